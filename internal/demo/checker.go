package demo

import (
	"fmt"
	"strings"
)

// checkerWindow is how many records the Checker remembers one by one. A repeat
// from further back is still a violation, but is counted as out of order and not
// as a duplicate. 1<<17 are some 20 MB, and a day of the demo at its usual pace.
const checkerWindow = 1 << 17

// Checker judges records by their `position` header alone, whoever made the
// changes, the shop or a hand at psql:
//
//  1. No record comes twice. A record is known by its topic, key and position
//     and by whether it is a tombstone; a truncate, which goes to every
//     partition, by its partition too; a key change gives two records that differ
//     in their key.
//  2. Within a partition positions do not go back.
//
// It is not safe for concurrent use.
type Checker struct {
	seen  map[identity]struct{}
	ring  []identity // the oldest is at next once the ring is full
	next  int
	last  map[partition]string
	count Verdict
}

// Verdict counts what a Checker saw.
type Verdict struct {
	Records, Duplicates, OutOfOrder int
}

type identity struct {
	topic     string
	partition int32 // -1 but for a truncate
	position  string
	key       string
	tombstone bool
}

type partition struct {
	topic string
	n     int32
}

// NewChecker gives a Checker that has seen nothing.
func NewChecker() *Checker {
	return &Checker{seen: map[identity]struct{}{}, last: map[partition]string{}}
}

// Observe takes the next record of its partition, in the order of its offsets,
// and says what is wrong with it: "" if nothing is. Repeat is true for a record
// that has been seen before.
func (c *Checker) Observe(e *Event) (problem string, repeat bool) {
	c.count.Records++
	id := identity{topic: e.Topic, partition: -1, position: e.Position, key: e.Key, tombstone: e.Tombstone}
	if e.Op == "t" {
		id.partition = e.Partition
	}
	if _, twice := c.seen[id]; twice {
		c.count.Duplicates++
		return fmt.Sprintf("DUPLICATE of position %s", e.Position), true
	}
	c.remember(id)
	p := partition{e.Topic, e.Partition}
	prev := c.last[p]
	// A snapshot row carries the position of the last transaction before it and
	// sorts, as text, behind that transaction's changes: '-s' > '-0'.
	if strings.Compare(e.Position, prev) < 0 {
		c.count.OutOfOrder++
		return fmt.Sprintf("OUT OF ORDER: position %s after %s", e.Position, prev), false
	}
	c.last[p] = e.Position
	return "", false
}

// Verdict gives the counts so far.
func (c *Checker) Verdict() Verdict { return c.count }

func (c *Checker) remember(id identity) {
	if len(c.ring) < checkerWindow {
		c.ring = append(c.ring, id)
	} else {
		delete(c.seen, c.ring[c.next])
		c.ring[c.next] = id
		c.next = (c.next + 1) % checkerWindow
	}
	c.seen[id] = struct{}{}
}

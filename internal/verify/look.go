package verify

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"

	"github.com/walrelay/walrelay/replication"
)

// look is what one reading of a table and its topics is for. The first one holds hashes
// of rows against each other: it settles the keys whose last record holds the whole row,
// which are nearly all. What it leaves, those that are told by several records or differ,
// the next look compares column by column, under a snapshot of its own; and the ones after
// it those that were being written while it looked.
type look struct {
	seed    maphash.Seed
	digests bool
	only    *keySet // the keys that are left; nil: all
	final   bool    // what is in doubt is judged as it stands
	// shape is the table's: the hashes of keys are of its columns.
	shape string
	// named are the topics that rows of an outbox table have named so far.
	named map[string]bool
}

// first tells whether all keys are looked at.
func (l *look) first() bool { return l.only == nil }

// begin takes the table's shape. Keys that are left are not found again in another one.
func (l *look) begin(rel *replication.Relation) error {
	shape := fmt.Sprint(*rel)
	if !l.first() && shape != l.shape {
		return errAltered
	}
	l.shape = shape
	return nil
}

// hash is a key's. All looks at one table have the same seed.
func (l *look) hash(key []byte) uint64 { return maphash.Bytes(l.seed, key) }

// digestSize is what stands for a key and for a row in the first look. Two rows that
// differ have one digest once in 2^64.
const digestSize = 8

// digest gives what stands for b in the entries of this look: its hash in the first one,
// put into dst, else b itself.
func (l *look) digest(dst *[digestSize]byte, b []byte) []byte {
	if !l.digests || b == nil {
		return b
	}
	binary.LittleEndian.PutUint64(dst[:], maphash.Bytes(l.seed, b))
	return dst[:]
}

// keySet is a set of keys by their hashes, up to a limit: beyond it holds all keys.
type keySet struct {
	limit    int
	keys     map[uint64]bool // false: its records are asked for, and it is not compared
	overflow bool
}

func newKeySet(limit int) *keySet { return &keySet{limit: limit, keys: map[uint64]bool{}} }

func (k *keySet) add(hash uint64, compared bool) {
	switch {
	case k.overflow:
	case compared:
		k.keys[hash] = true
	default:
		if !k.keys[hash] {
			k.keys[hash] = false
		}
	}
	if len(k.keys) > k.limit {
		k.keys, k.overflow = nil, true
	}
}

// has tells whether a key's records and rows are of interest: of a nil set all are.
func (k *keySet) has(hash uint64) bool {
	if k == nil {
		return true
	}
	_, found := k.keys[hash]
	return found
}

// compares tells whether a key is one to be compared.
func (k *keySet) compares(hash uint64) bool { return k == nil || k.keys[hash] }

func (k *keySet) empty() bool { return len(k.keys) == 0 && !k.overflow }

// join adds the keys of another set.
func (k *keySet) join(o *keySet) {
	if o.overflow {
		k.keys, k.overflow = nil, true
	}
	for hash, compared := range o.keys {
		k.add(hash, compared)
	}
}

// next gives the look that is to follow one that has left keys; false where none is.
func (c *compared) next() (look, bool) {
	left := c.comparison.left
	if left.empty() {
		return look{}, false
	}
	next := look{seed: c.seed, only: left, shape: c.shape, named: c.named}
	left.join(c.moved) // rows have columns from the keys that they had before
	if left.overflow {
		next.only = nil
	}
	return next, true
}

// announce says what is being done.
func (c *compared) announce() {
	e := c.o.Logger.Info().Str("table", c.table.String())
	if c.digests {
		e.Msg("comparing")
		return
	}
	if c.only != nil {
		e = e.Int("keys", len(c.only.keys))
	}
	e.Msg("looking again")
}

// join adds what a look has found. One at all keys counts instead of what was before it.
func (t *TableReport) join(c *compared) {
	if c.first() {
		*t = c.report
		return
	}
	t.take(&c.report)
	t.Snapshot, t.LSN = c.report.Snapshot, c.report.LSN
}

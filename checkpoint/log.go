package checkpoint

import (
	"fmt"
	"maps"
)

// Limits of what a position record carries before a new state record is written.
// Thirty-two topics keep a position record at a few kilobytes; a thousand records
// with a delta cost more than one state record of a few thousand topics does.
const (
	DefaultMaxDelta = 32
	DefaultMaxAge   = 1000
)

// Record is one record for the checkpoint topic.
type Record struct {
	Key   []byte
	Value []byte
}

// Log decides what a Kafka transaction writes to the checkpoint topic: always a
// position record, and now and then a state record in front of it. It is pure (no
// I/O, no clock) and holds the partition counts of the topics written to.
//
// What must hold:
//
//  1. Records and Committed alternate with the transactions: Records, produce all
//     of them in order, commit, Committed. Records again without Committed means
//     that the transaction in between was aborted; nothing of it is built upon.
//  2. After an unknown outcome the Log is thrown away and a new one is made from
//     what Load finds (DESIGN, invariant 5).
//  3. A position record names a state record that is committed before it or with
//     it, and carries every count set since. So the first state record at or after
//     the named offset, with the delta on top, gives the counts, even after
//     compaction has replaced the named one.
//
// A Log belongs to one goroutine.
type Log struct {
	counts      map[string]int32 // every topic, as the caller set it
	delta       map[string]int32 // those set since the committed state record
	stateOffset int64            // of the committed state record; StateBeside: none yet
	age         int              // committed position records with a delta since then
	last        Position         // committed

	// What the last call of Records put into the transaction under way.
	pending   Position
	sentState bool
	sentDelta map[string]int32 // the part of delta that the state record holds

	maxDelta int
	maxAge   int

	position []byte // buffers of the records, reused
	state    []byte
	records  [2]Record
	keys     [2][]byte
}

// NewLog makes a Log that continues after last, which is what Load found, or a
// checkpoint made for a first start. Its first transaction writes a state record:
// one small record a start, and no start depends on one that an older run wrote.
func NewLog(last Checkpoint) *Log {
	l := &Log{
		counts:      maps.Clone(last.Partitions),
		delta:       make(map[string]int32),
		stateOffset: StateBeside,
		last:        last.Position,
		maxDelta:    DefaultMaxDelta,
		maxAge:      DefaultMaxAge,
		keys:        [2][]byte{[]byte(KeyState), []byte(KeyPosition)},
	}
	if l.counts == nil {
		l.counts = make(map[string]int32)
	}
	return l
}

// SetPartitions notes that topic has count partitions, and returns the count known
// before, 0 for a topic not seen yet. It goes into the next transaction's records.
func (l *Log) SetPartitions(topic string, count int32) (old int32) {
	old = l.counts[topic]
	if old == count {
		return old
	}
	l.counts[topic] = count
	l.delta[topic] = count
	return old
}

// Partitions gives the count noted for topic, 0 for none.
func (l *Log) Partitions(topic string) int32 { return l.counts[topic] }

// Records gives the one or two records that the transaction with the checkpoint c
// must write, in this order, to partition 0 of the checkpoint topic. The partition
// counts are the Log's own; c.Partitions is not looked at. The records are valid
// until the next call.
//
// An error means that c would break the position's properties: a bug, which must
// not be committed.
func (l *Log) Records(c *Checkpoint) ([]Record, error) {
	if err := c.Position.Check(); err != nil {
		return nil, fmt.Errorf("write checkpoint: %w (%w)", err, ErrBroken)
	}
	if c.Position.LSN < l.last.LSN {
		return nil, fmt.Errorf("write checkpoint: position %s is before the committed one, %s (%w)", c.Position, l.last, ErrBroken)
	}
	l.pending = c.Position
	l.sentState = l.stateDue()
	at, delta := l.stateOffset, l.delta
	l.records[0] = Record{Key: l.keys[0]}
	if l.sentState {
		l.sentDelta = maps.Clone(l.delta)
		l.state = EncodeState(l.state[:0], &Checkpoint{Partitions: l.counts})
		l.records[0].Value = l.state
		at, delta = StateBeside, nil
	}
	l.position = EncodePosition(l.position[:0], c, at, delta)
	l.records[1] = Record{Key: l.keys[1], Value: l.position}
	if l.sentState {
		return l.records[:], nil
	}
	return l.records[1:], nil
}

// stateDue tells whether the next transaction writes a state record.
func (l *Log) stateDue() bool {
	return l.stateOffset == StateBeside || len(l.delta) > l.maxDelta || l.age >= l.maxAge
}

// Committed notes that the transaction with the records of the last call of
// Records is committed. stateOffset is the offset at which the state record was
// appended; it is ignored when there was none.
func (l *Log) Committed(stateOffset int64) {
	l.last = l.pending
	if !l.sentState {
		if len(l.delta) > 0 {
			l.age++
		}
		return
	}
	// Counts may have been set while the transaction was under way; those are not
	// in the state record and stay in the delta.
	for topic, n := range l.sentDelta {
		if l.delta[topic] == n {
			delete(l.delta, topic)
		}
	}
	l.stateOffset, l.age = stateOffset, 0
	l.sentState, l.sentDelta = false, nil
}

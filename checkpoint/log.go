package checkpoint

import (
	"fmt"
	"maps"
)

// Limits of what position records carry before a new state record is due: the entries
// of a delta, the records that have carried one, and the bytes of those in all.
// Thirty-two topics or tables are a few kilobytes.
//
// What is due is written once the deltas have cost as many bytes as the state record
// did. So all state records together are about as large as all deltas together at the
// most, which matters with 20,000 tables, where one has megabytes and a snapshot changes
// some progress in every transaction.
const (
	DefaultMaxDelta   = 32
	DefaultMaxAge     = 1000
	DefaultMaxCarried = 256 << 10

	// A delta that is larger is never written: together with the position it would not
	// fit into a topic that takes a megabyte at once, which the state record may.
	maxDeltaBytes = 512 << 10
)

// Record is one record for the checkpoint topic. A nil Value is a tombstone.
type Record struct {
	Key   []byte
	Value []byte
}

// Log decides what a Kafka transaction writes to the checkpoint topic: always a
// position record, and now and then a state record in front of it. It is pure (no
// I/O, no clock) and holds the partition counts of the topics written to, the progress of
// the tables, and the partitions of those that have some.
//
// What must hold:
//
//  1. Records and Committed alternate with the transactions: Records, produce all
//     of them in order, commit, Committed. Records again without Committed means
//     that the transaction in between was aborted; nothing of it is built upon, and
//     what its checkpoint said of tables is forgotten.
//  2. After an unknown outcome the Log is thrown away and a new one is made from
//     what Load finds (DESIGN, invariant 5).
//  3. A position record names a state record that is committed before it or with
//     it, and carries everything set since. So the first state record at or after
//     the named offset, with the delta on top, gives the whole, even after
//     compaction has replaced the named one.
//
// A Log belongs to one goroutine.
type Log struct {
	counts      map[string]int32 // every topic, as the caller set it
	tables      tableLog
	trees       treeLog
	delta       Delta    // since the committed state record, with what the transaction under way changes
	stateOffset int64    // of the committed state record; StateBeside: none yet
	stateBytes  int      // its size
	age         int      // committed position records with a delta since then
	carried     int      // bytes of their deltas
	last        Position // committed

	// What the last call of Records put into the transaction under way.
	pending    Position
	deltaBytes int
	sentState  bool
	sentDelta  map[string]int32 // the part of delta.Partitions that the state record holds

	maxDelta   int
	maxAge     int
	maxCarried int

	position []byte // buffers of the records, reused
	state    []byte
	records  []Record
	keys     [2][]byte
}

// NewLog makes a Log that continues after last, which is what Load found, or a
// checkpoint made for a first start. Its first transaction writes a state record:
// one a start, and no start depends on one that an older run wrote.
func NewLog(last Checkpoint) *Log {
	l := &Log{
		counts:      maps.Clone(last.Partitions),
		tables:      newTableLog(last.Tables),
		trees:       newTreeLog(last.Trees),
		stateOffset: StateBeside,
		last:        last.Position,
		maxDelta:    DefaultMaxDelta,
		maxAge:      DefaultMaxAge,
		maxCarried:  DefaultMaxCarried,
		keys:        [2][]byte{[]byte(KeyState), []byte(KeyPosition)},
	}
	l.delta = Delta{Partitions: make(map[string]int32), Tables: make(map[uint32]*TableDelta), Trees: make(map[uint32]Tree)}
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
	l.delta.Partitions[topic] = count
	return old
}

// Partitions gives the count noted for topic, 0 for none.
func (l *Log) Partitions(topic string) int32 { return l.counts[topic] }

// Records gives the records that the transaction with the checkpoint c must write, in
// this order, to partition 0 of the checkpoint topic: tombstones of the requests that
// are taken over, the state record where one is due, the position record. The partition
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
	l.tables.stage(c.Tables)
	l.tables.delta(l.delta.Tables)
	l.trees.stage(c.Trees, l.delta.Trees)
	l.records = l.records[:0]
	for _, id := range c.TakenOver {
		l.records = append(l.records, Record{Key: []byte(RequestKey(id))})
	}
	l.position, l.deltaBytes = encodePosition(l.position[:0], c, l.stateOffset, &l.delta)
	if l.sentState = l.stateDue(); l.sentState {
		l.sentDelta = maps.Clone(l.delta.Partitions)
		l.state = encodeState(l.state[:0], l.counts, l.tables.whole(), l.trees.whole())
		l.position, l.deltaBytes = encodePosition(l.position[:0], c, StateBeside, nil)
		l.records = append(l.records, Record{Key: l.keys[0], Value: l.state})
	}
	l.records = append(l.records, Record{Key: l.keys[1], Value: l.position})
	return l.records, nil
}

// stateDue tells whether the transaction under way writes a state record.
func (l *Log) stateDue() bool {
	if l.stateOffset == StateBeside || l.deltaBytes > maxDeltaBytes {
		return true
	}
	entries, carried := len(l.delta.Partitions)+len(l.delta.Tables)+len(l.delta.Trees), l.carried+l.deltaBytes
	due := entries > l.maxDelta || l.age >= l.maxAge || carried > l.maxCarried
	return due && carried >= l.stateBytes
}

// Committed notes that the transaction with the records of the last call of
// Records is committed. stateOffset is the offset at which the state record was
// appended; it is ignored when there was none.
func (l *Log) Committed(stateOffset int64) {
	l.last = l.pending
	l.tables.commit(l.sentState)
	l.trees.commit(l.sentState)
	if !l.sentState {
		if l.deltaBytes > 0 {
			l.age++
			l.carried += l.deltaBytes
		}
		return
	}
	// Counts may have been set while the transaction was under way; those are not
	// in the state record and stay in the delta.
	for topic, n := range l.sentDelta {
		if l.delta.Partitions[topic] == n {
			delete(l.delta.Partitions, topic)
		}
	}
	l.stateOffset, l.stateBytes, l.age, l.carried = stateOffset, len(l.state), 0, 0
	l.sentState, l.sentDelta = false, nil
}

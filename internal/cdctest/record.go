package cdctest

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
)

// Record is a record as it lies in a topic. A nil Key or Value is Kafka's null,
// an empty one is not.
type Record struct {
	Topic     string
	Partition int32
	Offset    int64
	Key       []byte
	Value     []byte
	Headers   map[string]string
	// Committed is false for a record of an aborted or still open Kafka transaction,
	// which only ReadUncommitted returns.
	Committed bool
	// ProducerID, ProducerEpoch and Segment say which Kafka transaction wrote the
	// record. Segment counts the transactions' ends in this partition before it. Two
	// records of one transaction agree in all three, as far as they share a partition.
	ProducerID    int64
	ProducerEpoch int16
	Segment       int
}

// Where names the record's place.
func (r *Record) Where() string { return fmt.Sprintf("%s[%d]@%d", r.Topic, r.Partition, r.Offset) }

// Log is what a set of topics held at one moment.
type Log struct {
	Records    []Record         // in any order; validators sort for themselves
	Partitions map[string]int32 // the partition count of each topic, the empty ones too
}

// Position is the header "position": where in the source a record comes from.
type Position struct {
	Commit   checkpoint.LSN
	Seq      uint64
	Snapshot bool
}

// Compare orders positions as their texts sort: a snapshot row comes behind every
// change of the transaction that was delivered before it.
func (p Position) Compare(o Position) int {
	if c := p.Commit.Compare(o.Commit); c != 0 {
		return c
	}
	if p.Snapshot != o.Snapshot {
		if p.Snapshot {
			return 1
		}
		return -1
	}
	return cmp.Compare(p.Seq, o.Seq)
}

// String gives the form of the header.
func (p Position) String() string {
	if p.Snapshot {
		return string(checkpoint.AppendSnapshotHeader(nil, p.Commit))
	}
	return string(checkpoint.AppendHeader(nil, p.Commit, p.Seq))
}

// Position reads the header "position".
func (r *Record) Position() (Position, error) {
	h, ok := r.Headers["position"]
	if !ok {
		return Position{}, fmt.Errorf("no header position")
	}
	commit, seq, snapshot, err := checkpoint.ParseHeader(h)
	if err != nil {
		return Position{}, err
	}
	p := Position{commit, seq, snapshot}
	if s := p.String(); s != h {
		// Lower-case digits or a longer number parse, but do not sort.
		return Position{}, fmt.Errorf("header position %q is not in its sortable form %q", h, s)
	}
	return p, nil
}

// Kind is what a record is, by its content alone.
type Kind byte

// The kinds. The letters of changes are those of "op".
const (
	KindCreate    Kind = 'c'
	KindUpdate    Kind = 'u'
	KindDelete    Kind = 'd'
	KindRead      Kind = 'r'
	KindTruncate  Kind = 't'
	KindMessage   Kind = 'm'
	KindTombstone Kind = 'x'
	KindEvent     Kind = 'e' // an outbox event: it carries the header id
)

// item is a record read: its kind, its position and, for a change, its envelope.
type item struct {
	*Record
	kind Kind
	pos  Position
	env  *Envelope // nil for tombstones and events
}

// read parses one record.
func (r *Record) read() (item, error) {
	it := item{Record: r}
	pos, err := r.Position()
	if err != nil {
		return it, err
	}
	it.pos = pos
	if _, event := r.Headers["id"]; event {
		it.kind = KindEvent
		return it, nil
	}
	if r.Value == nil {
		it.kind = KindTombstone
		return it, nil
	}
	if it.env, err = ParseEnvelope(r.Value); err != nil {
		return it, err
	}
	it.kind = Kind(it.env.Op[0])
	return it, nil
}

// items reads all records of the log, by topic, partition and offset. What cannot
// be read is a finding and left out.
func (l *Log) items(f *findings) []item {
	sorted := slices.Clone(l.Records)
	slices.SortStableFunc(sorted, func(a, b Record) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
	})
	out := make([]item, 0, len(sorted))
	for i := range sorted {
		it, err := sorted[i].read()
		if err != nil {
			f.at(&sorted[i], "cannot be read: %v", err)
			continue
		}
		out = append(out, it)
	}
	return out
}

// byPosition sorts items as a consumer that folds them does: by position, then by
// partition and offset.
func byPosition(items []item) {
	slices.SortStableFunc(items, func(a, b item) int {
		return cmp.Or(a.pos.Compare(b.pos), cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
	})
}

// runs splits items into stretches of equal key.
func runs[K comparable](items []item, key func(item) K) [][]item {
	var out [][]item
	for start := 0; start < len(items); {
		end := start + 1
		for end < len(items) && key(items[end]) == key(items[start]) {
			end++
		}
		out = append(out, items[start:end])
		start = end
	}
	return out
}

// partitionID names a partition.
type partitionID struct {
	topic     string
	partition int32
}

func (it item) partitionID() partitionID { return partitionID{it.Topic, it.Partition} }

package verify

import (
	"bytes"
	"encoding/binary"
	"maps"
	"slices"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/snapshot"
)

// Format says what the records of tables look like.
type Format struct {
	Bare    bool // format.envelope: false
	Schemas bool // format.debezium.schemas-enable
}

// records takes the records of a table's topic that belong to what a snapshot sees, and
// puts them aside by key.
type records struct {
	look
	format   Format
	snapshot snapshot.MVCC
	lsn      checkpoint.LSN // every transaction that the snapshot sees ends at or before it
	settled  checkpoint.LSN // what begins before it was delivered before the snapshot was taken
	begin    ends           // offsets before the snapshot was taken
	keyless  bool
	bald     bool // the table has no columns: its rows stand as null
	// schema and table, as JSON strings, tell the table's records from those of others in
	// the same topic; nil where the topic is the table's alone.
	schema, table []byte
	threshold     uint64

	out       *spill
	truncated map[int32]order
	read      checkpoint.LSN // of the last row of a snapshot
	last      map[int32]*passed
	report    *TableReport
	comparer  *comparison
	moved     *keySet // keys that rows have left
	entry     []byte
	change    change
	hashed    [2][digestSize]byte
	restarted bool // a snapshot has begun meanwhile, or a truncate may be one that is not seen
}

// passed is what a partition has held so far, and its last record.
type passed struct {
	order     order
	highest   order
	seen      bool
	unsettled bool
	// unreadable are the records, up to worst, that cannot be read. A truncate behind them
	// takes them away, as it does all that stands before it: they may be from when the table
	// had no key, or the configuration another format.
	unreadable TableReport
	worst      order
}

func (p *passed) pass(o order) {
	if o.comparePosition(p.highest) > 0 {
		p.highest = o
	}
}

const (
	headerPosition    = "position"
	headerReplay      = "replay"
	headerPreviousKey = "previous-key"
	headerOldKey      = "__debezium.oldkey"
)

// take takes one record.
func (s *records) take(r *kgo.Record) error {
	c := &s.change
	*c = change{order: order{partition: r.Partition, offset: r.Offset}}
	last := s.last[r.Partition]
	if last == nil {
		last = &passed{}
		s.last[r.Partition] = last
	}
	s.headers(r, last)
	last.pass(c.order) // whatever it is: a record without a position stands behind it in each look
	// A row of a snapshot that began after ours was taken may be newer than ours.
	if c.order.seq == snapshotSeq && c.flags&flagUnplaced == 0 && r.Offset >= s.begin[r.Partition] {
		s.restarted = true
	}
	if c.flags&flagMoved != 0 && !s.keyless {
		s.moved.add(s.hash(c.previous), false) // of every record: the next look may ask for any of them
	}
	if s.skips(r) {
		return nil
	}
	var e envelope
	ok := true
	switch {
	case r.Value == nil:
	case s.format.Bare:
		e, ok = parseBare(r.Value, s.format.Schemas)
	default:
		if e, ok = parseEnvelope(r.Value, s.format.Schemas); ok && s.foreign(&e) {
			return nil
		}
	}
	if !ok && s.bald && (s.format.Bare || e.op != 0) {
		e.after, ok = null, true
		if e.op == 0 {
			e.op = 'c'
		}
	}
	if !ok {
		s.unreadable(r)
		return nil
	}
	seen, uncertain := s.sees(r, &e, last)
	last.order, last.seen, last.unsettled = c.order, seen, uncertain
	if !seen {
		return nil
	}
	if uncertain {
		c.flags |= flagUnsettled
	}
	s.report.Records++
	if c.order.seq == snapshotSeq && c.flags&flagUnplaced == 0 {
		s.read = max(s.read, c.order.commit)
	}
	if e.op == 't' {
		s.restarted = s.restarted || uncertain
		s.truncate(last)
		return nil
	}
	if s.keyless {
		return s.rows(r, &e)
	}
	return s.keyed(r, &e)
}

// allKeys is the key of a truncate in a compacted topic, where Kafka takes no null key. No
// row has it.
const allKeys = "{}"

// skips tells whether a record is of a key that this look has no use for.
func (s *records) skips(r *kgo.Record) bool {
	if s.only == nil || s.keyless || len(r.Key) == 0 || string(r.Key) == allKeys {
		return false
	}
	return !s.only.has(s.hash(s.withoutSchema(r.Key)))
}

// headers reads the position and what else the headers tell.
func (s *records) headers(r *kgo.Record, last *passed) {
	c := &s.change
	c.flags = flagUnplaced
	c.order.commit, c.order.seq = last.highest.commit, last.highest.seq
	for i := range r.Headers {
		h := &r.Headers[i]
		switch h.Key {
		case headerPosition:
			commit, seq, isRead, err := checkpoint.ParseHeader(string(h.Value))
			if err != nil {
				continue
			}
			c.order.commit, c.order.seq = commit, seq
			if isRead {
				c.order.seq = snapshotSeq
			}
			c.flags &^= flagUnplaced
		case headerReplay:
			c.flags |= flagReplayed
		case headerPreviousKey, headerOldKey:
			c.flags |= flagMoved
			c.previous = s.withoutSchema(h.Value)
		}
	}
}

// foreign tells whether a record is of another table in the same topic.
func (s *records) foreign(e *envelope) bool {
	return s.table != nil && e.table != nil && (!bytes.Equal(e.table, s.table) || !bytes.Equal(e.schema, s.schema))
}

// sees tells whether the snapshot sees the record's transaction. A record that does not
// tell its transaction, a tombstone or a row without an envelope, is judged by the record
// of the same change before it, else by its commit's LSN: then it is not certain near the
// snapshot, as commits become visible a moment after they are in the WAL.
func (s *records) sees(r *kgo.Record, e *envelope, last *passed) (seen, uncertain bool) {
	c := &s.change
	switch {
	case e.hasXID:
		return s.snapshot.Sees(e.xid), false
	case c.flags&flagUnplaced != 0:
		return true, r.Offset >= s.begin[r.Partition]
	case c.order.seq == snapshotSeq:
		return true, false
	case r.Value == nil && last.order.commit == c.order.commit && last.order.seq == c.order.seq:
		return last.seen, last.unsettled
	}
	return c.order.commit < s.lsn, c.order.commit >= s.settled
}

// truncate takes away what stands before it.
func (s *records) truncate(last *passed) {
	c := &s.change
	if t, ok := s.truncated[c.order.partition]; !ok || c.order.compare(t) > 0 {
		s.truncated[c.order.partition] = c.order
	}
	if c.order.compare(last.worst) > 0 {
		last.unreadable = TableReport{}
	}
}

func (s *records) unreadable(r *kgo.Record) {
	if !s.first() {
		return // counted
	}
	o := s.change.order
	if t, ok := s.truncated[r.Partition]; ok && o.compare(t) <= 0 {
		return
	}
	last := s.last[r.Partition]
	if o.compare(last.worst) > 0 {
		last.worst = o
	}
	last.unreadable.add(Difference{Kind: kindUnreadable, Key: r.Key, Topic: r.Value, Where: s.comparer.where(o)}, false)
}

// count adds the unreadable records that no truncate has taken away to the report.
func (s *records) count() {
	for _, partition := range slices.Sorted(maps.Keys(s.last)) {
		s.report.take(&s.last[partition].unreadable)
	}
}

// keyed puts a record of a table with a key aside.
func (s *records) keyed(r *kgo.Record, e *envelope) error {
	c := &s.change
	c.key, c.op = s.withoutSchema(r.Key), e.op
	if len(c.key) == 0 {
		s.unreadable(r)
		return nil
	}
	switch {
	case r.Value == nil:
		c.kind = kindTombstone
	case e.op == 'd':
		c.kind = kindDelete
	default:
		c.row = e.after
		if c.order.seq == snapshotSeq && !s.format.Bare {
			c.sum = s.hash(r.Value)
		}
	}
	return s.put()
}

// withoutSchema is the key itself.
func (s *records) withoutSchema(key []byte) []byte {
	if s.format.Schemas && len(key) > 0 {
		if payload := member(key, `"payload"`); payload != nil {
			return payload
		}
	}
	return key
}

// rows puts a record of a table without a key aside: a row comes, a row goes, or both.
func (s *records) rows(r *kgo.Record, e *envelope) error {
	c := &s.change
	if r.Value == nil {
		return nil // Debezium's, which says nothing
	}
	c.flags &^= flagMoved
	c.op = e.op
	if c.order.seq == snapshotSeq {
		c.sum = 0 // rows of one chunk may be equal
	}
	if e.op == 'u' || e.op == 'd' {
		if e.before == nil {
			s.unreadable(r)
			return nil
		}
		c.key, c.kind = e.before, kindDelete
		if err := s.put(); err != nil {
			return err
		}
	}
	if e.after == nil {
		return nil
	}
	c.key, c.kind = e.after, kindSet
	return s.put()
}

func (s *records) put() error {
	c := &s.change
	hash := s.hash(c.key)
	if hash > s.threshold || !s.only.has(hash) {
		return nil
	}
	if s.digests {
		binary.LittleEndian.PutUint64(s.hashed[0][:], hash)
		c.key = s.hashed[0][:]
		c.row = s.digest(&s.hashed[1], c.row)
		c.flags, c.previous = c.flags&^flagMoved, nil
	}
	s.entry = c.append(s.entry[:0])
	return s.out.add(hash, s.entry)
}

package snapshot

import (
	"slices"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// Bounds of what a table keeps in memory, and in the checkpoint.
const (
	// maxPassedKeys is how many keys of one transaction are remembered; beyond it the
	// chunks that do not see the transaction are read again.
	maxPassedKeys = 50_000
	// againPerOrder is how many of them are read at once, while the stream stands still.
	againPerOrder = 100
	// retryAfter is how long a read that did not see enough waits for the next try.
	retryAfter = 100 * time.Millisecond
	// pauseAfter is how long the stream goes on after it stood still in vain.
	// At first; it doubles each time, up to maxPauseAfter.
	pauseAfter    = time.Second
	maxPauseAfter = time.Minute
	// splitFrom is the number of rows, in chunks, from which a table is read in several
	// ranges at once.
	splitFrom = 16
)

// table is one table's snapshot.
type table struct {
	m     *Merger
	def   Table
	state checkpoint.TableState
	whole bool // read in one piece: see whole.go

	key     []string // as the ranges, and the chunks, have it; nil before the first
	ranges  []*span
	again   [][]string
	asked   map[string]struct{} // again, joined; nil where not made, and more than that
	rows    int64
	began   time.Time
	request *checkpoint.Request
	// beside tells that the stream runs beside an outbox table's rows, and no longer waits
	// for those from before the slot.
	beside  bool
	removed bool
	dirty   bool // the progress changed

	// resumed tells that the progress goes on where a checkpoint left it.
	resumed bool

	wait   Wait           // while it is waiting
	place  int            // in the queue
	since  checkpoint.LSN // where the stream stood when the table was added
	orders []*Order       // outstanding, not cancelled
	chunks []*chunk       // in memory, in the order of arrival
	passed map[checkpoint.XID]*passed
	// remembered counts the changes and transactions in passed. Where they are too many,
	// they make place for crowd: a chunk has to see every xid up to it.
	remembered int
	crowd      checkpoint.XID
	inserted   inserted // of an outbox table

	truncateDue bool // a truncate goes out before the first row
	emitBefore  bool // changes before the truncate go out: the consumer has the table
	shape       *replication.Relation
	retryAt     time.Time
	failures    int // pauses in a row that were of no use
	againNow    int // how many of again are to be read in this pause; 0: as many as go
	keyIndex    keyCache

	// Of tables that are read whole.
	snapshot MVCC
	upTo     checkpoint.LSN // where the WAL ended at the snapshot
	opened   bool           // snapshot is known
	rowsOut  bool           // the last row is out
	holdAll  bool           // a truncate is held, so everything behind it is
	probed   bool           // in this pause a snapshot has seen everything that has passed
}

// passed is what one transaction did to a table, as far as it has passed.
type passed struct {
	changes   []passedChange
	truncated bool
	// wholesale tells that a chunk that does not see the transaction is of no use.
	wholesale bool
}

type passedChange struct {
	old, key   string // empty old: the same as key; empty key: deleted
	incomplete bool   // went out without a column
	// moved tells that it was incomplete and came from another key before the table's first
	// chunk was ordered: the key's row may be in no chunk that the change supersedes.
	moved bool
}

// span is a range of keys, read by one chunk after the other.
type span struct {
	checkpoint.Range
	readAfter []string // the last key that was read, delivered or not
	ordered   bool
	readOut   bool   // the last chunk has arrived
	last      *chunk // whose cursor is what After is to become
}

// rewind forgets what was read and not delivered.
func (s *span) rewind() {
	s.settle()
	s.readAfter, s.ordered, s.readOut, s.last = s.After, false, false, nil
}

// settle takes the cursor of the chunk that is going out over into After.
func (s *span) settle() {
	if s.last != nil && s.last.cursor > 0 {
		s.After = s.last.keyOf(s.last.cursor - 1)
	}
}

func newTable(m *Merger, def Table, p checkpoint.TableProgress) *table {
	t := &table{
		m: m, def: def, state: p.State, whole: def.Whole, key: p.Key, again: slices.Clone(p.Again),
		rows: p.Rows, began: p.Began, request: p.Request, beside: p.Beside,
		passed: map[checkpoint.XID]*passed{},
	}
	for _, r := range p.Ranges {
		t.ranges = append(t.ranges, &span{Range: r, readAfter: r.After})
	}
	switch reading := p.State == checkpoint.TableReading; {
	case reading && !t.whole && !p.Whole:
		t.resumed = true // behind the last key delivered
	case reading:
		// Read whole: a restart begins it again. So does a key that came, or went.
		t.state = checkpoint.TablePending
		t.key, t.ranges, t.again, t.rows = nil, nil, nil, 0
		t.truncateDue = true
	default:
		t.truncateDue = p.Request != nil && (p.Request.Replace || t.whole)
		t.emitBefore = t.truncateDue
	}
	return t
}

// touch notes that the progress changed.
func (t *table) touch() {
	if !t.dirty {
		t.dirty = true
		t.m.dirty = append(t.m.dirty, t)
	}
}

// rank is the place in the queue: an outbox table's backlog first, then what has begun.
func (t *table) rank() int {
	switch {
	case t.inBacklog():
		return 0
	case t.def.Outbox:
		return 1
	case t.state == checkpoint.TableReading:
		return 2
	case t.state == checkpoint.TablePending:
		return 3
	}
	return 4
}

// inBacklog tells that rows from before the slot are to go out before the stream.
func (t *table) inBacklog() bool {
	return t.def.Outbox && !t.beside && t.m.o.SlotSnapshot.Xmax > 0 && t.state != checkpoint.TableWaiting && t.state != checkpoint.TableDone
}

func (t *table) progress() checkpoint.TableProgress {
	if t.removed {
		return checkpoint.TableProgress{}
	}
	p := checkpoint.TableProgress{
		Table: t.def.String(), State: t.state,
		Whole: t.whole, Rows: t.rows, Began: t.began, Request: t.request, Beside: t.beside,
	}
	if t.state != checkpoint.TableReading {
		return p
	}
	p.Key, p.Again = t.key, slices.Clone(t.again)
	for _, s := range t.ranges {
		s.settle()
		p.Ranges = append(p.Ranges, s.Range)
	}
	return p
}

// floor is a snapshot that every chunk of the table that may still arrive is not older
// than.
func (t *table) floor() MVCC {
	if len(t.orders) > 0 {
		return t.orders[0].floor
	}
	return t.m.latest
}

// forget drops the memory of transactions that every chunk to come sees.
func (t *table) forget() {
	if len(t.passed) == 0 {
		return
	}
	floor := t.floor()
	for x, p := range t.passed {
		if floor.Sees(x) {
			t.remembered -= 1 + len(p.changes)
			delete(t.passed, x)
		}
	}
}

// tooOld tells whether a snapshot does not see what passed when it was too much to be
// remembered one by one.
func (t *table) tooOld(s MVCC) bool { return t.crowd > 0 && s.Xmin <= t.crowd }

// crowded drops the memory where it is too large.
func (t *table) crowded() {
	if t.remembered <= t.m.o.MaxPassed {
		return
	}
	for x := range t.passed {
		t.crowd = max(t.crowd, x)
	}
	t.crowd = max(t.crowd, t.m.xid)
	clear(t.passed)
	t.remembered = 0
}

// remember gives the memory of the open transaction; nil where every chunk to come sees it.
func (t *table) remember() *passed {
	p := t.passed[t.m.xid]
	if p == nil {
		if t.floor().Sees(t.m.xid) {
			return nil
		}
		p = &passed{}
		t.passed[t.m.xid] = p
		t.remembered++
		if t.crowded(); t.remembered == 0 {
			return nil
		}
	}
	return p
}

// change takes a change of a table that is read by ranges.
func (t *table) change(c *replication.Change) {
	if t.def.Outbox && c.Op != replication.OpCreate {
		return // what becomes of a row afterwards does not undo its event
	}
	if c.Op == replication.OpTruncate {
		for _, ch := range t.chunks {
			if !ch.Snapshot.Sees(t.m.xid) {
				ch.strikeAll()
			}
		}
		if len(t.again) > 0 && !t.m.again() { // keys that came behind it stay
			t.again = nil
			t.touch()
		}
		if t.state != checkpoint.TableReading {
			for _, p := range t.passed {
				for i := range p.changes {
					p.changes[i].moved = false
				}
			}
		}
		if p := t.remember(); p != nil {
			p.truncated = true
		}
		return
	}
	index := t.keyIndex.of(c.Relation, t.identity())
	if index == nil {
		t.unreadable()
		return
	}
	oldKey, newKey := t.changedKeys(c, index)
	for _, ch := range t.chunks {
		if ch.Snapshot.Sees(t.m.xid) {
			continue
		}
		if row := ch.find(oldKey); row >= 0 {
			ch.fill(c, row)
			if newKey != "" && incomplete(c) { // the column has another name or type here
				t.readAgain(splitKey(newKey, len(index)))
			}
		}
		ch.strike(oldKey)
		if newKey != "" {
			ch.strike(newKey)
		}
	}
	if t.def.Outbox && c.Op == replication.OpCreate {
		t.noteInserted(c, newKey)
		t.streamed(newKey)
		for _, ch := range t.chunks {
			ch.strike(newKey)
		}
	}
	lacking := incomplete(c)
	moved := lacking && (c.Op == replication.OpCreate || newKey != oldKey)
	reading := t.state == checkpoint.TableReading
	if moved && reading && !(t.resumed && t.m.delivered(c)) {
		// One that was delivered is in the progress that went with it, or has been read again.
		t.readAgain(splitKey(newKey, len(index)))
	}
	p := t.remember()
	if p == nil || p.wholesale {
		return
	}
	if t.request != nil && t.request.Replace && t.m.again() {
		// It may have gone out before the truncate, so the rows have to hold it.
		t.wholly(p)
		return
	}
	if len(p.changes) >= maxPassedKeys {
		t.wholly(p)
		return
	}
	e := passedChange{key: newKey, incomplete: lacking, moved: moved && !reading}
	if oldKey != newKey {
		e.old = oldKey
	}
	p.changes = append(p.changes, e)
	t.remembered++
	t.crowded()
}

// noteInserted remembers a row of an outbox table that the stream brings, for as long as
// ranges are to be read.
func (t *table) noteInserted(c *replication.Change, key string) {
	if t.key == nil {
		t.inserted.note(c, key, nil, nil)
	} else if n := len(t.ranges); n > 0 {
		t.inserted.note(c, key, t.key, t.ranges[n-1].To)
	}
	if len(t.inserted.keys) > t.m.o.MaxInserted && t.m.failed == nil {
		t.m.failed = t.overfull()
	}
}

// unreadable takes a change whose columns the chunks' key cannot be found in, after DDL.
func (t *table) unreadable() {
	for _, ch := range slices.Clone(t.chunks) {
		if !ch.Snapshot.Sees(t.m.xid) {
			t.throwBack(ch)
		}
	}
	if p := t.remember(); p != nil {
		t.wholly(p)
	}
}

// wholly makes a chunk that does not see the transaction useless.
func (t *table) wholly(p *passed) {
	t.remembered -= len(p.changes)
	p.wholesale, p.changes = true, nil
}

// throwBack gives a chunk up, and with it what was read of the same range: a range is
// delivered in order.
func (t *table) throwBack(ch *chunk) {
	s := ch.Order.span
	if s != nil {
		for _, o := range t.orders {
			if o.span == s {
				o.cancelled.Store(true)
			}
		}
		t.orders = slices.DeleteFunc(t.orders, func(o *Order) bool { return o.Cancelled() })
		s.rewind()
	}
	t.chunks = slices.DeleteFunc(t.chunks, func(q *chunk) bool {
		drop := q == ch || s != nil && q.Order.span == s
		if drop {
			t.m.recycle(q.Chunk)
		}
		return drop
	})
}

// identity are the columns by which a change finds its row.
func (t *table) identity() []string {
	if t.def.Identity != nil {
		return t.def.Identity
	}
	if t.key != nil {
		return t.key
	}
	return t.def.Key
}

// changedKeys gives the keys before and after a change, joined; the new one is empty for
// a delete.
func (t *table) changedKeys(c *replication.Change, index []int) (oldKey, newKey string) {
	b := t.m.scratch[:0]
	if len(c.New) > 0 {
		b = appendKey(b, c.New, c.Old, index)
		newKey = string(b)
	}
	if len(c.Old) > 0 {
		b = appendKey(b[:0], c.Old, c.Old, index)
		oldKey = string(b)
	} else {
		oldKey = newKey
	}
	t.m.scratch = b
	return oldKey, newKey
}

// incomplete tells whether a change goes out without a column: one that is unchanged and
// that its old row, or key, does not hold either.
func incomplete(c *replication.Change) bool {
	for i := range c.New {
		if c.New[i].Kind != replication.ValueUnchanged {
			continue
		}
		if len(c.Old) > 0 && c.Old[i].Kind == replication.ValueText && (!c.OldIsKey || c.Relation.Columns[i].Identity) {
			continue
		}
		return true
	}
	return false
}

// readAgain notes a key whose row is to be read once more.
func (t *table) readAgain(key []string) {
	t.touch()
	if t.rereadsAll() {
		return
	}
	for _, k := range t.again {
		if slices.Equal(k, key) {
			return
		}
	}
	t.again, t.asked = append(t.again, key), nil
	if len(t.again) > t.m.o.MaxAgain && !t.def.Outbox {
		t.again = nil
		t.ranges = append(t.ranges, &span{})
	}
}

// streamed forgets that an outbox table's key is to be read again: the stream has brought
// the row, and brings it again where it is not delivered.
func (t *table) streamed(key string) {
	if len(t.again) == 0 {
		return
	}
	if t.asked == nil {
		t.asked = make(map[string]struct{}, len(t.again))
		for _, k := range t.again {
			t.asked[joinKey(k)] = struct{}{}
		}
	}
	if _, ok := t.asked[key]; ok {
		delete(t.asked, key)
		t.settled(splitKey(key, len(t.identity())))
		t.touch()
	}
}

// rereadsAll tells whether the whole table is to be read once more behind its ranges.
func (t *table) rereadsAll() bool {
	n := len(t.ranges)
	return n > 1 && t.ranges[n-1].whole()
}

// whole tells that the span is the whole table and has not begun.
func (s *span) whole() bool {
	return s.After == nil && s.To == nil && s.readAfter == nil && !s.ordered
}

package snapshot

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// Options of a Merger.
type Options struct {
	ChunkRows  int
	ChunkBytes int64
	Readers    int // orders carried out at once; twice as many chunks are in hand
	// SlotSnapshot is the MVCC snapshot at the slot's creation: transactions that it does
	// not see are in the stream. The zero value where it is not known.
	SlotSnapshot MVCC
	// Delivered is how far the stream was delivered before: what is sent again up to there
	// makes the memory of what has passed whole, and nothing is read before it has passed.
	Delivered checkpoint.Position
	// MaxPassed bounds the changes that are remembered of a table, and the transactions of
	// all; 0 is DefaultMaxPassed.
	MaxPassed int
	// MaxAgain is how many keys of a table may wait to be read again; beyond it the whole
	// table is. 0 is DefaultMaxAgain.
	MaxAgain int
	// MaxInserted bounds the rows of an outbox table that are remembered of the stream; 0 is
	// DefaultMaxInserted.
	MaxInserted int
	// Flushed makes every chunk wait until what it has seen is on the primary's disk: where
	// the stream comes from a standby, a crash of the primary takes commits that a chunk
	// saw, and does not end the stream.
	Flushed bool
	// Discover is asked for a table that the stream sends and nobody added; false where it
	// is not to be read. It is asked once per table. Nil: none is.
	Discover func(rel *replication.Relation) (Table, checkpoint.TableProgress, bool)
}

// Verdict is what becomes of a change of the stream.
type Verdict uint8

// The verdicts.
const (
	// Emit: the change goes out now.
	Emit Verdict = iota
	// Drop: the rows that will be read contain it (tables that are read whole).
	Drop
	// Hold: it goes out when the table's rows are out (tables that are read whole).
	Hold
)

// Row is a row of a chunk that goes out as a read; or, with Truncate, a truncate before
// a table is read anew.
type Row struct {
	Table    uint32
	Relation *replication.Relation
	Tuple    replication.Tuple // valid until the next call of Next
	Time     time.Time
	Xmin     checkpoint.XID // of the MVCC snapshot that the row was read under
	Truncate bool
	Outbox   bool
}

// ErrBroken says that the connection was lost in the middle of a table that is read whole.
// What was read of it is void: the session is to be given up, and the next one reads the
// table from the beginning.
var ErrBroken = errors.New("the connection was lost before the end of a table that is read whole")

// pauseBudget is how long the stream may stand still for a read that has to see
// everything that has passed.
const pauseBudget = time.Second

// Merger merges chunks into the stream. It is pure: no I/O, no clock but the one handed
// in, no goroutine. One goroutine owns it, the one that takes the stream's events; it
// calls, in the order in which things happen:
//
//   - Begin, Change and Reached with what the stream sends, what is skipped as delivered
//     before included;
//   - Saw and Arrived with what the readers answer;
//   - Order for what to read next, Paused for whether the stream has to stand still;
//   - Next for the rows that may go out, only between source transactions.
//
// What must hold, for a change of transaction X and a chunk read under the snapshot S:
//
//  1. If S sees X, the chunk's rows contain the change. They go out only when the stream
//     has reached the chunk's LSN, and so has passed X: never a row and then an older
//     change.
//  2. If S does not see X, the change supersedes the row of its key, and the row is struck
//     out: at once where the chunk is in memory, else when it arrives, by the memory of
//     what has passed (table.passed). That memory is kept until the snapshot of every
//     chunk that may still arrive is known to see X.
//  3. A superseding change that lacks a column is filled from the row that it strikes out;
//     where that is not at hand its key is read again before the table is done.
type Merger struct {
	o      Options
	tables map[uint32]*table
	queue  []*table // not done, in the order in which they are read; outbox tables first
	active []*table // of these, the ones whose turn has come
	none   map[uint32]bool
	dirty  []*table // whose progress changed

	nextID      uint64
	nextWait    uint64
	outstanding map[uint64]*Order

	latest  MVCC           // the newest snapshot known
	covered bool           // it sees what the slot's snapshot sees
	past    MVCC           // the newest of which the stream has passed all that it sees
	windows []window       // those after it
	reached checkpoint.LSN // everything up to here has been sent
	xid     checkpoint.XID // of the open source transaction
	before  checkpoint.LSN // where it began
	open    bool
	unseen  []passedAt // transactions that touched a table here and that latest does not see
	crowd   passedAt   // more of them than can be told apart: the largest xid, and before the first

	failed   error     // why the merger cannot go on
	clock    time.Time // as last handed in
	pause    *pause
	rest     time.Time // before it the stream does not stand still again
	recycled []*Chunk
	row      Row
	tuple    replication.Tuple
	scratch  []byte
}

// DefaultMaxPassed is some 50 MB. It is reached only while no snapshot comes in: without
// connections to the primary.
const DefaultMaxPassed = 500_000

// DefaultMaxAgain keys stand in the checkpoint at most.
const DefaultMaxAgain = 10_000

// passedAt is a transaction and where the stream stood before it.
type passedAt struct {
	xid    checkpoint.XID
	before checkpoint.LSN
}

// window is a snapshot, and where the stream has passed all that it sees.
type window struct {
	snapshot MVCC
	lsn      checkpoint.LSN
}

// pause is the stream standing still for a table's sake.
type pause struct {
	t     *table
	began time.Time // zero while a source transaction is open still
}

// NewMerger makes a Merger. since is where the stream begins: nothing before it is sent.
func NewMerger(o Options, since checkpoint.LSN) *Merger {
	if o.MaxPassed == 0 {
		o.MaxPassed = DefaultMaxPassed
	}
	if o.MaxAgain == 0 {
		o.MaxAgain = DefaultMaxAgain
	}
	if o.MaxInserted == 0 {
		o.MaxInserted = DefaultMaxInserted
	}
	return &Merger{o: o, tables: map[uint32]*table{}, none: map[uint32]bool{}, outstanding: map[uint64]*Order{}, reached: since}
}

// Add makes a table known, with its progress: pending where it is new and safe to be
// read, waiting where it is to be released first. A table that was done may be added
// again, for a request.
func (m *Merger) Add(def Table, p checkpoint.TableProgress) {
	if old := m.tables[def.OID]; old != nil {
		m.throwAway(old)
		m.leave(old)
	}
	t := newTable(m, def, p)
	m.tables[def.OID] = t
	delete(m.none, def.OID)
	if p.State == checkpoint.TableDone {
		return
	}
	m.nextWait++
	t.wait = Wait{OID: def.OID, Number: m.nextWait}
	t.since = m.reached
	if m.open {
		t.since = min(t.since, m.before)
	}
	at, _ := slices.BinarySearchFunc(m.queue, t.rank()+1, func(q *table, rank int) int { return cmp.Compare(q.place, rank) })
	t.place = t.rank()
	m.queue = slices.Insert(m.queue, at, t)
}

// Remove forgets a table that is not there, or not published or captured, any more, and
// its progress with it: should it come back it is read from the beginning.
func (m *Merger) Remove(oid uint32) {
	t := m.tables[oid]
	if t == nil {
		return
	}
	m.throwAway(t)
	m.leave(t)
	t.state, t.removed = checkpoint.TableDone, true
	t.touch()
}

// leave takes a table out of the queue.
func (m *Merger) leave(t *table) {
	m.queue = slices.DeleteFunc(m.queue, func(q *table) bool { return q == t })
	m.active = slices.DeleteFunc(m.active, func(q *table) bool { return q == t })
	if m.pause != nil && m.pause.t == t {
		m.pause = nil
	}
	if len(m.queue) == 0 {
		m.unseen, m.crowd = nil, passedAt{}
	}
}

// throwAway cancels what is being read of a table and drops what is in memory.
func (m *Merger) throwAway(t *table) {
	for _, o := range t.orders {
		o.cancelled.Store(true)
	}
	t.orders = nil
	for _, c := range t.chunks {
		m.recycle(c.Chunk)
	}
	t.chunks = nil
	for i := range t.ranges {
		t.ranges[i].rewind()
	}
}

// Wait names one wait of a table for transactions to end. Another one of the same table
// has another number, and another set of transactions.
type Wait struct {
	OID    uint32
	Number uint64
}

// Release ends a wait, so that the table is read: every transaction that its publication
// change, or its request, had to wait for has ended.
func (m *Merger) Release(w Wait) {
	if t := m.tables[w.OID]; t != nil && t.wait == w && t.state == checkpoint.TableWaiting {
		t.state = checkpoint.TablePending
		t.touch()
	}
}

// Active tells whether any table is not done.
func (m *Merger) Active() bool { return len(m.queue) > 0 }

// Known gives a table's progress; false where it is not known.
func (m *Merger) Known(oid uint32) (checkpoint.TableProgress, bool) {
	t := m.tables[oid]
	if t == nil {
		return checkpoint.TableProgress{}, false
	}
	return t.progress(), true
}

// Err tells why the merger cannot go on after a Change; nil where it can.
func (m *Merger) Err() error { return m.failed }

// Begin opens a source transaction; before is the LSN up to which the stream has sent
// everything.
func (m *Merger) Begin(xid checkpoint.XID, before checkpoint.LSN) {
	m.xid, m.before, m.open = xid, before, true
}

// delivered tells whether the change was delivered before the restart.
func (m *Merger) delivered(c *replication.Change) bool {
	d := m.o.Delivered
	return d.HasTransaction(c.Txn.CommitLSN) || c.Seq < d.Skip(c.Txn.CommitLSN)
}

// again tells whether the stream sends what was delivered before.
func (m *Merger) again() bool {
	d := m.o.Delivered
	return m.reached < d.LSN || !d.Cut.IsZero() && m.reached <= d.Cut.CommitLSN
}

// Change takes a row change of the transaction that Begin opened. Where the change lacks
// unchanged TOAST values that a chunk in memory has, they are filled in, in c.New.
func (m *Merger) Change(c *replication.Change) Verdict {
	t := m.tables[c.Relation.OID]
	if t == nil && m.o.Discover != nil && !m.none[c.Relation.OID] {
		def, p, ok := m.o.Discover(c.Relation)
		if !ok {
			m.none[c.Relation.OID] = true
			return Emit
		}
		m.Add(def, p)
		t = m.tables[c.Relation.OID]
		t.touch()
	}
	if t == nil || t.state == checkpoint.TableDone {
		return Emit
	}
	if n := len(m.unseen); !m.latest.Sees(m.xid) && (n == 0 || m.unseen[n-1].xid != m.xid) {
		if n >= m.o.MaxPassed {
			// Too many to be told apart: they go together, when all of them are seen.
			if m.crowd.xid == 0 {
				m.crowd.before = m.before
			}
			m.crowd.xid = max(m.crowd.xid, m.xid)
		} else {
			m.unseen = append(m.unseen, passedAt{m.xid, m.before})
		}
	}
	if t.whole {
		return t.wholeChange(c)
	}
	t.change(c)
	return Emit
}

// Reached says that the stream has sent everything that ends at or before lsn, and that
// no source transaction is open.
func (m *Merger) Reached(lsn checkpoint.LSN) {
	m.open = false
	m.reached = max(m.reached, lsn)
	m.close()
}

// close takes the windows whose end the stream has reached.
func (m *Merger) close() {
	n := 0
	for n < len(m.windows) && m.windows[n].lsn <= m.reached {
		m.past = m.windows[n].snapshot
		n++
	}
	m.windows = slices.Delete(m.windows, 0, n)
}

// opened notes the window of an answer.
func (m *Merger) opened(s MVCC, lsn checkpoint.LSN) {
	newest := m.past
	if n := len(m.windows); n > 0 {
		newest = m.windows[n-1].snapshot
	}
	if lsn == 0 || !later(s, newest) {
		return
	}
	m.windows = append(m.windows, window{s, lsn})
	m.close()
}

// hasPassed tells whether the stream has passed every transaction that s sees, where lsn
// is one behind all their commit records. That is so as well where it has passed all that
// another snapshot sees, and that one sees as much: on a quiet server, whose WAL is
// flushed late, one chunk waits for the flush and not each.
func (m *Merger) hasPassed(s MVCC, lsn checkpoint.LSN) bool {
	return m.reached >= lsn || m.past.Covers(s)
}

// Saw takes an MVCC snapshot that was taken at any time, by anybody, on the primary.
func (m *Merger) Saw(s MVCC) {
	if later(s, m.latest) {
		m.latest = s
	}
	m.covered = m.covered || m.latest.Covers(m.o.SlotSnapshot)
	m.unseen = slices.DeleteFunc(m.unseen, func(p passedAt) bool { return m.latest.Sees(p.xid) })
	if m.latest.Xmin > m.crowd.xid {
		m.crowd = passedAt{}
	}
	for _, t := range m.queue {
		t.forget()
	}
}

// later tells whether a was taken after b: what is seen once is seen for ever.
func later(a, b MVCC) bool {
	if a.Xmax != b.Xmax {
		return a.Xmax > b.Xmax
	}
	if a.Xmin != b.Xmin {
		return a.Xmin > b.Xmin
	}
	return len(a.Running) < len(b.Running)
}

// Arrived takes the answer to an order. The chunk's memory is the Merger's until it comes
// back through Recycle.
func (m *Merger) Arrived(c *Chunk, now time.Time) error {
	m.clock = now
	o := c.Order
	last := o.Kind != OrderWhole || c.Last || c.Err != nil || c.Gone || c.Broken
	if last {
		delete(m.outstanding, o.ID)
	}
	t := m.tables[o.Table.OID]
	if t != nil && last {
		t.orders = slices.DeleteFunc(t.orders, func(q *Order) bool { return q == o })
	}
	if o.Cancelled() || t == nil {
		m.recycle(c)
		return nil
	}
	if c.Err != nil {
		m.recycle(c)
		return fmt.Errorf("read table %s: %w", o.Table, c.Err)
	}
	if c.Broken {
		m.recycle(c)
		return fmt.Errorf("read table %s: %w", o.Table, ErrBroken)
	}
	if c.Gone {
		m.recycle(c)
		m.Remove(o.Table.OID)
		return nil
	}
	if !c.Snapshot.IsZero() {
		m.opened(c.Snapshot, c.LSN)
		defer m.Saw(c.Snapshot)
	}
	if (o.Kind != OrderPlan || o.End) && !m.covered && !c.Snapshot.Covers(m.o.SlotSnapshot) {
		// A transaction that committed before the slot's beginning is not in the stream, and
		// is not visible yet: its standby keeps it waiting.
		t.blind(c, now)
		return nil
	}
	switch o.Kind {
	case OrderPlan:
		t.planned(c)
		m.recycle(c)
	case OrderRange, OrderKeys:
		t.arrived(c, now)
	case OrderWhole, OrderSnapshot:
		t.wholeArrived(c, now)
	default:
		return fmt.Errorf("read table %s: order of kind %d was answered", o.Table, o.Kind)
	}
	return nil
}

func (m *Merger) recycle(c *Chunk) { m.recycled = append(m.recycled, c) }

// Recycle gives back a chunk whose memory is free again; nil for none.
func (m *Merger) Recycle() *Chunk {
	n := len(m.recycled)
	if n == 0 {
		return nil
	}
	c := m.recycled[n-1]
	m.recycled = m.recycled[:n-1]
	return c
}

// Next gives the next row that may go out, in the order of its range. To be called
// between source transactions only. What it gave counts as delivered in Progress.
func (m *Merger) Next() (*Row, bool) {
	if m.open {
		return nil, false
	}
	backlog := m.backlog()
	for _, t := range m.active {
		if backlog && !t.inBacklog() {
			continue
		}
		if t.next(&m.row) {
			return &m.row, true
		}
	}
	for i := 0; i < len(m.active); i++ {
		if t := m.active[i]; t.finished() {
			t.finish()
			m.leave(t)
			i--
		}
	}
	return nil, false
}

// Released tells whether the held changes of a table may go out now, and after them its
// progress: the caller delivers them and then calls HeldOut.
func (m *Merger) Released() (oid uint32, ok bool) {
	for _, t := range m.active {
		if t.whole && t.rowsOut {
			return t.def.OID, true
		}
	}
	return 0, false
}

// HeldOut says that every held change of the table has been handed out.
func (m *Merger) HeldOut(oid uint32) {
	if t := m.tables[oid]; t != nil && t.rowsOut {
		t.finish()
		m.leave(t)
	}
}

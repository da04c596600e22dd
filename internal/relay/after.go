package relay

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/replication"
)

// after is the loop's part in what becomes of outbox rows once they are delivered
// (outbox[].after): it remembers them until they are marked or deleted, and meanwhile
// keeps PostgreSQL from being told of them. It belongs to the loop.
//
// What must hold:
//
//  1. A row is handed to the marker only when its event is in a Kafka transaction that
//     has committed.
//  2. Nothing is confirmed to PostgreSQL from the transaction of the oldest row on that is not
//     marked, so that a restart is sent it again. A snapshot's rows, which are never sent
//     again, are in the checkpoint by their keys.
//  3. What was delivered otherwise than as an event, or put aside, is known to a restart:
//     by checkpoint.After.
type after struct {
	l      *loop
	marker marker
	lanes  map[uint32]*lane // by OID
	tables map[uint32]checkpoint.AfterTable
	plans  map[*replication.Relation]*afterPlan

	head int        // of rows: all before it are done
	rows []afterRow // in the order of the stream; a snapshot's where they were delivered
	keys []byte     // of rows, one behind the other
	key  []byte     // of the row in hand
	done int        // of rows: those that nothing is left to be done about
	dead []checkpoint.ChangeID
	// sealed is the first change behind the last checkpoint that was made.
	sealed checkpoint.ChangeID

	start     checkpoint.Position // of the session: what it has is not delivered again
	old       checkpoint.After    // as a restart finds it
	batch     uint64              // number of the batch in hand
	delivered uint64              // of the last one that was
	before    checkpoint.LSN      // what the stream had sent before the open source transaction

	reads, readBytes int  // of rows: a snapshot's, not done
	kept             int  // a snapshot's rows that the last checkpoint names
	waiting          bool // the stream waits for marks

	work
	restBy time.Time // the end of the run does not wait for marks any longer
}

// marker is an *outbox.Marker.
type marker interface {
	Do(j *outbox.Job)
	Done() <-chan *outbox.Job
	Close()
}

// afterRow is a row that was, or is about to be, delivered.
type afterRow struct {
	lane   *lane
	id     checkpoint.ChangeID // zero for a snapshot's
	batch  uint64              // that a snapshot's row leaves with
	before checkpoint.LSN      // up to here PostgreSQL may be told as long as it is not marked
	xid    checkpoint.XID
	at, n  int // its key in keys
	state  afterState
	fails  uint8     // how often it was in the way, or may have been
	tryAt  time.Time // not before
}

type afterState uint8

const (
	rowWaits afterState = iota
	rowPicked
	rowDone
)

// afterPlan is where a relation's rows have their keys; columns is nil where nothing
// becomes of them.
type afterPlan struct {
	lane    *lane
	columns []int
}

const (
	// maxUnmarked bounds the memory: with so many rows that are delivered and not marked
	// the stream waits. Some 30 MB, with those that are done in between.
	maxUnmarked = 100_000
	// maxAfterKept and maxAfterBytes bound what the checkpoint holds of a snapshot's rows,
	// and the dead letters in it.
	maxAfterKept  = 1000
	maxAfterBytes = 64 << 10
	// restBudget is how long the end of a run waits for marks; the next start makes those
	// that are left.
	restBudget = 3 * time.Second
)

// newAfter goes on from a checkpoint.
func newAfter(l *loop, targets []*outbox.Target, cp checkpoint.Checkpoint) (*after, error) {
	a := &after{
		l: l, lanes: map[uint32]*lane{}, tables: map[uint32]checkpoint.AfterTable{},
		plans: map[*replication.Relation]*afterPlan{}, batch: 1, start: cp.Position,
	}
	a.old.Done = cp.Position.Next()
	if cp.After != nil {
		a.old = *cp.After
	}
	// What stands there is not marked yet, so those of a restart of a restart.
	a.dead = slices.Clone(a.old.Dead)
	for _, t := range targets {
		a.lanes[t.OID] = newLane(t)
		a.tables[t.OID] = checkpoint.AfterTable{From: cp.Position.Next()}
		known, ok := a.old.Tables[t.OID]
		if !ok {
			continue // what was delivered before was not to be marked
		}
		a.tables[t.OID] = checkpoint.AfterTable{From: known.From}
		lane := a.lanes[t.OID]
		if slices.Equal(known.Key, t.ByEvent().Key) {
			lane = lane.loose()
		}
		if len(known.Rows) > 0 && !slices.Equal(known.Key, lane.target.Key) {
			return nil, &checkpoint.Refusal{
				What: fmt.Sprintf("the key of outbox table %s is %v, and %d rows that were delivered and not marked are known by %v",
					t.String(), t.Key, len(known.Rows), known.Key),
				Risk:   "they could not be marked, or others would be",
				Remedy: "give the table its old key until they are marked, or start once with after: keep under its outbox entry, which forgets them",
			}
		}
		for _, row := range known.Rows {
			a.key = a.key[:0]
			for _, text := range row {
				a.key = outbox.AppendColumn(a.key, []byte(text))
			}
			a.add(afterRow{lane: lane})
		}
	}
	for oid, known := range a.old.Tables {
		if a.lanes[oid] == nil && len(known.Rows) > 0 {
			l.s.log.Warn().Uint32("oid", oid).Int("rows", len(known.Rows)).
				Msg("delivered rows of an outbox table stay unmarked: the configuration does not want them marked any more, or the table is gone")
		}
	}
	return a, nil
}

// active tells whether anything is marked at all.
func (a *after) active() bool { return len(a.lanes) > 0 }

// plan finds out what becomes of a relation's rows.
func (a *after) plan(rel *replication.Relation) (*afterPlan, error) {
	if p := a.plans[rel]; p != nil {
		return p, nil
	}
	p := &afterPlan{}
	// By the entry that the router goes by: a row that is no event there is none to be marked.
	if entry := a.l.s.entryOf(rel); a.l.s.r.o.afterOf(entry) != outbox.Keep {
		if p.lane = a.lanes[rel.OID]; p.lane == nil {
			// Made, or made anew, since the start; or renamed before it.
			t, err := a.l.s.newTarget(rel.OID, entry)
			if err != nil {
				return nil, err
			}
			if t != nil {
				p.lane = newLane(t)
				a.lanes[rel.OID] = p.lane
				a.tables[rel.OID] = checkpoint.AfterTable{From: a.l.pos.Next()}
				if known, ok := a.old.Tables[rel.OID]; ok {
					a.tables[rel.OID] = checkpoint.AfterTable{From: known.From}
				}
			}
		}
	}
	if p.lane != nil && !p.find(rel) {
		// A column of the key has had another name, or is not published. The event's id
		// there has to be.
		if p.lane = p.lane.loose(); !p.find(rel) {
			return nil, &checkpoint.Refusal{
				What:   fmt.Sprintf("the stream does not send column %s of outbox table %s", p.lane.target.EventID, p.lane.target.String()),
				Risk:   "its delivered rows could not be found to be marked",
				Remedy: "publish the column that is the event's id, or set after: keep under its outbox entry",
			}
		}
	}
	if len(a.plans) > 1000 { // RELATION messages of long ago
		clear(a.plans)
	}
	a.plans[rel] = p
	return p, nil
}

// find finds the key's columns in a relation.
func (p *afterPlan) find(rel *replication.Relation) bool {
	p.columns = p.columns[:0]
	for _, name := range p.lane.target.Key {
		at := slices.IndexFunc(rel.Columns, func(c replication.Column) bool { return c.Name == name })
		if at < 0 {
			return false
		}
		p.columns = append(p.columns, at)
	}
	return true
}

// begin notes where a source transaction begins.
func (a *after) begin() { a.before = a.l.sent }

// passed takes a change that was routed into the batch in hand; dead tells that it was put aside.
func (a *after) passed(c *replication.Change, dead bool) error {
	if c.Relation == nil || c.Op != replication.OpCreate && c.Op != replication.OpRead {
		return nil
	}
	p, err := a.plan(c.Relation)
	if err != nil || p.lane == nil {
		return err
	}
	switch {
	case c.Read == nil && dead:
		a.dead = append(a.dead, changeID(c))
	case c.Read == nil:
		a.pack(p, c)
		a.add(afterRow{lane: p.lane, id: changeID(c), before: a.before, xid: c.Txn.XID})
	case !dead:
		a.pack(p, c)
		a.add(afterRow{lane: p.lane, batch: a.batch})
	}
	return nil
}

// again takes a change that was delivered before the restart: its row may not be marked
// yet.
func (a *after) again(c *replication.Change) error {
	if c.Relation == nil || c.Txn == nil || c.Op != replication.OpCreate {
		return nil
	}
	p, err := a.plan(c.Relation)
	if err != nil || p.lane == nil {
		return err
	}
	id := changeID(c)
	if id.Before(a.old.Done) || id.Before(a.tables[p.lane.target.OID].From) {
		return nil
	}
	if _, dead := slices.BinarySearchFunc(a.old.Dead, id, checkpoint.ChangeID.Compare); dead {
		return nil
	}
	for _, s := range a.old.Skipped {
		if s.Has(id) {
			return nil // not delivered, and never will be
		}
	}
	a.pack(p, c)
	a.add(afterRow{lane: p.lane, id: id, before: a.before, xid: c.Txn.XID})
	return nil
}

func changeID(c *replication.Change) checkpoint.ChangeID {
	return checkpoint.ChangeID{CommitLSN: c.Txn.CommitLSN, Seq: c.Seq}
}

// pack puts a row's key in hand. An event has an id, and a key no null.
func (a *after) pack(p *afterPlan, c *replication.Change) {
	a.key = a.key[:0]
	for _, i := range p.columns {
		a.key = outbox.AppendColumn(a.key, c.New[i].Text)
	}
}

func (a *after) add(row afterRow) {
	row.at, row.n = len(a.keys), len(a.key)
	a.keys = append(a.keys, a.key...)
	a.rows = append(a.rows, row)
	if row.id.IsZero() {
		a.reads++
		a.readBytes += row.n
	}
}

// mayRead tells whether a snapshot's next row may go out: the checkpoint has to hold its key.
func (a *after) mayRead() bool { return a.reads < maxAfterKept && a.readBytes < maxAfterBytes }

// mayTake tells whether the stream may go on.
func (a *after) mayTake() bool {
	full := len(a.rows)-a.done >= maxUnmarked && a.firstReady()
	if !full && len(a.dead) >= maxAfterKept {
		// Those before the oldest row that is not marked are of no use any more.
		a.forgetDead(a.horizon(a.l.pos.Next()))
		full = len(a.dead) >= maxAfterKept && a.firstReady()
	}
	if full != a.waiting {
		a.waiting = full
		a.l.s.r.setMarksWait(full)
	}
	return !full
}

// open are the rows from the oldest that is not done on.
func (a *after) open() []afterRow {
	for a.head < len(a.rows) && a.rows[a.head].state == rowDone {
		a.head++
	}
	return a.rows[a.head:]
}

// firstReady tells whether there are rows to be marked, so that waiting for them ends.
func (a *after) firstReady() bool {
	rows := a.open()
	return len(rows) > 0 && a.ready(&rows[0])
}

// ready tells whether a row's event is known to be in Kafka.
func (a *after) ready(row *afterRow) bool {
	if row.id.IsZero() {
		return row.batch <= a.delivered
	}
	return row.id.Before(a.l.committed.Next())
}

// horizon gives the oldest change of the stream whose row is not marked, or next, which is
// behind all that counts.
func (a *after) horizon(next checkpoint.ChangeID) checkpoint.ChangeID {
	if a.reading() {
		// What is still to be sent again has rows that nobody has looked at yet.
		if seen := (checkpoint.ChangeID{CommitLSN: a.l.sent}); seen.Before(next) {
			next = seen
		}
		if next.Before(a.old.Done) {
			next = a.old.Done
		}
	}
	if row := a.oldest(); row != nil && row.id.Before(next) {
		return row.id
	}
	return next
}

// free is how far PostgreSQL may be told that everything is done; most is how far it may
// otherwise.
func (a *after) free(most checkpoint.LSN) checkpoint.LSN {
	if !a.active() {
		return most
	}
	// Of what a restart is sent again the rows are known only when it has been sent.
	most = min(most, a.l.sent)
	if row := a.oldest(); row != nil {
		return min(most, row.before)
	}
	return most
}

// reading tells whether the stream may still send what was delivered before the restart.
func (a *after) reading() bool {
	return a.l.pos.LSN == a.start.LSN && a.l.pos.Cut == a.start.Cut
}

// oldest is the oldest row of the stream that is not marked; nil where there is none.
func (a *after) oldest() *afterRow {
	rows := a.open()
	for i := range rows {
		if row := &rows[i]; row.state != rowDone && !row.id.IsZero() {
			return row
		}
	}
	return nil
}

func (a *after) forgetDead(before checkpoint.ChangeID) {
	n := 0
	for n < len(a.dead) && a.dead[n].Before(before) {
		n++
	}
	a.dead = slices.Delete(a.dead, 0, n)
}

// checkpoint adds what a restart has to know if the batch in hand is the last that it
// finds.
func (a *after) checkpoint(cp *checkpoint.Checkpoint) {
	a.batch++
	a.kept = 0
	next := cp.Position.Next()
	a.sealed = next
	if !a.active() {
		return
	}
	out := &checkpoint.After{Done: a.horizon(next), Tables: maps.Clone(a.tables)}
	a.carryRenamed(out.Tables)
	a.forgetDead(out.Done)
	for _, id := range a.dead {
		if id.Before(next) { // the others are not in Kafka: a restart routes them anew
			out.Dead = append(out.Dead, id)
		}
	}
	for _, s := range a.old.Skipped {
		if out.Done.Before(s.To) {
			out.Skipped = append(out.Skipped, s)
		}
	}
	cp.After = out
	if a.reads == 0 {
		return
	}
	lanes := map[uint32]*lane{}
	mixed := map[uint32]bool{}
	for row := range a.openReads() {
		oid := row.lane.target.OID
		if known := lanes[oid]; known != nil && !slices.Equal(known.target.Key, row.lane.target.Key) {
			mixed[oid] = true
		}
		lanes[oid] = row.lane
	}
	for row := range a.openReads() {
		oid, key := row.lane.target.OID, row.lane.target.Key
		texts := outbox.SplitKey(a.keys[row.at:row.at+row.n], len(key))
		if mixed[oid] { // the table's key has changed; the event's id is part of any
			at := slices.Index(key, row.lane.target.EventID)
			key, texts = key[at:at+1], texts[at:at+1]
		}
		t := out.Tables[oid]
		t.Key, t.Rows = key, append(t.Rows, texts)
		out.Tables[oid] = t
		a.kept++
	}
}

// openReads are a snapshot's rows that are not done.
func (a *after) openReads() iter.Seq[*afterRow] {
	return func(yield func(*afterRow) bool) {
		rows := a.open()
		for i := range rows {
			if row := &rows[i]; row.state != rowDone && row.id.IsZero() && !yield(row) {
				return
			}
		}
	}
}

// carryRenamed keeps what a restart has to know of tables that have another name by now,
// until what it was to be sent again has been sent: by then plan knows them.
func (a *after) carryRenamed(tables map[uint32]checkpoint.AfterTable) {
	if !a.reading() {
		return
	}
	for oid, known := range a.old.Tables {
		if _, ok := tables[oid]; !ok {
			tables[oid] = checkpoint.AfterTable{From: known.From}
		}
	}
}

// moving tells whether the checkpoint names rows of a snapshot that are marked by now.
func (a *after) moving() bool { return a.kept > 0 && a.reads == 0 && !a.busy }

// deliveredBatch notes that the batch of the last checkpoint is committed.
func (a *after) deliveredBatch() { a.delivered = a.batch - 1 }

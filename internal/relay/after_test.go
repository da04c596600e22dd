package relay

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/replication"
)

// fakeMarker marks rows of a model: those in trouble end the job with their error.
type fakeMarker struct {
	job     *outbox.Job
	done    chan *outbox.Job
	trouble map[string]string // event id to SQLSTATE
	table   map[string]string // table to SQLSTATE
	unseen  map[string]bool
	marked  []string
	jobs    int
}

func (m *fakeMarker) Do(j *outbox.Job)         { m.job = j }
func (m *fakeMarker) Done() <-chan *outbox.Job { return m.done }
func (m *fakeMarker) Close()                   {}

// work carries the job out; false where there is none.
func (m *fakeMarker) work() bool {
	j := m.job
	if j == nil {
		return false
	}
	m.job = nil
	m.jobs++
	state := m.table[j.Target.Name]
	var seen []int
	for i := range j.Len() {
		id := j.Key(i)[0]
		if m.unseen[id] {
			continue
		}
		if code := m.trouble[id]; code != "" {
			state = code
		}
		seen = append(seen, i)
	}
	if state != "" {
		j.Err = fmt.Errorf("mark: %w", &pgconn.PgError{Code: state, Message: "in trouble"})
		return true
	}
	for _, i := range seen {
		j.Settle(i)
		m.marked = append(m.marked, j.Key(i)[0])
	}
	return true
}

// afterBench is the marks of a loop that does nothing else.
type afterBench struct {
	*after
	m    *fakeMarker
	rels map[string]*replication.Relation
	seq  uint64
}

func newAfterBench(t *testing.T, cp checkpoint.Checkpoint, tables ...string) *afterBench {
	t.Helper()
	var targets []*outbox.Target
	b := &afterBench{m: &fakeMarker{trouble: map[string]string{}, table: map[string]string{}, unseen: map[string]bool{}}, rels: map[string]*replication.Relation{}}
	o := Options{After: map[string]string{}}
	for i, name := range tables {
		oid := uint32(i + 1)
		o.After["public."+name] = outbox.Mark
		targets = append(targets, &outbox.Target{Table: outbox.Table{OID: oid, Schema: "public", Name: name, After: outbox.Mark, EventID: "id"}, Key: []string{"id"}, Loose: true})
		b.rels[name] = &replication.Relation{OID: oid, Schema: "public", Name: name, Columns: []replication.Column{{Name: "id"}}}
	}
	l := &loop{s: &session{r: New(o), log: zerolog.Nop()}, now: time.Unix(1000, 0), pos: cp.Position, committed: cp.Position}
	a, err := newAfter(l, targets, cp)
	if err != nil {
		t.Fatal(err)
	}
	a.marker = b.m
	b.after = a
	return b
}

// insert passes an event of the stream, in a transaction of its own.
func (b *afterBench) insert(t *testing.T, table, id string, dead bool) {
	t.Helper()
	b.seq++
	commit := b.l.pos.LSN + 1
	c := &replication.Change{Op: replication.OpCreate, Relation: b.rels[table], Txn: &replication.Transaction{XID: checkpoint.XID(b.seq), CommitLSN: commit},
		New: replication.Tuple{{Kind: replication.ValueText, Text: []byte(id)}}}
	b.begin()
	if err := b.passed(c, dead); err != nil {
		t.Fatal(err)
	}
	b.l.pos = checkpoint.Position{LSN: commit + 10, CommitLSN: commit}
	b.l.sent = b.l.pos.LSN
}

// deliver commits what has passed, and gives the checkpoint.
func (b *afterBench) deliver() *checkpoint.After {
	cp := checkpoint.Checkpoint{Position: b.l.pos}
	b.checkpoint(&cp)
	b.l.committed = b.l.pos
	b.deliveredBatch()
	return cp.After
}

// round gives the marker one job, if there is one.
func (b *afterBench) round() bool {
	b.pump()
	if !b.m.work() {
		return false
	}
	b.back()
	return true
}

// settleAll works until nothing is left to be done for the moment.
func (b *afterBench) settleAll(t *testing.T) {
	t.Helper()
	for n := 0; b.round(); n++ {
		if n > 100_000 {
			t.Fatal("it never comes to rest")
		}
	}
}

// pass lets time pass. back takes the time of day, so that the loop's has to follow it.
func (b *afterBench) pass(d time.Duration) { b.l.now = time.Now().Add(d) }

// Many rows that somebody holds locks on do not keep the others from being marked, nor
// does the marker do nothing but wait for them.
func TestRowsThatAreLockedDoNotKeepOthersFromBeingMarked(t *testing.T) {
	b := newAfterBench(t, checkpoint.Checkpoint{}, "outbox")
	for i := range 5000 {
		id := fmt.Sprint(i)
		b.insert(t, "outbox", id, false)
		if i%100 == 7 || i < 20 {
			b.m.trouble[id] = "55P03"
		}
	}
	locked := len(b.m.trouble)
	b.deliver()
	b.pass(0)
	b.settleAll(t)
	if n := len(b.m.marked); n != 5000-locked {
		t.Fatalf("%d rows are marked, want %d", n, 5000-locked)
	}
	// A locked row costs some halvings of a thousand, not a try of each of its neighbours.
	if limit := 5 + 12*2*locked; b.m.jobs > limit {
		t.Errorf("%d statements, want at most %d", b.m.jobs, limit)
	}
	// New rows are marked at once, though the locked ones are due for another try.
	b.pass(time.Minute)
	b.m.jobs = 0
	b.insert(t, "outbox", "new", false)
	b.deliver()
	for range 2 {
		b.round()
	}
	if !slices.Contains(b.m.marked, "new") {
		t.Error("a new row waits behind locked ones")
	}
	if free := b.free(b.l.pos.LSN); free >= 10 {
		t.Errorf("PostgreSQL may be told of %s, behind a row that is not marked", free)
	}
	clear(b.m.trouble)
	for range 20 {
		b.pass(time.Minute)
		b.settleAll(t)
	}
	if n := len(b.m.marked); n != 5001 || len(b.rows) != 0 || b.troubled != 0 {
		t.Errorf("%d rows are marked, %d are left, %d in trouble", n, len(b.rows), b.troubled)
	}
	if free := b.free(b.l.pos.LSN); free != b.l.pos.LSN {
		t.Errorf("PostgreSQL may be told of %s, want all of %s", free, b.l.pos.LSN)
	}
}

// A table that cannot be marked at all does not keep another from it.
func TestATableThatCannotBeMarkedDoesNotKeepAnotherFromIt(t *testing.T) {
	b := newAfterBench(t, checkpoint.Checkpoint{}, "first", "second")
	b.m.table["first"] = "42501"
	for i := range 10 {
		b.insert(t, "first", fmt.Sprintf("f%d", i), false)
		b.insert(t, "second", fmt.Sprintf("s%d", i), false)
	}
	b.deliver()
	b.pass(0)
	b.settleAll(t)
	if n := len(b.m.marked); n != 10 {
		t.Fatalf("%d rows are marked, want those of the second table", n)
	}
	if b.l.s.r.markProblem == "" {
		t.Error("nothing is said of the first table")
	}
	b.insert(t, "second", "s10", false)
	b.deliver()
	b.pass(0)
	b.settleAll(t)
	if b.l.s.r.markProblem == "" {
		t.Error("a row of the second table took the first one's problem away")
	}
	delete(b.m.table, "first")
	b.pass(time.Minute)
	b.settleAll(t)
	if len(b.rows) != 0 || b.l.s.r.markProblem != "" {
		t.Errorf("%d rows are left, and it is said: %q", len(b.rows), b.l.s.r.markProblem)
	}
}

// A failure that concerns everything is waited out with everything.
func TestAFailureOfTheServerIsWaitedOut(t *testing.T) {
	b := newAfterBench(t, checkpoint.Checkpoint{}, "first", "second")
	b.insert(t, "first", "f", false)
	b.insert(t, "second", "s", false)
	b.deliver()
	b.m.table["first"], b.m.table["second"] = "53100", "53100" // disk full
	b.pass(0)
	b.settleAll(t)
	if b.m.jobs != 1 {
		t.Errorf("%d statements, want one", b.m.jobs)
	}
	if d := b.wake(); d <= 0 || d > maxTableRetry {
		t.Errorf("it wakes in %s", d)
	}
	clear(b.m.table)
	b.pass(time.Minute)
	b.settleAll(t)
	if len(b.m.marked) != 2 {
		t.Errorf("marked: %v", b.m.marked)
	}
}

// A statement that takes too long is made with fewer rows.
func TestASlowStatementGetsFewerRows(t *testing.T) {
	b := newAfterBench(t, checkpoint.Checkpoint{}, "outbox")
	for i := range rowsPerMark {
		b.insert(t, "outbox", fmt.Sprint(i), false)
	}
	b.deliver()
	b.m.table["outbox"] = "57014"
	b.pass(0)
	b.round()
	if b.lanes[1].size != rowsPerMark/2 {
		t.Errorf("the next job has %d rows, want half of them", b.lanes[1].size)
	}
	clear(b.m.table)
	b.settleAll(t)
	if len(b.m.marked) != rowsPerMark {
		t.Errorf("%d rows are marked", len(b.m.marked))
	}
}

// Nothing is marked before its delivery, nothing twice, and a row whose transaction cannot be
// seen yet is waited for.
func TestRowsAreMarkedAfterTheirDelivery(t *testing.T) {
	b := newAfterBench(t, checkpoint.Checkpoint{}, "outbox")
	b.insert(t, "outbox", "a", false)
	b.insert(t, "outbox", "dead", true)
	b.pass(0)
	if b.round() {
		t.Fatal("a row that is not delivered was handed out")
	}
	out := b.deliver()
	if want := (checkpoint.ChangeID{CommitLSN: b.l.pos.CommitLSN}); len(out.Dead) != 1 || out.Dead[0] != want {
		t.Errorf("dead letters %v, want %v", out.Dead, want)
	}
	b.insert(t, "outbox", "b", false)
	b.m.unseen["a"] = true
	b.settleAll(t)
	if len(b.m.marked) > 0 || b.free(99) != 0 {
		t.Errorf("marked %v, free %s", b.m.marked, b.free(99))
	}
	delete(b.m.unseen, "a")
	b.pass(time.Minute)
	b.settleAll(t)
	b.deliver()
	b.settleAll(t)
	if !slices.Equal(b.m.marked, []string{"a", "b"}) {
		t.Errorf("marked %v, want a and b", b.m.marked)
	}
}

// What a restart finds: rows that were delivered are marked, and no others.
func TestARestartMarksWhatWasDelivered(t *testing.T) {
	id := func(lsn checkpoint.LSN) checkpoint.ChangeID { return checkpoint.ChangeID{CommitLSN: lsn} }
	cp := checkpoint.Checkpoint{Position: checkpoint.Position{LSN: 200, CommitLSN: 190}, After: &checkpoint.After{
		Done: id(20), Dead: []checkpoint.ChangeID{id(40)}, Skipped: []checkpoint.Stretch{{From: id(50), To: id(60)}},
		Tables: map[uint32]checkpoint.AfterTable{1: {From: id(10), Key: []string{"id"}, Rows: [][]string{{"read"}}}, 2: {From: id(30)}},
	}}
	b := newAfterBench(t, cp, "first", "second", "third")
	for _, table := range []string{"first", "second", "third"} {
		for lsn := checkpoint.LSN(5); lsn <= 75; lsn += 10 {
			for _, at := range []checkpoint.LSN{lsn, lsn + 5} {
				c := &replication.Change{Op: replication.OpCreate, Relation: b.rels[table], Txn: &replication.Transaction{CommitLSN: at},
					New: replication.Tuple{{Kind: replication.ValueText, Text: fmt.Appendf(nil, "%s %d", table, at)}}}
				b.begin()
				if err := b.again(c); err != nil {
					t.Fatal(err)
				}
				b.l.sent = at + 1
			}
		}
	}
	b.pass(0)
	b.settleAll(t)
	slices.Sort(b.m.marked)
	want := []string{"first 20", "first 25", "first 30", "first 35", "first 45", "first 60", "first 65", "first 70", "first 75", "first 80", "read",
		"second 30", "second 35", "second 45", "second 60", "second 65", "second 70", "second 75", "second 80"}
	if !slices.Equal(b.m.marked, want) {
		t.Errorf("marked %v\nwant   %v", b.m.marked, want)
	}
	// Nothing new has come: what is not sent again yet is not done.
	if out := b.deliver(); out.Done.CommitLSN > b.l.sent || len(out.Skipped) > 1 {
		t.Errorf("checkpoint %+v, and the stream has sent no more than %s", out, b.l.sent)
	}
}

// A table that has another name by now is known to a restart of a restart, until what it was
// to be sent again has been sent.
func TestWhatWaitsInARenamedTableIsNotForgotten(t *testing.T) {
	from := checkpoint.AfterTable{From: checkpoint.ChangeID{CommitLSN: 10}}
	cp := checkpoint.Checkpoint{Position: checkpoint.Position{LSN: 200, CommitLSN: 190}, After: &checkpoint.After{
		Done: from.From, Tables: map[uint32]checkpoint.AfterTable{1: from, 9: from},
	}}
	b := newAfterBench(t, cp, "outbox")
	if out := b.deliver(); out.Tables[9].From != from.From {
		t.Errorf("checkpoint %+v; want the renamed table in it", out.Tables)
	}
	b.insert(t, "outbox", "new", false)
	if out := b.deliver(); len(out.Tables) != 1 {
		t.Errorf("checkpoint %+v; want the outbox alone in it", out.Tables)
	}
}

// Rows of a snapshot are stored by one key, though the table got another one in between.
func TestRowsOfASnapshotAreStoredByOneKey(t *testing.T) {
	b := newAfterBench(t, checkpoint.Checkpoint{}, "outbox")
	read := func(rel *replication.Relation, texts ...string) {
		c := &replication.Change{Op: replication.OpRead, Relation: rel, Read: &replication.ReadPoint{}}
		for _, text := range texts {
			c.New = append(c.New, replication.Value{Kind: replication.ValueText, Text: []byte(text)})
		}
		if err := b.passed(c, false); err != nil {
			t.Fatal(err)
		}
	}
	read(b.rels["outbox"], "a")
	keyed := *b.lanes[1].target
	keyed.Key, keyed.Loose = []string{"n", "id"}, false
	b.lanes[1] = newLane(&keyed)
	read(&replication.Relation{OID: 1, Schema: "public", Name: "outbox", Columns: []replication.Column{{Name: "n"}, {Name: "id"}}}, "7", "b")
	want := checkpoint.AfterTable{Key: []string{"id"}, Rows: [][]string{{"a"}, {"b"}}}
	if got := b.deliver().Tables[1]; !slices.Equal(got.Key, want.Key) || !slices.EqualFunc(got.Rows, want.Rows, slices.Equal) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// A column of the key that had another name when the row was written does not end the
// stream: the event's id finds the row.
func TestARowIsFoundByItsEventWhereTheKeyHadAnotherName(t *testing.T) {
	b := newAfterBench(t, checkpoint.Checkpoint{}, "outbox")
	old := &replication.Relation{OID: 1, Schema: "public", Name: "outbox", Columns: []replication.Column{{Name: "uid"}}}
	c := &replication.Change{Op: replication.OpCreate, Relation: old, Txn: &replication.Transaction{CommitLSN: 1}, New: replication.Tuple{{Kind: replication.ValueText, Text: []byte("x")}}}
	if err := b.passed(c, false); err == nil {
		t.Error("a row without the event's id was taken")
	}
}

// The memory of rows that are done is given back, whatever else is in the way.
func TestMarksTakeBoundedMemory(t *testing.T) {
	b := newAfterBench(t, checkpoint.Checkpoint{}, "outbox")
	b.m.trouble["stuck"] = "P0001"
	b.insert(t, "outbox", "stuck", false)
	most := 0
	for i := range 200 {
		for n := range 100 {
			b.insert(t, "outbox", fmt.Sprintf("%d-%d", i, n), false)
		}
		b.deliver()
		b.pass(0)
		b.settleAll(t)
		most = max(most, len(b.rows))
	}
	if most > 2*rowsPerMark+200 {
		t.Errorf("%d rows were in memory, and one is not marked", most)
	}
	for i := 0; b.mayTake(); i++ {
		if i > 2*maxUnmarked {
			t.Fatal("the stream never waits for marks")
		}
		b.insert(t, "outbox", fmt.Sprint(i), false)
		b.l.committed = b.l.pos
	}
	if n := len(b.rows) - b.done; n != maxUnmarked {
		t.Errorf("the stream waits at %d rows, want %d", n, maxUnmarked)
	}
}

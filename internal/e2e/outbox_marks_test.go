package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
)

// badEvent is insertEvent with a type that no topic can be made of.
func (c *caseRun) badEvent(aggregate string, seq int) string {
	return strings.Replace(c.insertEvent(aggregate, seq), "'"+c.name+"'", "'bad type'", 1)
}

// refuseMarks makes a trigger that keeps rows from being marked.
func (c *caseRun) refuseMarks(when string) {
	c.t.Helper()
	c.pg.Exec(`CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE OR DELETE ON outbox FOR EACH ROW WHEN (` + when + `) EXECUTE FUNCTION refuse()`)
}

// markedSeqs are the aggregate_seqs of the rows that are marked.
func (c *caseRun) markedSeqs() string {
	c.t.Helper()
	return c.pg.Value("SELECT coalesce(string_agg(aggregate_seq::text, ',' ORDER BY aggregate_seq), '') FROM outbox WHERE published_at IS NOT NULL")
}

// waitMarked waits until exactly these rows are marked.
func (c *caseRun) waitMarked(want string) {
	c.t.Helper()
	harness.WaitFor(c.t, "the rows "+want+" to be marked", harness.DefaultTimeout, func() (bool, error) { return c.markedSeqs() == want, nil })
}

// Rows that checkpoint set moves the position over were not delivered, and the stream may
// send them again for the sake of rows before them that are not marked yet.
func TestRowsThatWereSkippedAreNotMarked(t *testing.T) {
	c := afterNew(t, caseOutbox, caseMap{"after": "mark"})
	c.refuseMarks("old.aggregate_seq = 1")
	c.start()
	c.anchored()
	c.pg.Exec(c.insertEvent("a", 1) + c.insertEvent("a", 2))
	c.fence()
	c.waitMarked("2")
	c.proc.Kill()
	c.pg.Exec(c.insertEvent("a", 3) + c.insertEvent("a", 4) + c.badEvent("a", 5))
	skip := c.walEnd()
	c.pg.Exec(c.insertEvent("a", 6))
	if r := c.mustSet("--lsn", skip.String()); r.Direction != "forwards" || r.Changes != 3 {
		t.Fatalf("forwards: %+v; want 3 changes", r)
	}
	// Twice, since the second start knows of it only what the first one wrote down.
	c.start()
	c.waitMarked("2,6")
	c.proc.Kill()
	c.pg.Exec("DROP TRIGGER refuse ON outbox")
	c.start()
	c.waitMarked("1,2,6")
	c.pg.Exec(c.insertEvent("a", 7))
	c.waitMarked("1,2,6,7")
	if n := len(c.delivered()); n != 4 {
		t.Errorf("%d events, want 4", n)
	}
	end := c.walEnd()
	c.waitConfirmed(end)
	c.stop()
}

// What is delivered again after a rewind is marked though it was once delivered to be kept,
// and though the process is killed before that.
func TestRowsDeliveredAgainAfterARewindAreMarked(t *testing.T) {
	c := afterNew(t, caseOutbox, caseMap{"after": "keep"})
	c.start()
	c.anchored()
	c.fence()
	back := c.walEnd()
	c.pg.Exec(c.insertEvent("a", 1) + c.badEvent("a", 2))
	c.fence()
	c.stop()
	c.setAfter(caseMap{"after": "mark"})
	c.refuseMarks("old.aggregate_seq = 3") // what follows it stays in the checkpoint
	c.start()
	c.pg.Exec(c.insertEvent("a", 3) + c.badEvent("a", 4) + c.insertEvent("a", 5) + c.insertEvent("a", 6))
	c.waitMarked("5,6")
	c.fence()
	c.proc.Kill()
	c.pg.Exec("DROP TRIGGER refuse ON outbox; DELETE FROM outbox WHERE aggregate_seq = 6")
	if r := c.mustSet("--lsn", back.String()); r.Direction != "backwards" {
		t.Fatalf("backwards: %+v", r)
	}
	c.launch(killpoint.Env + "=" + killpoint.Spec(killpoint.Marking, 1))
	c.killed()
	c.start()
	c.waitMarked("1,3,5")
	c.fence()
	counts := map[string]int{}
	for _, r := range c.topic(c.settled(), c.eventTopic()) {
		counts[r.Headers["aggregate_seq"]]++
	}
	for _, seq := range []string{"1", "3", "5", "6"} {
		if counts[seq] != 2 {
			t.Errorf("event %s was delivered %d times, want 2", seq, counts[seq])
		}
	}
	c.stop()
}

// A replay sends what was delivered, and touches no row.
func TestAReplayMarksNothing(t *testing.T) {
	c := afterNew(t, caseOutbox, caseMap{"after": "keep"})
	c.start()
	c.anchored()
	from := c.walEnd().String()
	c.pg.Exec(c.insertEvent("a", 1) + c.insertEvent("a", 2))
	c.fence()
	c.setAfter(caseMap{"after": "delete"})
	if r := c.mustReplay("--from-lsn", from); r.Records < 2 {
		t.Fatalf("replayed %+v, want 2 events", r)
	}
	if got := c.pg.Value("SELECT count(*) FROM outbox"); got != "2" {
		t.Errorf("%s rows are left, want 2", got)
	}
	c.stop()
}

// Rows that an application holds for long, as a poller of its own would, keep neither
// the others from being marked nor the stream from going on.
func TestManyLockedRowsDoNotKeepTheOthersFromBeingMarked(t *testing.T) {
	c := afterNew(t, caseOutbox, caseMap{"after": "mark"})
	c.start()
	c.stop() // an open transaction would keep a slot from being made
	var sql strings.Builder
	for seq := 1; seq <= 60; seq++ {
		sql.WriteString(c.insertEvent("a", seq))
	}
	c.pg.Exec(sql.String())
	app := c.session()
	c.exec(app, "BEGIN; SELECT FROM outbox WHERE aggregate_seq % 3 = 0 FOR UPDATE")
	c.start()
	c.waitNone("the rows that are not locked to be marked", "published_at IS NULL AND aggregate_seq % 3 <> 0")
	for seq := 61; seq <= 63; seq++ {
		c.pg.Exec(c.insertEvent("a", seq))
		c.waitNone("a new row to be marked", "published_at IS NULL AND aggregate_seq > 60")
	}
	if got := c.pg.Value("SELECT count(*) FROM outbox WHERE published_at IS NULL"); got != "20" {
		t.Errorf("%s rows are not marked, want those that are locked", got)
	}
	c.exec(app, "COMMIT")
	c.waitNone("all rows to be marked", "published_at IS NULL")
	if n := len(c.delivered()); n != 63 {
		t.Errorf("%d events, want 63", n)
	}
	end := c.walEnd()
	c.waitConfirmed(end)
	c.stop()
}

// A key that gets another name, under a connector that runs and under one that is started
// behind rows of the old name, and a table that is dropped.
func TestOutboxTablesThatChangeUnderTheirMarks(t *testing.T) {
	c := afterNew(t, caseOutbox+`; CREATE TABLE other (event_id uuid PRIMARY KEY, event_type text, payload json, published_at timestamptz)`, caseMap{"after": "mark"})
	entries := c.config["outbox"].([]caseMap)
	c.set(caseMap{"outbox": append(entries, caseMap{"table": "public.other", "after": "mark"})})
	c.refuseMarks("old.aggregate_seq % 2 = 0")
	c.start()
	c.pg.Exec(c.insertEvent("a", 1) + c.insertEvent("a", 2))
	c.waitMarked("1")
	c.pg.Exec("ALTER TABLE outbox RENAME COLUMN id TO number")
	c.pg.Exec(c.insertEvent("a", 3) + c.insertEvent("a", 4))
	c.waitMarked("1,3")
	c.fence()
	c.proc.Kill()
	c.pg.Exec("ALTER TABLE outbox RENAME COLUMN number TO row_number")
	c.start() // and is sent rows of both former names
	c.pg.Exec(c.insertEvent("a", 5))
	c.waitMarked("1,3,5")
	c.pg.Exec("DROP TRIGGER refuse ON outbox")
	c.waitMarked("1,2,3,4,5")

	// A table that is gone has no rows to be marked, and holds nothing back.
	c.stop()
	c.pg.Exec("INSERT INTO other (event_id, event_type, payload) SELECT gen_random_uuid(), '" + c.name + "', '{}' FROM generate_series(1, 3)")
	app := c.session()
	c.exec(app, "BEGIN; LOCK TABLE other")
	c.start()
	c.fence()
	c.exec(app, "DROP TABLE other; COMMIT")
	c.proc.WaitLog(harness.DefaultTimeout, harness.Message("outbox table is gone"))
	c.pg.Exec(c.insertEvent("a", 6))
	c.waitMarked("1,2,3,4,5,6")
	end := c.walEnd()
	c.waitConfirmed(end)
	if n := len(c.delivered()); n != 9 {
		t.Errorf("%d events, want 9", n)
	}
	c.stop()
}

// An instance that is taken over while it has rows to mark, and wakes up again later.
func TestMarksOfAnInstanceThatIsTakenOver(t *testing.T) {
	c := afterNew(t, caseOutbox, caseMap{"after": "delete"})
	c.refuseMarks("old.aggregate_seq IN (2, 3)")
	old := c.start()
	c.pg.Exec(c.insertEvent("a", 1) + c.insertEvent("a", 2) + c.badEvent("a", 3) + c.insertEvent("a", 4))
	c.waitNone("the rows that are free to be gone", "aggregate_seq IN (1, 4)")
	c.fence()
	old.Pause()
	c.proc = harness.StartProgram(t, harness.Binary(t), nil, "run", "-c", c.file(), "--takeover")
	c.streaming()
	c.pg.Exec("DROP TRIGGER refuse ON outbox")
	c.pg.Exec(c.insertEvent("a", 5) + c.badEvent("a", 6))
	c.waitNone("what was delivered to be gone", "aggregate_seq NOT IN (3, 6)")
	old.Resume()
	old.WaitLog(2*harness.DefaultTimeout, harness.Message("standing by"))
	c.pg.Exec(c.insertEvent("a", 7))
	c.waitNone("one more to be gone", "aggregate_seq NOT IN (3, 6)")
	if got := c.left(); got != "3,6" {
		t.Errorf("left: %s, want the dead letters' rows", got)
	}
	if n := len(c.delivered()); n != 5 {
		t.Errorf("%d events, want 5", n)
	}
	c.stop()
}

// Where a row that cannot be an event stops the connector, neither it nor what is behind
// it is touched.
func TestARowThatStopsTheConnectorIsNotMarked(t *testing.T) {
	c := afterNew(t, caseOutbox, caseMap{"after": "mark"}).set(caseMap{"dead-letter": caseMap{"on-error": "stop"}})
	c.start()
	c.pg.Exec("BEGIN;" + c.insertEvent("a", 1) + "COMMIT")
	c.waitMarked("1")
	c.pg.Exec("BEGIN;" + c.insertEvent("a", 2) + c.badEvent("a", 3) + c.insertEvent("a", 4) + "COMMIT")
	if code := c.proc.Wait(harness.DefaultTimeout); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	if got := c.markedSeqs(); got != "1" {
		t.Errorf("marked: %s, want 1", got)
	}
	if n := len(c.topic(c.log(), c.eventTopic())); n != 1 {
		t.Errorf("%d events, want 1", n)
	}
}

// Publish and mark are two systems: whoever decides by the mark what to publish publishes
// again after a crash in between.
func TestACrashBetweenDeliveryAndMarkRepeatsNothing(t *testing.T) {
	c := afterNew(t, caseOutbox+`; CREATE TABLE orders (id int PRIMARY KEY);
		CREATE TABLE marks (id bigserial PRIMARY KEY, event_id uuid, at timestamptz DEFAULT clock_timestamp());
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO marks (event_id) VALUES (new.event_id); RETURN new; END $$;
		CREATE TRIGGER note BEFORE UPDATE OF published_at ON outbox FOR EACH ROW EXECUTE FUNCTION note()`, caseMap{"after": "mark"})
	c.launch(killpoint.Env + "=" + killpoint.Spec(killpoint.Marking, 1))
	c.streaming()
	c.pg.Exec("BEGIN; INSERT INTO orders VALUES (1);" + c.insertEvent("order-1", 5) + "COMMIT")
	c.killed()
	committed := c.pg.Value("SELECT clock_timestamp()::text")
	if got := c.kafka.Committed(t, c.eventTopic()); len(got) != 1 {
		t.Fatalf("%d events at the crash, want 1", len(got))
	}
	if got := c.markedSeqs(); got != "" {
		t.Fatalf("marked at the crash: %s", got)
	}
	c.start()
	c.waitMarked("5")
	if got := c.pg.Value("SELECT count(*) FROM marks"); got != "1" {
		t.Errorf("published_at was set %s times, want once", got)
	}
	if got := c.pg.Value("SELECT published_at > $1::text::timestamptz FROM outbox", committed); got != "t" {
		t.Error("published_at is older than the delivery")
	}
	amount := 0
	for _, r := range c.topic(c.settled(), c.eventTopic()) {
		var payload struct{ N int }
		if err := json.Unmarshal(r.Value, &payload); err != nil {
			t.Fatal(err)
		}
		amount += payload.N
	}
	if amount != 5 {
		t.Errorf("a consumer that knows no repeats ends with %d, want 5", amount)
	}
	c.stop()
}

// The mark is an update of a published table that has no replica identity.
func TestMarksAreNoChangesOfTheirOwn(t *testing.T) {
	c := afterNew(t, `CREATE TABLE outbox (id bigserial, event_id uuid NOT NULL, aggregate_id text NOT NULL, aggregate_seq bigint NOT NULL,
		event_type text NOT NULL, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz)`, caseMap{"after": "mark"})
	c.set(caseMap{"admin": caseMap{"listen": "127.0.0.1:0"}})
	c.start()
	for seq := 1; seq <= 10; seq++ {
		c.pg.Exec(c.insertEvent("a", seq))
	}
	c.waitMarked("1,2,3,4,5,6,7,8,9,10")
	c.pg.Exec("UPDATE outbox SET payload = '{}' WHERE aggregate_seq = 1")
	c.pg.Exec("DELETE FROM outbox WHERE aggregate_seq = 2")
	c.fence()
	if n := len(c.delivered()); n != 10 {
		t.Errorf("%d events, want 10", n)
	}
	log := c.log()
	c.expectNoTopic(log, c.name+".public.outbox")
	if n := c.metric("walrelay_records_total", `outcome="excluded"`, "outbox"); n != 0 {
		t.Errorf("%v marks came back as changes", n)
	}
	for _, line := range c.proc.Lines() {
		if line.Level() == "error" {
			t.Errorf("the log says: %s", line.Raw)
		}
	}
	c.stop()
}

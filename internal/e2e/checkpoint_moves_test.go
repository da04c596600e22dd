package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

// refuses wants a start to be refused, and gives what it said.
func (c *caseRun) refuses(says string) string {
	c.t.Helper()
	code, _, stderr := c.command("run")
	if code != 4 || !strings.Contains(stderr, says) {
		c.t.Fatalf("the start: exit code %d, want 4 and %q: %s", code, says, stderr)
	}
	return stderr
}

// wantKeys waits for the keys of t's records, in the order of their positions.
func (c *caseRun) wantKeys(ids ...int) {
	c.t.Helper()
	var want []string
	for _, id := range ids {
		want = append(want, fmt.Sprintf(`{"id":%d}`, id))
	}
	c.fence()
	if got := replayKeys(c.kafka.WaitCommitted(c.t, c.name+".public.t", len(want))); !slices.Equal(got, want) {
		c.t.Errorf("delivered %v, want %v", got, want)
	}
}

// remedy runs the command checkpoint set that a refusal names, from the n-th on.
func (c *caseRun) remedy(refusal string, n int) {
	c.t.Helper()
	lsns := regexp.MustCompile(`--lsn ([0-9A-F]+/[0-9A-F]+)`).FindAllStringSubmatch(refusal, -1)
	if len(lsns) <= n {
		c.t.Fatalf("no --lsn in: %s", refusal)
	}
	c.mustSet("--lsn", lsns[n][1])
}

// A slot that somebody advanced: what the refusal offers works, both ways.
func TestCheckpointSetMendsASlotThatSomebodyAdvanced(t *testing.T) {
	for i, tt := range []struct {
		name string
		want []int
	}{{"the gap is accepted", []int{1, 3}}, {"the slot is made again from the anchor", []int{1, 2, 3}}} {
		t.Run(tt.name, func(t *testing.T) {
			c := caseNew(t)
			c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
			c.start()
			c.anchored()
			c.pg.Exec("INSERT INTO t VALUES (1)")
			c.fence()
			c.stop()
			c.pg.Exec("INSERT INTO t VALUES (2)")
			c.pg.Exec("SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())", "walrelay_"+c.name)
			c.remedy(c.refuses("past the checkpoint"), i)
			c.pg.Exec("INSERT INTO t VALUES (3)")
			c.start()
			c.wantKeys(tt.want...)
			c.stop()
		})
	}
}

func TestCheckpointSetMakesADroppedSlotAgain(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"batch": caseMap{"max-records": 10}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	c.stop()
	// In the middle of a transaction, whose delivered part must not come again.
	c.startUntil(3)
	c.pg.Exec("INSERT INTO t SELECT generate_series(1, 50)")
	c.killed()
	harness.WaitFor(t, "the slot to be dropped", harness.DefaultTimeout, func() (bool, error) {
		_, err := c.pg.TryQuery("SELECT pg_drop_replication_slot($1)", "walrelay_"+c.name)
		return err == nil, nil
	})
	if cut := c.checkpoint().Position.Cut; cut.IsZero() {
		t.Fatal("the checkpoint is not in the middle of a transaction")
	}
	failover := harness.DefaultMajor(t) >= 17
	c.remedy(c.refuses("does not exist"), 0)
	if failover {
		c.pg.WaitValue("t", "SELECT failover FROM pg_replication_slots WHERE slot_name = $1", "walrelay_"+c.name)
	}
	c.start()
	var ids []int
	for id := range 50 {
		ids = append(ids, id+1)
	}
	c.wantKeys(ids...)
	c.stop()

	// Without an anchor there is nothing to make it from.
	c.pg.Exec("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()")
	at := c.checkpoint().Position.LSN.String()
	if code, _, stderr := c.command("checkpoint", "set", "--yes", "--lsn", at); code != 4 || !strings.Contains(stderr, "there is no anchor to make it from") {
		t.Errorf("without slot and anchor: exit code %d, %s; want 4", code, stderr)
	}
}

// Nothing ends between the delivered part of a transaction and its commit: an LSN there is the
// place where the connector is, and what is delivered does not come again.
func TestCheckpointSetKeepsThePlaceInATransaction(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"batch": caseMap{"max-records": 10}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	c.stop()
	c.startUntil(3)
	c.pg.Exec("INSERT INTO t SELECT generate_series(1, 50)")
	c.killed()
	slot := "walrelay_" + c.name
	released := func() {
		c.pg.WaitValue("0", "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1 AND active", slot)
	}
	at := c.checkpoint().Position
	if at.Cut.IsZero() {
		t.Fatal("the checkpoint is not in the middle of a transaction")
	}
	stays := func(lsn checkpoint.LSN) {
		t.Helper()
		released()
		code, out, stderr := c.command("checkpoint", "set", "--yes", "--lsn", lsn.String())
		if code != 0 || !strings.Contains(out, `"direction": "none"`) || !strings.Contains(stderr, "its first 20 changes are delivered and do not come again") {
			t.Errorf("checkpoint set --lsn %s: exit code %d, %s%s", lsn, code, out, stderr)
		}
		if now := c.checkpoint().Position; now.String() != at.String() {
			t.Errorf("checkpoint set --lsn %s moved the checkpoint from %s to %s", lsn, at, now)
		}
	}
	within := at.Cut.CommitLSN - 8 // the commit record's neighbour, a row's
	stays(at.LSN)
	stays(within)
	stays(at.Cut.CommitLSN)
	stays(at.Cut.CommitLSN + 8)
	released()
	c.pg.Exec("SELECT pg_drop_replication_slot($1)", slot)
	stays(at.Cut.CommitLSN)
	// A gap that is accepted, and that nothing was committed in.
	c.pg.Exec("SELECT pg_replication_slot_advance($1, $2)", slot, within.String())
	c.remedy(c.refuses("past the checkpoint"), 0)
	c.start()
	var ids []int
	for id := range 50 {
		ids = append(ids, id+1)
	}
	c.wantKeys(ids...)
	c.stop()
}

// The rest of a transaction is skipped by an LSN behind its end.
func TestCheckpointSetSkipsTheRestOfATransaction(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"batch": caseMap{"max-records": 10}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.startUntil(3)
	c.pg.Exec("INSERT INTO t SELECT generate_series(1, 50)")
	c.killed()
	c.pg.WaitValue("f", "SELECT active FROM pg_replication_slots WHERE slot_name = $1", "walrelay_"+c.name)
	cut := c.checkpoint().Position.Cut
	if r := c.mustSet("--lsn", c.walEnd().String()); r.Direction != "forwards" || r.Transactions != 1 || r.Changes != 50-int64(cut.Changes) {
		t.Errorf("%+v; want one transaction with the changes behind the first %d", r, cut.Changes)
	}
	c.start()
	var ids []int
	for id := range int(cut.Changes) {
		ids = append(ids, id+1)
	}
	c.wantKeys(ids...)
	c.stop()
}

// A slot that is not behind the wanted LSN need not be replaced: no anchor is needed.
func TestCheckpointSetGoesBackWithoutAnAnchorWhereTheSlotStillReaches(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"replay": caseMap{"retain-wal": 0}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.pg.Exec("INSERT INTO t VALUES (1)")
	c.fence()
	c.stop()
	slot := c.confirmed()
	back := c.checkpoint().Position.LSN
	// Killed after the commit to Kafka and before the confirm: the slot stays behind.
	c.pg.Exec("INSERT INTO t VALUES (2)")
	c.launch("WALRELAY_TEST_KILL_AT=6:1")
	c.killed()
	if at := c.checkpoint().Position.LSN; at <= back || c.confirmed() > slot {
		t.Fatalf("the checkpoint is at %s, was at %s; the slot at %s, was at %s", at, back, c.confirmed(), slot)
	}
	released := func() {
		c.pg.WaitValue("f", "SELECT active FROM pg_replication_slots WHERE slot_name = $1", "walrelay_"+c.name)
	}
	released()
	// A source that is the checkpoint's already: a script that ran before changes nothing.
	at := c.checkpoint().Position
	if r := c.mustSet("--accept-source"); r.Direction != "none" || c.checkpoint().Position.String() != at.String() {
		t.Errorf("--accept-source of the same source: %+v, the checkpoint is at %s, was at %s", r, c.checkpoint().Position, at)
	}
	released()
	if r := c.mustSet("--lsn", back.String()); r.Direction != "backwards" {
		t.Errorf("%+v; want backwards", r)
	}
	c.start()
	c.wantKeys(1, 2, 2)
	c.stop()
}

func TestCheckpointSetAcceptsTheClusterOfARestoredDump(t *testing.T) {
	c := caseNew(t, harness.Dedicated())
	const table = "CREATE TABLE t (id int PRIMARY KEY)"
	c.pg.Exec(table)
	c.start()
	c.pg.Exec("INSERT INTO t VALUES (1)")
	c.fence()
	c.stop()
	old := c.checkpoint().Source

	c.pg = harness.Postgres(t, harness.Dedicated())
	c.set(caseMap{"source": caseMap{"dsn": c.pg.DSN()}})
	c.pg.Exec(table)
	c.pg.Exec("INSERT INTO t VALUES (1)")
	c.refuses("the checkpoint belongs to another cluster")
	for _, command := range [][]string{{"replay", "--from-lsn", "0/1"}, {"checkpoint", "set", "--yes", "--lsn", "0/1"}} {
		if code, _, stderr := c.command(command...); code != 4 || !strings.Contains(stderr, "the checkpoint belongs to another cluster") {
			t.Errorf("%v: exit code %d, %s; want 4", command, code, stderr)
		}
	}
	// There is no slot yet: it says how to make one.
	code, _, stderr := c.command("checkpoint", "set", "--yes", "--accept-source")
	create := regexp.MustCompile(`SELECT pg_create_logical_replication_slot\('[a-z0-9_]+', 'pgoutput'\)`).FindString(stderr)
	if code != 4 || create == "" {
		t.Fatalf("without a slot: exit code %d, %s; want 4", code, stderr)
	}
	c.pg.Exec("CREATE PUBLICATION walrelay_" + c.name + " FOR TABLE t")
	c.pg.Exec(create)
	c.pg.Exec("INSERT INTO t VALUES (2)")
	r := c.mustSet("--accept-source")
	if r.SystemID == old.SystemID || r.SystemID != c.pg.Value("SELECT system_identifier FROM pg_control_system()") {
		t.Errorf("%+v; want another system identifier than %s", r, old.SystemID)
	}
	c.start()
	c.anchored()
	c.pg.Exec("INSERT INTO t VALUES (3)")
	c.fence()
	keys := map[string]int{}
	for _, r := range c.kafka.WaitCommitted(t, c.name+".public.t", 3) {
		keys[string(r.Key)]++
	}
	if len(keys) != 3 || keys[`{"id":1}`] != 1 {
		t.Errorf("delivered %v; want each of 1, 2 and 3 once", keys)
	}
	// And replay works there, from where both publications are named.
	c.proc.WaitLog(harness.DefaultTimeout, harness.Field("message", "recovered"))
	begin := c.walEnd().String()
	c.pg.Exec("INSERT INTO t VALUES (4)")
	c.fence()
	if again := c.mustReplay("--from-lsn", begin, "--table", "public.t"); again.Records != 1 {
		t.Errorf("%d records are replayed on the new cluster, want 1", again.Records)
	}
	if code, _, stderr := c.command("replay", "--from-lsn", c.anchorLSN().String(), "--dry-run"); code != 4 || !strings.Contains(stderr, "is younger than the beginning of the range") {
		t.Errorf("over the beginning of a publication: exit code %d, %s; want 4", code, stderr)
	}
	c.stop()
}

// What PostgreSQL wrote and cannot decode any more: a bytea whose text is longer than 1 GiB.
func TestCheckpointSetGoesPastAChangeThatCannotBeDecoded(t *testing.T) {
	c := caseNew(t, harness.Dedicated())
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, b bytea)")
	c.start()
	c.anchored()
	c.pg.Exec("INSERT INTO t VALUES (1)")
	c.fence()
	c.pg.Exec("INSERT INTO t SELECT 2, x||x||x||x||x||x FROM (SELECT decode(repeat('00', 100000000), 'hex') x) s")
	c.pg.Exec("INSERT INTO t VALUES (3)")
	if code := c.proc.Wait(4 * harness.DefaultTimeout); code != 1 {
		t.Fatalf("the instance ended with exit code %d, want 1: %s", code, c.proc.Stderr())
	}
	said := c.proc.Stderr()
	for _, text := range []string{"PostgreSQL cannot decode a change of slot walrelay_" + c.name, "at risk", "walrelay checkpoint set -c FILE --lsn"} {
		if !strings.Contains(said, text) {
			t.Errorf("the error does not say %q: %s", text, said)
		}
	}
	if at := c.checkpoint().Position.LSN; c.confirmed() > at {
		t.Errorf("the slot is confirmed up to %s, past the checkpoint at %s", c.confirmed(), at)
	}
	lsn := regexp.MustCompile(`--lsn ([0-9A-F]+/[0-9A-F]+)`).FindStringSubmatch(said)
	if lsn == nil {
		t.Fatalf("the error names no LSN: %s", said)
	}
	code, _, stderr := c.command("checkpoint", "set", "--yes", "--lsn", lsn[1])
	if code != 0 || !strings.Contains(stderr, "cannot decode") {
		t.Fatalf("checkpoint set: exit code %d, %s", code, stderr)
	}
	c.start()
	c.wantKeys(1, 3)
	c.stop()
}

// The holder is a process that stands still, as on a host that is cut off.
func TestRunFromLSNTakesOverFromAStaleHolder(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	stale := c.start()
	c.anchored()
	c.pg.Exec("INSERT INTO t VALUES (1)")
	c.fence()
	back := c.walEnd().String()
	c.pg.Exec("INSERT INTO t VALUES (2)")
	c.fence()
	stale.Pause()
	c.proc = harness.StartProgram(t, harness.Binary(t), nil, "run", "-c", c.file(), "--from-lsn", back, "--takeover")
	c.streaming()
	c.pg.Exec("INSERT INTO t VALUES (3)")
	c.wantKeys(1, 2, 2, 3)
	// It wakes up, is fenced out, and stands by.
	stale.Resume()
	stale.WaitLog(2*harness.DefaultTimeout, harness.Field("message", "standing by: another instance holds the slot; taking over when it lets go"))
	c.pg.Exec("INSERT INTO t VALUES (4)")
	c.wantKeys(1, 2, 2, 3, 4)
	stale.Term()
	stale.Wait(harness.DefaultTimeout)
	c.stop()
}

func TestGoingBackDoesNotStallMarks(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"outbox": []caseMap{{"table": "public.outbox", "topic": c.name + ".ev", "after": "mark"}}})
	c.pg.Exec("CREATE TABLE outbox (event_id bigint PRIMARY KEY, event_type text, aggregate_id text, payload jsonb, published_at timestamptz)")
	c.start()
	c.anchored()
	back := c.walEnd()
	insert := "INSERT INTO outbox SELECT g, 'made', '7', '{}' FROM generate_series($1::int, $1::int + 9) g"
	c.pg.Exec(insert, 1)
	c.pg.WaitValue("0", "SELECT count(*) FROM outbox WHERE published_at IS NULL")
	c.stop()
	c.mustSet("--lsn", back.String())
	c.pg.Exec(insert, 11)
	c.start()
	c.kafka.WaitCommitted(t, c.name+".ev", 30)
	c.pg.WaitValue("0", "SELECT count(*) FROM outbox WHERE published_at IS NULL")
	end := c.walEnd()
	c.fence()
	c.waitConfirmed(end)
	if n := len(c.kafka.Committed(t, c.name+".ev")); n != 30 {
		t.Errorf("%d events, want 30", n)
	}
	c.stop()
}

// A restored dump has the same tables under other numbers; what was sent of them was sent.
func TestARestoredDumpIsNotSentASecondTime(t *testing.T) {
	c := caseNew(t, harness.Dedicated())
	c.set(caseMap{"snapshot": caseMap{"mode": "initial"}, "outbox": []any{caseMap{"table": "public.outbox", "topic": "restored." + c.name}}})
	schema := "CREATE TABLE t (id int PRIMARY KEY); " + caseOutbox
	event := func(n int) string {
		return fmt.Sprintf("INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload) VALUES (gen_random_uuid(), 'a', %d, 't', '{}'); INSERT INTO t VALUES (%d)", n, n)
	}
	rows := event(1) + "; " + event(2)
	c.pg.Exec(schema + "; " + event(1))
	c.start()
	c.kafka.WaitCommitted(t, "restored."+c.name, 1)
	c.pg.Exec(event(2))
	c.kafka.WaitCommitted(t, "restored."+c.name, 2)
	c.kafka.WaitCommitted(t, c.name+".public.t", 2)
	c.waitRead()
	c.stop()
	before := len(c.kafka.Committed(t, c.name+".public.t")) // a row may come as read and as change

	c.pg = harness.Postgres(t, harness.Dedicated())
	c.set(caseMap{"source": caseMap{"dsn": c.pg.DSN()}})
	c.pg.Exec("CREATE TABLE first (id int PRIMARY KEY); " + schema + "; " + rows) // another number for each
	c.pg.Exec("CREATE PUBLICATION walrelay_" + c.name + " FOR TABLE t; CREATE PUBLICATION walrelay_" + c.name + "_insert FOR TABLE outbox WITH (publish = 'insert')")
	c.pg.Exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", "walrelay_"+c.name)
	c.mustSet("--accept-source")
	c.start()
	c.pg.Exec(event(3))
	c.kafka.WaitCommitted(t, "restored."+c.name, 3)
	c.kafka.WaitCommitted(t, c.name+".public.t", before+1)
	c.stop()
	if events, records := len(c.kafka.Committed(t, "restored."+c.name)), len(c.kafka.Committed(t, c.name+".public.t")); events != 3 || records != before+1 {
		t.Errorf("%d events and %d records, want 3 and %d", events, records, before+1)
	}
}

func TestCheckpointSetOfAConnectorThatNeverRanCreatesNothing(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	for _, args := range [][]string{{"--accept-source"}, {"--lsn", c.walEnd().String()}} {
		if code, _, stderr := c.command(append([]string{"checkpoint", "set", "--yes"}, args...)...); code != 4 {
			t.Errorf("%v: exit code %d, %s; want 4", args, code, stderr)
		}
	}
	if topics, err := kadm.NewClient(c.kafka.Client(t)).ListTopics(t.Context()); err != nil || topics.Has("_walrelay."+c.name) {
		t.Errorf("there is a checkpoint topic: %v", err)
	}
	if n := c.pg.Value("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE $1", "walrelay_"+c.name+"%"); n != "0" {
		t.Errorf("%s slots", n)
	}
}

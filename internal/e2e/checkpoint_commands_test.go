package e2e

import (
	"encoding/json"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/replay"
)

func (c *caseRun) mustSet(args ...string) (r replay.SetResult) {
	c.t.Helper()
	code, out, stderr := c.command(append([]string{"checkpoint", "set", "--yes"}, args...)...)
	if code != 0 {
		c.t.Fatalf("checkpoint set %v: exit code %d: %s", args, code, stderr)
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		c.t.Fatalf("checkpoint set printed %q: %v", out, err)
	}
	return r
}

func TestCheckpointSetMovesTheConnectorBothWays(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	c.pg.Exec("INSERT INTO t VALUES (1)")
	c.fence()
	back := c.walEnd()
	c.pg.Exec("INSERT INTO t VALUES (2)")
	c.fence()
	if code, _, stderr := c.command("checkpoint", "set", "--yes", "--lsn", back.String()); code != 4 || !strings.Contains(stderr, "an instance of this connector runs") {
		t.Errorf("beside a live instance: exit code %d, %s", code, stderr)
	}
	c.stop()

	// Forwards: what is between is skipped, and counted.
	c.pg.Exec("INSERT INTO t SELECT generate_series(10, 12)")
	c.pg.Exec("INSERT INTO t VALUES (13)")
	skip := c.walEnd()
	c.pg.Exec("INSERT INTO t VALUES (14)")
	if r := c.mustSet("--lsn", skip.String()); r.Direction != "forwards" || r.Transactions != 2 || r.Changes != 4 {
		t.Errorf("forwards: %+v; want 2 transactions with 4 changes", r)
	}
	c.start()
	c.fence()
	topic := c.name + ".public.t"
	if got, want := replayKeys(c.kafka.WaitCommitted(t, topic, 3)), []string{`{"id":1}`, `{"id":2}`, `{"id":14}`}; !slices.Equal(got, want) {
		t.Errorf("forwards: %v, want %v", got, want)
	}
	c.stop()

	// Backwards: everything behind comes again, at the positions it had.
	const isFailover = "SELECT coalesce(to_jsonb(s)->>'failover', 'no such thing') FROM pg_replication_slots s WHERE slot_name = $1"
	failover := c.pg.Value(isFailover, "walrelay_"+c.name)
	if r := c.mustSet("--lsn", back.String()); r.Direction != "backwards" {
		t.Errorf("backwards: %+v", r)
	}
	if got := c.pg.Value(isFailover, "walrelay_"+c.name); got != failover {
		t.Errorf("the slot is failover-enabled: %s, was %s", got, failover)
	}
	c.start()
	c.fence()
	want := []string{`{"id":1}`, `{"id":2}`, `{"id":2}`, `{"id":10}`, `{"id":11}`, `{"id":12}`, `{"id":13}`, `{"id":14}`, `{"id":14}`}
	if got := replayKeys(c.kafka.WaitCommitted(t, topic, len(want))); !slices.Equal(got, want) {
		t.Errorf("backwards: %v, want %v", got, want)
	}
	c.stop()

	if code, _, _ := c.command("checkpoint", "set", "--yes", "--lsn", "0/1"); code != 4 {
		t.Errorf("below the anchor: exit code %d, want 4", code)
	}
	if code, _, _ := c.command("checkpoint", "set", "--yes", "--lsn", "FFFF/0"); code != 1 {
		t.Errorf("beyond the end of the WAL: exit code %d, want 1", code)
	}
	if code, out, _ := c.command("checkpoint", "show"); code != 0 || !strings.Contains(out, c.checkpoint().Position.LSN.String()) {
		t.Errorf("checkpoint show: exit code %d, %s", code, out)
	}
}

func TestSlotDropDropsTheAnchorToo(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	if code, out, _ := c.command("slot", "show"); code != 0 || !strings.Contains(out, "walrelay_"+c.name+"_anchor") {
		t.Errorf("slot show: exit code %d, %s", code, out)
	}
	if code, _, _ := c.command("slot", "drop", "--yes"); code != 4 {
		t.Errorf("beside a live instance: exit code %d, want 4", code)
	}
	c.stop()
	// Who may not drop the publications drops nothing.
	owner, role := c.pg.DSN(), "role_"+c.name
	c.pg.Exec("CREATE ROLE " + role + " LOGIN REPLICATION PASSWORD 'x'")
	t.Cleanup(func() { c.pg.Exec("DROP ROLE " + role) })
	dsn, err := url.Parse(owner)
	if err != nil {
		t.Fatal(err)
	}
	dsn.User = url.UserPassword(role, "x")
	c.set(caseMap{"source": caseMap{"dsn": dsn.String()}})
	if code, _, stderr := c.command("slot", "drop", "--yes"); code != 1 || !strings.Contains(stderr, "nothing was dropped") {
		t.Errorf("slot drop by a role that owns nothing: exit code %d, %s", code, stderr)
	}
	if n := c.pg.Value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"); n != "2" {
		t.Errorf("%s slots are left, want 2", n)
	}
	c.set(caseMap{"source": caseMap{"dsn": owner}})
	if code, _, stderr := c.command("slot", "drop", "--yes"); code != 0 {
		t.Errorf("slot drop: exit code %d, %s", code, stderr)
	}
	if n := c.pg.Value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"); n != "0" {
		t.Errorf("%s slots are left", n)
	}
	if n := c.pg.Value("SELECT count(*) FROM pg_publication"); n != "0" {
		t.Errorf("%s publications are left", n)
	}
}

// The manual's way out where the position is given up: what it says to drop is all that
// keeps a connector from a first start.
func TestStartingAnewAsTheManualSays(t *testing.T) {
	manual, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, way, _ := strings.Cut(string(manual), "**Start anew**")
	way, _, _ = strings.Cut(way, "\n\n")
	drop := regexp.MustCompile("`walrelay ([a-z ]+) -c FILE`").FindStringSubmatch(way)
	if drop == nil || !strings.Contains(way, "give `kafka.checkpoint-topic` a name that was never used") {
		t.Fatalf("the manual does not say how to start anew: %s", way)
	}
	c := caseNew(t)
	c.set(caseMap{"snapshot": caseMap{"mode": "initial"}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	c.pg.Exec("INSERT INTO t VALUES (1)")
	c.fence()
	c.stop()
	if code, _, stderr := c.command(append(strings.Fields(drop[1]), "--yes")...); code != 0 {
		t.Fatalf("%s: exit code %d, %s", drop[1], code, stderr)
	}
	c.refuses("does not exist, although the checkpoint") // with the old topic
	c.set(caseMap{"kafka": caseMap{"checkpoint-topic": "_walrelay." + c.name + ".anew"}})
	c.pg.Exec("INSERT INTO t VALUES (2)")
	c.start()
	c.pg.Exec("INSERT INTO t VALUES (3)")
	keys := map[string]bool{}
	for _, r := range c.kafka.WaitCommitted(t, c.name+".public.t", 4) {
		keys[string(r.Key)] = true
	}
	if len(keys) != 3 {
		t.Errorf("delivered %v, want the rows 1, 2 and 3", keys)
	}
	c.stop()
}

func TestAReplayThatIsKilledGoesOnWhereItWas(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"batch": caseMap{"max-records": 100}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.start()
	c.anchored()
	begin := c.walEnd()
	c.pg.Exec("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 1000) g") // cut into pieces
	for i := range 5 {
		c.pg.Exec("INSERT INTO t SELECT g, 'x' FROM generate_series($1::int, $1::int + 49) g", 2000+100*i)
	}
	c.fence()
	live := c.kafka.WaitCommitted(t, c.name+".public.t", 1250)
	before := c.lsn("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1", "walrelay_"+c.name)
	for _, n := range []int{4, 11} {
		id := c.killedReplay(n, "--from-lsn", begin.String(), "--table", "public.t")
		r := c.mustReplay("--from-lsn", begin.String(), "--table", "public.t", "--resume", id)
		if r.ID != id || r.Records == 0 || r.Records >= 1250 {
			t.Errorf("resumed %s: %d records", r.ID, r.Records)
		}
		sameButReplay(t, live, c.kafka.WaitCommitted(t, "replay."+id+".public.t", 1250), id)
	}
	harness.WaitFor(t, "the temporary slots to go", harness.DefaultTimeout, func() (bool, error) {
		return c.pg.Value("SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()") == "0", nil
	})
	if after := c.lsn("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1", "walrelay_"+c.name); after < before {
		t.Errorf("the live slot went back from %s to %s", before, after)
	}
	c.fence() // the live instance goes on
	c.quiet()
}

package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
	"github.com/walrelay/walrelay/internal/relay"
)

func (c *caseRun) anchorName() string { return "walrelay_" + c.name + "_anchor" }

// anchorLSN is the oldest LSN that replay reaches.
func (c *caseRun) anchorLSN() checkpoint.LSN {
	c.t.Helper()
	return c.lsn("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1", c.anchorName())
}

// writeUntil writes WAL, which the stream passes, and makes checkpoints of the server, until
// done.
func (c *caseRun) writeUntil(what string, done func() bool) {
	c.t.Helper()
	harness.WaitFor(c.t, what, 2*harness.DefaultTimeout, func() (bool, error) {
		c.pg.Exec("SELECT pg_logical_emit_message(false, 'filler', repeat(md5(random()::text), 30000)) FROM generate_series(1, 4)")
		c.pg.Exec("CHECKPOINT")
		return done(), nil
	})
}

// said tells whether the log has the message.
func (c *caseRun) said(message string) bool {
	for _, line := range c.proc.Lines() {
		if line.Field("message") == message {
			return true
		}
	}
	return false
}

// begunAt waits for the anchor, and gives where it stands, with a row behind it.
func (c *caseRun) begunAt() checkpoint.LSN {
	c.t.Helper()
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	c.pg.Exec("INSERT INTO t VALUES (1)")
	c.fence()
	return c.anchorLSN()
}

// reachesOnly wants the anchor to stand behind old: what was before is refused, what is now
// can be read, and the stream went on.
func (c *caseRun) reachesOnly(old checkpoint.LSN) {
	c.t.Helper()
	oldest := c.anchorLSN()
	if oldest <= old {
		c.t.Errorf("the anchor is at %s, as before", oldest)
	}
	if code, _, stderr := c.command("replay", "--from-lsn", old.String(), "--dry-run"); code != 4 || !strings.Contains(stderr, "the oldest LSN available is") || !strings.Contains(stderr, "and the oldest time") {
		c.t.Errorf("from where the anchor was: exit code %d, %s; want 4", code, stderr)
	}
	c.pg.Exec("INSERT INTO t VALUES (2)")
	c.fence()
	from := c.anchorLSN()
	if r := c.mustReplay("--from-lsn", from.String(), "--table", "public.t", "--dry-run"); r.Records > 2 {
		c.t.Errorf("%d records behind %s", r.Records, from)
	}
	c.kafka.WaitCommitted(c.t, c.name+".public.t", 2)
}

func TestAnchorLetsGoAboveMaxRetainedWAL(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"source": caseMap{"max-retained-wal": "2MiB"}})
	old := c.begunAt()
	c.writeUntil("the anchor to let go", func() bool {
		return c.said("source.max-retained-wal is reached and the anchor let go of its WAL: replay reaches back only to here")
	})
	c.reachesOnly(old)
}

// A replay that stands still keeps the anchor where it is, until the server is short of room.
func TestAnchorLetsGoBeforeTheServerRunsShortOfWALRoom(t *testing.T) {
	c := caseNew(t, harness.Dedicated(), harness.Setting("max_slot_wal_keep_size", "96MB"))
	old := c.begunAt()
	replaying := c.standingReplay(old)
	kept := func() bool {
		return c.pg.Value("SELECT pg_current_wal_lsn() - restart_lsn > 76 * 1048576 FROM pg_replication_slots WHERE slot_name = $1", c.anchorName()) == "t"
	}
	c.writeUntil("three quarters of the room to be used up", kept)
	c.proc.WaitLog(harness.DefaultTimeout, harness.Field("message", "max_slot_wal_keep_size is nearly reached and the anchor let go of its WAL: replay reaches back only to here"))
	if lost := c.pg.Value("SELECT count(*) FROM pg_replication_slots WHERE wal_status = 'lost'"); lost != "0" {
		t.Errorf("%s slots were lost", lost)
	}
	// Whoever has begun reads on from what it holds itself.
	replaying.Resume()
	if code := replaying.Wait(2 * harness.DefaultTimeout); code != 0 {
		t.Errorf("the replay ended with exit code %d: %s", code, replaying.Stderr())
	}
	c.reachesOnly(old)
}

// standingReplay starts a replay and stops it when it has its slot.
func (c *caseRun) standingReplay(from checkpoint.LSN) *harness.Proc {
	c.t.Helper()
	p := harness.StartProgram(c.t, harness.Binary(c.t), nil, "replay", "-c", c.file(), "--from-lsn", from.String(), "-o", "json")
	c.pg.WaitValue("1", "SELECT count(*) FROM pg_replication_slots WHERE temporary AND confirmed_flush_lsn IS NOT NULL AND slot_name LIKE $1", "walrelay_"+c.name+"_replay_%")
	p.Pause()
	return p
}

func TestAnchorThatIsDroppedOrLostIsMadeAnew(t *testing.T) {
	c := caseNew(t, harness.Dedicated())
	old := c.begunAt()
	c.pg.Exec("SELECT pg_drop_replication_slot($1)", c.anchorName())
	c.proc.WaitLog(harness.DefaultTimeout, harness.Field("message", "the anchor was dropped and is made anew: replay reaches back only to here"))
	c.reachesOnly(old)
	if harness.DefaultMajor(t) < 18 {
		t.Log("idle_replication_slot_timeout, by which an anchor can be lost without the slot, came with 18")
		return
	}
	old = c.anchorLSN()
	c.pg.Exec("ALTER SYSTEM SET idle_replication_slot_timeout = '1s'")
	c.pg.Exec("SELECT pg_reload_conf()")
	c.writeUntil("the anchor to be lost", func() bool { return c.said("the anchor was lost and is made anew: replay reaches back only to here") })
	c.pg.Exec("ALTER SYSTEM RESET idle_replication_slot_timeout")
	c.pg.Exec("SELECT pg_reload_conf()")
	if oldest := c.anchorLSN(); oldest <= old {
		t.Errorf("the anchor is at %s, as before", oldest)
	}
}

func TestAnchorTrailsByTime(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"replay": caseMap{"retain-time": "4s"}})
	old := c.begunAt()
	c.writeUntil("the anchor to move", func() bool { return c.anchorLSN() > old })
	c.stop()
	c.quiet() // it moved, and did not let go
	c.start()
	c.reachesOnly(old)
}

func TestAnchorTrailsByWALAndWaitsForAReplay(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"replay": caseMap{"retain-wal": "1MiB"}, "batch": caseMap{"max-records": 10}, "admin": caseMap{"listen": "127.0.0.1:0"}})
	old := c.begunAt()
	replaying := c.standingReplay(old)
	held := c.lsn("SELECT min(confirmed_flush_lsn) FROM pg_replication_slots WHERE temporary AND slot_name LIKE $1", "walrelay_"+c.name+"_replay_%")
	// Ten times the window, in steps that the anchor would follow: the status tells that it has
	// looked, several times.
	looks := map[int64]bool{}
	c.writeUntil("the anchor to keep ten windows", func() bool {
		var status struct {
			Replay relay.ReplayStatus `json:"replay"`
		}
		_, body := c.get(c.admin() + "/status")
		if err := json.Unmarshal([]byte(body), &status); err != nil {
			t.Fatal(err)
		}
		if status.Replay.Retained > 10<<20 {
			looks[status.Replay.Retained] = true
		}
		return len(looks) == 4
	})
	if at := c.anchorLSN(); at > held {
		t.Errorf("the anchor went on to %s, past a replay at %s", at, held)
	}
	replaying.Resume()
	if code := replaying.Wait(2 * harness.DefaultTimeout); code != 0 {
		t.Fatalf("the replay ended with exit code %d: %s", code, replaying.Stderr())
	}
	c.writeUntil("the anchor to go on", func() bool { return c.anchorLSN() > held })
	c.quiet()
}

// The moment at which the anchor was made is a time that replay reaches, though nothing was
// committed before it.
func TestReplayReachesBackToTheMomentOfTheAnchor(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	made := c.clock()
	c.pg.Exec("INSERT INTO t VALUES (1), (2)")
	c.fence()
	if r := c.mustReplay("--from-time", made, "--table", "public.t"); r.Records != 2 {
		t.Errorf("%d records since %s, want 2", r.Records, made)
	}
	if code, _, stderr := c.command("replay", "--from-time", "2001-01-01T00:00:00Z"); code != 4 || !strings.Contains(stderr, "and the oldest time 20") {
		t.Errorf("before it: exit code %d, %s; want 4 and a time", code, stderr)
	}
	// The next instance knows it from the checkpoint.
	c.stop()
	c.start()
	c.fence()
	if r := c.mustReplay("--from-time", made, "--table", "public.t", "--dry-run"); r.Records != 2 {
		t.Errorf("after a restart: %d records since %s, want 2", r.Records, made)
	}
	c.quiet()
}

// killedReplay starts a replay that kills itself in its nth Kafka transaction with
// records, and gives its id.
func (c *caseRun) killedReplay(n int, args ...string) string {
	c.t.Helper()
	env := killpoint.Env + "=" + killpoint.Spec(killpoint.FirstProduced, n)
	code, _, stderr := c.commandWith([]string{env}, append([]string{"replay"}, args...)...)
	if code != -1 {
		c.t.Fatalf("the replay ended with exit code %d instead of killing itself: %s", code, stderr)
	}
	_, rest, _ := strings.Cut(stderr, `"replay":"`)
	id, _, _ := strings.Cut(rest, `"`)
	return id
}

func TestResumeGoesOnWithWhatWasBegunAndNothingElse(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"batch": caseMap{"max-records": 10}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	from := c.walEnd().String()
	for i := range 10 {
		c.pg.Exec("INSERT INTO t SELECT g FROM generate_series($1::int, $1::int + 9) g", 10*i)
	}
	c.fence()
	middle := c.walEnd().String()
	c.pg.Exec("INSERT INTO t VALUES (1000)")
	c.fence()
	begun := []string{"--from-lsn", from, "--table", "public.t", "--topic-prefix", c.name + "again"}
	id := c.killedReplay(3, begun...)
	// Without an end it ends where the WAL ended when it began, however late it is resumed.
	c.pg.Exec("INSERT INTO t VALUES (1001)")
	c.fence()
	for _, other := range [][]string{
		{"--from-lsn", middle, "--table", "public.t", "--topic-prefix", c.name + "again"},
		{"--from-lsn", from, "--to-lsn", middle, "--table", "public.t", "--topic-prefix", c.name + "again"},
		{"--from-lsn", from, "--topic-prefix", c.name + "again"},
		{"--from-lsn", from, "--table", "public.t"},
		{"--from-lsn", from, "--table", "public.t", "--in-place", "--yes"},
		{"--from-time", "2026-01-01T00:00:00Z", "--table", "public.t", "--topic-prefix", c.name + "again"},
	} {
		if code, _, stderr := c.command(append([]string{"replay", "--resume", id}, other...)...); code != 4 || !strings.Contains(stderr, "was begun with --from-lsn "+from) {
			t.Errorf("resumed with %v: exit code %d, %s; want 4", other, code, stderr)
		}
	}
	if code, _, stderr := c.command(append([]string{"replay", "--resume", "20260101-000000-aaaaaa"}, begun...)...); code != 4 || !strings.Contains(stderr, "has no checkpoint") {
		t.Errorf("an id that there never was: exit code %d, %s; want 4", code, stderr)
	}
	rest := c.mustReplay(append([]string{"--resume", id, "--dry-run"}, begun...)...)
	done := c.mustReplay(append([]string{"--resume", id}, begun...)...)
	if rest.Records != done.Records || done.Records == 0 || done.Records > 91 {
		t.Errorf("the dry run of the rest counts %d records, the rest has %d", rest.Records, done.Records)
	}
	topic := c.name + "again.public.t"
	if n := len(c.kafka.WaitCommitted(t, topic, 101)); n != 101 {
		t.Errorf("%d records in the replay, want 101", n)
	}
	if again := c.mustReplay(append([]string{"--resume", id}, begun...)...); again.Records != 0 || len(c.kafka.Committed(t, topic)) != 101 {
		t.Errorf("resumed after its end: %d records", again.Records)
	}
	c.quiet()
}

func TestResumeIsRefusedWhenTheAnchorHasPassed(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"batch": caseMap{"max-records": 10}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	from := c.walEnd().String()
	c.pg.Exec("INSERT INTO t SELECT generate_series(1, 100)")
	c.fence()
	id := c.killedReplay(3, "--from-lsn", from)
	c.stop()
	c.pg.WaitValue("0", "SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()")
	c.pg.Exec("SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())", c.anchorName())
	code, _, stderr := c.command("replay", "--from-lsn", from, "--resume", id)
	if code != 4 || !strings.Contains(stderr, "replay "+id+" stands at") || !strings.Contains(stderr, c.anchorLSN().String()) {
		t.Errorf("exit code %d, %s; want 4", code, stderr)
	}
}

package e2e

import (
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
)

// runFrom starts an instance with --from-lsn. env are variables in the form NAME=value.
func (c *caseRun) runFrom(lsn string, env ...string) *harness.Proc {
	c.t.Helper()
	args := append(slices.Clone(env), harness.Binary(c.t), "run", "-c", c.file(), "--from-lsn", lsn)
	c.proc = harness.StartProgram(c.t, "env", nil, args...)
	return c.proc
}

// A service manager starts a killed instance with the same command line.
func TestRunFromLSNDeliversAgainOnceHoweverOftenItIsStarted(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	c.pg.Exec("INSERT INTO t VALUES (1)")
	c.fence()
	back := c.walEnd().String()
	c.pg.Exec("INSERT INTO t VALUES (2)")
	c.pg.Exec("INSERT INTO t VALUES (3)")
	c.fence()
	topic := c.name + ".public.t"
	c.kafka.WaitCommitted(t, topic, 3)

	// Beside a live instance nothing is moved.
	if code, _, stderr := c.command("run", "--from-lsn", back); code != 4 || !strings.Contains(stderr, "an instance of this connector runs") {
		t.Errorf("beside a live instance: exit code %d, %s", code, stderr)
	}
	c.stop()

	// Killed in the middle of what comes again, and started until it is through.
	c.set(caseMap{"batch": caseMap{"max-records": 1}})
	c.runFrom(back, killpoint.Env+"="+killpoint.Spec(killpoint.FirstProduced, 2))
	c.streaming()
	c.killed()
	const done = "--from-lsn was done by an earlier start and is recorded in the checkpoint: going on; to go back to it again: walrelay checkpoint set -c FILE --lsn"
	for range 2 {
		p := c.runFrom(back)
		p.WaitLog(harness.DefaultTimeout, harness.Field("message", done))
		c.streaming()
		c.fence()
		p.Kill()
	}
	c.pg.Exec("INSERT INTO t VALUES (4)")
	c.runFrom(back)
	c.streaming()
	c.fence()
	want := []string{`{"id":1}`, `{"id":2}`, `{"id":2}`, `{"id":3}`, `{"id":3}`, `{"id":4}`}
	got := c.kafka.WaitCommitted(t, topic, len(want))
	if keys := replayKeys(got); !slices.Equal(keys, want) {
		t.Errorf("delivered %v, want %v", keys, want)
	}
	// A rewind is no replay: the records are the live ones, without a mark.
	sameButReplay(t, []*kgo.Record{got[1], got[3]}, []*kgo.Record{got[2], got[4]}, "")
	if at := c.checkpoint().Rewound.String(); at != back {
		t.Errorf("the checkpoint records --from-lsn %s, want %s", at, back)
	}
	c.stop()

	// Another LSN is another rewind.
	next := c.walEnd().String()
	c.pg.Exec("INSERT INTO t VALUES (5)")
	c.start()
	c.fence()
	c.stop()
	c.runFrom(next)
	c.streaming()
	c.fence()
	want = append(want, `{"id":5}`, `{"id":5}`)
	if keys := replayKeys(c.kafka.WaitCommitted(t, topic, len(want))); !slices.Equal(keys, want) {
		t.Errorf("after another rewind: %v, want %v", keys, want)
	}
	c.stop()
}

func TestRunFromLSNOnlyGoesBack(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	if code, _, stderr := c.command("run", "--from-lsn", c.walEnd().String()); code != 4 || !strings.Contains(stderr, "there is no checkpoint") {
		t.Errorf("before the first start: exit code %d, %s", code, stderr)
	}
	if n := c.pg.Value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"); n != "0" {
		t.Errorf("a refused start made %s slots", n)
	}
	c.start()
	c.anchored()
	c.fence()
	c.stop()
	c.pg.Exec("INSERT INTO t VALUES (1)")
	before := c.checkpoint()
	for _, tt := range []struct {
		lsn  string
		code int
		says string
	}{
		{c.walEnd().String(), 4, "is ahead of the checkpoint"},
		{"0/1", 4, "anchor"},
		{"FFFF/0", 1, "beyond the end of the WAL"},
		{"x", 2, "neither an LSN"},
	} {
		if code, _, stderr := c.command("run", "--from-lsn", tt.lsn); code != tt.code || !strings.Contains(stderr, tt.says) {
			t.Errorf("--from-lsn %s: exit code %d, want %d and %q: %s", tt.lsn, code, tt.code, tt.says, stderr)
		}
	}
	if after := c.checkpoint(); after.Position != before.Position || after.Rewound != 0 {
		t.Errorf("refused starts moved the checkpoint from %v to %v, rewound %s", before.Position, after.Position, after.Rewound)
	}
	c.start()
	c.fence()
	c.kafka.WaitCommitted(t, c.name+".public.t", 1)
	c.quiet()
}

// A slot that is behind the place sends again what was delivered and not marked: going back,
// or to where the checkpoint is, does not move it over those rows.
func TestGoingBackLeavesNoDeliveredRowUnmarked(t *testing.T) {
	for _, tt := range []struct {
		name   string
		move   func(c *caseRun, back string)
		events int
	}{
		{"run --from-lsn", func(c *caseRun, back string) { c.runFrom(back) }, 4},
		{"checkpoint set", func(c *caseRun, back string) { c.mustSet("--lsn", back); c.launch() }, 4},
		{"checkpoint set to where it is", func(c *caseRun, _ string) {
			c.mustSet("--lsn", c.checkpoint().Position.LSN.String())
			c.launch()
		}, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := afterNew(t, caseOutbox, caseMap{"after": "mark"})
			c.refuseMarks("true")
			c.start()
			c.anchored()
			c.pg.Exec(c.insertEvent("a", 1))
			c.pg.Exec(c.insertEvent("a", 2))
			c.fence()
			back := c.walEnd().String()
			c.pg.Exec(c.insertEvent("a", 3))
			c.fence()
			c.proc.Kill()
			c.pg.Exec("DROP TRIGGER refuse ON outbox")
			c.pg.WaitValue("f", "SELECT active FROM pg_replication_slots WHERE slot_name = $1", "walrelay_"+c.name)
			tt.move(c, back)
			c.streaming()
			c.waitMarked("1,2,3")
			c.fence()
			if n := len(c.kafka.Committed(t, c.eventTopic())); n != tt.events {
				t.Errorf("%d events, want %d", n, tt.events)
			}
			end := c.walEnd()
			c.waitConfirmed(end)
			c.stop()
		})
	}
}

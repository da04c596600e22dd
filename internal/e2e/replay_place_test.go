package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/harness"
)

// clock is the server's time now, as --from-time takes it.
func (c *caseRun) clock() string {
	c.t.Helper()
	return c.pg.Value(`SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')`)
}

func TestReplayTakesTimesAsItsBounds(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	var times, ends [6]string // times[i] and ends[i] are behind the commit of row i, and before that of row i+1
	for i := 1; i <= 5; i++ {
		c.pg.Exec("INSERT INTO t VALUES ($1)", i)
		times[i], ends[i] = c.clock(), c.walEnd().String()
	}
	c.fence()
	c.kafka.WaitCommitted(t, c.name+".public.t", 5)
	keys := func(from, to int) (keys []string) {
		for i := from; i <= to; i++ {
			keys = append(keys, fmt.Sprintf(`{"id":%d}`, i))
		}
		return keys
	}
	// To the microsecond: the time of a commit itself is in the range at both ends.
	third := c.mustReplay("--from-time", times[2], "--to-time", times[3], "--table", "public.t", "--dry-run")
	if len(third.Topics) != 1 || third.Records != 1 || third.Topics[0].FirstTime == nil {
		t.Fatalf("between row 2 and row 4: %+v", third)
	}
	exact := *third.Topics[0].FirstTime
	if stamp := exact.UTC().Format("2006-01-02T15:04:05.000000Z"); stamp < times[2] || stamp > times[3] {
		t.Errorf("row 3 was committed at %s, between %s and %s", stamp, times[2], times[3])
	}
	at := func(d time.Duration) string { return exact.Add(d).UTC().Format(time.RFC3339Nano) }
	for i, tt := range []struct {
		args []string
		want []string
	}{
		{[]string{"--from-time", times[2]}, keys(3, 5)},
		{[]string{"--from-time", times[1], "--to-time", times[4]}, keys(2, 4)},
		{[]string{"--from-time", times[1], "--to-time", "2999-01-01T00:00:00+02:00"}, keys(2, 5)},
		{[]string{"--from-time", at(0), "--to-time", at(0)}, keys(3, 3)},
		{[]string{"--from-time", at(time.Microsecond)}, keys(4, 5)},
		{[]string{"--from-time", times[1], "--to-time", at(-time.Microsecond)}, keys(2, 2)},
		{[]string{"--from-time", times[5]}, nil},
		{[]string{"--from-lsn", third.Topics[0].FirstLSN, "--to-time", times[4]}, keys(3, 4)},
		{[]string{"--from-lsn", third.Topics[0].FirstLSN, "--to-time", times[2]}, nil}, // nothing was committed between
		{[]string{"--from-time", times[3], "--to-lsn", ends[3]}, nil},                  // and here
	} {
		prefix := fmt.Sprintf("%stime%d", c.name, i)
		args := append(tt.args, "--topic-prefix", prefix, "--table", "public.t")
		dry := c.mustReplay(append(args, "--dry-run")...)
		done := c.mustReplay(args...)
		if dry.Records != int64(len(tt.want)) || done.Records != dry.Records {
			t.Errorf("%v: the dry run counts %d, the replay %d, want %d", tt.args, dry.Records, done.Records, len(tt.want))
		}
		if len(tt.want) > 0 {
			if got := replayKeys(c.kafka.WaitCommitted(t, prefix+".public.t", len(tt.want))); !slices.Equal(got, tt.want) {
				t.Errorf("%v: replayed %v, want %v", tt.args, got, tt.want)
			}
		}
	}
	for _, tt := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--from-time", "2001-01-01T00:00:00Z"}, 4, "the oldest LSN available is"},
		{[]string{"--from-time", times[3], "--to-time", times[2]}, 2, "ends before it begins"},
		{[]string{"--from-lsn", third.Topics[0].FirstLSN, "--to-time", times[1]}, 2, "is before --from-lsn"},
		{[]string{"--from-time", times[3], "--to-lsn", ends[2]}, 2, "is before --from-time"},
		{[]string{"--from-time", "2999-01-01T00:00:00Z", "--to-lsn", ends[2]}, 2, "is before --from-time"},
		{[]string{"--from-time", "yesterday"}, 2, "is not a time"},
		{[]string{"--from-time", times[1], "--from-lsn", "0/1"}, 2, "from-time"},
		{nil, 2, "from-time"},
	} {
		if code, _, stderr := c.command(append([]string{"replay"}, tt.args...)...); code != tt.code || !strings.Contains(stderr, tt.says) {
			t.Errorf("%v: exit code %d, want %d and %q: %s", tt.args, code, tt.code, tt.says, stderr)
		}
	}
	c.quiet()
}

func TestReplayInPlaceAsksAndGoesToTheLiveTopics(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.start()
	c.anchored()
	c.pg.Exec("INSERT INTO t VALUES (0, 'before')")
	c.fence()
	begin := c.walEnd().String()
	c.pg.Exec("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 20) g")
	c.pg.Exec("UPDATE t SET v = 'y' WHERE id IN (1, 2)")
	c.pg.Exec("DELETE FROM t WHERE id = 20")
	c.fence()
	topic := c.name + ".public.t"
	const all, ranged = 25, 24 // the delete is two records
	live := c.kafka.WaitCommitted(t, topic, all)
	args := []string{"replay", "--from-lsn", begin, "--in-place", "--table", "public.t", "-o", "json"}

	// Nobody answers: nothing is done. A dry run needs no answer.
	if code, _, stderr := c.command(args...); code != 2 || !strings.Contains(stderr, "live topics") || !strings.Contains(stderr, "say --yes") {
		t.Errorf("without --yes: exit code %d, %s", code, stderr)
	}
	if code, _, stderr := c.answer("no", args...); code != 2 || !strings.Contains(stderr, "nothing was done") {
		t.Errorf("answered no: exit code %d, %s", code, stderr)
	}
	if code, _, stderr := c.command(append(args, "--topic-prefix", "x")...); code != 2 {
		t.Errorf("with --topic-prefix: exit code %d, %s", code, stderr)
	}
	if r := c.mustReplay(slices.Concat(args[1:6], []string{"--dry-run"})...); r.Records != ranged || !r.InPlace {
		t.Errorf("the dry run counts %d records, in place: %t", r.Records, r.InPlace)
	}
	if n := len(c.kafka.Committed(t, topic)); n != all {
		t.Fatalf("%d records are in the live topic without a yes", n-all)
	}

	r := c.mustReplay(slices.Concat(args[1:6], []string{"--yes"})...)
	again := c.marked(topic, r.ID, ranged)
	want := slices.DeleteFunc(slices.Clone(live), func(r *kgo.Record) bool { return string(r.Key) == `{"id":0}` })
	sameButReplay(t, want, again, r.ID)
	if code, _, stderr := c.answer("yes", args...); code != 0 {
		t.Errorf("answered yes: exit code %d, %s", code, stderr)
	}
	if n := len(c.kafka.WaitCommitted(t, topic, all+2*ranged)); n != all+2*ranged {
		t.Errorf("%d records are in the topic, want %d", n, all+2*ranged)
	}
	// The live instance went on, and marks nothing.
	c.pg.Exec("INSERT INTO t VALUES (100, 'after')")
	c.fence()
	c.kafka.WaitCommitted(t, topic, all+2*ranged+1)
	if n := len(c.marked(topic, "", all+1)); n != all+1 {
		t.Errorf("%d records are the live instance's, want %d", n, all+1)
	}
	c.quiet()
}

// answer runs a command that is answered on its standard input.
func (c *caseRun) answer(text string, args ...string) (code int, stdout, stderr string) {
	c.t.Helper()
	p := harness.StartProgram(c.t, "sh", nil, slices.Concat([]string{"-c", `echo ` + text + ` | "$0" "$@"`, harness.Binary(c.t)}, args, []string{"-c", c.file()})...)
	code = p.Wait(2 * harness.DefaultTimeout)
	return code, p.Stdout(), p.Stderr()
}

// marked waits for n records of a topic whose header replay is id.
func (c *caseRun) marked(topic, id string, n int) (in []*kgo.Record) {
	c.t.Helper()
	harness.WaitFor(c.t, fmt.Sprintf("%d records of replay %q", n, id), harness.DefaultTimeout, func() (bool, error) {
		in = slices.DeleteFunc(c.kafka.Committed(c.t, topic), func(r *kgo.Record) bool { return replayHeader(r, "replay") != id })
		return len(in) >= n, nil
	})
	return in
}

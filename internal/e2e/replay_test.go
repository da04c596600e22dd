package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/replay"
)

// command runs a command with the case's configuration and gives its exit code.
func (c *caseRun) command(args ...string) (code int, stdout, stderr string) {
	c.t.Helper()
	return c.commandWith(nil, args...)
}

// commandWith is command with variables in the form NAME=value.
func (c *caseRun) commandWith(env []string, args ...string) (code int, stdout, stderr string) {
	c.t.Helper()
	text, err := yaml.Marshal(c.config)
	if err != nil {
		c.t.Fatal(err)
	}
	file := filepath.Join(c.t.TempDir(), "walrelay.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		c.t.Fatal(err)
	}
	p := harness.StartProgram(c.t, "env", nil, slices.Concat(env, []string{harness.Binary(c.t)}, args, []string{"-c", file})...)
	code = p.Wait(2 * harness.DefaultTimeout)
	return code, p.Stdout(), p.Stderr()
}

// mustReplay runs a replay that succeeds.
func (c *caseRun) mustReplay(args ...string) (r replay.Report) {
	c.t.Helper()
	code, out, stderr := c.command(append([]string{"replay", "-o", "json"}, args...)...)
	if code != 0 {
		c.t.Fatalf("replay %v: exit code %d: %s", args, code, stderr)
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		c.t.Fatalf("replay printed %q: %v", out, err)
	}
	return r
}

// anchored waits until the connector has its anchor.
func (c *caseRun) anchored() {
	c.t.Helper()
	c.proc.WaitLog(harness.DefaultTimeout, harness.Field("message", "created the anchor: replay reaches back to here"))
}

func replayHeader(r *kgo.Record, name string) string {
	for _, h := range r.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}

// replayKeys gives the keys of records in the order of their positions.
func replayKeys(records []*kgo.Record) []string {
	slices.SortStableFunc(records, func(a, b *kgo.Record) int {
		return strings.Compare(replayHeader(a, "position"), replayHeader(b, "position"))
	})
	var keys []string
	for _, r := range records {
		keys = append(keys, string(r.Key))
	}
	return keys
}

// sameButReplay compares replayed records with live ones: all but the header replay.
func sameButReplay(t *testing.T, live, again []*kgo.Record, id string) {
	t.Helper()
	replayKeys(live)
	replayKeys(again)
	if len(live) != len(again) {
		t.Fatalf("%d records are replayed, %d were live", len(again), len(live))
	}
	for i, want := range live {
		got := again[i]
		if string(want.Key) != string(got.Key) || string(want.Value) != string(got.Value) || (want.Value == nil) != (got.Value == nil) || want.Partition != got.Partition {
			t.Errorf("record %d: partition %d %s %s, want %d %s %s", i, got.Partition, got.Key, got.Value, want.Partition, want.Key, want.Value)
		}
		if replayHeader(got, "replay") != id {
			t.Errorf("record %d has the header replay %q, want %q", i, replayHeader(got, "replay"), id)
		}
		rest := slices.DeleteFunc(slices.Clone(got.Headers), func(h kgo.RecordHeader) bool { return h.Key == "replay" })
		if !slices.EqualFunc(rest, want.Headers, func(a, b kgo.RecordHeader) bool { return a.Key == b.Key && string(a.Value) == string(b.Value) }) {
			t.Errorf("record %d has the headers %v, want %v", i, rest, want.Headers)
		}
	}
}

func TestReplayTakesItsBoundsAndItsRecordsFromTheLiveStream(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.pg.Exec("CREATE TABLE u (id int PRIMARY KEY, v text)")
	c.start()
	c.anchored()
	ends := make([]checkpoint.LSN, 6)
	for i := 1; i <= 5; i++ {
		c.pg.Exec("INSERT INTO t VALUES ($1, 'x')", i)
		c.fence() // a transaction of its own behind each
		ends[i] = c.walEnd()
	}
	live := c.kafka.WaitCommitted(t, c.name+".public.t", 5)
	commits := map[string]string{}
	for _, r := range live {
		lsn, _, _, err := checkpoint.ParseHeader(replayHeader(r, "position"))
		if err != nil {
			t.Fatal(err)
		}
		commits[string(r.Key)] = lsn.String()
	}
	c2, c4 := commits[`{"id":2}`], commits[`{"id":4}`]
	for i, tt := range []struct {
		args []string
		want []string
	}{
		{[]string{"--from-lsn", c2, "--to-lsn", ends[4].String()}, []string{`{"id":2}`, `{"id":3}`, `{"id":4}`}},
		{[]string{"--from-lsn", c2, "--to-lsn", c4}, []string{`{"id":2}`, `{"id":3}`}},
		{[]string{"--from-lsn", ends[2].String(), "--to-lsn", ends[4].String()}, []string{`{"id":3}`, `{"id":4}`}},
		{[]string{"--from-lsn", c4, "--to-lsn", c4}, nil},
	} {
		prefix := c.name + "again" + string(rune('a'+i))
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
	if n := c.pg.Value("SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()"); n != "0" {
		t.Errorf("%s temporary slots are left", n)
	}
	oldest := c.pg.Value("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1", "walrelay_"+c.name+"_anchor")
	code, _, stderr := c.command("replay", "--from-lsn", "0/1", "--topic-prefix", c.name+"old")
	if code != 4 || !strings.Contains(stderr, oldest) {
		t.Errorf("below the anchor: exit code %d, %s; want 4 and %s", code, stderr, oldest)
	}
	again := c.mustReplay("--from-lsn", oldest, "--topic-prefix", c.name+"all")
	sameButReplay(t, live, c.kafka.WaitCommitted(t, c.name+"all.public.t", 5), again.ID)
	if code, _, stderr := c.command("replay", "--from-lsn", "FFFF/0"); code != 1 || strings.Contains(stderr, "--resume") {
		t.Errorf("beyond the end of the WAL: exit code %d, want 1, and nothing to resume: %s", code, stderr)
	}
	if code, _, _ := c.command("replay", "--from-lsn", c4, "--to-lsn", c2); code != 2 {
		t.Errorf("an end before the start: exit code %d, want 2", code)
	}
	if code, _, _ := c.command("replay", "--from-lsn", c2, "--topic-prefix", c.name); code != 4 {
		t.Errorf("a live target: exit code %d, want 4", code)
	}
	c.quiet()
}

func TestReplayedRecordsAreTheLiveOnesByteForByte(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"outbox": []caseMap{{"table": "public.outbox", "topic": c.name + ".ev.{event_type}"}}})
	c.pg.Exec("CREATE TABLE w (id int PRIMARY KEY, n numeric, j json)")
	c.pg.Exec("CREATE TABLE u (id int PRIMARY KEY)")
	c.pg.Exec("CREATE TABLE outbox (event_id uuid PRIMARY KEY DEFAULT gen_random_uuid(), event_type text, aggregate_id text, payload jsonb)")
	c.start()
	c.anchored()
	begin := c.walEnd()
	c.pg.Exec("INSERT INTO w SELECT g, g * 1.50, '{ \"a\":1 }' FROM generate_series(1, 200) g")
	conn := c.session()
	c.exec(conn, "BEGIN; INSERT INTO u VALUES (1); UPDATE w SET n = 7 WHERE id < 20; UPDATE w SET id = 1001 WHERE id = 1; DELETE FROM w WHERE id = 2; INSERT INTO outbox (event_type, aggregate_id, payload) VALUES ('made', '7', '{\"x\": 1}'); COMMIT")
	c.exec(conn, "TRUNCATE u")
	c.pg.Exec("ALTER TABLE w ADD COLUMN x int DEFAULT 9")
	c.fence()
	r := c.mustReplay("--from-lsn", begin.String())
	if r.Transactions < 3 {
		t.Errorf("%d transactions are replayed", r.Transactions)
	}
	for _, topic := range []string{c.name + ".public.w", c.name + ".public.u", c.name + ".message", c.name + ".ev.made"} {
		target := r.Prefix + strings.TrimPrefix(topic, c.name)
		if strings.Contains(topic, ".ev.") {
			target = r.Prefix + "." + topic
		}
		live := c.kafka.Committed(t, topic)
		sameButReplay(t, live, c.kafka.WaitCommitted(t, target, len(live)), r.ID)
	}
	c.quiet()
}

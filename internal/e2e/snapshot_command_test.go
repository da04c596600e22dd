package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

func TestATableIsReadAgainBesideTheStreamWhenAsked(t *testing.T) {
	const rows = 10_000
	b := newSnapBed(t, countersSQL(rows))
	b.set("snapshot.chunk-rows", 500)
	p := b.stream()
	b.waitTable(p, "public.t", allRows)
	w := b.countUp(rows)
	first := b.reads(b.log(), "t")

	code, said := b.ask(p, "--table", "public.t", "--where", "id <")
	if code != 1 && code != 2 || !strings.Contains(said, "syntax error") {
		t.Errorf("a condition that is none: exit code %d: %s", code, said)
	}
	if code, said := b.ask(p, "--table", "public.t", "--where", "id <= 1000", "--replace"); code != 2 {
		t.Errorf("--replace with --where: exit code %d, want 2: %s", code, said)
	}
	if code, said := b.ask(p, "--table", "public.nothing"); code == 0 {
		t.Errorf("a table that is not there: exit code 0: %s", said)
	}
	b.mustAsk(p, "--table", "public.t", "--where", "id <= 1000")
	var log *cdctest.Log
	harness.WaitFor(t, "rows to be read again", snapLong, func() (bool, error) {
		log = b.log()
		return b.reads(log, "t") > first && b.status(p).Snapshot.Tables["public.t"].State == "done", nil
	})
	w.end()
	log = b.settled(p)
	var again []int
	for id, ops := range b.ops(log, "t") {
		if n := strings.Count(ops, "r"); n > 1 {
			again = append(again, id)
			if n > 2 {
				t.Errorf("id %d was read %d times", id, n)
			}
		}
	}
	if len(again) == 0 || slices.Max(again) > 1000 {
		t.Errorf("%d rows were read again, the last one %d; want some up to 1000", len(again), slices.Max(append(again, 0)))
	}
	b.folds(log, "n", snapTable("t", "id:int4:key n:int4"))

	// To a connector that does not run.
	b.stop(p)
	before := b.reads(log, "t")
	b.mustAsk(p, "--table", "public.t")
	b.untilCaughtUp()
	log = b.log()
	left, _ := strconv.Atoi(b.pg.Value("SELECT count(*) FROM t"))
	if n := b.reads(log, "t"); n != before+left {
		t.Errorf("%d rows were read by the next run, want all %d", n-before, left)
	}
	b.folds(log, "n", snapTable("t", "id:int4:key n:int4"))
}

// TestARequestWithReplaceTakesRowsThatTheTopicShouldNotHave begins with a topic that has
// rows which the table lost while nobody listened.
func TestARequestWithReplaceTakesRowsThatTheTopicShouldNotHave(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 1000)`)
	p := b.stream()
	b.waitTable(p, "public.t", allRows)
	b.pg.Exec(fmt.Sprintf("ALTER PUBLICATION %s SET (publish = 'insert')", b.slot()))
	b.pg.Exec("DELETE FROM t WHERE id <= 400")
	b.pg.Exec(fmt.Sprintf("ALTER PUBLICATION %s SET (publish = 'insert, update, delete, truncate')", b.slot()))
	b.mustAsk(p, "--table", "public.t", "--replace")
	harness.WaitFor(t, "the table to be read again", snapLong, func() (bool, error) { return b.reads(b.log(), "t") == 1600, nil })
	log := b.settled(p)
	b.folds(log, "", snapTable("t", "id:int4:key"))
	truncates := 0
	for _, r := range b.records(log, "t") {
		if r.Op == "t" {
			truncates++
			if !r.Source.Snapshot || !strings.HasSuffix(r.Headers["position"], "-snapshot") || r.Key != nil {
				t.Errorf("%s: the truncate of a replacement: key %q, position %s: %s", r.Where(), r.Key, r.Headers["position"], r.Value)
			}
		}
	}
	if truncates != 6 {
		t.Errorf("%d truncates, want one in each of 6 partitions", truncates)
	}
}

// TestARequestSurvivesAKill kills the connector in the middle of what was asked for.
func TestARequestSurvivesAKill(t *testing.T) {
	const rows = 50_000
	b := newSnapBed(t, fmt.Sprintf(`CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, %d)`, rows))
	b.set("snapshot.chunk-rows", 500)
	p := b.stream()
	b.waitTable(p, "public.t", allRows)
	b.mustAsk(p, "--table", "public.t")
	harness.WaitFor(t, "some rows to be read again", snapLong, func() (bool, error) {
		log, err := cdctest.ReadCommitted(t.Context(), regexp.QuoteMeta(b.topic("t")), kgo.SeedBrokers(b.kafka.Brokers()...))
		return err == nil && len(log.Records) > rows, err
	})
	p.Kill()
	b.untilCaughtUp()
	log := b.log()
	b.wantOps(log, "t", 1, rows, "rr")
}

const snapOutbox = `(id bigserial PRIMARY KEY, event_id uuid NOT NULL DEFAULT gen_random_uuid(), aggregate_id text NOT NULL, event_type text NOT NULL,
	payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now()%s)`

// newOutboxBed has an outbox with 100 rows, the events of 10 aggregates; extra is more of
// its columns.
func newOutboxBed(t *testing.T, extra string) *snapBed {
	t.Helper()
	b := newSnapBed(t, "CREATE TABLE outbox "+fmt.Sprintf(snapOutbox, extra)+`;
		INSERT INTO outbox (aggregate_id, event_type, payload) SELECT 'a' || g % 10, 'x', jsonb_build_object('n', g) FROM generate_series(1, 100) g`)
	b.set("outbox", []map[string]any{{"table": "public.outbox", "topic": b.name + ".events"}})
	b.set("snapshot.chunk-rows", 7)
	return b
}

func (b *snapBed) setOutbox(key string, value any) {
	b.yaml["outbox"].([]map[string]any)[0][key] = value
}

// events gives the numbers in the payloads, by partition and offset, and checks that
// those of each key rise: rows that are read go out in the order of their ids.
func (b *snapBed) events(log *cdctest.Log) (all []int) {
	b.t.Helper()
	last := map[string]int{}
	for _, r := range b.topicRecords(log, b.name+".events") {
		text := regexp.MustCompile(`"n": (\d+)`).FindSubmatch(r.Value)
		if text == nil {
			b.t.Fatalf("%s is no event of the test: %s", r.Where(), r.Value)
		}
		n, _ := strconv.Atoi(string(text[1]))
		if n <= last[string(r.Key)] {
			b.t.Errorf("%s: event %d of %s comes behind %d", r.Where(), n, r.Key, last[string(r.Key)])
		}
		last[string(r.Key)] = n
		all = append(all, n)
	}
	slices.Sort(all)
	return all
}

func TestAnOutboxsBacklogGoesOutAsTheConfigurationSays(t *testing.T) {
	marked := ", published_at timestamptz"
	for _, tt := range []struct {
		name, extra, mode string
		before            string
		want              []int
	}{
		{"pending", marked, "pending", "UPDATE outbox SET published_at = now() WHERE id <= 40", append(faultRange(41, 100), 101)},
		{"pending by itself", marked, "", "UPDATE outbox SET published_at = now() WHERE id <= 40", append(faultRange(41, 100), 101)},
		{"pending with a status", ", status text DEFAULT 'new'", "pending", "UPDATE outbox SET status = 'processed' WHERE id <= 40", append(faultRange(41, 100), 101)},
		{"all", "", "all", "", faultRange(1, 101)},
		{"all of a marked one", marked, "all", "UPDATE outbox SET published_at = now() WHERE id <= 40", faultRange(1, 101)},
		{"none", "", "none", "", []int{101}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newOutboxBed(t, tt.extra)
			if tt.before != "" {
				b.pg.Exec(tt.before)
			}
			if tt.mode != "" {
				b.setOutbox("snapshot", tt.mode)
			}
			p := b.stream()
			if tt.mode != "none" {
				b.waitTable(p, "public.outbox", allRows)
			}
			b.pg.Exec(`INSERT INTO outbox (aggregate_id, event_type, payload) VALUES ('a1', 'x', '{"n": 101}')`)
			if got := b.events(b.settled(p)); !slices.Equal(got, tt.want) {
				t.Errorf("events %s, want %s", faultShort(got), faultShort(tt.want))
			}
			// A restart repeats nothing.
			b.stop(p)
			b.untilCaughtUp()
			if got := b.events(b.log()); !slices.Equal(got, tt.want) {
				t.Errorf("events after a restart %s, want %s", faultShort(got), faultShort(tt.want))
			}
		})
	}
}

func TestAnOutboxOfWhichNobodyKnowsWhatWasPublishedIsRefused(t *testing.T) {
	b := newOutboxBed(t, "")
	b.refused(b.start(), "public.outbox", "snapshot")
}

// TestEventsInsertedWhileTheBacklogIsReadGoOutOnce inserts while the backlog's chunk is
// held: the rows are in the stream, and some of them in the chunk too.
func TestEventsInsertedWhileTheBacklogIsReadGoOutOnce(t *testing.T) {
	for _, held := range []gateAct{gateHold, gateHoldReply} {
		t.Run(fmt.Sprint("gate ", held), func(t *testing.T) {
			b := newOutboxBed(t, ", published_at timestamptz")
			b.set("snapshot.chunk-rows", 1000)
			b.gate.on(gateOnce(held, rowsOf("outbox")))
			p := b.start()
			b.gate.waitHeld(t)
			b.pg.Exec(`INSERT INTO outbox (aggregate_id, event_type, payload) SELECT 'b' || g % 10, 'x', jsonb_build_object('n', g) FROM generate_series(101, 150) g`)
			// The stream waits for the backlog, so that each aggregate's events keep their order.
			if got := b.events(b.log()); len(got) > 0 {
				t.Errorf("events %s went out before the backlog", faultShort(got))
			}
			b.gate.release()
			b.waitTable(p, "public.outbox", allRows)
			if got := b.events(b.settled(p)); !slices.Equal(got, faultRange(1, 150)) {
				t.Errorf("events %s, want 1 to 150 once each", faultShort(got))
			}
		})
	}
}

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
)

// holdFence keeps a start from its fence: only a transactional producer asks for its
// coordinator, and not the one that notes the slot's creation.
func holdFence(int) faultAct { return faultHold }

// Nothing tells of such rows which of them were published, or one from the other. What is
// written once the slot is there is the stream's, however early the tables are looked at.
func TestRowsWrittenBetweenSlotAndLookAreNoBacklog(t *testing.T) {
	for name, columns := range map[string]string{
		"no mark": "event_id text PRIMARY KEY, event_type text, payload json",
		"no key":  "event_id text, event_type text, payload json, published_at timestamptz",
	} {
		t.Run(name, func(t *testing.T) {
			b, w := newWireBed(t, "CREATE TABLE outbox ("+columns+")")
			topic := "early." + b.name
			b.set("snapshot.mode", "initial")
			b.set("outbox", []any{map[string]any{"table": "public.outbox", "topic": topic}})
			w.on(faultKeyCoordinator, holdFence)
			p := b.start()
			harness.WaitFor(t, "the fence to be held", faultLong, func() (bool, error) { return w.heldNow() > 0, nil })
			b.pg.Exec(`INSERT INTO outbox VALUES ('e1', 't', '{"n":1}'), ('e2', 't', '{"n":2}')`)
			w.release()
			faultStreaming(p)
			b.pg.Exec(`INSERT INTO outbox VALUES ('e3', 't', '{"n":3}')`)
			var got []string
			for _, r := range b.kafka.WaitCommitted(t, topic, 3) {
				got = append(got, string(r.Value))
			}
			slices.Sort(got)
			if want := []string{`{"n":1}`, `{"n":2}`, `{"n":3}`}; !slices.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
			b.stop(p)
			if n := len(b.kafka.Committed(t, topic)); n != 3 {
				t.Errorf("%d records at the end", n)
			}
		})
	}
}

// A first start that ends before its first delivery has made the slot all the same. What was
// there before goes out before what the slot sends, whoever goes on.
func TestAFirstStartThatIsKilledKeepsTheOrderOfTheBacklog(t *testing.T) {
	const aggregates, old, all = 5, 60, 100
	insert := fmt.Sprintf(`INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload)
		SELECT gen_random_uuid(), 'a' || a, s, 't', to_jsonb(s) FROM generate_series(%%d, %%d) s, generate_series(1, %d) a ORDER BY s, a`, aggregates)
	for name, step := range map[string]killpoint.Step{"before the fence": 0, "first checkpoint begun": killpoint.Begun, "first checkpoint committed": killpoint.Committed} {
		t.Run(name, func(t *testing.T) {
			b, w := newWireBed(t, caseOutbox+"; "+fmt.Sprintf(insert, 1, old))
			topic := "first." + b.name
			b.set("snapshot.mode", "initial")
			b.set("batch.max-records", 20)
			b.set("outbox", []any{map[string]any{"table": "public.outbox", "topic": topic}})
			w.on(faultKeyCoordinator, holdFence)
			spec := ""
			if step > 0 {
				spec = killpoint.Spec(step, 1)
			}
			c := &caseRun{t: t, config: b.yaml}
			p := c.launch(killpoint.Env + "=" + spec)
			harness.WaitFor(t, "the fence to be held", faultLong, func() (bool, error) { return w.heldNow() > 0, nil })
			b.pg.Exec(fmt.Sprintf(insert, old+1, all))
			if step == 0 {
				p.Kill()
				w.discard()
			} else {
				w.release()
			}
			p.Wait(faultLong)
			p = b.stream()
			seen := map[string]int{}
			for _, r := range b.kafka.WaitCommitted(t, topic, aggregates*all) {
				key, seq := string(r.Key), string(r.Value)
				if seen[key]++; seq != fmt.Sprint(seen[key]) {
					t.Fatalf("event %s of %s comes where %d should", seq, key, seen[key])
				}
			}
			b.stop(p)
			if n := len(b.kafka.Committed(t, topic)); n != aggregates*all {
				t.Errorf("%d events, want %d", n, aggregates*all)
			}
		})
	}
}

// A row that moves to another partition is an insert in the WAL, and would be a second event.
func TestAnOutboxPartitionedByItsMarkIsRefused(t *testing.T) {
	for _, after := range []string{"keep", "mark"} {
		b := newPlainBed(t, `CREATE TABLE outbox (id bigserial, event_id uuid, event_type text, payload json, status text DEFAULT 'pending') PARTITION BY LIST (status);
			CREATE TABLE outbox_new PARTITION OF outbox FOR VALUES IN ('pending'); CREATE TABLE outbox_done PARTITION OF outbox DEFAULT`)
		b.set("outbox", []any{map[string]any{"table": "public.outbox", "after": after}})
		p := b.start()
		if code := p.Wait(faultLong); code != 4 {
			t.Errorf("after %s: exit code %d, want 4", after, code)
		}
		if said := p.Stderr(); !strings.Contains(said, "partitioned by status") || !strings.Contains(said, "published_at timestamptz") {
			t.Errorf("after %s: it says %s", after, said)
		}
	}
}

// What is written to a new outbox table before walrelay has published it is in no stream.
func TestAnOutboxTableThatIsMadeAnewIsReadAtOnce(t *testing.T) {
	b := newPlainBed(t, caseOutbox)
	topic := "anew." + b.name
	insert := func(n int) string {
		return fmt.Sprintf(`INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload) VALUES (gen_random_uuid(), 'a', %d, 't', '%d')`, n, n)
	}
	b.set("snapshot.mode", "initial")
	b.set("outbox", []any{map[string]any{"table": "public.outbox", "topic": topic, "snapshot": "all"}}) // its rows are new
	p := b.stream()
	b.pg.Exec(insert(1))
	b.kafka.WaitCommitted(t, topic, 1)
	b.pg.Exec("BEGIN; DROP TABLE outbox; " + caseOutbox + "; " + insert(2) + "; COMMIT")
	b.kafka.WaitCommitted(t, topic, 2)
	b.pg.Exec(insert(3))
	b.kafka.WaitCommitted(t, topic, 3)
	b.stop(p)
	var got []string
	for _, r := range b.kafka.Committed(t, topic) {
		got = append(got, string(r.Value))
	}
	if want := []string{"1", "2", "3"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// backlogOf makes a case whose outbox has these columns and the 20 events of each of 10 aggregates,
// all of one transaction; n is where an event stands in its aggregate.
func backlogOf(t *testing.T, columns string, entry caseMap) *caseRun {
	t.Helper()
	c := caseOutboxNew(t, "public.outbox", "CREATE TABLE outbox (event_id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregate_id text, event_type text DEFAULT 't', payload json, n int, "+columns+")")
	whole := caseMap{"table": "public.outbox", "topic": c.name + ".events", "snapshot": "all"}
	caseMerge(whole, entry)
	return c.set(caseMap{"snapshot": caseMap{"mode": "initial", "chunk-rows": 7}, "batch": caseMap{"max-records": 20}, "outbox": []caseMap{whole}})
}

const backlogRows = `INSERT INTO outbox (aggregate_id, n, payload%s) SELECT 'a' || a, s, to_jsonb(s)%s FROM generate_series(1, 20) s, generate_series(1, 10) a ORDER BY s, a`

// inOrder wants each aggregate's 20 events once, in their order.
func (c *caseRun) inOrder() {
	c.t.Helper()
	seen := map[string]int{}
	records := c.kafka.Committed(c.t, c.name+".events")
	for _, r := range records {
		key := string(r.Key)
		if seen[key]++; string(r.Value) != fmt.Sprint(seen[key]) {
			c.t.Errorf("event %s of %s comes where %d should", r.Value, key, seen[key])
		}
	}
	if len(records) != 200 {
		c.t.Errorf("%d events, want 200", len(records))
	}
}

// The rows of a transaction have the same now(), and a uuid says nothing of their order: their
// number in the aggregate does, where it is there.
func TestTheBacklogKeepsTheOrderOfItsNumbers(t *testing.T) {
	for name, tt := range map[string]struct {
		columns, number string
		entry           caseMap
	}{
		"beside a time":    {"created_at timestamptz NOT NULL DEFAULT now(), aggregate_seq int NOT NULL", "aggregate_seq", nil},
		"without a time":   {"created_at timestamptz, version bigint NOT NULL", "version", nil},
		"by another name":  {"created_at timestamptz NOT NULL DEFAULT now(), place smallint NOT NULL", "place", caseMap{"columns": caseMap{"seq": "place"}}},
		"in the whole log": {"created_at timestamptz NOT NULL DEFAULT now(), sequence_num bigserial", "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			c := backlogOf(t, tt.columns, tt.entry)
			if tt.number == "" {
				c.pg.Exec(fmt.Sprintf(backlogRows, "", ""))
			} else {
				c.pg.Exec(fmt.Sprintf(backlogRows, ", "+tt.number, ", s"))
			}
			c.catchUp()
			c.inOrder()
			if said := c.proc.Stderr(); strings.Contains(said, "change places") {
				t.Errorf("it says that the order is not known: %s", said)
			}
		})
	}
}

// Where nothing tells the order that is said, of rows that are there.
func TestABacklogWithoutAnOrderIsSaid(t *testing.T) {
	for name, tt := range map[string]struct{ columns, text string }{
		"nothing":          {"version int", "no number and no time tells in which order"},
		"a time":           {"created_at timestamptz NOT NULL DEFAULT now(), aggregate_seq int", "rows that are there already go out by time"},
		"nothing to order": {"version int", ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := backlogOf(t, tt.columns, nil)
			if tt.text != "" {
				c.pg.Exec(fmt.Sprintf(backlogRows, "", ""))
			}
			c.catchUp()
			said := c.proc.Stderr()
			if !strings.Contains(said, tt.text) || strings.Count(said, "change places") != min(len(tt.text), 1) {
				t.Errorf("want %q, once: %s", tt.text, said)
			}
		})
	}
}

// A table that is altered while its rows are read is read on as it was begun: in another order,
// rows that are out would be read again, and be events again.
func TestABacklogGoesOnInTheOrderInWhichItWasBegun(t *testing.T) {
	c := backlogOf(t, "aggregate_seq int", nil)
	c.pg.Exec(fmt.Sprintf(backlogRows, ", aggregate_seq", ", s"))
	c.launch(killpoint.Env + "=" + killpoint.Spec(killpoint.Confirmed, 4))
	c.killed()
	if n := len(c.kafka.Committed(t, c.name+".events")); n == 0 || n == 200 {
		t.Fatalf("%d events before the restart, want some", n)
	}
	c.pg.Exec("ALTER TABLE outbox ALTER COLUMN aggregate_seq SET NOT NULL")
	c.catchUp()
	ids := map[string]int{}
	for _, r := range c.kafka.Committed(t, c.name+".events") {
		ids[string(r.Headers[0].Value)]++
	}
	total := 0
	for id, n := range ids {
		if total += n; n != 1 {
			t.Errorf("event %s is there %d times", id, n)
		}
	}
	if total != 200 {
		t.Errorf("%d events, want 200", total)
	}
}

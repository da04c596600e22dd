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

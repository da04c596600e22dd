package e2e

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

const eventsTable = `CREATE TABLE outbox (event_id text, event_type text, schema_version int, occurred_at timestamptz DEFAULT now(), producer text,
  aggregate_type text, aggregate_id text, aggregate_seq bigint, payload json, part int, meta jsonb, published_at timestamptz%s)%s;`

// eventSQL inserts the n-th event of an aggregate; each seventh has no payload.
const eventSQL = `INSERT INTO outbox (event_id, event_type, schema_version, producer, aggregate_type, aggregate_id, aggregate_seq, payload, part, meta)
  VALUES ($1::text || '-' || $2::int, 'paid', 1, 'shop', 'order', $1, $2, CASE WHEN $2 % 7 > 0 THEN json_build_object('n', $2) END, $2 % 3, jsonb_build_object('h', $2))`

// TestVerifyOfEveryKindOfOutbox finds nothing where all is sound, and what was injected.
func TestVerifyOfEveryKindOfOutbox(t *testing.T) {
	partitioned := fmt.Sprintf(eventsTable, "", " PARTITION BY HASH (event_id)") +
		`CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 0); CREATE TABLE outbox_1 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)`
	for name, c := range map[string]struct {
		table string
		entry map[string]any
	}{
		"payload":      {"", map[string]any{}},
		"envelope":     {"", map[string]any{"format": "envelope"}},
		"structured":   {"", map[string]any{"format": "cloudevents"}},
		"binary":       {"", map[string]any{"format": "cloudevents", "cloudevents": "binary"}},
		"json strings": {"", map[string]any{"json-strings": true, "null-payload": "null"}},
		"route":        {"", map[string]any{"topic": nil, "route": map[string]any{"by": "event_type", "regex": "p(.*)", "replacement": "NAME.events"}}},
		"partition":    {"", map[string]any{"partition": "part", "headers-from": "meta"}},
		"mark":         {fmt.Sprintf(eventsTable, ", PRIMARY KEY (event_id)", ""), map[string]any{"after": "mark"}},
		"delete":       {fmt.Sprintf(eventsTable, ", PRIMARY KEY (event_id)", ""), map[string]any{"after": "delete"}},
		"partitioned":  {partitioned, map[string]any{}},
	} {
		t.Run(name, func(t *testing.T) {
			table := c.table
			if table == "" {
				table = fmt.Sprintf(eventsTable, "", "")
			}
			b := newSnapBed(t, table)
			entry := map[string]any{"table": "public.outbox", "topic": "{prefix}.events"}
			for key, value := range c.entry {
				if value == nil {
					delete(entry, key)
					continue
				}
				entry[key] = value
			}
			if route, ok := entry["route"].(map[string]any); ok {
				entry["route"] = map[string]any{"by": route["by"], "regex": route["regex"], "replacement": b.name + ".events"}
			}
			b.set("outbox", []map[string]any{entry})
			p := b.start()
			b.waitRead(p, "public.outbox")
			w := b.write(2, 10*time.Millisecond, func(ctx context.Context, conn *pgx.Conn, session, i int) error {
				_, err := conn.Exec(ctx, eventSQL, fmt.Sprintf("a%d", session), i)
				return err
			})
			for range 2 {
				b.sound(p)
			}
			topic := b.name + ".events"
			b.kafka.WaitCommitted(t, topic, 20)
			event := newEvents(b, b.log(), topic)
			want := []string{"doubled " + event.shown("a0-1"), "disordered " + event.shown("a0")}
			behind := event.copied("a0-2")
			for i, h := range behind.Headers {
				switch h.Key {
				case "id", "ce_id":
					behind.Headers[i].Value = []byte("another")
				case "position":
					behind.Headers[i].Value = []byte("0000000000000001-0000000000")
				}
			}
			b.produce(event.copied("a0-1"), behind)
			unpublished := fmt.Sprintf(`ALTER PUBLICATION %q DROP TABLE outbox`, b.slot()+"_insert")
			w.end()
			b.caughtUp(p)
			b.pg.Exec(unpublished)
			b.pg.Exec(eventSQL, "lost", 1)
			b.pg.Exec(strings.Replace(unpublished, "DROP", "ADD", 1))
			want = append(want, "missing "+event.shown("lost-1"))
			if name == "delete" {
				b.pg.WaitValue("1", "SELECT count(*) FROM outbox") // the one that is lost
				b.pg.Exec("DELETE FROM outbox WHERE event_id = 'lost-1'")
				want = want[:2]
			} else {
				b.pg.Exec(`UPDATE outbox SET payload = '{"n":-1}' WHERE event_id IN ('a1-1', 'a1-7')`)
				want = append(want, "differing "+event.shown("a1-1"), "differing "+event.shown("a1-7"))
			}
			b.finds(p, "public.outbox", want...)
		})
	}
}

// events are those of a topic by their ids.
type events struct {
	topic string
	t     *testing.T
	byID  map[string]cdctest.Record
}

func newEvents(b *snapBed, log *cdctest.Log, topic string) *events {
	e := &events{topic: topic, t: b.t, byID: map[string]cdctest.Record{}}
	for _, r := range log.Records {
		if r.Topic == topic {
			e.byID[cmp.Or(r.Headers["id"], r.Headers["ce_id"])] = r
		}
	}
	return e
}

func (e *events) copied(id string) *kgo.Record {
	e.t.Helper()
	r, found := e.byID[id]
	if !found {
		e.t.Fatalf("topic %s has no event %s", e.topic, id)
	}
	return again(r)
}

// shown is an event, or an aggregate, as verify names it.
func (e *events) shown(id string) string {
	if strings.HasPrefix(string(e.copied("a0-1").Key), `"`) && !strings.Contains(id, "-") {
		id = strconv.Quote(id)
	}
	return strconv.Quote(e.topic + " " + id)
}

// TestVerifyOfAnOutboxOfMessages says that it has no table, and compares the others.
func TestVerifyOfAnOutboxOfMessages(t *testing.T) {
	b := newSnapBed(t, "CREATE TABLE t (id int PRIMARY KEY)")
	b.set("outbox", []map[string]any{{"message-prefix": "shop-events"}})
	p := b.start()
	b.waitRead(p, "public.t")
	if r := b.sound(p); len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "shop-events") {
		t.Errorf("notes %q, want that messages are in no table", r.Notes)
	}
}

// TestVerifyLeavesDeadLettersOut counts them in a note.
func TestVerifyLeavesDeadLettersOut(t *testing.T) {
	b := newSnapBed(t, fmt.Sprintf(eventsTable, "", ""))
	b.set("outbox", []map[string]any{{"table": "public.outbox", "topic": "{prefix}.{event_type}"}})
	p := b.start()
	b.waitRead(p, "public.outbox")
	b.pg.Exec(eventSQL, "good", 1)
	b.pg.Exec(`INSERT INTO outbox (event_id, event_type, aggregate_id, payload) VALUES ('bad', 'no topic''s name', 'x', '{}')`)
	b.caughtUp(p)
	if r := b.sound(p); r.Tables[0].Equal != 1 || !strings.Contains(strings.Join(r.Tables[0].Notes, " "), "1 rows cannot become records") {
		t.Errorf("%+v", r.Tables[0])
	}
}

// TestVerifyRefusesAStandby says that it needs the primary: a standby's snapshots do not
// tell what is in progress.
func TestVerifyRefusesAStandby(t *testing.T) {
	b := newSnapBed(t, "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)", harness.Dedicated())
	p := b.untilCaughtUp()
	b.sound(p)
	if err := os.WriteFile(filepath.Join(b.pg.Server.Dir(), "data", "standby.signal"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := b.pg.Server.Restart(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if _, code, said := b.verify(p); code != 4 || !strings.Contains(said, "standby") || !strings.Contains(said, "source.primary-dsn") {
		t.Errorf("exit code %d, want 4 and the primary: %s", code, said)
	}
}

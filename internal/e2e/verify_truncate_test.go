package e2e

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// unpublished runs statements whose inserts a publication does not send.
func (b *snapBed) unpublished(publication, statements string) {
	b.t.Helper()
	b.pg.Exec(fmt.Sprintf(`ALTER PUBLICATION %q SET (publish = 'update, delete, truncate'); %s; ALTER PUBLICATION %[1]q SET (publish = 'insert, update, delete, truncate')`, publication, statements))
}

// TestVerifyOfATruncateInACompactedTopic loses the insert of a row that was there before the
// truncate with the same values.
func TestVerifyOfATruncateInACompactedTopic(t *testing.T) {
	for name, settings := range map[string]map[string]any{
		"plain":         {},
		"debezium":      {"format.types": "debezium", "format.debezium.schemas-enable": true},
		"bare":          {"format.envelope": false},
		"bare debezium": {"format.envelope": false, "format.types": "debezium", "format.debezium.schemas-enable": true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newSnapBed(t, "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'v' FROM generate_series(1, 20) g")
			b.set("topics.config", map[string]any{"cleanup.policy": "compact"})
			for path, value := range settings {
				b.set(path, value)
			}
			p := b.start()
			b.waitRead(p, "public.t")
			b.pg.Exec("TRUNCATE t; INSERT INTO t SELECT g, 'v' FROM generate_series(11, 20) g")
			b.caughtUp(p)
			b.sound(p)
			b.unpublished(b.slot(), "INSERT INTO t VALUES (1, 'v')")
			b.caughtUp(p)
			b.finds(p, "public.t", `missing {"id":1}`)
		})
	}
}

// TestVerifyOfATableThatGotItsKeyLater finds the records without a key until the table has
// been read anew.
func TestVerifyOfATableThatGotItsKeyLater(t *testing.T) {
	b := newSnapBed(t, "CREATE TABLE t (id int NOT NULL, v text); INSERT INTO t SELECT g, 'v' FROM generate_series(1, 10) g")
	b.set("source.keyless", "inserts")
	b.untilCaughtUp()
	b.pg.Exec("ALTER TABLE t ADD PRIMARY KEY (id)")
	p := b.start()
	b.waitRead(p, "public.t")
	b.pg.Exec("INSERT INTO t VALUES (11, 'v')")
	b.caughtUp(p)
	if r, code, said := b.verify(p); code != 3 || r.Tables[0].Unreadable != 10 || r.Tables[0].Missing != 10 {
		t.Fatalf("exit code %d, want 3 and 10 records without a key: %s", code, said)
	}
	b.mustAsk(p, "--table", "public.t", "--replace")
	harness.WaitFor(t, "the table to be read again", snapLong, func() (bool, error) { return b.reads(b.log(), "t") == 21, nil })
	b.settled(p)
	b.sound(p)
}

// TestVerifyOfMarksWithoutATimeZone misses the event of a row that was marked since the
// connector began, and not those of older ones.
func TestVerifyOfMarksWithoutATimeZone(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE outbox (id bigserial PRIMARY KEY, event_id text NOT NULL, aggregate_id text, event_type text NOT NULL, payload jsonb, published_at timestamp);
		INSERT INTO outbox (event_id, event_type, published_at) SELECT 'old' || g, 'done', now() AT TIME ZONE 'UTC' FROM generate_series(1, 5) g`)
	b.set("outbox", []map[string]any{{"table": "public.outbox", "topic": "{prefix}.events"}})
	p := b.start()
	b.waitRead(p, "public.outbox")
	b.pg.Exec("INSERT INTO outbox (event_id, event_type) VALUES ('sent', 'done')")
	b.caughtUp(p)
	b.pg.Exec(fmt.Sprintf(`ALTER PUBLICATION %q DROP TABLE outbox; INSERT INTO outbox (event_id, event_type) VALUES ('lost', 'done'); ALTER PUBLICATION %[1]q ADD TABLE outbox`, b.slot()+"_insert"))
	b.pg.Exec("UPDATE outbox SET published_at = now() AT TIME ZONE 'UTC' WHERE published_at IS NULL")
	b.caughtUp(p)
	b.finds(p, "public.outbox", "missing "+strconv.Quote(b.name+".events lost"))
}

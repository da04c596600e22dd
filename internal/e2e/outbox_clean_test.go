package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/walrelay/walrelay/internal/harness"
)

// clean runs outbox clean and wants its exit code and texts of what it prints.
func (c *caseRun) clean(code int, arguments []string, texts ...string) {
	c.t.Helper()
	text, err := yaml.Marshal(c.config)
	if err != nil {
		c.t.Fatal(err)
	}
	file := filepath.Join(c.t.TempDir(), "walrelay.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		c.t.Fatal(err)
	}
	p := harness.StartProgram(c.t, harness.Binary(c.t), nil, append([]string{"outbox", "clean", "-c", file}, arguments...)...)
	if got := p.Wait(harness.DefaultTimeout); got != code {
		c.t.Fatalf("exit code %d, want %d: %s", got, code, p.Stderr())
	}
	for _, text := range texts {
		if said := p.Stdout() + p.Stderr(); !strings.Contains(said, text) {
			c.t.Errorf("it does not say %q: %s", text, said)
		}
	}
}

// left are the aggregate_seqs that the table has.
func (c *caseRun) left() string {
	return c.pg.Value("SELECT coalesce(string_agg(aggregate_seq::text, ',' ORDER BY aggregate_seq), '') FROM outbox")
}

// The age counts from the publication, and NULL is no age at all.
func TestCleaningNeverDeletesAnUnpublishedRow(t *testing.T) {
	c := caseOutboxNew(t, "public.outbox", caseOutbox)
	c.pg.Exec(`INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload, created_at, published_at) VALUES
 ('00000000-0000-0000-0000-000000000001','o',1,'a','{}', now() - interval '10 days', now() - interval '8 days'),
 ('00000000-0000-0000-0000-000000000002','o',2,'a','{}', now() - interval '10 days', now() - interval '1 hour'),
 ('00000000-0000-0000-0000-000000000003','o',3,'a','{}', now() - interval '10 days', NULL)`)
	c.clean(0, []string{"--older-than", "7d", "--batch", "1"}, "public.outbox: 1 rows deleted")
	if got := c.left(); got != "2,3" {
		t.Errorf("left: %s", got)
	}
	c.clean(0, []string{"--older-than", "0s", "-o", "json"}, `"deleted": 1`)
	if got := c.left(); got != "3" {
		t.Errorf("left: %s", got)
	}
	c.clean(2, []string{"--older-than", "soon"}, "7d, 36h or 0s")
	// A time that a row has from the start does not tell that it was published.
	c.pg.Exec("ALTER TABLE outbox ALTER published_at SET DEFAULT now(); INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload) VALUES ('00000000-0000-0000-0000-000000000004','o',4,'a','{}')")
	c.clean(4, []string{"--older-than", "0s"}, "which rows are published")
	if got := c.left(); got != "3,4" {
		t.Errorf("left: %s", got)
	}
}

// Where a status tells it, everything but the one value is not published, and the age
// counts from the time of writing; one that is not known is no age.
func TestCleaningByStatus(t *testing.T) {
	c := caseOutboxNew(t, "public.outbox", `CREATE TABLE outbox (event_id bigint PRIMARY KEY, event_type text, payload json, aggregate_seq int, created_at timestamp, status text)`)
	c.pg.Exec(`INSERT INTO outbox SELECT g, 'a', '{}', g, CASE WHEN g % 5 > 0 THEN now() - interval '10 days' END, (ARRAY['pending','processed','processing',NULL])[g % 4 + 1] FROM generate_series(1, 4000) g`)
	c.clean(0, []string{"--batch", "100"}, "800 rows deleted")
	if got := c.pg.Value("SELECT count(*) FROM outbox WHERE status IS DISTINCT FROM 'processed'"); got != "3000" {
		t.Errorf("%s rows that are not published are left, want 3000", got)
	}
	c.pg.Exec("ALTER TABLE outbox DROP COLUMN status")
	c.clean(4, nil, "tells which rows are published")
}

// A table that does not fit its entry is refused, as run refuses it, and keeps no other from it.
func TestCleaningGoesOnBesideATableThatDoesNotFit(t *testing.T) {
	c := caseOutboxNew(t, "public.outbox", caseOutbox).set(caseMap{"outbox": []caseMap{{"table": "public.a_misfit"}, {"table": "public.outbox"}, {"table": "public.gone"}}})
	c.pg.Exec(`CREATE TABLE a_misfit (n int, published_at timestamptz);
		INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload, created_at, published_at)
		VALUES ('00000000-0000-0000-0000-000000000001','o',1,'a','{}', now(), now() - interval '8 days')`)
	c.clean(4, nil, "public.outbox: 1 rows deleted", "table public.a_misfit does not fit its configuration", "public.gone is not there")
	if got := c.left(); got != "" {
		t.Errorf("left: %s", got)
	}
}

func TestCleaningDropsOldPartitionsWhoseRowsAreAllPublished(t *testing.T) {
	c := caseOutboxNew(t, "public.outbox", `CREATE TABLE outbox (id bigserial, event_id uuid NOT NULL DEFAULT gen_random_uuid(), event_type text, payload json,
		aggregate_seq int, created_at timestamptz NOT NULL, published_at timestamptz) PARTITION BY RANGE (created_at);
		CREATE TABLE o_done PARTITION OF outbox FOR VALUES FROM ('2020-01-01') TO ('2020-02-01');
		CREATE TABLE o_open PARTITION OF outbox FOR VALUES FROM ('2020-02-01') TO ('2020-03-01');
		CREATE TABLE o_now PARTITION OF outbox FOR VALUES FROM ('2020-03-01') TO ('2999-01-01');
		CREATE TABLE o_rest PARTITION OF outbox DEFAULT;
		INSERT INTO outbox (event_type, payload, aggregate_seq, created_at, published_at) VALUES
			('a', '{}', 1, '2020-01-05', '2020-01-06'), ('a', '{}', 2, '2020-02-05', '2020-02-06'), ('a', '{}', 3, '2020-02-07', NULL),
			('a', '{}', 4, '2020-03-05', '2020-03-06'), ('a', '{}', 5, '3000-01-01', '2020-03-06')`)
	c.clean(0, []string{"--drop-partitions"}, "3 rows deleted, 1 partitions dropped: public.o_done", "public.o_open: it holds rows that are not published", "public.o_rest: its bounds")
	if got := c.left(); got != "3" {
		t.Errorf("left: %s", got)
	}
	if got := c.pg.Value("SELECT string_agg(inhrelid::regclass::text, ',' ORDER BY inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'outbox'::regclass"); got != "o_now,o_open,o_rest" {
		t.Errorf("partitions: %s", got)
	}
}

// An aggregate over no rows is NULL and not 0; and while Kafka is down nothing else tells
// how long an event has waited.
func TestPendingRowsAreCountedWhileKafkaIsDown(t *testing.T) {
	c := caseKafkaOwn(t).set(caseMap{"outbox": []caseMap{{"table": "public.outbox", "after": "mark"}}, "admin": caseMap{"listen": "127.0.0.1:0"}, "snapshot": caseMap{"mode": "initial"}})
	c.pg.Exec(caseOutbox)
	c.kafka.Kill(0)
	c.launch()
	c.pg.Exec(strings.ReplaceAll(`INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload, created_at)
		SELECT gen_random_uuid(), 'a', g, 'NAME', '{}', now() - (ARRAY[600, 60, 0])[g] * interval '1 second' FROM generate_series(1, 3) g`, "NAME", c.name))
	const label = `table="public.outbox"`
	harness.WaitFor(t, "3 pending rows", harness.DefaultTimeout, func() (bool, error) {
		return c.metric("walrelay_outbox_pending_rows", label) == 3, nil
	})
	if got := c.metric("walrelay_outbox_oldest_pending_seconds", label); got < 600 || got > 700 {
		t.Errorf("the oldest waits for %v s, want 600 and a little", got)
	}
	// The lag does not tell: it is small, or not known yet.
	if got := c.metric("walrelay_lag_bytes"); got > 1<<20 {
		t.Errorf("the lag is %v bytes", got)
	}
	c.kafka.Restart(0)
	c.streaming()
	harness.WaitFor(t, "no pending rows", harness.DefaultTimeout, func() (bool, error) {
		return c.metric("walrelay_outbox_pending_rows", label) == 0 && c.pg.Value("SELECT count(*) FROM outbox WHERE published_at IS NULL") == "0", nil
	})
	if got := c.metric("walrelay_outbox_oldest_pending_seconds", label); got != 0 {
		t.Errorf("the oldest waits for %v s, want 0", got)
	}
}

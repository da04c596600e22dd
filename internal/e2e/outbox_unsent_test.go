package e2e

import (
	"fmt"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// An event is made of what the stream brings. Where a column that it needs is not among
// that, the start says so, and no event leaves under another key.
func TestAnOutboxColumnThatIsNotStreamedIsRefused(t *testing.T) {
	generated := func(column string) string {
		return fmt.Sprintf(`CREATE TABLE ob (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), event_type text DEFAULT 't', n text, %s text GENERATED ALWAYS AS ('x' || n) STORED%s, published_at timestamptz)`,
			column, map[bool]string{true: "", false: ", payload text"}[column == "payload"])
	}
	const plain = `CREATE TABLE ob (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), event_type text DEFAULT 't', aggregate_id text, payload text, tenant text, unused text)`
	for _, tt := range []struct {
		name, table, publication string
		outbox                   caseMap
		says                     []string // none: it is not refused
	}{
		{"the key", generated("aggregate_id"), "", nil, []string{`column "aggregate_id"`, "public.ob", "aggregate_id", "plain column"}},
		{"the payload", generated("payload"), "", nil, []string{`column "payload"`, "(payload)"}},
		{"a key template's", generated("k"), "", caseMap{"key": "{k}"}, []string{`column "k"`, "(key)"}},
		{"a topic template's", generated("k"), "", caseMap{"topic": "o.{k}"}, []string{`column "k"`, "(topic)"}},
		{"a route's", generated("k"), "", caseMap{"route": caseMap{"by": "k"}}, []string{`column "k"`, "(route)"}},
		{"a partition's", generated("k"), "", caseMap{"partition": "k"}, []string{`column "k"`, "(partition)"}},
		{"a header's", generated("k"), "", caseMap{"headers": []string{"k:kind"}}, []string{`column "k"`, "(header kind)"}},
		{"of a list of headers", generated("k"), "", caseMap{"headers-from": "k"}, []string{`column "k"`, "(headers-from)"}},
		{"an envelope's", generated("k"), "", caseMap{"format": "envelope", "envelope": []string{"k"}}, []string{`column "k"`, "(envelope)"}},
		{"one that nothing needs", generated("k"), "", nil, nil},
		{"one that a column list lacks", plain, "TABLE ob (id, event_type, aggregate_id, tenant, unused)", nil, []string{`column "payload"`, "column list of publication p"}},
		{"a header's that a column list lacks", plain, "TABLE ob (id, event_type, aggregate_id, payload)", caseMap{"headers": []string{"tenant"}}, []string{`column "tenant"`, "(header tenant)"}},
		{"a column list without what nothing needs", plain, "TABLE ob (id, event_type, aggregate_id, payload)", nil, nil},
		{"no column list", plain, "TABLE ob", caseMap{"headers": []string{"tenant"}}, nil},
		{"a generated one of an existing publication", generated("aggregate_id"), "TABLE ob", nil, []string{`column "aggregate_id"`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			b := newFaultBed(t, harness.Postgres(t, harness.Major(17)), harness.Kafka(t))
			b.pg.Exec(tt.table)
			outbox := map[string]any{"table": "public.ob"}
			for key, value := range tt.outbox {
				outbox[key] = value
			}
			b.set("outbox", []map[string]any{outbox})
			b.set("source.tables", []string{})
			if tt.publication != "" {
				b.pg.Exec("CREATE PUBLICATION p FOR " + tt.publication + " WITH (publish = 'insert')")
				b.set("source.publication", "p")
				b.set("source.publication-mode", "existing")
			}
			if tt.says != nil {
				b.refused(b.start(), tt.says...)
				return
			}
			b.stop(b.stream())
		})
	}
}

// PostgreSQL 18 sends stored generated columns, if it is asked to.
func TestAGeneratedOutboxColumnIsThereWhereTheServerSendsIt(t *testing.T) {
	t.Parallel()
	b := newFaultBed(t, harness.Postgres(t, harness.Major(18)), harness.Kafka(t))
	topic := b.name + "-t"
	b.pg.Exec(`CREATE TABLE ob (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), event_type text, n int, payload text, aggregate_id text GENERATED ALWAYS AS ('agg' || n::text) STORED)`)
	b.set("outbox", []map[string]any{{"table": "public.ob", "topic": topic}})
	b.set("source.tables", []string{})
	p := b.stream()
	b.pg.Exec(`INSERT INTO ob (event_type, n, payload) VALUES ('x', 7, 'p')`)
	if r := b.kafka.WaitCommitted(t, topic, 1)[0]; string(r.Key) != "agg7" {
		t.Errorf("key %s", r.Key)
	}
	b.stop(p)
}

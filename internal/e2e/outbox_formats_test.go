package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

// formatsTable has a column for every field of an event.
const formatsTable = `(event_id text PRIMARY KEY, event_type text, schema_version int, occurred_at timestamptz, producer text,
  aggregate_type text, aggregate_id text, aggregate_seq bigint, partition_key text, correlation_id text, causation_id text, payload json%s)`

// formatsRow is a row of it; what follows payload is the caller's.
func formatsRow(table, id, more string) string {
	return fmt.Sprintf(`INSERT INTO %s VALUES ('%s','payment.charged',3,'2026-10-19 15:01:02.114+05:30','pay/2.1','order','order-8891',7,'acct-1','c-1','ev-6','{"amount_cents":12800}'%s);`, table, id, more)
}

// formatsCase makes a case with outbox entries whose topics are the case's own.
func formatsCase(t *testing.T, sql string, entries ...caseMap) *caseRun {
	t.Helper()
	c := caseNew(t)
	c.pg.Exec(sql)
	return c.set(caseMap{"outbox": entries, "snapshot": caseMap{"mode": "initial"}})
}

// events gives the records of a topic of the case by the events' ids.
func (c *caseRun) eventsOf(log *cdctest.Log, topic string) map[string]cdctest.Record {
	c.t.Helper()
	events := map[string]cdctest.Record{}
	for _, r := range c.topic(log, c.name+"."+topic) {
		if _, twice := events[r.Headers["id"]]; twice {
			c.t.Errorf("event %s is there twice", r.Headers["id"])
		}
		events[r.Headers["id"]] = r
	}
	return events
}

func (c *caseRun) expectEvents(events map[string]cdctest.Record, ids ...string) {
	c.t.Helper()
	if got := slices.Sorted(maps.Keys(events)); !slices.Equal(got, ids) {
		c.t.Fatalf("events %q, want %q", got, ids)
	}
}

// Rows that are there at the start and rows of the stream are the same records, of a
// partitioned table too, and of tables of one name in two schemas.
func TestOutboxFormatsOfBacklogAndStream(t *testing.T) {
	c := formatsCase(t, `CREATE SCHEMA "Billing";
		CREATE TABLE outbox `+fmt.Sprintf(formatsTable, "")+`;
		CREATE TABLE "Billing".outbox `+fmt.Sprintf(formatsTable, ", part int, meta jsonb")+` PARTITION BY HASH (event_id);
		CREATE TABLE "Billing".outbox_0 PARTITION OF "Billing".outbox FOR VALUES WITH (MODULUS 2, REMAINDER 0);
		CREATE TABLE "Billing".outbox_1 PARTITION OF "Billing".outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1);`+
		formatsRow("outbox", "ev-0", "")+formatsRow(`"Billing".outbox`, "ev-0", `, 3, '{"tenant":"acme","n":1.50}'`),
		caseMap{"table": "public.outbox", "topic": "{prefix}.plain", "format": "envelope", "snapshot": "all"},
		caseMap{"table": "Billing.outbox", "topic": "{prefix}.{event_name}", "format": "cloudevents", "partition": "part", "headers-from": "meta", "snapshot": "all"})
	c.start()
	c.pg.Exec(formatsRow("outbox", "ev-7", "") + formatsRow(`"Billing".outbox`, "ev-7", `, NULL, NULL`) + formatsRow(`"Billing".outbox`, "ev-8", `, 0, '{"tenant":"b"}'`))
	log := c.settled()

	plain := c.eventsOf(log, "plain")
	c.expectEvents(plain, "ev-0", "ev-7")
	for id, r := range plain {
		want := strings.Replace(`{"event_id":"ID","type":"payment.charged","version":3,"occurred_at":"2026-10-19T09:31:02.114Z","producer":"pay/2.1","aggregate_type":"order","aggregate_id":"order-8891","aggregate_seq":7,"partition_key":"acct-1","correlation_id":"c-1","causation_id":"ev-6","payload":{"amount_cents":12800}}`, "ID", id, 1)
		if string(r.Value) != want || string(r.Key) != "acct-1" {
			t.Errorf("event %s: key %s, value %s; want %s", id, r.Key, r.Value, want)
		}
	}
	billing := c.eventsOf(log, "payment.charged")
	c.expectEvents(billing, "ev-0", "ev-7", "ev-8")
	for id, r := range billing {
		var event struct {
			SpecVersion, ID, Source, Type, Subject, Time, DataContentType string
			Data                                                          json.RawMessage
		}
		if err := json.Unmarshal(r.Value, &event); err != nil {
			t.Fatal(err)
		}
		if event.SpecVersion != "1.0" || event.ID != id || event.Source != "pay/2.1" || event.Subject != "order-8891" || event.Time != "2026-10-19T09:31:02.114Z" ||
			event.DataContentType != "application/json" || string(event.Data) != `{"amount_cents":12800}` || r.Headers["content-type"] != "application/cloudevents+json; charset=UTF-8" {
			t.Errorf("event %s: %s, headers %v", id, r.Value, r.Headers)
		}
	}
	if r := billing["ev-0"]; r.Partition != 3 || r.Headers["tenant"] != "acme" || r.Headers["n"] != "1.50" {
		t.Errorf("ev-0: partition %d, headers %v", r.Partition, r.Headers)
	}
	if billing["ev-8"].Partition != 0 || billing["ev-7"].Partition != plain["ev-7"].Partition {
		t.Errorf("ev-8 in partition %d, want 0; ev-7 in %d, want that of its key, %d", billing["ev-8"].Partition, billing["ev-7"].Partition, plain["ev-7"].Partition)
	}
	c.expectNoTopic(log, c.name+".public.outbox")
	c.expectNoTopic(log, c.name+".Billing.outbox_0")
}

// Debezium's table and options: the key and the value as its JsonConverter writes them.
func TestAnOutboxAsDebeziumsEventRouterWritesIt(t *testing.T) {
	c := formatsCase(t, `CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,
		type varchar(255) NOT NULL, payload jsonb, tenant text, ver int)`)
	c.set(caseMap{"outbox": []caseMap{{"table": "public.outbox", "json-strings": true, "null-payload": "null", "headers": []string{"type:eventType", "tenant"},
		"route": caseMap{"by": "aggregatetype", "regex": "(?<routedByValue>.*)", "replacement": c.name + ".$${routedByValue}"}}}})
	c.start()
	c.pg.Exec(`INSERT INTO outbox VALUES ('00000000-0000-0000-0000-000000000001','Order','o-1','OrderCreated','{"id":1,  "amount":1.10,"e":[]}','acme',1),
		('00000000-0000-0000-0000-000000000003','weird/topic name','o-2','x','{}','acme',1), ('00000000-0000-0000-0000-000000000002','Order','o-1','OrderGone',NULL,NULL,1)`)
	log := c.settled()
	events := c.eventsOf(log, "Order")
	c.expectEvents(events, "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002")
	first, gone := events["00000000-0000-0000-0000-000000000001"], events["00000000-0000-0000-0000-000000000002"]
	if string(first.Key) != `"o-1"` || string(first.Value) != `"{\"e\": [], \"id\": 1, \"amount\": 1.10}"` || first.Headers["eventType"] != "OrderCreated" || first.Headers["tenant"] != "acme" {
		t.Errorf("key %s, value %s, headers %v", first.Key, first.Value, first.Headers)
	}
	if string(gone.Value) != "null" || gone.Partition != first.Partition {
		t.Errorf("value %s in partition %d, want null in %d", gone.Value, gone.Partition, first.Partition)
	}
	if r := c.expectOnly(log, c.name+".dead-letter"); r.Headers["reason"] != "route" || string(r.Key) != `"o-2"` {
		t.Errorf("dead letter: key %s, headers %v", r.Key, r.Headers)
	}
}

// Rows that no event can be made of go aside, each with its reason, and the others of
// their transaction go out.
func TestPoisonRowsOfAnOutboxGoAside(t *testing.T) {
	sql := "CREATE TABLE outbox " + fmt.Sprintf(formatsTable, ", part int, meta jsonb")
	c := formatsCase(t, sql, caseMap{"table": "public.outbox", "topic": "{prefix}.ev", "partition": "part", "headers-from": "meta", "format": "cloudevents", "cloudevents": "binary"})
	c.set(caseMap{"admin": caseMap{"listen": "127.0.0.1:0"}})
	c.start()
	c.exec(c.session(), "BEGIN;"+formatsRow("outbox", "a", ", 1, NULL")+formatsRow("outbox", "b", ", 99, NULL")+formatsRow("outbox", "c", ", -1, NULL")+
		formatsRow("outbox", "d", ", 1, '[]'")+formatsRow("outbox", "", ", 1, NULL")+formatsRow("outbox", "e", ", 2, '{}'")+"COMMIT")
	log := c.settled()
	events := c.eventsOf(log, "ev")
	c.expectEvents(events, "a", "e")
	if events["a"].Partition != 1 || events["e"].Partition != 2 || events["a"].Headers["ce_id"] != "a" || string(events["a"].Value) != `{"amount_cents":12800}` {
		t.Errorf("events %v", events)
	}
	var reasons []string
	for _, r := range c.topic(log, c.name+".dead-letter") {
		reasons = append(reasons, r.Headers["reason"])
	}
	if want := []string{"route", "malformed", "malformed", "malformed"}; !slices.Equal(reasons, want) {
		t.Errorf("dead letters for %q, want %q", reasons, want)
	}
	// a and e have the sequence 7, both.
	if n := c.metric("walrelay_outbox_sequence_faults_total", `table="public.outbox"`, `kind="backward"`); n != 1 {
		t.Errorf("%v backward steps counted, want 1", n)
	}
	c.proc.WaitLog(harness.DefaultTimeout, harness.Field("aggregate", "order order-8891"))
}

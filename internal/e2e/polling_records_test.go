package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/harness"
)

// pollingWide has a column for every field and option of an event.
const pollingWide = `CREATE TABLE outbox (event_id text PRIMARY KEY, event_type text, schema_version int, occurred_at timestamptz, producer text,
  aggregate_type text, aggregate_id text, aggregate_seq bigint, partition_key text, correlation_id text, causation_id text, traceparent text,
  payload jsonb, part int, meta jsonb, tenant text, amount numeric, tags text[], at timestamp, published_at timestamptz)`

// pollingWideRows are events of it, odd ones and dead letters among them. NAME is the case's.
const pollingWideRows = `INSERT INTO outbox (event_id, event_type, schema_version, occurred_at, producer, aggregate_type, aggregate_id, aggregate_seq, partition_key,
   correlation_id, causation_id, traceparent, payload, part, meta, tenant, amount, tags, at) VALUES
 ('e1', 'order.paid.v2', 3, '2026-10-19 15:01:02.114+05:30', 'pay/2.1', 'NAME', 'o-1', 1, 'acct-1', 'c-1', 'e0', '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01',
   '{"b": 1.10, "a": [1, null], "ü": "ä\"\\"}', 3, '{"n": 1.50, "s": "x", "o": {"a": 1}, "z": null}', 'acme', 12.50, '{a,"b c"}', '2026-10-19 09:31:02.5'),
 ('e2', 'order.paid.v2', NULL, NULL, NULL, 'NAME', 'o-1', 2, 'acct-1', NULL, NULL, NULL, '"text"', 0, NULL, NULL, NULL, NULL, NULL),
 ('e3', 'order.gone', 1, '0044-03-15 12:00:00+00 BC', 'a b/ü', 'NAME', 'o-1', 3, 'acct-1', '', '', '', NULL, NULL, '{}', '', 'NaN', '{}', 'infinity'),
 ('e4', 'order.new', 1, 'infinity', 'p', 'NAME', 'o-2', NULL, NULL, NULL, NULL, NULL, '{}', 5, '{"position": "1", "id": "2", "ok": true}', 'ö', 1e20, NULL, NULL),
 ('e5', 'order.new', 1, NULL, NULL, 'NAME', NULL, NULL, NULL, NULL, NULL, NULL, '{}', NULL, NULL, NULL, NULL, NULL, NULL),
 ('bad-part', 'order.new', 1, NULL, NULL, 'NAME', 'o-3', 1, NULL, NULL, NULL, NULL, '{}', 99, NULL, NULL, NULL, NULL, NULL),
 ('bad-meta', 'order.new', 1, NULL, NULL, 'NAME', 'o-3', 2, NULL, NULL, NULL, NULL, '{}', -1, '[]', NULL, NULL, NULL, NULL),
 ('bad-type', NULL, 1, NULL, NULL, NULL, 'o-4', 1, NULL, NULL, NULL, NULL, '{}', NULL, NULL, NULL, NULL, NULL, NULL),
 ('bad-topic', 'no topic/ü', 1, NULL, NULL, 'no topic/ü', 'o-4', 2, NULL, NULL, NULL, NULL, '{}', NULL, NULL, NULL, NULL, NULL, NULL);
 INSERT INTO outbox (event_id, event_type, aggregate_type, aggregate_id, aggregate_seq, payload)
   SELECT 'large-' || g, 'order.large', 'NAME', 'o-5', g, jsonb_build_object('v', repeat(md5(g::text), g * 20000)) FROM generate_series(1, 3) g`

// pollingNumbers are what a topic's events need beside pollingWide.
const pollingNumbers = `INSERT INTO outbox (aggregate_id, aggregate_seq, event_type, payload)
  SELECT 'a' || g % 7, g / 7, 'NAME', jsonb_build_object('n', g, 'note', repeat('x', g)) FROM generate_series(1, 200) g`

// One table with the same rows goes through the WAL and through polling: but for the
// position, the records are the same.
func TestPollingMakesTheRecordsThatTheWALMakes(t *testing.T) {
	for name, tt := range map[string]struct {
		table, rows string
		entry       caseMap
	}{
		"numeric id, event_id and published_at": {pollingTable, pollingNumbers, caseMap{}},
		"a uuid and a status that is an enum": {
			`CREATE TYPE st AS ENUM ('pending', 'processed'); CREATE TABLE outbox (id uuid PRIMARY KEY, event_type text, payload jsonb, created_at timestamptz, status st DEFAULT 'pending')`,
			`INSERT INTO outbox SELECT md5(g::text)::uuid, 'NAME', jsonb_build_object('n', g), CASE WHEN g % 3 > 0 THEN '2026-10-19 09:31:02.114+02'::timestamptz END FROM generate_series(1, 50) g`, caseMap{}},
		"aggregate type, json and status that is a number": {
			`CREATE TABLE outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, event_id varchar(64) NOT NULL UNIQUE, aggregate_type varchar(64) NOT NULL,
			   aggregate_id varchar(64) NOT NULL, event_type varchar(64) NOT NULL, payload json NOT NULL, status smallint NOT NULL DEFAULT 0, retry_count int NOT NULL DEFAULT 0,
			   next_retry_at timestamptz, created_at timestamptz(3) NOT NULL DEFAULT now())`,
			`INSERT INTO outbox (event_id, aggregate_type, aggregate_id, event_type, payload, status, retry_count, next_retry_at)
			   SELECT 'e-' || g, 'NAME', g % 5, 'OrderPaid', E'{"amountFen": 12800,\n  "amountFen": 12800.0}', (ARRAY[0, 2, 3])[g % 3 + 1], g, now() + interval '1 day' FROM generate_series(1, 40) g`, caseMap{}},
		"Debezium's": {
			`CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,
			   type varchar(255) NOT NULL, payload jsonb, tenant char(5), status text)`,
			`INSERT INTO outbox (aggregatetype, aggregateid, type, payload, tenant) SELECT CASE WHEN g % 10 = 0 THEN 'weird/name' ELSE 'NAME' END, 'o-' || g % 4, 'OrderCreated',
			   CASE WHEN g % 3 > 0 THEN jsonb_build_object('id', g) END, 'ab' FROM generate_series(1, 60) g`,
			caseMap{"json-strings": true, "null-payload": "null", "headers": []string{"type:eventType", "tenant"},
				"route": caseMap{"by": "aggregatetype", "regex": "(?<routedByValue>.*)", "replacement": "NAME.$${routedByValue}"}}},
		"payload, with all that makes headers": {pollingWide, pollingWideRows, caseMap{"partition": "part", "headers-from": "meta", "headers": []string{"tenant", "amount:sum", "tags", "at"}}},
		"a null payload as null":               {pollingWide, pollingWideRows, caseMap{"null-payload": "null"}},
		"envelope":                             {pollingWide, pollingWideRows, caseMap{"format": "envelope", "envelope": []string{"amount", "tags:labels", "at"}, "headers-from": "meta"}},
		"payload with members beside it":       {pollingWide, pollingWideRows, caseMap{"envelope": []string{"amount", "meta"}, "null-payload": "null"}},
		"CloudEvents, structured":              {pollingWide, pollingWideRows, caseMap{"format": "cloudevents", "partition": "part"}},
		"CloudEvents, binary":                  {pollingWide, pollingWideRows, caseMap{"format": "cloudevents", "cloudevents": "binary", "headers-from": "meta"}},
		"templates with functions":             {pollingWide, pollingWideRows, caseMap{"topic": "{prefix}.{event_name|lower}.{event_version|default:none}", "key": "{tenant|default:nobody}-{aggregate_id|replace:o-:order-}"}},
		"route by a field":                     {pollingWide, pollingWideRows, caseMap{"route": caseMap{"by": "event_type", "regex": `(.+)\.(v[0-9]+)`, "replacement": "NAME.$2"}}},
		"names that are not recognised, and need quotes": {
			`CREATE SCHEMA "My Schema"; CREATE TABLE "My Schema"."Out Box" ("Row" bigserial PRIMARY KEY, "Event Id" uuid NOT NULL DEFAULT gen_random_uuid(), "Art" text, "Body" bytea, "select" text, "when" timestamp DEFAULT '2026-10-19 09:31:02.5', status varchar(20))`,
			`INSERT INTO "My Schema"."Out Box" ("Art", "Body", "select") SELECT 'NAME', decode(md5(g::text), 'hex'), 'k' || g % 3 FROM generate_series(1, 30) g`,
			caseMap{"table": "My Schema.Out Box", "columns": caseMap{"id": "Event Id", "type": "Art", "payload": "Body", "partition_key": "select", "occurred": "when"}, "format": "envelope", "headers": []string{"Row"}}},
		"a partitioned table": {
			`CREATE TABLE outbox (id bigserial, event_id uuid NOT NULL DEFAULT gen_random_uuid(), aggregate_id text, aggregate_seq bigint, event_type text, payload jsonb,
			   created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz, PRIMARY KEY (id, aggregate_id)) PARTITION BY HASH (aggregate_id);
			 CREATE TABLE o_0 PARTITION OF outbox FOR VALUES WITH (MODULUS 3, REMAINDER 0); CREATE TABLE o_1 PARTITION OF outbox FOR VALUES WITH (MODULUS 3, REMAINDER 1);
			 CREATE TABLE o_2 (junk int, LIKE outbox INCLUDING DEFAULTS); ALTER TABLE o_2 DROP COLUMN junk; ALTER TABLE outbox ATTACH PARTITION o_2 FOR VALUES WITH (MODULUS 3, REMAINDER 2)`,
			pollingNumbers, caseMap{}},
	} {
		t.Run(name, func(t *testing.T) {
			c := caseNew(t)
			c.setDatabase("TimeZone", "Asia/Kathmandu")
			c.setDatabase("DateStyle", "German")
			c.setDatabase("bytea_output", "escape")
			c.pg.Exec(strings.ReplaceAll(tt.table, "NAME", c.name))
			entry := caseMap{"table": "public.outbox"}
			caseMerge(entry, caseNamed(tt.entry, c.name))
			c.set(caseMap{"outbox": []caseMap{entry}, "topics": caseMap{"replication-factor": 1, "config": caseMap{"max.message.bytes": "1000000"}}})
			c.start()
			c.pg.Exec("BEGIN;" + strings.ReplaceAll(tt.rows, "NAME", c.name) + "; COMMIT")
			c.fence()
			c.stop()
			streamed := c.recordsByTopic(true)

			delete(c.config, "snapshot")
			c.config["source"] = caseMap{"dsn": c.pg.DSN(), "mode": "polling"}
			entry["after"] = "mark"
			c.catchUp()
			c.sameRecords(streamed, c.recordsByTopic(false))
		})
	}
}

// caseNamed puts the case's name in the place of NAME.
func caseNamed(m caseMap, name string) caseMap {
	out := caseMap{}
	for k, v := range m {
		switch v := v.(type) {
		case string:
			out[k] = strings.ReplaceAll(v, "NAME", name)
		case caseMap:
			out[k] = caseNamed(v, name)
		default:
			out[k] = v
		}
	}
	return out
}

// recordsByTopic gives the records of the case's topics, with a position or without, as
// text: by topic and key, in their order.
func (c *caseRun) recordsByTopic(position bool) map[string][]string {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), harness.DefaultTimeout)
	defer cancel()
	topics, err := kadm.NewClient(c.kafka.Client(c.t)).ListTopics(ctx)
	if err != nil {
		c.t.Fatal(err)
	}
	out := map[string][]string{}
	for _, topic := range topics.Names() {
		if !strings.Contains(topic, c.name) || strings.HasPrefix(topic, "_") || strings.HasSuffix(topic, ".message") {
			continue
		}
		for _, r := range c.kafka.Committed(c.t, topic) {
			text, has := c.describe(r)
			if has == position {
				key := topic + " " + string(r.Key)
				out[key] = append(out[key], text)
			}
		}
	}
	return out
}

var recordTakes = regexp.MustCompile(`the record takes [0-9]+ bytes`)

// describe gives all of a record but its position, and whether it has one.
func (c *caseRun) describe(r *kgo.Record) (text string, position bool) {
	c.t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "partition %d, key %q nil %t, value %q nil %t, headers", r.Partition, r.Key, r.Key == nil, r.Value, r.Value == nil)
	for _, h := range r.Headers {
		if h.Key == "position" {
			position = true
			continue
		}
		fmt.Fprintf(&b, " %s=%q", h.Key, h.Value)
	}
	if !strings.HasSuffix(r.Topic, ".dead-letter") {
		return b.String(), position
	}
	var letter map[string]json.RawMessage
	if err := json.Unmarshal(r.Value, &letter); err != nil {
		c.t.Fatalf("dead letter %s: %v", r.Value, err)
	}
	if bytes.Equal(letter["position"], []byte("null")) == position {
		c.t.Errorf("the dead letter's position is %s, its header is there: %t", letter["position"], position)
	}
	var row map[string]*string
	var cut []struct{ Name string }
	if err := errors.Join(json.Unmarshal(letter["row"], &row), json.Unmarshal([]byte(cmp.Or(string(letter["cut"]), "null")), &cut)); err != nil {
		c.t.Fatalf("dead letter %s: %v", r.Value, err)
	}
	for _, v := range cut {
		delete(row, v.Name) // how much of it there is room for hangs on the position
	}
	var err error
	if letter["row"], err = json.Marshal(row); err != nil {
		c.t.Fatal(err)
	}
	delete(letter, "position")
	delete(letter, "op")                                                                          // c of the stream, r of a row that was read
	letter["error"] = recordTakes.ReplaceAll(letter["error"], []byte("the record takes N bytes")) // the position is some of them
	value, err := json.Marshal(letter)
	if err != nil {
		c.t.Fatal(err)
	}
	return strings.Replace(b.String(), fmt.Sprintf("value %q", r.Value), fmt.Sprintf("letter %s", value), 1), position
}

func (c *caseRun) sameRecords(streamed, polled map[string][]string) {
	c.t.Helper()
	if len(streamed) == 0 {
		c.t.Fatal("the WAL made no records")
	}
	if a, b := slices.Sorted(maps.Keys(streamed)), slices.Sorted(maps.Keys(polled)); !slices.Equal(a, b) {
		c.t.Fatalf("topics and keys by the WAL %q, by polling %q", a, b)
	}
	for key, want := range streamed {
		got := polled[key]
		if slices.Equal(want, got) {
			continue
		}
		for i := range max(len(want), len(got)) {
			a, b := "none", "none"
			if i < len(want) {
				a = want[i]
			}
			if i < len(got) {
				b = got[i]
			}
			if a != b {
				c.t.Errorf("%s, record %d of %d and %d\nby the WAL  %.700s\nby polling  %.700s", key, i+1, len(want), len(got), a, b)
				break
			}
		}
	}
}

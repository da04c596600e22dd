package router

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/replication"
)

// debeziumRecord is a record that Debezium's EventRouter 3.6.1 sent, as captured in
// testdata/debezium: key, value and headers as text.
type debeziumRecord struct {
	Topic   string
	Key     *string
	Value   *string
	Headers [][2]*string
}

func debeziumRecords(t *testing.T, name string) (records []debeziumRecord) {
	t.Helper()
	data, err := os.ReadFile("testdata/debezium/" + name + ".jsonl")
	if err != nil {
		t.Fatal(err)
	}
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		var r debeziumRecord
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		records = append(records, r)
	}
	if len(records) == 0 {
		t.Fatal("no records")
	}
	return records
}

// The tables and rows that the captures were made of, as PostgreSQL sends them. The
// captures are in each topic's order.
func debeziumTable(t *testing.T, payload, aggregateID string, more ...string) *replication.Relation {
	return relationOf(t, "outbox", append([]string{"id uuid", "aggregatetype varchar", "aggregateid " + aggregateID, "type varchar",
		"payload " + payload, "tenant text", "ver int", "part int"}, more...)...)
}

func debeziumUUID(last string) string { return "00000000-0000-0000-0000-0000000000" + last }

func debeziumRows() []replication.Tuple {
	const at = "2026-12-01 05:54:21+00"
	return []replication.Tuple{
		rowOf(debeziumUUID("01"), "Order", "o-1", "OrderCreated", `{"id": 1, "big": 9007199254740993, "amount": 1.10, "nested": {"a": [1, 2], "e": []}}`,
			"acme", "1", "0", at, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
		rowOf(debeziumUUID("02"), "Order", "o-1", "OrderPaid", `{"id": 1, "ok": true, "note": null}`, "acme", "2", "0", at, null),
		rowOf(debeziumUUID("06"), "Order", "o-2", "InsDel", `{"x": 1}`, "t", "1", "0", at, null),
		rowOf(debeziumUUID("03"), "customer", "c 2", "CustomerRenamed", null, null, null, "0", null, null),
		rowOf(debeziumUUID("04"), "customer", "c 2", "List", `[1, 2, 3]`, "t", "3", "0", at, null),
	}
}

func TestDebeziumsEventRouterIsReproduced(t *testing.T) {
	outbox := debeziumTable(t, "jsonb", "varchar", "at timestamptz", "traceparent text")
	all := debeziumRows()
	texts := []replication.Tuple{
		rowOf(debeziumUUID("12"), "Order", "o-1", "T", `{"a":1}`, "acme", "1", "0"), rowOf(debeziumUUID("13"), "Order", "o-1", "T", "plain text é", "acme", "1", "0"),
		rowOf(debeziumUUID("14"), "Order", "o-1", "T", "", "acme", "1", "0"), rowOf(debeziumUUID("15"), "Order", "o-1", "T", "{broken", "acme", "1", "0"),
	}
	bytea := []replication.Tuple{
		rowOf(debeziumUUID("22"), "Order", "42", "B", `\x00010203`, "acme", "1", "0"), rowOf(debeziumUUID("23"), "Order", "42", "B", `\x`, "acme", "1", "0"),
		rowOf(debeziumUUID("24"), "Order", "42", "B", null, "acme", "1", "0"),
	}
	asIs := func(v *string) *string { return v }
	tests := []struct {
		capture string
		rel     *replication.Relation
		rows    []replication.Tuple
		options OutboxOptions
		// theirs and ours bring values whose bytes differ to one form; nil compares bytes.
		theirs, ours func(*string) *string
	}{
		{"outbox-default", outbox, all, OutboxOptions{JSONStrings: true, NullPayload: NullPayloadNull}, nil, nil},
		// Debezium's value is a Java object's text, Struct{payload=…,ver=1}: ours is the object.
		{"outbox-string", outbox, all, OutboxOptions{Headers: []string{"type:eventType", "tenant"}, Envelope: []string{"ver"}, NullPayload: NullPayloadNull},
			structText, wrappedText},
		{"outbox-string2", outbox, all, OutboxOptions{Headers: []string{"type:eventType", "tenant"}, Route: RouteOptions{Regex: "(?<routedByValue>.*)", Replacement: "events.${routedByValue}"}}, nil, nil},
		// Debezium loses 1.10's zero, empty arrays and members that are null.
		{"outbox-expand", outbox, all[:4], OutboxOptions{NullPayload: NullPayloadNull, Key: `"{aggregate_id}"`}, canonical, lossy},
		{"outbox-partition", outbox, all, OutboxOptions{Partition: "part", Headers: []string{"type"}}, nil, nil},
		{"outbox-text", debeziumTable(t, "text", "varchar"), texts, OutboxOptions{}, nil, nil},
		{"outbox-bytes", debeziumTable(t, "bytea", "bigint"), bytea, OutboxOptions{Headers: []string{"type"}}, nil, nil},
	}
	for _, tt := range tests {
		t.Run(tt.capture, func(t *testing.T) {
			p := mustPlan(t, tt.rel, tt.options)
			theirs, ours := tt.theirs, tt.ours
			if theirs == nil {
				theirs, ours = asIs, asIs
			}
			records := debeziumRecords(t, tt.capture)
			if len(records) != len(tt.rows) {
				t.Fatalf("%d records of %d rows", len(records), len(tt.rows))
			}
			for i, want := range records {
				var ev event
				if err := p.appendEvent(&ev, &scratch{}, tt.rows[i]); err != nil {
					t.Fatal(err)
				}
				got := debeziumRecord{Topic: ev.Topic, Key: textOf(ev.Key)}
				if !ev.NullValue {
					got.Value = textOf(ev.Value)
				}
				have := map[string]string{}
				for _, h := range ev.Headers {
					have[h.Key] = string(h.Value)
				}
				// A header of Debezium's that is null is one that we leave out; we have more.
				for _, h := range want.Headers {
					value, there := have[*h[0]]
					if there != (h[1] != nil) || there && value != *h[1] {
						t.Errorf("record %d: header %s is %q (%v)", i, *h[0], value, there)
					}
				}
				want.Headers, want.Value, got.Value = nil, theirs(want.Value), ours(got.Value)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("record %d (-debezium +walrelay):\n%s", i, diff)
				}
				if tt.options.Partition != "" && ev.Partition != 0 {
					t.Errorf("record %d: partition %d", i, ev.Partition)
				}
			}
		})
	}
}

func textOf(b []byte) *string { s := string(b); return &s }

// structText is {payload=A,ver=B} with null for what is not there.
func structText(s *string) *string {
	inner := strings.TrimSuffix(strings.TrimPrefix(*s, "Struct{"), "}")
	payload, ver := "null", "null"
	if at := strings.LastIndex(inner, ",ver="); at >= 0 {
		payload, ver = strings.TrimPrefix(inner[:at], "payload="), inner[at+len(",ver="):]
	}
	return textOf([]byte(payload + " / " + ver))
}

func wrappedText(s *string) *string {
	var v struct{ Payload, Ver json.RawMessage }
	if err := json.Unmarshal([]byte(*s), &v); err != nil {
		return textOf([]byte(err.Error()))
	}
	return textOf([]byte(string(v.Payload) + " / " + string(v.Ver)))
}

// canonical is JSON with its numbers' digits and its members in order.
func canonical(s *string) *string { return rewriteJSON(*s, func(v any) (any, bool) { return v, true }) }

// lossy is JSON with Debezium's losses.
func lossy(s *string) *string {
	return rewriteJSON(*s, func(v any) (any, bool) {
		if list, ok := v.([]any); v == nil || ok && len(list) == 0 {
			return nil, false
		}
		if n, ok := v.(json.Number); ok && strings.Contains(n.String(), ".") {
			return json.Number(strings.TrimRight(n.String(), "0")), true
		}
		return v, true
	})
}

func rewriteJSON(s string, change func(any) (any, bool)) *string {
	d := json.NewDecoder(strings.NewReader(s))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return textOf([]byte(err.Error()))
	}
	var walk func(any) any
	walk = func(v any) any {
		object, ok := v.(map[string]any)
		if !ok {
			return v
		}
		for name, member := range object {
			if changed, keep := change(member); keep {
				object[name] = walk(changed)
			} else {
				delete(object, name)
			}
		}
		return object
	}
	out, _ := json.Marshal(walk(v))
	return textOf(out)
}

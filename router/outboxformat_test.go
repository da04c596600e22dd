package router

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/replication"
)

func formatRelation(t testing.TB, payload string) *replication.Relation {
	return relationOf(t, "outbox", "event_id text", "event_type text", "schema_version int", "occurred_at timestamptz", "producer text",
		"aggregate_type text", "aggregate_id text", "aggregate_seq bigint", "partition_key text", "correlation_id text", "causation_id text",
		"payload "+payload, "part int", "meta jsonb")
}

func formatRow(payload string) replication.Tuple {
	return rowOf("ev-7", "payment.charged.v3", "3", "2026-10-19 09:31:02.114+00", "pay/2.1", "order", "order-8891", "7", "acct-1", "c-1", "ev-6",
		payload, null, null)
}

func bareRow(payload string) replication.Tuple {
	return rowOf("ev-8", "t", null, "infinity", null, null, null, null, null, null, null, payload, "4", `{"a":"x\ny","n":1.50,"type":"no","o":{"b": []},"z":null,"position":"1"}`)
}

func TestOutboxFormats(t *testing.T) {
	tests := []struct {
		name, payload string
		options       OutboxOptions
		row           replication.Tuple
		value         string
		headers       []string // which have to be there, among others
		without       string   // no header of this name
	}{
		{"the event envelope", "json", OutboxOptions{Format: FormatEnvelope}, formatRow(`{"amount_cents":12800}`),
			`{"event_id":"ev-7","type":"payment.charged.v3","version":3,"occurred_at":"2026-10-19T09:31:02.114Z","producer":"pay/2.1","aggregate_type":"order","aggregate_id":"order-8891","aggregate_seq":7,"partition_key":"acct-1","correlation_id":"c-1","causation_id":"ev-6","payload":{"amount_cents":12800}}`,
			[]string{"id=ev-7"}, "ce_id"},
		{"absent fields are null, bytes are base64", "bytea", OutboxOptions{Format: FormatEnvelope, Envelope: []string{"part:p"}}, bareRow(`\x00ff`),
			`{"event_id":"ev-8","type":"t","version":null,"occurred_at":"infinity","producer":null,"aggregate_type":null,"aggregate_id":null,"aggregate_seq":null,"partition_key":null,"correlation_id":null,"causation_id":null,"payload":"AP8=","p":4}`,
			nil, "ce_id"},
		{"a NULL payload in the envelope", "text", OutboxOptions{Format: FormatEnvelope, NullPayload: NullPayloadNull}, bareRow(null),
			`{"event_id":"ev-8","type":"t","version":null,"occurred_at":"infinity","producer":null,"aggregate_type":null,"aggregate_id":null,"aggregate_seq":null,"partition_key":null,"correlation_id":null,"causation_id":null,"payload":null}`, nil, "ce_id"},
		{"CloudEvents, structured", "json", OutboxOptions{Format: FormatCloudEvents}, formatRow(`{"a":1.10}`),
			`{"specversion":"1.0","id":"ev-7","source":"pay/2.1","type":"payment.charged.v3","subject":"order-8891","time":"2026-10-19T09:31:02.114Z","aggregatetype":"order","aggregateseq":"7","schemaversion":"3","partitionkey":"acct-1","correlationid":"c-1","causationid":"ev-6","datacontenttype":"application/json","data":{"a":1.10}}`,
			[]string{"content-type=application/cloudevents+json; charset=UTF-8", "id=ev-7"}, "ce_id"},
		{"CloudEvents, structured, of bytes, without what is not there", "bytea", OutboxOptions{Format: FormatCloudEvents}, bareRow(`\x00ff`),
			`{"specversion":"1.0","id":"ev-8","source":"/shop/public.outbox","type":"t","datacontenttype":"application/octet-stream","data_base64":"AP8="}`, nil, "ce_id"},
		{"CloudEvents, structured, of text that JSON escapes", "text", OutboxOptions{Format: FormatCloudEvents}, bareRow("a\"\n"),
			`{"specversion":"1.0","id":"ev-8","source":"/shop/public.outbox","type":"t","datacontenttype":"text/plain","data":"a\"\n"}`, nil, "ce_id"},
		{"CloudEvents, structured, of null", "text", OutboxOptions{Format: FormatCloudEvents, NullPayload: NullPayloadNull}, bareRow(null),
			`{"specversion":"1.0","id":"ev-8","source":"/shop/public.outbox","type":"t","datacontenttype":"application/json","data":null}`, nil, "ce_id"},
		{"CloudEvents, binary", "jsonb", OutboxOptions{Format: FormatCloudEvents, CloudEvents: CloudEventsBinary}, formatRow(`{"a": 1.10}`), `{"a": 1.10}`,
			[]string{"ce_specversion=1.0", "ce_id=ev-7", "ce_source=pay/2.1", "ce_type=payment.charged.v3", "ce_subject=order-8891", "ce_time=2026-10-19T09:31:02.114Z", "ce_partitionkey=acct-1", "content-type=application/json"}, "ce_traceparent"},
		{"CloudEvents, binary, of Avro", "bytea", OutboxOptions{Format: FormatCloudEvents, CloudEvents: CloudEventsBinary}, bareRow(`\x00ff`), "\x00\xff",
			[]string{"content-type=application/octet-stream"}, "ce_time"},
		{"CloudEvents, binary, of null", "bytea", OutboxOptions{Format: FormatCloudEvents, CloudEvents: CloudEventsBinary, NullPayload: NullPayloadNull}, bareRow(null),
			"null", []string{"ce_id=ev-8", "content-type=application/json"}, ""},
		{"a tombstone has no content", "bytea", OutboxOptions{Format: FormatCloudEvents, CloudEvents: CloudEventsBinary}, bareRow(null), "(tombstone)", []string{"ce_id=ev-8"}, "content-type"},
		{"the payload with columns beside it", "jsonb", OutboxOptions{Envelope: []string{"schema_version:v", "partition_key"}}, formatRow(`{"a": 1.10}`),
			`{"payload":{"a": 1.10},"v":3,"partition_key":"acct-1"}`, nil, "ce_id"},
		{"JSON strings", "text", OutboxOptions{JSONStrings: true}, formatRow("a\"b"), `"a\"b"`, []string{"aggregate_id=order-8891"}, "ce_id"},
		{"headers of an object, not those that columns make", "text", OutboxOptions{HeadersFrom: "meta"}, bareRow("x"), "x",
			[]string{"a=x\ny", "n=1.50", `o={"b": []}`, "type=t"}, "z"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.options.Topic = "x"
			p := mustPlan(t, formatRelation(t, tt.payload), tt.options)
			var s scratch
			var ev event
			if err := p.appendEvent(&ev, &s, tt.row); err != nil {
				t.Fatal(err)
			}
			got := string(ev.Value)
			if ev.NullValue {
				got = "(tombstone)"
			}
			if diff := cmp.Diff(tt.value, got); diff != "" {
				t.Errorf("value (-want +got):\n%s", diff)
			}
			all := describeEvent(&ev) + "\n"
			for _, h := range tt.headers {
				if !strings.Contains(all, "\n"+h+"\n") {
					t.Errorf("no header %s in\n%s", h, all)
				}
			}
			if strings.Contains(all, "\n"+tt.without+"=") || strings.Contains(all, "\nposition=") {
				t.Errorf("a header %s or position in\n%s", tt.without, all)
			}
			if allocs := testing.AllocsPerRun(20, func() {
				s.reset()
				if err := p.appendEvent(&ev, &s, tt.row); err != nil {
					t.Fatal(err)
				}
			}); allocs != 0 {
				t.Errorf("%v allocations", allocs)
			}
		})
	}
}

func TestOutboxRowsThatAFormatCannotTake(t *testing.T) {
	with := func(column int, text string) replication.Tuple {
		row := formatRow(`"x"`)
		row[column] = rowOf(text)[0]
		return row
	}
	for _, tt := range []struct {
		name, payload string
		options       OutboxOptions
		row           replication.Tuple
		reason        string
	}{
		{"no CloudEvents type", "json", OutboxOptions{Format: FormatCloudEvents}, with(1, null), ReasonMalformed},
		{"an empty CloudEvents type, binary", "json", OutboxOptions{Format: FormatCloudEvents, CloudEvents: CloudEventsBinary}, with(1, ""), ReasonMalformed},
		{"a CloudEvents attribute with a control character", "json", OutboxOptions{Format: FormatCloudEvents}, with(6, "a\nb"), ReasonMalformed},
		{"the same, binary", "json", OutboxOptions{Format: FormatCloudEvents, CloudEvents: CloudEventsBinary}, with(10, "a\u0085"), ReasonMalformed},
		{"text that is not UTF-8", "text", OutboxOptions{Format: FormatEnvelope}, with(11, "\xff"), ReasonEncode},
		{"a key that is not UTF-8", "text", OutboxOptions{JSONStrings: true}, with(8, "\xff"), ReasonEncode},
		{"headers that are no object", "json", OutboxOptions{HeadersFrom: "meta"}, with(13, "[1]"), ReasonMalformed},
		{"a header without a name", "json", OutboxOptions{HeadersFrom: "meta"}, with(13, `{"":1}`), ReasonMalformed},
		{"a negative partition", "json", OutboxOptions{Partition: "part"}, with(12, "-1"), ReasonMalformed},
		{"a route that does not match", "json", OutboxOptions{Route: RouteOptions{Regex: "(ord)"}}, formatRow("1"), ReasonRoute},
		{"a route that matches the end alone", "json", OutboxOptions{Route: RouteOptions{Regex: "(der)"}}, formatRow("1"), ReasonRoute},
		{"a route to no topic's name", "json", OutboxOptions{Route: RouteOptions{Replacement: "a b"}}, formatRow("1"), ReasonRoute},
		{"a route by NULL", "json", OutboxOptions{Route: RouteOptions{By: "part"}}, formatRow("1"), ReasonRoute},
	} {
		p := mustPlan(t, formatRelation(t, tt.payload), tt.options)
		var ev event
		err := p.appendEvent(&ev, &scratch{}, tt.row)
		var re *RouteError
		if !errors.As(err, &re) || re.Reason != tt.reason {
			t.Errorf("%s: got %v, want %s", tt.name, err, tt.reason)
		}
		if len(ev.Key) == 0 {
			t.Errorf("%s: the dead letter has no key", tt.name)
		}
		if err := p.appendEvent(&ev, &scratch{}, with(12, "2")); err != nil && tt.reason != ReasonRoute {
			t.Errorf("%s: the next row: %v", tt.name, err)
		}
	}
}

func TestOutboxTopicsByRouteAndByVersion(t *testing.T) {
	for _, tt := range []struct {
		options OutboxOptions
		want    string
	}{
		{OutboxOptions{Route: RouteOptions{By: "event_type", Regex: `(.+)\.(v[0-9]+)`, Replacement: "ev.$2.$1"}}, "ev.v3.payment.charged"},
		{OutboxOptions{Route: RouteOptions{By: "type", Regex: `(?P<a>[a-z]+).*`, Replacement: `${a}\.$10`}}, "payment.payment0"},
		{OutboxOptions{Route: RouteOptions{Regex: "order"}}, ""}, // no group 1
		{OutboxOptions{Topic: "ev.{event_name}"}, "ev.payment.charged"},
		{OutboxOptions{Topic: "ev.{event_version|default:v1}"}, "ev.v3"},
	} {
		o := tt.options
		p, err := compileOutbox(sourceOf(formatRelation(t, "json")), &o, envForTest())
		if err != nil {
			if tt.want != "" || !strings.Contains(err.Error(), "names no group") {
				t.Errorf("%+v: %v", o, err)
			}
			continue
		}
		for range 2 {
			var ev event
			if err := p.appendEvent(&ev, &scratch{}, formatRow("1")); err != nil || ev.Topic != tt.want {
				t.Errorf("%+v: topic %q, %v; want %q", o, ev.Topic, err, tt.want)
			}
		}
	}
	for text, want := range map[string]string{"a.v1": "a v1", "a.b.v20": "a.b v20", "a": "a ", "v1": "v1 ", ".v1": ".v1 ", "a.v": "a.v ", "av1": "av1 ", "a.vx1": "a.vx1 ", "": " "} {
		if got := string(partName.of([]byte(text))) + " " + string(partVersion.of([]byte(text))); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestSequenceFaultsAreCountedAndSaidOnce(t *testing.T) {
	p := mustPlan(t, schemaO(t), OutboxOptions{})
	var got []string
	report := func(f *SequenceFault) {
		got = append(got, fmt.Sprintf("%s %d>%d %v %s", f.Kind(), f.Last, f.Seq, f.First, f.Aggregate))
	}
	for _, step := range []string{"a 5", "b 1", "a 6", "a 8", "a 7", "b 2", "a 9", "b 2"} {
		id, seq, _ := strings.Cut(step, " ")
		row := rowO()
		row[2].Text, row[3].Text = []byte(id), []byte(seq)
		p.observe(row, report)
	}
	want := []string{"gap 6>8 true a", "backward 8>7 false ", "backward 2>2 true b"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}

	// Ever new aggregates take no more memory, and cost no allocation.
	row := rowO()
	n := 0
	allocs := testing.AllocsPerRun(200_000, func() {
		n++
		row[2].Text = append(row[2].Text[:0], fmt.Sprintf("%8x", n)[:8]...)
		p.observe(row, report)
	})
	if allocs > 2 { // of the name
		t.Errorf("%v allocations", allocs)
	}

	global := mustPlan(t, relationOf(t, "outbox", "id uuid", "event_type text", "payload jsonb", "sequence_num bigint", "aggregate_id text"), OutboxOptions{})
	got = nil
	for _, seq := range []string{"1", "7", "5"} {
		global.observe(rowOf("e", "t", "{}", seq, "a"), report)
	}
	if diff := cmp.Diff([]string{"backward 7>5 true a"}, got); diff != "" {
		t.Errorf("faults of a table's sequence (-want +got):\n%s", diff)
	}
}

// FuzzOutboxTexts lets rows and configuration say anything: no panic, no event with a
// topic that is none, and JSON where JSON is meant.
func FuzzOutboxTexts(f *testing.F) {
	f.Add("x.{event_type|lower|replace:a:b|default:c}", "(.*)", "o.$1", `{"a":"b"}`, "order.v1")
	f.Add(`\{{event_version}`, `(?P<a>x)|y`, `\$${a}$10`, `{"":[1,{"x":null}]}`, "\xff")
	f.Fuzz(func(t *testing.T, template, regex, replacement, meta, text string) {
		rel := formatRelation(t, "text")
		for _, o := range []OutboxOptions{
			{Topic: template, Key: template, HeadersFrom: "meta", JSONStrings: true},
			{Route: RouteOptions{By: "type", Regex: regex, Replacement: replacement}, Format: FormatEnvelope},
			{Topic: "x", Format: FormatCloudEvents, HeadersFrom: "meta"},
		} {
			p, err := compileOutbox(sourceOf(rel), &o, envForTest())
			if err != nil {
				continue
			}
			row := formatRow(text)
			row[1].Text, row[4].Text = []byte(text), []byte(text)
			row[13] = rowOf(meta)[0]
			var ev event
			err = p.appendEvent(&ev, &scratch{}, row)
			var re *RouteError
			switch {
			case err != nil && !errors.As(err, &re):
				t.Fatal(err)
			case err != nil:
			case validTopicForTest(ev.Topic) != nil:
				t.Fatalf("topic %q", ev.Topic)
			case !json.Valid(ev.Value) || !utf8.Valid(ev.Value):
				t.Fatalf("value %q", ev.Value)
			}
			if err == nil && !o.Route.IsZero() {
				if m, _ := regexp.MatchString(`\A(?:`+p.route.source+`)\z`, text); !m {
					t.Fatalf("%q does not match %q", text, regex)
				}
			}
		}
	})
}

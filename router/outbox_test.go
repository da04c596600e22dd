package router

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// relationOf makes a relation of "name type" columns.
func relationOf(t testing.TB, name string, columns ...string) *replication.Relation {
	t.Helper()
	oids := map[string]uint32{
		"bytea": oidBytea, "bigint": oidInt8, "smallint": oidInt2, "int": oidInt4, "text": oidText, "json": oidJSON,
		"varchar": oidVarchar, "timestamp": oidTimestamp, "timestamptz": oidTimestamptz, "uuid": oidUUID, "jsonb": oidJSONB,
	}
	rel := &replication.Relation{OID: 16384, Schema: "public", Name: name}
	for i, c := range columns {
		column, typ, _ := strings.Cut(c, " ")
		oid, ok := oids[typ]
		if !ok {
			t.Fatalf("no OID for type %q", typ)
		}
		rel.Columns = append(rel.Columns, replication.Column{Name: column, TypeOID: oid, TypeMod: -1, Identity: i == 0})
	}
	return rel
}

const null = "\x00NULL"

func rowOf(texts ...string) replication.Tuple {
	row := make(replication.Tuple, len(texts))
	for i, s := range texts {
		row[i] = replication.Value{Kind: replication.ValueText, Text: []byte(s)}
		if s == null {
			row[i] = replication.Value{Kind: replication.ValueNull}
		}
	}
	return row
}

var topicRunes = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)

func validTopicForTest(name string) error {
	if !topicRunes.MatchString(name) {
		return errors.New("a topic's name has letters, digits, '.', '_' and '-' only")
	}
	return nil
}

func envForTest() outboxEnv {
	return outboxEnv{name: "shop", prefix: "shop", validTopic: validTopicForTest}
}

func sourceOf(rel *replication.Relation) eventSource {
	s, err := tableSource(rel, new(format.Encoder), func(oid uint32) (*format.Type, error) { return format.Builtin(oid), nil })
	if err != nil {
		panic(err)
	}
	return s
}

func mustPlan(t testing.TB, rel *replication.Relation, o OutboxOptions) *outboxPlan {
	t.Helper()
	p, err := compileOutbox(sourceOf(rel), &o, envForTest())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// describeEvent gives an event as text: topic, key, value, headers.
func describeEvent(ev *event) string {
	var b strings.Builder
	fmt.Fprintf(&b, "topic %s\nkey %s\n", ev.Topic, ev.Key)
	if ev.NullValue {
		b.WriteString("tombstone\n")
	} else {
		fmt.Fprintf(&b, "value %s\n", ev.Value)
	}
	for _, h := range ev.Headers {
		fmt.Fprintf(&b, "%s=%s\n", h.Key, h.Value)
	}
	return b.String()
}

func schemaO(t testing.TB) *replication.Relation {
	return relationOf(t, "outbox", "id bigint", "event_id uuid", "aggregate_id text", "aggregate_seq bigint",
		"event_type text", "payload jsonb", "created_at timestamptz", "published_at timestamptz")
}

const testUUID = "3fa85f64-5717-4562-b3fc-2c963f66afa6"

func rowO() replication.Tuple {
	return rowOf("1", testUUID, "order-8891", "7", "payment.charged",
		`{"currency": "CNY", "order_id": "order-8891", "amount_cents": 12800}`, "2026-10-19 09:31:02.114+00", null)
}

func TestOutboxEvents(t *testing.T) {
	withoutAggregate := func(t testing.TB) *replication.Relation {
		return relationOf(t, "outbox", "id uuid", "event_type text", "payload jsonb", "created_at timestamptz", "status text")
	}
	debezium := func(t testing.TB) *replication.Relation {
		return relationOf(t, "outbox", "id uuid", "aggregatetype varchar", "aggregateid varchar", "type varchar", "payload jsonb")
	}
	domain := func(t testing.TB) *replication.Relation {
		return relationOf(t, "domain_event_outbox", "id bigint", "event_id varchar", "aggregate_type varchar", "aggregate_id varchar",
			"event_type varchar", "payload json", "status smallint", "retry_count int", "created_at timestamptz")
	}
	tests := []struct {
		name    string
		rel     func(testing.TB) *replication.Relation
		options OutboxOptions
		row     replication.Tuple
		want    string
	}{
		{"event_id wins over the numeric id and the payload stays as it stands", schemaO, OutboxOptions{}, rowO(),
			"topic outbox.event.payment.charged\nkey order-8891\n" +
				`value {"currency": "CNY", "order_id": "order-8891", "amount_cents": 12800}` + "\n" +
				"id=" + testUUID + "\ntype=payment.charged\naggregate_id=order-8891\naggregate_seq=7\noccurred_at=2026-10-19T09:31:02.114Z\n"},
		{"without an aggregate the event id is the key", withoutAggregate, OutboxOptions{},
			rowOf(testUUID, "order.created", "{}", null, "pending"),
			"topic outbox.event.order.created\nkey " + testUUID + "\nvalue {}\nid=" + testUUID + "\ntype=order.created\n"},
		{"without an aggregate, with created_at", withoutAggregate, OutboxOptions{},
			rowOf(testUUID, "order.created", "{}", "2026-10-19 09:31:02+00", "pending"),
			"topic outbox.event.order.created\nkey " + testUUID + "\nvalue {}\nid=" + testUUID + "\ntype=order.created\noccurred_at=2026-10-19T09:31:02Z\n"},
		{"the aggregate type routes and json keeps its bytes", domain, OutboxOptions{},
			rowOf("1", "e-1", "Order", "42", "OrderPaid", "{\"amountFen\": 12800,\n  \"amountFen\": 12800.0}", "0", "0", "2026-10-19 09:31:02.114+00"),
			"topic outbox.event.Order\nkey 42\nvalue {\"amountFen\": 12800,\n  \"amountFen\": 12800.0}\n" +
				"id=e-1\ntype=OrderPaid\naggregate_type=Order\naggregate_id=42\noccurred_at=2026-10-19T09:31:02.114Z\n"},
		{"Debezium's columns are recognised", debezium, OutboxOptions{},
			rowOf(testUUID, "order", "42", "OrderPaid", `{"a": 1.10}`),
			"topic outbox.event.order\nkey 42\nvalue {\"a\": 1.10}\nid=" + testUUID + "\ntype=OrderPaid\naggregate_type=order\naggregate_id=42\n"},
		{"a NULL payload is a tombstone", debezium, OutboxOptions{}, rowOf(testUUID, "order", "42", "OrderPaid", null),
			"topic outbox.event.order\nkey 42\ntombstone\nid=" + testUUID + "\ntype=OrderPaid\naggregate_type=order\naggregate_id=42\n"},
		{"a NULL payload is the JSON null when told so", debezium, OutboxOptions{NullPayload: NullPayloadNull}, rowOf(testUUID, "order", "42", null, null),
			"topic outbox.event.order\nkey 42\nvalue null\nid=" + testUUID + "\naggregate_type=order\naggregate_id=42\n"},
		{"templates for topic and key, and further headers", schemaO,
			OutboxOptions{Topic: "{prefix}.{event_type|replace:.:-}", Key: "{event_id}", Headers: []string{"published_at", "aggregate_id"}},
			rowOf("1", testUUID, "o", "7", "Payment.Charged.v2", "{}", null, "2026-10-19 09:31:02+00"),
			"topic shop.Payment-Charged-v2\nkey " + testUUID + "\nvalue {}\nid=" + testUUID +
				"\ntype=Payment.Charged.v2\naggregate_id=o\naggregate_seq=7\npublished_at=2026-10-19 09:31:02+00\n"},
		{"a key template without text leaves the key to the columns", schemaO, OutboxOptions{Key: "{published_at}"}, rowO(),
			strings.TrimSuffix("topic outbox.event.payment.charged\nkey order-8891\n"+
				`value {"currency": "CNY", "order_id": "order-8891", "amount_cents": 12800}`+"\n"+
				"id="+testUUID+"\ntype=payment.charged\naggregate_id=order-8891\naggregate_seq=7\noccurred_at=2026-10-19T09:31:02.114Z\n", "")},
		{"bytea payloads go out as their bytes, partition_key goes first, version is the schema's",
			func(t testing.TB) *replication.Relation {
				return relationOf(t, "outbox", "event_id text", "event_type text", "version int", "occurred_at timestamp", "created_at timestamptz",
					"aggregate_type text", "aggregate_id text", "aggregate_seq bigint", "partition_key text", "correlation_id text",
					"causation_id text", "traceparent text", "producer text", "payload bytea")
			}, OutboxOptions{},
			rowOf("e", "t", "3", "2026-10-19 09:31:02.5", "2020-01-01 00:00:00+00", "order", "o-1", "7", "acct-1", "c-1", "e-0", "00-1", "pay", `\x00ff4142`),
			"topic outbox.event.order\nkey acct-1\nvalue \x00\xffAB\nid=e\ntype=t\naggregate_type=order\naggregate_id=o-1\naggregate_seq=7\n" +
				"occurred_at=2026-10-19T09:31:02.5\nschema_version=3\ncorrelation_id=c-1\ncausation_id=e-0\ntraceparent=00-1\n"},
		{"a NULL partition_key leaves the key to the aggregate, version is the sequence",
			func(t testing.TB) *replication.Relation {
				return relationOf(t, "outbox", "id uuid", "aggregate_type text", "aggregate_id text", "partition_key text", "version int", "payload text")
			}, OutboxOptions{}, rowOf("e", "order", "o-1", null, "4", ""),
			"topic outbox.event.order\nkey o-1\nvalue \nid=e\naggregate_type=order\naggregate_id=o-1\naggregate_seq=4\n"},
		{"configured columns go before recognised ones",
			func(t testing.TB) *replication.Relation {
				return relationOf(t, "log", "nr bigint", "kind text", "event_type text", "version int", "body json", "at timestamptz")
			}, OutboxOptions{Columns: map[string]string{"id": "nr", "type": "kind", "payload": "body", "schema_version": "version", "occurred": "at"}},
			rowOf("9", "k", "ignored", "2", "[]", "infinity"),
			"topic outbox.event.k\nkey 9\nvalue []\nid=9\ntype=k\noccurred_at=infinity\nschema_version=2\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := mustPlan(t, tt.rel(t), tt.options)
			var s scratch
			var ev event
			if err := p.appendEvent(&ev, &s, tt.row); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, describeEvent(&ev)); diff != "" {
				t.Errorf("event (-want +got):\n%s", diff)
			}
			if !ev.NullValue && ev.Value == nil {
				t.Error("value is nil, which is a tombstone to the client")
			}
		})
	}
}

func TestOutboxShapesAreRecognisedUnmapped(t *testing.T) {
	tests := []struct {
		columns []string
		want    string
	}{
		{[]string{"id bigint", "event_id uuid", "aggregate_id text", "aggregate_seq bigint", "event_type text", "payload jsonb", "created_at timestamptz", "published_at timestamptz"},
			"id=event_id type=event_type aggregate_id=aggregate_id seq=aggregate_seq occurred=created_at payload=payload"},
		{[]string{"id bigint", "event_id varchar", "aggregate_type varchar", "aggregate_id varchar", "event_type varchar", "payload json", "status smallint", "retry_count int", "next_retry_at timestamptz", "created_at timestamptz"},
			"id=event_id type=event_type aggregate_type=aggregate_type aggregate_id=aggregate_id occurred=created_at payload=payload"},
		{[]string{"id uuid", "event_type text", "payload jsonb", "created_at timestamptz", "status text", "sequence_num bigint", "aggregate_id text"},
			"id=id type=event_type aggregate_id=aggregate_id seq=sequence_num occurred=created_at payload=payload"},
		{[]string{"id uuid", "aggregatetype varchar", "aggregateid varchar", "type varchar", "payload jsonb"},
			"id=id type=type aggregate_type=aggregatetype aggregate_id=aggregateid payload=payload"},
		{[]string{"id uuid", "type text", "payload text", "version int", "sequence_num int"},
			"id=id type=type seq=sequence_num schema_version=version payload=payload"},
		{[]string{"id uuid", "type text", "payload text", "version int", "schema_version int"},
			"id=id type=type seq=version schema_version=schema_version payload=payload"},
	}
	for _, tt := range tests {
		p := mustPlan(t, relationOf(t, "outbox", tt.columns...), OutboxOptions{})
		if got := strings.Join(p.recognised(), " "); got != tt.want {
			t.Errorf("%v:\n got %s\nwant %s", tt.columns, got, tt.want)
		}
	}
}

func TestOutboxMappingErrorsNameColumnsAndAWorkingMapping(t *testing.T) {
	tests := []struct {
		name     string
		columns  []string
		options  OutboxOptions
		problems []string
		mapping  string // what the error suggests; "" where nothing can work
	}{
		{"nothing is recognised", []string{"nr bigint", "uid uuid", "kind text", "body jsonb"}, OutboxOptions{},
			[]string{"no column is recognised as id", "no column is recognised as payload", "no column is recognised as type"},
			"{id: uid, type: kind, payload: body}"},
		{"only the payload is missing", []string{"id uuid", "event_type text", "Data json"}, OutboxOptions{},
			[]string{"no column is recognised as payload"}, `{payload: "Data"}`},
		{"a topic template needs no type", []string{"key uuid", "payload text"}, OutboxOptions{Topic: "events"},
			[]string{"no column is recognised as id"}, "{id: key}"},
		{"two spellings", []string{"id uuid", "payload text", "aggregate_type text", "aggregatetype text"}, OutboxOptions{},
			[]string{"aggregate_type may be column aggregate_type or aggregatetype"}, "{aggregate_type: aggregate_type}"},
		{"an unknown column", []string{"id uuid", "event_type text", "payload text"}, OutboxOptions{Columns: map[string]string{"payload": "boddy", "subject": "id"}},
			[]string{`the table has no column "boddy"`, `no field "subject"`}, ""},
		{"no column is left", []string{"id uuid", "event_type text"}, OutboxOptions{},
			[]string{"no column left for: payload"}, ""},
	}
	suggested := regexp.MustCompile(`columns: \{(.*)\}$`)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			rel := relationOf(t, "outbox", tt.columns...)
			_, err := compileOutbox(sourceOf(rel), &tt.options, envForTest())
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range append(tt.problems, "public.outbox", "columns found: "+tt.columns[0]) {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error lacks %q:\n%v", want, err)
				}
			}
			if tt.mapping == "" {
				return
			}
			if !strings.Contains(err.Error(), "columns: "+tt.mapping) {
				t.Errorf("error lacks the mapping %s:\n%v", tt.mapping, err)
			}
			o := tt.options
			o.Columns = map[string]string{}
			for pair := range strings.SplitSeq(suggested.FindStringSubmatch(err.Error())[1], ", ") {
				field, column, _ := strings.Cut(pair, ": ")
				o.Columns[field] = strings.Trim(column, `"`)
			}
			if _, err := compileOutbox(sourceOf(rel), &o, envForTest()); err != nil {
				t.Errorf("the suggested mapping does not work: %v", err)
			}
		})
	}
}

func TestOutboxOptionErrors(t *testing.T) {
	for want, o := range map[string]OutboxOptions{
		`no field {aggregate_type}; there are the columns id, event_id, aggregate_id`: {Topic: "x.{aggregate_type}"},
		`key: compile template`:                          {Key: "{nope}"},
		`headers: the table has no column "tenant"`:      {Headers: []string{"tenant"}},
		`column "id" would make a second header "id"`:    {Headers: []string{"id"}},
		`null-payload: "none" is neither`:                {NullPayload: "none"},
		`the fields aggregate_id, aggregate_seq, event_`: {Topic: "{Event_type}"},
	} {
		if _, err := compileOutbox(sourceOf(schemaO(t)), &o, envForTest()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

func TestOutboxRowsThatCannotBeRouted(t *testing.T) {
	long := strings.Repeat("x", 100_000)
	tests := []struct {
		name   string
		change func(row replication.Tuple)
		topic  string
		reason string
		detail string
		// what the dead letter gets
		wantTopic, wantKey string
	}{
		{"an invalid topic name", func(r replication.Tuple) { r[4].Text = []byte("bad type/ü") }, "ev.{event_type}",
			ReasonRoute, `"ev.bad type/ü"`, "ev.bad type/ü", "order-8891"},
		{"a long invalid topic name is cut in the error", func(r replication.Tuple) { r[4].Text = []byte(long) }, "ev.{event_type}",
			ReasonRoute, "99703 bytes more", "ev." + long[:246], "order-8891"},
		{"a NULL type", func(r replication.Tuple) { r[4] = replication.Value{Kind: replication.ValueNull} }, "",
			ReasonRoute, "field {event_type} of the topic", "", "order-8891"},
		{"an empty type", func(r replication.Tuple) { r[4].Text = nil }, "", ReasonRoute, "NULL or empty", "", "order-8891"},
		{"a NULL event id", func(r replication.Tuple) { r[1] = replication.Value{Kind: replication.ValueNull} }, "",
			ReasonMalformed, `column "event_id", is NULL`, "", "order-8891"},
		{"an unchanged TOAST value", func(r replication.Tuple) { r[5] = replication.Value{Kind: replication.ValueUnchanged} }, "",
			ReasonMalformed, "unchanged TOAST", "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := mustPlan(t, schemaO(t), OutboxOptions{Topic: tt.topic})
			var s scratch
			for range 2 { // the second time the topic is remembered
				row := rowO()
				tt.change(row)
				var ev event
				err := p.appendEvent(&ev, &s, row)
				var re *RouteError
				if !errors.As(err, &re) || re.Reason != tt.reason || !strings.Contains(re.Detail, tt.detail) {
					t.Fatalf("got %v, want reason %s and %q", err, tt.reason, tt.detail)
				}
				if len(re.Detail) > 1500 {
					t.Errorf("detail has %d bytes", len(re.Detail))
				}
				if ev.Topic != tt.wantTopic || string(ev.Key) != tt.wantKey {
					t.Errorf("topic %q, key %q", ev.Topic, ev.Key)
				}
			}
			var ev event
			if err := p.appendEvent(&ev, &s, rowO()); err != nil {
				t.Errorf("the next row does not go through: %v", err)
			}
		})
	}

	p := mustPlan(t, relationOf(t, "o", "id uuid", "type text", "payload bytea"), OutboxOptions{})
	for _, payload := range []string{`abc`, `\x0`, `\xzz`, `\000`} {
		var ev event
		var re *RouteError
		if err := p.appendEvent(&ev, &scratch{}, rowOf("e", "t", payload)); !errors.As(err, &re) || re.Reason != ReasonMalformed {
			t.Errorf("payload %s: got %v, want malformed", payload, err)
		}
	}
	if err := p.appendEvent(&event{}, &scratch{}, rowOf("e")); err == nil {
		t.Error("a row of the wrong length went through")
	}
}

func TestOutboxEventsSurviveTheGrowthOfTheScratch(t *testing.T) {
	p := mustPlan(t, schemaO(t), OutboxOptions{})
	var s scratch
	for range 2 {
		var events []event
		for i := range 500 {
			row := rowO()
			row[2].Text = fmt.Appendf(nil, "order-%d", i)
			row[4].Text = fmt.Appendf(nil, "type-%d", i%7)
			var ev event
			if err := p.appendEvent(&ev, &s, row); err != nil {
				t.Fatal(err)
			}
			s.addHeader(&ev, "position", fmt.Appendf(nil, "p-%d", i))
			clear(row[2].Text) // the row's memory is the stream's
			events = append(events, ev)
		}
		for i, ev := range events {
			h := ev.Headers
			if string(ev.Key) != fmt.Sprintf("order-%d", i) || ev.Topic != fmt.Sprintf("outbox.event.type-%d", i%7) ||
				len(h) != 6 || h[0].Key != "id" || string(h[2].Value) != string(ev.Key) || string(h[5].Value) != fmt.Sprintf("p-%d", i) {
				t.Fatalf("event %d: %s", i, describeEvent(&ev))
			}
		}
		s.reset()
	}
}

func TestOutboxRemembersABoundedNumberOfTopics(t *testing.T) {
	p := mustPlan(t, schemaO(t), OutboxOptions{})
	var s scratch
	for i := range 3 * maxCachedTopics {
		row := rowO()
		row[4].Text = fmt.Appendf(nil, "t%d", i)
		var ev event
		if err := p.appendEvent(&ev, &s, row); err != nil || ev.Topic != fmt.Sprintf("outbox.event.t%d", i) {
			t.Fatal(ev.Topic, err)
		}
		s.reset()
	}
	if len(p.topics) > maxCachedTopics {
		t.Errorf("%d topics remembered", len(p.topics))
	}
}

func TestOutboxRowDoesNotAllocate(t *testing.T) {
	p := mustPlan(t, schemaO(t), OutboxOptions{Topic: "{prefix}.{event_type|lower|replace:.:-|default:x}", Key: "{aggregate_id}"})
	rows := []replication.Tuple{rowO(), rowO()}
	rows[1][4].Text = []byte("Order.Paid")
	var s scratch
	var ev event
	allocs := testing.AllocsPerRun(100, func() {
		for _, row := range rows {
			if err := p.appendEvent(&ev, &s, row); err != nil {
				t.Fatal(err)
			}
		}
		s.reset()
	})
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}

func BenchmarkOutboxEvent(b *testing.B) {
	p := mustPlan(b, schemaO(b), OutboxOptions{})
	row := rowO()
	row[5].Text = []byte(`{"note": "` + strings.Repeat("x", 168) + `"}`)
	var s scratch
	var ev event
	b.ReportAllocs()
	b.SetBytes(int64(len(row[5].Text)))
	for b.Loop() {
		if len(s.buf) > 1<<20 {
			s.reset()
		}
		if err := p.appendEvent(&ev, &s, row); err != nil {
			b.Fatal(err)
		}
	}
}

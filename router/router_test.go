package router

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

func mustRouter(t testing.TB, o Options, topics Topics) *Router {
	t.Helper()
	r, err := NewRouter(o, topics)
	if err == nil {
		err = r.Guard()
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func testTxn() *replication.Transaction {
	return &replication.Transaction{XID: 900, CommitLSN: 0x3000000, CommitTime: time.Date(2026, 12, 1, 6, 0, 0, 0, time.UTC)}
}

func insertOf(rel *replication.Relation, texts ...string) *replication.Change {
	return &replication.Change{Op: replication.OpCreate, LSN: 0x2FFFF00, Txn: testTxn(), Relation: rel, New: rowOf(texts...)}
}

func messageOf(content string) *replication.Change {
	return &replication.Change{Op: replication.OpMessage, LSN: 0x2FFFF00, Txn: testTxn(),
		Message: replication.Message{Prefix: "p", Transactional: true, Content: []byte(content)}}
}

// testEvents is a relation of outbox rows: id, key, topic, payload.
func testEvents(t testing.TB) (*replication.Relation, OutboxOptions) {
	return relationOf(t, "outbox", "id text", "aggregate_id text", "event_type text", "payload text"),
		OutboxOptions{Schema: "public", Table: "outbox", Topic: "{event_type}"}
}

// contents is everything that a batch holds, for comparisons.
func contents(b *Batch) string {
	out := fmt.Sprintf("%+v %+v %q\n", b.mark(), b.done, b.arena)
	for i := range b.records {
		out += describeRecord(b, i)
	}
	return out + fmt.Sprint(b.counts)
}

func TestMissingTopicLeavesTheBatchUnchanged(t *testing.T) {
	events, outbox := testEvents(t)
	rel := relationOf(t, "t", "id int", "v text")
	rel.OID++
	deletion := insertOf(rel)
	deletion.Op, deletion.New, deletion.Old, deletion.OldIsKey = replication.OpDelete, nil, rowOf("1", null), true
	for _, tt := range []struct {
		name, topic string
		change      *replication.Change
		records     int
	}{
		{"of a table", "shop.public.t", insertOf(rel, "1", "a"), 1},
		{"of a delete", "shop.public.t", deletion, 2},
		{"of an event", "orders", insertOf(events, "e1", "k", "orders", "p"), 1},
		{"of a message", "shop.message", messageOf("x"), 1},
		{"of a snapshot row", "shop.public.t", readOf(insertOf(rel, "1", "a")), 1},
		{"of the truncate before a table is read anew", "shop.public.t", &replication.Change{Op: replication.OpTruncate, Relation: rel, Read: &replication.ReadPoint{}}, 1},
		{"of a snapshot row's dead letter", "shop.dead-letter", readOf(insertOf(rel, "1", "\xff")), 1},
		{"of a dead letter", "shop.dead-letter", insertOf(rel, "1", "\xff"), 1},
		{"of an event's dead letter", "shop.dead-letter", insertOf(events, "e1", "k", "no topic", "p"), 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o, topics := testOptions(), newFixedTopics()
			o.Outbox = []OutboxOptions{outbox}
			r := mustRouter(t, o, topics)
			b := NewBatch(Limits{Bytes: 1 << 20, Records: 100})
			if err := r.Route(messageOf("before"), b); err != nil {
				t.Fatal(err)
			}
			before := contents(b)
			topics.absent[tt.topic] = true
			var missing *MissingTopicError
			if err := r.Route(tt.change, b); !errors.As(err, &missing) || missing.Topic != tt.topic {
				t.Fatalf("error %v, want topic %s to be missing", err, tt.topic)
			}
			if diff := cmp.Diff(before, contents(b)); diff != "" {
				t.Errorf("the batch has changed (-before +after):\n%s", diff)
			}
			delete(topics.absent, tt.topic)
			if err := r.Route(tt.change, b); err != nil || b.Records() != 1+tt.records {
				t.Errorf("routed again: %v and %d records", err, b.Records())
			}
		})
	}
}

func TestStopLeavesTheBatchUnchanged(t *testing.T) {
	o := testOptions()
	o.DeadLetterOn = nil
	r := mustRouter(t, o, newFixedTopics())
	b := NewBatch(Limits{Bytes: 1 << 20, Records: 100})
	rel := relationOf(t, "t", "id int", "v text")
	if err := r.Route(insertOf(rel, "1", "a"), b); err != nil {
		t.Fatal(err)
	}
	before := contents(b)
	var stop *StopError
	if err := r.Route(insertOf(rel, "2", "\xff"), b); !errors.As(err, &stop) {
		t.Fatalf("error %v, want a *StopError", err)
	}
	want := StopError{Reason: ReasonEncode, Table: "public.t", Key: `{"id":2}`, Position: "0000000003000000-0000000000", Err: stop.Err}
	if *stop != want {
		t.Errorf("%+v, want %+v", *stop, want)
	}
	if diff := cmp.Diff(before, contents(b)); diff != "" {
		t.Errorf("the batch has changed (-before +after):\n%s", diff)
	}
}

func TestOversizeBeginsBehindTheLimit(t *testing.T) {
	events, outbox := testEvents(t)
	rel := relationOf(t, "t", "id int", "v text")
	rel.OID++
	for name, c := range map[string]*replication.Change{
		"row":     insertOf(rel, "1", strings.Repeat("v", 3000)),
		"event":   insertOf(events, "e1", "k", "orders", strings.Repeat("v", 3000)),
		"message": messageOf(strings.Repeat("v", 3000)),
	} {
		t.Run(name, func(t *testing.T) {
			o, topics := testOptions(), newFixedTopics()
			o.Outbox = []OutboxOptions{outbox}
			r := mustRouter(t, o, topics)
			b := NewBatch(Limits{Bytes: 1 << 20, Records: 100})
			if err := r.Route(c, b); err != nil {
				t.Fatal(err)
			}
			topic, size := b.records[0].topic, recordSize(b, &b.records[0])
			for _, tt := range []struct {
				limit int
				dead  bool
			}{{size + 1, false}, {size, false}, {size - 1, true}} {
				b.Reset()
				topic.MaxMessageBytes = int32(tt.limit)
				if err := r.Route(c, b); err != nil || b.Records() != 1 {
					t.Fatal(err, b.Records())
				}
				if dead := b.records[0].dead; dead != tt.dead {
					t.Errorf("a record of %d bytes in a topic that takes %d: dead letter %v, want %v", size, tt.limit, dead, tt.dead)
				}
			}
		})
	}
}

func TestOversizeBeginsAtARequestsLimitToo(t *testing.T) {
	r := mustRouter(t, testOptions(), newFixedTopics())
	topic := &Topic{Name: "t", MaxMessageBytes: 1 << 30}
	b := NewBatch(Limits{})
	var fault *RouteError
	// The value's bytes are never looked at.
	if err := r.add(b, record{topic: topic, key: nullSpan, value: span{n: 100 << 20}}, "t"); !errors.As(err, &fault) || fault.Reason != ReasonOversize {
		t.Errorf("error %v, want oversize", err)
	}
	if err := r.add(b, record{topic: topic, key: nullSpan, value: span{n: 99 << 20}}, "t"); err != nil {
		t.Error(err)
	}
}

// A key that is larger than what the dead-letter topic takes must not stop the stream
// for ever: the letter goes without it and says what it was.
func TestDeadLetterOfAHugeKeyFits(t *testing.T) {
	events, outbox := testEvents(t)
	o, topics := testOptions(), newFixedTopics()
	o.Outbox = []OutboxOptions{outbox}
	topics.get("shop.dead-letter").MaxMessageBytes = 4000
	topics.get("orders").MaxMessageBytes = 4000
	r := mustRouter(t, o, topics)
	for _, n := range []int{500, 990, 1010, 3000, 3700, 5000, 1 << 20} {
		b := NewBatch(Limits{Bytes: 1 << 20, Records: 100})
		key := strings.Repeat("k", n)
		if err := r.Route(insertOf(events, "e1", key, "orders", strings.Repeat("v", 4000)), b); err != nil {
			t.Fatalf("key of %d bytes: %v", n, err)
		}
		rec := &b.records[0]
		if size := recordSize(b, rec); !rec.dead || size > 4000 {
			t.Errorf("key of %d bytes: dead letter %v of %d bytes", n, rec.dead, size)
		}
		if got := b.bytes(rec.key); n <= 1000 && string(got) != key || n > 1000 && got != nil {
			t.Errorf("key of %d bytes: the letter's has %d", n, len(got))
		}
		if !bytes.Contains(b.bytes(rec.value), []byte(`"aggregate_id":"kkkk`)) {
			t.Errorf("key of %d bytes: not in the row: %s", n, b.bytes(rec.value))
		}
	}
}

func TestRejectedTopicOfAnEventMakesDeadLetters(t *testing.T) {
	events, outbox := testEvents(t)
	rel := relationOf(t, "t", "id int", "v text")
	rel.OID++
	o, topics := testOptions(), newFixedTopics()
	o.Outbox = []OutboxOptions{outbox}
	topics.absent["orders"], topics.absent["shop.public.t"] = true, true
	r := mustRouter(t, o, topics)
	b := NewBatch(Limits{Bytes: 1 << 20, Records: 100})

	c := insertOf(rel, "1", "a")
	if err := r.Route(c, b); err == nil || r.RejectTopic(c, "shop.public.t", &TopicNameError{Name: "shop.public.t", Reason: "why"}) {
		t.Errorf("a table's topic was rejected (%v)", err)
	}
	if m := messageOf("x"); r.RejectTopic(m, "shop.message", &TopicNameError{Name: "shop.message", Reason: "why"}) {
		t.Error("a message's topic was rejected")
	}
	c = insertOf(events, "e1", "k", "orders", "p")
	if err := r.Route(c, b); err == nil || !r.RejectTopic(c, "orders", &TopicNameError{Name: "orders", Reason: "Kafka says no"}) {
		t.Fatalf("an event's topic was not rejected (%v)", err)
	}
	if err := r.Route(c, b); err != nil || b.Records() != 1 || !b.records[0].dead {
		t.Fatalf("%v, %d records", err, b.Records())
	}
	if got := describeRecord(b, 0); !strings.Contains(got, `"error":"topic name \"orders\": Kafka says no; correct the row's column`) || !strings.Contains(got, "source-topic: orders") {
		t.Error(got)
	}
	if c := readOf(c); r.Route(c, b) != nil || !b.records[1].dead {
		t.Error("an event of the backlog is not a dead letter")
	}
	topics.absent["archive"] = true
	c = readOf(insertOf(events, "e3", "k", "archive", "p"))
	if err := r.Route(c, b); err == nil || !r.RejectTopic(c, "archive", &TopicNameError{Name: "archive", Reason: "Kafka says no"}) || r.Route(c, b) != nil || !b.records[2].dead {
		t.Errorf("the topic of an event of the backlog was not rejected (%v)", err)
	}
	// One that is not there is asked for again after a while; another error is no reason.
	topics.absent["later"] = true
	c = insertOf(events, "e4", "k", "later", "p")
	absent := onlyMissing(t, "later")
	if err := r.Route(c, b); err == nil || r.RejectTopic(c, "later", errors.New("the broker is away")) || !r.RejectTopic(c, "later", absent) || r.Route(c, b) != nil || !b.records[3].dead {
		t.Errorf("an event's topic that is absent was not rejected (%v)", err)
	}
	if got := describeRecord(b, 3); !strings.Contains(got, "kafka-topics.sh --bootstrap-server HOST:PORT --create --topic later") {
		t.Error(got)
	}
	no := r.rejected["later"]
	no.until = time.Now().Add(-time.Second)
	r.rejected["later"] = no
	var missing *MissingTopicError
	if err := r.Route(c, b); !errors.As(err, &missing) {
		t.Errorf("a topic that was absent a while ago: %v", err)
	}
	b.Reset()
	// Others of the table are not concerned.
	if err := r.Route(insertOf(events, "e2", "k", "other", "p"), b); err != nil || b.records[0].dead {
		t.Error(err)
	}
	// The configuration's own topic is for the configuration to change.
	outbox.Topic = "orders"
	o.Outbox = []OutboxOptions{outbox}
	r = mustRouter(t, o, topics)
	c = insertOf(events, "e5", "k", "orders", "p")
	if err := r.Route(c, b); err == nil || r.RejectTopic(c, "orders", onlyMissing(t, "orders")) {
		t.Errorf("a topic that the configuration names was rejected (%v)", err)
	}
}

// onlyMissing is the refusal of a topic that is not there.
func onlyMissing(t *testing.T, topic string) error {
	t.Helper()
	err := missingTopics([]string{topic}, TopicSpec{})
	if !checkpoint.IsRefusal(err) {
		t.Fatalf("%v is no refusal", err)
	}
	return fmt.Errorf("look: %w", err)
}

func TestUnknownOperationIsAnError(t *testing.T) {
	r := mustRouter(t, testOptions(), newFixedTopics())
	b := NewBatch(Limits{Bytes: 1 << 20, Records: 100})
	c := insertOf(relationOf(t, "t", "id int"), "1")
	c.Op = 'x'
	if err := r.Route(c, b); err == nil || b.Tail() {
		t.Errorf("error %v, batch %+v", err, b.mark())
	}
}

// wideRow is an insert of ten columns of usual types.
func wideRow(t testing.TB) *replication.Change {
	rel := relationOf(t, "orders", "id bigint", "customer bigint", "state text", "note text", "placed timestamptz",
		"changed timestamp", "data jsonb", "ref uuid", "n int", "code varchar")
	return insertOf(rel, "123456789", "42", "paid", "left at the door, \"please ring\"", "2026-12-01 05:54:20.512345+00",
		"2026-12-01 05:54:20.5", `{"items": [{"sku": "a-1", "n": 2}], "total": "12.50"}`, "3fa85f64-5717-4562-b3fc-2c963f66afa6", null, "AB-12")
}

func eventRow(t testing.TB) (*replication.Change, OutboxOptions) {
	rel := relationOf(t, "outbox", "id uuid", "aggregate_type text", "aggregate_id text", "event_type text", "payload jsonb", "created_at timestamptz")
	return insertOf(rel, "3fa85f64-5717-4562-b3fc-2c963f66afa6", "order", "order-8891", "OrderPaid",
		`{"order": 8891, "items": [{"sku": "a-1", "n": 2}], "total": "12.50"}`, "2026-12-01 05:54:20.512345+00"), OutboxOptions{Schema: "public", Table: "outbox"}
}

func TestRouteDoesNotAllocate(t *testing.T) {
	event, outbox := eventRow(t)
	row := wideRow(t)
	row.Relation.OID++
	update := *row
	update.Op, update.Old, update.OldIsKey = replication.OpUpdate, slices.Clone(row.New), true
	moved := update
	moved.Old = slices.Clone(row.New)
	moved.Old[0].Text = []byte("7")
	for name, c := range map[string]*replication.Change{
		"row": row, "update with key": &update, "key change": &moved, "event": event, "message": messageOf("hello"),
		"snapshot row": readOf(row), "snapshot event": readOf(event),
		"debezium row": row, "debezium key change": &moved, "debezium message": messageOf("hello"), "debezium snapshot row": readOf(row),
		"unwrapped key change": &moved, "masked row": row, "masked key change": &moved,
	} {
		o := testOptions()
		o.Outbox = []OutboxOptions{outbox}
		if strings.HasPrefix(name, "debezium") {
			o.Debezium = &DebeziumOptions{Schemas: true}
		}
		o.Unwrapped = strings.HasPrefix(name, "unwrapped")
		if strings.HasPrefix(name, "masked") {
			o.Columns = wideMasks()
		}
		r := mustRouter(t, o, newFixedTopics())
		b := NewBatch(Limits{Bytes: 1 << 20, Records: 1000})
		allocs := testing.AllocsPerRun(100, func() {
			b.Reset()
			for range 10 {
				if err := r.Route(c, b); err != nil {
					t.Fatal(err)
				}
			}
			b.Advance(checkpoint.Position{LSN: 1}, true)
		})
		if allocs != 0 {
			t.Errorf("%s: %v allocations", name, allocs)
		}
	}
}

// readOf is the inserted row of c as a snapshot reads it: with another relation of the
// same shape.
func readOf(c *replication.Change) *replication.Change {
	rel := *c.Relation
	return &replication.Change{Op: replication.OpRead, Relation: &rel, New: c.New,
		Read: &replication.ReadPoint{CommitLSN: 0x3000000, Time: time.Date(2026, 12, 1, 6, 0, 0, 0, time.UTC)}}
}

// The stream's relation and the chunks' of one table take turns for as long as its
// snapshot runs: each has a plan of its own, and a turn makes none.
func TestPlansOfStreamAndSnapshotDoNotReplaceEachOther(t *testing.T) {
	o := testOptions()
	looked := 0
	o.Types = func(uint32) (*format.Type, error) {
		looked++
		return nil, nil
	}
	r := mustRouter(t, o, newFixedTopics())
	b := NewBatch(Limits{Bytes: 1 << 20, Records: 1000})
	row := wideRow(t)
	row.Relation.Columns[4].TypeOID = 99999 // which only the catalog knows
	read := readOf(row)
	turn := func() {
		b.Reset()
		for _, c := range []*replication.Change{row, read} {
			if err := r.Route(c, b); err != nil {
				t.Fatal(err)
			}
		}
	}
	if allocs := testing.AllocsPerRun(100, turn); allocs != 0 || looked != 2 {
		t.Errorf("%v allocations a turn, and %d plans made, want 2", allocs, looked)
	}
	// Another shape of either is another plan.
	altered := *read.Relation
	read.Relation = &altered
	turn()
	turn()
	if looked != 3 {
		t.Errorf("%d plans made, want 3", looked)
	}
}

func benchmarkRoute(b *testing.B, c *replication.Change, o Options) {
	r := mustRouter(b, o, newFixedTopics())
	batch := NewBatch(Limits{Bytes: 8 << 20, Records: 20000})
	b.ReportAllocs()
	for b.Loop() {
		if batch.Full() {
			batch.Reset()
		}
		if err := r.Route(c, batch); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(int64(len(batch.arena) / len(batch.records)))
}

func BenchmarkRouteRow(b *testing.B) { benchmarkRoute(b, wideRow(b), testOptions()) }

// BenchmarkRouteDebeziumRow is the same row under types debezium, which may cost 1.5
// times as much.
func BenchmarkRouteDebeziumRow(b *testing.B) {
	o := testOptions()
	o.Debezium = &DebeziumOptions{}
	benchmarkRoute(b, wideRow(b), o)
}

// BenchmarkRouteMaskedRow is the same row with one column left out and five masked.
func BenchmarkRouteMaskedRow(b *testing.B) {
	o := testOptions()
	o.Columns = wideMasks()
	benchmarkRoute(b, wideRow(b), o)
}

func BenchmarkRouteBareRow(b *testing.B) {
	o := testOptions()
	o.Unwrapped = true
	benchmarkRoute(b, wideRow(b), o)
}

// BenchmarkRouteRead is what a snapshot costs per row, ten columns wide.
func BenchmarkRouteRead(b *testing.B) { benchmarkRoute(b, readOf(wideRow(b)), testOptions()) }

func BenchmarkRouteEvent(b *testing.B) {
	c, outbox := eventRow(b)
	o := testOptions()
	o.Outbox = []OutboxOptions{outbox}
	benchmarkRoute(b, c, o)
}

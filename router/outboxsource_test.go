package router

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// messagePlan is a plan of logical messages.
func messagePlan(t testing.TB, o OutboxOptions) *outboxPlan {
	t.Helper()
	p, err := compileOutbox(messageSource("outbox"), &o, envForTest())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestMessagesAreEventsAsRowsAre(t *testing.T) {
	tests := []struct {
		name    string
		options OutboxOptions
		content string
		want    string
	}{
		{"the payload is cut out as bytes and the aggregate type routes", OutboxOptions{},
			`{"event_id":"ev-1","event_type":"order.created","aggregate_type":"order","aggregate_id":"order-1","payload":{"n":1.10}}`,
			"topic outbox.event.order\nkey order-1\nvalue {\"n\":1.10}\nid=ev-1\ntype=order.created\naggregate_type=order\naggregate_id=order-1\n"},
		{"without an aggregate the event's type routes and its id is the key", OutboxOptions{},
			` { "id" : 7 , "type" : "order.created" , "payload" : [ 1,  2 ] , "aggregate_type" : null } `,
			"topic outbox.event.order.created\nkey 7\nvalue [ 1,  2 ]\nid=7\ntype=order.created\n"},
		{"a better name wins wherever it stands, and version is the schema's beside a sequence", OutboxOptions{},
			`{"event_id":"e","id":"n","version":3,"type":"t","event_type":"T","sequence_num":5,"payload":"a\n"}`,
			"topic outbox.event.T\nkey e\nvalue \"a\\n\"\nid=e\ntype=T\naggregate_seq=5\nschema_version=3\n"},
		{"version is the sequence where there is none", OutboxOptions{}, `{"id":"e","type":"t","version":3,"aggregate_seq":null,"payload":null}`,
			"topic outbox.event.t\nkey e\ntombstone\nid=e\ntype=t\naggregate_seq=3\n"},
		{"escapes are read", OutboxOptions{}, `{"i\u0064":"\"\u00e9\ud83d\ude00\/","type":"t","payload":0}`,
			"topic outbox.event.t\nkey \"é😀/\nvalue 0\nid=\"é😀/\ntype=t\n"},
		{"templates, headers and columns name further members",
			OutboxOptions{Topic: "{prefix}.{region|default:eu}", Key: "{tenant}", Headers: []string{"tenant", "n"}, Columns: map[string]string{"id": "uid", "payload": "body"}},
			`{"id":"no","uid":"u","tenant":"acme","body":{},"n":1e2,"payload":1}`,
			"topic shop.eu\nkey acme\nvalue {}\nid=u\ntenant=acme\nn=1e2\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := messagePlan(t, tt.options)
			for range 2 { // the second time over used memory
				row, err := p.objectRow([]byte(tt.content))
				if err != nil {
					t.Fatal(err)
				}
				var ev event
				if err := p.appendEvent(&ev, &scratch{}, row); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(tt.want, describeEvent(&ev)); diff != "" {
					t.Errorf("event (-want +got):\n%s", diff)
				}
			}
		})
	}
}

func TestAMessageThatIsNoObjectIsMalformed(t *testing.T) {
	p := messagePlan(t, OutboxOptions{})
	for _, content := range []string{"", " ", "[]", `"x"`, "{", `{"a":1,}`, `{"a":1}x`, "null"} {
		if _, err := p.objectRow([]byte(content)); err == nil || !strings.Contains(err.Error(), "malformed") {
			t.Errorf("%q: got %v, want malformed", content, err)
		}
	}
}

func TestWhatAMessageCannotSayIsMalformed(t *testing.T) {
	p := messagePlan(t, OutboxOptions{Columns: map[string]string{"seq": "n"}, Headers: []string{"tenant"}})
	deep := strings.Repeat("[", 20000) + strings.Repeat("]", 20000)
	for content, says := range map[string]string{
		`{"event_id":"e","type":"t"}`:                                       `no field "payload"`,
		"{\"event_id\":\"\xff\",\"type\":\"t\",\"payload\":1}":              "not UTF-8",
		"{\"event_id\":\"e\",\"type\":\"t\",\"payload\":\"\xe9\"}":          "convert_to",
		`{"event_id":"e\ud800","type":"t","payload":1}`:                     `field "event_id" has half`,
		`{"event_id":"e\udc00\ud800","type":"t","payload":1}`:               `field "event_id" has half`,
		`{"event_id":"e","type":"t","payload":1,"tenant":"\\\ud83d\u0041"}`: `field "tenant" has half`,
		`{"event_id":"e","type":"t","payload":` + deep + `}`:                "exceeded max depth",
		`[1]`: "it is an array", `5`: "it is 5", `"s"`: "it is a string", `nope`: "invalid character",
	} {
		if _, err := p.objectRow([]byte(content)); err == nil || !strings.HasPrefix(err.Error(), "malformed: ") || !strings.Contains(err.Error(), says) {
			t.Errorf("%.60q: got %v, want %s", content, err, says)
		}
	}
	row, err := p.objectRow([]byte(`{"event_id":null,"type":"t","payload":1}`))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.appendEvent(&event{}, &scratch{}, row); err == nil || !strings.Contains(err.Error(), `field "event_id", is NULL`) || strings.Contains(err.Error(), "column") {
		t.Errorf("a message without an id: %v", err)
	}
	// The payload goes out as it stands, and what nobody reads is nobody's fault.
	for _, content := range []string{`{"event_id":"\ud83d\ude00\\ud800","type":"t","payload":"\ud800"}`, `{"event_id":"e","type":"t","payload":1,"other":"\ud800"}`} {
		if _, err := p.objectRow([]byte(content)); err != nil {
			t.Errorf("%s: %v", content, err)
		}
	}
}

func TestFurtherMembersOfAMessageStandInTheEnvelopeAsJSON(t *testing.T) {
	p := messagePlan(t, OutboxOptions{Envelope: []string{"x:y", "n"}, Headers: []string{"x"}, Topic: "{x|default:o}"})
	for content, want := range map[string]string{
		`{"id":"e","payload":{"a":1.0},"x":"s","n":{"q":[1, 2]}}`: "topic s\nkey e\nvalue {\"payload\":{\"a\":1.0},\"y\":\"s\",\"n\":{\"q\":[1, 2]}}\nid=e\nx=s\n",
		`{"id":"e","payload":1,"n":true,"x":null}`:                "topic o\nkey e\nvalue {\"payload\":1,\"y\":null,\"n\":true}\nid=e\n",
	} {
		row, err := p.objectRow([]byte(content))
		if err != nil {
			t.Fatal(err)
		}
		var ev event
		if err := p.appendEvent(&ev, &scratch{}, row); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, describeEvent(&ev)); diff != "" {
			t.Errorf("event (-want +got):\n%s", diff)
		}
	}
}

func TestAMessageDoesNotAllocate(t *testing.T) {
	p := messagePlan(t, OutboxOptions{})
	content := []byte(`{"event_id":"ev-1","event_type":"order\u002ecreated","aggregate_id":"order-1","payload":{"n":1.10}}`)
	var s scratch
	var ev event
	allocs := testing.AllocsPerRun(100, func() {
		row, err := p.objectRow(content)
		if err == nil {
			err = p.appendEvent(&ev, &s, row)
		}
		if err != nil {
			t.Fatal(err)
		}
		s.reset()
	})
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}

// FuzzObjectMembers compares the walk over an object with encoding/json.
func FuzzObjectMembers(f *testing.F) {
	for _, s := range []string{`{}`, `{"a":1}`, ` {"a" : [1,{"b":"]"}] , "c":"\"\\" ,"d":-1e5,"e":null}`, `{"\ud83d\ude00":"\ud83d"}`, `[]`, `{"a":tru}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m, ok := openObject(text)
		var want map[string]json.RawMessage
		if err := json.Unmarshal(text, &want); (err == nil && want != nil) != ok {
			t.Fatalf("open %v, json %v", ok, err)
		}
		got := map[string]json.RawMessage{}
		for ok && m.next() {
			var name, value any
			if json.Unmarshal(m.name, &name) != nil || json.Unmarshal(m.value, &value) != nil {
				t.Fatalf("member %q: %q", m.name, m.value)
			}
			out := appendJSONText(nil, m.value)
			if s, isText := value.(string); isText && string(bytes.ToValidUTF8(out, []byte("\uFFFD"))) != s && bytes.Equal(bytes.ToValidUTF8(out, nil), out) {
				t.Fatalf("text of %q is %q, want %q", m.value, out, s)
			}
			got[name.(string)] = m.value
		}
		for name, value := range got {
			if string(want[name]) != string(value) {
				t.Fatalf("member %q: got %s, want %s", name, value, want[name])
			}
		}
		if len(got) != len(want) {
			t.Fatalf("%d members, want %d", len(got), len(want))
		}
	})
}

package demo

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kgo"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

// sample gives one record of each sort, as Kafka would give them.
func sample() []*kgo.Record {
	table := func(topic, key, value string) *kgo.Record {
		r := &kgo.Record{Topic: topic, Key: []byte(key), Headers: []kgo.RecordHeader{{Key: "position", Value: []byte(pos1)}}}
		if value != "" {
			r.Value = []byte(value)
		}
		return r
	}
	value := func(op, before, after string) string {
		return fmt.Sprintf(`{"before":%s,"after":%s,"op":%q,"ts_ms":1764550000119,"source":{"schema":"public","table":"orders","tx_id":771}}`, before, after, op)
	}
	event := table("outbox.event.payment.charged", "order-17", `{"order_id": "order-17", "currency": "EUR", "amount_cents": 12800}`)
	event.Headers = append(event.Headers, kgo.RecordHeader{Key: "id", Value: []byte("e-1")}, kgo.RecordHeader{Key: "type", Value: []byte("payment.charged")})
	o := "shop.public.orders"
	return []*kgo.Record{
		table(o, `{"id":17}`, value("c", "null", `{"id":17,"status":"new","total":"12.50"}`)),
		table(o, `{"id":17}`, value("u", `{"id":17,"status":"new","note":null}`, `{"id":17,"status":"paid","note":"ok"}`)),
		table(o, `{"id":17}`, value("u", "null", `{"id":17,"status":"paid"}`)),
		table(o, `{"id":17}`, value("u", `{"id":17}`, `{"id":17}`)),
		table(o, `{"a":1,"b":"x"}`, value("d", `{"a":1,"b":"x"}`, "null")),
		table(o, `{"a":1,"b":"x"}`, ""),
		table(o, "", value("t", "null", "null")),
		table("shop.public.customers", `{"id":3}`, value("u", `{"id":3,"city":"Oslo"}`, `{"id":3,"city":"東京\u001b[31m\nred"}`)),
		table("shop.public.a_table_with_quite_a_long_name", `{"id":"0123456789abcdef"}`, value("r", "null", `{"id":"0123456789abcdef"}`)),
		event,
	}
}

func TestLinesOfEachSortAndWidth(t *testing.T) {
	var got bytes.Buffer
	arrived := time.UnixMilli(1764550000119 + 4)
	for _, width := range []int{150, 100, 80, 60, 30} {
		fmt.Fprintf(&got, "-- %d --\n", width)
		for _, r := range sample() {
			e, err := ParseRecord(r, arrived)
			if err != nil {
				t.Fatal(err)
			}
			line := FormatEvent(&e, width)
			if width >= 60 && cells(line) > width {
				t.Errorf("%d cells in a width of %d: %q", cells(line), width, line)
			}
			fmt.Fprintln(&got, line)
		}
	}
	const golden = "testdata/lines.golden"
	if *rewrite {
		if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("lines (-want +got); -rewrite takes them over:\n%s", diff)
	}
}

func TestParseRecordRefusesWhatIsNotTheConnectors(t *testing.T) {
	position := []kgo.RecordHeader{{Key: "position", Value: []byte(pos1)}}
	for name, r := range map[string]*kgo.Record{
		"no position": {Topic: "shop.public.orders", Value: []byte(`{}`)},
		"no JSON":     {Topic: "shop.public.orders", Value: []byte(`hello`), Headers: position},
		"no row":      {Topic: "shop.public.orders", Value: []byte(`{"after":[1]}`), Headers: position},
	} {
		if _, err := ParseRecord(r, time.Now()); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestColoursAndFooterAreForTerminals(t *testing.T) {
	e, err := ParseRecord(sample()[9], time.UnixMilli(0))
	if err != nil {
		t.Fatal(err)
	}
	draw := func(width func() int, color bool) string {
		var b strings.Builder
		s := NewScreen(&b, width, color)
		s.Footer("foot")
		s.Event(&e, "bad")
		s.Heading("end")
		s.EndFooter()
		return b.String()
	}
	eighty := func() int { return 80 }
	if got := draw(nil, false); strings.ContainsAny(got, "\x1b\r") || strings.Contains(got, "foot") {
		t.Errorf("no terminal, but %q", got)
	}
	if got := draw(eighty, false); strings.Contains(got, "\x1b[3") || !strings.Contains(got, "\r\x1b[Kfoot") {
		t.Errorf("a terminal without colours, but %q", got)
	}
	if got := draw(eighty, true); !strings.Contains(got, ansiBold+ansiCyan+"● ") || !strings.HasSuffix(got, ansiClear) {
		t.Errorf("a terminal with colours, but %q", got)
	}
}

func TestQuantilesAreCloseEnough(t *testing.T) {
	var h histogram
	for i := 1; i <= 1000; i++ {
		h.add(time.Duration(i) * time.Millisecond)
	}
	h.add(-time.Second) // a clock that was set
	for q, want := range map[float64]float64{0.5: 500, 0.99: 990} {
		got := float64(h.quantile(q).Milliseconds())
		if got < want*0.93 || got > want*1.01 {
			t.Errorf("quantile %v is %v ms, want about %v", q, got, want)
		}
	}
}

func TestSummaryIsAnErrorWhereAnythingIsWrong(t *testing.T) {
	good := Totals{Events: 1, Changes: 2}
	if lines, err := summary(good, LedgerCount{Committed: 3, ByHand: 1}, 2); err != nil || !strings.Contains(strings.Join(lines, "\n"), "each exactly once and in order") {
		t.Errorf("%q, %v", lines, err)
	}
	for name, c := range map[string]struct {
		t Totals
		l LedgerCount
	}{
		"duplicate":    {Totals{Events: 1, Verdict: Verdict{Duplicates: 1}}, LedgerCount{}},
		"out of order": {Totals{Events: 1, Verdict: Verdict{OutOfOrder: 1}}, LedgerCount{}},
		"missing":      {good, LedgerCount{Missing: 1}},
		"rolled-back":  {good, LedgerCount{Ghosts: 1}},
	} {
		lines, err := summary(c.t, c.l, 1)
		if err == nil || !strings.Contains(err.Error(), name) || strings.Contains(strings.Join(lines, "\n"), "nothing was lost") {
			t.Errorf("%s: %q, %v", name, lines, err)
		}
	}
}

package checkpoint

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

// full is a checkpoint with every field set, and names that need escaping.
func full() (Checkpoint, int64, *Delta) {
	return Checkpoint{
			Position: Position{
				LSN: 0x16B374D848, CommitLSN: 0x16B374E000,
				CommitTime: time.UnixMicro(1764550000119001).UTC(),
				Cut:        Cut{CommitLSN: 0x16B374E000, Changes: 1<<64 - 1},
			},
			Source:       Source{SystemID: "7431870498234981234", Database: "the \"shop\"\\\n\x01é", Timeline: 3},
			Publications: []Publication{{Name: "walrelay_shop", Horizon: 0x16B3000000}, {Name: "walrelay_shop_insert"}},
			SlotSnapshot: "812:815:813",
			Requests:     41000,
			Rewound:      0x16B3700000,
			Anchor:       Anchor{LSN: 0x16B3000000, At: time.UnixMicro(1764540000119001).UTC()},
			Replay:       &Replay{From: 0x16B3000000, To: 0x16B374E000, Asked: `--from-lsn 16/B3000000 --table public."é"`},
			After: &After{
				Done: ChangeID{CommitLSN: 0x16B374D848, Seq: 1<<64 - 1}, Dead: []ChangeID{{0x16B374E000, 0}, {0x16B374E000, 7}},
				Skipped: []Stretch{{ChangeID{0x16B374E000, 8}, ChangeID{CommitLSN: 0x16B374F000}}, {ChangeID{CommitLSN: 0x16B374F000}, ChangeID{0x16B374F000, 1}}},
				Tables: map[uint32]AfterTable{
					9: {}, 16390: {From: ChangeID{CommitLSN: 5}, Key: []string{"id", "event_id"}, Rows: [][]string{{"1", "a"}, {"2", "\xff"}}},
				},
			},
		}, 41822, &Delta{
			Partitions: map[string]int32{"shop.public.orders": 8, "a": 1},
			Tables: map[uint32]*TableDelta{
				16384: {
					TableProgress: TableProgress{
						Table: "public.orders", State: TableReading, Key: []string{"region", "id"},
						Ranges: []Range{{To: []string{"eu", "7"}}, {After: []string{"us", ""}, To: []string{}}, {After: []string{}}},
						Again:  [][]string{{"\xff\x00", "é\u2028\n"}},
						Rows:   1 << 40, Began: time.UnixMicro(1764550000119001).UTC(),
						Request: fullRequest(),
					},
					AgainRead: [][]string{{"eu", "1"}, {}},
				},
				9:          nil,
				4294967295: {TableProgress: TableProgress{Table: "public.\xe9", State: TableWaiting, Beside: true, Whole: true}},
			},
			Trees: fullTrees(),
		}
}

func fullTrees() map[uint32]Tree {
	return map[uint32]Tree{
		16500: {16501: {Name: "public.p_a", Link: 735, File: 16399}, 16502: {Name: "public.\xe9", Link: 4294967295}, 9: {Name: "s.p_b", File: 1, Space: 1663, Truncated: 4294967295}},
		16510: {},
		17:    nil,
	}
}

func fullRequest() *Request {
	return &Request{
		ID: "20261202-105912.123-k3v9x2", Tables: []string{"public.orders", "public.\xe9"}, Where: "region = 'e\"u'",
		Replace: true, At: time.UnixMicro(1764550000119002).UTC(),
	}
}

func TestPositionRecordGolden(t *testing.T) {
	c, at, delta := full()
	golden(t, "position-full.json", EncodePosition(nil, &c, at, delta))
	got, gotAt, gotDelta, err := DecodePosition(read(t, "position-full.json"))
	if err != nil || gotAt != at {
		t.Fatal(gotAt, err)
	}
	if d := cmp.Diff(c, got) + cmp.Diff(delta, &gotDelta); d != "" {
		t.Error(d)
	}

	small := Checkpoint{Position: Position{LSN: 1}, Source: Source{SystemID: "1", Database: "d", Timeline: 1}}
	golden(t, "position-first.json", EncodePosition(nil, &small, StateBeside, nil))
	got, gotAt, gotDelta, err = DecodePosition(read(t, "position-first.json"))
	if err != nil || gotAt != StateBeside || !gotDelta.IsZero() {
		t.Fatal(gotAt, gotDelta, err)
	}
	if d := cmp.Diff(small, got); d != "" {
		t.Error(d)
	}
}

func TestStateRecordGolden(t *testing.T) {
	_, _, delta := full()
	c := Checkpoint{
		Partitions: map[string]int32{"shop.public.orders": 6, "shop.public.customers": 12},
		Tables:     map[uint32]TableProgress{16384: delta.Tables[16384].TableProgress, 16390: {Table: "public.customers", State: TableDone, Rows: 3}},
		Trees:      map[uint32]Tree{16500: fullTrees()[16500]},
	}
	golden(t, "state.json", EncodeState(nil, &c))
	var got Checkpoint
	if err := DecodeState(read(t, "state.json"), &got); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(c, got); d != "" {
		t.Error(d)
	}
	if err := DecodeState(EncodeState(nil, &Checkpoint{}), &got); err != nil || got.Partitions == nil || len(got.Partitions) != 0 || got.Tables != nil {
		t.Error("no topics is a state too:", got, err)
	}
}

// What the releases before this one wrote.
func TestPreviousFormatsAreRead(t *testing.T) {
	want, wantAt, wantDelta := full()
	want.After, want.Rewound, want.Anchor, want.Replay = nil, 0, Anchor{}, nil // of 1.2
	wantDelta.Trees = nil
	c, at, delta, err := DecodePosition(read(t, "position-1.1.json"))
	if d := cmp.Diff(want, c) + cmp.Diff(wantDelta, &delta); d != "" || at != wantAt || err != nil {
		t.Error(d, at, err)
	}
	if err := DecodeState(read(t, "state-1.1.json"), &c); err != nil || c.Tables[16390].Rows != 3 || c.Trees != nil {
		t.Error(c, err)
	}
	c, at, delta, err = DecodePosition(read(t, "position-1.0.json"))
	if err != nil || at != 41822 || delta.Partitions["shop.public.orders"] != 8 || delta.Tables != nil || c.Requests != 0 || c.SlotSnapshot != "" {
		t.Error(c, at, delta, err)
	}
	if err := DecodeState(read(t, "state-1.0.json"), &c); err != nil || c.Partitions["shop.public.orders"] != 6 || c.Tables != nil {
		t.Error(c, err)
	}
	c.Apply(delta)
	if c.Partitions["shop.public.orders"] != 8 || c.Tables != nil {
		t.Error(c)
	}
}

func TestRequestRecordGolden(t *testing.T) {
	r := fullRequest()
	golden(t, "request.json", EncodeRequest(nil, r))
	got, err := DecodeRequest(r.ID, read(t, "request.json"))
	if d := cmp.Diff(*r, got); d != "" || err != nil {
		t.Error(d, err)
	}
	least := Request{ID: "x", Tables: []string{"a.b"}}
	if got, err = DecodeRequest("x", EncodeRequest(nil, &least)); err != nil || !cmp.Equal(got, least) {
		t.Error(got, err)
	}
	for _, data := range []string{"", "{}", `{"version":"1.1"}`, `{"version":"1.1","tables":[]}`, `{"version":"1.1","tables":[null]}`, `{"version":"1.1","tables":["a"],"where":null}`} {
		if got, err := DecodeRequest("x", []byte(data)); err == nil {
			t.Errorf("%s is read as %+v", data, got)
		}
	}
	var ve *VersionError
	if _, err := DecodeRequest("x", []byte(`{"version":"2.0","tables":7}`)); !errors.As(err, &ve) {
		t.Error(err)
	}
}

func TestRequestIDs(t *testing.T) {
	at := time.Date(2026, 12, 2, 10, 59, 12, 123e6, time.UTC)
	a, b, later := NewRequestID(at), NewRequestID(at), NewRequestID(at.Add(time.Millisecond))
	if a == b || max(a, b) >= later || !strings.HasPrefix(a, "20261202-105912.123-") || len(a) > 26 {
		t.Error(a, b, later)
	}
	if id, ok := RequestID([]byte(RequestKey(a))); id != a || !ok {
		t.Error(id)
	}
	for _, key := range []string{"request", KeyPosition, ""} {
		if _, ok := RequestID([]byte(key)); ok {
			t.Error(key)
		}
	}
}

func TestNewerMinorIsRead(t *testing.T) {
	c, _, _, err := DecodePosition(read(t, "position-newer-minor.json"))
	if err != nil || c.Position.LSN != 0x100 || c.Source.Database != "shop" {
		t.Error(c, err)
	}
	var s Checkpoint
	if err := DecodeState([]byte(`{"version":"1.9","partitions":{"t":3},"snapshot":{"public.t":[1]}}`), &s); err != nil || s.Partitions["t"] != 3 {
		t.Error(s, err)
	}
}

func TestNewerMajorIsRefused(t *testing.T) {
	for _, v := range []string{"2.0", "0.9", "10.0"} {
		// Other types than ours behind the version must not hide the reason.
		data := []byte(fmt.Sprintf(`{"version":%q,"lsn":17,"state":"x","partitions":[]}`, v))
		_, _, _, err := DecodePosition(data)
		errState := DecodeState(data, new(Checkpoint))
		for _, err := range []error{err, errState} {
			var ve *VersionError
			if !errors.As(err, &ve) || ve.Version != v || !strings.Contains(err.Error(), `"`+v+`"`) || !strings.Contains(err.Error(), `"1.2"`) {
				t.Errorf("version %s: %v", v, err)
			}
		}
	}
}

func TestDamagedRecordsAreErrors(t *testing.T) {
	good := `"version":"1.0","lsn":"0/1","state":0`
	for name, data := range map[string]string{
		"empty":              "",
		"null":               "null",
		"cut off":            `{"version":"1.0","lsn":"0/1","state":0`,
		"two values":         `{` + good + `}{}`,
		"no version":         `{"lsn":"0/1","state":0}`,
		"version as number":  `{"version":1.0,"lsn":"0/1","state":0}`,
		"version without .":  `{"version":"1","lsn":"0/1","state":0}`,
		"no lsn":             `{"version":"1.0","state":0}`,
		"null lsn":           `{"version":"1.0","lsn":null,"state":0}`,
		"bad lsn":            `{"version":"1.0","lsn":"01","state":0}`,
		"lsn as number":      `{"version":"1.0","lsn":1,"state":0}`,
		"no state":           `{"version":"1.0","lsn":"0/1"}`,
		"state below -1":     `{"version":"1.0","lsn":"0/1","state":-2}`,
		"state is fraction":  `{"version":"1.0","lsn":"0/1","state":0.5}`,
		"half a cut":         `{` + good + `,"cut":{"commit_lsn":"0/2"}}`,
		"cut delivered":      `{"version":"1.0","lsn":"0/3","state":0,"cut":{"commit_lsn":"0/2","changes":1}}`,
		"null horizon":       `{` + good + `,"publications":[{"name":"p","horizon":null}]}`,
		"null count":         `{` + good + `,"delta":{"t":null}}`,
		"count 0":            `{` + good + `,"delta":{"t":0}}`,
		"count out of range": `{` + good + `,"delta":{"t":4294967297}}`,
		"requests below 0":   `{` + good + `,"requests":-1}`,
		"no state of table":  `{` + good + `,"tables":{"1":{"table":"t","rows":0}}}`,
		"unknown state":      `{` + good + `,"tables":{"1":{"table":"t","rows":0,"state":"x"}}}`,
		"no rows":            `{` + good + `,"tables":{"1":{"table":"t","state":"done"}}}`,
		"no name":            `{` + good + `,"tables":{"1":{"rows":0,"state":"done"}}}`,
		"OID too large":      `{` + good + `,"tables":{"4294967296":null}}`,
		"OID written oddly":  `{` + good + `,"tables":{"01":null}}`,
		"null in a key":      `{` + good + `,"tables":{"1":{"table":"t","rows":0,"state":"reading","ranges":[{"after":[null]}]}}}`,
		"number in a key":    `{` + good + `,"tables":{"1":{"table":"t","rows":0,"state":"reading","ranges":[{"after":[1]}]}}}`,
		"null for a key":     `{` + good + `,"tables":{"1":{"table":"t","rows":0,"state":"reading","again":[null]}}}`,
		"bad base64":         `{` + good + `,"tables":{"1":{"table":{"base64":"*"},"rows":0,"state":"reading"}}}`,
		"request without id": `{` + good + `,"tables":{"1":{"table":"t","rows":0,"state":"reading","request":{"tables":["t"]}}}}`,
		"tree of parts":      `{` + good + `,"trees":{"1":[]}}`,
		"part without link":  `{` + good + `,"trees":{"1":{"2":{"name":"p"}}}}`,
		"part without name":  `{` + good + `,"trees":{"1":{"2":{"link":1}}}}`,
		"part is null":       `{` + good + `,"trees":{"1":{"2":null}}}`,
		"part of no OID":     `{` + good + `,"trees":{"1":{"x":{"name":"p","link":1}}}}`,
		"tree of no OID":     `{` + good + `,"trees":{"-1":null}}`,
		"half a skip":        `{` + good + `,"after":{"done":"0000000000000001-0000000000","tables":{},"skipped":[["0000000000000001-0000000000"]]}}`,
		"skip backwards":     `{` + good + `,"after":{"done":"0000000000000001-0000000000","tables":{},"skipped":[["0000000000000002-0000000000","0000000000000001-0000000000"]]}}`,
		"skips overlap":      `{` + good + `,"after":{"done":"0000000000000001-0000000000","tables":{},"skipped":[["0000000000000001-0000000000","0000000000000003-0000000000"],["0000000000000002-0000000000","0000000000000004-0000000000"]]}}`,
		"skip of nothing":    `{` + good + `,"after":{"done":"0000000000000001-0000000000","tables":{},"skipped":[["x","0000000000000001-0000000000"]]}}`,
		"request for nobody": `{` + good + `,"tables":{"1":{"table":"t","rows":0,"state":"reading","request":{"id":"x"}}}}`,
	} {
		if c, _, _, err := DecodePosition([]byte(data)); err == nil {
			t.Errorf("position, %s: read as %+v", name, c)
		}
	}
	if _, _, _, err := DecodePosition([]byte(`{` + good + `}`)); err != nil {
		t.Errorf("the record that the others are bent from is good: %v", err)
	}
	for _, data := range []string{"", `{"version":"1.0"}`, `{"version":"1.0","partitions":null}`, `{"version":"1.0","partitions":{"t":-1}}`, `{"version":"1.0","partitions":[]}`,
		`{"version":"1.1","partitions":{},"tables":{"1":null}}`, `{"version":"1.2","partitions":{},"trees":{"1":null}}`, `{"version":"1.1","partitions":{},"tables":{"1":{"table":"t","rows":0,"state":"reading","again_read":[["1"]]}}}`} {
		c := Checkpoint{Partitions: map[string]int32{"kept": 1}}
		if err := DecodeState([]byte(data), &c); err == nil || c.Partitions["kept"] != 1 {
			t.Errorf("state %q: %v, %v", data, c, err)
		}
	}
}

func TestEncodePositionDoesNotAllocate(t *testing.T) {
	c, at, delta := full()
	buf := make([]byte, 0, 4096)
	if n := testing.AllocsPerRun(100, func() { buf = EncodePosition(buf[:0], &c, at, delta) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestAppendStringIsJSON(t *testing.T) {
	for _, s := range []string{"", "a", "\x00\x1f\x7f", `"\/`, "é€😀", "a\xffb", "\xed\xa0\x80", "\u2028"} {
		var got string
		if err := json.Unmarshal(appendString(nil, s), &got); err != nil || got != strings.ToValidUTF8(s, "\uFFFD") && got != string([]rune(s)) {
			t.Errorf("%q reads back as %q, %v", s, got, err)
		}
	}
}

func TestRefusalSaysWhatRiskRemedy(t *testing.T) {
	cause := errors.New("cause")
	err := fmt.Errorf("open store: %w", &Refusal{What: "what", Risk: "risk", Remedy: "remedy", Err: cause})
	if got := err.Error(); got != "open store: what: cause; at risk: risk; to resolve: remedy" {
		t.Error(got)
	}
	if !IsRefusal(err) || !errors.Is(err, cause) || IsRefusal(cause) {
		t.Error("the chain is not kept")
	}
}

func FuzzDecodePosition(f *testing.F) {
	c, at, delta := full()
	f.Add(EncodePosition(nil, &c, at, delta))
	f.Add(EncodePosition(nil, &Checkpoint{}, StateBeside, nil))
	f.Add([]byte(`{"version":"2.0"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, at, delta, err := DecodePosition(data)
		if err != nil {
			return
		}
		out := EncodePosition(nil, &c, at, &delta)
		c2, at2, delta2, err := DecodePosition(out)
		if err != nil || at2 != at {
			t.Fatalf("%q reads, but %q does not: %v", data, out, err)
		}
		// An empty delta is left out.
		if d := cmp.Diff(c, c2) + cmp.Diff(delta, delta2, cmpopts.EquateEmpty()); d != "" {
			t.Fatalf("%q reads back differently: %s", data, d)
		}
	})
}

func FuzzDecodeState(f *testing.F) {
	f.Add([]byte(`{"version":"1.0","partitions":{"a":1,"b":2}}`))
	f.Add([]byte(`{"version":"1.5","partitions":{},"x":[]}`))
	_, _, delta := full()
	f.Add(encodeState(nil, delta.Partitions, map[uint32]*TableDelta{1: {TableProgress: delta.Tables[16384].TableProgress}}, map[uint32]Tree{1: {}, 16500: fullTrees()[16500]}))
	f.Fuzz(func(t *testing.T, data []byte) {
		var c, c2 Checkpoint
		if DecodeState(data, &c) != nil {
			return
		}
		out := EncodeState(nil, &c)
		if err := DecodeState(out, &c2); err != nil || !cmp.Equal(c, c2) {
			t.Fatalf("%q reads, %q does not: %v", data, out, err)
		}
	})
}

func FuzzDecodeRequest(f *testing.F) {
	f.Add("id", EncodeRequest(nil, fullRequest()))
	f.Fuzz(func(t *testing.T, id string, data []byte) {
		r, err := DecodeRequest(id, data)
		if err != nil {
			return
		}
		out := EncodeRequest(nil, &r)
		if r2, err := DecodeRequest(id, out); err != nil || !cmp.Equal(r, r2) {
			t.Fatalf("%q reads, %q does not: %v", data, out, err)
		}
	})
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	if *rewrite {
		if err := os.WriteFile(filepath.Join("testdata", name), append(got, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want := strings.TrimSuffix(string(read(t, name)), "\n"); string(got) != want {
		t.Errorf("%s: got\n%s\nwant\n%s", name, got, want)
	}
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func BenchmarkEncodePosition(b *testing.B) {
	c, at, _ := full()
	buf := make([]byte, 0, 4096)
	b.ReportAllocs()
	for b.Loop() {
		buf = EncodePosition(buf[:0], &c, at, nil)
	}
}

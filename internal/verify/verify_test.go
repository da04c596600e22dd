package verify

import (
	"encoding/json"
	"fmt"
	"hash/maphash"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/snapshot"
)

// bed compares records and rows that a test gives.
type bed struct {
	t      *testing.T
	c      *comparison
	s      *records
	topic  *spill
	table  *spill
	offset int64
}

func newBed(t *testing.T, limit int64) *bed {
	t.Helper()
	b := &bed{t: t}
	seed := maphash.MakeSeed()
	mvcc, err := snapshot.ParseMVCC("100:200:150")
	if err != nil {
		t.Fatal(err)
	}
	b.topic, b.table = newSpill(t.TempDir(), limit, 0), newSpill(t.TempDir(), limit, 0)
	b.c = &comparison{seed: seed, dir: t.TempDir(), budget: limit, threshold: ^uint64(0), topic: "t", judge: judgeKey, report: &TableReport{}}
	b.s = &records{
		seed: seed, snapshot: mvcc, lsn: 1000, settled: 900, begin: ends{0: 1 << 40}, threshold: ^uint64(0), out: b.topic,
		truncated: map[int32]order{}, last: map[int32]*passed{}, report: b.c.report, comparer: b.c,
	}
	return b
}

// record takes a record at a position, such as "10-1" or "10-snapshot"; empty: none.
func (b *bed) record(position, key, value string, headers ...kgo.RecordHeader) {
	b.t.Helper()
	r := &kgo.Record{Offset: b.offset, Headers: headers}
	b.offset++
	if key != "" {
		r.Key = []byte(key)
	}
	if value != "" {
		r.Value = []byte(value)
	}
	if position != "" {
		var header []byte
		var commit checkpoint.LSN
		var seq uint64
		if _, err := fmt.Sscanf(position, "%d-snapshot", &commit); err == nil && strings.HasSuffix(position, "snapshot") {
			header = checkpoint.AppendSnapshotHeader(nil, commit)
		} else if _, err := fmt.Sscanf(position, "%d-%d", &commit, &seq); err == nil {
			header = checkpoint.AppendHeader(nil, commit, seq)
		}
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: headerPosition, Value: header})
	}
	if err := b.s.take(r); err != nil {
		b.t.Fatal(err)
	}
}

// value is that of a change of transaction xid.
func value(op, after string, xid int) string {
	source := `{"schema":"public","table":"t","tx_id":` + fmt.Sprint(xid) + `}`
	if op == "r" {
		source = `{"schema":"public","table":"t","tx_id":null}`
	}
	if op == "d" {
		return `{"before":` + after + `,"after":null,"op":"d","source":` + source + `}`
	}
	if after == "" {
		after = "null"
	}
	return `{"before":null,"after":` + after + `,"op":"` + op + `","source":` + source + `}`
}

func (b *bed) row(key, value string) {
	b.t.Helper()
	r := row{key: []byte(key), value: []byte(value)}
	if err := b.table.add(maphash.Bytes(b.c.seed, r.key), r.append(nil)); err != nil {
		b.t.Fatal(err)
	}
}

// want runs the comparison and checks what it found, each written "kind key columns".
func (b *bed) want(want ...string) {
	b.t.Helper()
	b.c.truncated = b.s.truncated
	if err := b.c.run(b.topic, b.table); err != nil {
		b.t.Fatal(err)
	}
	got := map[string]int{}
	for _, d := range b.c.report.Found {
		got[strings.TrimSpace(d.Kind+" "+string(d.Key)+" "+strings.Join(d.Columns, ","))]++
	}
	for _, w := range want {
		got[w]--
	}
	for what, n := range got {
		switch {
		case n > 0:
			b.t.Errorf("found %s, which is none", what)
		case n < 0:
			b.t.Errorf("did not find %s", what)
		}
	}
	if n := b.c.report.Differences(); n != int64(len(want)) {
		b.t.Errorf("%d differences, want %d", n, len(want))
	}
	for _, s := range []*spill{b.topic, b.table} {
		if err := s.close(); err != nil {
			b.t.Error(err)
		}
	}
}

func moved(key string) kgo.RecordHeader {
	return kgo.RecordHeader{Key: headerPreviousKey, Value: []byte(key)}
}

func TestFolding(t *testing.T) {
	replayed := kgo.RecordHeader{Key: headerReplay, Value: []byte("1")}
	for name, c := range map[string]struct {
		do   func(b *bed)
		want []string
	}{
		"equal": {func(b *bed) {
			b.record("10-0", "1", value("c", `{"id":1,"v":"a"}`, 50))
			b.row("1", `{"id":1,"v":"a"}`)
		}, nil},
		"a transaction that the snapshot does not see is left out": {func(b *bed) {
			b.record("10-0", "1", value("c", `{"id":1,"v":"a"}`, 50))
			b.record("20-0", "1", value("u", `{"id":1,"v":"b"}`, 150))
			b.record("30-0", "2", value("c", `{"id":2,"v":"b"}`, 200))
			b.record("40-0", "1", value("d", `{"id":1}`, 201))
			b.record("40-0", "1", "")
			b.row("1", `{"id":1,"v":"a"}`)
		}, nil},
		"absent columns keep their value": {func(b *bed) {
			b.record("5-snapshot", "1", value("r", `{"id":1,"v":"a","big":"x"}`, 0))
			b.record("10-0", "1", value("u", `{"id":1,"v":"b"}`, 50))
			b.row("1", `{"id":1,"v":"b","big":"x"}`)
		}, nil},
		"absent columns of a row that was there before are none": {func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1,"big":"x"}`, 50))
			b.record("6-0", "1", value("d", `{"id":1}`, 51))
			b.record("6-0", "1", "")
			b.record("7-0", "1", value("c", `{"id":1}`, 52))
			b.row("1", `{"id":1,"big":"x"}`)
		}, []string{"differing 1 big"}},
		"a marker is an absent column": {func(b *bed) {
			b.c.marks = map[string][]byte{`"big"`: []byte(`"-"`)}
			b.record("5-0", "1", value("c", `{"id":1,"big":"x"}`, 50))
			b.record("6-0", "1", value("u", `{"id":1,"big":"-"}`, 51))
			b.record("5-1", "2", value("c", `{"id":2,"big":"-"}`, 50))
			b.row("1", `{"id":1,"big":"x"}`)
			b.row("2", `{"id":2,"big":"-"}`)
		}, nil},
		"a key that changes takes absent columns along, twice": {func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1,"v":"a","big":"x"}`, 50))
			for i, from := range []string{"1", "2"} {
				position := fmt.Sprintf("%d-0", 10+i)
				to := string(rune(from[0] + 1))
				b.record(position, from, value("d", `{"id":`+from+`}`, 60+i))
				b.record(position, from, "")
				b.record(position, to, value("c", `{"id":`+to+`,"v":"b"}`, 60+i), moved(from))
			}
			b.record("20-0", "1", value("c", `{"id":1,"v":"c","big":"y"}`, 70))
			b.row("3", `{"id":3,"v":"b","big":"x"}`)
			b.row("1", `{"id":1,"v":"c","big":"y"}`)
		}, nil},
		"a key that changed has another value": {func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1,"big":"x"}`, 50))
			b.record("6-0", "1", value("d", `{"id":1}`, 51))
			b.record("6-0", "2", value("c", `{"id":2}`, 51), moved("1"))
			b.row("2", `{"id":2,"big":"y"}`)
		}, []string{"differing 2 big"}},
		"the order is that of positions, of a replay too": {func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1,"v":"a"}`, 50))
			b.record("6-0", "1", value("u", `{"id":1,"v":"b"}`, 51))
			b.record("5-0", "1", value("c", `{"id":1,"v":"a"}`, 50), replayed)
			b.row("1", `{"id":1,"v":"b"}`)
		}, nil},
		"a record without a position stands at its offset": {func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1,"v":"a"}`, 50))
			b.record("", "1", value("u", `{"id":1,"v":"b"}`, 50))
			b.row("1", `{"id":1,"v":"a"}`)
		}, []string{"differing 1 v"}},
		"doubled records": {func(b *bed) {
			b.record("5-snapshot", "1", value("r", `{"id":1}`, 0))
			b.record("5-snapshot", "1", value("r", `{"id":1}`, 0))
			for range 2 {
				b.record("6-0", "2", value("c", `{"id":2}`, 50))
			}
			for range 2 {
				b.record("7-0", "3", value("d", `{"id":3}`, 50))
				b.record("7-0", "3", "")
			}
			b.row("1", `{"id":1}`)
			b.row("2", `{"id":2}`)
		}, []string{"doubled 1", "doubled 2", "doubled 3", "doubled 3"}},
		"missing, extra, a missing delete": {func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1}`, 50))
			b.record("6-0", "3", "")
			b.row("2", `{"id":2}`)
			b.row("3", `{"id":3}`)
		}, []string{"extra 1", "missing 2", "missing 3"}},
		"a truncate empties what stands before it": {func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1}`, 50))
			b.record("6-0", "", value("t", "", 51))
			b.record("6-1", "2", value("c", `{"id":2}`, 51))
			b.record("7-0", "", value("t", "", 150)) // not seen
			b.row("2", `{"id":2}`)
		}, nil},
		"a tombstone is of its delete's transaction": {func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1}`, 50))
			b.record("6-0", "1", value("d", `{"id":1}`, 150))
			b.record("6-0", "1", "")
			b.row("1", `{"id":1}`)
		}, nil},
		"a column that is younger than the row": {func(b *bed) {
			b.c.defaults = map[string][]byte{`"new"`: []byte("7")}
			b.record("5-0", "1", value("c", `{"id":1,"gone":1}`, 50))
			b.record("5-1", "2", value("c", `{"id":2}`, 50))
			b.row("1", `{"id":1,"new":7,"other":null}`)
			b.row("2", `{"id":2,"new":8}`)
		}, []string{"differing 2 new"}},
		"what is no record of ours": {func(b *bed) {
			b.record("5-0", "1", `{"before":`)
			b.record("5-1", "2", `{}`)
			b.record("5-2", "3", value("x", `{}`, 50))
		}, []string{"unreadable 1", "unreadable 2", "unreadable 3"}},
		"rows without an envelope, at the edge of the snapshot": {func(b *bed) {
			b.s.format.Bare = true
			b.record("10-0", "1", `{"id":1,"v":"a"}`)
			b.record("950-0", "1", `{"id":1,"v":"b"}`) // perhaps seen
			b.record("951-0", "2", `{"id":2}`)         // perhaps
			b.record("1000-0", "3", `{"id":3}`)        // not
			b.row("1", `{"id":1,"v":"a"}`)
		}, nil},
		"rows without an envelope, long before": {func(b *bed) {
			b.s.format.Bare = true
			b.record("10-0", "1", `{"id":1,"v":"a"}`)
			b.record("11-0", "1", `{"id":1,"v":"b"}`)
			b.row("1", `{"id":1,"v":"a"}`)
		}, []string{"differing 1 v"}},
	} {
		for _, limit := range []int64{1 << 20, 512} { // in memory, and in files that are parted again
			t.Run(fmt.Sprintf("%s/%d", name, limit), func(t *testing.T) {
				b := newBed(t, limit)
				c.do(b)
				b.want(c.want...)
			})
		}
	}
}

func TestRowsWithoutAKeyAreAMultiset(t *testing.T) {
	for name, c := range map[string]struct {
		exact bool
		want  []string
	}{
		"with updates and deletes": {true, []string{`missing {"a":1}`, `extra {"a":3}`, `extra {"a":4}`}},
		"inserts alone":            {false, []string{`missing {"a":1}`}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, 1<<20)
			b.s.keyless, b.c.judge = true, judgeRows(c.exact)
			b.record("5-snapshot", "", value("r", `{"a":1}`, 0))
			b.record("5-snapshot", "", value("r", `{"a":2}`, 0))
			b.record("6-0", "", value("c", `{"a":3}`, 50))
			b.record("6-1", "", value("c", `{"a":4}`, 50))
			b.row(`{"a":1}`, "")
			b.row(`{"a":1}`, "")
			b.row(`{"a":2}`, "")
			b.want(c.want...)
		})
	}
}

func TestManyKeysThroughFiles(t *testing.T) {
	b := newBed(t, 1<<10)
	for i := range 5000 {
		row := fmt.Sprintf(`{"id":%d,"v":"%s"}`, i, strings.Repeat("x", i%50))
		if i != 77 {
			b.record(fmt.Sprintf("%d-0", i+1), fmt.Sprint(i), value("c", row, 50))
		}
		b.row(fmt.Sprint(i), row)
	}
	if b.topic.disk == 0 || b.table.disk == 0 {
		t.Fatal("nothing was put aside")
	}
	b.s.lsn = 1 << 30
	b.want("missing 77")
	if got := b.c.report.Equal; got != 4999 {
		t.Errorf("%d keys are equal, want 4999", got)
	}
}

func TestASampleIsTheSmallestHashes(t *testing.T) {
	s := sample{n: 3}
	for _, h := range []uint64{9, 4, 7, 1, 8, 3} {
		s.take(h)
	}
	if h, sampled := s.threshold(); h != 4 || !sampled {
		t.Errorf("threshold %d, %t, want 4 of a sample", h, sampled)
	}
	if s.take(5) {
		t.Error("took a hash above the threshold")
	}
}

// FuzzEnvelope holds the look at JSON against encoding/json.
func FuzzEnvelope(f *testing.F) {
	f.Add([]byte(value("u", `{"id":1,"v":"a\"b\\"}`, 50)))
	f.Add([]byte(`{"payload":{"op":"c","after":{},"source":{"txId":7}}}`))
	f.Add([]byte(` { "a" : [1,{"b":"]"}] } `))
	f.Fuzz(func(t *testing.T, b []byte) {
		parseEnvelope(b, true)
		parseBare(b, false)
		parseEnvelope(b, false)
		var want map[string]json.RawMessage
		if json.Unmarshal(b, &want) != nil || want == nil {
			return
		}
		got := map[string]string{}
		m := object(b)
		for name, v, ok := m.next(); ok; name, v, ok = m.next() {
			got[unquote(name)] = string(v)
		}
		if m.bad || len(got) != len(want) {
			t.Fatalf("%q: %d members, bad %t, want %d", b, len(got), m.bad, len(want))
		}
		for name, v := range want {
			if got[name] != string(v) {
				t.Errorf("%q: member %q is %q, want %q", b, name, got[name], v)
			}
		}
	})
}

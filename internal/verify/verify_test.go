package verify

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/snapshot"
)

// bed compares records and rows that a test gives.
type bed struct {
	t      *testing.T
	k      *compared
	c      *comparison
	s      *records
	topic  *spill
	table  *spill
	offset int64
}

func newBed(t *testing.T, limit int64, l look) *bed {
	t.Helper()
	b := &bed{t: t, k: &compared{look: l, moved: newKeySet(1000)}}
	mvcc, err := snapshot.ParseMVCC("100:200:150")
	if err != nil {
		t.Fatal(err)
	}
	b.topic, b.table = newSpill(t.TempDir(), limit, 0), newSpill(t.TempDir(), limit, 0)
	b.c = &b.k.comparison
	*b.c = comparison{look: l, dir: t.TempDir(), budget: limit, threshold: ^uint64(0), topic: "t", judge: judgeKey, report: &b.k.report, left: newKeySet(1000)}
	if l.digests {
		b.c.judge = judgeDigests
	}
	b.k.rows = b.table
	b.s = &records{
		look: l, snapshot: mvcc, lsn: 1000, settled: 900, begin: ends{0: 1 << 40}, threshold: ^uint64(0), out: b.topic,
		truncated: map[int32]order{}, last: map[int32]*passed{}, report: b.c.report, comparer: b.c, moved: b.k.moved,
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
	hash := b.k.hash([]byte(key))
	if !b.k.only.has(hash) {
		return
	}
	if err := b.k.put(hash, row{key: []byte(key), value: b.k.digest(&b.k.hashed, []byte(value))}); err != nil {
		b.t.Fatal(err)
	}
}

// onlyLook is one that judges all keys as they stand.
func onlyLook() look { return look{seed: maphash.MakeSeed(), final: true} }

// run compares what was given.
func (b *bed) run() {
	b.t.Helper()
	b.s.count()
	b.c.truncated, b.c.read = b.s.truncated, b.s.read
	if err := b.c.run(b.topic, b.table); err != nil {
		b.t.Fatal(err)
	}
	for _, s := range []*spill{b.topic, b.table} {
		if err := s.close(); err != nil {
			b.t.Error(err)
		}
	}
}

// want runs the comparison and checks what it found, each written "kind key columns".
func (b *bed) want(want ...string) {
	b.t.Helper()
	b.run()
	got := map[string]int{}
	for _, d := range b.c.report.Found {
		got[shown(&d)]++
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
}

func shown(d *Difference) string {
	return strings.TrimSpace(d.Kind + " " + string(d.Key) + " " + strings.Join(d.Columns, ","))
}

func moved(key string) kgo.RecordHeader {
	return kgo.RecordHeader{Key: headerPreviousKey, Value: []byte(key)}
}

func TestFolding(t *testing.T) {
	replayed := kgo.RecordHeader{Key: headerReplay, Value: []byte("1")}
	for name, c := range map[string]struct {
		do     func(b *bed)
		want   []string
		simple bool // one look settles it
	}{
		"equal": {do: func(b *bed) {
			b.record("10-0", "1", value("c", `{"id":1,"v":"a"}`, 50))
			b.record("11-0", "1", value("u", `{"id":1,"v":"b"}`, 51))
			b.record("10-1", "2", value("c", `{"id":2,"v":"a"}`, 50))
			b.record("12-0", "2", value("d", `{"id":2}`, 52))
			b.record("12-0", "2", "")
			b.row("1", `{"id":1,"v":"b"}`)
		}, simple: true},
		"a transaction that the snapshot does not see is left out": {do: func(b *bed) {
			b.record("10-0", "1", value("c", `{"id":1,"v":"a"}`, 50))
			b.record("20-0", "1", value("u", `{"id":1,"v":"b"}`, 150))
			b.record("30-0", "2", value("c", `{"id":2,"v":"b"}`, 200))
			b.record("40-0", "1", value("d", `{"id":1}`, 201))
			b.record("40-0", "1", "")
			b.row("1", `{"id":1,"v":"a"}`)
		}},
		"absent columns keep their value": {do: func(b *bed) {
			b.record("5-snapshot", "1", value("r", `{"id":1,"v":"a","big":"x"}`, 0))
			b.record("10-0", "1", value("u", `{"id":1,"v":"b"}`, 50))
			b.row("1", `{"id":1,"v":"b","big":"x"}`)
		}},
		"absent columns of a row that was there before are none": {do: func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1,"big":"x"}`, 50))
			b.record("6-0", "1", value("d", `{"id":1}`, 51))
			b.record("6-0", "1", "")
			b.record("7-0", "1", value("c", `{"id":1}`, 52))
			b.row("1", `{"id":1,"big":"x"}`)
		}, want: []string{"differing 1 big"}},
		"a marker is an absent column": {do: func(b *bed) {
			b.c.marks = map[string][]byte{`"big"`: []byte(`"-"`)}
			b.record("5-0", "1", value("c", `{"id":1,"big":"x"}`, 50))
			b.record("6-0", "1", value("u", `{"id":1,"big":"-"}`, 51))
			b.record("5-1", "2", value("c", `{"id":2,"big":"-"}`, 50))
			b.row("1", `{"id":1,"big":"x"}`)
			b.row("2", `{"id":2,"big":"-"}`)
		}},
		"a key that changes takes absent columns along, twice": {do: func(b *bed) {
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
		}},
		"a key that changed has another value": {do: func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1,"big":"x"}`, 50))
			b.record("6-0", "1", value("d", `{"id":1}`, 51))
			b.record("6-0", "2", value("c", `{"id":2}`, 51), moved("1"))
			b.row("2", `{"id":2,"big":"y"}`)
		}, want: []string{"differing 2 big"}},
		"the order is that of positions, of a replay too": {do: func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1,"v":"a"}`, 50))
			b.record("6-0", "1", value("u", `{"id":1,"v":"b"}`, 51))
			b.record("5-0", "1", value("c", `{"id":1,"v":"a"}`, 50), replayed)
			b.row("1", `{"id":1,"v":"b"}`)
		}},
		"a record without a position stands at its offset": {do: func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1,"v":"a"}`, 50))
			b.record("", "1", value("u", `{"id":1,"v":"b"}`, 50))
			b.row("1", `{"id":1,"v":"a"}`)
		}, want: []string{"differing 1 v"}},
		"doubled records": {do: func(b *bed) {
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
		}, want: []string{"doubled 1", "doubled 2", "doubled 3", "doubled 3"}},
		"missing, extra, a missing delete": {do: func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1}`, 50))
			b.record("6-0", "3", "")
			b.row("2", `{"id":2}`)
			b.row("3", `{"id":3}`)
		}, want: []string{"extra 1", "missing 2", "missing 3"}},
		"a truncate empties what stands before it": {do: func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1}`, 50))
			b.record("6-0", "", value("t", "", 51))
			b.record("6-1", "2", value("c", `{"id":2}`, 51))
			b.record("7-0", "", value("t", "", 150)) // not seen
			b.row("2", `{"id":2}`)
		}},
		"a tombstone is of its delete's transaction": {do: func(b *bed) {
			b.record("5-0", "1", value("c", `{"id":1}`, 50))
			b.record("6-0", "1", value("d", `{"id":1}`, 150))
			b.record("6-0", "1", "")
			b.row("1", `{"id":1}`)
		}},
		"a column that is younger than the row": {do: func(b *bed) {
			b.c.defaults = map[string][]byte{`"new"`: []byte("7")}
			b.record("5-0", "1", value("c", `{"id":1,"gone":1}`, 50))
			b.record("5-1", "2", value("c", `{"id":2}`, 50))
			b.row("1", `{"id":1,"new":7,"other":null}`)
			b.row("2", `{"id":2,"new":8}`)
		}, want: []string{"differing 2 new"}},
		"what is no record of ours": {do: func(b *bed) {
			b.record("5-0", "1", `{"before":`)
			b.record("5-1", "2", `{}`)
			b.record("5-2", "3", value("x", `{}`, 50))
		}, want: []string{"unreadable 1", "unreadable 2", "unreadable 3"}},
		"what cannot be read is passed too": {do: func(b *bed) {
			b.record("9-0", "2", value("x", `{}`, 50))
			b.record("", "1", value("c", `{"id":1,"v":"a"}`, 50)) // stands at 9-0
			b.record("7-0", "1", value("u", `{"id":1,"v":"b"}`, 51), replayed)
			b.row("1", `{"id":1,"v":"a"}`)
		}, want: []string{"unreadable 2"}},
		"a truncate takes away what it was before": {do: func(b *bed) {
			b.record("5-0", "", value("c", `{"id":1}`, 50)) // when the table had no key
			b.record("5-snapshot", "", value("r", `{"id":1}`, 50))
			b.record("6-0", "", "")
			b.record("7-0", "1", `{"id":1}`) // when records had no envelope
			b.record("", "1", `{"half":`)
			b.record("7-snapshot", "", value("t", "", 0))
			b.record("7-snapshot", "1", value("r", `{"id":1}`, 0))
			b.record("5-0", "", value("c", `{"id":1}`, 50), replayed)
			b.row("1", `{"id":1}`)
		}, simple: true},
		"it stands before what cannot be read": {do: func(b *bed) {
			b.record("5-0", "", value("c", `{"id":1}`, 50))
			b.record("6-0", "", value("t", "", 51))
			b.record("6-1", "", value("c", `{"id":1}`, 51))
			b.record("7-0", "", value("c", `{"id":1}`, 52))
			b.record("8-0", "", value("t", "", 150)) // not seen
			b.record("6-0", "", value("t", "", 51), replayed)
		}, want: []string{"unreadable", "unreadable"}},
		"rows without an envelope, at the edge of the snapshot": {do: func(b *bed) {
			b.s.format.Bare = true
			b.record("10-0", "1", `{"id":1,"v":"a"}`)
			b.record("950-0", "1", `{"id":1,"v":"b"}`) // perhaps seen
			b.record("951-0", "2", `{"id":2}`)         // perhaps
			b.record("1000-0", "3", `{"id":3}`)        // not
			b.row("1", `{"id":1,"v":"a"}`)
		}},
		"rows without an envelope, long before": {do: func(b *bed) {
			b.s.format.Bare = true
			b.record("10-0", "1", `{"id":1,"v":"a"}`)
			b.record("11-0", "1", `{"id":1,"v":"b"}`)
			b.row("1", `{"id":1,"v":"a"}`)
		}, want: []string{"differing 1 v"}},
	} {
		for _, limit := range []int64{1 << 20, 512} { // in memory, and in files that are parted again
			t.Run(fmt.Sprintf("%s/%d", name, limit), func(t *testing.T) {
				b := newBed(t, limit, onlyLook())
				c.do(b)
				b.want(c.want...)
			})
			t.Run(fmt.Sprintf("%s/%d/in two looks", name, limit), func(t *testing.T) {
				b := newBed(t, limit, look{seed: maphash.MakeSeed(), digests: true})
				c.do(b)
				b.run()
				second, again := b.k.next()
				found := b.k.report.Differences()
				if !again {
					if len(c.want) != int(found) {
						t.Errorf("the first look found %d differences, and left nothing; want %d", found, len(c.want))
					}
					return
				}
				if second.final = true; c.simple {
					t.Errorf("the first look left %d keys", len(second.only.keys))
				}
				total := b.k.report
				b = newBed(t, limit, second)
				c.do(b)
				b.k.report.Found, b.k.report.Unreadable = total.Found, total.Unreadable
				b.want(c.want...)
			})
		}
	}
}

func TestManyKeysThroughFiles(t *testing.T) {
	b := newBed(t, 1<<10, onlyLook())
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

func TestAFullDiskSaysWhatToDo(t *testing.T) {
	f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := newSpill(t.TempDir(), fan*64, 0)
	s.parts[0].file = f
	for range 100 {
		if err = s.add(0, make([]byte, 30)); err != nil {
			break
		}
	}
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "--temp-dir") {
		t.Errorf("a full disk gives %v", err)
	}
	if err := s.close(); err != nil {
		t.Error(err)
	}
}

func TestAKeySetThatOverflowsHoldsAll(t *testing.T) {
	k := newKeySet(2)
	for hash := range uint64(3) {
		k.add(hash, hash == 0)
	}
	if !k.overflow || k.empty() {
		t.Errorf("3 keys of 2: %+v", k)
	}
	left := newKeySet(5)
	left.add(1, false)
	left.add(1, true)
	left.add(1, false)
	if !left.compares(1) || left.has(2) {
		t.Errorf("%+v", left)
	}
	if left.join(k); !left.overflow {
		t.Error("a set that joins all keys does not hold them")
	}
}

func TestAHorizonIsSettledWhenNothingOfItRuns(t *testing.T) {
	s, err := snapshot.ParseMVCC("4294967396:4294967400:4294967398") // 100:104:102 of the second epoch
	if err != nil {
		t.Fatal(err)
	}
	for xid, want := range map[uint32]bool{99: true, 101: true, 102: false, 103: true, 104: false, 4294967290: true} {
		if h := (horizon{running: []uint32{99, xid}}); h.settledBy(s) != want {
			t.Errorf("with %d running before: settled is %t, want %t", xid, !want, want)
		}
	}
}

func FuzzChange(f *testing.F) {
	f.Add([]byte("key"), []byte("row"), []byte("before"), uint64(5), uint64(1), int64(7), int32(3), byte(0), uint64(9))
	f.Add([]byte{}, []byte{}, []byte{}, uint64(0), uint64(snapshotSeq), int64(1<<40), int32(0), flagMoved, uint64(1))
	f.Fuzz(func(t *testing.T, key, row, previous []byte, commit, seq uint64, offset int64, partition int32, flags byte, sum uint64) {
		want := change{key: key, row: row, flags: flags, kind: 1, op: 'c', order: order{checkpoint.LSN(commit), seq, partition, offset}}
		if flags&flagMoved != 0 {
			want.previous = previous
		}
		if seq == snapshotSeq {
			want.sum = sum
		}
		got := parseChange(want.append(nil))
		if !bytes.Equal(got.key, key) || !bytes.Equal(got.row, row) || !bytes.Equal(got.previous, want.previous) || got.order != want.order || got.sum != want.sum || got.flags != flags {
			t.Errorf("%+v became %+v", want, got)
		}
	})
}

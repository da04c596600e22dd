package checkpoint

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

// topicLog is a checkpoint topic in memory: what Kafka keeps of it.
type topicLog struct {
	records []topicRecord
	next    int64
}

type topicRecord struct {
	offset    int64
	key       string
	value     []byte
	committed bool
}

// write appends one transaction and gives the offset of its state record.
func (l *topicLog) write(records []Record, commit bool) (state int64) {
	state = -1
	for _, r := range records {
		if string(r.Key) == KeyState {
			state = l.next
		}
		l.records = append(l.records, topicRecord{l.next, string(r.Key), append([]byte(nil), r.Value...), commit})
		l.next++
	}
	l.next++ // the marker
	return state
}

// compact keeps the newest committed record of each key among those before offset.
func (l *topicLog) compact(before int64) {
	newest := map[string]int64{}
	for _, r := range l.records {
		if r.committed {
			newest[r.key] = r.offset
		}
	}
	kept := l.records[:0]
	for _, r := range l.records {
		if r.offset >= before || r.committed && newest[r.key] == r.offset {
			kept = append(kept, r)
		}
	}
	l.records = kept
}

// load does what a start does, by the rules of FORMAT.md.
func (l *topicLog) load() (c Checkpoint, found bool, err error) {
	for i := len(l.records) - 1; i >= 0; i-- {
		r := l.records[i]
		if !r.committed || r.key != KeyPosition {
			continue
		}
		c, at, delta, err := DecodePosition(r.value)
		if err != nil {
			return c, false, err
		}
		for j := range l.records {
			s := l.records[j]
			if at == StateBeside {
				s = l.records[max(i-1-j, 0)]
			}
			if s.committed && s.key == KeyState && s.offset >= at {
				err := DecodeState(s.value, &c)
				c.Apply(delta)
				return c, true, err
			}
		}
		return c, false, fmt.Errorf("no state record for position record at %d, state %d", r.offset, at)
	}
	return c, false, nil
}

// progressGen draws the progress of a table after old: keys of Again mostly leave
// anywhere and come at the end.
func progressGen(t *rapid.T, old TableProgress) TableProgress {
	text := rapid.SampledFrom([]string{"", "1", "a\"b", "\xff", "é", "long " + strings.Repeat("x", 30)})
	key := rapid.SliceOfN(text, 0, 2)
	maybe := func(what string) []string {
		if rapid.Bool().Draw(t, what) {
			return nil
		}
		return key.Draw(t, what)
	}
	if old.State != "" && rapid.IntRange(0, 4).Draw(t, "take out") == 0 {
		return TableProgress{}
	}
	p := TableProgress{
		Table: "public." + text.Draw(t, "table"),
		State: rapid.SampledFrom([]TableState{TableWaiting, TablePending, TableReading, TableDone}).Draw(t, "state"),
		Key:   maybe("key"),
		Whole: rapid.Bool().Draw(t, "whole"),
		Rows:  rapid.Int64Range(0, 9).Draw(t, "rows"),
	}
	for range rapid.IntRange(0, 2).Draw(t, "ranges") {
		p.Ranges = append(p.Ranges, Range{After: maybe("after"), To: maybe("to")})
	}
	for _, k := range old.Again {
		if rapid.IntRange(0, 3).Draw(t, "keep") > 0 {
			p.Again = append(p.Again, k)
		}
	}
	for range rapid.IntRange(0, 3).Draw(t, "new keys") {
		k := key.Draw(t, "again")
		if !slices.ContainsFunc(p.Again, func(o []string) bool { return slices.Equal(o, k) }) {
			p.Again = append(p.Again, k)
		}
	}
	if len(p.Again) > 1 && rapid.IntRange(0, 4).Draw(t, "reorder") == 0 {
		slices.Reverse(p.Again)
	}
	if rapid.Bool().Draw(t, "began") {
		p.Began = time.UnixMicro(rapid.Int64Range(1, 9).Draw(t, "at")).UTC()
	}
	if rapid.Bool().Draw(t, "request") {
		p.Request = &Request{ID: text.Draw(t, "id") + "x", Tables: []string{text.Draw(t, "asked")}, Where: text.Draw(t, "where")}
	}
	return p
}

// treeGen draws a partitioned table's partitions; nil takes the table out.
func treeGen(t *rapid.T) Tree {
	if rapid.IntRange(0, 3).Draw(t, "no tree") == 0 {
		return nil
	}
	tree := Tree{}
	for range rapid.IntRange(0, 3).Draw(t, "parts") {
		tree[rapid.Uint32Range(5, 8).Draw(t, "part")] = Part{
			Name: "public.p", Link: rapid.Uint32Range(0, 2).Draw(t, "link"), File: rapid.Uint32Range(0, 2).Draw(t, "file"),
			Truncated: rapid.Uint32Range(0, 2).Draw(t, "truncated"),
		}
	}
	return tree
}

// Whatever happens between starts, a start finds the last committed checkpoint
// with the partition counts and the tables as they were then.
func TestLogAlwaysLeadsToTheWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var topic topicLog
		want := Checkpoint{}
		newLog := func(c Checkpoint) *Log {
			l := NewLog(c)
			l.maxDelta, l.maxAge, l.maxCarried = 2, 5, 800
			return l
		}
		l := newLog(want)
		now := map[string]int32{}
		tables := map[uint32]TableProgress{}
		trees := map[uint32]Tree{}
		lsn := LSN(1)
		set := func() {
			name := fmt.Sprint("t", rapid.IntRange(0, 6).Draw(t, "topic"))
			n := rapid.Int32Range(1, 9).Draw(t, "count")
			if old := l.SetPartitions(name, n); old != now[name] {
				t.Fatalf("%s had %d partitions, Log says %d", name, now[name], old)
			}
			now[name] = n
		}
		records := func(at LSN) ([]Record, map[uint32]TableProgress, map[uint32]Tree) {
			c := Checkpoint{Position: Position{LSN: at}, Tables: map[uint32]TableProgress{}, Trees: map[uint32]Tree{}}
			treesAfter := maps.Clone(trees)
			for range rapid.IntRange(0, 2).Draw(t, "trees") {
				oid := rapid.Uint32Range(1, 4).Draw(t, "root")
				c.Trees[oid] = treeGen(t)
				setTree(treesAfter, oid, c.Trees[oid])
			}
			after := maps.Clone(tables)
			for range rapid.IntRange(0, 3).Draw(t, "tables") {
				oid := rapid.Uint32Range(1, 6).Draw(t, "oid")
				p := progressGen(t, tables[oid])
				c.Tables[oid] = p
				after[oid] = deepCopy(map[uint32]TableProgress{oid: p})[oid]
				if p.State == "" {
					delete(after, oid)
				}
			}
			out, err := l.Records(&c)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range c.Tables { // what the caller does with it later is its own business
				clear(p.Ranges)
				clear(p.Again)
			}
			return out, after, treesAfter
		}
		check := func() Checkpoint {
			c, found, err := topic.load()
			if err != nil || found == want.Position.IsZero() {
				t.Fatalf("found %v, %v; want %v", found, err, want)
			}
			if d := cmp.Diff(want, c, emptyIsNil); d != "" {
				t.Fatal(d)
			}
			return c
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.SampledFrom([]string{"set", "commit", "commit", "commit", "abort", "compact", "restart"}).Draw(t, "step") {
			case "set":
				set()
			case "commit":
				lsn++
				out, after, treesAfter := records(lsn)
				tables, trees = after, treesAfter
				want = Checkpoint{Position: Position{LSN: lsn}, Partitions: maps.Clone(now), Tables: deepCopy(after), Trees: maps.Clone(trees)}
				at := topic.write(out, true)
				if rapid.Bool().Draw(t, "set meanwhile") {
					set()
				}
				l.Committed(at)
			case "abort":
				out, _, _ := records(lsn + 100)
				topic.write(out, false)
			case "compact":
				topic.compact(rapid.Int64Range(0, topic.next).Draw(t, "before"))
			case "restart":
				c := check()
				l = newLog(c)
				if now = maps.Clone(c.Partitions); now == nil {
					now = map[string]int32{}
				}
				if tables = deepCopy(c.Tables); tables == nil {
					tables = map[uint32]TableProgress{}
				}
				if trees = c.Trees; trees == nil {
					trees = map[uint32]Tree{}
				}
			}
		}
		check()
	})
}

// emptyIsNil takes what is empty for nil, but for keys, where that matters.
var emptyIsNil = cmp.FilterPath(func(p cmp.Path) bool { return p.Last().Type() != reflect.TypeFor[[]string]() }, cmpopts.EquateEmpty())

func deepCopy(tables map[uint32]TableProgress) map[uint32]TableProgress {
	out := maps.Clone(tables)
	for oid, p := range out {
		p.Ranges, p.Again = slices.Clone(p.Ranges), slices.Clone(p.Again)
		out[oid] = p
	}
	return out
}

func mustRecords(t *testing.T, l *Log, lsn LSN) []Record {
	t.Helper()
	r, err := l.Records(&Checkpoint{Position: Position{LSN: lsn}})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestLogWritesStateRarely(t *testing.T) {
	l := NewLog(Checkpoint{Partitions: map[string]int32{"a": 1}})
	if r := mustRecords(t, l, 1); len(r) != 2 || string(r[0].Key) != KeyState || string(r[1].Key) != KeyPosition {
		t.Fatal("the first transaction has a state record, in front")
	}
	if r := mustRecords(t, l, 1); len(r) != 2 {
		t.Fatal("the first was aborted, so the second has it again")
	}
	l.Committed(7)
	for i := range LSN(3000) {
		if r := mustRecords(t, l, 2+i); len(r) != 1 {
			t.Fatal("nothing changed, no state record is due")
		}
		l.Committed(-1)
	}

	l.SetPartitions("b", 2)
	n := 0
	for ; len(mustRecords(t, l, 5000)) == 1; n++ {
		l.Committed(-1)
	}
	if n != DefaultMaxAge {
		t.Errorf("a delta is carried by %d records, want %d", n, DefaultMaxAge)
	}
	l.Committed(9)

	for i := range DefaultMaxDelta {
		l.SetPartitions(fmt.Sprint("c", i), 1)
	}
	if len(mustRecords(t, l, 5000)) != 1 {
		t.Error("the delta is full but not too large")
	}
	l.SetPartitions("one more", 1)
	if len(mustRecords(t, l, 5000)) != 2 {
		t.Error("the delta is too large")
	}
	if l.Partitions("a") != 1 || l.Partitions("one more") != 1 || l.Partitions("none") != 0 {
		t.Error("Partitions is wrong")
	}
}

func TestLogRefusesPositionsThatGoBack(t *testing.T) {
	l := NewLog(Checkpoint{Position: Position{LSN: 10}})
	if _, err := l.Records(&Checkpoint{Position: Position{LSN: 9}}); err == nil {
		t.Error("before the loaded position")
	}
	mustRecords(t, l, 20)
	mustRecords(t, l, 15) // the one at 20 was aborted
	l.Committed(0)
	if _, err := l.Records(&Checkpoint{Position: Position{LSN: 14}}); err == nil {
		t.Error("before the committed position")
	}
	if _, err := l.Records(&Checkpoint{Position: Position{LSN: 30, Cut: Cut{CommitLSN: 29, Changes: 1}}}); err == nil {
		t.Error("cut in a delivered transaction")
	}
}

// reading is a snapshot at work: n tables, of which some are being read.
func reading(n int) Checkpoint {
	c := Checkpoint{Tables: map[uint32]TableProgress{}}
	for i := range n {
		c.Tables[uint32(16384+i)] = TableProgress{Table: fmt.Sprintf("public.table_%d", i), State: TableDone, Rows: 123456, Began: time.UnixMicro(1764550000119001)}
	}
	return c
}

func step(oid uint32, row int) TableProgress {
	return TableProgress{
		Table: fmt.Sprintf("public.table_%d", oid), State: TableReading, Key: []string{"id"},
		Ranges: []Range{{After: []string{fmt.Sprint(row)}, To: []string{"99999999"}}, {After: []string{"99999999"}}},
		Rows:   int64(row), Began: time.UnixMicro(1764550000119001),
	}
}

// With the progress of four tables in every transaction, position records stay small
// and state records rare, however large.
func TestLogIsCheapWhileTablesAreRead(t *testing.T) {
	for _, n := range []int{4, 20000} {
		l := NewLog(reading(n))
		mustRecords(t, l, 1)
		l.Committed(1)
		state := l.stateBytes
		var states, stateBytes, positions int
		const transactions = 10000
		for i := range transactions {
			c := Checkpoint{Position: Position{LSN: LSN(2 + i)}, Tables: map[uint32]TableProgress{}}
			for oid := range uint32(4) {
				c.Tables[16384+oid] = step(oid, i)
			}
			r, err := l.Records(&c)
			if err != nil {
				t.Fatal(err)
			}
			if len(r) == 2 {
				states++
				stateBytes += len(r[0].Value)
			}
			positions += len(r[len(r)-1].Value)
			l.Committed(int64(i))
		}
		t.Logf("%d tables: state record of %d bytes written %d times in %d transactions, position records of %d bytes on average", n, state, states, transactions, positions/transactions)
		if positions/transactions > 1000 || states > transactions/100 || stateBytes > positions {
			t.Errorf("%d tables: %d bytes of positions, %d state records of %d bytes in all", n, positions, states, stateBytes)
		}
	}
}

// A busy stream that leaves incomplete changes: keys gather by the thousand, and no
// transaction repeats them all.
func TestLogRepeatsFewKeysOfAgain(t *testing.T) {
	l := NewLog(reading(20))
	p := step(0, 0)
	total, most := 0, 0
	const transactions, behind = 8000, 5000
	for i := range transactions {
		p.Again = append(p.Again, []string{fmt.Sprintf("customer-%08d", i)})
		if len(p.Again) > behind {
			p.Again = slices.Delete(slices.Clone(p.Again), 7, 8)
		}
		r, err := l.Records(&Checkpoint{Position: Position{LSN: LSN(1 + i)}, Tables: map[uint32]TableProgress{16384: p}})
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range r {
			total += len(x.Value)
		}
		most = max(most, len(r[len(r)-1].Value))
		l.Committed(int64(i))
	}
	t.Logf("%d bytes a transaction, the largest position record %d; all keys are %d", total/transactions, most, l.stateBytes)
	if total/transactions > 4<<10 || most > 16<<10 {
		t.Error("the keys are repeated")
	}
}

// What is too large for a position record is in the state record, also where it is
// new in every transaction.
func TestLogKeepsPositionRecordsBelowTheirLimit(t *testing.T) {
	l := NewLog(reading(20000))
	for i := range 30 {
		p := step(0, i)
		for j := range 300 {
			p.Ranges = append(p.Ranges, Range{After: []string{strings.Repeat("k", 2500), fmt.Sprint(i, j)}})
		}
		r, err := l.Records(&Checkpoint{Position: Position{LSN: LSN(1 + i)}, Tables: map[uint32]TableProgress{16384: p}})
		if err != nil {
			t.Fatal(err)
		}
		if n := len(r[len(r)-1].Value); n > maxDeltaBytes+1000 {
			t.Errorf("position record of %d bytes", n)
		}
		l.Committed(int64(i))
	}
}

func TestLogWritesTombstonesOfRequests(t *testing.T) {
	l := NewLog(Checkpoint{})
	r, err := l.Records(&Checkpoint{TakenOver: []string{"a", "b"}})
	if err != nil || len(r) != 4 {
		t.Fatal(r, err)
	}
	for i, key := range []string{"request/a", "request/b", KeyState, KeyPosition} {
		if string(r[i].Key) != key || (r[i].Value == nil) != (i < 2) {
			t.Errorf("record %d is %q: %q", i, r[i].Key, r[i].Value)
		}
	}
	l.Committed(2)
	if r := mustRecords(t, l, 1); len(r) != 1 {
		t.Error("a tombstone is written once:", r)
	}
}

func BenchmarkLogRecords(b *testing.B) {
	l := NewLog(reading(100))
	c := Checkpoint{Tables: map[uint32]TableProgress{}}
	for oid := range uint32(4) {
		c.Tables[16384+oid] = step(oid, 1)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		c.Position.LSN++
		if _, err := l.Records(&c); err != nil {
			b.Fatal(err)
		}
		l.Committed(int64(i))
	}
}

func BenchmarkStateRecordOf20000Tables(b *testing.B) {
	c := reading(20000)
	b.ReportAllocs()
	for b.Loop() {
		l := NewLog(c)
		if _, err := l.Records(&c); err != nil {
			b.Fatal(err)
		}
	}
}

func TestLogRecordsDoesNotAllocate(t *testing.T) {
	l := NewLog(Checkpoint{})
	c, _, _ := full()
	l.SetPartitions("a", 1)
	c.Tables = map[uint32]TableProgress{1: step(1, 1), 2: step(2, 1)}
	transaction := func() {
		if _, err := l.Records(&c); err != nil {
			t.Fatal(err)
		}
		l.Committed(1)
	}
	transaction()
	l.SetPartitions("b", 1)
	transaction()
	if n := testing.AllocsPerRun(100, transaction); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

package router

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/walrelay/walrelay/replication"
)

// changesOf are n changes of every form: several records that share bytes, dead letters,
// counts, keys and values that are null or empty.
func changesOf(t *rapid.T, tb testing.TB, n int) []*replication.Change {
	rel := relationOf(tb, "t", "id text", "v text")
	hidden := relationOf(tb, "hidden", "id text")
	hidden.OID++
	log := relationOf(tb, "log", "line text")
	log.OID, log.Columns[0].Identity = log.OID+2, false
	var list []*replication.Change
	for i := range n {
		id := fmt.Sprint("k", i)
		c := insertOf(rel, id, rapid.StringMatching(`[a-z]{0,30}`).Draw(t, "v"))
		c.Seq = uint64(i)
		switch rapid.IntRange(0, 6).Draw(t, "form") {
		case 0: // delete, tombstone, insert with previous-key
			c.Op, c.Old, c.OldIsKey = replication.OpUpdate, rowOf("old"+id, null), true
		case 1:
			c.Op, c.Old, c.OldIsKey, c.New = replication.OpDelete, c.New, true, nil
		case 2:
			c.Op, c.New = replication.OpTruncate, nil
		case 3:
			c.New = rowOf(id, "\xff") // a dead letter
		case 4:
			c.Relation, c.New = hidden, rowOf(id)
		case 5:
			c.Relation, c.New = log, rowOf(id)
		}
		list = append(list, c)
	}
	return list
}

func described(b *Batch) (records []string, counts map[string]int) {
	counts = map[string]int{}
	for i := range b.records {
		records = append(records, describeRecord(b, i))
	}
	for _, n := range b.counts {
		counts[n.topic+" "+n.outcome.String()] += n.n
	}
	return records, counts
}

// However many pieces a side batch is taken in, into batches of whatever limits, and
// whatever is routed between them: its records arrive in their order, byte for byte, and
// every change is counted once.
func TestTakeGivesTheSameRecordsInTheSameOrder(tt *testing.T) {
	rapid.Check(tt, func(t *rapid.T) {
		o := testOptions()
		o.Tables = func(_, table string) bool { return table != "hidden" }
		r := mustRouter(tt, o, newFixedTopics())
		wide := Limits{Bytes: 1 << 20, Records: 1 << 20}
		whole, side := NewBatch(wide), NewBatch(wide)
		route := func(c *replication.Change, b *Batch) {
			if err := r.Route(c, b); err != nil {
				t.Fatal(err)
			}
		}
		var got []string
		counts := map[string]int{}
		hand := NewBatch(Limits{Bytes: rapid.IntRange(1, 3000).Draw(t, "bytes"), Records: rapid.IntRange(1, 30).Draw(t, "records")})
		deliver := func() {
			records, n := described(hand)
			got = append(got, records...)
			for k, v := range n {
				counts[k] += v
			}
			hand.Reset()
		}
		for range rapid.IntRange(1, 4).Draw(t, "rounds") {
			for _, c := range changesOf(t, tt, rapid.IntRange(0, 30).Draw(t, "changes")) {
				route(c, whole)
				route(c, side)
			}
			for calls := rapid.IntRange(0, 10).Draw(t, "calls"); calls > 0; calls-- {
				n := rapid.IntRange(1, 10).Draw(t, "n")
				before, left := len(hand.records), len(side.records)-side.taken
				more := hand.Take(side, n)
				switch took := len(hand.records) - before; {
				case took > n || left > 0 && took == 0:
					t.Fatalf("%d records taken, asked for %d of %d", took, n, left)
				case took > 1 && len(hand.records) > hand.limits.Records:
					t.Fatalf("%d records taken into a batch that has %d behind them and a limit of %d", took, len(hand.records), hand.limits.Records)
				case more != (took < left):
					t.Fatalf("%d of %d records taken, and more is %v", took, left, more)
				case took < min(n, left) && !hand.Full():
					t.Fatalf("%d records taken into a batch that is not full, asked for %d of %d", took, n, left)
				}
				if hand.Full() || rapid.Bool().Draw(t, "deliver") {
					deliver()
				}
			}
		}
		for hand.Take(side, 1000) {
			if hand.Full() {
				deliver()
			}
		}
		deliver()
		want, wantCounts := described(whole)
		if !slices.Equal(got, want) {
			t.Fatalf("taken %q\nwent in %q", got, want)
		}
		if !maps.Equal(counts, wantCounts) {
			t.Fatalf("counted %v, want %v", counts, wantCounts)
		}
	})
}

func TestTakeGivesTheMemoryBack(t *testing.T) {
	l := Limits{Bytes: 1 << 20, Records: 1000}
	side, hand := NewBatch(l), NewBatch(l)
	r := mustRouter(t, testOptions(), newFixedTopics())
	for range 3 {
		for range 10 {
			if err := r.Route(wideRow(t), side); err != nil {
				t.Fatal(err)
			}
		}
		if !hand.Take(side, 9) || side.Bytes() == 0 || cap(side.arena) == 0 {
			t.Fatal("the side batch is empty too early")
		}
		if hand.Take(side, 9) {
			t.Fatal("the side batch has records left")
		}
		if side.Tail() || cap(side.arena) != 0 || side.records != nil || side.headers != nil || side.counts != nil {
			t.Errorf("the side batch has kept memory: %+v", side.mark())
		}
	}
	if hand.Records() != 30 || hand.Take(side, 1) {
		t.Errorf("%d records", hand.Records())
	}
}

// Null and empty are not the same, in a batch without any memory either.
func TestTakeKeepsNullAndEmptyApart(t *testing.T) {
	l := Limits{Bytes: 1 << 20, Records: 1000}
	side, hand := NewBatch(l), NewBatch(l)
	for range 2 {
		topic := &Topic{Name: "t", Partitions: 1}
		side.records = append(side.records,
			record{topic: topic, key: side.put([]byte{}), value: side.put(nil)},
			record{topic: topic, key: side.put(nil), value: side.put([]byte{})})
		hand.Reset()
		for hand.Take(side, 1) {
		}
		for i, rec := range hand.records {
			key, value := hand.bytes(rec.key), hand.bytes(rec.value)
			if (key == nil) != (i == 1) || (value == nil) != (i == 0) {
				t.Errorf("record %d: key %v, value %v", i, key, value)
			}
		}
	}
}

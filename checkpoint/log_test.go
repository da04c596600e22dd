package checkpoint

import (
	"fmt"
	"maps"
	"testing"

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

// Whatever happens between starts, a start finds the last committed checkpoint
// with the partition counts as they were then.
func TestLogAlwaysLeadsToTheCounts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var topic topicLog
		want := Checkpoint{}
		l := NewLog(want)
		l.maxDelta, l.maxAge = 2, 5
		now := map[string]int32{}
		lsn := LSN(1)
		set := func() {
			name := fmt.Sprint("t", rapid.IntRange(0, 6).Draw(t, "topic"))
			n := rapid.Int32Range(1, 9).Draw(t, "count")
			if old := l.SetPartitions(name, n); old != now[name] {
				t.Fatalf("%s had %d partitions, Log says %d", name, now[name], old)
			}
			now[name] = n
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.SampledFrom([]string{"set", "commit", "commit", "commit during set", "abort", "compact", "restart"}).Draw(t, "step") {
			case "set":
				set()
			case "commit", "commit during set":
				lsn++
				records, err := l.Records(&Checkpoint{Position: Position{LSN: lsn}})
				if err != nil {
					t.Fatal(err)
				}
				want = Checkpoint{Position: Position{LSN: lsn}, Partitions: maps.Clone(now)}
				at := topic.write(records, true)
				if rapid.Bool().Draw(t, "set meanwhile") {
					set()
				}
				l.Committed(at)
			case "abort":
				records, err := l.Records(&Checkpoint{Position: Position{LSN: lsn + 100}})
				if err != nil {
					t.Fatal(err)
				}
				topic.write(records, false)
			case "compact":
				topic.compact(rapid.Int64Range(0, topic.next).Draw(t, "before"))
			case "restart":
				c, found, err := topic.load()
				if err != nil || found == want.Position.IsZero() {
					t.Fatalf("found %v, %v; want %v", found, err, want)
				}
				if c.Position != want.Position || !maps.Equal(c.Partitions, want.Partitions) {
					t.Fatalf("loaded %v, want %v", c, want)
				}
				l = NewLog(c)
				l.maxDelta, l.maxAge = 2, 5
				now = maps.Clone(c.Partitions)
				if now == nil {
					now = map[string]int32{}
				}
			}
		}
		c, _, err := topic.load()
		if err != nil || c.Position != want.Position || !maps.Equal(c.Partitions, want.Partitions) {
			t.Fatalf("loaded %v, %v, want %v", c, err, want)
		}
	})
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

func TestLogRecordsDoesNotAllocate(t *testing.T) {
	l := NewLog(Checkpoint{})
	c, _, _ := full()
	l.SetPartitions("a", 1)
	step := func() {
		if _, err := l.Records(&c); err != nil {
			t.Fatal(err)
		}
		l.Committed(1)
	}
	step()
	l.SetPartitions("b", 1)
	step()
	if n := testing.AllocsPerRun(100, step); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

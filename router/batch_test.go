package router

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/walrelay/walrelay/checkpoint"
)

// stretch is what a batch delivers: its prefix as text, and its counts.
type stretch struct {
	records      []string
	excluded     map[string]int
	transactions int
}

func readPrefix(b *Batch) stretch {
	s := stretch{excluded: map[string]int{}, transactions: b.transactions}
	for i := range b.records[:b.done.records] {
		s.records = append(s.records, describeRecord(b, i))
	}
	for _, n := range b.counts[:b.done.counts] {
		s.excluded[n.topic] += n.n
	}
	return s
}

// batchMachine drives two batches as the relay's loop does and keeps account of what
// went in and what came out.
type batchMachine struct {
	t              *rapid.T
	limits         Limits
	filling, spare *Batch
	topic          *Topic

	in  stretch // everything that was not dropped
	out stretch // everything delivered

	pos      checkpoint.Position
	next     uint64 // number of the next change, and so its content
	open     bool
	size     Limits // of the open transaction so far
	counts   int
	cut      bool // the open transaction was cut
	tail     stretch
	maxShare int // bytes of the largest change
}

func newBatchMachine(t *rapid.T) *batchMachine {
	l := Limits{Bytes: rapid.IntRange(50, 2000).Draw(t, "bytes"), Records: rapid.IntRange(2, 20).Draw(t, "records")}
	return &batchMachine{
		t: t, limits: l, filling: NewBatch(l), spare: NewBatch(l), topic: &Topic{Name: "t", Partitions: 3},
		in: stretch{excluded: map[string]int{}}, out: stretch{excluded: map[string]int{}}, tail: stretch{excluded: map[string]int{}},
	}
}

// change puts one change into the batch: up to three records, or a count.
func (m *batchMachine) change() {
	b := m.filling
	m.open = true
	m.next++
	before := len(b.arena)
	if n := rapid.IntRange(0, 3).Draw(m.t, "records of the change"); n > 0 {
		var shared span
		for i := range n {
			rec := record{topic: m.topic, key: b.put(fmt.Appendf(nil, "k%d", m.next)), value: nullSpan}
			if i != 1 {
				size := rapid.IntRange(0, 100).Draw(m.t, "size")
				rec.value = b.put(fmt.Appendf(nil, "%d:%0*d", m.next, size, i))
			}
			at := len(b.headers)
			b.headers = append(b.headers, header{name: "position", value: b.put(fmt.Appendf(nil, "p%d", m.next))})
			if i == 2 {
				b.headers = append(b.headers, header{name: "previous-key", value: shared}) // another record's bytes
			}
			shared = rec.key
			rec.headers = span{at: at, n: len(b.headers) - at}
			b.records = append(b.records, rec)
			m.tail.records = append(m.tail.records, describeRecord(b, len(b.records)-1))
		}
	} else {
		topic := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"}).Draw(m.t, "excluded")
		b.tally(topic, outcomeExcluded)
		m.tail.excluded[topic]++
		m.counts++
	}
	m.size.Bytes += len(b.arena) - before
	m.size.Records = len(m.tail.records)
	m.maxShare = max(m.maxShare, len(b.arena)-before)
	m.limit()
}

// limit is what the loop does behind each change of an open transaction.
func (m *batchMachine) limit() {
	for m.filling.Full() && m.filling.Moved() && m.open {
		m.deliver()
	}
	if !m.open || !m.filling.Full() {
		return
	}
	// The open transaction alone fills the batch: only then may it be cut.
	if !m.cut && m.size.Bytes < m.limits.Bytes && m.size.Records < m.limits.Records && m.counts < m.limits.Records {
		m.t.Fatalf("a transaction of %+v and %d counts is to be cut at limits of %+v", m.size, m.counts, m.limits)
	}
	m.cut = true
	m.advance(false)
	m.deliver()
}

func (m *batchMachine) advance(ends bool) {
	m.pos.LSN++
	m.pos.CommitTime = time.Unix(int64(m.pos.LSN), 0)
	m.filling.Advance(m.pos, ends)
	m.in.records = append(m.in.records, m.tail.records...)
	for topic, n := range m.tail.excluded {
		m.in.excluded[topic] += n
	}
	if ends {
		m.in.transactions++
	}
	m.tail = stretch{excluded: map[string]int{}}
	if m.filling.Tail() {
		m.t.Fatal("there is a tail behind Advance")
	}
}

func (m *batchMachine) commit() {
	m.advance(true)
	m.open, m.size, m.counts, m.cut = false, Limits{}, 0, false
	if m.filling.Full() {
		m.deliver()
	}
}

// deliver takes the prefix out, as the relay does: the tail moves to the other batch.
func (m *batchMachine) deliver() {
	b := m.filling
	if !b.Moved() {
		return
	}
	if b.Position() != m.pos {
		m.t.Fatalf("position %v, want %v", b.Position(), m.pos)
	}
	if len(b.arena) >= m.limits.Bytes+2*m.maxShare+1 || len(b.records) > m.limits.Records+2*3 {
		m.t.Fatalf("%d bytes and %d records at limits of %+v and changes of at most %d bytes", len(b.arena), len(b.records), m.limits, m.maxShare)
	}
	b.MoveTail(m.spare)
	if b.Tail() || m.spare.Moved() || m.spare.Ready() {
		m.t.Fatal("behind MoveTail one batch has a tail or the other a prefix")
	}
	m.filling, m.spare = m.spare, nil
	s := readPrefix(b)
	m.out.records = append(m.out.records, s.records...)
	m.out.transactions += s.transactions
	for topic, n := range s.excluded {
		m.out.excluded[topic] += n
	}
	if ready := len(s.records) > 0; ready != b.Ready() {
		m.t.Fatalf("%d records and Ready is %v", len(s.records), b.Ready())
	}
	b.Reset()
	m.spare = b
}

// drop is a restart's or a stop's: the open transaction is forgotten.
func (m *batchMachine) drop() {
	m.filling.DropTail()
	m.tail = stretch{excluded: map[string]int{}}
	m.open, m.size, m.counts, m.cut = false, Limits{}, 0, false
	if m.filling.Tail() {
		m.t.Fatal("there is a tail behind DropTail")
	}
}

// Whatever sequence of changes, commits, cuts, deliveries and dropped tails: the
// delivered prefixes are the input, byte for byte, and so are the counts; and a
// transaction that fits into a batch is never cut.
func TestBatchesDeliverWhatWentIn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newBatchMachine(t)
		t.Repeat(map[string]func(*rapid.T){
			"change":  func(*rapid.T) { m.change() },
			"change2": func(*rapid.T) { m.change() },
			"change3": func(*rapid.T) { m.change() },
			"commit":  func(*rapid.T) { m.commit() },
			"deliver": func(*rapid.T) { m.deliver() },
			"drop":    func(*rapid.T) { m.drop() },
			"": func(t *rapid.T) {
				if got, want := m.filling.Tail(), len(m.tail.records)+len(m.tail.excluded) > 0; got != want {
					t.Fatalf("Tail is %v, want %v", got, want)
				}
			},
		})
		m.drop()
		m.deliver()
		if !slices.Equal(m.out.records, m.in.records) {
			t.Fatalf("delivered %q\nwent in %q", m.out.records, m.in.records)
		}
		if !maps.Equal(m.out.excluded, m.in.excluded) || m.out.transactions != m.in.transactions {
			t.Fatalf("delivered %v in %d transactions, went in %v in %d", m.out.excluded, m.out.transactions, m.in.excluded, m.in.transactions)
		}
	})
}

func TestExcludedChangesOfOneTransactionAreOneNumber(t *testing.T) {
	b := NewBatch(Limits{Bytes: 1 << 20, Records: 10})
	for range 10_000_000 {
		b.tally("t", outcomeExcluded)
	}
	if len(b.counts) != 1 || b.counts[0].n != 10_000_000 || b.Full() {
		t.Errorf("%+v", b.counts)
	}
	b.Advance(checkpoint.Position{LSN: 1}, true)
	b.tally("t", outcomeExcluded) // of the next one, which may be dropped
	b.DropTail()
	if len(b.counts) != 1 || b.counts[0].n != 10_000_000 {
		t.Errorf("%+v", b.counts)
	}
}

// The histogram of delivery times is of transactions: a message outside one, on a
// stream that was idle for hours, has no commit time of its own.
func TestOldestIsACommitOfTheBatch(t *testing.T) {
	hour := time.Date(2026, 12, 1, 6, 0, 0, 0, time.UTC)
	topic := &Topic{Name: "t", Partitions: 1}
	b := NewBatch(Limits{Bytes: 1 << 20, Records: 10})
	add := func() { b.records = append(b.records, record{topic: topic, key: nullSpan, value: nullSpan}) }
	add()
	b.Advance(checkpoint.Position{LSN: 1, CommitTime: hour}, false) // a message
	if !b.oldest.IsZero() {
		t.Errorf("oldest is %v behind a message", b.oldest)
	}
	add()
	b.Advance(checkpoint.Position{LSN: 2, CommitTime: hour.Add(time.Hour)}, true)
	add()
	b.Advance(checkpoint.Position{LSN: 3, CommitTime: hour.Add(2 * time.Hour)}, true)
	if want := hour.Add(time.Hour); !b.oldest.Equal(want) {
		t.Errorf("oldest is %v, want %v", b.oldest, want)
	}
	b.Reset()
	add()
	b.Advance(checkpoint.Position{LSN: 3, CommitTime: hour, Cut: checkpoint.Cut{CommitLSN: 9, Changes: 1}}, false)
	if !b.oldest.Equal(hour) {
		t.Errorf("oldest of a cut transaction is %v", b.oldest)
	}
}

func TestResetGivesAHugeArenaBack(t *testing.T) {
	b := NewBatch(Limits{Bytes: 1 << 10, Records: 10})
	b.put(make([]byte, 4<<20))
	b.Reset()
	if usual := cap(NewBatch(b.limits).arena); cap(b.arena) != usual {
		t.Errorf("the arena has %d bytes, want %d", cap(b.arena), usual)
	}
	b.put(make([]byte, 1<<10))
	kept := &b.arena[:1][0]
	b.Reset()
	if &b.arena[:1][0] != kept {
		t.Error("an arena of usual size is not kept")
	}
}

func TestACheckpointAloneLeavesTheTailATail(t *testing.T) {
	b, next := NewBatch(Limits{Bytes: 1 << 10, Records: 10}), NewBatch(Limits{Bytes: 1 << 10, Records: 10})
	b.records = append(b.records, record{key: b.put([]byte("k")), value: b.put([]byte("of an open transaction"))})
	b.Stand(checkpoint.Position{LSN: 7})
	if !b.Moved() || b.Ready() || b.done != (mark{}) {
		t.Fatalf("moved %v, records ready %v, prefix %+v", b.Moved(), b.Ready(), b.done)
	}
	b.MoveTail(next)
	if len(b.records) != 0 || len(next.records) != 1 || string(next.bytes(next.records[0].value)) != "of an open transaction" {
		t.Errorf("%d records leave, %d stay", len(b.records), len(next.records))
	}
}

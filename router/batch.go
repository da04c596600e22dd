package router

import (
	"time"

	"github.com/walrelay/walrelay/checkpoint"
)

// Limits bound a batch, and with it a Kafka transaction and our memory.
type Limits struct {
	Bytes   int // of keys, values and headers, before compression
	Records int
}

// Batch is the records of consecutive source transactions, to be delivered in one
// Kafka transaction together with the position after them.
//
// What must hold:
//
//  1. A batch is a prefix of complete source transactions and at most one open one
//     behind it, the tail. Only the prefix is ever delivered, so that a consumer
//     sees a source transaction wholly or not at all; unless a transaction alone
//     exceeds the limits: then it is cut, and its pieces are delivered in turn.
//  2. Position is the one after the prefix. Records and position belong together:
//     nothing is delivered without the other (DESIGN, invariant 2).
//
// Records lie in one arena and are described by offsets, so that a full batch is a
// handful of allocations, all reused. One goroutine owns a batch at a time.
type Batch struct {
	limits  Limits
	arena   []byte
	records []record
	headers []header
	counts  []count // excluded and dead-lettered changes

	// done is where the prefix ends.
	done mark
	// taken is how many records Take has copied out.
	taken int
	// Position after the prefix; zero where the prefix is empty and moves nothing.
	position     checkpoint.Position
	moved        bool
	transactions int       // source transactions that end in the prefix
	oldest       time.Time // commit time of the first of them
	// lastCut tells that the dead letter appended last lacks a part of its row.
	lastCut bool
}

// mark is a point in a batch.
type mark struct{ arena, records, headers, counts int }

// span is a piece of the arena; n is -1 for null.
type span struct{ at, n int }

// null is the span of a null key or value.
var nullSpan = span{n: -1}

// record describes a record; its partition is chosen when it is delivered.
type record struct {
	topic      *Topic
	key, value span
	headers    span // of Batch.headers
	where      placement
	partition  int32 // where it is placeAt
	dead       bool  // a dead letter
}

// placement says which partition a record goes to.
type placement uint8

const (
	placeByKey placement = iota // murmur2 of the key
	placeAlone                  // no key: all records of the topic in partition 0
	placeEvery                  // one in every partition (truncate)
	placeAt                     // the partition that the record names
)

// header is a record's header: a constant name and a piece of the arena.
type header struct {
	name  string
	value span
}

// count is a number of changes that did not become records of their topic.
type count struct {
	topic   string
	outcome outcome
	n       int
}

// outcome is what became of a change.
type outcome uint8

// The outcomes of a change; the names are the metric's label.
const (
	outcomeDelivered outcome = iota
	outcomeDeadLettered
	outcomeExcluded
)

func (o outcome) String() string {
	return [...]string{"delivered", "dead_lettered", "excluded"}[o]
}

// NewBatch makes an empty batch. Its arena has its final size at once: growing to it by
// doubling would take twice the memory, and pages that are never filled cost nothing.
func NewBatch(l Limits) *Batch {
	return &Batch{limits: l, arena: make([]byte, 0, min(l.Bytes, maxArena)+arenaSlack)}
}

const (
	arenaSlack = 64 << 10 // for the record that reaches the limit
	maxArena   = 64 << 20 // beyond that it grows as it is needed
)

// Bytes is the memory that the records take.
func (b *Batch) Bytes() int { return len(b.arena) }

// Transactions is the number of source transactions that end in the prefix.
func (b *Batch) Transactions() int { return b.transactions }

// Added tells of the records from number from on: their topic, how many Kafka records each
// becomes, and whether it is a tombstone or a dead letter.
func (b *Batch) Added(from int, each func(t *Topic, copies int, tombstone, dead bool)) {
	for i := from; i < len(b.records); i++ {
		r := &b.records[i]
		each(r.topic, r.copies(), r.value.n < 0, r.dead)
	}
}

// Records is the number of records, the tail's included.
func (b *Batch) Records() int { return len(b.records) }

// Ready tells whether there is something to deliver: records of complete source
// transactions.
func (b *Batch) Ready() bool { return b.done.records > 0 }

// Moved tells whether the prefix moves the position, with records or without.
func (b *Batch) Moved() bool { return b.moved }

// Position is the position after the prefix; it holds if Moved.
func (b *Batch) Position() checkpoint.Position { return b.position }

// Full tells whether the limits are reached.
func (b *Batch) Full() bool {
	return len(b.arena) >= b.limits.Bytes || len(b.records) >= b.limits.Records || len(b.counts) >= b.limits.Records
}

// Tail tells whether an open source transaction has changes in the batch.
func (b *Batch) Tail() bool { return b.mark() != b.done }

func (b *Batch) mark() mark {
	return mark{arena: len(b.arena), records: len(b.records), headers: len(b.headers), counts: len(b.counts)}
}

// Advance ends the prefix here: everything in the batch belongs to it, and p is the
// position after it. ends tells that a source transaction ends here.
func (b *Batch) Advance(p checkpoint.Position, ends bool) {
	b.done = b.mark()
	b.position, b.moved = p, true
	if ends {
		b.transactions++
	}
	// A message outside a transaction has no commit time: p still has that of the last
	// transaction, maybe hours ago.
	if b.oldest.IsZero() && b.done.records > 0 && (ends || !p.Cut.IsZero()) {
		b.oldest = p.CommitTime
	}
}

// Stand gives the batch a position without moving the prefix's end: nothing but the
// checkpoint leaves, and a tail stays a tail.
func (b *Batch) Stand(p checkpoint.Position) { b.position, b.moved = p, true }

// MoveTail moves the tail into the empty batch to. A tail is moved once at most, to
// the start of the next batch, so that each byte is copied once at most.
func (b *Batch) MoveTail(to *Batch) {
	to.Reset()
	to.arena = append(to.arena, b.arena[b.done.arena:]...)
	to.counts = append(to.counts, b.counts[b.done.counts:]...)
	shift := func(s span) span {
		if s.n < 0 {
			return s
		}
		return span{at: s.at - b.done.arena, n: s.n}
	}
	for _, r := range b.records[b.done.records:] {
		r.key, r.value = shift(r.key), shift(r.value)
		r.headers.at -= b.done.headers
		to.records = append(to.records, r)
	}
	for _, h := range b.headers[b.done.headers:] {
		to.headers = append(to.headers, header{name: h.name, value: shift(h.value)})
	}
	b.truncate(b.done)
}

// Take moves the next records of from, a side batch that is never delivered itself,
// behind b's own: n of them, fewer where b is Full before, at least one while there is
// one. It tells whether there are more. The changes that became no records are counted
// with the last piece. Behind that, from is empty and has given its memory back; until
// then more may be routed into it.
func (b *Batch) Take(from *Batch, n int) (more bool) {
	for i := 0; from.taken < len(from.records) && (i == 0 || i < n && !b.Full()); i++ {
		b.copyRecord(from, &from.records[from.taken])
		from.taken++
	}
	if from.taken < len(from.records) {
		return true
	}
	for _, c := range from.counts {
		b.tallyN(c.topic, c.outcome, c.n)
	}
	*from = Batch{limits: from.limits, arena: []byte{}}
	return false
}

// copyRecord copies a record with everything it points to, which may lie in an earlier
// record of its change.
func (b *Batch) copyRecord(from *Batch, rec *record) {
	to := *rec
	to.key, to.value = b.put(from.bytes(rec.key)), b.put(from.bytes(rec.value))
	to.headers.at = len(b.headers)
	for _, h := range from.headers[rec.headers.at : rec.headers.at+rec.headers.n] {
		b.headers = append(b.headers, header{name: h.name, value: b.put(from.bytes(h.value))})
	}
	b.records = append(b.records, to)
}

// DropTail forgets the open source transaction, which a restart reads again.
func (b *Batch) DropTail() { b.truncate(b.done) }

func (b *Batch) truncate(m mark) {
	b.arena, b.records, b.headers, b.counts = b.arena[:m.arena], b.records[:m.records], b.headers[:m.headers], b.counts[:m.counts]
}

// Reset empties the batch and keeps its memory, unless one huge row made it far
// larger than the limits.
func (b *Batch) Reset() {
	if cap(b.arena) > 2*b.limits.Bytes+1<<20 {
		b.arena = make([]byte, 0, min(b.limits.Bytes, maxArena)+arenaSlack)
	}
	b.truncate(mark{})
	b.done, b.position, b.moved, b.transactions, b.taken = mark{}, checkpoint.Position{}, false, 0, 0
	b.oldest = time.Time{}
}

func (b *Batch) bytes(s span) []byte {
	if s.n < 0 {
		return nil
	}
	return b.arena[s.at : s.at+s.n : s.at+s.n]
}

// spanFrom is the piece of the arena from at to its end.
func (b *Batch) spanFrom(at int) span { return span{at: at, n: len(b.arena) - at} }

// tally counts a change that did not become a record of its topic. Counts of one
// topic in the tail become one: a source transaction of ten million excluded changes
// is one number.
func (b *Batch) tally(topic string, o outcome) { b.tallyN(topic, o, 1) }

func (b *Batch) tallyN(topic string, o outcome, n int) {
	tail := b.counts[b.done.counts:]
	for i := len(tail) - 1; i >= max(0, len(tail)-tallyDepth); i-- {
		if tail[i].topic == topic && tail[i].outcome == o {
			tail[i].n += n
			return
		}
	}
	b.counts = append(b.counts, count{topic: topic, outcome: o, n: n})
}

// tallyDepth is how far back a count of the same topic is looked for.
const tallyDepth = 8

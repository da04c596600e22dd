package router

import (
	"hash/maphash"

	"github.com/walrelay/walrelay/replication"
)

// SequenceFault is an event whose aggregate_seq does not follow the one before it of the
// same aggregate. It goes out all the same: what it means is for its consumers to say.
type SequenceFault struct {
	Table     string // schema.table, or a messages' prefix
	Aggregate string // type and id, cut; only where First
	Last, Seq int64
	// First tells that nothing was said of the aggregate yet, as far as is remembered.
	First bool
}

// The kinds of a SequenceFault, as the metric's label spells them.
const (
	SequenceGap      = "gap"      // numbers are missing in between
	SequenceBackward = "backward" // it is not above the one before
)

// Kind is SequenceGap or SequenceBackward.
func (f *SequenceFault) Kind() string {
	if f.Seq > f.Last {
		return SequenceGap
	}
	return SequenceBackward
}

// seqWatch remembers the highest aggregate_seq of aggregates, of some 65,000 at a time in
// two megabytes: the aggregates of a set share a few places, which the least recent one
// leaves for a new one. An aggregate that has been forgotten begins anew.
type seqWatch struct {
	seed maphash.Seed
	sets [][seqPlaces]seqPlace // a power of two of them
	gaps bool                  // the numbers count within an aggregate, one by one
}

type seqPlace struct {
	hash uint64 // of the aggregate; 0 for none
	seq  int64
	said bool
}

const (
	seqSets   = 1 << 14
	seqPlaces = 4 // the most recent first
)

// newSeqWatch makes a watch. Its memory is the plan's, and taken with the first event.
func newSeqWatch(gaps bool) *seqWatch { return &seqWatch{seed: maphash.MakeSeed(), gaps: gaps} }

// step takes note of an event that goes out, and tells whether it is a fault.
func (w *seqWatch) step(hash uint64, seq int64) (last int64, first, fault bool) {
	if w.sets == nil {
		w.sets = make([][seqPlaces]seqPlace, seqSets)
	}
	hash |= 1 // never none
	set := &w.sets[hash>>1%seqSets]
	at := 0
	for at < seqPlaces-1 && set[at].hash != hash {
		at++
	}
	p := set[at]
	if p.hash != hash {
		p = seqPlace{hash: hash, seq: seq}
	} else {
		last, fault = p.seq, seq <= p.seq || w.gaps && seq > p.seq+1
		first = fault && !p.said
		p.said = p.said || fault
		p.seq = max(p.seq, seq)
	}
	copy(set[1:at+1], set[:at])
	set[0] = p
	return last, first, fault
}

// watchSequence sets sequence, where events have an aggregate and a number in it. A
// sequence_num counts the events of the whole table: only its order tells something.
func (p *outboxPlan) watchSequence() {
	c := p.fields[fieldSeq]
	if c < 0 || p.fields[fieldAggregateID] < 0 {
		return
	}
	p.sequence = newSeqWatch(p.source.columns[c].name != "sequence_num")
}

// observe looks at the sequence of a row whose event goes out.
func (p *outboxPlan) observe(row replication.Tuple, report func(*SequenceFault)) {
	w := p.sequence
	if w == nil || report == nil {
		return
	}
	id := row[p.fields[fieldAggregateID]]
	seq, ok := parseInteger(row[p.fields[fieldSeq]].Text)
	if !ok || id.Kind != replication.ValueText {
		return
	}
	hash := maphash.Bytes(w.seed, id.Text)
	kind := p.fields[fieldAggregateType]
	if kind >= 0 {
		hash = hash*31 + maphash.Bytes(w.seed, row[kind].Text)
	}
	last, first, fault := w.step(hash, seq)
	if !fault {
		return
	}
	f := SequenceFault{Table: p.source.path, Last: last, Seq: seq, First: first}
	if first {
		f.Aggregate = cutText(string(id.Text))
		if kind >= 0 {
			f.Aggregate = cutText(string(row[kind].Text)) + " " + f.Aggregate
		}
	}
	report(&f)
}

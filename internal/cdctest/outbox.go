package cdctest

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
)

// OutboxOrder checks events as their consumers see them. Per key: in each
// partition, read by offset, aggregate_seq strictly ascends; over all topics, by
// position, it runs 1, 2, ... n without a gap or a repeat, n being the number of
// events that were committed. No event id is there twice. It asks of the workload
// that one aggregate's events are numbered in commit order, from 1.
//
// The rows that were there before the slot are the backlog: those without a mark are
// there once, in the order of their ids; how they stand to the stream is open.
func OutboxOrder(log *Log, truth *Truth, l Layout) []Violation {
	f := &findings{rule: "OutboxOrder"}
	return f.outboxOrder(log.items(f), truth, l)
}

func (f *findings) outboxOrder(items []item, truth *Truth, l Layout) []Violation {
	var events []item
	ids := map[string]*Record{}
	for _, it := range items {
		if it.kind != KindEvent {
			continue
		}
		if first, ok := ids[it.Headers["id"]]; ok {
			f.at(it.Record, "event %s is already at %s", it.Headers["id"], first.Where())
		} else {
			ids[it.Headers["id"]] = it.Record
		}
		events = append(events, it)
	}
	checkByOffset(f, events)
	streamed, read := splitReads(events)
	byPosition(streamed)
	want := wantedEvents(items, truth, l)
	got := map[string][]int64{}
	for _, it := range streamed {
		if seq, ok := aggregateSeq(f, it); ok {
			got[string(it.Key)] = append(got[string(it.Key)], seq)
		}
	}
	for key, seqs := range got {
		checkNumbers(f, key, seqs, want.early[key], want.streamed[key])
		delete(want.streamed, key)
	}
	for key, n := range want.streamed {
		f.add("key "+key, "none of its %d events is there", n)
	}
	checkBacklog(f, read, want)
	return f.list
}

// splitReads parts the events that the snapshot read from those of the stream.
func splitReads(events []item) (streamed, read []item) {
	for _, it := range events {
		if it.pos.Snapshot {
			read = append(read, it)
		} else {
			streamed = append(streamed, it)
		}
	}
	return streamed, read
}

func checkByOffset(f *findings, events []item) {
	type stream struct {
		partitionID
		key  string
		read bool // the backlog has an order of its own
	}
	last := map[stream]int64{}
	for _, it := range events {
		seq, err := strconv.ParseInt(it.Headers["aggregate_seq"], 10, 64)
		if err != nil {
			continue // reported by aggregateSeq
		}
		s := stream{it.partitionID(), string(it.Key), it.pos.Snapshot}
		if was, ok := last[s]; ok && seq <= was {
			f.at(it.Record, "key %s: aggregate_seq %d comes behind %d, a stale event behind a newer one", it.Key, seq, was)
		}
		last[s] = seq
	}
}

func aggregateSeq(f *findings, it item) (int64, bool) {
	seq, err := strconv.ParseInt(it.Headers["aggregate_seq"], 10, 64)
	if err != nil {
		f.at(it.Record, "header aggregate_seq %q is no number", it.Headers["aggregate_seq"])
	}
	return seq, err == nil
}

func checkNumbers(f *findings, key string, seqs []int64, before, n int) {
	if len(seqs) != n {
		f.add("key "+key, "%d events, %d were committed", len(seqs), n)
	}
	for i, seq := range seqs {
		if seq != int64(before+i)+1 {
			f.add("key "+key, "by position, event number %d has aggregate_seq %d: %s", before+i+1, seq, around(seqs, i))
			return
		}
	}
}

func around(seqs []int64, i int) string {
	return fmt.Sprint("...", slices.Clone(seqs[max(0, i-3):min(len(seqs), i+4)]), "...")
}

// wanted is what the outbox tables must give.
type wanted struct {
	// early and streamed count, by key, the events from before the slot's beginning and
	// those from behind it.
	early, streamed map[string]int
	// must and may hold, by event id, the rows from before the slot's beginning that no
	// mark column calls published: those that stayed so, and those that were deleted or
	// marked since and so may have been read before.
	must, may map[string]Change
}

// wantedEvents works out what must be there. It takes the column published_at for the
// mark, as the connector does with snapshot: pending.
func wantedEvents(items []item, truth *Truth, l Layout) wanted {
	w := wanted{map[string]int{}, map[string]int{}, map[string]Change{}, map[string]Change{}}
	early := earlyTxns(items, truth)
	txns := slices.Clone(truth.Committed)
	slices.SortStableFunc(txns, func(a, b *Txn) int { return a.Commit.Compare(b.Commit) })
	for _, tx := range txns {
		for _, c := range tx.Changes {
			switch {
			case c.Table == nil || !c.Table.Outbox || !l.captured(c.Table.ID()):
			case early(tx):
				w.before(c)
			case c.Op == 'c':
				w.streamed[c.text(c.New, "aggregate_id")]++
			default:
				w.since(c)
			}
		}
	}
	return w
}

// before takes a change from before the slot's beginning.
func (w wanted) before(c Change) {
	if c.Op == 'c' {
		w.early[c.text(c.New, "aggregate_id")]++
	}
	switch {
	case c.Op == 't':
		clear(w.must)
	case c.Op == 'd':
		delete(w.must, c.text(c.Old, "event_id"))
	case c.text(c.New, "published_at") != "":
		delete(w.must, c.text(c.New, "event_id"))
	default:
		w.must[c.text(c.New, "event_id")] = c
	}
}

// since takes an update, delete or truncate from behind it.
func (w wanted) since(c Change) {
	if c.Op == 't' {
		maps.Copy(w.may, w.must)
		clear(w.must)
		return
	}
	id := c.text(c.New, "event_id")
	if c.Op == 'd' {
		id = c.text(c.Old, "event_id")
	}
	if row, ok := w.must[id]; ok && (c.Op == 'd' || c.text(c.New, "published_at") != "") {
		delete(w.must, id)
		w.may[id] = row
	}
}

// checkBacklog checks the events that the snapshot read: each row that was there before
// the slot, and was not marked, gave its event once, and nothing else did. In each
// partition they come in the order of their ids.
func checkBacklog(f *findings, read []item, want wanted) {
	last := map[partitionID]int64{}
	for _, it := range read {
		id := it.Headers["id"]
		c, ok := want.must[id]
		if !ok {
			c, ok = want.may[id]
		}
		if !ok {
			f.at(it.Record, "event %s was read, but it is not of the backlog", id)
			continue
		}
		delete(want.must, id)
		for _, problem := range event(c).problems(it) {
			f.at(it.Record, "event %s of the backlog: %s", id, problem)
		}
		row, _ := strconv.ParseInt(c.text(c.New, "id"), 10, 64)
		if row <= last[it.partitionID()] {
			f.at(it.Record, "the backlog's row %d comes behind row %d", row, last[it.partitionID()])
		}
		last[it.partitionID()] = row
	}
	for id, c := range want.must {
		f.add("event "+id, "of the backlog, row %s, is not there", c.text(c.New, "id"))
	}
}

package cdctest

import (
	"fmt"
	"slices"
	"strconv"
)

// OutboxOrder checks events as their consumers see them. Per key: in each
// partition, read by offset, aggregate_seq strictly ascends; over all topics, by
// position, it runs 1, 2, ... n without a gap or a repeat, n being the number of
// events that were committed. No event id is there twice. It asks of the workload
// that one aggregate's events are numbered in commit order, from 1.
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
	byPosition(events)
	got := map[string][]int64{}
	for _, it := range events {
		if seq, ok := aggregateSeq(f, it); ok {
			got[string(it.Key)] = append(got[string(it.Key)], seq)
		}
	}
	want := countEvents(truth, l)
	for key, seqs := range got {
		checkNumbers(f, key, seqs, want[key])
		delete(want, key)
	}
	for key, n := range want {
		f.add("key "+key, "none of its %d events is there", n)
	}
	return f.list
}

func checkByOffset(f *findings, events []item) {
	type stream struct {
		partitionID
		key string
	}
	last := map[stream]int64{}
	for _, it := range events {
		seq, err := strconv.ParseInt(it.Headers["aggregate_seq"], 10, 64)
		if err != nil {
			continue // reported by aggregateSeq
		}
		s := stream{it.partitionID(), string(it.Key)}
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

func checkNumbers(f *findings, key string, seqs []int64, n int) {
	if len(seqs) != n {
		f.add("key "+key, "%d events, %d were committed", len(seqs), n)
	}
	for i, seq := range seqs {
		if seq != int64(i)+1 {
			f.add("key "+key, "by position, event number %d has aggregate_seq %d: %s", i+1, seq, around(seqs, i))
			return
		}
	}
}

func around(seqs []int64, i int) string {
	return fmt.Sprint("...", slices.Clone(seqs[max(0, i-3):min(len(seqs), i+4)]), "...")
}

// countEvents gives the number of committed events of each aggregate.
func countEvents(truth *Truth, l Layout) map[string]int {
	n := map[string]int{}
	for _, tx := range truth.Committed {
		for _, c := range tx.Changes {
			if c.Table != nil && c.Table.Outbox && c.Op == 'c' && l.delivered(c) {
				n[c.text(c.New, "aggregate_id")]++
			}
		}
	}
	return n
}

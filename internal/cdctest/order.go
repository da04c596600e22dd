package cdctest

import (
	"fmt"
	"regexp"
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
)

// Order checks what holds of each partition, read by offset:
//
//  1. positions never go back, and from change to change they rise (but for a table
//     without a key, whose changes may be held while its rows are read);
//  2. the records of one change stand together in the documented order: an update
//     alone, a delete with its tombstone, a key change as delete, tombstone, create
//     (the create in another partition perhaps);
//  3. the header position says what the source block says; snapshot rows, and they
//     alone, have a time and no tx_id, lsn and seq;
//
// and of the log as a whole: one commit LSN belongs to one transaction with one
// time, and each half of a key change has the other.
//
// Under l.NoTombstones the tombstones must be missing.
func Order(log *Log, l Layout) []Violation {
	f := &findings{rule: "Order"}
	return f.order(log.items(f), l)
}

func (f *findings) order(items []item, l Layout) []Violation {
	checkSources(f, items)
	for _, part := range runs(items, item.partitionID) {
		checkPositions(f, part)
		checkReads(f, part)
		for _, change := range runs(part, func(it item) Position { return it.pos }) {
			checkShape(f, change, l)
		}
	}
	checkKeyChanges(f, items)
	return f.list
}

func checkPositions(f *findings, part []item) {
	keyless := slices.ContainsFunc(part, func(it item) bool { return it.Key == nil && it.kind != KindTruncate })
	for i := 1; i < len(part); i++ {
		prev, it := part[i-1], part[i]
		if it.Offset == prev.Offset {
			f.at(it.Record, "the offset is there twice")
		}
		if it.pos.Compare(prev.pos) < 0 && !keyless {
			f.at(it.Record, "position %s comes behind %s of offset %d: it goes back", it.pos, prev.pos, prev.Offset)
		}
	}
}

// checkReads looks at what the snapshot wrote.
func checkReads(f *findings, part []item) {
	for _, it := range part {
		if (it.kind == KindRead) != it.pos.Snapshot && it.kind != KindTruncate && it.kind != KindEvent {
			f.at(it.Record, "op %c at position %s: op r and a snapshot's position go together", it.kind, it.pos)
		}
		if it.kind == KindRead && (it.env.Before != nil || it.env.After == nil) {
			f.at(it.Record, "op r has the row as after, and before null")
		}
		if it.env == nil || !it.env.Source.Snapshot {
			continue
		}
		if s := it.env.Source; s.TxID != nil || s.LSN != nil || s.Seq != nil {
			f.at(it.Record, "a snapshot row has no tx_id, lsn and seq")
		}
		if it.env.TsMs == nil {
			f.at(it.Record, "a snapshot row has the time of its chunk as ts_ms")
		}
	}
}

// The records of one change in one partition, as the letters of their kinds.
var (
	shape            = regexp.MustCompile(`^(c|u|t|m|e|dx|dxc)$`)
	shapeNoTombstone = regexp.MustCompile(`^(c|u|t|m|e|d|dc)$`)
)

func checkShape(f *findings, change []item, l Layout) {
	first := change[0]
	if first.pos.Snapshot {
		return // every row of a chunk has the same position
	}
	kinds := ""
	for _, it := range change {
		kinds += string(byte(it.kind))
	}
	want := shape
	if l.NoTombstones {
		want = shapeNoTombstone
	}
	if first.Key == nil && kinds == "d" {
		return // a tombstone without a key would say nothing
	}
	if !want.MatchString(kinds) {
		f.at(first.Record, "position %s has the records %q here, want one of c u t m, e (event), dx (delete and tombstone), dxc (key change)", first.pos, kinds)
		return
	}
	for i, it := range change[1:] {
		prev := change[i]
		switch it.kind {
		case KindTombstone:
			if string(it.Key) != string(prev.Key) {
				f.at(it.Record, "tombstone of %s behind the delete of %s", shorten(it.Key), shorten(prev.Key))
			}
		case KindCreate:
			if it.Headers["previous-key"] != string(first.Key) {
				f.at(it.Record, "create with header previous-key %q behind the delete of %s at the same position", it.Headers["previous-key"], shorten(first.Key))
			}
		}
	}
}

// checkSources compares header and source block, and each commit LSN's transactions.
func checkSources(f *findings, items []item) {
	type commit struct {
		txID uint64
		tsMs int64
		at   string
	}
	seen := map[checkpoint.LSN]commit{}
	owner := map[uint64]checkpoint.LSN{}
	for _, it := range items {
		if it.env == nil {
			continue
		}
		s := it.env.Source
		if p := s.position(); p != it.pos {
			f.at(it.Record, "header position %s, but the source block says %s", it.pos, p)
		}
		if s.Seq == nil != s.Snapshot {
			f.at(it.Record, "source.seq %v with snapshot %v: only snapshot rows have none", s.Seq, s.Snapshot)
		}
		if s.TxID == nil || it.env.TsMs == nil {
			if !s.Snapshot && (it.kind != KindMessage || it.env.Message.Transactional) {
				f.at(it.Record, "no tx_id or no ts_ms, which only messages that are not transactional lack")
			}
			continue
		}
		now := commit{*s.TxID, *it.env.TsMs, it.Where()}
		if was, ok := seen[s.CommitLSN]; !ok {
			seen[s.CommitLSN] = now
		} else if was.txID != now.txID || was.tsMs != now.tsMs {
			f.at(it.Record, "commit %s is of tx_id %d, ts_ms %d here, but of %d, %d at %s", s.CommitLSN, now.txID, now.tsMs, was.txID, was.tsMs, was.at)
		}
		if was, ok := owner[now.txID]; !ok {
			owner[now.txID] = s.CommitLSN
		} else if was != s.CommitLSN {
			f.at(it.Record, "tx_id %d has commit_lsn %s here and %s elsewhere", now.txID, s.CommitLSN, was)
		}
	}
}

// checkKeyChanges looks for the delete that each create with previous-key needs;
// the two may be in two partitions.
func checkKeyChanges(f *findings, items []item) {
	deletes := map[string]bool{}
	id := func(it item, key string) string { return fmt.Sprintf("%s %s %s", it.Topic, it.pos, key) }
	for _, it := range items {
		if it.kind == KindDelete {
			deletes[id(it, string(it.Key))] = true
		}
	}
	for _, it := range items {
		prev, ok := it.Headers["previous-key"]
		if !ok {
			continue
		}
		if it.kind != KindCreate {
			f.at(it.Record, "header previous-key on op %c; only the create of a key change has it", it.kind)
		} else if !deletes[id(it, prev)] {
			f.at(it.Record, "key change from %s without the delete of that key at the same position", prev)
		}
	}
}

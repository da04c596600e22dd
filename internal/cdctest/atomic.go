package cdctest

import (
	"fmt"
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
)

// Atomic checks that small source transactions were delivered in one Kafka
// transaction each: all of their records carry one producer id and epoch, and in
// each partition no transaction's end lies between them. maxRecords is the number
// of records up to which a transaction counts as small; the connector must not have
// been configured to cut those.
//
// Changes of tables without a key go out late where they were held while the rows were
// read; late tells whose topics these are.
//
// Under transaction version 2 (Kafka 4) the epoch rises with every transaction, so
// that equal epochs prove one transaction. Under version 1 they prove one instance.
func Atomic(log *Log, maxRecords int, late ...string) []Violation {
	f := &findings{rule: "Atomic"}
	byCommit := map[checkpoint.LSN][]item{}
	for _, it := range log.items(f) {
		if !it.pos.Snapshot && !slices.Contains(late, it.Topic) {
			byCommit[it.pos.Commit] = append(byCommit[it.pos.Commit], it)
		}
	}
	for commit, items := range byCommit {
		if len(items) > maxRecords {
			continue
		}
		first := items[0]
		segment := map[partitionID]item{}
		for _, it := range items {
			if it.ProducerID != first.ProducerID || it.ProducerEpoch != first.ProducerEpoch {
				f.at(it.Record, "source transaction %s: written by producer %d epoch %d, its record %s by %d epoch %d: two Kafka transactions",
					commit, it.ProducerID, it.ProducerEpoch, first.Where(), first.ProducerID, first.ProducerEpoch)
				break
			}
			if was, ok := segment[it.partitionID()]; ok && was.Segment != it.Segment {
				f.at(it.Record, "source transaction %s: a Kafka transaction ended between this record and %s", commit, was.Where())
				break
			}
			segment[it.partitionID()] = it
		}
	}
	return f.list
}

// Visible checks snapshots of one log taken while it grew, the last one when it was
// whole: what a reader saw of a small source transaction is all of it or nothing.
//
// A snapshot is read partition by partition, and Kafka ends a transaction in one
// partition after the other, so that a reader may see half of a transaction that is
// just committing. Half of it in two snapshots, the second begun after the first
// was done, is more than that: nothing had been missing but the next commit.
// Records never disappear from one snapshot to the next.
func Visible(snapshots []*Log, maxRecords int) []Violation {
	f := &findings{rule: "Visible"}
	if len(snapshots) == 0 {
		return nil
	}
	whole := recordsByCommit(f, snapshots[len(snapshots)-1])
	before := map[checkpoint.LSN]int{}
	for i, s := range snapshots {
		now := recordsByCommit(f, s)
		for commit, n := range now {
			if n < whole[commit] && whole[commit] <= maxRecords && before[commit] == n {
				f.add(fmt.Sprintf("snapshots %d and %d", i-1, i), "source transaction %s: %d of %d records are visible in both", commit, n, whole[commit])
			}
		}
		for commit, n := range before {
			if now[commit] < n {
				f.add(fmt.Sprintf("snapshot %d", i), "source transaction %s: %d records, %d were visible before", commit, now[commit], n)
			}
		}
		before = now
	}
	return f.list
}

func recordsByCommit(f *findings, log *Log) map[checkpoint.LSN]int {
	n := map[checkpoint.LSN]int{}
	for i := range log.Records {
		pos, err := log.Records[i].Position()
		if err != nil {
			f.at(&log.Records[i], "cannot be read: %v", err)
			continue
		}
		if !pos.Snapshot {
			n[pos.Commit]++
		}
	}
	return n
}

package demo

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// at gives a record of topic t at a position.
func at(partition int32, position, key string) Event {
	return Event{Kind: KindTable, Topic: "t", Partition: partition, Op: "u", Key: key, Position: position}
}

const (
	pos1 = "0000000000000010-0000000000"
	pos2 = "0000000000000010-0000000001"
	pos3 = "0000000000000020-0000000000"
)

func TestCheckerJudgesSequences(t *testing.T) {
	tombstone := func(e Event) Event { e.Tombstone, e.Op = true, ""; return e }
	truncate := func(e Event) Event { e.Op = "t"; return e }
	tests := map[string]struct {
		events []Event
		want   Verdict
	}{
		"in order":                              {[]Event{at(0, pos1, "a"), at(0, pos2, "a"), at(0, pos3, "a")}, Verdict{Records: 3}},
		"a repeat at once":                      {[]Event{at(0, pos1, "a"), at(0, pos1, "a")}, Verdict{2, 1, 0}},
		"a repeat later":                        {[]Event{at(0, pos1, "a"), at(0, pos3, "a"), at(0, pos1, "a")}, Verdict{3, 1, 0}},
		"a repeat in another partition":         {[]Event{at(0, pos1, "a"), at(1, pos1, "a")}, Verdict{2, 1, 0}},
		"back in time":                          {[]Event{at(0, pos3, "a"), at(0, pos1, "a")}, Verdict{2, 0, 1}},
		"back in time within a transaction":     {[]Event{at(0, pos2, "a"), at(0, pos1, "a")}, Verdict{2, 0, 1}},
		"partitions are not ordered":            {[]Event{at(0, pos3, "a"), at(1, pos1, "b")}, Verdict{2, 0, 0}},
		"a delete and its tombstone":            {[]Event{at(0, pos1, "a"), tombstone(at(0, pos1, "a"))}, Verdict{2, 0, 0}},
		"a tombstone twice":                     {[]Event{tombstone(at(0, pos1, "a")), tombstone(at(0, pos1, "a"))}, Verdict{2, 1, 0}},
		"a key change, two keys at a position":  {[]Event{at(0, pos1, "a"), tombstone(at(0, pos1, "a")), at(0, pos1, "b")}, Verdict{3, 0, 0}},
		"a truncate in each partition":          {[]Event{truncate(at(0, pos1, "")), truncate(at(1, pos1, ""))}, Verdict{2, 0, 0}},
		"a truncate twice in a partition":       {[]Event{truncate(at(0, pos1, "")), truncate(at(0, pos1, ""))}, Verdict{2, 1, 0}},
		"snapshot rows of one position":         {[]Event{at(0, pos2, "a"), at(0, "0000000000000010-snapshot", "a"), at(0, "0000000000000010-snapshot", "b"), at(0, pos3, "a")}, Verdict{4, 0, 0}},
		"a snapshot row twice":                  {[]Event{at(0, "0000000000000010-snapshot", "a"), at(0, "0000000000000010-snapshot", "a")}, Verdict{2, 1, 0}},
		"a change before the snapshot's behind": {[]Event{at(0, "0000000000000010-snapshot", "a"), at(0, pos2, "a")}, Verdict{2, 0, 1}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := NewChecker()
			said := 0
			for i := range tt.events {
				if problem, _ := c.Observe(&tt.events[i]); problem != "" {
					said++
				}
			}
			if diff := cmp.Diff(tt.want, c.Verdict()); diff != "" {
				t.Errorf("verdict (-want +got):\n%s", diff)
			}
			if said != tt.want.Duplicates+tt.want.OutOfOrder {
				t.Errorf("%d problems said, %+v counted", said, tt.want)
			}
		})
	}
}

func TestCheckerForgetsWhatIsFarBackButStillSeesThatItIsWrong(t *testing.T) {
	c := NewChecker()
	first := at(0, fmt.Sprintf("%016X-0000000000", 1), "a")
	c.Observe(&first)
	for i := range checkerWindow {
		e := at(0, fmt.Sprintf("%016X-0000000000", i+2), "a")
		c.Observe(&e)
	}
	if len(c.seen) != checkerWindow {
		t.Errorf("remembers %d records, want %d", len(c.seen), checkerWindow)
	}
	if _, repeat := c.Observe(&first); repeat || c.Verdict().OutOfOrder != 1 {
		t.Errorf("verdict %+v, want one out of order", c.Verdict())
	}
}

func TestLedgerHoldsArrivalsAgainstCommits(t *testing.T) {
	row := func(xid uint64, id string) *Event {
		return &Event{Kind: KindTable, XID: xid, Op: "c", Table: "public.orders", Key: `{"id":` + id + `}`}
	}
	tests := map[string]struct {
		do   func(*Ledger)
		want LedgerCount
	}{
		"arrived after the commit": {func(l *Ledger) {
			e := l.Begin(7)
			e.Row("c", "public.orders", 1)
			e.Commit()
			l.Arrive(row(7, "1"))
		}, LedgerCount{Committed: 1}},
		"arrived before the commit returned": {func(l *Ledger) {
			e := l.Begin(7)
			e.Row("c", "public.orders", 1)
			l.Arrive(row(7, "1"))
			e.Commit()
		}, LedgerCount{Committed: 1}},
		"missing": {func(l *Ledger) {
			e := l.Begin(7)
			e.Row("c", "public.orders", 1)
			e.Event("x")
			e.Commit()
			l.Arrive(&Event{Kind: KindEvent, ID: "x"})
		}, LedgerCount{Committed: 2, Missing: 1}},
		"the same row of another transaction does not stand in for it": {func(l *Ledger) {
			e := l.Begin(7)
			e.Row("c", "public.orders", 1)
			e.Commit()
			l.Arrive(row(8, "1"))
		}, LedgerCount{Committed: 1, Missing: 1, ByHand: 1}},
		"rolled back": {func(l *Ledger) {
			e := l.Begin(7)
			e.Event("x")
			e.Rollback()
		}, LedgerCount{RolledBack: 1}},
		"rolled back and arrived": {func(l *Ledger) {
			e := l.Begin(7)
			e.Event("x")
			e.Rollback()
			l.Arrive(&Event{Kind: KindEvent, ID: "x"})
		}, LedgerCount{RolledBack: 1, Ghosts: 1}},
		"arrived before it was rolled back": {func(l *Ledger) {
			e := l.Begin(7)
			e.Event("x")
			l.Arrive(&Event{Kind: KindEvent, ID: "x"})
			e.Rollback()
		}, LedgerCount{RolledBack: 1, Ghosts: 1}},
		"a tombstone belongs to its delete": {func(l *Ledger) {
			l.Arrive(&Event{Kind: KindTable, Tombstone: true})
		}, LedgerCount{}},
		"an unknown outcome demands nothing": {func(l *Ledger) {
			e := l.Begin(7)
			e.Event("x")
			e.Unknown()
		}, LedgerCount{}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l := NewLedger()
			tt.do(l)
			if diff := cmp.Diff(tt.want, l.Count()); diff != "" {
				t.Errorf("count (-want +got):\n%s", diff)
			}
			if got := len(l.Missing(10)); got != tt.want.Missing {
				t.Errorf("names %d missing, want %d", got, tt.want.Missing)
			}
		})
	}
}

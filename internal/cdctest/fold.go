package cdctest

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"
)

// folded is a table folded out of its topic: by canonical key, the JSON of each
// column.
type folded map[string]map[string]json.RawMessage

// apply folds in the records of one position. A consumer has all of them when it
// goes on; that the delete and the create of a key change lie in two partitions
// must not matter, so the columns to be carried over are read first.
func (t folded) apply(f *findings, change []item) {
	carried := make([]map[string]json.RawMessage, len(change))
	for i, it := range change {
		if previous, ok := it.Headers["previous-key"]; ok {
			key, err := canonicalKey([]byte(previous))
			if err != nil {
				f.at(it.Record, "header previous-key cannot be read: %v", err)
			}
			carried[i] = maps.Clone(t[key])
		}
	}
	emptied := false
	for i, it := range change {
		if it.kind == KindTruncate {
			if !emptied { // one record per partition says so
				clear(t)
			}
			emptied = true
			continue
		}
		key, err := canonicalKey(it.Key)
		if err != nil {
			f.at(it.Record, "key %s cannot be read: %v", shorten(it.Key), err)
			continue
		}
		switch it.kind {
		case KindDelete, KindTombstone:
			delete(t, key)
		case KindCreate, KindUpdate, KindRead:
			row := carried[i]
			if row == nil {
				row = t[key]
			}
			if row == nil {
				row = map[string]json.RawMessage{}
			}
			for _, m := range it.env.After {
				row[m.Name] = m.Raw
			}
			t[key] = row
		}
	}
}

// tableChanges gives a topic's records by position, split where it changes. A
// record whose position cannot be read is a finding.
func tableChanges(f *findings, items []item, topic string) [][]item {
	var of []item
	for _, it := range items {
		if it.Topic == topic {
			of = append(of, it)
		}
	}
	byPosition(of)
	// A truncate of a chunk that is read anew comes first among its snapshot rows.
	slices.SortStableFunc(of, func(a, b item) int {
		if c := a.pos.Compare(b.pos); c != 0 || !a.pos.Snapshot {
			return c
		}
		return boolCompare(b.kind == KindTruncate, a.kind == KindTruncate)
	})
	return runs(of, func(it item) Position { return it.pos })
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	default:
		return -1
	}
}

// Fold folds each captured table's topic as a consumer does and compares with the
// table's rows, column by column.
func Fold(log *Log, truth *Truth, l Layout) []Violation {
	f := &findings{rule: "Fold"}
	return f.fold(log.items(f), truth, l)
}

func (f *findings) fold(items []item, truth *Truth, l Layout) []Violation {
	for _, t := range truth.Tables {
		if t.Outbox || !l.captured(t.ID()) {
			continue
		}
		got := folded{}
		for _, change := range tableChanges(f, items, l.tableTopic(t)) {
			got.apply(f, change)
		}
		compareTable(f, t, got, truth.Final[t.ID()])
	}
	return f.list
}

func compareTable(f *findings, t *Table, got folded, want []Row) {
	for _, row := range want {
		key := t.canonicalRowKey(row)
		where := t.ID() + " " + key
		have, ok := got[key]
		if !ok {
			f.add(where, "the table has this row, the fold of its topic has not")
			continue
		}
		for i, c := range t.Columns {
			v := PlainJSON(c.Type, row[i])
			if raw, ok := have[c.Name]; !ok {
				f.add(where, "column %s never came", c.Name)
			} else if !sameJSON(raw, v) {
				f.add(where, "column %s folds to %s, the table has %s", c.Name, shorten(raw), shorten(v))
			}
		}
		if len(have) > len(t.Columns) {
			f.add(where, "the fold has %d columns, the table %d", len(have), len(t.Columns))
		}
		delete(got, key)
	}
	for key := range got {
		f.add(t.ID()+" "+key, "the fold of the topic has this row, the table has not")
	}
}

// Sum checks money: at the end of every source transaction, in the order of
// positions, the sum of a column over all rows is what it was after the first one
// that touched the table. It is NoGap's business whether the rows are the right ones;
// this one needs no truth.
func Sum(log *Log, l Layout, t *Table, column string) []Violation {
	f := &findings{rule: "Sum"}
	rows := folded{}
	var want *big.Rat
	changes := tableChanges(f, log.items(f), l.tableTopic(t))
	for i, change := range changes {
		rows.apply(f, change)
		commit := change[0].pos.Commit
		if i+1 < len(changes) && changes[i+1][0].pos.Commit == commit {
			continue // in the middle of a transaction money may be on its way
		}
		sum := new(big.Rat)
		for key, row := range rows {
			n, ok := new(big.Rat).SetString(strings.Trim(string(row[column]), `"`))
			if !ok {
				f.add(t.ID()+" "+key, "column %s is %s, no number", column, row[column])
				return f.list
			}
			sum.Add(sum, n)
		}
		if want == nil {
			want = sum
		} else if sum.Cmp(want) != 0 {
			f.add(fmt.Sprintf("%s after commit %s", t.ID(), commit), "the sum of %s is %s, it was %s", column, sum.FloatString(2), want.FloatString(2))
			want = sum // say each leak once
		}
	}
	return f.list
}

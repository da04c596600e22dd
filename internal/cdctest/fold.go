package cdctest

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
)

// folded is a table folded out of its topic, by canonical key.
type folded map[string]foldedRow

// foldedRow is a row with the JSON of each column, and where its records lie.
type foldedRow struct {
	partition int32
	columns   map[string]json.RawMessage
}

// apply folds in the records of one position. A consumer has all of them when it
// goes on; that the delete and the create of a key change lie in two partitions
// must not matter, so the columns to be carried over are read first.
//
// A truncate empties its own partition: there is one in each, and the snapshot rows
// that share a position with it may lie before it or behind it in each.
func (t folded) apply(f *findings, change []item) {
	carried := make([]map[string]json.RawMessage, len(change))
	for i, it := range change {
		if previous, ok := it.Headers["previous-key"]; ok {
			key, err := canonicalKey([]byte(previous))
			if err != nil {
				f.at(it.Record, "header previous-key cannot be read: %v", err)
			}
			carried[i] = maps.Clone(t[key].columns)
		}
	}
	for i, it := range change {
		if it.kind == KindTruncate {
			maps.DeleteFunc(t, func(_ string, row foldedRow) bool { return row.partition == it.Partition })
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
			columns := carried[i]
			if columns == nil {
				columns = t[key].columns
			}
			if columns == nil {
				columns = map[string]json.RawMessage{}
			}
			for _, m := range it.env.After {
				columns[m.Name] = m.Raw
			}
			t[key] = foldedRow{it.Partition, columns}
		}
	}
}

// ofTopic gives the items of a topic, by partition and offset.
func ofTopic(items []item, topic string) []item {
	var of []item
	for _, it := range items {
		if it.Topic == topic {
			of = append(of, it)
		}
	}
	return of
}

// tableChanges gives a topic's records by position, split where it changes.
func tableChanges(items []item, topic string) [][]item {
	of := ofTopic(items, topic)
	byPosition(of)
	return runs(of, func(it item) Position { return it.pos })
}

// Fold folds each captured table's topic as a consumer does and compares with the
// table's rows, column by column. A table without a key is folded by offset, as a bag
// of rows.
func Fold(log *Log, truth *Truth, l Layout) []Violation {
	f := &findings{rule: "Fold"}
	return f.fold(log.items(f), truth, l)
}

func (f *findings) fold(items []item, truth *Truth, l Layout) []Violation {
	for _, t := range truth.Tables {
		if t.Outbox || !l.captured(t.ID()) {
			continue
		}
		if t.Keyless() {
			compareBags(f, t, foldBag(f, t, ofTopic(items, l.tableTopic(t))), bagOf(t, truth.Final[t.ID()]))
			continue
		}
		got := folded{}
		for _, change := range tableChanges(items, l.tableTopic(t)) {
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
			if raw, ok := have.columns[c.Name]; !ok {
				f.add(where, "column %s never came", c.Name)
			} else if !sameJSON(raw, v) {
				f.add(where, "column %s folds to %s, the table has %s", c.Name, shorten(raw), shorten(v))
			}
		}
		if len(have.columns) > len(t.Columns) {
			f.add(where, "the fold has %d columns, the table %d", len(have.columns), len(t.Columns))
		}
		delete(got, key)
	}
	for key := range got {
		f.add(t.ID()+" "+key, "the fold of the topic has this row, the table has not")
	}
}

// Sum checks money: at the end of every source transaction, in the order of positions,
// the sum of a column over all rows of the tables is the same. Only moments at which all
// rows are there count: before a snapshot is done some are missing. It is NoGap's business
// whether the rows are the right ones; this one needs no truth.
func Sum(log *Log, l Layout, column string, tables ...*Table) []Violation {
	f := &findings{rule: "Sum"}
	topics := map[string]bool{}
	for _, t := range tables {
		topics[l.tableTopic(t)] = true
	}
	var of []item
	for _, it := range log.items(f) {
		if topics[it.Topic] {
			of = append(of, it)
		}
	}
	byPosition(of)
	commits := runs(of, func(it item) checkpoint.LSN { return it.pos.Commit })
	rows := 0
	foldCommits(f, commits, func(_ checkpoint.LSN, state map[string]folded) { rows = countRows(state) })
	var want *big.Rat
	foldCommits(&findings{}, commits, func(at checkpoint.LSN, state map[string]folded) {
		if countRows(state) < rows {
			return
		}
		sum, err := sumOf(state, column)
		switch {
		case err != nil:
			f.add(fmt.Sprintf("after commit %s", at), "%v", err)
		case want == nil:
			want = sum
		case sum.Cmp(want) != 0:
			f.add(fmt.Sprintf("after commit %s", at), "the sum of %s is %s, it was %s", column, sum.FloatString(2), want.FloatString(2))
			want = sum // say each leak once
		}
	})
	return f.list
}

// foldCommits folds topics together, and shows them after each source transaction.
func foldCommits(f *findings, commits [][]item, after func(at checkpoint.LSN, state map[string]folded)) {
	state := map[string]folded{}
	for _, commit := range commits {
		for _, change := range runs(commit, func(it item) Position { return it.pos }) {
			for _, part := range runs(change, func(it item) string { return it.Topic }) {
				topic := part[0].Topic
				if state[topic] == nil {
					state[topic] = folded{}
				}
				state[topic].apply(f, part)
			}
		}
		after(commit[0].pos.Commit, state)
	}
}

func countRows(tables map[string]folded) int {
	n := 0
	for _, rows := range tables {
		n += len(rows)
	}
	return n
}

func sumOf(tables map[string]folded, column string) (*big.Rat, error) {
	sum := new(big.Rat)
	for topic, rows := range tables {
		for key, row := range rows {
			n, ok := new(big.Rat).SetString(strings.Trim(string(row.columns[column]), `"`))
			if !ok {
				return nil, fmt.Errorf("%s %s: column %s is %s, no number", topic, key, column, row.columns[column])
			}
			sum.Add(sum, n)
		}
	}
	return sum, nil
}

package cdctest

import (
	"cmp"
	"encoding/json"
	"math/big"
	"slices"
	"strings"
)

// tableState is a table with a key at one moment, by canonical key.
type tableState map[string]Row

// apply takes a change of the table.
func (s tableState) apply(c Change) {
	switch {
	case c.Op == 't':
		clear(s)
	case c.Op == 'd':
		delete(s, c.Table.canonicalRowKey(c.Old))
	default:
		if c.Old != nil && !c.Table.sameKey(c.Old, c.New) {
			delete(s, c.Table.canonicalRowKey(c.Old))
		}
		s[c.Table.canonicalRowKey(c.New)] = c.New
	}
}

// history is the database's tables with keys, moved forward commit by commit.
type history struct {
	txns   []*Txn // by commit LSN
	tables map[string]tableState
}

func newHistory(truth *Truth) *history {
	h := &history{txns: slices.Clone(truth.Committed), tables: map[string]tableState{}}
	slices.SortStableFunc(h.txns, func(a, b *Txn) int { return a.Commit.Compare(b.Commit) })
	for _, t := range truth.Tables {
		if !t.Keyless() {
			h.tables[t.ID()] = tableState{}
		}
	}
	return h
}

// forward applies the transactions for which ok holds, up to the first for which it
// does not.
func (h *history) forward(ok func(*Txn) bool) {
	for len(h.txns) > 0 && ok(h.txns[0]) {
		for _, c := range h.txns[0].Changes {
			if c.Table != nil && h.tables[c.Table.ID()] != nil {
				h.tables[c.Table.ID()].apply(c)
			}
		}
		h.txns = h.txns[1:]
	}
}

// Reads holds each snapshot row against the history of its table: at the point of the
// stream where it stands, it is the row that the table had there, column by column. So
// none stands behind a newer change, none is of a row that is deleted by then, and none
// shows what the stream has yet to bring. It needs a truth with commit LSNs.
//
// What was there before the stream began is there, in one way or another: each key of
// that moment has a record.
func Reads(log *Log, truth *Truth, l Layout) []Violation {
	f := &findings{rule: "Reads"}
	return f.reads(log.items(f), truth, l)
}

func (f *findings) reads(items []item, truth *Truth, l Layout) []Violation {
	tables := map[string]*Table{}
	for _, t := range truth.Tables {
		if !t.Outbox && !t.Keyless() && l.captured(t.ID()) {
			tables[l.tableTopic(t)] = t
		}
	}
	var rows []item
	for _, it := range items {
		if it.kind != KindRead {
			continue
		}
		if tables[it.Topic] != nil {
			rows = append(rows, it)
		} else if !slices.ContainsFunc(truth.Tables, func(t *Table) bool { return l.tableTopic(t) == it.Topic && t.Keyless() }) {
			f.at(it.Record, "a snapshot row in a topic of no table")
		}
	}
	if len(rows) == 0 {
		return f.list
	}
	if slices.ContainsFunc(truth.Committed, func(tx *Txn) bool { return tx.Commit == 0 && len(tx.Changes) > 0 }) {
		f.add("truth", "snapshot rows cannot be judged: the commit LSNs of transactions are not known")
		return f.list
	}
	byPosition(rows)
	h := newHistory(truth)
	for _, it := range rows {
		h.forward(func(tx *Txn) bool { return tx.Commit <= it.pos.Commit })
		t := tables[it.Topic]
		key, err := canonicalKey(it.Key)
		if err != nil {
			f.at(it.Record, "key %s cannot be read: %v", shorten(it.Key), err)
			continue
		}
		row, ok := h.tables[t.ID()][key]
		if !ok {
			f.at(it.Record, "r of a row that %s does not have after commit %s: %s", t.ID(), it.pos.Commit, key)
			continue
		}
		want := expected{kind: KindRead, table: t, key: key, after: row}
		for _, problem := range want.problems(it) {
			f.at(it.Record, "r of %s, as the table is after commit %s: %s", key, it.pos.Commit, problem)
		}
	}
	f.everyEarlyRow(items, truth, tables)
	return f.list
}

// everyEarlyRow looks for the keys that the tables had where the stream begins.
func (f *findings) everyEarlyRow(items []item, truth *Truth, tables map[string]*Table) {
	seen := map[string]map[string]bool{}
	for topic := range tables {
		seen[topic] = map[string]bool{}
	}
	truncated := map[string]bool{}
	for _, it := range items {
		switch {
		case tables[it.Topic] == nil:
		case it.kind == KindTruncate:
			truncated[it.Topic] = truncated[it.Topic] || !it.pos.Snapshot
		default:
			if key, err := canonicalKey(it.Key); err == nil {
				seen[it.Topic][key] = true
			}
		}
	}
	h := newHistory(truth)
	early := earlyTxns(items, truth)
	h.forward(func(tx *Txn) bool { return early(tx) || tx.Commit == 0 })
	for topic, t := range tables {
		if truncated[topic] {
			continue // the rows may have gone before they were read
		}
		for key := range h.tables[t.ID()] {
			if !seen[topic][key] {
				f.add(t.ID()+" "+key, "the row was there before the stream began, and no record tells of it")
			}
		}
	}
}

// Once checks how often rows are read: once for the table's first snapshot and once for
// each that was asked for (Truth.Passes); and once more for each change of the key that
// went out without a column, which is read again.
func Once(log *Log, truth *Truth, l Layout) []Violation {
	f := &findings{rule: "Once"}
	return f.once(log.items(f), truth, l)
}

func (f *findings) once(items []item, truth *Truth, l Layout) []Violation {
	for _, t := range truth.Tables {
		if t.Outbox || t.Keyless() {
			continue
		}
		left := map[string]int{}
		of := ofTopic(items, l.tableTopic(t))
		for _, it := range of {
			if (it.kind == KindCreate || it.kind == KindUpdate) && len(it.env.After) < len(t.Columns) {
				left[string(it.Key)]++
			}
		}
		for _, it := range of {
			if it.kind != KindRead {
				continue
			}
			key := string(it.Key)
			if left[key]--; left[key] < -1-truth.Passes[t.ID()] {
				f.at(it.Record, "row %s is read again, %d times too often", key, -left[key]-1-truth.Passes[t.ID()])
			}
		}
	}
	return f.list
}

// NeverBack checks, without any truth, that the records of each key of a topic go
// forward, read by offset: version, a column that only rises, never falls, and behind a
// delete, or a truncate that the application made, the key comes back by a create alone.
// version may be empty.
func NeverBack(log *Log, topic, version string) []Violation {
	f := &findings{rule: "NeverBack"}
	type state struct {
		gone    *Record // by this
		version *big.Rat
		at      *Record
	}
	keys := map[string]*state{}
	for _, part := range runs(ofTopic(log.items(f), topic), item.partitionID) {
		slices.SortStableFunc(part, func(a, b item) int { return cmp.Compare(a.Offset, b.Offset) })
		var emptied *Record
		for _, it := range part {
			if it.kind == KindTruncate {
				clear(keys)
				if emptied = it.Record; it.pos.Snapshot {
					emptied = nil
				}
				continue
			}
			key := string(it.Key)
			s := keys[key]
			if s == nil {
				s = &state{gone: emptied}
				keys[key] = s
			}
			if s.gone != nil && (it.kind == KindRead || it.kind == KindUpdate) {
				f.at(it.Record, "%c of %s behind the end of the row at %s", it.kind, key, s.gone.Where())
			}
			switch it.kind {
			case KindDelete, KindTombstone:
				*s = state{gone: it.Record}
				continue
			default:
				s.gone = nil
			}
			if n, ok := versionOf(it, version); ok {
				if s.version != nil && n.Cmp(s.version) < 0 {
					f.at(it.Record, "%c of %s has %s %s, behind %s at %s: it goes back", it.kind, key, version, n.RatString(), s.version.RatString(), s.at.Where())
				}
				s.version, s.at = n, it.Record
			}
		}
		clear(keys)
	}
	return f.list
}

func versionOf(it item, column string) (*big.Rat, bool) {
	var raw json.RawMessage
	if it.env != nil {
		raw, _ = it.env.After.Get(column)
	}
	return new(big.Rat).SetString(strings.Trim(string(raw), `"`))
}

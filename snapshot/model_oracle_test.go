package snapshot_test

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/replication"
)

// absent stands for a column that a record lacks.
const absent = "~"

// record is what the router would make of a change or of a row.
type record struct {
	table    *modelTable
	op       replication.Op
	snapshot bool     // a row or truncate of the snapshot's
	stamp    int      // of the write that the stream sends
	key      string   // of the row that is there afterwards; of a delete the one that is gone
	old      string   // the key before, where it is another
	values   []string // by column
	before   []string // of keyless tables and under identity FULL: the old row
}

func (r record) String() string {
	s := fmt.Sprintf("%s %s", r.op, r.table.name)
	if r.old != "" {
		s += " " + r.old + " ->"
	}
	if r.op != replication.OpTruncate {
		s += " " + r.key
	}
	if r.values != nil {
		if n := slices.Index(r.table.columns, "n"); n >= 0 {
			s += " n=" + r.values[n]
		}
		s += " big=" + r.values[slices.Index(r.table.columns, "big")]
	}
	if r.snapshot && r.op == replication.OpTruncate {
		s += " (snapshot)"
	}
	return s
}

// oracle judges the records one after the other and folds them as a consumer would.
type oracle struct {
	world *world
	topic map[*modelTable]*topic
}

// topic is what a consumer has of a table.
type topic struct {
	rows    map[string][]string // by key
	bag     map[string]int      // of a keyless table: how many of each row
	last    map[string]int      // the last write of each key that a record told of
	floor   int                 // that of every key: a truncate's
	events  map[string]string   // of an outbox: the op by which each row went out
	streams []int               // the writes that came by the stream, in order
	reads   int
	// readsOf counts the reads of each key, lacking the records of the stream that went out
	// without a column.
	readsOf, lacking map[string]int
	// torn tells that a restart found a keyless table's rows out in part: until the
	// truncate, changes of rows that are not there may pass.
	torn bool
}

func newOracle(w *world) *oracle { return &oracle{world: w, topic: map[*modelTable]*topic{}} }

func (o *oracle) of(t *modelTable) *topic {
	if o.topic[t] == nil {
		o.topic[t] = &topic{rows: map[string][]string{}, bag: map[string]int{}, last: map[string]int{}, events: map[string]string{},
			readsOf: map[string]int{}, lacking: map[string]int{}}
	}
	return o.topic[t]
}

// add takes the next record; the error is what is wrong with it.
func (o *oracle) add(r record) error {
	p := o.of(r.table)
	if r.op == replication.OpRead {
		p.reads++
		p.readsOf[r.key]++
	} else if !r.snapshot {
		p.streams = append(p.streams, r.stamp)
		if r.before == nil && slices.Contains(r.values, absent) {
			p.lacking[r.key]++
		}
	}
	switch {
	case r.table.outbox:
		return p.event(r)
	case r.table.whole:
		return p.addKeyless(r)
	}
	if err := o.check(p, r); err != nil {
		return err
	}
	base := p.rows[r.key]
	if r.old != "" {
		base = p.rows[r.old]
		delete(p.rows, r.old)
	}
	switch r.op {
	case replication.OpTruncate:
		p.rows = map[string][]string{}
	case replication.OpDelete:
		delete(p.rows, r.key)
	default:
		if r.op != replication.OpUpdate {
			base = nil
		}
		if r.before != nil {
			base = r.before
		}
		p.rows[r.key] = fill(r.values, base)
	}
	return nil
}

// fill gives values with what they lack from base, where that has it.
func fill(values, base []string) []string {
	values = slices.Clone(values)
	for i, v := range values {
		if v == absent && base != nil {
			values[i] = base[i]
		}
	}
	return values
}

// check tells whether a keyed table's record says what was written, and does not go back
// behind what was said of its key before.
func (o *oracle) check(p *topic, r record) error {
	if r.op == replication.OpTruncate {
		if !r.snapshot {
			p.floor = r.stamp
		}
		return nil
	}
	stamp := r.stamp
	if r.op == replication.OpRead {
		stamp, _ = strconv.Atoi(r.values[slices.Index(r.table.columns, "n")])
	}
	for _, key := range []string{r.key, r.old} {
		if key == "" {
			continue
		}
		last := max(p.last[key], p.floor)
		if stamp < last || stamp == last && r.op != replication.OpRead {
			return fmt.Errorf("key %s goes back: write %d after %d", key, stamp, last)
		}
		p.last[key] = stamp
	}
	if r.op == replication.OpDelete {
		return nil
	}
	v := o.world.written[stamp]
	if v == nil || v.table != r.table || v.key != r.key {
		return fmt.Errorf("write %d did not write key %s of %s", stamp, r.key, r.table.name)
	}
	for i, name := range r.table.columns {
		if got := r.values[i]; got != v.column(name) && (got != absent || r.op == replication.OpRead || name != "big") {
			return fmt.Errorf("column %s is %q, written was %q", name, got, v.column(name))
		}
	}
	return nil
}

// event takes an outbox's record.
func (p *topic) event(r record) error {
	if r.op == replication.OpTruncate {
		return fmt.Errorf("an outbox has no truncate")
	}
	if was, ok := p.events[r.key]; ok {
		return fmt.Errorf("the event %s goes out as %s, and went out as %s before", r.key, r.op, was)
	}
	p.events[r.key] = r.op.String()
	return nil
}

// addKeyless takes a keyless table's record.
func (p *topic) addKeyless(r record) error {
	if r.op == replication.OpTruncate {
		clear(p.bag)
		p.torn = p.torn && !r.snapshot
		return nil
	}
	if r.before != nil {
		old := strings.Join(r.before, " ")
		if p.bag[old] == 0 && p.torn {
			return nil
		}
		if p.bag[old] == 0 {
			return fmt.Errorf("%s of the row (%s), which is not there", r.op, old)
		}
		if p.bag[old]--; p.bag[old] == 0 {
			delete(p.bag, old)
		}
	}
	if r.values != nil {
		p.bag[strings.Join(fill(r.values, r.before), " ")]++
	}
	return nil
}

// final compares what a consumer has with the tables, when everything is out. since is
// the number of the transaction in the WAL with which the stream began; asked tells how
// often each table was to be read again, and is nil where whole tables may be besides.
func (o *oracle) final(since int, asked map[*modelTable]int) error {
	for _, t := range o.world.tables {
		if !t.published {
			continue
		}
		if err := o.finalTable(t, since); err != nil {
			return fmt.Errorf("table %s: %w", t.name, err)
		}
		if asked == nil || t.outbox || t.whole {
			continue
		}
		p := o.of(t)
		for key, n := range p.readsOf {
			if may := 1 + asked[t] + p.lacking[key]; n > may {
				return fmt.Errorf("table %s: key %s is read %d times, and %d at most are needed", t.name, key, n, may)
			}
		}
	}
	return nil
}

func (o *oracle) finalTable(t *modelTable, since int) error {
	p := o.of(t)
	if t.outbox {
		return o.finalOutbox(t, p, since)
	}
	bag, rows := map[string]int{}, map[string]bool{}
	for _, v := range o.world.visible(t) {
		var values []string
		for _, name := range t.columns {
			values = append(values, v.column(name))
		}
		bag[strings.Join(values, " ")]++
		rows[v.key] = true
		if got := p.rows[v.key]; !t.whole && !slices.Equal(got, values) {
			return fmt.Errorf("key %s folds to %v, the table has %v", v.key, got, values)
		}
	}
	if t.whole {
		if p.torn {
			return fmt.Errorf("a restart found its rows out in part, and no truncate came")
		}
		if !maps.Equal(bag, p.bag) {
			return fmt.Errorf("the rows fold to %v, the table has %v", p.bag, bag)
		}
		return nil
	}
	for key := range p.rows {
		if !rows[key] {
			return fmt.Errorf("key %s folds to %v, and is not in the table", key, p.rows[key])
		}
	}
	if want := o.streamed(t, since); !slices.Equal(p.streams, want) {
		return fmt.Errorf("the stream's writes went out as %v, want %v", p.streams, want)
	}
	return nil
}

// streamed gives the published writes to a table in the order of the stream.
func (o *oracle) streamed(t *modelTable, since int) []int {
	var want []int
	for _, x := range o.world.wal[since:] {
		for _, c := range x.changes {
			if c.table == t {
				want = append(want, c.stamp)
			}
		}
	}
	return want
}

func (o *oracle) finalOutbox(t *modelTable, p *topic, since int) error {
	for _, stamp := range o.streamed(t, since) {
		if key := o.world.written[stamp].key; p.events[key] != "c" {
			return fmt.Errorf("the streamed event %s went out as %q", key, p.events[key])
		}
	}
	for _, v := range o.world.visible(t) {
		if p.events[v.key] == "" {
			return fmt.Errorf("the event %s did not go out", v.key)
		}
	}
	return nil
}

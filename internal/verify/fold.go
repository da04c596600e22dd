package verify

import (
	"bytes"
	"encoding/json"
)

// column is a column of a row of the table, and what the topic has of it.
type column struct {
	name, table []byte
	topic       []byte // nil while no record was found that holds it
}

// judgeKey compares the row of a key with what its records fold to.
func judgeKey(c *comparison, w *worker, key []byte, changes []change, rows []row) {
	uncertain := unsettled(changes)
	if !c.final && (uncertain || c.asksAnew(changes)) {
		c.leave(w, key) // until it stands still
		return
	}
	c.reportDoubled(w, changes)
	changes = c.standing(changes)
	// Where it is not certain which of the last records the snapshot sees, the row has to be
	// what the key was at one moment among them.
	for n := len(changes); n > 0 && changes[n-1].flags&flagUnsettled != 0; n-- {
		if c.equal(w, changes[:n-1], rows) {
			w.report.Compared += int64(len(rows))
			w.report.Equal += int64(len(rows))
			w.report.doubtful++
			return
		}
	}
	alive := isAlive(changes)
	switch {
	case !alive && len(rows) == 0:
		return
	case !alive:
		w.report.Compared++
		w.report.add(Difference{Kind: kindMissing, Key: key, Table: rows[0].value}, uncertain)
		return
	case len(rows) == 0:
		last := &changes[len(changes)-1]
		w.report.Compared++
		w.report.add(Difference{Kind: kindExtra, Key: key, Topic: last.row, Where: c.where(last.order)}, uncertain)
		return
	}
	w.report.Compared++
	for _, r := range rows { // more than one where source.keys names a key that is none
		if bytes.Equal(changes[len(changes)-1].row, r.value) {
			w.report.Equal++
			return
		}
	}
	r := rows[0]
	if !w.expand(r.value) {
		w.report.add(Difference{Kind: kindDiffering, Key: key, Table: r.value, Topic: changes[len(changes)-1].row}, uncertain)
		return
	}
	moved := c.fill(w, changes)
	c.settle(w, r, moved, uncertain)
}

// asksAnew tells whether a row has moved from a key that the look before did not know of, so
// that this one has no records of it.
func (c *comparison) asksAnew(changes []change) bool {
	for i := range changes {
		if x := &changes[i]; x.flags&flagMoved != 0 && !c.only.has(c.hash(x.previous)) {
			return true
		}
	}
	return false
}

func isAlive(changes []change) bool {
	return len(changes) > 0 && changes[len(changes)-1].kind == kindSet
}

// equal tells whether records fold to the row, or to none where there is none.
func (c *comparison) equal(w *worker, changes []change, rows []row) bool {
	if alive := isAlive(changes); !alive || len(rows) == 0 {
		return !alive && len(rows) == 0
	}
	if !w.expand(rows[0].value) || c.fill(w, changes) != nil {
		return false
	}
	for i := range w.columns {
		if !bytes.Equal(w.columns[i].table, w.columns[i].topic) {
			return false
		}
	}
	return true
}

// expand lists the columns of a row.
func (w *worker) expand(value []byte) bool {
	w.columns = w.columns[:0]
	m := object(value)
	for name, v, ok := m.next(); ok; name, v, ok = m.next() {
		w.columns = append(w.columns, column{name: name, table: v})
	}
	return !m.bad
}

// fill goes back through a key's records until each column is found: a record sets those
// that it holds, and what is absent keeps its value. It ends at a delete, and at a change
// of the key, which it gives: what was not found until then the row has from its previous
// key.
func (c *comparison) fill(w *worker, changes []change) (moved *change) {
	open := 0
	for i := range w.columns {
		if w.columns[i].topic == nil {
			open++
		}
	}
	for i := len(changes) - 1; i >= 0 && open > 0; i-- {
		x := &changes[i]
		if x.kind != kindSet {
			return nil
		}
		next := 0 // columns stand in the same order on both sides, mostly
		m := object(x.row)
		for name, v, ok := m.next(); ok; name, v, ok = m.next() {
			at := w.find(name, next)
			if at < 0 {
				continue // a column that was dropped
			}
			next = at + 1
			k := &w.columns[at]
			if k.topic != nil || c.isMark(k, v) {
				continue
			}
			k.topic = v
			open--
		}
		if x.flags&flagMoved != 0 {
			if open == 0 {
				return nil
			}
			return x
		}
	}
	return nil
}

// find gives the column of a name, looking at the one that is expected first.
func (w *worker) find(name []byte, next int) int {
	if next < len(w.columns) && bytes.Equal(w.columns[next].name, name) {
		return next
	}
	for i := range w.columns {
		if bytes.Equal(w.columns[i].name, name) {
			return i
		}
	}
	return -1
}

// isMark tells whether a value stands for one that is not in the WAL. Where the table has
// the same text in that column it is a value.
func (c *comparison) isMark(k *column, v []byte) bool {
	mark, ok := c.marks[string(k.name)]
	return ok && bytes.Equal(mark, v) && !bytes.Equal(k.table, v)
}

// settle compares the columns that were found, once all that can be were. A column that no
// record holds is younger than the row's last record: it counts as equal where the table
// has in it what PostgreSQL gives to such rows. moved is the change of the key from before
// which the row has what was not found.
func (c *comparison) settle(w *worker, r row, moved *change, uncertain bool) {
	switch {
	case moved == nil || c.sampled:
	case c.only.has(c.hash(moved.previous)):
		ask := carry{previous: moved.previous, before: moved.order, found: w.found(), row: r}
		if uncertain {
			ask.flags = flagUnsettled
		}
		w.carries = append(w.carries, ask.append(nil))
		w.report.Compared-- // it is when the answer is there
		return
	case !c.final:
		c.leave(w, r.key)
		w.report.Compared--
		return
	}
	d := Difference{Kind: kindDiffering, Key: r.key}
	var table, topic []byte
	defaulted := false
	for i := range w.columns {
		k := &w.columns[i]
		if bytes.Equal(k.table, k.topic) {
			continue
		}
		if k.topic == nil {
			if moved != nil {
				w.report.partial = true // its previous key was not looked at
				continue
			}
			if isNull(k.table) || bytes.Equal(k.table, c.defaults[string(k.name)]) {
				defaulted = true
				continue
			}
		}
		d.Columns = append(d.Columns, unquote(k.name))
		table = appendMember(table, k.name, k.table)
		if k.topic != nil {
			topic = appendMember(topic, k.name, k.topic)
		}
	}
	if defaulted {
		w.report.defaulted++
	}
	if len(d.Columns) == 0 {
		w.report.Equal++
		return
	}
	d.Table, d.Topic = closeObject(table), closeObject(topic)
	w.report.add(d, uncertain)
}

// carried answers what a row asked of its previous key: the records of w are those keys'.
func (c *comparison) carried(w *worker, ask carry) {
	var changes []change
	for _, x := range c.standing(w.changes) {
		if bytes.Equal(x.key, ask.previous) && x.order.comparePosition(ask.before) < 0 {
			changes = append(changes, x)
		}
	}
	w.expand(ask.row.value)
	next := 0
	m := object(ask.found)
	for name, v, ok := m.next(); ok; name, v, ok = m.next() {
		if at := w.find(name, next); at >= 0 {
			w.columns[at].topic = v
			next = at + 1
		}
	}
	moved := c.fill(w, changes)
	uncertain := ask.flags&flagUnsettled != 0 || unsettled(changes)
	if uncertain && !c.final {
		c.leave(w, ask.row.key)
		return
	}
	w.report.Compared++
	c.settle(w, ask.row, moved, uncertain)
}

// unquote gives the text of a JSON string.
func unquote(name []byte) string {
	var text string
	if json.Unmarshal(name, &text) != nil {
		return string(name) // as it stands
	}
	return text
}

// found gives the columns that were found as an object.
func (w *worker) found() []byte {
	var b []byte
	for i := range w.columns {
		if w.columns[i].topic != nil {
			b = appendMember(b, w.columns[i].name, w.columns[i].topic)
		}
	}
	return closeObject(b)
}

func appendMember(dst, name, value []byte) []byte {
	if len(dst) == 0 {
		dst = append(dst, '{')
	} else {
		dst = append(dst, ',')
	}
	dst = append(append(dst, name...), ':')
	return append(dst, value...)
}

func closeObject(b []byte) []byte {
	if len(b) == 0 {
		return []byte("{}")
	}
	return append(b, '}')
}

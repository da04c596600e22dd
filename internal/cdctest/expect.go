package cdctest

import (
	"bytes"
	"fmt"
)

// expected is one record that a change must give.
type expected struct {
	kind  Kind
	table *Table
	key   string // of a change in canonical form, of an event as it stands
	// before holds the columns that PostgreSQL may have sent of the old row,
	// mustBefore tells that they must be there. after is the new row; old tells which
	// of its big columns may be absent.
	before     Row
	mustBefore bool
	keyOnly    bool // before holds the key columns alone
	after, old Row
	previous   string // canonical previous-key
	message    *MessageBody
	headers    map[string]string // an event's
	value      []byte            // an event's
}

// expect gives the records of a change in the order of their delivery. A truncate
// is one per partition.
func (g *gap) expect(c Change) []expected {
	t := c.Table
	switch {
	case t == nil:
		m := c.Message
		return []expected{{kind: KindMessage, key: messageKey(m), message: &MessageBody{m.Prefix, true, []byte(m.Content)}}}
	case t.Outbox:
		return []expected{event(c)}
	}
	switch c.Op {
	case 't':
		return slicesRepeat(expected{kind: KindTruncate, table: t}, int(g.layout.Partitions))
	case 'c':
		return []expected{{kind: KindCreate, table: t, key: t.canonicalRowKey(c.New), after: c.New}}
	case 'd':
		return g.deleted(c)
	}
	if c.Old == nil || t.sameKey(c.Old, c.New) {
		return []expected{{kind: KindUpdate, table: t, key: t.canonicalRowKey(c.New), after: c.New, old: c.Old,
			before: c.Old, mustBefore: t.Full && c.Old != nil, keyOnly: !t.Full}}
	}
	return append(g.deleted(c), expected{kind: KindCreate, table: t, key: t.canonicalRowKey(c.New),
		after: c.New, old: c.Old, before: c.Old, keyOnly: !t.Full, previous: t.canonicalRowKey(c.Old)})
}

func (g *gap) deleted(c Change) []expected {
	key := c.Table.canonicalRowKey(c.Old)
	list := []expected{{kind: KindDelete, table: c.Table, key: key, before: c.Old, mustBefore: true, keyOnly: !c.Table.Full}}
	if !g.layout.NoTombstones && !c.Table.Keyless() {
		list = append(list, expected{kind: KindTombstone, table: c.Table, key: key})
	}
	return list
}

func slicesRepeat(e expected, n int) []expected {
	list := make([]expected, n)
	for i := range list {
		list[i] = e
	}
	return list
}

func messageKey(m Message) string {
	return fmt.Sprintf("%q=%s ", "prefix", quote(m.Prefix))
}

// event is the record of an outbox row in the format payload.
func event(c Change) expected {
	e := expected{kind: KindEvent, table: c.Table, key: c.text(c.New, "aggregate_id"), headers: map[string]string{
		"id":   c.text(c.New, "event_id"),
		"type": c.text(c.New, "event_type"),
	}}
	for header, column := range map[string]string{"aggregate_id": "aggregate_id", "aggregate_seq": "aggregate_seq"} {
		if v := c.text(c.New, column); v != "" {
			e.headers[header] = v
		}
	}
	if at := c.text(c.New, "created_at"); at != "" {
		e.headers["occurred_at"] = isoTime(at, true)
	}
	if p := c.Table.value(c.New, "payload"); p != nil {
		e.value = []byte(*p)
	}
	return e
}

// problems tells how the record differs from what was expected.
func (e expected) problems(it item) []string {
	var p []string
	say := func(format string, args ...any) { p = append(p, fmt.Sprintf(format, args...)) }
	switch e.kind {
	case KindEvent:
		return e.eventProblems(it)
	case KindTruncate:
		if it.env.Before != nil || it.env.After != nil {
			say("a truncate with a row")
		}
	case KindMessage:
		if m := it.env.Message; m.Prefix != e.message.Prefix || m.Transactional != e.message.Transactional || !bytes.Equal(m.Content, e.message.Content) {
			say("the message is %q %v %s, want %q %v %s", m.Prefix, m.Transactional, shorten(m.Content), e.message.Prefix, e.message.Transactional, shorten(e.message.Content))
		}
	}
	switch {
	case e.kind == KindTruncate:
	case e.table != nil && e.table.Keyless():
		if it.Key != nil {
			say("its key is %s, want null", shorten(it.Key))
		}
	default:
		if key, err := canonicalKey(it.Key); err != nil || key != e.key {
			say("its key is %s, want %s", shorten(it.Key), e.key)
		}
	}
	if it.env == nil {
		return p
	}
	if e.table != nil && (it.env.Source.Schema != e.table.Schema || it.env.Source.Table != e.table.Name) {
		say("the source block says table %s.%s", it.env.Source.Schema, it.env.Source.Table)
	}
	if previous := it.Headers["previous-key"]; e.previous != "" || previous != "" {
		if key, err := canonicalKey([]byte(previous)); err != nil || key != e.previous {
			say("header previous-key is %q, want %s", previous, e.previous)
		}
	}
	return append(p, e.rowProblems(it.env)...)
}

func (e expected) rowProblems(env *Envelope) []string {
	var p []string
	say := func(format string, args ...any) { p = append(p, fmt.Sprintf(format, args...)) }
	switch {
	case e.after == nil && env.After != nil:
		say("after is not null")
	case e.after != nil && env.After == nil:
		say("after is null")
	case e.after != nil:
		p = append(p, e.compare("after", env.After, e.after, func(i int) bool {
			c := e.table.Columns[i]
			// An update may lack a big column that it did not change, and a create only
			// as part of a key change.
			return c.Big && (e.kind == KindUpdate || e.previous != "") && (e.old == nil || equalText(e.old[i], e.after[i]))
		})...)
	}
	switch {
	case env.Before == nil && e.mustBefore:
		say("before is null")
	case env.Before == nil:
	case e.before == nil && e.kind != KindUpdate:
		say("before is not null: %v", env.Before)
	case e.before != nil:
		p = append(p, e.compare("before", env.Before, e.before, func(i int) bool {
			return e.keyOnly && !e.table.Columns[i].Key
		})...)
	}
	return p
}

// compare holds a record's row against the truth's. Columns stand in the table's
// order; those that mayLack may be absent.
func (e expected) compare(name string, got Object, want Row, mayLack func(column int) bool) []string {
	var p []string
	next := 0
	for i, c := range e.table.Columns {
		if next < len(got) && got[next].Name == c.Name {
			if v := PlainJSON(c.Type, want[i]); !sameJSON(got[next].Raw, v) {
				p = append(p, fmt.Sprintf("%s.%s is %s, want %s", name, c.Name, shorten(got[next].Raw), shorten(v)))
			}
			next++
		} else if !mayLack(i) {
			p = append(p, fmt.Sprintf("%s.%s is not there", name, c.Name))
		}
	}
	for _, m := range got[next:] {
		p = append(p, fmt.Sprintf("%s.%s is no column of the table at this place", name, m.Name))
	}
	if name == "before" && e.keyOnly && len(got) > 0 && next > countKeys(e.table) {
		p = append(p, "before holds more than the key, which is all that PostgreSQL sent")
	}
	return p
}

func countKeys(t *Table) int {
	n := 0
	for _, c := range t.Columns {
		if c.Key {
			n++
		}
	}
	return n
}

func (e expected) eventProblems(it item) []string {
	var p []string
	if string(it.Key) != e.key {
		p = append(p, fmt.Sprintf("its key is %s, want %s", shorten(it.Key), e.key))
	}
	if !bytes.Equal(it.Value, e.value) || (it.Value == nil) != (e.value == nil) {
		p = append(p, fmt.Sprintf("its value is %s, want %s", shorten(it.Value), shorten(e.value)))
	}
	for name, want := range e.headers {
		if got, ok := it.Headers[name]; !ok || got != want {
			p = append(p, fmt.Sprintf("header %s is %q, want %q", name, got, want))
		}
	}
	for name := range it.Headers {
		if _, known := e.headers[name]; !known && name != "position" && name != "replay" {
			p = append(p, fmt.Sprintf("header %s is none of the event's", name))
		}
	}
	return p
}

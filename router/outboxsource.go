package router

import (
	"bytes"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// eventSource is what an outbox plan reads rows of: a table's columns, or the members
// that a logical message's JSON object may have. A row is a tuple with a value for each
// column, as text or null; where it comes from the plan does not know.
type eventSource struct {
	label   string // for people, such as "outbox table public.outbox"
	path    string // of the CloudEvents attribute source, such as public.outbox
	columns []eventColumn
	// table is nil for messages. Their columns are one for each field, called as the field
	// is, and those that the configuration names: a row may lack any of them, so that what
	// depends on whether a column is there is decided row by row.
	table *replication.Relation
}

// eventColumn is one column of a source.
type eventColumn struct {
	name string
	// typeOID is the column's type, of a domain the one beneath.
	typeOID uint32
	json    format.Append // the value as JSON, as `types: plain` has it
	jsonOf  int           // of a message: the column whose member's JSON this one has; 0: it has its own text
}

// tableSource describes a table. typeOf describes a type; nil is an unknown one, whose
// values are text.
func tableSource(rel *replication.Relation, enc *format.Encoder, typeOf func(oid uint32) (*format.Type, error)) (eventSource, error) {
	s := eventSource{
		label: fmt.Sprintf("outbox table %s.%s", rel.Schema, rel.Name), path: rel.Schema + "." + rel.Name,
		columns: make([]eventColumn, len(rel.Columns)), table: rel,
	}
	for i, c := range rel.Columns {
		t, err := typeOf(c.TypeOID)
		if err != nil {
			return s, fmt.Errorf("look up the type of column %s: %w", c.Name, err)
		}
		s.columns[i] = eventColumn{name: c.Name, typeOID: c.TypeOID, json: enc.Plain(t)}
		if t != nil {
			s.columns[i].typeOID = t.Underlying().OID
		}
	}
	return s, nil
}

// jsonIndex gives the column of a name as JSON. A table's column has a type that tells what
// that is; of a message's further members it is the JSON that stands there.
func (s *eventSource) jsonIndex(name string) (int, bool) {
	c, ok := s.index(name)
	if !ok || !s.open() || c < int(outboxFields) {
		return c, ok
	}
	s.columns = append(s.columns, eventColumn{name: jsonPrefix + name, typeOID: oidJSON, jsonOf: c, json: appendAsIs})
	return len(s.columns) - 1, true
}

// jsonPrefix makes a name that no member can have, since a name has no NUL.
const jsonPrefix = "\x00json of "

func appendAsIs(dst, text []byte) ([]byte, error) { return append(dst, text...), nil }

// messageSource describes the messages of a prefix. Further columns join while the plan
// is compiled; (*outboxPlan).objectRow makes a row of a message.
func messageSource(prefix string) eventSource {
	s := eventSource{label: fmt.Sprintf("outbox messages %q", prefix), path: prefix}
	for f := range outboxFields {
		c := eventColumn{name: f.rule().name, typeOID: oidText, json: format.AppendString}
		switch f {
		case fieldPayload:
			c.typeOID = oidJSON
			c.json = appendAsIs
		case fieldSeq, fieldSchemaVersion:
			c.json = appendCount
		}
		s.columns = append(s.columns, c)
	}
	return s
}

// appendCount appends a number of a message as a JSON number, and what is none as a
// string. A message has no types that would tell.
func appendCount(dst, text []byte) ([]byte, error) {
	if _, ok := parseInteger(text); ok {
		return append(dst, text...), nil
	}
	return format.AppendString(dst, text)
}

// parseInteger reads a number as PostgreSQL and JSON write an integer of up to 18 digits.
func parseInteger(text []byte) (n int64, ok bool) {
	digits := bytes.TrimPrefix(text, []byte{'-'})
	if len(digits) == 0 || len(digits) > 18 || digits[0] == '0' && len(digits) > 1 {
		return 0, false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	if len(digits) < len(text) {
		n = -n
	}
	return n, true
}

// open tells that columns which nobody has seen yet may be asked for.
func (s *eventSource) open() bool { return s.table == nil }

// index gives the column of a name. An open source takes every name.
func (s *eventSource) index(name string) (int, bool) {
	for i := range s.columns {
		if s.columns[i].name == name {
			return i, true
		}
	}
	if !s.open() {
		return -1, false
	}
	s.columns = append(s.columns, eventColumn{name: name, typeOID: oidText, json: format.AppendString})
	return len(s.columns) - 1, true
}

func (s *eventSource) names() []string {
	names := make([]string, len(s.columns))
	for i := range s.columns {
		names[i] = s.columns[i].name
	}
	return names
}

// objectColumns says where the members of messages go.
type objectColumns struct {
	slots map[string]objectSlot // by the member's name
	// versionIsSeq and versionIsSchema tell what a member called version may be.
	versionIsSeq, versionIsSchema bool

	row  replication.Tuple // reused
	rank []int             // of the name that filled each column of row; reused
	text []byte            // what row's values point to that are not as they stand; reused
	name []byte            // reused
}

// objectSlot is where a member goes. Of several names of one field the one with the
// lowest rank wins, as it does with a table's columns.
type objectSlot struct {
	column, rank int
	json         int // a second column, which gets the member's JSON; 0 for none
}

const (
	noRank        = 1 << 20 // of a column that nothing has filled
	versionColumn = -1      // of the member version, see objectRow
)

// newObjectColumns works out which members fill which columns.
func newObjectColumns(s *eventSource, o *OutboxOptions) *objectColumns {
	c := &objectColumns{
		slots: map[string]objectSlot{},
		row:   make(replication.Tuple, len(s.columns)), rank: make([]int, len(s.columns)),
		versionIsSeq:    o.Columns[fieldSeq.rule().name] == "",
		versionIsSchema: o.Columns[fieldSchemaVersion.rule().name] == "",
	}
	for i := int(outboxFields); i < len(s.columns); i++ {
		if of := s.columns[i].jsonOf; of == 0 {
			c.slots[s.columns[i].name] = objectSlot{column: i}
		}
	}
	for i := int(outboxFields); i < len(s.columns); i++ {
		if of := s.columns[i].jsonOf; of > 0 {
			slot := c.slots[s.columns[of].name]
			slot.json = i
			c.slots[s.columns[of].name] = slot
		}
	}
	for f := range outboxFields {
		if name := o.Columns[f.rule().name]; name != "" {
			c.slots[name] = objectSlot{column: int(f)}
		}
	}
	for f := range outboxFields {
		if o.Columns[f.rule().name] != "" {
			continue
		}
		for rank, name := range f.rule().columns {
			if _, taken := c.slots[name]; taken {
				continue
			}
			slot := objectSlot{column: int(f), rank: rank}
			if name == "version" {
				slot.column = versionColumn
			}
			c.slots[name] = slot
		}
	}
	return c
}

// objectRow makes a row of a logical message's content, a JSON object whose members are
// named as an outbox table's columns are. Of the payload the JSON stays as it stands; of
// every other member its text counts. A member that is null or is not there is NULL.
//
// The row is valid until the next call and as long as content is. An error is a
// *RouteError.
func (p *outboxPlan) objectRow(content []byte) (replication.Tuple, error) {
	m, ok := openObject(content)
	switch {
	case !ok:
		return nil, &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
			"the message's content, %d bytes, is no JSON object (%s); emit one with the fields of an event (event_id, event_type, payload, …)", len(content), whyNoObject(content))}
	case !utf8.Valid(content):
		return nil, &RouteError{Reason: ReasonMalformed, Detail: "the message's content is not UTF-8, which JSON is; a message is in the stream as the bytes that were emitted: " +
			"where the database has another encoding, emit convert_to(content, 'UTF8')"}
	}
	c := p.object
	for i := range c.row {
		c.row[i] = replication.Value{Kind: replication.ValueNull}
		c.rank[i] = noRank
	}
	// Growing would move what the row points to already.
	c.text = slices.Grow(c.text[:0], len(content))
	version := replication.Value{Kind: replication.ValueNull}
	payload := false
	for m.next() {
		c.name = appendJSONText(c.name[:0], m.name)
		slot, ok := c.slots[string(c.name)]
		if !ok {
			continue
		}
		asJSON := slot.column == int(fieldPayload)
		payload = payload || asJSON
		if m.isNull() {
			continue
		}
		if !asJSON && hasHalfSurrogate(m.value) {
			return nil, &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
				"field %s has half of a surrogate pair, which is no character: two values that differ could not be told apart; write both halves", quoteCut(string(c.name)))}
		}
		switch {
		case slot.column == versionColumn:
			version = c.value(m.value, false)
		case slot.rank <= c.rank[slot.column]:
			c.row[slot.column], c.rank[slot.column] = c.value(m.value, asJSON), slot.rank
		}
		if slot.json > 0 {
			c.row[slot.json] = replication.Value{Kind: replication.ValueText, Text: m.value}
		}
	}
	if !payload {
		return nil, &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
			"the message has no field %q; write it, as null where the event is to have no value", p.memberName(fieldPayload))}
	}
	// version is the sequence, and the schema's where something else is the sequence.
	switch {
	case c.versionIsSeq && c.row[fieldSeq].Kind == replication.ValueNull:
		c.row[fieldSeq] = version
	case c.versionIsSchema && c.row[fieldSchemaVersion].Kind == replication.ValueNull:
		c.row[fieldSchemaVersion] = version
	}
	return c.row, nil
}

// value gives a member's text; asJSON its JSON.
func (c *objectColumns) value(value []byte, asJSON bool) replication.Value {
	if asJSON || value[0] != '"' {
		return replication.Value{Kind: replication.ValueText, Text: value}
	}
	at := len(c.text)
	c.text = appendJSONText(c.text, value)
	return replication.Value{Kind: replication.ValueText, Text: c.text[at:len(c.text):len(c.text)]}
}

package router

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/replication"
)

// Header is one header of a record.
type Header struct {
	Key   string
	Value []byte
}

// The values of OutboxOptions.NullPayload: what an event whose payload is NULL
// becomes.
const (
	NullPayloadTombstone = "tombstone" // a record without a value
	NullPayloadNull      = "null"      // the JSON value null
)

// OutboxOptions says how the rows of one outbox table become events. Schema and
// Table name it; every other field may be its zero value.
type OutboxOptions struct {
	Schema, Table string
	// Topic and Key are templates over the row's fields (see rowTemplate). Empty:
	// outbox.event.{aggregate_type}, or outbox.event.{event_type} where the table has
	// no aggregate type; and partition_key, else aggregate_id, else the event id.
	Topic, Key string
	// Columns names the column of a field whose name is not recognised: id, type,
	// aggregate_type, aggregate_id, payload, seq, occurred, partition_key,
	// schema_version, correlation_id, causation_id, producer, traceparent.
	Columns map[string]string
	// Headers are further columns that become headers of their own name.
	Headers []string
	// NullPayload is NullPayloadTombstone (also when empty) or NullPayloadNull.
	NullPayload string
}

// The reasons of a RouteError and of a dead letter, as the header "reason" spells
// them.
const (
	ReasonRoute     = "route"     // the row does not say where it belongs
	ReasonMalformed = "malformed" // the row is not what an event's row has to be
	ReasonEncode    = "encode"    // a value has no form in the record
	ReasonOversize  = "oversize"  // the record is larger than its topic takes
)

// RouteError tells why one change cannot become a record. It concerns this change
// only: the next one may be fine. Whether the change becomes a dead letter or stops
// the connector is the configuration's choice (dead-letter.on-error).
type RouteError struct {
	Reason string // one of the Reason constants
	Detail string // what is wrong with the row, and what to do
}

// Error gives the reason and the detail.
func (e *RouteError) Error() string { return e.Reason + ": " + e.Detail }

// event is what an outbox row becomes. Key, Value and the headers' values point
// into the scratch that it was made with.
type event struct {
	Topic string
	Key   []byte // nil only when the row's event id is NULL and so nothing else is there
	Value []byte // nil when NullValue, never otherwise
	// NullValue tells that the record has no value (a tombstone).
	NullValue bool
	Headers   []Header
}

// scratch is the memory that events are written to, so that a row costs no
// allocation. Growing leaves earlier events intact; reset does not, so that it must
// wait until no record of them is in flight.
type scratch struct {
	buf     []byte
	headers []Header
}

// reset gives the memory free for new events.
func (s *scratch) reset() {
	s.buf = s.buf[:0]
	// Values of an earlier, larger buffer would keep it alive.
	clear(s.headers)
	s.headers = s.headers[:0]
}

// since gives what was written from start on. It is never nil: an empty key or
// value is not the same as none, and the Kafka client tells them apart by nil.
func (s *scratch) since(start int) []byte {
	if start == len(s.buf) {
		return []byte{}
	}
	return s.buf[start:len(s.buf):len(s.buf)]
}

// addHeader appends one more header to ev, which must be the event made last with
// s. value is copied.
func (s *scratch) addHeader(ev *event, key string, value []byte) {
	start := len(s.buf)
	s.buf = append(s.buf, value...)
	s.headers = append(s.headers, Header{Key: key, Value: s.since(start)})
	first := len(s.headers) - len(ev.Headers) - 1
	ev.Headers = s.headers[first:len(s.headers):len(s.headers)]
}

// outboxPlan is what compileOutbox found out about one relation: where each part of
// an event comes from, so that a row needs no look-up by name.
//
// A plan is for one goroutine, since it remembers the topics it has seen.
type outboxPlan struct {
	relation *replication.Relation
	fields   fieldColumns
	topic    *rowTemplate
	// key is nil without a template; keyColumns are then tried in order, and also
	// where the template gives no text.
	key         *rowTemplate
	keyColumns  []int
	payload     int
	payloadForm payloadForm
	nullPayload string
	headers     []headerColumn

	validTopic func(string) error
	topics     map[string]topicEntry
	last       topicEntry
}

// headerColumn is a column that becomes a header.
type headerColumn struct {
	key    string
	column int
	form   timeForm
}

// timeForm says how a header's text differs from PostgreSQL's.
type timeForm uint8

const (
	formText        timeForm = iota // not at all
	formTimestamp                   // a T between date and time
	formTimestamptz                 // that, and Z for +00
)

// payloadForm says how a payload's bytes differ from PostgreSQL's text.
type payloadForm uint8

const (
	payloadText  payloadForm = iota // not at all
	payloadBytea                    // they are its hexadecimal digits
)

// topicEntry is a topic name once built, and what validTopic said about it.
type topicEntry struct {
	name string
	err  error
}

// maxCachedTopics bounds the memory for topic names: a template over an event id
// would otherwise remember every row. What is beyond is built again, once.
const maxCachedTopics = 4096

// maxTopicLength is Kafka's limit for a topic's name
// (org.apache.kafka.common.internals.Topic).
const maxTopicLength = 249

// appendEvent makes row, an inserted row of the plan's relation, the event ev.
// Everything ev points to is a copy in s, so that row's memory may go.
//
// An error is a *RouteError about this row. Then ev holds what was found before it,
// for the dead letter: the key wherever there is one, and the topic's name where it
// could be built, valid or not (of one that is too long, the beginning).
func (p *outboxPlan) appendEvent(ev *event, s *scratch, row replication.Tuple) error {
	*ev = event{}
	if err := p.checkRow(row); err != nil {
		return err
	}
	p.appendKey(ev, s, row)
	if row[p.fields[fieldID]].Kind != replication.ValueText {
		return &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
			"the event id, column %q, is NULL: consumers could not tell a repeat from a new event; make the column NOT NULL",
			p.columnName(p.fields[fieldID]))}
	}
	if err := p.appendTopic(ev, s, row); err != nil {
		return err
	}
	if err := p.appendPayload(ev, s, &row[p.payload]); err != nil {
		return err
	}
	p.appendHeaders(ev, s, row)
	return nil
}

// checkRow finds what an inserted row cannot be. It looks at every column before
// anything is built, so that the other steps need no error for it.
func (p *outboxPlan) checkRow(row replication.Tuple) error {
	if len(row) != len(p.relation.Columns) {
		return &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
			"the row has %d values and %s.%s %d columns; report this as a bug, with the table's definition",
			len(row), p.relation.Schema, p.relation.Name, len(p.relation.Columns))}
	}
	for i := range row {
		if row[i].Kind == replication.ValueUnchanged {
			return &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
				"column %q is an unchanged TOAST value, which an inserted row cannot have; outbox rows are read from inserts only",
				p.columnName(i))}
		}
	}
	return nil
}

// appendKey sets ev.Key: the template's text, else the first of the key columns
// that is not NULL.
func (p *outboxPlan) appendKey(ev *event, s *scratch, row replication.Tuple) {
	start := len(s.buf)
	if p.key != nil {
		s.buf, _ = p.key.appendTo(s.buf, row)
		if len(s.buf) > start {
			ev.Key = s.since(start)
			return
		}
	}
	for _, c := range p.keyColumns {
		if row[c].Kind == replication.ValueText {
			s.buf = append(s.buf, row[c].Text...)
			ev.Key = s.since(start)
			return
		}
	}
}

// appendTopic sets ev.Topic. A name seen before costs a comparison or a look-up and
// no allocation.
func (p *outboxPlan) appendTopic(ev *event, s *scratch, row replication.Tuple) error {
	start := len(s.buf)
	buf, empty := p.topic.appendTo(s.buf, row)
	// The name is a string of its own: its place in the buffer is free again.
	s.buf = buf[:start]
	name := buf[start:]
	if empty != "" {
		return &RouteError{Reason: ReasonRoute, Detail: fmt.Sprintf(
			"field {%s} of the topic %q is NULL or empty; fill the column, or give the template a default as in {%s|default:other}",
			empty, p.topic.source, empty)}
	}
	if len(name) > maxTopicLength {
		// Not remembered: a payload column taken for a topic may hold megabytes. The dead
		// letter gets the beginning only, since its header has to fit into a record.
		ev.Topic = strings.ToValidUTF8(string(name[:maxTopicLength]), "")
		return p.checkTopic(string(name))
	}
	if p.last.name != string(name) {
		p.last = p.lookUpTopic(name)
	}
	ev.Topic = p.last.name
	if p.last.err != nil {
		return p.last.err
	}
	return nil
}

// lookUpTopic gives the entry of the topic name, checked when it is new.
func (p *outboxPlan) lookUpTopic(name []byte) topicEntry {
	if e, ok := p.topics[string(name)]; ok {
		return e
	}
	e := topicEntry{name: string(name)}
	e.err = p.checkTopic(e.name)
	if len(p.topics) >= maxCachedTopics {
		clear(p.topics)
	}
	p.topics[e.name] = e
	return e
}

// checkTopic gives a *RouteError for a name that is no topic's.
func (p *outboxPlan) checkTopic(name string) error {
	err := p.validTopic(name)
	if err == nil && len(name) > maxTopicLength {
		err = fmt.Errorf("it has %d bytes, and Kafka takes %d", len(name), maxTopicLength)
	}
	if err == nil {
		return nil
	}
	return &RouteError{Reason: ReasonRoute, Detail: fmt.Sprintf(
		"topic name %s from %q: %s; correct the row's column, or the outbox's topic template",
		quoteCut(name), p.topic.source, cutText(err.Error()))}
}

// appendPayload sets ev.Value and ev.NullValue.
func (p *outboxPlan) appendPayload(ev *event, s *scratch, v *replication.Value) error {
	start := len(s.buf)
	switch {
	case v.Kind == replication.ValueNull && p.nullPayload == NullPayloadNull:
		s.buf = append(s.buf, "null"...)
	case v.Kind == replication.ValueNull:
		ev.NullValue = true
		return nil
	case p.payloadForm == payloadBytea:
		digits, ok := bytes.CutPrefix(v.Text, []byte(`\x`))
		var err error
		if ok {
			s.buf, err = hex.AppendDecode(s.buf, digits)
		}
		if !ok || err != nil {
			s.buf = s.buf[:start]
			return &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
				"payload column %q is bytea but its text is not \\x and hexadecimal digits; the connection must have bytea_output = hex",
				p.columnName(p.payload))}
		}
	default:
		s.buf = append(s.buf, v.Text...)
	}
	ev.Value = s.since(start)
	return nil
}

// appendHeaders sets ev.Headers to those of the columns that are not NULL.
func (p *outboxPlan) appendHeaders(ev *event, s *scratch, row replication.Tuple) {
	first := len(s.headers)
	for i := range p.headers {
		h := &p.headers[i]
		v := &row[h.column]
		if v.Kind != replication.ValueText {
			continue
		}
		start := len(s.buf)
		if h.form == formText {
			s.buf = append(s.buf, v.Text...)
		} else {
			s.buf = appendPlainTime(s.buf, v.Text, h.form)
		}
		s.headers = append(s.headers, Header{Key: h.key, Value: s.since(start)})
	}
	ev.Headers = s.headers[first:len(s.headers):len(s.headers)]
}

// appendPlainTime appends PostgreSQL's ISO text of a timestamp as the plain form of
// the records: T between date and time and, of a timestamptz in UTC, Z. infinity
// and years BC stay as PostgreSQL prints them.
func appendPlainTime(dst, text []byte, form timeForm) []byte {
	date, clock, ok := bytes.Cut(text, []byte{' '})
	if !ok || bytes.IndexByte(clock, ' ') >= 0 {
		return append(dst, text...)
	}
	dst = append(append(dst, date...), 'T')
	if form == formTimestamptz {
		if utc, ok := bytes.CutSuffix(clock, []byte("+00")); ok {
			return append(append(dst, utc...), 'Z')
		}
	}
	return append(dst, clock...)
}

func (p *outboxPlan) columnName(i int) string { return p.relation.Columns[i].Name }

// cutText gives the first 400 bytes of a message that may quote a whole value.
func cutText(s string) string {
	const longest = 400
	if len(s) <= longest {
		return s
	}
	return strings.ToValidUTF8(s[:longest], "") + " …"
}

// quoteCut quotes s for an error message, the first 300 bytes of it: a payload
// column taken for a topic may hold megabytes.
func quoteCut(s string) string {
	const longest = 300
	if len(s) <= longest {
		return fmt.Sprintf("%q", s)
	}
	return fmt.Sprintf("%q and %d bytes more", s[:longest], len(s)-longest)
}

// outboxField is a part of an event that a column may hold.
type outboxField uint8

// The fields, with the headers' order for those that are headers.
const (
	fieldID outboxField = iota
	fieldType
	fieldAggregateType
	fieldAggregateID
	fieldSeq
	fieldOccurred
	fieldSchemaVersion
	fieldCorrelationID
	fieldCausationID
	fieldTraceparent
	fieldPayload
	fieldPartitionKey
	fieldProducer
	outboxFields // how many there are
)

// fieldColumns gives each field's column by index, or -1.
type fieldColumns [outboxFields]int

// fieldRule says how a field is named in the configuration, which columns are taken
// for it, and how it appears outside.
type fieldRule struct {
	name string // in `columns:`
	// columns are recognised, the first that the table has winning.
	columns []string
	// respelled: the columns are two spellings of one name, so that a table with both
	// leaves it open which one is meant.
	respelled bool
	header    string // the header that it becomes; "" for none
	// alias is a second name in templates, beside name.
	alias string
}

// rule gives the rule of a field. The columns' order is a preference: event_id
// says more than id, which is often a mere row number; occurred_at says when the
// event was, created_at when the row was.
func (f outboxField) rule() fieldRule {
	switch f {
	case fieldID:
		return fieldRule{name: "id", columns: []string{"event_id", "id"}, header: "id", alias: "event_id"}
	case fieldType:
		return fieldRule{name: "type", columns: []string{"event_type", "type"}, header: "type", alias: "event_type"}
	case fieldAggregateType:
		return fieldRule{name: "aggregate_type", columns: []string{"aggregate_type", "aggregatetype"}, respelled: true, header: "aggregate_type"}
	case fieldAggregateID:
		return fieldRule{name: "aggregate_id", columns: []string{"aggregate_id", "aggregateid"}, respelled: true, header: "aggregate_id"}
	case fieldSeq:
		return fieldRule{name: "seq", columns: []string{"aggregate_seq", "sequence_num", "version"}, header: "aggregate_seq", alias: "aggregate_seq"}
	case fieldOccurred:
		return fieldRule{name: "occurred", columns: []string{"occurred_at", "created_at"}, header: "occurred_at", alias: "occurred_at"}
	case fieldSchemaVersion:
		// version counts only where another column is the sequence: since seq is
		// resolved first and takes it otherwise, it is simply not free any more.
		return fieldRule{name: "schema_version", columns: []string{"schema_version", "version"}, header: "schema_version"}
	case fieldCorrelationID:
		return fieldRule{name: "correlation_id", columns: []string{"correlation_id"}, header: "correlation_id"}
	case fieldCausationID:
		return fieldRule{name: "causation_id", columns: []string{"causation_id"}, header: "causation_id"}
	case fieldTraceparent:
		return fieldRule{name: "traceparent", columns: []string{"traceparent"}, header: "traceparent"}
	case fieldPayload:
		return fieldRule{name: "payload", columns: []string{"payload"}}
	case fieldPartitionKey:
		return fieldRule{name: "partition_key", columns: []string{"partition_key"}}
	case fieldProducer:
		return fieldRule{name: "producer", columns: []string{"producer"}}
	}
	panic(fmt.Sprintf("outbox field %d has no rule", f))
}

// compileOutbox works out how rows of rel become events. prefix is {prefix} in
// templates; validTopic judges topic names, its error saying what is wrong with
// one. o and rel are kept and must not change.
//
// The plan holds for this *Relation only: after an ALTER TABLE another RELATION
// message arrives and the plan has to be made again. An error says what the table
// lacks, which columns it has, and which configuration would work.
func compileOutbox(rel *replication.Relation, o *OutboxOptions, prefix string, validTopic func(string) error) (*outboxPlan, error) {
	p := &outboxPlan{
		relation:    rel,
		nullPayload: o.NullPayload,
		validTopic:  validTopic,
		topics:      make(map[string]topicEntry),
	}
	var problems []error
	p.fields, problems = mapFields(rel, o)
	problems = append(problems, p.requireFields(o)...)
	if len(problems) > 0 {
		return nil, mappingError(rel, o, p.fields, problems)
	}
	p.payload = p.fields[fieldPayload]
	if rel.Columns[p.payload].TypeOID == oidBytea {
		p.payloadForm = payloadBytea
	}
	for _, f := range []outboxField{fieldPartitionKey, fieldAggregateID, fieldID} {
		if c := p.fields[f]; c >= 0 {
			p.keyColumns = append(p.keyColumns, c)
		}
	}
	err := errors.Join(p.compileTemplates(o, prefix), p.compileHeaders(o))
	if err != nil {
		return nil, fmt.Errorf("outbox table %s.%s: %w", rel.Schema, rel.Name, err)
	}
	return p, nil
}

// mapFields finds each field's column: the configured one, else the first
// recognised name that no other field was given.
func mapFields(rel *replication.Relation, o *OutboxOptions) (fields fieldColumns, problems []error) {
	byName := columnsByName(rel)
	taken := make(map[int]bool)
	byField := make(map[string]outboxField)
	for f := range outboxFields {
		fields[f] = -1
		byField[f.rule().name] = f
	}
	for _, name := range slices.Sorted(maps.Keys(o.Columns)) {
		f, known := byField[name]
		c, exists := byName[o.Columns[name]]
		switch {
		case !known:
			problems = append(problems, fmt.Errorf("columns: no field %q; there are %s", name, strings.Join(fieldNames(), ", ")))
		case !exists:
			problems = append(problems, fmt.Errorf("columns: %s: the table has no column %q", name, o.Columns[name]))
		default:
			fields[f] = c
			taken[c] = true
		}
	}
	for f := range outboxFields {
		if _, configured := o.Columns[f.rule().name]; configured {
			continue
		}
		c, err := recognise(f.rule(), byName, taken)
		if err != nil {
			problems = append(problems, err)
		}
		if c >= 0 {
			fields[f] = c
			taken[c] = true
		}
	}
	return fields, problems
}

// recognise gives the column that rule takes, or -1.
func recognise(rule fieldRule, byName map[string]int, taken map[int]bool) (int, error) {
	found := -1
	for _, name := range rule.columns {
		c, ok := byName[name]
		if !ok || taken[c] {
			continue
		}
		if found >= 0 {
			return found, fmt.Errorf("%s may be column %s; name one of them under columns", rule.name, strings.Join(rule.columns, " or "))
		}
		found = c
		if !rule.respelled {
			break
		}
	}
	return found, nil
}

// requireFields says what an event cannot do without.
func (p *outboxPlan) requireFields(o *OutboxOptions) (problems []error) {
	// What is configured wrongly is a problem already.
	missing := func(f outboxField) bool { return p.fields[f] < 0 && o.Columns[f.rule().name] == "" }
	for _, f := range []outboxField{fieldID, fieldPayload} {
		if missing(f) {
			problems = append(problems, fmt.Errorf("no column is recognised as %s (%s)", f.rule().name, strings.Join(f.rule().columns, ", ")))
		}
	}
	if o.Topic == "" && missing(fieldType) && missing(fieldAggregateType) {
		problems = append(problems, errors.New("no column is recognised as type (event_type, type) or aggregate_type (aggregate_type, aggregatetype), and there is no topic template, so that nothing says which topic an event belongs to"))
	}
	switch o.NullPayload {
	case "", NullPayloadTombstone, NullPayloadNull:
	default:
		problems = append(problems, fmt.Errorf("null-payload: %q is neither %s nor %s", o.NullPayload, NullPayloadTombstone, NullPayloadNull))
	}
	return problems
}

// compileTemplates sets topic and key.
func (p *outboxPlan) compileTemplates(o *OutboxOptions, prefix string) error {
	scope := p.scope(prefix)
	if o.Topic == "" {
		// Built from the field's column and not from a name: the table may have another
		// column of that name, which columns: has overruled.
		f, name := fieldType, "event_type"
		if p.fields[fieldAggregateType] >= 0 {
			f, name = fieldAggregateType, "aggregate_type"
		}
		p.topic = &rowTemplate{
			source: "outbox.event.{" + name + "}",
			parts:  []templatePart{{literal: "outbox.event.", column: -1}, {column: p.fields[f], name: name}},
		}
	} else {
		t, err := compileRowTemplate(o.Topic, scope)
		if err != nil {
			return fmt.Errorf("topic: %w", err)
		}
		p.topic = t
	}
	if o.Key != "" {
		t, err := compileRowTemplate(o.Key, scope)
		if err != nil {
			return fmt.Errorf("key: %w", err)
		}
		p.key = t
	}
	return nil
}

// scope gives the names that templates may use. A column goes before a field of
// the same name: the template's writer sees the table.
func (p *outboxPlan) scope(prefix string) templateScope {
	s := templateScope{columns: make(map[string]int), constants: map[string]string{"prefix": prefix}}
	var names []string
	for f := range outboxFields {
		r := f.rule()
		for _, name := range []string{r.name, r.alias} {
			if name != "" && p.fields[f] >= 0 {
				s.columns[name] = p.fields[f]
				names = append(names, name)
			}
		}
	}
	for i, c := range p.relation.Columns {
		s.columns[c.Name] = i
	}
	slices.Sort(names)
	s.describe = fmt.Sprintf("the columns %s, the fields %s, and prefix",
		strings.Join(columnNames(p.relation), ", "), strings.Join(names, ", "))
	return s
}

// compileHeaders sets headers: the fields' in their fixed order, then the
// configured columns'.
func (p *outboxPlan) compileHeaders(o *OutboxOptions) error {
	used := map[string]int{"position": -1, "replay": -1} // every record has these of its own
	for f := range outboxFields {
		key, c := f.rule().header, p.fields[f]
		if key == "" || c < 0 {
			continue
		}
		h := headerColumn{key: key, column: c}
		if f == fieldOccurred {
			switch p.relation.Columns[c].TypeOID {
			case oidTimestamp:
				h.form = formTimestamp
			case oidTimestamptz:
				h.form = formTimestamptz
			}
		}
		p.headers = append(p.headers, h)
		used[key] = c
	}
	byName := columnsByName(p.relation)
	for _, name := range o.Headers {
		c, ok := byName[name]
		if !ok {
			return fmt.Errorf("headers: the table has no column %q; there are %s", name, strings.Join(columnNames(p.relation), ", "))
		}
		if other, ok := used[name]; ok {
			if other == c {
				continue // the same header, already there
			}
			return fmt.Errorf("headers: column %q would make a second header %q with another meaning; leave it out or rename the column", name, name)
		}
		p.headers = append(p.headers, headerColumn{key: name, column: c})
		used[name] = c
	}
	return nil
}

// recognised gives field=column for the fields that have one, for the log line at
// the start.
func (p *outboxPlan) recognised() []string {
	var out []string
	for f := range outboxFields {
		if c := p.fields[f]; c >= 0 {
			out = append(out, f.rule().name+"="+p.columnName(c))
		}
	}
	return out
}

func columnsByName(rel *replication.Relation) map[string]int {
	m := make(map[string]int, len(rel.Columns))
	for i, c := range rel.Columns {
		m[c.Name] = i
	}
	return m
}

func columnNames(rel *replication.Relation) []string {
	names := make([]string, len(rel.Columns))
	for i, c := range rel.Columns {
		names[i] = c.Name
	}
	return names
}

func fieldNames() []string {
	names := make([]string, 0, outboxFields)
	for f := range outboxFields {
		names = append(names, f.rule().name)
	}
	return names
}

// The type OIDs that the outbox cares about; they are fixed in PostgreSQL's
// pg_type.dat.
const (
	oidBytea       = 17
	oidInt8        = 20
	oidInt2        = 21
	oidInt4        = 23
	oidText        = 25
	oidJSON        = 114
	oidVarchar     = 1043
	oidTimestamp   = 1114
	oidTimestamptz = 1184
	oidUUID        = 2950
	oidJSONB       = 3802
)

// mappingError is the error about a table that cannot be an outbox as it is: every
// problem, the columns found, and a configuration that would work.
func mappingError(rel *replication.Relation, o *OutboxOptions, fields fieldColumns, problems []error) error {
	var b strings.Builder
	fmt.Fprintf(&b, "outbox table %s.%s:", rel.Schema, rel.Name)
	for _, p := range problems {
		fmt.Fprintf(&b, "\n  %v", p)
	}
	found := make([]string, len(rel.Columns))
	for i, c := range rel.Columns {
		found[i] = c.Name + " " + typeName(c.TypeOID)
	}
	fmt.Fprintf(&b, "\n  columns found: %s", strings.Join(found, ", "))
	mapping, lacking := suggestColumns(rel, o, fields)
	if len(lacking) > 0 {
		fmt.Fprintf(&b, "\n  the table has no column left for: %s; add one, or take the table out of outbox:", strings.Join(lacking, ", "))
		return errors.New(b.String())
	}
	fmt.Fprintf(&b, "\n  this would work, if these columns are the ones meant:\n")
	fmt.Fprintf(&b, "    outbox:\n      - table: %s\n        columns: {%s}", yamlString(rel.Schema+"."+rel.Name), strings.Join(mapping, ", "))
	return errors.New(b.String())
}

// suggestColumns gives "field: column" for every field that has to be said: what
// is configured rightly, what is ambiguous, and a guess for what is missing.
// lacking names the fields for which no column is left.
func suggestColumns(rel *replication.Relation, o *OutboxOptions, fields fieldColumns) (mapping, lacking []string) {
	needed := []outboxField{fieldID, fieldPayload}
	if o.Topic == "" && fields[fieldAggregateType] < 0 {
		needed = append(needed, fieldType)
	}
	taken := make(map[int]bool)
	for _, c := range fields {
		if c >= 0 {
			taken[c] = true
		}
	}
	byName := columnsByName(rel)
	for f := range outboxFields {
		rule := f.rule()
		c := fields[f]
		_, configured := o.Columns[rule.name]
		switch {
		case c >= 0 && !configured && !bothSpellings(rule, byName):
			continue // recognised; nothing to say
		case c < 0 && slices.Contains(needed, f):
			if c = guessColumn(f, rel, taken); c < 0 {
				lacking = append(lacking, rule.name)
				continue
			}
			taken[c] = true
		case c < 0:
			continue
		}
		mapping = append(mapping, rule.name+": "+yamlString(rel.Columns[c].Name))
	}
	return mapping, lacking
}

// bothSpellings tells whether the table has more than one column for a rule whose
// columns are spellings of one name.
func bothSpellings(rule fieldRule, byName map[string]int) bool {
	n := 0
	for _, name := range rule.columns {
		if _, ok := byName[name]; ok {
			n++
		}
	}
	return rule.respelled && n > 1
}

// guessColumn gives the free column that looks most like f: by name before type,
// and any free one rather than none. It is only ever a suggestion to a reader.
func guessColumn(f outboxField, rel *replication.Relation, taken map[int]bool) int {
	var words []string
	var types []uint32
	switch f {
	case fieldID:
		words, types = []string{"uuid", "guid", "id", "key"}, []uint32{oidUUID, oidInt8, oidInt4, oidText, oidVarchar}
	case fieldPayload:
		words, types = []string{"payload", "body", "data", "content", "message", "event"}, []uint32{oidJSONB, oidJSON, oidBytea, oidText, oidVarchar}
	default:
		words, types = []string{"type", "kind", "name", "topic", "event"}, []uint32{oidText, oidVarchar}
	}
	best, bestScore := -1, -1
	for i, c := range rel.Columns {
		if taken[i] {
			continue
		}
		score := 0
		if w := slices.IndexFunc(words, func(w string) bool { return strings.Contains(c.Name, w) }); w >= 0 {
			score += 2 * (len(words) - w)
		}
		if t := slices.Index(types, c.TypeOID); t >= 0 {
			score += 2*(len(types)-t) + 5
		}
		if score > bestScore {
			best, bestScore = i, score
		}
	}
	return best
}

// typeName gives a type's name where it is one that outboxes are made of.
func typeName(oid uint32) string {
	switch oid {
	case 16:
		return "boolean"
	case oidBytea:
		return "bytea"
	case oidInt8:
		return "bigint"
	case oidInt2:
		return "smallint"
	case oidInt4:
		return "integer"
	case oidText:
		return "text"
	case oidJSON:
		return "json"
	case 1042:
		return "char"
	case oidVarchar:
		return "varchar"
	case oidTimestamp:
		return "timestamp"
	case oidTimestamptz:
		return "timestamptz"
	case 1700:
		return "numeric"
	case oidUUID:
		return "uuid"
	case oidJSONB:
		return "jsonb"
	}
	return "(type OID " + strconv.FormatUint(uint64(oid), 10) + ")"
}

// yamlString gives s as a YAML scalar, in quotes unless it is plainly a word.
func yamlString(s string) string {
	plain := regexp.MustCompile(`^[a-z_][a-z0-9_.]*$`).MatchString(s)
	if plain && !slices.Contains([]string{"null", "true", "false", "yes", "no", "on", "off", "y", "n"}, s) {
		return s
	}
	return strconv.Quote(s)
}

package router

import (
	"bytes"
	"encoding/hex"
	"fmt"
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
	// Prefix is that of logical messages that are events, instead of a table.
	Prefix string
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
	source eventSource
	fields fieldColumns
	topic  *rowTemplate
	// topicWithoutAggregate is the topic of rows without an aggregate type, where that is
	// for each row to say; else nil.
	topicWithoutAggregate *rowTemplate
	// key is nil without a template; keyColumns are then tried in order, and also
	// where the template gives no text.
	key         *rowTemplate
	keyColumns  []int
	payload     int
	payloadForm payloadForm
	nullPayload string
	headers     []headerColumn

	object *objectColumns // of an open source, else nil

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

// appendEvent makes row, a row of the plan's source, the event ev.
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
	if len(row) != len(p.source.columns) {
		return &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
			"the row has %d values and %s %d columns; report this as a bug, with the table's definition",
			len(row), p.source.label, len(p.source.columns))}
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
	topic := p.topic
	if p.topicWithoutAggregate != nil && row[p.fields[fieldAggregateType]].Kind != replication.ValueText {
		topic = p.topicWithoutAggregate
	}
	buf, empty := topic.appendTo(s.buf, row)
	// The name is a string of its own: its place in the buffer is free again.
	s.buf = buf[:start]
	name := buf[start:]
	if empty != "" {
		return &RouteError{Reason: ReasonRoute, Detail: fmt.Sprintf(
			"field {%s} of the topic %q is NULL or empty; fill the column, or give the template a default as in {%s|default:other}",
			empty, topic.source, empty)}
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

func (p *outboxPlan) columnName(i int) string { return p.source.columns[i].name }

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

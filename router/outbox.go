package router

import (
	"fmt"
	"strings"

	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
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

// The values of OutboxOptions.Format and .CloudEvents.
const (
	FormatPayload         = "payload"
	FormatEnvelope        = "envelope"
	FormatCloudEvents     = "cloudevents"
	CloudEventsStructured = "structured"
	CloudEventsBinary     = "binary"
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
	// Partition is the column that holds the partition's number; empty, or NULL in a row:
	// murmur2 of the key.
	Partition string
	// Format is FormatPayload (also when empty), FormatEnvelope or FormatCloudEvents.
	Format string
	// CloudEvents is CloudEventsStructured (also when empty) or CloudEventsBinary.
	CloudEvents string
	// Headers are further columns that become headers, of their own name or, as in
	// "type:eventType", of another.
	Headers []string
	// HeadersFrom is a column with a JSON object whose members become headers.
	HeadersFrom string
	// Envelope are columns that stand beside the payload in the value.
	Envelope []string
	// JSONStrings writes keys and payloads as JSON values, text in quotes.
	JSONStrings bool
	// Route chooses the topic instead of Topic, unless it is zero.
	Route RouteOptions
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
	Partition int64 // -1: by key
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
	// configured is OutboxOptions.Columns.
	configured map[string]string
	topic      *rowTemplate
	// topicWithoutAggregate is the topic of rows without an aggregate type, where that is
	// for each row to say; else nil.
	topicWithoutAggregate *rowTemplate
	// key is nil without a template; keyColumns are then tried in order, and also
	// where the template gives no text.
	key         *rowTemplate
	keyColumns  []int
	route       *topicRoute // instead of topic, else nil
	partition   int         // its column, or -1
	payload     int
	value       valueForm
	envelope    []member // of the value, beside the payload
	jsonStrings bool
	nullPayload string
	headers     []headerColumn
	headersFrom int               // its column, or -1
	names       map[string]string // of headers from rows
	cloud       cloudEvents
	sequence    *seqWatch // nil where there is none

	object *objectColumns // of an open source, else nil

	env    outboxEnv
	topics map[string]topicEntry
	last   topicEntry
}

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
	*ev = event{Partition: -1}
	if err := p.checkRow(row); err != nil {
		return err
	}
	keyErr := p.appendKey(ev, s, row)
	if row[p.fields[fieldID]].Kind != replication.ValueText {
		remedy := "make the column NOT NULL"
		if p.source.open() {
			remedy = "write it"
		}
		return &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
			"the event id, %s, is NULL: consumers could not tell a repeat from a new event; %s", p.place(p.fields[fieldID]), remedy)}
	}
	if keyErr != nil {
		return keyErr
	}
	if err := p.appendTopic(ev, s, row); err != nil {
		return err
	}
	if err := p.choosePartition(ev, row); err != nil {
		return err
	}
	if err := p.appendValue(ev, s, row); err != nil {
		return err
	}
	return p.appendHeaders(ev, s, row)
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
func (p *outboxPlan) appendKey(ev *event, s *scratch, row replication.Tuple) error {
	start := len(s.buf)
	if p.key != nil {
		s.buf, _ = p.key.appendTo(s.buf, row)
		if len(s.buf) > start {
			ev.Key = s.since(start)
			return p.quoteKey(ev, s, format.AppendString)
		}
	}
	for _, c := range p.keyColumns {
		if row[c].Kind == replication.ValueText {
			s.buf = append(s.buf, row[c].Text...)
			ev.Key = s.since(start)
			return p.quoteKey(ev, s, p.source.columns[c].json)
		}
	}
	return nil
}

// quoteKey makes ev.Key JSON where that is asked for. A key that cannot be stays as it
// is, for the dead letter.
func (p *outboxPlan) quoteKey(ev *event, s *scratch, json format.Append) error {
	if !p.jsonStrings {
		return nil
	}
	start := len(s.buf)
	var err error
	if s.buf, err = json(s.buf, ev.Key); err != nil {
		return &RouteError{Reason: ReasonEncode, Detail: fmt.Sprintf("the key as JSON: %v", err)}
	}
	ev.Key = s.since(start)
	return nil
}

// choosePartition sets ev.Partition. Whether the topic has it is not known here.
func (p *outboxPlan) choosePartition(ev *event, row replication.Tuple) error {
	if p.partition < 0 || row[p.partition].Kind != replication.ValueText {
		return nil
	}
	n, ok := parseInteger(row[p.partition].Text)
	if !ok || n < 0 {
		return &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
			"%s holds no partition's number but %s; write a number from 0 on, or NULL for the key's partition",
			p.place(p.partition), quoteCut(string(row[p.partition].Text)))}
	}
	ev.Partition = n
	return nil
}

// appendTopic sets ev.Topic. A name seen before costs a comparison or a look-up and
// no allocation.
func (p *outboxPlan) appendTopic(ev *event, s *scratch, row replication.Tuple) error {
	if p.route != nil {
		e := p.route.topicOf(p, row)
		ev.Topic = e.name
		return e.err
	}
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
		ev.Topic = topicBeginning(string(name))
		return p.checkTopic(string(name), topic.source)
	}
	if p.last.name != string(name) {
		p.last = p.lookUpTopic(name, topic.source)
	}
	ev.Topic = p.last.name
	return p.last.err
}

// fixedTopic is the topic of all events; empty where it depends on the row.
func (p *outboxPlan) fixedTopic() string {
	if p.route != nil || p.topicWithoutAggregate != nil {
		return ""
	}
	name := ""
	for _, part := range p.topic.parts {
		if part.column >= 0 {
			return ""
		}
		name += part.literal
	}
	return name
}

// lookUpTopic gives the entry of the topic name, checked when it is new.
func (p *outboxPlan) lookUpTopic(name []byte, source string) topicEntry {
	if e, ok := p.topics[string(name)]; ok {
		return e
	}
	e := topicEntry{name: string(name)}
	e.err = p.checkTopic(e.name, source)
	if len(p.topics) >= maxCachedTopics {
		clear(p.topics)
	}
	p.topics[e.name] = e
	return e
}

// checkTopic gives a *RouteError for a name that is no topic's. source is what made it.
func (p *outboxPlan) checkTopic(name, source string) error {
	err := p.env.validTopic(name)
	if err == nil && len(name) > maxTopicLength {
		err = fmt.Errorf("it has %d bytes, and Kafka takes %d", len(name), maxTopicLength)
	}
	if err == nil {
		return nil
	}
	maker := "topic template"
	if p.route != nil {
		maker = "route"
	}
	return &RouteError{Reason: ReasonRoute, Detail: fmt.Sprintf(
		"topic name %s from %q: %s; correct the row's column, or the outbox's %s",
		quoteCut(name), source, cutText(err.Error()), maker)}
}

func (p *outboxPlan) columnName(i int) string { return p.source.columns[i].name }

// place names where a value stands, for people: a row's column, or a message's field.
func (p *outboxPlan) place(i int) string {
	switch {
	case !p.source.open():
		return fmt.Sprintf("column %q", p.columnName(i))
	case i < int(outboxFields):
		return fmt.Sprintf("field %q", p.memberName(outboxField(i)))
	}
	return fmt.Sprintf("field %q", strings.TrimPrefix(p.columnName(i), jsonPrefix))
}

// memberName is what a message calls a field.
func (p *outboxPlan) memberName(f outboxField) string {
	if name := p.configured[f.rule().name]; name != "" {
		return name
	}
	return f.rule().columns[0]
}

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

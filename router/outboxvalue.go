package router

import (
	"fmt"
	"slices"
	"strings"

	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// valueForm says what an event's value is made of.
type valueForm uint8

const (
	valueText       valueForm = iota // the payload's text
	valueBytea                       // the bytes that its hexadecimal digits stand for
	valueJSON                        // the payload as JSON, text in quotes (json-strings)
	valueEnvelope                    // an object with the fields of the event
	valueWrapped                     // an object with the payload and further columns
	valueStructured                  // a CloudEvent
)

// member is a member of an object: its name with quotes, colon and the comma before, and
// the column that it has, or -1 for null.
type member struct {
	head   string
	column int
}

// compileValue sets what appendValue works by.
func (p *outboxPlan) compileValue(o *OutboxOptions) error {
	p.payload = p.fields[fieldPayload]
	p.jsonStrings = o.JSONStrings
	switch {
	case o.Format == FormatEnvelope:
		p.value = valueEnvelope
		p.envelope = p.envelopeMembers()
	case o.Format == FormatCloudEvents:
		p.compileCloudEvents(o)
	case len(o.Envelope) > 0:
		p.value = valueWrapped
		p.envelope = []member{{head: `{"payload":`, column: p.payload}}
	case o.JSONStrings:
		p.value = valueJSON
	case p.source.columns[p.payload].typeOID == oidBytea:
		p.value = valueBytea
	}
	for _, entry := range o.Envelope {
		_, exact := columnsByName(&p.source)[entry]
		name, key := entry, entry
		if before, after, renamed := strings.Cut(entry, ":"); !exact && renamed {
			name, key = before, after
		}
		c, ok := p.source.jsonIndex(name)
		if !ok {
			return fmt.Errorf("envelope: the table has no column %q; there are %s", name, strings.Join(p.source.names(), ", "))
		}
		m := member{head: "," + string(format.QuoteName(key)), column: c}
		if slices.ContainsFunc(p.envelope, func(other member) bool { return strings.TrimLeft(other.head, "{,") == m.head[1:] }) {
			return fmt.Errorf("envelope: the value has a member %q already; write %s:NAME for one of another name, or leave it out", key, name)
		}
		p.envelope = append(p.envelope, m)
	}
	return nil
}

// envelopeMembers are the event envelope's, in its order.
func (p *outboxPlan) envelopeMembers() []member {
	return []member{
		{`{"event_id":`, p.fields[fieldID]},
		{`,"type":`, p.fields[fieldType]},
		{`,"version":`, p.fields[fieldSchemaVersion]},
		{`,"occurred_at":`, p.fields[fieldOccurred]},
		{`,"producer":`, p.fields[fieldProducer]},
		{`,"aggregate_type":`, p.fields[fieldAggregateType]},
		{`,"aggregate_id":`, p.fields[fieldAggregateID]},
		{`,"aggregate_seq":`, p.fields[fieldSeq]},
		{`,"partition_key":`, p.fields[fieldPartitionKey]},
		{`,"correlation_id":`, p.fields[fieldCorrelationID]},
		{`,"causation_id":`, p.fields[fieldCausationID]},
		{`,"payload":`, p.payload},
	}
}

// appendValue sets ev.Value and ev.NullValue. A payload that is NULL makes the whole
// value null, whatever stands beside it, where tombstones are wanted.
func (p *outboxPlan) appendValue(ev *event, s *scratch, row replication.Tuple) error {
	v := &row[p.payload]
	if v.Kind == replication.ValueNull && p.nullPayload != NullPayloadNull {
		ev.NullValue = true
		return nil
	}
	start := len(s.buf)
	var err error
	switch {
	case p.value == valueEnvelope || p.value == valueWrapped:
		err = p.appendObject(s, row)
	case p.value == valueStructured:
		err = p.appendCloudEvent(s, row)
	case v.Kind == replication.ValueNull:
		s.buf = append(s.buf, "null"...)
	case p.value == valueJSON:
		err = p.appendPayloadJSON(s, v)
	case p.value == valueBytea:
		s.buf, err = p.appendBytes(s.buf, v.Text)
	default:
		s.buf = append(s.buf, v.Text...)
	}
	if err != nil {
		s.buf = s.buf[:start]
		return err
	}
	ev.Value = s.since(start)
	return nil
}

// appendObject appends the members of envelope.
func (p *outboxPlan) appendObject(s *scratch, row replication.Tuple) error {
	for i := range p.envelope {
		m := &p.envelope[i]
		s.buf = append(s.buf, m.head...)
		var err error
		switch {
		case m.column < 0 || row[m.column].Kind != replication.ValueText:
			s.buf = append(s.buf, "null"...)
		case m.column == p.payload && p.value == valueWrapped && p.jsonStrings:
			err = p.appendPayloadJSON(s, &row[m.column])
		default:
			err = p.appendColumn(s, row, m.column)
		}
		if err != nil {
			return err
		}
	}
	s.buf = append(s.buf, '}')
	return nil
}

// appendPayloadJSON appends a payload as Kafka Connect's JsonConverter does: to that,
// json and jsonb are text.
func (p *outboxPlan) appendPayloadJSON(s *scratch, v *replication.Value) (err error) {
	encode := p.source.columns[p.payload].json
	if oid := p.source.columns[p.payload].typeOID; oid == oidJSON || oid == oidJSONB {
		encode = format.AppendString
	}
	if s.buf, err = encode(s.buf, v.Text); err != nil {
		return p.encodeError(p.payload, err)
	}
	return nil
}

// appendColumn appends a column's value, which is not NULL, as JSON.
func (p *outboxPlan) appendColumn(s *scratch, row replication.Tuple, c int) (err error) {
	if s.buf, err = p.source.columns[c].json(s.buf, row[c].Text); err != nil {
		return p.encodeError(c, err)
	}
	return nil
}

func (p *outboxPlan) encodeError(c int, err error) error {
	return &RouteError{Reason: ReasonEncode, Detail: fmt.Sprintf("%s: %v", p.place(c), err)}
}

// appendBytes appends the bytes of a bytea payload.
func (p *outboxPlan) appendBytes(dst, text []byte) ([]byte, error) {
	dst, err := format.AppendBytea(dst, text)
	if err != nil {
		return dst, &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
			"payload column %q is bytea but its text is not \\x and hexadecimal digits; the connection must have bytea_output = hex",
			p.columnName(p.payload))}
	}
	return dst, nil
}

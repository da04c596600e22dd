package router

import (
	"bytes"
	"fmt"
	"net/url"
	"strings"
	"time"
	"unicode"

	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// cloudEvents is what a plan of CloudEvents 1.0 has beside.
type cloudEvents struct {
	mode        string // CloudEventsStructured or -Binary; empty: these are none
	source      string // where the row names no producer, a URI reference
	contentType string // of the payload
	attributes  []cloudAttribute
}

// cloudAttribute is an attribute that is a column's text.
type cloudAttribute struct {
	name   string
	header string // in binary mode
	member string // in structured mode, with its comma
	column int
	form   timeForm
	role   cloudRole
}

// cloudRole says what a value of the attribute has to be.
type cloudRole uint8

const (
	cloudOptional  cloudRole = iota // left out where it is NULL or empty
	cloudMandatory                  // not empty
	cloudSource                     // a URI reference; NULL or empty: the plan's own
	cloudTime                       // RFC 3339; left out where it is not
)

// cloudContentType is what a structured event's header content-type says.
const cloudContentType = "application/cloudevents+json; charset=UTF-8"

// compileCloudEvents sets cloud. What the specification has no attribute for are
// extensions, whose names have small letters and digits only.
func (p *outboxPlan) compileCloudEvents(o *OutboxOptions) {
	p.cloud.mode = o.CloudEvents
	if p.cloud.mode == "" {
		p.cloud.mode = CloudEventsStructured
	}
	path := strings.Split(p.source.path, "/")
	for i := range path {
		path[i] = url.PathEscape(path[i])
	}
	p.cloud.source = "/" + url.PathEscape(p.env.name) + "/" + strings.Join(path, "%2F")
	payload := p.source.columns[p.payload].typeOID
	switch payload {
	case oidJSON, oidJSONB:
		p.cloud.contentType = "application/json"
	case oidBytea:
		p.cloud.contentType = "application/octet-stream"
	default:
		p.cloud.contentType = "text/plain"
	}
	if p.cloud.mode == CloudEventsStructured {
		p.value = valueStructured
	} else if payload == oidBytea {
		p.value = valueBytea
	}
	for _, a := range []struct {
		name  string
		field outboxField
		role  cloudRole
	}{
		{"id", fieldID, cloudMandatory},
		{"source", fieldProducer, cloudSource},
		{"type", fieldType, cloudMandatory},
		{"subject", fieldAggregateID, cloudOptional},
		{"time", fieldOccurred, cloudTime},
		{"aggregatetype", fieldAggregateType, cloudOptional},
		{"aggregateseq", fieldSeq, cloudOptional},
		{"schemaversion", fieldSchemaVersion, cloudOptional},
		{"partitionkey", fieldPartitionKey, cloudOptional},
		{"correlationid", fieldCorrelationID, cloudOptional},
		{"causationid", fieldCausationID, cloudOptional},
		{"traceparent", fieldTraceparent, cloudOptional},
	} {
		c := p.fields[a.field]
		if c < 0 && a.role != cloudSource {
			continue
		}
		p.cloud.attributes = append(p.cloud.attributes, cloudAttribute{
			name: a.name, header: "ce_" + a.name, member: `,"` + a.name + `":`, column: c, form: p.timeForm(a.field), role: a.role,
		})
	}
}

// appendAttribute appends the text of an attribute; nothing where the event has none.
func (p *outboxPlan) appendAttribute(dst []byte, a *cloudAttribute, row replication.Tuple) ([]byte, error) {
	var text []byte
	if a.column >= 0 {
		text = row[a.column].Text
	}
	start := len(dst)
	switch {
	case len(text) == 0 && a.role == cloudMandatory:
		return dst, &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
			"%s is NULL or empty, and a CloudEvent has to have the attribute %s; fill it", p.place(a.column), a.name)}
	case a.role == cloudSource && len(text) == 0:
		return append(dst, p.cloud.source...), nil
	case a.role == cloudSource:
		return appendURI(dst, text), nil
	case a.role == cloudTime:
		dst = appendTimeForm(dst, text, a.form)
		if !isRFC3339(dst[start:]) {
			dst = dst[:start]
		}
		return dst, nil
	}
	if bytes.ContainsFunc(text, unicode.IsControl) {
		return dst, &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
			"%s has a control character, which the attribute %s of a CloudEvent must not have; clean it", p.place(a.column), a.name)}
	}
	return append(dst, text...), nil
}

// appendCloudEvent appends an event in structured mode.
func (p *outboxPlan) appendCloudEvent(s *scratch, row replication.Tuple) error {
	s.buf = append(s.buf, `{"specversion":"1.0"`...)
	for i := range p.cloud.attributes {
		a := &p.cloud.attributes[i]
		head := len(s.buf)
		s.buf = append(s.buf, a.member...)
		start := len(s.buf)
		var err error
		if s.buf, err = p.appendAttribute(s.buf, a, row); err != nil {
			return err
		}
		end := len(s.buf)
		if end == start {
			s.buf = s.buf[:head]
			continue
		}
		// The string is written behind the text and moved over it.
		if s.buf, err = format.AppendString(s.buf, s.buf[start:end]); err != nil {
			return p.encodeError(max(a.column, 0), err)
		}
		s.buf = append(s.buf[:start], s.buf[end:]...)
	}
	s.buf = append(s.buf, `,"datacontenttype":"`...)
	s.buf = append(s.buf, p.contentType(row)...)
	bytea := p.source.columns[p.payload].typeOID == oidBytea
	var err error
	switch v := &row[p.payload]; {
	case v.Kind != replication.ValueText:
		s.buf = append(s.buf, `","data":null`...)
	case bytea:
		s.buf = append(s.buf, `","data_base64":`...)
		err = p.appendColumn(s, row, p.payload)
	default:
		s.buf = append(s.buf, `","data":`...)
		err = p.appendColumn(s, row, p.payload)
	}
	s.buf = append(s.buf, '}')
	return err
}

// contentType is that of the row's payload.
func (p *outboxPlan) contentType(row replication.Tuple) string {
	if row[p.payload].Kind != replication.ValueText {
		return "application/json" // which null is
	}
	return p.cloud.contentType
}

// appendCloudHeaders appends the headers of Kafka's protocol binding.
func (p *outboxPlan) appendCloudHeaders(ev *event, s *scratch, row replication.Tuple) error {
	constant := func(key, value string) {
		start := len(s.buf)
		s.buf = append(s.buf, value...)
		s.headers = append(s.headers, Header{Key: key, Value: s.since(start)})
	}
	switch p.cloud.mode {
	case "":
	case CloudEventsStructured:
		if !ev.NullValue {
			constant("content-type", cloudContentType)
		}
	default:
		constant("ce_specversion", "1.0")
		for i := range p.cloud.attributes {
			a := &p.cloud.attributes[i]
			start := len(s.buf)
			var err error
			if s.buf, err = p.appendAttribute(s.buf, a, row); err != nil {
				return err
			}
			if len(s.buf) > start {
				s.headers = append(s.headers, Header{Key: a.header, Value: s.since(start)})
			}
		}
		if !ev.NullValue {
			constant("content-type", p.contentType(row))
		}
	}
	return nil
}

// appendURI appends text as a URI reference: what no URI has becomes its percent code.
func appendURI(dst, text []byte) []byte {
	const digits = "0123456789ABCDEF"
	for i, c := range text {
		switch {
		case c == '%' && !(i+2 < len(text) && isHex(text[i+1]) && isHex(text[i+2])):
			dst = append(dst, "%25"...)
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', strings.IndexByte("-._~:/?#[]@!$&'()*+,;=%", c) >= 0:
			dst = append(dst, c)
		default:
			dst = append(dst, '%', digits[c>>4], digits[c&15])
		}
	}
	return dst
}

func isHex(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

// isRFC3339 tells whether text is a time with its zone. infinity, years
// beyond 9999, and times without a zone have not.
func isRFC3339(text []byte) bool {
	const form = "0000-00-00T00:00:00"
	if len(text) <= len(form) {
		return false
	}
	for i := range form {
		if form[i] == '0' && (text[i] < '0' || text[i] > '9') || form[i] != '0' && text[i] != form[i] {
			return false
		}
	}
	two := func(at int) int { return int(text[at]-'0')*10 + int(text[at+1]-'0') }
	year, month, day := two(0)*100+two(2), two(5), two(8)
	if month < 1 || month > 12 || day < 1 || day > time.Date(year, time.Month(month)+1, 0, 0, 0, 0, 0, time.UTC).Day() || two(11) > 23 || two(14) > 59 || two(17) > 59 {
		return false
	}
	zone := text[len(form):]
	if zone[0] == '.' {
		n := 1
		for n < len(zone) && zone[n] >= '0' && zone[n] <= '9' {
			n++
		}
		if n == 1 {
			return false
		}
		zone = zone[n:]
	}
	if string(zone) == "Z" {
		return true
	}
	if len(zone) != len("+00:00") || zone[0] != '+' && zone[0] != '-' || zone[3] != ':' {
		return false
	}
	for _, at := range [...]int{1, 2, 4, 5} {
		if zone[at] < '0' || zone[at] > '9' {
			return false
		}
	}
	return (zone[1] < '2' || zone[1] == '2' && zone[2] <= '3') && zone[4] <= '5'
}

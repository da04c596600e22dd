package router

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/walrelay/walrelay/replication"
)

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

// compileHeaders sets headers: the fields' in their fixed order, then the
// configured columns'.
func (p *outboxPlan) compileHeaders(o *OutboxOptions) error {
	used := map[string]int{"position": -1, "replay": -1} // every record has these of its own
	for f := range outboxFields {
		if key, c := f.rule().header, p.fields[f]; key != "" && c >= 0 {
			p.headers = append(p.headers, headerColumn{key: key, column: c, form: p.timeForm(f)})
			used[key] = c
		}
	}
	for _, entry := range o.Headers {
		// A column may have a colon in its name.
		name, key := entry, entry
		_, exact := columnsByName(&p.source)[name]
		if before, after, renamed := strings.Cut(entry, ":"); !exact && renamed {
			name, key = before, after
		}
		c, ok := p.source.index(name)
		if !ok {
			return fmt.Errorf("headers: the table has no column %q; there are %s", name, strings.Join(p.source.names(), ", "))
		}
		if other, ok := used[key]; ok {
			if other == c {
				continue // the same header, already there
			}
			return fmt.Errorf("headers: column %q would make a second header %q with another meaning; write %s:NAME for a header of another name, or leave it out", name, key, name)
		}
		p.headers = append(p.headers, headerColumn{key: key, column: c})
		used[key] = c
	}
	p.headersFrom = -1
	if o.HeadersFrom == "" {
		return nil
	}
	c, ok := p.source.index(o.HeadersFrom)
	if !ok {
		return fmt.Errorf("headers-from: the table has no column %q; there are %s", o.HeadersFrom, strings.Join(p.source.names(), ", "))
	}
	if slices.Contains([]uint32{oidBytea, oidInt2, oidInt4, oidInt8, oidTimestamp, oidTimestamptz, oidUUID}, p.source.columns[c].typeOID) {
		return fmt.Errorf("headers-from: column %q is a %s, and no JSON object; name a jsonb column", o.HeadersFrom, typeName(p.source.columns[c].typeOID))
	}
	p.headersFrom, p.names = c, map[string]string{}
	return nil
}

// timeForm says how the text of a field differs from PostgreSQL's.
func (p *outboxPlan) timeForm(f outboxField) timeForm {
	if f == fieldOccurred && p.fields[f] >= 0 {
		switch p.source.columns[p.fields[f]].typeOID {
		case oidTimestamp:
			return formTimestamp
		case oidTimestamptz:
			return formTimestamptz
		}
	}
	return formText
}

// appendHeaders sets ev.Headers to those of the columns that are not NULL, and of the
// object of headers-from.
func (p *outboxPlan) appendHeaders(ev *event, s *scratch, row replication.Tuple) error {
	first := len(s.headers)
	for i := range p.headers {
		h := &p.headers[i]
		v := &row[h.column]
		if v.Kind != replication.ValueText {
			continue
		}
		start := len(s.buf)
		s.buf = appendTimeForm(s.buf, v.Text, h.form)
		s.headers = append(s.headers, Header{Key: h.key, Value: s.since(start)})
	}
	err := p.appendCloudHeaders(ev, s, row)
	if err == nil && p.headersFrom >= 0 && row[p.headersFrom].Kind == replication.ValueText {
		err = p.appendObjectHeaders(s, first, row[p.headersFrom].Text)
	}
	if err != nil {
		s.headers = s.headers[:first]
		return err
	}
	ev.Headers = s.headers[first:len(s.headers):len(s.headers)]
	return nil
}

// errHeaderName is a member whose name no header should have.
var errHeaderName = errors.New("a header's name is empty or not UTF-8")

// appendObjectHeaders makes a header of each member of an object: a string's text, the
// JSON of anything else, and nothing of null. A name that the record has already, from
// first on, or that all records have, is not made again: consumers take one or the other,
// and the column's is the one that is meant.
func (p *outboxPlan) appendObjectHeaders(s *scratch, first int, object []byte) error {
	m, ok := openObject(object)
	if !ok {
		return &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf(
			"%s, whose members become headers, holds no JSON object; write one, or NULL", p.place(p.headersFrom))}
	}
	columns := len(s.headers)
	for m.next() {
		start := len(s.buf)
		s.buf = appendJSONText(s.buf, m.name)
		name := s.buf[start:]
		s.buf = s.buf[:start]
		taken := m.isNull() || string(name) == "position" || string(name) == "replay"
		for i := first; i < columns && !taken; i++ {
			taken = s.headers[i].Key == string(name)
		}
		if taken {
			continue
		}
		key, err := p.headerName(name)
		if err != nil {
			return &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf("%s: %v", p.place(p.headersFrom), err)}
		}
		s.buf = appendJSONText(s.buf, m.value)
		s.headers = append(s.headers, Header{Key: key, Value: s.since(start)})
	}
	return nil
}

// headerName gives a name as a string that is made once. Their number is bounded as that
// of topics is.
func (p *outboxPlan) headerName(name []byte) (string, error) {
	if known, ok := p.names[string(name)]; ok {
		return known, nil
	}
	if len(name) == 0 || !bytes.Equal(bytes.ToValidUTF8(name, nil), name) {
		return "", errHeaderName
	}
	made := string(name)
	if len(p.names) >= maxCachedTopics {
		clear(p.names)
	}
	if len(made) <= maxTopicLength {
		p.names[made] = made
	}
	return made, nil
}

// appendTimeForm appends text in its form.
func appendTimeForm(dst, text []byte, form timeForm) []byte {
	if form == formText {
		return append(dst, text...)
	}
	return appendPlainTime(dst, text, form)
}

// appendPlainTime appends PostgreSQL's ISO text of a timestamp as the plain form of
// the records: T between date and time and, of a timestamptz in UTC, Z. infinity
// and years BC stay as PostgreSQL prints them.
func appendPlainTime(dst, text []byte, form timeForm) []byte {
	if ad, ok := bytes.CutSuffix(text, []byte(" BC")); ok {
		return append(appendPlainTime(dst, ad, form), " BC"...)
	}
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

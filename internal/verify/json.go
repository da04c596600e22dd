package verify

import "bytes"

// The few looks at JSON that a comparison needs, without a value being decoded: records
// hold each column's bytes exactly as a row read from the table is encoded.

// skipSpace gives the index of the next byte that is no blank.
func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// skipString gives the index behind the string that begins at i; -1 where it does not end.
func skipString(b []byte, i int) int {
	for i++; i < len(b); {
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 {
			return -1
		}
		end := i + n
		escapes := 0
		for k := end - 1; k >= i && b[k] == '\\'; k-- {
			escapes++
		}
		i = end + 1
		if escapes%2 == 0 {
			return i
		}
	}
	return -1
}

// skipValue gives the index behind the value that begins at i; -1 where there is none. It
// looks at brackets and strings only.
func skipValue(b []byte, i int) int {
	if i >= len(b) {
		return -1
	}
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
		depth := 0
		for i < len(b) {
			switch b[i] {
			case '"':
				if i = skipString(b, i); i < 0 {
					return -1
				}
				continue
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			}
			i++
		}
		return -1
	}
	start := i
	for i < len(b) && b[i] != ',' && b[i] != '}' && b[i] != ']' && b[i] != ' ' && b[i] != '\n' && b[i] != '\t' && b[i] != '\r' {
		i++
	}
	if i == start {
		return -1
	}
	return i
}

// members walks over the members of a JSON object.
type members struct {
	b   []byte
	at  int // of the next member's name
	bad bool
}

// object begins a walk. What is no object has no members, and bad is set.
func object(b []byte) members {
	m := members{b: b, at: skipSpace(b, 0)}
	if m.at >= len(b) || b[m.at] != '{' {
		m.bad = true
		return m
	}
	m.at = skipSpace(b, m.at+1)
	if m.at < len(b) && b[m.at] == '}' {
		m.finish()
	}
	return m
}

func (m *members) finish() {
	m.bad = skipSpace(m.b, m.at+1) != len(m.b)
	m.at = -1
}

// next gives the next member: its name as it stands, in quotes, and its value's bytes.
// False at the end, and where the object is malformed: then bad is set.
func (m *members) next() (name, value []byte, ok bool) {
	if m.bad || m.at < 0 {
		return nil, nil, false
	}
	b, i := m.b, m.at
	m.bad = true
	if i >= len(b) || b[i] != '"' {
		return nil, nil, false
	}
	end := skipString(b, i)
	if end < 0 {
		return nil, nil, false
	}
	name = b[i:end]
	i = skipSpace(b, end)
	if i >= len(b) || b[i] != ':' {
		return nil, nil, false
	}
	i = skipSpace(b, i+1)
	if end = skipValue(b, i); end < 0 {
		return nil, nil, false
	}
	value = b[i:end]
	i = skipSpace(b, end)
	switch {
	case i < len(b) && b[i] == ',':
		m.at, m.bad = skipSpace(b, i+1), false
	case i < len(b) && b[i] == '}':
		m.at = i
		m.finish()
		if m.bad {
			return nil, nil, false
		}
	default:
		return nil, nil, false
	}
	return name, value, true
}

// member gives the value of one member; nil where there is none.
func member(b []byte, name string) []byte {
	m := object(b)
	for n, v, ok := m.next(); ok; n, v, ok = m.next() {
		if string(n) == name {
			return v
		}
	}
	return nil
}

var null = []byte("null")

func isNull(v []byte) bool { return len(v) == 0 || bytes.Equal(v, null) }

package router

import (
	"bytes"
	"encoding/json"
	"unicode/utf16"
	"unicode/utf8"
)

// objectMembers walks over the members of one JSON object without decoding or copying
// them: what stands in an event goes out as the bytes that it came as.
//
//	m, ok := openObject(text)
//	for m.next() { use m.name, m.value }
type objectMembers struct {
	rest []byte
	// name is the member's name as it stands, in quotes; value its JSON. Both point into
	// the text.
	name, value []byte
}

// openObject begins the walk; false where text is no JSON object.
func openObject(text []byte) (objectMembers, bool) {
	text = trimJSON(text)
	if len(text) == 0 || text[0] != '{' || !json.Valid(text) {
		return objectMembers{}, false
	}
	return objectMembers{rest: text[1 : len(text)-1]}, true
}

// whyNoObject tells why openObject does not take text.
func whyNoObject(text []byte) string {
	var whole json.RawMessage
	if err := json.Unmarshal(text, &whole); err != nil {
		return err.Error()
	}
	switch trimJSON(text)[0] {
	case '[':
		return "it is an array"
	case '"':
		return "it is a string"
	}
	return "it is " + cutText(string(trimJSON(text)))
}

// hasHalfSurrogate tells that a JSON string has half of a surrogate pair, which stands for
// nothing. Of other values their JSON counts, in which it stays what it is.
func hasHalfSurrogate(value []byte) bool {
	if value[0] != '"' {
		return false
	}
	for {
		i := bytes.IndexByte(value, '\\')
		if i < 0 {
			return false
		}
		value = value[i:]
		if value[1] != 'u' {
			value = value[2:]
			continue
		}
		r := hexRune(value[2:6])
		value = value[6:]
		if !utf16.IsSurrogate(r) {
			continue
		}
		if len(value) < 6 || value[0] != '\\' || value[1] != 'u' || utf16.DecodeRune(r, hexRune(value[2:6])) == utf8.RuneError {
			return true
		}
		value = value[6:]
	}
}

// next moves on to the next member.
func (m *objectMembers) next() bool {
	rest := trimJSON(m.rest)
	if len(rest) == 0 {
		return false
	}
	if rest[0] == ',' {
		rest = trimJSON(rest[1:])
	}
	n := jsonLength(rest)
	m.name, rest = rest[:n], trimJSON(rest[n:])
	rest = trimJSON(rest[1:]) // the colon
	n = jsonLength(rest)
	m.value, m.rest = rest[:n:n], rest[n:]
	return true
}

// isNull tells that the member is null.
func (m *objectMembers) isNull() bool { return m.value[0] == 'n' }

// trimJSON removes the blanks that JSON allows between its tokens.
func trimJSON(text []byte) []byte { return bytes.Trim(text, " \t\r\n") }

// jsonLength is the length of the JSON value that text, which is valid, begins with.
func jsonLength(text []byte) int {
	switch text[0] {
	case '"':
		return stringLength(text)
	case '{', '[':
	default:
		if n := bytes.IndexAny(text, ",}] \t\r\n"); n >= 0 {
			return n
		}
		return len(text)
	}
	depth := 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"':
			i += stringLength(text[i:]) - 1
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return len(text)
}

// stringLength is the length of the JSON string that text begins with, its quotes
// included.
func stringLength(text []byte) int {
	for i := 1; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(text)
}

// appendJSONText appends a JSON value as text: what a string says, and the JSON itself
// of any other value. Halves of surrogate pairs, which stand for nothing, become U+FFFD.
func appendJSONText(dst, value []byte) []byte {
	if len(value) < 2 || value[0] != '"' {
		return append(dst, value...)
	}
	text := value[1 : len(value)-1]
	for {
		i := bytes.IndexByte(text, '\\')
		if i < 0 {
			return append(dst, text...)
		}
		dst = append(dst, text[:i]...)
		var n int
		dst, n = appendEscaped(dst, text[i:])
		text = text[i+n:]
	}
}

// appendEscaped appends the character of the escape that text begins with, and gives
// the escape's length.
func appendEscaped(dst, text []byte) (out []byte, n int) {
	switch c := text[1]; c {
	case 'b':
		return append(dst, '\b'), 2
	case 'f':
		return append(dst, '\f'), 2
	case 'n':
		return append(dst, '\n'), 2
	case 'r':
		return append(dst, '\r'), 2
	case 't':
		return append(dst, '\t'), 2
	case 'u':
		r := hexRune(text[2:6])
		if !utf16.IsSurrogate(r) {
			return utf8.AppendRune(dst, r), 6
		}
		if len(text) >= 12 && text[6] == '\\' && text[7] == 'u' {
			if pair := utf16.DecodeRune(r, hexRune(text[8:12])); pair != utf8.RuneError {
				return utf8.AppendRune(dst, pair), 12
			}
		}
		return utf8.AppendRune(dst, utf8.RuneError), 6
	default: // " \ /
		return append(dst, c), 2
	}
}

// hexRune reads four hexadecimal digits.
func hexRune(digits []byte) (r rune) {
	for _, c := range digits {
		switch {
		case c >= 'a':
			c -= 'a' - 10
		case c >= 'A':
			c -= 'A' - 10
		default:
			c -= '0'
		}
		r = r<<4 | rune(c)
	}
	return r
}

package format

import (
	"bytes"
	"encoding/hex"
	"slices"
	"unicode/utf8"
)

// Append appends the JSON of one value to dst. Text is PostgreSQL's text of the value
// (a NULL has none and is the caller's to write), is not kept and not changed. On an
// error, which is a *ValueError, dst comes back with the length that it had.
type Append func(dst, text []byte) ([]byte, error)

// maxScratch is how much memory for unquoting an Encoder keeps between values, in
// bytes. Values that need more are rare, and one of a gigabyte must not hold on to it.
const maxScratch = 1 << 20

// Encoder makes Appends and owns the memory that they share. The Encoder and all
// Appends made by it belong to one goroutine. The zero Encoder is ready for use.
type Encoder struct {
	// scratch is a stack: a quoted element is unquoted onto its end and taken off when
	// the element is encoded, and so on for what is quoted within it. It may move when
	// it grows; slices into the old memory stay good, as nothing else writes there.
	scratch []byte
	// limbs holds a long number while it is converted, nested the JSON that goes into a
	// JSON string. Both are for one value.
	limbs  []uint64
	nested []byte
}

// release takes everything above mark off the scratch stack.
func (e *Encoder) release(mark int) {
	e.scratch = e.scratch[:mark]
	if mark == 0 && cap(e.scratch) > maxScratch {
		e.scratch = nil
	}
}

// Plain returns the encoding of t under `types: plain`. A nil t, like every type that
// has no form of its own, gives PostgreSQL's text as a JSON string. Making an Append
// allocates; it is meant to be kept with the column.
func (e *Encoder) Plain(t *Type) Append {
	t = t.Underlying()
	if t == nil {
		return textAppend(nil)
	}
	switch t.Kind {
	case KindBase:
		return e.base(t)
	case KindArray:
		return e.array(t)
	case KindComposite:
		return e.composite(t)
	case KindHstore:
		return e.hstore(t)
	}
	// Enums, ranges and multiranges are PostgreSQL's text. So is what is unknown: the
	// text is at least the truth, while a guess could be wrong.
	return textAppend(t)
}

// base returns the encoding of a type that is not made of others.
func (e *Encoder) base(t *Type) Append {
	switch t.OID {
	case oidInt2, oidInt4, oidInt8:
		return func(dst, text []byte) ([]byte, error) {
			if !isInteger(text) {
				return dst, malformed(t, reasonInteger)
			}
			return append(dst, text...), nil
		}
	case oidFloat4, oidFloat8:
		return func(dst, text []byte) ([]byte, error) { return appendFloat(dst, text, t) }
	case oidBool:
		return func(dst, text []byte) ([]byte, error) { return appendBool(dst, text, t) }
	case oidBytea:
		return func(dst, text []byte) ([]byte, error) { return e.appendBytea(dst, text, t) }
	case oidDate:
		return func(dst, text []byte) ([]byte, error) { return appendDate(dst, text, t) }
	case oidTimestamp:
		return func(dst, text []byte) ([]byte, error) { return appendTimestamp(dst, text, t) }
	case oidTimestamptz:
		return func(dst, text []byte) ([]byte, error) { return appendTimestamptz(dst, text, t) }
	case oidJSON, oidJSONB:
		return func(dst, text []byte) ([]byte, error) { return appendJSON(dst, text, t) }
	}
	return textAppend(t)
}

// textAppend encodes a value as its text. Numeric and money are among these: as JSON
// numbers they would lose digits in nearly every reader.
func textAppend(t *Type) Append {
	return func(dst, text []byte) ([]byte, error) {
		dst, err := AppendString(dst, text)
		if err != nil {
			return dst, invalid(t, err)
		}
		return dst, nil
	}
}

func appendBool(dst, text []byte, t *Type) ([]byte, error) {
	if len(text) == 1 {
		switch text[0] {
		case 't':
			return append(dst, "true"...), nil
		case 'f':
			return append(dst, "false"...), nil
		}
	}
	return dst, malformed(t, reasonBool)
}

// appendFloat copies the digits. PostgreSQL prints the shortest ones that give the
// same value again, in a form that JSON allows, `-0` and `1e+22` included; what JSON
// has no number for becomes a string.
func appendFloat(dst, text []byte, t *Type) ([]byte, error) {
	if isNumber(text) {
		return append(dst, text...), nil
	}
	switch string(text) {
	case "NaN", "Infinity", "-Infinity":
		return appendQuoted(dst, text), nil
	}
	return dst, malformed(t, reasonFloat)
}

// appendJSON embeds the value byte for byte: blanks, order, doubled members and digits
// belong to it.
//
// It is not parsed again. PostgreSQL's json and jsonb input functions have refused
// everything outside the grammar, whose tokens and blanks are RFC 8259's, jsonb is
// printed from a tree, and the server checks the encoding towards a UTF-8 client. What
// is looked at here costs next to nothing and keeps a record whole if a value did not
// come that way.
func appendJSON(dst, text []byte, t *Type) ([]byte, error) {
	if len(bytes.TrimLeft(text, " \t\r\n")) == 0 {
		return dst, malformed(t, reasonJSON)
	}
	if !utf8.Valid(text) {
		return dst, invalid(t, ErrInvalidUTF8)
	}
	return append(dst, text...), nil
}

// AppendBytea appends the bytes that a bytea's text stands for: for outbox payloads,
// which leave as they are. On an error dst comes back as it was.
func AppendBytea(dst, text []byte) ([]byte, error) {
	if len(text) < 2 || text[0] != '\\' || text[1] != 'x' {
		return dst, malformed(Builtin(oidBytea), reasonBytea)
	}
	digits := text[2:]
	n := len(dst)
	dst = slices.Grow(dst, len(digits)/2)
	// hex.Decode's error quotes the value, so that it must not be passed on.
	if _, err := hex.Decode(dst[n:n+len(digits)/2], digits); err != nil {
		return dst, malformed(Builtin(oidBytea), reasonBytea)
	}
	return dst[:n+len(digits)/2], nil
}

func (e *Encoder) appendBytea(dst, text []byte, t *Type) ([]byte, error) {
	mark := len(e.scratch)
	var err error
	e.scratch, err = AppendBytea(e.scratch, text)
	if err == nil {
		dst = AppendBase64(dst, e.scratch[mark:])
	}
	e.release(mark)
	return dst, err
}

// isInteger tells whether s is an integer as JSON writes one.
func isInteger(s []byte) bool {
	if len(s) > 0 && s[0] == '-' {
		s = s[1:]
	}
	n := digits(s)
	return n > 0 && n == len(s) && (s[0] != '0' || n == 1)
}

// isNumber tells whether s is a number of JSON's grammar (RFC 8259, section 6).
func isNumber(s []byte) bool {
	if len(s) > 0 && s[0] == '-' {
		s = s[1:]
	}
	n := digits(s)
	if n == 0 || s[0] == '0' && n > 1 {
		return false
	}
	s = s[n:]
	if len(s) > 0 && s[0] == '.' {
		n = digits(s[1:])
		if n == 0 {
			return false
		}
		s = s[1+n:]
	}
	if len(s) > 0 && (s[0] == 'e' || s[0] == 'E') {
		s = s[1:]
		if len(s) > 0 && (s[0] == '+' || s[0] == '-') {
			s = s[1:]
		}
		n = digits(s)
		return n > 0 && n == len(s)
	}
	return len(s) == 0
}

// digits returns how many decimal digits s begins with.
func digits(s []byte) int {
	for i, c := range s {
		if c < '0' || c > '9' {
			return i
		}
	}
	return len(s)
}

package format

import "bytes"

// maxDimensions is PostgreSQL's MAXDIM. More braces than that are no array, and the
// depth of the JSON stays bounded whatever the text is.
const maxDimensions = 6

// array returns the encoding of an array under `types: plain`.
func (e *Encoder) array(t *Type) Append { return e.arrayOf(t, e.Plain(t.Elem)) }

// arrayOf returns the encoding of an array whose elements elem encodes: a JSON array, one within the other for each
// dimension, with elements by their own type's rule. Lower bounds are not represented.
//
// What array_out prints, and what is relied on here: an optional prefix of bounds
// `[2:3][0:1]=`; braces around every dimension; the element type's delimiter between
// elements and between dimensions; NULL without quotes for nulls; in quotes every
// element that is empty, reads NULL, or holds a brace, the delimiter, a quote, a
// backslash or a blank; within quotes a backslash before each quote and backslash.
// No dimension is empty: an empty array is `{}` whatever it was.
func (e *Encoder) arrayOf(t *Type, elem Append) Append {
	delim := byte(',')
	if t.Elem != nil && t.Elem.Delim != 0 {
		delim = t.Elem.Delim
	}
	return func(dst, text []byte) ([]byte, error) {
		start := len(dst)
		dst, err := e.appendArray(dst, text, t, elem, delim)
		if err != nil {
			return dst[:start], err
		}
		return dst, nil
	}
}

// appendArray goes through text once. At the head of the loop an element or an opening
// brace must follow.
func (e *Encoder) appendArray(dst, text []byte, t *Type, elem Append, delim byte) ([]byte, error) {
	pos := skipBounds(text)
	if string(text[pos:]) == "{}" {
		return append(dst, "[]"...), nil
	}
	for depth := 0; ; {
		for pos < len(text) && text[pos] == '{' {
			dst = append(dst, '[')
			depth++
			pos++
		}
		if depth == 0 || depth > maxDimensions || pos == len(text) {
			return dst, malformed(t, reasonArray)
		}
		var err error
		if dst, pos, err = e.appendElement(dst, text, pos, t, elem, delim); err != nil {
			return dst, err
		}
		for depth > 0 && pos < len(text) && text[pos] == '}' {
			dst = append(dst, ']')
			depth--
			pos++
		}
		switch {
		case depth == 0 && pos == len(text):
			return dst, nil
		case depth == 0 || pos == len(text) || text[pos] != delim:
			return dst, malformed(t, reasonArray)
		}
		dst = append(dst, ',')
		pos++
	}
}

// appendElement appends the element at pos and returns the position behind it.
func (e *Encoder) appendElement(dst, text []byte, pos int, t *Type, elem Append, delim byte) ([]byte, int, error) {
	if text[pos] == '"' {
		mark := len(e.scratch)
		value, next, ok := e.unquote(text, pos, false)
		if !ok {
			return dst, pos, malformed(t, reasonArray)
		}
		dst, err := elem(dst, value)
		e.release(mark)
		return dst, next, err
	}
	end := pos
	for end < len(text) && text[end] != delim && text[end] != '}' {
		end++
	}
	value := text[pos:end]
	switch {
	case len(value) == 0:
		return dst, pos, malformed(t, reasonArray)
	case len(value) == len("NULL") && bytes.EqualFold(value, []byte("NULL")):
		// Any case, as array_in reads it; array_out quotes a text that reads so.
		return append(dst, "null"...), end, nil
	}
	dst, err := elem(dst, value)
	return dst, end, err
}

// skipBounds returns the length of the prefix of bounds that text begins with.
func skipBounds(text []byte) int {
	if len(text) == 0 || text[0] != '[' {
		return 0
	}
	for i, c := range text {
		switch {
		case c == '=':
			return i + 1
		case c != '[' && c != ']' && c != ':' && c != '-' && c != '+' && (c < '0' || c > '9'):
			return 0 // the caller finds no brace and refuses
		}
	}
	return 0
}

// unquote returns what the quoted text at pos, which is a quote, stands for, and the
// position behind its closing quote. A backslash stands before a byte to be taken as
// it is; with doubled, two quotes are one, too. Where nothing is escaped, the value is
// a part of text; else it lies on the scratch stack, to be released by the caller.
func (e *Encoder) unquote(text []byte, pos int, doubled bool) (value []byte, next int, ok bool) {
	pos++
	mark, start := len(e.scratch), pos
	for {
		pos += indexQuote(text[pos:])
		if pos == len(text) {
			e.release(mark)
			return nil, 0, false
		}
		escape := text[pos] == '\\' || doubled && pos+1 < len(text) && text[pos+1] == '"'
		if !escape {
			break
		}
		if pos+1 == len(text) {
			e.release(mark)
			return nil, 0, false
		}
		e.scratch = append(e.scratch, text[start:pos]...)
		e.scratch = append(e.scratch, text[pos+1])
		pos += 2
		start = pos
	}
	if len(e.scratch) == mark {
		return text[start:pos], pos + 1, true
	}
	e.scratch = append(e.scratch, text[start:pos]...)
	return e.scratch[mark:len(e.scratch):len(e.scratch)], pos + 1, true
}

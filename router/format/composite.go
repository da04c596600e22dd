package format

// composite returns the encoding of a row value under `types: plain`.
func (e *Encoder) composite(t *Type) Append {
	fields := make([]Append, len(t.Fields))
	for i, f := range t.Fields {
		fields[i] = e.Plain(f.Type)
	}
	return e.compositeOf(t, fields)
}

// compositeOf returns the encoding of a row value whose fields the given ones encode: a JSON object of its fields, each by
// its own type's rule.
//
// What record_out prints, and what is relied on here: parentheses around the fields,
// commas between them, nothing at all for a null; in quotes every field that is empty
// or holds a parenthesis, comma, quote, backslash or blank; within quotes each quote
// and backslash doubled (record_in reads a backslash before a byte as well).
func (e *Encoder) compositeOf(t *Type, fields []Append) Append {
	names := make([][]byte, len(t.Fields)) // `{"street":`, `,"no":`
	for i, f := range t.Fields {
		names[i] = append([]byte{','}, QuoteName(f.Name)...)
	}
	if len(names) > 0 {
		names[0][0] = '{'
	}
	return func(dst, text []byte) ([]byte, error) {
		start := len(dst)
		dst, err := e.appendComposite(dst, text, t, names, fields)
		if err != nil {
			return dst[:start], err
		}
		return dst, nil
	}
}

// appendComposite goes through text once. At the head of the loop a field begins,
// possibly an empty one, for which a null stands.
func (e *Encoder) appendComposite(dst, text []byte, t *Type, names [][]byte, fields []Append) ([]byte, error) {
	if len(text) < 2 || text[0] != '(' {
		return dst, malformed(t, reasonComposite)
	}
	if len(fields) == 0 { // PostgreSQL does have rows without columns
		if string(text) != "()" {
			return dst, invalid(t, ErrFieldCount)
		}
		return append(dst, "{}"...), nil
	}
	pos := 1
	for i, field := range fields {
		dst = append(dst, names[i]...)
		var err error
		if dst, pos, err = e.appendField(dst, text, pos, t, field); err != nil {
			return dst, err
		}
		last := i == len(fields)-1
		switch {
		case pos == len(text):
			return dst, malformed(t, reasonComposite)
		case text[pos] == ')' && pos+1 < len(text), text[pos] != ')' && text[pos] != ',':
			return dst, malformed(t, reasonComposite)
		case last != (text[pos] == ')'):
			// Nothing is filled in or left out: which field it is that is missing
			// cannot be known.
			return dst, invalid(t, ErrFieldCount)
		}
		pos++
	}
	return append(dst, '}'), nil
}

// appendField appends the field at pos and returns the position behind it.
func (e *Encoder) appendField(dst, text []byte, pos int, t *Type, field Append) ([]byte, int, error) {
	if pos < len(text) && text[pos] == '"' {
		mark := len(e.scratch)
		value, next, ok := e.unquote(text, pos, true)
		if !ok {
			return dst, pos, malformed(t, reasonComposite)
		}
		dst, err := field(dst, value)
		e.release(mark)
		return dst, next, err
	}
	end := pos
	for end < len(text) && text[end] != ',' && text[end] != ')' {
		end++
	}
	if end == pos {
		return append(dst, "null"...), end, nil
	}
	dst, err := field(dst, text[pos:end])
	return dst, end, err
}

package format

import "bytes"

// hstore returns the encoding of an hstore: a JSON object whose values are strings or
// null, its keys in the order in which PostgreSQL keeps them.
//
// What hstore_out prints, and what is relied on here: `"key"=>"value"` and
// `"key"=>NULL`, comma and blank between the pairs, always in quotes, within them a
// backslash before each quote and backslash; nothing for no pairs. Keys are unique.
func (e *Encoder) hstore(t *Type) Append {
	return func(dst, text []byte) ([]byte, error) {
		start, mark := len(dst), len(e.scratch)
		dst, err := e.appendHstore(dst, text, t)
		e.release(mark)
		if err != nil {
			return dst[:start], err
		}
		return dst, nil
	}
}

func (e *Encoder) appendHstore(dst, text []byte, t *Type) ([]byte, error) {
	dst = append(dst, '{')
	for pos := 0; len(text) > 0; {
		var err error
		if dst, pos, err = e.appendHstoreString(dst, text, pos, t); err != nil {
			return dst, err
		}
		if !bytes.HasPrefix(text[pos:], []byte("=>")) {
			return dst, malformed(t, reasonHstore)
		}
		pos += len("=>")
		dst = append(dst, ':')
		if bytes.HasPrefix(text[pos:], []byte("NULL")) {
			dst = append(dst, "null"...)
			pos += len("NULL")
		} else if dst, pos, err = e.appendHstoreString(dst, text, pos, t); err != nil {
			return dst, err
		}
		if pos == len(text) {
			break
		}
		if !bytes.HasPrefix(text[pos:], []byte(", ")) {
			return dst, malformed(t, reasonHstore)
		}
		pos += len(", ")
		dst = append(dst, ',')
	}
	return append(dst, '}'), nil
}

// appendHstoreString appends the key or value at pos as a JSON string and returns the
// position behind it.
func (e *Encoder) appendHstoreString(dst, text []byte, pos int, t *Type) ([]byte, int, error) {
	if pos >= len(text) || text[pos] != '"' {
		return dst, pos, malformed(t, reasonHstore)
	}
	mark := len(e.scratch)
	value, next, ok := e.unquote(text, pos, false)
	if !ok {
		return dst, pos, malformed(t, reasonHstore)
	}
	dst, err := AppendString(dst, value)
	e.release(mark)
	if err != nil {
		return dst, pos, invalid(t, err)
	}
	return dst, next, nil
}

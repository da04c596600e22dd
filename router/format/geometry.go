package format

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"math"
	"strconv"
)

// appendPoint appends a point `(1.5,-2)`: its coordinates, and both once more as
// well-known binary.
func appendPoint(dst, text []byte, t *Type) ([]byte, error) {
	start := len(dst)
	if len(text) < 2 || text[0] != '(' || text[len(text)-1] != ')' {
		return dst, malformed(t, reasonPoint)
	}
	x, y, ok := bytes.Cut(text[1:len(text)-1], []byte{','})
	// Byte order (little endian) and kind (point), then two doubles.
	wkb := [21]byte{1, 1}
	ok = ok && putDouble(wkb[5:], x) && putDouble(wkb[13:], y)
	if !ok {
		return dst, malformed(t, reasonPoint)
	}
	var err error
	dst = append(dst, `{"x":`...)
	if dst, err = appendDouble(dst, x, t); err == nil {
		dst = append(dst, `,"y":`...)
		dst, err = appendDouble(dst, y, t)
	}
	if err != nil {
		return dst[:start], malformed(t, reasonPoint)
	}
	dst = append(dst, `,"wkb":`...)
	dst = AppendBase64(dst, wkb[:])
	return append(dst, `,"srid":null}`...), nil
}

// putDouble puts the double that text stands for, lowest byte first.
func putDouble(to, text []byte) bool {
	f, err := strconv.ParseFloat(view(text), 64)
	binary.LittleEndian.PutUint64(to, math.Float64bits(f))
	return err == nil
}

// appendEWKB appends a PostGIS geometry or geography, which is printed as hexadecimal
// EWKB: these bytes, and the reference system that they name. A type of this name that
// prints anything else is its text.
func (e *Encoder) appendEWKB(dst, text []byte, t *Type) ([]byte, error) {
	mark := len(e.scratch)
	defer e.release(mark)
	var err error
	e.scratch, err = hex.AppendDecode(e.scratch, text)
	raw := e.scratch[mark:]
	const head = 1 + 4 // byte order, kind and flags
	if err != nil || len(raw) < head || raw[0] > 1 {
		return textAppend(t)(dst, text)
	}
	var order binary.ByteOrder = binary.BigEndian
	if raw[0] == 1 {
		order = binary.LittleEndian
	}
	const hasSRID = 0x20000000
	withSRID := order.Uint32(raw[1:])&hasSRID != 0
	if withSRID && len(raw) < head+4 {
		return textAppend(t)(dst, text)
	}
	dst = append(dst, `{"wkb":`...)
	dst = AppendBase64(dst, raw)
	dst = append(dst, `,"srid":`...)
	if !withSRID {
		return append(dst, "null}"...), nil
	}
	dst = strconv.AppendInt(dst, int64(int32(order.Uint32(raw[head:]))), 10)
	return append(dst, '}'), nil
}

// appendVector appends pgvector's `[1,2.5]` as an array of doubles. A type of this name
// that prints anything else is its text.
func appendVector(dst, text []byte, t *Type) ([]byte, error) {
	start := len(dst)
	if len(text) < 2 || text[0] != '[' || text[len(text)-1] != ']' {
		return textAppend(t)(dst, text)
	}
	rest := text[1 : len(text)-1]
	dst = append(dst, '[')
	for more := len(rest) > 0; more; {
		var number []byte
		number, rest, more = bytes.Cut(rest, []byte{','})
		var err error
		if dst, err = appendDouble(dst, number, t); err != nil {
			return textAppend(t)(dst[:start], text)
		}
		if more {
			dst = append(dst, ',')
		}
	}
	return append(dst, ']'), nil
}

// appendSparseVector appends pgvector's `{1:1.5,3:2}/5` as its dimensions and the pairs
// of index and double, which is how Connect's JSON has a map whose keys are numbers.
func appendSparseVector(dst, text []byte, t *Type) ([]byte, error) {
	start := len(dst)
	pairs, dimensions, ok := bytes.Cut(text, []byte("}/"))
	if !ok || len(pairs) == 0 || pairs[0] != '{' || !isInteger(dimensions) {
		return textAppend(t)(dst, text)
	}
	dst = append(dst, `{"dimensions":`...)
	dst = append(dst, dimensions...)
	dst = append(dst, `,"vector":[`...)
	rest := pairs[1:]
	for more := len(rest) > 0; more; {
		var pair []byte
		pair, rest, more = bytes.Cut(rest, []byte{','})
		index, number, ok := bytes.Cut(pair, []byte{':'})
		if !ok || !isInteger(index) {
			return textAppend(t)(dst[:start], text)
		}
		dst = append(dst, '[')
		dst = append(dst, index...)
		dst = append(dst, ',')
		var err error
		if dst, err = appendDouble(dst, number, t); err != nil {
			return textAppend(t)(dst[:start], text)
		}
		dst = append(dst, ']')
		if more {
			dst = append(dst, ',')
		}
	}
	return append(dst, "]}"...), nil
}

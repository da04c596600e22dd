package format

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"math/bits"
	"slices"
	"unicode/utf8"
)

// AppendString appends s as a JSON string, quotes included. Only what JSON demands is
// escaped: the quote, the backslash and the control characters below U+0020. Text that
// is not UTF-8 gives ErrInvalidUTF8 and dst as it was.
func AppendString(dst, s []byte) ([]byte, error) {
	// Nearly every value is ASCII without anything to escape: one look, one copy.
	i := indexSpecial(s, highBits)
	if i == len(s) {
		dst = append(dst, '"')
		dst = append(dst, s...)
		return append(dst, '"'), nil
	}
	start := len(dst)
	dst, ascii := appendEscaped(dst, s)
	if !ascii && !utf8.Valid(s[i:]) {
		return dst[:start], ErrInvalidUTF8
	}
	return dst, nil
}

// escapeChunk is how much text is escaped with one look at the room for it, in bytes.
const (
	escapeChunk   = 512
	longestEscape = len(`\u0000`)
)

// appendEscaped appends s as a JSON string, and tells whether all of it is ASCII; where
// it is not, the caller must know that it is valid UTF-8.
func appendEscaped(dst, s []byte) (out []byte, ascii bool) {
	dst = append(dst, '"')
	seen := uint64(0)
	for len(s) > 0 {
		part := s[:min(escapeChunk, len(s))]
		s = s[len(part):]
		n := len(dst)
		dst = slices.Grow(dst, longestEscape*len(part)+8)
		m, x := escapeInto(dst[n:cap(dst)], part)
		dst = dst[:n+m]
		seen |= x
	}
	return append(dst, '"'), seen&highBits == 0
}

// escapeInto writes s escaped to out, where there is room for it and eight bytes more,
// and returns how long it is, and all bytes of s or-ed together.
//
// A word is stored whole. For each quote and backslash in it a backslash takes its
// place, and what begins with it is stored again behind that: JSON within a string has
// one every few bytes, and none of them costs another look at the word.
func escapeInto(out, s []byte) (n int, seen uint64) {
	i, o := 0, 0
	for ; len(s)-i >= 8; i += 8 {
		x := binary.LittleEndian.Uint64(s[i:])
		seen |= x
		binary.LittleEndian.PutUint64(out[o:], x)
		if less(x) != 0 {
			for _, c := range s[i : i+8] {
				o += escape(out[o:], c)
			}
			continue
		}
		for m := equal(x, '"'*lowBits) | equal(x, '\\'*lowBits); m != 0; m &= m - 1 {
			at := bits.TrailingZeros64(m) &^ 7 // the byte's lowest bit
			k := o + at/8
			binary.LittleEndian.PutUint64(out[k+1:], x>>at)
			out[k] = '\\'
			o++
		}
		o += 8
	}
	for _, c := range s[i:] {
		seen |= uint64(c)
		o += escape(out[o:], c)
	}
	return o, seen
}

// escape writes c to out, escaped where JSON demands it, and returns its length.
func escape(out []byte, c byte) int {
	switch {
	case c == '"' || c == '\\':
		out[1] = c
		out[0] = '\\'
		return 2
	case c < 0x20:
		return escapeControl(out, c)
	}
	out[0] = c
	return 1
}

// escapeControl takes the short form where JSON has one.
func escapeControl(out []byte, c byte) int {
	const hex = "0123456789abcdef"
	switch c {
	case '\b':
		return copy(out, `\b`)
	case '\f':
		return copy(out, `\f`)
	case '\n':
		return copy(out, `\n`)
	case '\r':
		return copy(out, `\r`)
	case '\t':
		return copy(out, `\t`)
	}
	out[5] = hex[c&15]
	out[4] = hex[c>>4]
	return copy(out, `\u00`) + 2
}

// Eight bytes at a time. For a byte b of the word x, zero(x) sets the high bit of
// every byte that is 0, less(x) of every one below 0x20. A borrow can set the bit of a
// byte that does not qualify, but only above one that does, so the lowest bit set is
// always right, and only that one is used.
const (
	lowBits  = 0x0101010101010101
	highBits = 0x8080808080808080
)

func zero(x uint64) uint64 { return (x - lowBits) &^ x & highBits }
func less(x uint64) uint64 { return (x - 0x20*lowBits) &^ x & highBits }

// equal sets the high bit of exactly the bytes that x and y have in common: no sum of two
// bytes below 0x80 reaches into the next.
func equal(x, y uint64) uint64 {
	x ^= y
	return ^(x&^highBits + ^uint64(highBits) | x) & highBits
}

// indexSpecial returns the index of the first byte of s that a JSON string must
// escape, or len(s). With mask highBits it stops at bytes beyond ASCII, too.
func indexSpecial(s []byte, mask uint64) int {
	i := 0
	for ; len(s)-i >= 8; i += 8 {
		x := binary.LittleEndian.Uint64(s[i:])
		m := less(x) | zero(x^'"'*lowBits) | zero(x^'\\'*lowBits) | x&mask
		if m != 0 {
			return i + bits.TrailingZeros64(m)/8
		}
	}
	for ; i < len(s); i++ {
		if c := s[i]; c < 0x20 || c == '"' || c == '\\' || c&byte(mask) != 0 {
			return i
		}
	}
	return i
}

// indexQuote returns the index of the first quote or backslash in s, or len(s).
func indexQuote(s []byte) int {
	i := 0
	for ; len(s)-i >= 8; i += 8 {
		x := binary.LittleEndian.Uint64(s[i:])
		if m := zero(x^'"'*lowBits) | zero(x^'\\'*lowBits); m != 0 {
			return i + bits.TrailingZeros64(m)/8
		}
	}
	for ; i < len(s); i++ {
		if c := s[i]; c == '"' || c == '\\' {
			return i
		}
	}
	return i
}

// QuoteName returns `"name":`, the beginning of a member of a JSON object. It is made
// once per column, not per row.
func QuoteName(name string) []byte { return append(appendName(nil, name), ':') }

// appendName appends a name of the catalog as a JSON string. Names come over a connection
// with client_encoding UTF8, which carries nothing else; should a name have an invalid
// byte all the same, U+FFFD stands for it.
func appendName(dst []byte, name string) []byte {
	dst, _ = appendEscaped(dst, bytes.ToValidUTF8([]byte(name), []byte("\uFFFD")))
	return dst
}

// AppendBase64 appends data as a JSON string in standard base64 with padding, quotes
// included.
func AppendBase64(dst, data []byte) []byte {
	dst = append(dst, '"')
	dst = base64.StdEncoding.AppendEncode(dst, data)
	return append(dst, '"')
}

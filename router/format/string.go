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
	if !utf8.Valid(s[i:]) {
		return dst, ErrInvalidUTF8
	}
	return appendEscaped(dst, s), nil
}

// escapeChunk is how much text is escaped with one look at the room for it, in bytes.
const (
	escapeChunk   = 512
	longestEscape = len(`\u0000`)
)

// appendEscaped appends s, which is valid UTF-8, as a JSON string.
func appendEscaped(dst, s []byte) []byte {
	dst = append(dst, '"')
	for len(s) > 0 {
		part := s[:min(escapeChunk, len(s))]
		s = s[len(part):]
		n := len(dst)
		dst = slices.Grow(dst, longestEscape*len(part)+8)
		dst = dst[:n+escapeInto(dst[n:cap(dst)], part)]
	}
	return append(dst, '"')
}

// escapeInto writes s escaped to out, where there is room for it and eight bytes more,
// and returns how long it is. A word is stored whole; a byte to be escaped in it costs a
// turn, and what is behind it is stored again. JSON within a string has one every few
// bytes.
func escapeInto(out, s []byte) int {
	i, o := 0, 0
	for len(s)-i >= 8 {
		x := binary.LittleEndian.Uint64(s[i:])
		binary.LittleEndian.PutUint64(out[o:], x)
		m := less(x) | zero(x^'"'*lowBits) | zero(x^'\\'*lowBits)
		if m == 0 {
			i, o = i+8, o+8
			continue
		}
		k := bits.TrailingZeros64(m) / 8
		i, o = i+k, o+k
		o += escape(out[o:], s[i])
		i++
	}
	for _, c := range s[i:] {
		o += escape(out[o:], c)
	}
	return o
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
// once per column, not per row. Names come over a connection with client_encoding
// UTF8, which carries nothing else; should a name have an invalid byte all the same,
// U+FFFD stands for it.
func QuoteName(name string) []byte {
	return append(appendEscaped(nil, bytes.ToValidUTF8([]byte(name), []byte("\uFFFD"))), ':')
}

// AppendBase64 appends data as a JSON string in standard base64 with padding, quotes
// included.
func AppendBase64(dst, data []byte) []byte {
	dst = append(dst, '"')
	dst = base64.StdEncoding.AppendEncode(dst, data)
	return append(dst, '"')
}

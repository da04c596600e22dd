package format

import "encoding/binary"

// Dates and times are checked for their shape and copied; the calendar is PostgreSQL's
// business. It knows years from 4714 BC to 294276 (dates to 5874897), which no time
// type of ours would hold, and infinities.

// appendDate appends a date: its text.
func appendDate(dst, text []byte, t *Type) ([]byte, error) {
	if n := scanDate(text); !isInfinity(text) && (n == 0 || !isEra(text[n:])) {
		return dst, malformed(t, reasonDate)
	}
	return appendQuoted(dst, text), nil
}

// appendTimestamp appends a timestamp: its text with T for the blank between date and
// time. The blank before BC stays, as PostgreSQL reads it back only so.
func appendTimestamp(dst, text []byte, t *Type) ([]byte, error) {
	date, end := scanTimestamp(text)
	switch {
	case isInfinity(text):
		return appendQuoted(dst, text), nil
	case end == 0 || !isEra(text[end:]):
		return dst, malformed(t, reasonTimestamp)
	}
	dst = append(dst, '"')
	dst = append(dst, text[:date]...)
	dst = append(dst, 'T')
	dst = append(dst, text[date+1:]...)
	return append(dst, '"'), nil
}

// appendTimestamptz appends a timestamptz: as a timestamp, with Z for the offset of
// UTC. Any other offset is an error: it shows that the session has the wrong zone, and
// the ranges and multiranges beside it, which are copied, would be in that zone, too.
func appendTimestamptz(dst, text []byte, t *Type) ([]byte, error) {
	const utc = "+00"
	date, end := scanTimestamp(text)
	switch {
	case isInfinity(text):
		return appendQuoted(dst, text), nil
	case end == 0 || len(text) < end+len(utc) || string(text[end:end+len(utc)]) != utc || !isEra(text[end+len(utc):]):
		return dst, malformed(t, reasonZone)
	}
	dst = append(dst, '"')
	dst = append(dst, text[:date]...)
	dst = append(dst, 'T')
	dst = append(dst, text[date+1:end]...)
	dst = append(dst, 'Z')
	dst = append(dst, text[end+len(utc):]...)
	return append(dst, '"'), nil
}

// appendQuoted appends text that needs no escaping as a JSON string.
func appendQuoted(dst, text []byte) []byte {
	dst = append(dst, '"')
	dst = append(dst, text...)
	return append(dst, '"')
}

// shape is what eight bytes of a date or time look like: want has a 0 where a digit
// stands, and separators; most is what may be added to the digits' values, and to the 0 of
// a separator that is right, without reaching 0x80.
type shape struct{ want, most uint64 }

// The shapes of four-digit years, of what stands behind them, and of a time of day, in
// little-endian words.
const (
	yearWant, yearMost   = 0x2d30302d30303030, 0x7f76767f76767676 // 0000-00-
	dayWant, dayMost     = 0x30303a3030203030, 0x76767f76767f7676 // 00 00:00
	clockWant, clockMost = 0x30303a30303a3030, 0x76767f76767f7676 // 00:00:00
)

// fits tells whether s begins with eight bytes of the shape.
func (f shape) fits(s []byte) bool {
	x := binary.LittleEndian.Uint64(s) ^ f.want
	return (x+f.most|x)&highBits == 0
}

// pairs gives the two-digit numbers that begin at each of the eight bytes of s, which
// fits, as a byte each.
func (f shape) pairs(s []byte) uint64 {
	x := binary.LittleEndian.Uint64(s) ^ f.want
	return x*10 + x>>8
}

// scanDate returns the length of the date (YYYY-MM-DD, the year with four digits or
// more) that s begins with, 0 if it begins with none.
func scanDate(s []byte) int {
	const short = len("YYYY-MM-DD")
	if len(s) >= short && (shape{yearWant, yearMost}).fits(s) && digits(s[short-2:short]) == 2 {
		return short
	}
	n := digits(s)
	if n < 4 || len(s) < n+6 || !isPairs(s[n:n+6], '-', '-') {
		return 0
	}
	return n + 6
}

// scanTimestamp returns the length of the date that s begins with, and of date and
// time (HH:MM:SS and up to six digits of fraction) together, or zeros.
func scanTimestamp(s []byte) (date, end int) {
	const short = len("YYYY-MM-DD HH:MM:SS")
	if len(s) >= short && (shape{yearWant, yearMost}).fits(s) && (shape{dayWant, dayMost}).fits(s[8:]) && (shape{clockWant, clockMost}).fits(s[11:]) {
		date, end = len("YYYY-MM-DD"), short
	} else {
		date = scanDate(s)
		if date == 0 || len(s) < date+9 || !isPairs(s[date:date+9], ' ', ':', ':') {
			return 0, 0
		}
		end = date + 9
	}
	if len(s) > end && s[end] == '.' {
		n := digits(s[end+1:])
		if n < 1 || n > 6 {
			return 0, 0
		}
		end += 1 + n
	}
	return date, end
}

// isPairs tells whether s consists of a separator and two digits for each of seps.
func isPairs(s []byte, seps ...byte) bool {
	for i, sep := range seps {
		if s[3*i] != sep || digits(s[3*i+1:3*i+3]) != 2 {
			return false
		}
	}
	return true
}

// isEra tells whether s is what may stand behind a date or time: nothing, or BC.
func isEra(s []byte) bool { return len(s) == 0 || string(s) == " BC" }

func isInfinity(s []byte) bool { return string(s) == "infinity" || string(s) == "-infinity" }

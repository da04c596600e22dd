package format

import (
	"bytes"
	"math"
	"math/bits"
	"strconv"
)

// interval is PostgreSQL's three parts of an interval. Each has a sign of its own, and
// none can be converted into another exactly.
type interval struct {
	years, months, days int64
	micros              clock // hours, minutes and seconds; more than a day, maybe
}

// parseInterval reads what IntervalStyle postgres prints: of years, mons and days each
// a number with its unit, and of the time [-]HH:MM:SS with a fraction, of each only
// what is not zero, and 00:00:00 if nothing is.
func parseInterval(s []byte) (iv interval, ok bool) {
	if len(s) == 0 {
		return iv, false
	}
	for len(s) > 0 {
		neg := s[0] == '-'
		if neg || s[0] == '+' {
			s = s[1:]
		}
		n := digits(s)
		if n == 0 || n > len("2147483648") || n == len(s) {
			return iv, false
		}
		var v int64
		for _, c := range s[:n] {
			v = v*10 + int64(c-'0')
		}
		if s[n] == ':' {
			iv.micros, ok = parseLongClock(neg, v, s[n:])
			return iv, ok
		}
		if neg {
			v = -v
		}
		var unit []byte
		unit, s, _ = bytes.Cut(s[n+1:], []byte{' '})
		switch string(unit) {
		case "year", "years":
			iv.years = v
		case "mon", "mons":
			iv.months = v
		case "day", "days":
			iv.days = v
		default:
			return iv, false
		}
	}
	return iv, true
}

// parseLongClock reads :MM:SS and a fraction behind these hours. PostgreSQL has all that
// an int64 of microseconds holds, up to 2562047788:00:54.775807.
func parseLongClock(neg bool, hours int64, s []byte) (micros clock, ok bool) {
	n := len(":MM:SS")
	if len(s) < n || !isPairs(s[:n], ':', ':') {
		return 0, false
	}
	fraction, length, ok := parseFraction(s[n:])
	seconds := hours*3600 + (int64(s[1]-'0')*10+int64(s[2]-'0'))*60 + int64(s[4]-'0')*10 + int64(s[5]-'0')
	if !ok || n+length != len(s) || seconds > math.MaxInt64/microsPerSecond {
		return 0, false
	}
	abs := uint64(seconds)*microsPerSecond + uint64(fraction)
	if neg {
		return int64(-abs), abs <= 1<<63
	}
	return int64(abs), abs < 1<<63
}

// appendMicroDuration appends an interval in microseconds, a month having 30.4375 days.
// What is beyond an int64 is its end, and so are PostgreSQL 17's infinite intervals.
func appendMicroDuration(dst, text []byte, t *Type) ([]byte, error) {
	if isInfinity(text) {
		return strconv.AppendInt(dst, saturated(text[0] == '-'), 10), nil
	}
	iv, ok := parseInterval(text)
	if !ok {
		return dst, malformed(t, reasonInterval)
	}
	const perDay = secondsPerDay * microsPerSecond
	const perMonth = 304375 * (perDay / 10000)
	var sum int128
	sum.addProduct(iv.years*12+iv.months, perMonth)
	sum.addProduct(iv.days, perDay)
	sum.addProduct(iv.micros, 1)
	return strconv.AppendInt(dst, sum.int64(), 10), nil
}

func saturated(neg bool) int64 {
	if neg {
		return math.MinInt64
	}
	return math.MaxInt64
}

// int128 is a two's complement number in two halves.
type int128 struct{ hi, lo uint64 }

// addProduct adds a*b, b being positive.
func (n *int128) addProduct(a int64, b uint64) {
	abs := uint64(a)
	if a < 0 {
		abs = -abs
	}
	hi, lo := bits.Mul64(abs, b)
	if a < 0 {
		var borrow uint64
		lo, borrow = bits.Sub64(0, lo, 0)
		hi, _ = bits.Sub64(0, hi, borrow)
	}
	var carry uint64
	n.lo, carry = bits.Add64(n.lo, lo, 0)
	n.hi, _ = bits.Add64(n.hi, hi, carry)
}

// int64 is the number, or the int64 next to it.
func (n *int128) int64() int64 {
	if sign := uint64(int64(n.lo) >> 63); n.hi == sign {
		return int64(n.lo)
	}
	return saturated(int64(n.hi) < 0)
}

// appendISOInterval appends an interval as P1Y2M3DT4H5M6.7S, every part with its sign.
// An infinite one is its text.
func appendISOInterval(dst, text []byte, t *Type) ([]byte, error) {
	if isInfinity(text) {
		return appendQuoted(dst, text), nil
	}
	iv, ok := parseInterval(text)
	if !ok {
		return dst, malformed(t, reasonInterval)
	}
	seconds := iv.micros / microsPerSecond
	dst = append(dst, '"')
	for _, part := range [...]struct {
		before string
		v      int64
	}{{"P", iv.years}, {"Y", iv.months}, {"M", iv.days}, {"DT", seconds / 3600}, {"H", seconds / 60 % 60}} {
		dst = append(dst, part.before...)
		dst = strconv.AppendInt(dst, part.v, 10)
	}
	dst = append(dst, 'M')
	rest, fraction := seconds%60, iv.micros%microsPerSecond
	if rest < 0 || fraction < 0 {
		dst = append(dst, '-')
		rest, fraction = -rest, -fraction
	}
	dst = strconv.AppendInt(dst, rest, 10)
	dst = appendFraction(dst, fraction)
	return append(dst, 'S', '"'), nil
}

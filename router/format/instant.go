package format

import (
	"math/bits"
	"strconv"
)

// Under `types: debezium` dates and times are numbers, so that here, other than under
// `types: plain`, the calendar is ours: the proleptic Gregorian one, as PostgreSQL's.

// Infinite dates and timestamps, in Debezium's numbers: PostgreSQL's JDBC driver has
// 9223372036825200000 and -9223372036832400000 ms for infinity, Debezium turns these
// into microseconds as they stand, and cuts days to 32 bits. Of a date outside arrays
// the driver's binary form comes through, shifted to 1970 and cut, too. None of them is
// a date that PostgreSQL knows.
const (
	infiniteMicros         = 9223372036825200000
	minusInfiniteMicros    = -9223372036832400000
	infiniteDay            = -2147472692
	minusInfiniteDay       = -2147472691
	infiniteDayInArray     = -622191234
	minusInfiniteDayArray  = -625821272
	microsPerSecond        = 1_000_000
	secondsPerDay          = 86400
	defaultFractionDigits  = 6 // of a time type without precision
	millisecondDigits      = 3
	microsPerMillisecond   = 1000
	daysFromEraToUnixEpoch = 719468 // 0000-03-01 to 1970-01-01
)

// clock is a time of day or a time span below the day, in microseconds.
type clock = int64

// fractionDigits is how many digits of a second a time type with this modifier has.
func fractionDigits(mod int32) int {
	if mod < 0 || mod > defaultFractionDigits {
		return defaultFractionDigits
	}
	return int(mod)
}

// debeziumTime gives the types without a zone: a date in days since 1970, a time since
// midnight, a timestamp since 1970 UTC, in milliseconds or microseconds; or all of them
// as ISO text.
func debeziumTime(t *Type, mod int32, d *Debezium, element bool) Append {
	millis := t.millis(mod, d)
	switch {
	case d.Time == TimeISOString && t.OID == oidDate:
		return func(dst, text []byte) ([]byte, error) { return appendISODate(dst, text, t) }
	case d.Time == TimeISOString && t.OID == oidTime:
		return func(dst, text []byte) ([]byte, error) { return appendISOTime(dst, text, t) }
	case d.Time == TimeISOString:
		return func(dst, text []byte) ([]byte, error) { return appendISOTimestamp(dst, text, t) }
	case t.OID == oidDate:
		return func(dst, text []byte) ([]byte, error) { return appendDays(dst, text, element, t) }
	case t.OID == oidTime:
		return func(dst, text []byte) ([]byte, error) {
			c, n := parseClock(text)
			if n == 0 || n != len(text) {
				return dst, malformed(t, reasonTime)
			}
			if millis {
				c /= microsPerMillisecond
			}
			return strconv.AppendInt(dst, c, 10), nil
		}
	}
	return func(dst, text []byte) ([]byte, error) { return appendEpoch(dst, text, millis, t) }
}

// millis tells that a time or timestamp is counted in milliseconds and not microseconds.
func (t *Type) millis(mod int32, d *Debezium) bool {
	switch {
	case d.Time == TimeConnect:
		return true
	case t.OID == oidTime && d.Time == TimeAdaptiveMicros:
		return false
	}
	return fractionDigits(mod) <= millisecondDigits
}

func appendDays(dst, text []byte, element bool, t *Type) ([]byte, error) {
	if isInfinity(text) {
		switch {
		case element && text[0] == '-':
			return strconv.AppendInt(dst, minusInfiniteDayArray, 10), nil
		case element:
			return strconv.AppendInt(dst, infiniteDayInArray, 10), nil
		case text[0] == '-':
			return strconv.AppendInt(dst, minusInfiniteDay, 10), nil
		}
		return strconv.AppendInt(dst, infiniteDay, 10), nil
	}
	n := scanDate(text)
	if n == 0 || !isEra(text[n:]) {
		return dst, malformed(t, reasonDate)
	}
	days, ok := parseDays(text[:n], len(text) > n)
	if !ok {
		return dst, malformed(t, reasonDate)
	}
	return strconv.AppendInt(dst, days, 10), nil
}

// appendEpoch appends a timestamp as a number. The last weeks that PostgreSQL knows, in
// the year 294276, have more microseconds than an int64: they are written all the same.
func appendEpoch(dst, text []byte, millis bool, t *Type) ([]byte, error) {
	if isInfinity(text) {
		v := int64(infiniteMicros)
		if text[0] == '-' {
			v = minusInfiniteMicros
		}
		if millis {
			v /= microsPerMillisecond
		}
		return strconv.AppendInt(dst, v, 10), nil
	}
	days, c, end, ok := parseTimestamp(text)
	if !ok || !isEra(text[end:]) {
		return dst, malformed(t, reasonTimestamp)
	}
	if millis { // rounded down, before 1970, too
		return strconv.AppendInt(dst, days*secondsPerDay*1000+c/microsPerMillisecond, 10), nil
	}
	if days < 0 {
		return strconv.AppendInt(dst, days*secondsPerDay*microsPerSecond+c, 10), nil
	}
	hi, lo := bits.Mul64(uint64(days), secondsPerDay*microsPerSecond)
	lo, carry := bits.Add64(lo, uint64(c), 0)
	if hi+carry != 0 {
		return dst, malformed(t, reasonTimestamp)
	}
	return strconv.AppendUint(dst, lo, 10), nil
}

// parseTimestamp gives the days since 1970 and the time of day of the timestamp that
// text begins with, and where it ends; the era at the end of text counts.
func parseTimestamp(text []byte) (days int64, c clock, end int, ok bool) {
	date, end := scanTimestamp(text)
	if end == 0 {
		return 0, 0, 0, false
	}
	c, _ = parseClock(text[date+1 : end])
	days, ok = parseDays(text[:date], isBC(text))
	return days, c, end, ok
}

// isBC tells whether the date or timestamp text is before the year 1.
func isBC(text []byte) bool {
	n := len(text)
	return n > 3 && text[n-1] == 'C' && text[n-2] == 'B' && text[n-3] == ' '
}

// parseDays gives the days from 1970-01-01 to a date that scanDate has found. Not ok is
// a year of more digits than PostgreSQL prints, or a month or day that no year has.
func parseDays(date []byte, bc bool) (days int64, ok bool) {
	const longest = len("5874897")
	yearDigits := len(date) - len("-MM-DD")
	if yearDigits > longest {
		return 0, false
	}
	var y int64
	if yearDigits == 4 {
		pairs := shape{yearWant, yearMost}.pairs(date)
		y = int64(pairs&0xff)*100 + int64(pairs>>16&0xff)
	} else {
		for _, c := range date[:yearDigits] {
			y = y*10 + int64(c-'0')
		}
	}
	m := int64(date[yearDigits+1]-'0')*10 + int64(date[yearDigits+2]-'0')
	d := int64(date[yearDigits+4]-'0')*10 + int64(date[yearDigits+5]-'0')
	if y == 0 || m == 0 || m > 12 || d == 0 || d > 31 {
		return 0, false
	}
	if bc {
		y = 1 - y // the year before 1 is 0
	}
	// Years that begin in March, so that the leap day is the last: Hinnant,
	// "chrono-Compatible Low-Level Date Algorithms".
	if m <= 2 {
		y--
		m += 12
	}
	const yearsPerEra, daysPerEra = 400, 146097
	era := y
	if y < 0 {
		era -= yearsPerEra - 1
	}
	era /= yearsPerEra
	yearOfEra := y - era*yearsPerEra
	dayOfYear := (153*(m-3)+2)/5 + d - 1
	dayOfEra := yearOfEra*365 + yearOfEra/4 - yearOfEra/100 + dayOfYear
	return era*daysPerEra + dayOfEra - daysFromEraToUnixEpoch, true
}

// parseClock gives the time HH:MM:SS with up to six digits of fraction that s begins
// with, and its length, which is 0 if there is none.
func parseClock(s []byte) (c clock, n int) {
	n = len("HH:MM:SS")
	f := shape{clockWant, clockMost}
	if len(s) < n || !f.fits(s) {
		return 0, 0
	}
	pairs := f.pairs(s)
	c = int64(pairs&0xff*3600+pairs>>24&0xff*60+pairs>>48&0xff) * microsPerSecond
	micros, length, ok := parseFraction(s[n:])
	if !ok {
		return 0, 0
	}
	return c + micros, n + length
}

// parseFraction gives the microseconds of a point and one to six digits that s begins
// with; without a point there are none.
func parseFraction(s []byte) (micros int64, n int, ok bool) {
	if len(s) == 0 || s[0] != '.' {
		return 0, 0, true
	}
	d := digits(s[1:])
	if d == 0 || d > defaultFractionDigits {
		return 0, 0, false
	}
	for _, c := range s[1 : 1+d] {
		micros = micros*10 + int64(c-'0')
	}
	for range defaultFractionDigits - d {
		micros *= 10
	}
	return micros, 1 + d, true
}

// appendZoned appends a timestamptz: ISO 8601 in UTC with as many digits of a second as
// the type has, years as ISO counts them, where 44 BC is -0043.
func appendZoned(dst, text []byte, fraction int, t *Type) ([]byte, error) {
	const utc = "+00"
	if isInfinity(text) {
		return appendQuoted(dst, text), nil
	}
	date, end := scanTimestamp(text)
	if end == 0 || len(text) < end+len(utc) || string(text[end:end+len(utc)]) != utc || !isEra(text[end+len(utc):]) {
		return dst, malformed(t, reasonZone)
	}
	dst = append(dst, '"')
	dst = appendISOYear(dst, text[:date], isBC(text))
	dst = append(dst, 'T')
	dst = append(dst, text[date+1:end]...)
	have := end - date - len(" HH:MM:SS") // the point included
	if have == 0 && fraction > 0 {
		dst = append(dst, '.')
		have = 1
	}
	for ; have <= fraction && fraction > 0; have++ {
		dst = append(dst, '0')
	}
	return append(dst, 'Z', '"'), nil
}

// appendISOYear appends a date with the year as ISO 8601 and Java write it: a plus
// before more than four digits, and a minus before the year 0.
func appendISOYear(dst, date []byte, bc bool) []byte {
	n := len(date) - len("-MM-DD")
	switch {
	case bc:
		var y uint64
		for _, c := range date[:n] {
			y = y*10 + uint64(c-'0')
		}
		y-- // 1 BC is 0
		if y > 0 {
			dst = append(dst, '-')
		}
		for pad := uint64(1000); pad > y && pad > 1; pad /= 10 {
			dst = append(dst, '0')
		}
		dst = strconv.AppendUint(dst, y, 10)
		return append(dst, date[n:]...)
	case n > len("YYYY"):
		dst = append(dst, '+')
	}
	return append(dst, date...)
}

// appendZonedTime appends a timetz as the time of day in UTC, as Debezium has it.
func appendZonedTime(dst, text []byte, t *Type) ([]byte, error) {
	c, n := parseClock(text)
	if n == 0 || n == len(text) || text[n] != '+' && text[n] != '-' {
		return dst, malformed(t, reasonTime)
	}
	offset, ok := parseOffset(text[n+1:])
	if !ok {
		return dst, malformed(t, reasonTime)
	}
	if text[n] == '-' {
		offset = -offset
	}
	const day = secondsPerDay * microsPerSecond
	if offset == 0 && c == day {
		return append(dst, `"24:00:00Z"`...), nil
	}
	c = ((c-offset)%day + day) % day
	dst = append(dst, '"')
	dst = appendClock(dst, c)
	return append(dst, 'Z', '"'), nil
}

// parseOffset gives the microseconds of HH, HH:MM or HH:MM:SS.
func parseOffset(s []byte) (micros int64, ok bool) {
	unit := int64(3600 * microsPerSecond)
	for i := 0; ; i += 3 {
		if len(s) < i+2 || digits(s[i:i+2]) != 2 || i > 6 {
			return 0, false
		}
		micros += (int64(s[i]-'0')*10 + int64(s[i+1]-'0')) * unit
		unit /= 60
		if len(s) == i+2 {
			return micros, true
		}
		if s[i+2] != ':' {
			return 0, false
		}
	}
}

// appendClock appends HH:MM:SS and what there is of a fraction.
func appendClock(dst []byte, c clock) []byte {
	s := c / microsPerSecond
	for i, v := range [3]int64{s / 3600, s / 60 % 60, s % 60} {
		if i > 0 {
			dst = append(dst, ':')
		}
		dst = append(dst, byte('0'+v/10), byte('0'+v%10))
	}
	return appendFraction(dst, c%microsPerSecond)
}

// appendFraction appends a point and the digits of these microseconds but for zeros at
// the end, or nothing.
func appendFraction(dst []byte, micros int64) []byte {
	if micros == 0 {
		return dst
	}
	dst = append(dst, '.')
	for unit := int64(microsPerSecond / 10); micros > 0; unit /= 10 {
		dst = append(dst, byte('0'+micros/unit))
		micros %= unit
	}
	return dst
}

// appendISODate, appendISOTime and appendISOTimestamp are time-precision isostring.
// Infinities are their text, as those of timestamptz are: Debezium's are dates that are
// not in the database.
func appendISODate(dst, text []byte, t *Type) ([]byte, error) {
	n := scanDate(text)
	switch {
	case isInfinity(text):
		return appendQuoted(dst, text), nil
	case n == 0 || !isEra(text[n:]):
		return dst, malformed(t, reasonDate)
	}
	dst = append(dst, '"')
	dst = appendISOYear(dst, text[:n], isBC(text))
	return append(dst, 'Z', '"'), nil
}

func appendISOTime(dst, text []byte, t *Type) ([]byte, error) {
	if _, n := parseClock(text); n == 0 || n != len(text) {
		return dst, malformed(t, reasonTime)
	}
	dst = append(dst, '"')
	dst = append(dst, text...)
	return append(dst, 'Z', '"'), nil
}

func appendISOTimestamp(dst, text []byte, t *Type) ([]byte, error) {
	date, end := scanTimestamp(text)
	switch {
	case isInfinity(text):
		return appendQuoted(dst, text), nil
	case end == 0 || !isEra(text[end:]):
		return dst, malformed(t, reasonTimestamp)
	}
	dst = append(dst, '"')
	dst = appendISOYear(dst, text[:date], isBC(text))
	dst = append(dst, 'T')
	dst = append(dst, text[date+1:end]...)
	return append(dst, 'Z', '"'), nil
}

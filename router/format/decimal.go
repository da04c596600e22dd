package format

import (
	"bytes"
	"math/bits"
	"strconv"
	"unsafe"
)

// decimal is a finite numeric as PostgreSQL prints it: digits before and behind the
// point, parts of the text. It never prints an exponent.
type decimal struct {
	neg         bool
	whole, frac []byte
}

func parseDecimal(text []byte) (n decimal, ok bool) {
	if len(text) > 0 && text[0] == '-' {
		n.neg, text = true, text[1:]
	}
	i := digits(text)
	n.whole = text[:i]
	if i == 0 || text[0] == '0' && i > 1 {
		return n, false
	}
	if i == len(text) {
		return n, true
	}
	n.frac = text[i+1:]
	return n, text[i] == '.' && len(n.frac) > 0 && digits(n.frac) == len(n.frac)
}

// debeziumNumeric gives a numeric with a scale as base64 of its unscaled value, one
// without as a pair of scale and unscaled value, trailing zeros of the fraction taken
// off; or as text, or as a double.
func (e *Encoder) debeziumNumeric(t *Type, mod int32, d *Debezium) Append {
	scale, fixed := numericScale(mod)
	short := fixed && d.Decimal == DecimalPrecise
	return func(dst, text []byte) ([]byte, error) {
		if short {
			if v, ok := shortUnscaled(text, scale); ok {
				return appendInt64Bytes(dst, v), nil
			}
		}
		n, ok := parseDecimal(text)
		switch {
		case !ok:
			return appendSpecial(dst, text, d, t)
		case d.Decimal == DecimalString:
			return appendQuoted(dst, text), nil
		case d.Decimal == DecimalDouble:
			return appendFloat64(dst, text), nil
		case fixed:
			return e.appendFixed(dst, n, scale, t)
		}
		for len(n.frac) > 0 && n.frac[len(n.frac)-1] == '0' {
			n.frac = n.frac[:len(n.frac)-1]
		}
		dst = append(dst, `{"scale":`...)
		dst = strconv.AppendInt(dst, int64(len(n.frac)), 10)
		dst = append(dst, `,"value":`...)
		dst = e.appendUnscaled(dst, n.neg, n.whole, n.frac, 0)
		return append(dst, '}'), nil
	}
}

// numericScale takes the scale, which may be negative, out of a numeric's modifier.
func numericScale(mod int32) (scale int, fixed bool) {
	const header = 4 // VARHDRSZ, which PostgreSQL adds
	if mod < header {
		return 0, false
	}
	// The lowest 11 bits, in two's complement.
	return int((mod-header)&0x7ff^1024) - 1024, true
}

// appendSpecial appends a NaN or an infinity: in Debezium's words where decimals are
// strings or doubles. Decimal has no such value, and Debezium writes null; we write
// the text, since null would be another value.
func appendSpecial(dst, text []byte, d *Debezium, t *Type) ([]byte, error) {
	switch word := string(text); {
	case word != "NaN" && word != "Infinity" && word != "-Infinity":
		return dst, malformed(t, reasonNumeric)
	case d.Decimal != DecimalString:
		return appendQuoted(dst, text), nil
	case word == "NaN":
		return append(dst, `"NAN"`...), nil
	case word == "Infinity":
		return append(dst, `"POSITIVE_INFINITY"`...), nil
	}
	return append(dst, `"NEGATIVE_INFINITY"`...), nil
}

// appendFixed appends the unscaled value at scale. The text has as many digits as the
// scale says, unless the modifier is not the one that the value was stored with; only
// zeros are ever added or taken off.
func (e *Encoder) appendFixed(dst []byte, n decimal, scale int, t *Type) ([]byte, error) {
	for len(n.frac) > max(scale, 0) && n.frac[len(n.frac)-1] == '0' {
		n.frac = n.frac[:len(n.frac)-1]
	}
	zeros := max(scale, 0) - len(n.frac)
	if scale < 0 {
		cut := min(-scale, len(n.whole))
		if len(bytes.Trim(n.whole[len(n.whole)-cut:], "0")) > 0 {
			return dst, malformed(t, reasonScale)
		}
		n.whole = n.whole[:len(n.whole)-cut]
	}
	if zeros < 0 {
		return dst, malformed(t, reasonScale)
	}
	return e.appendUnscaled(dst, n.neg, n.whole, n.frac, zeros), nil
}

// shortUnscaled gives the unscaled value of a numeric of at most maxFast digits, of which
// scale are behind the point: what nearly every one with a scale is. Not ok is any other
// text.
func shortUnscaled(text []byte, scale int) (v int64, ok bool) {
	digits := text
	if len(digits) > 0 && digits[0] == '-' {
		digits = digits[1:]
	}
	whole := len(digits)
	if scale > 0 {
		whole -= scale + 1
	}
	if scale < 0 || whole < 1 || len(digits) > maxFast || digits[0] == '0' && whole > 1 {
		return 0, false
	}
	for _, c := range digits[:whole] {
		if c -= '0'; c > 9 {
			return 0, false
		}
		v = v*10 + int64(c)
	}
	if scale > 0 {
		if digits[whole] != '.' {
			return 0, false
		}
		for _, c := range digits[whole+1:] {
			if c -= '0'; c > 9 {
				return 0, false
			}
			v = v*10 + int64(c)
		}
	}
	if len(digits) < len(text) {
		v = -v
	}
	return v, true
}

// maxFast is how many digits surely fit into an int64.
const maxFast = 18

// appendUnscaled appends, as base64, the two's complement, highest byte first and with
// no more bytes than it takes, of the number whose digits are whole, frac and zeros.
func (e *Encoder) appendUnscaled(dst []byte, neg bool, whole, frac []byte, zeros int) []byte {
	if len(whole)+len(frac)+zeros > maxFast {
		return e.appendLongUnscaled(dst, neg, whole, frac, zeros)
	}
	var v int64
	for _, c := range whole {
		v = v*10 + int64(c-'0')
	}
	for _, c := range frac {
		v = v*10 + int64(c-'0')
	}
	for range zeros {
		v *= 10
	}
	if neg {
		v = -v
	}
	return appendInt64Bytes(dst, v)
}

// appendInt64Bytes is what appendUnscaled appends of v.
func appendInt64Bytes(dst []byte, v int64) []byte {
	// A value of n bits takes a sign bit more.
	n := bits.Len64(uint64(v^v>>63))/8 + 1
	x := uint64(v) << (64 - 8*n) // its bytes are now the highest
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
	dst = append(dst, '"')
	for ; n > 0; n -= 3 {
		dst = append(dst, alphabet[x>>58], alphabet[x>>52&63], alphabet[x>>46&63], alphabet[x>>40&63])
		x <<= 24
	}
	for ; n < 0; n++ {
		dst[len(dst)+n] = '='
	}
	return append(dst, '"')
}

// appendLongUnscaled works with the number as 64-bit limbs, the lowest first, and takes
// the digits in groups of 18. PostgreSQL's longest numeric has 147,455 digits, which
// take some 10 ms.
func (e *Encoder) appendLongUnscaled(dst []byte, neg bool, whole, frac []byte, zeros int) []byte {
	limbs := e.limbs[:0]
	group, scale := uint64(0), uint64(1)
	add := func(digit uint64) {
		group, scale = group*10+digit, scale*10
		if scale == 1e18 {
			limbs = mulAdd(limbs, scale, group)
			group, scale = 0, 1
		}
	}
	for _, c := range whole {
		add(uint64(c - '0'))
	}
	for _, c := range frac {
		add(uint64(c - '0'))
	}
	for range zeros {
		add(0)
	}
	limbs = mulAdd(limbs, scale, group)
	e.limbs = limbs
	if cap(limbs) > maxScratch/8 {
		e.limbs = nil
	}

	mark := len(e.scratch)
	e.scratch = append(e.scratch, 0) // room for the sign
	for i := len(limbs) - 1; i >= 0; i-- {
		for shift := 56; shift >= 0; shift -= 8 {
			e.scratch = append(e.scratch, byte(limbs[i]>>shift))
		}
	}
	raw := e.scratch[mark:]
	if neg {
		negate(raw)
	}
	for len(raw) > 1 && (raw[0] == 0 && raw[1] < 0x80 || raw[0] == 0xff && raw[1] >= 0x80) {
		raw = raw[1:]
	}
	dst = AppendBase64(dst, raw)
	e.release(mark)
	return dst
}

// mulAdd sets the number to number*m + a.
func mulAdd(limbs []uint64, m, a uint64) []uint64 {
	for i, l := range limbs {
		hi, lo := bits.Mul64(l, m)
		var carry uint64
		limbs[i], carry = bits.Add64(lo, a, 0)
		a = hi + carry
	}
	if a > 0 {
		limbs = append(limbs, a)
	}
	return limbs
}

// negate makes a two's complement number its negative.
func negate(raw []byte) {
	carry := byte(1)
	for i := len(raw) - 1; i >= 0; i-- {
		raw[i] = ^raw[i] + carry
		if raw[i] != 0 {
			carry = 0
		}
	}
}

// debeziumMoney gives money at a scale of 2, from text like $1,234.50, whose signs and
// separators are those of the server's lc_monetary.
func (e *Encoder) debeziumMoney(t *Type, d *Debezium) Append {
	return func(dst, text []byte) ([]byte, error) {
		v, ok := parseMoney(text)
		if !ok {
			return dst, malformed(t, reasonMoney)
		}
		if d.Decimal == DecimalPrecise {
			return appendInt64Bytes(dst, v), nil
		}
		var buf [24]byte
		s := appendCents(buf[:0], v)
		if d.Decimal == DecimalString {
			return appendQuoted(dst, s), nil
		}
		return appendFloat64(dst, s), nil
	}
}

// parseMoney gives the value in hundredths. Behind a point or comma stand two digits,
// or one; three are a group of thousands, in a currency that has no smaller unit.
func parseMoney(text []byte) (cents int64, ok bool) {
	var v uint64
	seen, neg, behind := 0, false, -1
	for i, c := range text {
		switch {
		case c >= '0' && c <= '9':
			hi, lo := bits.Mul64(v, 10)
			sum, carry := bits.Add64(lo, uint64(c-'0'), 0)
			if hi != 0 || carry != 0 {
				return 0, false
			}
			v = sum
			seen++
			if behind >= 0 {
				behind++
			}
		case c == '-' || c == '(':
			neg = true
		case (c == '.' || c == ',') && seen > 0 && i+1 < len(text) && text[i+1] >= '0' && text[i+1] <= '9':
			behind = 0
		}
	}
	scale := uint64(100)
	switch behind {
	case 1:
		scale = 10
	case 2:
		scale = 1
	case -1, 3:
	default:
		return 0, false
	}
	hi, v := bits.Mul64(v, scale)
	switch {
	case seen == 0 || hi != 0 || v > 1<<63 || v == 1<<63 && !neg:
		return 0, false
	case neg:
		return -int64(v), true
	}
	return int64(v), true
}

// appendCents appends hundredths as a decimal number.
func appendCents(dst []byte, v int64) []byte {
	abs := uint64(v)
	if v < 0 {
		dst = append(dst, '-')
		abs = -abs
	}
	dst = strconv.AppendUint(dst, abs/100, 10)
	return append(dst, '.', byte('0'+abs/10%10), byte('0'+abs%10))
}

// appendDouble appends a float as Java does: with a fraction or an exponent, so that
// readers that tell 4 from 4.0 see a floating-point number.
func appendDouble(dst, text []byte, t *Type) ([]byte, error) {
	n := len(dst)
	dst, err := appendFloat(dst, text, t)
	if err != nil {
		return dst, err
	}
	return withPoint(dst, n), nil
}

// withPoint adds a fraction of 0 to the number that begins at n, if it has neither
// fraction nor exponent; a string has a quote and stays as it is.
func withPoint(dst []byte, n int) []byte {
	for _, c := range dst[n:] {
		if c == '.' || c == 'e' || c == 'E' || c == '"' {
			return dst
		}
	}
	return append(dst, '.', '0')
}

// appendFloat64 appends the double next to a decimal number of any length; one that no
// double reaches is infinite.
func appendFloat64(dst, text []byte) []byte {
	n := len(dst)
	const exact = 15 // digits that every double keeps
	if len(text) <= exact {
		return withPoint(append(dst, text...), n)
	}
	f, _ := strconv.ParseFloat(view(text), 64)
	switch {
	case f > 0 && f/2 == f:
		return append(dst, `"Infinity"`...)
	case f < 0 && f/2 == f:
		return append(dst, `"-Infinity"`...)
	}
	return withPoint(strconv.AppendFloat(dst, f, 'g', -1, 64), n)
}

// view is b as a string for as long as b does not change: for strconv, which keeps
// nothing of it and has no functions for bytes.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

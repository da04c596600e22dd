package format

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"slices"
)

// Debezium says how `types: debezium` writes the types that Debezium has options for.
// The values are Debezium's own words; an empty one stands for its default.
type Debezium struct {
	Decimal  string // decimal.handling.mode
	Time     string // time.precision.mode
	Interval string // interval.handling.mode
	Binary   string // binary.handling.mode
	Hstore   string // hstore.handling.mode
	// Unavailable stands for an unchanged TOAST value (unavailable.value.placeholder).
	Unavailable string
}

// The words of Debezium's options; the first of each is its default.
const (
	DecimalPrecise = "precise" // base64 of the unscaled value
	DecimalString  = "string"
	DecimalDouble  = "double"

	TimeAdaptive       = "adaptive" // milliseconds up to a precision of 3, else microseconds
	TimeAdaptiveMicros = "adaptive_time_microseconds"
	TimeConnect        = "connect" // milliseconds
	TimeISOString      = "isostring"

	IntervalNumeric = "numeric" // microseconds; a month has 30.4375 days
	IntervalString  = "string"  // ISO 8601

	BinaryBytes         = "bytes" // base64, as Connect's JSON has it
	BinaryBase64        = "base64"
	BinaryBase64URLSafe = "base64-url-safe"
	BinaryHex           = "hex"

	HstoreJSON = "json" // a string that holds JSON
	HstoreMap  = "map"

	// UnavailableValue is the default placeholder.
	UnavailableValue = "__debezium_unavailable_value"
)

// debeziumWords are the words that each option takes.
var debeziumWords = [...]struct {
	option string
	of     func(d *Debezium) *string
	words  []string
}{
	{"decimal-handling", func(d *Debezium) *string { return &d.Decimal }, []string{DecimalPrecise, DecimalString, DecimalDouble}},
	{"time-precision", func(d *Debezium) *string { return &d.Time }, []string{TimeAdaptive, TimeAdaptiveMicros, TimeConnect, TimeISOString}},
	{"interval-handling", func(d *Debezium) *string { return &d.Interval }, []string{IntervalNumeric, IntervalString}},
	{"binary-handling", func(d *Debezium) *string { return &d.Binary }, []string{BinaryBytes, BinaryBase64, BinaryBase64URLSafe, BinaryHex}},
	{"hstore-handling", func(d *Debezium) *string { return &d.Hstore }, []string{HstoreJSON, HstoreMap}},
}

// Resolve puts defaults where nothing is said, and refuses words that no option has.
func (d Debezium) Resolve() (Debezium, error) {
	for _, o := range debeziumWords {
		word := o.of(&d)
		if *word == "" {
			*word = o.words[0]
		}
		if !slices.Contains(o.words, *word) {
			return d, fmt.Errorf("%s %q is not one of %q; write one of these", o.option, *word, o.words)
		}
	}
	if d.Unavailable == "" {
		d.Unavailable = UnavailableValue
	}
	return d, nil
}

// Debezium returns the encoding of t under `types: debezium`: what Debezium's
// JsonConverter writes, but for the differences that docs/debezium.md lists. Mod is the
// column's modifier (pg_attribute.atttypmod). Of d, Resolve has been called.
func (e *Encoder) Debezium(t *Type, mod int32, d *Debezium) Append {
	return e.debezium(t, mod, d, false)
}

// debezium is Debezium; element tells that t is an array's element, where Debezium has
// another number for an infinite date.
func (e *Encoder) debezium(t *Type, mod int32, d *Debezium, element bool) Append {
	t, mod = t.bottom(mod)
	if t == nil {
		return textAppend(nil)
	}
	switch t.Kind {
	case KindBase:
		return e.debeziumBase(t, mod, d, element)
	case KindArray:
		return e.arrayOf(t, e.debezium(t.Elem, mod, d, true))
	case KindComposite:
		fields := make([]Append, len(t.Fields))
		for i, f := range t.Fields {
			fields[i] = e.debezium(f.Type, f.Mod, d, false)
		}
		return e.compositeOf(t, fields)
	case KindHstore:
		if d.Hstore == HstoreMap {
			return e.hstore(t)
		}
		return func(dst, text []byte) ([]byte, error) { return e.appendHstoreText(dst, text, t) }
	}
	return textAppend(t)
}

func (e *Encoder) debeziumBase(t *Type, mod int32, d *Debezium, element bool) Append {
	switch t.OID {
	case oidFloat4, oidFloat8:
		return func(dst, text []byte) ([]byte, error) { return appendDouble(dst, text, t) }
	case oidOID:
		return func(dst, text []byte) ([]byte, error) {
			if !isInteger(text) {
				return dst, malformed(t, reasonInteger)
			}
			return append(dst, text...), nil
		}
	case oidNumeric:
		return e.debeziumNumeric(t, mod, d)
	case oidMoney:
		return e.debeziumMoney(t, d)
	case oidBytea:
		return e.debeziumBytea(t, d)
	case oidBit, oidVarbit:
		return e.debeziumBits(t, mod)
	case oidDate, oidTime, oidTimestamp:
		return debeziumTime(t, mod, d, element)
	case oidTimestamptz:
		return func(dst, text []byte) ([]byte, error) { return appendZoned(dst, text, fractionDigits(mod), t) }
	case oidTimetz:
		return func(dst, text []byte) ([]byte, error) { return appendZonedTime(dst, text, t) }
	case oidInterval:
		if d.Interval == IntervalString {
			return func(dst, text []byte) ([]byte, error) { return appendISOInterval(dst, text, t) }
		}
		return func(dst, text []byte) ([]byte, error) { return appendMicroDuration(dst, text, t) }
	case oidPoint:
		return func(dst, text []byte) ([]byte, error) { return appendPoint(dst, text, t) }
	case oidJSON, oidJSONB:
		return textAppend(t) // a string that holds JSON
	}
	if t.Schema != "pg_catalog" {
		switch t.Name {
		case "geometry", "geography":
			return func(dst, text []byte) ([]byte, error) { return e.appendEWKB(dst, text, t) }
		case "vector", "halfvec":
			return func(dst, text []byte) ([]byte, error) { return appendVector(dst, text, t) }
		case "sparsevec":
			return func(dst, text []byte) ([]byte, error) { return appendSparseVector(dst, text, t) }
		}
	}
	return e.base(t)
}

// debeziumBytea gives base64 in the standard or the URL alphabet, or hex.
func (e *Encoder) debeziumBytea(t *Type, d *Debezium) Append {
	switch d.Binary {
	case BinaryHex:
		return func(dst, text []byte) ([]byte, error) {
			if len(text) < 2 || text[0] != '\\' || text[1] != 'x' || len(text)%2 != 0 || !isHex(text[2:]) {
				return dst, malformed(t, reasonBytea)
			}
			return appendQuoted(dst, text[2:]), nil
		}
	case BinaryBase64URLSafe:
		return func(dst, text []byte) ([]byte, error) {
			mark := len(e.scratch)
			var err error
			e.scratch, err = AppendBytea(e.scratch, text)
			if err == nil {
				dst = d.AppendBinary(dst, e.scratch[mark:])
			}
			e.release(mark)
			return dst, err
		}
	}
	return func(dst, text []byte) ([]byte, error) { return e.appendBytea(dst, text, t) }
}

// isHex tells whether s consists of hexadecimal digits as PostgreSQL prints them.
func isHex(s []byte) bool {
	for _, c := range s {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// debeziumBits gives a bit(1) as a boolean, and every other bit string as bytes of
// which the lowest comes first, without those above the highest bit set. That is how
// Debezium has it, and it leaves out how long the string is.
func (e *Encoder) debeziumBits(t *Type, mod int32) Append {
	if mod == 1 {
		return func(dst, text []byte) ([]byte, error) {
			switch string(text) {
			case "0":
				return append(dst, "false"...), nil
			case "1":
				return append(dst, "true"...), nil
			case "": // of a varbit(1), neither true nor false
				return append(dst, `""`...), nil
			}
			return dst, malformed(t, reasonBits)
		}
	}
	return func(dst, text []byte) ([]byte, error) {
		mark := len(e.scratch)
		defer e.release(mark)
		for end := len(text); end > 0; end -= 8 {
			var b byte
			for _, c := range text[max(0, end-8):end] {
				if c != '0' && c != '1' {
					return dst, malformed(t, reasonBits)
				}
				b = b<<1 | c&1
			}
			e.scratch = append(e.scratch, b)
		}
		bits := e.scratch[mark:]
		for len(bits) > 0 && bits[len(bits)-1] == 0 {
			bits = bits[:len(bits)-1]
		}
		return AppendBase64(dst, bits), nil
	}
}

// appendHstoreText appends an hstore as a string that holds a JSON object.
func (e *Encoder) appendHstoreText(dst, text []byte, t *Type) ([]byte, error) {
	mark := len(e.scratch)
	var err error
	e.nested, err = e.appendHstore(e.nested[:0], text, t)
	e.release(mark)
	if err == nil {
		dst, err = AppendString(dst, e.nested)
	}
	if cap(e.nested) > maxScratch {
		e.nested = nil
	}
	return dst, err
}

// UnavailableValue gives the JSON that stands for an unchanged TOAST value of type t:
// the placeholder in the form that fits the type, as Debezium has it.
func (d *Debezium) UnavailableValue(t *Type) []byte {
	t = t.Underlying()
	text, err := AppendString(nil, []byte(d.Unavailable))
	if err != nil {
		text = []byte(`"` + UnavailableValue + `"`) // the configuration is checked
	}
	switch {
	case t == nil:
	case t.Kind == KindBase && t.OID == oidBytea && d.Binary == BinaryBytes:
		return AppendBase64(nil, []byte(d.Unavailable))
	case t.Kind == KindHstore:
		object := append(append(append(append([]byte{'{'}, text...), ':'), text...), '}')
		if d.Hstore == HstoreMap {
			return object
		}
		text, _ = AppendString(nil, object)
	case t.Kind == KindArray:
		switch elem := t.Elem.Underlying(); {
		case elem != nil && (elem.OID == oidInt4 || elem.OID == oidInt8 || elem.OID == oidDate):
			return numbers(d.Unavailable)
		case elem != nil && elem.OID == oidBytea && d.Binary == BinaryBytes:
			text = AppendBase64(nil, []byte(d.Unavailable))
		}
		return append(append([]byte{'['}, text...), ']')
	}
	return text
}

// AppendBinary appends bytes that are no column's, such as a logical message's, in the
// form of bytea.
func (d *Debezium) AppendBinary(dst, data []byte) []byte {
	switch d.Binary {
	case BinaryHex:
		dst = append(dst, '"')
		dst = hex.AppendEncode(dst, data)
		return append(dst, '"')
	case BinaryBase64URLSafe:
		dst = append(dst, '"')
		dst = base64.URLEncoding.AppendEncode(dst, data)
		return append(dst, '"')
	}
	return AppendBase64(dst, data)
}

// numbers gives the bytes of s as a JSON array of numbers.
func numbers(s string) []byte {
	dst := []byte{'['}
	for i := range len(s) {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = fmt.Appendf(dst, "%d", int8(s[i]))
	}
	return append(dst, ']')
}

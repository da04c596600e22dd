package cdctest

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
)

// PlainJSON gives the JSON of a column's text under types: plain. Text of types
// without a form of their own becomes a string.
func PlainJSON(typ string, text *string) json.RawMessage {
	if text == nil {
		return json.RawMessage("null")
	}
	s := *text
	switch typ {
	case "int2", "int4", "int8", "oid":
		return json.RawMessage(s)
	case "float4", "float8":
		if strings.ContainsAny(s, "Ny") { // NaN, Infinity
			return quote(s)
		}
		return json.RawMessage(s)
	case "bool":
		if strings.HasPrefix(s, "t") {
			return json.RawMessage("true")
		}
		return json.RawMessage("false")
	case "json", "jsonb":
		return json.RawMessage(s)
	case "bytea":
		if b, err := hex.DecodeString(strings.TrimPrefix(s, `\x`)); err == nil {
			return quote(base64.StdEncoding.EncodeToString(b))
		}
		return quote(s)
	case "timestamp", "timestamptz":
		return quote(isoTime(s, typ == "timestamptz"))
	default:
		return quote(s)
	}
}

// isoTime turns PostgreSQL's "2026-12-01 05:54:20.5+00" into
// "2026-12-01T05:54:20.5Z"; the infinities stay.
func isoTime(s string, zone bool) string {
	if strings.HasSuffix(s, "infinity") {
		return s
	}
	s, bc := strings.CutSuffix(s, " BC")
	s = strings.Replace(s, " ", "T", 1)
	if zone {
		s = strings.TrimSuffix(s, "+00") + "Z"
	}
	if bc {
		s += " BC"
	}
	return s
}

func quote(s string) json.RawMessage {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // a string always encodes
	}
	return b
}

// sameJSON tells whether got is the JSON want. Strings are compared by what they
// say, since an encoder is free in its escapes; everything else byte for byte, so
// that no digit and no blank of an embedded document may change.
func sameJSON(got, want json.RawMessage) bool {
	if bytes.Equal(got, want) {
		return true
	}
	var g, w string
	if len(got) == 0 || len(want) == 0 || got[0] != '"' || want[0] != '"' ||
		json.Unmarshal(got, &g) != nil || json.Unmarshal(want, &w) != nil {
		return false
	}
	return g == w
}

// canonicalKey gives a record key in one form whatever its escapes are; an error
// where it is no JSON object.
func canonicalKey(key []byte) (string, error) {
	o, err := ParseObject(key)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, m := range o {
		fmt.Fprintf(&b, "%q=%s ", m.Name, canonicalValue(m.Raw))
	}
	return b.String(), nil
}

func canonicalValue(raw json.RawMessage) string {
	var s string
	if len(raw) > 0 && raw[0] == '"' && json.Unmarshal(raw, &s) == nil {
		return string(quote(s))
	}
	return string(raw)
}

// canonicalRowKey gives the same form for a row of the truth.
func (t *Table) canonicalRowKey(row Row) string {
	var b strings.Builder
	for i, c := range t.Columns {
		if c.Key {
			fmt.Fprintf(&b, "%q=%s ", c.Name, canonicalValue(PlainJSON(c.Type, row[i])))
		}
	}
	return b.String()
}

// shorten cuts a text for a message.
func shorten(b []byte) string {
	const most = 120
	if b == nil {
		return "null"
	}
	if len(b) <= most {
		return string(b)
	}
	return fmt.Sprintf("%s... (%d bytes)", b[:most], len(b))
}

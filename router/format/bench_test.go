package format

import (
	"fmt"
	"strings"
	"testing"
)

// families are the ways to encode a value, each with what it sets up.
func families(tb testing.TB) []struct {
	name string
	of   func(e *Encoder, t *Type) Append
} {
	def := resolved(tb, Debezium{})
	other := resolved(tb, Debezium{Decimal: DecimalDouble, Time: TimeISOString, Interval: IntervalString, Binary: BinaryBase64URLSafe, Hstore: HstoreMap})
	return []struct {
		name string
		of   func(e *Encoder, t *Type) Append
	}{
		{"plain", func(e *Encoder, t *Type) Append { return e.Plain(t) }},
		{"debezium", func(e *Encoder, t *Type) Append { return e.Debezium(t, benchMod(t), def) }},
		{"debezium-strings", func(e *Encoder, t *Type) Append { return e.Debezium(t, benchMod(t), other) }},
	}
}

// benchMod is numeric(12,2) for a numeric, and no modifier for all others.
func benchMod(t *Type) int32 {
	if t.OID == oidNumeric {
		return numericMod(12, 2)
	}
	return NoMod
}

// A value that costs an allocation costs it for each of a million rows.
func TestNothingIsAllocatedPerValue(t *testing.T) {
	r := mustTypes(t)
	for _, family := range families(t) {
		for name, text := range benchTexts() {
			var e Encoder
			enc, in := family.of(&e, mustNamed(t, r, name)), []byte(text)
			dst := make([]byte, 0, 4096)
			run := func() {
				var err error
				if dst, err = enc(dst[:0], in); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
			run() // the scratch stack grows once
			if n := testing.AllocsPerRun(50, run); n != 0 {
				t.Errorf("%s %s: %v allocations", family.name, name, n)
			}
		}
	}
}

// benchTexts holds one typical value for each form that a type can have.
func benchTexts() map[string]string {
	return map[string]string{
		"int4": `2147483647`, "int8": `9223372036854775807`, "float8": `0.1234567890123456`, "bool": `t`, "numeric": `1234567.89`, "money": `$1,234.50`,
		"_numeric": `{12345678901234567890123456789.12345678901234567890,1.5}`, "varbit": `1010101010101010101`, "point": `(1.5,-2)`, "oid": `4294967295`,
		"text": `a line of text, as people write it`, "varchar": "zwölf Boxkämpfer jagen \"Viktor\"", "bytea": `\x` + strings.Repeat("00ff10", 16),
		"date": `2026-12-01`, "timestamp": `2026-12-01 05:54:20.123456`, "timestamptz": `2026-12-01 05:54:20.123456+00`, "time": `05:54:20.123456`, "timetz": `05:54:20.123456+02`,
		"interval": `1 year 2 mons 3 days 04:05:06.789`, "geometry": `0101000020E6100000000000000000F03F0000000000000040`, "vector": `[1,2.5,3.25,-4]`, "sparsevec": `{1:1.5,3:2}/5`,
		"uuid": `3fa85f64-5717-4562-b3fc-2c963f66afa6`, "jsonb": `{"id": 1, "name": "x", "lines": [{"sku": "a", "n": 2}, {"sku": "b", "n": 1}]}`, "inet": `192.168.1.5/24`, "tstzrange": `["2026-12-01 05:54:20+00",)`,
		"_int4": `{1,NULL,3,4,5,6,7,8}`, "_text": `{plain,"with blank","q\"q","b\\s",NULL}`, "_jsonb": `{"{\"a\": 1.10}","\"s\""}`,
		"addr":   `("12 ""Main"" St, N",7,1.10,"2026-12-01 05:54:20+00","{a,""b \\""c\\""""}")`,
		"hstore": `"a"=>"1", "b"=>NULL, "q\"u"=>"b\\s"`, "mood": `happy`, "_bytea": `{"\\x00ff","\\x"}`, "citext": `Straße`,
	}
}

func BenchmarkValue(b *testing.B) {
	r := mustTypes(b)
	for _, family := range families(b) {
		for name, text := range benchTexts() {
			b.Run(family.name+"/"+name, func(b *testing.B) {
				var e Encoder
				enc, in := family.of(&e, mustNamed(b, r, name)), []byte(text)
				dst := make([]byte, 0, 4096)
				b.SetBytes(int64(len(in)))
				b.ReportAllocs()
				for b.Loop() {
					dst, _ = enc(dst[:0], in)
				}
			})
		}
	}
}

// A whole row as the router writes it: names and values of ordinary types. What
// debezium may cost is 1.5 times plain.
func BenchmarkRow(b *testing.B) {
	texts := benchTexts()
	kinds := []string{"int8", "uuid", "text", "numeric", "timestamptz", "bool", "int4", "varchar", "jsonb", "float8"}
	for _, columns := range []int{10, 30} {
		for _, family := range families(b) {
			b.Run(fmt.Sprintf("%d-columns/%s", columns, family.name), func(b *testing.B) {
				var e Encoder
				var names, values [][]byte
				var encs []Append
				size := 0
				for i := range columns {
					kind := kinds[i%len(kinds)]
					names = append(names, QuoteName(fmt.Sprintf("column_%d", i)))
					encs = append(encs, family.of(&e, builtinNamed(kind)))
					values = append(values, []byte(texts[kind]))
					size += len(texts[kind])
				}
				dst := make([]byte, 0, 8192)
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					dst = append(dst[:0], '{')
					for i, enc := range encs {
						if i > 0 {
							dst = append(dst, ',')
						}
						dst = append(dst, names[i]...)
						dst, _ = enc(dst, values[i])
					}
					dst = append(dst, '}')
				}
			})
		}
	}
}

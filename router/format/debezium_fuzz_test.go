package format

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"math/big"
	"strings"
	"testing"
	"unicode/utf8"
)

// fuzzDebezium is fuzzValid for every option of Debezium's that the types know.
func fuzzDebezium(f *testing.F, types []string, mods []int32, seeds ...string) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	r := mustTypes(f)
	var all []*Debezium
	for _, d := range []Debezium{{}, {Decimal: DecimalString, Time: TimeISOString, Interval: IntervalString, Binary: BinaryHex, Hstore: HstoreMap},
		{Decimal: DecimalDouble, Time: TimeConnect, Binary: BinaryBase64URLSafe}, {Time: TimeAdaptiveMicros, Binary: BinaryBase64}} {
		all = append(all, resolved(f, d))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var e Encoder
		for _, name := range types {
			for _, mod := range mods {
				for _, d := range all {
					got, err := e.Debezium(mustNamed(t, r, name), mod, d)([]byte("["), text)
					var ve *ValueError
					switch {
					case err == nil && (!json.Valid(append(got, ']')) || !utf8.Valid(got)):
						t.Errorf("%s(%d) %q: %s is no JSON", name, mod, text, got)
					case err != nil && (!errors.As(err, &ve) || string(got) != "["):
						t.Errorf("%s(%d) %q: %s, %v", name, mod, text, got, err)
					}
					if len(e.scratch) != 0 {
						t.Errorf("%s %q: %d bytes left on the scratch stack", name, text, len(e.scratch))
					}
				}
			}
		}
	})
}

func FuzzDebeziumTimes(f *testing.F) {
	fuzzDebezium(f, []string{"date", "time", "timetz", "timestamp", "timestamptz"}, []int32{-1, 0, 3, 5},
		`2026-12-01`, `infinity`, `24:00:00`, `11:51:30.123789+02:30`, `2026-12-01 05:54:20.1`, `0044-03-15 12:00:00+00 BC`, `294276-12-31 23:59:59.999999`)
}

func FuzzDebeziumInterval(f *testing.F) {
	fuzzDebezium(f, []string{"interval"}, []int32{-1}, `1 year 2 mons 3 days 04:05:06.789`, `-1 years -2 days +03:04:05`, `00:00:00`, `178000000 years`, `-2562047788:00:54.775808`, `infinity`)
}

func FuzzDebeziumScalars(f *testing.F) {
	fuzzDebezium(f, []string{"money", "bytea", "bit", "varbit", "point", "float8", "geometry", "vector", "sparsevec", "hstore", "jsonb"}, []int32{-1, 1, 4},
		`$1,234.50`, `($0.01)`, `0E0`, `\x00ff`, `1010`, `(1.5,-2)`, `0101000020E6100000`, `[1,2.5]`, `{1:1.5}/3`, `"a"=>"1", "b"=>NULL`, `{"a":1}`)
}

func FuzzDebeziumArrays(f *testing.F) {
	fuzzDebezium(f, []string{"_int4", "_numeric", "_timestamptz", "_date", "_addr", "_hstore", "_bytea", "addr"}, []int32{-1, numericMod(6, 2)},
		`{1,NULL,3}`, `{1.50,NaN}`, `{00000}`, `{infinity,2026-12-01}`, `{"(\"x y\",1,2,,)",NULL}`, `{"\"a\"=>\"1\""}`, `{{1},{2}}`, `(a,1,2.5,"2026-12-01 05:54:20+00",{a})`)
}

// A numeric is the number that the standard library reads, whichever of our ways it
// takes.
func FuzzDebeziumNumeric(f *testing.F) {
	for _, s := range []string{"0", "-0.00", "12.30", "-999.99", "123456789012345678", "1234567890123456789", "-0.000000000000000000001", "9223372036854775808", "NaN"} {
		f.Add(s, int8(2))
	}
	precise, double := resolved(f, Debezium{}), resolved(f, Debezium{Decimal: DecimalDouble})
	f.Fuzz(func(t *testing.T, text string, scale int8) {
		var e Encoder
		typ := builtinNamed("numeric")
		pair, err := e.Debezium(typ, NoMod, precise)(nil, []byte(text))
		if (err == nil) != (isNumeric(text) || isSpecial(text)) {
			t.Fatalf("%q: %s, %v", text, pair, err)
		}
		if err != nil || isSpecial(text) {
			return
		}
		want, _ := new(big.Rat).SetString(text)
		var v struct {
			Scale int64
			Value []byte
		}
		if json.Unmarshal(pair, &v) != nil || shifted(fromTwosComplement(v.Value), v.Scale).Cmp(want) != 0 {
			t.Errorf("%q: %s", text, pair)
		}
		if fixed, err := e.Debezium(typ, numericMod(1000, int32(scale)), precise)(nil, []byte(text)); err == nil {
			raw, err := base64.StdEncoding.DecodeString(strings.Trim(string(fixed), `"`))
			if err != nil || shifted(fromTwosComplement(raw), int64(scale)).Cmp(want) != 0 {
				t.Errorf("%q at scale %d: %s, %v", text, scale, fixed, err)
			}
		} else if s := new(big.Rat).Mul(want, shifted(big.NewInt(1), -int64(scale))); s.IsInt() {
			t.Errorf("%q at scale %d: %v", text, scale, err)
		}
		got, err := e.Debezium(typ, NoMod, double)(nil, []byte(text))
		var number float64
		if f, _ := want.Float64(); err != nil || json.Unmarshal(got, &number) == nil && number != f {
			t.Errorf("%q: %s, %v", text, got, err)
		}
	})
}

// shifted is v divided by ten to the power of scale.
func shifted(v *big.Int, scale int64) *big.Rat {
	ten := new(big.Int).Exp(big.NewInt(10), big.NewInt(max(scale, -scale)), nil)
	if scale < 0 {
		return new(big.Rat).SetInt(ten.Mul(ten, v))
	}
	return new(big.Rat).SetFrac(v, ten)
}

func isSpecial(s string) bool { return s == "NaN" || s == "Infinity" || s == "-Infinity" }

func isNumeric(s string) bool {
	whole, frac, point := strings.Cut(strings.TrimPrefix(s, "-"), ".")
	return whole != "" && (whole == "0" || whole[0] != '0') && strings.Trim(whole, "0123456789") == "" && strings.Trim(frac, "0123456789") == "" && (frac != "" || !point)
}

package format

import (
	"encoding/json"
	"errors"
	"math"
	"math/big"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// resolved is d with Debezium's defaults.
func resolved(t testing.TB, d Debezium) *Debezium {
	t.Helper()
	d, err := d.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	return &d
}

// numericMod is the modifier of numeric(precision, scale).
func numericMod(precision, scale int32) int32 { return (precision<<16 | scale&0x7ff) + 4 }

func TestDebezium(t *testing.T) {
	nines := strings.Repeat("9", 200)
	type row struct {
		name string
		mod  int32
		text string
		want string
	}
	for _, group := range []struct {
		name string
		d    Debezium
		rows []row
	}{
		{"numbers by default", Debezium{}, []row{
			{"int2", -1, `-32768`, `-32768`}, {"int8", -1, `9223372036854775807`, `9223372036854775807`}, {"oid", -1, `4294967295`, `4294967295`},
			{"float4", -1, `1.5`, `1.5`}, {"float8", -1, `4`, `4.0`}, {"float8", -1, `-0`, `-0.0`}, {"float4", -1, `1e-10`, `1e-10`}, {"float8", -1, `1e+300`, `1e+300`},
			{"float4", -1, `NaN`, `"NaN"`}, {"float8", -1, `-Infinity`, `"-Infinity"`}, {"bool", -1, `t`, `true`},
		}},
		{"a numeric with a scale is its unscaled value", Debezium{}, []row{
			{"numeric", numericMod(5, 2), `12.30`, `"BM4="`}, {"numeric", numericMod(5, 2), `-999.99`, `"/nlh"`}, {"numeric", numericMod(5, 2), `0.00`, `"AA=="`},
			{"numeric", numericMod(10, 0), `42`, `"Kg=="`}, {"numeric", numericMod(10, 0), `-1`, `"/w=="`}, {"numeric", numericMod(5, 2), `1.00`, `"ZA=="`},
			{"numeric", numericMod(4, 0), `127`, `"fw=="`}, {"numeric", numericMod(4, 0), `128`, `"AIA="`}, {"numeric", numericMod(4, 0), `-128`, `"gA=="`}, {"numeric", numericMod(4, 0), `-129`, `"/38="`},
			{"numeric", numericMod(30, 2), `12345678901234567890.12`, `"Qu0SOwvYIDoU"`}, {"numeric", numericMod(5, 2), `1`, `"ZA=="`},
			{"numeric", numericMod(5, -2), `12300`, `"ew=="`}, {"numeric", numericMod(5, -2), `0`, `"AA=="`},
			{"numeric", numericMod(3, 5), `0.00123`, `"ew=="`}, {"_numeric", numericMod(6, 2), `{1.50,NULL}`, `["AJY=",null]`},
			{"price", -1, `1.50`, `"AJY="`},
		}},
		{"a numeric without is a pair", Debezium{}, []row{
			{"numeric", -1, `123.456`, `{"scale":3,"value":"AeJA"}`}, {"numeric", -1, `-0.000000000000000000001`, `{"scale":21,"value":"/w=="}`},
			{"numeric", -1, `1000000000000000000000000000000`, `{"scale":0,"value":"DJ8snNBGdO3qQAAAAA=="}`}, {"numeric", -1, `0.10`, `{"scale":1,"value":"AQ=="}`},
			{"numeric", -1, `1000`, `{"scale":0,"value":"A+g="}`}, {"numeric", -1, `100.00`, `{"scale":0,"value":"ZA=="}`}, {"numeric", -1, `0.00001`, `{"scale":5,"value":"AQ=="}`},
			{"numeric", -1, `12345678901234567890.12345678901234567890`, `{"scale":19,"value":"XODppWAV/sWq36MorjmBFQ=="}`},
			{"numeric", -1, nines, `{"scale":0,"value":"AU5xjX12JaLZaFHxWALKw7aBQe6ZtEQnMGjsE98kk5H926YMaE1FRgieh96JtDprzT8Wk4KIdTy5suD/////////////////////////////////"}`},
		}},
		{"money has two digits, whatever separates them", Debezium{}, []row{
			{"money", -1, `$12.34`, `"BNI="`}, {"money", -1, `-$0.01`, `"/w=="`}, {"money", -1, `$92,233,720,368,547,758.07`, `"f/////////8="`}, {"money", -1, `$0.00`, `"AA=="`},
			{"money", -1, `-$92,233,720,368,547,758.08`, `"gAAAAAAAAAA="`}, {"money", -1, `12,34 €`, `"BNI="`}, {"money", -1, `Rs. 1,234`, `"AeII"`}, {"money", -1, `($1.50)`, `"/2o="`}, {"money", -1, `$1.5`, `"AJY="`},
		}},
		{"decimals as strings", Debezium{Decimal: DecimalString}, []row{
			{"numeric", -1, `100.00`, `"100.00"`}, {"numeric", numericMod(5, 2), `12.30`, `"12.30"`}, {"numeric", -1, `NaN`, `"NAN"`}, {"numeric", -1, `Infinity`, `"POSITIVE_INFINITY"`}, {"numeric", -1, `-Infinity`, `"NEGATIVE_INFINITY"`},
			{"money", -1, `$12.34`, `"12.34"`}, {"money", -1, `-$0.01`, `"-0.01"`}, {"money", -1, `$92,233,720,368,547,758.07`, `"92233720368547758.07"`}, {"_numeric", numericMod(6, 2), `{1.50,NULL}`, `["1.50",null]`},
		}},
		{"decimals as doubles", Debezium{Decimal: DecimalDouble}, []row{
			{"numeric", -1, `123.456`, `123.456`}, {"numeric", numericMod(10, 0), `42`, `42.0`}, {"numeric", -1, `12345678901234567890.12345678901234567890`, `1.2345678901234567e+19`},
			{"numeric", -1, `-0.000000000000000000001`, `-1e-21`}, {"numeric", -1, nines, `1e+200`}, {"numeric", -1, `NaN`, `"NaN"`}, {"numeric", -1, strings.Repeat("9", 400), `"Infinity"`}, {"numeric", -1, "-" + strings.Repeat("9", 400), `"-Infinity"`},
			{"numeric", -1, `0.0000000000000000`, `0.0`}, {"numeric", -1, `123456789012345678`, `1.2345678901234568e+17`},
			{"money", -1, `$92,233,720,368,547,758.07`, `9.223372036854776e+16`}, {"money", -1, `$12.34`, `12.34`},
		}},
		{"texts", Debezium{}, []row{
			{"bpchar", 9, `ab   `, `"ab   "`}, {"json", -1, `{"b":1,  "a":1.10,"a":9007199254740993}`, `"{\"b\":1,  \"a\":1.10,\"a\":9007199254740993}"`}, {"jsonb", -1, `null`, `"null"`},
			{"name", -1, `name`, `"name"`}, {"xml", -1, `<a b="1">x</a>`, `"<a b=\"1\">x</a>"`}, {"uuid", -1, `11111111-2222-3333-4444-555555555555`, `"11111111-2222-3333-4444-555555555555"`},
			{"mood", -1, `ok`, `"ok"`}, {"citext", -1, `CiText`, `"CiText"`}, {"tsvector", -1, `'cat' 'fat'`, `"'cat' 'fat'"`}, {"posint", -1, `5`, `5`},
			{"hstore", -1, `"a"=>"1", "b"=>NULL`, `"{\"a\":\"1\",\"b\":null}"`}, {"hstore", -1, ``, `"{}"`}, {"hstore", -1, `"k k"=>"v\"v"`, `"{\"k k\":\"v\\\"v\"}"`}, {"_hstore", -1, `{"\"a\"=>\"1\"",NULL}`, `["{\"a\":\"1\"}",null]`},
			{"tstzrange", -1, `["2026-01-01 00:00:00+00",)`, `"[\"2026-01-01 00:00:00+00\",)"`}, {"inet", -1, `::1`, `"::1"`}, {"pg_lsn", -1, `0/16B3748`, `"0/16B3748"`}, {"int4multirange", -1, `{[1,3)}`, `"{[1,3)}"`},
		}},
		{"hstore as a map", Debezium{Hstore: HstoreMap}, []row{{"hstore", -1, `"a"=>"1", "b"=>NULL`, `{"a":"1","b":null}`}}},
		{"bytes and bits", Debezium{}, []row{
			{"bytea", -1, `\x00ff10`, `"AP8Q"`}, {"bytea", -1, `\x`, `""`}, {"bit", 1, `1`, `true`}, {"bit", 1, `0`, `false`}, {"bit", 4, `1010`, `"Cg=="`}, {"bit", 4, `0000`, `""`},
			{"bit", 20, `10000000000000000001`, `"AQAI"`}, {"varbit", 12, `101`, `"BQ=="`}, {"varbit", -1, `1`, `"AQ=="`}, {"varbit", -1, ``, `""`}, {"varbit", 1, ``, `""`}, {"bit", 20, strings.Repeat("1", 20), `"//8P"`},
			{"varbit", 12, strings.Repeat("1", 12), `"/w8="`}, {"varbit", -1, `10101010101010101`, `"VVUB"`}, {"_bytea", -1, `{"\\x01",NULL}`, `["AQ==",null]`}, {"_varbit", 4, `{101,NULL}`, `["BQ==",null]`},
		}},
		{"bytes as hex", Debezium{Binary: BinaryHex}, []row{{"bytea", -1, `\xdeadbeef`, `"deadbeef"`}, {"_bytea", -1, `{"\\x01",NULL}`, `["01",null]`}, {"bit", 4, `1010`, `"Cg=="`}}},
		{"bytes as base64", Debezium{Binary: BinaryBase64}, []row{{"bytea", -1, `\xfbff`, `"+/8="`}}},
		{"bytes as base64 for URLs", Debezium{Binary: BinaryBase64URLSafe}, []row{{"bytea", -1, `\xfbff`, `"-_8="`}}},
		{"adaptive times", Debezium{}, []row{
			{"date", -1, `2026-12-01`, `20788`}, {"date", -1, `1970-01-01`, `0`}, {"date", -1, `0044-03-15 BC`, `-735160`}, {"date", -1, `12345-01-01`, `3789391`}, {"date", -1, `1582-10-10`, `-141432`},
			{"date", -1, `infinity`, `-2147472692`}, {"date", -1, `-infinity`, `-2147472691`}, {"date", -1, `5874897-12-31`, `2145042905`}, {"date", -1, `4713-11-24 BC`, `-2440222`}, {"date", -1, `0001-02-28 BC`, `-719470`},
			{"_date", -1, `{2026-12-01,infinity,-infinity}`, `[20788,-622191234,-625821272]`},
			{"time", -1, `11:51:30.123456`, `42690123456`}, {"time", 0, `11:51:30`, `42690000`}, {"time", 3, `11:51:30.123`, `42690123`}, {"time", 6, `24:00:00`, `86400000000`}, {"time", 4, `00:00:00.0001`, `100`},
			{"timestamp", -1, `2026-12-01 05:54:20.123456`, `1796104460123456`}, {"timestamp", 0, `2026-12-01 05:54:20`, `1796104460000`}, {"timestamp", 3, `2026-12-01 05:54:20.123`, `1796104460123`},
			{"timestamp", -1, `infinity`, `9223372036825200000`}, {"timestamp", 0, `infinity`, `9223372036825200`}, {"timestamp", 3, `-infinity`, `-9223372036832400`}, {"timestamp", -1, `-infinity`, `-9223372036832400000`},
			{"timestamp", -1, `0044-03-15 12:00:00 BC`, `-63517780800000000`}, {"timestamp", -1, `12345-01-01 00:00:00`, `327403382400000000`}, {"timestamp", 0, `1969-12-31 23:59:59`, `-1000`}, {"timestamp", 3, `1969-12-31 23:59:59.999`, `-1`},
			{"timestamp", -1, `1582-10-10 00:00:00`, `-12219724800000000`}, {"timestamp", -1, `294276-12-31 23:59:59.999999`, `9224318015999999999`}, {"_timestamp", -1, `{"2026-12-01 05:54:20.5"}`, `[1796104460500000]`},
			{"timestamptz", -1, `2026-12-01 00:24:20.123456+00`, `"2026-12-01T00:24:20.123456Z"`}, {"timestamptz", 0, `2026-12-01 05:54:20+00`, `"2026-12-01T05:54:20Z"`}, {"timestamptz", 3, `2026-12-01 05:54:20.12+00`, `"2026-12-01T05:54:20.120Z"`},
			{"timestamptz", -1, `infinity`, `"infinity"`}, {"timestamptz", 3, `-infinity`, `"-infinity"`}, {"timestamptz", -1, `0044-03-15 12:00:00+00 BC`, `"-0043-03-15T12:00:00.000000Z"`}, {"timestamptz", -1, `0001-03-15 12:00:00+00 BC`, `"0000-03-15T12:00:00.000000Z"`},
			{"timestamptz", -1, `12345-01-01 00:00:00+00`, `"+12345-01-01T00:00:00.000000Z"`}, {"timestamptz", 3, `1900-01-01 00:00:00.001+00`, `"1900-01-01T00:00:00.001Z"`}, {"_timestamptz", -1, `{"2026-12-01 05:54:20.5+00"}`, `["2026-12-01T05:54:20.500000Z"]`},
			{"timetz", -1, `11:51:30.123789+02`, `"09:51:30.123789Z"`}, {"timetz", -1, `11:51:02+00`, `"11:51:02Z"`}, {"timetz", -1, `00:00:00-12`, `"12:00:00Z"`}, {"timetz", -1, `23:30:00-05:30`, `"05:00:00Z"`}, {"timetz", -1, `00:00:01+00:00:02`, `"23:59:59Z"`}, {"timetz", -1, `24:00:00+00`, `"24:00:00Z"`}, {"timetz", -1, `01:02:03.5+00`, `"01:02:03.5Z"`},
		}},
		{"times in microseconds, timestamps adaptive", Debezium{Time: TimeAdaptiveMicros}, []row{{"time", 0, `11:51:30`, `42690000000`}, {"timestamp", 0, `2026-12-01 05:54:20`, `1796104460000`}, {"timestamp", -1, `2026-12-01 05:54:20`, `1796104460000000`}}},
		{"Connect's times are in milliseconds", Debezium{Time: TimeConnect}, []row{
			{"time", -1, `11:51:30.123456`, `42690123`}, {"timestamp", -1, `2026-12-01 05:54:20.123456`, `1796104460123`}, {"timestamp", -1, `infinity`, `9223372036825200`}, {"timestamp", -1, `1969-12-31 23:59:59.9995`, `-1`},
			{"date", -1, `2026-12-01`, `20788`}, {"timestamptz", -1, `2026-12-01 00:24:20.123456+00`, `"2026-12-01T00:24:20.123456Z"`}, {"time", -1, `24:00:00`, `86400000`},
		}},
		{"times as ISO text", Debezium{Time: TimeISOString}, []row{
			{"date", -1, `2026-12-01`, `"2026-12-01Z"`}, {"date", -1, `0044-03-15 BC`, `"-0043-03-15Z"`}, {"date", -1, `12345-01-01`, `"+12345-01-01Z"`}, {"date", -1, `infinity`, `"infinity"`},
			{"time", -1, `11:51:30.123456`, `"11:51:30.123456Z"`}, {"time", 0, `11:51:30`, `"11:51:30Z"`}, {"time", -1, `24:00:00`, `"24:00:00Z"`},
			{"timestamp", -1, `2026-12-01 05:54:20.5`, `"2026-12-01T05:54:20.5Z"`}, {"timestamp", -1, `0044-03-15 12:00:00 BC`, `"-0043-03-15T12:00:00Z"`}, {"timestamp", 0, `-infinity`, `"-infinity"`},
		}},
		{"intervals", Debezium{}, []row{
			{"interval", -1, `1 year 2 mons 3 days 04:05:06.789`, `37091106789000`}, {"interval", -1, `-1 years -2 days +03:04:05`, `-31719355000000`}, {"interval", -1, `00:00:00`, `0`}, {"interval", -1, `178000000 years`, `9223372036854775807`},
			{"interval", -1, `-178000000 years`, `-9223372036854775808`}, {"interval", -1, `-00:00:00.000001`, `-1`}, {"interval", -1, `1 mon`, `2629800000000`}, {"interval", -1, `2562047788:00:54.775807`, `9223372036854775807`}, {"interval", -1, `1 day -2562047788:00:54.775808`, `-9223371950454775808`}, {"interval", -1, `1000 years 00:00:00.000001`, `31557600000000001`},
			{"interval", -1, `infinity`, `9223372036854775807`}, {"interval", -1, `-infinity`, `-9223372036854775808`},
		}},
		{"intervals as text", Debezium{Interval: IntervalString}, []row{
			{"interval", -1, `1 year 2 mons 3 days 04:05:06.789`, `"P1Y2M3DT4H5M6.789S"`}, {"interval", -1, `-1 years -2 days +03:04:05`, `"P-1Y0M-2DT3H4M5S"`}, {"interval", -1, `00:00:00`, `"P0Y0M0DT0H0M0S"`}, {"interval", -1, `178000000 years`, `"P178000000Y0M0DT0H0M0S"`},
			{"interval", -1, `-00:00:00.000001`, `"P0Y0M0DT0H0M-0.000001S"`}, {"interval", -1, `1 day -04:05:06.7`, `"P0Y0M1DT-4H-5M-6.7S"`}, {"interval", -1, `infinity`, `"infinity"`},
		}},
		{"points", Debezium{}, []row{{"point", -1, `(1.5,-2)`, `{"x":1.5,"y":-2.0,"wkb":"AQEAAAAAAAAAAAD4PwAAAAAAAADA","srid":null}`}, {"point", -1, `(NaN,Infinity)`, `{"x":"NaN","y":"Infinity","wkb":"AQEAAAABAAAAAAD4fwAAAAAAAPB/","srid":null}`},
			{"line", -1, `{1,2,3}`, `"{1,2,3}"`}, {"_point", -1, `{"(1,2)"}`, `[{"x":1.0,"y":2.0,"wkb":"AQEAAAAAAAAAAADwPwAAAAAAAABA","srid":null}]`}}},
		{"composites are objects, fields by the same rules", Debezium{}, []row{
			{"addr", -1, `("a b",7,1.10,"2026-12-01 05:54:20+00","{a,b}")`, `{"street":"a b","no":7,"price":{"scale":1,"value":"Cw=="},"at":"2026-12-01T05:54:20.000000Z","tags":["a","b"]}`},
			{"_addr", -1, `{"(,,,,)",NULL}`, `[{"street":null,"no":null,"price":null,"at":null,"tags":null},null]`}}},
		{"arrays", Debezium{}, []row{
			{"_int4", -1, `{1,NULL,3}`, `[1,null,3]`}, {"_int4", -1, `{{1,2},{3,4}}`, `[[1,2],[3,4]]`}, {"_float8", -1, `{1.5,NaN,Infinity}`, `[1.5,"NaN","Infinity"]`}, {"_jsonb", -1, `{"{\"a\": 1}","null"}`, `["{\"a\": 1}","null"]`}, {"_mood", -1, `{ok,sad}`, `["ok","sad"]`}}},
		{"other extensions", Debezium{}, []row{
			{"geometry", -1, `0101000020E6100000000000000000F03F0000000000000040`, `{"wkb":"AQEAACDmEAAAAAAAAAAA8D8AAAAAAAAAQA==","srid":4326}`},
			{"geometry", -1, `0101000000000000000000F03F0000000000000040`, `{"wkb":"AQEAAAAAAAAAAADwPwAAAAAAAABA","srid":null}`}, {"geometry", -1, `00200000010000ffff`, `{"wkb":"ACAAAAEAAP//","srid":65535}`},
			{"geometry", -1, `POINT(1 2)`, `"POINT(1 2)"`}, {"geometry", -1, `0101000020E6`, `"0101000020E6"`}, {"vector", -1, `[1,2.5,1e-05]`, `[1.0,2.5,1e-05]`}, {"vector", -1, `[]`, `[]`}, {"vector", -1, `north`, `"north"`}, {"vector", -1, `[1,x]`, `"[1,x]"`},
			{"sparsevec", -1, `{1:1.5,3:2}/5`, `{"dimensions":5,"vector":[[1,1.5],[3,2.0]]}`}, {"sparsevec", -1, `{}/5`, `{"dimensions":5,"vector":[]}`}, {"sparsevec", -1, `{1:}/5`, `"{1:}/5"`}}},
	} {
		t.Run(group.name, func(t *testing.T) {
			var e Encoder
			d := resolved(t, group.d)
			r := mustTypes(t)
			for _, row := range group.rows {
				got, err := e.Debezium(mustNamed(t, r, row.name), row.mod, d)([]byte("x"), []byte(row.text))
				if err != nil || string(got) != "x"+row.want {
					t.Errorf("%s(%d) %q: %s, %v, want %s", row.name, row.mod, row.text, got, err, row.want)
				}
			}
		})
	}
	got, err := new(Encoder).Debezium(nil, -1, resolved(t, Debezium{}))(nil, []byte("x"))
	if string(got) != `"x"` || err != nil {
		t.Errorf("an unknown type: %s, %v", got, err)
	}
}

// What Debezium turns into null, because Decimal has no NaN, stays what it is.
func TestDebeziumDoesNotTurnNaNIntoNull(t *testing.T) {
	var e Encoder
	d := resolved(t, Debezium{})
	for _, mod := range []int32{NoMod, numericMod(5, 2)} {
		for _, text := range []string{"NaN", "Infinity", "-Infinity"} {
			if got, err := e.Debezium(builtinNamed("numeric"), mod, d)(nil, []byte(text)); string(got) != `"`+text+`"` || err != nil {
				t.Errorf("%s: %s, %v", text, got, err)
			}
		}
	}
}

func TestDebeziumRefusesWhatIsNotOfTheType(t *testing.T) {
	var e Encoder
	r := mustTypes(t)
	for _, d := range []Debezium{{}, {Decimal: DecimalDouble, Time: TimeISOString, Interval: IntervalString, Binary: BinaryHex, Hstore: HstoreMap}, {Binary: BinaryBase64URLSafe, Time: TimeConnect}} {
		for _, c := range [][]string{
			{"int4", "x", "1.0"}, {"oid", "", "x"}, {"float8", "", "inf", "0x1"}, {"numeric", "", "-", "1.", ".5", "1e5", "1.2.3", "nan"},
			{"money", "", "$", "$1.2345", "$999,999,999,999,999,999,999.00", "$92,233,720,368,547,758.08"}, {"bytea", "", `\000`, `\xf`, `\xfg`}, {"bit", "2", "1012"},
			{"date", "", "01.12.2026", "2026-13-01", "2026-00-01", "2026-12-32", "0000-01-01", "12345678-01-01", "2026-12-01 x", "2026-12-01 AD"}, {"time", "", "1:02:03", "01:02", "01:02:03.1234567", "01:02:03x"},
			{"timestamp", "2026-12-01", "2026-12-01 01:02:03 AD", "2026-12-01T01:02:03", "2026-12-01 01:02:03xyz"}, {"timestamptz", "2026-12-01 01:02:03", "2026-12-01 01:02:03+05:30"},
			{"timetz", "01:02:03", "01:02:03Z", "01:02:03+1", "01:02:03+01:", "01:02:03+01:02:03:04"}, {"interval", "", "1", "1 yearx", "P1Y", "1 day 01:02", "2562047788:00:54.775808", "99999999999:00:00", "1 day x", "00:00:00 1 day", "1 "},
			{"point", "", "1,2", "(1)", "(a,b)", "(1,2", "(0x1,2)"}, {"hstore", "x"}, {"_date", "{x}"}, {"addr", "(x)"},
		} {
			if d.Time == TimeISOString && c[0] == "date" {
				c = []string{"date", "", "01.12.2026", "2026-12-01 x"} // copied, so that the calendar is PostgreSQL's
			}
			for _, text := range c[1:] {
				typ := mustNamed(t, r, c[0])
				got, err := e.Debezium(typ, NoMod, resolved(t, d))([]byte("x"), []byte(text))
				var ve *ValueError
				if !errors.As(err, &ve) || string(got) != "x" || ve.Type != typ.String() && c[0] != "_date" && c[0] != "addr" {
					t.Errorf("%s %q: %s, %v", c[0], text, got, err)
				}
			}
		}
	}
	if got, err := e.Debezium(builtinNamed("numeric"), numericMod(5, 2), resolved(t, Debezium{}))(nil, []byte("1.234")); err == nil {
		t.Errorf("a digit too many became %s", got)
	}
	if got, err := e.Debezium(builtinNamed("numeric"), numericMod(5, -2), resolved(t, Debezium{}))(nil, []byte("1234")); err == nil {
		t.Errorf("a digit too many became %s", got)
	}
}

func TestDebeziumOptions(t *testing.T) {
	d, err := Debezium{}.Resolve()
	if want := (Debezium{DecimalPrecise, TimeAdaptive, IntervalNumeric, BinaryBytes, HstoreJSON, UnavailableValue}); err != nil || d != want {
		t.Errorf("defaults %+v, %v", d, err)
	}
	if _, err := (Debezium{Decimal: "exact"}).Resolve(); err == nil || !strings.Contains(err.Error(), "decimal-handling") {
		t.Errorf("got %v", err)
	}
}

func TestUnavailableValuesFitTheirType(t *testing.T) {
	r := mustTypes(t)
	for _, c := range []struct {
		d    Debezium
		typ  string
		want string
	}{
		{Debezium{}, "text", `"__debezium_unavailable_value"`}, {Debezium{}, "jsonb", `"__debezium_unavailable_value"`},
		{Debezium{}, "bytea", `"X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="`}, {Debezium{Binary: BinaryHex}, "bytea", `"__debezium_unavailable_value"`},
		{Debezium{}, "_text", `["__debezium_unavailable_value"]`}, {Debezium{Unavailable: "aé"}, "_int8", `[97,-61,-87]`}, {Debezium{Unavailable: `"`}, "numeric", `"\""`},
		{Debezium{Unavailable: "u"}, "hstore", `"{\"u\":\"u\"}"`}, {Debezium{Unavailable: "u", Hstore: HstoreMap}, "hstore", `{"u":"u"}`}, {Debezium{Unavailable: "u"}, "ints", `[117]`}, {Debezium{Unavailable: "u"}, "_bytea", `["dQ=="]`},
	} {
		if got := resolved(t, c.d).UnavailableValue(mustNamed(t, r, c.typ)); string(got) != c.want {
			t.Errorf("%s: %s, want %s", c.typ, got, c.want)
		}
	}
}

// The unscaled value is what the standard library makes of it.
func TestUnscaledValuesAreBigInts(t *testing.T) {
	typ := builtinNamed("numeric")
	rapid.Check(t, func(t *rapid.T) {
		var e Encoder
		digits := rapid.StringMatching(`[1-9][0-9]{0,60}`).Draw(t, "digits")
		if rapid.IntRange(0, 9).Draw(t, "long") == 0 {
			digits += strings.Repeat(digits, 40)
		}
		scale := rapid.IntRange(0, min(len(digits)-1, 1000)).Draw(t, "scale") // numeric(p,s) takes no more
		neg := rapid.SampledFrom([]string{"", "-"}).Draw(t, "sign")
		text := neg + digits[:len(digits)-scale]
		if scale > 0 {
			text += "." + digits[len(digits)-scale:]
		}
		d, _ := Debezium{}.Resolve()
		got, err := e.Debezium(typ, numericMod(1000, int32(scale)), &d)(nil, []byte(text))
		var raw []byte
		if err != nil || json.Unmarshal(got, &raw) != nil {
			t.Fatalf("%s: %s, %v", text, got, err)
		}
		if v := fromTwosComplement(raw); v.String() != neg+digits || len(raw) > 1 && raw[0] == byte(int8(raw[1])>>7) {
			t.Fatalf("%s: %x is %s", text, raw, v)
		}
		got, err = e.Debezium(typ, NoMod, &d)(nil, []byte(text))
		var pair struct {
			Scale int
			Value []byte
		}
		if err != nil || json.Unmarshal(got, &pair) != nil {
			t.Fatalf("%s: %s, %v", text, got, err)
		}
		want, _ := new(big.Rat).SetString(text)
		have := new(big.Rat).SetFrac(fromTwosComplement(pair.Value), new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(pair.Scale)), nil))
		if want.Cmp(have) != 0 {
			t.Fatalf("%s: %s is %s", text, got, have)
		}
	})
}

func fromTwosComplement(raw []byte) *big.Int {
	v := new(big.Int).SetBytes(raw)
	if raw[0] >= 0x80 {
		v.Sub(v, new(big.Int).Lsh(big.NewInt(1), uint(8*len(raw))))
	}
	return v
}

// The longest numeric that PostgreSQL has goes through.
func TestTheLongestNumeric(t *testing.T) {
	var e Encoder
	text := strings.Repeat("7", 131072) + "." + strings.Repeat("3", 16383)
	got, err := e.Debezium(builtinNamed("numeric"), NoMod, resolved(t, Debezium{}))(nil, []byte(text))
	var pair struct {
		Scale int
		Value []byte
	}
	if err != nil || json.Unmarshal(got, &pair) != nil || pair.Scale != 16383 {
		t.Fatalf("%d, %v", pair.Scale, err)
	}
	if want := strings.Replace(text, ".", "", 1); fromTwosComplement(pair.Value).String() != want {
		t.Error("another number")
	}
}

// Days and microseconds are those of the standard library's calendar.
func TestInstantsAreThoseOfTheCalendar(t *testing.T) {
	first, last := time.Date(-4713, 11, 24, 0, 0, 0, 0, time.UTC).Unix(), time.Date(294276, 12, 31, 0, 0, 0, 0, time.UTC).Unix()
	rapid.Check(t, func(t *rapid.T) {
		at := time.Unix(rapid.Int64Range(first, last).Draw(t, "seconds"), rapid.Int64Range(0, 999999).Draw(t, "micros")*1000).UTC()
		y, era := at.Year(), ""
		if y <= 0 {
			y, era = 1-y, " BC"
		}
		date := at.Format("-01-02")
		date = strings.Repeat("0", max(0, 4-len(itoa(y)))) + itoa(y) + date
		clock := strings.TrimSuffix(strings.TrimRight(at.Format("15:04:05.000000"), "0"), ".")
		var e Encoder
		d, _ := Debezium{}.Resolve()
		days, err := e.Debezium(builtinNamed("date"), NoMod, &d)(nil, []byte(date+era))
		if want := int64(math.Floor(float64(at.Unix()) / 86400)); string(days) != itoa(int(want)) || err != nil {
			t.Fatalf("%s: %s, want %d, %v", date+era, days, want, err)
		}
		micros, err := e.Debezium(builtinNamed("timestamp"), NoMod, &d)(nil, []byte(date+" "+clock+era))
		want := new(big.Int).Add(new(big.Int).Mul(big.NewInt(at.Unix()), big.NewInt(1e6)), big.NewInt(int64(at.Nanosecond()/1000)))
		if string(micros) != want.String() || err != nil {
			t.Fatalf("%s: %s, want %s, %v", date+" "+clock+era, micros, want, err)
		}
	})
}

func itoa(n int) string { return big.NewInt(int64(n)).String() }

// Every part of an interval comes back from its ISO form.
func TestIntervalsComeBackAsTheyWere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		years, months, days := rapid.IntRange(-1e6, 1e6).Draw(t, "y"), rapid.IntRange(-11, 11).Draw(t, "m"), rapid.IntRange(-1e6, 1e6).Draw(t, "d")
		seconds, micros := rapid.IntRange(0, 1e9).Draw(t, "s"), rapid.IntRange(0, 999999).Draw(t, "us")
		sign := rapid.SampledFrom([]string{"", "-"}).Draw(t, "sign")
		fraction := strings.TrimRight(itoa(1e6 + micros)[1:], "0")
		if fraction != "" {
			fraction = "." + fraction
		}
		two := func(n int) string { return itoa(100 + n)[1:] }
		hours := itoa(seconds / 3600)
		if len(hours) < 2 {
			hours = "0" + hours
		}
		text := itoa(years) + " years " + itoa(months) + " mons " + itoa(days) + " days " + sign + hours + ":" + two(seconds/60%60) + ":" + two(seconds%60) + fraction
		part := func(n int) string {
			if n == 0 {
				return "0"
			}
			return sign + itoa(n)
		}
		last := part(seconds % 60)
		if fraction != "" {
			last = sign + itoa(seconds%60) + fraction
		}
		want := `"P` + itoa(years) + "Y" + itoa(months) + "M" + itoa(days) + "DT" + part(seconds/3600) + "H" + part(seconds/60%60) + "M" + last + `S"`
		var e Encoder
		d, _ := Debezium{Interval: IntervalString}.Resolve()
		if got, err := e.Debezium(builtinNamed("interval"), NoMod, &d)(nil, []byte(text)); string(got) != want || err != nil {
			t.Fatalf("%s: %s, want %s, %v", text, got, want, err)
		}
		d, _ = Debezium{}.Resolve()
		got, err := e.Debezium(builtinNamed("interval"), NoMod, &d)(nil, []byte(text))
		total := seconds*1e6 + micros
		if sign != "" {
			total = -total
		}
		if n := big.NewInt(0); err != nil || n.Add(n.Mul(big.NewInt(int64(years*12+months)), big.NewInt(2629800000000)), big.NewInt(int64(days)*86400e6+int64(total))).IsInt64() && n.String() != string(got) {
			t.Fatalf("%s: %s, want %s, %v", text, got, n, err)
		}
	})
}

func TestDomainsAndFieldsHaveTheirOwnModifiers(t *testing.T) {
	price := &Type{Name: "price", Kind: KindDomain, Base: builtinNamed("numeric"), Mod: numericMod(12, 2)}
	dear := &Type{Name: "dear", Kind: KindDomain, Base: price, Mod: NoMod}
	row := &Type{Name: "row", Kind: KindComposite, Fields: []Field{{"a", builtinNamed("numeric"), numericMod(5, 1)}, {"b", dear, NoMod}, {"c", builtinNamed("bit"), 1}}}
	var e Encoder
	got, err := e.Debezium(&Type{Kind: KindArray, Elem: row}, NoMod, resolved(t, Debezium{}))(nil, []byte(`{"(1.5,1.50,1)"}`))
	if want := `[{"a":"Dw==","b":"AJY=","c":true}]`; string(got) != want || err != nil {
		t.Errorf("%s, %v", got, err)
	}
	if !reflect.DeepEqual(e.scratch, e.scratch[:0]) {
		t.Error("something is left on the scratch stack")
	}
}

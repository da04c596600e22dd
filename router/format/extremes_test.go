package format

import (
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// extremes are the ends of what each type holds, in PostgreSQL's text. What the reader in
// TestExtremeValuesComeBack does not take back as it is, TestPlain has: blanks around a
// json, its null, which becomes NULL, and \u0000.
var extremes = []struct {
	typ    string
	values []string
}{
	{"int2", []string{"-32768", "32767"}}, {"int4", []string{"-2147483648", "2147483647"}}, {"int8", []string{"-9223372036854775808", "9223372036854775807"}},
	{"oid", []string{"0", "4294967295"}}, {"xid", []string{"4294967295"}}, {"xid8", []string{"18446744073709551615"}}, {"pg_lsn", []string{"0/0", "FFFFFFFF/FFFFFFFF"}},
	{"float4", []string{"3.4028235e38", "1e-45", "-0", "NaN", "Infinity", "-Infinity", "1.17549435e-38", "16777217"}},
	{"float8", []string{"1.7976931348623157e308", "5e-324", "-0", "NaN", "Infinity", "-Infinity", "9007199254740993", "0.1", "1e15", "1e16"}},
	{"numeric", []string{"0", "-0.0", "NaN", "Infinity", "-Infinity", strings.Repeat("9", 131072) + "." + strings.Repeat("9", 16383), "0." + strings.Repeat("0", 16382) + "1", "1e131071", "1.10"}},
	{"numeric(1000,1000)", []string{"0." + strings.Repeat("9", 1000)}}, {"numeric(38,-5)", []string{"12345600000"}}, {"numeric(3,8)", []string{"0.00000123"}},
	{"money", []string{"-92233720368547758.08", "92233720368547758.07"}}, {"bool", []string{"true", "false"}},
	{"text", []string{"", " ", "NULL", "é😀\u2028\x01\x7f\\\"", strings.Repeat("x", 100000)}}, {"char(5)", []string{"", "ab", "é"}}, {`"char"`, []string{"", "x", `\377`}},
	{"name", []string{"", strings.Repeat("n", 63)}}, {"varchar(3)", []string{"", "😀😀😀"}},
	{"date", []string{"4714-11-24 BC", "0001-01-01", "0001-12-31 BC", "5874897-12-31", "infinity", "-infinity", "2000-02-29", "1582-10-10"}},
	{"time", []string{"00:00", "24:00", "23:59:59.999999"}}, {"time(0)", []string{"23:59:59.4"}},
	{"timetz", []string{"00:00+15:59:59", "24:00-15:59:59", "23:59:59.999999+00", "01:02:03-00:30"}},
	{"timestamp", []string{"4714-11-24 00:00 BC", "294276-12-31 23:59:59.999999", "infinity", "-infinity", "0001-12-31 23:59:59.999999 BC", "1969-12-31 23:59:59.999999"}},
	{"timestamptz", []string{"4714-11-24 00:00+00 BC", "294276-12-31 23:59:59.999999+00", "infinity", "-infinity", "1970-01-01 00:00+00"}}, {"timestamptz(0)", []string{"2026-12-01 05:54:20.4+05:30"}},
	{"interval", []string{"-178000000 years", "178000000 years", "2147483647 days", "2562047788:00:54.775807", "-2562047788:00:54.775807", "1 mon -1 day +00:00:00.000001", "0"}},
	{"uuid", []string{"00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"}},
	{"inet", []string{"0.0.0.0/0", "255.255.255.255", "::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/1"}}, {"cidr", []string{"0.0.0.0/0", "::/0"}}, {"macaddr", []string{"ff:ff:ff:ff:ff:ff"}}, {"macaddr8", []string{"ff:ff:ff:ff:ff:ff:ff:ff"}},
	{"bit(1)", []string{"0", "1"}}, {"bit(65)", []string{strings.Repeat("1", 65), strings.Repeat("0", 65)}}, {"varbit", []string{"", "0", strings.Repeat("10", 5000)}}, {"varbit(1)", []string{"", "1"}},
	{"json", []string{`""`, "1e400", "-0", `{"a":1,"a":2}`, `[ ]`, strings.Repeat("[", 5000) + strings.Repeat("]", 5000)}},
	{"jsonb", []string{"1e400", `{"": {"b": [9007199254740993, 1.10]}}`, `"\ud83d\ude00"`, strings.Repeat("[", 5000) + strings.Repeat("]", 5000)}},
	{"xml", []string{"", `<a b="1">x</a>`}}, {"jsonpath", []string{"$", `strict $."a b"[*] ? (@ > 1)`}}, {"tsvector", []string{"", "'a b':1A,16383"}}, {"tsquery", []string{"", "'a' & !'b':*"}},
	{"point", []string{"(NaN,Infinity)", "(-0,1e-300)"}}, {"line", []string{"{1,-1,0}"}}, {"box", []string{"(Infinity,1),(-Infinity,0)"}}, {"path", []string{"[(0,0)]", "((0,0),(1,1))"}}, {"circle", []string{"<(0,0),0>"}},
	{"int4range", []string{"empty", "(,)", "[-2147483648,2147483647)"}}, {"numrange", []string{"[NaN,NaN]"}}, {"tstzrange", []string{"[-infinity,infinity]", "[0044-03-15 00:00+00 BC,)"}}, {"daterange", []string{"[4714-11-24 BC,5874897-12-31)"}},
	{"int8multirange", []string{"{}", "{(,1),[5,)}"}}, {"int4[]", []string{"{}", "[-5:-4]={1,NULL}", "{{{{{{1}}}}}}"}}, {"text[]", []string{`{"",NULL,"NULL","{}","a\"\\b"}`}}, {"box[]", []string{"{(1,1),(0,0);(2,2),(1,1)}"}},
	{"refcursor", []string{"", "c"}}, {"tid", []string{"(4294967295,65535)"}},
}

// The ends of every type go out as JSON that PostgreSQL reads back as the same value.
func TestExtremeValuesComeBack(t *testing.T) {
	harness.EachMajor(t, func(t *testing.T, major int) {
		s := mustServerOf(t, major)
		var r Resolver
		var e Encoder
		for _, c := range extremes {
			if major < 15 && (c.typ == "numeric(38,-5)" || c.typ == "numeric(3,8)") {
				continue // 15 brought scales that are negative or above the precision
			}
			s.exec(`DROP TABLE IF EXISTS v; CREATE TABLE v (v ` + c.typ + `)`)
			for _, value := range c.values {
				s.exec(`TRUNCATE v`)
				s.query(`INSERT INTO v VALUES ($1::text::`+c.typ+`)`, value)
				names, types := s.columnTypes(&r, "v")
				row := s.exec(`SELECT v FROM v`)[0]
				obj := encode(t, &e, names, types, row)
				back := s.query(`SELECT x.v FROM json_populate_record(NULL::v, $1) x`, obj)[0]
				want := strings.TrimPrefix(string(row[0]), "[-5:-4]=") // bounds are not in the JSON
				if string(back[0]) != want {
					t.Errorf("%s %.100q: PostgreSQL has %.100q and reads back %.100q", c.typ, value, row[0], back[0])
				}
			}
		}
	})
}

// Debezium's numbers are those that PostgreSQL itself computes.
func TestDebeziumsNumbersAreThosePostgreSQLComputes(t *testing.T) {
	s := mustServer(t)
	s.exec(`CREATE TABLE v AS SELECT
		date '4714-11-24 BC' + (random() * 3000000)::int AS d,
		timestamp '4714-11-24 BC' + random() * interval '290000 years' AS ts,
		(timestamp '1900-01-01' + random() * interval '200 years')::timestamp(3) AS ts3,
		time '00:00' + random() * interval '1 day' AS t,
		((time '00:00' + random() * interval '1 day')::text || '+05:30')::timetz AS tt,
		((random() - 0.5) * 1e6)::int * interval '1 month' + ((random() - 0.5) * 1e6)::int * interval '1 day' + (random() - 0.5) * interval '1000 hours' AS i,
		((random() - 0.5) * 1e9)::numeric(12,2) AS n,
		((random() - 0.5) * 1e9)::numeric::money AS m
		FROM generate_series(1, 500)`)
	rows := s.exec(`SELECT d, ts, ts3, t, i, m, n, tt,
		(d - date '1970-01-01')::text,
		trunc(extract(epoch FROM ts) * 1000000)::text,
		trunc(extract(epoch FROM ts3) * 1000)::text,
		trunc(extract(epoch FROM t) * 1000000)::text,
		((extract(year FROM i) * 12 + extract(month FROM i)) * 2629800000000 + extract(day FROM i) * 86400000000 + extract(hour FROM i) * 3600000000 + extract(minute FROM i) * 60000000 + extract(second FROM i) * 1000000)::numeric(30,0)::text,
		m::numeric::text, n::text, (tt AT TIME ZONE 'UTC')::time::text
		FROM v`)
	if len(rows) != 500 {
		t.Fatalf("%d rows", len(rows))
	}
	mods := []int32{-1, -1, 3, -1, -1, -1, numericMod(12, 2), -1}
	var e Encoder
	d := resolved(t, Debezium{Decimal: DecimalString})
	for _, row := range rows {
		for i, name := range []string{"date", "timestamp", "timestamp", "time", "interval", "money", "numeric", "timetz"} {
			got, err := e.Debezium(builtinNamed(name), mods[i], d)(nil, row[i])
			want := string(row[8+i])
			switch name {
			case "money", "numeric":
				want = `"` + want + `"`
			case "timetz":
				want = `"` + want + `Z"`
			}
			if err != nil || string(got) != want {
				t.Fatalf("%s %s: %s, PostgreSQL says %s, %v", name, row[i], got, want, err)
			}
		}
	}
}

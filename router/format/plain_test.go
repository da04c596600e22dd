package format

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

// The types of the composite and domain cases; OIDs as a database would give them.
const (
	oidAddr = 20000 + iota
	oidAddrArray
	oidMood
	oidMoodArray
	oidPosint
	oidPrice
	oidHstore
	oidHstoreArray
	oidPerson
	oidEmpty
	oidIntsDomain
	oidIntsDomainArray
	oidBoxDomain
	oidBoxDomainArray
	oidCitext
	oidGeometry
	oidVector
	oidSparsevec
)

// mustTypes is a Resolver with the types above.
func mustTypes(t testing.TB) *Resolver {
	t.Helper()
	var r Resolver
	r.Add(
		TypeRow{OID: oidAddr, Schema: "public", Name: "addr", Class: 'c', Delim: ',', Fields: []FieldRow{
			{"street", 25, NoMod}, {"no", 23, NoMod}, {"price", 1700, NoMod}, {"at", 1184, NoMod}, {"tags", 1009, NoMod}}},
		TypeRow{OID: oidAddrArray, Schema: "public", Name: "_addr", Class: 'b', Delim: ',', Elem: oidAddr},
		TypeRow{OID: oidMood, Schema: "public", Name: "mood", Class: 'e', Delim: ','},
		TypeRow{OID: oidMoodArray, Schema: "public", Name: "_mood", Class: 'b', Delim: ',', Elem: oidMood},
		TypeRow{OID: oidPosint, Schema: "public", Name: "posint", Class: 'd', Delim: ',', Base: 23, Mod: NoMod},
		TypeRow{OID: oidPrice, Schema: "public", Name: "price", Class: 'd', Delim: ',', Base: 1700, Mod: numericMod(12, 2)},
		TypeRow{OID: oidHstore, Schema: "ext", Name: "hstore", Class: 'b', Delim: ','},
		TypeRow{OID: oidHstoreArray, Schema: "ext", Name: "_hstore", Class: 'b', Delim: ',', Elem: oidHstore},
		TypeRow{OID: oidPerson, Schema: "public", Name: "person", Class: 'c', Delim: ',', Fields: []FieldRow{
			{`na"me`, 25, NoMod}, {"home", oidAddr, NoMod}, {"others", oidAddrArray, NoMod}, {"more", oidHstore, NoMod}}},
		TypeRow{OID: oidEmpty, Schema: "public", Name: "nothing", Class: 'c', Delim: ','},
		TypeRow{OID: oidIntsDomain, Schema: "public", Name: "ints", Class: 'd', Delim: ',', Base: 1007, Mod: NoMod},
		TypeRow{OID: oidIntsDomainArray, Schema: "public", Name: "_ints", Class: 'b', Delim: ',', Elem: oidIntsDomain},
		TypeRow{OID: oidBoxDomain, Schema: "public", Name: "tile", Class: 'd', Delim: ';', Base: 603, Mod: NoMod},
		TypeRow{OID: oidBoxDomainArray, Schema: "public", Name: "_tile", Class: 'b', Delim: ';', Elem: oidBoxDomain},
		TypeRow{OID: oidGeometry, Schema: "public", Name: "geometry", Class: 'b', Delim: ':'},
		TypeRow{OID: oidVector, Schema: "public", Name: "vector", Class: 'b', Delim: ','},
		TypeRow{OID: oidSparsevec, Schema: "public", Name: "sparsevec", Class: 'b', Delim: ','},
		TypeRow{OID: oidCitext, Schema: "public", Name: "citext", Class: 'b', Delim: ','},
	)
	return &r
}

// mustNamed returns the type that a test calls by name.
func mustNamed(t testing.TB, r *Resolver, name string) *Type {
	t.Helper()
	if b := builtinNamed(name); b != nil {
		return b
	}
	for oid := range r.rows {
		if r.rows[oid].Name == name {
			return r.Type(oid)
		}
	}
	t.Fatalf("no type %q", name)
	return nil
}

func TestPlain(t *testing.T) {
	long := "1" + strings.Repeat("0", 400)
	for _, group := range []struct {
		name  string
		cases [][3]string // type, PostgreSQL's text, JSON
	}{
		{"integers and booleans keep every digit", [][3]string{
			{"int2", `-32768`, `-32768`}, {"int4", `2147483647`, `2147483647`}, {"int4", `0`, `0`},
			{"int8", `9223372036854775807`, `9223372036854775807`}, {"int8", `-9223372036854775808`, `-9223372036854775808`},
			{"bool", `t`, `true`}, {"bool", `f`, `false`},
		}},
		{"floats are numbers with PostgreSQL's digits", [][3]string{
			{"float4", `0.1`, `0.1`}, {"float8", `0.1`, `0.1`}, {"float4", `1e+10`, `1e+10`}, {"float8", `1e-07`, `1e-07`},
			{"float4", `1.6777216e+07`, `1.6777216e+07`}, {"float8", `1e+22`, `1e+22`}, {"float4", `3.4028235e+38`, `3.4028235e+38`},
			{"float8", `1.7976931348623157e+308`, `1.7976931348623157e+308`}, {"float8", `-0`, `-0`},
		}},
		{"NaN and infinities are strings", [][3]string{
			{"float4", `NaN`, `"NaN"`}, {"float8", `NaN`, `"NaN"`}, {"numeric", `NaN`, `"NaN"`},
			{"float4", `Infinity`, `"Infinity"`}, {"float8", `Infinity`, `"Infinity"`}, {"numeric", `Infinity`, `"Infinity"`},
			{"float4", `-Infinity`, `"-Infinity"`}, {"float8", `-Infinity`, `"-Infinity"`}, {"numeric", `-Infinity`, `"-Infinity"`},
			{"float8", `1`, `1`}, {"numeric", `1`, `"1"`},
		}},
		{"numeric and money are their text", [][3]string{
			{"numeric", `12345678901234567890.123456789`, `"12345678901234567890.123456789"`}, {"numeric", `1.10`, `"1.10"`},
			{"numeric", `0.00000000000000000001`, `"0.00000000000000000001"`}, {"numeric", `0.00`, `"0.00"`},
			{"numeric", `1000000000000000000000000000000`, `"1000000000000000000000000000000"`},
			{"numeric", `9999999999.99`, `"9999999999.99"`}, {"money", `-$1,234.50`, `"-$1,234.50"`},
		}},
		{"text is escaped where JSON demands it and nowhere else", [][3]string{
			{"text", "a\"b\\c\x01\t\u2028😀", `"a\"b\\c\u0001\t` + "\u2028" + `😀"`},
			{"bpchar", `ab   `, `"ab   "`}, {"varchar", "x\ny", `"x\ny"`},
			{"text", ``, `""`}, {"bpchar", `     `, `"     "`}, {"text", `NULL`, `"NULL"`},
			{"text", "\b\f\r\x00\x1f\x7f</&>", `"\b\f\r\u0000\u001f` + "\x7f" + `</&>"`},
			{"text", "0123456789abcde\"", `"0123456789abcde\""`}, {"text", "01234567\\é", `"01234567\\é"`},
		}},
		{"bytea is base64", [][3]string{
			{"bytea", `\x00ff10`, `"AP8Q"`}, {"bytea", `\x`, `""`}, {"bytea", `\x00FF`, `"AP8="`}, {"bytea", `\xfbff`, `"+/8="`},
		}},
		{"a date is its text", [][3]string{
			{"date", `2026-12-01`, `"2026-12-01"`}, {"date", `infinity`, `"infinity"`}, {"date", `-infinity`, `"-infinity"`},
			{"date", `0044-03-15 BC`, `"0044-03-15 BC"`}, {"date", `10000-01-01`, `"10000-01-01"`}, {"date", `5874897-12-31`, `"5874897-12-31"`},
		}},
		{"a timestamp has a T", [][3]string{
			{"timestamp", `2026-12-01 05:54:20.123456`, `"2026-12-01T05:54:20.123456"`}, {"timestamp", `2026-12-01 05:54:20.1`, `"2026-12-01T05:54:20.1"`},
			{"timestamp", `infinity`, `"infinity"`}, {"timestamp", `-infinity`, `"-infinity"`},
			{"timestamp", `10000-01-01 00:00:00`, `"10000-01-01T00:00:00"`}, {"timestamp", `294276-12-31 23:59:59.999999`, `"294276-12-31T23:59:59.999999"`},
			{"timestamp", `0044-03-15 12:00:00 BC`, `"0044-03-15T12:00:00 BC"`}, {"timestamp", `2026-12-01 00:00:00`, `"2026-12-01T00:00:00"`},
		}},
		{"a timestamptz has a T and a Z", [][3]string{
			{"timestamptz", `2026-12-01 05:54:20.123456+00`, `"2026-12-01T05:54:20.123456Z"`}, {"timestamptz", `2026-12-01 05:54:20.1+00`, `"2026-12-01T05:54:20.1Z"`},
			{"timestamptz", `infinity`, `"infinity"`}, {"timestamptz", `10000-01-01 00:00:00+00`, `"10000-01-01T00:00:00Z"`},
			{"timestamptz", `0044-03-15 12:00:00+00 BC`, `"0044-03-15T12:00:00Z BC"`}, {"timestamptz", `1582-10-10 00:00:00+00`, `"1582-10-10T00:00:00Z"`},
		}},
		{"intervals and what stands beside them in a session of other settings", [][3]string{
			{"interval", `1 year 2 mons 3 days 04:05:06.78`, `"1 year 2 mons 3 days 04:05:06.78"`},
			{"float8", `0.1234567890123456`, `0.1234567890123456`}, {"_date", `{2026-12-01}`, `["2026-12-01"]`},
			{"tstzrange", `["2026-12-01 05:54:20+00","2026-12-02 00:00:00+00")`, `"[\"2026-12-01 05:54:20+00\",\"2026-12-02 00:00:00+00\")"`},
		}},
		{"json and jsonb are embedded byte for byte", [][3]string{
			{"json", `{"a": 1.10,  "a":2,` + "\n" + ` "z":"\u0000"}`, `{"a": 1.10,  "a":2,` + "\n" + ` "z":"\u0000"}`},
			{"json", ` "x" `, ` "x" `}, {"json", `null`, `null`}, {"json", `1e400`, `1e400`}, {"json", `-0`, `-0`},
			{"jsonb", `{"a": 2, "b": 1.10}`, `{"a": 2, "b": 1.10}`}, {"jsonb", `{"a": 9007199254740993, "b": 1.10}`, `{"a": 9007199254740993, "b": 1.10}`},
			{"jsonb", long, long}, {"jsonb", `0.0`, `0.0`},
		}},
		{"arrays of one dimension", [][3]string{
			{"_int4", `{1,NULL,3}`, `[1,null,3]`},
			{"_text", `{"NULL",NULL,"a,b","q\"q","b\\s",""," x ","{}"}`, `["NULL",null,"a,b","q\"q","b\\s",""," x ","{}"]`},
			{"_numeric", `{1.10,NaN,NULL}`, `["1.10","NaN",null]`},
			{"_timestamptz", `{"2026-12-01 05:54:20.123456+00",infinity,NULL}`, `["2026-12-01T05:54:20.123456Z","infinity",null]`},
			{"_bytea", `{"\\x00ff","\\x",NULL}`, `["AP8=","",null]`}, {"_bool", `{t,f,NULL}`, `[true,false,null]`},
			{"_float8", `{0.1,NaN,1e+300}`, `[0.1,"NaN",1e+300]`},
			{"_jsonb", `{"{\"a\": 1.10}","\"s\"","null",NULL}`, `[{"a": 1.10},"s",null,null]`},
			{"_int4", `{}`, `[]`}, {"_text", `{}`, `[]`}, {"_jsonb", `{}`, `[]`}, {"_text", `{nulls,nul,a b}`, `["nulls","nul","a b"]`},
		}},
		{"arrays of more dimensions, with bounds, with another delimiter", [][3]string{
			{"_int4", `{{1,2},{3,NULL}}`, `[[1,2],[3,null]]`}, {"_int4", `{{{1},{2}},{{3},{4}}}`, `[[[1],[2]],[[3],[4]]]`},
			{"_int4", `[2:3]={7,8}`, `[7,8]`}, {"_int4", `[-1:0][2:3]={{1,2},{3,4}}`, `[[1,2],[3,4]]`},
			{"_box", `{(1,1),(0,0);(2,2),(1,1);NULL}`, `["(1,1),(0,0)","(2,2),(1,1)",null]`},
			{"_box", `{{(1,1),(0,0)};{(2,2),(1,1)}}`, `[["(1,1),(0,0)"],["(2,2),(1,1)"]]`},
			{"_point", `{"(1,2)","(3,4)"}`, `["(1,2)","(3,4)"]`}, {"_int2vector", `{"1 2",3}`, `["1 2","3"]`},
			{"_tile", `{(1,1),(0,0);(2,2),(1,1)}`, `["(1,1),(0,0)","(2,2),(1,1)"]`},
			{"_ints", `{"{1,2}","{}",NULL}`, `[[1,2],[],null]`}, {"ints", `{1,2}`, `[1,2]`},
		}},
		{"composites are objects", [][3]string{
			{"addr", `("12 ""Main"" St, N",7,1.10,"2026-12-01 05:54:20+00","{a,""b \\""c\\""""}")`,
				`{"street":"12 \"Main\" St, N","no":7,"price":"1.10","at":"2026-12-01T05:54:20Z","tags":["a","b \"c\""]}`},
			{"addr", `("",0,0,,)`, `{"street":"","no":0,"price":"0","at":null,"tags":null}`},
			{"addr", `(,,,,)`, `{"street":null,"no":null,"price":null,"at":null,"tags":null}`},
			{"addr", `("a\b",1,2,,{})`, `{"street":"ab","no":1,"price":"2","at":null,"tags":[]}`},
			{"nothing", `()`, `{}`},
			{"_addr", `{"(\"x y\",1,2,,\"{p,\"\"q r\"\"}\")",NULL,"(,,,,)"}`,
				`[{"street":"x y","no":1,"price":"2","at":null,"tags":["p","q r"]},null,{"street":null,"no":null,"price":null,"at":null,"tags":null}]`},
			{"person", `(Jo,"(""a b"",1,2,,""{""""c d""""}"")","{""(x,,,,)""}","""k""=>""v\\""w""")`,
				`{"na\"me":"Jo","home":{"street":"a b","no":1,"price":"2","at":null,"tags":["c d"]},` +
					`"others":[{"street":"x","no":null,"price":null,"at":null,"tags":null}],"more":{"k":"v\"w"}}`},
		}},
		{"enums are strings, domains as what they are over", [][3]string{
			{"mood", `happy`, `"happy"`}, {"_mood", `{sad,happy}`, `["sad","happy"]`}, {"posint", `5`, `5`}, {"price", `1.50`, `"1.50"`},
		}},
		{"hstore is an object", [][3]string{
			{"hstore", ``, `{}`}, {"hstore", `"a"=>"1", "b"=>NULL, "c d"=>"NULL"`, `{"a":"1","b":null,"c d":"NULL"}`},
			{"hstore", `"q\"u"=>"b\\s", ""=>""`, `{"q\"u":"b\\s","":""}`}, {"_hstore", `{"\"a\"=>\"1\"",""}`, `[{"a":"1"},{}]`},
			{"hstore", `"a"=>"x=>y, z"`, `{"a":"x=>y, z"}`},
		}},
		{"ranges and multiranges are their text", [][3]string{
			{"int4range", `[1,11)`, `"[1,11)"`}, {"numrange", `(1.50,2.5]`, `"(1.50,2.5]"`}, {"daterange", `[2026-12-01,)`, `"[2026-12-01,)"`},
			{"int4multirange", `{[1,3),[5,8)}`, `"{[1,3),[5,8)}"`}, {"int4range", `empty`, `"empty"`}, {"numrange", `(,)`, `"(,)"`}, {"int4multirange", `{}`, `"{}"`},
		}},
		{"all others are their text", [][3]string{
			{"inet", `10.0.0.1`, `"10.0.0.1"`}, {"inet", `10.0.0.1/24`, `"10.0.0.1/24"`}, {"cidr", `::/0`, `"::/0"`}, {"macaddr", `08:00:2b:01:02:03`, `"08:00:2b:01:02:03"`},
			{"point", `(1.5,-2)`, `"(1.5,-2)"`}, {"box", `(1,1),(0,0)`, `"(1,1),(0,0)"`}, {"polygon", `((0,0),(1,1),(1,0))`, `"((0,0),(1,1),(1,0))"`}, {"line", `{1,-1,0}`, `"{1,-1,0}"`},
			{"uuid", `3fa85f64-5717-4562-b3fc-2c963f66afa6`, `"3fa85f64-5717-4562-b3fc-2c963f66afa6"`}, {"tsvector", `'a' 'cat' 'fat'`, `"'a' 'cat' 'fat'"`},
			{"jsonpath", `$."a"[*]`, `"$.\"a\"[*]"`}, {"pg_lsn", `16/B374D848`, `"16/B374D848"`}, {"xml", `<a b="c"/>`, `"<a b=\"c\"/>"`},
			{"oid", `4294967295`, `"4294967295"`}, {"time", `24:00:00`, `"24:00:00"`}, {"timetz", `11:24:20.1+05:30`, `"11:24:20.1+05:30"`},
			{"bit", `101`, `"101"`}, {"varbit", ``, `""`}, {"citext", `Ab`, `"Ab"`}, {"int2vector", `1 2`, `"1 2"`},
		}},
	} {
		t.Run(group.name, func(t *testing.T) {
			r := mustTypes(t)
			var e Encoder
			for _, c := range group.cases {
				checkPlain(t, &e, mustNamed(t, r, c[0]), c[1], c[2])
			}
		})
	}
}

// checkPlain encodes twice, behind what is there already and over the memory of the
// first time, and wants the same JSON, the text untouched and nothing left on the
// scratch stack.
func checkPlain(t *testing.T, e *Encoder, typ *Type, text, want string) {
	t.Helper()
	enc := e.Plain(typ)
	in := []byte(text)
	for _, prefix := range []string{"", `{"v":`} {
		got, err := enc([]byte(prefix), in)
		if err != nil {
			t.Errorf("%s %q: %v", typ, text, err)
			return
		}
		if string(got) != prefix+want {
			t.Errorf("%s %q:\n got %s\nwant %s%s", typ, text, got, prefix, want)
		}
	}
	if string(in) != text {
		t.Errorf("%s %q: the text was changed to %q", typ, text, in)
	}
	if len(e.scratch) != 0 {
		t.Errorf("%s %q: %d bytes left on the scratch stack", typ, text, len(e.scratch))
	}
	if !json.Valid([]byte(want)) {
		t.Errorf("%s %q: the test wants %s, which is no JSON", typ, text, want)
	}
}

func TestMalformedTextIsAnErrorWithoutTheValue(t *testing.T) {
	r := mustTypes(t)
	var e Encoder
	for _, c := range [][2]string{
		{"int4", ``}, {"int4", `-`}, {"int4", `01`}, {"int4", `1.5`}, {"int4", `secret`}, {"int4", `1,"x":2`}, {"int8", `0x1`},
		{"float8", ``}, {"float8", `nan`}, {"float8", `.5`}, {"float8", `1.`}, {"float8", `1e`}, {"float8", `1e+`}, {"float8", `secret`}, {"float8", `00`},
		{"bool", ``}, {"bool", `true`}, {"bool", `secret`},
		{"text", "secret\xe9"}, {"text", "\xed\xa0\x80"}, {"text", "0123456789\xff"}, {"mood", "\xff"}, {"numeric", "1\xc0\x80"},
		{"bytea", `secret`}, {"bytea", `\000\377`}, {"bytea", `\x0`}, {"bytea", `\xzz`}, {"bytea", ``}, {"bytea", `\`},
		{"date", `01.12.2026`}, {"date", `12/01/2026`}, {"date", `2026-12-01 AD`}, {"date", ``}, {"date", `26-12-01`}, {"date", `2026-12-0"`},
		{"timestamp", `01.12.2026 11:24:20`}, {"timestamp", `Tue Dec 01 05:54:20 2026`}, {"timestamp", `2026-12-01`}, {"timestamp", `2026-12-01 05:54:20+00`},
		{"timestamp", `2026-12-01 05:54:20.`}, {"timestamp", `2026-12-01 05:54:20.1234567`}, {"timestamp", ``},
		{"timestamptz", `2026-12-01 11:24:20+05:30`}, {"timestamptz", `2026-12-01 05:54:20`}, {"timestamptz", `2026-12-01 05:54:20+01`},
		{"timestamptz", `2026-12-01 05:54:20+00:01`}, {"timestamptz", `2026-12-01 05:54:20 UTC`}, {"timestamptz", ``},
		{"json", ``}, {"jsonb", ` `}, {"json", "\"\xff\""},
		{"_int4", ``}, {"_int4", `secret`}, {"_int4", `{1`}, {"_int4", `{1,}`}, {"_int4", `{,1}`}, {"_int4", `{1}}`}, {"_int4", `{1}2`}, {"_int4", `1}`},
		{"_int4", `{{}}`}, {"_int4", `{a}`}, {"_text", `{"a}`}, {"_text", `{"a\`}, {"_text", `{"a\"}`}, {"_text", `{"a"b}`}, {"_int4", `{{{{{{{1}}}}}}}`},
		{"_int4", `[1:2]`}, {"_int4", `[1:2]=`}, {"_int4", `[x]={1}`}, {"_box", `{(1,1),(0,0),(2,2)`}, {"_text", "{\"\xff\"}"}, {"_int4", `{`}, {"_int4", `}`},
		{"addr", ``}, {"addr", `(`}, {"addr", `secret`}, {"addr", `(a,1,2,,`}, {"addr", `("a,1,2,,)`}, {"addr", `(a,1,2,,)x`}, {"addr", `(a,b,2,,)`}, {"addr", `("a"b,1,2,,)`},
		{"addr", `(a,1,2)`}, {"addr", `(a,1,2,,,)`}, {"nothing", `(1)`}, {"addr", `("a\`}, {"addr", `(a,1,2,,{)`},
		{"hstore", `secret`}, {"hstore", `"a"`}, {"hstore", `"a"=>`}, {"hstore", `"a"=>1`}, {"hstore", `"a"=>"1",`}, {"hstore", `"a"=>"1", `},
		{"hstore", `"a"=>"1" "b"=>"2"`}, {"hstore", `"a`}, {"hstore", `"a"=>"\`}, {"hstore", "\"\xff\"=>NULL"}, {"hstore", `"a"=>NULLx`},
	} {
		typ := mustNamed(t, r, c[0])
		got, err := e.Plain(typ)([]byte("before"), []byte(c[1]))
		var ve *ValueError
		switch {
		case !errors.As(err, &ve):
			t.Errorf("%s %q: got %s, error %v; want a *ValueError", c[0], c[1], got, err)
		case string(got) != "before":
			t.Errorf("%s %q: dst came back as %q", c[0], c[1], got)
		case strings.Contains(err.Error(), "secret"):
			t.Errorf("%s %q: the error shows the value: %v", c[0], c[1], err)
		case ve.Type == "" || !strings.Contains(ve.Reason, ";"):
			t.Errorf("%s %q: the error does not name the type or what to do: %v", c[0], c[1], err)
		}
		if len(e.scratch) != 0 {
			t.Errorf("%s %q: %d bytes left on the scratch stack", c[0], c[1], len(e.scratch))
		}
	}
}

func TestErrorsTellWhatCallersBranchOn(t *testing.T) {
	r := mustTypes(t)
	var e Encoder
	if _, err := e.Plain(r.Type(25))(nil, []byte("\xff")); !errors.Is(err, ErrInvalidUTF8) {
		t.Errorf("invalid UTF-8: %v", err)
	}
	for _, text := range []string{`(a,1)`, `(a,1,2,,,)`} {
		_, err := e.Plain(r.Type(oidAddr))(nil, []byte(text))
		if !errors.Is(err, ErrFieldCount) || !strings.Contains(err.Error(), "public.addr") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestNilTypeIsText(t *testing.T) {
	var e Encoder
	got, err := e.Plain(nil)(nil, []byte(`a"b`))
	if err != nil || string(got) != `"a\"b"` {
		t.Errorf("got %s, %v", got, err)
	}
	if _, err := e.Plain(nil)(nil, []byte("\xff")); !errors.Is(err, ErrInvalidUTF8) {
		t.Errorf("invalid UTF-8: %v", err)
	}
}

func TestScratchOfAHugeValueIsGivenBack(t *testing.T) {
	var e Encoder
	text := `{"\\` + strings.Repeat("x", 2*maxScratch) + `"}`
	if _, err := e.Plain(Builtin(1009))(nil, []byte(text)); err != nil {
		t.Fatal(err)
	}
	if cap(e.scratch) > maxScratch {
		t.Errorf("%d bytes are kept", cap(e.scratch))
	}
}

// Every position of every special byte, around the words of eight that are looked at
// together.
func TestAppendStringFindsEachByteAtEachPlace(t *testing.T) {
	for n := range 26 {
		for at := range n {
			for c := range 128 {
				s := []byte(strings.Repeat("\x7f", n))
				s[at] = byte(c)
				got, err := AppendString(nil, s)
				var back string
				if err != nil || json.Unmarshal(got, &back) != nil || back != string(s) {
					t.Fatalf("%q: got %s, %v", s, got, err)
				}
			}
			s := []byte(strings.Repeat("a", n))
			s[at] = 0x80
			if _, err := AppendString(nil, s); !errors.Is(err, ErrInvalidUTF8) {
				t.Fatalf("%q: %v", s, err)
			}
		}
	}
}

func TestQuoteName(t *testing.T) {
	for name, want := range map[string]string{"id": `"id":`, `a"b`: `"a\"b":`, "é\n": `"é\n":`, "": `"":`} {
		if got := string(QuoteName(name)); got != want {
			t.Errorf("QuoteName(%q) = %s, want %s", name, got, want)
		}
	}
}

func TestAppendBase64(t *testing.T) {
	if got := string(AppendBase64([]byte("x"), []byte{0, 255})); got != `x"AP8="` {
		t.Errorf("got %s", got)
	}
}

func TestAppendBytea(t *testing.T) {
	got, err := AppendBytea([]byte("x"), []byte(`\x00fF`))
	if err != nil || string(got) != "x\x00\xff" {
		t.Errorf("got %q, %v", got, err)
	}
	if got, err := AppendBytea([]byte("x"), []byte(`\x0g`)); err == nil || string(got) != "x" {
		t.Errorf("got %q, %v", got, err)
	}
}

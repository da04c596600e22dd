package format

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

// fuzzValid wants, for any text whatever, valid JSON or a *ValueError that leaves dst
// as it was: a record is never half a record.
func fuzzValid(f *testing.F, types []string, seeds ...string) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	r := mustTypes(f)
	f.Fuzz(func(t *testing.T, text []byte) {
		var e Encoder
		for _, name := range types {
			got, err := e.Plain(mustNamed(t, r, name))([]byte("["), text)
			var ve *ValueError
			switch {
			case err == nil && !json.Valid(append(got, ']')):
				t.Errorf("%s %q: %s is no JSON", name, text, got)
			case err == nil && !utf8.Valid(got):
				t.Errorf("%s %q: %q is no UTF-8", name, text, got)
			case err != nil && (!errors.As(err, &ve) || string(got) != "["):
				t.Errorf("%s %q: %s, %v", name, text, got, err)
			}
			if len(e.scratch) != 0 {
				t.Errorf("%s %q: %d bytes left on the scratch stack", name, text, len(e.scratch))
			}
		}
	})
}

func FuzzScalar(f *testing.F) {
	fuzzValid(f, []string{"int8", "float8", "bool", "numeric", "text", "bytea", "mood"},
		`-1`, `1e+10`, `NaN`, `t`, `a"b`, "é\x01", `\x00ff`)
}

func FuzzTimestamp(f *testing.F) {
	fuzzValid(f, []string{"date", "timestamp", "timestamptz"},
		`2026-12-01`, `infinity`, `2026-12-01 05:54:20.1`, `0044-03-15 12:00:00+00 BC`, `294276-12-31 23:59:59.999999+00`)
}

func FuzzArray(f *testing.F) {
	fuzzValid(f, []string{"_int4", "_text", "_box", "_bytea", "_timestamptz", "_addr", "_hstore", "_ints"},
		`{1,NULL,3}`, `{"NULL","a,b","q\"q","b\\s",""}`, `[2:3]={{1},{2}}`, `{(1,1),(0,0);(2,2),(1,1)}`, `{"(\"x y\",1,2,,)",NULL}`, `{"{1,2}"}`)
}

func FuzzComposite(f *testing.F) {
	fuzzValid(f, []string{"addr", "person", "nothing"},
		`("12 ""Main"" St, N",7,1.10,"2026-12-01 05:54:20+00","{a,""b \\""c\\""""}")`, `(,,,,)`, `()`, `(Jo,"(""a b"",1,2,,)","{""(x,,,,)""}","""k""=>""v\\""w""")`)
}

func FuzzHstore(f *testing.F) {
	fuzzValid(f, []string{"hstore"}, ``, `"a"=>"1", "b"=>NULL`, `"q\"u"=>"b\\s"`)
}

// printArray prints nested slices of string or nil as array_out does.
func printArray(b *strings.Builder, v []any, delim byte) {
	b.WriteByte('{')
	for i, e := range v {
		if i > 0 {
			b.WriteByte(delim)
		}
		switch e := e.(type) {
		case nil:
			b.WriteString("NULL")
		case []any:
			printArray(b, e, delim)
		case string:
			if e != "" && !strings.EqualFold(e, "NULL") && !strings.ContainsAny(e, "{}\"\\ \t\n\r\v\f"+string(rune(delim))) {
				b.WriteString(e)
				continue
			}
			b.WriteString(`"` + strings.NewReplacer(`"`, `\"`, `\`, `\\`).Replace(e) + `"`)
		}
	}
	b.WriteByte('}')
}

// printComposite prints fields, string or nil, as record_out does.
func printComposite(fields []any) string {
	out := make([]string, len(fields))
	for i, f := range fields {
		s, ok := f.(string)
		switch {
		case !ok:
		case s == "" || strings.ContainsAny(s, "(),\"\\ \t\n\r\v\f"):
			out[i] = `"` + strings.NewReplacer(`"`, `""`, `\`, `\\`).Replace(s) + `"`
		default:
			out[i] = s
		}
	}
	return "(" + strings.Join(out, ",") + ")"
}

// element draws a text or a null, rich in what needs quoting.
func element() *rapid.Generator[any] {
	text := rapid.OneOf(rapid.String(), rapid.StringOfN(rapid.SampledFrom([]rune("{}\"\\,;() \n=é😀NULnula>")), 0, 12, -1), rapid.Just("NULL"))
	return rapid.Custom(func(t *rapid.T) any {
		if rapid.IntRange(0, 5).Draw(t, "null") == 0 {
			return nil
		}
		return strings.ReplaceAll(text.Draw(t, "text"), "\x00", "")
	})
}

// decodeJSON encodes text as typ and reads the JSON back.
func decodeJSON(t *rapid.T, e *Encoder, typ *Type, text string) any {
	got, err := e.Plain(typ)(nil, []byte(text))
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	var v any
	if err := json.Unmarshal(got, &v); err != nil {
		t.Fatalf("%q: %s: %v", text, got, err)
	}
	return v
}

func TestArraysComeBackAsTheyWere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var build func(dims []int) []any
		build = func(dims []int) []any {
			v := make([]any, dims[0])
			for i := range v {
				if len(dims) > 1 {
					v[i] = build(dims[1:])
				} else {
					v[i] = element().Draw(t, "element")
				}
			}
			return v
		}
		want := build(rapid.SliceOfN(rapid.IntRange(1, 3), 1, 4).Draw(t, "dims"))
		typ := builtinNamed("_text")
		if rapid.Bool().Draw(t, "semicolon") {
			typ = builtinNamed("_box") // elements are any text to us
		}
		var b strings.Builder
		b.WriteString(rapid.SampledFrom([]string{"", "[2:3]=", "[-1:0][5:6]="}).Draw(t, "bounds"))
		printArray(&b, want, typ.Elem.Delim)
		var e Encoder
		if got := decodeJSON(t, &e, typ, b.String()); !reflect.DeepEqual(got, any(want)) {
			t.Fatalf("%q: got %#v, want %#v", b.String(), got, want)
		}
	})
}

func TestCompositesWithinArraysWithinCompositesComeBackAsTheyWere(t *testing.T) {
	inner := &Type{Name: "inner", Kind: KindComposite, Delim: ',', Fields: []Field{{"a", Builtin(25), NoMod}, {"b", Builtin(25), NoMod}}}
	array := &Type{Name: "_inner", Kind: KindArray, Delim: ',', Elem: inner}
	outer := &Type{Name: "outer", Kind: KindComposite, Delim: ',', Fields: []Field{{"x", Builtin(25), NoMod}, {"y", array, NoMod}, {"z", inner, NoMod}}}
	rapid.Check(t, func(t *rapid.T) {
		draw := func() (string, any) {
			f := []any{element().Draw(t, "a"), element().Draw(t, "b")}
			return printComposite(f), map[string]any{"a": f[0], "b": f[1]}
		}
		var texts, want []any
		for range rapid.IntRange(1, 4).Draw(t, "n") {
			text, obj := draw()
			texts, want = append(texts, text), append(want, obj)
		}
		var b strings.Builder
		printArray(&b, texts, ',')
		x, zText, z := element().Draw(t, "x"), "", any(nil)
		zText, z = draw()
		text := printComposite([]any{x, b.String(), zText})
		var e Encoder
		got := decodeJSON(t, &e, outer, text)
		if w := any(map[string]any{"x": x, "y": want, "z": z}); !reflect.DeepEqual(got, w) {
			t.Fatalf("%q: got %#v, want %#v", text, got, w)
		}
	})
}

func TestHstoresComeBackAsTheyWere(t *testing.T) {
	quote := strings.NewReplacer(`"`, `\"`, `\`, `\\`)
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.MapOf(rapid.Map(element(), func(v any) string { s, _ := v.(string); return s }), element()).Draw(t, "pairs")
		var pairs []string
		for k, v := range want {
			value := "NULL"
			if s, ok := v.(string); ok {
				value = `"` + quote.Replace(s) + `"`
			}
			pairs = append(pairs, `"`+quote.Replace(k)+`"=>`+value)
		}
		var e Encoder
		text := strings.Join(pairs, ", ")
		if got := decodeJSON(t, &e, &Type{Name: "hstore", Kind: KindHstore}, text); !reflect.DeepEqual(got, any(want)) {
			t.Fatalf("%q: got %#v, want %#v", text, got, want)
		}
	})
}

// The numbers that the grammar allows are those that the standard library allows.
func FuzzNumberGrammar(f *testing.F) {
	for _, s := range []string{"0", "-0", "01", "1.", ".5", "1e5", "1E-05", "1e", "-", "1.0e+10"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if s == "" || strings.TrimSpace(s) != s {
			return // blanks may stand around JSON, never around our numbers
		}
		want := json.Valid([]byte(s)) && (s[0] == '-' || s[0] >= '0' && s[0] <= '9')
		if got := isNumber([]byte(s)); got != want {
			t.Errorf("isNumber(%q) = %v", s, got)
		}
		if isInteger([]byte(s)) && !want {
			t.Errorf("isInteger(%q) though it is no number", s)
		}
	})
}

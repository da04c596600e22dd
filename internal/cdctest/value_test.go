package cdctest

import "testing"

func TestPlainJSONOfPostgreSQLText(t *testing.T) {
	for _, c := range []struct{ typ, text, want string }{
		{"int8", "-9223372036854775808", "-9223372036854775808"},
		{"float8", "1e-07", "1e-07"}, {"float8", "-0", "-0"}, {"float8", "NaN", `"NaN"`}, {"float4", "-Infinity", `"-Infinity"`},
		{"numeric", "1.10", `"1.10"`}, {"numeric", "NaN", `"NaN"`}, {"money", "$1.00", `"$1.00"`},
		{"bool", "t", "true"}, {"bool", "true", "true"}, {"bool", "f", "false"}, {"bool", "false", "false"},
		{"timestamp", "2026-12-01 05:54:20.5", `"2026-12-01T05:54:20.5"`}, {"timestamp", "0044-03-15 12:00:00 BC", `"0044-03-15T12:00:00 BC"`},
		{"timestamptz", "2026-12-01 05:54:20.123456+00", `"2026-12-01T05:54:20.123456Z"`}, {"timestamptz", "-infinity", `"-infinity"`},
		{"timestamptz", "0044-03-15 12:00:00+00 BC", `"0044-03-15T12:00:00Z BC"`},
		{"bytea", `\x00ff10`, `"AP8Q"`}, {"bytea", `\x`, `""`},
		{"jsonb", `{"a": 1.10}`, `{"a": 1.10}`}, {"date", "2026-12-01", `"2026-12-01"`}, {"text", "", `""`},
	} {
		if got := PlainJSON(c.typ, &c.text); !sameJSON(got, []byte(c.want)) {
			t.Errorf("%s %q: %s, want %s", c.typ, c.text, got, c.want)
		}
	}
	if got := PlainJSON("text", nil); string(got) != "null" {
		t.Errorf("NULL: %s", got)
	}
}

func TestSameJSONComparesWhatStringsSayAndTheRestByteForByte(t *testing.T) {
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{`"\u00fc<"`, `"ü\u003c"`, true}, {`"a"`, `"b"`, false}, {`1.10`, `1.1`, false}, {`{"a": 1}`, `{"a":1}`, false},
		{`null`, `""`, false}, {`"1"`, `1`, false}, {`9223372036854775807`, `9223372036854775808`, false}, {``, `null`, false},
	} {
		if got := sameJSON([]byte(c.a), []byte(c.b)); got != c.same {
			t.Errorf("%s and %s: same %v, want %v", c.a, c.b, got, c.same)
		}
	}
}

// TestFoldCarriesColumnsOver folds by hand what INTERFACE says of unchanged TOAST
// values under updates and key changes.
func TestFoldCarriesColumnsOver(t *testing.T) {
	tab := table("docs", "id:int4:key body:text:big n:int4")
	b := newBuilder(testLayout())
	xid, ts := uint64(5), int64(1)
	absent := func(i int) bool { return i == 1 }
	step := func(seq uint64, op byte, old, row Row, lacks func(int) bool) {
		b.change(meta{commit: 100, xid: &xid, ts: &ts, seq: seq}, Change{Op: op, Table: tab, Old: old, New: row}, lacks)
	}
	body := "long"
	step(0, 'c', nil, texts("900", body, "1"), nil)
	step(1, 'u', texts("900", body, "1"), texts("900", body, "2"), absent)
	step(2, 'u', texts("900", body, "2"), texts("901", body, "2"), absent) // to another key
	step(3, 'u', texts("901", body, "2"), texts("900", body, "3"), absent) // and back
	truth := &Truth{Tables: []*Table{tab}, Final: map[string][]Row{"public.docs": {texts("900", body, "3")}}}
	if vs := Fold(b.log, truth, testLayout()); len(vs) > 0 {
		t.Errorf("the right rows:\n%s", Report(vs, 5))
	}
	truth.Final["public.docs"] = []Row{texts("901", body, "3")}
	mustViolate(t, "another key", Fold(b.log, truth, testLayout()))
	truth.Final["public.docs"] = []Row{texts("900", "other", "3")}
	mustViolate(t, "another value", Fold(b.log, truth, testLayout()))
}

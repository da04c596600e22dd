package router

import (
	"strings"
	"testing"
)

func testScope() templateScope {
	return templateScope{
		columns:   map[string]int{"a": 0, "b": 1, "n": 2},
		constants: map[string]string{"prefix": "Shop"},
		describe:  "a, b, n, prefix",
	}
}

func TestTemplates(t *testing.T) {
	row := rowOf("Order.Created.v2", "", null)
	tests := []struct{ source, want, empty string }{
		{"", "", ""},
		{"plain", "plain", ""},
		{"x.{a}", "x.Order.Created.v2", ""},
		{"{prefix}.{a|lower}", "Shop.order.created.v2", ""},
		{"{prefix|lower}", "shop", ""},
		{"{a|replace:.v2:}", "Order.Created", ""},
		{"{a|replace:.:-|lower}!", "order-created-v2!", ""},
		{"{a|replace:r:rr}", "Orrderr.Crreated.v2", ""},
		{"{a|replace:zzz:y}", "Order.Created.v2", ""},
		{`{a|replace:.:\:}`, "Order:Created:v2", ""},
		{`\{{a|replace:\.v2:}`, "", "error"},
		{`\{{a}\}`, "{Order.Created.v2}", ""},
		{"{b|default:none}", "none", ""},
		{"{n|lower|default:No}", "No", ""},
		{"{n|default:No|lower}", "no", ""},
		{"x{b}y{n}", "xy", "b"},
		{"x{n}", "x", "n"},
		{"{a|replace:Order.Created.v2:}", "", "a"},
	}
	for _, tt := range tests {
		tpl, err := compileRowTemplate(tt.source, testScope())
		if tt.empty == "error" {
			if err == nil {
				t.Errorf("%q compiles", tt.source)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", tt.source, err)
			continue
		}
		got, empty := tpl.appendTo([]byte("kept|"), row)
		if string(got) != "kept|"+tt.want || empty != tt.empty {
			t.Errorf("%q: got %q, empty field %q; want %q, %q", tt.source, got, empty, tt.want, tt.empty)
		}
	}
}

func TestTemplateErrorsSayWhatWouldBeRight(t *testing.T) {
	for source, want := range map[string]string{
		"{a":               `write \{ for a brace`,
		"a}":               `write \} for a brace`,
		"{}":               "no field {}; there are a, b, n, prefix",
		"{c}":              "no field {c}; there are a, b, n, prefix",
		"{a|upper}":        `no function "upper"; there are lower`,
		"{a|lower:x}":      "write {x|lower}",
		"{a|replace:x}":    "write {x|replace:a:b}",
		"{a|replace::y}":   "write {x|replace:a:b}",
		"{a|default}":      "write {x|default:y}",
		"{a|default:x:y}":  "write {x|default:y}",
		`a\b`:              `write \\ for a backslash`,
		`{a|default:\n}`:   `write \\ for a backslash`,
		`trailing\`:        `write \\ for a backslash`,
		`{a|replace:a:\\`:  "no } behind",
		"{a|lower|}":       `no function ""`,
		"{prefix|nothing}": `no function "nothing"`,
	} {
		_, err := compileRowTemplate(source, testScope())
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "compile template") {
			t.Errorf("%q: got %v, want %q", source, err, want)
		}
	}
}

// The functions must agree with the strings package, whatever the text.
func FuzzTemplateFunctions(f *testing.F) {
	f.Add("Order.Created", ".", "-")
	f.Add("ÄÖİ\xffaa", "a", "aa")
	f.Add("aaa", "aa", "")
	f.Fuzz(func(t *testing.T, text, from, to string) {
		row := rowOf(text)
		if from != "" && text != null {
			tpl := &rowTemplate{parts: []templatePart{{column: 0, funcs: []templateFunc{{kind: funcReplace, from: from, to: to}}}}}
			if got, _ := tpl.appendTo(nil, row); string(got) != strings.ReplaceAll(text, from, to) {
				t.Errorf("replace %q by %q in %q: %q", from, to, text, got)
			}
		}
		if text == null || strings.ToValidUTF8(text, "") != text {
			return
		}
		tpl := &rowTemplate{parts: []templatePart{{column: 0, funcs: []templateFunc{{kind: funcLower}}}}}
		if got, _ := tpl.appendTo(nil, row); string(got) != strings.ToLower(text) {
			t.Errorf("lower %q: %q", text, got)
		}
	})
}

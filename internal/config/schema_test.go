package config

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// miniSchema checks v against the part of JSON Schema that Schema uses. A
// keyword that it does not know is an error, so that none is used unchecked.
func miniSchema(root, s map[string]any, path string, v any) []string {
	var errs []string
	bad := func(format string, args ...any) { errs = append(errs, path+": "+fmt.Sprintf(format, args...)) }
	for keyword, arg := range s {
		switch keyword {
		case "$schema", "title", "description", "default", "$defs", "additionalProperties":
		case "$ref":
			name := strings.TrimPrefix(arg.(string), "#/$defs/")
			errs = append(errs, miniSchema(root, root["$defs"].(map[string]any)[name].(map[string]any), path, v)...)
		case "anyOf":
			if !slices.ContainsFunc(arg.([]any), func(o any) bool { return len(miniSchema(root, o.(map[string]any), path, v)) == 0 }) {
				bad("%v fits none of the choices", v)
			}
		case "type":
			types, _ := arg.([]any)
			if one, ok := arg.(string); ok {
				types = []any{one}
			}
			if !slices.ContainsFunc(types, func(t any) bool { return hasType(v, t.(string)) }) {
				bad("%v is not of type %v", v, types)
			}
		case "enum":
			if !slices.Contains(arg.([]any), v) {
				bad("%v is not in %v", v, arg)
			}
		case "const":
			if n, ok := v.(float64); !ok || n != arg.(float64) {
				bad("%v is not %v", v, arg)
			}
		case "pattern":
			if s, ok := v.(string); ok && !regexp.MustCompile(arg.(string)).MatchString(s) {
				bad("%q does not match %v", s, arg)
			}
		case "minimum":
			if n, ok := v.(float64); ok && n < arg.(float64) {
				bad("%v is below %v", n, arg)
			}
		case "maximum":
			if n, ok := v.(float64); ok && n > arg.(float64) {
				bad("%v is above %v", n, arg)
			}
		case "minItems":
			if l, ok := v.([]any); ok && float64(len(l)) < arg.(float64) {
				bad("is too short")
			}
		case "items":
			if l, ok := v.([]any); ok {
				for i, e := range l {
					errs = append(errs, miniSchema(root, arg.(map[string]any), fmt.Sprintf("%s[%d]", path, i), e)...)
				}
			}
		case "required":
			if m, ok := v.(map[string]any); ok {
				for _, k := range arg.([]any) {
					if _, there := m[k.(string)]; !there {
						bad("%v is missing", k)
					}
				}
			}
		case "properties":
			if m, ok := v.(map[string]any); ok {
				for k, e := range m {
					if p, known := arg.(map[string]any)[k]; known {
						errs = append(errs, miniSchema(root, p.(map[string]any), join(path, k), e)...)
					} else if s["additionalProperties"] == false {
						bad("%s is unknown", k)
					}
				}
			}
		default:
			bad("unknown keyword %s", keyword)
		}
	}
	return errs
}

func hasType(v any, t string) bool {
	switch v := v.(type) {
	case nil:
		return t == "null"
	case string:
		return t == "string"
	case bool:
		return t == "boolean"
	case float64:
		return t == "number" || t == "integer" && v == float64(int64(v))
	case []any:
		return t == "array"
	}
	return t == "object"
}

// mustSchema is the schema as a reader of it sees it.
func mustSchema(t *testing.T) map[string]any {
	t.Helper()
	var s map[string]any
	if err := json.Unmarshal(Schema(), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// mustTree is a YAML text as a JSON Schema validator sees it.
func mustTree(t *testing.T, text string) any {
	t.Helper()
	var y, v any
	if err := yaml.Unmarshal([]byte(text), &y); err != nil {
		t.Fatal(err)
	}
	j, err := json.Marshal(y)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(j, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestSchemaTakesWhatIsRight(t *testing.T) {
	s := mustSchema(t)
	if s["$schema"] != "https://json-schema.org/draft/2020-12/schema" {
		t.Errorf("$schema is %v", s["$schema"])
	}
	for what, text := range map[string]string{
		"the example":              mustRead(t, exampleFile),
		"the example, all enabled": enableAll(mustRead(t, exampleFile)),
		"everything set":           mustRead(t, "testdata/full.yaml"),
		"the minimum":              minimal("outbox:\n"),
		"references":               minimal("topics: {partitions: '${N}', create: '${C:-true}'}\nbatch: {max-bytes: '${B}', max-delay: '${D}'}\non-fenced: ${F}\n"),
	} {
		if errs := miniSchema(s, s, "", mustTree(t, text)); len(errs) > 0 {
			t.Errorf("%s: %s", what, strings.Join(errs, "\n"))
		}
	}
}

func TestSchemaRefusesWhatIsWrong(t *testing.T) {
	s := mustSchema(t)
	for _, with := range []string{
		"verify: {}", "batch: {max-dely: 1s}", "batch: {max-bytes: -1}", "batch: {max-delay: fast}", "topics: {partitions: 0}",
		"format: {value: xml}", "outbox: [{topic: x}]", "outbox: {table: a.b}", "stop-timeout: 10", "dead-letter: {on: [x]}",
		"source: {}", "source: {dsn: x, columns: [public.t]}", "kafka: {brokers: []}", "topics: {create: maybe}",
	} {
		text := minimal(with)
		if key, _, _ := strings.Cut(with, ":"); strings.Contains(minimal(""), "\n"+key+":") {
			text = regexp.MustCompile(`(?m)^`+key+`:\n( .*\n)*`).ReplaceAllString(minimal(""), with+"\n")
		}
		if errs := miniSchema(s, s, "", mustTree(t, text)); len(errs) == 0 {
			t.Errorf("taken: %s", with)
		}
		if problemsOf(t, text) == nil {
			t.Errorf("the schema refuses what decodes: %s", with)
		}
	}
}

func TestSchemaDescribesEveryKey(t *testing.T) {
	var walk func(path string, s map[string]any) int
	walk = func(path string, s map[string]any) int {
		n := 0
		properties, _ := s["properties"].(map[string]any)
		for k, p := range properties {
			p := p.(map[string]any)
			n++
			if d, _ := p["description"].(string); d == "" {
				t.Errorf("%s has no description", join(path, k))
			}
			n += walk(join(path, k), p)
			if items, ok := p["items"].(map[string]any); ok {
				n += walk(join(path, k)+"[]", items)
			}
		}
		return n
	}
	if n := walk("", mustSchema(t)); n != len(specs()) {
		t.Errorf("the schema has %d keys, the table %d", n, len(specs()))
	}
}

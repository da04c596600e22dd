package config

import (
	"encoding/json"
	"fmt"
	"reflect"
)

// Schema returns the JSON Schema (draft 2020-12) of the file, for editors. It
// is made from the same table and types that decode and validate, and is a
// little more tolerant than they are: a ${reference} may stand for any value.
func Schema() []byte {
	t := newTable()
	root := t.groupSchema("", reflect.ValueOf(Default()))
	root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	root["title"] = "walrelay configuration"
	root["$defs"] = map[string]any{
		"reference": map[string]any{
			"type": "string", "pattern": `\$\{[^}]+\}`,
			"description": "${VAR}, ${VAR:-default} or ${file:/path}",
		},
	}
	out, err := json.MarshalIndent(root, "", "  ")
	if err != nil {
		panic(fmt.Sprintf("configuration schema: %v", err)) // maps of strings and numbers always encode
	}
	return append(out, '\n')
}

// groupSchema describes a mapping; v holds the defaults.
func (t table) groupSchema(path string, v reflect.Value) map[string]any {
	properties := make(map[string]any)
	required := []string{}
	for _, f := range fieldsOf(v) {
		at := join(path, f.key)
		s := t.at(at)
		p := t.valueSchema(at, f.value, s)
		p["description"] = s.doc
		properties[f.key] = p
		if s.required || holdsRequired(t, at, f.value) {
			required = append(required, f.key)
		}
	}
	g := map[string]any{"type": nullable("object"), "properties": properties, "additionalProperties": false}
	if len(required) > 0 {
		g["required"] = required
		g["type"] = "object"
	}
	return g
}

// holdsRequired tells whether a mapping must be there because something in it
// must.
func holdsRequired(t table, path string, v reflect.Value) bool {
	if !isGroup(v.Type()) {
		return false
	}
	for _, f := range fieldsOf(v) {
		if t.at(join(path, f.key)).required {
			return true
		}
	}
	return false
}

// valueSchema describes one value, its default included where it has one.
func (t table) valueSchema(path string, v reflect.Value, s spec) map[string]any {
	texts := map[string]any{"type": []string{"string", "number", "boolean"}}
	switch {
	case isGroup(v.Type()):
		return t.groupSchema(path, v)
	case v.Type() == reflect.TypeFor[[]Outbox]():
		return map[string]any{"type": nullable("array"), "items": t.groupSchema(path+"[]", reflect.ValueOf(DefaultOutbox()))}
	case v.Type() == reflect.TypeFor[map[string]string]():
		return map[string]any{"type": nullable("object"), "additionalProperties": texts}
	case v.Type() == reflect.TypeFor[map[string]Columns]():
		return columnsSchema(texts)
	case v.Type() == reflect.TypeFor[map[string][]string]():
		return map[string]any{"type": nullable("object"), "additionalProperties": map[string]any{"type": "array", "items": texts, "minItems": 1}}
	case v.Kind() == reflect.Slice:
		items := texts
		if len(s.enum) > 0 {
			items = orReference(map[string]any{"enum": s.enum})
		}
		p := map[string]any{"type": nullable("array"), "items": items}
		if s.required {
			p["type"], p["minItems"] = "array", 1
		} else if v.Len() > 0 {
			p["default"] = v.Interface()
		}
		return p
	}
	p := scalarSchema(v, s)
	if !s.required && !s.whenSet && !(v.Kind() == reflect.String && v.String() == "") && !holdsSecret(v.Type()) {
		p["default"] = v.Interface() // sizes and durations encode as the file writes them
	}
	return p
}

// scalarSchema describes a single value without its default.
func scalarSchema(v reflect.Value, s spec) map[string]any {
	switch v.Interface().(type) {
	case bool:
		return orReference(map[string]any{"type": "boolean"})
	case int:
		low, high := reflect.New(v.Type()).Elem(), reflect.New(v.Type()).Elem()
		if setScalar(low, s.min) != nil || setScalar(high, s.max) != nil {
			panic(fmt.Sprintf("field table: bounds of %s: %q, %q", s.path, s.min, s.max))
		}
		return orReference(map[string]any{"type": "integer", "minimum": low.Int(), "maximum": high.Int()})
	case Size:
		return orReference(map[string]any{"type": "integer", "minimum": 0},
			map[string]any{"type": "string", "pattern": `^ *[0-9]+ *([kKmMgGtT]?[iI]?[bB])? *$`})
	case Duration:
		return orReference(map[string]any{"const": 0},
			map[string]any{"type": "string", "pattern": `^ *(0|([0-9]+d)?([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))*) *$`})
	}
	if len(s.enum) > 0 {
		choices := make([]any, 0, len(s.enum)+1)
		for _, e := range s.enum {
			choices = append(choices, e)
			if e == "null" { // without quotes it is no text to editors, and taken all the same
				choices = append(choices, nil)
			}
		}
		return orReference(map[string]any{"enum": choices})
	}
	// Plain digits are a fine text to YAML's reader of this file.
	return map[string]any{"type": []string{"string", "number", "boolean"}}
}

// orReference lets a ${reference} stand for the value.
func orReference(choices ...map[string]any) map[string]any {
	return map[string]any{"anyOf": append(choices, map[string]any{"$ref": "#/$defs/reference"})}
}

// nullable adds null, which is what a key with all of its lines commented out
// holds.
func nullable(kind string) []string { return []string{kind, "null"} }

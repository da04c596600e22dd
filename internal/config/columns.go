package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Columns says which columns of a table are masked or left out.
type Columns struct {
	Exclude []string        `yaml:"exclude"`
	Mask    map[string]Mask `yaml:"mask"` // by column
	// Gone are those of them that the table has no more.
	Gone []string `yaml:"gone"`
}

// Mask is what stands in the place of a column's values. In the file it is a word, or a
// mapping of one: sha256, null, {hmac-sha256: SALT}, {truncate: LENGTH}, {fixed: TEXT}.
type Mask struct {
	Kind   string // one of the Mask constants
	Salt   Secret // of hmac-sha256
	Length int    // of truncate, in characters
	Text   string // of fixed
}

// The kinds of masks.
const (
	MaskSHA256   = "sha256"
	MaskHMAC     = "hmac-sha256"
	MaskTruncate = "truncate"
	MaskFixed    = "fixed"
	MaskNull     = "null"
)

// maxTruncate is what a varchar may have at the most.
const maxTruncate = 10485760

const maskRemedy = `write sha256, null, {hmac-sha256: "${file:/path}"}, {truncate: 8} or {fixed: "-"}`

// mask decodes a Mask. What is written in its place is not quoted in a problem: it may be
// a salt.
func (d *decoder) mask(n *yaml.Node, path string, v reflect.Value) {
	var m Mask
	bad := func(reason string) {
		d.problems.add(Problem{Path: path, Line: n.Line, Reason: reason, Remedy: maskRemedy})
	}
	switch {
	case isNull(n) && n.Value == "":
		bad("the key has no value")
		return
	case isNull(n):
		m.Kind = MaskNull
	case n.Kind == yaml.ScalarNode:
		if !d.scalar(n, path, reflect.ValueOf(&m.Kind).Elem()) {
			return
		}
		if m.Kind != MaskSHA256 && m.Kind != MaskNull {
			bad(unknownMask(m.Kind))
			return
		}
	case n.Kind == yaml.MappingNode && len(n.Content) == 2:
		entries, ok := d.entries(n, path, v.Type())
		if !ok || len(entries) == 0 || !d.maskEntry(entries[0], path, &m, bad) {
			return
		}
	default:
		bad("is not a mask")
		return
	}
	v.Set(reflect.ValueOf(m))
}

// maskEntry decodes the mapping of a mask.
func (d *decoder) maskEntry(e entry, path string, m *Mask, bad func(reason string)) bool {
	m.Kind = e.key
	into := map[string]any{MaskHMAC: &m.Salt, MaskTruncate: &m.Length, MaskFixed: &m.Text}[e.key]
	if into == nil {
		bad(unknownMask(e.key))
		return false
	}
	at, v := join(path, e.key), reflect.ValueOf(into).Elem()
	return d.plainNode(e.node, at, v.Type()) && d.scalar(e.node, at, v)
}

// unknownMask tells what is wrong with the word for a mask, and repeats it only where it is
// known.
func unknownMask(word string) string {
	switch right, ok := closest(word, []string{MaskSHA256, MaskHMAC, MaskTruncate, MaskFixed, MaskNull}); {
	case ok && right == word && (word == MaskSHA256 || word == MaskNull):
		return word + " takes nothing more"
	case ok && right == word:
		return word + " needs a value"
	case ok:
		return "is not a mask; did you mean " + right + "?"
	}
	return "is not a mask"
}

// flow is m as a YAML flow, without its secret.
func (m Mask) flow() string {
	switch m.Kind {
	case MaskHMAC:
		return fmt.Sprintf("{%s: %s}", m.Kind, yamlText(m.Salt.String()))
	case MaskTruncate:
		return fmt.Sprintf("{%s: %d}", m.Kind, m.Length)
	case MaskFixed:
		return fmt.Sprintf("{%s: %s}", m.Kind, yamlText(m.Text))
	}
	return m.Kind
}

// flow is c as a YAML flow, without secrets.
func (c Columns) flow() string {
	var parts []string
	if len(c.Exclude) > 0 {
		parts = append(parts, "exclude: "+yamlList(c.Exclude))
	}
	if len(c.Mask) > 0 {
		var masks []string
		for _, column := range slices.Sorted(maps.Keys(c.Mask)) {
			masks = append(masks, yamlText(column)+": "+c.Mask[column].flow())
		}
		parts = append(parts, "mask: {"+strings.Join(masks, ", ")+"}")
	}
	if len(c.Gone) > 0 {
		parts = append(parts, "gone: "+yamlList(c.Gone))
	}
	return "{" + strings.Join(parts, ", ") + "}"
}

// columnsSchema describes source.columns.
func columnsSchema(texts map[string]any) map[string]any {
	object := func(properties map[string]any) map[string]any {
		return map[string]any{"type": "object", "properties": properties, "additionalProperties": false}
	}
	number := orReference(map[string]any{"type": "integer", "minimum": 1, "maximum": maxTruncate})
	mask := map[string]any{"anyOf": []any{
		map[string]any{"enum": []any{MaskSHA256, MaskNull, nil}},
		object(map[string]any{MaskHMAC: texts}), object(map[string]any{MaskTruncate: number}), object(map[string]any{MaskFixed: texts}),
		map[string]any{"$ref": "#/$defs/reference"},
	}}
	list := map[string]any{"type": nullable("array"), "items": texts}
	table := object(map[string]any{
		"exclude": list, "gone": list,
		"mask": map[string]any{"type": nullable("object"), "additionalProperties": mask},
	})
	return map[string]any{"type": nullable("object"), "additionalProperties": table}
}

// columns checks what is masked and left out.
func (v *validator) columns(c Config) {
	for _, table := range slices.Sorted(maps.Keys(c.Source.Columns)) {
		path := join("source.columns", table)
		v.tableName(path, table)
		v.columnsOf(path, c.Source.Columns[table], c.Source.Keys[table])
		schema, name, _ := strings.Cut(table, ".")
		switch {
		case slices.ContainsFunc(c.Outbox, func(o Outbox) bool { return o.Table == table }):
			v.bad(path, "", "is an outbox table, whose rows leave as events and not by their columns", "leave out by topic, key and headers what is not to leave, or keep it out of the payload")
		case !c.Source.Tables.Match(schema, name) && !v.spokenIn("source.tables"):
			v.bad(path, "", "is not captured, so that a misspelt name would hide nothing of the table that is meant", "correct the name, or add the table to source.tables")
		}
	}
}

func (v *validator) columnsOf(path string, c Columns, key []string) {
	v.distinct(path+".exclude", c.Exclude, "column")
	v.distinct(path+".gone", c.Gone, "column")
	if len(c.Exclude) == 0 && len(c.Mask) == 0 {
		v.bad(path, "", "names no column", "write for example {exclude: [password_hash], mask: {email: sha256}}")
	}
	for i, column := range c.Exclude {
		v.keyColumn(fmt.Sprintf("%s.exclude[%d]", path, i), column, "exclude", key)
	}
	for i, column := range c.Gone {
		if _, masked := c.Mask[column]; !masked && !slices.Contains(c.Exclude, column) {
			v.bad(fmt.Sprintf("%s.gone[%d]", path, i), column, "is neither excluded nor masked", "name it there too: gone columns stay hidden in the rows that have them")
		}
	}
	for _, column := range slices.Sorted(maps.Keys(c.Mask)) {
		m, at := c.Mask[column], join(path+".mask", column)
		switch {
		case column == "":
			v.bad(at, `""`, "names no column", "write the column's name")
		case slices.Contains(c.Exclude, column):
			v.bad(at, m.Kind, "is excluded as well", "keep one of the two")
		case m.Kind == MaskHMAC && m.Salt.IsZero():
			v.bad(join(at, m.Kind), "", "the salt is empty, so that everybody could make the same hashes", `write a secret, such as "${file:/run/salt}"`)
		case m.Kind == MaskTruncate && (m.Length < 1 || m.Length > maxTruncate):
			v.bad(join(at, m.Kind), fmt.Sprint(m.Length), "is not a number of characters that can stay", fmt.Sprintf("write a value from 1 to %d, or {fixed: \"\"}", maxTruncate))
		case m.Kind != MaskSHA256 && m.Kind != MaskHMAC:
			v.keyColumn(at, column, m.Kind, key)
		}
	}
}

// keyColumn refuses what would make different keys one. Keys that source.keys does not
// name are the database's to say.
func (v *validator) keyColumn(path, column, how string, key []string) {
	if slices.Contains(key, column) {
		v.bad(path, how, "is a column of source.keys: different rows would have one key, and replace and delete each other in the topic",
			"use sha256 or hmac-sha256, under which different values stay different, or another key")
	}
}

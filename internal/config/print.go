package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// Print writes the configuration as YAML in the order of the file, defaults
// included and secrets masked. Apart from those, the text decodes to c again.
func (c Config) Print(w io.Writer) error {
	p := printer{table: newTable()}
	p.group(reflect.ValueOf(c), "", "")
	if _, err := w.Write(p.out.Bytes()); err != nil {
		return fmt.Errorf("print configuration: %w", err)
	}
	return nil
}

// printer writes the few shapes that a Config has. A YAML encoder would do
// more, but not leave out what is unset, nor keep short lists on one line.
type printer struct {
	table table
	out   bytes.Buffer
}

func (p *printer) group(v reflect.Value, path, indent string) {
	for _, f := range fieldsOf(v) {
		at := join(path, f.key)
		if p.table.at(at).whenSet && f.value.IsZero() {
			continue
		}
		p.entry(f.key, f.value, at, indent)
	}
}

// entry writes one key with its value.
func (p *printer) entry(key string, v reflect.Value, path, indent string) {
	fmt.Fprintf(&p.out, "%s%s:", indent, key)
	switch {
	case isGroup(v.Type()):
		p.out.WriteByte('\n')
		p.group(v, path, indent+"  ")
	case v.Type() == reflect.TypeFor[[]Outbox]() && v.Len() > 0:
		p.out.WriteByte('\n')
		for i := range v.Len() {
			start := p.out.Len()
			p.group(v.Index(i), fmt.Sprintf("%s[%d]", path, i), indent+"    ")
			// The entry's first line carries the dash of the list.
			copy(p.out.Bytes()[start+len(indent):], "  - ")
		}
	case v.Kind() == reflect.Map && v.Len() > 0:
		p.out.WriteByte('\n')
		keys := v.Interface()
		switch m := keys.(type) {
		case map[string]string:
			for _, k := range slices.Sorted(maps.Keys(m)) {
				fmt.Fprintf(&p.out, "%s  %s: %s\n", indent, yamlText(k), yamlText(m[k]))
			}
		case map[string][]string:
			for _, k := range slices.Sorted(maps.Keys(m)) {
				fmt.Fprintf(&p.out, "%s  %s: %s\n", indent, yamlText(k), yamlList(m[k]))
			}
		case map[string]Columns:
			for _, k := range slices.Sorted(maps.Keys(m)) {
				fmt.Fprintf(&p.out, "%s  %s: %s\n", indent, yamlText(k), m[k].flow())
			}
		}
	case v.Kind() == reflect.Map:
		p.out.WriteString(" {}\n")
	case v.Kind() == reflect.Slice:
		list := make([]string, v.Len())
		for i := range list {
			list[i] = v.Index(i).String()
		}
		p.out.WriteString(" " + yamlList(list) + "\n")
	case v.Kind() == reflect.String:
		p.out.WriteString(" " + yamlText(v.String()) + "\n")
	case v.Type() == reflect.TypeFor[Secret](), v.Type() == reflect.TypeFor[DSN]():
		p.out.WriteString(" " + yamlText(fmt.Sprint(v.Interface())) + "\n")
	default: // numbers, booleans, sizes and durations are plain in YAML
		fmt.Fprintf(&p.out, " %v\n", v.Interface())
	}
}

func yamlList(list []string) string {
	quoted := make([]string, len(list))
	for i, s := range list {
		quoted[i] = yamlText(s)
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

// yamlText is s as a YAML scalar: plain where no reader could take it for
// anything but this text, else as a JSON string, which YAML reads as well. A ${
// in it is escaped, so that it is not looked up when read again.
func yamlText(s string) string {
	plain := regexp.MustCompile(`^[A-Za-z_/][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)*$`)
	word := regexp.MustCompile(`(?i)^(true|false|null|yes|no|on|off|y|n)$`)
	if plain.MatchString(s) && !word.MatchString(s) {
		return s
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(strings.ReplaceAll(s, "${", "$${")) // a string always has a JSON form
	return strings.TrimSuffix(b.String(), "\n")
}

package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// decoder walks the YAML syntax tree alongside the structs. It does so by hand
// because no decoder at hand goes on after an unknown key or a wrong type, and
// because only the tree still has what makes a problem precise: the line, the
// text as written, and which keys are there at all.
type decoder struct {
	table    table
	problems *Problems
	env      func(string) (string, bool)
	readFile func(string) ([]byte, error)
	// seen has the line and the text of every key in the file. Validation
	// quotes them; presence alone decides kafka.tls.enabled.
	seen map[string]source
}

// source is where a value stands in the file, and its text as written there
// (empty for lists and mappings).
type source struct {
	line int
	text string
}

func newDecoder(env func(string) (string, bool), readFile func(string) ([]byte, error)) *decoder {
	return &decoder{
		table: newTable(), problems: &Problems{}, env: env, readFile: readFile,
		seen: make(map[string]source),
	}
}

// at is where path stands in the file.
func (d *decoder) at(path string) source { return d.seen[path] }

// parse turns the text into a tree. Syntax errors are the one kind that hides
// others: behind one, nothing can be told of the rest. ok is false then, and
// where the file holds nothing to decode.
func (d *decoder) parse(data []byte) (root *yaml.Node, ok bool) {
	defer func() {
		// The parser is not ours and a configuration file is not worth a crash
		// dump, which would show the text around it.
		if recover() != nil {
			root, ok = nil, false
			d.problems.add(Problem{Reason: "the file cannot be parsed as YAML", Remedy: "look for unbalanced quotes, brackets and indentation"})
		}
	}()
	docs := yaml.NewDecoder(bytes.NewReader(data))
	var doc, second yaml.Node
	if err := docs.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, true // empty: everything that is mandatory is missing
	} else if err != nil {
		d.problems.add(syntaxProblem(err, data))
		return nil, false
	}
	if err := docs.Decode(&second); err == nil {
		d.problems.add(Problem{
			Line: second.Line, Reason: "the file has more than one YAML document",
			Remedy: "keep one connector to a file and remove the --- lines",
		})
		return nil, false
	} else if !errors.Is(err, io.EOF) {
		d.problems.add(syntaxProblem(err, data))
		return nil, false
	}
	return doc.Content[0], true
}

// decode reads the tree over c, which holds the defaults.
func (d *decoder) decode(root *yaml.Node, c *Config) {
	if root == nil {
		return
	}
	d.value(root, "", reflect.ValueOf(c).Elem())
	// A certificate without TLS is never meant; said explicitly, it stands.
	tls := &c.Kafka.TLS
	if _, said := d.seen["kafka.tls.enabled"]; !said && (tls.CA != "" || tls.Cert != "" || tls.Key != "") {
		tls.Enabled = true
	}
}

// value decodes n into v by v's type. What cannot be decoded is a problem and
// leaves v as it is.
func (d *decoder) value(n *yaml.Node, path string, v reflect.Value) {
	if !d.plainNode(n, path, v.Type()) {
		return
	}
	switch {
	case v.Type() == reflect.TypeFor[Mask]():
		d.mask(n, path, v)
	case isGroup(v.Type()):
		d.group(n, path, v)
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.String:
		d.strings(n, path, v)
	case v.Kind() == reflect.Slice:
		d.outboxes(n, path, v)
	case v.Kind() == reflect.Map:
		d.dictionary(n, path, v)
	default:
		d.scalar(n, path, v)
	}
}

// plainNode refuses anchors, aliases, merges and tags. A file of forty keys
// does not need them, and nearly always they are a forgotten pair of quotes:
// *.* is an alias to YAML, !public.audit a tag.
func (d *decoder) plainNode(n *yaml.Node, path string, t reflect.Type) bool {
	var what string
	switch {
	case n.Kind == yaml.AliasNode:
		what = "a value that begins with * is an alias to YAML"
	case n.Anchor != "":
		what = "a value that begins with & is an anchor to YAML"
	case n.Style&yaml.TaggedStyle != 0:
		what = "a value that begins with ! is a tag to YAML"
	default:
		return true
	}
	d.add(n, path, t, what, "write the value in quotes; aliases, anchors and tags are not taken")
	return false
}

// group decodes a mapping into a struct.
func (d *decoder) group(n *yaml.Node, path string, v reflect.Value) {
	entries, ok := d.entries(n, path, v.Type())
	if !ok {
		return
	}
	fields := fieldsOf(v)
	for _, e := range entries {
		i := slices.IndexFunc(fields, func(f field) bool { return f.key == e.key })
		if i < 0 {
			d.unknown(e, path, v)
			continue
		}
		d.value(e.node, join(path, e.key), fields[i].value)
	}
}

// entry is one key of a mapping with its value.
type entry struct {
	key  string
	line int
	node *yaml.Node
}

// entries lists a mapping's keys, each once; a second time is a problem. A
// mapping whose lines are all commented out is null to YAML and counts as
// empty.
func (d *decoder) entries(n *yaml.Node, path string, t reflect.Type) ([]entry, bool) {
	if isNull(n) {
		return nil, true
	}
	if n.Kind != yaml.MappingNode {
		d.add(n, path, t, "must be a mapping", "write keys and values: "+d.someKeys(path))
		return nil, false
	}
	var list []entry
	first := make(map[string]int)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, node := n.Content[i], n.Content[i+1]
		if k.Kind != yaml.ScalarNode || k.Tag == "!!merge" {
			d.problems.add(Problem{Path: path, Line: k.Line, Reason: "a key that is not plain text", Remedy: "write KEY: VALUE; merges (<<) and complex keys (?) are not taken"})
			continue
		}
		key := k.Value
		if at, dup := first[key]; dup {
			d.problems.add(Problem{
				Path: join(path, key), Line: k.Line,
				Reason: fmt.Sprintf("the key is there already, in line %d", at), Remedy: "keep one of the two",
			})
			continue
		}
		first[key] = k.Line
		d.seen[join(path, key)] = source{line: k.Line, text: scalarText(node)}
		list = append(list, entry{key: key, line: k.Line, node: node})
	}
	return list, true
}

// unknown reports a key that the mapping at path does not have. Its value is
// shown only where no secret can be meant: the guess at the right key is not
// one, and none is among its neighbours.
func (d *decoder) unknown(e entry, path string, v reflect.Value) {
	p := Problem{Path: join(path, e.key), Line: e.line, Reason: "unknown key"}
	var siblings []string
	secretNear := false
	for _, f := range fieldsOf(v) {
		siblings = append(siblings, f.key)
		secretNear = secretNear || !isGroup(f.value.Type()) && holdsSecret(f.value.Type())
	}
	if right, ok := closest(e.key, siblings); ok {
		p.Remedy = "did you mean " + right + "?"
		d.problems.cover(join(path, right))
		if !secretNear && !holdsSecret(fieldsOf(v)[slices.Index(siblings, right)].value.Type()) {
			p.Value = scalarText(e.node)
		}
	} else if home, ok := d.elsewhere(e.key); ok && path == "" {
		p.Remedy = "it belongs at " + home
		d.problems.cover(home)
	} else {
		p.Remedy = "keys here: " + strings.Join(siblings, ", ")
	}
	d.problems.add(p)
}

// elsewhere finds the one place where a key of the top level belongs: most
// often it lost its indentation.
func (d *decoder) elsewhere(key string) (string, bool) {
	var found []string
	for _, p := range d.table.order {
		if p == key || strings.HasSuffix(p, "."+key) {
			found = append(found, p)
		}
	}
	if len(found) != 1 {
		return "", false
	}
	return found[0], true
}

// someKeys is an example of what belongs into the mapping at path.
func (d *decoder) someKeys(path string) string {
	if keys := d.table.keys(listed(path)); len(keys) > 0 {
		return strings.Join(keys, ", ")
	}
	return "name: value"
}

// strings decodes a list of strings.
func (d *decoder) strings(n *yaml.Node, path string, v reflect.Value) {
	items, ok := d.items(n, path, v.Type())
	if !ok {
		return
	}
	list := reflect.MakeSlice(v.Type(), 0, len(items))
	for i, item := range items {
		var s string
		p := fmt.Sprintf("%s[%d]", path, i)
		if d.plainNode(item, p, v.Type()) && d.scalar(item, p, reflect.ValueOf(&s).Elem()) {
			list = reflect.Append(list, reflect.ValueOf(s).Convert(v.Type().Elem()))
		}
	}
	v.Set(list)
}

// outboxes decodes the list of outbox tables, each over its defaults.
func (d *decoder) outboxes(n *yaml.Node, path string, v reflect.Value) {
	items, ok := d.items(n, path, v.Type())
	if !ok {
		return
	}
	list := make([]Outbox, len(items))
	for i, item := range items {
		list[i] = DefaultOutbox()
		d.value(item, fmt.Sprintf("%s[%d]", path, i), reflect.ValueOf(&list[i]).Elem())
	}
	v.Set(reflect.ValueOf(list))
}

// items lists a sequence's elements, and notes where each stands. Null counts
// as empty, as for mappings.
func (d *decoder) items(n *yaml.Node, path string, t reflect.Type) ([]*yaml.Node, bool) {
	if isNull(n) {
		return nil, true
	}
	if n.Kind != yaml.SequenceNode {
		d.add(n, path, t, "must be a list", "write [a, b], or one - line per element")
		return nil, false
	}
	for i, item := range n.Content {
		d.seen[fmt.Sprintf("%s[%d]", path, i)] = source{line: item.Line, text: scalarText(item)}
	}
	return n.Content, true
}

// dictionary decodes a mapping with free keys.
func (d *decoder) dictionary(n *yaml.Node, path string, v reflect.Value) {
	entries, ok := d.entries(n, path, v.Type())
	if !ok {
		return
	}
	m := reflect.MakeMap(v.Type())
	for _, e := range entries {
		elem := reflect.New(v.Type().Elem()).Elem()
		d.value(e.node, join(path, e.key), elem)
		m.SetMapIndex(reflect.ValueOf(e.key), elem)
	}
	if len(entries) > 0 {
		v.Set(m)
	}
}

// add reports a problem with n, quoting the value unless it may be secret.
func (d *decoder) add(n *yaml.Node, path string, t reflect.Type, reason, remedy string) {
	p := Problem{Path: path, Line: n.Line, Value: scalarText(n), Reason: reason, Remedy: remedy}
	if p.Value != "" && holdsSecret(t) {
		p.Value = masked
	}
	d.problems.add(p)
}

// scalar decodes one value, references resolved, and tells whether it could.
func (d *decoder) scalar(n *yaml.Node, path string, v reflect.Value) bool {
	// null-payload: null is the one place where YAML's null is a word.
	word := slices.Contains(d.table.at(path).enum, n.Value)
	switch {
	case isNull(n) && !word:
		d.problems.add(Problem{Path: path, Line: n.Line, Reason: "the key has no value", Remedy: `write one, "" for an empty text, or leave the key out`})
		return false
	case n.Kind != yaml.ScalarNode:
		d.add(n, path, v.Type(), "must be a single value", kindRemedy(v.Type()))
		return false
	}
	text, failed := interpolate(n.Value, d.env, d.readFile)
	for _, f := range failed {
		d.problems.add(Problem{Path: path, Line: n.Line, Value: f.ref, Reason: f.reason, Remedy: f.remedy})
	}
	if len(failed) > 0 {
		return false
	}
	if err := setScalar(v, text); err != nil {
		d.add(n, path, v.Type(), err.Error(), kindRemedy(v.Type()))
		return false
	}
	return true
}

// setScalar converts text to v's type. The error is the reason alone.
func setScalar(v reflect.Value, text string) error {
	switch v.Interface().(type) {
	case Secret:
		v.Set(reflect.ValueOf(NewSecret(text)))
		return nil
	case DSN:
		v.Set(reflect.ValueOf(NewDSN(text)))
		return nil
	case Size:
		n, err := ParseSize(text)
		if err == nil {
			v.SetInt(int64(n))
		}
		return err
	case Duration:
		n, err := ParseDuration(text)
		if err == nil {
			v.SetInt(int64(n))
		}
		return err
	case bool:
		if text != "true" && text != "false" {
			return errors.New("is neither true nor false")
		}
		v.SetBool(text == "true")
		return nil
	case int:
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return errors.New("is not a whole number that fits 32 bits")
		}
		v.SetInt(n)
		return nil
	}
	v.SetString(text)
	return nil
}

// kindRemedy says what a value of type t looks like.
func kindRemedy(t reflect.Type) string {
	switch {
	case t == reflect.TypeFor[Size]():
		return "write a size such as 64MiB, 8MB or a number of bytes"
	case t == reflect.TypeFor[Duration]():
		return "write a duration such as 500ms, 10s or 7d"
	case t.Kind() == reflect.Bool:
		return "write true or false"
	case t.Kind() == reflect.Int:
		return "write a number such as 6"
	}
	return "write one text, in quotes where it has special characters"
}

// isNull tells whether n is YAML's null: nothing at all, ~ or null.
func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// scalarText is a scalar as it stands in the file, without its quotes, and
// empty for everything else. Numbers keep their digits: a password of 007 is
// not 7.
func scalarText(n *yaml.Node) string {
	if n.Kind != yaml.ScalarNode || isNull(n) {
		return ""
	}
	return n.Value
}

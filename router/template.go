package router

import (
	"bytes"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/walrelay/walrelay/replication"
)

// rowTemplate is a compiled template over the columns of one relation: literal
// text and fields in braces, each with functions applied from left to right.
//
//	outbox.event.{aggregate_type|lower}
//	{tenant|default:none}.{event_type|replace:.v2:}
//
// Functions: lower (Unicode lower case), replace:FROM:TO (every occurrence, TO may
// be empty), default:TEXT (where the value so far is NULL or empty). The
// characters { } | : and \ lose their meaning behind a backslash.
//
// A template belongs to one relation, because columns are resolved to indexes once
// and not per row. It is never changed after compileRowTemplate and may be shared.
type rowTemplate struct {
	source string
	parts  []templatePart
}

// templatePart is literal text (column < 0), or a column's value piped through
// funcs.
type templatePart struct {
	literal string
	column  int
	part    valuePart // of the column's value
	name    string    // as the template spells the field
	funcs   []templateFunc
}

// valuePart is a part of a value.
type valuePart uint8

const (
	partWhole   valuePart = iota
	partName              // order.created of order.created.v2
	partVersion           // v2 of it; nothing of what has no such suffix
)

// of gives the part of text.
func (p valuePart) of(text []byte) []byte {
	if p == partWhole {
		return text
	}
	i := len(text)
	for i > 0 && text[i-1] >= '0' && text[i-1] <= '9' {
		i--
	}
	if i == len(text) || i < 3 || text[i-1] != 'v' || text[i-2] != '.' {
		i = len(text) + 2 // no suffix
	}
	if p == partName {
		return text[:i-2]
	}
	return text[min(i-1, len(text)):]
}

// templateFunc is one function of a field. from is the sought text of replace, to
// its replacement or the text of default.
type templateFunc struct {
	kind     templateFuncKind
	from, to string
}

type templateFuncKind uint8

const (
	funcLower templateFuncKind = iota + 1
	funcReplace
	funcDefault
)

// templateScope says what the names of a template mean: the index of a column, or
// a constant (for {prefix}).
type templateScope struct {
	columns map[string]int
	// parts are parts of a column's value that have names of their own.
	parts     map[string]columnPart
	constants map[string]string
	// add gives the column of a name that is neither; nil where there are no others.
	add func(name string) int
	// describe lists the names that exist, for the error about one that does not.
	describe string
}

// columnPart is a part of a column's value.
type columnPart struct {
	column int
	part   valuePart
}

// compileRowTemplate compiles source. Its errors name the place in the template and
// what would be right there; an unknown field's error lists those that exist.
func compileRowTemplate(source string, scope templateScope) (*rowTemplate, error) {
	t := &rowTemplate{source: source}
	var literal strings.Builder
	flush := func() {
		if literal.Len() > 0 {
			t.parts = append(t.parts, templatePart{literal: literal.String(), column: -1})
			literal.Reset()
		}
	}
	for rest := source; rest != ""; {
		switch rest[0] {
		case '\\':
			c, err := unescape(rest)
			if err != nil {
				return nil, fmt.Errorf("compile template %q: %w", source, err)
			}
			literal.WriteByte(c)
			rest = rest[2:]
		case '{':
			end := indexUnescaped(rest, '}')
			if end < 0 {
				return nil, fmt.Errorf("compile template %q: no } behind %q; close the field, or write \\{ for a brace", source, rest)
			}
			part, err := compileField(rest[1:end], scope)
			if err != nil {
				return nil, fmt.Errorf("compile template %q: %w", source, err)
			}
			if part.column < 0 {
				// A constant is folded into the text around it.
				literal.WriteString(part.literal)
			} else {
				flush()
				t.parts = append(t.parts, part)
			}
			rest = rest[end+1:]
		case '}':
			return nil, fmt.Errorf("compile template %q: } without {; write \\} for a brace", source)
		default:
			literal.WriteByte(rest[0])
			rest = rest[1:]
		}
	}
	flush()
	return t, nil
}

// compileField compiles what stands between the braces.
func compileField(text string, scope templateScope) (templatePart, error) {
	pieces := splitUnescaped(text, '|')
	name, err := unescapeAll(pieces[0])
	if err != nil {
		return templatePart{}, err
	}
	part := templatePart{column: -1, name: name}
	for _, p := range pieces[1:] {
		f, err := compileFunc(p)
		if err != nil {
			return templatePart{}, fmt.Errorf("field {%s}: %w", text, err)
		}
		part.funcs = append(part.funcs, f)
	}
	if i, ok := scope.columns[name]; ok {
		part.column = i
		return part, nil
	}
	if c, ok := scope.parts[name]; ok {
		part.column, part.part = c.column, c.part
		return part, nil
	}
	if c, ok := scope.constants[name]; ok {
		out := applyFuncs([]byte(c), 0, part.funcs)
		return templatePart{literal: string(out), column: -1}, nil
	}
	if scope.add != nil {
		part.column = scope.add(name)
		return part, nil
	}
	return templatePart{}, fmt.Errorf("no field {%s}; there are %s", name, scope.describe)
}

// compileFunc compiles one function with its arguments, name:arg:arg.
func compileFunc(text string) (templateFunc, error) {
	pieces := splitUnescaped(text, ':')
	for i := range pieces {
		var err error
		if pieces[i], err = unescapeAll(pieces[i]); err != nil {
			return templateFunc{}, err
		}
	}
	args := pieces[1:]
	switch pieces[0] {
	case "lower":
		if len(args) != 0 {
			return templateFunc{}, fmt.Errorf("lower takes no argument, not %q; write {x|lower}", text)
		}
		return templateFunc{kind: funcLower}, nil
	case "replace":
		if len(args) != 2 || args[0] == "" {
			return templateFunc{}, fmt.Errorf("replace takes a text and its replacement, not %q; write {x|replace:a:b}, with \\: for a colon", text)
		}
		return templateFunc{kind: funcReplace, from: args[0], to: args[1]}, nil
	case "default":
		if len(args) != 1 || args[0] == "" {
			return templateFunc{}, fmt.Errorf("default takes one text, not %q; write {x|default:y}, with \\: for a colon", text)
		}
		return templateFunc{kind: funcDefault, to: args[0]}, nil
	}
	return templateFunc{}, fmt.Errorf("no function %q; there are lower, replace:a:b and default:y", pieces[0])
}

// appendTo appends the template's text for row to dst. A field that is NULL gives
// no text. empty names the first field that gave none although it is there to give
// some, or is "": a topic without its variable part would mix events that do not
// belong together, so that callers who route must refuse it.
//
// It does not allocate as long as dst has room for the text and, while a function
// works, for a second copy of one field.
func (t *rowTemplate) appendTo(dst []byte, row replication.Tuple) (out []byte, empty string) {
	for i := range t.parts {
		p := &t.parts[i]
		if p.column < 0 {
			dst = append(dst, p.literal...)
			continue
		}
		start := len(dst)
		if v := &row[p.column]; v.Kind == replication.ValueText {
			dst = append(dst, p.part.of(v.Text)...)
		}
		if len(p.funcs) > 0 {
			dst = applyFuncs(dst, start, p.funcs)
		}
		if len(dst) == start && empty == "" {
			empty = p.name
		}
	}
	return dst, empty
}

// applyFuncs pipes dst[start:] through funcs. Each function writes its result
// behind its input and moves it down over it, so that no buffer is needed beside
// dst.
func applyFuncs(dst []byte, start int, funcs []templateFunc) []byte {
	for i := range funcs {
		f := &funcs[i]
		end := len(dst)
		switch f.kind {
		case funcLower:
			dst = appendLower(dst, start)
		case funcReplace:
			dst = appendReplaced(dst, start, f.from, f.to)
		case funcDefault:
			if end == start {
				dst = append(dst, f.to...)
			}
			continue
		}
		dst = append(dst[:start], dst[end:]...)
	}
	return dst
}

// appendLower appends the lower case of dst[start:]. Bytes that are not UTF-8 stay
// as they are: whether they may be in a topic's name is decided elsewhere.
func appendLower(dst []byte, start int) []byte {
	for end := len(dst); start < end; {
		c := dst[start]
		switch {
		case 'A' <= c && c <= 'Z':
			dst = append(dst, c+'a'-'A')
			start++
		case c < utf8.RuneSelf:
			dst = append(dst, c)
			start++
		default:
			r, n := utf8.DecodeRune(dst[start:end])
			if r == utf8.RuneError && n == 1 {
				dst = append(dst, c)
			} else {
				dst = utf8.AppendRune(dst, unicode.ToLower(r))
			}
			start += n
		}
	}
	return dst
}

// appendReplaced appends dst[start:] with each from replaced by to. from is not
// empty.
func appendReplaced(dst []byte, start int, from, to string) []byte {
	end := len(dst)
	for start < end {
		// Compared as a string, since bytes.Index would want from as a slice.
		i := indexString(dst[start:end], from)
		if i < 0 {
			return append(dst, dst[start:end]...)
		}
		dst = append(dst, dst[start:start+i]...)
		dst = append(dst, to...)
		start += i + len(from)
	}
	return dst
}

// indexString is bytes.Index with a string, which converts without allocating.
func indexString(b []byte, s string) int {
	for i := 0; ; i++ {
		j := bytes.IndexByte(b[i:], s[0])
		if j < 0 || i+j+len(s) > len(b) {
			return -1
		}
		i += j
		if string(b[i:i+len(s)]) == s {
			return i
		}
	}
}

// indexUnescaped gives the index of the first c in s that no backslash precedes, or
// -1.
func indexUnescaped(s string, c byte) int {
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case c:
			return i
		}
	}
	return -1
}

// splitUnescaped splits s at each c that no backslash precedes. The pieces keep
// their backslashes.
func splitUnescaped(s string, c byte) []string {
	var pieces []string
	for {
		i := indexUnescaped(s, c)
		if i < 0 {
			return append(pieces, s)
		}
		pieces = append(pieces, s[:i])
		s = s[i+1:]
	}
}

// unescape gives the character that the backslash at the start of s protects.
func unescape(s string) (byte, error) {
	if len(s) < 2 || strings.IndexByte(`{}|:\`, s[1]) < 0 {
		return 0, fmt.Errorf(`backslash before none of { } | : \ at %q; write \\ for a backslash`, s)
	}
	return s[1], nil
}

// unescapeAll resolves the backslashes of s.
func unescapeAll(s string) (string, error) {
	if strings.IndexByte(s, '\\') < 0 {
		return s, nil
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c == '\\' {
			var err error
			if c, err = unescape(s[i:]); err != nil {
				return "", err
			}
			i++
		}
		b.WriteByte(c)
	}
	return b.String(), nil
}

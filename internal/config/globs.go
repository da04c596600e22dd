package config

import (
	"errors"
	"strings"
	"unicode/utf8"
)

// Globs selects tables by schema.table patterns.
//
// In a pattern '*' stands for any number of characters (none included) and '?'
// for exactly one; '\' takes the special meaning from the character after it.
// A pattern is cut at its first dot, and each part must match the whole of the
// schema's and of the table's name, so that '*' never reaches over the dot
// between them; dots in a table's name belong to the second part. A leading
// '!' excludes. A table is selected when a pattern matches it and no excluding
// one does, whatever their order.
//
// Names are compared as the catalog holds them: exact in case and without the
// quotes that SQL needs. Only patterns have special characters; a '*' in a
// table's real name is a character like any other.
type Globs []string

// Match tells whether the table is selected. It does not allocate.
func (g Globs) Match(schema, table string) bool {
	matched := false
	for _, p := range g {
		pattern, negative := strings.CutPrefix(p, "!")
		if matched && !negative {
			continue
		}
		ps, pt, ok := strings.Cut(pattern, ".")
		if !ok || !globMatch(ps, schema) || !globMatch(pt, table) {
			continue
		}
		if negative {
			return false
		}
		matched = true
	}
	return matched
}

// Validate returns what is wrong with the patterns, joined, or nil.
func (g Globs) Validate() error {
	var errs []error
	for _, p := range g {
		errs = append(errs, checkGlob(p, true))
	}
	return errors.Join(errs...)
}

// PrefixGlobs selects logical messages by their prefix, with the patterns of
// Globs except that a prefix is one name: a dot is a character like any other.
type PrefixGlobs []string

// Match tells whether messages with this prefix are selected.
func (g PrefixGlobs) Match(prefix string) bool {
	matched := false
	for _, p := range g {
		pattern, negative := strings.CutPrefix(p, "!")
		if !globMatch(pattern, prefix) {
			continue
		}
		if negative {
			return false
		}
		matched = true
	}
	return matched
}

// Validate returns what is wrong with the patterns, joined, or nil.
func (g PrefixGlobs) Validate() error {
	var errs []error
	for _, p := range g {
		errs = append(errs, checkGlob(p, false))
	}
	return errors.Join(errs...)
}

// checkGlob returns what is wrong with one pattern, and nil where nothing is.
// The text is "reason; remedy".
func checkGlob(p string, table bool) error {
	body := strings.TrimPrefix(p, "!")
	if body == "" {
		return errors.New("the pattern is empty; write schema.table with * and ?, or leave it out")
	}
	if strings.Contains(body, `"`) {
		return errors.New("the pattern has SQL quotes; write names as they are, without quotes, such as public.Order Items")
	}
	for i := 0; i < len(body); i++ {
		if body[i] != '\\' {
			continue
		}
		if i++; i == len(body) || !strings.ContainsRune(`*?\!`, rune(body[i])) {
			return errors.New(`the pattern has a \ that escapes nothing; write \*, \?, \! or \\ for these characters themselves`)
		}
	}
	if !table {
		return nil
	}
	schema, name, ok := strings.Cut(body, ".")
	if !ok || schema == "" || name == "" {
		return errors.New("the pattern is not of the form schema.table; write for example public." + strings.Trim(body, ".") + " or *." + strings.Trim(body, "."))
	}
	return nil
}

// globMatch matches the whole of s. On a mismatch after a '*' it goes back to
// that '*' and lets it take one more character; only the last '*' need be
// remembered, so the time is at most len(pattern) × len(s).
func globMatch(pattern, s string) bool {
	p, i := 0, 0
	star, resume := -1, 0
	for i < len(s) {
		if p < len(pattern) && pattern[p] == '*' {
			star, resume = p, i
			p++
			continue
		}
		if n, width := globStep(pattern[p:], s[i:]); n > 0 {
			p, i = p+n, i+width
			continue
		}
		if star < 0 {
			return false
		}
		_, width := utf8.DecodeRuneInString(s[resume:])
		resume += width
		p, i = star+1, resume
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}

// globStep matches one pattern element that is not '*' against the start of s
// and returns how many bytes of each it took; 0, 0 is a mismatch.
func globStep(pattern, s string) (int, int) {
	if pattern == "" {
		return 0, 0
	}
	_, width := utf8.DecodeRuneInString(s)
	switch {
	case pattern[0] == '?':
		return 1, width
	case pattern[0] == '\\' && len(pattern) > 1 && pattern[1] == s[0]:
		return 2, 1
	case pattern[0] != '\\' && pattern[0] == s[0]:
		return 1, 1
	}
	return 0, 0
}

package config

import (
	"fmt"
	"strings"
)

// Problem is one thing that is wrong with a configuration.
type Problem struct {
	Path   string // where in the file, such as outbox[0].table
	Line   int    // line in the file, from 1; 0 where the key is not in it
	Value  string // as it stands in the file; empty where there is none, *** where it may be secret
	Reason string // what is wrong
	Remedy string // what would be right
}

// String is the problem on one line: PATH: REASON; REMEDY (line N, value V).
func (p Problem) String() string {
	var b strings.Builder
	if p.Path != "" {
		b.WriteString(p.Path + ": ")
	}
	b.WriteString(p.Reason)
	if p.Remedy != "" {
		b.WriteString("; " + p.Remedy)
	}
	var facts []string
	if p.Line > 0 {
		facts = append(facts, fmt.Sprintf("line %d", p.Line))
	}
	if p.Value != "" {
		facts = append(facts, "value "+p.Value)
	}
	if len(facts) > 0 {
		b.WriteString(" (" + strings.Join(facts, ", ") + ")")
	}
	return b.String()
}

// Problems is the error of this package: everything that is wrong with a
// configuration, in the order of the file, followed by what is missing.
type Problems struct {
	list []Problem
	// covered holds paths about which a problem was reported under another
	// name (a misspelt key), so that its absence is not reported as well.
	covered map[string]bool
}

// List returns the problems; the slice is the caller's.
func (p *Problems) List() []Problem { return append([]Problem(nil), p.list...) }

// Error is one line per problem.
func (p *Problems) Error() string {
	lines := make([]string, len(p.list))
	for i, q := range p.list {
		lines[i] = q.String()
	}
	return strings.Join(lines, "\n")
}

// add appends a problem. Line breaks would break the promise of one line per
// problem, so they are written out.
func (p *Problems) add(q Problem) {
	q.Value = oneLine(q.Value)
	q.Reason = oneLine(q.Reason)
	p.list = append(p.list, q)
}

// cover marks path as already spoken about.
func (p *Problems) cover(path string) {
	if p.covered == nil {
		p.covered = make(map[string]bool)
	}
	p.covered[path] = true
}

// spoken tells whether a problem at path, or at something that contains it,
// is in the list.
func (p *Problems) spoken(path string) bool {
	for c := range p.covered {
		if c == path || inside(path, c) {
			return true
		}
	}
	for _, q := range p.list {
		if q.Path == path || inside(path, q.Path) {
			return true
		}
	}
	return false
}

// spokenIn tells whether a problem at path or at something inside it is in
// the list.
func (p *Problems) spokenIn(path string) bool {
	if p.spoken(path) {
		return true
	}
	for _, q := range p.list {
		if inside(q.Path, path) {
			return true
		}
	}
	return false
}

// err is p, or nil where the list is empty (never a typed nil).
func (p *Problems) err() error {
	if len(p.list) == 0 {
		return nil
	}
	return p
}

// inside tells whether path lies within outer: a.b within a, a[0].b within a.
func inside(path, outer string) bool {
	rest, ok := strings.CutPrefix(path, outer)
	return ok && outer != "" && rest != "" && (rest[0] == '.' || rest[0] == '[')
}

func oneLine(s string) string {
	return strings.NewReplacer("\r", `\r`, "\n", `\n`).Replace(s)
}

package router

import (
	"fmt"
	"regexp"
	"regexp/syntax"
	"strings"

	"github.com/walrelay/walrelay/replication"
)

// RouteOptions choose an event's topic by a field's value, as Debezium's EventRouter
// does: Regex has to match all of it, and Replacement is the topic.
type RouteOptions struct {
	By          string // a column or field; empty: aggregate_type
	Regex       string // RE2 syntax; empty: (.*)
	Replacement string // $1, ${1} and ${name} are the groups, \ takes a $'s meaning away; empty: outbox.event.$1
}

// IsZero tells that nothing is set, so that the topic's template routes.
func (o RouteOptions) IsZero() bool { return o == RouteOptions{} }

// The meaning of what RouteOptions leave empty.
const (
	defaultRouteRegex       = "(.*)"
	defaultRouteReplacement = "outbox.event.$1"
)

// topicRoute is compiled RouteOptions. It remembers what values gave: a match allocates,
// and events have few values that route them.
type topicRoute struct {
	column      int
	name        string // of the field, as configured
	regex       *regexp.Regexp
	source      string // of regex, as configured
	replacement []replacePart

	seen map[string]topicEntry // by the field's value
}

// replacePart is literal text, or a group's.
type replacePart struct {
	literal string
	group   int // -1 for literal text
}

// CheckRoute tells what is wrong with a regex and its replacement, whatever the table.
func CheckRoute(o RouteOptions) error {
	_, err := compileRoute(o)
	return err
}

// compileRoute compiles all but the column.
func compileRoute(o RouteOptions) (*topicRoute, error) {
	r := &topicRoute{name: o.By, source: o.Regex, seen: map[string]topicEntry{}}
	if r.name == "" {
		r.name = fieldAggregateType.rule().name
	}
	if r.source == "" {
		r.source = defaultRouteRegex
	}
	// Alone first: the error shall quote what is written, and a ) must not close our group.
	if _, err := syntax.Parse(r.source, syntax.Perl); err != nil {
		return nil, fmt.Errorf("regex: %w (lookaround and backreferences of Java's patterns are not there)", err)
	}
	var err error
	if r.regex, err = regexp.Compile(`\A(?:` + r.source + `)\z`); err != nil {
		return nil, fmt.Errorf("regex: %w", err)
	}
	replacement := o.Replacement
	if replacement == "" {
		replacement = defaultRouteReplacement
	}
	if r.replacement, err = compileReplacement(replacement, r.regex); err != nil {
		return nil, fmt.Errorf("replacement: %w", err)
	}
	return r, nil
}

// compileReplacement reads a replacement as Java does: of $12 the group is 12 where there
// is one, else 1 with a 2 behind it.
func compileReplacement(text string, regex *regexp.Regexp) (parts []replacePart, err error) {
	var literal strings.Builder
	for rest := text; rest != ""; {
		switch rest[0] {
		case '\\':
			if len(rest) == 1 {
				return nil, fmt.Errorf("%q ends in a \\; write \\\\ for one", text)
			}
			literal.WriteByte(rest[1])
			rest = rest[2:]
		case '$':
			group, n := groupReference(rest, regex)
			if n == 0 {
				return nil, fmt.Errorf("%q has a $ that names no group of the regex, which has %d%s; write $1 or ${name}, or \\$ for the character",
					text, regex.NumSubexp(), groupNames(regex))
			}
			if literal.Len() > 0 {
				parts = append(parts, replacePart{literal: literal.String(), group: -1})
				literal.Reset()
			}
			parts = append(parts, replacePart{group: group})
			rest = rest[n:]
		default:
			literal.WriteByte(rest[0])
			rest = rest[1:]
		}
	}
	if literal.Len() > 0 {
		parts = append(parts, replacePart{literal: literal.String(), group: -1})
	}
	return parts, nil
}

// groupReference reads the group that text, which begins with $, refers to, and how long
// the reference is; 0 where there is no such group.
func groupReference(text string, regex *regexp.Regexp) (group, length int) {
	if name, ok := strings.CutPrefix(text, "${"); ok {
		name, _, closed := strings.Cut(name, "}")
		group = regex.SubexpIndex(name)
		if n, ok := parseInteger([]byte(name)); ok && n >= 0 && n <= int64(regex.NumSubexp()) {
			group = int(n)
		}
		if !closed || group < 0 {
			return 0, 0
		}
		return group, len("${}") + len(name)
	}
	for i := 1; i < len(text) && text[i] >= '0' && text[i] <= '9'; i++ {
		next := group*10 + int(text[i]-'0')
		if next > regex.NumSubexp() {
			break
		}
		group, length = next, i+1
	}
	return group, length
}

// groupNames lists the named groups, for an error.
func groupNames(regex *regexp.Regexp) string {
	var names []string
	for _, name := range regex.SubexpNames() {
		if name != "" {
			names = append(names, name)
		}
	}
	if names == nil {
		return ""
	}
	return " (" + strings.Join(names, ", ") + ")"
}

// maxRoutedValue bounds what a value costs that is remembered.
const maxRoutedValue = 1024

// topicOf gives the topic of a row. A value seen before costs a look-up and no
// allocation.
func (r *topicRoute) topicOf(p *outboxPlan, row replication.Tuple) topicEntry {
	v := &row[r.column]
	if v.Kind != replication.ValueText || len(v.Text) == 0 {
		return topicEntry{err: &RouteError{Reason: ReasonRoute, Detail: fmt.Sprintf(
			"field %s, which routes, is NULL or empty; fill the column", r.name)}}
	}
	e, ok := r.seen[string(v.Text)]
	if !ok {
		e = r.match(p, string(v.Text))
		if len(v.Text) > maxRoutedValue {
			return e
		}
		if len(r.seen) >= maxCachedTopics {
			clear(r.seen)
		}
		r.seen[string(v.Text)] = e
	}
	return e
}

// match makes the topic of a value.
func (r *topicRoute) match(p *outboxPlan, value string) topicEntry {
	groups := r.regex.FindStringSubmatch(value)
	if groups == nil {
		return topicEntry{err: &RouteError{Reason: ReasonRoute, Detail: fmt.Sprintf(
			"the regex %q does not match all of %s, which is %s; correct the row's column, or the outbox's route",
			r.source, r.name, quoteCut(value))}}
	}
	var b strings.Builder
	for _, part := range r.replacement {
		if part.group < 0 {
			b.WriteString(part.literal)
		} else {
			b.WriteString(groups[part.group])
		}
	}
	name := b.String()
	err := p.checkTopic(name, r.source)
	return topicEntry{name: topicBeginning(name), err: err}
}

// topicBeginning is a topic's name for a dead letter's header, where a payload column
// taken for a topic may hold megabytes.
func topicBeginning(name string) string {
	if len(name) <= maxTopicLength {
		return name
	}
	return strings.ToValidUTF8(name[:maxTopicLength], "")
}

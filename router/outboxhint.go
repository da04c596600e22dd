package router

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// The type OIDs that the outbox cares about; they are fixed in PostgreSQL's
// pg_type.dat.
const (
	oidBytea       = 17
	oidInt8        = 20
	oidInt2        = 21
	oidInt4        = 23
	oidText        = 25
	oidJSON        = 114
	oidBpchar      = 1042
	oidVarchar     = 1043
	oidTimestamp   = 1114
	oidTimestamptz = 1184
	oidUUID        = 2950
	oidJSONB       = 3802
)

// mappingError is the error about a table that cannot be an outbox as it is: every
// problem, the columns found, and a configuration that would work.
func mappingError(s *eventSource, o *OutboxOptions, fields fieldColumns, problems []error) error {
	var b strings.Builder
	b.WriteString(s.label + ":")
	for _, p := range problems {
		fmt.Fprintf(&b, "\n  %v", p)
	}
	found := make([]string, len(s.columns))
	for i, c := range s.columns {
		found[i] = c.name + " " + typeName(c.typeOID)
	}
	fmt.Fprintf(&b, "\n  columns found: %s", strings.Join(found, ", "))
	mapping, lacking := suggestColumns(s, o, fields)
	if len(lacking) > 0 {
		fmt.Fprintf(&b, "\n  the table has no column left for: %s; add one, or take the table out of outbox:", strings.Join(lacking, ", "))
		return errors.New(b.String())
	}
	fmt.Fprintf(&b, "\n  this would work, if these columns are the ones meant:\n")
	fmt.Fprintf(&b, "    outbox:\n      - table: %s\n        columns: {%s}", yamlString(s.path), strings.Join(mapping, ", "))
	return errors.New(b.String())
}

// suggestColumns gives "field: column" for every field that has to be said: what
// is configured rightly, what is ambiguous, and a guess for what is missing.
// lacking names the fields for which no column is left.
func suggestColumns(s *eventSource, o *OutboxOptions, fields fieldColumns) (mapping, lacking []string) {
	needed := []outboxField{fieldID, fieldPayload}
	if o.Format == FormatCloudEvents || o.Topic == "" && o.Route.IsZero() && fields[fieldAggregateType] < 0 {
		needed = append(needed, fieldType)
	}
	taken := make(map[int]bool)
	for _, c := range fields {
		if c >= 0 {
			taken[c] = true
		}
	}
	byName := columnsByName(s)
	for f := range outboxFields {
		rule := f.rule()
		c := fields[f]
		_, configured := o.Columns[rule.name]
		switch {
		case c >= 0 && !configured && !bothSpellings(rule, byName):
			continue // recognised; nothing to say
		case c < 0 && slices.Contains(needed, f):
			if c = guessColumn(f, s, taken); c < 0 {
				lacking = append(lacking, rule.name)
				continue
			}
			taken[c] = true
		case c < 0:
			continue
		}
		mapping = append(mapping, rule.name+": "+yamlString(s.columns[c].name))
	}
	return mapping, lacking
}

// bothSpellings tells whether the table has more than one column for a rule whose
// columns are spellings of one name.
func bothSpellings(rule fieldRule, byName map[string]int) bool {
	n := 0
	for _, name := range rule.columns {
		if _, ok := byName[name]; ok {
			n++
		}
	}
	return rule.respelled && n > 1
}

// guessColumn gives the free column that looks most like f: by name before type,
// and any free one rather than none. It is only ever a suggestion to a reader.
func guessColumn(f outboxField, s *eventSource, taken map[int]bool) int {
	var words []string
	var types []uint32
	switch f {
	case fieldID:
		words, types = []string{"uuid", "guid", "id", "key"}, []uint32{oidUUID, oidInt8, oidInt4, oidText, oidVarchar}
	case fieldPayload:
		words, types = []string{"payload", "body", "data", "content", "message", "event"}, []uint32{oidJSONB, oidJSON, oidBytea, oidText, oidVarchar}
	default:
		words, types = []string{"type", "kind", "name", "topic", "event"}, []uint32{oidText, oidVarchar}
	}
	best, bestScore := -1, -1
	for i, c := range s.columns {
		if taken[i] {
			continue
		}
		score := 0
		if w := slices.IndexFunc(words, func(w string) bool { return strings.Contains(c.name, w) }); w >= 0 {
			score += 2 * (len(words) - w)
		}
		if t := slices.Index(types, c.typeOID); t >= 0 {
			score += 2*(len(types)-t) + 5
		}
		if score > bestScore {
			best, bestScore = i, score
		}
	}
	return best
}

// typeName gives a type's name where it is one that outboxes are made of.
func typeName(oid uint32) string {
	switch oid {
	case 16:
		return "boolean"
	case oidBytea:
		return "bytea"
	case oidInt8:
		return "bigint"
	case oidInt2:
		return "smallint"
	case oidInt4:
		return "integer"
	case oidText:
		return "text"
	case oidJSON:
		return "json"
	case oidBpchar:
		return "char"
	case oidVarchar:
		return "varchar"
	case oidTimestamp:
		return "timestamp"
	case oidTimestamptz:
		return "timestamptz"
	case 1700:
		return "numeric"
	case oidUUID:
		return "uuid"
	case oidJSONB:
		return "jsonb"
	}
	return "(type OID " + strconv.FormatUint(uint64(oid), 10) + ")"
}

// yamlString gives s as a YAML scalar, in quotes unless it is plainly a word.
func yamlString(s string) string {
	plain := regexp.MustCompile(`^[a-z_][a-z0-9_.]*$`).MatchString(s)
	if plain && !slices.Contains([]string{"null", "true", "false", "yes", "no", "on", "off", "y", "n"}, s) {
		return s
	}
	return strconv.Quote(s)
}

package router

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/walrelay/walrelay/replication"
)

// outboxField is a part of an event that a column may hold.
type outboxField uint8

// The fields, with the headers' order for those that are headers.
const (
	fieldID outboxField = iota
	fieldType
	fieldAggregateType
	fieldAggregateID
	fieldSeq
	fieldOccurred
	fieldSchemaVersion
	fieldCorrelationID
	fieldCausationID
	fieldTraceparent
	fieldPayload
	fieldPartitionKey
	fieldProducer
	outboxFields // how many there are
)

// fieldColumns gives each field's column by index, or -1.
type fieldColumns [outboxFields]int

// fieldRule says how a field is named in the configuration, which columns are taken
// for it, and how it appears outside.
type fieldRule struct {
	name string // in `columns:`
	// columns are recognised, the first that the table has winning.
	columns []string
	// respelled: the columns are two spellings of one name, so that a table with both
	// leaves it open which one is meant.
	respelled bool
	header    string // the header that it becomes; "" for none
	// alias is a second name in templates, beside name.
	alias string
}

// rule gives the rule of a field. The columns' order is a preference: event_id
// says more than id, which is often a mere row number; occurred_at says when the
// event was, created_at when the row was.
func (f outboxField) rule() fieldRule {
	switch f {
	case fieldID:
		return fieldRule{name: "id", columns: []string{"event_id", "id"}, header: "id", alias: "event_id"}
	case fieldType:
		return fieldRule{name: "type", columns: []string{"event_type", "type"}, header: "type", alias: "event_type"}
	case fieldAggregateType:
		return fieldRule{name: "aggregate_type", columns: []string{"aggregate_type", "aggregatetype"}, respelled: true, header: "aggregate_type"}
	case fieldAggregateID:
		return fieldRule{name: "aggregate_id", columns: []string{"aggregate_id", "aggregateid"}, respelled: true, header: "aggregate_id"}
	case fieldSeq:
		return fieldRule{name: "seq", columns: []string{"aggregate_seq", "sequence_num", "version"}, header: "aggregate_seq", alias: "aggregate_seq"}
	case fieldOccurred:
		return fieldRule{name: "occurred", columns: []string{"occurred_at", "created_at"}, header: "occurred_at", alias: "occurred_at"}
	case fieldSchemaVersion:
		// version counts only where another column is the sequence: since seq is
		// resolved first and takes it otherwise, it is simply not free any more.
		return fieldRule{name: "schema_version", columns: []string{"schema_version", "version"}, header: "schema_version"}
	case fieldCorrelationID:
		return fieldRule{name: "correlation_id", columns: []string{"correlation_id"}, header: "correlation_id"}
	case fieldCausationID:
		return fieldRule{name: "causation_id", columns: []string{"causation_id"}, header: "causation_id"}
	case fieldTraceparent:
		return fieldRule{name: "traceparent", columns: []string{"traceparent"}, header: "traceparent"}
	case fieldPayload:
		return fieldRule{name: "payload", columns: []string{"payload"}}
	case fieldPartitionKey:
		return fieldRule{name: "partition_key", columns: []string{"partition_key"}}
	case fieldProducer:
		return fieldRule{name: "producer", columns: []string{"producer"}}
	}
	panic(fmt.Sprintf("outbox field %d has no rule", f))
}

// compileOutbox works out how rows of rel become events. prefix is {prefix} in
// templates; validTopic judges topic names, its error saying what is wrong with
// one. o and rel are kept and must not change.
//
// The plan holds for this *Relation only: after an ALTER TABLE another RELATION
// message arrives and the plan has to be made again. An error says what the table
// lacks, which columns it has, and which configuration would work.
func compileOutbox(rel *replication.Relation, o *OutboxOptions, prefix string, validTopic func(string) error) (*outboxPlan, error) {
	p := &outboxPlan{
		relation:    rel,
		nullPayload: o.NullPayload,
		validTopic:  validTopic,
		topics:      make(map[string]topicEntry),
	}
	var problems []error
	p.fields, problems = mapFields(rel, o)
	problems = append(problems, p.requireFields(o)...)
	if len(problems) > 0 {
		return nil, mappingError(rel, o, p.fields, problems)
	}
	p.payload = p.fields[fieldPayload]
	if rel.Columns[p.payload].TypeOID == oidBytea {
		p.payloadForm = payloadBytea
	}
	for _, f := range []outboxField{fieldPartitionKey, fieldAggregateID, fieldID} {
		if c := p.fields[f]; c >= 0 {
			p.keyColumns = append(p.keyColumns, c)
		}
	}
	err := errors.Join(p.compileTemplates(o, prefix), p.compileHeaders(o))
	if err != nil {
		return nil, fmt.Errorf("outbox table %s.%s: %w", rel.Schema, rel.Name, err)
	}
	return p, nil
}

// mapFields finds each field's column: the configured one, else the first
// recognised name that no other field was given.
func mapFields(rel *replication.Relation, o *OutboxOptions) (fields fieldColumns, problems []error) {
	byName := columnsByName(rel)
	taken := make(map[int]bool)
	byField := make(map[string]outboxField)
	for f := range outboxFields {
		fields[f] = -1
		byField[f.rule().name] = f
	}
	for _, name := range slices.Sorted(maps.Keys(o.Columns)) {
		f, known := byField[name]
		c, exists := byName[o.Columns[name]]
		switch {
		case !known:
			problems = append(problems, fmt.Errorf("columns: no field %q; there are %s", name, strings.Join(fieldNames(), ", ")))
		case !exists:
			problems = append(problems, fmt.Errorf("columns: %s: the table has no column %q", name, o.Columns[name]))
		default:
			fields[f] = c
			taken[c] = true
		}
	}
	for f := range outboxFields {
		if _, configured := o.Columns[f.rule().name]; configured {
			continue
		}
		c, err := recognise(f.rule(), byName, taken)
		if err != nil {
			problems = append(problems, err)
		}
		if c >= 0 {
			fields[f] = c
			taken[c] = true
		}
	}
	return fields, problems
}

// recognise gives the column that rule takes, or -1.
func recognise(rule fieldRule, byName map[string]int, taken map[int]bool) (int, error) {
	found := -1
	for _, name := range rule.columns {
		c, ok := byName[name]
		if !ok || taken[c] {
			continue
		}
		if found >= 0 {
			return found, fmt.Errorf("%s may be column %s; name one of them under columns", rule.name, strings.Join(rule.columns, " or "))
		}
		found = c
		if !rule.respelled {
			break
		}
	}
	return found, nil
}

// requireFields says what an event cannot do without.
func (p *outboxPlan) requireFields(o *OutboxOptions) (problems []error) {
	// What is configured wrongly is a problem already.
	missing := func(f outboxField) bool { return p.fields[f] < 0 && o.Columns[f.rule().name] == "" }
	for _, f := range []outboxField{fieldID, fieldPayload} {
		if missing(f) {
			problems = append(problems, fmt.Errorf("no column is recognised as %s (%s)", f.rule().name, strings.Join(f.rule().columns, ", ")))
		}
	}
	if o.Topic == "" && missing(fieldType) && missing(fieldAggregateType) {
		problems = append(problems, errors.New("no column is recognised as type (event_type, type) or aggregate_type (aggregate_type, aggregatetype), and there is no topic template, so that nothing says which topic an event belongs to"))
	}
	switch o.NullPayload {
	case "", NullPayloadTombstone, NullPayloadNull:
	default:
		problems = append(problems, fmt.Errorf("null-payload: %q is neither %s nor %s", o.NullPayload, NullPayloadTombstone, NullPayloadNull))
	}
	return problems
}

// compileTemplates sets topic and key.
func (p *outboxPlan) compileTemplates(o *OutboxOptions, prefix string) error {
	scope := p.scope(prefix)
	if o.Topic == "" {
		// Built from the field's column and not from a name: the table may have another
		// column of that name, which columns: has overruled.
		f, name := fieldType, "event_type"
		if p.fields[fieldAggregateType] >= 0 {
			f, name = fieldAggregateType, "aggregate_type"
		}
		p.topic = &rowTemplate{
			source: "outbox.event.{" + name + "}",
			parts:  []templatePart{{literal: "outbox.event.", column: -1}, {column: p.fields[f], name: name}},
		}
	} else {
		t, err := compileRowTemplate(o.Topic, scope)
		if err != nil {
			return fmt.Errorf("topic: %w", err)
		}
		p.topic = t
	}
	if o.Key != "" {
		t, err := compileRowTemplate(o.Key, scope)
		if err != nil {
			return fmt.Errorf("key: %w", err)
		}
		p.key = t
	}
	return nil
}

// moveTopics puts prefix in the place of {prefix} in the events' topics, and in front of
// them where the template has none.
func (p *outboxPlan) moveTopics(o *OutboxOptions, prefix string) error {
	with, err := compileRowTemplate(o.Topic, p.scope(prefix))
	if err != nil {
		return fmt.Errorf("topic: %w", err)
	}
	without, err := compileRowTemplate(o.Topic, p.scope(""))
	if err != nil {
		return fmt.Errorf("topic: %w", err)
	}
	if !slices.EqualFunc(with.parts, without.parts, func(a, b templatePart) bool { return a.literal == b.literal }) {
		p.topic = with
		return nil
	}
	p.topic = &rowTemplate{source: p.topic.source, parts: slices.Insert(slices.Clone(p.topic.parts), 0, templatePart{literal: prefix + ".", column: -1})}
	return nil
}

// scope gives the names that templates may use. A column goes before a field of
// the same name: the template's writer sees the table.
func (p *outboxPlan) scope(prefix string) templateScope {
	s := templateScope{columns: make(map[string]int), constants: map[string]string{"prefix": prefix}}
	var names []string
	for f := range outboxFields {
		r := f.rule()
		for _, name := range []string{r.name, r.alias} {
			if name != "" && p.fields[f] >= 0 {
				s.columns[name] = p.fields[f]
				names = append(names, name)
			}
		}
	}
	for i, c := range p.relation.Columns {
		s.columns[c.Name] = i
	}
	slices.Sort(names)
	s.describe = fmt.Sprintf("the columns %s, the fields %s, and prefix",
		strings.Join(columnNames(p.relation), ", "), strings.Join(names, ", "))
	return s
}

// compileHeaders sets headers: the fields' in their fixed order, then the
// configured columns'.
func (p *outboxPlan) compileHeaders(o *OutboxOptions) error {
	used := map[string]int{"position": -1, "replay": -1} // every record has these of its own
	for f := range outboxFields {
		key, c := f.rule().header, p.fields[f]
		if key == "" || c < 0 {
			continue
		}
		h := headerColumn{key: key, column: c}
		if f == fieldOccurred {
			switch p.relation.Columns[c].TypeOID {
			case oidTimestamp:
				h.form = formTimestamp
			case oidTimestamptz:
				h.form = formTimestamptz
			}
		}
		p.headers = append(p.headers, h)
		used[key] = c
	}
	byName := columnsByName(p.relation)
	for _, name := range o.Headers {
		c, ok := byName[name]
		if !ok {
			return fmt.Errorf("headers: the table has no column %q; there are %s", name, strings.Join(columnNames(p.relation), ", "))
		}
		if other, ok := used[name]; ok {
			if other == c {
				continue // the same header, already there
			}
			return fmt.Errorf("headers: column %q would make a second header %q with another meaning; leave it out or rename the column", name, name)
		}
		p.headers = append(p.headers, headerColumn{key: name, column: c})
		used[name] = c
	}
	return nil
}

// recognised gives field=column for the fields that have one, for the log line at
// the start.
func (p *outboxPlan) recognised() []string {
	var out []string
	for f := range outboxFields {
		if c := p.fields[f]; c >= 0 {
			out = append(out, f.rule().name+"="+p.columnName(c))
		}
	}
	return out
}

func columnsByName(rel *replication.Relation) map[string]int {
	m := make(map[string]int, len(rel.Columns))
	for i, c := range rel.Columns {
		m[c.Name] = i
	}
	return m
}

func columnNames(rel *replication.Relation) []string {
	names := make([]string, len(rel.Columns))
	for i, c := range rel.Columns {
		names[i] = c.Name
	}
	return names
}

func fieldNames() []string {
	names := make([]string, 0, outboxFields)
	for f := range outboxFields {
		names = append(names, f.rule().name)
	}
	return names
}

package router

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
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

// outboxEnv is what a plan needs to know of the connector.
type outboxEnv struct {
	name   string // the connector's
	prefix string // {prefix} in templates
	// topicPrefix is what Options.TopicPrefix is.
	topicPrefix string
	// validTopic judges topic names; its error says what is wrong with one.
	validTopic func(string) error
}

// compileOutbox works out how rows of s become events. o is kept and must not change.
//
// The plan of a table holds for this *Relation only: after an ALTER TABLE another
// RELATION message arrives and the plan has to be made again. An error says what the
// table lacks, which columns it has, and which configuration would work.
func compileOutbox(s eventSource, o *OutboxOptions, env outboxEnv) (*outboxPlan, error) {
	p := &outboxPlan{
		source:      s,
		env:         env,
		nullPayload: o.NullPayload,
		configured:  o.Columns,
		topics:      make(map[string]topicEntry),
	}
	var problems []error
	p.fields, problems = mapFields(&p.source, o)
	problems = append(problems, p.requireFields(o)...)
	if len(problems) > 0 {
		return nil, mappingError(&p.source, o, p.fields, problems)
	}
	for _, f := range []outboxField{fieldPartitionKey, fieldAggregateID, fieldID} {
		if c := p.fields[f]; c >= 0 {
			p.keyColumns = append(p.keyColumns, c)
		}
	}
	err := errors.Join(p.compileTemplates(o), p.compileRoute(o), p.compilePartition(o), p.compileValue(o), p.compileHeaders(o))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.label, err)
	}
	if env.topicPrefix != "" {
		if err := p.moveTopics(o); err != nil {
			return nil, fmt.Errorf("%s: %w", s.label, err)
		}
	}
	p.watchSequence()
	if p.source.open() {
		p.object = newObjectColumns(&p.source, o)
	}
	return p, nil
}

// mapFields finds each field's column: the configured one, else the first
// recognised name that no other field was given. An open source has a column for each.
func mapFields(s *eventSource, o *OutboxOptions) (fields fieldColumns, problems []error) {
	byName := columnsByName(s)
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
		case s.open():
		case !exists:
			problems = append(problems, fmt.Errorf("columns: %s: the table has no column %q", name, o.Columns[name]))
		default:
			fields[f] = c
			taken[c] = true
		}
	}
	if s.open() {
		for f := range outboxFields {
			fields[f] = int(f)
		}
		return fields, problems
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
	switch {
	case o.Format == FormatCloudEvents && missing(fieldType):
		problems = append(problems, errors.New("no column is recognised as type (event_type, type), which a CloudEvent has to have"))
	case o.Topic == "" && o.Route.IsZero() && missing(fieldType) && missing(fieldAggregateType):
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
func (p *outboxPlan) compileTemplates(o *OutboxOptions) error {
	scope := p.scope()
	if o.Topic == "" {
		p.defaultTopic()
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

// defaultTopic sets topic to outbox.event.{aggregate_type}, or {event_type} where the
// source has no aggregate type: of an open one each row has it or not. The templates are
// built from the fields' columns and not from names: the table may have another column of
// that name, which columns: has overruled.
func (p *outboxPlan) defaultTopic() {
	of := func(f outboxField, name string) *rowTemplate {
		return &rowTemplate{
			source: "outbox.event.{" + name + "}",
			parts:  []templatePart{{literal: "outbox.event.", column: -1}, {column: p.fields[f], name: name}},
		}
	}
	p.topic = of(fieldType, "event_type")
	if p.fields[fieldAggregateType] >= 0 {
		if p.source.open() {
			p.topicWithoutAggregate = p.topic
		}
		p.topic = of(fieldAggregateType, "aggregate_type")
	}
}

// moveTopics puts a replay's prefix in the place of {prefix} in the events' topics, and in
// front of them where there is none.
func (p *outboxPlan) moveTopics(o *OutboxOptions) error {
	front := p.env.topicPrefix + "."
	if p.route != nil {
		p.route.replacement = slices.Insert(p.route.replacement, 0, replacePart{literal: front, group: -1})
		return nil
	}
	if o.Topic != "" {
		scope := p.scope()
		scope.constants["prefix"] = p.env.topicPrefix
		moved, err := compileRowTemplate(o.Topic, scope)
		if err != nil {
			return fmt.Errorf("topic: %w", err)
		}
		scope.constants["prefix"] = ""
		without, err := compileRowTemplate(o.Topic, scope)
		if err != nil {
			return fmt.Errorf("topic: %w", err)
		}
		if !slices.EqualFunc(moved.parts, without.parts, func(a, b templatePart) bool { return a.literal == b.literal }) {
			p.topic = moved
			return nil
		}
	}
	for _, t := range []*rowTemplate{p.topic, p.topicWithoutAggregate} {
		if t != nil {
			t.parts = slices.Insert(t.parts, 0, templatePart{literal: front, column: -1})
		}
	}
	return nil
}

// scope gives the names that templates may use. A column goes before a field of
// the same name: the template's writer sees the table.
func (p *outboxPlan) scope() templateScope {
	s := templateScope{columns: make(map[string]int), constants: map[string]string{"prefix": p.env.prefix}}
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
	for i, c := range p.source.columns {
		s.columns[c.name] = i
	}
	if p.source.open() {
		s.add = func(name string) int {
			c, _ := p.source.index(name)
			return c
		}
	}
	if c := p.fields[fieldType]; c >= 0 {
		s.parts = map[string]columnPart{"event_name": {c, partName}, "event_version": {c, partVersion}}
		names = append(names, "event_name", "event_version")
	}
	slices.Sort(names)
	s.describe = fmt.Sprintf("the columns %s, the fields %s, and prefix",
		strings.Join(p.source.names(), ", "), strings.Join(names, ", "))
	return s
}

// compileRoute sets route.
func (p *outboxPlan) compileRoute(o *OutboxOptions) (err error) {
	if o.Route.IsZero() {
		return nil
	}
	if p.route, err = compileRoute(o.Route); err != nil {
		return fmt.Errorf("route: %w", err)
	}
	scope := p.scope()
	c, ok := scope.columns[p.route.name]
	if part, isPart := scope.parts[p.route.name]; isPart && !ok {
		return fmt.Errorf("route: by: %s is for templates only, a part of %s; write by: %s, and let the regex take the part, as in (.+)\\.v[0-9]+",
			p.route.name, p.place(part.column), fieldType.rule().name)
	}
	if !ok && p.source.open() {
		c, ok = p.source.index(p.route.name)
	}
	if !ok {
		return fmt.Errorf("route: by: no field %s; there are %s", p.route.name, scope.describe)
	}
	p.route.column = c
	return nil
}

// compilePartition sets partition.
func (p *outboxPlan) compilePartition(o *OutboxOptions) error {
	p.partition = -1
	if o.Partition == "" {
		return nil
	}
	c, ok := p.source.index(o.Partition)
	if !ok {
		return fmt.Errorf("partition: the table has no column %q; there are %s", o.Partition, strings.Join(p.source.names(), ", "))
	}
	if slices.Contains([]uint32{oidBytea, oidJSON, oidJSONB, oidTimestamp, oidTimestamptz, oidUUID}, p.source.columns[c].typeOID) {
		return fmt.Errorf("partition: column %q is a %s and holds no partition's number; name an integer column", o.Partition, typeName(p.source.columns[c].typeOID))
	}
	p.partition = c
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

// uses tells what the plan takes from each column, by the column's name.
func (p *outboxPlan) uses() map[string][]string {
	uses := map[string][]string{}
	add := func(c int, use string) {
		if c >= 0 && !slices.Contains(uses[p.columnName(c)], use) {
			uses[p.columnName(c)] = append(uses[p.columnName(c)], use)
		}
	}
	for f := range outboxFields {
		add(p.fields[f], f.rule().name)
	}
	for use, t := range map[string]*rowTemplate{"topic": p.topic, "key": p.key} {
		if t != nil && (use == "key" || p.route == nil) {
			for _, part := range t.parts {
				add(part.column, use)
			}
		}
	}
	if p.route != nil {
		add(p.route.column, "route")
	}
	add(p.partition, "partition")
	for i := range p.headers {
		add(p.headers[i].column, "header "+p.headers[i].key)
	}
	add(p.headersFrom, "headers-from")
	for i := range p.envelope {
		add(p.envelope[i].column, "envelope")
	}
	return uses
}

func columnsByName(s *eventSource) map[string]int {
	m := make(map[string]int, len(s.columns))
	for i, c := range s.columns {
		m[c.name] = i
	}
	return m
}

func fieldNames() []string {
	names := make([]string, 0, outboxFields)
	for f := range outboxFields {
		names = append(names, f.rule().name)
	}
	return names
}

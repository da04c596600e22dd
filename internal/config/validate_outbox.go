package config

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
)

// outboxRoles are the roles that a column can have in an outbox row.
func outboxRoles() []string {
	return []string{
		"id", "aggregate_type", "aggregate_id", "type", "payload", "seq", "occurred", "partition_key",
		"schema_version", "correlation_id", "causation_id", "producer", "traceparent",
	}
}

func (v *validator) outbox(path string, o Outbox, before []Outbox) {
	switch {
	case o.Table != "" && o.Prefix != "":
		v.bad(path+".message-prefix", o.Prefix, "stands beside a table", "keep one of them, or write two entries")
	case o.Table != "":
		v.tableName(path+".table", o.Table)
	case o.Prefix == "":
		v.bad(path+".table", "", "is missing", "write for example table: public.outbox, or message-prefix: outbox")
	default:
		if o.After != AfterKeep {
			v.bad(path+".after", o.After, "goes with a table; a message leaves no row behind", "remove it")
		}
		if o.Snapshot != "" {
			v.bad(path+".snapshot", o.Snapshot, "goes with a table; there are no messages from before the start", "remove it")
		}
	}
	for j, b := range before {
		if o.Prefix != "" && b.Prefix == o.Prefix {
			v.bad(path+".message-prefix", o.Prefix, fmt.Sprintf("is in outbox[%d] already", j), "keep one entry per prefix")
		}
	}
	for j, b := range before {
		if o.Table != "" && b.Table == o.Table {
			v.bad(path+".table", o.Table, fmt.Sprintf("is in outbox[%d] already", j), "keep one entry per table")
		}
	}
	if reason, remedy := rowTemplate(o.Topic, true); reason != "" {
		v.bad(path+".topic", o.Topic, reason, remedy)
	} else if o.Topic != "" {
		v.eventTopic(path+".topic", o.Topic, strings.ReplaceAll(o.Topic, "{prefix}", v.prefix))
	}
	if reason, remedy := rowTemplate(o.Key, false); reason != "" {
		v.bad(path+".key", o.Key, reason, remedy)
	}
	for _, role := range slices.Sorted(maps.Keys(o.Columns)) {
		at := join(path+".columns", role)
		if !slices.Contains(outboxRoles(), role) {
			v.bad(at, o.Columns[role], "is not a role of an outbox column", "the roles are "+strings.Join(outboxRoles(), ", "))
		} else if o.Columns[role] == "" {
			v.bad(at, `""`, "names no column", "write the column's name, or leave the role out")
		}
	}
	v.distinct(path+".headers", o.Headers, "column")
	v.distinct(path+".envelope", o.Envelope, "column")
	v.renamed(path+".headers", "header", o.Headers, takenHeaders(o))
	v.renamed(path+".envelope", "member", o.Envelope, takenMembers(o))
	if o.CloudEvents == CloudEventsBinary && o.Format != FormatCloudEvents {
		v.bad(path+".cloudevents", o.CloudEvents, "goes with format cloudevents, and the format is "+o.Format, "write format: cloudevents, or remove it")
	}
	if len(o.Envelope) > 0 && o.Format == FormatCloudEvents {
		v.bad(path+".envelope", "", "does not go with format cloudevents, whose members the specification says", "name the columns under headers, or choose the format envelope")
	}
	v.route(path+".route", o)
}

// route checks a route as far as the file alone tells.
func (v *validator) route(path string, o Outbox) {
	if o.Route.IsZero() {
		return
	}
	if o.Topic != "" {
		v.bad(path, "", "is there beside topic, and each chooses the topic", "keep one of them")
	}
	pattern := cmp.Or(o.Route.Regex, "(.*)")
	if _, err := syntax.Parse(pattern, syntax.Perl); err != nil {
		v.bad(path+".regex", o.Route.Regex, "is not a regular expression (RE2): "+err.Error(), `write for example "(.*)\\.v[0-9]+"; lookaround and backreferences are not there`)
	}
	literal := regexp.MustCompile(`\\.|\$(\{[^}]*\}|[0-9]+)`).ReplaceAllString(o.Route.Replacement, "")
	if strings.Contains(literal, "$") {
		v.bad(path+".replacement", o.Route.Replacement, "has a $ that names no group", "write $1, or $${name} for ${name}")
	} else if bad := badTopicChars(literal); bad != "" {
		v.bad(path+".replacement", o.Route.Replacement, "Kafka takes only letters, digits, . _ and - in a topic's name, not "+bad, "write for example outbox.event.$1")
	}
	regex, err := regexp.Compile(pattern)
	if err != nil || v.spokenIn(path+".replacement") {
		return
	}
	for _, ref := range regexp.MustCompile(`\\.|\$\{([^}]*)\}|\$([0-9])`).FindAllStringSubmatch(o.Route.Replacement, -1) {
		name := ref[1] + ref[2]
		n, err := strconv.Atoi(name)
		if ref[0][0] == '$' && (err != nil || n > regex.NumSubexp()) && regex.SubexpIndex(name) < 0 {
			v.bad(path+".replacement", o.Route.Replacement, fmt.Sprintf("has %s, and the regex %s has %d groups", ref[0], pattern, regex.NumSubexp()), "write $1, or a name that a group of the regex has")
		}
	}
	if literal == o.Route.Replacement && literal != "" {
		v.eventTopic(path+".replacement", literal, literal)
	}
}

// eventTopic checks what the file tells of an event's topic: the whole name where it is
// constant, and what it begins with.
func (v *validator) eventTopic(path, text, topic string) {
	begin, _, open := strings.Cut(topic, "{")
	reason := reservedTopic(topic, v.reserved)
	if !open {
		reason = cmp.Or(topicProblem(topic), reason)
	} else if strings.HasPrefix(begin, checkpointTopics) {
		reason = reservedTopic(begin, nil)
	} else if len(begin) > maxTopicName {
		reason = fmt.Sprintf("a topic's name has at most %d characters", maxTopicName)
	}
	if reason != "" {
		v.bad(path, text, reason, "write another name, such as orders.{event_type}")
	}
}

// takenHeaders are the headers that every event has, with the columns that may well be
// named for them.
func takenHeaders(o Outbox) map[string][]string {
	id := []string{"event_id", "id"}
	if c := o.Columns["id"]; c != "" {
		id = []string{c}
	}
	taken := map[string][]string{"id": id, "position": nil, "replay": nil}
	if o.Format == FormatCloudEvents {
		taken["content-type"] = nil
	}
	return taken
}

// takenMembers are the members that the value has.
func takenMembers(o Outbox) map[string][]string {
	names := []string{"payload"}
	if o.Format == FormatEnvelope {
		names = []string{
			"event_id", "type", "version", "occurred_at", "producer", "aggregate_type", "aggregate_id", "aggregate_seq",
			"partition_key", "correlation_id", "causation_id", "payload",
		}
	}
	taken := map[string][]string{}
	for _, name := range names {
		taken[name] = nil
	}
	return taken
}

// renamed checks entries column or column:name. taken are names that are there already.
func (v *validator) renamed(path, what string, entries []string, taken map[string][]string) {
	seen := map[string]string{}
	for i, entry := range entries {
		at := fmt.Sprintf("%s[%d]", path, i)
		column, name, colon := strings.Cut(entry, ":")
		if !colon {
			name = column
		}
		columns, reserved := taken[name]
		switch {
		case column == "" || name == "":
			v.bad(at, quoteEmpty(entry), "names no column, or no "+what, "write column, or column:"+what)
		case reserved && !slices.Contains(columns, column) && (colon || len(columns) == 0):
			v.bad(at, entry, fmt.Sprintf("would be a second %s %s, which every event has", what, name), fmt.Sprintf("write %s:NAME, or leave it out", column))
		case seen[name] != "" && seen[name] != column:
			v.bad(at, entry, fmt.Sprintf("makes the %s %s, and so does another column", what, name), fmt.Sprintf("write %s:NAME, or leave it out", column))
		}
		seen[name] = column
	}
}

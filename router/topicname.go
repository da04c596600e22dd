package router

import (
	"fmt"
	"slices"
	"strings"
)

// maxTopicName is Kafka's limit, given by the file names that it makes of topics.
const maxTopicName = 249

// TopicNameError says that Kafka takes no topic of that name. For an outbox event it
// is the reason of a dead letter; for a table or a configured topic it ends the start.
type TopicNameError struct {
	Name   string
	Reason string
}

// Error names the topic and what is wrong with it. The name is data (an outbox row's
// column may have made it), so it is quoted and cut.
func (e *TopicNameError) Error() string {
	name := e.Name
	if len(name) > maxTopicName {
		name = name[:maxTopicName] + "…"
	}
	return fmt.Sprintf("topic name %q: %s", name, e.Reason)
}

// ValidTopicName tells whether Kafka takes s as the name of a topic: letters, digits,
// dot, underscore and dash, at most 249 of them, and none of Kafka's own. The error is
// a *TopicNameError.
func ValidTopicName(s string) error {
	switch {
	case s == "":
		return &TopicNameError{Name: s, Reason: "it is empty"}
	case s == "." || s == "..":
		return &TopicNameError{Name: s, Reason: `"." and ".." are not allowed`}
	case len(s) > maxTopicName:
		return &TopicNameError{Name: s, Reason: fmt.Sprintf("it has %d characters, Kafka takes %d", len(s), maxTopicName)}
	case internalTopic(s):
		return &TopicNameError{Name: s, Reason: "it is one of Kafka's own, which takes no records of others"}
	}
	for _, r := range s {
		if !topicRune(r) {
			return &TopicNameError{Name: s, Reason: fmt.Sprintf("Kafka does not take the character %q, only letters, digits, dot, underscore and dash", r)}
		}
	}
	return nil
}

// internalTopic tells that Kafka keeps its own state in the topic s. It exists, so that
// only the produce request would fail, which must not look like trouble that passes.
func internalTopic(s string) bool {
	switch s {
	case "__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata":
		return true
	}
	return false
}

// validTopic is ValidTopicName, and keeps events out of the checkpoint topic: one with
// the key "state" or "position" would be read as the connector's own.
func (r *Router) validTopic(name string) error {
	if name != "" && name == r.o.CheckpointTopic {
		return &TopicNameError{Name: name, Reason: "it is the checkpoint topic, which holds this connector's position"}
	}
	if strings.HasPrefix(name, checkpointTopics) {
		return &TopicNameError{Name: name, Reason: "a name that begins with " + checkpointTopics + " is that of a connector's checkpoint topic"}
	}
	return ValidTopicName(name)
}

// checkpointTopics is what the names of all connectors' checkpoint topics begin with,
// unless they are configured: none of them is for anybody's records.
const checkpointTopics = "_walrelay."

// validEventTopic judges the topic of an event, which a row may name. Between the dead
// letters an event would pass for one.
func (r *Router) validEventTopic(name string) error {
	if name != "" && name == r.o.DeadLetterTopic {
		return &TopicNameError{Name: name, Reason: "it is the topic of the dead letters, and of nothing else"}
	}
	return r.validTopic(name)
}

// SanitizeTopic replaces each character that Kafka does not take by an underscore.
// It is for table topics only: an outbox topic is never rewritten. Two tables can
// meet in one name by it, which the caller must refuse.
func SanitizeTopic(s string) string {
	return strings.Map(func(r rune) rune {
		if topicRune(r) {
			return r
		}
		return '_'
	}, s)
}

func topicRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-'
}

// Template is a compiled topic template such as {prefix}.{schema}.{table}.
type Template struct {
	parts []topicPart // literal and field in turns
}

type topicPart struct {
	literal string // in front of the field
	field   string // empty: none follows
}

// ParseTemplate compiles text, in which only the named fields may stand in braces.
// The error says where text goes wrong and which fields there are.
func ParseTemplate(text string, fields ...string) (*Template, error) {
	t := &Template{}
	rest := text
	for {
		literal, tail, open := strings.Cut(rest, "{")
		if strings.Contains(literal, "}") {
			return nil, fmt.Errorf("template %q: } without {", text)
		}
		if !open {
			t.parts = append(t.parts, topicPart{literal: literal})
			return t, nil
		}
		field, after, closed := strings.Cut(tail, "}")
		if !closed {
			return nil, fmt.Errorf("template %q: { is not closed", text)
		}
		if !slices.Contains(fields, field) {
			return nil, fmt.Errorf("template %q: there is no {%s}, only {%s}", text, field, strings.Join(fields, "}, {"))
		}
		t.parts = append(t.parts, topicPart{literal, field})
		rest = after
	}
}

// Expand gives the name, with value asked for each field.
func (t *Template) Expand(value func(field string) string) string {
	var b strings.Builder
	for _, p := range t.parts {
		b.WriteString(p.literal)
		if p.field != "" {
			b.WriteString(value(p.field))
		}
	}
	return b.String()
}

// Has tells whether the template uses field.
func (t *Template) Has(field string) bool {
	return field != "" && slices.ContainsFunc(t.parts, func(p topicPart) bool { return p.field == field })
}

// TableTopics compiles topics.table, a template over {prefix}, {schema} and {table}.
// Characters that Kafka does not take become underscores.
func TableTopics(template, prefix string) (func(schema, table string) string, error) {
	t, err := ParseTemplate(template, "prefix", "schema", "table")
	if err != nil {
		return nil, err
	}
	return func(schema, table string) string {
		return SanitizeTopic(t.Expand(func(field string) string {
			switch field {
			case "schema":
				return schema
			case "table":
				return table
			}
			return prefix
		}))
	}, nil
}

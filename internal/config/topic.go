package config

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// maxTopicName is Kafka's limit for a topic's name, in bytes.
const maxTopicName = 249

// topicProblem tells why Kafka would refuse a topic of this name, and is empty
// where it would not.
func topicProblem(name string) string {
	switch {
	case name == "":
		return "a topic's name cannot be empty"
	case name == "." || name == "..":
		return "Kafka takes no topic of the name . or .."
	case len(name) > maxTopicName:
		return fmt.Sprintf("a topic's name has at most %d characters", maxTopicName)
	}
	if bad := badTopicChars(name); bad != "" {
		return "Kafka takes only letters, digits, . _ and - in a topic's name, not " + bad
	}
	return ""
}

// checkpointTopics is what the names of all connectors' checkpoint topics begin with, where
// they are not configured.
const checkpointTopics = "_walrelay."

// reservedTopic tells what a topic is that no event may have, and is empty for any other.
// own are the connector's, with what they are.
func reservedTopic(name string, own map[string]string) string {
	switch {
	case name == "":
	case own[name] != "":
		return "is " + own[name]
	case strings.HasPrefix(name, checkpointTopics):
		return "a topic whose name begins with " + checkpointTopics + " is a connector's checkpoint topic"
	case slices.Contains([]string{"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"}, name):
		return "is one of Kafka's own topics, which takes no records of others"
	}
	return ""
}

// badTopicChars lists the characters of s that no topic may have, each once.
func badTopicChars(s string) string {
	var bad []string
	for _, r := range s {
		ok := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-'
		if q := fmt.Sprintf("%q", r); !ok && !slices.Contains(bad, q) {
			bad = append(bad, q)
		}
	}
	return strings.Join(bad, " ")
}

// placeholder is one {name|function:argument…} of a template.
type placeholder struct {
	name      string
	functions []string
}

// parseTemplate cuts a template into the text between its placeholders and
// the placeholders. It checks the syntax only.
func parseTemplate(s string) (literal string, holders []placeholder, err error) {
	var text strings.Builder
	for {
		i := strings.IndexAny(s, "{}")
		if i < 0 {
			text.WriteString(s)
			return text.String(), holders, nil
		}
		if s[i] == '}' {
			return "", nil, errors.New("has a } without its {")
		}
		text.WriteString(s[:i])
		body, rest, ok := strings.Cut(s[i+1:], "}")
		if !ok || strings.Contains(body, "{") {
			return "", nil, errors.New("has a { without its }")
		}
		parts := strings.Split(body, "|")
		if parts[0] == "" {
			return "", nil, errors.New("has a { } without a name")
		}
		holders = append(holders, placeholder{name: parts[0], functions: parts[1:]})
		s = rest
	}
}

// fixedTemplate checks a template that may use only the given names, without
// functions. It returns reason and remedy, empty where all is well.
func fixedTemplate(s string, names ...string) (reason, remedy string) {
	remedy = "write a template of letters, digits, . _ - and {" + strings.Join(names, "}, {") + "}"
	literal, holders, err := parseTemplate(s)
	if err != nil {
		return err.Error(), remedy
	}
	for _, h := range holders {
		if !slices.Contains(names, h.name) || len(h.functions) > 0 {
			return fmt.Sprintf("{%s} is not known here", h.text()), remedy
		}
	}
	if literal == "" && len(holders) == 0 {
		return "a topic's name cannot be empty", remedy
	}
	if bad := badTopicChars(literal); bad != "" {
		return "Kafka takes only letters, digits, . _ and - in a topic's name, not " + bad, remedy
	}
	return "", ""
}

// rowTemplate checks a template over a row's fields. Which fields there are is
// the database's to say; here only the form and the functions can be wrong.
func rowTemplate(s string, topic bool) (reason, remedy string) {
	remedy = "write for example orders.{event_type|lower}; functions: lower, replace:a:b, default:y"
	// A character behind a backslash is text, and none that a topic may have.
	s = regexp.MustCompile(`\\[{}|:\\]`).ReplaceAllString(s, "%")
	if strings.Contains(s, `\`) {
		return `has a backslash before none of { } | : \`, `write \\ for a backslash`
	}
	literal, holders, err := parseTemplate(s)
	if err != nil {
		return err.Error(), remedy
	}
	function := regexp.MustCompile(`^(lower|replace:[^:]+:[^:]*|default:[^:]+)$`)
	for _, h := range holders {
		for i, f := range h.functions {
			if !function.MatchString(f) {
				return fmt.Sprintf("the function %q is not known", f), remedy
			}
			text, isDefault := strings.CutPrefix(f, "default:")
			if bad := badTopicChars(text); topic && isDefault && bad != "" && i == len(h.functions)-1 {
				return "Kafka takes only letters, digits, . _ and - in a topic's name, not " + bad, remedy
			}
		}
	}
	if bad := badTopicChars(literal); topic && bad != "" {
		return "Kafka takes only letters, digits, . _ and - in a topic's name, not " + bad, remedy
	}
	return "", ""
}

// text is the placeholder as written, without its braces.
func (h placeholder) text() string {
	return strings.Join(append([]string{h.name}, h.functions...), "|")
}

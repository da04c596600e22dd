package config

import (
	"regexp"
	"strconv"
	"strings"
)

// syntaxProblem takes what it can from the parser's error, which is only text.
// Its lines need care: the first one is not named, and where the grammar (not
// the characters) is at fault, they count from 0. Names of anchors are left
// out: what looks like one is most likely an unquoted value, perhaps a secret.
func syntaxProblem(err error, data []byte) Problem {
	p := Problem{Line: 1, Reason: "YAML syntax error", Remedy: "look at this line and the one before it"}
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	if m := regexp.MustCompile(`^line ([0-9]+): (.*)$`).FindStringSubmatch(text); m != nil {
		p.Line, _ = strconv.Atoi(m[1]) // digits, by the pattern
		text = m[2]
		if regexp.MustCompile(`^did not find expected (node content|key|',|'-'|<)`).MatchString(text) {
			p.Line++
		}
	}
	if strings.Contains(text, "anchor") {
		p.Reason += ": a value that begins with * or & is an alias or anchor to YAML"
		p.Remedy = `write such values in quotes: "*.*"`
		return p
	}
	p.Reason += ": " + text
	switch line := lineOf(data, p.Line); {
	case strings.Contains(line, "${") && strings.ContainsAny(line, "[{"):
		p.Remedy = `inside [ ] and { } write references in quotes: "${VAR}"`
	case strings.Contains(line, "\t"):
		p.Remedy = "indent with blanks, not with tabs"
	case strings.Contains(line, "*") || strings.Contains(line, "!"):
		p.Remedy = `write values that begin with * or ! in quotes: "*.*"`
	}
	return p
}

// lineOf is line n of a text, from 1, and empty where there is none.
func lineOf(data []byte, n int) string {
	lines := strings.Split(string(data), "\n")
	if n < 1 || n > len(lines) {
		return ""
	}
	return lines[n-1]
}

package config

import (
	"fmt"
	"regexp"
	"strings"
)

// maxSecretFile bounds what ${file:PATH} may bring in. A file behind it holds
// one password or token; anything larger is the wrong file.
const maxSecretFile = 1 << 20

// failedReference says which ${…} of a scalar could not be resolved.
type failedReference struct {
	ref    string // the reference, without a default, which may be secret
	reason string
	remedy string
}

// interpolate replaces ${VAR}, ${VAR:-default} and ${file:PATH} in s; $${ is a
// literal ${. It works on decoded scalars only and never looks at what it has
// put in, so that no value can add keys, quotes or references of its own.
func interpolate(s string, env func(string) (string, bool), readFile func(string) ([]byte, error)) (string, []failedReference) {
	var out strings.Builder
	var failed []failedReference
	for {
		i := strings.Index(s, "${")
		if i < 0 {
			out.WriteString(s)
			return out.String(), failed
		}
		if i > 0 && s[i-1] == '$' {
			out.WriteString(s[:i-1] + "${")
			s = s[i+2:]
			continue
		}
		out.WriteString(s[:i])
		body, rest, ok := strings.Cut(s[i+2:], "}")
		if !ok {
			return out.String(), append(failed, failedReference{
				ref: "${", reason: "has a ${ without its }", remedy: "close it, or write $${ for the two characters themselves",
			})
		}
		v, bad := resolve(body, env, readFile)
		if bad != nil {
			failed = append(failed, *bad)
		}
		out.WriteString(v)
		s = rest
	}
}

// resolve gives the value of one reference, the text between ${ and }.
func resolve(body string, env func(string) (string, bool), readFile func(string) ([]byte, error)) (string, *failedReference) {
	if path, ok := strings.CutPrefix(body, "file:"); ok {
		return resolveFile(path, readFile)
	}
	name, fallback, hasFallback := strings.Cut(body, ":-")
	if !regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`).MatchString(name) {
		return "", &failedReference{
			ref: "${…}", reason: "has a ${…} that names no variable",
			remedy: "write ${NAME}, ${NAME:-default} or ${file:/path}, or $${ for the two characters themselves",
		}
	}
	v, set := env(name)
	switch {
	case hasFallback && v == "":
		return fallback, nil // as the shell does: unset or empty
	case !set:
		return "", &failedReference{
			ref:    "${" + name + "}",
			reason: fmt.Sprintf("the environment variable %s is not set", name),
			remedy: fmt.Sprintf("set it, or write ${%s:-default}", name),
		}
	}
	return v, nil
}

// resolveFile reads a file's text without the line break that editors and echo
// leave at its end.
func resolveFile(path string, readFile func(string) ([]byte, error)) (string, *failedReference) {
	ref := "${file:" + path + "}"
	data, err := readFile(path)
	if err != nil {
		return "", &failedReference{ref: ref, reason: "the file cannot be read: " + pathReason(err), remedy: "give the path of a readable file"}
	}
	if len(data) > maxSecretFile {
		return "", &failedReference{ref: ref, reason: "the file is larger than 1MiB", remedy: "give a file that holds the value alone"}
	}
	return strings.TrimRight(string(data), "\r\n"), nil
}

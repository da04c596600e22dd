package config

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// masked is what a secret prints as.
const masked = "***"

// Secret is a value that no output shows: formatted by any verb, encoded as
// text, JSON or YAML, or logged, it is ***. Only Reveal gives it away.
//
// The text is behind a pointer because fmt ignores methods on values in
// unexported fields and would print a string there as it is. The zero Secret
// is the empty one.
type Secret struct{ text *string }

// NewSecret wraps s.
func NewSecret(s string) Secret {
	if s == "" {
		return Secret{}
	}
	return Secret{text: &s}
}

// Reveal returns the text itself, for the one call that needs it.
func (s Secret) Reveal() string {
	if s.text == nil {
		return ""
	}
	return *s.text
}

// IsZero tells whether there is no secret.
func (s Secret) IsZero() bool { return s.text == nil }

// Equal tells whether two secrets hold the same text; == compares pointers.
func (s Secret) Equal(o Secret) bool { return s.Reveal() == o.Reveal() }

// String is ***, or empty for the empty secret: whether one is set is no
// secret, and is what an operator wants to see.
func (s Secret) String() string {
	if s.IsZero() {
		return ""
	}
	return masked
}

// GoString is String, for %#v.
func (s Secret) GoString() string { return s.String() }

// Format prints String whatever the verb, %d and %x included.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, s.String()) }

// MarshalText is String; JSON map keys and loggers use it.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalJSON is String as a JSON string.
func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.String()) }

// MarshalYAML is String.
func (s Secret) MarshalYAML() (any, error) { return s.String(), nil }

// DSN is a PostgreSQL connection string, as a URL or as key=value pairs. It
// prints with everything that may be a password masked.
type DSN struct{ text *string }

// NewDSN wraps s without looking at it.
func NewDSN(s string) DSN { return DSN(NewSecret(s)) }

// Reveal returns the connection string with its password.
func (d DSN) Reveal() string { return Secret(d).Reveal() }

// IsZero tells whether there is none.
func (d DSN) IsZero() bool { return d.text == nil }

// Equal tells whether both are the same text; == compares pointers.
func (d DSN) Equal(o DSN) bool { return d.Reveal() == o.Reveal() }

// String is the connection string with its password masked.
func (d DSN) String() string { return maskDSN(d.Reveal()) }

// GoString is String, for %#v.
func (d DSN) GoString() string { return d.String() }

// Format prints String whatever the verb.
func (d DSN) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, d.String()) }

// MarshalText is String.
func (d DSN) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// MarshalJSON is String as a JSON string.
func (d DSN) MarshalJSON() ([]byte, error) { return json.Marshal(d.String()) }

// MarshalYAML is String.
func (d DSN) MarshalYAML() (any, error) { return d.String(), nil }

// check tells what is wrong with the connection string. The driver's own error
// is never passed on: it quotes pieces of the string, and where the string is
// malformed, any piece may be the password. It only chooses among fixed texts.
func (d DSN) check() (reason, remedy string) {
	_, err := pgconn.ParseConfig(d.Reveal())
	if err == nil {
		return "", ""
	}
	// The driver's text is "cannot parse `STRING`: MESSAGE"; only the message
	// may choose.
	text := err.Error()
	text = text[strings.LastIndex(text, "`: ")+1:]
	for _, known := range []struct{ sign, reason, remedy string }{
		{"sslmode is invalid", "the sslmode is not known", "write disable, allow, prefer, require, verify-ca or verify-full"},
		{"failed to configure TLS", "the TLS settings cannot be used", "look at sslrootcert, sslcert and sslkey: each must be a readable PEM file"},
		{"invalid port", "the port is not a number from 1 to 65535", "write it as host:5432; where the password has one of @ : / ? #, percent-encode it (@ is %40)"},
		{"invalid connect_timeout", "the connect_timeout is not a number of seconds", "write for example connect_timeout=10"},
		{"service", "the service is not known", "name one of the service file, or write host, user and dbname"},
	} {
		if strings.Contains(text, known.sign) {
			return known.reason, known.remedy
		}
	}
	return "is not a connection string that PostgreSQL's driver can read",
		"write postgres://user:password@host:5432/database, special characters of the password percent-encoded (@ is %40, / is %2F), or host=… user=… dbname=…"
}

// maskDSN masks s, rather too much than too little: s may be malformed, so a
// part is shown only where it cannot belong to a password.
func maskDSN(s string) string {
	switch {
	case s == "":
		return ""
	case strings.HasPrefix(s, "postgres://"), strings.HasPrefix(s, "postgresql://"):
		return maskURL(s)
	case strings.Contains(s, "="):
		return maskKeywords(s)
	}
	return masked
}

// maskURL takes the last '@' of all as the end of the userinfo, so that an
// unencoded '@', '/' or '?' in a password does not end the masking early.
func maskURL(s string) string {
	i := strings.Index(s, "://") + len("://")
	out, rest := s[:i], s[i:]
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user, _, hasPassword := strings.Cut(rest[:at], ":")
		if strings.ContainsAny(user, "/?#=@") {
			return out + masked // not a user name: where the parts lie is not certain
		}
		out += user
		if hasPassword {
			out += ":" + masked
		}
		out, rest = out+"@", rest[at+1:]
	} else if !plausibleHosts(rest) {
		return out + masked // perhaps user:password with the host left out
	}
	head, query, hasQuery := strings.Cut(rest, "?")
	if !hasQuery {
		return out + head
	}
	pairs := strings.Split(query, "&")
	for j, pair := range pairs {
		key, _, ok := strings.Cut(pair, "=")
		name, err := url.QueryUnescape(key)
		switch {
		case !ok:
			pairs[j] = masked // the tail of a password with an unencoded '&'
		case err != nil || secretKey(name):
			pairs[j] = key + "=" + masked
		}
	}
	return out + head + "?" + strings.Join(pairs, "&")
}

// plausibleHosts tells whether the authority at the start of rest is hosts
// with numeric ports, not userinfo.
func plausibleHosts(rest string) bool {
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		rest = rest[:i]
	}
	for host := range strings.SplitSeq(rest, ",") {
		if i := strings.LastIndexByte(host, ']'); i >= 0 {
			host = host[i+1:]
		}
		if _, port, ok := strings.Cut(host, ":"); ok && strings.Trim(port, "0123456789") != "" {
			return false
		}
	}
	return true
}

// maskKeywords masks the key=value form. A value is quoted or ends at a blank,
// and a backslash takes the next character with it. What does not fit that
// form hides all of the rest.
func maskKeywords(s string) string {
	var out strings.Builder
	rest := strings.TrimSpace(s)
	for rest != "" {
		key, after, ok := strings.Cut(rest, "=")
		key = strings.TrimSpace(key)
		if !ok || key == "" || strings.ContainsAny(key, " \t\n'\\") {
			out.WriteString(masked)
			break
		}
		after = strings.TrimLeft(after, " \t\n")
		n := keywordValueLen(after)
		if n < 0 {
			out.WriteString(key + "=" + masked)
			break
		}
		if secretKey(key) {
			out.WriteString(key + "=" + masked)
		} else {
			out.WriteString(key + "=" + after[:n])
		}
		if rest = strings.TrimLeft(after[n:], " \t\n"); rest != "" {
			out.WriteByte(' ')
		}
	}
	return out.String()
}

// keywordValueLen is the length of the value at the start of s, quotes
// included, or -1 where a quote is not closed.
func keywordValueLen(s string) int {
	quoted := strings.HasPrefix(s, "'")
	i := 0
	if quoted {
		i = 1
	}
	for ; i < len(s); i++ {
		switch {
		case s[i] == '\\':
			i++
		case quoted && s[i] == '\'':
			return i + 1
		case !quoted && strings.IndexByte(" \t\n", s[i]) >= 0:
			return i
		}
	}
	if quoted || i > len(s) {
		return -1
	}
	return len(s)
}

// secretKey tells whether a connection parameter is a secret, by name:
// password, sslpassword, oauth_client_secret, scram_client_key and the like.
func secretKey(name string) bool {
	name = strings.ToLower(name)
	return strings.Contains(name, "password") || strings.Contains(name, "secret") || strings.HasPrefix(name, "scram_")
}

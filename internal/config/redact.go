package config

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// redactMin is the length from which a secret is searched for in other texts.
// Shorter ones would strike innocent words and break the JSON of a log line.
const redactMin = 8

// Redactor returns a replacer that strikes the configuration's secrets out of
// any text: as they are, percent-encoded, base64 and as JSON escapes them. It
// is the last line of defence, for texts made by drivers; nothing may rely on
// it. A secret that also is a DSN's user, host or database is left alone: it
// is public there.
func (c Config) Redactor() *strings.Replacer {
	secrets := []string{
		c.Kafka.SASL.Password.Reveal(), c.Kafka.SASL.Token.Reveal(), c.Kafka.SASL.SecretKey.Reveal(),
		c.Kafka.SASL.SessionToken.Reveal(), c.Admin.Token.Reveal(),
	}
	for _, columns := range c.Source.Columns {
		for _, m := range columns.Mask {
			secrets = append(secrets, m.Salt.Reveal())
		}
	}
	var public []string
	for _, dsn := range []DSN{c.Source.DSN, c.Source.PrimaryDSN} {
		if pg, err := pgconn.ParseConfig(dsn.Reveal()); err == nil && !dsn.IsZero() {
			secrets = append(secrets, pg.Password)
			public = append(public, pg.User, pg.Host, pg.Database)
		}
	}
	var forms []string
	for _, s := range secrets {
		if len(s) < redactMin || slices.Contains(public, s) {
			continue
		}
		quoted, _ := json.Marshal(s) // a string always has a JSON form
		forms = append(forms, s, url.QueryEscape(s), url.PathEscape(s), strings.Trim(string(quoted), `"`),
			base64.StdEncoding.EncodeToString([]byte(s)), base64.RawStdEncoding.EncodeToString([]byte(s)),
			base64.URLEncoding.EncodeToString([]byte(s)), base64.RawURLEncoding.EncodeToString([]byte(s)))
	}
	// The longest first, so that a form that begins with another is struck whole.
	slices.SortFunc(forms, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, f := range slices.Compact(forms) {
		pairs = append(pairs, f, masked)
	}
	return strings.NewReplacer(pairs...)
}

package config

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/rs/zerolog"
	"go.yaml.in/yaml/v3"
)

// shown returns v in every form that a program may print it in.
func shown(t *testing.T, v any) string {
	t.Helper()
	var b bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%t", "%c", "%U", "%5.2f"} {
		fmt.Fprintf(&b, verb+"\n", v)
	}
	type nested struct{ inner any }
	fmt.Fprintf(&b, "%v %+v %#v\n", nested{v}, []any{v}, map[string]any{"k": v})
	b.WriteString(fmt.Errorf("wrapped: %v", v).Error())
	j, err := json.Marshal(map[string]any{"k": v})
	if err != nil {
		t.Fatal(err)
	}
	y, err := yaml.Marshal(map[string]any{"k": v})
	if err != nil {
		t.Fatal(err)
	}
	b.Write(j)
	b.Write(y)
	log := zerolog.New(&b)
	log.Info().Interface("a", v).Any("b", v).Fields(map[string]any{"c": v}).Send()
	if s, ok := v.(fmt.Stringer); ok {
		log.Info().Stringer("s", s).Send()
	}
	return b.String()
}

func TestSecretsAreNeverShown(t *testing.T) {
	const pg, k = "s3cr3t-pg", "s3cr3t-k"
	c := Default()
	c.Source.DSN = NewDSN("postgres://u:" + pg + "@h/d?sslpassword=" + pg)
	c.Kafka.SASL.Password, c.Kafka.SASL.Token, c.Kafka.SASL.SecretKey, c.Kafka.SASL.SessionToken = NewSecret(k), NewSecret(k), NewSecret(k), NewSecret(k)
	c.Admin.Token = NewSecret(k)
	c.Source.Columns = map[string]Columns{"public.users": {Mask: map[string]Mask{"phone": {Kind: MaskHMAC, Salt: NewSecret(k)}}}}
	type hidden struct {
		s Secret
		d DSN
	}
	for _, v := range []any{
		c.Kafka.SASL.Password, &c.Kafka.SASL.Password, c.Source.DSN, c.Kafka.SASL, c.Source.Columns, c, &c,
		hidden{c.Admin.Token, c.Source.DSN}, // fmt calls no methods in there
	} {
		out := shown(t, v)
		for _, secret := range []string{pg, k} {
			for _, form := range []string{secret, fmt.Sprintf("%x", secret), fmt.Sprintf("%X", secret), base64.StdEncoding.EncodeToString([]byte(secret))} {
				if strings.Contains(out, form) {
					t.Errorf("%T shows its secret:\n%s", v, out)
				}
			}
		}
	}
	if out := shown(t, c.Admin.Token); !strings.Contains(out, "***") {
		t.Errorf("a secret is not visible as masked:\n%s", out)
	}
	if got := fmt.Sprintf("%d %x", c.Admin.Token, c.Admin.Token); got != "*** ***" { //nolint:govet // the wrong verb is the point
		t.Errorf("with the wrong verbs a secret prints as %s", got)
	}
	if c.Admin.Token.Reveal() != k || NewSecret("").String() != "" || !c.Admin.Token.Equal(NewSecret(k)) {
		t.Error("Reveal, Equal or the empty secret are wrong")
	}
}

func TestDSNsPrintWithoutTheirPassword(t *testing.T) {
	for dsn, want := range map[string]string{
		"postgres://u:s3cr3t@h:5432/d":                        "postgres://u:***@h:5432/d",
		"postgresql://u:s3cr3t@h1:5432,h2:5433/d?sslmode=off": "postgresql://u:***@h1:5432,h2:5433/d?sslmode=off",
		"postgres://u@h/d":                                    "postgres://u@h/d",
		"postgres://h:5432/d":                                 "postgres://h:5432/d",
		"postgres://[::1]:5432/d":                             "postgres://[::1]:5432/d",
		"postgres:///d?host=/tmp&password=s3cr3t&user=u":      "postgres:///d?host=/tmp&password=***&user=u",
		"postgres://h/d?PassWord=s3cr3t":                      "postgres://h/d?PassWord=***",
		"postgres://h/d?pass%77ord=s3cr3t":                    "postgres://h/d?pass%77ord=***",
		"postgres://h/d?password=a&s3cr3t":                    "postgres://h/d?password=***&***",
		"postgres://u:s3cr3t@s3cr3t/s3cr3t?s3cr3t#@h/d":       "postgres://u:***@h/d",
		"postgres://h/d?password=s3@cr3t":                     "postgres://***",
		"postgres://u:s3cr3t":                                 "postgres://***",
		"postgres://u:s3cr3t/d":                               "postgres://***",
		"host=h user=u password=s3cr3t dbname=d":              "host=h user=u password=*** dbname=d",
		`user=u password = 's3cr3t \' s3cr3t' dbname='d d'`:   "user=u password=*** dbname='d d'",
		`password=s3cr3t\ s3cr3t user=u`:                      "password=*** user=u",
		"user=u password='s3cr3t":                             "user=u password=***",
		"user=u s3cr3t host=h":                                "user=u ***",
		"user=u oauth_client_secret=s3cr3t":                   "user=u oauth_client_secret=***",
		"s3cr3t":                                              "***",
		"mysql://u:s3cr3t@h/d":                                "***",
		"":                                                    "",
	} {
		if got := NewDSN(dsn).String(); got != want {
			t.Errorf("%s\n prints as %s\n want      %s", dsn, got, want)
		}
	}
}

func TestGoodDSNsAreTaken(t *testing.T) {
	for _, dsn := range []string{
		"postgres://u:p@h/d", "postgresql://u:p%40@h1:5432,h2:5433/d?target_session_attrs=read-write", "postgres://u@[::1]:5432/d",
		"host=/var/run/postgresql dbname=d", "host=h user=u password='a b'", "postgres:///d?host=/tmp",
	} {
		if reason, remedy := NewDSN(dsn).check(); reason != "" {
			t.Errorf("%s: %s; %s", dsn, reason, remedy)
		}
	}
}

// The driver's errors quote the connection string; ours must not.
func TestBadDSNsAreRefusedWithoutQuotingThem(t *testing.T) {
	for dsn, want := range map[string]string{
		"postgres://u:s3cr3t@h:s3cr3t/d":         "the port is not a number",
		"postgres://u:s3/cr3t@h/d":               "",
		"postgres://u:%zzs3cr3t@h/d":             "is not a connection string",
		"postgres://u:s3cr3t s3cr3t@h/d":         "",
		"postgres://u:s3cr3t@h/d?sslmode=s3cr3t": "the sslmode is not known",
		"host=h password='s3cr3t":                "is not a connection string",
		"host=h user=u s3cr3t":                   "is not a connection string",
		"s3cr3t":                                 "is not a connection string",
		"host=h port=s3cr3t":                     "the port is not a number",
		"host=h sslrootcert=/none sslmode=verify-ca password=s3cr3t": "the TLS settings cannot be used",
		"host=h connect_timeout=s3cr3t":                              "the connect_timeout is not",
		"host=h target_session_attrs=s3cr3t":                         "is not a connection string",
	} {
		text := "name: shop\nsource:\n  dsn: " + fmt.Sprintf("%q", dsn) + "\nkafka: {brokers: [k:9092]}\n"
		_, err := Parse([]byte(text), lookup(nil), noFile)
		if want != "" && (err == nil || !strings.Contains(err.Error(), "source.dsn: "+want)) {
			t.Errorf("%s: %v", dsn, err)
		}
		var p *Problems
		if errors.As(err, &p) && (strings.Contains(fmt.Sprintf("%v %#v", err, p.List()), "s3cr3t") || len(p.List()) != 1) {
			t.Errorf("%s: %v", dsn, err)
		}
	}
}

func TestRedactorStrikesSecretsOutOfForeignTexts(t *testing.T) {
	c := Default()
	c.Source.DSN = NewDSN("postgres://postgres:s3cr3t%20pg@h/d")
	c.Kafka.SASL.Password = NewSecret(`s3"cr\et-k`)
	c.Source.PrimaryDSN = NewDSN("postgres://walrelay:s3cr3t-primary@h/d")
	c.Admin.Token = NewSecret("short")
	c.Source.Columns = map[string]Columns{"public.users": {Mask: map[string]Mask{"phone": {Kind: MaskHMAC, Salt: NewSecret("s3cr3t-salt")}}}}
	quoted, _ := json.Marshal(`s3"cr\et-k`)
	for _, in := range []string{
		"s3cr3t-primary", "s3cr3t-salt", "s3cr3t pg", "s3cr3t%20pg", "s3cr3t+pg", base64.StdEncoding.EncodeToString([]byte("s3cr3t pg")),
		`s3"cr\et-k`, strings.Trim(string(quoted), `"`), url.QueryEscape(`s3"cr\et-k`),
	} {
		if got := c.Redactor().Replace("x " + in + " y"); got != "x *** y" {
			t.Errorf("%q becomes %q", in, got)
		}
	}
	for _, in := range []string{"a short word", "postgres"} {
		if got := c.Redactor().Replace(in); got != in {
			t.Errorf("%q becomes %q", in, got)
		}
	}
	c.Source.DSN = NewDSN("postgres://postgres:postgres@h/d")
	if got := c.Redactor().Replace("user postgres"); got != "user postgres" {
		t.Errorf("a user's name is struck: %q", got)
	}
}

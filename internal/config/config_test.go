package config

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// cmpEmpty compares Configs with no difference between nil and empty.
func cmpEmpty() cmp.Option { return cmpopts.EquateEmpty() }

func lookup(vars map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		v, ok := vars[name]
		return v, ok
	}
}

func noFile(path string) ([]byte, error) {
	return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
}

// minimal is a valid file; with is appended to it.
func minimal(with string) string {
	return "name: shop\nsource:\n  dsn: postgres://u:s3cr3t-pg@db/shop\nkafka:\n  brokers: [k:9092]\n" + with
}

func mustParse(t *testing.T, text string) Config {
	t.Helper()
	c, err := Parse([]byte(text), lookup(nil), noFile)
	if err != nil {
		t.Fatalf("parse: %v", err)
	}
	return c
}

func TestMinimalFileHasAllDefaults(t *testing.T) {
	c := mustParse(t, minimal(""))
	for _, x := range []struct{ what, got, want string }{
		{"slot", c.Source.Slot, "walrelay_shop"},
		{"publication", c.Source.Publication, "walrelay_shop"},
		{"transactional id", c.Kafka.TransactionalID, "walrelay-shop"},
		{"checkpoint topic", c.Kafka.CheckpointTopic, "_walrelay.shop"},
		{"prefix", c.Topics.Prefix, "shop"},
		{"listen", c.Admin.Listen, "127.0.0.1:8642"},
		{"max-bytes", c.Batch.MaxBytes.String(), "8MiB"},
	} {
		if x.got != x.want {
			t.Errorf("%s is %q, want %q", x.what, x.got, x.want)
		}
	}
	if c.Batch.MaxDelay.Std() != 5*time.Millisecond || c.Kafka.TransactionTimeout.Std() != time.Minute {
		t.Errorf("max-delay %v, transaction-timeout %v", c.Batch.MaxDelay, c.Kafka.TransactionTimeout)
	}
}

func TestNameWithADashIsUnderscoredWhereItMustBe(t *testing.T) {
	c := mustParse(t, strings.Replace(minimal(""), "name: shop", "name: shop-eu", 1))
	got := []string{c.Source.Slot, c.Source.Publication, c.Kafka.TransactionalID, c.Kafka.CheckpointTopic, c.Topics.Prefix}
	want := []string{"walrelay_shop_eu", "walrelay_shop_eu", "walrelay-shop-eu", "_walrelay.shop-eu", "shop-eu"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestEverythingSet(t *testing.T) {
	c, err := Parse([]byte(mustRead(t, "testdata/full.yaml")), lookup(map[string]string{"PW": "x: [1]\nname: evil", "PEPPER": "s3cr3t-salt"}),
		func(string) ([]byte, error) { return []byte("from file\n"), nil })
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		Name: "shop",
		Source: Source{
			DSN: NewDSN("host=db user=u password='s3cr3t-pg' dbname=shop"), Slot: "s", Publication: "p",
			PublicationMode: PublicationExisting, Tables: Globs{"public.*", "!public.audit_*"}, Messages: PrefixGlobs{"a*"},
			Columns: map[string]Columns{
				"public.users": {Exclude: []string{"password_hash"}, Mask: map[string]Mask{
					"email": {Kind: MaskSHA256}, "phone": {Kind: MaskHMAC, Salt: NewSecret("s3cr3t-salt")},
					"note": {Kind: MaskTruncate, Length: 8}, "city": {Kind: MaskNull}, "name": {Kind: MaskFixed, Text: "-"},
				}},
				"public.old": {Exclude: []string{"a"}, Gone: []string{"a"}},
			},
			Keyless: KeylessInserts, Keys: map[string][]string{"public.events": {"tenant", "id"}},
			MaxRetainedWAL: 50 << 30,
			Mode:           ModeWAL, PollInterval: Duration(250 * time.Millisecond), PrimaryDSN: NewDSN("postgres://u:s3cr3t-primary@primary/shop"),
		},
		Snapshot: Snapshot{Mode: SnapshotOnly, Exclude: Globs{"public.log_*", "!public.log_new"}, ChunkRows: 500, ChunkBytes: 1 << 20, Readers: 4},
		Outbox: []Outbox{{
			Table: "public.outbox", Partition: "part", Key: `{a}/{b|replace:\::-|default:x}`, CloudEvents: CloudEventsStructured,
			HeadersFrom: "meta", Envelope: []string{"ver"}, JSONStrings: true, Route: OutboxRoute{By: "kind", Regex: "(a)(?P<b>.*)", Replacement: "x.$1.${b}"},
			Columns: map[string]string{"id": "event_uuid"}, Headers: []string{"tenant"}, NullPayload: NullPayloadNull,
			Format: FormatEnvelope, After: "keep", Snapshot: OutboxPending,
		}},
		Topics: Topics{
			Prefix: "eu", Table: "{prefix}.{table}", Message: "m", Partitions: 12, ReplicationFactor: 3,
			Config: map[string]string{"min.insync.replicas": "2", "retention.ms": "-1"}, Create: false,
		},
		Format: Format{
			Value: "json", Types: TypesPlain, Envelope: false, Deletes: DeletesField, Tombstones: false, TOAST: TOASTMarker, TOASTMarker: "?",
			Debezium: Debezium{DecimalHandling: "string", TimePrecision: "connect", IntervalHandling: "string", BinaryHandling: "hex", HstoreHandling: "map", Placeholder: "gone", SchemasEnable: true},
		},
		Kafka: Kafka{
			Brokers: []string{"a:9092", "[::1]:9093"}, TLS: TLS{Enabled: true, CA: "/ca.pem", Cert: "/c.pem", Key: "/k.pem"},
			SASL:        SASL{Mechanism: SASLSCRAM512, Username: "from file", Password: NewSecret("x: [1]\nname: evil")},
			Compression: "zstd", TransactionalID: "t", TransactionTimeout: Duration(90 * time.Second), CheckpointTopic: "c",
		},
		Batch:      Batch{MaxBytes: 1e6, MaxRecords: 10, MaxDelay: 0},
		Replay:     Replay{RetainWAL: 0, RetainTime: Duration(24 * time.Hour)},
		DeadLetter: DeadLetter{Topic: "dl", On: []string{"encode"}, OnError: OnErrorStop},
		OnFenced:   OnFencedExit, StopTimeout: Duration(36 * time.Hour),
		Admin: Admin{Listen: "", Token: NewSecret("007")}, Log: Log{Level: "debug", Format: LogConsole},
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestEffectiveConfigurationReadsBack(t *testing.T) {
	for _, file := range []string{"testdata/full.yaml", exampleFile} {
		c, err := Parse([]byte(mustRead(t, file)), lookup(map[string]string{"PW": "p", "PEPPER": "s3cr3t-salt", "PGPASSWORD": "s3cr3t-pg"}),
			func(string) ([]byte, error) { return []byte("true"), nil })
		if err != nil {
			t.Fatal(err)
		}
		if users := c.Source.Columns["public.users"]; users.Mask != nil {
			users.Mask["a: {yes}, #"] = Mask{Kind: MaskFixed, Text: "${Y}, null"}
			users.Exclude = append(users.Exclude, "a:b", "null", "1")
			c.Source.Columns["public.users"] = users
		}
		c.Source.Keys = map[string][]string{`public.a "b": c`: {"${X}", "yes", "1"}}
		var out bytes.Buffer
		if err := c.Print(&out); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(out.String(), "s3cr3t") {
			t.Errorf("%s: a secret is printed:\n%s", file, &out)
		}
		// Only the secrets may differ; put what they print as in their place.
		want := c
		want.Source.DSN, want.Source.PrimaryDSN = NewDSN(c.Source.DSN.String()), NewDSN(c.Source.PrimaryDSN.String())
		want.Kafka.SASL.Password = NewSecret(c.Kafka.SASL.Password.String())
		want.Admin.Token = NewSecret(c.Admin.Token.String())
		want.Source.Keys = nil
		if users := c.Source.Columns["public.users"]; users.Mask != nil {
			users.Mask["phone"] = Mask{Kind: MaskHMAC, Salt: NewSecret(users.Mask["phone"].Salt.String())}
		}
		text := out.String()
		got, err := Parse([]byte(strings.Replace(text, `public.a \"b\": c`, "public.t", 1)), lookup(nil), noFile)
		if err != nil {
			t.Fatalf("%s: printed configuration does not read back: %v\n%s", file, err, text)
		}
		if diff := cmp.Diff([]string{"${X}", "yes", "1"}, got.Source.Keys["public.t"]); diff != "" {
			t.Errorf("%s: keys (-want +got):\n%s", file, diff)
		}
		got.Source.Keys = nil
		if diff := cmp.Diff(want, got, cmpEmpty()); diff != "" {
			t.Errorf("%s: (-want +got):\n%s", file, diff)
		}
	}
}

func TestLoadReadsFilesAndNamesThemWhenItCannot(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	file := filepath.Join(dir, "walrelay.yaml")
	for name, text := range map[string]string{
		secret: "pw\n",
		file:   strings.Replace(minimal(""), "s3cr3t-pg", "${file:"+secret+"}", 1),
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c, err := Load(file, lookup(nil))
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Source.DSN.Reveal(); got != "postgres://u:pw@db/shop" {
		t.Errorf("dsn is %q", got)
	}
	_, err = Load(filepath.Join(dir, "none.yaml"), lookup(nil))
	if err == nil || !strings.Contains(err.Error(), "none.yaml: the file cannot be read: no such file") {
		t.Errorf("missing file: %v", err)
	}
}

func TestReferences(t *testing.T) {
	env := lookup(map[string]string{"A": "a", "EMPTY": "", "EVIL": "${A} ${file:/etc/passwd}"})
	file := func(string) ([]byte, error) { return []byte("f\r\n\n"), nil }
	for in, want := range map[string]string{
		"x${A}y${A}": "xaya", "${A:-b}": "a", "${B:-b}": "b", "${EMPTY:-b}": "b", "${EMPTY}": "", "${B:-}": "", "${B:-c:-d}": "c:-d",
		"${file:/x}!": "f!", "$${A}": "${A}", "$A": "$A", "pa$$w": "pa$$w", "${EVIL}": "${A} ${file:/etc/passwd}", "": "",
	} {
		if got, failed := interpolate(in, env, file); got != want || len(failed) > 0 {
			t.Errorf("%q becomes %q, %v; want %q", in, got, failed, want)
		}
	}
	for _, in := range []string{"${B}", "${A", "${}", "${A B}", "${1}"} {
		if got, failed := interpolate(in, env, file); len(failed) != 1 {
			t.Errorf("%q becomes %q, %v", in, got, failed)
		}
	}
}

// That pending is the default and that it was asked for are not the same: an outbox
// table that has rows and no column to mark them with needs the second.
func TestWhetherAnOutboxsSnapshotWasSetIsKnown(t *testing.T) {
	c := mustParse(t, minimal("outbox: [{table: public.a}, {table: public.b, snapshot: pending}, {table: public.c, snapshot: none}]\n"))
	for i, want := range []struct{ set, means string }{{"", "pending"}, {"pending", "pending"}, {"none", "none"}} {
		if o := c.Outbox[i]; o.Snapshot != want.set || o.Backlog() != want.means {
			t.Errorf("%s: %q, which means %q", o.Table, o.Snapshot, o.Backlog())
		}
	}
	var out bytes.Buffer
	if err := c.Print(&out); err != nil {
		t.Fatal(err)
	}
	if again := mustParse(t, out.String()); again.Outbox[0].Snapshot != "" || again.Outbox[1].Snapshot != OutboxPending {
		t.Errorf("printed and read again: %+v", again.Outbox)
	}
}

func TestTLSIsOnWhereAFileIsNamedUnlessSaidOtherwise(t *testing.T) {
	for _, c := range []struct {
		tls  string
		want bool
	}{
		{"{}", false}, {"{ca: /x}", true}, {"{enabled: true}", true}, {"{enabled: false, ca: /x}", false}, {`{enabled: "${ON:-true}"}`, true},
	} {
		if got := mustParse(t, minimal("  tls: "+c.tls)).Kafka.TLS.Enabled; got != c.want {
			t.Errorf("tls: %s: enabled is %v", c.tls, got)
		}
	}
}

func TestSectionsWithAllLinesCommentedOutAreDefaults(t *testing.T) {
	c := mustParse(t, minimal("  tls:\n  sasl:\noutbox:\nbatch:\nformat:\n"))
	if want := Default(); c.Batch != want.Batch || c.Format != want.Format || len(c.Outbox) != 0 {
		t.Errorf("got %+v", c)
	}
}

func TestDefaultsAreValidOnceTheMandatoryValuesAreThere(t *testing.T) {
	c := Default()
	var problems *Problems
	if err := c.Validate(); !errors.As(err, &problems) || len(problems.List()) != 3 {
		t.Errorf("the defaults alone: %v", err)
	}
	c.Name, c.Source.DSN, c.Kafka.Brokers = "shop", NewDSN("host=db"), []string{"k:9092"}
	c.FillNames()
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}

package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"
)

// Config is one connector's whole configuration. A Config that Load or Parse
// returned without an error is complete (every default filled in) and valid.
//
// The yaml tags are the keys of the file, in the order in which Print writes
// them. Enumerated values are plain strings, held to the choices listed in the
// field table.
type Config struct {
	Name        string     `yaml:"name"`
	Source      Source     `yaml:"source"`
	Snapshot    Snapshot   `yaml:"snapshot"`
	Outbox      []Outbox   `yaml:"outbox"`
	Topics      Topics     `yaml:"topics"`
	Format      Format     `yaml:"format"`
	Kafka       Kafka      `yaml:"kafka"`
	Batch       Batch      `yaml:"batch"`
	Replay      Replay     `yaml:"replay"`
	DeadLetter  DeadLetter `yaml:"dead-letter"`
	OnFenced    string     `yaml:"on-fenced"` // standby | exit
	StopTimeout Duration   `yaml:"stop-timeout"`
	Admin       Admin      `yaml:"admin"`
	Log         Log        `yaml:"log"`
}

// Source says which database is read, and what of it.
type Source struct {
	DSN             DSN                 `yaml:"dsn"`
	Slot            string              `yaml:"slot"`
	Publication     string              `yaml:"publication"`
	PublicationMode string              `yaml:"publication-mode"` // managed | existing
	Tables          Globs               `yaml:"tables"`
	Columns         map[string]Columns  `yaml:"columns"` // schema.table → what is hidden of it
	Messages        PrefixGlobs         `yaml:"messages"`
	Keyless         string              `yaml:"keyless"`          // refuse | inserts
	Keys            map[string][]string `yaml:"keys"`             // schema.table → key columns
	MaxRetainedWAL  Size                `yaml:"max-retained-wal"` // 0: no limit
	Mode            string              `yaml:"mode"`             // wal | polling
	// PollInterval is how long polling waits where it found nothing.
	PollInterval Duration `yaml:"poll-interval"`
	// PrimaryDSN is where snapshots are read when DSN is a standby; empty: at DSN.
	PrimaryDSN DSN `yaml:"primary-dsn"`
}

// Snapshot says what is read of the tables beside the stream.
type Snapshot struct {
	Mode       string `yaml:"mode"`    // initial | never | only
	Exclude    Globs  `yaml:"exclude"` // streamed, but not read at the start
	ChunkRows  int    `yaml:"chunk-rows"`
	ChunkBytes Size   `yaml:"chunk-bytes"`
	Readers    int    `yaml:"readers"`
}

// Outbox describes one outbox: a table, or the logical messages of a prefix.
type Outbox struct {
	Table       string            `yaml:"table"`          // schema.table
	Prefix      string            `yaml:"message-prefix"` // of logical messages, instead of a table
	Topic       string            `yaml:"topic"`          // template over the row's fields; "" follows the rule for recognised columns
	Key         string            `yaml:"key"`            // template over the row's fields; "" likewise
	Partition   string            `yaml:"partition"`      // column with the partition's number; "": by the key
	Format      string            `yaml:"format"`         // payload | envelope | cloudevents
	CloudEvents string            `yaml:"cloudevents"`    // structured | binary
	NullPayload string            `yaml:"null-payload"`   // tombstone | null
	Columns     map[string]string `yaml:"columns"`        // role → column
	Headers     []string          `yaml:"headers"`        // columns, or column:header
	HeadersFrom string            `yaml:"headers-from"`   // column with a JSON object
	Envelope    []string          `yaml:"envelope"`       // columns beside the payload, or column:member
	JSONStrings bool              `yaml:"json-strings"`
	Route       OutboxRoute       `yaml:"route"`
	After       string            `yaml:"after"` // keep | mark | delete
	// Snapshot is pending | all | none, and empty where the file does not say: then
	// pending rows are read, and a table without a column that marks published rows must
	// not have any.
	Snapshot string `yaml:"snapshot"`
}

// OutboxRoute chooses an event's topic by a field, instead of a template. What is empty
// has the meaning that router.RouteOptions says.
type OutboxRoute struct {
	By          string `yaml:"by"`
	Regex       string `yaml:"regex"`
	Replacement string `yaml:"replacement"`
}

// IsZero tells that there is no route, so that the topic's template holds.
func (r OutboxRoute) IsZero() bool { return r == OutboxRoute{} }

// Backlog is what Snapshot means.
func (o Outbox) Backlog() string {
	if o.Snapshot == "" {
		return OutboxPending
	}
	return o.Snapshot
}

// Topics says where records go and how a missing topic is created.
type Topics struct {
	Prefix            string            `yaml:"prefix"`
	Table             string            `yaml:"table"`   // template: {prefix} {schema} {table}
	Message           string            `yaml:"message"` // template: {prefix}
	Partitions        int               `yaml:"partitions"`
	ReplicationFactor int               `yaml:"replication-factor"` // -1: the broker's default
	Config            map[string]string `yaml:"config"`
	Create            bool              `yaml:"create"`
}

// Format says what a record's value looks like.
type Format struct {
	Value       string `yaml:"value"` // json
	Types       string `yaml:"types"` // plain | debezium
	Envelope    bool   `yaml:"envelope"`
	Deletes     string `yaml:"deletes"` // tombstone | field
	Tombstones  bool   `yaml:"tombstones"`
	TOAST       string `yaml:"toast"` // omit | marker
	TOASTMarker string `yaml:"toast-marker"`
	// Debezium holds with types debezium.
	Debezium Debezium `yaml:"debezium"`
}

// Debezium says how records of types debezium differ from Debezium's defaults, in the
// words of Debezium's own options.
type Debezium struct {
	DecimalHandling  string `yaml:"decimal-handling"`  // precise | string | double
	TimePrecision    string `yaml:"time-precision"`    // adaptive | adaptive_time_microseconds | connect | isostring
	IntervalHandling string `yaml:"interval-handling"` // numeric | string
	BinaryHandling   string `yaml:"binary-handling"`   // bytes | base64 | base64-url-safe | hex
	HstoreHandling   string `yaml:"hstore-handling"`   // json | map
	Placeholder      string `yaml:"unavailable-value-placeholder"`
	SchemasEnable    bool   `yaml:"schemas-enable"`
}

// Kafka says how the cluster is reached and under which identity.
type Kafka struct {
	Brokers            []string `yaml:"brokers"`
	TLS                TLS      `yaml:"tls"`
	SASL               SASL     `yaml:"sasl"`
	Compression        string   `yaml:"compression"` // none | gzip | snappy | lz4 | zstd
	TransactionalID    string   `yaml:"transactional-id"`
	TransactionTimeout Duration `yaml:"transaction-timeout"`
	CheckpointTopic    string   `yaml:"checkpoint-topic"`
}

// TLS holds paths of PEM files. Enabled alone decides whether TLS is used:
// decoding sets it when one of the files is given and enabled is not.
type TLS struct {
	Enabled bool   `yaml:"enabled"`
	CA      string `yaml:"ca"`
	Cert    string `yaml:"cert"`
	Key     string `yaml:"key"`
}

// SASL holds the credentials of one mechanism; an empty Mechanism means none.
type SASL struct {
	Mechanism    string `yaml:"mechanism"` // plain | scram-sha-256 | scram-sha-512 | oauthbearer | aws-msk-iam
	Username     string `yaml:"username"`
	Password     Secret `yaml:"password"`
	Token        Secret `yaml:"token"`
	AccessKey    string `yaml:"access-key"`
	SecretKey    Secret `yaml:"secret-key"`
	SessionToken Secret `yaml:"session-token"`
}

// Batch bounds one Kafka transaction.
type Batch struct {
	MaxBytes   Size     `yaml:"max-bytes"`
	MaxRecords int      `yaml:"max-records"`
	MaxDelay   Duration `yaml:"max-delay"`
}

// Replay says how far back the WAL is kept for being delivered again. Either of them 0
// turns the anchor off.
type Replay struct {
	RetainWAL  Size     `yaml:"retain-wal"`
	RetainTime Duration `yaml:"retain-time"`
}

// DeadLetter says which changes may go to the dead-letter topic.
type DeadLetter struct {
	Topic   string   `yaml:"topic"` // template: {prefix}
	On      []string `yaml:"on"`    // subset of oversize, route, encode, malformed
	OnError string   `yaml:"on-error"`
}

// Admin is the HTTP server beside the stream; an empty Listen turns it off.
type Admin struct {
	Listen string `yaml:"listen"`
	Token  Secret `yaml:"token"`
}

// Log says how much is logged to stderr, and in which form.
type Log struct {
	Level  string `yaml:"level"`
	Format string `yaml:"format"` // json | console
}

// The values that code branches on. Those with a single choice have no name.
const (
	PublicationManaged  = "managed"
	PublicationExisting = "existing"

	KeylessRefuse  = "refuse"
	KeylessInserts = "inserts"

	ModeWAL     = "wal"
	ModePolling = "polling"

	SnapshotInitial = "initial"
	SnapshotNever   = "never"
	SnapshotOnly    = "only"

	FormatPayload         = "payload"
	FormatEnvelope        = "envelope"
	FormatCloudEvents     = "cloudevents"
	CloudEventsStructured = "structured"
	CloudEventsBinary     = "binary"

	OutboxPending = "pending"
	OutboxAll     = "all"
	OutboxNone    = "none"

	AfterKeep   = "keep"
	AfterMark   = "mark"
	AfterDelete = "delete"

	NullPayloadTombstone = "tombstone"
	NullPayloadNull      = "null"

	TypesPlain    = "plain"
	TypesDebezium = "debezium"

	DeletesTombstone = "tombstone"
	DeletesField     = "field"

	TOASTOmit   = "omit"
	TOASTMarker = "marker"

	OnFencedStandby = "standby"
	OnFencedExit    = "exit"

	OnErrorDeadLetter = "dead-letter"
	OnErrorStop       = "stop"

	LogJSON    = "json"
	LogConsole = "console"
)

// The five SASL mechanisms, as kafka.sasl.mechanism spells them.
const (
	SASLPlain       = "plain"
	SASLSCRAM256    = "scram-sha-256"
	SASLSCRAM512    = "scram-sha-512"
	SASLOAuthBearer = "oauthbearer"
	SASLAWSMSKIAM   = "aws-msk-iam"
)

// Default returns a Config in which everything is set but the three mandatory
// values (name, source.dsn, kafka.brokers) and what follows the name, which
// FillNames adds. Its slices and maps are the caller's.
func Default() Config {
	return Config{
		Source: Source{
			PublicationMode: PublicationManaged,
			Tables:          Globs{"*.*"},
			Keyless:         KeylessRefuse,
			Mode:            ModeWAL,
			PollInterval:    Duration(500 * time.Millisecond),
		},
		Snapshot: Snapshot{Mode: SnapshotInitial, ChunkRows: 20000, ChunkBytes: 16 << 20, Readers: 2},
		Topics: Topics{
			Table:             "{prefix}.{schema}.{table}",
			Message:           "{prefix}.message",
			Partitions:        6,
			ReplicationFactor: -1,
			Create:            true,
		},
		Format: Format{
			Value: "json", Types: TypesPlain, Envelope: true, Deletes: DeletesTombstone, Tombstones: true,
			TOAST: TOASTOmit, TOASTMarker: "__walrelay_unchanged",
			Debezium: Debezium{
				DecimalHandling: "precise", TimePrecision: "adaptive", IntervalHandling: "numeric", BinaryHandling: "bytes",
				HstoreHandling: "json", Placeholder: "__debezium_unavailable_value",
			},
		},
		Kafka:  Kafka{Compression: "lz4", TransactionTimeout: Duration(60 * time.Second)},
		Batch:  Batch{MaxBytes: 8 << 20, MaxRecords: 20000, MaxDelay: Duration(5 * time.Millisecond)},
		Replay: Replay{RetainWAL: 1 << 30, RetainTime: Duration(6 * time.Hour)},
		DeadLetter: DeadLetter{
			Topic:   "{prefix}.dead-letter",
			On:      []string{"oversize", "route", "encode", "malformed"},
			OnError: OnErrorDeadLetter,
		},
		OnFenced:    OnFencedStandby,
		StopTimeout: Duration(10 * time.Second),
		Admin:       Admin{Listen: "127.0.0.1:8642"},
		Log:         Log{Level: "info", Format: LogJSON},
	}
}

// DefaultOutbox returns an outbox entry with every default set and no table.
func DefaultOutbox() Outbox {
	return Outbox{NullPayload: NullPayloadTombstone, Format: FormatPayload, CloudEvents: CloudEventsStructured, After: AfterKeep}
}

// FillNames sets what is still empty of the identity that follows the name:
// slot, publication, transactional id, checkpoint topic and topic prefix. Load
// and Parse have done so already; a Config built in code calls it once Name is
// set.
//
// Slot names allow no '-', so it becomes '_' there, and in the publication so
// that the two read alike. Two connectors named a-b and a_b would therefore
// meet in one slot; PostgreSQL lets only one of them in.
func (c *Config) FillNames() {
	under := strings.ReplaceAll(c.Name, "-", "_")
	fill := func(s *string, v string) {
		if *s == "" && c.Name != "" {
			*s = v
		}
	}
	fill(&c.Source.Slot, "walrelay_"+under)
	fill(&c.Source.Publication, "walrelay_"+under)
	fill(&c.Kafka.TransactionalID, "walrelay-"+c.Name)
	fill(&c.Kafka.CheckpointTopic, "_walrelay."+c.Name)
	fill(&c.Topics.Prefix, c.Name)
}

// Load reads, decodes and validates the file at path. env answers for ${VAR},
// as os.LookupEnv does. The error, if any, is a *Problems with everything that
// is wrong; the Config beside an error is not to be used.
func Load(path string, env func(string) (string, bool)) (Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Config{}, &Problems{list: []Problem{{
			Path:   path,
			Reason: "the file cannot be read: " + pathReason(err),
			Remedy: "give the path of a readable YAML file with -c",
		}}}
	}
	return Parse(data, env, os.ReadFile)
}

// Parse decodes and validates a file's text. env answers for ${VAR}, readFile
// for ${file:PATH}. Errors are as Load's.
func Parse(data []byte, env func(string) (string, bool), readFile func(string) ([]byte, error)) (Config, error) {
	c := Default()
	d := newDecoder(env, readFile)
	if root, ok := d.parse(data); ok {
		d.decode(root, &c)
		c.FillNames()
		// Validation sees the same list, so that it can pass over values that
		// could not even be decoded: one mistake, one problem.
		c.validate(d.problems, d.at)
	}
	if err := d.problems.err(); err != nil {
		return Config{}, err
	}
	return c, nil
}

// pathReason is what is wrong with a file, without its path, which the caller
// says already.
func pathReason(err error) string {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err.Error()
	}
	return fmt.Sprint(err)
}

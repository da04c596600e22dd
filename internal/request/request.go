package request

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// Options says which connector is asked.
type Options struct {
	// Connect opens connections to where the snapshots are read: the primary.
	Connect      replication.Connector
	Publications replication.PlanOptions
	Existing     bool                // publication-mode: existing
	Keys         map[string][]string // source.keys
	Kafka        router.ClientOptions
	Checkpoint   ckafka.Options
}

// UsageError is a mistake in the flags, as against one in the state of database or
// Kafka, which is a *checkpoint.Refusal.
type UsageError struct{ Err error }

// Error says what is wrong with the flags.
func (e *UsageError) Error() string { return e.Err.Error() }

func (e *UsageError) Unwrap() error { return e.Err }

// New makes a request out of what stands on the command line. A table is named
// schema.table as the catalog holds it, or without schema where it is in public.
func New(tables []string, where string, replace bool, now time.Time) (checkpoint.Request, error) {
	r := checkpoint.Request{Where: where, Replace: replace, At: now.UTC().Truncate(time.Microsecond)}
	var problems []error
	if len(tables) == 0 {
		problems = append(problems, errors.New("no table: name at least one with --table SCHEMA.TABLE"))
	}
	for _, name := range tables {
		schema, table, ok := strings.Cut(name, ".")
		if !ok {
			schema, table = "public", name
		}
		if schema == "" || table == "" {
			problems = append(problems, fmt.Errorf("--table %q: write schema.table, such as public.orders", name))
			continue
		}
		if full := schema + "." + table; !slices.Contains(r.Tables, full) {
			r.Tables = append(r.Tables, full)
		}
	}
	if where != "" && replace {
		problems = append(problems, errors.New("--replace with --where: replacing empties the whole table first, so that the rows outside of the condition would be lost; leave one of the two out"))
	}
	if len(problems) > 0 {
		return checkpoint.Request{}, &UsageError{errors.Join(problems...)}
	}
	r.ID = checkpoint.NewRequestID(now)
	return r, nil
}

// Send checks the request and writes it to the checkpoint topic, where the running
// connector, or the next one, takes it from. It gives the record's offset.
func Send(ctx context.Context, o Options, r checkpoint.Request) (offset int64, err error) {
	if err := o.captured(r.Tables); err != nil {
		return 0, err
	}
	db, err := o.checkDatabase(ctx, r)
	if err != nil {
		return 0, err
	}
	cl, err := router.NewAdminClient(o.Kafka)
	if err != nil {
		return 0, err
	}
	defer cl.Close()
	if err := ping(ctx, cl, o.Kafka.Brokers); err != nil {
		return 0, err
	}
	// It is not created here: a topic that was written to and holds no checkpoint would
	// keep the connector from its first start.
	if err := router.NewCatalog(cl).Ensure(ctx, []string{o.Checkpoint.Topic}, router.TopicSpec{}); err != nil {
		if checkpoint.IsRefusal(err) {
			return 0, refuseNotStarted("the checkpoint topic " + o.Checkpoint.Topic + " does not exist")
		}
		return 0, fmt.Errorf("look up the checkpoint topic: %w", err)
	}
	store := ckafka.NewStore(cl, o.Checkpoint)
	cp, found, err := store.Peek(ctx)
	switch {
	case err != nil:
		return 0, fmt.Errorf("read the checkpoint: %w", err)
	case !found:
		return 0, refuseNotStarted("the checkpoint topic " + o.Checkpoint.Topic + " holds no checkpoint")
	}
	if err := sameSource(cp.Source, db, o.Checkpoint.Topic); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if offset, err = store.Request(ctx, r); err != nil {
		return 0, fmt.Errorf("%w; it may be there all the same: look at /status before you ask again", err)
	}
	return offset, nil
}

// writeTimeout bounds the one write; the client itself would go on for ever.
const writeTimeout = time.Minute

// kafkaTimeout bounds the first contact with Kafka, as at a connector's start.
const kafkaTimeout = 15 * time.Second

func ping(ctx context.Context, cl interface{ Ping(context.Context) error }, brokers []string) error {
	ctx, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	if err := cl.Ping(ctx); err != nil {
		return fmt.Errorf("connect to Kafka at %s: %w; check kafka.brokers, kafka.tls and kafka.sasl, and that the brokers run", strings.Join(brokers, ","), err)
	}
	return nil
}

// captured refuses tables that the configuration does not capture, and outbox tables,
// whose rows would be events a second time.
func (o *Options) captured(tables []string) error {
	var usage, refused []error
	for _, name := range tables {
		schema, table, _ := strings.Cut(name, ".")
		switch {
		case slices.Contains(o.Publications.Outbox, name):
			refused = append(refused, &checkpoint.Refusal{
				What:   fmt.Sprintf("%s is an outbox table", name),
				Risk:   "its rows are events, and consumers would get each of them a second time",
				Remedy: "deliver a stretch of the stream again with walrelay replay; which rows become events at a first start is said by outbox[].snapshot",
			})
		case !o.Publications.Match(schema, table):
			advice := ""
			if strings.Contains(name, `"`) {
				advice = "; names are written without SQL quotes, as in 'My Schema.Order Items'"
			}
			usage = append(usage, fmt.Errorf("--table %s: source.tables does not capture it, so that it has no topic; add it there, and walrelay run reads it by itself%s", name, advice))
		}
	}
	if len(usage) > 0 {
		return &UsageError{errors.Join(append(usage, refused...)...)}
	}
	return errors.Join(refused...)
}

func sameSource(s checkpoint.Source, db replication.Database, topic string) error {
	if s.Database == db.Name && (db.SystemID == "" || s.SystemID == db.SystemID) {
		return nil
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("the checkpoint in %s is of database %s of cluster %s, and source.dsn leads to database %s of cluster %s", topic, s.Database, s.SystemID, db.Name, db.SystemID),
		Risk:   "another database's rows would go to the topics",
		Remedy: "name the database that the connector reads in source.dsn and source.primary-dsn",
	}
}

func refuseNotStarted(what string) error {
	return &checkpoint.Refusal{
		What:   what + ": the connector has not run yet",
		Risk:   "nobody would take the request",
		Remedy: "start walrelay run, which reads every captured table by itself (snapshot.mode: initial); ask for a snapshot when it has run once",
	}
}

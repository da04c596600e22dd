package verify

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/router/format"
	"github.com/walrelay/walrelay/snapshot"
)

// Options says what is compared.
type Options struct {
	Name string
	// Connect opens connections to the primary, where tables are read; Source to where the
	// slot is, which is the same but for a connector on a standby.
	Connect, Source replication.Connector
	Slot            string
	Publications    replication.PlanOptions
	Existing        bool // publication-mode: existing
	Kafka           router.ClientOptions
	Checkpoint      ckafka.Options
	Router          router.Options
	Format          Format
	// Backlogs says by outbox table which of the rows from before the first start were
	// sent: pending, all or none.
	Backlogs map[string]string
	// Messages are the prefixes of messages that are outboxes. No table has their events.
	Messages []string

	Tables  []string      // schema.table; none: every captured one
	Sample  int           // keys of each table; 0: all
	TempDir string        // for what does not fit into Memory; empty: the system's
	Memory  int64         // bytes of rows in memory at a time; 0: DefaultMemory
	Timeout time.Duration // how long to wait for the connector; 0: DefaultTimeout
	Logger  zerolog.Logger
}

// The defaults of Options.
const (
	DefaultMemory  = 256 << 20
	DefaultTimeout = time.Minute
)

// attempts bounds how often a table is looked at where what was found may be of
// transactions at the edge of the snapshot.
const attempts = 5

// UsageError is a mistake in the flags, as against one in the state of database or Kafka.
type UsageError struct{ Err error }

// Error says what is wrong with the flags.
func (e *UsageError) Error() string { return e.Err.Error() }

func (e *UsageError) Unwrap() error { return e.Err }

// run is one call of Run.
type run struct {
	o        Options
	conn     *replication.Conn
	names    []string // publications
	router   *router.Router
	resolver format.Resolver
	store    *ckafka.Store
	topics   *topicReader
	tables   []snapshot.Table
}

// Run compares the tables and gives what it found. A table that cannot be compared is
// refused in the report and keeps none of the others from it. An error is that of the whole
// run: a *checkpoint.Refusal, a *UsageError, or what failed.
func Run(ctx context.Context, o Options) (*Report, error) {
	began := time.Now()
	if o.Memory <= 0 {
		o.Memory = DefaultMemory
	}
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.TempDir == "" {
		o.TempDir = os.TempDir()
	}
	v := &run{o: o}
	conn, err := o.Connect(ctx)
	if err != nil {
		return nil, err
	}
	v.conn = conn
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // nothing hangs on it
	cl, err := router.NewAdminClient(o.Kafka)
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	v.topics = &topicReader{cl: cl, adm: kadm.NewClient(cl), bytes: int32(min(max(o.Memory/fetchShare, minFetch), maxFetch))}
	if err := v.prepare(ctx, router.NewCatalog(cl)); err != nil {
		return nil, err
	}
	chosen, err := v.choose()
	if err != nil {
		return nil, err
	}
	report := &Report{Name: o.Name}
	if len(o.Tables) == 0 {
		for _, prefix := range o.Messages {
			report.Notes = append(report.Notes, fmt.Sprintf("the outbox of messages %q is left out: its events are in no table that they could be compared with", prefix))
		}
	}
	for _, t := range chosen {
		r, err := v.table(ctx, t)
		if err != nil {
			return nil, err
		}
		report.Tables = append(report.Tables, *r)
		report.Differences += r.Differences()
		if r.Refused != "" {
			report.Refused++
		}
	}
	report.Seconds = time.Since(began).Seconds()
	return report, nil
}

// prepare looks at both sides, and refuses what cannot be compared at all.
func (v *run) prepare(ctx context.Context, catalog *router.Catalog) error {
	db, err := replication.ReadDatabase(ctx, v.conn)
	if err != nil {
		return err
	}
	if db.InRecovery {
		return &checkpoint.Refusal{
			What:   "the server is a standby, whose snapshots do not tell which transactions are in progress",
			Risk:   "what is on its way would look like a difference",
			Remedy: "name the primary in source.primary-dsn; the stream stays where it is",
		}
	}
	if err := v.ping(ctx); err != nil {
		return err
	}
	if err := catalog.Ensure(ctx, []string{v.o.Checkpoint.Topic}, router.TopicSpec{}); err != nil {
		if checkpoint.IsRefusal(err) {
			return v.notStarted("the checkpoint topic " + v.o.Checkpoint.Topic + " does not exist")
		}
		return fmt.Errorf("look up the checkpoint topic: %w", err)
	}
	v.store = ckafka.NewStore(v.topics.cl, v.o.Checkpoint)
	cp, err := v.checkpoint(ctx)
	if err != nil {
		return err
	}
	if s := cp.Source; s.Database != db.Name || db.SystemID != "" && s.SystemID != db.SystemID {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("the checkpoint in %s is of database %s of cluster %s, and source.dsn leads to database %s of cluster %s", v.o.Checkpoint.Topic, s.Database, s.SystemID, db.Name, db.SystemID),
			Risk:   "two databases would be compared that have nothing to do with each other",
			Remedy: "name the database that the connector reads in source.dsn and source.primary-dsn",
		}
	}
	v.o.Router.Types = func(oid uint32) (*format.Type, error) { return v.typeOf(ctx, oid) }
	if v.router, err = router.NewRouter(v.o.Router, catalog); err != nil {
		return err
	}
	if err := v.guard(ctx); err != nil {
		return err
	}
	v.names = []string{v.o.Publications.Publication}
	if !v.o.Existing {
		v.names = append(v.names, v.names[0]+replication.InsertSuffix)
	}
	published, err := snapshot.Tables(ctx, v.conn, v.names)
	if err != nil {
		return err
	}
	for _, p := range published {
		outbox := slices.Contains(v.o.Publications.Outbox, p.String())
		if !outbox && !v.o.Router.Tables(p.Schema, p.Name) {
			continue
		}
		t := p.Table(v.o.Router.Keys[p.String()])
		t.Outbox = outbox
		v.tables = append(v.tables, t)
	}
	return nil
}

// guard tells the router the tables that have hidden columns, as they are now.
func (v *run) guard(ctx context.Context) error {
	if len(v.o.Router.Columns) == 0 {
		return nil
	}
	tables, err := replication.Tables(ctx, v.conn)
	if err != nil {
		return err
	}
	var oids []uint32
	for _, t := range tables {
		if _, hidden := v.o.Router.Columns[t.String()]; hidden {
			oids = append(oids, t.OID)
		}
	}
	described, err := replication.Describe(ctx, v.conn, oids)
	if err != nil {
		return err
	}
	return v.router.Guard(slices.Collect(maps.Values(described))...)
}

// kafkaTimeout bounds the first contact with Kafka, as at a connector's start.
const kafkaTimeout = 15 * time.Second

func (v *run) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	if err := v.topics.cl.Ping(ctx); err != nil {
		return fmt.Errorf("connect to Kafka at %s: %w; check kafka.brokers, kafka.tls and kafka.sasl, and that the brokers run", strings.Join(v.o.Kafka.Brokers, ","), err)
	}
	return nil
}

// checkpoint reads the newest checkpoint.
func (v *run) checkpoint(ctx context.Context) (checkpoint.Checkpoint, error) {
	cp, found, err := v.store.Peek(ctx)
	switch {
	case err != nil:
		return cp, fmt.Errorf("read the checkpoint: %w", err)
	case !found:
		return cp, v.notStarted("the checkpoint topic " + v.o.Checkpoint.Topic + " holds no checkpoint")
	}
	return cp, nil
}

func (v *run) notStarted(what string) error {
	return &checkpoint.Refusal{
		What:   what + ": the connector has not run yet",
		Risk:   "there is nothing to compare with",
		Remedy: "start walrelay run, and verify when its snapshot is done; or correct kafka.checkpoint-topic",
	}
}

// typeOf describes a type that is not built in.
func (v *run) typeOf(ctx context.Context, oid uint32) (*format.Type, error) {
	if len(v.resolver.Missing([]uint32{oid})) > 0 {
		rows, err := replication.TextRows(ctx, v.conn, format.TypesQueryFor([]uint32{oid}))
		if err != nil {
			return nil, fmt.Errorf("look up type %d: %w", oid, err)
		}
		for _, values := range rows {
			row, err := format.ParseTypeRow(values)
			if err != nil {
				return nil, err
			}
			v.resolver.Add(row)
		}
	}
	return v.resolver.Type(oid), nil
}

// choose gives the tables that were asked for.
func (v *run) choose() ([]snapshot.Table, error) {
	if len(v.o.Tables) == 0 {
		if len(v.tables) == 0 {
			return nil, &checkpoint.Refusal{
				What:   fmt.Sprintf("publication %s publishes no captured table", v.names[0]),
				Risk:   "there is nothing to compare",
				Remedy: "correct source.tables, and start walrelay run, which publishes them",
			}
		}
		return v.tables, nil
	}
	var chosen []snapshot.Table
	var usage, refused []error
	for _, name := range v.o.Tables {
		schema, table, ok := strings.Cut(name, ".")
		if !ok {
			schema, table = "public", name
		}
		full := schema + "." + table
		at := slices.IndexFunc(v.tables, func(t snapshot.Table) bool { return t.String() == full })
		switch {
		case at >= 0:
			chosen = append(chosen, v.tables[at])
		case schema == "" || table == "":
			usage = append(usage, fmt.Errorf("--table %q: write schema.table, such as public.orders", name))
		case !slices.Contains(v.o.Publications.Outbox, full) && !v.o.Router.Tables(schema, table):
			usage = append(usage, fmt.Errorf("--table %s: source.tables does not capture it, so that it has no topic", name))
		default:
			refused = append(refused, &checkpoint.Refusal{
				What:   fmt.Sprintf("table %s is not published: it does not exist, is a partition of another, or joined source.tables since the connector started", full),
				Risk:   "there is nothing to compare with",
				Remedy: "correct --table (names are those of the catalog, in its spelling and without SQL quotes; of a partitioned table the root), or start walrelay run anew",
			})
		}
	}
	if len(usage) > 0 {
		return nil, &UsageError{errors.Join(append(usage, refused...)...)}
	}
	return chosen, errors.Join(refused...)
}

// table compares one table, again where the first look was not certain.
func (v *run) table(ctx context.Context, t snapshot.Table) (*TableReport, error) {
	began := time.Now()
	first := look{seed: maphash.MakeSeed(), digests: true}
	next := first
	var total TableReport
	for attempt := 1; ; attempt++ {
		next.final = attempt >= attempts
		c := &compared{run: v, table: t, look: next}
		c.announce()
		err := c.once(ctx)
		if errors.Is(err, errAgain) && attempt < attempts {
			if errors.Is(err, errAltered) {
				next = first
			}
			continue
		}
		if err == nil {
			total.join(c)
			var again bool
			if next, again = c.next(); again {
				continue
			}
		}
		if errors.Is(err, errAgain) {
			err = &checkpoint.Refusal{
				What:   fmt.Sprintf("%s is being read by a snapshot, or altered, each time it is looked at", t),
				Risk:   "rows that are on their way would look like differences",
				Remedy: "verify again when the snapshot is done (walrelay status, /status)",
			}
		}
		r := &total
		r.Table, r.Seconds = t.String(), time.Since(began).Seconds()
		if checkpoint.IsRefusal(err) {
			v.o.Logger.Warn().Err(err).Str("table", t.String()).Msg("refused")
			return &TableReport{Table: r.Table, Kind: c.kind(), Refused: err.Error(), Seconds: r.Seconds}, nil
		}
		if err != nil {
			return nil, fmt.Errorf("verify %s: %w", t, err)
		}
		c.notes(r)
		v.o.Logger.Info().Str("table", t.String()).Int64("rows", r.Rows).Int64("records", r.Records).
			Int64("differences", r.Differences()).Dur("took", time.Since(began)).Msg("compared")
		return r, nil
	}
}

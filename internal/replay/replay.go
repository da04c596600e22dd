package replay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/lookup"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// Options configures a replay.
type Options struct {
	DSN         string
	AppName     string
	ConnOptions []replication.ConnOption
	Slot        string // the connector's; the anchor is named after it
	Publication string // the connector's, where no checkpoint tells

	Kafka    router.ClientOptions
	Topics   router.TopicSpec
	Producer router.ProducerOptions // with the replay's own transactional id and checkpoint topic
	// Live is the connector's checkpoint topic, Own the replay's.
	Live, Own ckafka.Options
	Router    router.Options // with the replay's topics
	// LivePrefix and Prefix are what {prefix} is live, and in the replay.
	LivePrefix, Prefix string
	InPlace            bool

	Limits router.Limits
	Buffer int64

	ID     string
	Resume bool
	Tables []string // schema.table; empty: everything
	Range  Range
	DryRun bool

	// Progress is told how far the replay is, now and then; nil for nobody.
	Progress func(Progress)
	Logger   zerolog.Logger
}

// Range is what of the WAL is delivered: source transactions whose commit record ends after
// From and at or before To. A time counts where its LSN is 0: from the first transaction,
// in commit order, whose commit time is at or after FromTime, to the last one at or before
// ToTime. Without an end the range ends where the WAL ends at the start.
type Range struct {
	From, To         checkpoint.LSN
	FromTime, ToTime time.Time
}

// Progress is how far a replay is.
type Progress struct {
	At, From, To checkpoint.LSN
	Records      int64
}

// Part is how much of the range that is, from 0 to 1.
func (p Progress) Part() float64 {
	if p.To <= p.From {
		return 1
	}
	return min(1, float64(max(p.At, p.From)-p.From)/float64(p.To-p.From))
}

// recordRoom is more than a commit record takes: 16 MiB are four million subtransactions.
// So far back the stream begins, and what ends at or before the range's start is dropped: a
// server that is asked to begin in the middle of a record leaves that record out.
const recordRoom = 16 << 20

// session is one replay at work.
type session struct {
	o       Options
	conn    *replication.Conn
	lookup  *lookup.Lookup
	catalog *router.Catalog
	live    checkpoint.Checkpoint
	db      replication.Database
	// source is the slot whose copies the WAL is read through, and oldest is where it stands:
	// in a replay hold's temporary slot, so that nothing moves it meanwhile.
	source string
	oldest checkpoint.LSN
	hold   *replication.Stream
	named  []string       // publications that are named
	floor  checkpoint.LSN // before it they must not be
	base   context.Context

	from, to checkpoint.LSN
	stored   bool // the replay has a checkpoint to go on from
	router   *router.Router
	producer *router.Producer
	stream   *replication.Stream
	tables   tableFilter
	report   Report
	counts   counts
}

// Run replays, and gives what was delivered, or with DryRun what would be. A refusal
// (*checkpoint.Refusal) says what forbids it; a *UsageError that the range is none.
func Run(ctx context.Context, o Options) (Report, error) {
	s := &session{o: o, base: context.WithoutCancel(ctx), tables: newTableFilter(o.Tables)}
	defer s.close()
	report, err := s.run(ctx)
	if err != nil && s.stored && !checkpoint.IsRefusal(err) {
		err = fmt.Errorf("%w; what is delivered stays: the same command with --resume %s goes on", err, o.ID)
	}
	return report, err
}

func (s *session) run(ctx context.Context) (Report, error) {
	o := &s.o
	admin, err := router.NewAdminClient(o.Kafka)
	if err != nil {
		return Report{}, err
	}
	defer admin.Close()
	s.catalog = router.NewCatalog(admin)
	found := false
	if s.live, found, err = ckafka.NewStore(admin, o.Live).Look(ctx); err != nil {
		return Report{}, err
	}
	if !found {
		return Report{}, &checkpoint.Refusal{
			What:   fmt.Sprintf("there is no checkpoint in topic %s: the connector has never run", o.Live.Topic),
			Risk:   "nothing was delivered that could be delivered again",
			Remedy: "start the connector with walrelay run -c FILE",
		}
	}
	own := ckafka.NewStore(admin, o.Own)
	var begun checkpoint.Checkpoint
	if o.Resume {
		if begun, err = s.begun(ctx, own); err != nil {
			return Report{}, err
		}
		s.stored = !o.DryRun
	}
	if err := s.inspect(ctx); err != nil {
		return Report{}, err
	}
	cp, err := s.begin(ctx, begun)
	if err != nil {
		return Report{}, err
	}
	s.report = Report{
		ID: o.ID, From: s.from.String(), To: s.to.String(), DryRun: o.DryRun, InPlace: o.InPlace, Prefix: o.Prefix,
	}
	if !o.DryRun {
		if cp, err = s.fence(ctx, own, cp); err != nil {
			return Report{}, err
		}
	}
	if err := s.prepare(ctx, cp.Position.LSN); err != nil {
		return Report{}, err
	}
	if err := newLoop(s, cp).run(ctx); err != nil {
		return Report{}, err
	}
	s.report.Topics = s.counts.list()
	for _, t := range s.report.Topics {
		s.report.Records += t.Records
	}
	for _, t := range s.tables.unseen() {
		s.o.Logger.Warn().Str("table", t).Msg("the range has no change of this table: it is written schema.table, as the catalog spells it, and partitions come under their root's name")
	}
	return s.report, nil
}

func (s *session) close() {
	ctx, cancel := context.WithTimeout(s.base, 5*time.Second)
	defer cancel()
	if s.hold != nil {
		if err := s.hold.Close(ctx); err != nil { // the temporary slot goes with the connection
			s.o.Logger.Debug().Err(err).Msg("replication stream closed")
		}
	}
	if s.producer != nil {
		s.producer.Close()
	}
	if s.conn != nil {
		_ = s.conn.Close(ctx) // only the catalog was read
	}
}

// inspect reads server and anchor, refuses where the WAL is not the one that the connector
// delivered, and holds what the anchor keeps.
func (s *session) inspect(ctx context.Context) error {
	if err := s.connect(ctx); err != nil {
		return err
	}
	if err := replication.CheckSource(s.live.Source, s.db); err != nil {
		return err
	}
	if err := s.checkTimeline(ctx); err != nil {
		return err
	}
	name := replication.AnchorName(s.o.Slot)
	anchor, found, err := replication.ReadSlot(ctx, s.conn, name)
	if err != nil {
		return err
	}
	if !found || anchor.Invalidation != "" {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("the anchor slot %s is not there, or is lost, so that no WAL is kept to be read again", name),
			Remedy: "let the connector run with replay.retain-wal and replay.retain-time above 0: it makes the anchor, and replay reaches back to that moment; walrelay snapshot reads tables again as they are now",
		}
	}
	cfg, err := s.config()
	if err != nil {
		return err
	}
	s.source = replication.ReplaySlot(s.o.Slot, slotUnique())
	if s.hold, s.oldest, err = replication.OpenHold(ctx, cfg, name, s.source); err != nil {
		return err
	}
	return s.lookup.ReadKeys(ctx)
}

// connect opens the connection for the catalog and reads what the server says of itself.
func (s *session) connect(ctx context.Context) (err error) {
	o := &s.o
	if s.conn, err = replication.Connect(ctx, o.DSN, o.AppName, o.ConnOptions...); err != nil {
		return err
	}
	s.lookup = lookup.New(s.base, s.conn)
	cfg, err := s.config()
	if err != nil {
		return err
	}
	s.db, err = replication.ReadSource(ctx, s.conn, cfg)
	return err
}

func (s *session) config() (*pgconn.Config, error) {
	return replication.WalsenderConfig(s.o.DSN, s.o.AppName, s.o.ConnOptions...)
}

// checkTimeline refuses where the checkpoint is not in the past of the server: the LSNs of
// the one are not those of the other.
func (s *session) checkTimeline(ctx context.Context) error {
	cfg, err := s.config()
	if err != nil {
		return err
	}
	history, err := replication.ReadHistory(ctx, cfg, s.live.Source, s.db.Timeline)
	if err != nil {
		return err
	}
	return replication.CheckTimeline(s.live.Source, s.live.Position.LSN, s.db.Timeline, history)
}

// open reads the WAL beside the replay's own stream, from lsn on or a little before.
func (s *session) open(ctx context.Context, lsn checkpoint.LSN) (*replication.Stream, error) {
	cfg, err := s.config()
	if err != nil {
		return nil, err
	}
	o := s.streamOptions(lsn)
	o.Slot = replication.ReplaySlot(s.o.Slot, slotUnique())
	stream, confirmed, err := replication.OpenCopy(ctx, cfg, s.source, o)
	if err != nil {
		return nil, err
	}
	// Where the source is the anchor itself the connector may have moved it since.
	if confirmed > lsn {
		stream.Abort()
		s.oldest = confirmed
		return nil, s.refuseOld(lsn, time.Time{})
	}
	return stream, nil
}

// streamOptions are those of a stream that sends all that ends behind lsn.
func (s *session) streamOptions(lsn checkpoint.LSN) replication.StreamOptions {
	return replication.StreamOptions{
		Publications: s.named, From: max(s.oldest, s.floor, lsn-min(lsn, recordRoom)),
		Near: s.db.TransactionEnd, Keys: s.lookup.PrimaryKey, Buffer: s.o.Buffer,
	}
}

// name refuses a target that is a live topic, as far as that is known before a record is.
func (s *session) name() error {
	if s.o.InPlace {
		return nil
	}
	if s.o.Prefix == s.o.LivePrefix {
		return refuseLive("prefix " + s.o.Prefix)
	}
	return nil
}

func refuseLive(what string) error {
	return &checkpoint.Refusal{
		What:   what + " is the connector's own, and records of the past would stand behind newer ones in live topics",
		Risk:   "consumers that take the last record of a key would go back to an old state",
		Remedy: "choose another --topic-prefix, or say --in-place if that is what is meant",
	}
}

// fence takes the replay's own transactional id. A new replay writes down what it was asked
// for, before anything else; one that goes on finds where it was.
func (s *session) fence(ctx context.Context, store *ckafka.Store, cp checkpoint.Checkpoint) (checkpoint.Checkpoint, error) {
	if err := store.EnsureTopic(ctx); err != nil {
		return cp, err
	}
	var err error
	if s.producer, err = router.NewProducer(s.o.Producer, s.catalog, router.NewMetrics(nil)); err != nil {
		return cp, err
	}
	if err := s.producer.Fence(ctx); err != nil {
		return cp, err
	}
	found := false
	if s.o.Resume {
		// Invariant 3 (fence, then read): the one that was killed may have committed since.
		if cp, found, err = store.Load(ctx); err != nil {
			return cp, err
		}
		if !found {
			return cp, s.refuseUnknown()
		}
		if err := s.checkHeld(cp); err != nil {
			return cp, err
		}
	}
	cp.Source = s.db.Source()
	s.producer.Resume(cp)
	if s.o.Resume {
		return cp, nil
	}
	first := router.NewBatch(s.o.Limits)
	first.Advance(cp.Position, false)
	if err := s.producer.Deliver(ctx, first, &cp); err != nil {
		return cp, fmt.Errorf("write the replay's first checkpoint: %w", err)
	}
	s.stored = true
	return cp, nil
}

// prepare opens the stream and the routing.
func (s *session) prepare(ctx context.Context, at checkpoint.LSN) (err error) {
	o := s.streamOptions(at)
	o.Slot = s.source
	if err := s.hold.Start(ctx, o); err != nil {
		return err
	}
	s.stream = s.hold
	ro := s.o.Router
	ro.Database, ro.Replay = s.db.Name, s.o.ID
	types := s.lookup.Types(s.stream.TypeName)
	ro.Types, ro.TypesAt = types.Lookup, types.Current
	if s.router, err = router.NewRouter(ro, s.catalog); err != nil {
		return err
	}
	if _, err := s.lookup.Outboxes(ctx, s.router, ro.Outbox, s.live.Tables); err != nil {
		return err
	}
	return s.lookup.Guard(ctx, s.router, ro.Columns)
}

// topic makes a target known: it has as many partitions as its live twin.
func (s *session) topic(ctx context.Context, name string) error {
	if _, live := s.live.Partitions[name]; live && !s.o.InPlace {
		return refuseLive("topic " + name)
	}
	spec := s.o.Topics
	if !s.o.InPlace {
		for _, twin := range []string{strings.Replace(name, s.o.Prefix, s.o.LivePrefix, 1), strings.TrimPrefix(name, s.o.Prefix+".")} {
			if n := s.live.Partitions[twin]; n > 0 {
				spec.Partitions = n
				break
			}
		}
	}
	known := s.catalog.Ensure
	if s.o.DryRun {
		known = s.catalog.Preview
	}
	if err := known(ctx, []string{name}, spec); err != nil {
		return err
	}
	if s.o.InPlace && s.catalog.Lookup(name).Compacted {
		return refuseCompacted(name)
	}
	return nil
}

// refuseCompacted: compaction goes by offsets, and does not know of positions.
func refuseCompacted(topic string) error {
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("topic %s is compacted (cleanup.policy), so that of each key Kafka keeps the record that was written last, and --in-place writes those of the past behind newer ones", topic),
		Risk:   "the newest state of a key would be removed for every consumer, and keys that were deleted would come back",
		Remedy: "choose another --topic-prefix, or leave the topic's table out with --table; walrelay snapshot -c FILE --table T --replace sends a table as it is now to its topic",
	}
}

// route appends the records of a change; topics that are not known yet are looked up or
// created first.
func (s *session) route(ctx context.Context, c *replication.Change, b *router.Batch) error {
	if !s.tables.wants(c.Relation) {
		return nil
	}
	for {
		before := b.Records()
		err := s.router.Route(c, b)
		if err == nil {
			s.counts.add(b, before, c)
			return nil
		}
		var missing *router.MissingTopicError
		if !errors.As(err, &missing) {
			return err
		}
		if err := s.topic(ctx, missing.Topic); err != nil {
			var name *router.TopicNameError // a replay's topics are not the rows' to choose
			if errors.As(err, &name) && s.router.RejectTopic(c, missing.Topic, err) {
				continue // it becomes a dead letter
			}
			return err
		}
	}
}

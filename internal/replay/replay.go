package replay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/router/format"
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
	Tables map[string]bool // schema.table; empty: everything
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

// recordRoom is more than a commit record takes: 16 MiB are four million subtransactions.
// So far back the stream begins, and what ends at or before the range's start is dropped: a
// server that is asked to begin in the middle of a record leaves that record out.
const recordRoom = 16 << 20

// session is one replay at work.
type session struct {
	o       Options
	conn    *replication.Conn
	catalog *router.Catalog
	live    checkpoint.Checkpoint
	db      replication.Database
	anchor  replication.Slot
	oldest  checkpoint.LSN
	named   []string
	keys    map[uint32][]string
	base    context.Context

	from, to checkpoint.LSN
	waiting  bool // for the first transaction at or after FromTime
	router   *router.Router
	producer *router.Producer
	stream   *replication.Stream
	report   Report
	counts   counts
}

// Run replays, and gives what was delivered, or with DryRun what would be. A refusal
// (*checkpoint.Refusal) says what forbids it; a *UsageError that the range is none.
func Run(ctx context.Context, o Options) (Report, error) {
	s := &session{o: o, base: context.WithoutCancel(ctx)}
	defer s.close()
	admin, err := router.NewAdminClient(o.Kafka)
	if err != nil {
		return Report{}, err
	}
	defer admin.Close()
	s.catalog = router.NewCatalog(admin)
	found := false
	if s.live, found, err = ckafka.NewStore(admin, o.Live).Peek(ctx); err != nil {
		return Report{}, err
	}
	if !found {
		return Report{}, &checkpoint.Refusal{
			What:   fmt.Sprintf("there is no checkpoint in topic %s: the connector has never run", o.Live.Topic),
			Risk:   "nothing was delivered that could be delivered again",
			Remedy: "start the connector with walrelay run -c FILE",
		}
	}
	if err := s.inspect(ctx); err != nil {
		return Report{}, err
	}
	if err := s.bounds(ctx); err != nil {
		return Report{}, err
	}
	if err := s.name(); err != nil {
		return Report{}, err
	}
	s.report = Report{
		ID: o.ID, From: s.from.String(), To: s.to.String(), DryRun: o.DryRun, InPlace: o.InPlace, Prefix: o.Prefix,
	}
	cp := checkpoint.Checkpoint{Position: checkpoint.Position{LSN: s.from, CommitLSN: s.from}, Source: s.db.Source()}
	if !o.DryRun {
		if cp, err = s.fence(ctx, ckafka.NewStore(admin, o.Own), cp); err != nil {
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
	return s.report, nil
}

func (s *session) close() {
	ctx, cancel := context.WithTimeout(s.base, 5*time.Second)
	defer cancel()
	if s.stream != nil {
		if err := s.stream.Close(ctx); err != nil { // the temporary slot goes with the connection
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

// inspect reads server and anchor, and refuses where the WAL is not the one that the
// connector delivered.
func (s *session) inspect(ctx context.Context) (err error) {
	o := &s.o
	if s.conn, err = replication.Connect(ctx, o.DSN, o.AppName, o.ConnOptions...); err != nil {
		return err
	}
	if s.db, err = replication.ReadDatabase(ctx, s.conn); err != nil {
		return err
	}
	cfg, err := replication.WalsenderConfig(o.DSN, o.AppName, o.ConnOptions...)
	if err != nil {
		return err
	}
	side, err := replication.Open(ctx, cfg)
	if err != nil {
		return err
	}
	defer side.Abort()
	system, err := side.Identify(ctx)
	if err != nil {
		return err
	}
	s.db.SystemID = system.SystemID
	if was := s.live.Source; was.SystemID != s.db.SystemID || was.Database != s.db.Name {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("the checkpoint belongs to database %q of cluster %s, and source.dsn leads to %q of %s", was.Database, was.SystemID, s.db.Name, s.db.SystemID),
			Risk:   "LSNs of two clusters cannot be compared, so other changes would be delivered",
			Remedy: "point source.dsn to the server that the connector reads",
		}
	}
	if s.live.Source.Timeline != s.db.Timeline && s.db.Timeline > 1 {
		content, err := side.TimelineHistory(ctx, s.db.Timeline)
		if err != nil {
			return err
		}
		history, err := replication.ParseTimelineHistory(content)
		if err != nil {
			return err
		}
		if err := replication.CheckTimeline(s.live.Source, s.live.Position.LSN, s.db.Timeline, history); err != nil {
			return err
		}
	}
	name := replication.AnchorName(o.Slot)
	found := false
	if s.anchor, found, err = replication.ReadSlot(ctx, s.conn, name); err != nil {
		return err
	}
	if !found || s.anchor.Invalidation != "" {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("the anchor slot %s is not there, or is lost, so that no WAL is kept to be read again", name),
			Remedy: "let the connector run with replay.retain-wal and replay.retain-time above 0: it makes the anchor, and replay reaches back to that moment; walrelay snapshot reads tables again as they are now",
		}
	}
	s.oldest = s.anchor.ConfirmedFlush
	for _, p := range s.live.Publications {
		if p.Horizon > 0 {
			s.named = append(s.named, p.Name)
		}
	}
	s.keys, err = replication.PrimaryKeys(ctx, s.conn)
	return err
}

// open streams from a copy of the anchor, from lsn on or a little before.
func (s *session) open(ctx context.Context, lsn checkpoint.LSN) (*replication.Stream, error) {
	cfg, err := replication.WalsenderConfig(s.o.DSN, s.o.AppName, s.o.ConnOptions...)
	if err != nil {
		return nil, err
	}
	start := s.oldest
	if lsn > recordRoom {
		start = max(start, lsn-recordRoom)
	}
	stream, _, err := replication.OpenCopy(ctx, cfg, replication.AnchorName(s.o.Slot), replication.StreamOptions{
		Slot: replication.ReplaySlot(s.o.Slot, slotUnique()), Publications: s.named, From: start,
		Near: s.db.TransactionEnd, Keys: s.primaryKey, Buffer: s.o.Buffer,
	})
	return stream, err
}

// lookupTimeout bounds a catalog query that the stream waits for.
const lookupTimeout = 30 * time.Second

func (s *session) primaryKey(oid uint32) ([]string, error) {
	if names, ok := s.keys[oid]; ok {
		delete(s.keys, oid) // the next RELATION comes after DDL
		return names, nil
	}
	ctx, cancel := context.WithTimeout(s.base, lookupTimeout)
	defer cancel()
	return replication.PrimaryKey(ctx, s.conn, oid)
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

// fence takes the replay's own transactional id and finds where it goes on.
func (s *session) fence(ctx context.Context, store *ckafka.Store, first checkpoint.Checkpoint) (cp checkpoint.Checkpoint, err error) {
	if s.o.Resume {
		if _, found, err := store.Peek(ctx); err != nil || !found {
			return cp, &checkpoint.Refusal{
				What:   fmt.Sprintf("replay %s has no checkpoint in topic %s: there was none of that id, or it ended before it delivered anything", s.o.ID, s.o.Own.Topic),
				Remedy: "run the replay without --resume",
				Err:    err,
			}
		}
	}
	if err := store.EnsureTopic(ctx); err != nil {
		return cp, err
	}
	if s.producer, err = router.NewProducer(s.o.Producer, s.catalog, router.NewMetrics(nil)); err != nil {
		return cp, err
	}
	if err := s.producer.Fence(ctx); err != nil {
		return cp, err
	}
	cp, found, err := store.Load(ctx)
	if err != nil {
		return cp, err
	}
	switch {
	case !found:
		cp = first
	case cp.Position.LSN < s.oldest:
		return cp, s.refuseOld(cp.Position.LSN, time.Time{})
	case cp.Position.LSN < s.from && cp.Position.Cut.IsZero():
		return cp, &UsageError{fmt.Sprintf("replay %s stands at %s, before --from-lsn %s: resume it with the range that it began with", s.o.ID, cp.Position.LSN, s.from)}
	}
	s.waiting = s.waiting && !found // what is delivered began where it had to
	cp.Source = s.db.Source()
	s.producer.Resume(cp)
	return cp, nil
}

// prepare opens the stream and the routing.
func (s *session) prepare(ctx context.Context, at checkpoint.LSN) (err error) {
	ro := s.o.Router
	ro.Database, ro.Replay = s.db.Name, s.o.ID
	if s.stream, err = s.open(ctx, at); err != nil {
		return err
	}
	types := &format.Cache{TypeName: s.stream.TypeName, Ask: func(queries ...string) ([][][][]byte, error) {
		ctx, cancel := context.WithTimeout(s.base, lookupTimeout)
		defer cancel()
		return replication.TextResults(ctx, s.conn, queries...)
	}}
	ro.Types, ro.TypesAt = types.Lookup, types.Current
	if s.router, err = router.NewRouter(ro, s.catalog); err != nil {
		return err
	}
	return s.guard(ctx)
}

// guard tells the router of the tables whose columns are hidden, before anything is sent.
func (s *session) guard(ctx context.Context) error {
	if len(s.o.Router.Columns) == 0 {
		return nil
	}
	tables, err := replication.Tables(ctx, s.conn)
	if err != nil {
		return err
	}
	var oids []uint32
	for _, t := range tables {
		if _, hidden := s.o.Router.Columns[t.String()]; hidden {
			oids = append(oids, t.OID)
		}
	}
	described, err := replication.Describe(ctx, s.conn, oids)
	if err != nil {
		return err
	}
	return s.router.Guard(slices.Collect(maps.Values(described))...)
}

// topic makes a target known: it has as many partitions as its live twin.
func (s *session) topic(ctx context.Context, name string) error {
	if _, live := s.live.Partitions[name]; live && !s.o.InPlace {
		return refuseLive("topic " + name)
	}
	spec := s.o.Topics
	if rest, ok := strings.CutPrefix(name, s.o.Prefix); ok && !s.o.InPlace {
		for _, twin := range []string{s.o.LivePrefix + rest, strings.TrimPrefix(rest, ".")} {
			if n := s.live.Partitions[twin]; n > 0 {
				spec.Partitions = n
				break
			}
		}
	}
	if s.o.DryRun {
		return s.catalog.Preview(ctx, []string{name}, spec)
	}
	return s.catalog.Ensure(ctx, []string{name}, spec)
}

// route appends the records of a change; topics that are not known yet are looked up or
// created first.
func (s *session) route(ctx context.Context, c *replication.Change, b *router.Batch) error {
	if len(s.o.Tables) > 0 && (c.Relation == nil || !s.o.Tables[c.Relation.Schema+"."+c.Relation.Name]) {
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
			var name *router.TopicNameError
			if errors.As(err, &name) && s.router.RejectTopic(c, missing.Topic, err) {
				continue // it becomes a dead letter
			}
			return err
		}
	}
}

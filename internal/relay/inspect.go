package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/lookup"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// inspect connects to both sides and reads the facts that decide whether a start is
// possible at all.
func (s *session) inspect(ctx context.Context) (err error) {
	o := &s.r.o
	if s.conn, err = s.r.connect(ctx); err != nil {
		return err
	}
	s.lookup = lookup.New(s.r.base, s.conn)
	s.r.sourceReached()
	if s.admin, err = router.NewAdminClient(o.Kafka); err != nil {
		return fmt.Errorf("make Kafka client: %w", err)
	}
	if err := s.reachKafka(ctx); err != nil {
		return err
	}
	s.store = ckafka.NewStore(s.admin, o.Checkpoint)
	s.catalog = router.NewCatalog(s.admin)
	if err := s.store.EnsureTopic(ctx); err != nil {
		return onKafka(err)
	}
	f := &s.facts
	f.Managed, f.SlotName, f.Publication, f.CheckpointTopic = !o.Existing, o.Slot, o.Publications.Publication, o.Checkpoint.Topic
	if err := s.readDatabase(ctx); err != nil {
		return err
	}
	if o.UntilCaughtUp && s.r.target == 0 {
		// What is committed now, and nothing later, is what has to arrive.
		s.r.target = f.Database.WALEnd
		s.target = s.r.target
	}
	if err := s.readSlot(ctx); err != nil {
		return err
	}
	if _, f.AnchorFound, err = replication.ReadSlot(ctx, s.conn, replication.AnchorName(o.Slot)); err != nil {
		return err
	}
	if f.Checkpoint, _, err = s.store.Peek(ctx); err != nil {
		return onKafka(err)
	}
	if f.PublicationFound && f.SlotFound && f.Checkpoint.IsZero() {
		if f.Order, err = replication.ReadOrder(ctx, s.r.connect, f.Publication, f.SlotName); err != nil {
			return err
		}
	}
	if err := s.planTables(ctx); err != nil {
		return err
	}
	if err := replication.VerifyStart(*f); err != nil {
		return err
	}
	return errors.Join(s.checkReadable(ctx), s.checkAfter(ctx))
}

// checkTables tries what the configuration says of single tables on their columns, so
// that a mapping that cannot work ends the start and not the stream at its first row.
func (s *session) checkTables(ctx context.Context, tables []replication.Table) error {
	var oids []uint32
	inserts := map[uint32]bool{}
	for _, t := range tables {
		events := slices.Contains(s.r.o.Publications.Outbox, t.String())
		_, keyed := s.r.o.Router.Keys[t.String()]
		if _, hidden := s.r.o.Router.Columns[t.String()]; events || keyed || hidden {
			oids = append(oids, t.OID)
			inserts[t.OID] = !t.Updatable
		}
	}
	absent, err := s.checkColumns(ctx, tables)
	if err != nil || len(oids) == 0 {
		return errors.Join(absent, err)
	}
	described, err := replication.Describe(ctx, s.conn, oids)
	if err != nil {
		return err
	}
	trial, err := router.NewRouter(s.r.o.Router, s.catalog)
	if err != nil {
		return err
	}
	problems := []error{absent}
	for _, oid := range oids {
		rel := described[oid]
		if rel == nil {
			continue // dropped this moment
		}
		recognised, err := trial.Check(rel, inserts[oid])
		if err != nil {
			problems = append(problems, err)
		} else if len(recognised) > 0 && !s.r.saidOutbox {
			s.log.Info().Str("table", rel.Schema+"."+rel.Name).Strs("columns", recognised).Msg("outbox table recognised")
		}
		if err == nil && len(recognised) > 0 {
			problems = append(problems, s.checkMoves(ctx, trial, rel), s.checkSent(ctx, trial, rel))
		}
	}
	s.r.saidOutbox = true
	return errors.Join(problems...)
}

// checkMoves refuses an outbox table whose rows move to another partition when they are
// marked, by us or by the application: PostgreSQL writes that as a delete and an insert, and
// an insert is an event.
func (s *session) checkMoves(ctx context.Context, trial *router.Router, rel *replication.Relation) error {
	t, err := outboxTable(ctx, s.conn, trial, rel, outbox.Mark)
	if err != nil || t.Mark == "" {
		return err
	}
	columns, err := replication.PartitionColumns(ctx, s.conn, rel.OID)
	if err != nil || !slices.Contains(columns, t.Mark) {
		return err
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("outbox table %s is partitioned by %s, which marks its published rows", t.String(), t.Mark),
		Risk:   "a row that is marked moves to another partition, which is an insert in the WAL: each event would be sent twice",
		Remedy: "partition the table by a column that stays as it is, such as created_at; or give it a column published_at timestamptz, which is the mark then",
	}
}

// readDatabase reads what the server says of itself.
func (s *session) readDatabase(ctx context.Context) error {
	cfg, err := replication.WalsenderConfig(s.r.o.DSN, s.r.o.AppName, s.r.o.ConnOptions...)
	if err != nil {
		return err
	}
	s.facts.Database, err = replication.ReadSource(ctx, s.conn, cfg)
	return err
}

func (s *session) openStream(ctx context.Context) (*replication.Stream, error) {
	cfg, err := replication.WalsenderConfig(s.r.o.DSN, s.r.o.AppName, s.r.o.ConnOptions...)
	if err != nil {
		return nil, err
	}
	return replication.Open(ctx, cfg)
}

// reachKafka makes sure that brokers answer, so that a wrong address is an error of the
// start and not a hang in the middle of it.
func (s *session) reachKafka(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	if err := s.admin.Ping(ctx); err != nil {
		return onKafka(fmt.Errorf("connect to Kafka at %s: %w; check kafka.brokers, kafka.tls and kafka.sasl, and that the brokers run", strings.Join(s.r.o.Kafka.Brokers, ","), err))
	}
	s.r.kafkaReached()
	return nil
}

// kafkaTimeout bounds one attempt to reach Kafka at a start.
const kafkaTimeout = 15 * time.Second

func (s *session) readSlot(ctx context.Context) (err error) {
	f := &s.facts
	if f.Slot, f.SlotFound, err = replication.ReadSlot(ctx, s.conn, s.r.o.Slot); err != nil {
		return err
	}
	_, found, err := replication.ReadPublication(ctx, s.conn, f.Publication)
	if err != nil {
		return err
	}
	f.PublicationFound = found
	return nil
}

// planTables reads which tables are to be published, or whether the existing
// publication covers them.
func (s *session) planTables(ctx context.Context) error {
	tables, err := replication.Tables(ctx, s.conn)
	if err != nil {
		return err
	}
	if err := s.checkTables(ctx, tables); err != nil {
		return err
	}
	known := map[uint32]string{}
	for oid, p := range s.facts.Checkpoint.Tables {
		known[oid] = p.Table
	}
	if err := refuseRenamed(tables, s.r.o.Publications.Outbox, known); err != nil {
		return err
	}
	if s.r.o.Existing {
		if !s.facts.PublicationFound {
			return nil // VerifyStart says so
		}
		cover, err := replication.Cover(ctx, s.conn, tables, s.r.o.Publications)
		if err != nil {
			return err
		}
		s.r.setWarnings(s.log, cover.Warnings())
		return cover.Refusal()
	}
	if s.plan, err = replication.NewPlan(tables, s.r.o.Publications); err != nil {
		return err
	}
	s.r.setWarnings(s.log, s.plan.Warnings)
	trial, err := router.NewRouter(s.r.o.Router, s.catalog)
	if err != nil {
		return err
	}
	_, err = s.claimTopics(trial)
	return err
}

// claimTopics gives the topics of the planned tables, and refuses where two meet.
func (s *session) claimTopics(r *router.Router) ([]string, error) {
	var topics []string
	for _, t := range s.r.o.plannedTables(s.plan) {
		if err := r.ClaimTopic(t.OID, t.Schema, t.Name); err != nil {
			return nil, err
		}
		topics = append(topics, s.r.o.Router.TableTopic(t.Schema, t.Name))
	}
	return topics, nil
}

// refuseRenamed refuses where an outbox table of the configuration, names, is not there, and one
// that was it, by known, has another name, which the configuration does not have: the table
// would leave the publication, and what is written to it would not be sent.
func refuseRenamed(tables []replication.Table, names []string, known map[uint32]string) error {
	there := map[string]bool{}
	for _, t := range tables {
		there[t.String()] = true
	}
	var problems []error
	for _, t := range tables {
		was := known[t.OID]
		if was == "" || there[was] || !slices.Contains(names, was) || slices.Contains(names, t.String()) {
			continue
		}
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("outbox table %s was renamed to %s", was, t),
			Risk:   "events that are written to it would not be sent",
			Remedy: fmt.Sprintf("set table: %s in its outbox entry, and start again: nothing is lost, or sent twice", t),
		})
	}
	return errors.Join(problems...)
}

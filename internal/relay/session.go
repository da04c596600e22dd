package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/router/format"
	"github.com/walrelay/walrelay/snapshot"
)

// session is one pass from invariant 3's first step to the end of the stream. Every
// lost connection and every unknown outcome ends it; the next one knows nothing of it
// and reads the checkpoint again.
type session struct {
	r   *Relay
	log zerolog.Logger

	conn     *replication.Conn // for the catalog
	admin    *router.Client    // for topics and the checkpoint topic
	store    *ckafka.Store
	catalog  *router.Catalog
	stream   *replication.Stream
	producer *router.Producer
	router   *router.Router

	facts   replication.Facts
	plan    replication.Plan
	source  checkpoint.Source
	near    checkpoint.XID
	created bool           // the slot was created in this session
	start   checkpoint.LSN // where a slot without a checkpoint begins
	target  checkpoint.LSN // until-caught-up: the end; 0 without
	named   []string       // publications that START_REPLICATION names
	keys    map[uint32][]string
	waits   waits
	targets []*outbox.Target // outbox tables whose delivered rows are marked or deleted
	primary *primary         // nil where tables are read at the stream's source
	watch   *treeWatch
	// slotSnapshot is the MVCC snapshot at the creation of the slot, in this session.
	slotSnapshot string
	// before are the tables that were published before that.
	before map[uint32]bool
}

// newSession makes a session; run must be called.
func newSession(r *Relay) *session {
	return &session{r: r, log: r.o.Logger, target: r.target}
}

// run is the start in its order, and the stream.
func (s *session) run(ctx context.Context) error {
	defer s.close(ctx)
	s.r.setPhase(PhaseConnecting)
	if s.r.o.Rewind != nil && !s.r.rewound {
		if err := s.r.o.Rewind(ctx); err != nil {
			return err
		}
		s.r.rewound = true
	}
	// Nothing is created or changed before all refusals that can be seen have been.
	if err := s.inspect(ctx); err != nil {
		return err
	}
	if err := s.prepareSource(ctx); err != nil {
		return err
	}
	// Invariant 3: the slot is the lease; fence, then read.
	if err := s.takeSlot(ctx); err != nil {
		return err
	}
	if err := s.fence(ctx); err != nil {
		return err
	}
	cp, err := s.resume(ctx)
	if err != nil {
		return err
	}
	if err := s.prepareRouting(ctx); err != nil {
		return err
	}
	return s.relay(ctx, cp)
}

// close gives everything back, in the reverse order of the start. The stream goes
// before the producer: with it the lease is given up.
func (s *session) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if s.stream != nil {
		if err := s.stream.Close(ctx); err != nil {
			s.log.Debug().Err(err).Msg("replication stream closed")
		}
	}
	if s.producer != nil {
		s.producer.Close()
	}
	if s.admin != nil {
		s.admin.Close()
	}
	if s.conn != nil {
		if err := s.conn.Close(ctx); err != nil {
			s.log.Debug().Err(err).Msg("database connection closed")
		}
	}
}

// prepareSource creates publications and slot on a first start: publications first,
// because decoding looks them up in the catalog of each change's own time.
func (s *session) prepareSource(ctx context.Context) error {
	f := &s.facts
	if f.SlotFound {
		return nil
	}
	s.r.setPhase(PhaseCreatingSlot)
	if f.Managed {
		if err := s.syncPublications(ctx); err != nil {
			return err
		}
	}
	if err := s.publishedBefore(ctx); err != nil {
		return err
	}
	s.log.Info().Str("slot", s.r.o.Slot).Msg("creating the replication slot; it begins where it is created")
	standby := s.facts.Database.InRecovery // where no slot is failover-enabled
	slot, err := replication.CreateSlot(ctx, s.r.connect, s.r.o.Slot, !standby, s.reportWaiting)
	if err != nil {
		return fmt.Errorf("create slot %s: %w", s.r.o.Slot, err)
	}
	s.created = true
	if !standby { // whose snapshots do not list what runs
		s.slotSnapshot = slot.Snapshot
	}
	s.log.Info().Str("slot", s.r.o.Slot).Stringer("lsn", slot.LSN).Msg("replication slot created")
	return s.readSlot(ctx)
}

// reportWaiting says for which transactions the creation of the slot waits.
func (s *session) reportWaiting(waiting []replication.RunningTransaction) {
	list := make([]string, len(waiting))
	for i, t := range waiting {
		list[i] = t.String()
	}
	s.r.setWaiting(list)
	s.log.Warn().Str("slot", s.r.o.Slot).Strs("transactions", list).
		Msg("creating the slot waits until these transactions end: commit or roll them back, or end them with pg_terminate_backend(pid)")
}

func (s *session) syncPublications(ctx context.Context) error {
	changes, err := replication.Sync(ctx, s.conn, s.plan)
	if err != nil {
		return err
	}
	s.r.logChanges(s.log, changes)
	return nil
}

// publications decides which publications can be named, and makes those that are
// missing. One that was made later than the slot waits for its horizon.
func (s *session) publications() []checkpoint.Publication {
	names := []string{s.r.o.Publications.Publication}
	if !s.r.o.Existing {
		names = append(names, names[0]+replication.InsertSuffix)
	}
	var list []checkpoint.Publication
	for _, name := range names {
		p := checkpoint.Publication{Name: name}
		for _, known := range s.facts.Checkpoint.Publications {
			if known.Name == name {
				p = known
			}
		}
		list = append(list, p)
	}
	return list
}

// nameable tells whether START_REPLICATION may name a publication.
func (s *session) nameable(ctx context.Context, p checkpoint.Publication) (bool, error) {
	switch {
	case s.created:
		return true, nil // made before the slot, in this very session
	case p.Horizon > 0 && s.facts.Slot.ConfirmedFlush >= p.Horizon:
		return true, nil
	case p.Name == s.facts.Publication:
		// VerifyStart has refused one that is known to be younger. Should an older one
		// not be proven, the server says so before anything is lost (ReadOrder).
		return true, nil
	case !s.facts.Checkpoint.Position.Cut.IsZero():
		// The changes of the cut transaction were counted without it, and seq must count
		// the same the second time.
		return false, nil
	case !s.facts.Checkpoint.IsZero():
		// Made while the slot was in use, unless the catalog proves otherwise.
		return replication.ProvablyOlder(ctx, s.conn, p.Name, s.facts.SlotName)
	}
	_, found, err := replication.ReadPublication(ctx, s.conn, p.Name)
	if err != nil || !found {
		return false, err
	}
	// It is there, like the slot, and no checkpoint is: a first start that was ended
	// before it wrote one, or a slot and publications that somebody made.
	order, err := replication.ReadOrder(ctx, s.r.connect, p.Name, s.facts.SlotName)
	return order != replication.OrderSlotFirst, err
}

// takeSlot waits for the lease. While another instance holds it this one is a standby
// and touches nothing: it does not fence, it does not alter publications.
func (s *session) takeSlot(ctx context.Context) (err error) {
	if s.r.o.Takeover && !s.r.tookOver {
		s.r.tookOver = true
		pid, err := replication.TerminateHolder(ctx, s.conn, s.r.o.Slot)
		if err != nil {
			return err
		}
		s.log.Warn().Int32("pid", pid).Msg("ended the walsender that held the slot (--takeover)")
	}
	wait := newBackoff(200*time.Millisecond, 2*time.Second)
	for waited := false; ; waited = true {
		if err := s.nameAgain(ctx, waited); err != nil {
			return err
		}
		if s.stream, err = s.openStream(ctx); err != nil {
			return err
		}
		err = s.stream.Start(ctx, replication.StreamOptions{
			Slot: s.r.o.Slot, Publications: s.named, Near: s.near, Keys: s.primaryKey, Buffer: s.r.o.Buffer,
		})
		if err == nil {
			break
		}
		s.stream.Abort()
		s.stream = nil
		if !errors.Is(err, replication.ErrSlotActive) {
			return err
		}
		s.r.setPhase(PhaseStandby)
		if !waited {
			s.log.Info().Str("slot", s.r.o.Slot).AnErr("held", err).Msg("standing by: another instance holds the slot; taking over when it lets go")
		}
		if err := wait.sleep(ctx); err != nil {
			return err
		}
	}
	if s.keys, err = replication.PrimaryKeys(ctx, s.conn); err != nil {
		return err
	}
	s.log.Info().Str("slot", s.r.o.Slot).Strs("publications", s.named).Msg("holding the slot")
	return nil
}

// nameAgain decides which publications to name. What a standby found out before it
// waited, maybe for days, is not what holds when it takes over: the holder may have
// made a publication nameable, and moved the slot and the transaction ids on.
func (s *session) nameAgain(ctx context.Context, waited bool) (err error) {
	if waited {
		s.created, s.slotSnapshot = false, "" // whoever made the slot, another instance has used it since
		if err := s.readDatabase(ctx); err != nil {
			return err
		}
		if err := s.readSlot(ctx); err != nil {
			return err
		}
		if s.facts.Checkpoint, _, err = s.store.Peek(ctx); err != nil {
			return onKafka(err)
		}
	}
	s.near = s.facts.Database.TransactionEnd
	s.named = nil
	for _, p := range s.publications() {
		ok, err := s.nameable(ctx, p)
		if err != nil {
			return err
		}
		if ok {
			s.named = append(s.named, p.Name)
		}
	}
	return nil
}

// primaryKey looks a table's key up. The keys that were read at the start serve for a
// table's first RELATION message; another one comes after DDL, which may have changed
// the key, and asks anew.
func (s *session) primaryKey(oid uint32) ([]string, error) {
	if names, ok := s.keys[oid]; ok {
		delete(s.keys, oid)
		return names, nil
	}
	ctx, cancel := context.WithTimeout(s.r.base, lookupTimeout)
	defer cancel()
	return replication.PrimaryKey(ctx, s.conn, oid)
}

// lookupTimeout bounds a catalog query that the stream waits for.
const lookupTimeout = 30 * time.Second

// fence shuts older instances out. Only the holder of the slot gets here.
func (s *session) fence(ctx context.Context) (err error) {
	s.r.setPhase(PhaseFencing)
	s.producer, err = router.NewProducer(s.r.o.Producer, s.catalog, s.r.routerMetrics)
	if err != nil {
		return err
	}
	return onKafka(s.producer.Fence(ctx))
}

// explainFence tells a takeover from a transaction that the broker ended because it
// stood open for longer than transaction-timeout (Kafka stood still): the answer is the
// same, but whoever holds the slot cannot have been taken over.
func (s *session) explainFence(err error) error {
	if !errors.Is(err, router.ErrFenced) {
		return err
	}
	ctx, cancel := context.WithTimeout(s.r.base, lookupTimeout)
	defer cancel()
	slot, found, serr := replication.ReadSlot(ctx, s.conn, s.r.o.Slot)
	if serr != nil || !found || uint32(slot.ActivePID) != s.stream.PID() {
		return err
	}
	return fmt.Errorf("transaction ended by Kafka: it stood open for longer than kafka.transaction-timeout: %v", err) //nolint:errorlint // no takeover, so ErrFenced must not be found
}

// resume reads the checkpoint, up to the end of its log, and refuses where it does not
// fit what the server says (DESIGN, invariant 7).
func (s *session) resume(ctx context.Context) (checkpoint.Checkpoint, error) {
	s.r.setPhase(PhaseLoading)
	var none checkpoint.Checkpoint
	f := &s.facts
	cp, found, err := s.store.Load(ctx)
	if err != nil {
		return none, onKafka(err)
	}
	f.Checkpoint = cp
	if !found {
		virgin, reason, err := s.store.Virgin(ctx)
		if err != nil {
			return none, onKafka(err)
		}
		// A topic that was deleted under a running connector is as new as one that
		// never was; to adopt the slot would repeat what is delivered of a cut transaction.
		f.CheckpointTopicUsed = !virgin || s.r.resumed
		if !virgin {
			s.log.Warn().Str("topic", f.CheckpointTopic).Str("found", reason).Msg("no checkpoint in a checkpoint topic that was written to")
		}
	}
	if err := s.readDatabase(ctx); err != nil {
		return none, err
	}
	if err := s.readSlot(ctx); err != nil {
		return none, err
	}
	if err := s.readTimeline(ctx); err != nil {
		return none, err
	}
	if err := replication.VerifyResume(*f); err != nil {
		return none, err
	}
	s.source = f.Database.Source()
	publications := s.publications()
	// The checkpoint may know more than the look before the lease: a publication that the
	// holder before us named has to be named by us from the first change on.
	if found && s.waitingPublications(publications, f.Slot.ConfirmedFlush) {
		return none, errPublicationsReady
	}
	// And one that it did not name must not be, in the middle of a transaction.
	if !cp.Position.Cut.IsZero() {
		for _, p := range publications {
			if p.Horizon == 0 && p.Name != f.Publication && slices.Contains(s.named, p.Name) {
				return none, errPublicationsReady
			}
		}
	}
	if !found {
		s.start = f.Slot.ConfirmedFlush
		cp = checkpoint.Checkpoint{Position: checkpoint.Position{LSN: s.start, CommitLSN: s.start}, SlotSnapshot: s.slotSnapshot}
		s.sayFresh()
	}
	// A publication that this session names is one that the next may name too: all that
	// is decoded from here on has been asked for with it, or the stream has ended.
	for i := range publications {
		if publications[i].Horizon == 0 && slices.Contains(s.named, publications[i].Name) {
			publications[i].Horizon = f.Slot.ConfirmedFlush
		}
	}
	cp.Source, cp.Publications = s.source, publications
	s.producer.Resume(cp)
	if !found {
		// The first checkpoint goes out alone and at once, so that the time in which a
		// restart would have to adopt the slot is short.
		first := router.NewBatch(s.r.o.Limits)
		first.Advance(cp.Position, false)
		if err := s.producer.Deliver(ctx, first, &cp); err != nil {
			return none, onKafka(fmt.Errorf("write the first checkpoint: %w", err))
		}
	}
	s.r.resumed = true
	return cp, nil
}

func (s *session) sayFresh() {
	e := s.log.Info().Str("slot", s.r.o.Slot).Stringer("lsn", s.start)
	if s.created {
		if s.r.o.Snapshot.Never {
			e.Msg("first start: streaming from the slot's creation; rows that are in the tables already are not sent (snapshot.mode: never)")
			return
		}
		e.Msg("first start: streaming from the slot's creation, and reading the tables beside the stream")
		return
	}
	e.Msg("no checkpoint: adopted the slot, streaming from its confirmed position")
}

// readTimeline reads the history that the checkpoint's timeline is looked up in.
func (s *session) readTimeline(ctx context.Context) error {
	cp, db := s.facts.Checkpoint, s.facts.Database
	if cp.IsZero() || db.Timeline == cp.Source.Timeline || db.Timeline <= 1 {
		return nil
	}
	// The streaming connection takes no commands any more.
	side, err := s.openStream(ctx)
	if err != nil {
		return err
	}
	defer side.Abort()
	content, err := side.TimelineHistory(ctx, db.Timeline)
	if err != nil {
		return err
	}
	s.facts.History, err = replication.ParseTimelineHistory(content)
	return err
}

// prepareRouting brings publications and topics in step with the configuration.
func (s *session) prepareRouting(ctx context.Context) (err error) {
	if s.facts.Managed && !s.created {
		// Planned anew: while this instance stood by, tables have come that the holder
		// published, and a plan from before would drop them.
		if err := s.planTables(ctx); err != nil {
			return err
		}
		s.plan.InsertPending = !slices.Contains(s.named, s.plan.InsertPublication)
		if err := s.syncPublications(ctx); err != nil {
			return err
		}
	}
	types := s.typeCache()
	types.TypeName = s.stream.TypeName
	ro := s.r.o.Router
	ro.Database = s.facts.Database.Name
	ro.Types, ro.TypesAt = types.Lookup, types.Current
	ro.Sequence = s.sequenceFault
	if s.router, err = router.NewRouter(ro, s.catalog); err != nil {
		return err
	}
	if err := s.guardColumns(ctx); err != nil {
		return err
	}
	topics, err := s.claimTopics(s.router)
	if err != nil {
		return err
	}
	if ro.DeadLetterTopic != "" {
		topics = append(topics, ro.DeadLetterTopic)
	}
	if len(s.r.o.MessagePrefixes) > 0 {
		topics = append(topics, ro.MessageTopic)
	}
	return s.ensureTopics(ctx, topics...)
}

// sequenceFault counts an event out of its aggregate's sequence, and says so of each
// aggregate once. The event is delivered: nothing here could repair it.
func (s *session) sequenceFault(f *router.SequenceFault) {
	s.r.routerMetrics.Sequences.WithLabelValues(f.Table, f.Kind()).Inc()
	if f.First {
		s.log.Warn().Str("table", f.Table).Str("aggregate", f.Aggregate).Str("kind", f.Kind()).Int64("last", f.Last).Int64("seq", f.Seq).
			Msg("aggregate_seq does not follow: see how the application numbers events; the aggregate's further faults are only counted")
	}
}

// typeCache describes types by the catalog.
func (s *session) typeCache() *format.Cache {
	return &format.Cache{Ask: func(queries ...string) ([][][][]byte, error) {
		ctx, cancel := context.WithTimeout(s.r.base, lookupTimeout)
		defer cancel()
		return replication.TextResults(ctx, s.conn, queries...)
	}}
}

// ensureTopics looks topics up, and creates the missing ones where that is allowed.
func (s *session) ensureTopics(ctx context.Context, names ...string) error {
	err := s.catalog.Ensure(ctx, names, s.r.o.Topics)
	var name *router.TopicNameError
	if errors.As(err, &name) {
		return &checkpoint.Refusal{
			What:   "a topic cannot be had",
			Risk:   "its records could not be delivered",
			Remedy: "change topics.table or topics.prefix, or exclude the table under source.tables",
			Err:    err,
		}
	}
	return onKafka(err)
}

// relay streams.
func (s *session) relay(ctx context.Context, cp checkpoint.Checkpoint) error {
	l := newLoop(s, cp)
	var err error
	if l.after, err = s.newAfter(ctx, l, cp); err != nil {
		return err
	}
	defer l.after.close()
	if l.merging, err = s.newMerging(ctx, l, cp); err != nil {
		return err
	}
	connect := s.r.connect
	if s.r.o.Snapshot.PrimaryDSN != "" {
		s.primary = newPrimary(s.r.primary)
		connect, l.lost = s.primary.connect, s.primary.lost
		defer s.primary.close(context.WithoutCancel(ctx))
	}
	l.merging.readers = snapshot.NewReaders(ctx, snapshot.ReaderOptions{
		Connect: connect, N: s.r.o.Snapshot.Readers, Publications: s.named, Logger: s.log.With().Str("component", "snapshot").Logger(),
	})
	defer l.merging.readers.Close()
	if !l.merging.merger.Active() {
		l.merging.free = cp.Position.LSN
	}
	l.confirm()
	s.r.setPosition(cp.Position)
	s.r.recovered(s.log)
	s.r.setPhase(PhaseStreaming)
	s.log.Info().Stringer("lsn", cp.Position.LSN).Stringer("position", cp.Position).Msg("streaming")
	ctx, cancel := context.WithCancel(ctx)
	m := newMonitor(s, cp.Publications)
	l.horizons, l.news = m.horizons, m.news
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		m.run(ctx)
	}()
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		s.watchRequests(ctx, l.merging.requests.next, m.news)
	}()
	anchored := make(chan struct{})
	go func() {
		defer close(anchored)
		s.r.anchor.run(ctx, s.named)
	}()
	err = l.run(ctx)
	cancel()
	<-finished
	<-anchored
	<-asked
	if replication.DecodingFailed(err) && !replication.PublicationTooYoung(err) {
		return &replication.DecodingError{Slot: s.r.o.Slot, Confirmed: s.stream.Confirmed(), Err: err}
	}
	if replication.PublicationTooYoung(err) {
		return replication.RefuseYoungPublication(strings.Join(s.named, ","), s.r.o.Slot, s.facts.Slot.ConfirmedFlush, err)
	}
	return err
}

// waitingPublications tells whether a publication that is not named yet can be named
// by the next session, now that confirmed is.
func (s *session) waitingPublications(list []checkpoint.Publication, confirmed checkpoint.LSN) bool {
	for _, p := range list {
		if p.Horizon > 0 && confirmed >= p.Horizon && !slices.Contains(s.named, p.Name) {
			return true
		}
	}
	return false
}

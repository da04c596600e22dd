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
	"github.com/walrelay/walrelay/internal/lookup"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/internal/phase"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
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

	facts    replication.Facts
	plan     replication.Plan
	source   checkpoint.Source
	near     checkpoint.XID
	created  bool           // the slot was created in this session
	start    checkpoint.LSN // where a slot without a checkpoint begins
	target   checkpoint.LSN // until-caught-up: the end; 0 without
	named    []string       // publications that START_REPLICATION names
	lookup   *lookup.Lookup
	waits    waits
	targets  []*outbox.Target  // outbox tables whose delivered rows are marked or deleted
	outboxes map[uint32]string // outbox tables by OID, with the names of their entries
	primary  *primary          // nil where tables are read at the stream's source
	watch    *treeWatch
	// birth is what is known of the slot's creation, in this session or in one that ended
	// before its first checkpoint; nil for a slot that is older, or somebody else's.
	birth *checkpoint.Birth
}

// newSession makes a session; run must be called.
func newSession(r *Relay) *session {
	return &session{r: r, log: r.o.Logger, target: r.target}
}

// run is the start in its order, and the stream.
func (s *session) run(ctx context.Context) error {
	defer s.close(ctx)
	s.r.setPhase(phase.Connecting)
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

// fence shuts older instances out. Only the holder of the slot gets here.
func (s *session) fence(ctx context.Context) (err error) {
	s.r.setPhase(phase.Fencing)
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
	ctx, cancel := context.WithTimeout(s.r.base, lookup.Timeout)
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
	s.r.setPhase(phase.Loading)
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
	// And one that it did not name must not be while what it delivered is sent again, or in the
	// middle of a transaction.
	if !cp.Position.Cut.IsZero() || f.Slot.ConfirmedFlush < cp.Position.LSN {
		for _, p := range publications {
			if (p.Horizon == 0 || p.Horizon > f.Slot.ConfirmedFlush) && p.Name != f.Publication && slices.Contains(s.named, p.Name) {
				return none, errPublicationsReady
			}
		}
	}
	// The first checkpoint goes out before the tables are looked at, so that one which stands
	// where the slot began says nothing of them yet.
	if !found || cp.SlotSnapshot != "" && len(cp.Tables) == 0 && cp.Position.LSN == f.Slot.ConfirmedFlush {
		if err := s.recallBirth(ctx); err != nil {
			return none, err
		}
	}
	if !found {
		s.start = f.Slot.ConfirmedFlush
		cp = checkpoint.Checkpoint{Position: checkpoint.Beginning(s.start)}
		if s.birth != nil {
			cp.SlotSnapshot = s.birth.Snapshot
		}
		s.sayFresh()
	}
	// A publication that this session names is one that the next may name too: all that
	// is decoded from here on has been asked for with it, or the stream has ended.
	for i := range publications {
		if h := publications[i].Horizon; (h == 0 || h > f.Slot.ConfirmedFlush) && slices.Contains(s.named, publications[i].Name) {
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
	if s.birth != nil {
		if s.r.o.Snapshot.Never {
			e.Msg("first start: streaming from the slot's creation; rows that are in the tables already are not sent (snapshot.mode: never)")
			return
		}
		e.Msg("first start: streaming from the slot's creation, and reading the tables beside the stream")
		return
	}
	e.Msg("no checkpoint: adopted the slot, streaming from its confirmed position")
}

// relay streams.
func (s *session) relay(ctx context.Context, cp checkpoint.Checkpoint) error {
	l := newLoop(s, cp)
	s.r.setAnchor(cp.Anchor)
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
		Connect: connect, N: s.r.o.Snapshot.Readers, Publications: s.named, Logger: s.log.With().Str("part", "snapshot").Logger(),
	})
	defer l.merging.readers.Close()
	if !l.merging.merger.Active() {
		l.merging.free = cp.Position.LSN
	}
	l.confirm()
	s.r.setPosition(cp.Position)
	s.r.recovered(s.log)
	s.r.setPhase(phase.Streaming)
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
		txn, open := s.stream.Txn()
		if !open {
			txn = replication.Transaction{}
		}
		return &replication.DecodingError{Slot: s.r.o.Slot, Confirmed: s.stream.Confirmed(), Txn: txn, Err: err}
	}
	if replication.PublicationTooYoung(err) {
		return replication.RefuseYoungPublication(strings.Join(s.named, ","), s.r.o.Slot, s.facts.Slot.ConfirmedFlush, err)
	}
	return err
}

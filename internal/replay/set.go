package replay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// SetOptions says where the live connector is to go on.
type SetOptions struct {
	Options
	// LSN is where; 0 with AcceptSource: where the slot stands, or, of the same source, where
	// the checkpoint does if that is further.
	LSN checkpoint.LSN
	// AcceptSource takes the server as the checkpoint's, whatever its system identifier,
	// database and timeline are.
	AcceptSource bool
	// Once is for the start of a run: only backwards, and only where the checkpoint does not
	// record that it was moved to LSN so; then the result's Already is set.
	Once bool
	// Takeover ends the walsender that holds the slot first.
	Takeover bool
	// Confirm is told the consequences, before anything is changed; its error ends it.
	Confirm func(consequences string) error
}

// SetResult is what was done.
type SetResult struct {
	From         string `json:"from_lsn"`
	To           string `json:"to_lsn"`
	Direction    string `json:"direction"`    // forwards, backwards or none
	Transactions int64  `json:"transactions"` // skipped, or delivered again by the connector
	Changes      int64  `json:"changes"`
	SystemID     string `json:"system_id"`
	// Already: Once, and it was done before.
	Already bool `json:"-"`
}

// Set moves the live connector's checkpoint, and its slot with it. The slot is taken and
// the connector's transactional id is fenced first; beside a live instance it is a
// *checkpoint.Refusal.
func Set(ctx context.Context, o SetOptions) (SetResult, error) {
	s := &session{o: o.Options, base: context.WithoutCancel(ctx)}
	defer s.close()
	admin, err := router.NewAdminClient(o.Kafka)
	if err != nil {
		return SetResult{}, err
	}
	defer admin.Close()
	s.catalog = router.NewCatalog(admin)
	store := ckafka.NewStore(admin, o.Live)
	found := false
	if s.live, found, err = store.Look(ctx); err != nil {
		return SetResult{}, err
	}
	switch {
	case o.Once && !found:
		return SetResult{}, &checkpoint.Refusal{
			What:   fmt.Sprintf("there is no checkpoint in topic %s, so that there is nothing to go back from to %s", o.Live.Topic, o.LSN),
			Remedy: "start without --from-lsn",
		}
	case o.Once && s.live.Rewound == o.LSN:
		return s.already(), nil
	case !found && !o.AcceptSource && o.LSN == 0:
		return SetResult{}, &checkpoint.Refusal{What: fmt.Sprintf("there is no checkpoint in topic %s", o.Live.Topic), Remedy: "say where to begin with --lsn"}
	}
	if err := s.look(ctx); err != nil {
		return SetResult{}, err
	}
	if found && !o.AcceptSource {
		if err := replication.CheckSource(s.live.Source, s.db); err != nil {
			return SetResult{}, err
		}
	}
	slot, there, err := replication.ReadSlot(ctx, s.conn, o.Slot)
	if err != nil {
		return SetResult{}, err
	}
	if there && slot.Active && o.Takeover {
		if _, err := replication.TerminateHolder(ctx, s.conn, o.Slot); err != nil {
			return SetResult{}, err
		}
		if err := s.awaitFree(ctx); err != nil {
			return SetResult{}, err
		}
		// What the holder confirmed to its end counts.
		if slot, there, err = replication.ReadSlot(ctx, s.conn, o.Slot); err != nil {
			return SetResult{}, err
		}
	}
	if there && slot.Active {
		return SetResult{}, s.refuseHeld(slot.ActivePID)
	}
	if o.LSN > s.db.WALEnd {
		return SetResult{}, fmt.Errorf("%s is beyond the end of the WAL, which is at %s on timeline %d", o.LSN, s.db.WALEnd, s.db.Timeline)
	}
	if (!there || slot.Invalidation != "") && (o.LSN == 0 || s.oldest == 0) {
		return SetResult{}, s.refuseNoSlot()
	}
	if err := store.EnsureTopic(ctx); err != nil { // only now: what is refused creates nothing
		return SetResult{}, err
	}
	// Invariant 3: fence, then read. Whoever takes the slot meanwhile fences us in turn, and
	// then nothing of this is committed.
	if s.producer, err = router.NewProducer(o.Producer, s.catalog, router.NewMetrics(nil)); err != nil {
		return SetResult{}, err
	}
	if there && slot.Invalidation == "" {
		stream, err := s.take(ctx, slot.ConfirmedFlush)
		if err != nil {
			return SetResult{}, err
		}
		defer stream.Abort()
		if err := s.producer.Fence(ctx); err != nil {
			return SetResult{}, err
		}
		if s.live, _, err = store.Load(ctx); err != nil {
			return SetResult{}, err
		}
		return s.move(ctx, o, slot, stream)
	}
	if err := s.producer.Fence(ctx); err != nil {
		return SetResult{}, err
	}
	if s.live, _, err = store.Load(ctx); err != nil {
		return SetResult{}, err
	}
	return s.move(ctx, o, slot, nil)
}

// already is the result of a rewind that an earlier start did.
func (s *session) already() SetResult {
	at := s.live.Position.LSN.String()
	return SetResult{From: at, To: at, Direction: "none", SystemID: s.live.Source.SystemID, Already: true}
}

func (s *session) refuseHeld(pid int32) error {
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("slot %s is in use by process %d of the server: an instance of this connector runs", s.o.Slot, pid),
		Risk:   "two would move the position at once",
		Remedy: "stop the connector, then do this again",
	}
}

// look reads the server, and the anchor where there is one.
func (s *session) look(ctx context.Context) error {
	if err := s.connect(ctx); err != nil {
		return err
	}
	s.source = replication.AnchorName(s.o.Slot)
	anchor, found, err := replication.ReadSlot(ctx, s.conn, s.source)
	if found && anchor.Invalidation == "" {
		s.oldest = anchor.ConfirmedFlush
	}
	return err
}

// nameFrom is nameAt for a checkpoint that may not know its publications.
func (s *session) nameFrom(lsn checkpoint.LSN) {
	if s.nameAt(lsn); len(s.named) == 0 {
		s.named = []string{s.o.Publication}
	}
}

// take takes the live slot, which stands at confirmed: it is the lease.
func (s *session) take(ctx context.Context, confirmed checkpoint.LSN) (*replication.Stream, error) {
	cfg, err := s.config()
	if err != nil {
		return nil, err
	}
	stream, err := replication.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	s.nameFrom(confirmed)
	err = stream.Start(ctx, replication.StreamOptions{Slot: s.o.Slot, Publications: s.named, Near: s.db.TransactionEnd, Buffer: s.o.Buffer})
	if err != nil {
		stream.Abort()
		if errors.Is(err, replication.ErrSlotActive) {
			return nil, s.refuseHeld(0)
		}
		return nil, err
	}
	return stream, nil
}

// move does it. stream is nil where the slot is not there or lost.
func (s *session) move(ctx context.Context, o SetOptions, slot replication.Slot, stream *replication.Stream) (SetResult, error) {
	at := s.live.Position
	to := o.LSN
	if o.Once && s.live.Rewound == to { // by whoever held the slot while we looked
		return s.already(), nil
	}
	r := SetResult{From: at.LSN.String(), SystemID: s.db.SystemID, Direction: "none"}
	foreign := o.AcceptSource && s.live.Source != s.db.Source()
	switch {
	case o.Once && to > at.LSN:
		return r, &checkpoint.Refusal{
			What:   fmt.Sprintf("--from-lsn %s is ahead of the checkpoint, which is at %s", to, at.LSN),
			Risk:   "what is committed between would never be delivered",
			Remedy: "start without --from-lsn; to skip it on purpose: walrelay checkpoint set -c FILE --lsn " + to.String(),
		}
	case to == 0 && foreign:
		to = slot.ConfirmedFlush
	case to == 0: // it was accepted before, and the slot only follows
		to = max(at.LSN, slot.ConfirmedFlush)
	}
	// A slot itself cannot go back: only the anchor can, and it is what is left of a lost one.
	m := movement{replace: stream == nil || to < slot.ConfirmedFlush, foreign: foreign}
	begin := slot.ConfirmedFlush
	if m.replace {
		begin = s.oldest
	}
	if m.replace && (s.oldest == 0 || to < s.oldest) {
		return r, s.refuseBack(ctx, to)
	}
	var err error
	asked := to
	switch {
	case m.foreign && !m.replace:
		// LSNs of two clusters: neither is before the other.
	case to == at.LSN:
		m.keep = true // a transaction that is cut there, too
	case m.replace:
		s.nameFrom(to)
		to, _, err = s.endBefore(ctx, max(s.oldest, to-min(to, recordRoom)), to, time.Time{})
	case to < at.LSN:
		to, _, err = s.lastEnd(ctx, stream, slot.ConfirmedFlush, to, time.Time{})
	default:
		to, err = s.count(ctx, stream, max(at.LSN, slot.ConfirmedFlush), to, &r)
	}
	if err != nil {
		return r, err
	}
	if !m.foreign && asked >= at.LSN {
		to = max(to, at.LSN)
		// Between the delivered part of a transaction that is cut and its commit nothing ends.
		if m.keep = to <= max(at.LSN, at.Cut.CommitLSN); m.keep {
			to, r.Transactions, r.Changes = max(at.LSN, begin), 0, 0
		}
	}
	m.to, r.To = to, to.String()
	// Rows of an outbox that were delivered and are not marked yet, and what a snapshot has to
	// know of, is known only once the stream sends it again: a slot stays behind. What the
	// server cannot decode it must not be asked for again.
	switch {
	case m.foreign:
	case to <= at.LSN:
		m.resend = true
		if to < at.LSN {
			r.Direction = "backwards"
		}
	default:
		r.Direction, m.resend = "forwards", s.unmarked() && !m.replace && r.Changes >= 0
	}
	if err := o.Confirm(s.consequences(m, r, slot)); err != nil {
		return r, err
	}
	if stream != nil {
		stream.Abort()
	}
	return r, s.apply(ctx, o, slot, m)
}

// movement is what is to be done.
type movement struct {
	to      checkpoint.LSN
	replace bool // the slot, by a copy of the anchor
	keep    bool // the checkpoint's position, a cut transaction's delivered part too
	resend  bool // the slot stays where it is
	foreign bool // the checkpoint is another cluster's, or database's
}

// unmarked tells whether rows of an outbox may be delivered and not marked yet.
func (s *session) unmarked() bool {
	a := s.live.After
	return a != nil && a.Done.Before(s.live.Position.Next())
}

// consequences says them, for who has to agree.
func (s *session) consequences(m movement, r SetResult, slot replication.Slot) string {
	at := s.live.Position.LSN
	var text string
	switch {
	case r.Direction == "backwards":
		text = fmt.Sprintf("The connector goes back from %s to %s. Everything committed behind %s is delivered again to the live topics, in order and with the positions it had: consumers that do not drop positions they have seen see it twice.", at, m.to, m.to)
	case r.Direction == "forwards":
		text = fmt.Sprintf("The connector goes from %s forwards to %s. %s are skipped and never delivered; walrelay snapshot -c FILE --table T --replace reads the tables as they are now.", at, m.to, skipped(r))
		if !m.replace && slot.ConfirmedFlush > at {
			text += fmt.Sprintf(" What was committed between %s and %s is not sent by the slot any more, and is not counted.", at, slot.ConfirmedFlush)
		}
		if s.unmarked() && !m.resend {
			text += " Outbox rows that were delivered and are not marked (deleted) yet may stay so."
		}
	default:
		text = fmt.Sprintf("The connector goes on at %s.", m.to)
	}
	if cut := s.live.Position.Cut; m.keep && !cut.IsZero() {
		text += fmt.Sprintf(" It is in the middle of the transaction with commit LSN %s: its first %d changes are delivered and do not come again, and the rest follows; to skip that, give an LSN behind its end.", cut.CommitLSN, cut.Changes)
	}
	if m.replace {
		text += fmt.Sprintf(" Slot %s is replaced by a copy of the anchor.", s.o.Slot)
	}
	if m.foreign {
		text += fmt.Sprintf(" The checkpoint of cluster %s, database %q, timeline %d, is taken over for cluster %s, database %q, timeline %d: what was committed on either and is not in Kafka may be missing; walrelay snapshot -c FILE --table T --replace reads the tables again. Positions of the one do not follow those of the other: whoever folds topics by position must begin anew, or give topics.prefix another name.",
			s.live.Source.SystemID, s.live.Source.Database, s.live.Source.Timeline, s.db.SystemID, s.db.Name, s.db.Timeline)
	} else if was := s.live.Source.Timeline; was != 0 && was != s.db.Timeline {
		text += fmt.Sprintf(" The checkpoint goes from timeline %d over to %d: what was committed on the one and is not in Kafka is lost, and what is in Kafka and not on the other stays there; walrelay snapshot -c FILE --table T --replace reads the tables again.", was, s.db.Timeline)
	}
	return text
}

func (s *session) refuseNoSlot() error {
	return &checkpoint.Refusal{
		What: fmt.Sprintf("slot %s does not exist on this server, or is lost, and there is no anchor to make it from, so that there is nowhere to go on", s.o.Slot),
		Risk: "what is committed until there is a slot again is not streamed",
		Remedy: fmt.Sprintf("drop a lost one with walrelay slot drop -c FILE; make the publications as they were, then the slot: SELECT pg_create_logical_replication_slot('%s', 'pgoutput'); then walrelay checkpoint set -c FILE --accept-source goes on where it stands, and walrelay snapshot -c FILE --table T --replace reads the tables again",
			s.o.Slot),
	}
}

// refuseBack says why the connector cannot go back to an LSN.
func (s *session) refuseBack(ctx context.Context, to checkpoint.LSN) error {
	if s.oldest == 0 {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("there is no anchor slot, so that no WAL is kept to go back to %s", to),
			Remedy: "walrelay snapshot -c FILE --table T reads tables again as they are now",
		}
	}
	s.nameFrom(s.oldest)
	reach, err := s.reach(ctx)
	if err != nil {
		return err
	}
	return s.refuseOld(to, reach)
}

func skipped(r SetResult) string {
	if r.Changes < 0 {
		return "The transactions between, which PostgreSQL cannot decode,"
	}
	return fmt.Sprintf("%d transactions with %d changes", r.Transactions, r.Changes)
}

// count reads what is skipped, and gives the last end of a transaction at or before to; last
// where there is none. What the server cannot decode cannot be counted either: then to is
// taken as it stands.
func (s *session) count(ctx context.Context, stream *replication.Stream, last, to checkpoint.LSN, r *SetResult) (checkpoint.LSN, error) {
	at := s.live.Position
	changes := int64(0)
	for {
		ev, err := stream.Next(ctx)
		switch {
		case replication.DecodingFailed(err):
			r.Transactions, r.Changes = -1, -1
			return to, nil
		case err != nil:
			return 0, err
		case ev.Kind == replication.KindBegin && ev.Txn.CommitLSN >= to, ev.Kind == replication.KindProgress && ev.LSN >= to:
			return last, nil
		case ev.Kind == replication.KindBegin:
			changes = 0
		case ev.Kind == replication.KindChange && ev.Change.Txn == nil:
			if ev.Change.LSN > to {
				return last, nil
			}
			if !at.HasMessage(ev.Change.LSN) {
				r.Changes++
				last = ev.Change.LSN
			}
		case ev.Kind == replication.KindChange:
			if ev.Change.Seq >= at.Skip(ev.Change.Txn.CommitLSN) {
				changes++
			}
		case ev.Kind == replication.KindCommit && ev.Txn.EndLSN <= to && !at.HasTransaction(ev.Txn.CommitLSN):
			r.Transactions++
			r.Changes += changes
			last = ev.Txn.EndLSN
		}
	}
}

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
	// LSN is where; 0 with AcceptSource: where the slot stands.
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
	if err := store.EnsureTopic(ctx); err != nil { // its absence is an error for who reads it
		return SetResult{}, err
	}
	found := false
	if s.live, found, err = store.Peek(ctx); err != nil {
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
	if was := s.live.Source; found && !o.AcceptSource && (was.SystemID != s.db.SystemID || was.Database != s.db.Name) {
		return SetResult{}, &checkpoint.Refusal{
			What:   fmt.Sprintf("the checkpoint belongs to database %q of cluster %s, and source.dsn leads to %q of %s", was.Database, was.SystemID, s.db.Name, s.db.SystemID),
			Risk:   "LSNs of two clusters cannot be compared",
			Remedy: "point source.dsn to the server that the connector reads, or, after pg_upgrade or a restore of a dump, say --accept-source",
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
	// Invariant 3: fence, then read. Whoever takes the slot meanwhile fences us in turn, and
	// then nothing of this is committed.
	if s.producer, err = router.NewProducer(o.Producer, s.catalog, router.NewMetrics(nil)); err != nil {
		return SetResult{}, err
	}
	if there && slot.Invalidation == "" {
		stream, err := s.take(ctx)
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
func (s *session) look(ctx context.Context) (err error) {
	o := &s.o
	if s.conn, err = replication.Connect(ctx, o.DSN, o.AppName, o.ConnOptions...); err != nil {
		return err
	}
	if s.db, err = replication.ReadDatabase(ctx, s.conn); err != nil {
		return err
	}
	found := false
	if s.anchor, found, err = replication.ReadSlot(ctx, s.conn, replication.AnchorName(o.Slot)); err != nil {
		return err
	}
	if found && s.anchor.Invalidation == "" {
		s.oldest = s.anchor.ConfirmedFlush
	}
	s.named = nil
	for _, p := range s.live.Publications {
		s.named = append(s.named, p.Name)
	}
	if len(s.named) == 0 {
		s.named = []string{o.Publication}
	}
	s.keys = map[uint32][]string{}
	return nil
}

// take takes the live slot: it is the lease.
func (s *session) take(ctx context.Context) (*replication.Stream, error) {
	cfg, err := replication.WalsenderConfig(s.o.DSN, s.o.AppName, s.o.ConnOptions...)
	if err != nil {
		return nil, err
	}
	stream, err := replication.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
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
	switch {
	case o.Once && to > at.LSN:
		return r, &checkpoint.Refusal{
			What:   fmt.Sprintf("--from-lsn %s is ahead of the checkpoint, which is at %s", to, at.LSN),
			Risk:   "what is committed between would never be delivered",
			Remedy: "start without --from-lsn; to skip it on purpose: walrelay checkpoint set -c FILE --lsn " + to.String(),
		}
	case to == 0 && stream == nil:
		return r, &checkpoint.Refusal{
			What:   fmt.Sprintf("slot %s does not exist on this server, or is lost, so that there is nowhere to go on", s.o.Slot),
			Remedy: "create it, after its publications: SELECT pg_create_logical_replication_slot('" + s.o.Slot + "', 'pgoutput'), and do this again; then read the tables again with walrelay snapshot -c FILE --table T --replace",
		}
	case to == 0:
		to = slot.ConfirmedFlush
	}
	foreign := o.AcceptSource && s.live.Source != s.db.Source()
	backwards := !foreign && to < at.LSN || stream == nil || to < slot.ConfirmedFlush
	var text string
	switch {
	case backwards && (s.oldest == 0 || to < s.oldest):
		if s.oldest == 0 {
			return r, &checkpoint.Refusal{What: "there is no anchor slot, so that no WAL is kept to go back to", Remedy: "walrelay snapshot -c FILE --table T reads tables again as they are now"}
		}
		when, err := s.oldestTime(ctx)
		if err != nil {
			return r, err
		}
		return r, s.refuseOld(to, when)
	case backwards:
		last, err := s.endBefore(ctx, max(s.oldest, to-min(to, recordRoom)), to, time.Time{})
		if err != nil {
			return r, err
		}
		to, r.Direction = last, "backwards"
		text = fmt.Sprintf("The connector goes back from %s to %s: slot %s is replaced by a copy of the anchor, and everything committed behind %s is delivered again to the live topics, in order and with the positions it had. Consumers that do not drop positions they have seen see it twice.", at.LSN, to, s.o.Slot, to)
	case to > at.LSN && !foreign:
		last, err := s.count(ctx, stream, to, &r)
		if err != nil {
			return r, err
		}
		to, r.Direction = last, "forwards"
		text = fmt.Sprintf("The connector goes from %s forwards to %s. %s are skipped and never delivered; walrelay snapshot -c FILE --table T --replace reads the tables as they are now.", at.LSN, to, skipped(r))
	default:
		text = fmt.Sprintf("The connector goes on at %s.", to)
	}
	if foreign {
		text += fmt.Sprintf(" The checkpoint of cluster %s, database %q, is taken over for cluster %s, database %q: what was committed on either and is not in Kafka may be missing; walrelay snapshot -c FILE --table T --replace reads the tables again.",
			s.live.Source.SystemID, s.live.Source.Database, s.db.SystemID, s.db.Name)
	}
	r.To = to.String()
	if err := o.Confirm(text); err != nil {
		return r, err
	}
	if stream != nil {
		stream.Abort()
	}
	return r, s.apply(ctx, o, slot, to, backwards, foreign)
}

func skipped(r SetResult) string {
	if r.Changes < 0 {
		return "The transactions between, which PostgreSQL cannot decode,"
	}
	return fmt.Sprintf("%d transactions with %d changes", r.Transactions, r.Changes)
}

// count reads what is skipped, and gives the last end of a transaction at or before to.
// What the server cannot decode cannot be counted either: then to is taken as it stands.
func (s *session) count(ctx context.Context, stream *replication.Stream, to checkpoint.LSN, r *SetResult) (checkpoint.LSN, error) {
	last := s.live.Position.LSN
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
			if !s.live.Position.HasMessage(ev.Change.LSN) {
				r.Changes++
				last = ev.Change.LSN
			}
		case ev.Kind == replication.KindChange:
			changes++
		case ev.Kind == replication.KindCommit && ev.Txn.EndLSN <= to && !s.live.Position.HasTransaction(ev.Txn.CommitLSN):
			r.Transactions++
			r.Changes += changes
			last = ev.Txn.EndLSN
		}
	}
}

// apply changes slot and checkpoint. Backwards the slot goes first: a slot before the
// checkpoint is what every restart finds, and harmless. Forwards the checkpoint goes first
// (DESIGN, invariant 1).
func (s *session) apply(ctx context.Context, o SetOptions, slot replication.Slot, to checkpoint.LSN, backwards, foreign bool) error {
	if backwards {
		if err := s.awaitFree(ctx); err != nil {
			return err
		}
		if err := replication.DropSlot(ctx, s.conn, s.o.Slot); err != nil {
			return err
		}
		if _, err := replication.CopySlot(ctx, s.conn, replication.AnchorName(s.o.Slot), s.o.Slot); err != nil {
			return err
		}
		if s.db.Version >= 170000 && !s.db.InRecovery && (slot.Failover || slot.Name == "") {
			cfg, err := replication.WalsenderConfig(s.o.DSN, s.o.AppName, s.o.ConnOptions...)
			if err != nil {
				return err
			}
			if err := replication.SetFailover(ctx, cfg, s.o.Slot); err != nil {
				return err
			}
		}
	}
	cp := s.live
	cp.Position = checkpoint.Position{LSN: to, CommitLSN: to}
	cp.Source = s.db.Source()
	cp.TakenOver = nil
	if o.Once {
		cp.Rewound = o.LSN
	}
	if foreign {
		if err := s.adopt(ctx, &cp); err != nil {
			return err
		}
	}
	s.producer.Resume(cp)
	b := router.NewBatch(s.o.Limits)
	b.Advance(cp.Position, false)
	if err := s.producer.Deliver(ctx, b, &cp); err != nil {
		return fmt.Errorf("write the checkpoint: %w", err)
	}
	if !backwards && to > slot.ConfirmedFlush {
		if err := s.awaitFree(ctx); err != nil {
			return err
		}
		if err := replication.AdvanceSlot(ctx, s.conn, s.o.Slot, to); err != nil {
			return fmt.Errorf("the checkpoint is at %s, and the connector goes on from there; the slot follows with it: %w", to, err)
		}
	}
	return nil
}

// adopt forgets what holds on another cluster only: horizons are LSNs, and progress is
// kept by OID, which may be another table's here.
func (s *session) adopt(ctx context.Context, cp *checkpoint.Checkpoint) error {
	pubs := make([]checkpoint.Publication, len(cp.Publications))
	for i, p := range cp.Publications {
		pubs[i] = checkpoint.Publication{Name: p.Name}
	}
	cp.Publications, cp.SlotSnapshot = pubs, ""
	tables, err := replication.Tables(ctx, s.conn)
	if err != nil {
		return err
	}
	names := map[uint32]string{}
	for _, t := range tables {
		names[t.OID] = t.String()
	}
	kept := map[uint32]checkpoint.TableProgress{}
	for oid, p := range cp.Tables {
		if names[oid] == p.Table {
			kept[oid] = p
		}
	}
	cp.Tables = kept
	// What transactions did to partitions, and which rows of an outbox are to be marked, is
	// known by LSNs and transaction ids.
	cp.Trees, cp.After = nil, nil
	return nil
}

// awaitFree waits until the server has let go of the slot that we held.
func (s *session) awaitFree(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Second, errors.New("the server does not let go of the slot"))
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		slot, found, err := replication.ReadSlot(ctx, s.conn, s.o.Slot)
		if err != nil || !found || !slot.Active {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

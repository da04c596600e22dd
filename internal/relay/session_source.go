package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/phase"
	"github.com/walrelay/walrelay/replication"
)

// prepareSource creates publications and slot on a first start: publications first,
// because decoding looks them up in the catalog of each change's own time.
func (s *session) prepareSource(ctx context.Context) error {
	f := &s.facts
	if f.SlotFound {
		return nil
	}
	s.r.setPhase(phase.CreatingSlot)
	if f.Managed {
		if err := s.syncPublications(ctx); err != nil {
			return err
		}
	}
	before, err := s.publishedBefore(ctx)
	if err != nil {
		return err
	}
	b := &checkpoint.Birth{Slot: s.r.o.Slot, Source: f.Database.Source(), Before: before}
	s.log.Info().Str("slot", s.r.o.Slot).Msg("creating the replication slot; it begins where it is created")
	standby := s.facts.Database.InRecovery // where no slot is failover-enabled
	slot, err := replication.CreateSlot(ctx, s.r.connect, replication.SlotRequest{Name: s.r.o.Slot, Failover: !standby, Report: s.reportWaiting, Within: s.emptyBefore(b), Altered: s.reportAltered})
	if err != nil {
		return fmt.Errorf("create slot %s: %w", s.r.o.Slot, err)
	}
	s.created = true
	if !standby { // whose snapshots do not list what runs
		b.Snapshot = slot.Snapshot
	}
	s.log.Info().Str("slot", s.r.o.Slot).Stringer("lsn", slot.LSN).Msg("replication slot created")
	if err := s.readSlot(ctx); err != nil {
		return err
	}
	b.LSN = f.Slot.ConfirmedFlush
	s.birth, s.r.birth = b, b
	// Should it not get there, only a start after the death of this process would miss it.
	noting, cancel := context.WithTimeout(ctx, noteTimeout)
	defer cancel()
	if err := s.store.NoteBirth(noting, b); err != nil {
		s.log.Warn().Err(err).Msg("going on without")
	}
	return nil
}

// noteTimeout bounds the one write; the client itself would go on for ever.
const noteTimeout = 10 * time.Second

// recallBirth finds out whether the slot, of which nothing is delivered, is that of a first
// start which ended early.
func (s *session) recallBirth(ctx context.Context) (err error) {
	if s.birth != nil {
		return nil
	}
	b := s.r.birth
	if b == nil {
		if b, err = s.store.Birth(ctx); err != nil {
			return onKafka(err)
		}
	}
	if b.Is(s.r.o.Slot, s.facts.Slot.ConfirmedFlush, s.facts.Database.Source()) {
		s.birth = b
	}
	return nil
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

// reportAltered says for the sake of which tables the slot is created again.
func (s *session) reportAltered(tables []string) {
	s.log.Warn().Str("slot", s.r.o.Slot).Strs("tables", tables).
		Msg("creating the slot again: these tables were altered or truncated meanwhile, and PostgreSQL would decode their first changes by their old definition")
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
	case !s.facts.Checkpoint.Position.Cut.IsZero() || s.facts.Slot.ConfirmedFlush < s.facts.Checkpoint.Position.LSN:
		// What is sent again was delivered, and its changes counted, without it: seq must count the
		// same the second time, and what it adds would be taken for delivered.
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
			Slot: s.r.o.Slot, Publications: s.named, Near: s.near, Keys: s.lookup.PrimaryKey, Buffer: s.r.o.Buffer,
		})
		if err == nil {
			break
		}
		s.stream.Abort()
		s.stream = nil
		if !errors.Is(err, replication.ErrSlotActive) {
			return err
		}
		s.r.setPhase(phase.Standby)
		if !waited {
			s.log.Info().Str("slot", s.r.o.Slot).AnErr("held", err).Msg("standing by: another instance holds the slot; taking over when it lets go")
		}
		if err := wait.sleep(ctx); err != nil {
			return err
		}
	}
	if err := s.lookup.ReadKeys(ctx); err != nil {
		return err
	}
	s.log.Info().Str("slot", s.r.o.Slot).Strs("publications", s.named).Msg("holding the slot")
	for _, p := range s.publications() {
		if slices.Contains(s.named, p.Name) {
			continue
		}
		e := s.log.Warn().Str("publication", p.Name)
		if s.r.o.Snapshot.Never {
			e.Msg("this publication is younger than the slot and is not named yet: rows that are written until then to tables that only it publishes are not sent (snapshot.mode: never)")
		} else {
			e.Msg("this publication is younger than the slot and is not named yet: rows that are written until then to tables that only it publishes come later, with the rows that these tables have")
		}
	}
	return nil
}

// nameAgain decides which publications to name. What a standby found out before it
// waited, maybe for days, is not what holds when it takes over: the holder may have
// made a publication nameable, and moved the slot and the transaction ids on.
func (s *session) nameAgain(ctx context.Context, waited bool) (err error) {
	if waited {
		s.created, s.birth = false, nil // whoever made the slot, another instance has used it since
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

// readTimeline reads the history that the checkpoint's timeline is looked up in.
func (s *session) readTimeline(ctx context.Context) error {
	cp, db := s.facts.Checkpoint, s.facts.Database
	if cp.IsZero() {
		return nil
	}
	// The streaming connection takes no commands any more.
	cfg, err := replication.WalsenderConfig(s.r.o.DSN, s.r.o.AppName, s.r.o.ConnOptions...)
	if err != nil {
		return err
	}
	s.facts.History, err = replication.ReadHistory(ctx, cfg, cp.Source, db.Timeline)
	return err
}

// unnamed raises the horizons, where they are known, of publications that this session does
// not name to what it delivers up to p. What the server sends again after a restart must be behind
// that before one is named: changes that come with it only would be taken for delivered, and
// those of a cut transaction be counted otherwise.
func (s *session) unnamed(list []checkpoint.Publication, p checkpoint.Position) []checkpoint.Publication {
	least := p.LSN
	if !p.Cut.IsZero() {
		least = p.Cut.CommitLSN + 1 // any position behind it
	}
	var raised []checkpoint.Publication // the last checkpoint has the list
	for i := range list {
		if list[i].Horizon == 0 || list[i].Horizon >= least || slices.Contains(s.named, list[i].Name) {
			continue
		}
		if raised == nil {
			raised = slices.Clone(list)
		}
		raised[i].Horizon = least
	}
	if raised == nil {
		return list
	}
	return raised
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

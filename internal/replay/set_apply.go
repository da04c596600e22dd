package replay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// apply changes slot and checkpoint. A slot that is replaced goes first: one before the
// checkpoint is what every restart finds, and harmless. Else the checkpoint goes first
// (DESIGN, invariant 1).
func (s *session) apply(ctx context.Context, o SetOptions, slot replication.Slot, m movement) error {
	if m.replace {
		if err := s.replace(ctx, slot); err != nil {
			return err
		}
	}
	cp := s.live
	if m.keep {
		cp.Position.LSN = m.to
	} else {
		cp.Position = checkpoint.Beginning(m.to)
		cp.After = cp.After.Moved(s.live.Position, cp.Position)
	}
	cp.Source = s.db.Source()
	cp.TakenOver = nil
	if o.Once {
		cp.Rewound = o.LSN
	}
	if m.foreign {
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
	if !m.replace && !m.resend && m.to > slot.ConfirmedFlush {
		if err := s.awaitFree(ctx); err != nil {
			return err
		}
		if err := replication.AdvanceSlot(ctx, s.conn, s.o.Slot, m.to); err != nil {
			return fmt.Errorf("the checkpoint is at %s, and the connector goes on from there; the slot follows with it: %w", m.to, err)
		}
	}
	return nil
}

// replace makes the slot anew as a copy of the anchor, failover-enabled where it was.
func (s *session) replace(ctx context.Context, slot replication.Slot) error {
	if err := s.awaitFree(ctx); err != nil {
		return err
	}
	if err := replication.DropSlot(ctx, s.conn, s.o.Slot); err != nil {
		return err
	}
	if _, err := replication.CopySlot(ctx, s.conn, replication.AnchorName(s.o.Slot), s.o.Slot); err != nil {
		return fmt.Errorf("slot %s is dropped, and the same command again makes it: %w", s.o.Slot, err)
	}
	if s.db.Version < 170000 || s.db.InRecovery || !slot.Failover && slot.Name != "" {
		return nil
	}
	cfg, err := s.config()
	if err != nil {
		return err
	}
	return replication.SetFailover(ctx, cfg, s.o.Slot)
}

// adopt forgets what holds on another cluster only: horizons are LSNs. A table is the one of
// its name: a restored dump gives it another OID.
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
	oids, names := map[string]uint32{}, map[uint32]string{}
	for _, t := range tables {
		oids[t.String()], names[t.OID] = t.OID, t.String()
	}
	kept := map[uint32]checkpoint.TableProgress{}
	for oid, p := range cp.Tables {
		switch here, found := oids[p.Table]; {
		case found && p.State == checkpoint.TableDone:
			kept[here] = p // under the number that it has here: nothing is sent a second time
		case names[oid] == p.Table:
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

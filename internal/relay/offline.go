package relay

import (
	"context"
	"fmt"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/phase"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// Offline is the state of a connector that does not run, as Kafka and the database have it:
// where it would go on, and what its slots keep. Nothing is changed. What cannot be read,
// or is not as it should be, is among the problems.
func Offline(ctx context.Context, o Options) Status {
	s := Status{Name: o.Router.Name, Phase: phase.Stopped, Slot: o.Slot}
	problem := func(err error) {
		if err != nil {
			s.Problems = append(s.Problems, err.Error())
		}
	}
	cp, found, err := stored(ctx, o)
	if err != nil {
		err = fmt.Errorf("read the checkpoint: %w", err)
	}
	problem(err)
	if found {
		s.Position = cp.Position.String()
	} else if err == nil {
		s.Warnings = append(s.Warnings, fmt.Sprintf("checkpoint topic %s holds no checkpoint: the connector has not run yet", o.Checkpoint.Topic))
	}
	problem(s.readSlots(ctx, o, cp.Position))
	return s
}

// offlineTimeout bounds the look at Kafka, and the one at the database.
const offlineTimeout = 10 * time.Second

func stored(ctx context.Context, o Options) (cp checkpoint.Checkpoint, found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, offlineTimeout)
	defer cancel()
	client, err := router.NewAdminClient(o.Kafka)
	if err != nil {
		return cp, false, err
	}
	defer client.Close()
	return ckafka.NewStore(client, o.Checkpoint).Look(ctx)
}

// readSlots fills in what the slot and the anchor keep.
func (s *Status) readSlots(ctx context.Context, o Options, p checkpoint.Position) (err error) {
	ctx, cancel := context.WithTimeout(ctx, offlineTimeout)
	defer cancel()
	conn, err := replication.NewConnector(o.DSN, o.AppName, o.ConnOptions...)(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // it has only read
	room, err := replication.ReadRoom(ctx, conn)
	if err != nil {
		return err
	}
	slot, found, err := replication.ReadSlot(ctx, conn, o.Slot)
	switch {
	case err != nil:
		return err
	case !found && p.LSN > 0:
		s.Problems = append(s.Problems, fmt.Sprintf("slot %s is gone, and the next start will refuse: what was committed since %s may be missing from the WAL", o.Slot, p.LSN))
	case slot.Invalidation != "":
		s.Problems = append(s.Problems, fmt.Sprintf("slot %s is lost (%s), and the next start will refuse", o.Slot, slot.Invalidation))
	case slot.Active:
		s.Problems = append(s.Problems, fmt.Sprintf("process %d of the server holds slot %s: an instance runs that answers elsewhere (admin.listen)", slot.ActivePID, o.Slot))
	}
	if found && slot.Invalidation == "" {
		s.Confirmed, s.RetainedWAL = slot.ConfirmedFlush.String(), int64(room.WALEnd-slot.RestartLSN)
	}
	if p.LSN > 0 && room.WALEnd > p.LSN {
		s.LagBytes = int64(room.WALEnd - p.LSN)
	}
	anchor, found, err := replication.ReadSlot(ctx, conn, replication.AnchorName(o.Slot))
	if err == nil && found && anchor.Invalidation == "" {
		s.Replay = &ReplayStatus{Slot: anchor.Name, OldestLSN: anchor.ConfirmedFlush.String(), Retained: int64(room.WALEnd - anchor.RestartLSN)}
	}
	return err
}

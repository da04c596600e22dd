package verify

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

const (
	// caughtUpPoll is how often the checkpoint is looked at.
	caughtUpPoll = 200 * time.Millisecond
	// absence is how long the slot may be without a consumer before the connector counts as
	// not running: one that restarts, or is taken over, comes back sooner.
	absence = 5 * time.Second
	// peekLimit bounds the changes that are looked at behind the checkpoint of a connector
	// that does not run, and peekTimeout the time.
	peekLimit   = 10000
	peekTimeout = "30s"
)

// caughtUp waits until everything that ends at or before lsn is in the topics.
func (v *run) caughtUp(ctx context.Context, lsn checkpoint.LSN) (checkpoint.Checkpoint, error) {
	deadline := time.Now().Add(v.o.Timeout)
	var away time.Time // since when the slot has no consumer
	for {
		cp, err := v.checkpoint(ctx)
		if err != nil || cp.Position.LSN >= lsn {
			return cp, err
		}
		active, err := v.running(ctx)
		if err != nil {
			return cp, err
		}
		now := time.Now()
		switch {
		case active:
			away = time.Time{}
		case away.IsZero():
			away = now
		case now.Sub(away) >= absence:
			pending, err := v.pending(ctx, cp.Position, lsn)
			if err != nil {
				return cp, err
			}
			if pending == 0 {
				return cp, nil
			}
			return cp, &checkpoint.Refusal{
				What: fmt.Sprintf("the connector does not run, and the transaction that committed at %s is not in Kafka: its checkpoint is at %s, the database at %s",
					pending, cp.Position, lsn),
				Risk:   "what was not delivered yet would look like a difference",
				Remedy: "start walrelay run, and verify beside it; or let walrelay run --until-caught-up end first",
			}
		}
		if now.After(deadline) {
			return cp, &checkpoint.Refusal{
				What:   fmt.Sprintf("the connector is behind: after %s its checkpoint is at %s, the database was at %s", v.o.Timeout, cp.Position, lsn),
				Risk:   "what was not delivered yet would look like a difference",
				Remedy: "wait until it has caught up (walrelay status, /status), or wait longer with --timeout",
			}
		}
		if err := pause(ctx, caughtUpPoll); err != nil {
			return cp, err
		}
	}
}

// running tells whether the slot has a consumer.
func (v *run) running(ctx context.Context) (active bool, err error) {
	conn, err := v.o.Source(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // nothing hangs on it
	slot, found, err := replication.ReadSlot(ctx, conn, v.o.Slot)
	if err == nil && !found {
		err = &checkpoint.Refusal{
			What:   fmt.Sprintf("slot %q does not exist", v.o.Slot),
			Risk:   "what was committed since the checkpoint is not in Kafka, and would look like a difference",
			Remedy: "see docs/operations.md for a lost slot; walrelay run says what it can do",
		}
	}
	if err == nil && slot.Invalidation != "" {
		err = &checkpoint.Refusal{
			What:   fmt.Sprintf("slot %q is lost (%s)", v.o.Slot, slot.Invalidation),
			Risk:   "what was committed since the checkpoint is not in Kafka, and would look like a difference",
			Remedy: "see docs/operations.md for a lost slot; walrelay run says what it can do",
		}
	}
	return slot.Active, err
}

// pending gives the first commit, up to lsn, that the slot has for us and the position does
// not hold; 0 where there is none. The slot's own position stays where it is.
func (v *run) pending(ctx context.Context, at checkpoint.Position, lsn checkpoint.LSN) (first checkpoint.LSN, err error) {
	conn, err := v.o.Source(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // nothing hangs on it
	if _, err := conn.Exec(ctx, "SET statement_timeout = '"+peekTimeout+"'"); err != nil {
		return 0, fmt.Errorf("look behind the checkpoint: %w", err)
	}
	names := ""
	for i, name := range v.names {
		if i > 0 {
			names += ","
		}
		names += pgx.Identifier{name}.Sanitize()
	}
	rows, err := conn.Query(ctx, `SELECT data FROM pg_catalog.pg_logical_slot_peek_binary_changes($1, $2::text::pg_catalog.pg_lsn, $3, 'proto_version', '1', 'publication_names', $4)`,
		v.o.Slot, lsn.String(), peekLimit, names)
	if err != nil {
		return 0, fmt.Errorf("look behind the checkpoint: %w", replication.SlotRight(conn.Config().User, err))
	}
	n := 0
	var commit checkpoint.LSN
	var data []byte
	_, err = pgx.ForEachRow(rows, []any{&data}, func() error {
		n++
		const begin = 'B' // and the commit's LSN
		switch {
		case len(data) >= 9 && data[0] == begin:
			commit = checkpoint.LSN(binary.BigEndian.Uint64(data[1:]))
		case len(data) > 0 && (data[0] == 'I' || data[0] == 'U' || data[0] == 'D' || data[0] == 'T'):
			if first == 0 && !at.HasTransaction(commit) {
				first = commit
			}
		}
		return nil
	})
	switch {
	case err != nil:
		return 0, fmt.Errorf("look behind the checkpoint: %w", replication.SlotRight(conn.Config().User, err))
	case first == 0 && n >= peekLimit:
		return commit, nil // there may be more
	}
	return first, nil
}

// errAgain says that a table has to be looked at anew, and errAltered that this has to be
// as for the first time.
var (
	errAgain   = errors.New("the table was read again, or altered, meanwhile")
	errAltered = fmt.Errorf("other columns: %w", errAgain)
)

package verify

import (
	"context"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/snapshot"
)

// horizon is where the WAL ended, and then which transactions were running. A commit below
// lsn is visible once none of them runs any more: it enters the WAL while its transaction
// counts as running, so that such a one had ended before, or is among them. Records without
// an xid are judged by it.
type horizon struct {
	lsn     checkpoint.LSN
	running []uint32
}

// horizon looks at the primary. The locks that transactions hold on themselves last longer
// than they count as running.
func (v *run) horizon(ctx context.Context) (h horizon, err error) {
	var lsn string
	if err := v.conn.QueryRow(ctx, "SELECT pg_catalog.pg_current_wal_insert_lsn()::text").Scan(&lsn); err != nil {
		return h, fmt.Errorf("look up the end of the WAL: %w", err)
	}
	if h.lsn, err = checkpoint.ParseLSN(lsn); err != nil {
		return h, fmt.Errorf("look up the end of the WAL: %w", err)
	}
	rows, err := v.conn.Query(ctx, "SELECT transactionid::text FROM pg_catalog.pg_locks WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted")
	if err != nil {
		return h, fmt.Errorf("look up what is running: %w", err)
	}
	var text string
	_, err = pgx.ForEachRow(rows, []any{&text}, func() error {
		xid, err := strconv.ParseUint(text, 10, 32)
		h.running = append(h.running, uint32(xid))
		return err
	})
	if err != nil {
		return h, fmt.Errorf("look up what is running: %w", err)
	}
	return h, nil
}

// settledBy tells whether a snapshot, taken later, is certain to see every commit below
// the horizon's LSN.
func (h *horizon) settledBy(s snapshot.MVCC) bool {
	for _, xid := range h.running {
		// The locks tell 32 bits; the difference to a newer xid tells the others.
		if !s.Sees(s.Xmax + checkpoint.XID(int64(int32(xid-uint32(s.Xmax))))) {
			return false
		}
	}
	return true
}

package replication

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
)

// RunningTransaction is a transaction with an xid, somewhere in the cluster, for which
// a new slot or a publication's horizon has to wait.
type RunningTransaction struct {
	PID       int32  // 0 for a prepared transaction
	GID       string // of a prepared transaction (PREPARE TRANSACTION)
	XID       checkpoint.XID
	Since     time.Time // zero where our role may not see it (pg_read_all_stats)
	State     string    // pg_stat_activity.state, or "prepared"; empty as above
	User      string
	Database  string
	WaitedFor bool // the server waits for this one at this moment
}

// String names the transaction for a log line and says how to look at it.
func (t RunningTransaction) String() string {
	who := "pid " + strconv.Itoa(int(t.PID))
	if t.PID == 0 {
		who = "prepared transaction " + strconv.Quote(t.GID)
	}
	s := fmt.Sprintf("%s (xid %s, user %s, database %s", who, t.XID, t.User, t.Database)
	if !t.Since.IsZero() {
		s += ", since " + t.Since.UTC().Format(time.RFC3339)
	}
	if t.State != "" && t.PID != 0 {
		s += ", " + t.State
	}
	return s + ")"
}

// shownTransactions bounds the list: whoever waits for more has another problem.
const shownTransactions = 100

// running lists transactions with an xid, oldest first, prepared ones included; pid is
// left out, and the transaction that it waits for is marked. backend_xid is visible to
// every role, unlike state and xact_start.
func running(ctx context.Context, conn *pgx.Conn, pid uint32) ([]RunningTransaction, error) {
	rows, err := conn.Query(ctx, `
WITH waits AS (
  SELECT l.transactionid AS xid FROM pg_catalog.pg_locks l
   WHERE l.pid = $1 AND l.locktype = 'transactionid' AND NOT l.granted
)
SELECT t.pid, t.gid, t.xid::text, t.since, t.state, t.usename, t.datname,
       t.xid IN (SELECT xid FROM waits), pg_snapshot_xmax(pg_current_snapshot())::text
  FROM (SELECT a.pid, '' AS gid, a.backend_xid AS xid, a.xact_start AS since, coalesce(a.state, '') AS state,
               coalesce(a.usename::text, '') AS usename, coalesce(a.datname::text, '') AS datname
          FROM pg_catalog.pg_stat_activity a
         WHERE a.backend_xid IS NOT NULL AND a.pid <> $1 AND a.pid <> pg_backend_pid()
        UNION ALL
        SELECT 0, p.gid, p.transaction, p.prepared, 'prepared', p.owner::text, p.database::text
          FROM pg_catalog.pg_prepared_xacts p) t
 ORDER BY pg_catalog.age(t.xid) DESC
 LIMIT $2`, int32(pid), shownTransactions)
	if err != nil {
		return nil, fmt.Errorf("list running transactions: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (RunningTransaction, error) {
		var (
			t         RunningTransaction
			xid, next string
			since     *time.Time
		)
		if err := row.Scan(&t.PID, &t.GID, &xid, &since, &t.State, &t.User, &t.Database, &t.WaitedFor, &next); err != nil {
			return t, err
		}
		if since != nil {
			t.Since = *since
		}
		near, err := parseXID(next)
		if err != nil {
			return t, err
		}
		t.XID, err = widenText(xid, near)
		return t, err
	})
	if err != nil {
		return nil, fmt.Errorf("list running transactions: %w", err)
	}
	return list, nil
}

// OpenHorizon is called right after publications were created, or tables added, in a
// transaction that has committed. It gives the bound of the transactions that may
// still see the catalog from before: all of them have a smaller xid. Pass it to
// HorizonReached; lost, it is opened anew, which is only later, never wrong.
//
// The bound is a fresh xid and not pg_snapshot_xmax, which is one past the last
// *completed* transaction: one that is running may well have a higher xid.
func OpenHorizon(ctx context.Context, conn *pgx.Conn) (checkpoint.XID, error) {
	var text string
	err := pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, "SELECT pg_catalog.pg_current_xact_id()::text").Scan(&text)
	})
	if err != nil {
		return 0, fmt.Errorf("open horizon: %w", err)
	}
	return parseXID(text)
}

// RunningBound is OpenHorizon for where nothing must be written: it takes no xid. Every
// transaction that has an xid now, in any database, prepared ones included, has a smaller
// one than the bound, and whoever gets one later has none below it. Not to be called in a
// transaction that has an xid of its own.
//
// It is the counter's next value. pg_snapshot_xmax is not: that is one past the last
// transaction that completed. No view lists all of the running ones either, since an xid
// is assigned before it is shown anywhere. But age() counts from the counter itself,
// which is read under the lock that assigns.
func RunningBound(ctx context.Context, conn *pgx.Conn) (checkpoint.XID, error) {
	var (
		age  int32
		xmax string
	)
	// 3 is the first xid of a cluster, and any other would do: age() wraps as xids do.
	err := conn.QueryRow(ctx, `SELECT pg_catalog.age('3'::pg_catalog.xid), pg_snapshot_xmax(pg_current_snapshot())::text`).Scan(&age, &xmax)
	if err != nil {
		return 0, fmt.Errorf("read the next xid: %w", err)
	}
	near, err := parseXID(xmax)
	if err != nil {
		return 0, fmt.Errorf("read the next xid: %w", err)
	}
	const first = 3
	return widen(uint32(age)+first, near), nil
}

// HorizonReached tells whether every transaction that was running when the horizon was
// opened has ended, those of other databases and prepared ones included, and then
// gives the horizon: a WAL LSN after which no change is decoded with the catalog from
// before. Until then waiting names those transactions. Callers poll.
func HorizonReached(ctx context.Context, conn *pgx.Conn, bound checkpoint.XID) (horizon checkpoint.LSN, reached bool, waiting []RunningTransaction, err error) {
	var (
		oldest, insert string
		block          int32
		segment        int64
	)
	// The statement's snapshot is taken before the functions run, so that the LSN is
	// the later of the two: a transaction leaves the snapshot's list only after its
	// commit record is in the WAL.
	err = conn.QueryRow(ctx, `SELECT pg_snapshot_xmin(pg_current_snapshot())::text, pg_current_wal_insert_lsn()::text,
       current_setting('wal_block_size')::int, pg_size_bytes(current_setting('wal_segment_size'))`).Scan(&oldest, &insert, &block, &segment)
	if err != nil {
		return 0, false, nil, fmt.Errorf("read horizon: %w", err)
	}
	xmin, err := parseXID(oldest)
	if err != nil {
		return 0, false, nil, fmt.Errorf("read horizon: %w", err)
	}
	if xmin < bound {
		all, err := running(ctx, conn, 0)
		if err != nil {
			return 0, false, nil, err
		}
		for _, t := range all {
			if t.XID < bound {
				waiting = append(waiting, t)
			}
		}
		return 0, false, waiting, nil
	}
	lsn, err := checkpoint.ParseLSN(insert)
	if err != nil {
		return 0, false, nil, fmt.Errorf("read horizon: %w", err)
	}
	return RecordEnd(lsn, uint64(block), uint64(segment)), true, nil, nil
}

func parseXID(text string) (checkpoint.XID, error) {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("parse xid %q: want a decimal number", text)
	}
	return checkpoint.XID(n), nil
}

func widenText(text string, near checkpoint.XID) (checkpoint.XID, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("parse xid %q: want a decimal number of 32 bits", text)
	}
	return widen(uint32(n), near), nil
}

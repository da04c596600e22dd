package replication

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
)

// Plugin is the output plugin that the slot must have.
const Plugin = "pgoutput"

const (
	// createGrace is how long a slot may take before anybody asks what it waits for:
	// with no transaction running it takes well under it.
	createGrace = time.Second
	// createReport is the time between two reports of a wait.
	createReport = 5 * time.Second
	// cancelBudget bounds the wait for the server to give a slot up after a cancel
	// request; then its backend is terminated.
	cancelBudget = 5 * time.Second
)

// Slot is a replication slot as pg_replication_slots shows it.
type Slot struct {
	Name           string
	Plugin         string // empty for a physical slot
	Type           string // "logical" or "physical"
	Database       string
	Temporary      bool
	Active         bool
	ActivePID      int32 // 0 when not active
	RestartLSN     checkpoint.LSN
	ConfirmedFlush checkpoint.LSN
	CatalogXmin    checkpoint.XID
	WALStatus      string // reserved, extended, unreserved, lost; empty where no WAL is reserved
	// SafeWALSize is how many bytes may still be written before the slot is in danger
	// of being lost; negative when past that, nil without max_slot_wal_keep_size.
	SafeWALSize *int64
	// Invalidation is why the slot is lost; empty while it is usable. Servers from 17
	// on give the reason (wal_removed, rows_removed, wal_level_insufficient,
	// idle_timeout); for older ones it is wal_removed or, in 16, rows_removed.
	Invalidation string
	TwoPhase     bool
	Failover     bool // 17 and later
	Synced       bool // 17 and later: on a standby, copied from the primary
}

// slotRow is pg_replication_slots as JSON: one query for servers that have between 16
// and 21 columns.
type slotRow struct {
	Name           string  `json:"slot_name"`
	Plugin         *string `json:"plugin"`
	Type           string  `json:"slot_type"`
	Database       *string `json:"database"`
	Temporary      bool    `json:"temporary"`
	Active         bool    `json:"active"`
	ActivePID      *int32  `json:"active_pid"`
	CatalogXmin    *string `json:"catalog_xmin"`
	RestartLSN     *string `json:"restart_lsn"`
	ConfirmedFlush *string `json:"confirmed_flush_lsn"`
	WALStatus      *string `json:"wal_status"`
	SafeWALSize    *int64  `json:"safe_wal_size"`
	TwoPhase       bool    `json:"two_phase"`
	Conflicting    *bool   `json:"conflicting"`
	Invalidation   *string `json:"invalidation_reason"`
	Failover       bool    `json:"failover"`
	Synced         bool    `json:"synced"`
}

// ReadSlot reads a slot; found is false where there is none.
func ReadSlot(ctx context.Context, conn *pgx.Conn, name string) (s Slot, found bool, err error) {
	var row, next string
	err = conn.QueryRow(ctx, `SELECT to_jsonb(s)::text, pg_snapshot_xmax(pg_current_snapshot())::text
  FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = $1`, name).Scan(&row, &next)
	if errors.Is(err, pgx.ErrNoRows) {
		return Slot{}, false, nil
	}
	if err != nil {
		return Slot{}, false, fmt.Errorf("read slot %s: %w", name, err)
	}
	near, err := parseXID(next)
	if err != nil {
		return Slot{}, false, fmt.Errorf("read slot %s: %w", name, err)
	}
	if s, err = parseSlot([]byte(row), near); err != nil {
		return Slot{}, false, fmt.Errorf("read slot %s: %w", name, err)
	}
	return s, true, nil
}

func parseSlot(row []byte, near checkpoint.XID) (Slot, error) {
	var r slotRow
	if err := json.Unmarshal(row, &r); err != nil {
		return Slot{}, fmt.Errorf("parse pg_replication_slots: %w", err)
	}
	s := Slot{
		Name: r.Name, Plugin: value(r.Plugin), Type: r.Type, Database: value(r.Database), Temporary: r.Temporary,
		Active: r.Active, ActivePID: value(r.ActivePID), WALStatus: value(r.WALStatus), SafeWALSize: r.SafeWALSize,
		Invalidation: value(r.Invalidation), TwoPhase: r.TwoPhase, Failover: r.Failover, Synced: r.Synced,
	}
	switch {
	case s.Invalidation != "":
	case value(r.Conflicting):
		s.Invalidation = "rows_removed"
	case s.WALStatus == "lost":
		s.Invalidation = "wal_removed"
	}
	var err error
	if r.RestartLSN != nil {
		if s.RestartLSN, err = checkpoint.ParseLSN(*r.RestartLSN); err != nil {
			return Slot{}, err
		}
	}
	if r.ConfirmedFlush != nil {
		if s.ConfirmedFlush, err = checkpoint.ParseLSN(*r.ConfirmedFlush); err != nil {
			return Slot{}, err
		}
	}
	if r.CatalogXmin != nil {
		if s.CatalogXmin, err = widenText(*r.CatalogXmin, near); err != nil {
			return Slot{}, err
		}
	}
	return s, nil
}

// value gives what p points to, or the zero value.
func value[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}

// NewSlot is what a slot begins with.
type NewSlot struct {
	// LSN is the consistent point: every transaction that commits after it is decoded in
	// full.
	LSN checkpoint.LSN
	// Snapshot is the MVCC snapshot at that point, as pg_current_snapshot() prints it: the
	// transactions that it sees are not in the stream, and all others are, once they
	// commit. It lists as running whatever had not committed by then, aborted ones
	// included. Empty where it is not known: the server could not build it, or the
	// connection was lost.
	Snapshot string
}

// SlotRequest says which slot is created.
type SlotRequest struct {
	Name     string
	Failover bool // failover-enabled, on servers from PostgreSQL 17 on; older ones do not know that
	// Report is told what the creation waits for; may be nil.
	Report func([]RunningTransaction)
	// Within is called in a transaction that sees what the slot does not send, if the server
	// has exported its snapshot; may be nil. Its failure is not one of the creation.
	Within func(context.Context, *pgx.Conn) error
	// Altered is told of tables that were altered meanwhile, so that the slot is created
	// again; may be nil.
	Altered func(tables []string)
}

// CreateSlot creates the logical slot.
//
// The publications must exist before (see Sync). The server waits for all transactions
// that run when it starts, in every database; while it does, Report is told which,
// first after a second and then every few. Both functions are called on the caller's
// goroutine. Where tables were altered meanwhile the slot is created again, a few times, and
// then an *AlteredError says so.
//
// When ctx ends, the query is cancelled in the server, which drops the unfinished
// slot. A slot that was finished just then is kept and returned without an error: it
// is the caller's, and a later start adopts it.
func CreateSlot(ctx context.Context, connect Connector, r SlotRequest) (NewSlot, error) {
	var altered []string
	for export, try := true, 0; try < createTries; try++ {
		slot, tables, err := createSlot(ctx, connect, r, export)
		switch {
		case export && hasCode(err, codeSerializationFailure):
			// More transactions are between the snapshot's bounds than a snapshot can hold.
			export = false
			continue
		case err != nil || len(tables) == 0:
			return slot, err
		}
		if altered = tables; r.Altered != nil {
			r.Altered(tables)
		}
	}
	return NewSlot{}, &AlteredError{Slot: r.Name, Tables: altered}
}

// createSlot creates the slot on a walsender connection, since only that exports the
// snapshot. Where tables were altered meanwhile it gives them, and the slot is dropped.
func createSlot(ctx context.Context, connect Connector, o SlotRequest, export bool) (slot NewSlot, altered []string, err error) {
	var user string
	conn, err := connect(ctx, func(c *pgconn.Config) {
		c.RuntimeParams["replication"] = "database"
		user = c.User
	})
	if err != nil {
		if noReplicationRight(err) {
			return NewSlot{}, nil, refuseReplicationRight(user, err)
		}
		return NewSlot{}, nil, err
	}
	since, err := prepareCreation(ctx, conn)
	if err != nil {
		closeQuietly(ctx, conn)
		return NewSlot{}, nil, err
	}
	pid, query := conn.PgConn().PID(), createSQL(ServerMajor(conn.PgConn()), o.Name, o.Failover, export)
	// pgx answers a cancelled context by closing the socket, which a waiting backend
	// does not notice: it would finish the slot for nobody. So the query runs under a
	// context of its own, and is cancelled by a cancel request.
	queryCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	type result struct {
		lsn, exported string
		err           error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		rows, err := TextRows(queryCtx, conn, query)
		switch {
		case err != nil:
			r.err = err
		case len(rows) != 1 || len(rows[0]) < 3:
			r.err = fmt.Errorf("the server answered with %d rows", len(rows))
		default:
			r.lsn, r.exported = string(rows[0][1]), string(rows[0][2])
		}
		done <- r
	}()
	var got result
	finished := watchCreation(ctx, connect, pid, o.Report, done, &got)
	if !finished {
		got = cancelCreation(ctx, connect, conn, pid, done)
	}
	stop()
	defer closeQuietly(ctx, conn) // the exported snapshot lives as long as this
	if got.err != nil {
		if ctx.Err() != nil {
			return NewSlot{}, nil, fmt.Errorf("create slot %s: %w", o.Name, context.Cause(ctx))
		}
		return NewSlot{}, nil, createFailure(o.Name, user, got.err)
	}
	lsn, err := checkpoint.ParseLSN(got.lsn)
	if err != nil {
		return NewSlot{}, nil, fmt.Errorf("create slot %s: %w", o.Name, err)
	}
	slot = NewSlot{LSN: lsn}
	if got.exported != "" {
		// Not having it is no failure: the slot is there, and whoever needs the snapshot
		// must do without after every restart anyway.
		slot.Snapshot, _ = importSnapshot(ctx, connect, got.exported, o.Within)
	}
	altered, err = dropAltered(ctx, conn, o.Name, since)
	return slot, altered, err
}

// createSQL is the walsender's command; 15 brought the options in parentheses.
func createSQL(major int, name string, failover, export bool) string {
	query := "CREATE_REPLICATION_SLOT " + quote(name) + " LOGICAL " + Plugin
	switch {
	case major < 15 && export:
		return query + " EXPORT_SNAPSHOT"
	case major < 15:
		return query + " NOEXPORT_SNAPSHOT"
	case export:
		query += " (SNAPSHOT 'export'"
	default:
		query += " (SNAPSHOT 'nothing'"
	}
	if failover && major >= 17 {
		query += ", FAILOVER true"
	}
	return query + ")"
}

// importBudget bounds the look at an exported snapshot, of a server that may be busy.
const importBudget = 30 * time.Second

// importSnapshot reads an exported snapshot's text, and lets within look at what it sees.
func importSnapshot(ctx context.Context, connect Connector, exported string, within func(context.Context, *pgx.Conn) error) (text string, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), importBudget)
	defer cancel()
	conn, err := connect(ctx)
	if err != nil {
		return "", err
	}
	defer closeQuietly(ctx, conn) // and the transaction with it
	rows, err := TextResults(ctx, conn, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "SET TRANSACTION SNAPSHOT "+QuoteLiteral(exported), "SELECT pg_catalog.pg_current_snapshot()::text")
	if err != nil {
		return "", err
	}
	text = string(rows[2][0][0])
	if within != nil {
		_ = within(ctx, conn) // who asked knows
	}
	return text, nil
}

// watchCreation waits for the result and reports what the server waits for; false
// when ctx ended first.
func watchCreation[R any](ctx context.Context, connect Connector, pid uint32, report func([]RunningTransaction), done <-chan R, got *R) bool {
	timer := time.NewTimer(createGrace)
	defer timer.Stop()
	var watch *pgx.Conn
	defer func() {
		if watch != nil {
			closeQuietly(ctx, watch)
		}
	}()
	for {
		select {
		case *got = <-done:
			return true
		case <-ctx.Done():
			return false
		case <-timer.C:
		}
		timer.Reset(createReport)
		// Watching is for people only, so that its errors do not end the creation: the
		// next round tries again.
		if watch == nil || watch.IsClosed() {
			watch, _ = connect(ctx)
		}
		if watch == nil {
			continue
		}
		if list, err := running(ctx, watch, pid); err == nil && len(list) > 0 && report != nil {
			report(list)
		}
	}
}

// cancelCreation ends the creation in the server and waits until it has: with a cancel
// request, and, where that is lost on the way, by terminating the backend.
func cancelCreation[R any](ctx context.Context, connect Connector, conn *pgx.Conn, pid uint32, done <-chan R) R {
	ctx = context.WithoutCancel(ctx)
	budget, cancel := context.WithTimeout(ctx, cancelBudget)
	defer cancel()
	_ = conn.PgConn().CancelRequest(budget) // when lost, the terminate below takes over
	select {
	case r := <-done:
		return r
	case <-budget.Done():
	}
	last, cancelLast := context.WithTimeout(ctx, cancelBudget)
	defer cancelLast()
	if killer, err := connect(last); err == nil {
		_, _ = killer.Exec(last, "SELECT pg_catalog.pg_terminate_backend($1)", int32(pid))
		closeQuietly(last, killer)
	}
	select {
	case r := <-done:
		return r
	case <-last.Done():
	}
	// The server cannot be reached. Closing the socket is all that is left; the query
	// returns with that error.
	_ = conn.PgConn().Conn().Close()
	return <-done
}

// closeQuietly closes a connection whose work is done; an error would say nothing that
// matters any more.
func closeQuietly(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// createFailure turns the server's refusals into ours.
func createFailure(name, role string, err error) error {
	switch {
	case hasCode(err, codeConfigurationLimit):
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("no replication slot is free for %q", name),
			Remedy: "raise max_replication_slots (needs a restart of PostgreSQL), or drop a slot that nobody uses: SELECT slot_name, active FROM pg_replication_slots",
			Err:    err,
		}
	case hasCode(err, codeInsufficientPrivilege):
		return refuseReplicationRight(role, err)
	case hasCode(err, codeObjectNotReady):
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("the server cannot make the logical slot %q", name),
			Remedy: "ALTER SYSTEM SET wal_level = logical, then restart PostgreSQL",
			Err:    err,
		}
	}
	return fmt.Errorf("create slot %s: %w", name, err)
}

// DropSlot drops a slot that nobody holds; with it the WAL that it kept is gone. A slot
// that does not exist is no error.
func DropSlot(ctx context.Context, conn *pgx.Conn, name string) error {
	_, err := conn.Exec(ctx, `SELECT pg_catalog.pg_drop_replication_slot(slot_name)
  FROM pg_catalog.pg_replication_slots WHERE slot_name = $1`, name)
	if err != nil && !hasCode(err, codeUndefinedObject) {
		return fmt.Errorf("drop slot %s: %w", name, err)
	}
	return nil
}

// DropPublications drops the two publications that a managed connector made. One that does
// not exist is no error.
func DropPublications(ctx context.Context, conn *pgx.Conn, name string) error {
	if _, err := conn.Exec(ctx, "DROP PUBLICATION IF EXISTS "+quote(name)+", "+quote(name+InsertSuffix)); err != nil {
		return fmt.Errorf("drop publications %s: %w", name, err)
	}
	return nil
}

// TerminateHolder ends the walsender that holds the slot (run --takeover) and gives its
// pid, 0 if nobody held it. The slot is free a moment later, so that callers go on
// retrying. Never call it unasked: the holder may be a healthy instance.
func TerminateHolder(ctx context.Context, conn *pgx.Conn, name string) (pid int32, err error) {
	var ended bool
	err = conn.QueryRow(ctx, `SELECT active_pid, pg_catalog.pg_terminate_backend(active_pid)
  FROM pg_catalog.pg_replication_slots WHERE slot_name = $1 AND active_pid IS NOT NULL`, name).Scan(&pid, &ended)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, nil
	case hasCode(err, codeInsufficientPrivilege):
		return 0, fmt.Errorf("end the holder of slot %s: GRANT pg_signal_backend to our role, or end it as its own role: %w", name, err)
	case err != nil:
		return 0, fmt.Errorf("end the holder of slot %s: %w", name, err)
	}
	return pid, nil
}

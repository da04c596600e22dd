package replication

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
)

// AnchorSuffix makes the anchor's name of the slot's.
const AnchorSuffix = "_anchor"

// AnchorName is the name of a slot's anchor: the second slot, which trails the first, so
// that the WAL between the two can be read again.
func AnchorName(slot string) string { return slot + AnchorSuffix }

// replayInfix stands in the name of the temporary slots that a connector's replays use.
const replayInfix = "_replay_"

// ReplaySlot is the name of a replay's temporary slot; unique is 8 characters that
// PostgreSQL takes.
func ReplaySlot(slot, unique string) string { return replaySlots(slot) + unique }

// replaySlots is what the names of all temporary slots of a connector's replays begin
// with. Two connectors whose slots begin alike for that long share it, and then hold back
// each other's anchors while they replay, which harms nobody.
func replaySlots(slot string) string {
	const room = 63 - len(replayInfix) - 8
	return slot[:min(len(slot), room)] + replayInfix
}

// CopySlot makes the slot to, a copy of the logical slot from, which may be in use: what
// the one can read the other can read too. It reads no WAL. The copy is not
// failover-enabled, whatever from is.
func CopySlot(ctx context.Context, conn *pgx.Conn, from, to string) (confirmed checkpoint.LSN, err error) {
	var text string
	for range copyTries {
		err = conn.QueryRow(ctx, "SELECT lsn::text FROM pg_catalog.pg_copy_logical_replication_slot($1, $2, false)", from, to).Scan(&text)
		if !hasCode(err, codeObjectNotReady) {
			break // the slot moved on in the middle of being copied
		}
	}
	if err != nil {
		return 0, copyFailure(from, to, err)
	}
	return checkpoint.ParseLSN(text)
}

// copyTries is how often a copy is tried while the slot moves on.
const copyTries = 5

func copyFailure(from, to string, err error) error {
	if hasCode(err, codeConfigurationLimit) || hasCode(err, codeInsufficientPrivilege) {
		return createFailure(to, "our role", err)
	}
	return fmt.Errorf("copy slot %s to %s: %w", from, to, err)
}

// SetFailover makes a slot failover-enabled, which only servers from 17 on know, and only
// on a walsender connection.
func SetFailover(ctx context.Context, cfg *pgconn.Config, slot string) error {
	conn, err := ConnectReplication(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, "ALTER_REPLICATION_SLOT "+quote(slot)+" (FAILOVER true)").ReadAll(); err != nil {
		return fmt.Errorf("make slot %s failover-enabled: %w", slot, err)
	}
	return nil
}

// AdvanceSlot moves a slot that nobody holds up to lsn, which must be the end of a record.
// The server reads the WAL between without decoding its rows.
func AdvanceSlot(ctx context.Context, conn *pgx.Conn, name string, lsn checkpoint.LSN) error {
	if _, err := conn.Exec(ctx, "SELECT pg_catalog.pg_replication_slot_advance($1, $2::text::pg_catalog.pg_lsn)", name, lsn.String()); err != nil {
		return fmt.Errorf("advance slot %s to %s: %w", name, lsn, err)
	}
	return nil
}

// ReplayFloor is how far the slowest replay has come that runs now; 0 where none does.
func ReplayFloor(ctx context.Context, conn *pgx.Conn, slot string) (checkpoint.LSN, error) {
	var text *string
	err := conn.QueryRow(ctx, `SELECT min(confirmed_flush_lsn)::text FROM pg_catalog.pg_replication_slots
 WHERE temporary AND active AND starts_with(slot_name::text, $1)`, replaySlots(slot)).Scan(&text)
	if err != nil {
		return 0, fmt.Errorf("look for replays: %w", err)
	}
	if text == nil {
		return 0, nil
	}
	return checkpoint.ParseLSN(*text)
}

// Room is what the server has to say about the WAL that slots keep.
type Room struct {
	Now         time.Time
	WALEnd      checkpoint.LSN
	MaxKeep     int64         // max_slot_wal_keep_size in bytes; negative: no limit
	IdleTimeout time.Duration // idle_replication_slot_timeout; 0: none
}

// ReadRoom reads it; cheap enough for every few seconds.
func ReadRoom(ctx context.Context, conn *pgx.Conn) (r Room, err error) {
	var (
		end  string
		idle float64
	)
	err = conn.QueryRow(ctx, `
SELECT clock_timestamp(),
       (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END)::text,
       (SELECT CASE WHEN setting::int8 < 0 THEN -1 ELSE setting::int8 * 1048576 END FROM pg_catalog.pg_settings WHERE name = 'max_slot_wal_keep_size'),
       coalesce(extract(epoch FROM current_setting('idle_replication_slot_timeout', true)::interval), 0)::float8`).
		Scan(&r.Now, &end, &r.MaxKeep, &idle)
	if err != nil {
		return r, fmt.Errorf("read WAL room: %w", err)
	}
	r.IdleTimeout = time.Duration(idle * float64(time.Second))
	r.WALEnd, err = checkpoint.ParseLSN(end)
	return r, err
}

// OpenHold opens a connection with a temporary copy, named name, of the slot source, and
// gives where that stands: from there on the WAL stays as long as the stream does, whatever
// becomes of the source. Start begins to stream from it.
func OpenHold(ctx context.Context, cfg *pgconn.Config, source, name string) (s *Stream, confirmed checkpoint.LSN, err error) {
	if s, err = Open(ctx, cfg); err != nil {
		return nil, 0, err
	}
	if confirmed, err = s.copySlot(ctx, source, name); err != nil {
		s.Abort()
		return nil, 0, err
	}
	return s, confirmed, nil
}

// OpenCopy streams from a temporary copy of the slot source, which lives as long as the
// stream: from o.From on where that is set, else from where the source stands, which is
// given back. o.Slot is the copy's name. The source is neither moved nor held.
//
// The server moves a start before confirmed up to there without a word: a caller that needs
// what is before compares.
func OpenCopy(ctx context.Context, cfg *pgconn.Config, source string, o StreamOptions) (s *Stream, confirmed checkpoint.LSN, err error) {
	if s, confirmed, err = OpenHold(ctx, cfg, source, o.Slot); err != nil {
		return nil, 0, err
	}
	if err = s.Start(ctx, o); err != nil {
		s.Abort()
		return nil, 0, err
	}
	return s, confirmed, nil
}

// copySlot makes the temporary slot to on the stream's own connection.
func (s *Stream) copySlot(ctx context.Context, from, to string) (checkpoint.LSN, error) {
	query := "SELECT lsn FROM pg_catalog.pg_copy_logical_replication_slot(" + QuoteLiteral(from) + ", " + QuoteLiteral(to) + ", true)"
	var err error
	for range copyTries {
		var results []*pgconn.Result
		if results, err = s.conn.Exec(ctx, query).ReadAll(); err == nil {
			if len(results) != 1 || len(results[0].Rows) != 1 {
				return 0, fmt.Errorf("copy slot %s: the server gave no row", from)
			}
			return checkpoint.ParseLSN(string(results[0].Rows[0][0]))
		}
		if !hasCode(err, codeObjectNotReady) {
			break
		}
	}
	return 0, copyFailure(from, to, err)
}

// ErrNoCommit says that nothing was committed where a first commit was looked for.
var ErrNoCommit = errors.New("nothing was committed there")

// FirstCommit gives the first source transaction that a copy of the slot source sends from
// o.From on and that ends at or before until. ErrNoCommit where there is none.
func FirstCommit(ctx context.Context, cfg *pgconn.Config, source string, o StreamOptions, until checkpoint.LSN) (Transaction, error) {
	s, _, err := OpenCopy(ctx, cfg, source, o)
	if err != nil {
		return Transaction{}, err
	}
	defer s.Abort()
	for {
		ev, err := s.Next(ctx)
		switch {
		case err != nil:
			return Transaction{}, err
		case ev.Kind == KindBegin && ev.Txn.CommitLSN < until:
			return *ev.Txn, nil
		case ev.Kind == KindBegin, ev.Kind == KindProgress && ev.LSN >= until:
			return Transaction{}, ErrNoCommit
		}
	}
}

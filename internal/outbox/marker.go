package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/internal/killpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/snapshot"
)

// Marker works on rows on a connection of its own, so that neither the stream nor the
// catalog waits for the application's locks. It has one job at a time: Do hands it out,
// Done gives it back.
type Marker struct {
	connect replication.Connector
	log     zerolog.Logger
	conn    *pgx.Conn
	wait    time.Duration // the connection's lock_timeout
	jobs    chan *Job
	done    chan *Job
	ended   chan struct{}
	cancel  context.CancelFunc
}

// NewMarker makes a Marker, which connects with its first job. connect must lead to the
// primary. Close ends it.
func NewMarker(ctx context.Context, connect replication.Connector, log zerolog.Logger) *Marker {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	m := &Marker{
		connect: connect, log: log,
		jobs: make(chan *Job, 1), done: make(chan *Job, 1), ended: make(chan struct{}), cancel: cancel,
	}
	go m.run(ctx)
	return m
}

// Do hands a job out; the last one must be back.
func (m *Marker) Do(j *Job) { m.jobs <- j }

// Done gives the job back.
func (m *Marker) Done() <-chan *Job { return m.done }

// Close ends the Marker. A job that is not back may have been done or not.
func (m *Marker) Close() {
	m.cancel()
	<-m.ended
}

func (m *Marker) run(ctx context.Context) {
	defer close(m.ended)
	defer m.disconnect(ctx)
	for {
		select {
		case j := <-m.jobs:
			m.work(ctx, j)
			m.done <- j
		case <-ctx.Done():
			return
		}
	}
}

// LockWait is how long a lock of the application is waited for. It must be below the
// server's deadlock_timeout (1 s), which makes us the one that gives way when the
// application's transactions and ours wait for each other: it never sees a deadlock because of us.
const LockWait = 500 * time.Millisecond

// statementTimeout bounds one statement.
const (
	connectTimeout   = 15 * time.Second
	statementTimeout = 30 * time.Second
)

// settings are those of a connection that changes rows. A role's default isolation
// would make rows that changed meanwhile an error, its read-only transactions every
// change; a policy has to be one; and a commit that nobody waits for could be lost in a crash
// of the server, after a checkpoint that takes the row for marked. The connection is idle for
// as long as nothing is delivered.
func settings() string {
	return fmt.Sprintf("SET lock_timeout = %d; SET statement_timeout = %d; SET idle_session_timeout = 0; SET default_transaction_isolation = 'read committed'; SET default_transaction_read_only = off; SET row_security = off; "+
		"SELECT pg_catalog.set_config('synchronous_commit', CASE s WHEN 'off' THEN 'local' ELSE s END, false) FROM pg_catalog.current_setting('synchronous_commit') s",
		LockWait.Milliseconds(), statementTimeout.Milliseconds())
}

func (m *Marker) work(ctx context.Context, j *Job) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout+2*statementTimeout)
	defer cancel()
	j.Err = nil
	used := m.conn != nil
	err := m.do(ctx, j)
	if err != nil && IsLost(err) && used && ctx.Err() == nil {
		// It may have been cut off long ago, while there was nothing to do. What was done
		// before it was lost is done again, which changes nothing.
		m.disconnect(ctx)
		err = m.do(ctx, j)
	}
	if err != nil {
		j.failed(err)
		if IsLost(err) {
			m.disconnect(ctx)
		}
	}
}

func (m *Marker) do(ctx context.Context, j *Job) error {
	if m.conn == nil {
		conn, err := open(ctx, m.connect)
		if err != nil {
			return err
		}
		m.conn, m.wait = conn, LockWait
	}
	if m.wait != j.LockWait {
		if _, err := m.conn.PgConn().Exec(ctx, fmt.Sprintf("SET lock_timeout = %d", j.LockWait.Milliseconds())).ReadAll(); err != nil {
			return fmt.Errorf("set lock_timeout: %w", err)
		}
		m.wait = j.LockWait
	}
	var seen snapshot.MVCC
	if j.wantsLook() {
		var err error
		if seen, err = snapshot.Current(ctx, m.conn); err != nil {
			return err
		}
	}
	if !j.look(seen) {
		return nil
	}
	killpoint.At(killpoint.Marking)
	// One statement is one transaction, as short as can be; its snapshot is newer than the one
	// looked at.
	result := m.conn.PgConn().ExecParams(ctx, j.Target.sql, j.parameters(), nil, nil, nil).Read()
	if err := j.Target.read(result); err != nil {
		return fmt.Errorf("%s rows of %s: %w", j.Target.After, j.Target.String(), err)
	}
	killpoint.At(killpoint.Marked)
	return nil
}

// open connects for work on rows.
func open(ctx context.Context, connect replication.Connector) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	conn, err := connect(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := conn.PgConn().Exec(ctx, settings()).ReadAll(); err != nil {
		_ = conn.Close(ctx) // it is of no use
		return nil, fmt.Errorf("set up the connection for outbox rows: %w", err)
	}
	return conn, nil
}

func (m *Marker) disconnect(ctx context.Context) {
	if m.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := m.conn.Close(ctx); err != nil {
		m.log.Debug().Err(err).Msg("connection for outbox rows closed")
	}
	m.conn = nil
}

// IsLost tells whether an error is the connection's and not about a statement.
func IsLost(err error) bool {
	var answer *pgconn.PgError
	return !errors.As(err, &answer) || strings.HasPrefix(answer.Code, "57P") || strings.HasPrefix(answer.Code, "08")
}

// IsRow tells whether an error may be one row's: it is locked, or a trigger or constraint
// refuses it. A statement that takes too long may be that with fewer rows.
func IsRow(err error) bool { return kindOf(err) == ofRow }

// IsTable tells whether an error is every row's of the table: rights, names, a missing
// replica identity. Others concern every table: a full disk, a standby.
func IsTable(err error) bool { return kindOf(err) == ofTable }

// IsRedefined tells whether the table is not what the statement was made for any more.
func IsRedefined(err error) bool {
	var answer *pgconn.PgError
	return errors.As(err, &answer) && (answer.Code == codeUndefinedTable || answer.Code == "42703" || answer.Code == "42883" || answer.Code == "42804" || answer.Code == "3F000")
}

// IsLocked tells whether somebody else's lock was in the way.
func IsLocked(err error) bool {
	var answer *pgconn.PgError
	return errors.As(err, &answer) && (answer.Code == "55P03" || answer.Code == "40P01")
}

// IsSlow tells whether the statement took longer than it may.
func IsSlow(err error) bool {
	var answer *pgconn.PgError
	return errors.As(err, &answer) && answer.Code == "57014"
}

const codeUndefinedTable = "42P01"

// kind is whom an error concerns.
type kind uint8

const (
	ofAll kind = iota
	ofTable
	ofRow
)

func kindOf(err error) kind {
	var answer *pgconn.PgError
	if IsLost(err) || !errors.As(err, &answer) || len(answer.Code) != 5 {
		return ofAll
	}
	switch answer.Code[:2] {
	case "53", "58", "25", "28", "3D":
		return ofAll
	case "42", "3F", "0A", "54":
		return ofTable
	}
	if answer.Code == "55000" { // no replica identity
		return ofTable
	}
	return ofRow
}

package cdctest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// session is one connection of the workload and the transaction that it is in.
// Each operation sends its SQL and appends what the database says it did.
type session struct {
	w      *Workload
	ctx    context.Context // for statements
	stop   context.Context // done when the run is to end
	conn   *pgx.Conn
	number int
	tables map[string]*sqlFor
	rng    *rand.Rand // of the transaction in hand
	tx     *Txn
	gid    string // of the transaction that is being prepared; empty: none
}

func (s *session) close() { _ = s.conn.Close(s.ctx) }

// begin takes the transaction's id at once, so that a long one is old in every
// sense.
func (s *session) begin(index int) error {
	begun := s.w.clock.Add(1)
	s.tx = &Txn{}
	if _, err := s.conn.Exec(s.ctx, "BEGIN"); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	var xid string
	if err := s.conn.QueryRow(s.ctx, "SELECT pg_current_xact_id()::text").Scan(&xid); err != nil {
		return fmt.Errorf("read transaction id: %w", err)
	}
	n, err := strconv.ParseUint(xid, 10, 64)
	if err != nil {
		return fmt.Errorf("read transaction id: %w", err)
	}
	s.tx = &Txn{XID: n, Session: s.number, Index: index, Begun: begun}
	return nil
}

func (s *session) commit() error {
	s.tx.CommitSent = s.w.clock.Add(1)
	tag, err := s.conn.Exec(s.ctx, "COMMIT")
	if err != nil {
		return fmt.Errorf("commit, its outcome is not known: %w", err)
	}
	if tag.String() != "COMMIT" { // a failed transaction answers COMMIT with ROLLBACK
		return fmt.Errorf("commit: PostgreSQL answered %s", tag)
	}
	s.committed()
	return nil
}

// committed notes that the commit has returned.
func (s *session) committed() {
	s.tx.CommitDone = s.w.clock.Add(1)
	s.w.note(s.tx, true)
	s.w.commits.Add(1)
}

func (s *session) rollback() error {
	if _, err := s.conn.Exec(s.ctx, "ROLLBACK"); err != nil {
		return fmt.Errorf("roll back: %w", err)
	}
	s.w.note(s.tx, false)
	return nil
}

func (s *session) exec(sql string, args ...any) error {
	_, err := s.conn.Exec(s.ctx, sql, args...)
	return err
}

// rows runs a query whose columns are all text.
func (s *session) rows(sql string, args ...any) ([]Row, error) {
	res, err := s.conn.Query(s.ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(res, func(r pgx.CollectableRow) (Row, error) {
		row := make(Row, len(r.FieldDescriptions()))
		dest := make([]any, len(row))
		for i := range row {
			dest[i] = &row[i]
		}
		return row, r.Scan(dest...)
	})
}

func (s *session) did(op byte, t *sqlFor, old, row Row) {
	s.tx.Changes = append(s.tx.Changes, Change{Op: op, Table: t.Table, Old: old, New: row})
}

func (s *session) insert(table string, row Row) error {
	t := s.tables[table]
	rows, err := s.rows(t.ins, anys(row)...)
	for _, r := range rows {
		s.did('c', t, nil, r)
	}
	return err
}

func anys(row Row) []any {
	args := make([]any, len(row))
	for i := range row {
		args[i] = row[i]
	}
	return args
}

// lockRow locks the row with row's key and gives it, nil where there is none.
func (s *session) lockRow(t *sqlFor, row Row) (Row, error) {
	rows, err := s.rows(t.lock, t.keyOf(row)...)
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	return rows[0], nil
}

// put writes row: an update of some columns where its key exists, else an insert.
func (s *session) put(table string, row Row) error {
	t := s.tables[table]
	var set []int
	for i, c := range t.Columns {
		// A big column is mostly left alone: those are the unchanged TOAST values.
		if !c.Key && (c.Big && s.rng.IntN(4) == 0 || !c.Big && s.rng.IntN(2) == 0) {
			set = append(set, i)
		}
	}
	if len(set) == 0 {
		set = []int{len(t.Columns) - 1}
	}
	old, err := s.lockRow(t, row)
	if err != nil {
		return err
	}
	if old == nil {
		return s.insert(table, row)
	}
	return s.updateRow(t, set, old, row)
}

func (s *session) updateRow(t *sqlFor, set []int, old, row Row) error {
	sql, args := t.update(set, old, row)
	rows, err := s.rows(sql, args...)
	for _, r := range rows {
		if t.Name == "parts" && !samePartition(old, r) { // the server makes two of it
			s.did('d', t, old, nil)
			s.did('c', t, nil, r)
			continue
		}
		s.did('u', t, old, r)
	}
	return err
}

// rekey moves the row with from's key to to's key, where it exists and to's does
// not; sometimes another column changes with it.
func (s *session) rekey(table string, from, to Row) error {
	t := s.tables[table]
	set := slices.Clone(t.key)
	if s.rng.IntN(2) == 0 {
		set = append(set, len(t.Columns)-1)
	}
	old, err := s.lockRow(t, from)
	if err != nil || old == nil || t.sameKey(from, to) {
		return err
	}
	if there, err := s.lockRow(t, to); err != nil || there != nil {
		return err
	}
	return s.updateRow(t, set, old, to)
}

func (s *session) remove(table string, row Row) error {
	t := s.tables[table]
	rows, err := s.rows(t.del, t.keyOf(row)...)
	for _, r := range rows {
		s.did('d', t, r, nil)
	}
	return err
}

// many runs a statement that changes many rows of table and ends in RETURNING its
// columns. Rows come back in the order in which they were written. The old rows of
// an update are not known.
func (s *session) many(op byte, table, sql string, args ...any) error {
	t := s.tables[table]
	rows, err := s.rows(sql+" RETURNING "+t.list, args...)
	for _, r := range rows {
		if op == 'd' {
			s.did(op, t, r, nil)
		} else {
			s.did(op, t, nil, r)
		}
	}
	return err
}

// copyIn writes rows (an id from the range and a text) by COPY.
func (s *session) copyIn(table string, from, n int64) error {
	var text strings.Builder
	for i := range n {
		fmt.Fprintf(&text, "%d\tcopied %d \\\\ %x\n", from+i, i, s.rng.Uint32())
	}
	t := s.tables[table]
	if _, err := s.conn.PgConn().CopyFrom(s.ctx, strings.NewReader(text.String()), "COPY "+table+" FROM STDIN"); err != nil {
		return err
	}
	rows, err := s.rows(fmt.Sprintf("SELECT %s FROM %s WHERE id >= $1 AND id < $2 ORDER BY id", t.list, table), from, from+n)
	for _, r := range rows {
		s.did('c', t, nil, r)
	}
	return err
}

// truncate empties tables. It waits for its locks a moment only: behind it
// everybody else would wait too.
func (s *session) truncate(tables ...string) error {
	if err := s.exec("SET LOCAL lock_timeout = '150ms'"); err != nil {
		return err
	}
	if err := s.exec("TRUNCATE " + strings.Join(tables, ", ")); err != nil {
		return err
	}
	for _, t := range tables {
		s.did('t', s.tables[t], nil, nil)
	}
	return s.exec("SET LOCAL lock_timeout = 0")
}

// emit writes a logical message, and behind a transactional one another that is not.
//
// PostgreSQL files a transactional message under the end of its WAL record, a row
// under the start of its own. When it merges a transaction with its subtransactions
// by these LSNs, a message and the row right behind it tie if they are of two
// subtransactions, and may come out in the other order (seen on 15). The record in
// between keeps the truth's order PostgreSQL's.
func (s *session) emit(transactional bool, content string) error {
	if err := s.emitOne(transactional, content); err != nil || !transactional {
		return err
	}
	return s.emitOne(false, "behind "+content)
}

func (s *session) emitOne(transactional bool, content string) error {
	m := Message{Prefix: "workload", Content: content}
	if err := s.exec("SELECT pg_logical_emit_message($1, $2::text, $3::text)", transactional, m.Prefix, m.Content); err != nil {
		return err
	}
	if transactional {
		s.tx.Changes = append(s.tx.Changes, Change{Op: 'm', Message: m})
	} else {
		s.w.noteMessage(m)
	}
	return nil
}

// savepoint runs do under a savepoint, and takes back what it did where keep is
// false or do met an error that the workload counts on.
func (s *session) savepoint(keep bool, do func() error) error {
	mark := len(s.tx.Changes)
	if err := s.exec("SAVEPOINT s"); err != nil {
		return err
	}
	err := do()
	if err != nil && !expectedError(err) {
		return err
	}
	if keep && err == nil {
		return s.exec("RELEASE SAVEPOINT s")
	}
	s.tx.Changes = s.tx.Changes[:mark]
	return s.exec("ROLLBACK TO SAVEPOINT s; RELEASE SAVEPOINT s")
}

// expectedError tells whether an error is one of those that concurrent sessions
// cause each other. The transaction, or the savepoint, is then rolled back, as an
// application would.
func expectedError(err error) bool {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return false
	}
	switch pg.Code {
	case "40P01", // deadlock
		"40001", // serialization failure
		"55P03", // lock timeout
		"23505": // duplicate key
		return true
	}
	return false
}

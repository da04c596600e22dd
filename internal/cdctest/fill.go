package cdctest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// fillBatch is how many rows one statement of the filling writes.
const fillBatch = 50

// tokenID gives the uuid of the key k, scattered over all of them.
func tokenID(k int) string {
	return fmt.Sprintf("%08x-0000-4000-8000-%012x", uint32(k)*2654435761, k)
}

// partDay gives a day in one of the two leaves.
func partDay(k int) string { return fmt.Sprintf("2026-%02d-%02d", 1+k%2, 1+k%28) }

// oldAggregate is one whose events are all of the backlog.
func oldAggregate(i int) string { return fmt.Sprintf("old-%d", i) }

// moneyRows is how many accounts there are on each side.
func (w *Workload) moneyRows() int { return max(1, w.Fill/5) }

// fill writes the rows that are there before the connector, as transactions of the
// truth.
func (w *Workload) fill(ctx context.Context) error {
	s, err := w.newSession(ctx, -1)
	if err != nil {
		return err
	}
	defer s.close()
	s.stop, s.rng = ctx, rand.New(rand.NewPCG(w.Seed, 0x66696c6c))
	var prepared int
	if err := s.conn.QueryRow(ctx, "SELECT current_setting('max_prepared_transactions')::int").Scan(&prepared); err != nil {
		return fmt.Errorf("read max_prepared_transactions: %w", err)
	}
	w.prepares = prepared > 0
	index := 0
	inTransaction := func(do func() error) error {
		if err := s.begin(index); err != nil {
			return err
		}
		index++
		if err := do(); err != nil {
			return err
		}
		return s.commit()
	}
	for _, name := range []string{"items", "notes", "lines", "docs", "ledger", "bulk", "scratch", "scratch_too", "tokens", "parts", "heap", "accounts", "savings", "aggregates"} {
		rows := w.fillRows(s, name)
		for len(rows) > 0 {
			n := min(fillBatch*4, len(rows))
			if err := inTransaction(func() error { return s.insertMany(name, rows[:n]) }); err != nil {
				return fmt.Errorf("fill table %s: %w", name, err)
			}
			rows = rows[n:]
		}
	}
	for i := 0; i < w.Fill; i += 20 {
		if err := inTransaction(func() error { return s.backlog(i / 20) }); err != nil {
			return fmt.Errorf("fill the outbox: %w", err)
		}
	}
	return nil
}

func (w *Workload) fillRows(s *session, name string) []Row {
	var rows []Row
	switch name {
	case "accounts", "savings":
		for i := range w.moneyRows() {
			rows = append(rows, texts(strconv.Itoa(i+1), "1000.00"))
		}
	case "aggregates":
		for i := range aggregates {
			rows = append(rows, texts(aggregateID(i), "0"), texts(oldAggregate(i), "0"))
		}
	case "heap":
		for i := range w.Fill {
			rows = append(rows, texts(strconv.Itoa(i/2), "same"))
		}
	default:
		for i := range w.Fill {
			rows = append(rows, s.randomRow(name, i+1))
		}
	}
	return rows
}

// insertMany inserts rows, fillBatch with each statement.
func (s *session) insertMany(name string, rows []Row) error {
	t := s.tables[name]
	for len(rows) > 0 {
		n := min(fillBatch, len(rows))
		var values []string
		var args []any
		for _, row := range rows[:n] {
			var params []string
			for i, v := range row {
				args = append(args, v)
				params = append(params, fmt.Sprintf("$%d::text::%s", len(args), t.Columns[i].Type))
			}
			values = append(values, "("+strings.Join(params, ", ")+")")
		}
		if err := s.many('c', name, "INSERT INTO "+name+" VALUES "+strings.Join(values, ", "), args...); err != nil {
			return err
		}
		rows = rows[n:]
	}
	return nil
}

// backlog writes 20 events, half of them of aggregates that nobody touches later; some
// are marked as published.
func (s *session) backlog(n int) error {
	for i := range 20 {
		aggregate := oldAggregate((n + i) % aggregates)
		if i%2 == 0 {
			aggregate = aggregateID((n + i) % aggregates)
		}
		if err := s.event(aggregate); err != nil {
			return err
		}
	}
	if n%3 == 0 {
		return s.many('u', "outbox", "UPDATE outbox SET published_at = now() WHERE xmin::text::int8 = $1", int64(uint32(s.tx.XID)))
	}
	return nil
}

// filledStep is one operation on one row of the tables that only a filled workload has.
func (s *session) filledStep(key func() int) error {
	table := pick(s.rng, "tokens", "parts", "parts", "heap", "bulk")
	row, other := s.randomRow(table, key()), s.randomRow(table, key())
	switch {
	case table == "heap":
		return s.heapStep(key())
	case table == "bulk":
		return s.put(table, row)
	}
	switch s.rng.IntN(10) {
	case 0, 1:
		return s.remove(table, row)
	case 2, 3:
		return s.rekey(table, row, other)
	default:
		return s.put(table, row)
	}
}

// heapStep inserts a row of the table without a key, or changes or deletes one of those
// that are equal in a.
func (s *session) heapStep(k int) error {
	t := s.tables["heap"]
	a := strconv.Itoa(k / 2)
	if s.rng.IntN(3) == 0 {
		return s.insert("heap", texts(a, pick(s.rng, "same", s.text(20))))
	}
	found, err := s.rows("SELECT ctid::text, a::text, b::text FROM heap WHERE a = $1::text::int4 LIMIT 1 FOR UPDATE", a)
	if err != nil || len(found) == 0 {
		return err
	}
	ctid, old := found[0][0], found[0][1:]
	if s.rng.IntN(3) == 0 {
		rows, err := s.rows("DELETE FROM heap WHERE ctid = $1::text::tid RETURNING "+t.list, ctid)
		for _, r := range rows {
			s.did('d', t, r, nil)
		}
		return err
	}
	rows, err := s.rows("UPDATE heap SET b = $2 WHERE ctid = $1::text::tid RETURNING "+t.list, ctid, s.text(20))
	for _, r := range rows {
		s.did('u', t, old, r)
	}
	return err
}

// emptiedAndFilled truncates, rarely, and fills the table again: a snapshot shall find
// rows to read. The outbox is emptied seldom, since its backlog does not come again.
func (s *session) emptiedAndFilled() error {
	tables := []string{pick(s.rng, "scratch", "scratch_too", "heap")}
	switch s.rng.IntN(60) {
	case 0:
		tables = append(tables, "outbox")
	case 1, 2, 3, 4, 5, 6, 7, 8, 9:
	default:
		return s.step(s.hot)
	}
	if err := s.truncate(tables...); err != nil {
		return err
	}
	rows := s.w.fillRows(s, tables[0])
	return s.insertMany(tables[0], rows[:len(rows)/4])
}

// save moves money between the two tables, either way.
func (s *session) save(amount string) error {
	account, saving := strconv.Itoa(1+s.rng.IntN(s.w.moneyRows())), strconv.Itoa(1+s.rng.IntN(s.w.moneyRows()))
	minus := "-" + amount
	if s.rng.IntN(2) == 0 {
		amount, minus = minus, amount
	}
	if err := s.add("accounts", "balance", account, minus); err != nil {
		return err
	}
	return s.add("savings", "balance", saving, amount)
}

// rareWith makes one in n rarer where the server is to lose commits: what is flushed takes
// with it all that was written before.
func (s *session) rareWith(n int) int {
	if s.w.Crashes {
		return 10 * n
	}
	return n
}

// commitPrepared commits in two phases, with time for others in between.
func (s *session) commitPrepared(index int) error {
	s.gid = fmt.Sprintf("%s %d/%d", s.conn.Config().Database, s.number, index)
	if err := s.exec("PREPARE TRANSACTION '" + s.gid + "'"); err != nil {
		return fmt.Errorf("prepare transaction: %w", err)
	}
	s.w.waitCommits(s.stop, int64(s.rng.IntN(20)))
	s.tx.CommitSent = s.w.clock.Add(1)
	if err := s.exec("COMMIT PREPARED '" + s.gid + "'"); err != nil {
		return fmt.Errorf("commit prepared transaction, its outcome is not known: %w", err)
	}
	s.gid = ""
	s.committed()
	return nil
}

// neverDone is the tick of a commit that nobody has seen return.
const neverDone = 1<<63 - 1

// comeBack goes on after the server crashed in the middle of a transaction. Whether that
// was committed the ledger knows; one that was prepared is committed now.
func (s *session) comeBack() error {
	if lost := s.tx; lost != nil && lost.XID != 0 {
		if lost.CommitSent == 0 && s.gid != "" {
			lost.CommitSent = s.w.clock.Add(1)
		}
		if lost.CommitSent != 0 {
			lost.CommitDone = neverDone
		}
		s.w.note(lost, lost.CommitSent != 0)
	}
	for {
		if err := s.reconnect(); err != nil || s.gid == "" {
			return err
		}
		err := s.exec("COMMIT PREPARED '" + s.gid + "'")
		if err != nil && s.conn.IsClosed() {
			continue // and down again
		}
		s.gid = ""
		var pg *pgconn.PgError
		if errors.As(err, &pg) && pg.Code == "42704" { // committed before the crash, or never prepared
			return nil
		}
		return err
	}
}

// reconnect waits for the server to be back.
func (s *session) reconnect() error {
	ctx, cancel := context.WithTimeout(s.ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		again, err := s.w.newSession(s.ctx, s.number)
		if err == nil {
			s.conn = again.conn
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the server to be back: %w", err)
		case <-tick.C:
		}
	}
}

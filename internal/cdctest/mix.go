package cdctest

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// transaction runs the session's transaction number index. An error of the
// expected kind rolls it back; any other ends the run.
func (s *session) transaction(index int) error {
	s.tx = nil
	kind := s.chooseKind()
	commit := s.rng.IntN(100) < 85
	if kind == nil {
		return s.loneMessage(index)
	}
	if err := s.begin(index); err != nil {
		return err
	}
	err := kind(index)
	switch {
	case err != nil && !expectedError(err):
		return err
	case err != nil || !commit:
		return s.rollback()
	case s.w.prepares && s.rng.IntN(s.rareWith(12)) == 0:
		return s.commitPrepared(index)
	case s.w.Crashes && s.rng.IntN(20) == 0:
		if err := s.exec("SET LOCAL synchronous_commit = on"); err != nil {
			return err
		}
		return s.commit()
	default:
		return s.commit()
	}
}

// chooseKind draws what the transaction does; nil is a message outside of one.
func (s *session) chooseKind() func(int) error {
	for _, k := range []struct {
		percent int
		run     func(int) error
	}{
		{46, s.small}, {14, s.money}, {18, s.events}, {2, s.big}, {5, s.long},
		{4, s.copied}, {4, s.emptied}, {3, s.swapped}, {3, s.nothing},
	} {
		if s.rng.IntN(100) < k.percent {
			return k.run
		}
	}
	if s.rng.IntN(2) == 0 {
		return nil
	}
	return s.small
}

// loneMessage emits a message that is not transactional, outside a transaction.
func (s *session) loneMessage(index int) error {
	return s.emit(false, fmt.Sprintf("alone %d/%d", s.number, index))
}

// hot draws a key that all sessions use.
func (s *session) hot() int {
	if s.w != nil && s.w.Fill > 0 && s.rng.IntN(2) == 0 {
		return 1 + s.rng.IntN(s.w.Fill+s.w.Fill/4) // any row, and some that are not there
	}
	return 1 + s.rng.IntN(hotKeys)
}

// own draws a key that only this session uses.
func (s *session) own() int { return (s.number+1)*ownKeys + s.rng.IntN(20) }

func (s *session) small(index int) error {
	for i := range 1 + s.rng.IntN(6) {
		step := func() error { return s.step(s.hot) }
		var err error
		switch s.rng.IntN(10) {
		case 0, 1: // rolled back to the savepoint, nested or not
			err = s.savepoint(false, func() error {
				if s.rng.IntN(3) > 0 {
					return step()
				}
				if err := s.savepoint(true, step); err != nil {
					return err
				}
				return step()
			})
		case 2:
			err = s.savepoint(true, step)
		case 3:
			err = s.emit(s.rng.IntN(2) == 0, fmt.Sprintf("within %d/%d/%d", s.number, index, i))
		default:
			err = step()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// step is one operation on one row.
func (s *session) step(key func() int) error {
	if s.w.Fill > 0 && s.rng.IntN(3) == 0 {
		return s.filledStep(key)
	}
	table := pick(s.rng, "items", "items", "notes", "lines", "docs", "docs", "ledger", "ledger", "scratch", "scratch_too")
	row, other := s.randomRow(table, key()), s.randomRow(table, key())
	switch s.rng.IntN(10) {
	case 0, 1:
		return s.remove(table, row)
	case 2, 3:
		return s.rekey(table, row, other)
	default:
		return s.put(table, row)
	}
}

// randomRow gives a row of a table with the key k.
func (s *session) randomRow(table string, k int) Row {
	r := s.rng
	id := strconv.Itoa(k)
	switch table {
	case "items":
		at := time.UnixMicro(1_700_000_000_000_000+r.Int64N(1e15)).UTC().Format("2006-01-02 15:04:05.999999") + "+00"
		row := texts(id, strconv.FormatInt(r.Int64()-r.Int64(), 10), fmt.Sprintf("%d.%02d", r.IntN(1e6), r.IntN(100)),
			strconv.FormatFloat(r.NormFloat64(), 'g', -1, 64), strconv.FormatBool(r.IntN(2) == 0),
			fmt.Sprintf(`{"n": 1.%d0, "s": "%s"}`, r.IntN(10), "ü"), at, s.text(20))
		row[1+r.IntN(len(row)-1)] = nil
		return row
	case "notes":
		return texts(fmt.Sprintf("note <%d> \"ü\"\t\\", k), s.text(40))
	case "tokens":
		return texts(tokenID(k), s.text(30), strconv.Itoa(r.IntN(1000)))
	case "parts":
		return texts(id, partDay(k), s.text(30))
	case "lines":
		return texts(strconv.Itoa(k%3), strconv.Itoa(k), strconv.Itoa(r.IntN(1000)), s.text(10))
	case "docs":
		return texts(id, s.body(), s.text(20), strconv.Itoa(r.IntN(1000)))
	case "ledger":
		return texts(id, s.body(), fmt.Sprintf("%d.%d", r.IntN(1e6), r.IntN(1000)), s.text(20))
	default:
		return texts(id, s.text(30))
	}
}

// text gives up to n characters, some of which JSON must escape.
func (s *session) text(n int) string {
	return randomText(s.rng, n)
}

func randomText(r *rand.Rand, n int) string {
	letters := []rune("abcdefghijklmnop \"\\\t\nü😀<>&\u2028")
	var b strings.Builder
	for range r.IntN(n + 1) {
		b.WriteRune(letters[r.IntN(len(letters))])
	}
	return b.String()
}

// body gives a value for a column with storage external: mostly one that is moved
// out of the row, sometimes one that stays.
func (s *session) body() string {
	if s.rng.IntN(5) == 0 {
		return s.text(50)
	}
	return strings.Repeat(fmt.Sprintf("%016x", s.rng.Uint64()), 150+s.rng.IntN(200))
}

// money moves an amount between two accounts.
func (s *session) money(int) error {
	from, to := 1+s.rng.IntN(accounts), 1+s.rng.IntN(accounts)
	amount := fmt.Sprintf("%d.%02d", s.rng.IntN(50), s.rng.IntN(100))
	if s.w.Fill > 0 {
		return s.save(amount)
	}
	if err := s.add("accounts", "balance", strconv.Itoa(from), "-"+amount); err != nil {
		return err
	}
	return s.add("accounts", "balance", strconv.Itoa(to), amount)
}

// add adds to a numeric column of one row.
func (s *session) add(table, column, id, amount string) error {
	t := s.tables[table]
	old, err := s.lockRow(t, texts(id))
	if err != nil {
		return err
	}
	rows, err := s.rows(fmt.Sprintf("UPDATE %s SET %s = %s + $1::text::numeric WHERE id = $2::text::%s RETURNING %s",
		table, column, column, t.Columns[0].Type, t.list), amount, id)
	for _, r := range rows {
		s.did('u', t, old, r)
	}
	return err
}

// events writes outbox events with the change that they tell of. The aggregate's
// counter is locked until the commit, so that its events are numbered in commit
// order, without a gap: a rollback gives the number back.
func (s *session) events(index int) error {
	aggregate := aggregateID(s.rng.IntN(aggregates))
	if err := s.put("items", s.randomRow("items", s.hot())); err != nil {
		return err
	}
	for range 1 + s.rng.IntN(3) {
		write := func() error { return s.event(aggregate) }
		var err error
		if s.rng.IntN(5) == 0 {
			err = s.savepoint(false, write)
		}
		if err == nil {
			err = write()
		}
		if err != nil {
			return err
		}
	}
	t := s.tables["outbox"]
	switch s.rng.IntN(5) {
	case 0: // inserted and deleted at once: the event happened all the same
		return s.many('d', "outbox", "DELETE FROM outbox WHERE aggregate_id = $1 AND xmin::text::int8 = $2", aggregate, int64(uint32(s.tx.XID)))
	case 1: // as an application's own cleaner does
		return s.many('d', t.Name, "DELETE FROM outbox WHERE aggregate_id = $1 AND published_at IS NOT NULL", aggregate)
	case 2:
		return s.many('u', t.Name, "UPDATE outbox SET published_at = now() WHERE aggregate_id = $1 AND published_at IS NULL", aggregate)
	}
	return nil
}

func (s *session) event(aggregate string) error {
	if err := s.add("aggregates", "seq", aggregate, "1"); err != nil {
		return err
	}
	id := fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x", s.rng.Uint32(), s.rng.Uint32()>>16, s.rng.Uint32()>>20, s.rng.Uint32()>>20, s.rng.Uint64()>>16)
	payload := fmt.Sprintf(`{"order_id": %q, "amount_cents": %d, "rate": 1.%d0}`, aggregate, s.rng.IntN(100000), s.rng.IntN(10))
	return s.many('c', "outbox", `INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload)
SELECT $1::text::uuid, id, seq, $3, $4::text::jsonb FROM aggregates WHERE id = $2`,
		id, aggregate, pick(s.rng, "payment.charged", "payment.refunded", "order.closed"), payload)
}

// big writes a transaction that is larger than logical_decoding_work_mem, with a
// part that is rolled back in its middle.
func (s *session) big(index int) error {
	from := s.bulkKey(index)
	insert := func(from, n int) error {
		return s.many('c', "bulk", "INSERT INTO bulk SELECT g, repeat('x', 100) || g FROM generate_series($1::int8, $2::int8) g", from, from+n-1)
	}
	n := s.w.BigRows
	if err := insert(from, n/2); err != nil {
		return err
	}
	if err := s.savepoint(false, func() error { return insert(from+n, n/2) }); err != nil {
		return err
	}
	if err := insert(from+n/2, n/2); err != nil {
		return err
	}
	if err := s.many('u', "bulk", "UPDATE bulk SET v = v || '!' WHERE id >= $1 AND id < $2 AND id % 3 = 0", from, from+n); err != nil {
		return err
	}
	return s.many('d', "bulk", "DELETE FROM bulk WHERE id >= $1 AND id < $2 AND id % 2 = 0", from, from+n)
}

// bulkKey gives the first of the keys that no other transaction inserts.
func (s *session) bulkKey(index int) int {
	return ((s.number+1)*1_000_000 + index) * 100_000
}

// long begins early and commits late, when others have overtaken it. It keeps to
// rows of its own, or it would hold the others up.
func (s *session) long(index int) error {
	// The tables that are truncated are left alone for the same reason.
	write := func() error {
		table := pick(s.rng, "items", "docs", "ledger", "lines")
		return s.put(table, s.randomRow(table, s.own()))
	}
	for range 2 {
		if err := write(); err != nil {
			return err
		}
	}
	if err := s.emit(false, fmt.Sprintf("in a long one %d/%d", s.number, index)); err != nil {
		return err
	}
	s.w.waitCommits(s.stop, int64(5+s.rng.IntN(40)))
	return write()
}

func (s *session) copied(index int) error {
	table, from, n := "bulk", int64(s.bulkKey(index)), int64(20+s.rng.IntN(200))
	if s.rng.IntN(3) == 0 {
		if err := s.exec("SELECT 1"); err != nil { // COPY behind another statement
			return err
		}
	}
	return s.copyIn(table, from, n)
}

// emptied truncates, and writes behind it.
func (s *session) emptied(int) error {
	if s.w.Fill > 0 {
		return s.emptiedAndFilled()
	}
	tables := pick(s.rng, []string{"scratch"}, []string{"scratch", "scratch_too"}, []string{"scratch_too", "outbox", "scratch"})
	if err := s.put("scratch", s.randomRow("scratch", s.hot())); err != nil {
		return err
	}
	if err := s.truncate(tables...); err != nil {
		return err
	}
	return s.put("scratch", s.randomRow("scratch", s.hot()))
}

// swapped moves a key away and back in one transaction.
func (s *session) swapped(int) error {
	a, b := s.randomRow("docs", s.hot()), s.randomRow("docs", s.own()+50)
	if err := s.rekey("docs", a, b); err != nil {
		return err
	}
	return s.rekey("docs", b, a)
}

// nothing changes no row, but has a transaction id.
func (s *session) nothing(int) error {
	return s.exec("UPDATE items SET note = note WHERE false")
}

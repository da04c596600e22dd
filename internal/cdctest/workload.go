package cdctest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

// Workload writes random transactions to a database and remembers what it did.
//
// What each session attempts follows from Seed, its number and the transaction's
// index alone. How the sessions interleave, and so which of them meet a deadlock or
// a duplicate key, is PostgreSQL's choice; the Truth says what came of it. It is
// taken from what the database returned (RETURNING, with the row locked before), not
// from what was asked for.
type Workload struct {
	DSN  string // of a role that may create tables and alter the database's settings
	Seed uint64
	// Sessions run concurrently; 0 means 4.
	Sessions int
	// Transactions ends each session after that many; Duration ends all of them after
	// that time. Whichever is not zero and comes first; one of them must be set.
	Transactions int
	Duration     time.Duration
	// BigRows is the size of large transactions; 0 means 1500.
	BigRows int
	// Fill, if not 0, makes Setup write about so many rows into each table, an outbox's
	// backlog among them, and the workload write all over them. The connector may then be
	// started at any time: SlotSeen says when its slot was there. A Ledger tells the truth
	// where commits lie.
	Fill int
	// Crashes tells that the server may crash (with Fill only): sessions reconnect, and the
	// ledger decides about commits that got no answer or were lost in spite of one.
	Crashes bool

	ledger   *Ledger
	started  atomic.Int64 // Truth.Started
	prepares bool         // the server takes prepared transactions
	commits  atomic.Int64 // so that long transactions can wait for others to pass them
	clock    atomic.Int64 // the ticks of CommitSent and CommitDone
	ended    chan struct{}

	mu    sync.Mutex
	truth *Truth
}

// The workload's sizes: few enough keys that sessions meet on them.
const (
	hotKeys    = 40
	accounts   = 8
	aggregates = 12
	// Session s owns the keys from (s+1)*ownKeys on, for transactions that stay open
	// and must not hold up the others.
	ownKeys = 100_000
)

// Progress gives the number of transactions committed so far. It may be called
// while Run runs.
func (w *Workload) Progress() int64 { return w.commits.Load() }

// Run writes until its end is reached or ctx is done, waits for every session, and
// returns the truth. An error means that the truth is not exact, because a COMMIT's
// outcome is unknown or the database refused what it should take. That ctx ends the
// run is no error: sessions finish the transaction in hand. Run is called once.
func (w *Workload) Run(ctx context.Context) (*Truth, error) {
	if w.Sessions == 0 {
		w.Sessions = 4
	}
	if w.BigRows == 0 {
		w.BigRows = 1500
	}
	if w.Transactions == 0 && w.Duration == 0 {
		return nil, errors.New("run workload: set Transactions or Duration, else it never ends")
	}
	// The sessions' statements run under a context that the end of the run does not
	// cancel: a COMMIT cut off in the middle would spoil the truth.
	work := context.WithoutCancel(ctx)
	if w.Duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, w.Duration)
		defer cancel()
	}
	w.prepare()
	w.ended = make(chan struct{})
	if w.Fill == 0 {
		if err := w.seedRows(work); err != nil {
			return nil, fmt.Errorf("write the workload's first rows: %w", err)
		}
	}
	group, stop := errgroup.WithContext(ctx)
	var once sync.Once
	for i := range w.Sessions {
		group.Go(func() error {
			// The first session to end releases the long transactions of the others, which
			// may be waiting for commits that never come.
			defer once.Do(func() { close(w.ended) })
			if err := w.runSession(work, stop, i); err != nil {
				return fmt.Errorf("workload session %d: %w", i, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	if err := w.readFinal(work); err != nil {
		return nil, fmt.Errorf("read the final tables: %w", err)
	}
	w.truth.Started = w.started.Load()
	if w.ledger != nil {
		if err := w.ledger.Settle(work, w.truth, w.Crashes); err != nil {
			return nil, err
		}
	}
	return w.truth, nil
}

// prepare makes the truth, once.
func (w *Workload) prepare() {
	if w.truth != nil {
		return
	}
	w.truth = &Truth{Tables: Tables(), Final: map[string][]Row{}, Passes: map[string]int{}}
	if w.Fill > 0 {
		w.truth.Tables = FilledTables()
	}
}

// SlotSeen says that the connector's slot is there: what is committed from now on must be
// in the stream.
func (w *Workload) SlotSeen() { w.started.CompareAndSwap(0, w.clock.Add(1)) }

// Asked says that a snapshot of a table was asked for beside the first one.
func (w *Workload) Asked(table string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.truth.Passes[table]++
}

// seedRows writes, in one transaction, the accounts and the aggregates' counters.
func (w *Workload) seedRows(ctx context.Context) error {
	s, err := w.newSession(ctx, -1)
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.begin(0); err != nil {
		return err
	}
	for i := range accounts {
		if err := s.insert("accounts", texts(strconv.Itoa(i+1), "1000.00")); err != nil {
			return err
		}
	}
	for i := range aggregates {
		if err := s.insert("aggregates", texts(aggregateID(i), "0")); err != nil {
			return err
		}
	}
	return s.commit()
}

func aggregateID(i int) string { return fmt.Sprintf("order-%d", 8800+i) }

func texts(values ...string) Row {
	row := make(Row, len(values))
	for i := range values {
		row[i] = &values[i]
	}
	return row
}

func (w *Workload) runSession(ctx, stop context.Context, number int) error {
	s, err := w.newSession(ctx, number)
	if err != nil {
		return err
	}
	defer s.close()
	for index := 0; stop.Err() == nil && (w.Transactions == 0 || index < w.Transactions); index++ {
		s.stop = stop
		s.rng = rand.New(rand.NewPCG(w.Seed, uint64(number)<<32|uint64(index)))
		err := s.transaction(index)
		if err != nil && w.Crashes && s.conn.IsClosed() {
			err = s.comeBack()
		}
		if err != nil {
			return fmt.Errorf("transaction %d: %w", index, err)
		}
	}
	return nil
}

// readFinal reads every table under one snapshot. Before it, a commit flushes the
// WAL of those that did not wait for it: only then can a decoder see all of them. A
// comment writes WAL (without any, the commit would not wait), but no change.
func (w *Workload) readFinal(ctx context.Context) error {
	s, err := w.newSession(ctx, -2)
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.exec("COMMENT ON TABLE items IS 'written by the workload'"); err != nil {
		return err
	}
	tx, err := s.conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }() // it wrote nothing
	for _, t := range w.truth.Tables {
		rows, err := s.rows(fmt.Sprintf("SELECT %s FROM %s", s.tables[t.Name].list, t.Name))
		if err != nil {
			return err
		}
		w.truth.Final[t.ID()] = rows
	}
	return nil
}

// note adds a transaction that ended to the truth.
func (w *Workload) note(tx *Txn, committed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if committed {
		w.truth.Committed = append(w.truth.Committed, tx)
	} else {
		w.truth.RolledBack = append(w.truth.RolledBack, tx)
	}
}

func (w *Workload) noteMessage(m Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.Fill > 0 && w.started.Load() == 0 {
		w.truth.EarlyMessages = append(w.truth.EarlyMessages, m)
		return
	}
	w.truth.Messages = append(w.truth.Messages, m)
}

// waitCommits waits until n more transactions are committed, a session has ended,
// stop is done or a second has passed (all sessions may be waiting here).
func (w *Workload) waitCommits(stop context.Context, n int64) {
	until := w.commits.Load() + n
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(time.Second)
	for w.commits.Load() < until {
		select {
		case <-tick.C:
		case <-timeout:
			return
		case <-w.ended:
			return
		case <-stop.Done():
			return
		}
	}
}

// pick gives one of the choices.
func pick[T any](rng *rand.Rand, choices ...T) T { return choices[rng.IntN(len(choices))] }

// statementTimeout bounds one statement: a workload that hangs says so.
const statementTimeout = "60s"

// setSession makes texts come as the truth wants them.
var setSession = []string{
	"SET TimeZone = 'UTC'", "SET DateStyle = 'ISO'", "SET extra_float_digits = 1",
	"SET statement_timeout = '" + statementTimeout + "'",
}

func (w *Workload) newSession(ctx context.Context, number int) (*session, error) {
	conn, err := pgx.Connect(ctx, w.DSN)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	settings := setSession
	if number%2 == 1 || w.Crashes {
		// Commits that return before their WAL is flushed, which the stream waits for.
		settings = append(slices.Clone(settings), "SET synchronous_commit = off")
	}
	for _, sql := range settings {
		if _, err := conn.Exec(ctx, sql); err != nil {
			_ = conn.Close(ctx)
			return nil, fmt.Errorf("%s: %w", sql, err)
		}
	}
	s := &session{w: w, ctx: ctx, conn: conn, number: number, tables: map[string]*sqlFor{}}
	for _, t := range w.truth.Tables {
		s.tables[t.Name] = newSQLFor(t)
	}
	return s, nil
}

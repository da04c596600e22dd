package replication

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

// testPublication needs quoting in SQL and again in pgoutput's list of names.
const (
	testPublication    = `of "shop", all`
	testPublicationSQL = `"of ""shop"", all"`
)

// traceEnd is the prefix of the message behind which trace stops.
const traceEnd = "end of trace"

// onOldestAndNewest runs a test on the first and the last server version: between them lie
// all changes that pgoutput has seen (messages, column lists, unasked stream aborts).
func onOldestAndNewest(t *testing.T, test func(t *testing.T, major int)) {
	for _, major := range []int{14, 18} {
		t.Run("postgres "+strconv.Itoa(major), func(t *testing.T) { test(t, major) })
	}
}

// mustSource makes a database with a publication of all tables, and a slot, named as the
// database, that begins behind setup.
func mustSource(t *testing.T, setup string, options ...harness.PGOption) *harness.PG {
	t.Helper()
	pg := harness.Postgres(t, append(testSettings(), options...)...)
	if setup != "" {
		pg.Exec(setup)
	}
	pg.Exec(`create publication ` + testPublicationSQL + ` for all tables`)
	pg.Exec(`select pg_create_logical_replication_slot($1, 'pgoutput')`, pg.Name)
	return pg
}

// mustOpen connects a stream and does not start it.
func mustOpen(t *testing.T, dsn string) *Stream {
	t.Helper()
	cfg, err := WalsenderConfig(dsn, "walrelay_test")
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Abort)
	return s
}

// mustStart streams from the source's slot, unless o names another.
func mustStart(t *testing.T, pg *harness.PG, o StreamOptions) *Stream {
	t.Helper()
	return mustStartAt(t, pg, pg.DSN(), o)
}

func mustStartAt(t *testing.T, pg *harness.PG, dsn string, o StreamOptions) *Stream {
	t.Helper()
	s := mustOpen(t, dsn)
	if o.Slot == "" {
		o.Slot = pg.Name
	}
	o.Publications = []string{testPublication}
	if err := s.Start(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	return s
}

// mustNext waits for the next event, but not for ever.
func mustNext(t *testing.T, s *Stream) *Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.DefaultTimeout)
	defer cancel()
	ev, err := s.Next(ctx)
	if err != nil {
		t.Fatalf("next event: %v", err)
	}
	return ev
}

// nextCommit takes events until a transaction is closed and gives its end.
func nextCommit(t *testing.T, s *Stream) checkpoint.LSN {
	t.Helper()
	for {
		if ev := mustNext(t, s); ev.Kind == KindCommit {
			return ev.Txn.EndLSN
		}
	}
}

// nextError takes events until the stream ends, and gives them as well.
func nextError(t *testing.T, s *Stream) (events []string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.DefaultTimeout)
	defer cancel()
	for {
		ev, err := s.Next(ctx)
		if err != nil {
			return events, err
		}
		if ev.Kind != KindProgress {
			events = append(events, describe(ev))
		}
	}
}

// mustClose closes the stream, which must be well within its budget.
func mustClose(t *testing.T, s *Stream) {
	t.Helper()
	const budget = 10 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), budget)
	defer cancel()
	if err := s.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

// endTrace writes the marker behind which trace stops.
func endTrace(pg *harness.PG) {
	pg.Exec(`select pg_logical_emit_message(true, $1, '')`, traceEnd)
}

// trace renders all events up to the marker, Progress left out, and checks on the way what
// holds for every stream.
func trace(t *testing.T, s *Stream) []string {
	t.Helper()
	var (
		got  []string
		rule order
	)
	for {
		ev := mustNext(t, s)
		rule.check(t, ev)
		switch {
		case ev.Kind == KindProgress:
			continue
		case ev.Kind == KindChange && ev.Change.Message.Prefix == traceEnd:
			nextCommit(t, s)
			return got[:len(got)-1] // without the marker's begin
		}
		got = append(got, describe(ev))
	}
}

// order is what holds for the events of every stream: transactions do not overlap and come
// in the order of their commits, seq counts from 0, progress never goes back.
type order struct {
	open   Transaction // zero between transactions
	seq    uint64
	commit checkpoint.LSN // of the last transaction
	end    checkpoint.LSN // of the last transaction or progress
}

func (o *order) check(t *testing.T, ev *Event) {
	t.Helper()
	inside := !o.open.XID.IsZero()
	switch ev.Kind {
	case KindBegin:
		if inside || ev.Txn.CommitLSN <= o.commit || ev.Txn.CommitLSN < o.end || ev.Txn.EndLSN != 0 {
			t.Fatalf("begin of %+v (inside another: %t) behind commit %s, end %s", *ev.Txn, inside, o.commit, o.end)
		}
		o.open, o.seq = *ev.Txn, 0
	case KindChange:
		c := ev.Change
		if c.Txn == nil {
			if inside || c.Op != OpMessage || c.Message.Transactional {
				t.Fatalf("%s outside a transaction (inside one: %t)", describe(ev), inside)
			}
			return
		}
		if *c.Txn != o.open || c.Seq != o.seq || c.LSN > o.open.CommitLSN {
			t.Fatalf("%s at %s of %+v, want number %d of %+v", describe(ev), c.LSN, *c.Txn, o.seq, o.open)
		}
		o.seq++
	case KindCommit:
		if ev.Txn.XID != o.open.XID || ev.Txn.CommitLSN != o.open.CommitLSN || ev.Txn.EndLSN <= ev.Txn.CommitLSN {
			t.Fatalf("commit of %+v, open is %+v", *ev.Txn, o.open)
		}
		o.commit, o.end, o.open = ev.Txn.CommitLSN, ev.Txn.EndLSN, Transaction{}
	case KindProgress:
		if inside || ev.LSN < o.end {
			t.Fatalf("progress %s (inside a transaction: %t) behind end %s", ev.LSN, inside, o.end)
		}
		o.end = ev.LSN
	}
}

// nextOf takes events up to the first of this kind.
func nextOf(t *testing.T, s *Stream, kind EventKind) *Event {
	t.Helper()
	for {
		if ev := mustNext(t, s); ev.Kind == kind {
			return ev
		}
	}
}

func mustLSN(t *testing.T, text string) checkpoint.LSN {
	t.Helper()
	lsn, err := checkpoint.ParseLSN(text)
	if err != nil {
		t.Fatal(err)
	}
	return lsn
}

// mustXID reads an xid and moves it by so many epochs.
func mustXID(t *testing.T, text string, epochs checkpoint.XID) checkpoint.XID {
	t.Helper()
	xid, err := parseXID(text)
	if err != nil {
		t.Fatal(err)
	}
	return xid + epochs<<32
}

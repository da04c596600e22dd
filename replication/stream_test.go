package replication

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/pgserver"
)

// quick is a status interval that keeps these tests short.
const quick = 20 * time.Millisecond

// confirmedFlush is where the slot stands.
func confirmedFlush(t *testing.T, pg *harness.PG) checkpoint.LSN {
	t.Helper()
	return mustLSN(t, pg.Value(`select confirmed_flush_lsn from pg_replication_slots where slot_name = $1`, pg.Name))
}

func slotActive(pg *harness.PG) string {
	return pg.Value(`select active from pg_replication_slots where slot_name = $1`, pg.Name)
}

// waitReplies waits until the server has read a status update that was sent after now,
// seen by its time: at least two more, because one may be on its way.
func waitReplies(t *testing.T, pg *harness.PG, s *Stream) {
	t.Helper()
	const query = `select reply_time from pg_stat_replication where pid = $1`
	for range 2 {
		last := pg.Value(query, s.PID())
		harness.WaitFor(t, "a status update", harness.DefaultTimeout, func() (bool, error) { return pg.Value(query, s.PID()) != last, nil })
	}
}

func TestIdentifyTellsClusterAndDatabase(t *testing.T) {
	pg := mustSource(t, "")
	s := mustOpen(t, pg.DSN())
	before := mustLSN(t, pg.Value(`select pg_current_wal_flush_lsn()`))
	sys, err := s.Identify(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if id := pg.Value(`select system_identifier from pg_control_system()`); sys.SystemID != id || sys.Database != pg.Name || sys.Timeline != 1 || sys.FlushLSN < before {
		t.Errorf("%+v, want cluster %s, database %s, timeline 1, WAL at or behind %s", sys, id, pg.Name, before)
	}
	if _, err := s.TimelineHistory(t.Context(), 7); err == nil || !strings.Contains(err.Error(), "timeline 7") {
		t.Errorf("history of a timeline that is not there: %v", err)
	}
	// A stream that was never started is just closed.
	mustClose(t, s)
}

func TestASlotHasOneReader(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := mustSource(t, `create table t (id int primary key)`, harness.Major(major))
		first := mustStart(t, pg, StreamOptions{})
		second := mustOpen(t, pg.DSN())
		o := StreamOptions{Slot: pg.Name, Publications: []string{testPublication}}
		if err := second.Start(t.Context(), o); !errors.Is(err, ErrSlotActive) || !IsSlotActive(err) {
			t.Fatalf("start beside another reader: %v, want ErrSlotActive", err)
		}
		pg.Exec(`insert into t values (1)`)
		endTrace(pg)
		if diff := cmp.Diff([]string{"begin", "0 c public.t new(id=1)", "commit"}, trace(t, first)); diff != "" {
			t.Errorf("the first reader's events (-want +got):\n%s", diff)
		}
		// Close has let the slot go when it returns: the next one need not wait.
		mustClose(t, first)
		mustStart(t, pg, StreamOptions{})
	})
}

func TestStartSaysWhatItCouldNotStart(t *testing.T) {
	pg := mustSource(t, "")
	err := mustOpen(t, pg.DSN()).Start(t.Context(), StreamOptions{Slot: "nowhere", Publications: []string{testPublication}})
	if err == nil || errors.Is(err, ErrSlotActive) || !strings.Contains(err.Error(), "start replication from slot nowhere") {
		t.Errorf("start from a slot that does not exist: %v", err)
	}
}

// TestNothingIsConfirmedBeforeConfirm: whatever was sent and taken, the
// server hears of no position but that of Confirm.
func TestNothingIsConfirmedBeforeConfirm(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := mustSource(t, `create table t (id int primary key)`, harness.Major(major))
		start := confirmedFlush(t, pg)
		s := mustStart(t, pg, StreamOptions{StatusInterval: quick})
		pg.Exec(`insert into t values (1)`)
		end := nextCommit(t, s)
		nextOf(t, s, KindProgress)
		waitReplies(t, pg, s)
		const positions = `select concat_ws(' ', write_lsn, flush_lsn, replay_lsn) from pg_stat_replication where pid = $1`
		if got := pg.Value(positions, s.PID()); got != "" || s.Confirmed() != 0 {
			t.Errorf("positions %q (ours %s) before anything was confirmed", got, s.Confirmed())
		}
		if got := confirmedFlush(t, pg); got != start {
			t.Errorf("the slot went from %s to %s before anything was confirmed", start, got)
		}
		s.Confirm(end)
		pg.WaitValue(end.String(), `select confirmed_flush_lsn from pg_replication_slots where slot_name = $1`, pg.Name)
		pg.WaitValue(fmt.Sprintf("%s %s %s", end, end, end), positions, s.PID())
		// A confirmed position never goes back.
		s.Confirm(start)
		waitReplies(t, pg, s)
		if got := confirmedFlush(t, pg); got != end || s.Confirmed() != end {
			t.Errorf("the slot is at %s (ours %s), confirmed was %s", got, s.Confirmed(), end)
		}
		// What is taken later is not confirmed with it.
		pg.Exec(`insert into t values (2)`)
		nextCommit(t, s)
		waitReplies(t, pg, s)
		if got := confirmedFlush(t, pg); got != end {
			t.Errorf("the slot is at %s, confirmed was %s", got, end)
		}
	})
}

// TestAConfirmIsSentAtOnce: it does not wait for the status interval.
func TestAConfirmIsSentAtOnce(t *testing.T) {
	pg := mustSource(t, `create table t (id int primary key)`)
	s := mustStart(t, pg, StreamOptions{StatusInterval: time.Hour})
	pg.Exec(`insert into t values (1)`)
	end := nextCommit(t, s)
	s.Confirm(end)
	pg.WaitValue(end.String(), `select confirmed_flush_lsn from pg_replication_slots where slot_name = $1`, pg.Name)
}

func TestCloseMakesTheLastConfirmVisible(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := mustSource(t, `create table t (id int primary key)`, harness.Major(major))
		for i := range 5 { // each time a fresh race between the confirm and the end
			s := mustStart(t, pg, StreamOptions{StatusInterval: time.Hour})
			pg.Exec(`insert into t values ($1)`, i)
			end := nextCommit(t, s)
			s.Confirm(end)
			mustClose(t, s)
			if got := confirmedFlush(t, pg); got != end {
				t.Fatalf("round %d: the slot is at %s, confirmed was %s", i, got, end)
			}
			if got := slotActive(pg); got != "f" {
				t.Fatalf("round %d: the slot is still held after Close", i)
			}
			if _, err := nextError(t, s); !errors.Is(err, ErrStreamClosed) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("round %d: next event after Close: %v", i, err)
			}
		}
	})
}

// TestCloseInTheMiddleOfAHugeTransaction: neither the rows that are still to come nor the
// full queue hold it up, and the confirm arrives all the same.
func TestCloseInTheMiddleOfAHugeTransaction(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := mustSource(t, `create table t (id int primary key, v text)`, harness.Major(major))
		s := mustStart(t, pg, StreamOptions{Buffer: 100 << 10})
		pg.Exec(`insert into t values (0, '')`)
		end := nextCommit(t, s)
		pg.Exec(`insert into t select g, repeat('x', 200) from generate_series(1, 200000) g`)
		nextOf(t, s, KindChange)
		s.Confirm(end)
		waitBlocked(t, pg, s)
		mustClose(t, s)
		if got := confirmedFlush(t, pg); got != end || slotActive(pg) != "f" {
			t.Errorf("the slot is at %s (active %s), confirmed was %s", got, slotActive(pg), end)
		}
	})
}

// waitBlocked waits until the walsender cannot write any more, because nobody reads.
func waitBlocked(t *testing.T, pg *harness.PG, s *Stream) {
	t.Helper()
	pg.WaitValue("WalSenderWriteData", `select wait_event from pg_stat_activity where pid = $1`, s.PID())
}

func TestCloseSaysThatTheConfirmMayNotHaveArrived(t *testing.T) {
	pg := mustSource(t, `create table t (id int primary key)`)
	proxy := harness.StartProxy(t, pg.Server.Addr())
	s := mustStartAt(t, pg, pg.ProxyDSN(proxy.Addr()), StreamOptions{})
	pg.Exec(`insert into t values (1)`)
	s.Confirm(nextCommit(t, s))
	proxy.Hold(harness.Both)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	started := time.Now()
	if err := s.Close(ctx); !errors.Is(err, os.ErrDeadlineExceeded) || !strings.Contains(err.Error(), "last confirm") {
		t.Errorf("close behind a stalled network: %v, want that the confirm is not known to have arrived", err)
	}
	if took := time.Since(started); took > 5*time.Second {
		t.Errorf("close took %s of a budget of 200 ms", took)
	}
}

func TestCloseEndsWithItsContext(t *testing.T) {
	pg := mustSource(t, "")
	proxy := harness.StartProxy(t, pg.Server.Addr())
	s := mustStartAt(t, pg, pg.ProxyDSN(proxy.Addr()), StreamOptions{})
	proxy.Hold(harness.Both)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	started := time.Now()
	if err := s.Close(ctx); err == nil || time.Since(started) > 3*time.Second {
		t.Errorf("close under a context that is over took %s: %v", time.Since(started), err)
	}
}

func TestAbortLeavesTheSlotWhereItWas(t *testing.T) {
	pg := mustSource(t, `create table t (id int primary key)`)
	start := confirmedFlush(t, pg)
	s := mustStart(t, pg, StreamOptions{})
	pg.Exec(`insert into t values (1)`)
	nextCommit(t, s)
	s.Abort()
	pg.WaitValue("f", `select active from pg_replication_slots where slot_name = $1`, pg.Name)
	if got := confirmedFlush(t, pg); got != start {
		t.Errorf("the slot went from %s to %s", start, got)
	}
	if _, err := nextError(t, s); err == nil {
		t.Error("events without end")
	}
}

// TestTheServerKeepsAStreamThatNobodyReads: with the queue and all sockets full, status
// updates go on, so that wal_sender_timeout does not end the connection.
func TestTheServerKeepsAStreamThatNobodyReads(t *testing.T) {
	const rows = 30000
	pg := mustSource(t, `create table t (id int primary key, v text);
		do $$ begin execute format('alter database %I set wal_sender_timeout = ''2s''', current_database()); end $$`)
	const buffer = 200 << 10
	s := mustStart(t, pg, StreamOptions{Buffer: buffer})
	pg.Exec(`insert into t select g, repeat('x', 1000) from generate_series(1, $1) g`, rows)
	waitBlocked(t, pg, s)
	if got := s.Buffered(); got == 0 || got > buffer {
		t.Errorf("%d bytes buffered, want some and at most %d", got, buffer)
	}
	const longer = `select count(*) from pg_stat_replication where pid = $1 and now() - backend_start > interval '5 s'`
	pg.WaitValue("1", longer, s.PID()) // two timeouts and a half
	waitReplies(t, pg, s)
	if got := pg.Value(`select wait_event from pg_stat_activity where pid = $1`, s.PID()); got != "WalSenderWriteData" {
		t.Errorf("the walsender is in %s: it was not held up until now", got)
	}
	var rule order
	for seen := 0; seen < rows; {
		ev := mustNext(t, s)
		rule.check(t, ev)
		if ev.Kind == KindChange {
			seen++
		}
	}
	nextCommit(t, s)
}

func TestAnIdleStreamStaysConnected(t *testing.T) {
	pg := mustSource(t, `do $$ begin execute format('alter database %I set wal_sender_timeout = ''500ms''', current_database()); end $$`)
	// Longer than the timeout: only the server's own requests are answered in time.
	s := mustStart(t, pg, StreamOptions{StatusInterval: time.Hour})
	pg.WaitValue("1", `select count(*) from pg_stat_replication where pid = $1 and now() - backend_start > interval '1500 ms'`, s.PID())
	if ev := mustNext(t, s); ev.Kind != KindProgress || !ev.Urgent {
		t.Errorf("%s, urgent %t; want the server's request for a reply", describe(ev), ev.Urgent)
	}
}

// TestProgressFollowsTheWALOfOtherDatabases is what lets the slot advance where nothing of
// its own happens.
func TestProgressFollowsTheWALOfOtherDatabases(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := mustSource(t, "", harness.Major(major))
		s := mustStart(t, pg, StreamOptions{StatusInterval: quick})
		other := harness.Postgres(t, append(testSettings(), harness.Major(major))...)
		other.Exec(`create table n (v text); insert into n select repeat('x', 100) from generate_series(1, 1000)`)
		written := mustLSN(t, other.Value(`select pg_current_wal_flush_lsn()`))
		for {
			if ev := nextOf(t, s, KindProgress); ev.LSN >= written {
				break
			}
		}
	})
}

// TestACutConnectionGivesWhatArrivedBefore: first the events, then the error, and then
// nothing but the error.
func TestACutConnectionGivesWhatArrivedBefore(t *testing.T) {
	pg := mustSource(t, `create table t (id int primary key)`)
	proxy := harness.StartProxy(t, pg.Server.Addr())
	s := mustStartAt(t, pg, pg.ProxyDSN(proxy.Addr()), StreamOptions{})
	add := func(first int) {
		pg.Exec(`insert into t select g from generate_series($1::int, $1::int + 99) g`, first)
	}
	add(1000) // with the table's description
	nextCommit(t, s)
	before := s.Received()
	add(2000)
	nextCommit(t, s)
	size := s.Received() - before
	add(3000)
	harness.WaitFor(t, "the third transaction to arrive", harness.DefaultTimeout, func() (bool, error) {
		return s.Received() == before+2*size, nil
	})
	if n := proxy.Cut(); n != 1 {
		t.Fatalf("cut %d connections", n)
	}
	var want []string
	for i := range 100 {
		want = append(want, fmt.Sprintf("%d c public.t new(id=%d)", i, 3000+i))
	}
	want = append(append([]string{"begin"}, want...), "commit")
	got, err := nextError(t, s)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	var netErr *net.OpError
	if !errors.As(err, &netErr) && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("error %v, want the connection's end", err)
	}
	for range 3 {
		if ev, again := s.TryNext(); ev != nil || again == nil || again.Error() != err.Error() {
			t.Fatalf("after the error: %v, %v", ev, again)
		}
	}
}

func TestNextEndsWithItsContext(t *testing.T) {
	pg := mustSource(t, "")
	s := mustStart(t, pg, StreamOptions{})
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone home")
	cancel(gone)
	for {
		if ev, err := s.Next(ctx); err != nil {
			if !errors.Is(err, gone) {
				t.Errorf("error %v, want the context's cause", err)
			}
			break
		} else if ev.Kind != KindProgress {
			t.Fatal(describe(ev))
		}
	}
	// It was the wait that ended, not the stream.
	pg.Exec(`create table t (id int)`)
	endTrace(pg)
	nextCommit(t, s)
}

// TestAStreamDoesNotHoldUpTheServersShutdown: a server that stops waits until its
// walsenders' receivers have confirmed all that there is; it asks for that.
func TestAStreamDoesNotHoldUpTheServersShutdown(t *testing.T) {
	pg := mustSource(t, `create table t (id int primary key)`, harness.Dedicated())
	s := mustStart(t, pg, StreamOptions{})
	pg.Exec(`insert into t values (1)`)
	nextCommit(t, s) // not confirmed: only the request makes us
	stopped := make(chan error, 1)
	started := time.Now()
	go func() { stopped <- pg.Server.Stop(pgserver.Fast) }()
	ctx, cancel := context.WithTimeout(t.Context(), harness.DefaultTimeout)
	defer cancel()
	requests := 0
	for {
		ev, err := s.Next(ctx)
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("the stream ended with %v", err)
			}
			break
		}
		if ev.Kind == KindProgress && ev.Urgent {
			requests++
			s.Confirm(ev.LSN)
		}
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if took := time.Since(started); took > 10*time.Second || requests == 0 {
		t.Errorf("the server stopped after %s and %d requests", took, requests)
	}
}

// TestAPublicationMadeAfterTheChange: before 18 the server ends the stream, from then on
// it warns and leaves the change out. Either way nothing behind it is given.
func TestAPublicationMadeAfterTheChange(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := mustSource(t, `create table t (id int primary key)`, harness.Major(major))
		pg.Exec(`insert into t values (1)`)
		pg.Exec(`create publication young for all tables`)
		pg.Exec(`insert into t values (2)`)
		s := mustOpen(t, pg.DSN())
		err := s.Start(t.Context(), StreamOptions{Slot: pg.Name, Publications: []string{"young"}})
		if err != nil {
			t.Fatal(err)
		}
		endTrace(pg)
		got, err := nextError(t, s)
		if !PublicationTooYoung(err) {
			t.Errorf("error %v, want one that tells of the publication", err)
		}
		if text := strings.Join(got, "; "); strings.Contains(text, "id=2") || strings.Contains(text, "commit") {
			t.Errorf("events behind the gap: %s", text)
		}
		// The server goes on sending; the slot is let go all the same.
		mustClose(t, s)
		if slotActive(pg) != "f" {
			t.Error("the slot is still held after Close")
		}
	})
}

package e2e

import (
	"fmt"
	"slices"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// TestAnOutboxThatWasEmptyIsNotReadAfterARestart has no mark: the rows that the stream has
// brought in the meantime must be no reason to refuse, and no second events.
func TestAnOutboxThatWasEmptyIsNotReadAfterARestart(t *testing.T) {
	b := newOutboxBed(t, "")
	b.pg.Exec("TRUNCATE outbox")
	p := b.stream()
	insert := func(first, last int) {
		b.pg.Exec(`INSERT INTO outbox (aggregate_id, event_type, payload) SELECT 'a' || g % 10, 'x', jsonb_build_object('n', g) FROM generate_series($1::int, $2) g`, first, last)
	}
	insert(1, 10)
	b.caughtUp(p)
	p.Kill()
	insert(11, 20)
	p = b.stream()
	if got, want := b.events(b.settled(p)), numbers(1, 20); !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
}

// TestABacklogThatIsNotWantedAnyMoreEnds changes the configuration in the middle of it.
func TestABacklogThatIsNotWantedAnyMoreEnds(t *testing.T) {
	b := newOutboxBed(t, ", published_at timestamptz")
	chunks := 0
	b.gate.on(func(sql string, _ int) gateAct {
		if rowsOf("outbox")(sql) {
			if chunks++; chunks > 3 {
				return gateHold
			}
		}
		return gatePass
	})
	p := b.start()
	b.gate.waitHeld(t)
	harness.WaitFor(t, "the first chunks to be delivered", snapLong, func() (bool, error) { return len(b.events(b.log())) >= 14, nil })
	p.Kill()
	b.gate.release()
	b.setOutbox("snapshot", "none")
	p = b.stream()
	b.pg.Exec(`INSERT INTO outbox (aggregate_id, event_type, payload) VALUES ('a1', 'x', '{"n": 101}')`)
	got := b.events(b.settled(p))
	if n := len(got); n >= 101 || got[n-1] != 101 || !slices.Equal(got[:n-1], numbers(1, n-1)) {
		t.Errorf("events %v, want the first of the backlog and 101", got)
	}
}

// TestATransactionOverATableThatIsReadWholeIsNotHeldWithoutBound changes each row of a
// table without a key, in one transaction, while the table's rows are being read.
func TestATransactionOverATableThatIsReadWholeIsNotHeldWithoutBound(t *testing.T) {
	const rows = 20_000
	b := newSnapBed(t, fmt.Sprintf(`CREATE TABLE t (id int, v text); ALTER TABLE t REPLICA IDENTITY FULL;
		INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, %d) g`, rows))
	b.set("batch.max-bytes", "64KiB")
	b.gate.on(gateOnce(gateHoldReply, rowsOf("t")))
	p := b.start()
	b.gate.waitHeld(t)
	b.pg.Exec("UPDATE t SET v = repeat('y', 100)")
	p.WaitLog(snapLong, harness.Field("reason", "snapshot"))
	b.gate.release()
	b.waitTable(p, "public.t", allRows)
	b.folds(b.settled(p), "", snapTable("t", "id:int4 v:text"))
}

// TestALostPrimaryVoidsWhatWasRead: the stream does not come from there, and does not tell
// that the server has crashed.
func TestALostPrimaryVoidsWhatWasRead(t *testing.T) {
	const rows = 100_000
	b := newSnapBed(t, fmt.Sprintf(`CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t SELECT g, 0 FROM generate_series(1, %d) g`, rows))
	primary := newPGGate(t, b.pg.Server.Addr())
	b.set("source.primary-dsn", b.pg.ProxyDSN(primary.addr()))
	b.set("snapshot.chunk-rows", 1000)
	reads := 0
	primary.on(func(sql string, _ int) gateAct {
		if rowsOf("t")(sql) {
			if reads++; reads > 20 {
				return gateHold
			}
		}
		return gatePass
	})
	p := b.start()
	primary.waitHeld(t)
	primary.cut()
	p.WaitLog(snapLong, harness.Message("starting over from the checkpoint"))
	primary.release()
	b.waitTable(p, "public.t", allRows)
	b.wantOps(b.settled(p), "t", 1, rows, "r")
}

func numbers(first, last int) (list []int) {
	for n := first; n <= last; n++ {
		list = append(list, n)
	}
	return list
}

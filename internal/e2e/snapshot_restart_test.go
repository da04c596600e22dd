package e2e

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/harness"
)

// progress gives the state of a table in the newest committed checkpoint, empty for none.
func (b *snapBed) progress(table string) checkpoint.TableState {
	b.t.Helper()
	c, found, err := ckafka.NewStore(b.kafka.Client(b.t), ckafka.Options{Topic: b.checkpointTopic()}).Peek(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	if !found {
		return ""
	}
	for _, p := range c.Tables {
		if p.Table == table {
			return p.State
		}
	}
	return ""
}

func TestATableCountsAsDoneOnlyWithItsRows(t *testing.T) {
	t.Parallel()
	k := harness.Kafka(t, harness.WithProxy())
	w := newFaultWire(t, k)
	b := snapBedOn(t, harness.Postgres(t), k, `CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 500)`)
	// EndTxns of empty positions may come first; they are let through until the rows are there.
	w.on(faultKeyEndTxn, func(int) faultAct { return faultHold })
	p := b.start()
	harness.WaitFor(t, "the EndTxn behind the rows to be held", faultLong, func() (bool, error) {
		if w.heldNow() == 0 {
			return false, nil
		}
		if len(b.kafka.Consume(b.t, b.topic("t"), kgo.ReadUncommitted())) >= 500 {
			return true, nil
		}
		w.step()
		return false, nil
	})
	p.Kill()
	w.discard()
	if state := b.progress("public.t"); state == checkpoint.TableDone {
		t.Errorf("the checkpoint says that the table is %s, and nobody has its rows", state)
	}
	b.untilCaughtUp()
	log := b.log()
	if n := b.reads(log, "t"); n != 500 {
		t.Errorf("%d rows read, want 500", n)
	}
	b.wantOps(log, "t", 1, 500, "r")
	if state := b.progress("public.t"); state != checkpoint.TableDone {
		t.Errorf("the checkpoint says that the table is %q, want done", state)
	}
}

func TestARestartReadsWhatIsLeftAndNothingTwice(t *testing.T) {
	const small, rows, chunk, readers = 1000, 1_000_000, 1000, 2
	b := newSnapBed(t, fmt.Sprintf(`CREATE TABLE a (id int PRIMARY KEY); INSERT INTO a SELECT generate_series(1, %d);
		CREATE TABLE b (id int PRIMARY KEY); INSERT INTO b SELECT generate_series(1, %d)`, small, rows))
	b.set("snapshot.chunk-rows", chunk)
	b.set("snapshot.readers", readers)
	p := b.start()
	b.waitTable(p, "public.a", allRows)
	b.waitTable(p, "public.b", rows/2)
	p.Kill()
	before := b.reads(b.log(), "b")
	if before >= rows {
		t.Fatalf("all of b's rows were out before the kill")
	}
	chunks := len(b.gate.seen(rowsOf("b")))
	p = b.stream()
	b.waitTable(p, "public.b", allRows)
	metrics := b.metrics(p)
	if n := faultSum(metrics, "walrelay_snapshot_rows_total", `table="public.a"`); n != 0 {
		t.Errorf("%v rows of the table that was done were read again", n)
	}
	if n := faultSum(metrics, "walrelay_snapshot_rows_total", `table="public.b"`); int(n) < rows-before || int(n) > rows-before+2*readers*chunk {
		t.Errorf("the restart read %v rows of b; %d were left, and at most %d were in hand", n, rows-before, 2*readers*chunk)
	}
	if again := len(b.gate.seen(rowsOf("b"))) - chunks; again > (rows-before)/chunk+2*readers+5 {
		t.Errorf("the restart read %d chunks for %d rows", again, rows-before)
	}
	if n := len(b.gate.seen(rowsOf("a"))); n > 2 {
		t.Errorf("%d chunks of the table that was done before the restart", n)
	}
	log := b.settled(p)
	b.wantOps(log, "a", 1, small, "r")
	b.wantOps(log, "b", 1, rows, "r")
	if a, n := b.reads(log, "a"), b.reads(log, "b"); a != small || n != rows {
		t.Errorf("%d and %d rows in all, want %d and %d", a, n, small, rows)
	}
}

// TestAResumeNearTheEndIsShortAndNothingHoldsASnapshotOpen watches how long any transaction
// of a reader lasts.
func TestAResumeNearTheEndIsShortAndNothingHoldsASnapshotOpen(t *testing.T) {
	const rows, chunk, readers = 400_000, 5000, 2
	b := newSnapBed(t, fmt.Sprintf(`CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, repeat('x', 50) FROM generate_series(1, %d) g`, rows))
	b.set("snapshot.chunk-rows", chunk)
	b.set("snapshot.readers", readers)
	watch := b.watchSnapshots()
	p := b.start()
	b.waitTable(p, "public.t", rows/10*9)
	p.Kill()
	before := b.reads(b.log(), "t")
	p = b.stream()
	b.waitTable(p, "public.t", allRows)
	oldest := watch()
	t.Logf("%d of %d rows before the kill; the oldest snapshot was %s old", before, rows, oldest)
	if n := faultSum(b.metrics(p), "walrelay_snapshot_rows_total", `table="public.t"`); int(n) > rows-before+2*readers*chunk {
		t.Errorf("the resume read %v rows; %d were left", n, rows-before)
	}
	if oldest > 2*time.Second {
		t.Errorf("a reader held a snapshot for %s; a chunk takes a fraction of that", oldest)
	}
	b.wantOps(b.settled(p), "t", 1, rows, "r")
}

// watchSnapshots samples how long transactions of the connector's readers last. The
// function that it returns ends it and gives the longest.
func (b *snapBed) watchSnapshots() func() time.Duration {
	b.t.Helper()
	conn := b.session()
	stop, done := make(chan struct{}), make(chan time.Duration, 1)
	go func() {
		oldest := 0.0
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			var age float64
			err := conn.QueryRow(b.t.Context(), `SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8 FROM pg_stat_activity
				WHERE backend_xmin IS NOT NULL AND application_name LIKE 'walrelay%' AND backend_type = 'client backend' AND datname = current_database()`).Scan(&age)
			if err == nil {
				oldest = max(oldest, age)
			}
			select {
			case <-stop:
				done <- time.Duration(oldest * float64(time.Second))
				return
			case <-b.t.Context().Done():
				done <- 0
				return
			case <-tick.C:
			}
		}
	}()
	return func() time.Duration {
		close(stop)
		return <-done
	}
}

func TestConnectionsThatDieInTheMiddleAreMadeAgain(t *testing.T) {
	const rows = 200_000
	b := newSnapBed(t, fmt.Sprintf(`CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, repeat('x', 50) FROM generate_series(1, %d) g`, rows))
	b.set("snapshot.chunk-rows", 2000)
	p := b.start()
	b.waitTable(p, "public.t", rows/2)
	killed, _ := strconv.Atoi(b.pg.Value(`SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
		WHERE application_name LIKE 'walrelay%' AND datname = current_database()`))
	if killed < 2 {
		t.Errorf("only %d connections to kill", killed)
	}
	b.waitTable(p, "public.t", allRows)
	b.pg.Exec("INSERT INTO t VALUES (3000000, 'x')")
	log := b.settled(p)
	b.wantOps(log, "t", 1, rows, "r")
	b.wantOps(log, "t", 3000000, 3000000, "c")
	if n := b.reads(log, "t"); n != rows {
		t.Errorf("%d rows read, want %d", n, rows)
	}
	b.stop(p)
}

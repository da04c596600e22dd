package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/internal/harness"
)

// countersSQL makes a table whose column n only rises.
func countersSQL(rows int) string {
	return fmt.Sprintf(`CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t SELECT g, 0 FROM generate_series(1, %d) g`, rows)
}

// countUp writes all over the table: new ids behind those of the start, updates, and
// deletes of ids that never come back.
func (b *snapBed) countUp(rows int) *snapWriters {
	const sessions = 4
	return b.write(sessions, time.Millisecond, func(ctx context.Context, conn *pgx.Conn, session, i int) error {
		sql, id := "UPDATE t SET n = n + 1 WHERE id = $1", 1+rand.IntN(rows)
		switch i % 5 {
		case 0:
			sql, id = "INSERT INTO t VALUES ($1, 1)", rows+1+i*sessions+session
		case 1:
			sql = "DELETE FROM t WHERE id = $1"
		}
		_, err := conn.Exec(ctx, sql, id)
		return err
	})
}

func TestASnapshotBesideConstantWritesGoesForwardOnly(t *testing.T) {
	const rows = 100_000
	b := newSnapBed(t, countersSQL(rows))
	b.readsBesideWrites(rows)
}

// readsBesideWrites takes a snapshot while countUp writes, and judges what came of it.
func (b *snapBed) readsBesideWrites(rows int) {
	b.t.Helper()
	b.set("snapshot.chunk-rows", 1000)
	w := b.countUp(rows)
	p := b.stream()
	b.waitTable(p, "public.t", allRows)
	written := w.end()
	log := b.settled(p)
	reads := b.reads(log, "t")
	b.t.Logf("%d transactions, %d rows read, %d records", written, reads, len(b.records(log, "t")))
	b.folds(log, "n", snapTable("t", "id:int4:key n:int4"))
	if reads == 0 || reads > rows+written {
		b.t.Errorf("%d rows were read of a table of %d", reads, rows)
	}
}

func TestNoRowIsLostOrMisplacedBetweenSlotAndSnapshot(t *testing.T) {
	const table = `CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 10)`
	t.Run("idle", func(t *testing.T) {
		b := newSnapBed(t, table)
		p := b.stream()
		b.waitTable(p, "public.t", allRows)
		b.pg.Exec("INSERT INTO t VALUES (11)")
		log := b.settled(p)
		b.wantOps(log, "t", 1, 10, "r")
		b.wantOps(log, "t", 11, 11, "c")
	})
	// The transaction commits when the slot is there and the table's lock is still to be
	// taken; or when the lock is there, and the rows are still to be read.
	for name, match := range map[string]func(string) bool{"before the lock": lockOf("t"), "before the rows": rowsOf("t")} {
		t.Run(name, func(t *testing.T) {
			b := newSnapBed(t, table)
			b.gate.on(gateOnce(gateHold, match))
			p := b.start()
			b.gate.waitHeld(t)
			b.pg.Exec("INSERT INTO t VALUES (11)")
			b.gate.release()
			b.waitTable(p, "public.t", allRows)
			log := b.settled(p)
			b.wantOps(log, "t", 1, 10, "r")
			if got := b.ops(log, "t")[11]; !slices.Contains([]string{"r", "c", "cr"}, got) {
				t.Errorf("the row between has the records %q, want r, c, or c and then r", got)
			}
			b.folds(log, "", snapTable("t", "id:int4:key"))
		})
	}
}

func TestATruncateBehindAChunkTakesItsRows(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'old' FROM generate_series(1, 1000) g`)
	p := b.holdChunk("t")
	b.pg.Exec("TRUNCATE t; INSERT INTO t VALUES (5, 'new')")
	b.gate.releaseStream()
	b.waitTable(p, "public.t", allRows)
	log := b.settled(p)
	truncated := map[int32]bool{}
	for _, r := range b.records(log, "t") {
		switch {
		case r.Op == "t":
			truncated[r.Partition] = true
		case r.Op == "r" && truncated[r.Partition]:
			t.Errorf("%s: a row of the chunk behind the truncate: %s", r.Where(), r.Value)
		}
	}
	if len(truncated) != 6 {
		t.Errorf("the truncate is in %d of 6 partitions", len(truncated))
	}
	if got := b.ops(log, "t")[5]; !strings.HasSuffix(got, "c") {
		t.Errorf("row 5 has the records %q, want a create at the end", got)
	}
	b.folds(log, "", snapTable("t", "id:int4:key v:text"))
}

// TestAChangeThatLacksAColumnDoesNotTakeTheOnlyRowThatHasIt changes a row whose chunk is
// in memory, or on its way, by an update that leaves the big value alone.
func TestAChangeThatLacksAColumnDoesNotTakeTheOnlyRowThatHasIt(t *testing.T) {
	const table = `CREATE TABLE t (id int PRIMARY KEY, big text, n int); ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
		INSERT INTO t VALUES (1, repeat('a', 9000), 1)`
	columns := snapTable("t", "id:int4:key big:text:big n:int4")
	t.Run("chunk in memory", func(t *testing.T) {
		b := newSnapBed(t, table)
		p := b.holdChunk("t")
		b.pg.Exec("UPDATE t SET n = 2")
		b.gate.releaseStream()
		b.waitTable(p, "public.t", allRows)
		b.folds(b.settled(p), "n", columns)
	})
	t.Run("chunk on its way", func(t *testing.T) {
		b := newSnapBed(t, table)
		b.gate.on(gateOnce(gateHoldReply, rowsOf("t")))
		p := b.start()
		b.gate.waitHeld(t)
		b.pg.WaitValue("1", `SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'walrelay%' AND query LIKE '%; COMMIT'
			AND datname = current_database() AND state <> 'active'`)
		b.pg.Exec("UPDATE t SET n = 2")
		// The update alone cannot be complete: it has left before the row is there.
		harness.WaitFor(t, "the update to be delivered", harness.DefaultTimeout, func() (bool, error) {
			return strings.Contains(b.ops(b.log(), "t")[1], "u"), nil
		})
		b.gate.release()
		b.waitTable(p, "public.t", allRows)
		b.folds(b.settled(p), "n", columns)
	})
	t.Run("row deleted and made again", func(t *testing.T) {
		b := newSnapBed(t, table)
		p := b.holdChunk("t")
		b.pg.Exec("DELETE FROM t; INSERT INTO t VALUES (1, repeat('b', 9000), 5); UPDATE t SET n = 6")
		b.gate.releaseStream()
		b.waitTable(p, "public.t", allRows)
		b.folds(b.settled(p), "", columns)
	})
}

// TestAKeyMovedOutOfWhatIsUnreadKeepsItsUnchangedColumn moves a row from a range that is
// still to be read to one that has been.
func TestAKeyMovedOutOfWhatIsUnreadKeepsItsUnchangedColumn(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE t (id int PRIMARY KEY, big text); ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
		INSERT INTO t SELECT g, repeat(chr(97 + g % 26), 9000) FROM generate_series(1000, 6000) g`)
	b.set("snapshot.chunk-rows", 1000)
	b.set("snapshot.readers", 1)
	chunks := 0
	b.gate.on(gateOnce(gateHold, func(sql string) bool {
		if !rowsOf("t")(sql) {
			return false
		}
		chunks++
		return chunks == 2
	}))
	p := b.start()
	b.gate.waitHeld(t)
	b.pg.Exec("UPDATE t SET id = 10 WHERE id = 5500")
	b.gate.release()
	b.waitTable(p, "public.t", allRows)
	log := b.settled(p)
	b.folds(log, "", snapTable("t", "id:int4:key big:text:big"))
	if got := b.ops(log, "t")[5500]; strings.HasSuffix(got, "r") {
		t.Errorf("row 5500, which has moved, ends with the records %q", got)
	}
}

// TestASnapshotEndsThoughTheStreamIsAlwaysAhead updates rows, ten of them most of the
// time, faster than a chunk is read.
func TestASnapshotEndsThoughTheStreamIsAlwaysAhead(t *testing.T) {
	const rows = 50_000
	b := newSnapBed(t, fmt.Sprintf(`CREATE TABLE t (id int PRIMARY KEY, big text, n int); ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
		INSERT INTO t SELECT g, repeat('a', 3000), 0 FROM generate_series(1, %d) g`, rows))
	w := b.write(4, time.Millisecond, func(ctx context.Context, conn *pgx.Conn, _, i int) error {
		id := 1 + rand.IntN(rows)
		if i%2 == 0 {
			id = 1 + rand.IntN(10)*(rows/10)
		}
		_, err := conn.Exec(ctx, "UPDATE t SET n = n + 1 WHERE id = $1", id)
		return err
	})
	p := b.stream()
	b.waitTable(p, "public.t", allRows) // while the load goes on
	t.Logf("%d transactions", w.end())
	b.folds(b.settled(p), "n", snapTable("t", "id:int4:key big:text:big n:int4"))
}

// TestACrashOfTheServerTakesWhatAChunkSawOfIt lets a chunk see an update that was never
// flushed, and crashes the server.
func TestACrashOfTheServerTakesWhatAChunkSawOfIt(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t SELECT g, 0 FROM generate_series(1, 10000) g`,
		harness.Dedicated(), harness.Setting("wal_writer_delay", "10s"), harness.Setting("autovacuum", "off"))
	conn := b.session()
	b.must(conn, "SET synchronous_commit = off")
	b.gate.on(gateOnce(gateHold, lockOf("t")))
	p := b.start()
	b.gate.waitHeld(t)
	b.gate.holdStream()
	b.must(conn, "UPDATE t SET n = 987654 WHERE id = 77")
	b.gate.release()
	b.released("t")
	if err := b.pg.Server.Quit(); err != nil {
		t.Fatal(err)
	}
	b.gate.releaseStream()
	if err := b.pg.Server.Restart(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	var n [][]string
	harness.WaitFor(t, "the server to answer", faultLong, func() (bool, error) {
		var err error
		n, err = b.pg.TryQuery("SELECT n FROM t WHERE id = 77")
		return err == nil, nil // the connection from before the crash fails first
	})
	if n[0][0] != "0" {
		t.Fatalf("the update survived the crash (n = %s), so this shows nothing", n[0][0])
	}
	b.waitTable(p, "public.t", allRows)
	log := b.settled(p)
	for _, r := range b.records(log, "t") {
		if strings.Contains(string(r.Value), "987654") {
			t.Errorf("%s: a trace of the update that was lost: %s", r.Where(), r.Value)
		}
	}
	b.folds(log, "n", snapTable("t", "id:int4:key n:int4"))
}

// TestARewriteOfTheTableHidesNoRows rewrites a table again and again while it is read: to
// a snapshot from before, a rewritten table looks empty.
func TestARewriteOfTheTableHidesNoRows(t *testing.T) {
	const rows = 20_000
	b := newSnapBed(t, fmt.Sprintf(`CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, %d) g`, rows))
	b.set("snapshot.chunk-rows", 100)
	conn := b.session()
	// What is to be guarded against, as PostgreSQL does it.
	b.must(conn, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
	b.must(conn, "SELECT pg_current_snapshot()")
	b.pg.Exec("ALTER TABLE t ALTER v TYPE bigint")
	var seen int
	if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM t").Scan(&seen); err != nil || seen != 0 {
		t.Fatalf("a table that was rewritten shows %d rows to an older snapshot, %v; the rest of this test rests on none", seen, err)
	}
	b.must(conn, "ROLLBACK")
	p := b.stream()
	alters := 0
	for ; alters < 100 && b.status(p).Snapshot.Tables["public.t"].State != "done"; alters++ {
		b.pg.Exec("ALTER TABLE t ALTER v TYPE " + []string{"int", "bigint"}[alters%2])
	}
	b.waitTable(p, "public.t", allRows)
	t.Logf("%d rewrites", alters)
	log := b.settled(p)
	b.wantOps(log, "t", 1, rows, "r")
	b.folds(log, "", snapTable("t", "id:int4:key v:int4"))
}

// TestATransactionThatIsPreparedWhenTheChunkIsReadSupersedesIt has the chunk read while a
// transaction is prepared, and so not visible, that commits before the chunk is merged.
func TestATransactionThatIsPreparedWhenTheChunkIsReadSupersedesIt(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t SELECT g, 0 FROM generate_series(1, 1000) g`,
		harness.Setting("max_prepared_transactions", "20"))
	b.gate.on(gateOnce(gateHold, lockOf("t")))
	p := b.start()
	b.gate.waitHeld(t)
	gid := b.name
	b.pg.Exec("BEGIN; UPDATE t SET n = 1 WHERE id <= 500; SAVEPOINT s; UPDATE t SET n = 2 WHERE id <= 10; DELETE FROM t WHERE id = 11; PREPARE TRANSACTION '" + gid + "'")
	b.holdRead("t")
	b.pg.Exec("COMMIT PREPARED '" + gid + "'")
	b.gate.releaseStream()
	b.waitTable(p, "public.t", allRows)
	b.folds(b.settled(p), "n", snapTable("t", "id:int4:key n:int4"))
}

package e2e

import (
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// replayed delivers a table's changes behind begin again, in place, and checks how many
// records that were.
func (b *snapBed) replayed(p *harness.Proc, table, begin string, want int) {
	b.t.Helper()
	count := func() (n int) {
		for _, r := range b.log().Records {
			if _, marked := r.Headers["replay"]; marked && r.Topic == b.topic(table) {
				n++
			}
		}
		return n
	}
	before := count()
	cmd := exec.CommandContext(b.t.Context(), harness.Binary(b.t), "replay", "-c", p.ConfigFile, "--from-lsn", begin, "--table", "public."+table, "--in-place", "--yes")
	if out, err := cmd.CombinedOutput(); err != nil {
		b.t.Fatalf("walrelay replay: %v: %s", err, out)
	}
	if n := count() - before; n != want {
		b.t.Fatalf("%d records of %s are replayed, want %d", n, table, want)
	}
}

const bags = `CREATE TABLE full_bag (a int); ALTER TABLE full_bag REPLICA IDENTITY FULL; CREATE TABLE bag (a int)`

// newBags starts a connector on two tables without a key, and gives where the WAL ends then.
func newBags(t *testing.T) (b *snapBed, p *harness.Proc, begin string) {
	b = newSnapBed(t, bags)
	b.set("source.keyless", "inserts")
	p = b.start()
	b.waitRead(p, "public.bag")
	b.waitRead(p, "public.full_bag")
	p.WaitLog(harness.DefaultTimeout, harness.Field("message", "created the anchor: replay reaches back to here"))
	return b, p, b.pg.Value("SELECT pg_current_wal_insert_lsn()")
}

// TestVerifyFindsALostRowBehindAReplay loses the second of two equal rows, and replays the
// first one.
func TestVerifyFindsALostRowBehindAReplay(t *testing.T) {
	b, p, begin := newBags(t)
	for table, publication := range map[string]string{"full_bag": b.slot(), "bag": b.slot() + "_insert"} {
		published := b.pg.Value("SELECT concat_ws(', ', CASE WHEN pubinsert THEN 'insert' END, CASE WHEN pubupdate THEN 'update' END, CASE WHEN pubdelete THEN 'delete' END, CASE WHEN pubtruncate THEN 'truncate' END) FROM pg_publication WHERE pubname = $1", publication)
		b.pg.Exec(fmt.Sprintf("INSERT INTO %s VALUES (1)", table))
		b.pg.Exec(fmt.Sprintf("ALTER PUBLICATION %q SET (publish = ''); INSERT INTO %s VALUES (1); ALTER PUBLICATION %[1]q SET (publish = '%[3]s')", publication, table, published))
		b.caughtUp(p)
		b.finds(p, "public."+table, `missing {"a":1}`)
		for range 2 {
			b.replayed(p, table, begin, 1)
			b.finds(p, "public."+table, `missing {"a":1}`)
		}
	}
}

// TestVerifyCountsReplayedRowsOnce replays tables without a key again and again.
func TestVerifyCountsReplayedRowsOnce(t *testing.T) {
	b, p, begin := newBags(t)
	b.pg.Exec("INSERT INTO full_bag VALUES (1), (1), (2); INSERT INTO bag VALUES (1), (1), (2)")
	b.pg.Exec("UPDATE full_bag SET a = 3 WHERE a = 2")
	b.pg.Exec("DELETE FROM bag WHERE a = 2")
	b.caughtUp(p)
	notes := func() string { return strings.Join(b.sound(p, "--table", "public.bag").Tables[0].Notes, "\n") }
	before := notes()
	if !strings.HasPrefix(before, "1 rows are in the topic and no longer in the table") {
		t.Errorf("notes %q", before)
	}
	for range 2 {
		b.replayed(p, "full_bag", begin, 4)
		b.replayed(p, "bag", begin, 3)
		if b.sound(p); notes() != before {
			t.Errorf("notes %q, and before the replay %q", notes(), before)
		}
	}
	// What a delete takes away is taken away once, and what is written after counts.
	b.pg.Exec("DELETE FROM full_bag WHERE a = 3; INSERT INTO full_bag VALUES (1)")
	b.caughtUp(p)
	b.replayed(p, "full_bag", begin, 6)
	b.sound(p)
}

// TestVerifyOfReplayedRowsThatASnapshotHas replays changes that the stream has dropped,
// since the rows that the snapshot read contain them.
func TestVerifyOfReplayedRowsThatASnapshotHas(t *testing.T) {
	b, p, _ := newBags(t)
	b.stop(p)
	open := b.session()
	b.must(open, "BEGIN; INSERT INTO bag VALUES (5)") // keeps the table from being read
	b.pg.Exec("CREATE TABLE late (a int); ALTER TABLE late REPLICA IDENTITY FULL")
	p = b.start()
	b.pg.WaitValue("1", "SELECT count(*) FROM pg_publication_tables WHERE pubname = $1 AND tablename = 'late'", b.slot())
	begin := b.pg.Value("SELECT pg_current_wal_insert_lsn()")
	b.pg.Exec("INSERT INTO late VALUES (1), (1), (2)")
	b.pg.Exec("UPDATE late SET a = 1 WHERE a = 2")
	b.must(open, "COMMIT")
	b.waitRead(p, "public.late")
	b.pg.Exec("INSERT INTO late VALUES (1)")
	b.caughtUp(p)
	b.replayed(p, "late", begin, 5)
	changes := 0
	for _, r := range b.log().Records {
		if _, marked := r.Headers["replay"]; !marked && r.Topic == b.topic("late") && !strings.Contains(string(r.Value), `"op":"r"`) {
			changes++
		}
	}
	if changes != 1 {
		t.Fatalf("the stream has %d changes of the table, want the one behind its snapshot", changes)
	}
	b.sound(p)
}

// TestVerifyRefusesARoleThatMayNotPeek says which right is missing to look behind the
// checkpoint of a connector that does not run.
func TestVerifyRefusesARoleThatMayNotPeek(t *testing.T) {
	b, p, _ := newBags(t)
	b.stop(p)
	b.pg.Exec("INSERT INTO bag VALUES (1)")
	b.pg.Exec(`DO $$ BEGIN CREATE ROLE verify_peeker LOGIN PASSWORD 'peeker'; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
		GRANT USAGE ON SCHEMA public TO verify_peeker; GRANT SELECT ON bag TO verify_peeker`)
	_, code, said := b.verify(b.altered(p, regexp.MustCompile(`postgres:[^:@/]*@`).FindString(b.pg.DSN()), "verify_peeker:peeker@"), "--table", "public.bag")
	if code != 4 || !strings.Contains(said, "may not use replication slots") || !strings.Contains(said, "verify_peeker") || !strings.Contains(said, "REPLICATION") {
		t.Errorf("exit code %d, want 4 and the right that is missing: %s", code, said)
	}
}

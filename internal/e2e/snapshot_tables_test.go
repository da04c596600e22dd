package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

func TestNegativeZeroAndSparseKeysAreReadInFewChunks(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE t (id bigint PRIMARY KEY);
		INSERT INTO t VALUES (-9223372036854775808), (-1), (0), (1), (2), (9223372036854775807)`)
	b.set("snapshot.chunk-rows", 2)
	b.untilCaughtUp()
	log := b.log()
	if n := b.reads(log, "t"); n != 6 {
		t.Errorf("%d rows read, want 6", n)
	}
	b.folds(log, "", snapTable("t", "id:int8:key"))
	if chunks := b.gate.seen(rowsOf("t")); len(chunks) > 4 {
		t.Errorf("%d chunks for 6 rows, 2 each:\n%s", len(chunks), strings.Join(chunks, "\n"))
	}
}

// TestKeysOfEveryKindAreReadInOrder reads tables of each kind of key in small chunks.
func TestKeysOfEveryKindAreReadInOrder(t *testing.T) {
	kinds := []struct{ name, create, fill, columns string }{
		{"composite", "(b text, a int, v int, PRIMARY KEY (a, b))", "SELECT 'x' || g % 7, g / 7, g", "b:text:key a:int4:key v:int4"},
		{"texts", "(id text PRIMARY KEY)", `SELECT (ARRAY['a','B','ä','_','"','\',' ','é','Z','z'])[1 + g % 10] || g`, "id:text:key"},
		{"bytewise", `(id text COLLATE "C" PRIMARY KEY)`, `SELECT (ARRAY['a','B','ä','_','"','\',' ','é','Z','z'])[1 + g % 10] || g`, "id:text:key"},
		{"uuids", "(id uuid PRIMARY KEY)", "SELECT md5(g::text)::uuid", "id:uuid:key"},
		{"moods", "(id mood, n int, PRIMARY KEY (id, n))", "SELECT (ARRAY['sad','ok','happy'])[1 + g % 3]::mood, g", "id:mood:key n:int4:key"},
		{"numerics", "(id numeric PRIMARY KEY)", "SELECT CASE g WHEN 1 THEN 'NaN' ELSE (g - 30) * 1.10 END", "id:numeric:key"},
		{"times", "(id timestamptz PRIMARY KEY)", "SELECT CASE g WHEN 1 THEN 'infinity' WHEN 2 THEN '-infinity' ELSE '2026-03-01 00:00:00+00'::timestamptz + g * interval '37 hours 1 microsecond' END", "id:timestamptz:key"},
		{"bytes", "(id bytea PRIMARY KEY)", `SELECT decode(md5(g::text), 'hex')`, "id:bytea:key"},
		{"dates", "(id date PRIMARY KEY)", "SELECT date '0001-01-01 BC' + g * 1000", "id:date:key"},
	}
	var sql strings.Builder
	sql.WriteString("CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');")
	for _, k := range kinds {
		fmt.Fprintf(&sql, "CREATE TABLE %s %s; INSERT INTO %s %s FROM generate_series(1, 60) g;", k.name, k.create, k.name, k.fill)
	}
	sql.WriteString("CREATE TABLE empty (id int PRIMARY KEY)")
	b := newSnapBed(t, sql.String())
	b.setDatabase("TimeZone", "UTC")
	b.set("snapshot.chunk-rows", 7)
	b.untilCaughtUp()
	log := b.log()
	for _, k := range kinds {
		if n := b.reads(log, k.name); n != 60 {
			t.Errorf("%s: %d rows read, want 60", k.name, n)
		}
		b.folds(log, "", snapTable(k.name, k.columns))
	}
	if n := b.reads(log, "empty"); n != 0 {
		t.Errorf("%d rows of an empty table", n)
	}
}

// setDatabase sets a parameter for the database's new sessions.
func (b *snapBed) setDatabase(name, value string) {
	b.t.Helper()
	b.pg.Exec(fmt.Sprintf("ALTER DATABASE %s SET %s = '%s'", b.pg.Name, name, value))
}

// TestTheWindowClosesOnAQuietDatabase has no writer but the connector, which writes
// nothing.
func TestTheWindowClosesOnAQuietDatabase(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 100000)`,
		harness.Dedicated(), harness.Setting("autovacuum", "off"))
	started := time.Now()
	p := b.stream()
	b.waitTable(p, "public.t", allRows)
	t.Logf("the first snapshot took %s", time.Since(started))
	before := b.pg.Value("SELECT pg_current_snapshot()")
	started = time.Now()
	b.mustAsk(p, "--table", "public.t")
	harness.WaitFor(t, "each row to be read twice", snapLong, func() (bool, error) { return b.reads(b.log(), "t") == 200_000, nil })
	t.Logf("the second snapshot took %s", time.Since(started))
	if after := b.pg.Value("SELECT pg_current_snapshot()"); after != before {
		t.Errorf("the snapshot of transactions was %s and is %s: a snapshot must write nothing", before, after)
	}
}

func TestGeneratedColumnsAndAwkwardNamesAreReadAsTheyAreStreamed(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE g (id int PRIMARY KEY, a int, b int GENERATED ALWAYS AS (a * 2) STORED); INSERT INTO g VALUES (1, 21);
		CREATE SCHEMA "My Schema"; CREATE TABLE "My Schema"."Order*Items" ("Id" int PRIMARY KEY, "a b" text, "select" int);
		INSERT INTO "My Schema"."Order*Items" VALUES (1, 'x', 2)`)
	p := b.stream()
	b.waitTable(p, "public.g", allRows)
	b.waitTable(p, "My Schema.Order*Items", allRows)
	b.pg.Exec(`INSERT INTO g VALUES (2, 21); INSERT INTO "My Schema"."Order*Items" VALUES (2, 'x', 2)`)
	log := b.settled(p)
	var rows []string
	for _, topic := range []string{b.topic("g"), b.name + ".My_Schema.Order_Items"} {
		for _, r := range b.topicRecords(log, topic) {
			env, err := cdctest.ParseEnvelope(r.Value)
			if err != nil {
				t.Fatal(err)
			}
			line := r.Op + " " + string(r.Key)
			for _, m := range env.After {
				line += fmt.Sprintf(" %s=%s", m.Name, m.Raw)
			}
			rows = append(rows, line)
		}
	}
	slices.Sort(rows)
	generated := "" // published from 18 on
	if b.pg.Value("SELECT current_setting('server_version_num')::int >= 180000") == "t" {
		generated = " b=42"
	}
	want := []string{
		`c {"Id":2} Id=2 a b="x" select=2`, `c {"id":2} id=2 a=21` + generated,
		`r {"Id":1} Id=1 a b="x" select=2`, `r {"id":1} id=1 a=21` + generated,
	}
	if !slices.Equal(rows, want) {
		t.Errorf("records\n\t%s\nwant\n\t%s", strings.Join(rows, "\n\t"), strings.Join(want, "\n\t"))
	}
}

func TestRowLevelSecurityIsAnErrorAndNoFilter(t *testing.T) {
	t.Parallel()
	pg := harness.Postgres(t)
	b := snapBedOn(t, pg, harness.Kafka(t), `CREATE TABLE rt (id int PRIMARY KEY, o text); ALTER TABLE rt ENABLE ROW LEVEL SECURITY;
		CREATE POLICY po ON rt USING (o = current_user); INSERT INTO rt VALUES (1, 'walrelay'), (2, 'x')`)
	role := "reader_" + b.name
	pg.Exec(fmt.Sprintf(`CREATE ROLE %[1]s LOGIN REPLICATION PASSWORD 'x'; GRANT SELECT ON rt TO %[1]s; CREATE PUBLICATION %[2]s FOR TABLE rt`, role, b.slot()))
	t.Cleanup(func() {
		pg.CleanupSlots()
		pg.Exec(fmt.Sprintf("DROP OWNED BY %[1]s; DROP ROLE %[1]s", role))
	})
	b.set("source.publication-mode", "existing")
	b.set("source.dsn", fmt.Sprintf("postgres://%s:x@%s/%s?sslmode=disable", role, b.gate.addr(), pg.Name))
	p := b.start()
	if code := p.Wait(faultLong); code == 0 {
		t.Fatal("exit code 0")
	}
	said := p.Stderr()
	for _, text := range []string{"row-level security", "rt", "BYPASSRLS"} {
		if !strings.Contains(said, text) {
			t.Errorf("the error does not say %q", text)
		}
	}
	for _, topic := range []string{b.topic("rt")} {
		for _, r := range b.kafka.Committed(t, topic) {
			t.Errorf("a row went out: %s", r.Value)
		}
	}
}

// TestATableWithoutKeyIsReadInOnePieceBesideItsChanges compares bags of rows, then kills
// the connector midway.
func TestATableWithoutKeyIsReadInOnePieceBesideItsChanges(t *testing.T) {
	const sql = `CREATE TABLE n (a int, b text); ALTER TABLE n REPLICA IDENTITY FULL;
		INSERT INTO n SELECT g, 'x' FROM generate_series(1, 10000) g; INSERT INTO n SELECT g, 'x' FROM generate_series(1, 10) g;
		CREATE TABLE other (id int PRIMARY KEY)`
	columns := snapTable("n", "a:int4 b:text")
	write := func(b *snapBed) *snapWriters {
		return b.write(2, time.Millisecond, func(ctx context.Context, conn *pgx.Conn, session, i int) error {
			if i >= 50 {
				return nil
			}
			for _, sql := range []string{
				fmt.Sprintf("INSERT INTO n VALUES (%d, 'y')", 10001+session*50+i),
				fmt.Sprintf("UPDATE n SET b = 'z' WHERE a = %d", session*100+i),
				fmt.Sprintf("DELETE FROM n WHERE a = %d", 5000+session*100+i),
				fmt.Sprintf("INSERT INTO other VALUES (%d)", session*50+i),
			} {
				if _, err := conn.Exec(ctx, sql); err != nil {
					return err
				}
			}
			return nil
		})
	}
	t.Run("beside writes", func(t *testing.T) {
		b := newSnapBed(t, sql)
		b.set("snapshot.chunk-rows", 100)
		b.gate.on(gateOnce(gateHold, rowsOf("n")))
		p := b.start()
		b.gate.waitHeld(t)
		w := write(b)
		harness.WaitFor(t, "some writes", faultLong, func() (bool, error) { return b.pg.Value("SELECT count(*) > 20 FROM other") == "t", nil })
		b.gate.release()
		b.waitTable(p, "public.n", allRows)
		harness.WaitFor(t, "all writes", faultLong, func() (bool, error) { return b.pg.Value("SELECT count(*) FROM other") == "100", nil })
		w.end()
		log := b.settled(p)
		b.folds(log, "", columns)
		if n := b.reads(log, "n"); n < 9_000 || n > 10_110 {
			t.Errorf("%d rows read", n)
		}
	})
	t.Run("killed midway", func(t *testing.T) {
		b := newSnapBed(t, sql)
		b.set("snapshot.chunk-rows", 100)
		b.set("batch.max-records", 100)
		p := b.start()
		harness.WaitFor(t, "some rows", faultLong, func() (bool, error) {
			return b.status(p).Snapshot.Tables["public.n"].Rows > 0, nil
		})
		p.Kill()
		w := write(b)
		before := b.log()
		whole := b.progress("public.n") == "done"
		p = b.stream()
		b.waitTable(p, "public.n", allRows)
		harness.WaitFor(t, "all writes", faultLong, func() (bool, error) { return b.pg.Value("SELECT count(*) FROM other") == "100", nil })
		w.end()
		log := b.settled(p)
		b.folds(log, "", columns)
		truncates := 0
		for _, r := range b.records(log, "n") {
			if r.Op == "t" && r.Source.Snapshot {
				truncates++
			}
		}
		if read := b.reads(before, "n"); read > 0 && !whole && truncates != 6 {
			t.Errorf("%d rows were out before the kill, and %d truncates tell of it behind it, want one in each of 6 partitions", read, truncates)
		}
	})
}

func TestAPartitionedTableIsReadThroughItsRoot(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE p (id int, d date, PRIMARY KEY (id, d)) PARTITION BY RANGE (d);
		CREATE TABLE p_a PARTITION OF p FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
		CREATE TABLE p_b PARTITION OF p FOR VALUES FROM ('2026-02-01') TO ('2026-03-01');
		INSERT INTO p SELECT g, '2026-01-15' FROM generate_series(1, 10) g; INSERT INTO p SELECT g, '2026-02-15' FROM generate_series(1, 10) g`)
	b.set("source.tables", []string{"public.*"})
	b.untilCaughtUp()
	log := b.log()
	if n := b.reads(log, "p"); n != 20 {
		t.Errorf("%d rows read, want 20", n)
	}
	for _, leaf := range []string{"p_a", "p_b"} {
		if _, made := log.Partitions[b.topic(leaf)]; made {
			t.Errorf("there is a topic of the leaf %s", leaf)
		}
	}
	b.folds(log, "", snapTable("p", "id:int4:key d:date:key"))
}

func TestTablesThatInheritAndListsOfColumnsAreReadAsPublished(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE mother (id int PRIMARY KEY, v text); CREATE TABLE child (extra int, PRIMARY KEY (id)) INHERITS (mother);
		INSERT INTO mother VALUES (1, 'm'); INSERT INTO child VALUES (2, 'c', 7);
		CREATE TABLE listed (id int PRIMARY KEY, open text, secret text); INSERT INTO listed SELECT g, 'o', 's' FROM generate_series(1, 6) g`,
		harness.Major(max(harness.DefaultMajor(t), 15))) // 14 has no such lists
	b.pg.Exec(fmt.Sprintf("CREATE PUBLICATION %s FOR TABLE mother, listed (id, open) WHERE (id > 3)", b.slot()))
	b.set("source.publication-mode", "existing")
	b.untilCaughtUp()
	log := b.log()
	b.wantOps(log, "mother", 1, 1, "r")
	b.wantOps(log, "child", 2, 2, "r")
	if n := b.reads(log, "mother"); n != 1 {
		t.Errorf("%d rows of mother, want its own one", n)
	}
	b.wantOps(log, "listed", 4, 6, "r")
	for _, r := range b.records(log, "listed") {
		if len(r.After) != 2 || r.After["id"].(float64) <= 3 {
			t.Errorf("a row as it is not published: %s", r.Value)
		}
	}
}

func TestTablesThatComeAndGoWhileTheConnectorIsThere(t *testing.T) {
	const rows = 500
	b := newSnapBed(t, fmt.Sprintf(`CREATE TABLE a (id int PRIMARY KEY); INSERT INTO a SELECT generate_series(1, %[1]d);
		CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late SELECT generate_series(1, %[1]d)`, rows))
	b.set("source.tables", []string{"public.*", "!public.late"})
	p := b.stream()
	b.waitTable(p, "public.a", allRows)
	// One that is made while it runs.
	b.pg.Exec(fmt.Sprintf("CREATE TABLE fresh (id int PRIMARY KEY); INSERT INTO fresh SELECT generate_series(1, %d)", rows))
	b.waitTable(p, "public.fresh", allRows)
	b.pg.Exec("INSERT INTO fresh VALUES (501)")
	b.folds(b.settled(p), "", snapTable("fresh", "id:int4:key"))
	b.stop(p)
	// One that the configuration adds, while a transaction that wrote to it is open: what
	// it wrote is not in the stream.
	b.set("source.tables", []string{"public.*", "!public.a"})
	open := b.session()
	b.must(open, "BEGIN")
	b.must(open, "INSERT INTO late VALUES (1001)")
	p = b.stream()
	harness.WaitFor(t, "the added table to be seen", faultLong, func() (bool, error) {
		return b.status(p).Snapshot.Tables["public.late"].State != "", nil
	})
	b.must(open, "INSERT INTO late VALUES (1002)")
	b.must(open, "COMMIT")
	b.waitTable(p, "public.late", allRows)
	log := b.settled(p)
	b.folds(log, "", snapTable("late", "id:int4:key"))
	if n := b.reads(log, "a"); n != rows {
		t.Errorf("%d rows of a, want its %d of the first run", n, rows)
	}
	if n := b.reads(log, "fresh"); n < rows || n > rows+1 {
		t.Errorf("%d rows of fresh, want its %d of the first run", n, rows)
	}
	published := b.pg.Value(`SELECT count(*) FROM pg_publication_tables WHERE tablename = 'a'`)
	if published != "0" {
		t.Error("the table that was taken out is still published")
	}
}

func TestTheSnapshotsModes(t *testing.T) {
	const table = `CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 100);
		CREATE TABLE skipped (id int PRIMARY KEY); INSERT INTO skipped SELECT generate_series(1, 100)`
	t.Run("never", func(t *testing.T) {
		b := newSnapBed(t, table)
		b.set("snapshot.mode", "never")
		p := b.stream()
		b.pg.Exec("INSERT INTO t VALUES (101)")
		log := b.settled(p)
		if n := b.reads(log, "t"); n != 0 {
			t.Errorf("%d rows read, want none", n)
		}
		b.wantOps(log, "t", 101, 101, "c")
	})
	t.Run("only", func(t *testing.T) {
		b := newSnapBed(t, table)
		b.set("snapshot.mode", "only")
		p := b.start()
		if code := p.Wait(snapLong); code != 0 {
			t.Fatalf("exit code %d, want 0", code)
		}
		b.wantOps(b.log(), "t", 1, 100, "r")
	})
	t.Run("exclude", func(t *testing.T) {
		b := newSnapBed(t, table)
		b.set("snapshot.exclude", []string{"public.skipped"})
		p := b.stream()
		b.waitTable(p, "public.t", allRows)
		b.pg.Exec("INSERT INTO skipped VALUES (101)")
		log := b.settled(p)
		b.wantOps(log, "t", 1, 100, "r")
		b.wantOps(log, "skipped", 101, 101, "c")
		if n := b.reads(log, "skipped"); n != 0 {
			t.Errorf("%d rows of the excluded table", n)
		}
	})
}

package replication

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/internal/harness"
)

// treeOf gives a table's partitions by name.
func treeOf(t *testing.T, conn *pgx.Conn, root string) map[string]Part {
	t.Helper()
	var oid uint32
	mustScan(t, conn, fmt.Sprintf("SELECT '%s'::regclass::oid", root), &oid)
	trees, digest, err := PartitionTrees(t.Context(), conn, []string{"pub"}, []uint32{oid}, "")
	if err != nil {
		t.Fatal(err)
	}
	if same, again, err := PartitionTrees(t.Context(), conn, []string{"pub"}, []uint32{oid}, digest); err != nil || same != nil || again != digest {
		t.Errorf("nothing differs: %v, %q, %v; want nil, %q", same, again, err, digest)
	}
	if len(trees) != 1 || trees[0].Root != oid {
		t.Fatalf("trees of %s: %+v", root, trees)
	}
	parts := map[string]Part{}
	for _, p := range trees[0].Parts {
		parts[strings.TrimPrefix(p.Name, "public.")] = p
	}
	return parts
}

// How a partition came to be is told by how the catalog's rows were written, which may be
// otherwise in another version.
func TestPartitionsThatWereCreatedAreToldFromAttachedOnes(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		mustExec(t, conn, `CREATE TABLE p (id int, d int DEFAULT 1, v text, g int GENERATED ALWAYS AS (d * 2) STORED, PRIMARY KEY (id, d), CHECK (d > 0)) PARTITION BY RANGE (d)`,
			`CREATE INDEX ON p (v)`, `CREATE TABLE born_default PARTITION OF p DEFAULT`, `CREATE TABLE born_1 PARTITION OF p FOR VALUES FROM (1) TO (2)`,
			`BEGIN`, `SAVEPOINT s`, `CREATE TABLE born_2 PARTITION OF p FOR VALUES FROM (2) TO (3)`, `RELEASE s`, `INSERT INTO p VALUES (1, 2)`, `COMMIT`,
			`CREATE TABLE born_3 PARTITION OF p (v NOT NULL, CHECK (id > 0)) FOR VALUES FROM (3) TO (4) PARTITION BY LIST (id)`,
			`CREATE TABLE born_3_1 PARTITION OF born_3 FOR VALUES IN (1)`,
			`CREATE TABLE att_1 (LIKE p INCLUDING ALL)`, `ALTER TABLE p ATTACH PARTITION att_1 FOR VALUES FROM (11) TO (12)`,
			`BEGIN`, `CREATE TABLE att_2 (LIKE p INCLUDING ALL)`, `ALTER TABLE p ATTACH PARTITION att_2 FOR VALUES FROM (12) TO (13)`, `COMMIT`,
			`CREATE TABLE few (d int) PARTITION BY LIST (d)`, `CREATE TABLE few_born PARTITION OF few FOR VALUES IN (1)`,
			`BEGIN`, `CREATE TABLE few_att (d int)`, `ALTER TABLE few ATTACH PARTITION few_att FOR VALUES IN (2)`, `COMMIT`,
			`BEGIN`, `CREATE TABLE few_on (d int)`, `ALTER TABLE few ATTACH PARTITION few_on FOR VALUES IN (4)`, `SAVEPOINT s`, `ALTER TABLE few_on ALTER d SET STATISTICS 7`, `ROLLBACK TO s`, `COMMIT`,
			`BEGIN`, `CREATE TABLE few_as AS SELECT 3 AS d`, `ALTER TABLE few ATTACH PARTITION few_as FOR VALUES IN (3)`, `COMMIT`)
		for name, p := range treeOf(t, conn, "p") {
			if want := strings.HasPrefix(name, "born"); p.Born != want {
				t.Errorf("%s: created as a partition %t, want %t", name, p.Born, want)
			}
			if leaf := name != "born_3"; p.Leaf != leaf || leaf == (p.File == 0) || p.Link == 0 {
				t.Errorf("%s: %+v", name, p)
			}
		}
		few := treeOf(t, conn, "few")
		if !few["few_born"].Born || few["few_att"].Born || few["few_as"].Born || few["few_on"].Born || len(few) != 4 {
			t.Errorf("a table of one column: %+v", few)
		}
	})
}

func TestAPartitionThatIsAttachedAgainHasAnotherLink(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		mustExec(t, conn, `CREATE TABLE p (d int) PARTITION BY LIST (d)`, `CREATE TABLE p_1 PARTITION OF p FOR VALUES IN (1)`, `CREATE UNLOGGED TABLE p_u PARTITION OF p FOR VALUES IN (3)`,
			`CREATE PUBLICATION pub FOR TABLE p`)
		before := treeOf(t, conn, "p")
		up := treeOf(t, conn, "p_1")
		if len(before) != 1 || up["p_1"] != (Part{OID: before["p_1"].OID, Parent: before["p_1"].Parent, Name: "public.p_1", Link: before["p_1"].Link, Leaf: true, Born: true}) {
			t.Errorf("downwards %+v, upwards %+v", before, up)
		}
		mustExec(t, conn, `BEGIN`, `ALTER TABLE p DETACH PARTITION p_1`, `ALTER TABLE p ATTACH PARTITION p_1 FOR VALUES IN (1)`, `COMMIT`, `VACUUM FULL pg_inherits`)
		after := treeOf(t, conn, "p")
		if after["p_1"].Link == before["p_1"].Link || after["p_1"].Born || after["p_1"].File != before["p_1"].File {
			t.Errorf("before %+v, after %+v", before, after)
		}
		mustExec(t, conn, `VACUUM FULL pg_inherits`, `VACUUM FREEZE pg_inherits`)
		if again := treeOf(t, conn, "p"); !maps.Equal(again, after) {
			t.Errorf("maintenance of the catalog made %+v of %+v", again, after)
		}
		mustExec(t, conn, `ALTER TABLE p DETACH PARTITION p_1 CONCURRENTLY`)
		if left := treeOf(t, conn, "p"); len(left) != 0 {
			t.Errorf("left: %+v", left)
		}
	})
}

func TestATruncatedTableIsToldFromARewrittenOne(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		mustExec(t, conn, `CREATE TABLE t (id int PRIMARY KEY, v text)`)
		var oid uint32
		mustScan(t, conn, `SELECT 't'::regclass::oid`, &oid)
		for _, c := range []struct {
			what string
			sql  []string
			want NewFile
		}{
			{"truncated", []string{`TRUNCATE t`}, NewFile{Empty: true}},
			{"truncated and filled", []string{`TRUNCATE t`, `INSERT INTO t VALUES (2)`}, NewFile{Pages: true}},
			{"truncated and filled at once", []string{`BEGIN`, `SELECT pg_current_xact_id()`, `SAVEPOINT s`, `TRUNCATE t`, `RELEASE s`, `INSERT INTO t VALUES (2)`, `COMMIT`}, NewFile{Pages: true}},
			{"vacuumed", []string{`VACUUM FULL t`}, NewFile{Pages: true, Kept: true}},
			{"clustered", []string{`CLUSTER t USING t_pkey`}, NewFile{Pages: true, Kept: true}},
			{"altered", []string{`ALTER TABLE t ALTER v TYPE varchar(9)`, `ALTER TABLE t ALTER v TYPE text USING v || ''`}, NewFile{Pages: true, Altered: true}},
		} {
			mustExec(t, conn, `TRUNCATE t`, `INSERT INTO t SELECT generate_series(1, 9)`, `SELECT pg_current_xact_id()`)
			mustExec(t, conn, c.sql...)
			f, err := ReadNewFile(t.Context(), conn, oid)
			f.XID = 0
			if err != nil || f != c.want {
				t.Errorf("%s: %+v, %v; want %+v", c.what, f, err, c.want)
			}
		}
		mustExec(t, conn, `DROP TABLE t`)
		if f, err := ReadNewFile(t.Context(), conn, oid); err != nil || !f.Gone {
			t.Errorf("dropped: %+v, %v", f, err)
		}
		if there, err := Existing(t.Context(), conn, []uint32{oid, 1259}); err != nil || !slices.Equal(slices.Collect(maps.Keys(there)), []uint32{1259}) {
			t.Error(there, err)
		}
	})
}

// The types of a partition's bounds are named in full: whoever reads by them has another
// search_path. And nobody waits for a lock.
func TestBoundsOfPartitions(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn, other := mustConnect(t, s.dsn), mustConnect(t, s.dsn)
		mustExec(t, conn, `CREATE TYPE mood AS ENUM ('sad', 'ok')`, `CREATE TABLE p (m mood) PARTITION BY LIST (m)`,
			`CREATE TABLE p_ok PARTITION OF p FOR VALUES IN ('ok')`, `CREATE TABLE p_sad PARTITION OF p FOR VALUES IN ('sad')`, `INSERT INTO p VALUES ('ok')`,
			`CREATE PUBLICATION pub FOR TABLE p WITH (publish_via_partition_root)`, `CREATE PUBLICATION inserts FOR TABLE p WITH (publish_via_partition_root, publish = 'insert')`)
		parts := treeOf(t, conn, "p")
		ok, sad := parts["p_ok"].OID, parts["p_sad"].OID
		bounds, err := ReadPartBounds(t.Context(), conn, []uint32{ok, sad, 4294967295})
		want := map[uint32]PartBounds{
			ok:  {Rows: true, Condition: `((m IS NOT NULL) AND (m = 'ok'::public.mood))`},
			sad: {Condition: `((m IS NOT NULL) AND (m = 'sad'::public.mood))`},
		}
		if err != nil || !maps.Equal(bounds, want) {
			t.Errorf("bounds %+v, %v; want %+v", bounds, err, want)
		}
		var n int
		mustScan(t, conn, "SELECT count(*) FROM p WHERE "+InParts([]uint32{sad, ok}), &n)
		if n != 1 {
			t.Errorf("%d rows", n)
		}
		var root uint32
		mustScan(t, conn, `SELECT 'p'::regclass::oid`, &root)
		for publication, all := range map[string]bool{"pub": true, "inserts": false} {
			if d, tr, err := Removals(t.Context(), conn, []string{publication}, root); err != nil || d != all || tr != all {
				t.Errorf("%s sends deletes %t, truncates %t: %v", publication, d, tr, err)
			}
		}
		mustExec(t, other, `BEGIN`, `LOCK TABLE p_ok`)
		if _, err := ReadPartBounds(t.Context(), conn, []uint32{ok}); !IsLocked(err) {
			t.Errorf("with the partition locked: %v", err)
		}
		if _, err := ReadNewFile(t.Context(), conn, ok); !IsLocked(err) {
			t.Errorf("with the partition locked: %v", err)
		}
		mustExec(t, other, `ROLLBACK`)
	})
}

func TestPartitionColumnsAreThoseOfEveryLevel(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := mustSource(t, `create table p (id int, region text, day date, status text, n int) partition by list (region);
			create table p_eu partition of p for values in ('eu') partition by range (day, (n % 10));
			create table p_eu_1 partition of p_eu for values from (minvalue, minvalue) to (maxvalue, maxvalue) partition by hash (lower(status));
			create table p_eu_1_0 partition of p_eu_1 for values with (modulus 1, remainder 0);
			create table q (a int) partition by range (a);
			create table plain (id int primary key, b text generated always as (id::text) stored)`, harness.Major(major))
		conn := mustConnect(t, pg.DSN())
		for table, want := range map[string][]string{"p": {"day", "n", "region", "status"}, "q": {"a"}, "plain": {}} {
			var oid uint32
			if err := conn.QueryRow(t.Context(), `select $1::text::regclass::oid`, table).Scan(&oid); err != nil {
				t.Fatal(err)
			}
			got, err := PartitionColumns(t.Context(), conn, oid)
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("%s: %v, %v; want %v", table, got, err, want)
			}
		}
	})
}

package replication

import (
	"errors"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
)

// identitySetup makes tables whose name says whether an UPDATE of theirs can be
// published: ok_ or bad_.
var identitySetup = []string{
	`CREATE TABLE ok_pk (id int PRIMARY KEY, v text)`,
	`CREATE TABLE bad_none (id int, v text)`,
	`CREATE TABLE ok_full (id int, v text)`, `ALTER TABLE ok_full REPLICA IDENTITY FULL`,
	`CREATE TABLE bad_nothing (id int PRIMARY KEY, v text)`, `ALTER TABLE bad_nothing REPLICA IDENTITY NOTHING`,
	`CREATE TABLE ok_index (id int NOT NULL, v text)`, `CREATE UNIQUE INDEX ok_index_i ON ok_index (id)`,
	`ALTER TABLE ok_index REPLICA IDENTITY USING INDEX ok_index_i`,
	`CREATE TABLE bad_dropped (id int NOT NULL, v text)`, `CREATE UNIQUE INDEX bad_dropped_i ON bad_dropped (id)`,
	`ALTER TABLE bad_dropped REPLICA IDENTITY USING INDEX bad_dropped_i`, `DROP INDEX bad_dropped_i`,
	`CREATE TABLE bad_deferrable (id int PRIMARY KEY DEFERRABLE, v text)`,
	`CREATE TABLE bad_unique (id int NOT NULL UNIQUE, v text)`,
	`CREATE TABLE ok_include (id int, v text, PRIMARY KEY (id) INCLUDE (v))`,
	`CREATE TABLE ok_stored (id int, v text, g int GENERATED ALWAYS AS (id * 2) STORED)`, `ALTER TABLE ok_stored REPLICA IDENTITY FULL`,
	`CREATE TABLE ok_parent (id int PRIMARY KEY, v text)`,
	`CREATE TABLE bad_child () INHERITS (ok_parent)`,
	`CREATE TABLE ok_tree (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)`,
	`CREATE TABLE ok_tree_1 PARTITION OF ok_tree FOR VALUES FROM (0) TO (100)`,
	`CREATE TABLE bad_tree (id int, v text) PARTITION BY RANGE (id)`,
	`CREATE TABLE bad_tree_1 PARTITION OF bad_tree FOR VALUES FROM (0) TO (100)`,
	`ALTER TABLE bad_tree REPLICA IDENTITY FULL`, // of the root alone: leaves do not inherit it
	`CREATE TABLE ok_fulltree (id int, v text) PARTITION BY RANGE (id)`,
	`CREATE TABLE ok_fulltree_1 PARTITION OF ok_fulltree FOR VALUES FROM (0) TO (100) PARTITION BY RANGE (id)`,
	`CREATE TABLE ok_fulltree_11 PARTITION OF ok_fulltree_1 FOR VALUES FROM (0) TO (100)`,
	`ALTER TABLE ok_fulltree REPLICA IDENTITY FULL`, `ALTER TABLE ok_fulltree_11 REPLICA IDENTITY FULL`,
}

var identitySetup18 = []string{
	`CREATE TABLE bad_virtual (id int, v text, g int GENERATED ALWAYS AS (id * 2) VIRTUAL)`, `ALTER TABLE bad_virtual REPLICA IDENTITY FULL`,
	`CREATE TABLE ok_virtual (id int PRIMARY KEY, v text, g int GENERATED ALWAYS AS (id * 2) VIRTUAL)`,
}

// TestUpdatableIsWhatTheServerAccepts asks the server itself: each table, alone in the
// main publication, takes an UPDATE exactly if Updatable says so. Were it otherwise,
// the application would suffer.
func TestUpdatableIsWhatTheServerAccepts(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		mustExec(t, conn, identitySetup...)
		if majorVersion(conn.PgConn().ParameterStatus("server_version")) >= 18 {
			mustExec(t, conn, identitySetup18...)
		}
		tables, err := Tables(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		if len(tables) < 15 {
			t.Fatalf("only %d tables", len(tables))
		}
		for _, table := range tables {
			if want := table.Name[:3] != "bad"; table.Updatable != want || (table.Obstacle == "") != want {
				t.Errorf("%s: updatable %v (%s), want %v", table, table.Updatable, table.Obstacle, want)
			}
			name := pgx.Identifier{table.Schema, table.Name}.Sanitize()
			if _, err := Sync(t.Context(), conn, Plan{Publication: "p", InsertPublication: "p_insert", All: []Table{table}}); err != nil {
				t.Fatal(err)
			}
			mustExec(t, conn, "INSERT INTO "+name+" (id, v) VALUES (1, 'a')")
			_, err := conn.Exec(t.Context(), "UPDATE ONLY "+name+" SET v = 'b'")
			if table.Partitioned {
				_, err = conn.Exec(t.Context(), "UPDATE "+name+" SET v = 'b'")
			}
			var pgErr *pgconn.PgError
			if err != nil && (!errors.As(err, &pgErr) || pgErr.Code != "55000" && pgErr.Code != "42P10") {
				t.Fatal(err)
			}
			if (err == nil) != table.Updatable {
				t.Errorf("%s: updatable %v, but the server says: %v", table, table.Updatable, err)
			}
			// In the insert-only publication every table may be updated.
			if _, err := Sync(t.Context(), conn, Plan{Publication: "p", InsertPublication: "p_insert", Insert: []Table{table}}); err != nil {
				t.Fatal(err)
			}
			mustExec(t, conn, "UPDATE "+name+" SET v = 'c'")
		}
	})
}

func TestTablesLeavesOutWhatCannotBeCaptured(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		mustExec(t, conn, `CREATE SCHEMA "Odd ""Schema"`, `CREATE TABLE "Odd ""Schema"."T.a" (id int PRIMARY KEY)`,
			`ALTER TABLE "Odd ""Schema"."T.a" ENABLE ROW LEVEL SECURITY`,
			`CREATE TABLE plain (id int PRIMARY KEY)`, `CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY)`,
			`CREATE TEMP TABLE temp (id int PRIMARY KEY)`, `CREATE VIEW v AS SELECT 1`, `CREATE MATERIALIZED VIEW m AS SELECT 1`,
			`CREATE TABLE tree (id int PRIMARY KEY) PARTITION BY LIST (id)`, `CREATE TABLE leaf PARTITION OF tree FOR VALUES IN (1)`,
			`CREATE TABLE extended (id int PRIMARY KEY)`, `ALTER EXTENSION plpgsql ADD TABLE extended`,
			`CREATE PUBLICATION b FOR TABLE plain`, `CREATE PUBLICATION a FOR TABLE plain`)
		t.Cleanup(func() { mustExec(t, mustConnect(t, s.dsn), `ALTER EXTENSION plpgsql DROP TABLE extended`) })
		tables, err := Tables(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, table := range tables {
			got = append(got, table.String())
			switch table.Name {
			case "plain":
				if !slices.Equal(table.Publications, []string{"a", "b"}) || !table.Owned || table.Owner != "postgres" || table.RowSecurity {
					t.Errorf("plain: %+v", table)
				}
			case "tree":
				if !table.Partitioned {
					t.Errorf("tree: %+v", table)
				}
			case "T.a":
				if !table.RowSecurity {
					t.Errorf("T.a: %+v", table)
				}
			}
		}
		if want := []string{`Odd "Schema.T.a`, "public.plain", "public.tree"}; !slices.Equal(got, want) {
			t.Errorf("tables %q, want %q", got, want)
		}
	})
}

func TestPrimaryKeysInColumnOrder(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		mustExec(t, conn, `CREATE TABLE k (x text, b int, "A" int, c text, PRIMARY KEY (c, b) INCLUDE (x))`, `CREATE TABLE none (id int)`)
		keys, err := PrimaryKeys(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		var k, none uint32
		mustScan(t, conn, `SELECT 'k'::regclass::oid, 'none'::regclass::oid`, &k, &none)
		if !slices.Equal(keys[k], []string{"b", "c"}) || keys[none] != nil {
			t.Errorf("keys %v and %v", keys[k], keys[none])
		}
	})
}

func TestReadDatabase(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		d, err := ReadDatabase(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		if d.SystemID == "" || d.Name != s.db || d.Timeline != 1 || d.WALLevel != "logical" || d.InRecovery || d.WALEnd == 0 ||
			d.MaxSlots == 0 || d.Version < 140000 || !d.Role.Superuser || !d.Role.Create {
			t.Errorf("database %+v", d)
		}
		role, dsn := s.mustRole(t, conn, "REPLICATION")
		d, err = ReadDatabase(t.Context(), mustConnect(t, dsn))
		if err != nil {
			t.Fatal(err)
		}
		if d.Role != (Role{Name: role, Replication: true}) {
			t.Errorf("role %+v", d.Role)
		}
	})
}

// TestRecordEndIsWhatAnIdleStreamReaches: directly behind a page header the insert
// position is past the last record's end.
func TestRecordEndIsWhatAnIdleStreamReaches(t *testing.T) {
	for _, tt := range []struct{ insert, want checkpoint.LSN }{
		{0x3000028, 0x3000000},           // first page of a segment, long header
		{0x3002018, 0x3002000},           // another page, short header
		{0x3000018, 0x3000018},           // inside the long header's page: cannot be, left alone
		{0x3002028, 0x3002028},           // a record follows the short header
		{0x30020F8, 0x30020F8},           // anywhere else
		{0x100000000028, 0x100000000000}, // beyond 4 GiB
	} {
		if got := RecordEnd(tt.insert, 8192, 16<<20); got != tt.want {
			t.Errorf("RecordEnd(%s) = %s, want %s", tt.insert, got, tt.want)
		}
	}
}

func TestWiden(t *testing.T) {
	for _, tt := range []struct {
		xid  uint32
		near checkpoint.XID
		want checkpoint.XID
	}{
		{740, 750, 740},
		{760, 750, 760},
		{0xFFFFFFF0, 0x1_0000_0005, 0xFFFFFFF0},
		{7, 0x0_FFFFFFF0, 0x1_0000_0007},
		{3, 0x5_0000_0003, 0x5_0000_0003},
	} {
		if got := widen(tt.xid, tt.near); got != tt.want {
			t.Errorf("widen(%d, %d) = %d, want %d", tt.xid, tt.near, got, tt.want)
		}
	}
}

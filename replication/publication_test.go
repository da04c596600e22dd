package replication

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

func anyTable(string, string) bool { return true }

func TestNewPlan(t *testing.T) {
	good := Table{OID: 1, Schema: "public", Name: "orders", Identity: IdentityDefault, Updatable: true}
	keyless := Table{OID: 2, Schema: "public", Name: "npk", Identity: IdentityDefault, Obstacle: "no primary key"}
	outbox := Table{OID: 3, Schema: "app", Name: "outbox", Identity: IdentityDefault, Updatable: true}
	tree := Table{OID: 4, Schema: "public", Name: "tree", Partitioned: true, Identity: IdentityFull, Updatable: true}
	onlyPublic := func(schema, _ string) bool { return schema == "public" }
	for _, tt := range []struct {
		name        string
		tables      []Table
		opts        PlanOptions
		all, insert string
		refusal     string // what its text holds, blank-separated alternatives all required
		warnings    int
	}{
		{name: "tables with identity go into the main publication", tables: []Table{good}, opts: PlanOptions{Match: anyTable}, all: "public.orders"},
		{name: "tables that do not match go nowhere", tables: []Table{good}, opts: PlanOptions{Match: func(string, string) bool { return false }}},
		{name: "outbox tables are insert-only, whatever source.tables says", tables: []Table{good, outbox},
			opts: PlanOptions{Match: onlyPublic, Outbox: []string{"app.outbox"}}, all: "public.orders", insert: "app.outbox"},
		{name: "keyless tables are refused with the remedies", tables: []Table{good, keyless}, opts: PlanOptions{Match: anyTable}, all: "public.orders",
			refusal: `public.npk|"!public.npk"|ALTER TABLE "public"."npk" REPLICA IDENTITY FULL|keyless: inserts`},
		{name: "keyless tables that are excluded are no problem", tables: []Table{keyless}, opts: PlanOptions{Match: func(_, n string) bool { return n != "npk" }}},
		{name: "keyless: inserts publishes their inserts", tables: []Table{good, keyless}, opts: PlanOptions{Match: anyTable, KeylessInserts: true},
			all: "public.orders", insert: "public.npk", warnings: 1},
		{name: "a keyless outbox table is no problem", tables: []Table{keyless}, opts: PlanOptions{Match: anyTable, Outbox: []string{"public.npk"}}, insert: "public.npk"},
		{name: "a missing outbox table is refused", tables: []Table{good}, opts: PlanOptions{Match: anyTable, Outbox: []string{"app.outbox"}}, all: "public.orders",
			refusal: "app.outbox|outbox.table"},
		{name: "both problems come at once", tables: []Table{keyless}, opts: PlanOptions{Match: anyTable, Outbox: []string{"app.outbox"}}, refusal: "app.outbox|public.npk"},
		{name: "a partitioned table with FULL works but is warned of", tables: []Table{tree}, opts: PlanOptions{Match: anyTable}, all: "public.tree", warnings: 1},
		{name: "a name that PostgreSQL would cut is refused", opts: PlanOptions{Publication: strings.Repeat("x", 57), Match: anyTable}, refusal: "63 bytes|source.publication"},
		{name: "the longest name that fits", opts: PlanOptions{Publication: strings.Repeat("x", 56), Match: anyTable}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			plan, err := NewPlan(tt.tables, tt.opts)
			if got := names(plan.All, 9); got != tt.all {
				t.Errorf("main publication %q, want %q", got, tt.all)
			}
			if got := names(plan.Insert, 9); got != tt.insert {
				t.Errorf("insert publication %q, want %q", got, tt.insert)
			}
			if len(plan.Warnings) != tt.warnings {
				t.Errorf("warnings %q", plan.Warnings)
			}
			wantRefusal(t, err, tt.refusal)
		})
	}
}

// wantRefusal checks that err is a refusal with a remedy whose text has every part of
// want, separated by |; an empty want is no error.
func wantRefusal(t *testing.T, err error, want string) {
	t.Helper()
	if want == "" {
		if err != nil {
			t.Errorf("refused: %v", err)
		}
		return
	}
	var r *checkpoint.Refusal
	if !errors.As(err, &r) {
		t.Errorf("not refused: %v", err)
		return
	}
	if r.What == "" || r.Remedy == "" {
		t.Errorf("half a refusal: %+v", r)
	}
	for _, part := range strings.Split(want, "|") {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("refusal %q lacks %q", err, part)
		}
	}
}

func mustPlan(t *testing.T, conn *pgx.Conn, o PlanOptions) Plan {
	t.Helper()
	tables, err := Tables(t.Context(), conn)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := NewPlan(tables, o)
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

func mustSync(t *testing.T, conn *pgx.Conn, o PlanOptions) Changes {
	t.Helper()
	changes, err := Sync(t.Context(), conn, mustPlan(t, conn, o))
	if err != nil {
		t.Fatal(err)
	}
	return changes
}

func published(t *testing.T, conn *pgx.Conn, pub string) []string {
	t.Helper()
	var list []string
	mustScan(t, conn, "SELECT coalesce(array_agg(schemaname || '.' || tablename ORDER BY schemaname, tablename), '{}') FROM pg_publication_tables WHERE pubname = '"+pub+"'", &list)
	return list
}

func TestSyncKeepsBothPublicationsInStep(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		opts := PlanOptions{Publication: `Shop "1"`, Match: anyTable, KeylessInserts: true}
		check := func(step string, got Changes, want string) {
			t.Helper()
			if text := fmt.Sprint(got.Created, got.Altered, got.Added, got.Removed, got.Moved); text != want {
				t.Errorf("%s: changes %s, want %s", step, text, want)
			}
		}
		check("empty database", mustSync(t, conn, opts), `[Shop "1" Shop "1"_insert] [] [] [] []`)
		mustExec(t, conn, `CREATE TABLE a (id int PRIMARY KEY)`, `CREATE TABLE child () INHERITS (a)`,
			`CREATE SCHEMA "S"`, `CREATE TABLE "S"."b.c" (id int PRIMARY KEY)`,
			`CREATE TABLE tree (id int PRIMARY KEY) PARTITION BY LIST (id)`, `CREATE TABLE leaf PARTITION OF tree FOR VALUES IN (1)`)
		check("tables join", mustSync(t, conn, opts), `[] [] [public.a public.child S.b.c public.tree] [] []`)
		if got := published(t, conn, `Shop "1"`); !slices.Equal(got, []string{"S.b.c", "public.a", "public.tree"}) {
			t.Errorf("published %v", got)
		}
		if got := published(t, conn, `Shop "1"_insert`); !slices.Equal(got, []string{"public.child"}) {
			t.Errorf("published insert-only %v", got)
		}
		check("nothing to do", mustSync(t, conn, opts), `[] [] [] [] []`)
		mustExec(t, conn, `ALTER TABLE child ADD PRIMARY KEY (id)`, `ALTER TABLE a DROP CONSTRAINT a_pkey`)
		check("identities change", mustSync(t, conn, opts), `[] [] [] [] [public.a public.child]`)
		if got := published(t, conn, `Shop "1"_insert`); !slices.Equal(got, []string{"public.a"}) {
			t.Errorf("published insert-only %v", got)
		}
		narrow := opts
		narrow.Match = func(schema, name string) bool { return schema == "public" && name != "tree" }
		narrow.Outbox = []string{"public.child"}
		check("narrowed, with an outbox", mustSync(t, conn, narrow), `[] [] [] [S.b.c public.tree] [public.child]`)
		mustExec(t, conn, `DROP TABLE child`, `CREATE TABLE child (id int)`)
		check("dropped and made again", mustSync(t, conn, narrow), `[] [] [public.child] [] []`)
		mustExec(t, conn, `ALTER PUBLICATION "Shop ""1""_insert" SET (publish = 'insert, update')`, `ALTER PUBLICATION "Shop ""1""" SET (publish_via_partition_root = false)`)
		check("options altered", mustSync(t, conn, narrow), `[] [Shop "1" Shop "1"_insert] [] [] []`)
		pub, _, err := ReadPublication(t.Context(), conn, `Shop "1"`)
		if err != nil || !pub.Insert || !pub.Update || !pub.Delete || !pub.Truncate || !pub.ViaRoot || pub.AllTables {
			t.Errorf("publication %+v, %v", pub, err)
		}
		mustExec(t, conn, `DROP PUBLICATION "Shop ""1"""`)
		check("one dropped", mustSync(t, conn, narrow), `[Shop "1"] [] [] [] []`)
	})
}

// TestSyncManyTables: more tables than one transaction takes.
func TestSyncManyTables(t *testing.T) {
	s := mustDatabase(t, mustAdmin(t, harness.DefaultMajor(t)))
	conn := mustConnect(t, s.dsn)
	n := syncChunk + 10
	for from := 0; from < n; from += 500 { // the test's own locks have the same limit
		mustExec(t, conn, fmt.Sprintf(`DO $$ BEGIN FOR i IN %d..%d LOOP EXECUTE format('CREATE TABLE t%%s (id int)', i); END LOOP; END $$`, from, min(from+500, n)-1))
	}
	opts := PlanOptions{Publication: "p", Match: anyTable, KeylessInserts: true}
	if got := mustSync(t, conn, opts); len(got.Added) != n || len(published(t, conn, "p_insert")) != n {
		t.Errorf("added %d, want %d", len(got.Added), n)
	}
	if got := mustSync(t, conn, opts); !got.IsZero() {
		t.Error("the second run changes something")
	}
}

func TestSyncRefusesBeforeItChangesAnything(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		admin := mustConnect(t, s.dsn)
		version := majorVersion(admin.PgConn().ParameterStatus("server_version"))
		role, dsn := s.mustRole(t, admin, "REPLICATION")
		mustExec(t, admin, "CREATE TABLE a (id int PRIMARY KEY)", "CREATE SCHEMA own AUTHORIZATION "+role)
		conn := mustConnect(t, dsn)
		mustExec(t, conn, "CREATE TABLE own.o (id int PRIMARY KEY)")
		opts := PlanOptions{Publication: "p", Match: anyTable}
		refused := func(want string) {
			t.Helper()
			_, err := Sync(t.Context(), conn, mustPlan(t, conn, opts))
			wantRefusal(t, err, want)
		}
		refused("may not create publications|GRANT CREATE ON DATABASE|does not own|public.a|GRANT \"postgres\" TO|publication-mode: existing")
		mustExec(t, admin, "GRANT CREATE ON DATABASE "+s.db+" TO "+role)
		refused("does not own|public.a")
		if _, found, err := ReadPublication(t.Context(), conn, "p"); found || err != nil {
			t.Errorf("something was created: %v", err)
		}
		opts.Match = func(schema, _ string) bool { return schema == "own" }
		mustSync(t, conn, opts)
		mustExec(t, admin, "ALTER PUBLICATION p OWNER TO postgres")
		if got := mustSync(t, conn, opts); !got.IsZero() {
			t.Error("a publication in step needs no right and no change")
		}
		mustExec(t, conn, "CREATE TABLE own.o2 (id int PRIMARY KEY)")
		refused(`belongs to role "postgres"|OWNER TO`)
		mustExec(t, admin, "DROP PUBLICATION p", "CREATE PUBLICATION p FOR ALL TABLES")
		refused("FOR ALL TABLES|publication-mode: existing")
		if version >= 15 {
			mustExec(t, admin, "DROP PUBLICATION p", "CREATE PUBLICATION p FOR TABLES IN SCHEMA own")
			refused("FOR TABLES IN SCHEMA own")
			mustExec(t, admin, "DROP PUBLICATION p", "CREATE PUBLICATION p FOR TABLE own.o WHERE (id > 1)")
			refused("row filters or column lists: own.o|DROP TABLE")
		}
	})
}

func TestCover(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		mustExec(t, conn, `CREATE TABLE a (id int PRIMARY KEY)`, `CREATE TABLE e (id int PRIMARY KEY)`, `CREATE TABLE k (id int)`,
			`CREATE TABLE tree (id int PRIMARY KEY) PARTITION BY LIST (id)`, `CREATE TABLE l1 PARTITION OF tree FOR VALUES IN (1)`,
			`CREATE TABLE l2 PARTITION OF tree FOR VALUES IN (2)`)
		opts := PlanOptions{Publication: "p", Match: anyTable, Outbox: []string{"app.outbox"}}
		read := func() (Coverage, error) {
			tables, err := Tables(t.Context(), conn)
			if err != nil {
				t.Fatal(err)
			}
			return Cover(t.Context(), conn, tables, opts)
		}
		_, err := read()
		wantRefusal(t, err, `publication "p" does not exist|CREATE PUBLICATION`)
		mustExec(t, conn, `CREATE PUBLICATION p FOR TABLE a, k, l1 WITH (publish = 'update, delete')`)
		c, err := read()
		if err != nil {
			t.Fatal(err)
		}
		if names(c.Missing, 9) != "public.e, public.tree" || names(c.Keyless, 9) != "public.k" {
			t.Errorf("coverage %+v", c)
		}
		wantRefusal(t, c.Refusal(), "app.outbox|public.e, public.tree|ALTER PUBLICATION \"p\" ADD TABLE|does not publish inserts")
		mustExec(t, conn, `ALTER PUBLICATION p ADD TABLE l2, e`, `ALTER PUBLICATION p SET (publish = 'insert, update')`)
		opts.Outbox = nil
		if c, err = read(); err != nil || c.Refusal() != nil || names(c.ByLeaf, 9) != "public.tree" {
			t.Errorf("coverage %+v, %v, %v", c, c.Refusal(), err)
		}
		if w := strings.Join(c.Warnings(), "\n"); !strings.Contains(w, "deletes") || !strings.Contains(w, "truncates") || strings.Contains(w, "updates:") || !strings.Contains(w, "public.k") {
			t.Errorf("warnings %s", w)
		}
		opts.Outbox = []string{"public.tree"}
		if c, err = read(); err != nil {
			t.Fatal(err)
		}
		wantRefusal(t, c.Refusal(), "outbox table public.tree under the names of its partitions|publish_via_partition_root = true")
		opts.Outbox = nil
		// A table dropped and created again leaves its publication.
		mustExec(t, conn, `DROP TABLE e`, `CREATE TABLE e (id int PRIMARY KEY)`)
		if c, err = read(); err != nil {
			t.Fatal(err)
		}
		wantRefusal(t, c.Refusal(), "configured but not published|public.e|dropped and created again")
		mustExec(t, conn, `DROP PUBLICATION p`, `CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = true)`)
		if c, err = read(); err != nil || c.Refusal() != nil || !c.Publication.AllTables || len(c.ByLeaf) > 0 {
			t.Errorf("coverage %+v, %v, %v", c, c.Refusal(), err)
		}
		if majorVersion(conn.PgConn().ParameterStatus("server_version")) >= 15 {
			mustExec(t, conn, `DROP PUBLICATION p`, `CREATE PUBLICATION p FOR TABLES IN SCHEMA public`)
			if c, err = read(); err != nil || c.Refusal() != nil || !slices.Equal(c.Publication.Schemas, []string{"public"}) {
				t.Errorf("coverage %+v, %v, %v", c, c.Refusal(), err)
			}
		}
	})
}

func TestATableStaysInTheNamedPublicationUntilTheOtherIsRead(t *testing.T) {
	outbox := Table{OID: 1, Schema: "public", Name: "outbox"}
	gone := Table{OID: 2, Schema: "public", Name: "gone"}
	published := func(t Table) PublishedTable { return PublishedTable{OID: t.OID, Schema: t.Schema, Name: t.Name} }
	plan := Plan{Publication: "p", InsertPublication: "p_insert", Insert: []Table{outbox}, InsertPending: true}
	targets := []target{
		{name: "p", have: Publication{Tables: []PublishedTable{published(outbox), published(gone)}}},
		{name: "p_insert", want: plan.Insert},
	}
	render := func(todo []move) (s string) {
		for _, m := range todo {
			s += fmt.Sprintf("%s %q→%q ", m.table.Name, m.from, m.to)
		}
		return strings.TrimSpace(s)
	}
	if got, want := render(plan.stayNamed(moves(targets))), `outbox ""→"p_insert" gone "p"→""`; got != want {
		t.Errorf("before: %s, want %s", got, want)
	}
	targets[1].have.Tables = []PublishedTable{published(outbox)}
	if got, want := render(plan.stayNamed(moves(targets))), `gone "p"→""`; got != want {
		t.Errorf("while it is in both: %s, want %s", got, want)
	}
	plan.InsertPending = false
	if got, want := render(plan.stayNamed(moves(targets))), `outbox "p"→"" gone "p"→""`; got != want {
		t.Errorf("once both are named: %s, want %s", got, want)
	}
}

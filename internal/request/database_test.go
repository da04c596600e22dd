package request

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/replication"
)

// testShop is a database with a table of every kind, and the publications that a
// connector has made: everything but late and the tables without key are published.
const testShop = `
CREATE TABLE orders (id int PRIMARY KEY, state text);
CREATE SCHEMA "My Schema";
CREATE TABLE "My Schema"."Order*""Items" ("Id" int PRIMARY KEY, "a b" text);
CREATE TABLE late (id int PRIMARY KEY);
CREATE TABLE keyless (a int, b text);
CREATE TABLE whole (a int, b text);
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE events (event_id uuid NOT NULL, tenant int NOT NULL, v text, UNIQUE (tenant, event_id));
ALTER TABLE events REPLICA IDENTITY FULL;
CREATE TABLE part (id int, d date, PRIMARY KEY (id, d)) PARTITION BY RANGE (d);
CREATE TABLE part_a PARTITION OF part FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
CREATE VIEW overview AS SELECT * FROM orders;
CREATE UNLOGGED TABLE scratch (id int PRIMARY KEY);
CREATE PUBLICATION shop FOR TABLE orders, "My Schema"."Order*""Items", part, whole, events WITH (publish_via_partition_root);
CREATE PUBLICATION shop_insert WITH (publish = 'insert');
CREATE PUBLICATION leaves FOR TABLE part_a;`

func testRequestOptions(dsn string) Options {
	return Options{
		Connect:      replication.NewConnector(dsn, "test"),
		Publications: replication.PlanOptions{Publication: "shop", Match: func(string, string) bool { return true }},
		Keys:         map[string][]string{"public.events": {"event_id", "tenant"}, "public.whole": {"a"}},
	}
}

func TestTheDatabaseIsAskedWhetherATableCanBeRead(t *testing.T) {
	harness.EachMajor(t, func(t *testing.T, major int) {
		pg := harness.Postgres(t, harness.Major(major))
		pg.Exec(testShop)
		for _, tt := range []struct {
			name, table, where string
			change             func(*Options)
			usage              bool
			want               string // pieces of the error, separated by |; empty: none
		}{
			{name: "a published table", table: "public.orders"},
			{name: "its name as the catalog has it", table: `My Schema.Order*"Items`},
			{name: "a partitioned table", table: "public.part"},
			{name: "a table without key", table: "public.whole"},

			{name: "none", table: "public.nosuch", want: "table public.nosuch does not exist|without SQL quotes"},
			{name: "another case", table: "public.Orders", want: "did you mean --table public.orders?"},
			{name: "another schema", table: `public.Order*"Items`, want: `did you mean --table My Schema.Order*"Items?`},
			{name: "SQL quotes", table: `"public"."orders"`, want: "did you mean --table public.orders?"},
			{name: "a partition", table: "public.part_a", want: "is a partition of public.part|--table public.part"},
			{name: "a view", table: "public.overview", want: "is a view"},
			{name: "an unlogged table", table: "public.scratch", want: "is not logged"},
			{name: "a table of the system", table: "pg_catalog.pg_class", want: "belongs to the system"},
			{name: "not published yet", table: "public.late", want: "not published yet|start walrelay run anew"},
			{name: "never published", table: "public.keyless", want: "without a usable replica identity|REPLICA IDENTITY FULL"},
			{name: "a connector that never ran", table: "public.orders",
				change: func(o *Options) { o.Publications.Publication = "other" }, want: "publication other does not exist|start walrelay run"},
			{name: "not in an existing publication", table: "public.late", change: func(o *Options) { o.Existing = true },
				want: `publication shop does not publish public.late|ALTER PUBLICATION "shop" ADD TABLE "public"."late"`},
			{name: "a partitioned table by its leaves", table: "public.part",
				change: func(o *Options) { o.Existing, o.Publications.Publication = true, "leaves" }},

			{name: "a condition", table: "public.orders", where: "id <= 1000 AND state IN ('a', 'b') -- old ones"},
			{name: "a condition with a subquery", table: "public.orders", where: "id IN (SELECT id FROM part)"},
			{name: "on awkward names", table: `My Schema.Order*"Items`, where: `"a b" IS NULL`},
			{name: "on a unique index as source.keys", table: "public.events", where: "tenant = 5"},
			{name: "on a table without key", table: "public.whole", where: "a = 1", want: "public.whole has no key|would be lost|leave --where out"},
			{name: "half of a condition", table: "public.orders", where: "id <", usage: true,
				want: `--where "id <" is no condition on public.orders: syntax error|SQLSTATE 42601|nothing was asked for`},
			{name: "an unknown column", table: "public.orders", where: "id < 5 AND staet = 'x'", usage: true,
				want: `column "staet" does not exist at character 12 of it|SQLSTATE 42703`},
			{name: "no condition", table: "public.orders", where: "id", usage: true, want: "must be type boolean"},
			{name: "an aggregate", table: "public.orders", where: "count(*) > 1", usage: true, want: "aggregate functions are not allowed"},
			{name: "a wrong value", table: "public.orders", where: "id < 'x'", usage: true, want: "invalid input syntax"},
			{name: "a parameter", table: "public.orders", where: "id < $1", usage: true, want: "is no condition"},
			{name: "two statements", table: "public.orders", where: "true); DROP TABLE orders; SELECT (true", usage: true, want: "multiple commands"},
			{name: "a way out of the parentheses", table: "public.orders", where: "true) OR (true", usage: true, want: "syntax error"},
			{name: "a way out of the other form", table: "public.orders", where: "true THEN true END OR CASE WHEN true", usage: true, want: "syntax error"},
			{name: "a comment that swallows the rest", table: "public.orders", where: "true /*", usage: true, want: "unterminated"},
			{name: "more than a condition", table: "public.orders", where: "true) UNION SELECT (1", usage: true, want: "is no condition"},
		} {
			t.Run(tt.name, func(t *testing.T) {
				o := testRequestOptions(pg.DSN())
				if tt.change != nil {
					tt.change(&o)
				}
				_, err := o.checkDatabase(t.Context(), checkpoint.Request{Tables: []string{tt.table}, Where: tt.where})
				var usage *UsageError
				switch {
				case (err == nil) != (tt.want == ""):
					t.Fatalf("error %v", err)
				case err == nil:
					return
				case errors.As(err, &usage) != tt.usage, !tt.usage && !checkpoint.IsRefusal(err):
					t.Errorf("a mistake of the flags: %v, want %v: %v", errors.As(err, &usage), tt.usage, err)
				}
				for _, want := range strings.Split(tt.want, "|") {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("%q is not in: %v", want, err)
					}
				}
			})
		}
		if n := pg.Value("SELECT count(*) FROM orders"); n != "0" {
			t.Errorf("orders has %s rows", n)
		}
	})
}

func TestEveryTableIsLookedAt(t *testing.T) {
	pg := harness.Postgres(t)
	pg.Exec(testShop)
	o := testRequestOptions(pg.DSN())
	_, err := o.checkDatabase(t.Context(), checkpoint.Request{Tables: []string{"public.orders", "public.late", "public.nosuch"}})
	if !checkpoint.IsRefusal(err) || !strings.Contains(err.Error(), "public.late") || !strings.Contains(err.Error(), "public.nosuch") {
		t.Errorf("%v, want both refused", err)
	}
}

func TestWhatTheRoleMayNotReadIsRefused(t *testing.T) {
	pg := harness.Postgres(t)
	pg.Exec(testShop)
	role := "reader_" + pg.Name
	pg.Exec(`CREATE ROLE "` + role + `" LOGIN; GRANT SELECT ON orders TO "` + role + `"; GRANT SELECT ON part TO "` + role + `";
		ALTER TABLE part ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON part USING (id > 5)`)
	t.Cleanup(func() { pg.Exec(`DROP OWNED BY "` + role + `"; DROP ROLE "` + role + `"`) })
	o := testRequestOptions(pg.DSN())
	admin := o.Connect
	o.Connect = func(ctx context.Context, opts ...replication.ConnOption) (*replication.Conn, error) {
		conn, err := admin(ctx, opts...)
		if err == nil {
			_, err = conn.Exec(ctx, `SET ROLE "`+role+`"`)
		}
		return conn, err
	}
	for table, want := range map[string]string{
		"public.orders": "",
		"public.events": `GRANT SELECT ON "public"."events"`,
		"public.part":   "BYPASSRLS",
	} {
		_, err := o.checkDatabase(t.Context(), checkpoint.Request{Tables: []string{table}})
		if want == "" && err != nil || want != "" && (!checkpoint.IsRefusal(err) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", table, err, want)
		}
	}
}

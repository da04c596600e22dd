package e2e

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
)

// pollingOn makes a case whose connector polls a table of the test's own. In schema and entry
// NAME is the case's.
func pollingOn(t *testing.T, schema string, entry caseMap, options ...harness.PGOption) *caseRun {
	t.Helper()
	c := caseNew(t, options...)
	c.pg.Exec(strings.ReplaceAll(schema, "NAME", c.name))
	return c.setPolling(entry)
}

func (c *caseRun) setPolling(entry caseMap) *caseRun {
	delete(c.config, "snapshot")
	c.config["source"] = caseMap{"dsn": c.pg.DSN(), "mode": "polling", "poll-interval": "20ms"}
	whole := caseMap{"table": "public.outbox", "after": "mark", "topic": "{prefix}.{event_type}"}
	caseMerge(whole, entry)
	return c.set(caseMap{"outbox": []caseMap{whole}, "topics": caseMap{"replication-factor": 1}})
}

// refused runs the connector and wants exit code 4 and texts of its error.
func (c *caseRun) refused(texts ...string) {
	c.t.Helper()
	c.ends(4, texts...)
}

func (c *caseRun) ends(code int, texts ...string) {
	c.t.Helper()
	if got := c.proc.Wait(2 * faultLong); got != code {
		c.t.Fatalf("exit code %d, want %d: %s", got, code, c.proc.Stderr())
	}
	for _, text := range texts {
		if !strings.Contains(c.proc.Stderr(), text) {
			c.t.Errorf("it does not say %q: %s", text, c.proc.Stderr())
		}
	}
}

// Whichever column tells it, a row is marked; what is marked already, in the column's own
// way, is not published, and every other value is.
func TestPollingMarksWhicheverColumnTellsIt(t *testing.T) {
	const columns = "event_id uuid NOT NULL DEFAULT gen_random_uuid(), event_type text NOT NULL DEFAULT 'e', payload jsonb DEFAULT '{}'"
	for name, tt := range map[string]struct{ columns, values, left, marked string }{
		"published_at":      {"published_at timestamptz, status text DEFAULT 'processed'", "(published_at) VALUES (NULL), ('2020-01-01'), ('infinity'), (NULL)", "published_at IS NULL", "published_at > '2021-01-01' AND published_at <= now()"},
		"status, a number":  {"status smallint DEFAULT 0", "(status) VALUES (0), (1), (2), (NULL)", "status IS DISTINCT FROM 1", "status = 1"},
		"status, a text":    {"status varchar(9)", "(status) VALUES ('pending'), ('processed'), ('failed'), (NULL)", "status IS DISTINCT FROM 'processed'", "status = 'processed'"},
		"status, an enum":   {"status st", "(status) VALUES ('pending'), ('processed'), ('failed'), (NULL)", "status IS DISTINCT FROM 'processed'", "status = 'processed'"},
		"status, a domain":  {"status dom", "(status) VALUES (0), (1), (2), (NULL)", "status IS DISTINCT FROM 1", "status = 1"},
		"a retry is no bar": {"status int DEFAULT 0, retry_count int DEFAULT 9, next_retry_at timestamptz DEFAULT now() + interval '1 day', last_error text DEFAULT 'x'", "(status) VALUES (0), (1), (2), (3)", "status <> 1", "status = 1"},
	} {
		t.Run(name, func(t *testing.T) {
			c := pollingOn(t, "CREATE TYPE st AS ENUM ('pending', 'processed', 'failed'); CREATE DOMAIN dom AS int; CREATE TABLE outbox (id bigserial PRIMARY KEY, "+columns+", "+tt.columns+"); INSERT INTO outbox "+tt.values, nil)
			before := c.pg.Value("SELECT count(*) FROM outbox WHERE " + tt.left)
			c.catchUp()
			if left := c.pg.Value("SELECT count(*) FROM outbox WHERE " + tt.left); left != "0" {
				t.Errorf("%s rows are not marked", left)
			}
			if got := len(c.kafka.Committed(t, c.name+".e")); fmt.Sprint(got) != before || got < 2 {
				t.Errorf("%d events, want the %s that were not marked", got, before)
			}
			if c.pg.Value("SELECT count(*) >= $1 FROM outbox WHERE "+tt.marked, before) != "t" {
				t.Errorf("the marks are %v", c.pg.Query("SELECT * FROM outbox"))
			}
		})
	}
}

// Of a table without a number, the events of one transaction and of transactions that
// follow one another are published as they were written: a uuid orders nothing, and now() is
// the same throughout a transaction.
func TestPollingKeepsTheOrderOfTablesWithoutANumber(t *testing.T) {
	for name, columns := range map[string]string{
		"nothing but a uuid":       "id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregateid text, n int, status text",
		"a time":                   "id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregateid text, n int, created_at timestamptz NOT NULL DEFAULT now(), status text",
		"a time, and the sequence": "id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregateid text, n int, created_at timestamptz NOT NULL DEFAULT now(), version int, status text",
		"no key either":            "id uuid DEFAULT gen_random_uuid(), aggregateid text, n int, status text",
		"a time, and no key":       "id uuid DEFAULT gen_random_uuid(), aggregateid text, n int, created_at timestamptz NOT NULL DEFAULT now(), status text",
	} {
		t.Run(name, func(t *testing.T) {
			c := pollingOn(t, "CREATE TABLE outbox ("+columns+", event_type text DEFAULT 'e', payload jsonb DEFAULT '{}')", caseMap{"headers": []string{"n"}})
			c.set(caseMap{"batch": caseMap{"max-records": 7}}) // with a limit, a sort mixes equal rows
			conn := c.session()
			for tx := range 10 {
				var b strings.Builder
				b.WriteString("BEGIN;")
				for i := range 10 {
					fmt.Fprintf(&b, "INSERT INTO outbox (aggregateid, n) VALUES ('a', %d), ('b', %[1]d);", tx*10+i)
				}
				c.exec(conn, b.String()+"COMMIT")
			}
			c.catchUp()
			got := map[string][]string{}
			for _, r := range c.kafka.Committed(t, c.name+".e") {
				for _, h := range r.Headers {
					if h.Key == "n" {
						got[string(r.Key)] = append(got[string(r.Key)], string(h.Value))
					}
				}
			}
			var want []string
			for i := range 100 {
				want = append(want, fmt.Sprint(i))
			}
			for _, key := range []string{"a", "b"} {
				if !slices.Equal(got[key], want) {
					t.Errorf("key %s: %v", key, got[key])
				}
			}
		})
	}
}

// A row that became a dead letter is done with: it is marked, and where rows are deleted it
// stays for whoever has to look at it, if a column can mark it.
func TestPollingPutsAsideWhatCannotBePublished(t *testing.T) {
	const rows = `INSERT INTO outbox (event_type, payload) VALUES ('a', '{}'), ('bad type/ü', '{}'), ('b', '{}'), ('c', jsonb_build_object('v', repeat(md5('x'), 40000))), (NULL, '{}')`
	for name, tt := range map[string]struct{ mark, after, left string }{
		"mark":                 {"published_at timestamptz", "mark", "5 rows, 0 pending"},
		"delete, with a mark":  {"published_at timestamptz", "delete", "3 rows, 0 pending"},
		"delete, without mark": {"x int", "delete", ""},
		"delete, not markable": {"status st DEFAULT 'pending'", "delete", ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := pollingOn(t, "CREATE TYPE st AS ENUM ('pending', 'failed'); CREATE TABLE outbox (id bigserial PRIMARY KEY, event_type text, payload jsonb, "+tt.mark+");"+rows, caseMap{"after": tt.after})
			c.set(caseMap{"topics": caseMap{"config": caseMap{"max.message.bytes": "1000000"}}})
			want := 3
			if tt.left == "" {
				// The dead letter has no room for all of the row, and the row would be gone.
				c.launch()
				c.refused("does not fit into the dead-letter topic", "ADD COLUMN published_at")
				if got := c.pg.Value("SELECT count(*) FROM outbox"); got != "5" {
					t.Errorf("%s rows are left, want all 5", got)
				}
				c.pg.Exec("DELETE FROM outbox WHERE event_type = 'c'")
				want = 2
			}
			c.catchUp()
			switch {
			case tt.left != "":
				if got := c.pg.Value("SELECT count(*) || ' rows, ' || count(*) FILTER (WHERE published_at IS NULL) || ' pending' FROM outbox"); got != tt.left {
					t.Errorf("%s, want %s", got, tt.left)
				}
			case c.pg.Value("SELECT count(*) FROM outbox") != "0":
				t.Error("rows are left")
			}
			var reasons []string
			for _, r := range c.kafka.Committed(t, c.name+".dead-letter") {
				reasons = append(reasons, string(r.Headers[0].Value))
			}
			if len(reasons) != want {
				t.Errorf("dead letters for %q, want %d", reasons, want)
			}
			c.catchUp()
			if n := len(c.kafka.Committed(t, c.name+".dead-letter")); n != want {
				t.Errorf("%d dead letters after another start, want %d", n, want)
			}
		})
	}
}

// With on-error: stop the connector ends at such a row, which stays pending; what comes
// before it is published and marked.
func TestPollingStopsAtWhatCannotBePublished(t *testing.T) {
	c := pollingOn(t, `CREATE TABLE outbox (id bigserial PRIMARY KEY, event_type text, payload jsonb, published_at timestamptz);
		INSERT INTO outbox (event_type, payload) VALUES ('a', '{}'), ('a', '{}'), ('bad type', '{}'), ('a', '{}')`, nil)
	c.set(caseMap{"dead-letter": caseMap{"on-error": "stop"}})
	for range 2 {
		c.launch()
		c.ends(1, "bad type", "public.outbox")
	}
	if got := c.pg.Value("SELECT string_agg(id::text, ',' ORDER BY id) FROM outbox WHERE published_at IS NULL"); got != "3,4" {
		t.Errorf("pending: %s, want 3,4", got)
	}
	c.pg.Exec("UPDATE outbox SET event_type = 'a' WHERE id = 3")
	c.catchUp()
	if n := len(c.kafka.Committed(t, c.name+".a")); n != 4 {
		t.Errorf("%d events, want 4", n)
	}
}

// A partitioned table: the places of rows are the same in each partition, a mark may move
// a row to another one, and partitions come and go.
func TestPollingOfAPartitionedTable(t *testing.T) {
	c := pollingOn(t, `CREATE TABLE outbox (id bigserial, event_type text DEFAULT 'e', aggregate_id text, aggregate_seq int, payload jsonb DEFAULT '{}', event_id uuid DEFAULT gen_random_uuid(), status text DEFAULT 'pending') PARTITION BY LIST (status);
		CREATE TABLE o_pending PARTITION OF outbox FOR VALUES IN ('pending') PARTITION BY HASH (aggregate_id);
		CREATE TABLE o_p0 PARTITION OF o_pending FOR VALUES WITH (MODULUS 2, REMAINDER 0); CREATE TABLE o_p1 PARTITION OF o_pending FOR VALUES WITH (MODULUS 2, REMAINDER 1);
		CREATE TABLE o_done PARTITION OF outbox FOR VALUES IN ('processed')`, nil)
	c.set(caseMap{"batch": caseMap{"max-records": 30}})
	c.launch()
	const fill = `INSERT INTO outbox (aggregate_id, aggregate_seq) SELECT 'a' || a, s FROM generate_series(%d, %d) s, generate_series(1, 20) a ORDER BY s, a`
	c.pg.Exec(fmt.Sprintf(fill, 1, 10))
	c.pg.WaitValue("200", "SELECT count(*) FROM o_done")
	c.pg.Exec(`ALTER TABLE outbox DETACH PARTITION o_done; CREATE TABLE o_next PARTITION OF outbox FOR VALUES IN ('processed'); CREATE TABLE o_other PARTITION OF outbox DEFAULT`)
	c.pg.Exec(fmt.Sprintf(fill, 11, 20))
	c.pg.WaitValue("200", "SELECT count(*) FROM o_next")
	c.stop()
	c.pg.Exec("INSERT INTO outbox SELECT * FROM o_done")
	if repeats := c.pollingCheck(c.kafka.Committed(t, c.name+".e")); repeats != 0 {
		t.Errorf("%d repeats", repeats)
	}
}

// What cannot be polled is refused at the start, in words that say what to do; and while
// polling, when it becomes so.
func TestPollingRefuses(t *testing.T) {
	const table = "CREATE TABLE outbox (id bigserial PRIMARY KEY, event_type text DEFAULT 'e', payload jsonb DEFAULT '{}', %s); INSERT INTO outbox DEFAULT VALUES;"
	plain := fmt.Sprintf(table, "published_at timestamptz")
	for name, tt := range map[string]struct {
		schema string
		later  string // what makes it so while polling; else schema does
		after  string
		role   bool
		texts  []string
	}{
		"a table that is not there":         {schema: "", texts: []string{"outbox table public.outbox does not exist"}},
		"a table that goes":                 {schema: plain, later: "CREATE SCHEMA elsewhere; ALTER TABLE outbox SET SCHEMA elsewhere", texts: []string{"outbox table public.outbox does not exist"}},
		"a mark that goes":                  {schema: plain, later: "ALTER TABLE outbox DROP COLUMN published_at", texts: []string{"no column that could mark", "ADD COLUMN published_at"}},
		"a mark that is never NULL":         {schema: fmt.Sprintf(table, "published_at timestamptz NOT NULL DEFAULT now()"), texts: []string{"every row counts as published", "DROP NOT NULL"}},
		"an enum without the label":         {schema: "CREATE TYPE st AS ENUM ('pending', 'done'); " + fmt.Sprintf(table, "status st DEFAULT 'pending'"), texts: []string{"needs the label processed", `invalid input value for enum st: "processed"`}},
		"a constraint on the mark":          {schema: fmt.Sprintf(table, "status text DEFAULT 'new' CHECK (status IN ('new', 'sent'))"), texts: []string{"1 of 1 published rows", "violates check constraint", "published again and again"}},
		"a trigger that raises":             {schema: plain + "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''outbox rows are immutable''; END'; CREATE TRIGGER no BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION no()", texts: []string{"1 of 1 published rows", "outbox rows are immutable"}},
		"a trigger that keeps what is gone": {schema: plain + "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; CREATE TRIGGER no BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION no()", after: "delete", texts: []string{"1 of 1 published rows"}},
		"a payload that goes":               {schema: plain, later: "ALTER TABLE outbox DROP COLUMN payload; INSERT INTO outbox DEFAULT VALUES", texts: []string{"no column is recognised as payload"}},
		"a right that is missing":           {schema: plain + "GRANT SELECT ON outbox TO NAME", role: true, texts: []string{"may not lock and mark", "GRANT UPDATE ON"}},
		"no right to read":                  {schema: plain, role: true, texts: []string{"may not read public.outbox", "GRANT SELECT"}},
		"no right to delete":                {schema: plain + "GRANT SELECT, UPDATE ON outbox TO NAME", role: true, after: "delete", texts: []string{"GRANT UPDATE, DELETE ON"}},
		"a right that goes":                 {schema: plain + "GRANT SELECT, UPDATE ON outbox TO NAME", role: true, later: "REVOKE UPDATE ON outbox FROM NAME; INSERT INTO outbox DEFAULT VALUES", texts: []string{"GRANT UPDATE ON"}},
		"a policy that comes":               {schema: plain + "GRANT SELECT, UPDATE ON outbox TO NAME", role: true, later: "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON outbox USING (false)", texts: []string{"row-level security", "BYPASSRLS"}},
	} {
		t.Run(name, func(t *testing.T) {
			after := tt.after
			if after == "" {
				after = "mark"
			}
			c := caseNew(t)
			named := func(sql string) string { return strings.ReplaceAll(sql, "NAME", c.name) }
			if tt.role {
				c.pg.Exec(named("CREATE ROLE NAME LOGIN PASSWORD 'x'"))
				t.Cleanup(func() { c.pg.Exec(named("DROP OWNED BY NAME; DROP ROLE NAME")) })
			}
			c.pg.Exec(named(tt.schema))
			c.setPolling(caseMap{"after": after})
			if tt.role {
				c.set(caseMap{"source": caseMap{"dsn": caseAs(t, c.pg.DSN(), c.name)}})
			}
			c.launch()
			if tt.later != "" {
				c.pg.WaitValue("0", pollingPending)
				c.pg.Exec(named(tt.later))
			}
			c.refused(tt.texts...)
		})
	}
}

// caseAs is a DSN for another user, whose password is x.
func caseAs(t *testing.T, dsn, user string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(user, "x")
	return u.String()
}

// Rows that came before a column was altered and rows after it are published as the table
// is then: not with what a column was called or was before.
func TestPollingFollowsATableThatIsAltered(t *testing.T) {
	c := pollingOn(t, `CREATE TABLE outbox (id bigserial PRIMARY KEY, event_type text DEFAULT 'e', payload text DEFAULT '1', tenant int DEFAULT 7, published_at timestamptz)`,
		caseMap{"format": "envelope", "envelope": []string{"tenant"}})
	c.launch()
	c.pg.Exec("INSERT INTO outbox DEFAULT VALUES")
	c.pg.WaitValue("0", pollingPending)
	c.pg.Exec(`ALTER TABLE outbox ALTER COLUMN tenant TYPE text, ALTER COLUMN payload DROP DEFAULT, ALTER COLUMN payload TYPE jsonb USING payload::jsonb, ADD COLUMN more int; INSERT INTO outbox (payload, tenant) VALUES ('{"n": 2}', 'acme')`)
	c.pg.WaitValue("0", pollingPending)
	// One transaction, so that no poll comes between: the table is another one.
	c.pg.Exec(`BEGIN; DROP TABLE outbox; CREATE TABLE outbox (published_at timestamptz, tenant boolean, event_type text, id int PRIMARY KEY, payload json); INSERT INTO outbox VALUES (NULL, true, 'e', 3, '[3]'); COMMIT`)
	c.pg.WaitValue("0", pollingPending)
	c.stop()
	var got []string
	for _, r := range c.kafka.Committed(t, c.name+".e") {
		_, value, _ := strings.Cut(string(r.Value), `"payload":`)
		got = append(got, value)
	}
	slices.Sort(got)
	if want := []string{`"1","tenant":7}`, `[3],"tenant":true}`, `{"n": 2},"tenant":"acme"}`}; !slices.Equal(got, want) {
		t.Errorf("values %q, want %q", got, want)
	}
}

// A key whose first row is held must not keep other keys waiting, however many rows it has.
func TestPollingGoesRoundAKeyThatIsHeld(t *testing.T) {
	c := pollingNew(t, 10)
	c.pg.Exec(`INSERT INTO outbox (aggregate_id, aggregate_seq) SELECT 'held', s FROM generate_series(1, 35) s`)
	holder := c.session()
	c.exec(holder, `BEGIN; SELECT FROM outbox WHERE aggregate_seq = 1 FOR UPDATE`)
	c.launch()
	c.pollingFill(5, 12)
	c.pg.WaitValue("0", `SELECT count(*) FROM outbox WHERE published_at IS NULL AND aggregate_id <> 'held'`)
	if n := c.pg.Value(pollingPending); n != "35" {
		t.Errorf("%s rows are pending, want the 35 of the held key", n)
	}
	c.exec(holder, `COMMIT`)
	c.pg.WaitValue("0", pollingPending)
	c.stop()
	if repeats := c.pollingCheck(c.kafka.Committed(t, c.eventTopic())); repeats != 0 {
		t.Errorf("%d repeats", repeats)
	}
}

// The command that ends with everything: two tables, one with a template as key, rows that
// another instance left, and none at all.
func TestPollingUntilCaughtUp(t *testing.T) {
	c := pollingNew(t, 7)
	c.pg.Exec(`CREATE TABLE other (LIKE outbox INCLUDING ALL)`)
	c.set(caseMap{"outbox": []caseMap{
		{"table": "public.outbox", "after": "mark", "topic": c.eventTopic()},
		{"table": "public.other", "after": "delete", "topic": c.name + ".other", "key": "{event_type}-{aggregate_id}"},
	}})
	c.catchUp()
	c.pollingFill(5, 20)
	c.pg.Exec("INSERT INTO other SELECT * FROM outbox")
	c.launch(killpoint.Env + "=" + killpoint.Spec(killpoint.Committed, 3))
	c.killed()
	c.catchUp()
	if left := c.pg.Value("SELECT (SELECT count(*) FROM other) + (" + pollingPending + ")"); left != "0" {
		t.Errorf("%s rows are left", left)
	}
	c.pollingCheck(c.kafka.Committed(t, c.eventTopic()))
	c.pollingCheck(c.kafka.Committed(t, c.name+".other"))
}

// A database without an encoding checks nothing of what it holds, and each value in the
// answer to a client of UTF-8: one row would keep all others from being read.
func TestPollingOfADatabaseWithoutAnEncoding(t *testing.T) {
	c := pollingOn(t, "SELECT", caseMap{"format": "envelope"})
	c.pg.Exec("CREATE DATABASE " + c.name + " ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
	t.Cleanup(func() { c.pg.Exec("DROP DATABASE " + c.name + " WITH (FORCE)") })
	dsn := strings.Replace(c.pg.DSN(), "/"+c.pg.Name+"?", "/"+c.name+"?", 1)
	conn := caseConnect(t, dsn)
	c.exec(conn, `CREATE TABLE outbox (id bigserial PRIMARY KEY, event_type text DEFAULT 'e', payload text, status int);
		INSERT INTO outbox (payload) VALUES ('one'), (convert_from('\xff61', 'SQL_ASCII')), ('ä')`)
	c.set(caseMap{"source": caseMap{"dsn": dsn}})
	c.catchUp()
	if got := c.kafka.Committed(t, c.name+".e"); len(got) != 2 {
		t.Errorf("%d events, want 2", len(got))
	}
	if got := c.kafka.Committed(t, c.name+".dead-letter"); len(got) != 1 || string(got[0].Headers[0].Value) != "encode" {
		t.Errorf("dead letters %v, want one (encode)", got)
	}
}

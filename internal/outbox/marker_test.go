package outbox

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/replication"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// stand is a database with an outbox, and a marker on it.
type stand struct {
	t *testing.T
	*harness.PG
	*Marker
	dsn string
}

func newStand(t *testing.T, schema string) *stand {
	t.Helper()
	t.Parallel()
	s := &stand{t: t, PG: harness.Postgres(t)}
	s.dsn = s.DSN()
	s.Exec(schema)
	return s
}

func (s *stand) connect() *pgx.Conn {
	s.t.Helper()
	conn, err := replication.Connect(s.t.Context(), s.dsn, "walrelay_test")
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(s.t.Context())) }) // it may be gone
	return conn
}

// byPublishedAt is the table public.outbox with published_at.
func byPublishedAt(s *stand, after string) Table {
	return Table{Schema: "public", Name: "outbox", After: after, EventID: "event_id", Mark: "published_at", Pending: `"published_at" IS NULL`, Published: "pg_catalog.now()", OID: s.oid("outbox")}
}

func (s *stand) oid(table string) (oid uint32) {
	s.t.Helper()
	if _, err := fmt.Sscan(s.Value("SELECT $1::text::regclass::oid::text", table), &oid); err != nil {
		s.t.Fatal(err)
	}
	return oid
}

func (s *stand) target(t Table) *Target {
	s.t.Helper()
	target, err := NewTarget(s.t.Context(), s.connect(), t)
	if err != nil {
		s.t.Fatal(err)
	}
	return target
}

// mark works on rows, whose keys are read from the table as the stream would send them.
func (s *stand) mark(target *Target, where string) *Job {
	s.t.Helper()
	var j Job
	j.Reset(target)
	s.add(&j, where)
	return s.do(&j)
}

func (s *stand) add(j *Job, where string) {
	s.t.Helper()
	columns := make([]string, len(j.Target.Key))
	for i, name := range j.Target.Key {
		columns[i] = pgx.Identifier{name}.Sanitize() + "::text"
	}
	results, err := replication.TextResults(s.t.Context(), s.connect(), "SELECT "+strings.Join(columns, ", ")+" FROM "+j.Target.SQL()+" WHERE "+where+" ORDER BY 1")
	if err != nil {
		s.t.Fatal(err)
	}
	for _, row := range results[0] {
		var key []byte
		for _, text := range row {
			key = AppendColumn(key, text)
		}
		j.Add(0, key)
	}
}

func (s *stand) do(j *Job) *Job {
	s.t.Helper()
	if s.Marker == nil {
		s.Marker = NewMarker(s.t.Context(), replication.NewConnector(s.dsn, "walrelay_test"), zerolog.Nop())
		s.t.Cleanup(s.Close)
	}
	s.Do(j)
	select {
	case <-s.Done():
	case <-time.After(harness.DefaultTimeout):
		s.t.Fatal("the job does not come back")
	}
	return j
}

func (s *stand) must(j *Job) {
	s.t.Helper()
	if j.Err != nil {
		s.t.Fatal(j.Err)
	}
}

const schema = `CREATE TABLE outbox (id bigint PRIMARY KEY, event_id uuid NOT NULL DEFAULT gen_random_uuid(), published_at timestamptz, n int DEFAULT 0);
	INSERT INTO outbox (id) SELECT generate_series(1, 10)`

// Each kind of key finds the row that the stream's text names, and no other.
func TestRowsAreFoundByKeysOfEveryType(t *testing.T) {
	for name, tt := range map[string]struct{ table, values string }{
		"bigint":      {"id bigint PRIMARY KEY", "-9223372036854775808"},
		"smallint":    {"id smallint PRIMARY KEY", "-7"},
		"text":        {"id text PRIMARY KEY", `'e"u\{},NULL'`},
		"empty text":  {"id text PRIMARY KEY", "''"},
		"varchar":     {"id varchar(20) PRIMARY KEY", "'ü '"},
		"char":        {"id char(5) PRIMARY KEY", "'ab'"},
		"uuid":        {"id uuid PRIMARY KEY", "'9b1c2d3e-0000-0000-0000-00000000000a'"},
		"numeric":     {"id numeric(20,4) PRIMARY KEY", "1234567890123.4500"},
		"double":      {"id float8 PRIMARY KEY", "0.1::float8 + 0.2::float8"},
		"bytea":       {"id bytea PRIMARY KEY", `'\x00ff5c'`},
		"date":        {"id date PRIMARY KEY", "'2026-02-03'"},
		"timestamptz": {"id timestamptz PRIMARY KEY", "'2026-02-03 04:05:06.789012+05:30'"},
		"timestamp":   {"id timestamp(3) PRIMARY KEY", "'2026-02-03 04:05:06.789'"},
		"enum":        {"id kind PRIMARY KEY", "'b c'"},
		"domain":      {"id positive PRIMARY KEY", "42"},
		"array":       {"id int[] PRIMARY KEY", "'{1,2}'"},
		"composite":   {"id int, region text, PRIMARY KEY (region, id)", "7"},
		"quoted name": {`id int, "we ""ird" int GENERATED ALWAYS AS (id) STORED PRIMARY KEY`, "7"},
		"unique":      {"id int NOT NULL, UNIQUE (id)", "7"},
		"none":        {"id int", "7"},
		"deferrable":  {"id int PRIMARY KEY DEFERRABLE", "7"},
		"nullable":    {"id int UNIQUE", "7"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t, "CREATE TYPE kind AS ENUM ('a', 'b c'); CREATE DOMAIN positive AS int CHECK (value > 0)")
			region := ""
			if name == "composite" {
				region = "'e u'"
			}
			s.Exec("CREATE TABLE outbox (" + tt.table + ", event_id uuid NOT NULL DEFAULT gen_random_uuid(), published_at timestamptz)")
			columns, values := "id", tt.values
			if region != "" {
				columns, values = "id, region", tt.values+", "+region
			}
			s.Exec("INSERT INTO outbox (" + columns + ") VALUES (" + values + ")")
			other := ""
			if name == "none" || name == "deferrable" || name == "nullable" { // by the event's id
				s.Exec("INSERT INTO outbox (id) VALUES (8)")
				other = " AND id = 7"
			}
			target := s.target(byPublishedAt(s, Mark))
			if loose := other != ""; target.Loose != loose {
				t.Errorf("loose %t, key %v", target.Loose, target.Key)
			}
			s.must(s.mark(target, "true"+other))
			if got := s.Value("SELECT count(*) FROM outbox WHERE published_at IS NOT NULL"); got != "1" {
				t.Errorf("%s rows are marked, want 1: %s", got, target.sql)
			}
			target = s.target(byPublishedAt(s, Delete))
			s.must(s.mark(target, "published_at IS NOT NULL"))
			if got := s.Value("SELECT count(*) FROM outbox WHERE published_at IS NOT NULL"); got != "0" {
				t.Errorf("%s rows are left: %s", got, target.sql)
			}
		})
	}
}

func TestMarksOfEveryKind(t *testing.T) {
	for name, tt := range map[string]struct{ column, pending, published, want string }{
		"smallint": {"smallint NOT NULL DEFAULT 0", `"status" IS DISTINCT FROM 1`, "1", "1"},
		"text":     {"text", `"status" IS DISTINCT FROM 'processed'`, "'processed'", "processed"},
		"varchar":  {"varchar(10) DEFAULT 'new'", `"status" IS DISTINCT FROM 'processed'`, "'processed'", "processed"},
		"enum":     {"kind DEFAULT 'new'", `"status"::pg_catalog.text IS DISTINCT FROM 'processed'`, "'processed'", "processed"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t, "CREATE TYPE kind AS ENUM ('new', 'processed'); CREATE TABLE outbox (id bigint, event_id int, status "+tt.column+", PRIMARY KEY (id, event_id)) PARTITION BY RANGE (id);"+
				"CREATE TABLE o1 PARTITION OF outbox FOR VALUES FROM (0) TO (5); CREATE TABLE o2 PARTITION OF outbox DEFAULT; INSERT INTO outbox (id, event_id) SELECT g, g FROM generate_series(1, 9) g")
			target := s.target(Table{Schema: "public", Name: "outbox", OID: s.oid("outbox"), After: Mark, EventID: "event_id", Mark: "status", Pending: tt.pending, Published: tt.published})
			s.must(s.mark(target, "id BETWEEN 3 AND 7"))
			if got := s.Value("SELECT string_agg(id::text, ',' ORDER BY id) FROM outbox WHERE status::text = $1", tt.want); got != "3,4,5,6,7" {
				t.Errorf("marked: %s", got)
			}
		})
	}
}

// What the application did to a row meanwhile stands, and is no error.
func TestRowsThatTheApplicationHasChangedAreLeftAlone(t *testing.T) {
	s := newStand(t, schema)
	target := s.target(byPublishedAt(s, Mark))
	var j Job
	j.Reset(target)
	s.add(&j, "true")
	s.Exec(`DELETE FROM outbox WHERE id = 1; UPDATE outbox SET published_at = '2020-01-01' WHERE id = 2; UPDATE outbox SET id = 20 WHERE id = 3;
		UPDATE outbox SET n = 7 WHERE id = 4; DELETE FROM outbox WHERE id = 5; INSERT INTO outbox (id) VALUES (5)`)
	s.must(s.do(&j))
	for i := range j.Len() {
		if !j.Settled(i) {
			t.Errorf("row %v is not settled", j.Key(i))
		}
	}
	// 5 has the key of one that is gone, and another event.
	if got := s.Value("SELECT string_agg(id::text, ',' ORDER BY id) FROM outbox WHERE published_at > '2020-01-01'"); got != "4,6,7,8,9,10" {
		t.Errorf("marked: %s", got)
	}
	s.must(s.do(&j)) // again, as after a kill
	if got := s.Value("SELECT count(*) FROM outbox WHERE published_at = '2020-01-01'"); got != "1" {
		t.Error("the application's own mark was overwritten")
	}
}

func TestAnEventThatIsThereTwiceIsLeftAloneWithoutAKey(t *testing.T) {
	s := newStand(t, `CREATE TABLE outbox (event_id int, published_at timestamptz); INSERT INTO outbox VALUES (1), (2), (2), (3)`)
	for after, want := range map[string]string{Mark: "2", Delete: "2"} {
		s.must(s.mark(s.target(byPublishedAt(s, after)), "true"))
		if got := s.Value("SELECT count(*) FROM outbox WHERE published_at IS NULL"); got != want {
			t.Errorf("%s: %s rows are not marked, want the two", after, got)
		}
	}
}

// A lock is waited for in bounds, and a deadlock is never the application's.
func TestLocksOfTheApplication(t *testing.T) {
	s := newStand(t, schema)
	target := s.target(byPublishedAt(s, Mark))
	app := s.connect()
	exec := func(sql string) {
		t.Helper()
		if _, err := app.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec("BEGIN; SELECT FROM outbox WHERE id = 5 FOR UPDATE")
	for _, wait := range []time.Duration{20 * time.Millisecond, LockWait} {
		began := time.Now()
		var j Job
		j.Reset(target)
		j.LockWait = wait
		s.add(&j, "true")
		if s.do(&j); !IsLocked(j.Err) || j.Settled(0) {
			t.Fatalf("error %v, settled %t; want a lock", j.Err, j.Settled(0))
		}
		if took := time.Since(began); took < wait {
			t.Errorf("it waited for %s, want %s", took, wait)
		}
	}
	s.must(s.mark(target, "id <> 5"))

	// The marker holds the rows before 5 and waits for it; the application, which holds 5,
	// asks for one of those.
	var j Job
	j.Reset(s.target(byPublishedAt(s, Delete)))
	s.add(&j, "true")
	s.Do(&j)
	s.WaitValue("t", "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE 'WITH work AS (DELETE%'")
	exec("UPDATE outbox SET n = 1 WHERE id IN (1, 9)")
	exec("COMMIT")
	<-s.Done()
	if !IsLocked(j.Err) {
		t.Errorf("error %v, want that the marker gave way", j.Err)
	}
	s.must(s.do(&j))
	if got := s.Value("SELECT count(*) FROM outbox"); got != "0" {
		t.Errorf("%s rows are left", got)
	}
	exec("BEGIN; LOCK TABLE outbox")
	s.target(byPublishedAt(s, Mark)) // a start does not hang for it
	var again Job
	again.Reset(target)
	again.LockWait = 20 * time.Millisecond
	again.Add(0, key("1", "9b1c2d3e-0000-0000-0000-00000000000a"))
	if s.do(&again); !IsLocked(again.Err) {
		t.Errorf("error %v, want a lock on the table", again.Err)
	}
	exec("ROLLBACK")
}

// A role's own settings do not make marks fail, nor does a connection that was cut off
// while there was nothing to do.
func TestSettingsAndConnectionsThatAreInTheWay(t *testing.T) {
	s := newStand(t, schema)
	role := "walrelay_marker_" + strings.ToLower(s.Name)
	s.Exec(fmt.Sprintf(`CREATE ROLE %[1]s LOGIN PASSWORD 'x'; GRANT SELECT, UPDATE (published_at) ON outbox TO %[1]s;
		ALTER ROLE %[1]s SET default_transaction_isolation = 'serializable'; ALTER ROLE %[1]s SET statement_timeout = '1ms';
		ALTER ROLE %[1]s SET lock_timeout = 0; ALTER ROLE %[1]s SET synchronous_commit = off; ALTER ROLE %[1]s SET idle_session_timeout = '1ms'; ALTER ROLE %[1]s SET TimeZone = 'Asia/Tokyo'; ALTER ROLE %[1]s SET DateStyle = 'SQL, DMY'`, role))
	t.Cleanup(func() { s.Exec("DROP OWNED BY " + role + "; DROP ROLE " + role) })
	dsn, err := url.Parse(s.DSN())
	if err != nil {
		t.Fatal(err)
	}
	dsn.User = url.UserPassword(role, "x")
	target := s.target(byPublishedAt(s, Mark))
	s.Marker = NewMarker(t.Context(), replication.NewConnector(dsn.String(), "walrelay_test"), zerolog.Nop())
	t.Cleanup(s.Close)
	s.must(s.mark(target, "id = 1"))
	var wait string
	if err := s.conn.QueryRow(t.Context(), "SHOW synchronous_commit").Scan(&wait); err != nil || wait != "local" {
		t.Errorf("synchronous_commit is %q, %v", wait, err)
	}
	s.Exec("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = $1", role)
	s.must(s.mark(target, "id = 2"))
	if got := s.Value("SELECT count(*) FROM outbox WHERE abs(extract(epoch FROM now() - published_at)) < 600"); got != "2" {
		t.Errorf("%s rows are marked with the time, want 2", got)
	}
	// A right that is lost while it runs concerns the table.
	s.Exec("REVOKE UPDATE (published_at) ON outbox FROM " + role)
	if j := s.mark(target, "id = 3"); !IsTable(j.Err) || IsRedefined(j.Err) {
		t.Errorf("error %v, want one about the table", j.Err)
	}
}

// A table that is not what it was is told from one where somebody is in the way.
func TestTablesThatChange(t *testing.T) {
	s := newStand(t, schema)
	target := s.target(byPublishedAt(s, Mark))
	s.Exec("ALTER TABLE outbox RENAME COLUMN id TO number")
	if j := s.mark(target.ByEvent(), "number = 1"); j.Err != nil {
		t.Errorf("by the event's id: %v", j.Err)
	}
	renamed := s.target(byPublishedAt(s, Mark))
	if !renamed.SameKey(target) || renamed.Same(target) || !slices.Equal(renamed.Key, []string{"number", "event_id"}) {
		t.Errorf("the key %v of columns %v is not %v of columns %v", renamed.Key, renamed.columns, target.Key, target.columns)
	}
	var j Job
	j.Reset(target)
	j.Add(0, key("2", "9b1c2d3e-0000-0000-0000-00000000000a"))
	if s.do(&j); !IsRedefined(j.Err) {
		t.Errorf("a renamed column: %v", j.Err)
	}
	s.must(s.mark(renamed, "number = 3"))
	s.Exec("ALTER TABLE outbox DROP CONSTRAINT outbox_pkey")
	if loose := s.target(byPublishedAt(s, Mark)); loose.SameKey(renamed) || !loose.Loose || loose.ByEvent() != loose {
		t.Errorf("key %v without a primary key", loose.Key)
	}
	s.Exec("DROP TABLE outbox")
	if s.do(&j); !IsRedefined(j.Err) {
		t.Errorf("a table that is gone: %v", j.Err)
	}
}

// A rotation, also one that a statement has waited for: rows of the table that has the name
// by now are not touched.
func TestARowOfTheTableThatTookTheNameIsLeftAlone(t *testing.T) {
	for _, after := range []string{Mark, Delete} {
		t.Run(after, func(t *testing.T) {
			s := newStand(t, schema)
			target := s.target(byPublishedAt(s, after))
			var j Job
			j.Reset(target)
			j.LockWait = harness.DefaultTimeout
			s.add(&j, "id = 1")
			app := s.connect()
			for _, sql := range []string{"BEGIN; ALTER TABLE outbox RENAME TO outbox_old", "CREATE TABLE outbox (LIKE outbox_old INCLUDING ALL); INSERT INTO outbox SELECT * FROM outbox_old"} {
				if _, err := app.Exec(t.Context(), sql); err != nil {
					t.Fatal(err)
				}
			}
			if s.Marker == nil {
				s.do(&Job{Target: target}) // it has no rows, and connects
			}
			s.Do(&j)
			s.WaitValue("t", "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE 'WITH work AS (%'")
			if _, err := app.Exec(t.Context(), "COMMIT"); err != nil {
				t.Fatal(err)
			}
			<-s.Done()
			if !IsRedefined(j.Err) || !IsTable(j.Err) || j.Settled(0) {
				t.Errorf("error %v, settled %t; want that it is another table", j.Err, j.Settled(0))
			}
			if got := s.Value("SELECT count(*) FROM outbox WHERE published_at IS NULL"); got != "10" {
				t.Errorf("%s rows of the new table are as they were, want 10", got)
			}
			was := byPublishedAt(s, after)
			was.OID, was.Name = s.oid("outbox_old"), "outbox_old"
			j.Target = s.target(was)
			s.must(s.do(&j))
			if got := s.Value("SELECT count(*) FROM outbox_old WHERE published_at IS NULL"); got != "9" {
				t.Errorf("%s rows of the old table are as they were, want 9", got)
			}
		})
	}
}

func TestWhatCannotBeMarkedIsRefused(t *testing.T) {
	s := newStand(t, schema)
	table := byPublishedAt(s, Mark)
	table.Mark = ""
	_, err := NewTarget(t.Context(), s.connect(), table)
	var refusal *checkpoint.Refusal
	if !errors.As(err, &refusal) || !strings.Contains(refusal.Remedy, "ADD COLUMN published_at") {
		t.Errorf("no mark: %v", err)
	}
	table = byPublishedAt(s, Mark)
	table.Published = "'processed'"
	if _, err = NewTarget(t.Context(), s.connect(), table); !errors.As(err, &refusal) {
		t.Errorf("a mark that the column does not take: %v", err)
	}
}

// A row is touched only once its transaction can be seen.
func TestRowsOfTransactionsThatCannotBeSeenWait(t *testing.T) {
	s := newStand(t, schema)
	target := s.target(byPublishedAt(s, Mark))
	app := s.connect()
	if _, err := app.Exec(t.Context(), "BEGIN"); err != nil {
		t.Fatal(err)
	}
	var xid checkpoint.XID
	var event string
	if err := app.QueryRow(t.Context(), "INSERT INTO outbox (id) VALUES (11) RETURNING pg_current_xact_id()::text::int8, event_id::text").Scan(&xid, &event); err != nil {
		t.Fatal(err)
	}
	var j Job
	j.Reset(target)
	s.add(&j, "id = 1")
	j.Add(xid, key("11", event))
	if s.must(s.do(&j)); !j.Settled(0) || j.Settled(1) {
		t.Errorf("settled %t and %t, want the first", j.Settled(0), j.Settled(1))
	}
	if _, err := app.Exec(t.Context(), "COMMIT"); err != nil {
		t.Fatal(err)
	}
	if s.must(s.do(&j)); !j.Settled(1) {
		t.Error("the second is not settled though it can be seen")
	}
	if got := s.Value("SELECT string_agg(id::text, ',' ORDER BY id) FROM outbox WHERE published_at IS NOT NULL"); got != "1,11" {
		t.Errorf("marked: %s", got)
	}
}

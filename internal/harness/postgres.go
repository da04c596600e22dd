package harness

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/internal/pgserver"
)

// Null stands for a null in the results of Query.
const Null = "<null>"

const (
	startTimeout = 5 * time.Minute // a download may be part of it
	queryTimeout = time.Minute
)

// PG is a database of a test's own on a real server. Its query methods fail the test on an error; they reconnect when
// the server was restarted, and they are safe for concurrent use.
type PG struct {
	// Server is what the database lives on: a shared one, unless Dedicated was asked for. Do not stop a shared one.
	Server *pgserver.Server
	// Name of the database.
	Name string

	t         testing.TB
	dedicated bool
	mu        sync.Mutex // guards conn
	conn      *pgconn.PgConn
}

type pgOptions struct {
	major     int
	dedicated bool
	fsync     bool
	settings  map[string]string
}

// PGOption is an option of Postgres.
type PGOption func(*pgOptions)

// Major asks for a major version instead of DefaultMajor.
func Major(major int) PGOption { return func(o *pgOptions) { o.major = major } }

// Setting puts a line into postgresql.conf. Databases with the same version and settings share a server.
func Setting(name, value string) PGOption {
	return func(o *pgOptions) { o.settings[name] = value }
}

// Dedicated asks for a server that no other test uses, for tests that stop, kill or reconfigure it, or that count its
// slots or WAL.
func Dedicated() PGOption { return func(o *pgOptions) { o.dedicated = true } }

// Fsync asks for a server that does not trade durability for speed.
func Fsync() PGOption { return func(o *pgOptions) { o.fsync = true } }

// Majors are the versions that WALRELAY_TEST_PG names: 18 when it is not set, a list like 14,18, or all.
func Majors(t testing.TB) []int {
	t.Helper()
	value := os.Getenv("WALRELAY_TEST_PG")
	switch value {
	case "":
		return []int{pgserver.DefaultMajor}
	case "all":
		return pgserver.Majors()
	}
	var majors []int
	for _, field := range strings.Split(value, ",") {
		major, err := strconv.Atoi(strings.TrimSpace(field))
		if err != nil || !slices.Contains(pgserver.Majors(), major) {
			t.Fatalf("WALRELAY_TEST_PG=%s: want all, or a list of %v", value, pgserver.Majors())
		}
		majors = append(majors, major)
	}
	return majors
}

// DefaultMajor is the newest version that WALRELAY_TEST_PG names.
func DefaultMajor(t testing.TB) int { return slices.Max(Majors(t)) }

// EachMajor runs a test once per version that WALRELAY_TEST_PG names.
func EachMajor(t *testing.T, test func(t *testing.T, major int)) {
	for _, major := range Majors(t) {
		t.Run("postgres "+strconv.Itoa(major), func(t *testing.T) { test(t, major) })
	}
}

// Postgres returns a fresh, empty database. At the test's end its slots and the database are dropped, so whatever
// streams from it must have ended by then: start it after this call, and its cleanup comes first.
func Postgres(t testing.TB, options ...PGOption) *PG {
	t.Helper()
	o := &pgOptions{major: DefaultMajor(t), settings: map[string]string{}}
	for _, option := range options {
		option(o)
	}
	server, err := o.server(t)
	if err != nil {
		t.Fatal(err)
	}
	pg := &PG{Server: server, Name: "test_" + strings.ToLower(rand.Text()[:10]), t: t, dedicated: o.dedicated}
	if err := execOn(server.DSN(), "create database "+pg.Name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pg.close)
	return pg
}

func (o *pgOptions) server(t testing.TB) (*pgserver.Server, error) {
	start := func() (*pgserver.Server, error) {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		return pgserver.Start(ctx, pgserver.Options{Major: o.major, Settings: o.settings, Fsync: o.fsync})
	}
	if !o.dedicated {
		key := fmt.Sprintf("postgres %d %t", o.major, o.fsync)
		for _, name := range slices.Sorted(maps.Keys(o.settings)) {
			key += fmt.Sprintf(" %s=%q", name, o.settings[name])
		}
		return get(shared, key, start, (*pgserver.Server).Dir)
	}
	server, err := start()
	if err != nil {
		return nil, err
	}
	watch(t, server.Dir())
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Errorf("close the test's PostgreSQL: %v", err)
		}
	})
	return server, nil
}

// DSN is the URL of the test's database, for the superuser.
func (pg *PG) DSN() string { return pg.Server.Database(pg.Name) }

// ProxyDSN is DSN with another address, that of a Proxy before the server.
func (pg *PG) ProxyDSN(addr string) string {
	return strings.Replace(pg.DSN(), pg.Server.Addr(), addr, 1)
}

// Exec runs statements, separated by semicolons, in one implicit transaction unless they say otherwise. With arguments
// it is one statement, as for Query.
func (pg *PG) Exec(sql string, args ...any) {
	pg.t.Helper()
	pg.Query(sql, args...)
}

// Query runs a statement and returns the rows of the last result as PostgreSQL's text, nulls as Null. Arguments are
// passed as text: nil is null, []byte stands as it is, all else as fmt prints it.
func (pg *PG) Query(sql string, args ...any) [][]string {
	pg.t.Helper()
	rows, err := pg.TryQuery(sql, args...)
	if err != nil {
		pg.t.Fatalf("%s: %v", sql, err)
	}
	return rows
}

// Value is Query for one row with one column.
func (pg *PG) Value(sql string, args ...any) string {
	pg.t.Helper()
	rows := pg.Query(sql, args...)
	if len(rows) != 1 || len(rows[0]) != 1 {
		pg.t.Fatalf("%s: %d rows, want one with one column", sql, len(rows))
	}
	return rows[0][0]
}

// TryQuery is Query for statements that may fail.
func (pg *PG) TryQuery(sql string, args ...any) ([][]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), queryTimeout)
	defer cancel()
	pg.mu.Lock()
	defer pg.mu.Unlock()
	if pg.conn == nil || pg.conn.IsClosed() {
		conn, err := pgconn.Connect(ctx, pg.DSN())
		if err != nil {
			return nil, fmt.Errorf("connect: %w", err)
		}
		pg.conn = conn
	}
	if len(args) == 0 {
		results, err := pg.conn.Exec(ctx, sql).ReadAll()
		if err != nil || len(results) == 0 {
			return nil, err
		}
		return text(results[len(results)-1].Rows), nil
	}
	result := pg.conn.ExecParams(ctx, sql, params(args), nil, nil, nil).Read()
	return text(result.Rows), result.Err
}

func params(args []any) [][]byte {
	out := make([][]byte, len(args))
	for i, arg := range args {
		switch v := arg.(type) {
		case nil:
		case []byte:
			out[i] = v
		default:
			out[i] = []byte(fmt.Sprint(v))
		}
	}
	return out
}

func text(rows [][][]byte) [][]string {
	var out [][]string
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, cell := range row {
			cells[i] = string(cell)
			if cell == nil {
				cells[i] = Null
			}
		}
		out = append(out, cells)
	}
	return out
}

// WaitValue waits until a query for one value gives want.
func (pg *PG) WaitValue(want, sql string, args ...any) {
	pg.t.Helper()
	last := ""
	defer func() {
		if pg.t.Failed() {
			pg.t.Logf("%s: last %s", sql, last)
		}
	}()
	WaitFor(pg.t, fmt.Sprintf("%s to give %s", sql, want), DefaultTimeout, func() (bool, error) {
		last = pg.Value(sql, args...)
		return last == want, nil
	})
}

// CleanupSlots drops the replication slots of this database, ending the walsenders that hold them. It is done at the
// test's end too; a test may need it before, so that the server lets WAL go.
func (pg *PG) CleanupSlots() {
	pg.t.Helper()
	WaitFor(pg.t, "the slots to be dropped", DefaultTimeout, pg.dropSlots)
}

// dropSlots tries once. A slot that is still in use after its walsender was told to end is left for the next try.
func (pg *PG) dropSlots() (bool, error) {
	if _, err := pg.TryQuery(`select pg_terminate_backend(active_pid) from pg_replication_slots
		where database = current_database() and active_pid is not null`); err != nil {
		return false, err
	}
	if _, err := pg.TryQuery(`select pg_drop_replication_slot(slot_name) from pg_replication_slots
		where database = current_database() and active_pid is null and not temporary`); err != nil {
		return false, nil // taken again between look and drop
	}
	left, err := pg.TryQuery(`select 1 from pg_replication_slots where database = current_database()`)
	return len(left) == 0, err
}

// close gives the database back. Of a dedicated server nothing needs dropping, and it may be down.
func (pg *PG) close() {
	if !pg.dedicated {
		pg.CleanupSlots()
	}
	pg.mu.Lock()
	if pg.conn != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_ = pg.conn.Close(ctx) // the server may be gone
		cancel()
	}
	pg.mu.Unlock()
	if pg.dedicated {
		return
	}
	if err := execOn(pg.Server.DSN(), "drop database "+pg.Name+" with (force)"); err != nil {
		pg.t.Errorf("drop the test's database: %v", err)
	}
}

// execOn runs one statement on a connection of its own.
func execOn(dsn, sql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), queryTimeout)
	defer cancel()
	conn, err := pgconn.Connect(ctx, dsn)
	if err != nil {
		return fmt.Errorf("%s: %w", sql, err)
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, sql).ReadAll(); err != nil {
		return fmt.Errorf("%s: %w", sql, err)
	}
	return nil
}

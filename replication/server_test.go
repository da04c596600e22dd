package replication

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/internal/harness"
)

// The tests run on the servers of the harness, which chooses the majors; see its doc.

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// testSettings are those of the shared servers. The work memory is the least there is, so
// that a few thousand rows already make a large transaction.
func testSettings() []harness.PGOption {
	return []harness.PGOption{
		harness.Setting("max_prepared_transactions", "5"),
		harness.Setting("logical_decoding_work_mem", "64kB"),
	}
}

type server struct {
	dsn string // superuser, a database of the test's own
	db  string
}

func onServers(t *testing.T, test func(t *testing.T, s server)) {
	t.Helper()
	harness.EachMajor(t, func(t *testing.T, major int) { test(t, mustDatabase(t, mustAdmin(t, major))) })
}

// mustDatabase makes a database for one test and drops it, its slots first.
func mustDatabase(t *testing.T, admin string) server {
	t.Helper()
	conn := mustConnect(t, admin)
	name := fmt.Sprintf("wr_%d", time.Now().UnixNano())
	mustExec(t, conn, "CREATE DATABASE "+name)
	t.Cleanup(func() {
		conn := mustConnect(t, admin)
		mustExec(t, conn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '"+name+"'")
		waitFor(t, "the database's slots to be free", func() bool {
			var n int
			mustScan(t, conn, "SELECT count(*) FROM pg_replication_slots WHERE active AND database = '"+name+"'", &n)
			return n == 0
		})
		mustExec(t, conn, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = '"+name+"'")
		mustExec(t, conn, "DROP DATABASE "+name+" WITH (FORCE)")
	})
	u, err := url.Parse(admin)
	if err != nil {
		t.Fatalf("parse the server's DSN: %v", err)
	}
	u.Path = "/" + name
	return server{dsn: u.String(), db: name}
}

// as gives the server's DSN for another role.
func (s server) as(user, password string) string {
	u, _ := url.Parse(s.dsn)
	u.User = url.UserPassword(user, password)
	return u.String()
}

func (s server) connector() Connector { return NewConnector(s.dsn, "walrelay_test") }

// mustRole makes a role with a password, and drops it and what it owns.
func (s server) mustRole(t *testing.T, conn *pgx.Conn, attributes string) (name, dsn string) {
	t.Helper()
	name = fmt.Sprintf("wr_role_%d", time.Now().UnixNano())
	mustExec(t, conn, "CREATE ROLE "+name+" LOGIN PASSWORD 'pw-of-role' "+attributes)
	t.Cleanup(func() {
		conn := mustConnect(t, s.dsn)
		mustExec(t, conn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '"+name+"'")
		mustExec(t, conn, "REASSIGN OWNED BY "+name+" TO CURRENT_USER")
		mustExec(t, conn, "DROP OWNED BY "+name)
		mustExec(t, conn, "DROP ROLE "+name)
	})
	return name, s.as(name, "pw-of-role")
}

func mustConnect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := Connect(t.Context(), dsn, "walrelay_test")
	if t.Context().Err() != nil { // in a cleanup the test's context is over
		conn, err = Connect(context.WithoutCancel(t.Context()), dsn, "walrelay_test")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func mustExec(t *testing.T, conn *pgx.Conn, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := conn.Exec(context.WithoutCancel(t.Context()), s, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

func mustScan(t *testing.T, conn *pgx.Conn, query string, dest ...any) {
	t.Helper()
	if err := conn.QueryRow(context.WithoutCancel(t.Context()), query).Scan(dest...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// waitFor polls until ok, for at most 20 s.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			t.Fatalf("waited in vain for %s", what)
		case <-tick.C:
		}
	}
}

// mustAdmin gives a superuser's DSN of one server.
func mustAdmin(t *testing.T, major int) string {
	t.Helper()
	pg := harness.Postgres(t, append(testSettings(), harness.Major(major))...)
	dsn, _, _ := strings.Cut(pg.Server.DSN(), "?") // tests append parameters of their own
	return dsn
}

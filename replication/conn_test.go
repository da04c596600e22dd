package replication

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
)

func TestNoErrorShowsThePassword(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	refuse := WithDial(func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("refused") })
	for _, dsn := range []string{
		"postgres://u:s3cr3t@localhost:1/db",
		"postgres://u:s3cr3t%zz@localhost/db",
		"postgres://u:12@s3cr3t@localhost/db",
		"postgres://u:12/s3cr3t@localhost/db",
		"postgres://u:s3cr3t/12@localhost/db",
		"postgres://u:p?s3cr3t@localhost/db",
		"postgres://u:p#s3cr3t@localhost/db",
		"postgres://u:s3cr3t@localhost:port/db",
		"postgres://u@localhost/db?password=s3cr3t&sslmode=nonsense",
		"postgres://u:p s3cr3t@localhost/db",
		"host=localhost user=u password=p s3cr3t=x dbname=db",
		"host=localhost user=u password=p s3cr3t dbname=db",
		"host=localhost user=u password='p s3cr3t dbname=db",
		"host=localhost user=u password=p b s3cr3t=1",
		"host=localhost port=x user=u password=s3cr3t",
		"s3cr3t",
		"postgres://u:[s3cr3t@localhost/db",
	} {
		_, err := Connect(ctx, dsn, "walrelay_test", refuse)
		if err == nil {
			t.Fatalf("%s: connected", dsn)
		}
		for e := err; e != nil; e = errors.Unwrap(e) {
			if strings.Contains(e.Error(), "s3cr3t") {
				t.Errorf("%s: the error shows the password: %v", dsn, e)
			}
		}
		var withConfig *pgconn.ConnectError
		if errors.As(err, &withConfig) {
			t.Errorf("%s: the error carries the configuration with the password", dsn)
		}
		if _, err := WalsenderConfig(dsn, "walrelay_test"); err != nil && strings.Contains(err.Error(), "s3cr3t") {
			t.Errorf("%s: the error shows the password: %v", dsn, err)
		}
	}
}

func TestGoodDSNsAreAccepted(t *testing.T) {
	for _, dsn := range []string{
		"postgres://u%40tenant:p%40%2F@localhost:5432/db?sslmode=disable",
		"postgres://u:p@h1:1,h2:2/db?target_session_attrs=read-write",
		"postgres://u@localhost/db?options=-c%20search_path%3Da",
		"postgresql:///db?host=/var/run/postgresql&user=a@b",
		"host=/tmp user=u password='a b@c/d' dbname=db",
	} {
		cfg, err := WalsenderConfig(dsn, "walrelay_shop")
		if err != nil {
			t.Errorf("%s: %v", dsn, err)
			continue
		}
		if cfg.RuntimeParams["replication"] != "database" || cfg.RuntimeParams["application_name"] != "walrelay_shop" || cfg.ConnectTimeout == 0 {
			t.Errorf("%s: parameters %v, timeout %v", dsn, cfg.RuntimeParams, cfg.ConnectTimeout)
		}
	}
}

func TestDSNParameterInAnotherCaseDoesNotCompete(t *testing.T) {
	cfg, err := WalsenderConfig("postgres://u@localhost/db?timezone=Asia/Kolkata&DATESTYLE=German&search_path=a", "walrelay_shop")
	if err != nil {
		t.Fatal(err)
	}
	for name := range cfg.RuntimeParams {
		if name == "timezone" || name == "DATESTYLE" {
			t.Errorf("%s is still there beside ours", name)
		}
	}
	if cfg.RuntimeParams["search_path"] != "a" {
		t.Error("the DSN's search_path is gone")
	}
}

func TestClassifyConnect(t *testing.T) {
	notFound := &net.DNSError{Err: "no such host", Name: "db", IsNotFound: true}
	refused := &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	for _, tt := range []struct {
		name string
		err  error
		want error
	}{
		{"wrong password", &pgconn.PgError{Code: "28P01"}, ErrAuth},
		{"no pg_hba.conf entry", &pgconn.PgError{Code: "28000"}, ErrAuth},
		{"no CONNECT right", &pgconn.PgError{Code: "42501"}, ErrAuth},
		{"missing database", &pgconn.PgError{Code: "3D000"}, ErrNoDatabase},
		{"unknown host", notFound, ErrHostUnknown},
		{"one host unknown, the other one down", errors.Join(notFound, refused), nil},
		{"name server down", &net.DNSError{Err: "timeout", IsTimeout: true}, nil},
		{"refused", refused, nil},
		{"server starting up", &pgconn.PgError{Code: "57P03"}, nil},
		{"too many connections", &pgconn.PgError{Code: "53300"}, nil},
		{"no TLS on the server", errors.New("tls error: server refused TLS connection"), ErrTLS},
	} {
		if _, got := classifyConnect(tt.err); !errors.Is(got, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestConnectErrorsOnServers(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		_, err := Connect(t.Context(), s.as("postgres", "wr0ng-pw"), "walrelay_test")
		if !errors.Is(err, ErrAuth) || !IsConfiguration(err) || strings.Contains(err.Error(), "wr0ng-pw") {
			t.Errorf("wrong password: %v", err)
		}
		_, err = Connect(t.Context(), strings.Replace(s.dsn, s.db, "nowhere", 1), "walrelay_test")
		if !errors.Is(err, ErrNoDatabase) {
			t.Errorf("missing database: %v", err)
		}
		_, err = Connect(t.Context(), "postgres://u:p@walrelay.invalid/db", "walrelay_test")
		if !errors.Is(err, ErrHostUnknown) {
			t.Errorf("unknown host: %v", err)
		}
		_, err = Connect(t.Context(), "postgres://u:p@127.0.0.1:1/db", "walrelay_test")
		if err == nil || IsConfiguration(err) {
			t.Errorf("refused: %v", err)
		}
		_, dsn := s.mustRole(t, mustConnect(t, s.dsn), "NOREPLICATION")
		cfg, err := WalsenderConfig(dsn, "walrelay_test")
		if err != nil {
			t.Fatal(err)
		}
		_, err = ConnectReplication(t.Context(), cfg)
		var refusal *checkpoint.Refusal
		if !errors.As(err, &refusal) || !strings.Contains(refusal.Remedy, "REPLICATION") {
			t.Errorf("role without REPLICATION: %v", err)
		}
	})
}

// TestSettingsWinOverRoleAndDatabase is for both kinds of connections.
func TestSettingsWinOverRoleAndDatabase(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		admin := mustConnect(t, s.dsn)
		role, dsn := s.mustRole(t, admin, "REPLICATION")
		version := majorVersion(admin.PgConn().ParameterStatus("server_version"))
		settings := []string{
			"intervalstyle = 'iso_8601'", "datestyle = 'German, DMY'", "bytea_output = 'escape'", "extra_float_digits = -3",
			"timezone = 'Asia/Kolkata'", "statement_timeout = '1h'", "lock_timeout = '1h'", "client_min_messages = error",
			"idle_in_transaction_session_timeout = '1h'", "idle_session_timeout = '1h'", "client_encoding = 'LATIN1'",
		}
		if version >= 17 {
			settings = append(settings, "transaction_timeout = '1h'")
		}
		for _, set := range settings {
			for _, where := range []string{"ROLE " + role, "DATABASE " + s.db, "ROLE " + role + " IN DATABASE " + s.db} {
				mustExec(t, admin, "ALTER "+where+" SET "+set)
			}
		}
		want := sessionSettings()
		if version >= 17 {
			want["transaction_timeout"] = "0"
		}
		sep := "?"
		if strings.Contains(dsn, "?") {
			sep = "&"
		}
		dsn += sep + "options=-c%20TimeZone%3DAsia/Kolkata&timezone=Asia/Kolkata"
		cfg, err := WalsenderConfig(dsn, "walrelay_shop")
		if err != nil {
			t.Fatal(err)
		}
		walsender, err := ConnectReplication(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = walsender.Close(context.WithoutCancel(t.Context())) })
		for kind, conn := range map[string]*pgconn.PgConn{"catalog": mustConnect(t, dsn).PgConn(), "walsender": walsender} {
			for name, value := range want {
				res, err := conn.Exec(t.Context(), "SHOW "+name).ReadAll()
				if err != nil {
					t.Fatal(err)
				}
				if got := string(res[0].Rows[0][0]); got != value {
					t.Errorf("%s connection: %s is %q, want %q", kind, name, got, value)
				}
			}
		}
	})
}

// TestBytesOfADatabaseWithoutEncoding proves that a stream from an SQL_ASCII database
// gets bytes that are not UTF-8, instead of an error of the server.
func TestBytesOfADatabaseWithoutEncoding(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		admin := mustConnect(t, s.dsn)
		name := fmt.Sprintf("wr_ascii_%d", time.Now().UnixNano())
		mustExec(t, admin, "CREATE DATABASE "+name+" ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
		t.Cleanup(func() { mustExec(t, mustConnect(t, s.dsn), "DROP DATABASE "+name+" WITH (FORCE)") })
		u, err := url.Parse(s.dsn)
		if err != nil {
			t.Fatal(err)
		}
		u.Path = "/" + name
		cfg, err := WalsenderConfig(u.String(), "walrelay_test")
		if err != nil {
			t.Fatal(err)
		}
		conn, err := ConnectReplication(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
		res, err := conn.Exec(t.Context(), `SELECT E'a\377b'`).ReadAll()
		if err != nil {
			t.Fatal(err)
		}
		if got := string(res[0].Rows[0][0]); got != "a\xffb" {
			t.Errorf("the bytes are %q, want %q", got, "a\xffb")
		}
	})
}

func TestMajorVersion(t *testing.T) {
	for text, want := range map[string]int{"15.8 (Debian 15.8-1.pgdg120+1)": 15, "18beta1": 18, "14.0": 14, "": 0, "x": 0} {
		if got := majorVersion(text); got != want {
			t.Errorf("majorVersion(%q) = %d, want %d", text, got, want)
		}
	}
}

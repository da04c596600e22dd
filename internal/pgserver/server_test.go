package pgserver_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/internal/pgserver"
)

func mustStart(t *testing.T, options pgserver.Options) *pgserver.Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	s, err := pgserver.Start(ctx, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close the server: %v", err)
		}
	})
	return s
}

// mustQuery opens a connection, runs the statements and returns the first column of the last result.
func mustQuery(t *testing.T, dsn, sql string) []string {
	t.Helper()
	conn, err := pgconn.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	results, err := conn.Exec(t.Context(), sql).ReadAll()
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	var column []string
	for _, row := range results[len(results)-1].Rows {
		column = append(column, string(row[0]))
	}
	return column
}

func TestOldestAndNewestServerRun(t *testing.T) {
	for _, major := range []int{14, 18} {
		t.Run(fmt.Sprint(major), func(t *testing.T) {
			s := mustStart(t, pgserver.Options{Major: major, Settings: map[string]string{"application_name": "it's set"}})
			got := mustQuery(t, s.DSN(), `
				create extension hstore; create extension citext; create extension ltree;
				create table t (id int primary key, h hstore);
				insert into t values (1, 'a=>1');
				select current_setting('server_version_num')::int / 10000 || ' ' || current_setting('wal_level') || ' ' || (select h from t)`)
			if want := fmt.Sprintf(`%d logical "a"=>"1"`, major); got[0] != want {
				t.Fatalf("got %s, want %s", got[0], want)
			}
			if got := mustQuery(t, s.DSN(), `show application_name`); got[0] != "it's set" {
				t.Fatalf("a setting with a quote came out as %q", got[0])
			}
			mustQuery(t, s.DSN(), `select pg_create_logical_replication_slot('a', 'pgoutput')`)
			mustQuery(t, s.DSN(), `select pg_create_logical_replication_slot('b', 'test_decoding')`)
		})
	}
}

func TestKillLosesNothingCommittedAndLeavesNoProcess(t *testing.T) {
	s := mustStart(t, pgserver.Options{})
	mustQuery(t, s.DSN(), `create table t (id int); insert into t values (7)`)
	pids := mustQuery(t, s.DSN(), `select pid from pg_stat_activity where backend_type <> 'client backend'`)
	if len(pids) < 3 {
		t.Fatalf("only %d processes", len(pids))
	}
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		if stat, err := os.ReadFile("/proc/" + pid + "/stat"); err == nil && !strings.Contains(string(stat), ") Z ") {
			t.Errorf("process %s is still there: %s", pid, stat)
		}
	}
	if s.Running() {
		t.Error("Running after Kill")
	}
	if err := s.Restart(t.Context(), map[string]string{"work_mem": "5MB"}); err != nil {
		t.Fatal(err)
	}
	if got := mustQuery(t, s.DSN(), `select id || current_setting('work_mem') from t`); got[0] != "75MB" {
		t.Fatalf("after the crash: %v", got)
	}
	if !strings.Contains(s.Log(), "was not properly shut down") {
		t.Error("the server knows nothing of a crash, so there was none")
	}
}

func TestQuitGoesThroughRecoveryAndFastDoesNot(t *testing.T) {
	var mu sync.Mutex
	var log bytes.Buffer
	s := mustStart(t, pgserver.Options{Log: writerFunc(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return log.Write(p)
	})})
	if err := s.Stop(pgserver.Fast); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(s.Log(), "was not properly shut down") {
		t.Error("a fast stop went through recovery")
	}
	if err := s.Quit(); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	mustQuery(t, s.DSN(), `select 1`)
	mu.Lock()
	defer mu.Unlock()
	if !strings.Contains(log.String(), "was not properly shut down") {
		t.Error("after Quit the log that was passed in does not speak of recovery")
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestCloseLeavesNothingBehind(t *testing.T) {
	// Not t.TempDir: under root that is closed to the server's user.
	dir := filepath.Join(os.TempDir(), "walrelay-test-"+rand.Text())
	s := mustStart(t, pgserver.Options{Dir: dir})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Fatalf("the directory is still there: %v", err)
	}
}

func TestStartSaysWhyItCannot(t *testing.T) {
	_, err := pgserver.Start(t.Context(), pgserver.Options{Settings: map[string]string{"no_such_setting": "1"}})
	if err == nil || !strings.Contains(err.Error(), "no_such_setting") {
		t.Fatalf("error %v does not name the setting", err)
	}
	_, err = pgserver.Start(t.Context(), pgserver.Options{Major: 9})
	if err == nil || !strings.Contains(err.Error(), "14 15 16 17 18") {
		t.Fatalf("error %v does not say which versions there are", err)
	}
}

func TestClientToolRunsOrSaysWhatToInstall(t *testing.T) {
	path, err := pgserver.ClientTool("pg_recvlogical")
	if err != nil {
		if !strings.Contains(err.Error(), "apt-get install postgresql-client") {
			t.Fatalf("error %v does not say what to install", err)
		}
		return
	}
	out, err := exec.Command(path, "--version").CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("pg_recvlogical (PostgreSQL)")) {
		t.Fatalf("%s --version: %v: %s", path, err, out)
	}
}

package harness_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/internal/harness"
)

func TestEachTestHasItsOwnDatabaseOnASharedServer(t *testing.T) {
	harness.EachMajor(t, func(t *testing.T, major int) {
		a, b := harness.Postgres(t, harness.Major(major)), harness.Postgres(t, harness.Major(major))
		if a.Server != b.Server || a.Name == b.Name {
			t.Fatalf("servers %p and %p, databases %s and %s", a.Server, b.Server, a.Name, b.Name)
		}
		a.Exec(`create table t (id int primary key, note text); insert into t values (1, null)`)
		a.Exec(`insert into t values ($1, $2)`, 2, "it's")
		rows := a.Query(`select id, note from t order by id`)
		if len(rows) != 2 || rows[0][1] != harness.Null || rows[1][1] != "it's" {
			t.Errorf("rows %v", rows)
		}
		if _, err := b.TryQuery(`select * from t`); err == nil {
			t.Error("the other database has the table too")
		}
		b.WaitValue("1", `select 1`)
	})
}

func TestSettingsMakeAnotherSharedServer(t *testing.T) {
	a, b := harness.Postgres(t), harness.Postgres(t, harness.Setting("work_mem", "7MB"))
	if a.Server == b.Server {
		t.Fatal("one server for two settings")
	}
	if got := b.Value(`show work_mem`); got != "7MB" {
		t.Errorf("work_mem %s", got)
	}
}

func TestSlotsAreDroppedEvenWhileAWalsenderHoldsThem(t *testing.T) {
	pg := harness.Postgres(t)
	pg.Exec(`select pg_create_logical_replication_slot('` + pg.Name + `', 'pgoutput'); create publication p`)
	conn, err := pgconn.Connect(t.Context(), pg.DSN()+"&replication=database")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	stream := conn.Exec(t.Context(), `START_REPLICATION SLOT `+pg.Name+` LOGICAL 0/0 (proto_version '1', publication_names 'p')`)
	pg.WaitValue("t", `select active from pg_replication_slots where slot_name = $1`, pg.Name)
	pg.CleanupSlots()
	if got := pg.Value(`select count(*) from pg_replication_slots where slot_name = $1`, pg.Name); got != "0" {
		t.Errorf("%s slots left", got)
	}
	if err := stream.Close(); err == nil {
		t.Error("the stream ended well although its walsender was ended")
	}
}

func TestADedicatedServerComesBackFromAKill(t *testing.T) {
	pg := harness.Postgres(t, harness.Dedicated())
	pg.Exec(`create table t (id int); insert into t values (1)`)
	if err := pg.Server.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := pg.TryQuery(`select 1`); err == nil {
		t.Fatal("a killed server answered")
	}
	if err := pg.Server.Restart(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if got := pg.Value(`select count(*) from t`); got != "1" {
		t.Errorf("%s rows after the crash", got)
	}
}

func TestAProxyStandsBetweenClientAndPostgres(t *testing.T) {
	pg := harness.Postgres(t)
	proxy := harness.StartProxy(t, pg.Server.Addr())
	conn, err := pgconn.Connect(t.Context(), pg.ProxyDSN(proxy.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	if n := proxy.Cut(); n != 1 {
		t.Fatalf("cut %d connections", n)
	}
	if _, err := conn.Exec(t.Context(), `select 1`).ReadAll(); err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("after the cut: %v", err)
	}
}

package replication

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

func slotName(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("wr_%d", time.Now().UnixNano())
}

func mustSlot(t *testing.T, s server) string {
	t.Helper()
	name := slotName(t)
	if _, err := CreateSlot(t.Context(), s.connector(), SlotRequest{Name: name, Failover: true}); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestCreateReadAndDropSlot(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		name := slotName(t)
		if _, found, err := ReadSlot(t.Context(), conn, name); found || err != nil {
			t.Errorf("a slot before it is made: %v", err)
		}
		created, err := CreateSlot(t.Context(), s.connector(), SlotRequest{Name: name, Failover: true, Report: func(l []RunningTransaction) { t.Errorf("waited for %v", l) }})
		if err != nil {
			t.Fatal(err)
		}
		slot, found, err := ReadSlot(t.Context(), conn, name)
		if err != nil || !found {
			t.Fatal(found, err)
		}
		failover := majorVersion(conn.PgConn().ParameterStatus("server_version")) >= 17
		if slot.Name != name || slot.Plugin != Plugin || slot.Type != "logical" || slot.Database != s.db || slot.ConfirmedFlush != created.LSN || created.LSN == 0 || created.Snapshot == "" ||
			slot.RestartLSN == 0 || slot.RestartLSN > created.LSN || slot.CatalogXmin == 0 || slot.Active || slot.ActivePID != 0 ||
			slot.WALStatus != "reserved" || slot.Invalidation != "" || slot.TwoPhase || slot.Temporary || slot.Failover != failover {
			t.Errorf("slot %+v, created as %+v", slot, created)
		}
		_, err = CreateSlot(t.Context(), s.connector(), SlotRequest{Name: name, Failover: true})
		if err == nil || !strings.Contains(err.Error(), "already exists") {
			t.Errorf("a second time: %v", err)
		}
		for range 2 {
			if err := DropSlot(t.Context(), conn, name); err != nil {
				t.Fatal(err)
			}
		}
		if _, found, err := ReadSlot(t.Context(), conn, name); found || err != nil {
			t.Errorf("still there: %v", err)
		}
	})
}

// openTransactions starts what a new slot waits for: a transaction in another
// database, and a prepared one. The returned function ends both.
func openTransactions(t *testing.T, s server) (pid uint32, gid string, end func()) {
	t.Helper()
	conn := mustConnect(t, s.dsn)
	other := mustConnect(t, strings.Replace(s.dsn, s.db, "postgres", 1))
	gid = "gid_" + s.db
	mustExec(t, conn, "CREATE TABLE IF NOT EXISTS w (id int)", "BEGIN", "INSERT INTO w VALUES (1)", "PREPARE TRANSACTION '"+gid+"'")
	mustExec(t, other, "BEGIN", "SELECT pg_current_xact_id()")
	ended := false
	end = func() {
		if !ended {
			ended = true
			mustExec(t, other, "ROLLBACK")
			mustExec(t, conn, "ROLLBACK PREPARED '"+gid+"'")
		}
	}
	t.Cleanup(end)
	return other.PgConn().PID(), gid, end
}

func TestCreateSlotSaysWhatItWaitsFor(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		pid, gid, end := openTransactions(t, s)
		reports := 0
		created, err := CreateSlot(t.Context(), s.connector(), SlotRequest{Name: slotName(t), Failover: true, Report: func(list []RunningTransaction) {
			reports++
			var session, prepared, waited bool
			for _, r := range list {
				session = session || r.PID == int32(pid) && r.State == "idle in transaction" && r.User == "postgres" && r.Database == "postgres" && !r.Since.IsZero() && r.XID != 0
				prepared = prepared || r.PID == 0 && r.GID == gid && r.State == "prepared" && r.Database == s.db && !r.Since.IsZero()
				waited = waited || r.WaitedFor
			}
			if !session || !prepared || !waited {
				t.Errorf("reported %v: session %v, prepared %v, waited for %v", list, session, prepared, waited)
			}
			end()
		}})
		if err != nil || created.LSN == 0 || created.Snapshot == "" || reports == 0 {
			t.Errorf("created as %+v after %d reports, %v", created, reports, err)
		}
	})
}

func TestCancelledCreationLeavesNoSlot(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		_, _, end := openTransactions(t, s)
		name := slotName(t)
		ctx, cancel := context.WithCancel(t.Context())
		_, err := CreateSlot(ctx, s.connector(), SlotRequest{Name: name, Failover: true, Report: func([]RunningTransaction) { cancel() }})
		wantGone(t, s, name, err)
		end()
		wantGone(t, s, name, err)
	})
}

// TestCancelledCreationEndsTheBackend: the cancel request is lost on the way.
func TestCancelledCreationEndsTheBackend(t *testing.T) {
	s := mustDatabase(t, mustAdmin(t, harness.DefaultMajor(t)))
	_, _, end := openTransactions(t, s)
	name := slotName(t)
	ctx, cancel := context.WithCancel(t.Context())
	dials := 0
	connector := func(ctx context.Context, opts ...ConnOption) (*pgx.Conn, error) {
		// The first connection's dialer works once: pgconn dials anew for a cancel request.
		first := dials == 0
		opts = append(opts, WithDial(func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials++
			if first && dials > 1 {
				return nil, errors.New("the way is blocked")
			}
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}))
		return Connect(ctx, s.dsn+"?sslmode=disable", "walrelay_test", opts...)
	}
	_, err := CreateSlot(ctx, connector, SlotRequest{Name: name, Failover: true, Report: func([]RunningTransaction) { cancel() }})
	if dials < 4 {
		t.Errorf("%d dials: no cancel request and no second connection after it", dials)
	}
	wantGone(t, s, name, err)
	end()
	wantGone(t, s, name, err)
}

func wantGone(t *testing.T, s server, name string, err error) {
	t.Helper()
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled creation gives %v", err)
	}
	if _, found, err := ReadSlot(t.Context(), mustConnect(t, s.dsn), name); found || err != nil {
		t.Errorf("the slot is there: %v", err)
	}
	var n int
	mustScan(t, mustConnect(t, s.dsn), "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%"+name+"%' AND pid <> pg_backend_pid() AND state = 'active'", &n)
	if n > 0 {
		t.Error("the server still works on it")
	}
}

func TestCreateSlotRefusals(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		_, dsn := s.mustRole(t, conn, "NOREPLICATION")
		_, err := CreateSlot(t.Context(), NewConnector(dsn, "walrelay_test"), SlotRequest{Name: slotName(t), Failover: true})
		wantRefusal(t, err, "may not use replication slots|ALTER ROLE")
		var limit int
		mustScan(t, conn, "SELECT current_setting('max_replication_slots')::int", &limit)
		for i := 0; ; i++ {
			if i > limit {
				t.Fatal("the server's slots do not run out")
			}
			if _, err = CreateSlot(t.Context(), s.connector(), SlotRequest{Name: slotName(t), Failover: true}); err != nil {
				break
			}
		}
		wantRefusal(t, err, "no replication slot is free|max_replication_slots")
		db, err := ReadDatabase(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		wantRefusal(t, VerifyStart(Facts{Managed: true, Database: db, SlotName: "s"}), "no replication slot is free")
	})
}

func TestTerminateHolder(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		name := mustSlot(t, s)
		mustExec(t, conn, "CREATE PUBLICATION p")
		if pid, err := TerminateHolder(t.Context(), conn, name); pid != 0 || err != nil {
			t.Errorf("nobody holds it: pid %d, %v", pid, err)
		}
		cfg, err := WalsenderConfig(s.dsn, "walrelay_test")
		if err != nil {
			t.Fatal(err)
		}
		holder, err := ConnectReplication(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = holder.Close(context.WithoutCancel(t.Context())) })
		// The walsender answers with CopyBoth and stays; only a termination ends the read.
		ended := make(chan error, 1)
		go func() {
			_, err := holder.Exec(context.WithoutCancel(t.Context()), "START_REPLICATION SLOT "+name+" LOGICAL 0/0 (proto_version '1', publication_names 'p')").ReadAll()
			ended <- err
		}()
		var slot Slot
		waitFor(t, "the slot to be active", func() bool {
			if slot, _, err = ReadSlot(t.Context(), conn, name); err != nil {
				t.Fatal(err)
			}
			return slot.Active
		})
		_, err = conn.Exec(t.Context(), "SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())", name)
		if !IsSlotActive(err) {
			t.Errorf("not seen as active: %v", err)
		}
		pid, err := TerminateHolder(t.Context(), conn, name)
		if err != nil || pid == 0 || pid != slot.ActivePID {
			t.Errorf("ended %d, want %d: %v", pid, slot.ActivePID, err)
		}
		if err := <-ended; err == nil {
			t.Error("the holder's stream ended without an error")
		}
		waitFor(t, "the slot to be free", func() bool {
			slot, _, err := ReadSlot(t.Context(), conn, name)
			return err == nil && !slot.Active
		})
	})
}

func TestHorizonWaitsForEveryTransaction(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		pid, gid, end := openTransactions(t, s)
		bound, err := OpenHorizon(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		later := mustConnect(t, s.dsn) // younger than the horizon: not waited for
		mustExec(t, later, "BEGIN", "SELECT pg_current_xact_id()")
		_, reached, waiting, err := HorizonReached(t.Context(), conn, bound)
		text := fmt.Sprint(waiting)
		if err != nil || reached || len(waiting) < 2 || !strings.Contains(text, gid) || !strings.Contains(text, fmt.Sprintf("pid %d (xid", pid)) ||
			strings.Contains(text, fmt.Sprintf("pid %d (xid", later.PgConn().PID())) {
			t.Errorf("reached %v, waiting for %s, %v", reached, text, err)
		}
		end()
		var before string
		mustScan(t, conn, "SELECT pg_current_wal_insert_lsn()::text", &before)
		var horizon checkpoint.LSN
		waitFor(t, "the horizon", func() bool {
			horizon, reached, _, err = HorizonReached(t.Context(), conn, bound)
			return err == nil && reached
		})
		if low, _ := checkpoint.ParseLSN(before); horizon+longPageHeader < low {
			t.Errorf("horizon %s, but transactions ended at %s", horizon, before)
		}
	})
}

// TestARoleWithoutRightsStillSeesWhoIsWaitedFor: pg_stat_activity hides state and start
// of other roles' transactions, but not that they are there.
func TestARoleWithoutRightsStillSeesWhoIsWaitedFor(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		pid, gid, end := openTransactions(t, s)
		_, dsn := s.mustRole(t, mustConnect(t, s.dsn), "REPLICATION")
		var seen []RunningTransaction
		if _, err := CreateSlot(t.Context(), NewConnector(dsn, "walrelay_test"), SlotRequest{Name: slotName(t), Failover: true, Report: func(list []RunningTransaction) {
			seen = list
			end()
		}}); err != nil {
			t.Fatal(err)
		}
		if text := fmt.Sprint(seen); !strings.Contains(text, gid) || !strings.Contains(text, fmt.Sprintf("pid %d (xid", pid)) {
			t.Errorf("seen %s", text)
		}
	})
}

// TestHorizonWaitsForAnXidAboveTheSnapshot: the transaction that is running has the
// highest xid of all, which pg_snapshot_xmax does not cover.
func TestHorizonWaitsForAnXidAboveTheSnapshot(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn, open := mustConnect(t, s.dsn), mustConnect(t, s.dsn)
		var xmax, xid int64
		waitFor(t, "a transaction that no later one has overtaken", func() bool {
			mustExec(t, open, "ROLLBACK", "BEGIN")
			mustScan(t, open, "SELECT pg_current_xact_id()::text::int8", &xid)
			mustScan(t, conn, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8", &xmax)
			return xid >= xmax
		})
		bound, err := OpenHorizon(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		if _, reached, _, err := HorizonReached(t.Context(), conn, bound); reached || err != nil {
			t.Errorf("reached %v while xid %d runs: %v", reached, xid, err)
		}
		mustExec(t, open, "ROLLBACK")
	})
}

func TestReadOrder(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		order := func(pub, slot string) Order {
			t.Helper()
			o, err := ReadOrder(t.Context(), s.connector(), pub, slot)
			if err != nil {
				t.Fatal(err)
			}
			return o
		}
		mustExec(t, conn, "CREATE TABLE t (id int PRIMARY KEY)", `CREATE PUBLICATION "Old p" FOR TABLE t`)
		slot := mustSlot(t, s)
		if got := order("Old p", slot); got != OrderPublicationFirst {
			t.Errorf("publication, then slot: %d", got)
		}
		if got, err := ReadOrder(t.Context(), s.connector(), "Old p", "nowhere"); got != OrderUnknown || err == nil {
			t.Errorf("a slot that does not exist: %d, %v", got, err)
		}
		// The publication is made by hand after the fact.
		mustExec(t, conn, "INSERT INTO t VALUES (1)", "CREATE PUBLICATION young FOR TABLE t", "INSERT INTO t VALUES (2)")
		if got := order("young", slot); got != OrderSlotFirst {
			t.Errorf("slot, row, publication: %d", got)
		}
		// Nothing is known of what another slot will find first, and nothing is consumed.
		fresh := mustSlot(t, s)
		mustExec(t, conn, "CREATE PUBLICATION younger FOR TABLE t", "INSERT INTO t VALUES (3)")
		if got := order("younger", fresh); got != OrderUnknown {
			t.Errorf("slot, publication, row: %d", got)
		}
		var n int
		mustScan(t, conn, "SELECT count(*) FROM pg_logical_slot_peek_binary_changes('"+fresh+"', NULL, NULL, 'proto_version', '1', 'publication_names', 'younger')", &n)
		if n < 3 {
			t.Errorf("the probe consumed the changes: %d messages left", n)
		}
	})
}

// TestParseSlot has rows as the servers print them.
func TestParseSlot(t *testing.T) {
	for _, tt := range []struct {
		name, row string
		want      Slot
	}{
		{
			"14", `{"active": true, "plugin": "pgoutput", "database": "shop", "temporary": false, "two_phase": false, "xmin": null, "slot_name": "s", "slot_type": "logical", "active_pid": 77, "wal_status": "reserved", "datoid": 5, "restart_lsn": "0/1716AE8", "catalog_xmin": "740", "safe_wal_size": null, "confirmed_flush_lsn": "1/1716B20"}`,
			Slot{Name: "s", Plugin: "pgoutput", Type: "logical", Database: "shop", Active: true, ActivePID: 77, WALStatus: "reserved", RestartLSN: 0x1716AE8, ConfirmedFlush: 0x1_01716B20, CatalogXmin: 740},
		},
		{
			"14, lost", `{"slot_name": "s", "slot_type": "logical", "plugin": "pgoutput", "wal_status": "lost", "restart_lsn": null, "catalog_xmin": "4294967290", "confirmed_flush_lsn": "0/10"}`,
			Slot{Name: "s", Plugin: "pgoutput", Type: "logical", WALStatus: "lost", Invalidation: "wal_removed", ConfirmedFlush: 0x10, CatalogXmin: 4294967290},
		},
		{
			"16, conflicting", `{"slot_name": "s", "slot_type": "logical", "plugin": "pgoutput", "wal_status": "lost", "conflicting": true}`,
			Slot{Name: "s", Plugin: "pgoutput", Type: "logical", WALStatus: "lost", Invalidation: "rows_removed"},
		},
		{
			"18, idle", `{"slot_name": "s", "slot_type": "logical", "plugin": "pgoutput", "wal_status": "lost", "conflicting": false, "invalidation_reason": "idle_timeout", "failover": true, "synced": true, "two_phase": true, "temporary": true}`,
			Slot{Name: "s", Plugin: "pgoutput", Type: "logical", WALStatus: "lost", Invalidation: "idle_timeout", Failover: true, Synced: true, TwoPhase: true, Temporary: true},
		},
		{"physical", `{"slot_name": "p", "slot_type": "physical", "plugin": null, "database": null}`, Slot{Name: "p", Type: "physical"}},
	} {
		if got, err := parseSlot([]byte(tt.row), 0x1_0000_0003); err != nil || got != normal(tt.want, 0x1_0000_0003) {
			t.Errorf("%s: %+v, %v; want %+v", tt.name, got, err, tt.want)
		}
	}
	for _, row := range []string{`{`, `{"restart_lsn":"x"}`, `{"confirmed_flush_lsn":"1"}`, `{"catalog_xmin":"-1"}`} {
		if _, err := parseSlot([]byte(row), 1); err == nil {
			t.Errorf("%s: no error", row)
		}
	}
}

// normal widens the table's xid, so that the rows above can be read as they are.
func normal(s Slot, near checkpoint.XID) Slot {
	if s.CatalogXmin != 0 {
		s.CatalogXmin = widen(uint32(s.CatalogXmin), near)
	}
	return s
}

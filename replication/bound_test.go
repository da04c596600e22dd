package replication

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

// TestRunningBoundIsAboveWhatRuns: it is exactly the next xid, and taking it takes none.
func TestRunningBoundIsAboveWhatRuns(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn, other := mustConnect(t, s.dsn), mustConnect(t, s.dsn)
		mustExec(t, conn, "CREATE TABLE t (id int)")
		mustExec(t, other, "BEGIN", "INSERT INTO t VALUES (1)", "SAVEPOINT s", "INSERT INTO t VALUES (2)")
		var sub string // the savepoint's, above the transaction's own
		mustScan(t, other, "SELECT max(xmin::text::int8)::text FROM t", &sub)
		first, err := RunningBound(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		if first <= mustXID(t, sub, 0) {
			t.Errorf("bound %s, running is %s", first, sub)
		}
		mustExec(t, other, "PREPARE TRANSACTION 'bound_"+s.db+"'")
		defer mustExec(t, other, "ROLLBACK PREPARED 'bound_"+s.db+"'")
		second, err := RunningBound(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		if second < first {
			t.Errorf("bound %s after %s", second, first)
		}
		next, err := OpenHorizon(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		if next < second {
			t.Errorf("a fresh xid is %s, below the bound %s", next, second)
		}
	})
}

func TestRunningBoundTakesNoXID(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := harness.Postgres(t, harness.Major(major), harness.Dedicated())
		conn := mustConnect(t, pg.DSN())
		for range 10 {
			mustExec(t, conn, "CREATE TEMP TABLE x (); DROP TABLE x")
			bound, err := RunningBound(t.Context(), conn)
			if err != nil {
				t.Fatal(err)
			}
			fresh, err := OpenHorizon(t.Context(), conn)
			if err != nil {
				t.Fatal(err)
			}
			if bound != fresh {
				t.Errorf("bound %s, the next xid is %s", bound, fresh)
			}
		}
	})
}

// TestSlotSnapshotIsExact: transactions commit, abort, and are prepared right around the
// creation of slots, with and without subtransactions. Each that commits is either seen
// by the slot's snapshot or sent by the slot, never both and never neither.
func TestSlotSnapshotIsExact(t *testing.T) {
	const slots = 15
	onOldestAndNewest(t, func(t *testing.T, major int) {
		s := mustDatabase(t, mustAdmin(t, major))
		conn := mustConnect(t, s.dsn)
		mustExec(t, conn, "CREATE TABLE t (id int)", "CREATE PUBLICATION p FOR TABLE t")
		ctx, stop := context.WithCancel(t.Context())
		var (
			wg   sync.WaitGroup
			mu   sync.Mutex
			done = map[checkpoint.XID]bool{} // committed
		)
		for w := range 4 {
			writer := mustConnect(t, s.dsn)
			wg.Add(1)
			go func() {
				defer wg.Done()
				for i := 0; ctx.Err() == nil; i++ {
					end, commits := "COMMIT", true
					switch {
					case i%7 == 3:
						end, commits = "ROLLBACK", false
					case i%11 == 5:
						gid := fmt.Sprintf("exact_%s_%d_%d", s.db, w, i)
						end = fmt.Sprintf("PREPARE TRANSACTION '%s'; COMMIT PREPARED '%s'", gid, gid)
					}
					body := "BEGIN; INSERT INTO t VALUES (1); "
					if i%3 == 1 {
						body = "BEGIN; SAVEPOINT a; INSERT INTO t VALUES (1); RELEASE a; SAVEPOINT b; INSERT INTO t VALUES (2); ROLLBACK TO b; INSERT INTO t VALUES (3); "
					}
					results, err := writer.PgConn().Exec(context.WithoutCancel(ctx), body+"SELECT pg_current_xact_id()::text").ReadAll()
					if err != nil {
						t.Error(err)
						return
					}
					xid, err := parseXID(string(results[len(results)-1].Rows[0][0]))
					if err != nil {
						t.Error(err)
						return
					}
					// Statements of their own: PREPARE TRANSACTION ends the block.
					for _, sql := range strings.Split(end, "; ") {
						if _, err := writer.PgConn().Exec(context.WithoutCancel(ctx), sql).ReadAll(); err != nil {
							t.Error(err)
							return
						}
					}
					if commits {
						mu.Lock()
						done[xid] = true
						mu.Unlock()
					}
				}
			}()
		}
		names := make([]string, slots)
		snapshots := make([]string, slots)
		for i := range slots {
			names[i] = slotName(t)
			created, err := CreateSlot(t.Context(), s.connector(), SlotRequest{Name: names[i], Failover: true})
			if err != nil {
				t.Error(err)
				break
			}
			snapshots[i] = created.Snapshot
			mu.Lock()
			before := len(done)
			mu.Unlock()
			waitFor(t, "transactions behind the slot", func() bool { mu.Lock(); defer mu.Unlock(); return len(done) > before+50 })
		}
		stop()
		wg.Wait()
		if t.Failed() {
			return
		}
		for i, name := range names {
			sent := map[checkpoint.XID]bool{}
			rows, err := TextRows(t.Context(), conn, "SELECT xid::text, data FROM pg_logical_slot_get_binary_changes('"+name+"', NULL, NULL, 'proto_version', '1', 'publication_names', 'p')")
			if err != nil {
				t.Fatal(err)
			}
			for _, row := range rows {
				if xid, err := parseXID(string(row[0])); err == nil && bytes.HasPrefix(row[1], []byte(`\x42`)) { // B
					sent[xid] = true
				}
			}
			seen, both, neither := 0, 0, 0
			for xid := range done {
				sees := snapshotSees(t, snapshots[i], xid)
				switch {
				case sees && sent[xid]:
					both++
				case !sees && !sent[xid]:
					neither++
				case sees:
					seen++
				}
			}
			if both+neither > 0 || seen == len(done) || len(sent) == 0 {
				t.Errorf("slot %d with %s: %d of %d seen, %d sent, %d both, %d neither", i, snapshots[i], seen, len(done), len(sent), both, neither)
			}
		}
	})
}

// snapshotSees is what PostgreSQL's documentation says of pg_snapshot.
func snapshotSees(t *testing.T, snapshot string, xid checkpoint.XID) bool {
	t.Helper()
	parts := strings.Split(snapshot, ":")
	if len(parts) != 3 {
		t.Fatalf("snapshot %q", snapshot)
	}
	low, high := mustXID(t, parts[0], 0), mustXID(t, parts[1], 0)
	if xid < low || xid >= high {
		return xid < low
	}
	return !slices.Contains(strings.Split(parts[2], ","), strconv.FormatUint(uint64(xid), 10))
}

package replication

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/internal/harness"
)

// phases walks a slot's creation through the three waits that PostgreSQL has: it waits for
// what runs when it starts, then for what began meanwhile, and what begins during that is in
// the stream.
type phases struct {
	t       *testing.T
	s       server
	name    string
	second  *pgx.Conn
	created chan NewSlot
	failed  chan error
}

// open starts a transaction that has an id.
func (p *phases) open() (conn *pgx.Conn, xid string) {
	p.t.Helper()
	conn = mustConnect(p.t, p.s.dsn)
	mustExec(p.t, conn, "BEGIN")
	mustScan(p.t, conn, "SELECT pg_current_xact_id()::xid::text", &xid)
	return conn, xid
}

// awaited waits until somebody waits for the transaction.
func (p *phases) awaited(xid string) {
	p.t.Helper()
	conn := mustConnect(p.t, p.s.dsn)
	harness.WaitFor(p.t, "somebody who waits for transaction "+xid, harness.DefaultTimeout, func() (bool, error) {
		var n int
		mustScan(p.t, conn, "SELECT count(*) FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted AND transactionid::text = '"+xid+"'", &n)
		return n > 0, nil
	})
}

// creating starts the creation; between happens before its second wait. altered is told what
// CreateSlot says of altered tables.
func creating(t *testing.T, s server, between func(), altered func([]string)) *phases {
	t.Helper()
	p := &phases{t: t, s: s, name: slotName(t), created: make(chan NewSlot, 1), failed: make(chan error, 1)}
	first, firstXID := p.open()
	go func() {
		slot, err := CreateSlot(t.Context(), s.connector(), SlotRequest{Name: p.name, Altered: altered})
		p.created <- slot
		p.failed <- err
	}()
	p.awaited(firstXID)
	second, secondXID := p.open()
	between()
	mustExec(t, first, "COMMIT")
	p.awaited(secondXID)
	p.second = second
	return p
}

// finish ends what the creation waits for.
func (p *phases) finish() NewSlot {
	p.t.Helper()
	mustExec(p.t, p.second, "COMMIT")
	slot := <-p.created
	if err := <-p.failed; err != nil {
		p.t.Fatal(err)
	}
	return slot
}

func TestARolledBackTransactionDoesNotCrashTheServerThatCreatesASlot(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		mustExec(t, conn, "CREATE TABLE big (v text)")
		p := creating(t, s, func() {}, func(tables []string) { t.Errorf("%v were altered", tables) })
		const write = "INSERT INTO big SELECT repeat('x', 1000) FROM generate_series(1, 1000)"
		mustExec(t, conn, "BEGIN", "SAVEPOINT s", "INSERT INTO big VALUES ('x')", "RELEASE s", write, "ROLLBACK")
		p.finish()
	})
}

func TestASlotIsCreatedAgainWhereATableWasAlteredMeanwhile(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		for _, c := range []struct{ table, alter, row string }{
			{"grows", "ALTER TABLE grows ADD COLUMN v text", "INSERT INTO grows VALUES (1, 'a')"},
			{"emptied", "TRUNCATE emptied", "INSERT INTO emptied VALUES (1)"},
			{"dressed", "ALTER TYPE mood ADD VALUE 'new'", "INSERT INTO dressed VALUES (1, 'new')"},
		} {
			t.Run(c.table, func(t *testing.T) {
				conn, writer := mustConnect(t, s.dsn), mustConnect(t, s.dsn)
				mustExec(t, conn, "CREATE TYPE mood AS ENUM ('old')", "CREATE TABLE grows (id int)", "CREATE TABLE emptied (id int)", "CREATE TABLE dressed (id int, mood mood)",
					"CREATE PUBLICATION p FOR TABLE grows, emptied, dressed")
				defer mustExec(t, conn, "DROP TABLE grows, emptied, dressed", "DROP TYPE mood", "DROP PUBLICATION p")
				var told []string
				p := creating(t, s, func() { mustExec(t, conn, c.alter) }, func(tables []string) {
					told = tables
					mustExec(t, writer, "COMMIT") // the next creation waits for it
				})
				mustExec(t, writer, "BEGIN", c.row)
				p.finish()
				defer mustExec(t, conn, "SELECT pg_drop_replication_slot('"+p.name+"')")
				if want := []string{"public." + c.table}; !slices.Equal(told, want) {
					t.Errorf("created again for the sake of %v, want %v", told, want)
					mustExec(t, writer, "COMMIT")
				}
				mustExec(t, writer, c.row)
				var rows, columns, want int
				mustScan(t, conn, "SELECT count(*), max(get_byte(data, 7)) FROM pg_logical_slot_get_binary_changes('"+p.name+"', NULL, NULL, 'proto_version', '1', 'publication_names', 'p') WHERE get_byte(data, 0) = ascii('I')", &rows, &columns)
				mustScan(t, conn, "SELECT count(*) FROM pg_attribute WHERE attrelid = '"+c.table+"'::regclass AND attnum > 0", &want)
				if rows != 1 || columns != want {
					t.Errorf("the stream has %d rows, of %d columns; want 1, of %d", rows, columns, want)
				}
			})
		}
	})
}

func TestASlotIsNotCreatedForEverWhileTablesAreAltered(t *testing.T) {
	onServers(t, func(t *testing.T, s server) {
		conn := mustConnect(t, s.dsn)
		mustExec(t, conn, "CREATE TABLE emptied (id int)")
		p := &phases{t: t, s: s, name: slotName(t)}
		tries, connects := 0, 0
		// Whoever connects for the snapshot comes when the slot is there, and before the look.
		connector := func(ctx context.Context, opts ...ConnOption) (*pgx.Conn, error) {
			if connects++; connects%2 == 0 {
				mustExec(t, conn, "TRUNCATE emptied")
			}
			return s.connector()(ctx, opts...)
		}
		_, err := CreateSlot(t.Context(), connector, SlotRequest{Name: p.name, Altered: func([]string) { tries++ }})
		var altered *AlteredError
		if !errors.As(err, &altered) || tries != createTries || !strings.Contains(err.Error(), "public.emptied") {
			t.Errorf("after %d tries: %v", tries, err)
		}
		if _, found, err := ReadSlot(t.Context(), conn, p.name); found || err != nil {
			t.Errorf("the slot is there: %v", err)
		}
	})
}

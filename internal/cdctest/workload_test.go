package cdctest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

// mustDatabase gives the DSN of an empty database.
func mustDatabase(t *testing.T) string {
	t.Helper()
	return harness.Postgres(t, harness.Setting("logical_decoding_work_mem", "64kB")).DSN()
}

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

func mustConnect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func mustExec(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// TestValidatorsAgreeWithPostgreSQLAboutTheWorkload decodes the workload's WAL with
// pgoutput and writes the log that it must give. If truth, workload or a validator
// were wrong, they would not agree with what PostgreSQL itself says happened.
func TestValidatorsAgreeWithPostgreSQLAboutTheWorkload(t *testing.T) {
	dsn := mustDatabase(t)
	w := &Workload{DSN: dsn, Seed: 7, Sessions: 5, Transactions: 150, BigRows: 1500}
	if err := w.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	conn := mustConnect(t, dsn)
	var tables []string
	for _, table := range Tables() {
		if !table.Outbox {
			tables = append(tables, table.Name)
		}
	}
	mustExec(t, conn, "CREATE PUBLICATION p FOR TABLE "+strings.Join(tables, ", "))
	mustExec(t, conn, "CREATE PUBLICATION p_insert FOR TABLE outbox WITH (publish = 'insert')")
	mustExec(t, conn, "SELECT pg_create_logical_replication_slot('cdctest_'||pg_backend_pid(), 'pgoutput')")
	truth, err := w.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Log(summary(truth))
	layout := Layout{Prefix: "shop", Partitions: 6}
	log := decodeSlot(t, conn, layout, truth)
	t.Logf("%d records", len(log.Records))
	violations := Validate(log, truth, layout)
	violations = append(violations, Sum(log, layout, "balance", truth.table("public.accounts"))...)
	violations = append(violations, Atomic(log, 1<<30)...)
	if len(violations) > 0 {
		t.Fatalf("a right log, and %d violations:\n%s", len(violations), Report(violations, 30))
	}
	mustCover(t, log, truth)
}

func summary(truth *Truth) string {
	ops := map[string]int{}
	for _, tx := range truth.Committed {
		for _, c := range tx.Changes {
			name := "message"
			if c.Table != nil {
				name = c.Table.Name
			}
			ops[name+" "+string(c.Op)]++
		}
	}
	return fmt.Sprintf("committed %d, rolled back %d, messages %d, changes %v", len(truth.Committed), len(truth.RolledBack), len(truth.Messages), ops)
}

// mustCover checks that the workload did what it is there for.
func mustCover(t *testing.T, log *Log, truth *Truth) {
	t.Helper()
	seen := map[string]int{}
	for _, tx := range truth.Committed {
		if len(tx.Changes) > 1000 {
			seen["large transaction"]++
		}
		for _, c := range tx.Changes {
			if c.Table != nil && c.Op == 'u' && c.Old != nil && !c.Table.sameKey(c.Old, c.New) {
				seen["key change"]++
			}
			if c.Op == 't' {
				seen["truncate"]++
			}
			if c.Table != nil && c.Table.Outbox && c.Op == 'd' {
				seen["event deleted"]++
			}
			if c.Op == 'm' {
				seen["transactional message"]++
			}
		}
	}
	seen["rolled back"], seen["message"] = len(truth.RolledBack), len(truth.Messages)
	f := &findings{}
	for _, it := range log.items(f) {
		if it.env != nil && it.env.Source.Table == "docs" && it.env.After != nil {
			if _, ok := it.env.After.Get("body"); !ok {
				seen["unchanged TOAST value "+string(byte(it.kind))]++
			}
		}
	}
	for _, what := range []string{"large transaction", "key change", "truncate", "event deleted", "transactional message",
		"rolled back", "message", "unchanged TOAST value u", "unchanged TOAST value c"} {
		if seen[what] == 0 {
			t.Errorf("the workload had no %s: %v", what, seen)
		}
	}
}

// decodeSlot reads the slot to its end and writes the log.
func decodeSlot(t *testing.T, conn *pgx.Conn, l Layout, truth *Truth) *Log {
	t.Helper()
	mustExec(t, conn, "SET TimeZone = 'UTC'")
	rows, err := conn.Query(t.Context(), `SELECT data FROM pg_logical_slot_get_binary_changes('cdctest_'||pg_backend_pid(), NULL, NULL,
 'proto_version', '1', 'publication_names', 'p,p_insert', 'messages', 'true')`)
	if err != nil {
		t.Fatal(err)
	}
	messages, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	if err != nil {
		t.Fatal(err)
	}
	d := &slotDecoder{t: t, b: newBuilder(l), truth: truth, relations: map[uint32]*pglogrepl.RelationMessage{}}
	for _, m := range messages {
		parsed, err := pglogrepl.Parse(m)
		if err != nil {
			t.Fatal(err)
		}
		d.message(parsed)
	}
	return d.b.log
}

type slotDecoder struct {
	t         *testing.T
	b         *builder
	truth     *Truth
	relations map[uint32]*pglogrepl.RelationMessage
	in        meta
}

func (d *slotDecoder) message(m pglogrepl.Message) {
	switch m := m.(type) {
	case *pglogrepl.BeginMessage:
		xid, ts := uint64(m.Xid), m.CommitTime.UnixMilli()
		d.in = meta{commit: checkpoint.LSN(m.FinalLSN), xid: &xid, ts: &ts}
	case *pglogrepl.CommitMessage:
		d.b.deliver()
	case *pglogrepl.RelationMessage:
		d.relations[m.RelationID] = m
	case *pglogrepl.InsertMessage:
		d.row('c', m.RelationID, nil, m.Tuple)
	case *pglogrepl.UpdateMessage:
		d.row('u', m.RelationID, m.OldTuple, m.NewTuple)
	case *pglogrepl.DeleteMessage:
		d.row('d', m.RelationID, m.OldTuple, nil)
	case *pglogrepl.TruncateMessage:
		for _, id := range m.RelationIDs {
			d.emit(Change{Op: 't', Table: d.table(id)}, nil)
		}
	case *pglogrepl.LogicalDecodingMessage:
		c := Change{Op: 'm', Message: Message{m.Prefix, string(m.Content)}}
		if m.Transactional {
			d.emit(c, nil)
			return
		}
		d.b.change(meta{commit: checkpoint.LSN(m.LSN) - 1}, c, nil)
		d.b.deliver()
	case *pglogrepl.TypeMessage, *pglogrepl.OriginMessage:
	default:
		d.t.Fatalf("unexpected message %T", m)
	}
}

func (d *slotDecoder) emit(c Change, lacks func(int) bool) {
	d.b.change(d.in, c, lacks)
	d.in.seq++
}

func (d *slotDecoder) table(relation uint32) *Table {
	r := d.relations[relation]
	return d.truth.table(r.Namespace + "." + r.RelationName)
}

func (d *slotDecoder) row(op byte, relation uint32, old, row *pglogrepl.TupleData) {
	c := Change{Op: op, Table: d.table(relation)}
	var unchanged []int
	c.Old, _ = tuple(c.Table, old)
	c.New, unchanged = tuple(c.Table, row)
	d.emit(c, func(i int) bool { return slices.Contains(unchanged, i) })
}

// tuple gives a row as text; pgoutput's booleans are t and f, which PlainJSON takes.
func tuple(t *Table, data *pglogrepl.TupleData) (row Row, unchanged []int) {
	if data == nil {
		return nil, nil
	}
	row = make(Row, len(t.Columns))
	for i, c := range data.Columns {
		switch c.DataType {
		case pglogrepl.TupleDataTypeText:
			s := string(bytes.Clone(c.Data))
			row[i] = &s
		case pglogrepl.TupleDataTypeToast:
			unchanged = append(unchanged, i)
		}
	}
	return row, unchanged
}

// TestTheFilledWorkloadAgreesWithPostgreSQL does the same for the tables and transactions
// of a workload that begins with rows, prepared ones among them, through a slot that is
// made in its middle: what lies before it is early, and the ledger says where.
func TestTheFilledWorkloadAgreesWithPostgreSQL(t *testing.T) {
	dsn := harness.Postgres(t, harness.Setting("logical_decoding_work_mem", "64kB"), harness.Setting("max_prepared_transactions", "20")).DSN()
	w := &Workload{DSN: dsn, Seed: 11, Sessions: 4, Transactions: 150, BigRows: 600, Fill: 120}
	if err := w.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	conn := mustConnect(t, dsn)
	var tables []string
	for _, table := range FilledTables() {
		if !table.Outbox {
			tables = append(tables, table.Name)
		}
	}
	mustExec(t, conn, "CREATE PUBLICATION p FOR TABLE "+strings.Join(tables, ", ")+" WITH (publish_via_partition_root)")
	mustExec(t, conn, "CREATE PUBLICATION p_insert FOR TABLE outbox WITH (publish = 'insert')")
	group := new(errgroup.Group)
	var truth *Truth
	group.Go(func() (err error) {
		truth, err = w.Run(t.Context())
		return err
	})
	group.Go(func() error {
		_, err := conn.Exec(t.Context(), "SELECT pg_create_logical_replication_slot('cdctest_'||pg_backend_pid(), 'pgoutput')")
		w.SlotSeen()
		return err
	})
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Log(summary(truth))
	layout := Layout{Prefix: "shop", Partitions: 6}
	log := decodeSlot(t, conn, layout, truth)
	var violations []Violation
	for _, v := range Validate(log, truth, layout) {
		// Nobody read the rows from before the slot.
		if v.Rule != "Fold" && v.Rule != "OutboxOrder" {
			violations = append(violations, v)
		}
	}
	if len(violations) > 0 {
		t.Fatalf("a right log, and %d violations:\n%s", len(violations), Report(violations, 30))
	}
	seen := map[string]int{}
	for _, tx := range truth.Committed {
		if tx.Commit == 0 && len(tx.Changes) > 0 {
			t.Errorf("transaction %d has no commit LSN", tx.XID)
		}
		for _, c := range tx.Changes {
			if c.Table != nil && tx.Session >= 0 {
				seen[c.Table.Name+" "+string(c.Op)]++
			}
		}
	}
	for _, what := range []string{"heap c", "heap u", "heap d", "parts c", "parts d", "parts u", "tokens c", "tokens u", "tokens d", "savings u"} {
		if seen[what] == 0 {
			t.Errorf("the workload had no %s: %v", what, seen)
		}
	}
	// The history that the truth tells ends with the tables.
	h := newHistory(truth)
	h.forward(func(*Txn) bool { return true })
	for _, table := range truth.Tables {
		if table.Keyless() {
			continue
		}
		if got := len(h.tables[table.ID()]); got != len(truth.Final[table.ID()]) {
			t.Errorf("%s ends with %d rows, the history with %d", table.ID(), len(truth.Final[table.ID()]), got)
		}
		for _, row := range truth.Final[table.ID()] {
			if !slices.EqualFunc(h.tables[table.ID()][table.canonicalRowKey(row)], row, equalText) {
				t.Errorf("%s: row %s is not that of the history", table.ID(), table.canonicalRowKey(row))
			}
		}
	}
}

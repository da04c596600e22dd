package cdctest

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// The workload's tables, each there for one way in which a connector goes wrong.
var schemaSQL = []string{
	// The plain one: a few hot keys that every session fights over.
	`CREATE TABLE items (id int PRIMARY KEY, n int8, price numeric(12,2), ratio float8, ok bool, doc jsonb, at timestamptz, note text)`,
	// A text key with characters that JSON must escape.
	`CREATE TABLE notes (slug text PRIMARY KEY, body text)`,
	// A composite key whose columns stand in another order in the table.
	`CREATE TABLE lines (line int, order_id int, qty int, note text, PRIMARY KEY (order_id, line))`,
	// Unchanged TOAST values, which the WAL lacks.
	`CREATE TABLE docs (id int PRIMARY KEY, body text, title text, n int)`,
	`ALTER TABLE docs ALTER body SET STORAGE EXTERNAL`,
	// The whole old row, TOAST values included.
	`CREATE TABLE ledger (id int PRIMARY KEY, body text, amount numeric, note text)`,
	`ALTER TABLE ledger ALTER body SET STORAGE EXTERNAL`,
	`ALTER TABLE ledger REPLICA IDENTITY FULL`,
	// Large transactions and COPY.
	`CREATE TABLE bulk (id int8 PRIMARY KEY, v text)`,
	// Emptied now and then.
	`CREATE TABLE scratch (id int PRIMARY KEY, v text)`,
	`CREATE TABLE scratch_too (id int PRIMARY KEY, v text)`,
	// Money, whose sum never changes.
	`CREATE TABLE accounts (id int PRIMARY KEY, balance numeric(12,2) NOT NULL)`,
	// The counters that number each aggregate's events in commit order.
	`CREATE TABLE aggregates (id text PRIMARY KEY, seq int8 NOT NULL)`,
	`CREATE TABLE outbox (
  id bigserial PRIMARY KEY, event_id uuid NOT NULL UNIQUE,
  aggregate_id text NOT NULL, aggregate_seq bigint NOT NULL,
  event_type text NOT NULL, payload jsonb NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz,
  UNIQUE (aggregate_id, aggregate_seq))`,
}

// Tables describes the workload's tables, in the schema public, with their columns
// in the order of the catalog.
func Tables() []*Table {
	return []*Table{
		table("items", "id:int4:key n:int8 price:numeric ratio:float8 ok:bool doc:jsonb at:timestamptz note:text"),
		table("notes", "slug:text:key body:text"),
		table("lines", "line:int4:key order_id:int4:key qty:int4 note:text"),
		table("docs", "id:int4:key body:text:big title:text n:int4"),
		full(table("ledger", "id:int4:key body:text:big amount:numeric note:text")),
		table("bulk", "id:int8:key v:text"),
		table("scratch", "id:int4:key v:text"),
		table("scratch_too", "id:int4:key v:text"),
		table("accounts", "id:int4:key balance:numeric"),
		table("aggregates", "id:text:key seq:int8"),
		outboxTable(table("outbox", "id:int8:key event_id:uuid aggregate_id:text aggregate_seq:int8 event_type:text payload:jsonb created_at:timestamptz published_at:timestamptz")),
	}
}

// filledSQL makes the tables that a workload has besides when it begins with rows.
var filledSQL = []string{
	// Keys that are nowhere near each other.
	`CREATE TABLE tokens (id uuid PRIMARY KEY, v text, n int)`,
	// Published as its root; a row may move from leaf to leaf.
	`CREATE TABLE parts (id int, d date, v text, PRIMARY KEY (id, d)) PARTITION BY RANGE (d)`,
	`CREATE TABLE parts_a PARTITION OF parts FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')`,
	`CREATE TABLE parts_b PARTITION OF parts FOR VALUES FROM ('2026-02-01') TO ('2026-03-01')`,
	// No key, and rows that are equal.
	`CREATE TABLE heap (a int, b text)`,
	`ALTER TABLE heap REPLICA IDENTITY FULL`,
	// The other side of the money.
	`CREATE TABLE savings (id int PRIMARY KEY, balance numeric(12,2) NOT NULL)`,
}

// FilledTables describes the tables of a workload that begins with rows.
func FilledTables() []*Table {
	return append(Tables(),
		table("tokens", "id:uuid:key v:text n:int4"),
		table("parts", "id:int4:key d:date:key v:text"),
		full(table("heap", "a:int4 b:text")),
		table("savings", "id:int4:key balance:numeric"),
	)
}

// samePartition tells whether two rows of parts lie in one leaf.
func samePartition(a, b Row) bool { return (*a[1])[:7] == (*b[1])[:7] }

// table reads "name:type[:key|:big] ...".
func table(name, columns string) *Table {
	t := &Table{Schema: "public", Name: name}
	for field := range strings.FieldsSeq(columns) {
		p := append(strings.Split(field, ":"), "")
		t.Columns = append(t.Columns, Column{Name: p[0], Type: p[1], Key: p[2] == "key", Big: p[2] == "big"})
	}
	return t
}

func full(t *Table) *Table        { t.Full = true; return t }
func outboxTable(t *Table) *Table { t.Outbox = true; return t }

// sqlFor is a table with the SQL that the workload needs of it.
type sqlFor struct {
	*Table
	list string // the columns as text, for SELECT and RETURNING
	lock string // SELECT the row of a key FOR UPDATE
	ins  string // INSERT a whole row
	del  string // DELETE the row of a key
	key  []int  // the key columns
}

func newSQLFor(t *Table) *sqlFor {
	s := &sqlFor{Table: t}
	var list, names, params, where []string
	for i, c := range t.Columns {
		list = append(list, c.Name+"::text")
		names = append(names, c.Name)
		params = append(params, fmt.Sprintf("$%d::text::%s", i+1, c.Type))
		if c.Key {
			s.key = append(s.key, i)
			where = append(where, fmt.Sprintf("%s = $%d::text::%s", c.Name, len(s.key), c.Type))
		}
	}
	s.list = strings.Join(list, ", ")
	s.lock = fmt.Sprintf("SELECT %s FROM %s WHERE %s FOR UPDATE", s.list, t.Name, strings.Join(where, " AND "))
	s.ins = fmt.Sprintf("INSERT INTO %s (%s) VALUES (%s) RETURNING %s", t.Name, strings.Join(names, ", "), strings.Join(params, ", "), s.list)
	s.del = fmt.Sprintf("DELETE FROM %s WHERE %s RETURNING %s", t.Name, strings.Join(where, " AND "), s.list)
	return s
}

// keyOf gives the key columns of a row as parameters.
func (s *sqlFor) keyOf(row Row) []any {
	args := make([]any, len(s.key))
	for i, k := range s.key {
		args[i] = row[k]
	}
	return args
}

// update gives the UPDATE of the columns set, and its parameters: the new values,
// then the old key.
func (s *sqlFor) update(set []int, old, row Row) (string, []any) {
	var sets, where []string
	var args []any
	for _, i := range set {
		args = append(args, row[i])
		sets = append(sets, fmt.Sprintf("%s = $%d::text::%s", s.Columns[i].Name, len(args), s.Columns[i].Type))
	}
	for _, k := range s.key {
		args = append(args, old[k])
		where = append(where, fmt.Sprintf("%s = $%d::text::%s", s.Columns[k].Name, len(args), s.Columns[k].Type))
	}
	return fmt.Sprintf("UPDATE %s SET %s WHERE %s RETURNING %s", s.Name, strings.Join(sets, ", "), strings.Join(where, " AND "), s.list), args
}

// Setup creates the tables, which must not exist yet. The connector is to be
// started behind it, so that its publication finds them, and before Run, so that
// its slot sees every row.
//
// It also lowers logical_decoding_work_mem for the database's new sessions, the
// walsenders among them, so that ordinary transactions are already spilled.
func (w *Workload) Setup(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, w.DSN)
	if err != nil {
		return fmt.Errorf("connect to set the workload up: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	w.prepare()
	statements := schemaSQL
	if w.Fill > 0 {
		statements = slices.Concat(schemaSQL, filledSQL)
	}
	for _, sql := range statements {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return fmt.Errorf("create the workload's tables in an empty database: %w", err)
		}
	}
	const lower = `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET logical_decoding_work_mem = ''64kB''', current_database()); END $$`
	if _, err := conn.Exec(ctx, lower); err != nil {
		return fmt.Errorf("set logical_decoding_work_mem: %w", err)
	}
	if w.Fill == 0 {
		return nil
	}
	if w.ledger, err = OpenLedger(ctx, w.DSN); err != nil {
		return err
	}
	return w.fill(ctx)
}

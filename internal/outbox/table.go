package outbox

import (
	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// Table is an outbox table as the configuration and its columns describe it.
type Table struct {
	OID          uint32
	Schema, Name string
	Entry        string // the name of its outbox entry, which may be an earlier one of the table's
	After        string // Keep, Mark or Delete
	EventID      string // the column of the event's id
	// Mark is the column that tells which rows are published, Pending the SQL condition of
	// those that are not, and Published the SQL expression that Mark is set to. Empty where the table
	// has no such column.
	Mark, Pending, Published string
	// Created is the column of the time at which a row was written; empty for none.
	Created string
}

// NewTable describes a table by what the router finds in it.
func NewTable(rel *replication.Relation, after string, c router.OutboxColumns, b router.Backlog) Table {
	return Table{
		OID: rel.OID, Schema: rel.Schema, Name: rel.Name, After: after, EventID: c.EventID,
		Mark: b.Mark, Pending: b.Pending, Published: b.Published, Created: c.Created,
	}
}

// String gives schema.table, unquoted.
func (t *Table) String() string { return t.Schema + "." + t.Name }

// SQL gives the table's name, quoted.
func (t *Table) SQL() string { return pgx.Identifier{t.Schema, t.Name}.Sanitize() }

// NotPublished is the condition of the rows that are not marked; of all where the table
// has no mark.
func (t *Table) NotPublished() string {
	if t.Pending == "" {
		return "true"
	}
	return t.Pending
}

// Set is the SQL assignment that marks a row. The table must have a mark.
func (t *Table) Set() string {
	return pgx.Identifier{t.Mark}.Sanitize() + " = " + t.Published
}

// Package outboxmark is the SQL by which published rows of an outbox table are marked,
// deleted and counted, for whoever does it: the relay behind the stream, or polling.
package outboxmark

import (
	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/router"
)

// Table is an outbox table and how its rows tell that they are published.
type Table struct {
	Schema, Name string
	router.Backlog
	// Occurred is the column that ages count from; empty where there is none.
	Occurred string
}

// SQL gives the table's name, quoted.
func (t Table) SQL() string { return pgx.Identifier{t.Schema, t.Name}.Sanitize() }

// NotPublished is the condition of the rows that are not marked; of all where the table
// has no mark.
func (t Table) NotPublished() string {
	if t.Pending == "" {
		return "true"
	}
	return t.Pending
}

// Mark gives the statement that marks the rows for which where holds. The table must have
// a mark.
func (t Table) Mark(where string) string {
	return "UPDATE " + t.SQL() + " SET " + pgx.Identifier{t.Backlog.Mark}.Sanitize() + " = " + t.Published + " WHERE " + where
}

// Delete gives the statement that deletes the rows for which where holds.
func (t Table) Delete(where string) string { return "DELETE FROM " + t.SQL() + " WHERE " + where }

// Count gives the query of how many rows are not marked and of the age in seconds of the
// oldest; 0 where there is none, or no column tells.
func (t Table) Count() string {
	age := "0"
	if t.Occurred != "" {
		// A row of the future has no age.
		age = "coalesce(greatest(extract(epoch FROM pg_catalog.now() - min(" + pgx.Identifier{t.Occurred}.Sanitize() + ")), 0), 0)"
	}
	return "SELECT count(*)::text, (" + age + ")::float8::text FROM " + t.SQL() + " WHERE " + t.NotPublished()
}

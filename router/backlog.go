package router

import (
	"fmt"
	"slices"

	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// Backlog says how the rows are read that an outbox table has before it is streamed.
type Backlog struct {
	// Mark is the column that tells which rows have been published: published_at, else
	// status. Empty where there is none.
	Mark string
	// Pending is the SQL condition of the rows that are not marked. Empty without Mark.
	Pending string
	// Order holds the columns whose order is that in which the rows were written, as
	// nearly as the table tells, and which together name one row where there is a primary
	// key. Nil where there is nothing to go by.
	Order []string
}

// Backlog looks at the columns of an outbox table. primaryKey is its primary key, and
// notNull tells which of its columns cannot be null.
//
// published_at counts as a mark where it is a timestamp: set means published. status
// does where it is an integer, of which 1 means published, or a text or an enum, of which
// 'processed' does; every other value, null included, means not yet.
func (r *Router) Backlog(rel *replication.Relation, primaryKey []string, notNull func(column string) bool) (Backlog, error) {
	types := map[string]*format.Type{}
	for _, c := range rel.Columns {
		t := format.Builtin(c.TypeOID)
		if t == nil && r.o.Types != nil {
			var err error
			if t, err = r.o.Types(c.TypeOID); err != nil {
				return Backlog{}, fmt.Errorf("look up the type of column %s: %w", c.Name, err)
			}
		}
		types[c.Name] = t.Underlying()
	}
	b := Backlog{Order: backlogOrder(types, primaryKey, notNull)}
	switch status := types["status"]; {
	case isTimestamp(types["published_at"]):
		b.Mark, b.Pending = "published_at", pendingTime
	case isInteger(status):
		b.Mark, b.Pending = "status", pendingNumber
	case isText(status):
		b.Mark, b.Pending = "status", pendingText
	case status != nil && status.Kind == format.KindEnum:
		// An enum without such a label refuses to be compared with it.
		b.Mark, b.Pending = "status", pendingLabel
	}
	return b, nil
}

// The conditions of rows that are not marked, by what the mark is.
const (
	pendingTime   = `"published_at" IS NULL`
	pendingNumber = `"status" IS DISTINCT FROM 1`
	pendingText   = `"status" IS DISTINCT FROM 'processed'`
	pendingLabel  = `"status"::pg_catalog.text IS DISTINCT FROM 'processed'`
)

// Set is the SQL assignment that marks a row, after which Pending does not hold for it.
// Empty without Mark.
func (b Backlog) Set() string {
	switch b.Pending {
	case pendingTime:
		return `"published_at" = pg_catalog.now()`
	case pendingNumber:
		return `"status" = 1`
	case pendingText, pendingLabel:
		return `"status" = 'processed'`
	}
	return ""
}

// OutboxColumns says what the columns of an outbox table are to who reads its rows.
type OutboxColumns struct {
	// Key holds the columns of which the first that is not null is the key of the row's
	// record. Nil where a template makes the key.
	Key []string
	// Occurred is the column of the event's time, where it is a timestamp; else empty.
	Occurred string
}

// OutboxColumns looks at an outbox table, for which Check has found nothing wrong.
func (r *Router) OutboxColumns(rel *replication.Relation) (OutboxColumns, error) {
	p, err := r.newPlan(rel)
	if err != nil {
		return OutboxColumns{}, err
	}
	if p.outbox == nil {
		return OutboxColumns{}, fmt.Errorf("table %s is not an outbox", p.label)
	}
	var c OutboxColumns
	if p.outbox.key == nil {
		for _, at := range p.outbox.keyColumns {
			c.Key = append(c.Key, p.outbox.columnName(at))
		}
	}
	if at := p.outbox.fields[fieldOccurred]; at >= 0 && isTimestamp(format.Builtin(rel.Columns[at].TypeOID)) {
		c.Occurred = rel.Columns[at].Name
	}
	return c, nil
}

// backlogOrder gives the primary key where it is a row number; else a row number or the
// time of writing, with the primary key to tell equal ones apart. aggregate_seq and
// version are no such numbers, they count within one aggregate.
func backlogOrder(types map[string]*format.Type, primaryKey []string, notNull func(string) bool) []string {
	if len(primaryKey) == 1 && isInteger(types[primaryKey[0]]) {
		return primaryKey
	}
	first := ""
	for _, name := range []string{"sequence_num", "id", "created_at", "occurred_at"} {
		t := types[name]
		if first == "" && (isInteger(t) || isTimestamp(t)) && notNull(name) {
			first = name
		}
	}
	if first == "" {
		return primaryKey
	}
	order := []string{first}
	for _, name := range primaryKey {
		if !slices.Contains(order, name) {
			order = append(order, name)
		}
	}
	return order
}

func isInteger(t *format.Type) bool { return hasOID(t, oidInt2, oidInt4, oidInt8) }

func isTimestamp(t *format.Type) bool { return hasOID(t, oidTimestamp, oidTimestamptz) }

func isText(t *format.Type) bool { return hasOID(t, oidText, oidVarchar, oidBpchar) }

func hasOID(t *format.Type, oids ...uint32) bool { return t != nil && slices.Contains(oids, t.OID) }

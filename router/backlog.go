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
	// Primary is the primary key, its columns in the table's order; nil where there is none.
	Primary []string
	// Order holds the columns whose order is that in which the rows were written, as
	// nearly as the table tells, and which together name one row where there is a primary
	// key. Nil where there is nothing to go by.
	Order []string
	// Ordered tells that Order begins with a number or a time of writing, and not with what
	// says nothing of when a row was written.
	Ordered bool
	// Settled tells that Order puts the events of one aggregate in the order in which they were
	// written: by a row number, or by their number within the aggregate.
	Settled bool
	// Published is the SQL expression that Mark is set to once a row is published. Empty
	// without Mark.
	Published string
}

// Backlog looks at the columns of an outbox table. seq is the one that counts within an
// aggregate, empty for none (OutboxColumns).
//
// published_at counts as a mark where it is a timestamp that a new row does not have: set
// means published. status
// does where it is an integer, of which 1 means published, or a text or an enum, of which
// 'processed' does; every other value, null included, means not yet.
func (r *Router) Backlog(rel *replication.Relation, seq string, facts replication.ColumnFacts) (Backlog, error) {
	types := map[string]*format.Type{}
	for _, c := range rel.Columns {
		t, err := r.typeOf(c.TypeOID)
		if err != nil {
			return Backlog{}, fmt.Errorf("look up the type of column %s: %w", c.Name, err)
		}
		types[c.Name] = t.Underlying()
	}
	var b Backlog
	for _, i := range rel.PrimaryKey {
		b.Primary = append(b.Primary, rel.Columns[i].Name)
	}
	notNull := func(column string) bool { return slices.Contains(facts.NotNull, column) }
	if !isInteger(types[seq]) || !notNull(seq) {
		seq = ""
	}
	b.order(types, seq, notNull)
	switch status := types["status"]; {
	case isTimestamp(types[publishedAt]) && !slices.Contains(facts.NotNull, publishedAt) && !slices.Contains(facts.Filled, publishedAt):
		b.Mark, b.Pending, b.Published = publishedAt, `"published_at" IS NULL`, "pg_catalog.now()"
	case isInteger(status):
		b.Mark, b.Pending, b.Published = "status", `"status" IS DISTINCT FROM 1`, "1"
	case isText(status):
		b.Mark, b.Pending, b.Published = "status", `"status" IS DISTINCT FROM 'processed'`, "'processed'"
	case status != nil && status.Kind == format.KindEnum:
		// An enum without such a label refuses to be compared with it.
		b.Mark, b.Pending, b.Published = "status", `"status"::pg_catalog.text IS DISTINCT FROM 'processed'`, "'processed'"
	}
	return b, nil
}

const publishedAt = "published_at"

// order sets Order: the primary key where it is a row number; else a row number or the
// time of writing, with the primary key to tell equal ones apart. What counts within one
// aggregate, seq, is no such number, but orders what has the same time, as the rows of a
// transaction mostly have, or no time at all.
func (b *Backlog) order(types map[string]*format.Type, seq string, notNull func(string) bool) {
	orders := func(name string) bool { return isInteger(types[name]) || isTimestamp(types[name]) }
	for _, name := range []string{"sequence_num", "id", "created_at", "occurred_at"} {
		if b.Order == nil && orders(name) && notNull(name) {
			b.Order = []string{name}
		}
	}
	if len(b.Primary) > 0 && orders(b.Primary[0]) && (b.Order == nil || len(b.Primary) == 1 && isInteger(types[b.Primary[0]])) {
		b.Order = b.Primary[:1:1]
	}
	b.Ordered = b.Order != nil
	b.Settled = b.Ordered && isInteger(types[b.Order[0]])
	if seq != "" && !b.Settled {
		b.Order, b.Settled = append(b.Order, seq), true
	}
	for _, name := range b.Primary {
		if !slices.Contains(b.Order, name) {
			b.Order = append(b.Order, name)
		}
	}
}

func isInteger(t *format.Type) bool { return hasOID(t, oidInt2, oidInt4, oidInt8) }

func isTimestamp(t *format.Type) bool { return hasOID(t, oidTimestamp, oidTimestamptz) }

func isText(t *format.Type) bool { return hasOID(t, oidText, oidVarchar, oidBpchar) }

func hasOID(t *format.Type, oids ...uint32) bool { return t != nil && slices.Contains(oids, t.OID) }

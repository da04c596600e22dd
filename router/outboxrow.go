package router

import (
	"errors"

	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// OutboxColumns are columns of an outbox table that work on its rows goes by.
type OutboxColumns struct {
	EventID string
	// Created is a timestamp of when the row was written, as nearly as the table tells;
	// empty where there is none.
	Created string
	// Seq is the number of the event within its aggregate; empty where there is none that
	// is an integer.
	Seq string
	// Key holds the columns of which the first that is not null is the key of the row's
	// record. Nil where a template makes the key.
	Key []string
}

// Outboxes says which tables are outboxes by their OIDs, with the names, "schema.table", of their
// entries: the WAL may have a table under another name, and its rows are events all the
// same. To be called before the first change.
func (r *Router) Outboxes(entries map[uint32]string) { r.outboxes = entries }

// outboxEntry gives the entry of an outbox table; nil for other tables.
func (r *Router) outboxEntry(rel *replication.Relation) *OutboxOptions {
	entry, ok := r.outboxes[rel.OID]
	if !ok {
		entry = rel.Schema + "." + rel.Name
	}
	for i := range r.o.Outbox {
		if o := &r.o.Outbox[i]; entry == o.Schema+"."+o.Table {
			return o
		}
	}
	return nil
}

// OutboxColumns finds them in an outbox table as it is now.
func (r *Router) OutboxColumns(rel *replication.Relation) (OutboxColumns, error) {
	p, err := r.newPlan(rel, false)
	if err != nil {
		return OutboxColumns{}, err
	}
	if p.outbox == nil {
		return OutboxColumns{}, errors.New(p.label + " is no outbox table")
	}
	c := OutboxColumns{EventID: p.outbox.columnName(p.outbox.fields[fieldID])}
	// created_at says when the row was written, the field perhaps when the event was.
	for i, column := range rel.Columns {
		if (column.Name == "created_at" || c.Created == "" && i == p.outbox.fields[fieldOccurred]) && isTimestamp(format.Builtin(column.TypeOID)) {
			c.Created = column.Name
		}
	}
	if i := p.outbox.fields[fieldSeq]; i >= 0 && isInteger(format.Builtin(p.outbox.source.columns[i].typeOID)) {
		c.Seq = p.outbox.columnName(i)
	}
	if p.outbox.key == nil {
		for _, at := range p.outbox.keyColumns {
			c.Key = append(c.Key, p.outbox.columnName(at))
		}
	}
	return c, nil
}

// LastIsCut tells that the change routed last became a dead letter that does not hold the
// whole row.
func (b *Batch) LastIsCut() bool { return b.LastIsDeadLetter() && b.lastCut }

// LastIsDeadLetter tells whether the change routed last became a dead letter.
func (b *Batch) LastIsDeadLetter() bool {
	return len(b.records) > 0 && b.records[len(b.records)-1].dead
}

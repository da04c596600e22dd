package router

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// compositeColumn is a column whose values may be older, or newer, than what is known of a
// composite type in them. ALTER TYPE adds, drops and renames attributes under the tables
// that use the type, and neither the stream nor the values say so: a row value has no
// names, only their number may differ.
type compositeColumn struct {
	column  int
	altered checkpoint.XID // the newest transaction that altered the type, zero for none
	// known writes a value by the type as it is known, or where the number of its fields
	// shows that it is another's as other does.
	known format.Append
	// other is for values that are older than the type. Names from another time could be
	// those of other attributes, so that there are none: the value is PostgreSQL's text.
	// Where a schema says that it is a struct, it is an error.
	other format.Append
}

// chunkTime tells one chunk from another.
type chunkTime struct {
	at   time.Time
	xmin checkpoint.XID
}

// addComposite looks at the type of the column added last.
func (p *tablePlan) addComposite(t *format.Type, schemas bool, enc *format.Encoder) {
	altered, composite := t.LastAltered()
	if !composite {
		return
	}
	at := len(p.columns) - 1
	c := compositeColumn{column: at, altered: altered, other: enc.Plain(nil)}
	if schemas {
		c.other = func(dst, _ []byte) ([]byte, error) { return dst, format.ErrFieldCount }
	}
	object := p.columns[at].append
	c.known = func(dst, text []byte) ([]byte, error) {
		out, err := object(dst, text)
		if errors.Is(err, format.ErrFieldCount) {
			return c.other(dst, text)
		}
		return out, err
	}
	p.columns[at].append = c.known
	p.composites = append(p.composites, c)
}

// compositePlan makes p ready for the change c, anew where its types have changed.
//
// Which transaction wrote a value is known, and which altered the type: a value of an
// older one, or of the same, which may have written before it altered, is not written by
// the type as it is now. (A younger transaction that ended before a long one altered the
// type is taken for a newer, if it is read later and the number of fields is the same.)
// Rows that a snapshot reads are as the types are when they are read, which are those of
// now if the MVCC snapshot had seen the last that altered them.
func (r *Router) compositePlan(p *tablePlan, c *replication.Change) (*tablePlan, error) {
	r.last = p
	at := checkpoint.LSN(math.MaxUint64) // a chunk is newer than any answer from before it
	switch {
	case c.Txn != nil:
		at = c.Txn.CommitLSN
	case p.typesRead == chunkTime{c.Read.Time, c.Read.Xmin}:
		return p, nil
	}
	p, err := r.renewed(p, c, at)
	if err != nil {
		return nil, fmt.Errorf("plan records of %s.%s: %w", c.Relation.Schema, c.Relation.Name, err)
	}
	var by checkpoint.XID // what altered a type must be older
	if c.Read != nil {
		p.typesRead, by = chunkTime{c.Read.Time, c.Read.Xmin}, c.Read.Xmin
	} else {
		by = c.Txn.XID
	}
	for i := range p.composites {
		column := &p.composites[i]
		form := column.known
		if !column.altered.IsZero() && by <= column.altered {
			form = column.other
		}
		p.columns[column.column].append = form
	}
	return p, nil
}

// renewed is p, or another plan where the types have changed by what was written at lsn:
// then every plan is made anew.
func (r *Router) renewed(p *tablePlan, c *replication.Change, at checkpoint.LSN) (*tablePlan, error) {
	if r.o.TypesAt == nil {
		return p, nil
	}
	changed, err := r.o.TypesAt(at)
	if err != nil || !changed {
		return p, err
	}
	clear(r.plans)
	clear(r.readPlans)
	if p, err = r.newPlan(c.Relation, c.Read != nil); err != nil {
		return nil, err
	}
	if c.Read != nil {
		r.readPlans[p.rel.OID] = p
	} else {
		r.plans[p.rel.OID] = p
	}
	r.last = p
	return p, nil
}

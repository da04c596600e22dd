package router

import (
	"fmt"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// update gives one record, or three where the key changes: the old key goes and the
// new one comes, so that a consumer that folds by key ends with one row.
func (r *Router) update(p *tablePlan, c *replication.Change, b *Batch) error {
	if err := p.needsIdentity(); err != nil {
		return err
	}
	if !p.keyChanged(c) {
		// What PostgreSQL sent, also where it sent no more than the same key again (of a key
		// that is stored out of line, or where source.keys names a part of it).
		return r.row(p, c, b, rowRecord{op: c.Op, before: c.Old, beforeIsKey: c.OldIsKey, after: c.New, key: c.New})
	}
	var moved otherKey
	if r.o.Debezium != nil {
		at := len(b.arena)
		var err error
		if b.arena, err = p.appendKey(b.arena, c.New, c.Old); err != nil {
			return err
		}
		moved = otherKey{header: headerNewKey, key: p.keyPayload(b.spanFrom(at))}
	}
	if err := r.delete(p, c, b, moved); err != nil {
		return err
	}
	old := otherKey{header: headerPreviousKey, key: b.records[len(b.records)-1].key}
	if r.o.Debezium != nil {
		old = otherKey{header: headerOldKey, key: p.keyPayload(old.key)}
	}
	return r.row(p, c, b, rowRecord{op: replication.OpCreate, after: c.New, key: c.New, other: old})
}

// delete gives the delete and its tombstone; moved is the key that the row has now.
func (r *Router) delete(p *tablePlan, c *replication.Change, b *Batch, moved otherKey) error {
	if err := p.needsIdentity(); err != nil {
		return err
	}
	var key span
	if r.o.Unwrapped && !r.o.DeletedField && p.key != nil {
		at := len(b.arena)
		var err error
		if b.arena, err = p.appendKey(b.arena, c.Old, nil); err != nil {
			return err
		}
		key = b.spanFrom(at)
	} else {
		w := rowRecord{op: replication.OpDelete, before: c.Old, beforeIsKey: c.OldIsKey, key: c.Old, other: moved}
		if err := r.row(p, c, b, w); err != nil {
			return err
		}
		if !r.o.Tombstones {
			return nil
		}
		key = b.records[len(b.records)-1].key
	}
	where := placeByKey
	if p.key == nil {
		if r.o.Debezium == nil || r.o.Unwrapped {
			return nil // a tombstone without a key would say nothing
		}
		where = placeAlone // and says nothing, but Debezium sends it
	}
	return r.add(b, record{topic: p.topic, key: key, value: nullSpan, headers: r.rowHeaders(c, b, moved), where: where}, p.topicName)
}

// truncate gives one record for every partition, so that each partition's order
// holds it.
func (r *Router) truncate(p *tablePlan, c *replication.Change, b *Batch) error {
	key := nullSpan
	if p.topic.Compacted {
		at := len(b.arena)
		b.arena = append(b.arena, "{}"...)
		key = b.spanFrom(at)
	}
	at := len(b.arena)
	b.arena = r.shape.appendTruncate(b.arena, p, c)
	value := b.spanFrom(at)
	headers := r.positionHeader(c, b)
	return r.add(b, record{topic: p.topic, key: key, value: value, headers: headers, where: placeEvery}, p.topicName)
}

// needsIdentity refuses a key that updates and deletes do not carry.
func (p *tablePlan) needsIdentity() error {
	if !p.keyBeyondIdentity {
		return nil
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("source.keys names columns of %s that its replica identity does not hold, so that updates and deletes do not tell the old key", p.label),
		Risk:   "rows whose key changes would stay in the topic for ever",
		Remedy: fmt.Sprintf("ALTER TABLE %s REPLICA IDENTITY FULL; or name columns of its replica identity", p.label),
	}
}

// keyChanged tells whether an update moves the row to another key.
func (p *tablePlan) keyChanged(c *replication.Change) bool {
	if len(c.Old) == 0 {
		return false // PostgreSQL sends the old row when its identity changes
	}
	for _, i := range p.key {
		o, n := &c.Old[i], &c.New[i]
		if n.Kind == replication.ValueUnchanged {
			continue
		}
		if o.Kind != n.Kind || string(o.Text) != string(n.Text) {
			return true
		}
	}
	return false
}

// The headers of a key change. Plain records have one, on the new key's record, whose
// value is the old key as it stands.
const (
	headerPreviousKey = "previous-key"
	headerNewKey      = "__debezium.newkey"
	headerOldKey      = "__debezium.oldkey"
)

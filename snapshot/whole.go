package snapshot

import (
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// Tables without a key have nothing to strike rows out by. Such a table is read in one
// piece under one snapshot S. What passes before S is known is dropped, since S sees it:
// the stream stands still while S is taken, and S is taken again until it sees all that
// has passed. From then on what S sees is dropped, inserts that it does not see are new
// rows and go out at once, and what changes rows is held until the rows are out.

// becomeWhole turns a table that was to be read by ranges into one that is read whole.
// Its changes have gone out as they came, and the rows would be there twice: so a
// truncate goes first.
func (t *table) becomeWhole() {
	t.m.throwAway(t)
	t.whole, t.truncateDue, t.emitBefore = true, true, true
	t.state, t.resumed = checkpoint.TablePending, false
	t.key, t.ranges, t.again = nil, nil, nil
	for _, p := range t.passed {
		t.wholly(p)
	}
	t.touch()
}

// wholeChange decides what becomes of a change.
func (t *table) wholeChange(c *replication.Change) Verdict {
	if !t.opened {
		if p := t.remember(); p != nil {
			p.wholesale = true
		}
		if t.emitBefore {
			return Emit // the truncate that comes before the rows wipes it out
		}
		return Drop
	}
	if t.snapshot.Sees(t.m.xid) {
		return Drop
	}
	switch {
	case t.holdAll:
		return Hold
	case c.Op == replication.OpCreate && !t.rowsOut:
		return Emit
	case c.Op == replication.OpTruncate:
		t.holdAll = true
	}
	return Hold
}

// unseenBy tells whether something has passed that s does not see.
func (t *table) unseenBy(s MVCC) bool {
	if t.tooOld(s) {
		return true
	}
	for x, p := range t.passed {
		if p.wholesale && !s.Sees(x) {
			return true
		}
	}
	return false
}

// wholeOrder asks for a snapshot until one sees everything that has passed, then for the
// rows, while the stream stands still.
func (t *table) wholeOrder() *Order {
	if t.opened || len(t.orders) > 0 || !t.m.pausedFor(t) {
		return nil
	}
	if !t.probed {
		return &Order{Kind: OrderSnapshot, Flushed: t.m.o.Flushed}
	}
	o := &Order{Kind: OrderWhole}
	t.limits(o)
	return o
}

// wholeArrived takes a snapshot, or a piece of the table.
func (t *table) wholeArrived(c *Chunk, now time.Time) {
	if t.began.IsZero() {
		t.began = now
	}
	switch {
	case c.Order.Kind == OrderSnapshot:
		t.probed = !t.unseenBy(c.Snapshot)
		if !t.probed {
			t.retryAt = now.Add(retryAfter / 4)
		}
		t.m.recycle(c)
		return
	case !t.opened && t.unseenBy(c.Snapshot):
		// The stream went on before this snapshot was there.
		c.Order.cancelled.Store(true)
		t.orders, t.probed = nil, false
		t.retryAt = now.Add(retryAfter)
		t.m.recycle(c)
		return
	case !t.opened:
		t.opened, t.snapshot, t.upTo = true, c.Snapshot, c.LSN
		t.passed, t.remembered = map[checkpoint.XID]*passed{}, 0
		t.shape = c.Shape.Relation
		if !t.truncateDue {
			t.state = checkpoint.TableReading
			t.touch()
			t.m.endPause(t, now)
		}
	}
	if c.Rows.Len() == 0 && !c.Last {
		t.m.recycle(c)
		return
	}
	t.chunks = append(t.chunks, newChunk(c))
}

// mayTruncate tells whether the truncate may go out: of a table that is read whole, only
// once its snapshot is known, so that what passes before is contained in the rows.
func (t *table) mayTruncate() bool {
	if t.whole {
		return t.opened
	}
	return t.key != nil
}

package snapshot

import (
	"slices"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
)

// order gives what is to be read next of a table; nil for nothing.
func (t *table) order(now time.Time) *Order {
	if now.Before(t.retryAt) {
		return nil
	}
	t.retryAt = time.Time{}
	switch t.state {
	case checkpoint.TablePending, checkpoint.TableReading:
	default:
		return nil
	}
	if t.whole {
		return t.wholeOrder()
	}
	if t.key == nil {
		return t.planOrder(now)
	}
	if t.truncateDue {
		return nil // first it goes out
	}
	for i, s := range t.ranges {
		if s.ordered || s.readOut || t.inMemoryOf(s) >= 2 {
			continue
		}
		if i > 0 && s.whole() {
			continue // behind all others, alone
		}
		s.ordered = true
		o := &Order{Kind: OrderRange, Key: t.key, After: s.readAfter, To: s.To, span: s}
		t.limits(o)
		return o
	}
	if len(t.ranges) == 0 && len(t.again) > 0 && t.m.pausedFor(t) && len(t.orders) == 0 && len(t.chunks) == 0 {
		n := min(len(t.again), againPerOrder)
		if t.againNow > 0 {
			n = min(n, t.againNow)
		}
		o := &Order{Kind: OrderKeys, Key: t.identity(), Keys: slices.Clone(t.again[:n])}
		t.limits(o)
		return o
	}
	return nil
}

func (t *table) limits(o *Order) {
	o.Rows, o.Bytes = t.m.o.ChunkRows, t.m.o.ChunkBytes
	o.Xmin = t.inBacklog()
	o.Flushed = o.Xmin || t.m.o.Flushed
}

func (t *table) planOrder(now time.Time) *Order {
	if len(t.orders) > 0 {
		return nil
	}
	o := &Order{Kind: OrderPlan, Pieces: 1, End: t.def.Outbox}
	if t.def.Estimate >= int64(splitFrom*t.m.o.ChunkRows) && !t.def.Outbox {
		o.Pieces = t.m.o.Readers
	}
	if t.began.IsZero() {
		t.began = now
	}
	return o
}

// planned takes the table's shape and parts it into ranges.
func (t *table) planned(c *Chunk) {
	if c.Shape.Estimate >= 0 {
		t.def.Estimate = c.Shape.Estimate
	}
	if c.Shape.Whole || len(c.Shape.Key) == 0 {
		t.becomeWhole()
		return
	}
	former := t.identity()
	t.key, t.shape = c.Shape.names(), c.Shape.Relation
	if !slices.Equal(former, t.identity()) {
		for _, p := range t.passed { // by the former key
			t.wholly(p)
		}
	}
	t.ranges = nil
	var after []string
	for _, k := range c.Splits {
		t.ranges = append(t.ranges, &span{Range: checkpoint.Range{After: after, To: k}, readAfter: after})
		after = k
	}
	if !c.Order.End || c.End != nil {
		t.ranges = append(t.ranges, &span{Range: checkpoint.Range{After: after, To: c.End}, readAfter: after})
	}
	if !t.truncateDue {
		t.state = checkpoint.TableReading
		t.touch()
		t.moved(c.Snapshot)
		t.phaseOut()
	}
}

// moved notes the keys to be read again of what passed before the table's first chunk: of
// those changes alone that a chunk may not see. No chunk is older than the plan's snapshot.
func (t *table) moved(plan MVCC) {
	columns := len(t.identity())
	for x, p := range t.passed {
		for i := range p.changes {
			if e := &p.changes[i]; e.moved && !plan.Sees(x) {
				t.readAgain(splitKey(e.key, columns))
			}
		}
	}
}

// names are the key's columns.
func (s *Shape) names() []string {
	names := make([]string, len(s.Key))
	for i, at := range s.Key {
		names[i] = s.Relation.Columns[at].Name
	}
	return names
}

// startOver begins the table anew: its key is another one.
func (t *table) startOver(now time.Time) {
	t.m.throwAway(t)
	t.key, t.ranges, t.again = nil, nil, nil
	for _, p := range t.passed { // by the former key
		t.wholly(p)
	}
	t.state, t.resumed = checkpoint.TablePending, false
	t.touch()
	t.m.endPause(t, now)
}

func (t *table) inMemoryOf(s *span) int {
	n := 0
	for _, ch := range t.chunks {
		if ch.Order.span == s {
			n++
		}
	}
	return n
}

// arrived takes rows of a range, or of single keys, and strikes out what changes that
// passed before have superseded.
func (t *table) arrived(c *Chunk, now time.Time) {
	o := c.Order
	if o.span != nil {
		o.span.ordered = false
	}
	if c.Shape.Whole || !slices.Equal(c.Shape.names(), t.key) {
		t.m.recycle(c)
		t.startOver(now)
		return
	}
	if t.tooOld(c.Snapshot) {
		t.m.recycle(c)
		t.retryAt = now.Add(retryAfter)
		return
	}
	ch := newChunk(c)
	unresolved := map[string]bool{} // keys of OrderKeys that c does not see the last of
	for x, p := range t.passed {
		if c.Snapshot.Sees(x) {
			continue
		}
		if p.wholesale {
			t.m.recycle(c)
			t.retryAt = now.Add(retryAfter)
			return
		}
		if p.truncated {
			ch.strikeAll()
		}
		for _, e := range p.changes {
			t.supersede(ch, e)
			if o.Kind == OrderKeys {
				unresolved[e.key] = true
				unresolved[e.old] = true
			}
		}
	}
	t.inserted.strike(ch)
	if o.Kind == OrderKeys {
		if !t.againArrived(ch, unresolved, now) {
			t.m.recycle(c)
			return
		}
	}
	if s := o.span; s != nil {
		if n := c.Rows.Len(); n > 0 {
			s.readAfter = ch.keyOf(n - 1)
		}
		s.readOut = c.Last
	}
	t.chunks = append(t.chunks, ch)
}

// blind gives up an answer whose snapshot is too old to be of use, and tries again later.
func (t *table) blind(c *Chunk, now time.Time) {
	if c.Order.span != nil {
		c.Order.span.ordered = false
	}
	if c.Order.Kind == OrderWhole {
		c.Order.cancelled.Store(true)
		t.orders, t.probed = nil, false
	}
	t.retryAt = now.Add(retryAfter)
	t.m.recycle(c)
}

// supersede strikes out what a change that passed has superseded.
func (t *table) supersede(ch *chunk, e passedChange) {
	old := e.old
	if old == "" {
		old = e.key
	}
	if e.incomplete && ch.has(e.key) {
		// The change went out without a column that only this row has.
		t.readAgain(splitKey(e.key, len(t.identity())))
	}
	ch.strike(old)
	if e.key != "" && e.key != old {
		ch.strike(e.key)
	}
}

// againArrived tells whether a chunk of keys that are read again settles them: it does if
// it sees every change of theirs that has passed. Otherwise those that it would settle
// are asked for once more, alone, while the stream still stands.
func (t *table) againArrived(ch *chunk, unresolved map[string]bool, now time.Time) bool {
	stuck := func(k []string) bool { return unresolved[joinKey(k)] }
	asked := ch.Order.Keys
	if !slices.ContainsFunc(asked, stuck) {
		t.againNow, t.failures = 0, 0
		t.m.endPause(t, now)
		return true
	}
	var first, last [][]string
	for _, k := range t.again {
		if stuck(k) {
			last = append(last, k)
		} else {
			first = append(first, k)
		}
	}
	t.againNow = 0
	for _, k := range asked {
		if !stuck(k) {
			t.againNow++
		}
	}
	t.again = append(first, last...)
	if t.againNow == 0 {
		t.retryAt = now.Add(retryAfter / 4)
	}
	return false
}

// wantsPause tells whether the stream has to stand still for this table.
func (t *table) wantsPause(now time.Time) bool {
	if now.Before(t.retryAt) || t.state != checkpoint.TablePending && t.state != checkpoint.TableReading {
		return false
	}
	if t.whole {
		return !t.opened && len(t.orders) == 0
	}
	return t.key != nil && len(t.ranges) == 0 && len(t.again) > 0 && len(t.orders) == 0 && len(t.chunks) == 0
}

// pauseFailed gives a read that did not see enough in time up for a while.
func (t *table) pauseFailed(now time.Time) {
	for _, o := range t.orders {
		o.cancelled.Store(true)
	}
	t.orders = nil
	t.probed = false
	t.failures++
	t.retryAt = now.Add(min(pauseAfter<<min(t.failures, 10), maxPauseAfter))
}

// next gives the table's next row that may go out.
func (t *table) next(row *Row) bool {
	if t.truncateDue && t.mayTruncate() {
		t.truncateDue = false
		t.state = checkpoint.TableReading
		t.touch()
		t.m.endPause(t, t.m.clock)
		// Whoever passed before has been wiped out by the truncate, so its effect must be in
		// what is read from here on.
		for _, p := range t.passed {
			t.wholly(p)
		}
		*row = Row{Table: t.def.OID, Relation: t.shape, Truncate: true, Outbox: t.def.Outbox, Time: t.began}
		return true
	}
chunks:
	for len(t.chunks) > 0 {
		ready := -1
		for i, ch := range t.chunks {
			if t.mayGo(ch) && (ch.Order.span == nil || ch.first(t.chunks[:i])) {
				ready = i
				break
			}
		}
		if ready < 0 {
			return false
		}
		ch := t.chunks[ready]
		if s := ch.Order.span; s != nil {
			s.last = ch
		}
		for ch.cursor < ch.Rows.Len() {
			i := ch.cursor
			ch.cursor++
			t.touch()
			if ch.struck(i) {
				continue
			}
			if backlog := t.inBacklog(); t.passedOver(ch, i) {
				if backlog && t.beside {
					continue chunks // from here on the stream has to pass first
				}
				continue
			}
			if ch.Order.Kind == OrderKeys {
				t.settled(ch.identityOf(i))
			}
			t.m.tuple = ch.Rows.Tuple(i, t.m.tuple)
			t.rows++
			*row = Row{Table: t.def.OID, Relation: ch.Shape.Relation, Tuple: t.m.tuple, Time: ch.Time, Xmin: ch.Snapshot.Xmin, Outbox: t.def.Outbox}
			return true
		}
		t.chunkOut(ready)
	}
	return false
}

// passedOver tells that a row of an outbox table may be the stream's: a transaction that
// the slot's snapshot does not see wrote it, or changed it only. Its key is read again
// when the stream has shown which.
func (t *table) passedOver(ch *chunk, i int) bool {
	if len(ch.Xmins) == 0 || t.beside || t.m.o.SlotSnapshot.Sees(ch.Xmins[i]) {
		return false
	}
	t.again, t.asked = append(t.again, ch.identityOf(i)), nil
	if len(t.again) >= t.m.o.MaxAgain && !t.beside {
		t.besideNow()
	}
	return true
}

// settled forgets a key that was read again.
func (t *table) settled(key []string) {
	t.again = slices.DeleteFunc(t.again, func(a []string) bool { return slices.Equal(a, key) })
}

// besideNow lets the stream run beside what is left of an outbox table's rows.
func (t *table) besideNow() {
	t.beside = true
	t.touch()
}

// first tells that no chunk of the same range stands before this one.
func (ch *chunk) first(before []*chunk) bool {
	for _, b := range before {
		if b.Order.span == ch.Order.span {
			return false
		}
	}
	return true
}

// mayGo tells whether the stream has passed everything that a chunk has seen.
func (t *table) mayGo(ch *chunk) bool {
	if t.inBacklog() {
		return true // its rows are older than the stream
	}
	if t.whole {
		return t.m.hasPassed(t.snapshot, t.upTo)
	}
	return t.m.hasPassed(ch.Snapshot, ch.LSN)
}

// chunkOut ends a chunk whose last row is out.
func (t *table) chunkOut(i int) {
	ch := t.chunks[i]
	t.chunks = slices.Delete(t.chunks, i, i+1)
	t.touch()
	switch s := ch.Order.span; {
	case s != nil:
		s.settle()
		s.last = nil
		if ch.Last {
			t.ranges = slices.DeleteFunc(t.ranges, func(r *span) bool { return r == s })
			t.phaseOut()
		}
	case ch.Order.Kind == OrderKeys:
		for _, k := range ch.Order.Keys { // those that have no row, or one that is struck out
			t.settled(k)
		}
	case t.whole && ch.Last:
		t.rowsOut = true
	}
	t.m.recycle(ch.Chunk)
}

// phaseOut goes on to what may be the stream's, of an outbox table.
func (t *table) phaseOut() {
	if len(t.ranges) > 0 {
		return
	}
	t.inserted = inserted{} // what is read by its key is read while the stream stands still
	if t.inBacklog() {
		t.besideNow()
	}
}

// finished tells whether nothing is left to do.
func (t *table) finished() bool {
	return !t.whole && t.state == checkpoint.TableReading && t.key != nil && len(t.ranges) == 0 && len(t.again) == 0 &&
		len(t.orders) == 0 && len(t.chunks) == 0 && !t.truncateDue
}

func (t *table) finish() {
	t.state = checkpoint.TableDone
	t.touch()
	t.key, t.ranges, t.again = nil, nil, nil
	t.passed, t.inserted, t.request = nil, inserted{}, nil
}

package snapshot

import (
	"slices"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
)

// inHand is the number of chunks in memory or being read.
func (m *Merger) inHand() int {
	n := 0
	for _, o := range m.outstanding {
		if o.Kind != OrderPlan && o.Kind != OrderSnapshot && !o.Cancelled() {
			n++
		}
	}
	for _, t := range m.active {
		n += len(t.chunks)
	}
	return n
}

// Order gives what is to be read next; nil while nothing is, or as much is in hand
// already as Options allow.
func (m *Merger) Order(now time.Time) *Order {
	m.clock = now
	if len(m.queue) == 0 || len(m.outstanding) >= m.o.Readers || m.again() {
		return nil
	}
	// An outbox's backlog comes first, and the stream waits for it; so what other tables
	// have in hand, which waits for the stream, does not count.
	backlog := m.backlog()
	if !backlog && m.inHand() >= 2*m.o.Readers {
		return nil
	}
	for _, t := range m.active {
		if backlog && !t.inBacklog() {
			continue
		}
		if o := m.orderOf(t, now); o != nil {
			return o
		}
	}
	for _, t := range m.queue {
		if !backlog && len(m.active) >= 2*m.o.Readers {
			break
		}
		if t.state == checkpoint.TableWaiting || backlog && !t.inBacklog() || slices.Contains(m.active, t) {
			continue
		}
		m.active = append(m.active, t)
		if o := m.orderOf(t, now); o != nil {
			return o
		}
	}
	return nil
}

func (m *Merger) orderOf(t *table, now time.Time) *Order {
	o := t.order(now)
	if o == nil {
		return nil
	}
	m.nextID++
	o.ID, o.Table, o.floor = m.nextID, t.def, m.latest
	if t.request != nil && !t.whole { // a truncate takes the rows outside of it, too
		o.Where = t.request.Where
	}
	m.outstanding[o.ID] = o
	t.orders = append(t.orders, o)
	return o
}

// backlog tells whether rows of an outbox table, from before the slot, are to go out
// before anything of the stream does.
func (m *Merger) backlog() bool {
	for _, t := range m.queue {
		if !t.def.Outbox {
			break
		}
		if t.inBacklog() {
			return true
		}
	}
	return false
}

// Paused tells whether no further source transaction must be taken from the stream for
// the moment: a read is under way that has to see everything that has passed. It lasts
// a second at most, but for the backlog of outbox tables, which goes out before the
// stream; wake is when to ask again, zero for no need to.
func (m *Merger) Paused(now time.Time) (paused bool, wake time.Time) {
	m.clock = now
	if m.again() {
		return false, time.Time{}
	}
	if m.backlog() {
		return true, time.Time{}
	}
	if m.pause == nil && !now.Before(m.rest) {
		for _, t := range m.active {
			if t.wantsPause(now) {
				m.pause = &pause{t: t}
				break
			}
		}
	}
	switch p := m.pause; {
	case p == nil:
		return false, time.Time{}
	case m.open, p.t.opened && p.t.truncateDue:
		return true, time.Time{} // until the transaction is over; until the truncate is out
	case p.began.IsZero():
		p.began = now
		return true, now.Add(pauseBudget)
	case now.Sub(p.began) < pauseBudget:
		return true, p.began.Add(pauseBudget)
	default:
		p.t.pauseFailed(now)
		m.endPause(p.t, now)
		return false, time.Time{}
	}
}

// endPause lets the stream go on, for as long as it stood still at least.
func (m *Merger) endPause(t *table, now time.Time) {
	if m.pause == nil || m.pause.t != t {
		return
	}
	if !m.pause.began.IsZero() {
		m.rest = now.Add(now.Sub(m.pause.began))
	}
	m.pause = nil
}

// pausedFor tells whether the stream stands still for t, between source transactions.
func (m *Merger) pausedFor(t *table) bool { return m.pause != nil && m.pause.t == t && !m.open }

// Wake gives the time at which Order may have something that it had not before; zero
// for none.
func (m *Merger) Wake() time.Time {
	var wake time.Time
	for _, t := range m.active {
		if !t.retryAt.IsZero() && (wake.IsZero() || t.retryAt.Before(wake)) {
			wake = t.retryAt
		}
	}
	return wake
}

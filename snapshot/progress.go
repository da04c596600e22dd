package snapshot

import (
	"github.com/walrelay/walrelay/checkpoint"
)

// Progress gives the tables whose progress changed since the last call, to go into the
// checkpoint of the batch that holds the rows and changes taken so far. Nil for none.
func (m *Merger) Progress() map[uint32]checkpoint.TableProgress {
	if len(m.dirty) == 0 {
		return nil
	}
	changed := make(map[uint32]checkpoint.TableProgress, len(m.dirty))
	for _, t := range m.dirty {
		t.dirty = false
		changed[t.def.OID] = t.progress()
		if t.removed && m.tables[t.def.OID] == t {
			delete(m.tables, t.def.OID)
		}
	}
	m.dirty = m.dirty[:0]
	return changed
}

// Hold gives the LSN beyond which nothing may be confirmed to PostgreSQL, so that a
// restart is sent again what its memory needs; false where there is no such bound. It is
// asked together with Progress, and holds for the position of that checkpoint, once it is
// durable: what a table that is done needs no more, a restart may need that does not find
// it done.
func (m *Merger) Hold() (lsn checkpoint.LSN, ok bool) {
	if !m.Active() {
		return 0, false
	}
	lsn, ok = m.reached, true
	if m.open {
		lsn = m.before
	}
	if len(m.unseen) > 0 {
		lsn = min(lsn, m.unseen[0].before)
	}
	if m.crowd.xid > 0 {
		lsn = min(lsn, m.crowd.before)
	}
	for _, t := range m.queue {
		if !t.def.Outbox {
			break
		}
		lsn = min(lsn, t.since)
	}
	return lsn, ok
}

// Covered tells whether the slot's snapshot is of no use any more: newer ones see all
// that it sees, and the backlog of outbox tables is out.
func (m *Merger) Covered() bool {
	if !m.covered {
		return m.o.SlotSnapshot.IsZero()
	}
	for _, t := range m.queue {
		if t.def.Outbox {
			return false
		}
	}
	return true
}

// HeldMayWait tells whether the stream may stand still until the rows of a table that is
// read whole are out: not before it has passed what they have seen.
func (m *Merger) HeldMayWait(oid uint32) bool {
	t := m.tables[oid]
	return t != nil && t.whole && t.opened && m.hasPassed(t.snapshot, t.upTo)
}

// Note puts a table's progress into the next checkpoint.
func (m *Merger) Note(oid uint32) {
	if t := m.tables[oid]; t != nil {
		t.touch()
	}
}

// Waiting gives the waits that are to end by Release.
func (m *Merger) Waiting() []Wait {
	var list []Wait
	for _, t := range m.queue {
		if t.state == checkpoint.TableWaiting {
			list = append(list, t.wait)
		}
	}
	return list
}

// Each calls f with every table that is known, and its progress.
func (m *Merger) Each(f func(t Table, p checkpoint.TableProgress)) {
	for _, t := range m.tables {
		if !t.removed {
			f(t.def, t.progress())
		}
	}
}

// Label gives a table's name for people.
func (m *Merger) Label(oid uint32) string {
	if t := m.tables[oid]; t != nil {
		return t.def.String()
	}
	return ""
}

// Moving tells whether progress changed that no checkpoint holds yet.
func (m *Merger) Moving() bool { return len(m.dirty) > 0 }

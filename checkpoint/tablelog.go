package checkpoint

import "slices"

// tableLog is the part of a Log that holds the progress of the tables.
type tableLog struct {
	tables  map[uint32]*loggedTable // as committed
	changed map[uint32]struct{}     // of them those that the state record has otherwise
	staged  map[uint32]*loggedTable // of the transaction under way
	free    []*loggedTable
}

// loggedTable is what is known of one table.
type loggedTable struct {
	// now is the progress as a position record carries it. State is empty for a table
	// that was taken out; it stays known as long as the state record has it.
	now   TableDelta
	again [][]string // all of Again; never altered, only replaced
	base  [][]string // Again in the state record; never altered
}

// set takes p over, for which base is what the state record has. It copies what a
// caller might alter.
func (t *loggedTable) set(p TableProgress, base [][]string) {
	ranges, read := t.now.Ranges[:0], t.now.AgainRead[:0]
	t.base, t.again = base, nil
	t.now.TableProgress = p
	t.now.Ranges = append(ranges, p.Ranges...)
	if len(p.Again) > 0 {
		t.again = slices.Clone(p.Again)
	}
	t.now.AgainRead, t.now.Again = diffAgain(read, base, t.again)
}

// rebase notes that the state record holds t as it is.
func (t *loggedTable) rebase() {
	t.base, t.now.Again, t.now.AgainRead = t.again, nil, t.now.AgainRead[:0]
}

func newTableLog(tables map[uint32]TableProgress) tableLog {
	l := tableLog{
		tables:  make(map[uint32]*loggedTable, len(tables)),
		changed: make(map[uint32]struct{}),
		staged:  make(map[uint32]*loggedTable),
	}
	for oid, p := range tables {
		t := new(loggedTable)
		t.set(p, nil)
		l.tables[oid] = t
	}
	return l
}

// stage takes the tables that a transaction changes. Those of one that was not
// committed are forgotten.
func (l *tableLog) stage(tables map[uint32]TableProgress) {
	for oid, t := range l.staged {
		delete(l.staged, oid)
		l.free = append(l.free, t)
	}
	for oid, p := range tables {
		var base [][]string
		if old := l.tables[oid]; old != nil {
			base = old.base
		}
		var t *loggedTable
		if n := len(l.free); n > 0 {
			t, l.free = l.free[n-1], l.free[:n-1]
		} else {
			t = new(loggedTable)
		}
		t.set(p, base)
		l.staged[oid] = t
	}
}

// delta fills into with what the state record has otherwise.
func (l *tableLog) delta(into map[uint32]*TableDelta) {
	clear(into)
	for oid := range l.changed {
		l.tables[oid].deltaInto(into, oid)
	}
	for oid, t := range l.staged {
		t.deltaInto(into, oid)
	}
}

func (t *loggedTable) deltaInto(into map[uint32]*TableDelta, oid uint32) {
	into[oid] = nil
	if t.now.State != "" {
		into[oid] = &t.now
	}
}

// whole gives every table as the transaction under way leaves it, Again in full.
func (l *tableLog) whole() map[uint32]*TableDelta {
	all := make(map[uint32]*TableDelta, len(l.tables)+len(l.staged))
	add := func(oid uint32, t *loggedTable) {
		delete(all, oid)
		switch {
		case t.now.State == "":
		case len(t.now.AgainRead) == 0 && len(t.now.Again) == len(t.again):
			all[oid] = &t.now
		default:
			d := &TableDelta{TableProgress: t.now.TableProgress}
			d.Again = t.again
			all[oid] = d
		}
	}
	for oid, t := range l.tables {
		add(oid, t)
	}
	for oid, t := range l.staged {
		add(oid, t)
	}
	return all
}

// commit takes over what the transaction changed; state tells whether it wrote a state
// record, which then holds all of it.
func (l *tableLog) commit(state bool) {
	for oid, t := range l.staged {
		if old := l.tables[oid]; old != nil {
			l.free = append(l.free, old)
		}
		l.tables[oid] = t
		l.changed[oid] = struct{}{}
		delete(l.staged, oid)
	}
	l.free = l.free[:min(len(l.free), DefaultMaxDelta)]
	if !state {
		return
	}
	for oid, t := range l.tables {
		if t.now.State == "" {
			delete(l.tables, oid)
		} else {
			t.rebase()
		}
	}
	clear(l.changed)
}

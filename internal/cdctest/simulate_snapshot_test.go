package cdctest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
)

// simulatedSnapshot reads the tables of a simulation as a connector does that is always
// right: a row goes out as the table has it at that point of the stream.
type simulatedSnapshot struct {
	before  bool            // the slot is not there yet
	whole   map[string]bool // by topic and key: every column has been sent
	backlog []Row           // of the outbox, by id, not read yet
	heap    int             // 0: not begun; 1: rows are going out; 2: done
	rows    []Row           // of heap, still to go out
	held    []func()        // its updates and deletes meanwhile
}

// simulateSnapshot makes a database with rows, then a slot, then n transactions with
// everything read among them.
func simulateSnapshot(seed uint64, n int) (*Truth, *Log) {
	s := &simulation{rng: rand.New(rand.NewPCG(seed, 1)), truth: &Truth{Tables: FilledTables(), Final: map[string][]Row{}, Passes: map[string]int{}},
		b: newBuilder(testLayout()), rows: map[string][]Row{}, seqs: map[string]int64{}, xid: 700, commit: 0x16B3748,
		snap: &simulatedSnapshot{before: true, whole: map[string]bool{}}}
	s.transaction(0, func() {
		for i := range accounts {
			s.put(s.table("accounts"), texts(strconv.Itoa(i+1), "100.00"))
		}
		for i := range 20 {
			s.heapInsert(i / 2)
			s.event(aggregateID(i % 3))
		}
	}, true)
	for i := range 10 + n/4 {
		s.transaction(i+1, s.someOps, true)
	}
	s.clock++
	s.truth.Started = s.clock
	s.snap.before = false
	s.snap.backlog = slices.Clone(s.rows["outbox"])
	for i := range n {
		s.transaction(1000+i, s.someOps, s.rng.IntN(6) > 0)
		s.readSome()
		if s.rng.IntN(3) == 0 {
			s.b.deliver()
		}
	}
	s.readRest()
	s.transaction(5000, func() { s.put(s.table("items"), (&session{rng: s.rng}).randomRow("items", 1)) }, true)
	for _, t := range s.truth.Tables {
		s.truth.Final[t.ID()] = s.rows[t.Name]
	}
	return s.truth, s.b.log
}

func (s *simulation) wholeKey(t *Table, row Row) string { return t.Name + " " + t.canonicalRowKey(row) }

// takes tells whether the stream emits a change now, and notes what is sent with it.
func (p *simulatedSnapshot) takes(s *simulation, m meta, c Change) bool {
	t := c.Table
	switch {
	case t == nil || t.Outbox:
	case t.Keyless():
		switch {
		case p.heap == 0:
			return false // the rows will have it
		case p.heap == 1 && c.Op != 'c':
			p.held = append(p.held, func() { s.b.change(m, c, nil) })
			return false
		}
	case c.Op == 't' || c.Op == 'd':
	default:
		was := c.Old != nil && p.whole[s.wholeKey(t, c.Old)]
		lacks := c.Old != nil && slices.ContainsFunc(t.Columns, func(x Column) bool {
			return x.Big && equalText(t.value(c.Old, x.Name), t.value(c.New, x.Name))
		})
		p.whole[s.wholeKey(t, c.New)] = was || !lacks
	}
	return true
}

// readSome reads some rows of some tables, and repeats some that are out.
func (s *simulation) readSome() {
	for _, t := range s.truth.Tables {
		switch {
		case s.rng.IntN(3) > 0:
		case t.Outbox:
			s.readBacklog(1 + s.rng.IntN(4))
		case t.Keyless():
			s.readHeap(1 + s.rng.IntN(5))
		default:
			for _, row := range s.rows[t.Name] {
				if s.rng.IntN(4) == 0 {
					s.readRow(t, row)
				}
			}
		}
	}
}

func (s *simulation) readRow(t *Table, row Row) {
	if key := s.wholeKey(t, row); !s.snap.whole[key] {
		s.snap.whole[key] = true
		s.b.read(s.commit, t, row)
	}
}

func (s *simulation) readBacklog(n int) {
	for ; n > 0 && len(s.snap.backlog) > 0; n-- {
		row := s.snap.backlog[0]
		s.snap.backlog = s.snap.backlog[1:]
		if s.find(s.table("outbox"), row) >= 0 {
			s.b.read(s.commit, s.table("outbox"), row)
		}
	}
}

func (s *simulation) readHeap(n int) {
	p, t := s.snap, s.table("heap")
	if p.heap == 0 {
		p.heap, p.rows = 1, slices.Clone(s.rows["heap"])
	}
	n = min(n, len(p.rows))
	for _, row := range p.rows[:n] {
		s.b.read(s.commit, t, row)
	}
	if p.rows = p.rows[n:]; len(p.rows) > 0 || p.heap == 2 {
		return
	}
	p.heap = 2
	for _, emit := range p.held {
		emit()
	}
}

func (s *simulation) readRest() {
	for _, t := range s.truth.Tables {
		switch {
		case t.Outbox:
			s.readBacklog(1 << 30)
		case t.Keyless():
			s.readHeap(1 << 30)
		default:
			for _, row := range s.rows[t.Name] {
				s.readRow(t, row)
			}
		}
	}
}

func (s *simulation) heapInsert(a int) {
	row := texts(strconv.Itoa(a), "same")
	s.rows["heap"] = append(s.rows["heap"], row)
	s.did('c', s.table("heap"), nil, row)
}

func (s *simulation) heapOp() {
	t, rows := s.table("heap"), slices.Clone(s.rows["heap"])
	if len(rows) == 0 || s.rng.IntN(3) == 0 {
		s.heapInsert(s.rng.IntN(10))
		return
	}
	i := s.rng.IntN(len(rows))
	old := rows[i]
	if s.rng.IntN(3) == 0 {
		s.rows["heap"] = slices.Delete(rows, i, i+1)
		s.did('d', t, old, nil)
		return
	}
	rows[i] = texts(*old[0], fmt.Sprint("other ", s.rng.IntN(1000)))
	s.rows["heap"] = rows
	s.did('u', t, old, rows[i])
}

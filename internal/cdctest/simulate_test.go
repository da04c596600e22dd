package cdctest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
)

// simulation is a database that exists only as rows in memory: it makes random
// transactions, the truth about them, and the right log of them.
type simulation struct {
	rng    *rand.Rand
	truth  *Truth
	b      *builder
	rows   map[string][]Row // the state after the last transaction
	seqs   map[string]int64
	events int
	xid    uint64
	commit checkpoint.LSN
	clock  int64
	tx     *Txn
	snap   *simulatedSnapshot // nil: everything is streamed
}

func testLayout() Layout { return Layout{Prefix: "shop", Partitions: 6} }

// simulate makes n transactions from seed.
func simulate(seed uint64, n int) (*Truth, *Log) {
	s := &simulation{rng: rand.New(rand.NewPCG(seed, 1)), truth: &Truth{Tables: Tables(), Final: map[string][]Row{}},
		b: newBuilder(testLayout()), rows: map[string][]Row{}, seqs: map[string]int64{}, xid: 700, commit: 0x16B3748}
	s.transaction(0, func() {
		for i := range accounts {
			s.put(s.table("accounts"), texts(strconv.Itoa(i+1), "100.00"))
		}
	}, true)
	for i := range n {
		s.transaction(i+1, s.someOps, s.rng.IntN(6) > 0)
		if s.rng.IntN(3) == 0 {
			s.b.deliver()
		}
	}
	for _, t := range s.truth.Tables {
		s.truth.Final[t.ID()] = s.rows[t.Name]
	}
	return s.truth, s.b.log
}

func (s *simulation) table(name string) *Table { return s.truth.table("public." + name) }

func (s *simulation) transaction(index int, ops func(), commit bool) {
	s.xid++
	s.tx = &Txn{XID: s.xid, Index: index}
	rows, seqs := map[string][]Row{}, map[string]int64{}
	for k, v := range s.rows {
		rows[k] = slices.Clone(v)
	}
	for k, v := range s.seqs {
		seqs[k] = v
	}
	ops()
	if !commit {
		s.rows, s.seqs = rows, seqs
		s.truth.RolledBack = append(s.truth.RolledBack, s.tx)
		return
	}
	s.commit += checkpoint.LSN(64 + 8*s.rng.IntN(40))
	s.clock += 2
	s.tx.CommitSent, s.tx.CommitDone = s.clock-1, s.clock
	s.truth.Committed = append(s.truth.Committed, s.tx)
	if s.snap != nil && s.snap.before {
		s.tx.Commit = s.commit
		return
	}
	if s.snap != nil {
		s.tx.Commit = s.commit
	}
	xid, ts := s.xid, 1_764_550_000_000+int64(s.clock)
	m := meta{commit: s.commit, xid: &xid, ts: &ts}
	for _, c := range s.tx.Changes {
		if !s.b.layout.published(c) {
			continue
		}
		lacks := func(i int) bool {
			return c.Table != nil && c.Table.Columns[i].Big && c.Old != nil && equalText(c.Old[i], c.New[i])
		}
		if s.snap == nil || s.snap.takes(s, m, c) {
			s.b.change(m, c, lacks)
		}
		m.seq++
	}
	if s.rng.IntN(8) == 0 {
		msg := Message{"workload", "alone " + strconv.Itoa(index)}
		s.truth.Messages = append(s.truth.Messages, msg)
		s.commit += 48
		s.b.change(meta{commit: s.commit - 1}, Change{Op: 'm', Message: msg}, nil)
	}
}

func (s *simulation) did(op byte, t *Table, old, row Row) {
	s.tx.Changes = append(s.tx.Changes, Change{Op: op, Table: t, Old: old, New: row})
}

func (s *simulation) find(t *Table, row Row) int {
	return slices.IndexFunc(s.rows[t.Name], func(r Row) bool { return t.sameKey(r, row) })
}

func (s *simulation) put(t *Table, row Row) {
	i := s.find(t, row)
	if i < 0 {
		s.rows[t.Name] = append(s.rows[t.Name], row)
		s.did('c', t, nil, row)
		return
	}
	old := s.rows[t.Name][i]
	for j, c := range t.Columns {
		if c.Big && s.rng.IntN(3) > 0 {
			row[j] = old[j]
		}
	}
	s.rows[t.Name][i] = row
	s.did('u', t, old, row)
}

func (s *simulation) remove(t *Table, row Row) {
	if i := s.find(t, row); i >= 0 {
		s.did('d', t, s.rows[t.Name][i], nil)
		s.rows[t.Name] = slices.Delete(slices.Clone(s.rows[t.Name]), i, i+1)
	}
}

func (s *simulation) rekey(t *Table, from, to Row) {
	i := s.find(t, from)
	if i < 0 || s.find(t, to) >= 0 {
		return
	}
	old := s.rows[t.Name][i]
	row := slices.Clone(old)
	for j, c := range t.Columns {
		if c.Key {
			row[j] = to[j]
		}
	}
	s.rows[t.Name][i] = row
	s.did('u', t, old, row)
}

func (s *simulation) someOps() {
	session := &session{rng: s.rng} // for its random rows
	for range 1 + s.rng.IntN(5) {
		if s.snap != nil && s.rng.IntN(4) == 0 {
			s.heapOp()
			continue
		}
		name := pick(s.rng, "items", "notes", "lines", "docs", "docs", "ledger", "scratch")
		t := s.table(name)
		row, other := session.randomRow(name, 1+s.rng.IntN(12)), session.randomRow(name, 1+s.rng.IntN(12))
		if t.Columns[1].Big { // no TOAST here, so the value need not be long
			body := strings.ToValidUTF8((*row[1])[:min(30, len(*row[1]))], "")
			row[1] = &body
		}
		switch s.rng.IntN(12) {
		case 0, 1:
			s.remove(t, row)
		case 2, 3:
			s.rekey(t, row, other)
		case 4:
			s.event(aggregateID(s.rng.IntN(3)))
		case 5:
			s.money()
		case 6:
			s.tx.Changes = append(s.tx.Changes, Change{Op: 'm', Message: Message{"workload", fmt.Sprint("within ", s.xid)}})
		case 7:
			if s.rng.IntN(4) == 0 {
				s.rows["scratch"] = nil
				s.did('t', s.table("scratch"), nil, nil)
			}
		default:
			s.put(t, row)
		}
	}
}

func (s *simulation) event(aggregate string) {
	s.seqs[aggregate]++
	s.events++
	row := texts(strconv.Itoa(s.events), fmt.Sprintf("00000000-0000-4000-8000-%012d", s.events), aggregate, strconv.FormatInt(s.seqs[aggregate], 10),
		pick(s.rng, "order.paid", "order.sent"), fmt.Sprintf(`{"n": 1.%d0}`, s.rng.IntN(10)), "2026-10-19 09:31:02.114+00", "")
	row[len(row)-1] = nil
	t := s.table("outbox")
	s.did('c', t, nil, row)
	if s.rng.IntN(3) == 0 {
		s.did('d', t, row, nil) // not published
		return
	}
	s.rows[t.Name] = append(s.rows[t.Name], row)
}

func (s *simulation) money() {
	t := s.table("accounts")
	from, to := s.rng.IntN(accounts), s.rng.IntN(accounts)
	if from == to {
		return
	}
	for _, step := range [][2]int{{from, -1}, {to, 1}} {
		i, sign := step[0], step[1]
		old := s.rows[t.Name][i]
		units, _ := strconv.Atoi((*old[1])[:len(*old[1])-3])
		row := texts(*old[0], fmt.Sprintf("%d.00", units+sign))
		s.rows[t.Name] = slices.Clone(s.rows[t.Name])
		s.rows[t.Name][i] = row
		s.did('u', t, old, row)
	}
}

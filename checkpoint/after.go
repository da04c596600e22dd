package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
)

// ChangeID identifies a change for ever: the commit LSN of its source transaction and
// its index there. The zero value is before every change.
type ChangeID struct {
	CommitLSN LSN
	Seq       uint64
}

// Compare orders changes as the stream delivers them; it returns -1, 0 or 1.
func (c ChangeID) Compare(o ChangeID) int {
	return cmp.Or(c.CommitLSN.Compare(o.CommitLSN), cmp.Compare(c.Seq, o.Seq))
}

// Before tells whether c comes before o.
func (c ChangeID) Before(o ChangeID) bool { return c.Compare(o) < 0 }

// IsZero tells whether c is before every change.
func (c ChangeID) IsZero() bool { return c == ChangeID{} }

// String gives what the header "position" of the change's records says.
func (c ChangeID) String() string { return string(AppendHeader(nil, c.CommitLSN, c.Seq)) }

// Next is the first change that p does not have: those before it are delivered.
func (p Position) Next() ChangeID {
	if p.Cut.IsZero() {
		return ChangeID{CommitLSN: p.LSN}
	}
	return ChangeID{CommitLSN: p.Cut.CommitLSN, Seq: p.Cut.Changes}
}

// After is what a restart has to know of outbox rows that are marked or deleted once they
// are delivered (outbox[].after). PostgreSQL is told of no more than has been marked, so
// that the stream sends the others again; a row of it that was delivered before the restart is
// to be marked, unless this says otherwise. It is written in every position record and
// therefore kept small by whoever fills it.
type After struct {
	// Done: of the changes before it nothing is to be marked any more.
	Done ChangeID
	// Dead are those from Done on that were not delivered but put aside, in their order.
	Dead []ChangeID
	// Skipped are the stretches that somebody moved the position over, in their order:
	// nothing of them was delivered.
	Skipped []Stretch
	// Tables are those whose rows are marked, by OID.
	Tables map[uint32]AfterTable
}

// Stretch holds the changes from From on and before To.
type Stretch struct {
	From, To ChangeID
}

// Has tells whether c is one of them.
func (s Stretch) Has(c ChangeID) bool { return !c.Before(s.From) && c.Before(s.To) }

// Moved gives what holds once somebody has moved the position from was to to; nil gives
// nil. What is skipped was not delivered, and must not be marked when the stream sends it
// again for the sake of rows before it. What is behind a position that went back is
// delivered anew, whatever became of it the first time.
func (a *After) Moved(was, to Position) *After {
	if a == nil {
		return nil
	}
	old, next := was.Next(), to.Next()
	m := *a
	switch old.Compare(next) {
	case -1:
		m.Skipped = append(slices.Clone(a.Skipped), Stretch{old, next})
	case 1:
		m.Done = earlier(a.Done, next)
		m.Dead, m.Skipped, m.Tables = nil, nil, maps.Clone(a.Tables)
		for _, id := range a.Dead {
			if id.Before(next) {
				m.Dead = append(m.Dead, id)
			}
		}
		for _, s := range a.Skipped {
			if s.To = earlier(s.To, next); s.From.Before(s.To) {
				m.Skipped = append(m.Skipped, s)
			}
		}
		for oid, t := range m.Tables {
			t.From = earlier(t.From, next)
			m.Tables[oid] = t
		}
	}
	return &m
}

func earlier(a, b ChangeID) ChangeID {
	if b.Before(a) {
		return b
	}
	return a
}

// AfterTable is what After holds of one table.
type AfterTable struct {
	// From: rows of changes before it were delivered before the table's rows were to be
	// marked, or not at all.
	From ChangeID
	// Key holds the columns of Rows; nil without any.
	Key []string
	// Rows are the keys of rows that a snapshot delivered and that are not marked yet. The
	// stream does not send them again.
	Rows [][]string
}

// appendAfter appends a as a JSON object.
//
//	| field  | JSON             | meaning                                            |
//	| ------ | ---------------- | -------------------------------------------------- |
//	| done   | position         | After.Done, as in the header "position"            |
//	| dead   | [position]       | After.Dead; absent when empty                      |
//	| skipped | [[position]]    | After.Skipped, each as [from,to]; absent when empty |
//	| tables | object           | {"oid":{"from":position,"key":[text],"rows":[[text]]}} |
func appendAfter(dst []byte, a *After) []byte {
	dst = append(dst, `{"done":`...)
	dst = appendChangeID(dst, a.Done)
	if len(a.Dead) > 0 {
		dst = append(dst, `,"dead":[`...)
		for i, d := range a.Dead {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = appendChangeID(dst, d)
		}
		dst = append(dst, ']')
	}
	if len(a.Skipped) > 0 {
		dst = append(dst, `,"skipped":[`...)
		for i, s := range a.Skipped {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(appendChangeID(append(dst, '['), s.From), ',')
			dst = append(appendChangeID(dst, s.To), ']')
		}
		dst = append(dst, ']')
	}
	dst = append(dst, `,"tables":{`...)
	var room [16]uint32
	oids := slices.AppendSeq(room[:0], maps.Keys(a.Tables))
	slices.Sort(oids)
	for i, oid := range oids {
		if i > 0 {
			dst = append(dst, ',')
		}
		t := a.Tables[oid]
		dst = append(dst, '"')
		dst = strconv.AppendUint(dst, uint64(oid), 10)
		dst = append(dst, `":{"from":`...)
		dst = appendChangeID(dst, t.From)
		if len(t.Rows) > 0 {
			dst = append(dst, `,"key":`...)
			dst = appendKey(dst, t.Key)
			dst = append(dst, `,"rows":`...)
			dst = appendKeys(dst, t.Rows)
		}
		dst = append(dst, '}')
	}
	return append(dst, `}}`...)
}

func appendChangeID(dst []byte, c ChangeID) []byte {
	dst = append(dst, '"')
	dst = AppendHeader(dst, c.CommitLSN, c.Seq)
	return append(dst, '"')
}

type afterRecord struct {
	Done    *string                      `json:"done"`
	Dead    []string                     `json:"dead"`
	Skipped [][]string                   `json:"skipped"`
	Tables  map[string]*afterTableRecord `json:"tables"`
}

type afterTableRecord struct {
	From *string   `json:"from"`
	Key  jsonKey   `json:"key"`
	Rows []jsonKey `json:"rows"`
}

// after takes what appendAfter wrote out of its JSON form; nil gives nil.
func (r *afterRecord) after() (*After, error) {
	if r == nil {
		return nil, nil
	}
	bad := func(err error) (*After, error) { return nil, fmt.Errorf(`"after": %w`, err) }
	var a After
	var err error
	if a.Done, err = changeID(r.Done); err != nil {
		return bad(err)
	}
	for i := range r.Dead {
		id, err := changeID(&r.Dead[i])
		if err != nil {
			return bad(err)
		}
		if n := len(a.Dead); n > 0 && !a.Dead[n-1].Before(id) {
			return bad(errors.New(`"dead" is not in the order of the changes`))
		}
		a.Dead = append(a.Dead, id)
	}
	for _, pair := range r.Skipped {
		if len(pair) != 2 {
			return bad(fmt.Errorf(`"skipped" has an entry of %d positions`, len(pair)))
		}
		var s Stretch
		if s.From, err = changeID(&pair[0]); err == nil {
			s.To, err = changeID(&pair[1])
		}
		if err != nil {
			return bad(err)
		}
		if n := len(a.Skipped); !s.From.Before(s.To) || n > 0 && s.From.Before(a.Skipped[n-1].To) {
			return bad(errors.New(`"skipped" is not in the order of the changes`))
		}
		a.Skipped = append(a.Skipped, s)
	}
	if len(r.Tables) > 0 {
		a.Tables = make(map[uint32]AfterTable, len(r.Tables))
	}
	for name, t := range r.Tables {
		oid, err := strconv.ParseUint(name, 10, 32)
		if err != nil || strconv.FormatUint(oid, 10) != name || t == nil {
			return bad(fmt.Errorf("table %s is not an OID, or null", quote(name)))
		}
		table := AfterTable{Key: t.Key.key()}
		if table.From, err = changeID(t.From); err != nil {
			return bad(err)
		}
		if table.Rows, err = keysOf(t.Rows); err != nil {
			return bad(err)
		}
		if len(table.Rows) == 0 {
			table.Key, table.Rows = nil, nil // a key is that of rows
		} else if len(table.Key) == 0 {
			return bad(fmt.Errorf("table %s has rows and no key", quote(name)))
		}
		for _, row := range table.Rows {
			if len(row) != len(table.Key) {
				return bad(fmt.Errorf("table %s has a row of %d columns, and its key %d", quote(name), len(row), len(table.Key)))
			}
		}
		a.Tables[uint32(oid)] = table
	}
	return &a, nil
}

// changeID reads what appendChangeID wrote.
func changeID(s *string) (ChangeID, error) {
	if s == nil {
		return ChangeID{}, errors.New("a position is missing")
	}
	commit, seq, snapshot, err := ParseHeader(*s)
	if err != nil {
		return ChangeID{}, err
	}
	if snapshot {
		return ChangeID{}, fmt.Errorf("position %s is a snapshot's", quote(*s))
	}
	return ChangeID{CommitLSN: commit, Seq: seq}, nil
}

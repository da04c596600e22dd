package demo

import (
	"fmt"
	"sort"
	"sync"
)

// ghostWindow is how many changes of rolled-back transactions the Ledger
// remembers; they would arrive at once or never.
const ghostWindow = 10_000

// Ledger is the shop's own book of what it has committed, held against what
// arrives. It answers what the Checker cannot know: whether something is missing,
// and whether something arrived that was rolled back.
//
// A change is entered before its transaction ends, since it may reach the
// consumer before COMMIT has returned to the shop. All methods are safe for
// concurrent use.
type Ledger struct {
	mu      sync.Mutex
	state   map[string]state
	ghosts  []string // rolled back, oldest first
	settled chan struct{}
	missing int // committed and not arrived
	count   LedgerCount
}

// LedgerCount is what a Ledger has counted.
type LedgerCount struct {
	Committed  int // changes and events of committed transactions
	Missing    int // of these, not arrived
	RolledBack int // transactions rolled back
	Ghosts     int // changes that arrived though they were rolled back
	ByHand     int // arrived and not of the shop
}

type state uint8

const (
	open      state = iota + 1 // its transaction has not ended, or ended unknown
	early                      // arrived before its COMMIT had returned
	committed                  // to arrive
	ghost                      // never to arrive
)

// NewLedger gives an empty Ledger.
func NewLedger() *Ledger {
	return &Ledger{state: map[string]state{}, settled: make(chan struct{}, 1)}
}

// Entry is one transaction in the book. It must be ended by exactly one of
// Commit, Rollback and Unknown, and has one user.
type Entry struct {
	ledger *Ledger
	xid    uint64
	tokens []string
}

// Begin opens an entry for the source transaction xid.
func (l *Ledger) Begin(xid uint64) *Entry { return &Entry{ledger: l, xid: xid} }

// Row enters a table change.
func (t *Entry) Row(op, table string, id int64) {
	t.add(rowToken(t.xid, op, table, fmt.Sprint(id)))
}

// Event enters an outbox event.
func (t *Entry) Event(id string) { t.add("event " + id) }

func (t *Entry) add(token string) {
	t.ledger.mu.Lock()
	defer t.ledger.mu.Unlock()
	t.ledger.state[token] = open
	t.tokens = append(t.tokens, token)
}

func rowToken(xid uint64, op, table, id string) string {
	return fmt.Sprintf("%d %s %s %s", xid, op, table, id)
}

// Commit says that COMMIT has succeeded: everything entered has to arrive.
func (t *Entry) Commit() {
	l := t.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, tok := range t.tokens {
		l.count.Committed++
		if l.state[tok] == early {
			delete(l.state, tok)
			continue
		}
		l.state[tok] = committed
		l.missing++
	}
}

// Rollback says that nothing of the transaction exists: nothing may arrive.
func (t *Entry) Rollback() {
	l := t.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count.RolledBack++
	for _, tok := range t.tokens {
		if l.state[tok] == early {
			l.count.Ghosts++
		}
		l.state[tok] = ghost
		l.ghosts = append(l.ghosts, tok)
	}
	for len(l.ghosts) > ghostWindow {
		delete(l.state, l.ghosts[0])
		l.ghosts = l.ghosts[1:]
	}
}

// Unknown says that COMMIT was asked for and its answer lost. The changes may
// arrive or not, both is right.
func (t *Entry) Unknown() {
	l := t.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, tok := range t.tokens {
		delete(l.state, tok)
	}
}

// Arrive takes a record that the Checker has not seen before and says what is
// wrong with it: "" if nothing is. Tombstones are not in the book: they belong to
// the delete before them.
func (l *Ledger) Arrive(e *Event) string {
	if e.Tombstone {
		return ""
	}
	token := "event " + e.ID
	if e.Kind == KindTable {
		token = rowToken(e.XID, e.Op, e.Table, e.ShortKey())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch l.state[token] {
	case open:
		l.state[token] = early
	case committed:
		delete(l.state, token)
		if l.missing--; l.missing == 0 {
			select {
			case l.settled <- struct{}{}:
			default: // one signal says it
			}
		}
	case ghost:
		l.count.Ghosts++
		return "of a transaction that was ROLLED BACK"
	default:
		l.count.ByHand++
	}
	return ""
}

// Settled receives a value when the last missing change has arrived. The receiver
// asks Count, since more may have been committed in between.
func (l *Ledger) Settled() <-chan struct{} { return l.settled }

// Count gives the counts so far.
func (l *Ledger) Count() LedgerCount {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.count
	c.Missing = l.missing
	return c
}

// Missing names up to limit changes that are committed and have not arrived, as
// "xid op table id" or "event id", sorted.
func (l *Ledger) Missing(limit int) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var m []string
	for tok, s := range l.state {
		if s == committed {
			m = append(m, tok)
		}
	}
	sort.Strings(m)
	return m[:min(limit, len(m))]
}

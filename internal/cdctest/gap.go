package cdctest

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
)

// NoGap holds the log against the truth, transaction by transaction: every
// committed change and event is there with its keys and values, at its seq, in its
// topic; nothing else is, a rolled-back transaction's work least of all. Commit
// LSNs agree with the order of commits, as far as that is known.
//
// Snapshot rows are not looked at: they repeat what the truth has as changes. What
// they stand for may be missing: transactions from before the slot's beginning, and the
// changes of a table without a key that came no later than its last row was read.
func NoGap(log *Log, truth *Truth, l Layout) []Violation {
	f := &findings{rule: "NoGap"}
	return f.noGap(log.items(f), truth, l)
}

func (f *findings) noGap(items []item, truth *Truth, l Layout) []Violation {
	g := &gap{findings: f, truth: truth, layout: l, txns: index(truth), early: earlyTxns(items, truth), read: map[string]checkpoint.LSN{}}
	g.attribute(items)
	for _, tx := range truth.Committed {
		g.checkTxn(tx)
	}
	g.checkMessages()
	g.checkLeftovers()
	g.checkCommitOrder()
	return g.list
}

// gap is one run of NoGap.
type gap struct {
	*findings
	truth  *Truth
	layout Layout
	txns   txnIndex
	// groups holds the records of each change; what is explained is removed.
	groups map[Position][]item
	// commits holds the commit LSN that a transaction's records state, owners the
	// other way round.
	commits map[*Txn]checkpoint.LSN
	owners  map[checkpoint.LSN]*Txn
	// early tells which transactions lie before the slot's beginning.
	early func(*Txn) bool
	// read holds the position of the last snapshot row of each topic.
	read map[string]checkpoint.LSN
}

// earlyTxns tells which transactions lie before the slot's beginning, which nothing in
// the log states: those with a commit LSN below all that the stream delivered, as far
// as they were committed before the slot was seen.
func earlyTxns(items []item, truth *Truth) func(*Txn) bool {
	first := checkpoint.LSN(1<<64 - 1)
	for _, it := range items {
		if !it.pos.Snapshot {
			first = min(first, it.pos.Commit)
		}
	}
	return func(tx *Txn) bool { return tx.Commit != 0 && tx.Commit < first && tx.CommitSent < truth.Started }
}

// txnIndex finds a transaction by what its records carry.
type txnIndex struct {
	byXID      map[uint64]*Txn
	byEvent    map[string]*Txn
	rolledBack map[*Txn]bool
}

func index(truth *Truth) txnIndex {
	x := txnIndex{map[uint64]*Txn{}, map[string]*Txn{}, map[*Txn]bool{}}
	add := func(tx *Txn) {
		x.byXID[tx.XID] = tx
		for _, c := range tx.Changes {
			if c.Table != nil && c.Table.Outbox && c.Op == 'c' {
				x.byEvent[c.text(c.New, "event_id")] = tx
			}
		}
	}
	for _, tx := range truth.RolledBack {
		add(tx)
		x.rolledBack[tx] = true
	}
	for _, tx := range truth.Committed { // the later one wins: a retried event keeps its id
		add(tx)
	}
	return x
}

// attribute groups the records by position, and learns each transaction's commit
// LSN: changes state their tx_id, events are known by their id.
func (g *gap) attribute(items []item) {
	g.groups = map[Position][]item{}
	g.commits = map[*Txn]checkpoint.LSN{}
	g.owners = map[checkpoint.LSN]*Txn{}
	for _, it := range items {
		if it.pos.Snapshot {
			if it.kind == KindRead {
				g.read[it.Topic] = max(g.read[it.Topic], it.pos.Commit)
			}
			continue
		}
		g.groups[it.pos] = append(g.groups[it.pos], it)
		var tx *Txn
		switch {
		case it.kind == KindEvent:
			if tx = g.txns.byEvent[it.Headers["id"]]; tx == nil {
				g.at(it.Record, "event %s was never written", it.Headers["id"])
				continue
			}
		case it.env != nil && it.env.Source.TxID != nil:
			if tx = g.txns.byXID[*it.env.Source.TxID]; tx == nil {
				g.at(it.Record, "tx_id %d is no transaction of the workload", *it.env.Source.TxID)
				continue
			}
		default:
			continue // tombstones follow from their position
		}
		if g.txns.rolledBack[tx] {
			g.at(it.Record, "of transaction %d, which was rolled back: %s", tx.XID, shorten(it.Value))
			continue
		}
		if tx.Commit != 0 && tx.Commit != it.pos.Commit {
			g.at(it.Record, "transaction %d has commit LSN %s here, the WAL says %s", tx.XID, it.pos.Commit, tx.Commit)
			continue
		}
		if was, ok := g.commits[tx]; ok && was != it.pos.Commit {
			g.at(it.Record, "transaction %d has commit LSN %s here and %s elsewhere", tx.XID, it.pos.Commit, was)
			continue
		}
		if was, ok := g.owners[it.pos.Commit]; ok && was != tx {
			g.at(it.Record, "commit LSN %s is of transaction %d here and of %d elsewhere", it.pos.Commit, tx.XID, was.XID)
			continue
		}
		g.commits[tx], g.owners[it.pos.Commit] = it.pos.Commit, tx
	}
}

// checkTxn compares a committed transaction's records with its changes.
func (g *gap) checkTxn(tx *Txn) {
	commit, found := g.commits[tx]
	if !found && g.early(tx) {
		return
	}
	if !found && tx.Commit != 0 {
		commit, found = tx.Commit, true // each change will be said to be missing, unless a snapshot has it
	}
	seq := uint64(0)
	for i, c := range g.asDecoded(tx, commit) {
		pos := Position{Commit: commit, Seq: seq}
		seq++
		if !g.layout.delivered(c) {
			continue // a record at pos stays among the leftovers
		}
		what := fmt.Sprintf("transaction %d (session %d, number %d) change %d: %s", tx.XID, tx.Session, tx.Index, i, describe(c))
		if !found {
			g.add(what, "missing, as the whole transaction")
			return
		}
		recs := g.groups[pos]
		delete(g.groups, pos)
		if len(recs) == 0 && c.Table != nil && c.Table.Keyless() && commit <= g.read[g.layout.topic(c)] {
			continue // contained in the rows
		}
		if len(recs) == 0 {
			g.add(what, "missing: no record at %s", pos)
			continue
		}
		g.checkChange(what, c, recs)
	}
}

// asDecoded gives the changes that the publication sends, in the order in which
// PostgreSQL decodes them: that in which they were made, with one exception. Decoding
// merges a transaction and its subtransactions by the changes' LSNs, and a message's is
// the end of its record (seen on 15), which is where the next change begins. Where a
// savepoint lies between the two, either may come first; LSNs that are equal prove it (an event does not state its own).
func (g *gap) asDecoded(tx *Txn, commit checkpoint.LSN) []Change {
	var list []Change
	for _, c := range tx.Changes {
		if g.layout.published(c) {
			list = append(list, c)
		}
	}
	lsn := func(seq int) (lsn checkpoint.LSN, message bool) {
		for _, it := range g.groups[Position{Commit: commit, Seq: uint64(seq)}] {
			if it.env != nil && it.env.Source.LSN != nil {
				return *it.env.Source.LSN, it.kind == KindMessage
			}
		}
		return 0, false
	}
	for i := 0; i+1 < len(list); i++ {
		if list[i].Op != 'm' || list[i+1].Op == 'm' {
			continue
		}
		first, isMessage := lsn(i)
		second, nextIsMessage := lsn(i + 1)
		if !isMessage && nextIsMessage && (first == 0 || first == second) {
			list[i], list[i+1] = list[i+1], list[i]
			i++
		}
	}
	return list
}

func describe(c Change) string {
	if c.Table == nil {
		return fmt.Sprintf("m %q", c.Message.Prefix)
	}
	row := c.New
	if row == nil {
		row = c.Old
	}
	if row == nil {
		return fmt.Sprintf("%c %s", c.Op, c.Table.ID())
	}
	return fmt.Sprintf("%c %s %s", c.Op, c.Table.ID(), c.Table.canonicalRowKey(row))
}

// checkChange compares the records at one position with the change that was made.
func (g *gap) checkChange(what string, c Change, recs []item) {
	topic := g.layout.topic(c)
	for _, it := range recs {
		if it.Topic != topic {
			g.at(it.Record, "%s belongs in topic %s", what, topic)
		}
	}
	want := g.expect(c)
	slices.SortStableFunc(recs, func(a, b item) int { return cmp.Compare(rank(a.kind), rank(b.kind)) })
	for len(recs) > 0 || len(want) > 0 {
		switch {
		case len(want) == 0 || len(recs) > 0 && rank(recs[0].kind) < rank(want[0].kind):
			g.at(recs[0].Record, "%s: a record %c too many", what, recs[0].kind)
			recs = recs[1:]
		case len(recs) == 0 || recs[0].kind != want[0].kind:
			g.add(what, "its record %c is missing at %s", want[0].kind, g.layout.topic(c))
			want = want[1:]
		default:
			for _, problem := range want[0].problems(recs[0]) {
				g.at(recs[0].Record, "%s: %s", what, problem)
			}
			recs, want = recs[1:], want[1:]
		}
	}
}

// rank orders the records of one change as they are delivered; the create of a key
// change may lie in another partition, so offsets do not tell.
func rank(k Kind) int {
	switch k {
	case KindDelete:
		return 0
	case KindTombstone:
		return 1
	case KindCreate:
		return 2
	default:
		return 3
	}
}

// checkMessages looks for the messages that are not transactional.
func (g *gap) checkMessages() {
	left := map[Message]int{}
	for _, m := range g.truth.Messages {
		if g.layout.capturedMessage(m.Prefix) {
			left[m]++
		}
	}
	for _, m := range g.truth.EarlyMessages {
		if g.layout.capturedMessage(m.Prefix) {
			left[m]++ // may be there
		}
	}
	for pos, recs := range g.groups {
		it := recs[0]
		if len(recs) != 1 || it.kind != KindMessage || it.env.Message.Transactional {
			continue
		}
		m := Message{it.env.Message.Prefix, string(it.env.Message.Content)}
		if left[m] == 0 {
			continue // a leftover
		}
		left[m]--
		delete(g.groups, pos)
		want := expected{kind: KindMessage, key: messageKey(m), message: &MessageBody{Prefix: m.Prefix, Content: []byte(m.Content)}}
		for _, problem := range want.problems(it) {
			g.at(it.Record, "%s", problem)
		}
		if topic := g.layout.topic(Change{Op: 'm', Message: m}); it.Topic != topic {
			g.at(it.Record, "a message belongs in topic %s", topic)
		}
		if pos.Seq != 0 || it.env.Source.TxID != nil || it.env.TsMs != nil {
			g.at(it.Record, "a message that is not transactional has seq 0, no tx_id and no ts_ms")
		}
	}
	for _, m := range g.truth.EarlyMessages {
		left[m]--
	}
	for m, n := range left {
		if n > 0 {
			g.add(fmt.Sprintf("message %q %s", m.Prefix, shorten([]byte(m.Content))), "missing %d times", n)
		}
	}
}

// checkLeftovers objects to every record that nothing explains. Those of unknown
// and rolled-back transactions were reported as such already, which is no reason
// to leave them out: the list is short if the log is right.
func (g *gap) checkLeftovers() {
	for _, recs := range g.groups {
		for _, it := range recs {
			g.at(it.Record, "no committed change explains %c %s at %s", it.kind, shorten(it.Key), it.pos)
		}
	}
}

// checkCommitOrder walks the transactions by commit LSN: none may have returned
// from its COMMIT before one with a smaller LSN had sent its own.
func (g *gap) checkCommitOrder() {
	txns := make([]*Txn, 0, len(g.commits))
	for tx := range g.commits {
		txns = append(txns, tx)
	}
	slices.SortFunc(txns, func(a, b *Txn) int { return g.commits[a].Compare(g.commits[b]) })
	var last *Txn // of those before, the one that sent its COMMIT last
	for _, tx := range txns {
		if last != nil && tx.CommitDone < last.CommitSent {
			g.add(fmt.Sprintf("transaction %d", tx.XID), "its commit LSN %s is above %s of transaction %d, which sent its COMMIT only after this one's had returned",
				g.commits[tx], g.commits[last], last.XID)
		}
		if last == nil || tx.CommitSent > last.CommitSent {
			last = tx
		}
	}
}

package relay

import (
	"fmt"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// history makes sure that what the server sends again is what was delivered. A database that
// was put back to an older state of itself, as from a volume's snapshot, has the same system
// identifier and timeline; once it has written as much as it had before, its LSNs look as if
// nothing had happened, and what it committed below the checkpoint would be taken for
// delivered.
//
// What tells it is the transaction that was delivered last: it has to be sent again, at its
// LSN and with its commit time, where the slot stands before it.
type history struct {
	last  checkpoint.Position     // of the checkpoint
	slot  checkpoint.LSN          // where the server begins to send
	later replication.Transaction // one before it in the WAL that was committed later
}

// clockSlack is how much earlier than another, which stands before it in the WAL, a
// transaction may have been committed: its time is taken before its commit record is written.
const clockSlack = 100 * time.Millisecond

// newHistory gives nil where nothing is sent again that could tell.
func newHistory(p checkpoint.Position, slot checkpoint.LSN) *history {
	if p.CommitTime.IsZero() || slot > p.CommitLSN {
		return nil
	}
	return &history{last: p, slot: slot}
}

// begins takes a source transaction that begins. over tells that nothing more is to be
// looked at.
func (h *history) begins(txn *replication.Transaction) (over bool, err error) {
	switch {
	case txn.CommitLSN < h.last.CommitLSN:
		if h.later.CommitLSN == 0 && txn.CommitTime.Sub(h.last.CommitTime) > clockSlack {
			h.later = *txn
		}
		return false, nil
	case txn.CommitLSN > h.last.CommitLSN:
		return true, h.passed()
	case !txn.CommitTime.Equal(h.last.CommitTime):
		return true, h.refusal(fmt.Sprintf("what the server has there was committed at %s", txn.CommitTime.UTC().Format(time.RFC3339Nano)))
	}
	return true, nil
}

// reached takes an LSN up to which everything has been sent.
func (h *history) reached(lsn checkpoint.LSN) (over bool, err error) {
	if lsn <= h.last.CommitLSN {
		return false, nil
	}
	return true, h.passed()
}

// passed is called where the transaction did not come. That alone proves nothing: it may have
// held only what is not asked for any more, such as messages.
func (h *history) passed() error {
	if h.later.CommitLSN == 0 {
		return nil
	}
	return h.refusal(fmt.Sprintf("the server has none there, and one with commit LSN %s that was committed later, at %s",
		h.later.CommitLSN, h.later.CommitTime.UTC().Format(time.RFC3339Nano)))
}

func (h *history) refusal(found string) error {
	return &checkpoint.Refusal{
		What: fmt.Sprintf("the WAL below the checkpoint is not what was delivered: the last transaction delivered has commit LSN %s and was committed at %s; %s",
			h.last.CommitLSN, h.last.CommitTime.UTC().Format(time.RFC3339Nano), found),
		Risk: fmt.Sprintf("the database was put back to an older state (a volume's or a virtual machine's snapshot): what was committed since then below %s would be taken for delivered, "+
			"and Kafka has changes that the database does not have", h.last.LSN),
		Remedy: fmt.Sprintf("walrelay checkpoint set -c FILE --lsn %s goes on where the slot stands, so that nothing is left out, and walrelay snapshot -c FILE --table T --replace makes each topic equal to its table; "+
			"walrelay verify -c FILE names the differences", h.slot),
	}
}

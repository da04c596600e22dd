package relay

import (
	"testing"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/snapshot"
)

// A publication that a session did not name is named by the next one only when nothing
// of what that is sent again was delivered without it.
func TestAPublicationIsNamedBehindWhatWasDeliveredWithoutIt(t *testing.T) {
	for _, c := range []struct {
		name      string
		delivered checkpoint.Position
		confirmed checkpoint.LSN
		want      bool
	}{
		{"a cut transaction", checkpoint.Position{LSN: 200, CommitLSN: 250, Cut: checkpoint.Cut{CommitLSN: 250, Changes: 7}}, 200, false},
		{"the slot is held back", checkpoint.Position{LSN: 300, CommitLSN: 290}, 200, false},
		{"nothing is sent again", checkpoint.Position{LSN: 300, CommitLSN: 290}, 300, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newAfterBench(t, checkpoint.Checkpoint{Position: checkpoint.Beginning(100)})
			l := b.l
			l.s.named = []string{"p"}
			limits := router.Limits{Bytes: 1 << 20, Records: 1 << 20}
			l.after = b.after
			l.filling, l.spare = router.NewBatch(limits), router.NewBatch(limits)
			l.merging = &merging{l: l, merger: snapshot.NewMerger(snapshot.Options{}, l.pos.LSN)}
			l.work = make(chan delivery, 1)
			l.publish = []checkpoint.Publication{{Name: "p", Horizon: 50}, {Name: "p_insert", Horizon: 150}}
			l.pos, l.endedAt = c.delivered, time.Time{}
			l.advance(true)
			l.maybeDeliver(true)
			cp := (<-l.work).cp

			next := &session{r: l.s.r, facts: replication.Facts{Publication: "p", SlotFound: true, Checkpoint: cp, Slot: replication.Slot{ConfirmedFlush: c.confirmed}}}
			got, err := next.nameable(t.Context(), cp.Publications[1])
			if err != nil || got != c.want {
				t.Errorf("it can be named: %t, %v; want %t", got, err, c.want)
			}
			if main, err := next.nameable(t.Context(), cp.Publications[0]); err != nil || !main {
				t.Errorf("the one that was named can be: %t, %v", main, err)
			}
		})
	}
}

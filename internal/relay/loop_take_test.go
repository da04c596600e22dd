package relay

import (
	"testing"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/snapshot"
)

// A run that is told to stop while a crowd of dead letters in an open transaction waits for
// the delivery of what is complete has dropped them: no position says that they are delivered.
func TestDroppedDeadLettersAreNotCut(t *testing.T) {
	b := newAfterBench(t, checkpoint.Checkpoint{Position: checkpoint.Beginning(100)}, "outbox")
	l := b.l
	limits := router.Limits{Bytes: 1 << 20, Records: 1 << 20}
	l.after = b.after
	l.filling, l.spare = router.NewBatch(limits), router.NewBatch(limits)
	l.merging = &merging{l: l, merger: snapshot.NewMerger(snapshot.Options{}, l.pos.LSN)}
	l.work = make(chan delivery, 1)

	complete := checkpoint.Position{LSN: 200, CommitLSN: 190}
	l.pos = complete
	l.advance(true)
	// The next transaction: as many dead letters as a checkpoint takes.
	for seq := range uint64(maxAfterKept) {
		b.dead = append(b.dead, checkpoint.ChangeID{CommitLSN: 300, Seq: seq})
		l.tail, l.tailTime = checkpoint.Cut{CommitLSN: 300, Changes: seq + 1}, time.Unix(1000, 0)
		l.limit()
	}
	if !l.stalled || l.pos != complete {
		t.Fatalf("the batch waits: %t, at %s; want it to, at %s", l.stalled, l.pos, complete)
	}
	var stop <-chan struct{}
	var budget <-chan time.Time
	l.stop(&stop, &budget)
	l.maybeDeliver(false)
	if d := <-l.work; d.cp.Position != complete {
		t.Errorf("delivered %s, want %s", d.cp.Position, complete)
	}
	if l.filling.Moved() || l.pos != complete {
		t.Errorf("after the delivery the position is %s, to be delivered: %t; want %s, and nothing left", l.pos, l.filling.Moved(), complete)
	}
}

package relay

import (
	"context"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/killpoint"
	"github.com/walrelay/walrelay/router"
)

// delivery is a batch on its way, with the checkpoint after it.
type delivery struct {
	batch *router.Batch
	cp    checkpoint.Checkpoint
}

// idleInterval is how often a position moves that no records go with: WAL of other
// databases, or changes that are all excluded.
const idleInterval = 2 * time.Second

// settle ends a run only when its last batch can be seen, so that whoever waited for
// the exit finds everything. Other producers of the same topics may have transactions
// open for longer, so it is bounded, and no failure.
func (l *loop) settle(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, settleBudget)
	defer cancel()
	if err := l.s.producer.Settle(ctx); err != nil {
		l.s.log.Debug().Err(err).Msg("the last batch is committed and not visible everywhere yet")
	}
}

// settleBudget is ten times what a broker takes for its markers when it is busy.
const settleBudget = 2 * time.Second

// abandonAfter is how long a delivery may go on after the stream has ended.
const abandonAfter = 3 * time.Second

// deliver runs in its own goroutine, so that the next batch fills meanwhile.
func (l *loop) deliver(ctx context.Context) {
	for d := range l.work {
		l.done <- l.s.producer.Deliver(ctx, d.batch, &d.cp)
	}
}

func (l *loop) awaitDelivery(budget time.Duration) {
	t := time.NewTimer(budget)
	defer t.Stop()
	select {
	case err := <-l.done:
		if err == nil {
			_ = l.delivered() // that another publication can be named now is the next session's to see
		}
	case <-t.C:
	}
}

func (l *loop) advance(ends bool) {
	l.filling.Advance(l.pos, ends)
	l.stalled = l.stalled || l.filling.Full() || l.after.crowded()
}

// maybeDeliver starts the delivery of the batch in hand if it is time to.
func (l *loop) maybeDeliver(drained bool) {
	if !l.filling.Moved() && !l.published && !l.merging.moving() && !l.after.moving() || !l.due(drained) {
		return
	}
	b := l.filling
	if !b.Moved() {
		b.Stand(l.committed) // only the publications are news
	}
	b.MoveTail(l.spare)
	l.filling, l.spare, l.inFlight = l.spare, nil, b
	l.stalled, l.urgent, l.published = false, false, false
	l.filledAt = time.Now()
	l.publish = l.s.unnamed(l.publish, b.Position())
	cp := checkpoint.Checkpoint{Position: b.Position(), Source: l.s.source, Publications: l.publish, Rewound: l.rewound, Anchor: l.s.r.anchorAt()}
	l.merging.checkpoint(&cp)
	l.after.checkpoint(&cp)
	if l.filling.Tail() {
		l.limit() // not without one: what a stop has dropped is nobody's to cut
	}
	l.s.r.stall.Delivering(l.filledAt)
	l.work <- delivery{batch: b, cp: cp}
}

// due tells whether the batch in hand leaves now. On a quiet stream it leaves at once;
// on a busy one it fills for max-delay, so that transactions share a Kafka
// transaction; while more keeps arriving, for longer: then the stream is behind, and
// larger batches catch up faster.
func (l *loop) due(drained bool) bool {
	if l.stopping || l.stalled || l.published || l.merging.due(drained) || drained && l.after.moving() {
		return true
	}
	if l.merging.rowsComing() && !l.filling.Tail() && l.filling.Transactions() == 0 {
		drained = false // nothing but rows, and more of them are about to come
	}
	now := time.Now()
	if !l.filling.Ready() {
		return drained && (l.urgent || l.s.target > 0 && l.pos.LSN >= l.s.target) || now.Sub(l.endedAt) >= idleInterval
	}
	age := now.Sub(l.filledAt)
	if drained {
		return age >= l.s.r.o.MaxDelay || now.Sub(l.endedAt) >= l.s.r.o.MaxDelay
	}
	return age >= behindFactor*l.s.r.o.MaxDelay
}

// behindFactor times max-delay is how long a batch fills while more keeps arriving.
const behindFactor = 20

// nextWake is when due has to be asked again though nothing arrives; 0 for never.
func (l *loop) nextWake(paused time.Time) time.Duration {
	wake := l.merging.wake()
	if d := l.after.wake(); d > 0 && (wake == 0 || d < wake) {
		wake = d
	}
	if !paused.IsZero() {
		if d := max(paused.Sub(l.now), time.Millisecond); wake == 0 || d < wake {
			wake = d
		}
	}
	if d := l.deliveryWake(); d > 0 && (wake == 0 || d < wake) {
		wake = d
	}
	return wake
}

func (l *loop) deliveryWake() time.Duration {
	if l.inFlight != nil || l.stopping || !l.filling.Moved() {
		return 0
	}
	now := time.Now()
	if !l.filling.Ready() {
		return max(idleInterval-now.Sub(l.endedAt), time.Millisecond)
	}
	age := max(now.Sub(l.filledAt), now.Sub(l.endedAt))
	return max(l.s.r.o.MaxDelay-age, 10*time.Microsecond)
}

// delivered notes a committed batch and confirms it.
func (l *loop) delivered() error {
	b := l.inFlight
	l.inFlight, l.spare = nil, b
	l.committed = b.Position()
	l.merging.delivered()
	l.after.deliveredBatch()
	l.endedAt = time.Now()
	// Invariant 1 (durable before confirmed): the checkpoint with this position is
	// committed. While a transaction is cut the LSN is the end of the one before it.
	l.confirm()
	killpoint.At(killpoint.Confirmed)
	l.s.r.delivered(b, l.committed)
	b.Reset()
	// Not while the run ends, which would leave the batch in hand; nor before the horizon
	// is in a checkpoint, where the next session finds it.
	return l.nameMore()
}

// nameMore ends the session where the next one can name another publication.
func (l *loop) nameMore() error {
	if !l.stopping && !l.published && l.inFlight == nil && l.s.waitingPublications(l.publish, l.confirmable()) {
		return errPublicationsReady
	}
	return nil
}

// confirm lets PostgreSQL forget what is delivered, as far as the snapshot and outbox rows
// that are not marked yet let it.
//
// Invariant 1 (durable before confirmed): never beyond what is committed.
func (l *loop) confirm() {
	if l.past != nil {
		return // what the server would forget may be what was never delivered
	}
	lsn := l.confirmable()
	l.s.stream.Confirm(lsn)
	l.s.r.setConfirmed(lsn)
}

func (l *loop) confirmable() checkpoint.LSN {
	return l.after.free(min(l.committed.LSN, l.merging.free))
}

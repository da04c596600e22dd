package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/phase"
	"github.com/walrelay/walrelay/router"
)

// loop is the one loop: it takes events from the stream, routes them into a batch,
// and hands batches to the deliverer. It owns router and batches without a lock.
//
// While one batch is delivered the next one fills; when that one is full too, the
// loop takes no more events, the stream's queue fills, the receiver stops reading,
// and the walsender waits: that is all of the back-pressure.
type loop struct {
	s *session

	filling  *router.Batch
	spare    *router.Batch // empty while nothing is being delivered
	inFlight *router.Batch // nil while nothing is being delivered
	work     chan delivery
	done     chan error

	// pos is the position after everything appended to batches; committed is what
	// Kafka has.
	pos       checkpoint.Position
	committed checkpoint.Position

	skipTxn     bool           // the open source transaction was delivered before
	skipChanges uint64         // changes at its start that were
	tail        checkpoint.Cut // the open source transaction and its changes routed so far
	tailTime    time.Time      // its commit time

	past    *history       // what is sent again; nil once it is known
	sent    checkpoint.LSN // up to here the stream has sent everything
	inTxn   bool           // a source transaction is open
	now     time.Time      // of this round
	merging *merging
	after   *after

	urgent    bool      // the server waits for a confirm
	filledAt  time.Time // when the batch in hand got its first record
	endedAt   time.Time // when the last delivery ended
	stalled   bool      // the batch in hand must leave before another event is taken
	stopping  bool
	failed    error // a change that may not be put aside; the run ends with it
	horizons  <-chan checkpoint.Publication
	news      <-chan news
	lost      <-chan error // the primary, where that is not the source
	publish   []checkpoint.Publication
	rewound   checkpoint.LSN // of the last --from-lsn
	published bool           // publish changed and is not in a checkpoint yet
}

// errPublicationsReady ends a session so that the next one names a publication whose
// horizon the slot has reached.
var errPublicationsReady = errors.New("another publication can be named now")

// errNewOutbox ends a session so that the next one reads what was written to an outbox table
// before it was published.
var errNewOutbox = errors.New("an outbox table is new")

func newLoop(s *session, cp checkpoint.Checkpoint) *loop {
	return &loop{
		s:         s,
		filling:   router.NewBatch(s.r.o.Limits),
		spare:     router.NewBatch(s.r.o.Limits),
		work:      make(chan delivery),
		done:      make(chan error, 1),
		pos:       cp.Position,
		committed: cp.Position,
		publish:   cp.Publications,
		rewound:   cp.Rewound,
		past:      newHistory(cp.Position, s.facts.Slot.ConfirmedFlush),
		sent:      s.facts.Slot.ConfirmedFlush,
		now:       time.Now(),
	}
}

// run streams until the context ends (then it finishes the batch in hand), until
// the target is reached, or until something breaks.
func (l *loop) run(ctx context.Context) error {
	// Invariant 5: a delivery under way is not cut off by the signal to stop, only by
	// its budget, or its outcome would be unknown.
	deliverCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		l.deliver(deliverCtx)
	}()
	err := l.stream(ctx)
	defer l.s.r.stall.Delivering(time.Time{})
	if err != nil && l.inFlight != nil && !l.stopping { // stopping has had its budget
		// Whatever comes of it, the next session reads it from the checkpoint.
		l.awaitDelivery(abandonAfter)
	}
	cancel(errLoopEnded)
	close(l.work)
	<-finished
	if err == nil || l.failed != nil {
		l.settle(context.WithoutCancel(ctx))
	}
	return err
}

var errLoopEnded = errors.New("the stream has ended")

func (l *loop) stream(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var budget <-chan time.Time // set once the signal to stop has come
	stop := ctx.Done()
	for {
		l.now = time.Now()
		if err := l.merging.pump(); err != nil {
			return err
		}
		drained, paused, err := l.takeEvents(ctx)
		if isStop(err) {
			// What was committed before the change is not held up by it.
			l.failed = err
			l.stop(&stop, &budget)
		} else if err != nil {
			return err
		}
		if !paused.IsZero() {
			// What the stream has just come to stand still for is asked for now: nothing may
			// arrive before the pause is over.
			if err := l.merging.pump(); err != nil {
				return err
			}
		}
		if l.between() && !l.stalled && !l.stopping {
			if err := l.merging.emit(ctx); err != nil {
				return err
			}
		}
		if l.inFlight == nil {
			if l.finished() {
				return l.failed
			}
			l.maybeDeliver(drained)
		}
		l.after.pump()
		l.s.r.observe(l)
		wait := timer.C
		if wake := l.nextWake(paused); wake > 0 {
			timer.Reset(wake)
		} else {
			wait = nil
		}
		ready := l.s.stream.Ready()
		if l.stalled || l.stopping || !paused.IsZero() {
			ready = nil
		}
		block := drained || l.stalled || l.stopping
		if l.merging.rowsComing() && !l.stalled && !l.stopping && l.between() {
			block = false
		}
		if err := l.wait(block, ready, wait, &stop, &budget); err != nil {
			return err
		}
	}
}

// wait blocks until something happens, or, where block is false, only looks.
func (l *loop) wait(block bool, ready <-chan struct{}, wake <-chan time.Time, stop *<-chan struct{}, budget *<-chan time.Time) error {
	if !block {
		select {
		case err := <-l.done:
			return l.ended(err)
		case p := <-l.horizons:
			return l.horizon(p)
		case n := <-l.news:
			return l.hear(n)
		case <-l.after.marker.Done():
			return l.marked()
		case err := <-l.lost:
			return err
		case <-*stop:
			l.stop(stop, budget)
		default:
		}
		return nil
	}
	select {
	case <-ready:
	case <-wake:
	case err := <-l.done:
		return l.ended(err)
	case p := <-l.horizons:
		return l.horizon(p)
	case n := <-l.news:
		return l.hear(n)
	case err := <-l.lost:
		return err
	case c := <-l.merging.readers.Chunks():
		l.now = time.Now()
		return l.merging.arrived(c)
	case <-l.after.marker.Done():
		l.now = time.Now()
		return l.marked()
	case <-*stop:
		l.stop(stop, budget)
	case <-*budget:
		if l.failed != nil {
			return l.failed
		}
		return fmt.Errorf("stop: the batch in hand was not delivered within stop-timeout (%s); nothing is lost, the next start delivers it", l.s.r.o.StopTimeout)
	}
	return nil
}

// between tells whether the stream is between source transactions. One that a restart
// finds cut has begun: rows, whose positions would be above those of its rest, wait for
// that, and so the stream must not stand still for them before.
func (l *loop) between() bool { return !l.inTxn && l.pos.Cut.IsZero() }

// marked takes what became of outbox rows.
func (l *loop) marked() error {
	l.after.back()
	l.confirm()
	return l.nameMore()
}

// stop begins the orderly end: no more events, the batch in hand without its open
// transaction, within the budget.
func (l *loop) stop(stop *<-chan struct{}, budget *<-chan time.Time) {
	l.stopping = true
	*stop = nil
	*budget = time.After(l.s.r.o.StopTimeout)
	l.filling.DropTail()
	l.s.r.setPhase(phase.Stopping)
}

// isStop tells that err is about a change that can neither be delivered nor be put aside.
func isStop(err error) bool {
	var stop *router.StopError
	return errors.As(err, &stop)
}

// finished tells whether the loop has nothing left to do.
func (l *loop) finished() bool {
	switch {
	case l.stopping:
		return !l.filling.Moved() && l.after.rest()
	case l.s.target > 0:
		return l.committed.LSN >= l.s.target && l.merging.finished() && l.after.rest()
	case l.s.r.o.Snapshot.Only:
		return l.merging.finished() && l.after.rest()
	}
	return false
}

// ended takes the outcome of the delivery under way.
func (l *loop) ended(err error) error {
	l.s.r.stall.Delivering(time.Time{})
	if err != nil {
		l.inFlight = nil
		return onKafka(l.s.explainFence(err))
	}
	return l.delivered()
}

// hear takes what the monitor found.
func (l *loop) hear(n news) error {
	l.now = time.Now()
	if n.down != nil && (l.merging.merger.Active() || l.after.waitsForMarks()) {
		// The server is shutting down, and waits for a confirm that the snapshot, or rows that
		// cannot be marked any more, do not let us give: without us it ends at once.
		return n.down
	}
	l.merging.news(n)
	if l.merging.newOutbox {
		return errNewOutbox
	}
	return nil
}

// horizon takes a publication's horizon into the next checkpoint.
func (l *loop) horizon(p checkpoint.Publication) error {
	next := append([]checkpoint.Publication(nil), l.publish...)
	for i := range next {
		if next[i].Name == p.Name {
			next[i] = p
		}
	}
	l.publish, l.published = next, true
	return nil
}

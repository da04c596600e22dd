package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/killpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/snapshot"
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
	horizons  <-chan checkpoint.Publication
	news      <-chan news
	lost      <-chan error // the primary, where that is not the source
	publish   []checkpoint.Publication
	rewound   checkpoint.LSN // of the last --from-lsn
	published bool           // publish changed and is not in a checkpoint yet
}

// delivery is a batch on its way, with the checkpoint after it.
type delivery struct {
	batch *router.Batch
	cp    checkpoint.Checkpoint
}

// idleInterval is how often a position moves that no records go with: WAL of other
// databases, or changes that are all excluded.
const idleInterval = 2 * time.Second

// eventsPerLook is how many events are taken between two looks at everything else.
const eventsPerLook = 256

// eventsPerTxn is how many are taken, at most, to come to the end of a source transaction:
// rows of a snapshot go out only there, and a stream that never pauses must not keep them.
const eventsPerTxn = 16 * eventsPerLook

// errPublicationsReady ends a session so that the next one names a publication whose
// horizon the slot has reached.
var errPublicationsReady = errors.New("another publication can be named now")

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
	defer l.s.r.delivering(time.Time{})
	if err != nil && l.inFlight != nil && !l.stopping { // stopping has had its budget
		// Whatever comes of it, the next session reads it from the checkpoint.
		l.awaitDelivery(abandonAfter)
	}
	cancel(errLoopEnded)
	close(l.work)
	<-finished
	if err == nil {
		l.settle(context.WithoutCancel(ctx))
	}
	return err
}

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

var errLoopEnded = errors.New("the stream has ended")

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
		if err != nil {
			return err
		}
		if !paused.IsZero() {
			// What the stream has just come to stand still for is asked for now: nothing may
			// arrive before the pause is over.
			if err := l.merging.pump(); err != nil {
				return err
			}
		}
		if !l.inTxn && !l.stalled && !l.stopping {
			if err := l.merging.emit(ctx); err != nil {
				return err
			}
		}
		if l.inFlight == nil {
			if l.finished() {
				return nil
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
		if l.merging.rowsComing() && !l.stalled && !l.stopping && !l.inTxn {
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
			l.after.back()
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
		l.after.back()
	case <-*stop:
		l.stop(stop, budget)
	case <-*budget:
		return fmt.Errorf("stop: the batch in hand was not delivered within stop-timeout (%s); nothing is lost, the next start delivers it", l.s.r.o.StopTimeout)
	}
	return nil
}

// stop begins the orderly end: no more events, the batch in hand without its open
// transaction, within the budget.
func (l *loop) stop(stop *<-chan struct{}, budget *<-chan time.Time) {
	l.stopping = true
	*stop = nil
	*budget = time.After(l.s.r.o.StopTimeout)
	l.filling.DropTail()
	l.s.r.setPhase(PhaseStopping)
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

// takeEvents routes what has arrived, up to a bound. drained tells that nothing more
// is there at the moment, or is to be taken: the stream stands still for the snapshot's
// sake until paused, which is not zero then.
func (l *loop) takeEvents(ctx context.Context) (drained bool, paused time.Time, err error) {
	for n := 0; n < eventsPerLook || l.inTxn && n < eventsPerTxn && l.merging.merger.Active(); n++ {
		if l.stalled || l.stopping {
			return false, paused, nil
		}
		if !l.inTxn {
			if stand, until := l.merging.paused(); stand {
				if until.IsZero() {
					until = l.now.Add(time.Second)
				}
				return true, until, nil
			}
		}
		if !l.after.mayTake() {
			return true, l.now.Add(time.Second), nil
		}
		ev, err := l.s.stream.TryNext()
		if err != nil {
			return false, paused, err
		}
		if ev == nil {
			return true, paused, nil
		}
		if err := l.take(ctx, ev); err != nil {
			return false, paused, err
		}
	}
	return false, paused, nil
}

func (l *loop) take(ctx context.Context, ev *replication.Event) error {
	switch ev.Kind {
	case replication.KindBegin:
		l.skipTxn = l.pos.HasTransaction(ev.Txn.CommitLSN)
		l.skipChanges = l.pos.Skip(ev.Txn.CommitLSN)
		l.inTxn = true
		l.after.begin()
		l.merging.merger.Begin(ev.Txn.XID, l.sent)
	case replication.KindChange:
		return l.change(ctx, ev)
	case replication.KindCommit:
		l.inTxn = false
		l.reached(ev.Txn.EndLSN)
		if l.skipTxn {
			l.skipTxn = false
			return nil
		}
		l.pos = checkpoint.Position{LSN: ev.Txn.EndLSN, CommitLSN: ev.Txn.CommitLSN, CommitTime: ev.Txn.CommitTime}
		l.advance(true)
	case replication.KindProgress:
		l.urgent = l.urgent || ev.Urgent
		l.reached(ev.LSN)
		if ev.LSN > l.pos.LSN {
			l.pos.LSN = ev.LSN
			l.advance(false)
		}
	}
	return nil
}

// reached notes that the stream has sent everything that ends at or before lsn.
func (l *loop) reached(lsn checkpoint.LSN) {
	l.sent = max(l.sent, lsn)
	l.merging.merger.Reached(l.sent)
}

func (l *loop) change(ctx context.Context, ev *replication.Event) error {
	c := ev.Change
	verdict, err := l.merging.passing(c) // what was delivered before the restart, too
	if err != nil {
		return err
	}
	switch {
	case c.Txn == nil:
		if l.pos.HasMessage(c.LSN) {
			return nil
		}
	case l.skipTxn || c.Seq < l.skipChanges:
		return l.after.again(c) // delivered, and counted, before the restart
	}
	switch verdict {
	case snapshot.Emit:
		if err := l.route(ctx, c, l.filling); err != nil {
			return err
		}
		if err := l.after.passed(c, l.filling.LastIsDeadLetter()); err != nil {
			return err
		}
	case snapshot.Hold:
		if err := l.merging.hold(ctx, c); err != nil {
			return err
		}
	}
	switch {
	case c.Txn == nil:
		// The position moves to the end of the message's record, never beyond: one more
		// would lose the transaction whose commit record begins there.
		l.pos.LSN = c.LSN
		l.advance(false)
	default:
		l.tail, l.tailTime = checkpoint.Cut{CommitLSN: c.Txn.CommitLSN, Changes: c.Seq + 1}, c.Txn.CommitTime
		l.limit()
	}
	return nil
}

// limit holds the batch in hand to its limits while a source transaction is open.
// What is complete leaves first, so that the tail has room; a tail that alone exceeds
// them is cut, and a restart goes on behind its last change.
func (l *loop) limit() {
	if !l.filling.Full() && !l.after.crowded() {
		return
	}
	l.stalled = true
	if l.filling.Moved() {
		return
	}
	l.pos.CommitLSN, l.pos.CommitTime, l.pos.Cut = l.tail.CommitLSN, l.tailTime, l.tail
	l.advance(false)
}

// route appends the change's records; topics that are not known yet are looked up or
// created first.
func (l *loop) route(ctx context.Context, c *replication.Change, b *router.Batch) error {
	for {
		if l.filling.Records() == 0 {
			l.filledAt = time.Now()
		}
		err := l.s.router.Route(c, b)
		var missing *router.MissingTopicError
		if !errors.As(err, &missing) {
			return err
		}
		if err := l.ensureTopic(ctx, missing.Topic); err != nil {
			var name *router.TopicNameError
			if errors.As(err, &name) && l.s.router.RejectTopic(c, missing.Topic, err) {
				continue // it becomes a dead letter
			}
			return err
		}
	}
}

// ensureTopic looks up or creates a topic while there is a batch in hand, which the
// signal to stop must not throw away: like a delivery it has stop-timeout from then on.
func (l *loop) ensureTopic(ctx context.Context, topic string) error {
	asking, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	release := context.AfterFunc(ctx, func() {
		t := time.NewTimer(l.s.r.o.StopTimeout)
		defer t.Stop()
		select {
		case <-t.C:
			cancel()
		case <-asking.Done():
		}
	})
	defer release()
	err := l.s.ensureTopics(asking, topic)
	if err != nil && asking.Err() != nil {
		return onKafka(fmt.Errorf("stop: topic %s could not be had within stop-timeout (%s): %v", topic, l.s.r.o.StopTimeout, err)) //nolint:errorlint // the cancellation is ours and means nothing to the caller
	}
	return err
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
	l.limit()
	cp := checkpoint.Checkpoint{Position: b.Position(), Source: l.s.source, Publications: l.publish, Rewound: l.rewound}
	l.merging.checkpoint(&cp)
	l.after.checkpoint(&cp)
	l.s.r.delivering(l.filledAt)
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

// ended takes the outcome of the delivery under way.
func (l *loop) ended(err error) error {
	l.s.r.delivering(time.Time{})
	if err != nil {
		l.inFlight = nil
		return onKafka(l.s.explainFence(err))
	}
	return l.delivered()
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
	if !l.stopping && !l.published && l.s.waitingPublications(l.publish, l.confirmable()) {
		return errPublicationsReady
	}
	return nil
}

// confirm lets PostgreSQL forget what is delivered, as far as the snapshot and outbox rows
// that are not marked yet let it.
//
// Invariant 1 (durable before confirmed): never beyond what is committed.
func (l *loop) confirm() {
	lsn := l.confirmable()
	l.s.stream.Confirm(lsn)
	l.s.r.setConfirmed(lsn)
}

func (l *loop) confirmable() checkpoint.LSN {
	return l.after.free(min(l.committed.LSN, l.merging.free))
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

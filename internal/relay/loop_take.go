package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/snapshot"
)

// eventsPerLook is how many events are taken between two looks at everything else.
const eventsPerLook = 256

// eventsPerTxn is how many are taken, at most, to come to the end of a source transaction:
// rows of a snapshot go out only there, and a stream that never pauses must not keep them.
const eventsPerTxn = 16 * eventsPerLook

// takeEvents routes what has arrived, up to a bound. drained tells that nothing more
// is there at the moment, or is to be taken: the stream stands still for the snapshot's
// sake until paused, which is not zero then.
func (l *loop) takeEvents(ctx context.Context) (drained bool, paused time.Time, err error) {
	for n := 0; n < eventsPerLook || l.inTxn && n < eventsPerTxn && l.merging.merger.Active(); n++ {
		if l.stalled || l.stopping {
			return false, paused, nil
		}
		if l.between() {
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
		if l.past != nil {
			if err := l.compare(l.past.begins(ev.Txn)); err != nil {
				return err
			}
		}
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
		if l.past != nil {
			if err := l.compare(l.past.reached(ev.LSN)); err != nil {
				return err
			}
		}
		l.urgent = l.urgent || ev.Urgent
		l.reached(ev.LSN)
		if ev.LSN > l.pos.LSN {
			l.pos.LSN = ev.LSN
			l.advance(false)
		}
	}
	return nil
}

// compare takes what was found out about what is sent again.
func (l *loop) compare(over bool, err error) error {
	if over && err == nil {
		l.past = nil
		l.confirm()
	}
	return err
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
			if l.s.router.RejectTopic(c, missing.Topic, err) {
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

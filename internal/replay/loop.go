package replay

import (
	"context"
	"fmt"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// loop takes events, routes them into a batch, and hands full batches to the deliverer:
// while one is delivered the next one fills. A replay has all of its records before it, so
// that batches leave when they are full, and at the end.
type loop struct {
	s        *session
	filling  *router.Batch
	spare    *router.Batch
	inFlight *router.Batch
	work     chan delivery
	done     chan error

	pos         checkpoint.Position // after everything appended
	base        checkpoint.Checkpoint
	in          bool // the open source transaction is in the range, and not delivered
	skipChanges uint64
	tail        checkpoint.Cut
	tailTime    time.Time
	said        time.Time
	ended       bool
}

type delivery struct {
	batch *router.Batch
	cp    checkpoint.Checkpoint
}

func newLoop(s *session, cp checkpoint.Checkpoint) *loop {
	return &loop{
		s: s, filling: router.NewBatch(s.o.Limits), spare: router.NewBatch(s.o.Limits),
		work: make(chan delivery), done: make(chan error, 1), pos: cp.Position, base: cp,
	}
}

func (l *loop) run(ctx context.Context) error {
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		for d := range l.work {
			l.done <- l.s.producer.Deliver(ctx, d.batch, &d.cp)
		}
	}()
	err := l.stream(ctx)
	close(l.work)
	<-finished
	if err == nil && !l.s.o.DryRun {
		settling, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		_ = l.s.producer.Settle(settling) // committed it is; only that all see it may be late
	}
	return err
}

func (l *loop) stream(ctx context.Context) error {
	for !l.ended && l.s.to > l.pos.LSN {
		ev, err := l.s.stream.Next(ctx)
		if err != nil {
			return fmt.Errorf("read the WAL again: %w", err)
		}
		if err := l.take(ctx, ev); err != nil {
			return err
		}
		for l.filling.Full() {
			l.cut()
			if err := l.deliver(ctx); err != nil {
				return err
			}
		}
	}
	if l.filling.Moved() {
		if err := l.deliver(ctx); err != nil {
			return err
		}
	}
	return l.await(ctx)
}

func (l *loop) take(ctx context.Context, ev *replication.Event) error {
	switch ev.Kind {
	case replication.KindBegin:
		if ev.Txn.CommitLSN >= l.s.to {
			l.ended = true
			return nil
		}
		l.in = !l.pos.HasTransaction(ev.Txn.CommitLSN)
		l.skipChanges = l.pos.Skip(ev.Txn.CommitLSN)
	case replication.KindChange:
		return l.change(ctx, ev.Change)
	case replication.KindCommit:
		if ev.Txn.EndLSN <= l.pos.LSN {
			return nil // it ended at or before the start
		}
		l.pos = checkpoint.Position{LSN: ev.Txn.EndLSN, CommitLSN: ev.Txn.CommitLSN, CommitTime: ev.Txn.CommitTime}
		l.filling.Advance(l.pos, l.in)
		if l.in {
			l.s.report.Transactions++
		}
		l.tell()
	case replication.KindProgress:
		if ev.LSN >= l.s.to {
			l.ended = true
		}
	}
	return nil
}

func (l *loop) change(ctx context.Context, c *replication.Change) error {
	if c.Txn == nil {
		switch {
		case c.LSN > l.s.to:
			l.ended = true
			return nil
		case l.pos.HasMessage(c.LSN):
			return nil
		}
		if err := l.s.route(ctx, c, l.filling); err != nil {
			return err
		}
		l.pos.LSN = c.LSN
		l.filling.Advance(l.pos, false)
		return nil
	}
	if !l.in || c.Seq < l.skipChanges {
		return nil
	}
	if err := l.s.route(ctx, c, l.filling); err != nil {
		return err
	}
	l.tail, l.tailTime = checkpoint.Cut{CommitLSN: c.Txn.CommitLSN, Changes: c.Seq + 1}, c.Txn.CommitTime
	return nil
}

// cut ends the batch in hand in the middle of a source transaction that alone exceeds it.
func (l *loop) cut() {
	if l.filling.Moved() {
		return
	}
	l.pos.CommitLSN, l.pos.CommitTime, l.pos.Cut = l.tail.CommitLSN, l.tailTime, l.tail
	l.filling.Advance(l.pos, false)
}

// deliver hands the batch in hand over, once the one before is delivered.
func (l *loop) deliver(ctx context.Context) error {
	if l.s.o.DryRun {
		l.filling.MoveTail(l.spare)
		l.filling.Reset()
		l.filling, l.spare = l.spare, l.filling
		return nil
	}
	if err := l.await(ctx); err != nil {
		return err
	}
	b := l.filling
	b.MoveTail(l.spare)
	l.filling, l.spare, l.inFlight = l.spare, nil, b
	l.work <- delivery{b, checkpoint.Checkpoint{Position: b.Position(), Source: l.base.Source, Replay: l.base.Replay}}
	return nil
}

// await waits for the batch on its way, and lets the temporary slot go that far.
func (l *loop) await(ctx context.Context) error {
	if l.inFlight == nil {
		return nil
	}
	select {
	case err := <-l.done:
		if err != nil {
			return err
		}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	// Invariant 1 (durable before confirmed), though only the anchor looks at it: it does
	// not pass a running replay.
	l.s.stream.Confirm(l.inFlight.Position().LSN)
	l.inFlight.Reset()
	l.spare, l.inFlight = l.inFlight, nil
	return nil
}

// tell tells of the progress, now and then.
func (l *loop) tell() {
	if l.s.o.Progress == nil || time.Since(l.said) < 200*time.Millisecond {
		return
	}
	l.said = time.Now()
	l.s.o.Progress(Progress{At: l.pos.LSN, From: l.s.from, To: l.s.to, Records: l.s.counts.total})
}

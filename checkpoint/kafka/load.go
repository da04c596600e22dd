package kafka

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
)

// The end of the log is read in windows that grow from firstWindow by growth. The
// first holds some thirty transactions (a position and a marker each), so one
// fetch of a few kilobytes nearly always does; the growth bounds the number of
// fetches where aborted transactions or foreign records cover the end.
const (
	firstWindow = 64
	growth      = 8
)

// Load gives the newest committed checkpoint; found is false where none was ever
// committed. It reads backwards from the end of the log, so its time does not
// depend on the log's length.
//
// Invariant 3 (fence, then read): the caller has initialised its transactional id
// before, so that no older instance can commit behind what is read here. Load
// itself makes sure that no transaction is open below the end of the log, and
// fails with ErrOpenTransaction where one stays open.
func (s *Store) Load(ctx context.Context) (c checkpoint.Checkpoint, found bool, err error) {
	for range 3 {
		// The start of the log can move on between being listed and being read, where
		// compaction or an operator deletes at that moment.
		if c, found, err = s.load(ctx); !errors.Is(err, kerr.OffsetOutOfRange) {
			break
		}
	}
	return c, found, err
}

func (s *Store) load(ctx context.Context) (c checkpoint.Checkpoint, found bool, err error) {
	sp, err := s.stableSpan(ctx)
	if err != nil {
		return checkpoint.Checkpoint{}, false, err
	}
	return s.newest(ctx, sp)
}

// Peek gives a checkpoint without fencing: the newest one below transactions that are
// open, which may be another instance's, at work. Only what never changes may be relied
// on, the source and the horizons; the position may be old the moment it is read. Where the
// topic is missing there is none, which is told at once.
func (s *Store) Peek(ctx context.Context) (c checkpoint.Checkpoint, found bool, err error) {
	t, err := s.topic(ctx)
	if err != nil || t.ErrorCode == kerr.UnknownTopicOrPartition.Code {
		return c, false, err
	}
	var sp span
	if sp.start, err = s.offset(ctx, earliest, readUncommitted); err != nil {
		return c, false, err
	}
	if sp.end, err = s.offset(ctx, latest, readCommitted); err != nil {
		return c, false, err
	}
	return s.newest(ctx, sp)
}

// Look is Peek for whoever may come before the connector's first start: found is false,
// at once, where the topic does not exist either.
func (s *Store) Look(ctx context.Context) (c checkpoint.Checkpoint, found bool, err error) {
	t, err := s.topic(ctx)
	if err != nil || t.ErrorCode == kerr.UnknownTopicOrPartition.Code {
		return c, false, err
	}
	return s.Peek(ctx)
}

// newest gives the newest committed checkpoint in a span of the log that is stable.
func (s *Store) newest(ctx context.Context, sp span) (c checkpoint.Checkpoint, found bool, err error) {
	r, err := s.lastBefore(ctx, sp.start, sp.end, checkpoint.KeyPosition)
	if err != nil || r == nil {
		return checkpoint.Checkpoint{}, false, err
	}
	c, at, delta, err := checkpoint.DecodePosition(r.Value)
	if err != nil {
		return checkpoint.Checkpoint{}, false, fmt.Errorf("offset %d of checkpoint topic %s: %w", r.Offset, s.o.Topic, err)
	}
	state, err := s.state(ctx, sp.start, at, r.Offset)
	if err != nil {
		return checkpoint.Checkpoint{}, false, err
	}
	if err := checkpoint.DecodeState(state.Value, &c); err != nil {
		return checkpoint.Checkpoint{}, false, fmt.Errorf("offset %d of checkpoint topic %s: %w", state.Offset, s.o.Topic, err)
	}
	c.Apply(delta)
	return c, true, nil
}

// state finds the state record that belongs to the position record at position
// (FORMAT.md, "Why two records").
func (s *Store) state(ctx context.Context, start, at, position int64) (*kgo.Record, error) {
	var found *kgo.Record
	var err error
	if at == checkpoint.StateBeside {
		found, err = s.lastBefore(ctx, start, position, checkpoint.KeyState)
	} else {
		err = s.scan(ctx, max(at, start), position, readCommitted, false, func(r *kgo.Record) (bool, error) {
			if string(r.Key) == checkpoint.KeyState {
				found = r
			}
			return found == nil, nil
		})
	}
	if err == nil && found == nil {
		err = &checkpoint.Refusal{
			What:   fmt.Sprintf("the position record at offset %d of checkpoint topic %s names a state record at offset %d that is not there", position, s.o.Topic, at),
			Risk:   "records were deleted from the topic, and what else is missing is not known",
			Remedy: "restore the topic from where it was mirrored to, or start anew with another kafka.checkpoint-topic and slot",
		}
	}
	return found, err
}

// lastBefore gives the last committed record with key in [start, end), nil for
// none. No offset is read twice.
func (s *Store) lastBefore(ctx context.Context, start, end int64, key string) (*kgo.Record, error) {
	for window := int64(firstWindow); end > start; window *= growth {
		from := max(start, end-window)
		var last *kgo.Record
		err := s.scan(ctx, from, end, readCommitted, false, func(r *kgo.Record) (bool, error) {
			if string(r.Key) == key {
				last = r
			}
			return true, nil
		})
		if err != nil || last != nil {
			return last, err
		}
		end = from
	}
	return nil, nil
}

// Virgin tells whether nothing was ever committed to the topic, so that a slot
// found without a checkpoint may be adopted; otherwise reason says what shows that
// something was. Like Load it is called after fencing.
//
// A first start that was killed in its first transaction leaves aborted records,
// and those are virgin too. But aborted records are also all that is left when
// committed ones were compacted away or deleted, and that must not pass: so the
// log must begin at 0, every offset must still be there, none of it visible and
// every marker an abort. Requests are visible, and the slot's birth: those are written
// outside transactions, and say nothing of a delivery.
func (s *Store) Virgin(ctx context.Context) (virgin bool, reason string, err error) {
	sp, err := s.stableSpan(ctx)
	if err != nil {
		return false, "", err
	}
	if sp.start > 0 {
		return false, fmt.Sprintf("checkpoint topic %s begins at offset %d: older records were deleted", s.o.Topic, sp.start), nil
	}
	err = s.scan(ctx, 0, sp.end, readCommitted, false, func(r *kgo.Record) (bool, error) {
		if _, ok := checkpoint.RequestID(r.Key); (ok || string(r.Key) == checkpoint.KeySlot) && !r.Attrs.IsTransactional() {
			return true, nil
		}
		reason = fmt.Sprintf("checkpoint topic %s holds a committed record at offset %d", s.o.Topic, r.Offset)
		return false, nil
	})
	if err != nil || reason != "" {
		return false, reason, err
	}
	next := int64(0)
	err = s.scan(ctx, 0, sp.end, readUncommitted, true, func(r *kgo.Record) (bool, error) {
		switch {
		case r.Offset != next:
			reason = fmt.Sprintf("checkpoint topic %s lacks the offsets from %d to %d: records were compacted away", s.o.Topic, next, r.Offset-1)
		case r.Attrs.IsControl() && !isAbort(r.Key):
			reason = fmt.Sprintf("checkpoint topic %s holds a commit marker at offset %d", s.o.Topic, r.Offset)
		}
		next = r.Offset + 1
		return reason == "", nil
	})
	if err == nil && reason == "" && next != sp.end {
		reason = fmt.Sprintf("checkpoint topic %s lacks the offsets from %d to %d: records were compacted away", s.o.Topic, next, sp.end-1)
	}
	return err == nil && reason == "", reason, err
}

// isAbort reads the key of a transaction marker: version and type, 16 bits each;
// type 0 is an abort.
func isAbort(key []byte) bool {
	return len(key) >= 4 && binary.BigEndian.Uint16(key[2:]) == 0
}

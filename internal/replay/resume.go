package replay

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
)

// asked gives what is asked for as flags, always in the same form: a replay that goes on has
// to be asked for what it began with.
func (o *Options) asked() string {
	var b strings.Builder
	flag := func(name, value string) {
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(name)
		if value != "" {
			b.WriteString(" " + value)
		}
	}
	r := o.Range
	if r.From > 0 {
		flag("--from-lsn", r.From.String())
	} else {
		flag("--from-time", r.FromTime.UTC().Format(time.RFC3339Nano))
	}
	if r.To > 0 {
		flag("--to-lsn", r.To.String())
	} else if !r.ToTime.IsZero() {
		flag("--to-time", r.ToTime.UTC().Format(time.RFC3339Nano))
	}
	for _, t := range slices.Compact(slices.Sorted(slices.Values(o.Tables))) {
		flag("--table", t)
	}
	if o.InPlace {
		flag("--in-place", "")
	} else {
		flag("--topic-prefix", o.Prefix)
	}
	return b.String()
}

// begun finds a replay that was ended, and refuses where it was asked for something else.
func (s *session) begun(ctx context.Context, own *ckafka.Store) (checkpoint.Checkpoint, error) {
	cp, found, err := own.Peek(ctx)
	if err != nil || !found || cp.Replay == nil {
		refused := s.refuseUnknown()
		refused.Err = err
		return cp, refused
	}
	if asked := s.o.asked(); asked != cp.Replay.Asked {
		return cp, &checkpoint.Refusal{
			What:   fmt.Sprintf("replay %s was begun with %s, and cannot go on with %s", s.o.ID, cp.Replay.Asked, asked),
			Risk:   "a part of what was asked for would be left out, or stand in other topics",
			Remedy: "say --resume " + s.o.ID + " " + cp.Replay.Asked + "; for another range run a new replay, without --resume",
		}
	}
	return cp, nil
}

func (s *session) refuseUnknown() *checkpoint.Refusal {
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("replay %s has no checkpoint in topic %s: there was none of that id, or it ended before it began to deliver", s.o.ID, s.o.Own.Topic),
		Remedy: "run the replay without --resume",
	}
}

// begin gives the place to begin at, and sets the range: what is asked for, or, of a replay
// that goes on, the one that it began with.
func (s *session) begin(ctx context.Context, begun checkpoint.Checkpoint) (checkpoint.Checkpoint, error) {
	if err := s.name(); err != nil {
		return begun, err
	}
	if begun.Replay != nil {
		s.from, s.to = begun.Replay.From, begun.Replay.To
		s.nameAt(s.from)
		return begun, s.checkHeld(begun)
	}
	if err := s.bounds(ctx); err != nil {
		return begun, err
	}
	return checkpoint.Checkpoint{
		Position: checkpoint.Beginning(s.from), Source: s.db.Source(),
		Replay: &checkpoint.Replay{From: s.from, To: s.to, Asked: s.o.asked()},
	}, nil
}

// checkHeld refuses to go on where the anchor has passed the place: the server would leave
// out what is between.
func (s *session) checkHeld(cp checkpoint.Checkpoint) error {
	if cp.Position.LSN >= s.oldest {
		return nil
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("replay %s stands at %s, and the anchor has let go of the WAL before %s since", s.o.ID, cp.Position.LSN, s.oldest),
		Risk:   "what was committed between cannot be read from the WAL any more, and the server would leave it out without a word",
		Remedy: fmt.Sprintf("what it delivered stays; run a new replay with --from-lsn %s, which leaves that gap; raise replay.retain-wal and replay.retain-time to have more time to resume", s.oldest),
	}
}

package replay

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// UsageError says that what was asked for makes no sense in itself.
type UsageError struct{ What string }

// Error gives it.
func (e *UsageError) Error() string { return e.What }

// NewID makes an id of its own for a replay; it may stand in a topic's name.
func NewID(now time.Time) string {
	return now.UTC().Format("20060102-150405") + "-" + strings.ToLower(rand.Text()[:6])
}

func slotUnique() string { return strings.ToLower(rand.Text()[:8]) }

// bounds turns the range into LSNs, and refuses what cannot be had.
func (s *session) bounds(ctx context.Context) error {
	r, end := s.o.Range, s.db.WALEnd
	for _, b := range []struct {
		flag string
		lsn  checkpoint.LSN
	}{{"--from-lsn", r.From}, {"--to-lsn", r.To}} {
		if b.lsn > end {
			return fmt.Errorf("%s %s is beyond the end of the WAL, which is at %s on timeline %d", b.flag, b.lsn, end, s.db.Timeline)
		}
	}
	if r.To > 0 && r.From > r.To {
		return &UsageError{fmt.Sprintf("--to-lsn %s is before --from-lsn %s", r.To, r.From)}
	}
	before, err := s.start(ctx)
	if err != nil {
		return err
	}
	switch {
	case r.To > 0 && r.To < s.oldest: // from a time, then
		return &UsageError{fmt.Sprintf("--to-lsn %s is before %s, which is as far back as replay reaches", r.To, s.oldest)}
	case r.To > 0 && r.To < s.from: // which only a time can give
		if err := s.checkReversed(ctx); err != nil {
			return err
		}
	case r.To > 0:
		s.to, _, err = s.endBefore(ctx, max(s.from, r.To-min(r.To, recordRoom)), r.To, time.Time{})
	case !r.ToTime.IsZero():
		s.to, _, err = s.endBefore(ctx, s.from, end, r.ToTime)
		if err == nil && s.to <= s.from && r.ToTime.Before(before) {
			return &UsageError{fmt.Sprintf("--to-time %s is before --from-lsn %s: the transaction before that was committed at %s",
				r.ToTime.UTC().Format(time.RFC3339Nano), r.From, before.UTC().Format(time.RFC3339Nano))}
		}
	default:
		s.to = end
	}
	if err != nil {
		return err
	}
	s.to = max(s.to, s.from)
	return s.checkNamed()
}

// checkReversed tells an end that is before the time of the start from one in a pause of the
// commits around it: a transaction between the two was committed before that time.
func (s *session) checkReversed(ctx context.Context) error {
	r := s.o.Range
	last, committed, err := s.endBefore(ctx, max(s.oldest, r.To-min(r.To, recordRoom)), s.from, r.FromTime)
	if err != nil || last <= r.To {
		return err
	}
	return &UsageError{fmt.Sprintf("--to-lsn %s is before --from-time %s: a transaction that ends at %s, behind it, was committed at %s",
		r.To, r.FromTime.UTC().Format(time.RFC3339Nano), last, committed.UTC().Format(time.RFC3339Nano))}
}

// start finds where the range begins, and where that is given as an LSN the commit time of
// the transaction before it, zero where none is near.
func (s *session) start(ctx context.Context) (before time.Time, err error) {
	r := s.o.Range
	s.nameAt(max(r.From, s.oldest))
	if r.From == 0 {
		first, reach, err := s.firstAt(ctx, r.FromTime)
		if err != nil {
			return before, err
		}
		if !reach.IsZero() && r.FromTime.Before(reach) {
			return before, s.refuseOld(0, reach)
		}
		s.from = first
		s.nameAt(s.from)
		return before, nil
	}
	if r.From < s.oldest {
		reach, err := s.reach(ctx)
		if err != nil {
			return before, err
		}
		return before, s.refuseOld(r.From, reach)
	}
	// An LSN within a commit record belongs to that transaction, and one within a message's
	// record to that message: the range begins where the record before ends.
	s.from, before, err = s.endBefore(ctx, max(s.oldest, r.From-min(r.From, recordRoom)), r.From, time.Time{})
	return before, err
}

// nameAt decides which publications are named in what begins at lsn: those that every change
// from there on finds in the catalog of its own time. Naming another one would end the
// stream (14 to 17), or lose changes without a word (18).
func (s *session) nameAt(lsn checkpoint.LSN) {
	s.named, s.floor = nil, 0
	for _, p := range s.live.Publications {
		if p.Horizon > 0 && p.Horizon <= lsn {
			s.named = append(s.named, p.Name)
			s.floor = max(s.floor, p.Horizon)
		}
	}
}

// checkNamed refuses a range in the middle of which the connector began to name another
// publication: seq counts what is published, so that positions would not be the live ones.
func (s *session) checkNamed() error {
	from := max(s.from, s.o.Range.From) // nothing that ends between the two is in the range
	for _, p := range s.live.Publications {
		if p.Horizon > from && p.Horizon < s.to {
			return &checkpoint.Refusal{
				What:   fmt.Sprintf("publication %s is younger than the beginning of the range: it can be read from %s on, and the range is from %s to %s", p.Name, p.Horizon, s.from, s.to),
				Risk:   "changes would be left out, and those beside them would get other positions than they had",
				Remedy: fmt.Sprintf("replay in two parts: --to-lsn %[1]s, and --from-lsn %[1]s", p.Horizon),
			}
		}
	}
	return nil
}

// endBefore reads on from an LSN and gives the last end of a source transaction, or of a
// message, at or before lsn, and of one that was committed at or before at where that is
// set; the LSN that it began at where there is none. With it comes the commit time of the
// last such transaction, zero where there is none.
func (s *session) endBefore(ctx context.Context, from, lsn checkpoint.LSN, at time.Time) (checkpoint.LSN, time.Time, error) {
	stream, err := s.open(ctx, from)
	if err != nil {
		return 0, time.Time{}, err
	}
	defer stream.Abort()
	return s.lastEnd(ctx, stream, from, lsn, at)
}

// lastEnd is endBefore on a stream that begins at last.
func (s *session) lastEnd(ctx context.Context, stream *replication.Stream, last, lsn checkpoint.LSN, at time.Time) (end checkpoint.LSN, committed time.Time, err error) {
	for {
		ev, err := stream.Next(ctx)
		switch {
		case err != nil:
			return 0, committed, err
		case ev.Kind == replication.KindBegin && ev.Txn.CommitLSN >= lsn,
			ev.Kind == replication.KindProgress && ev.LSN >= lsn:
			return last, committed, nil
		case ev.Kind == replication.KindCommit && ev.Txn.EndLSN <= lsn && (at.IsZero() || !ev.Txn.CommitTime.After(at)):
			last, committed = max(last, ev.Txn.EndLSN), ev.Txn.CommitTime
		case ev.Kind == replication.KindChange && ev.Change.Txn == nil && at.IsZero():
			if ev.Change.LSN > lsn {
				return last, committed, nil
			}
			last = max(last, ev.Change.LSN)
		}
	}
}

// firstAt gives the commit LSN of the first source transaction, in commit order, that was
// committed at or after at, the end of the WAL where there is none; and the time that replay
// reaches back to, zero where it is not known.
func (s *session) firstAt(ctx context.Context, at time.Time) (lsn checkpoint.LSN, reach time.Time, err error) {
	stream, err := s.open(ctx, s.oldest)
	if err != nil {
		return 0, reach, err
	}
	defer stream.Abort()
	if a := s.live.Anchor; a.LSN == s.oldest {
		reach = a.At
	}
	end := s.db.WALEnd
	for first := true; ; {
		ev, err := stream.Next(ctx)
		switch {
		case err != nil:
			return 0, reach, err
		case ev.Kind == replication.KindBegin && ev.Txn.CommitLSN >= end, ev.Kind == replication.KindProgress && ev.LSN >= end:
			return end, reach, nil
		case ev.Kind == replication.KindBegin:
			t := ev.Txn.CommitTime
			if first && (reach.IsZero() || t.Before(reach)) {
				reach = t
			}
			first = false
			if !t.Before(at) {
				return ev.Txn.CommitLSN, reach, nil
			}
		}
	}
}

// reach is the time that replay reaches back to: what was committed at it or later can be
// read. Where nothing was committed since the anchor was made, which no checkpoint tells of
// yet, that is now.
func (s *session) reach(ctx context.Context) (time.Time, error) {
	if a := s.live.Anchor; a.LSN == s.oldest {
		return a.At, nil
	}
	room, err := replication.ReadRoom(ctx, s.conn)
	if err != nil {
		return time.Time{}, err
	}
	_, reach, err := s.firstAt(ctx, time.Time{})
	if reach.IsZero() {
		reach = room.Now
	}
	return reach, err
}

// refuseOld says how far back replay reaches.
func (s *session) refuseOld(lsn checkpoint.LSN, reach time.Time) error {
	when := ""
	if !reach.IsZero() { // it is, where the anchor went on while we read
		when = ", and the oldest time " + reach.UTC().Format(time.RFC3339Nano)
	}
	what := "the wanted time is"
	if lsn > 0 {
		what = fmt.Sprintf("LSN %s is", lsn)
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("%s older than the WAL that the anchor keeps: the oldest LSN available is %s%s", what, s.oldest, when),
		Risk:   "the changes before it cannot be read from the WAL any more, and the server would leave them out without a word",
		Remedy: fmt.Sprintf("begin at --from-lsn %s; what is older is in the topics, or, as the tables are now, in walrelay snapshot -c FILE --table T; raise replay.retain-wal and replay.retain-time to reach further back from now on", s.oldest),
	}
}

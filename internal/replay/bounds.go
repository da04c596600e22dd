package replay

import (
	"context"
	"crypto/rand"
	"errors"
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
	s.from, s.to = r.From, end
	if r.From == 0 {
		oldest, err := s.oldestTime(ctx)
		if err != nil {
			return err
		}
		if !oldest.IsZero() && r.FromTime.Before(oldest) {
			return s.refuseOld(0, oldest)
		}
		s.from, s.waiting = s.oldest, true
	} else if r.From < s.oldest {
		oldest, err := s.oldestTime(ctx)
		if err != nil {
			return err
		}
		return s.refuseOld(r.From, oldest)
	} else {
		// An LSN within a commit record belongs to that transaction, and one within a
		// message's record to that message: the range begins where the record before ends.
		from, err := s.endBefore(ctx, max(s.oldest, r.From-min(r.From, recordRoom)), r.From, time.Time{})
		if err != nil {
			return err
		}
		s.from = from
	}
	if r.To > 0 && r.From > r.To {
		return &UsageError{fmt.Sprintf("--to-lsn %s is before --from-lsn %s", r.To, r.From)}
	}
	switch {
	case r.To > 0:
		if r.To < s.from {
			return &UsageError{fmt.Sprintf("--to-lsn %s is before the start of the range, %s", r.To, s.from)}
		}
		to, err := s.endBefore(ctx, max(s.from, r.To-min(r.To, recordRoom)), r.To, time.Time{})
		s.to = max(to, s.from)
		return err
	case !r.ToTime.IsZero():
		to, err := s.endBefore(ctx, s.from, end, r.ToTime)
		s.to = max(to, s.from)
		return err
	}
	return nil
}

// endBefore reads on from an LSN and gives the last end of a source transaction, or of a
// message, at or before lsn, and of one that was committed at or before at where that is
// set; the LSN that it began at where there is none.
func (s *session) endBefore(ctx context.Context, from, lsn checkpoint.LSN, at time.Time) (checkpoint.LSN, error) {
	stream, err := s.open(ctx, from)
	if err != nil {
		return 0, err
	}
	defer stream.Abort()
	last := from
	for {
		ev, err := stream.Next(ctx)
		switch {
		case err != nil:
			return 0, err
		case ev.Kind == replication.KindBegin && ev.Txn.CommitLSN >= lsn,
			ev.Kind == replication.KindProgress && ev.LSN >= lsn:
			return last, nil
		case ev.Kind == replication.KindCommit && ev.Txn.EndLSN <= lsn && (at.IsZero() || !ev.Txn.CommitTime.After(at)):
			last = max(last, ev.Txn.EndLSN)
		case ev.Kind == replication.KindChange && ev.Change.Txn == nil && at.IsZero():
			if ev.Change.LSN > lsn {
				return last, nil
			}
			last = max(last, ev.Change.LSN)
		}
	}
}

// oldestTime is the time of the oldest commit that the anchor holds; zero where it holds
// none.
func (s *session) oldestTime(ctx context.Context) (time.Time, error) {
	cfg, err := replication.WalsenderConfig(s.o.DSN, s.o.AppName, s.o.ConnOptions...)
	if err != nil {
		return time.Time{}, err
	}
	t, err := replication.FirstCommit(ctx, cfg, replication.AnchorName(s.o.Slot), replication.StreamOptions{
		Slot: replication.ReplaySlot(s.o.Slot, slotUnique()), Publications: s.named,
	}, s.db.WALEnd)
	if errors.Is(err, replication.ErrNoCommit) {
		return time.Time{}, nil
	}
	return t.CommitTime, err
}

// refuseOld says how far back replay reaches.
func (s *session) refuseOld(lsn checkpoint.LSN, oldest time.Time) error {
	when := "no transaction was committed since"
	if !oldest.IsZero() {
		when = "its first transaction was committed at " + oldest.UTC().Format(time.RFC3339Nano)
	}
	what := "the wanted time is"
	if lsn > 0 {
		what = fmt.Sprintf("LSN %s is", lsn)
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("%s older than the WAL that the anchor keeps: the oldest LSN available is %s (%s)", what, s.oldest, when),
		Risk:   "the changes before it cannot be read from the WAL any more, and the server would leave them out without a word",
		Remedy: fmt.Sprintf("begin at --from-lsn %s; what is older is in the topics, or, as the tables are now, in walrelay snapshot -c FILE --table T; raise replay.retain-wal and replay.retain-time to reach further back from now on", s.oldest),
	}
}

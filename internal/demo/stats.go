package demo

import (
	"fmt"
	"math/bits"
	"strings"
	"sync"
	"time"
)

// Stats counts what the consumer has read. All methods are safe for concurrent use.
type Stats struct {
	mu      sync.Mutex
	started time.Time
	events  int
	changes int
	tombs   int
	latency histogram
	verdict Verdict
	foreign int
}

// Totals is a copy of what a Stats holds.
type Totals struct {
	Events, Changes, Tombstones int
	Foreign                     int // records that are not the connector's
	P50, P99                    time.Duration
	Rate                        float64 // records per second since the start
	Verdict                     Verdict
}

// Records gives how many records of the connector were read.
func (t Totals) Records() int { return t.Events + t.Changes + t.Tombstones }

func (s *Stats) observe(e *Event, v Verdict) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.started.IsZero() {
		s.started = e.Arrived
	}
	s.verdict = v
	switch {
	case e.Tombstone:
		s.tombs++
	case e.Kind == KindEvent:
		s.events++
	default:
		s.changes++
	}
	if !e.Committed.IsZero() {
		s.latency.add(e.Arrived.Sub(e.Committed))
	}
}

func (s *Stats) observeForeign() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.foreign++
}

// Totals gives the counts as of now.
func (s *Stats) Totals(now time.Time) Totals {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := Totals{
		Events: s.events, Changes: s.changes, Tombstones: s.tombs, Foreign: s.foreign,
		P50: s.latency.quantile(0.50), P99: s.latency.quantile(0.99), Verdict: s.verdict,
	}
	if d := now.Sub(s.started); !s.started.IsZero() && d > 0 {
		t.Rate = float64(t.Records()) / d.Seconds()
	}
	return t
}

// histogram keeps latencies in buckets of 1/16 of a power of two of a
// microsecond, so that a quantile is at most 6 % off and memory does not grow.
type histogram struct {
	buckets [64 * 16]int
	n       int
}

func (h *histogram) add(d time.Duration) {
	us := uint64(max(d.Microseconds(), 1))
	e := bits.Len64(us) - 1
	sub := 0 // the four bits behind the leading one
	if e >= 4 {
		sub = int(us>>(e-4)) & 15
	} else {
		sub = int(us<<(4-e)) & 15
	}
	h.buckets[e*16+sub]++
	h.n++
}

// quantile gives the lower bound of the bucket that holds the q-th value.
func (h *histogram) quantile(q float64) time.Duration {
	if h.n == 0 {
		return 0
	}
	rank := int(q * float64(h.n-1))
	for i, c := range h.buckets {
		if rank -= c; rank < 0 {
			us := float64(uint64(1)<<(i/16)) * (1 + float64(i%16)/16)
			return time.Duration(us * float64(time.Microsecond))
		}
	}
	return 0
}

// footer is the live line.
func footer(t Totals, l LedgerCount, kills int) string {
	verdict := "each exactly once"
	if p := problems(t, LedgerCount{Ghosts: l.Ghosts}); len(p) > 0 {
		verdict = strings.Join(p, ", ")
	}
	text := fmt.Sprintf(" %d records (%d events)  %.1f/s  p50 %s  p99 %s  under way %d  %s",
		t.Records(), t.Events, t.Rate, formatLatency(t.P50), formatLatency(t.P99), l.Missing, verdict)
	if kills > 0 {
		text += fmt.Sprintf("  killed %s", times(kills))
	}
	return text
}

// problems lists what contradicts "exactly once, in order".
func problems(t Totals, l LedgerCount) []string {
	var p []string
	for _, x := range []struct {
		n    int
		what string
	}{
		{l.Missing, "missing"},
		{t.Verdict.Duplicates, "duplicate"},
		{t.Verdict.OutOfOrder, "out of order"},
		{l.Ghosts, "of rolled-back transactions"},
	} {
		if x.n > 0 {
			p = append(p, fmt.Sprintf("%d %s", x.n, x.what))
		}
	}
	return p
}

// summary gives the last lines, and as an error what was not as promised.
func summary(t Totals, l LedgerCount, kills int) ([]string, error) {
	counts := fmt.Sprintf("%d records: %d events, %d table changes, %d tombstones", t.Records(), t.Events, t.Changes, t.Tombstones)
	bad := problems(t, l)
	if len(bad) > 0 {
		return []string{counts + "; NOT each exactly once in order: " + strings.Join(bad, ", ")},
			fmt.Errorf("exactly once, in order: %s; please report this with the lines marked ! above", strings.Join(bad, ", "))
	}
	if t.Records() == 0 {
		return []string{"no records"}, nil
	}
	lines := []string{fmt.Sprintf("%s; each exactly once and in order; median %s, p99 %s from commit to consumer",
		counts, formatLatency(t.P50), formatLatency(t.P99))}
	book := fmt.Sprintf("the shop committed %d changes and events, all of them arrived; %d of its transactions rolled back, nothing of them arrived",
		l.Committed, l.RolledBack)
	if l.ByHand > 0 {
		book += fmt.Sprintf("; %d were made by hand", l.ByHand)
	}
	if t.Foreign > 0 {
		book += fmt.Sprintf("; %d foreign records were left out", t.Foreign)
	}
	lines = append(lines, book)
	if kills > 0 {
		lines = append(lines, "the connector was killed with SIGKILL "+times(kills)+"; nothing was lost or doubled")
	}
	return lines, nil
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

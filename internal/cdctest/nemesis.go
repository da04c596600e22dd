package cdctest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// Fault is one way of disturbing a run. Do brings it about, heals what has to be
// healed before the next one (a paused process, a cut connection), and returns what
// it did in a few words. It draws from rng whatever it has to choose: how long, which
// step. An error means that the fault could not be brought about, or that the system
// under test did not survive it; a fault that quietly did nothing would make the run
// worthless.
type Fault struct {
	Name   string
	Weight int // relative to the others'; 0 means 1
	Do     func(ctx context.Context, rng *rand.Rand) (string, error)
}

// Nemesis brings faults about, one at a time, at random moments. Which faults, in
// which order, with which pauses and choices follows from Seed.
type Nemesis struct {
	Seed   uint64
	Faults []Fault
	// MinGap and MaxGap bound the quiet time between two faults; the system must come
	// back within it, or a crash loop is all that is tested.
	MinGap, MaxGap time.Duration
	// Log, if not nil, is told of each fault as it happens.
	Log func(format string, args ...any)
}

// Done is a fault that was brought about.
type Done struct {
	Name  string
	After time.Duration // since Run began
	Took  time.Duration
	What  string // Do's own words
}

// String gives one line.
func (d Done) String() string {
	return fmt.Sprintf("%8.3fs %s: %s (%.3fs)", d.After.Seconds(), d.Name, d.What, d.Took.Seconds())
}

// Run disturbs until ctx is done, which is its normal end, or most faults were
// brought about (0: no bound), or one returns an error. A fault in hand is not cut
// off by ctx, so that it heals. What was done is returned in each case: the test
// reports it with the seed, and checks that there was something.
func (n *Nemesis) Run(ctx context.Context, most int) ([]Done, error) {
	if len(n.Faults) == 0 {
		return nil, errors.New("run nemesis: it has no faults to choose from")
	}
	rng := rand.New(rand.NewPCG(n.Seed, 0x6e656d65736973))
	begun := time.Now()
	n.log("nemesis seed %d: %s", n.Seed, n.names())
	var done []Done
	for most == 0 || len(done) < most {
		gap := n.MinGap
		if d := n.MaxGap - n.MinGap; d > 0 {
			gap += time.Duration(rng.Int64N(int64(d)))
		}
		timer := time.NewTimer(gap)
		select {
		case <-ctx.Done():
			timer.Stop()
			return done, nil
		case <-timer.C:
		}
		fault := n.choose(rng)
		// Each fault has its own stream of choices: how many one draws must not shift
		// what the next ones are.
		own := rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64()))
		at := time.Now()
		what, err := fault.Do(context.WithoutCancel(ctx), own)
		d := Done{fault.Name, at.Sub(begun), time.Since(at), what}
		done = append(done, d)
		n.log("nemesis %s", d)
		if err != nil {
			return done, fmt.Errorf("nemesis seed %d, fault %d, %s: %w", n.Seed, len(done), fault.Name, err)
		}
	}
	return done, nil
}

func (n *Nemesis) choose(rng *rand.Rand) Fault {
	total := 0
	for _, f := range n.Faults {
		total += max(1, f.Weight)
	}
	at := rng.IntN(total)
	for _, f := range n.Faults {
		if at -= max(1, f.Weight); at < 0 {
			return f
		}
	}
	panic("unreachable: the weights sum up to total")
}

func (n *Nemesis) names() string {
	names := make([]string, len(n.Faults))
	for i, f := range n.Faults {
		names[i] = f.Name
	}
	return strings.Join(names, ", ")
}

func (n *Nemesis) log(format string, args ...any) {
	if n.Log != nil {
		n.Log(format, args...)
	}
}

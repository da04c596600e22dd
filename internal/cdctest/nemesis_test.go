package cdctest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// faultsOf gives two faults that only say what they were told to do, and take a second.
func faultsOf(fail error) []Fault {
	do := func(ctx context.Context, rng *rand.Rand) (string, error) {
		n := rng.IntN(1000)
		<-time.After(time.Second) // of the bubble
		if ctx.Err() != nil {
			return "", errors.New("the fault was cut off")
		}
		return fmt.Sprint(n), fail
	}
	return []Fault{{Name: "kill", Weight: 3, Do: do}, {Name: "pause", Do: do}}
}

func runNemesis(t *testing.T, seed uint64) string {
	var got string
	synctest.Test(t, func(t *testing.T) {
		n := &Nemesis{Seed: seed, Faults: faultsOf(nil), MinGap: time.Second, MaxGap: 3 * time.Second}
		done, err := n.Run(t.Context(), 20)
		if err != nil || len(done) != 20 {
			t.Fatalf("%d faults, %v", len(done), err)
		}
		last := time.Duration(0)
		kills := 0
		for _, d := range done {
			if gap := d.After - last; gap < time.Second || gap >= 3*time.Second {
				t.Errorf("a gap of %v before %s", gap, d)
			}
			last = d.After + d.Took
			if d.Name == "kill" {
				kills++
			}
			got += d.String() + "\n"
		}
		if kills < 8 || kills == 20 {
			t.Errorf("%d kills of 20, their weight is 3 of 4", kills)
		}
	})
	return got
}

func TestNemesisFollowsFromItsSeed(t *testing.T) {
	first, again, other := runNemesis(t, 5), runNemesis(t, 5), runNemesis(t, 6)
	if first != again {
		t.Errorf("one seed, two runs:\n%s\n%s", first, again)
	}
	if first == other {
		t.Error("two seeds, one run")
	}
}

func TestNemesisEndsWithItsContextBehindTheFaultInHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
		defer cancel()
		n := &Nemesis{Seed: 1, Faults: faultsOf(nil), MinGap: time.Second, MaxGap: time.Second}
		done, err := n.Run(ctx, 0)
		if err != nil || len(done) != 1 {
			t.Fatalf("%v, %v: want one fault", done, err)
		}
		ctx2, cancel2 := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel2()
		done, err = n.Run(ctx2, 0)
		if err != nil || len(done) != 1 || done[0].Took != time.Second {
			t.Fatalf("%v, %v: want the fault in hand to be finished", done, err)
		}
	})
}

func TestNemesisSaysWhichFaultFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("did not come back")
		n := &Nemesis{Seed: 42, Faults: faultsOf(broken)}
		done, err := n.Run(t.Context(), 3)
		if !errors.Is(err, broken) || !strings.Contains(err.Error(), "seed 42") || len(done) != 1 {
			t.Fatalf("%v, %v", done, err)
		}
	})
	if _, err := (&Nemesis{}).Run(t.Context(), 1); err == nil {
		t.Error("no faults, no error")
	}
}

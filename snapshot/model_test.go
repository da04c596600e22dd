package snapshot_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

var (
	modelSeed  = flag.Uint64("model.seed", 0, "run this seed of the model alone")
	modelSeeds = flag.Int("model.seeds", 300, "how many seeds the model runs")
	modelSteps = flag.Int("model.steps", 300, "how many lines a script of the model has")
)

// failure is a script that a Merger does not survive.
type failure struct {
	lines []string
	err   error
}

// runScript runs lines; where they fail it gives those up to there.
func runScript(create mergerMaker, lines []string) (f *failure) {
	s := newSim(create)
	s.quiet = true
	at := 0
	defer func() {
		if p := recover(); p != nil {
			f = &failure{lines[:at+1], fmt.Errorf("panic: %v", p)}
		}
	}()
	for i, line := range lines {
		at = i
		if err := s.run(line); err != nil {
			return &failure{lines[:i+1], fmt.Errorf("%s: %w", line, err)}
		}
	}
	return nil
}

// shrink leaves lines out for as long as the rest still fails.
func shrink(create mergerMaker, f *failure) *failure {
	for size := len(f.lines) / 2; size > 0; {
		smaller := false
		for at := 0; at+size < len(f.lines); {
			lines := append(append([]string{}, f.lines[:at]...), f.lines[at+size:]...)
			if g := runScript(create, lines); g != nil {
				f, smaller = g, true
			} else {
				at += size
			}
		}
		if !smaller || size > len(f.lines)/2 {
			size /= 2
		}
	}
	return f
}

// runSeed makes a script by a seed while it runs it.
func runSeed(create mergerMaker, seed uint64, steps int) (f *failure) {
	g := &generator{sim: newSim(create), r: rand.New(rand.NewPCG(seed, 0))}
	g.sim.quiet = true
	defer func() {
		if p := recover(); p != nil {
			f = &failure{g.lines, fmt.Errorf("panic: %v", p)}
		}
	}()
	if err := g.run(steps); err != nil {
		return &failure{g.lines, err}
	}
	return nil
}

func TestMergerAgainstModel(t *testing.T) {
	first, n := uint64(1), uint64(*modelSeeds)
	if *modelSeed != 0 {
		first, n = *modelSeed, 1
	}
	for seed := first; seed < first+n; seed++ {
		if f := runSeed(newMerger, seed, *modelSteps); f != nil {
			small := shrink(newMerger, f)
			s := newSim(newMerger)
			for _, line := range small.lines {
				if s.run(line) != nil {
					break
				}
			}
			t.Fatalf("seed %d (again with -model.seed=%d): %v\nat its smallest: %v\n%s\n%s",
				seed, seed, f.err, small.err, strings.Join(small.lines, "\n"), s.trace.String())
		}
	}
}

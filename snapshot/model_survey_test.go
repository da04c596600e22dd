package snapshot_test

import (
	"regexp"
	"testing"
)

func TestSurvey(t *testing.T) {
	digits := regexp.MustCompile(`[0-9]+`)
	count := map[string]int{}
	first := map[string]uint64{}
	for seed := uint64(1); seed < uint64(*modelSeeds); seed++ {
		if f := runSeed(newMerger, seed, *modelSteps); f != nil {
			k := digits.ReplaceAllString(f.err.Error(), "#")
			if len(k) > 90 {
				k = k[:90]
			}
			count[k]++
			if first[k] == 0 {
				first[k] = seed
			}
		}
	}
	for k, n := range count {
		t.Logf("%d first %d: %s", n, first[k], k)
	}
}

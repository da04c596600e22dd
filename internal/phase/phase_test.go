package phase

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestGaugeIsOneForThePhaseAndNoOther(t *testing.T) {
	g := NewGauge(prometheus.NewRegistry(), Polled())
	g.Set(Polling)
	g.Set(Stopping)
	if n := testutil.CollectAndCount(g.vec); n != len(Polled()) {
		t.Errorf("%d series, want one for each of %d phases", n, len(Polled()))
	}
	for _, p := range Polled() {
		want := 0.0
		if p == Stopping {
			want = 1
		}
		if got := testutil.ToFloat64(g.vec.WithLabelValues(string(p))); got != want {
			t.Errorf("phase %s: %v, want %v", p, got, want)
		}
	}
}

func TestABatchThatTakesLongIsAProblem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Stall
		if s.Took() != 0 || s.Problem("marked") != nil {
			t.Error("a problem, and nothing is on its way")
		}
		s.Delivering(time.Now())
		time.Sleep(StallAfter - 1) // of the bubble's clock
		if s.Took() != 0 {
			t.Error("a problem too early")
		}
		time.Sleep(2 * time.Second)
		problem := s.Problem("marked")
		if len(problem) != 1 || problem[0] != "Kafka has not taken a batch for 7s: waiting for it, nothing is lost and nothing is marked meanwhile" {
			t.Errorf("problem %q", problem)
		}
		if err := Ready(Polling, Polling, problem); err == nil || err.Error() != problem[0] {
			t.Errorf("ready: %v", err)
		}
		s.Delivering(time.Time{})
		if err := Ready(Polling, Polling, s.Problem("marked")); err != nil {
			t.Errorf("not ready: %v", err)
		}
		if err := Ready(Retrying, Polling, nil); err == nil || err.Error() != "phase retrying" {
			t.Errorf("ready: %v", err)
		}
	})
}

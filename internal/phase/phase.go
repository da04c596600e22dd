// Package phase tells what a connector is doing, whatever its source.mode: in the words of
// /status, /readyz and the metrics.
package phase

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Phase is what a connector is doing.
type Phase string

// The phases, in the order of a start. Creating the slot to Streaming are the WAL's.
const (
	Starting     Phase = "starting"
	Connecting   Phase = "connecting"
	CreatingSlot Phase = "creating-slot"
	Standby      Phase = "standby"
	Fencing      Phase = "fencing"
	Loading      Phase = "loading"
	Streaming    Phase = "streaming"
	Polling      Phase = "polling"
	Retrying     Phase = "retrying"
	Stopping     Phase = "stopping"
	Stopped      Phase = "stopped"
)

// WAL are the phases of a connector that streams.
func WAL() []Phase {
	return []Phase{Starting, Connecting, CreatingSlot, Standby, Fencing, Loading, Streaming, Retrying, Stopping, Stopped}
}

// Polled are the phases of one that polls.
func Polled() []Phase {
	return []Phase{Starting, Connecting, Polling, Retrying, Stopping, Stopped}
}

// Gauge is the metric walrelay_state.
type Gauge struct {
	vec    *prometheus.GaugeVec
	phases []Phase
}

// NewGauge makes the metric, with a series for each of the phases.
func NewGauge(reg prometheus.Registerer, phases []Phase) *Gauge {
	g := &Gauge{
		vec: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "walrelay_state", Help: "1 for the phase that the connector is in.",
		}, []string{"phase"}),
		phases: phases,
	}
	if reg != nil {
		reg.MustRegister(g.vec)
	}
	return g
}

// Set is 1 for p and 0 for the others.
func (g *Gauge) Set(p Phase) {
	for _, q := range g.phases {
		v := 0.0
		if q == p {
			v = 1
		}
		g.vec.WithLabelValues(string(q)).Set(v)
	}
}

// Ready tells why a connector does not work, or nil where it does: it is in the phase of
// its work, and nothing is wrong.
func Ready(now, work Phase, problems []string) error {
	if now != work {
		return errors.New("phase " + string(now))
	}
	if len(problems) > 0 {
		return errors.New(problems[0])
	}
	return nil
}

// StallAfter is how long Kafka may take for one batch before the connector counts as
// not doing its job. A commit takes milliseconds; a broker that is restarted, or a new
// leader, a second or two.
const StallAfter = 5 * time.Second

// Stall watches the batch on its way to Kafka; safe from any goroutine.
type Stall struct {
	mu    sync.Mutex
	since time.Time // zero while none is on its way
}

// Delivering notes that a batch is on its way since a moment; zero: none is.
func (s *Stall) Delivering(since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.since = since
}

// Took is how long the batch on its way has been, if that is too long, else 0.
func (s *Stall) Took() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.since.IsZero() {
		return 0
	}
	if took := time.Since(s.since); took >= StallAfter {
		return took
	}
	return 0
}

// Problem says it, or nothing where there is none. waits is what does not happen meanwhile.
func (s *Stall) Problem(waits string) []string {
	took := s.Took()
	if took == 0 {
		return nil
	}
	return []string{fmt.Sprintf("Kafka has not taken a batch for %s: waiting for it, nothing is lost and nothing is %s meanwhile", took.Round(time.Second), waits)}
}

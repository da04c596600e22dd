package polling

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/walrelay/walrelay/internal/phase"
)

// Status is a copy of the poller's state, for /status.
type Status struct {
	Name       string        `json:"name"`
	Mode       string        `json:"mode"` // polling
	Phase      phase.Phase   `json:"phase"`
	Since      time.Time     `json:"since"`
	LagSeconds float64       `json:"lag_seconds"` // age of the oldest pending row
	Records    uint64        `json:"records"`     // published by this process
	Tables     []TableStatus `json:"tables,omitempty"`
	Problems   []string      `json:"problems,omitempty"`
}

// TableStatus is how an outbox table stands, as last measured.
type TableStatus struct {
	Table         string  `json:"table"`
	Pending       int64   `json:"pending_rows"`
	OldestSeconds float64 `json:"oldest_pending_seconds"`
}

// Status gives a copy of the state; safe from any goroutine.
func (p *Poller) Status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.status
	s.Problems = append([]string(nil), s.Problems...)
	for _, w := range p.pending.Waiting() {
		s.Tables = append(s.Tables, TableStatus{Table: w.Table, Pending: w.Rows, OldestSeconds: w.Oldest})
		s.LagSeconds = max(s.LagSeconds, w.Oldest)
	}
	s.Problems = append(s.Problems, p.stall.Problem("marked")...)
	return s
}

// Ready tells why the poller does not poll, or nil where it does.
func (p *Poller) Ready() error {
	s := p.Status()
	return phase.Ready(s.Phase, phase.Polling, s.Problems)
}

// metrics of the poller itself; those of records are the router's.
type metrics struct {
	restarts *prometheus.CounterVec
	state    *phase.Gauge
	isrShort prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer, lag func() float64) *metrics {
	m := &metrics{
		restarts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "walrelay_restarts_total", Help: "Times that polling started over, by reason.",
		}, []string{"reason"}),
		state:    phase.NewGauge(reg, phase.Polled()),
		isrShort: prometheus.NewGauge(prometheus.GaugeOpts{Name: "walrelay_isr_short_partitions", Help: "Partitions written to whose in-sync replicas are fewer than their replicas."}),
	}
	if reg != nil {
		lagSeconds := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "walrelay_lag_seconds", Help: "Age of the oldest row that is not published; 0 when caught up."}, lag)
		reg.MustRegister(m.restarts, lagSeconds, m.isrShort)
	}
	return m
}

func (p *Poller) setPhase(now phase.Phase) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.status.Phase != now {
		p.status.Phase, p.status.Since = now, time.Now()
	}
	p.metrics.state.Set(now)
}

func (p *Poller) setProblem(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.status.Problems = nil
	if text != "" {
		p.status.Problems = []string{text}
	}
}

// published takes over a batch whose marks are committed.
func (p *Poller) published(t *table, n int) {
	p.o.Logger.Debug().Str("table", t.name()).Int("records", n).Msg("published")
	p.mu.Lock()
	defer p.mu.Unlock()
	p.status.Records += uint64(n)
}

// fault counts the attempts since a connection was lost, so that it is said once, with a
// count now and then, and once when it is over.
type fault struct {
	since, said time.Time
	attempts    int
}

// sayEvery is how often a fault that lasts is said again.
const sayEvery = time.Minute

func (p *Poller) lost(err error) {
	f := &p.fault
	f.attempts++
	p.metrics.restarts.WithLabelValues("connection").Inc()
	p.setProblem(err.Error())
	p.setPhase(phase.Retrying)
	now := time.Now()
	if f.attempts > 1 && now.Sub(f.said) < sayEvery {
		return
	}
	if f.attempts == 1 {
		f.since = now
	}
	f.said = now
	p.o.Logger.Warn().Err(err).Int("attempts", f.attempts).Msg("starting over: what was published and is not marked is published again")
}

func (p *Poller) recovered() {
	f := p.fault
	p.fault = fault{}
	p.setProblem("")
	if f.attempts > 0 {
		p.o.Logger.Info().Int("attempts", f.attempts).Dur("took", time.Since(f.since)).Msg("recovered")
	}
}

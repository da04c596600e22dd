package relay

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/router"
)

// Phase is what a connector is doing.
type Phase string

// The phases, in the order of a start.
const (
	PhaseStarting     Phase = "starting"
	PhaseConnecting   Phase = "connecting"
	PhaseCreatingSlot Phase = "creating-slot"
	PhaseStandby      Phase = "standby"
	PhaseFencing      Phase = "fencing"
	PhaseLoading      Phase = "loading"
	PhaseStreaming    Phase = "streaming"
	PhaseRetrying     Phase = "retrying"
	PhaseStopping     Phase = "stopping"
	PhaseStopped      Phase = "stopped"
)

var phases = []Phase{PhaseStarting, PhaseConnecting, PhaseCreatingSlot, PhaseStandby, PhaseFencing, PhaseLoading, PhaseStreaming, PhaseRetrying, PhaseStopping, PhaseStopped}

// Status is a copy of the connector's state, for /status.
type Status struct {
	Phase        Phase     `json:"phase"`
	Since        time.Time `json:"since"`
	Slot         string    `json:"slot"`
	Position     string    `json:"position"`  // committed to Kafka
	Confirmed    string    `json:"confirmed"` // confirmed to PostgreSQL
	LagBytes     int64     `json:"lag_bytes"`
	LagSeconds   float64   `json:"lag_seconds"`
	RetainedWAL  int64     `json:"slot_retained_wal_bytes"`
	BufferBytes  int64     `json:"buffer_bytes"`
	Transactions uint64    `json:"transactions"`
	Records      uint64    `json:"records"`
	// Snapshot is how far the tables are read; absent where none is known.
	Snapshot *SnapshotStatus `json:"snapshot,omitempty"`
	// Replay is how far back replay reaches; absent where there is no anchor.
	Replay *ReplayStatus `json:"replay,omitempty"`
	// WaitingFor are transactions that the creation of the slot waits for.
	WaitingFor []string `json:"waiting_for,omitempty"`
	Problems   []string `json:"problems,omitempty"`
	// Warnings are what the configuration leaves out on purpose, such as the updates of
	// tables without identity. They do not make the connector unready.
	Warnings []string `json:"warnings,omitempty"`
}

// stallAfter is how long Kafka may take for one batch before the connector counts as
// not doing its job. A commit takes milliseconds; a broker that is restarted, or a new
// leader, a second or two.
const stallAfter = 5 * time.Second

// Status gives a copy of the state; safe from any goroutine.
func (r *Relay) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.status
	s.Slot = r.o.Slot
	s.WaitingFor = append([]string(nil), s.WaitingFor...)
	s.Problems = append([]string(nil), s.Problems...)
	s.Warnings = append([]string(nil), s.Warnings...)
	if r.markProblem != "" {
		s.Problems = append(s.Problems, r.markProblem)
	}
	if r.marksWait {
		s.Problems = append(s.Problems, "delivery waits until outbox rows that were delivered are marked")
	}
	for _, root := range slices.Sorted(maps.Keys(r.partitions)) {
		s.Warnings = append(s.Warnings, r.partitions[root]...)
	}
	if took := r.stalledLocked(); took > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("Kafka has not taken a batch for %s: waiting for it, nothing is lost and nothing is confirmed meanwhile", took.Round(time.Second)))
	}
	return s
}

// Ready tells why the connector is not streaming, or nil where it is.
func (r *Relay) Ready() error {
	s := r.Status()
	if s.Phase != PhaseStreaming {
		return errors.New("phase " + string(s.Phase))
	}
	if len(s.Problems) > 0 {
		return errors.New(s.Problems[0])
	}
	return nil
}

// metrics of the relay itself; those of records are the router's.
type metrics struct {
	restarts    *prometheus.CounterVec
	state       *prometheus.GaugeVec
	position    prometheus.Gauge
	confirmed   prometheus.Gauge
	buffer      prometheus.Gauge
	lagBytes    prometheus.Gauge
	lagSeconds  prometheus.Gauge
	retainedWAL prometheus.Gauge
	isrShort    prometheus.Gauge

	snapshotRows   *prometheus.CounterVec
	snapshotTables *prometheus.GaugeVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	m := &metrics{
		restarts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "walrelay_restarts_total", Help: "Times the stream started over from the checkpoint, by reason.",
		}, []string{"reason"}),
		state: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "walrelay_state", Help: "1 for the phase that the connector is in.",
		}, []string{"phase"}),
		position:    gauge("walrelay_checkpoint_position", "LSN of the newest committed checkpoint, as a number."),
		confirmed:   gauge("walrelay_confirmed_position", "LSN confirmed to PostgreSQL, as a number."),
		buffer:      gauge("walrelay_buffer_bytes", "Bytes read from PostgreSQL and not yet committed in Kafka."),
		lagBytes:    gauge("walrelay_lag_bytes", "WAL written and not yet delivered."),
		lagSeconds:  gauge("walrelay_lag_seconds", "Age of the oldest WAL that is not delivered; 0 when caught up."),
		retainedWAL: gauge("walrelay_slot_retained_wal_bytes", "WAL that the slot keeps from being removed."),
		snapshotRows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "walrelay_snapshot_rows_total", Help: "Rows read by snapshots and sent on, by table.",
		}, []string{"table"}),
		snapshotTables: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "walrelay_snapshot_tables", Help: "Tables by the state of their snapshot.",
		}, []string{"state"}),
		isrShort: gauge("walrelay_isr_short_partitions", "Partitions written to whose in-sync replicas are fewer than their replicas."),
	}
	if reg != nil {
		reg.MustRegister(m.restarts, m.state, m.position, m.confirmed, m.buffer, m.lagBytes, m.lagSeconds, m.retainedWAL, m.isrShort, m.snapshotRows, m.snapshotTables)
	}
	return m
}

func (r *Relay) setPhase(p Phase) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.status.Phase != p {
		r.status.Phase, r.status.Since = p, time.Now()
	}
	for _, q := range phases {
		v := 0.0
		if q == p {
			v = 1
		}
		r.metrics.state.WithLabelValues(string(q)).Set(v)
	}
}

func (r *Relay) setProblem(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status.Problems = nil
	if text != "" {
		r.status.Problems = []string{text}
	}
}

// setMarkProblem notes what keeps delivered outbox rows from being marked; empty: nothing.
func (r *Relay) setMarkProblem(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.markProblem = text
}

// setMarksWait notes whether the stream waits for marks.
func (r *Relay) setMarksWait(wait bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.marksWait = wait
}

func (r *Relay) setWaiting(list []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status.WaitingFor = list
}

// observe takes over what the loop knows.
func (r *Relay) observe(l *loop) {
	buffered := l.s.stream.Buffered() + int64(l.filling.Bytes())
	if l.inFlight != nil {
		buffered += int64(l.inFlight.Bytes())
	}
	r.metrics.buffer.Set(float64(buffered))
	r.mu.Lock()
	r.status.BufferBytes = buffered
	r.mu.Unlock()
}

// delivered takes over a committed batch.
func (r *Relay) delivered(b *router.Batch, p checkpoint.Position) {
	r.setPosition(p)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status.Transactions += uint64(b.Transactions())
	r.status.Records += uint64(b.Records())
}

// delivering notes that a batch is on its way since a moment; zero: none is.
func (r *Relay) delivering(since time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.deliverySince = since
}

// stalled is how long the batch on its way has been, if that is too long, else 0.
func (r *Relay) stalled() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stalledLocked()
}

func (r *Relay) stalledLocked() time.Duration {
	if r.deliverySince.IsZero() {
		return 0
	}
	if took := time.Since(r.deliverySince); took >= stallAfter {
		return took
	}
	return 0
}

// setWarnings says what is left out, once and not at every start over.
func (r *Relay) setWarnings(log zerolog.Logger, list []string) {
	r.mu.Lock()
	before := r.status.Warnings
	r.status.Warnings = list
	r.mu.Unlock()
	for _, w := range list {
		if !slices.Contains(before, w) {
			log.Warn().Msg(w)
		}
	}
}

// partitionWarnings is how many are kept of a table; older ones are in the log.
const partitionWarnings = 10

// warnPartitions notes what partitions of a table did beside the stream, until the table is
// repaired.
func (r *Relay) warnPartitions(root uint32, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.partitions[root]
	if slices.Contains(list, text) {
		return
	}
	if r.partitions == nil {
		r.partitions = map[uint32][]string{}
	}
	list = append(list, text)
	r.partitions[root] = list[max(0, len(list)-partitionWarnings):]
}

// clearPartitions forgets it: consumers have been told to empty the table.
func (r *Relay) clearPartitions(root uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.partitions, root)
}

// setSnapshot notes how far the tables are read.
func (r *Relay) setSnapshot(s *SnapshotStatus) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status.Snapshot = s
}

// position is the newest committed one.
func (r *Relay) position() checkpoint.LSN {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.committed
}

// setPosition notes where a session goes on from.
func (r *Relay) setPosition(p checkpoint.Position) {
	r.metrics.position.Set(float64(p.LSN))
	r.mu.Lock()
	defer r.mu.Unlock()
	r.committed = p.LSN
	r.status.Position = p.String()
}

// setConfirmed notes what PostgreSQL may forget.
func (r *Relay) setConfirmed(lsn checkpoint.LSN) {
	r.metrics.confirmed.Set(float64(lsn))
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status.Confirmed = lsn.String()
}

// sample takes over what the monitor measured.
func (r *Relay) sample(lagBytes int64, lagSeconds float64, retained, isrShort int64) {
	r.metrics.lagBytes.Set(float64(lagBytes))
	r.metrics.lagSeconds.Set(lagSeconds)
	r.metrics.retainedWAL.Set(float64(retained))
	r.metrics.isrShort.Set(float64(isrShort))
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status.LagBytes, r.status.LagSeconds, r.status.RetainedWAL = lagBytes, lagSeconds, retained
}

package relay

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/phase"
	"github.com/walrelay/walrelay/router"
)

// Status is a copy of the connector's state, for /status.
type Status struct {
	Name         string      `json:"name"`
	Phase        phase.Phase `json:"phase"`
	Since        time.Time   `json:"since,omitzero"`
	Slot         string      `json:"slot"`
	Position     string      `json:"position"`  // committed to Kafka
	Confirmed    string      `json:"confirmed"` // confirmed to PostgreSQL
	LagBytes     int64       `json:"lag_bytes"`
	LagSeconds   float64     `json:"lag_seconds"`
	CatchUp      Seconds     `json:"catch_up_seconds"` // until all is delivered at these rates, or "never"
	Consumed     float64     `json:"delivered_bytes_per_second"`
	Produced     float64     `json:"written_bytes_per_second"`
	RetainedWAL  int64       `json:"slot_retained_wal_bytes"`
	BufferBytes  int64       `json:"buffer_bytes"`
	RecordRate   float64     `json:"records_per_second"`
	Transactions uint64      `json:"transactions"`
	Records      uint64      `json:"records"`
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

// Status gives a copy of the state; safe from any goroutine.
func (r *Relay) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.status
	s.Name, s.Slot = r.o.Router.Name, r.o.Slot
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
	s.Problems = append(s.Problems, r.stall.Problem("confirmed")...)
	s.LagSeconds, s.CatchUp = r.lagNow(time.Now())
	return s
}

// lagNow is the lag as it is known at the moment: as sampled last while the stream runs. While
// it does not, what is committed waits, from the last sample on at the most, and nothing catches
// up. What a standby does not deliver another instance does. r.mu is held.
func (r *Relay) lagNow(now time.Time) (seconds float64, catchUp Seconds) {
	switch {
	case r.sampled || r.status.Phase == phase.Stopped:
		return r.status.LagSeconds, r.status.CatchUp
	case r.status.Phase == phase.Standby:
		return 0, 0
	}
	return r.status.LagSeconds + now.Sub(r.sampledAt).Seconds(), Seconds(math.Inf(1))
}

// Ready tells why the connector is not streaming, or nil where it is.
func (r *Relay) Ready() error {
	s := r.Status()
	return phase.Ready(s.Phase, phase.Streaming, s.Problems)
}

// metrics of the relay itself; those of records are the router's.
type metrics struct {
	restarts    *prometheus.CounterVec
	state       *phase.Gauge
	position    prometheus.Gauge
	confirmed   prometheus.Gauge
	buffer      prometheus.Gauge
	lagBytes    prometheus.Gauge
	retainedWAL prometheus.Gauge
	isrShort    prometheus.Gauge

	snapshotRows   *prometheus.CounterVec
	snapshotTables *prometheus.GaugeVec
}

func newMetrics(reg prometheus.Registerer, lag func() (seconds, catchUp float64)) *metrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	m := &metrics{
		restarts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "walrelay_restarts_total", Help: "Times the stream started over from the checkpoint, by reason.",
		}, []string{"reason"}),
		state:       phase.NewGauge(reg, phase.WAL()),
		position:    gauge("walrelay_checkpoint_position", "LSN of the newest committed checkpoint, as a number."),
		confirmed:   gauge("walrelay_confirmed_position", "LSN confirmed to PostgreSQL, as a number."),
		buffer:      gauge("walrelay_buffer_bytes", "Bytes read from PostgreSQL and not yet committed in Kafka."),
		lagBytes:    gauge("walrelay_lag_bytes", "WAL written and not yet delivered."),
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
		reg.MustRegister(
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "walrelay_lag_seconds", Help: "Age of the oldest WAL that is not delivered; 0 when caught up, and on a standby.",
			}, func() float64 { seconds, _ := lag(); return seconds }),
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "walrelay_catch_up_seconds", Help: "Time until all is delivered, at the rates of the last seconds; +Inf for never.",
			}, func() float64 { _, catchUp := lag(); return catchUp }))
		reg.MustRegister(m.restarts, m.position, m.confirmed, m.buffer, m.lagBytes, m.retainedWAL, m.isrShort, m.snapshotRows, m.snapshotTables)
	}
	return m
}

func (r *Relay) setPhase(p phase.Phase) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p == phase.Standby || r.status.Phase == phase.Standby { // what it knew was another instance's to deliver
		r.metrics.lagBytes.Set(0)
		r.status.LagBytes, r.status.LagSeconds, r.sampledAt = 0, 0, time.Now()
	}
	if r.status.Phase != p {
		r.status.Phase, r.status.Since = p, time.Now()
	}
	r.metrics.state.Set(p)
	r.sampled = r.sampled && (p == phase.Streaming || p == phase.Stopping)
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

// standing is the newest committed position, and how many records were delivered.
func (r *Relay) standing() (checkpoint.Position, uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.committed, r.status.Records
}

// setPosition notes where a session goes on from.
func (r *Relay) setPosition(p checkpoint.Position) {
	r.metrics.position.Set(float64(p.LSN))
	r.mu.Lock()
	defer r.mu.Unlock()
	r.committed = p
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
func (r *Relay) sample(lag Lag, retained, isrShort int64) {
	r.metrics.lagBytes.Set(float64(lag.Bytes))
	r.metrics.retainedWAL.Set(float64(retained))
	r.metrics.isrShort.Set(float64(isrShort))
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sampled, r.sampledAt = true, time.Now()
	r.status.LagBytes, r.status.LagSeconds, r.status.CatchUp = lag.Bytes, lag.Seconds, lag.CatchUp
	r.status.Consumed, r.status.Produced, r.status.RecordRate, r.status.RetainedWAL = lag.Consumed, lag.Produced, lag.Records, retained
}

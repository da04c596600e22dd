package router

import (
	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are what the producer counts. Delivered counts records; the other two
// outcomes count changes, and exactly one of the three goes up for each change.
type Metrics struct {
	Records      *prometheus.CounterVec
	Transactions prometheus.Counter
	Delivery     prometheus.Histogram
	// Sequences counts the SequenceFaults that the router reports.
	Sequences *prometheus.CounterVec
}

// NewMetrics makes and registers the metrics; reg may be nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		Records: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "walrelay_records_total",
			Help: "Records delivered, and changes dead-lettered or excluded, by topic.",
		}, []string{"topic", "outcome"}),
		Transactions: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "walrelay_transactions_total",
			Help: "Source transactions delivered.",
		}),
		Delivery: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "walrelay_delivery_seconds",
			Help:    "Time from a source commit to the Kafka commit of its records, of the oldest transaction in each batch.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 18),
		}),
		Sequences: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "walrelay_outbox_sequence_faults_total",
			Help: "Outbox events whose aggregate_seq left a gap behind the aggregate's one before, or went backward.",
		}, []string{"table", "kind"}),
	}
	if reg != nil {
		reg.MustRegister(m.Records, m.Transactions, m.Delivery, m.Sequences)
	}
	return m
}

package router

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/plugin/kprom"
)

// kafkaMetrics are the metrics of the process's Kafka clients, walrelay_kafka_*: connections,
// requests, bytes and batches. Each session makes its clients anew, and the counters go on.
type kafkaMetrics struct {
	*kprom.Metrics
	once sync.Once
}

// ClientMetrics makes them, as the hooks of clients. It is called once for a registry.
func ClientMetrics(reg prometheus.Registerer) []kgo.Hook {
	return []kgo.Hook{&kafkaMetrics{Metrics: kprom.NewMetrics("walrelay_kafka", kprom.Registerer(ofAllClients{reg}))}}
}

// OnNewClient registers them with the first client.
func (m *kafkaMetrics) OnNewClient(cl *kgo.Client) {
	m.once.Do(func() { m.Metrics.OnNewClient(cl) })
}

// OnClientClosed leaves them: there are other clients, or there will be.
func (m *kafkaMetrics) OnClientClosed(*kgo.Client) {}

// ofAllClients leaves out the gauges that ask one client.
type ofAllClients struct{ prometheus.Registerer }

// MustRegister registers the others.
func (r ofAllClients) MustRegister(list ...prometheus.Collector) {
	for _, c := range list {
		if _, ofOne := c.(prometheus.GaugeFunc); !ofOne {
			r.Registerer.MustRegister(c)
		}
	}
}

package polling

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/internal/phase"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// Options configures a Poller.
type Options struct {
	DSN         string
	AppName     string // application_name of our connections
	Slot        string // that the connector would have with source.mode wal
	Outbox      []Outbox
	Interval    time.Duration // how long to wait where nothing was found
	StopTimeout time.Duration

	Kafka     router.ClientOptions
	Publisher router.PublisherOptions
	Topics    router.TopicSpec
	Router    router.Options
	Limits    router.Limits

	// UntilCaughtUp ends Run once everything committed before it is published.
	UntilCaughtUp bool

	Logger     zerolog.Logger
	Registerer prometheus.Registerer
}

// Poller publishes outbox tables until it is stopped.
type Poller struct {
	o             Options
	connect       replication.Connector
	routerMetrics *router.Metrics
	metrics       *metrics
	pending       *outbox.Pending

	sourceSeen, kafkaSeen bool            // each was reached once
	said                  map[string]bool // what is said once
	fault                 fault

	stall phase.Stall

	mu     sync.Mutex
	status Status
}

// New makes a Poller; Run runs it.
func New(o Options) *Poller {
	o.Router.Polled = true
	p := &Poller{
		o:             o,
		connect:       replication.NewConnector(o.DSN, o.AppName),
		routerMetrics: router.NewMetrics(o.Registerer),
		pending:       outbox.NewPending(o.Registerer),
		said:          map[string]bool{},
		status:        Status{Name: o.Router.Name, Mode: "polling", Phase: phase.Starting, Since: time.Now()},
	}
	p.metrics = newMetrics(o.Registerer, func() float64 { return p.Status().LagSeconds })
	return p
}

// Run polls until ctx ends, which is the signal to stop: then the batch in hand is
// published and marked, within StopTimeout, and Run returns nil. Lost connections are
// waited out for as long as it takes. It returns an error where the state of database or
// Kafka forbids to go on (*checkpoint.Refusal), where the configuration is wrong, where a
// row may not be dead-lettered, or where a last batch could not be published in time.
func (p *Poller) Run(ctx context.Context) error {
	stopCounting := p.countPending(ctx)
	defer func() {
		stopCounting()
		p.setPhase(phase.Stopped)
		p.o.Logger.Info().Uint64("records", p.Status().Records).Msg("polling ended")
	}()
	const first, most = 100 * time.Millisecond, 10 * time.Second
	wait := first
	for {
		began := time.Now()
		err := p.session(ctx)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, errUnfinished):
			return err
		case ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))):
			return nil // stopped with nothing in hand
		case errors.Is(err, errShape):
			continue
		case p.isFatal(err):
			return err
		case ctx.Err() != nil:
			return fmt.Errorf("stopped while not connected; what is not marked is published by the next start: %w", err)
		}
		if time.Since(began) > steadyAfter {
			wait = first
		}
		p.lost(err)
		select {
		case <-time.After(wait/2 + rand.N(wait/2+1)):
		case <-ctx.Done():
			return nil
		}
		wait = min(2*wait, most)
	}
}

// steadyAfter is how long a session must have lasted for the next fault to be a new one.
const steadyAfter = 30 * time.Second

// isFatal tells whether a retry would meet the error again. What is neither of the
// following has to do with a connection or a server, and passes.
func (p *Poller) isFatal(err error) bool {
	var stop *router.StopError
	switch {
	case checkpoint.IsRefusal(err), errors.As(err, &stop):
		return true
	case replication.IsConfiguration(err):
		return !p.sourceSeen
	case router.IsConfiguration(err):
		return !p.kafkaSeen
	}
	return false
}

// countPending counts what waits to be published, on its own and for as long as Run lasts, so
// that it is known while Kafka cannot be reached. The function that it returns ends it.
func (p *Poller) countPending(ctx context.Context) func() {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.pending.Run(ctx, p.connect, p.pendingTables, p.o.Logger)
	}()
	return func() {
		cancel()
		<-ended
	}
}

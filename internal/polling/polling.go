package polling

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/router/format"
)

// Options configures a Poller.
type Options struct {
	DSN         string
	AppName     string // application_name of our connections
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

	mu     sync.Mutex
	status Status
}

// New makes a Poller; Run runs it.
func New(o Options) *Poller {
	o.Router.Polled = true
	return &Poller{
		o:             o,
		connect:       replication.NewConnector(o.DSN, o.AppName),
		routerMetrics: router.NewMetrics(o.Registerer),
		metrics:       newMetrics(o.Registerer),
		pending:       outbox.NewPending(o.Registerer),
		said:          map[string]bool{},
		status:        Status{Mode: "polling", Phase: PhaseStarting, Since: time.Now()},
	}
}

// Run polls until ctx ends, which is the signal to stop: then the batch in hand is
// published and marked, within StopTimeout, and Run returns nil. Lost connections are
// waited out for as long as it takes. It returns an error where the state of database or
// Kafka forbids to go on (*checkpoint.Refusal), where the configuration is wrong, where a
// row may not be dead-lettered, or where a last batch could not be published in time.
func (p *Poller) Run(ctx context.Context) error {
	defer func() {
		p.setPhase(PhaseStopped)
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

// session is one pass from connecting to a fault.
type session struct {
	p   *Poller
	log zerolog.Logger

	conn      *replication.Conn
	admin     *router.Client
	catalog   *router.Catalog
	publisher *router.Publisher
	router    *router.Router
	types     format.Resolver
	tables    []*table
	batch     *router.Batch
}

func (p *Poller) session(ctx context.Context) error {
	s := &session{p: p, log: p.o.Logger}
	defer s.close(ctx)
	p.setPhase(PhaseConnecting)
	if err := s.open(ctx); err != nil {
		return err
	}
	p.recovered()
	p.setPhase(PhasePolling)
	s.log.Info().Int("tables", len(s.tables)).Dur("interval", p.o.Interval).Msg("polling")
	watching, stop := context.WithCancel(ctx)
	altered := make(chan error, 1)
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		s.watch(watching, altered)
	}()
	err := s.poll(ctx, altered)
	stop()
	<-finished
	return err
}

// open connects to both sides and looks, changing nothing but missing topics.
func (s *session) open(ctx context.Context) (err error) {
	o := &s.p.o
	if s.conn, err = s.p.connect(ctx); err != nil {
		return err
	}
	s.p.sourceSeen = true
	if s.admin, err = router.NewAdminClient(o.Kafka); err != nil {
		return err
	}
	// Before any row is locked: a transaction that waits for Kafka holds vacuum back.
	if err := s.ping(ctx); err != nil {
		return err
	}
	s.p.kafkaSeen = true
	s.catalog = router.NewCatalog(s.admin)
	if err := s.inspect(ctx); err != nil {
		return err
	}
	if topic := o.Router.DeadLetterTopic; topic != "" {
		if err := s.catalog.Ensure(ctx, []string{topic}, o.Topics); err != nil {
			return fmt.Errorf("look at dead-letter topic %s: %w", topic, err)
		}
	}
	s.batch = router.NewBatch(o.Limits)
	s.publisher, err = router.NewPublisher(o.Publisher, s.catalog, s.p.routerMetrics)
	return err
}

func (s *session) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	if err := s.admin.Ping(ctx); err != nil {
		return fmt.Errorf("connect to Kafka at %s: %w; check kafka.brokers, kafka.tls and kafka.sasl, and that the brokers run", strings.Join(s.p.o.Kafka.Brokers, ","), err)
	}
	return nil
}

func (s *session) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if s.publisher != nil {
		s.publisher.Close()
	}
	if s.admin != nil {
		s.admin.Close()
	}
	if s.conn != nil {
		if err := s.conn.Close(ctx); err != nil {
			s.log.Debug().Err(err).Msg("database connection closed")
		}
	}
}

// say runs f once in the life of the Poller for what.
func (s *session) say(what string, f func()) {
	if !s.p.said[what] {
		s.p.said[what] = true
		f()
	}
}

func (s *session) routerOptions(database string) router.Options {
	o := s.p.o.Router
	o.Database = database
	o.Types = func(oid uint32) (*format.Type, error) { return s.types.Type(oid), nil }
	return o
}

// poll goes round the tables. It waits only where no table had anything for us.
func (s *session) poll(ctx context.Context, altered <-chan error) error {
	caughtUp := make([]bool, len(s.tables))
	for {
		busy, all := false, true
		for i, t := range s.tables {
			r, err := s.round(ctx, t)
			if err != nil {
				return err
			}
			busy = busy || r.published > 0
			caughtUp[i] = caughtUp[i] || r.complete
			all = all && caughtUp[i]
		}
		if s.p.o.UntilCaughtUp && all {
			return nil
		}
		wait := s.p.o.Interval
		if busy {
			wait = 0
		}
		select {
		case err := <-altered:
			return err
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

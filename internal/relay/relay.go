package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/internal/phase"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// Options configures a Relay.
type Options struct {
	DSN         string
	AppName     string // application_name of our connections
	ConnOptions []replication.ConnOption

	Slot         string
	Publications replication.PlanOptions
	Existing     bool // publication-mode: existing
	Takeover     bool // end the walsender that holds the slot, once
	// Rewind moves the checkpoint back, before anything else and once; nil for not.
	Rewind func(ctx context.Context) error

	Kafka      router.ClientOptions
	Producer   router.ProducerOptions
	Topics     router.TopicSpec
	Checkpoint ckafka.Options
	Router     router.Options
	Snapshot   SnapshotOptions
	// After says by "schema.table" what becomes of delivered rows: outbox.Mark or
	// outbox.Delete; a table that is not there is kept as it is.
	After  map[string]string
	Anchor AnchorOptions
	// MessagePrefixes are the globs of captured messages; with none the message topic
	// is not created.
	MessagePrefixes []string

	Limits      router.Limits
	Buffer      int64 // bytes read ahead of the batch
	MaxDelay    time.Duration
	StopTimeout time.Duration

	// UntilCaughtUp ends Run once everything committed before it is in Kafka.
	UntilCaughtUp bool
	// ExitOnFenced ends Run when another instance took over, instead of standing by.
	ExitOnFenced bool

	Logger     zerolog.Logger
	Registerer prometheus.Registerer
}

// plannedTables are the planned tables that are not outboxes: those with a topic of
// their own.
func (o *Options) plannedTables(plan replication.Plan) []replication.Table {
	isOutbox := map[string]bool{}
	for _, t := range o.Publications.Outbox {
		isOutbox[t] = true
	}
	var tables []replication.Table
	for _, list := range [][]replication.Table{plan.All, plan.Insert} {
		for _, t := range list {
			if !isOutbox[t.String()] {
				tables = append(tables, t)
			}
		}
	}
	return tables
}

// Relay is the connector.
type Relay struct {
	o             Options
	connect       replication.Connector
	primary       replication.Connector // where tables are read
	base          context.Context       // not cancelled by the signal to stop
	routerMetrics *router.Metrics
	metrics       *metrics
	pending       *outbox.Pending

	anchor   *anchor
	target   checkpoint.LSN // until-caught-up; set once, by the first session
	tookOver bool
	rewound  bool

	sourceSeen, kafkaSeen bool            // each was reached once
	resumed               bool            // a checkpoint was read or written, so there has to be one
	saidOutbox            bool            // which columns of the outbox tables were recognised
	saidLoose             bool            // which of them have no unique key
	saidUnsettled         map[uint32]bool // those whose rows have no order
	fault                 fault
	birth                 *checkpoint.Birth // of a slot that this process made
	lag                   lagMeter          // the monitor's, which the sessions have one after the other

	stall phase.Stall

	mu          sync.Mutex
	status      Status
	committed   checkpoint.Position
	markProblem string              // what keeps delivered outbox rows from being marked
	marksWait   bool                // the stream waits for that
	partitions  map[uint32][]string // warnings, by table
	anchored    checkpoint.Anchor   // zero while it is not known
	sampled     bool                // the lag is that of the stream that runs
	sampledAt   time.Time           // when the lag was last known, or the process began
}

// New makes a Relay; Run runs it.
func New(o Options) *Relay {
	primary := o.Snapshot.PrimaryDSN
	if primary == "" {
		primary = o.DSN
	}
	r := &Relay{
		o:             o,
		connect:       replication.NewConnector(o.DSN, o.AppName, o.ConnOptions...),
		primary:       replication.NewConnector(primary, o.AppName, o.ConnOptions...),
		routerMetrics: router.NewMetrics(o.Registerer),
		pending:       outbox.NewPending(o.Registerer),
		status:        Status{Phase: phase.Starting, Since: time.Now()},
		sampledAt:     time.Now(),
	}
	r.metrics = newMetrics(o.Registerer, func() (float64, float64) {
		r.mu.Lock()
		defer r.mu.Unlock()
		seconds, catchUp := r.lagNow(time.Now())
		return seconds, float64(catchUp)
	})
	r.anchor = newAnchor(r)
	return r
}

// Run relays until ctx ends, which is the signal to stop: then the batch in hand is
// delivered and confirmed and Run returns nil. Lost connections are waited out for as
// long as it takes. It returns an error where the state of database or Kafka forbids
// to go on (*checkpoint.Refusal), where the configuration is wrong, or where a last
// batch could not be delivered in time.
func (r *Relay) Run(ctx context.Context) error {
	r.base = context.WithoutCancel(ctx)
	if len(r.o.After) > 0 {
		end := r.countPending(ctx)
		defer end()
	}
	wait := newBackoff(100*time.Millisecond, 10*time.Second)
	for {
		began := time.Now()
		err := newSession(r).run(ctx)
		switch {
		case err == nil:
			r.setPhase(phase.Stopped)
			return nil
		case ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))):
			// Stopped before anything was in hand.
			r.setPhase(phase.Stopped)
			return nil
		}
		verdict, reason := r.classify(err)
		if verdict == fatal {
			r.setPhase(phase.Stopped)
			return err
		}
		r.metrics.restarts.WithLabelValues(reason).Inc()
		if time.Since(began) > steadyAfter {
			wait.reset()
		}
		r.lost(r.o.Logger, err, reason)
		if verdict == restart {
			continue
		}
		if ctx.Err() != nil {
			return fmt.Errorf("stopped while not connected, the batch in hand is delivered by the next start: %w", err)
		}
		if err := wait.sleep(ctx); err != nil {
			r.setPhase(phase.Stopped)
			return nil
		}
	}
}

// steadyAfter is how long a session must have lasted for the next fault to be a new
// one and not the same again.
const steadyAfter = 30 * time.Second

// fault counts the attempts since a connection was lost, so that it is said once, with
// a count now and then, and once when it is over.
type fault struct {
	reason   string
	since    time.Time
	attempts int
	said     time.Time
}

// sayEvery is how often a fault that lasts is said again.
const sayEvery = time.Minute

func (r *Relay) lost(log zerolog.Logger, err error, reason string) {
	f := &r.fault
	f.attempts++
	r.setProblem(err.Error())
	r.setPhase(phase.Retrying)
	now := time.Now()
	if f.attempts > 1 && f.reason == reason && now.Sub(f.said) < sayEvery {
		return
	}
	if f.attempts == 1 {
		f.since = now
	}
	f.reason, f.said = reason, now
	log.Warn().Err(err).Str("reason", reason).Int("attempts", f.attempts).Msg("starting over from the checkpoint")
}

// recovered says that a fault is over.
func (r *Relay) recovered(log zerolog.Logger) {
	f := r.fault
	r.fault = fault{}
	r.setProblem("")
	r.setWaiting(nil)
	if f.attempts > 0 {
		log.Info().Str("reason", f.reason).Int("attempts", f.attempts).Dur("took", time.Since(f.since)).Msg("recovered")
	}
}

func (r *Relay) sourceReached() { r.sourceSeen = true }
func (r *Relay) kafkaReached()  { r.kafkaSeen = true }

func (r *Relay) logChanges(log zerolog.Logger, c replication.Changes) {
	if c.IsZero() {
		return
	}
	for _, name := range c.Created {
		log.Info().Str("publication", name).Msg("publication created")
	}
	for _, name := range c.Altered {
		log.Warn().Str("publication", name).Msg("publication options were not walrelay's and are set again: changes of a kind that it did not publish meanwhile are missing")
	}
	say := func(tables []replication.PublishedTable, msg string) {
		const shown = 20
		for i, t := range tables {
			if i == shown {
				log.Info().Int("more", len(tables)-shown).Msg(msg)
				return
			}
			log.Info().Str("table", t.String()).Msg(msg)
		}
	}
	say(c.Added, "table added to the publication")
	say(c.Removed, "table removed from the publication")
	say(c.Moved, "table moved to the other publication")
}

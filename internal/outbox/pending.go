package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/replication"
)

// Pending counts the rows of outbox tables whose events are not in Kafka, and tells how
// long the oldest has waited. It asks the tables, and so does it while Kafka is down, or
// another instance holds the slot.
type Pending struct {
	rows, oldest *prometheus.GaugeVec
	connect      replication.Connector
	log          zerolog.Logger
	// tables finds the tables to count, by a connection to the primary. An error beside some is
	// about others.
	tables func(ctx context.Context, conn *pgx.Conn) ([]Table, error)

	counted map[string]bool
	since   map[string]time.Time // since when a table without a time has had pending rows
	said    string

	mu      sync.Mutex
	waiting []Waiting
}

// Waiting is how a table stood when it was counted last.
type Waiting struct {
	Table  string
	Rows   int64
	Oldest float64 // seconds; 0 where there are none
}

// Waiting gives the tables as they were counted last; safe from any goroutine.
func (p *Pending) Waiting() []Waiting {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.waiting)
}

const (
	// pendingInterval is how often is counted, and pendingShare the part of the time that counting may
	// take: a count that took a second comes every 50 seconds.
	pendingInterval = 5 * time.Second
	pendingShare    = 50
	// pendingTimeout ends a count that would read a large table again and again for want of an index.
	pendingTimeout = 5 * time.Second
)

// NewPending makes a Pending and its metrics.
func NewPending(reg prometheus.Registerer) *Pending {
	p := &Pending{
		rows: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "walrelay_outbox_pending_rows", Help: "Rows of an outbox table that are not marked, or not deleted, yet.",
		}, []string{"table"}),
		oldest: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "walrelay_outbox_oldest_pending_seconds", Help: "Age of the oldest of them; 0 where there are none.",
		}, []string{"table"}),
		counted: map[string]bool{}, since: map[string]time.Time{},
	}
	if reg != nil {
		reg.MustRegister(p.rows, p.oldest)
	}
	return p
}

// Run counts until ctx ends. tables finds the tables, connect leads to the primary.
func (p *Pending) Run(ctx context.Context, connect replication.Connector, tables func(context.Context, *pgx.Conn) ([]Table, error), log zerolog.Logger) {
	p.connect, p.tables, p.log = connect, tables, log
	var conn *pgx.Conn
	defer func() { closeQuietly(ctx, conn) }()
	for {
		pause := pendingInterval
		var err error
		if conn == nil {
			conn, err = open(ctx, connect)
		}
		if err == nil {
			began := time.Now()
			if err = p.look(ctx, conn); !conn.IsClosed() { // one that hung cost the server nothing
				pause = max(pause, pendingShare*time.Since(began))
			}
		}
		if ctx.Err() != nil {
			return
		}
		p.report(err)
		if conn != nil && conn.IsClosed() {
			conn = nil
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

func closeQuietly(ctx context.Context, conn *pgx.Conn) {
	if conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // nothing depends on it
}

// report says a problem once, and once that it is over.
func (p *Pending) report(err error) {
	switch {
	case err == nil && p.said != "":
		p.said = ""
		p.log.Info().Msg("counting pending outbox rows again")
	case err != nil && err.Error() != p.said:
		p.said = err.Error()
		p.log.Warn().Err(err).Msg("pending outbox rows cannot be counted: their metrics stay as they are")
	}
}

func (p *Pending) look(ctx context.Context, conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, 2*statementTimeout)
	defer cancel()
	tables, problem := p.tables(ctx, conn)
	if problem != nil && len(tables) == 0 {
		return problem
	}
	if _, err := conn.Exec(ctx, fmt.Sprintf("SET statement_timeout = %d", pendingTimeout.Milliseconds())); err != nil {
		return fmt.Errorf("set statement_timeout: %w", err)
	}
	if problem == nil { // else its tables are not gone
		p.forget(tables)
	}
	var waiting []Waiting
	problems := []error{problem}
	for i := range tables {
		w, err := p.count(ctx, conn, &tables[i])
		if err == nil {
			waiting = append(waiting, w)
			continue
		}
		problems = append(problems, err)
		if IsLost(err) {
			return err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waiting = waiting
	return errors.Join(problems...)
}

// forget takes the metrics of tables away that are gone.
func (p *Pending) forget(tables []Table) {
	for name := range p.counted {
		if !slices.ContainsFunc(tables, func(t Table) bool { return t.String() == name }) {
			p.rows.DeleteLabelValues(name)
			p.oldest.DeleteLabelValues(name)
			delete(p.counted, name)
			delete(p.since, name)
		}
	}
}

// count asks one table how many of its rows are pending and how old the oldest is, in
// seconds, and sets the metrics. The condition is the mark's own, so that a partial index on it
// serves: CREATE INDEX ON outbox (created_at) WHERE published_at IS NULL.
func (p *Pending) count(ctx context.Context, conn *pgx.Conn, t *Table) (Waiting, error) {
	oldest := "NULL::pg_catalog.float8"
	// Not the difference of the two: of infinity that would be an error.
	if t.Created != "" {
		oldest = fmt.Sprintf("(extract(epoch FROM pg_catalog.now()) - extract(epoch FROM min(t.%s)))::pg_catalog.float8", pgx.Identifier{t.Created}.Sanitize())
	}
	var rows int64
	var seconds *float64
	err := conn.QueryRow(ctx, fmt.Sprintf("SELECT count(*), %s FROM %s t WHERE %s", oldest, t.SQL(), t.NotPublished())).Scan(&rows, &seconds)
	if err != nil {
		err = fmt.Errorf("count pending rows of %s: %w", t.String(), err)
		if IsSlow(err) {
			err = fmt.Errorf("%w; an index such as CREATE INDEX ON %s (…) WHERE %s makes it cheap", err, t.SQL(), t.NotPublished())
		}
		return Waiting{}, err
	}
	name := t.String()
	p.counted[name] = true
	p.rows.WithLabelValues(name).Set(float64(rows))
	age := p.age(name, rows, seconds, time.Now())
	p.oldest.WithLabelValues(name).Set(age)
	return Waiting{Table: name, Rows: rows, Oldest: age}, nil
}

// age is how long the oldest row has waited: by its own time, or, where there is none,
// since rows were first seen to wait, which is at least as late.
func (p *Pending) age(table string, rows int64, seconds *float64, now time.Time) float64 {
	if rows == 0 {
		delete(p.since, table)
		return 0
	}
	if seconds != nil {
		return max(*seconds, 0)
	}
	if _, ok := p.since[table]; !ok {
		p.since[table] = now
	}
	return now.Sub(p.since[table]).Seconds()
}

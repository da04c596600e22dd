package outbox

import (
	"context"
	"fmt"
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
	// tables finds the tables to count, by a connection to the primary.
	tables func(ctx context.Context, conn *pgx.Conn) ([]Table, error)

	since map[string]time.Time // since when a table without a time has had pending rows
	said  string
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
		since: map[string]time.Time{},
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
		began := time.Now()
		var err error
		if conn == nil {
			conn, err = open(ctx, connect)
		}
		if err == nil {
			err = p.look(ctx, conn)
		}
		if ctx.Err() != nil {
			return
		}
		p.report(err)
		if err != nil && IsLost(err) {
			closeQuietly(ctx, conn)
			conn = nil
		}
		t := time.NewTimer(max(pendingInterval, pendingShare*time.Since(began)))
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
	tables, err := p.tables(ctx, conn)
	if err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, fmt.Sprintf("SET statement_timeout = %d", pendingTimeout.Milliseconds())); err != nil {
		return fmt.Errorf("set statement_timeout: %w", err)
	}
	for i := range tables {
		if _, _, err := p.Count(ctx, conn, &tables[i]); err != nil {
			return err
		}
	}
	return nil
}

// Count asks one table how many of its rows are pending and how old the oldest is, in
// seconds, and sets the metrics. The condition is the mark's own, so that a partial index on it
// serves: CREATE INDEX ON outbox (created_at) WHERE published_at IS NULL.
func (p *Pending) Count(ctx context.Context, conn *pgx.Conn, t *Table) (rows int64, age float64, err error) {
	oldest := "NULL::pg_catalog.float8"
	if t.Created != "" {
		oldest = fmt.Sprintf("extract(epoch FROM pg_catalog.now() - min(t.%s))::pg_catalog.float8", pgx.Identifier{t.Created}.Sanitize())
	}
	var seconds *float64
	err = conn.QueryRow(ctx, fmt.Sprintf("SELECT count(*), %s FROM %s t WHERE %s", oldest, t.SQL(), t.NotPublished())).Scan(&rows, &seconds)
	if err != nil {
		return 0, 0, fmt.Errorf("count pending rows of %s: %w; an index such as CREATE INDEX ON %s (…) WHERE %s makes it cheap", t.String(), err, t.SQL(), t.NotPublished())
	}
	name := t.String()
	p.rows.WithLabelValues(name).Set(float64(rows))
	age = p.age(name, rows, seconds, time.Now())
	p.oldest.WithLabelValues(name).Set(age)
	return rows, age, nil
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

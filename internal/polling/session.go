package polling

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/internal/phase"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// errShape says that a table's columns are not those that the session knows: it begins
// anew, with the new ones.
var errShape = errors.New("an outbox table was altered")

// session is one pass from connecting to a fault.
type session struct {
	p   *Poller
	log zerolog.Logger

	conn      *replication.Conn
	admin     *router.Client
	catalog   *router.Catalog
	publisher *router.Publisher
	router    *router.Router
	tables    []*table
	batch     *router.Batch
}

func (p *Poller) session(ctx context.Context) error {
	s := &session{p: p, log: p.o.Logger}
	defer s.close(ctx)
	p.setPhase(phase.Connecting)
	if err := s.open(ctx); err != nil {
		return err
	}
	p.recovered()
	p.setPhase(phase.Polling)
	s.log.Info().Int("tables", len(s.tables)).Dur("interval", p.o.Interval).Msg("polling")
	return s.poll(ctx)
}

// open connects to both sides and looks, changing nothing but missing topics.
func (s *session) open(ctx context.Context) (err error) {
	o := &s.p.o
	if s.conn, err = s.p.connect(ctx); err != nil {
		return err
	}
	s.p.sourceSeen = true
	if err := s.settle(ctx); err != nil {
		return err
	}
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

// settle makes the settings that this connection needs beside those of every one.
func (s *session) settle(ctx context.Context) error {
	settings := []string{
		// A policy that hides rows has to be an error: their events would be forgotten.
		"SET row_security = off",
		// Ours waits for Kafka, at most twice publishTimeout. One that stands for longer is
		// of an instance whose host is gone, or which is held; the server lets its rows go.
		fmt.Sprintf("SET idle_in_transaction_session_timeout = %d", abandonedAfter.Milliseconds()),
		// A poll that reads a whole table for want of an index takes one process there, and
		// compiling its query would take longer than reading a small one.
		"SET max_parallel_workers_per_gather = 0",
		"SET jit = off",
	}
	if s.conn.PgConn().ParameterStatus("server_encoding") == "SQL_ASCII" {
		// As in the stream: such a server checks what it cannot convert, and one value that is
		// no UTF-8 would be an error of all rows that are read with it.
		settings = append(settings, "SET client_encoding = 'SQL_ASCII'")
	}
	if _, err := s.conn.PgConn().Exec(ctx, strings.Join(settings, "; ")).ReadAll(); err != nil {
		return fmt.Errorf("set up the connection: %w", err)
	}
	return nil
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

// poll goes round the tables. It waits only where no table had anything for us.
func (s *session) poll(ctx context.Context) error {
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
		s.p.metrics.isrShort.Set(float64(s.catalog.ISRShort()))
		if s.p.o.UntilCaughtUp && all {
			return nil
		}
		wait := s.p.o.Interval
		if busy {
			wait = 0
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil
		}
	}
}

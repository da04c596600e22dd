package relay

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/snapshot"
)

// monitor looks at the catalog beside the stream, on a connection of its own: it keeps
// the publications in step with the tables that come and go, waits for publications'
// horizons, and measures the lag. Nothing of the stream waits for it.
type monitor struct {
	s        *session
	log      zerolog.Logger
	horizons chan checkpoint.Publication
	news     chan news

	pending []checkpoint.Publication // without a horizon yet
	bound   checkpoint.XID           // of OpenHorizon; 0 until opened

	conn *replication.Conn
	// primary is where tables are read; the same as conn unless that is a standby.
	primary *replication.Conn
	bounds  map[snapshot.Wait]checkpoint.XID
	listed  []snapshot.Table // as last looked
	// saidWaiting tells that the transactions that tables wait for were said.
	saidWaiting bool
	said        string // the problem said last
	// stalled is how long Kafka had kept a batch waiting when that was last looked at.
	stalled time.Duration
}

const (
	sampleInterval  = time.Second
	catalogInterval = 5 * time.Second
	monitorTimeout  = 20 * time.Second
)

func newMonitor(s *session, publications []checkpoint.Publication) *monitor {
	m := &monitor{s: s, log: s.log, horizons: make(chan checkpoint.Publication, len(publications))}
	for _, p := range publications {
		if p.Horizon == 0 {
			m.pending = append(m.pending, p)
		}
	}
	m.news = make(chan news, 16)
	m.bounds = map[snapshot.Wait]checkpoint.XID{}
	return m
}

func (m *monitor) run(ctx context.Context) {
	tick := time.NewTicker(sampleInterval)
	defer tick.Stop()
	defer m.disconnect()
	last := time.Time{}
	for {
		m.delivery()
		err := m.look(ctx, time.Since(last) >= catalogInterval)
		if time.Since(last) >= catalogInterval {
			last = time.Now()
		}
		if err != nil && ctx.Err() == nil {
			m.report(err)
			if replication.IsShutdown(err) {
				m.tell(ctx, news{down: err})
			}
			if !checkpoint.IsRefusal(err) {
				m.disconnect()
			}
		}
		if err == nil {
			m.report(nil)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// delivery says once that Kafka does not take a batch, and once that it does again. The
// client waits within a delivery for as long as it takes, so that nothing else says it.
func (m *monitor) delivery() {
	took := m.s.r.stall.Took()
	switch {
	case took > 0 && m.stalled == 0:
		m.log.Warn().Dur("took", took).Msg("waiting for Kafka to take a batch")
	case took == 0 && m.stalled > 0:
		m.log.Info().Dur("took", m.stalled).Msg("Kafka takes batches again")
	}
	m.stalled = took
}

// report says a problem once, and once that it is over.
func (m *monitor) report(err error) {
	switch {
	case err == nil && m.said != "":
		m.said = ""
		m.s.r.setProblem("")
		m.log.Info().Msg("watching the catalog again")
	case err != nil && err.Error() != m.said:
		m.said = err.Error()
		if checkpoint.IsRefusal(err) {
			m.s.r.setProblem(m.said)
			m.log.Error().Err(err).Msg("a configured table is not captured; the next start would be refused")
			return
		}
		m.log.Warn().Err(err).Msg("watching the catalog: trying again")
	}
}

func (m *monitor) disconnect() {
	if m.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(m.s.r.base, time.Second)
	defer cancel()
	if err := m.conn.Close(ctx); err != nil {
		m.log.Debug().Err(err).Msg("monitor connection closed")
	}
	m.conn = nil
	if m.primary != nil {
		if err := m.primary.Close(ctx); err != nil {
			m.log.Debug().Err(err).Msg("monitor connection closed")
		}
		m.primary = nil
	}
}

func (m *monitor) look(ctx context.Context, catalog bool) (err error) {
	ctx, cancel := context.WithTimeout(ctx, monitorTimeout)
	defer cancel()
	if m.conn == nil {
		if m.conn, err = m.s.r.connect(ctx); err != nil {
			return err
		}
	}
	if err := m.measure(ctx); err != nil {
		return err
	}
	if len(m.pending) > 0 {
		if err := m.awaitHorizon(ctx); err != nil {
			return err
		}
	}
	if err := m.snapshots(ctx, catalog); err != nil {
		return err
	}
	if !catalog {
		if m.said != "" {
			return errors.New(m.said) // until the catalog was looked at again
		}
		return nil
	}
	return m.publications(ctx)
}

// measure samples the server's WAL end and what the slot keeps.
func (m *monitor) measure(ctx context.Context) error {
	w, err := replication.ReadWAL(ctx, m.conn, m.s.r.o.Slot)
	if err != nil {
		return err
	}
	r := m.s.r
	p, records := r.standing()
	age := time.Duration(0)
	if !p.CommitTime.IsZero() {
		age = w.Now.Sub(p.CommitTime)
	}
	lag := r.lag.sample(standing{at: time.Now(), end: w.End, delivered: p.LSN, records: records}, age)
	r.sample(lag, w.Retained, m.s.catalog.ISRShort())
	return nil
}

// awaitHorizon finds the horizon of publications that were made while a slot existed:
// the end of WAL once every transaction that was running at their creation is over.
func (m *monitor) awaitHorizon(ctx context.Context) (err error) {
	if m.bound == 0 {
		if m.bound, err = replication.OpenHorizon(ctx, m.conn); err != nil {
			return err
		}
	}
	lsn, reached, waiting, err := replication.HorizonReached(ctx, m.conn, m.bound)
	if err != nil {
		return err
	}
	if !reached {
		list := make([]string, len(waiting))
		for i, t := range waiting {
			list[i] = t.String()
		}
		m.s.r.setWaiting(list)
		return nil
	}
	m.s.r.setWaiting(nil)
	for _, p := range m.pending {
		p.Horizon = lsn
		m.log.Info().Str("publication", p.Name).Stringer("lsn", lsn).Msg("publication can be named once the slot has reached this LSN")
		m.horizons <- p
	}
	m.pending = nil
	return nil
}

// publications keeps the managed ones in step, or looks whether the existing one
// still covers the configured tables.
func (m *monitor) publications(ctx context.Context) error {
	o := &m.s.r.o
	tables, err := replication.Tables(ctx, m.conn)
	if err != nil {
		return err
	}
	if err := refuseRenamed(tables, o.Publications.Outbox, m.s.outboxes); err != nil {
		return err
	}
	if o.Existing {
		cover, err := replication.Cover(ctx, m.conn, tables, o.Publications)
		if err != nil {
			return err
		}
		return cover.Refusal()
	}
	plan, refused := replication.NewPlan(tables, o.Publications)
	if refused != nil {
		// A table that cannot be captured is said, and the others go on.
		captured := tables[:0]
		for _, t := range tables {
			if t.Updatable || !o.Publications.Match(t.Schema, t.Name) || slices.Contains(o.Publications.Outbox, t.String()) {
				captured = append(captured, t)
			}
		}
		if plan, err = replication.NewPlan(captured, o.Publications); err != nil {
			return err
		}
	}
	m.s.r.setWarnings(m.log, plan.Warnings)
	plan.InsertPending = !slices.Contains(m.s.named, plan.InsertPublication)
	changes, err := replication.Sync(ctx, m.conn, plan)
	if err != nil {
		return err
	}
	m.s.r.logChanges(m.log, changes)
	for _, t := range changes.Added {
		if m.s.r.o.Snapshot.Never {
			m.log.Warn().Str("table", t.String()).Msg("streaming this table from here on; rows written to it before are not sent (snapshot.mode: never)")
		}
	}
	return refused
}

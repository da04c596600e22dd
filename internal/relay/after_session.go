package relay

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/lookup"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// afterOf is what becomes of a table's delivered rows.
func (o *Options) afterOf(table string) string {
	if after, ok := o.After[table]; ok {
		return after
	}
	return outbox.Keep
}

// checkAfter finds the tables whose delivered rows are to be marked or deleted, and
// refuses where that cannot be done.
func (s *session) checkAfter(ctx context.Context) error {
	o := &s.r.o
	if len(o.After) == 0 {
		return nil
	}
	if s.facts.Database.InRecovery && o.Snapshot.PrimaryDSN == "" {
		return &checkpoint.Refusal{
			What:   "source.dsn is a standby, and outbox rows are marked or deleted on the primary",
			Risk:   "delivered rows would stay as they are",
			Remedy: "set source.primary-dsn, or after: keep under the outbox entries",
		}
	}
	tables, err := replication.Tables(ctx, s.conn)
	if err != nil {
		return err
	}
	var oids []uint32
	for _, t := range tables {
		if o.afterOf(t.String()) != outbox.Keep {
			oids = append(oids, t.OID)
		}
	}
	described, err := replication.Describe(ctx, s.conn, oids)
	if err != nil {
		return err
	}
	s.targets = nil
	var problems []error
	for _, oid := range oids {
		if described[oid] == nil {
			continue // dropped this moment
		}
		t, err := s.readTarget(ctx, described[oid], s.entryOf(described[oid]))
		if err != nil {
			problems = append(problems, err)
			continue
		}
		s.targets = append(s.targets, t)
		if t.Loose && !s.r.saidLoose {
			s.log.Warn().Str("table", t.String()).Str("column", t.EventID).
				Msg("outbox table has no unique key: delivered rows are found by the event's id, each time by a scan where no index helps, and those whose id is there twice are left as they are")
		}
	}
	s.r.saidLoose = true
	return errors.Join(problems...)
}

// newTarget looks at a table of an outbox entry that is none of those of the start; nil
// where it is gone.
func (s *session) newTarget(oid uint32, entry string) (*outbox.Target, error) {
	ctx, cancel := context.WithTimeout(s.r.base, lookup.Timeout)
	defer cancel()
	described, err := replication.Describe(ctx, s.conn, []uint32{oid})
	if err != nil || described[oid] == nil {
		return nil, err
	}
	return s.readTarget(ctx, described[oid], entry)
}

// renewTarget looks at a target's table again: it may be gone, or have another name.
func (s *session) renewTarget(was *outbox.Target) (t *outbox.Target, gone bool, err error) {
	ctx, cancel := context.WithTimeout(s.r.base, lookup.Timeout)
	defer cancel()
	described, err := replication.Describe(ctx, s.conn, []uint32{was.OID})
	if err != nil {
		return nil, false, err
	}
	rel := described[was.OID]
	if rel == nil {
		return nil, true, nil
	}
	t, err = s.readTarget(ctx, rel, was.Entry)
	return t, false, err
}

// readTarget finds out how rows of an entry's table, whatever its name is, are marked or
// deleted.
func (s *session) readTarget(ctx context.Context, rel *replication.Relation, entry string) (*outbox.Target, error) {
	trial, err := s.trialRouter()
	if err != nil {
		return nil, err
	}
	trial.Outboxes(map[uint32]string{rel.OID: entry})
	t, err := outboxTable(ctx, s.conn, trial, rel, s.r.o.afterOf(entry))
	if err != nil {
		return nil, err
	}
	conn := s.conn
	if s.r.o.Snapshot.PrimaryDSN != "" {
		if conn, err = s.r.primary(ctx); err != nil {
			return nil, err
		}
		defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // nothing is under way on it
	}
	t.Entry = entry
	return outbox.NewTarget(ctx, conn, t)
}

// trialRouter makes a router to ask about tables with.
func (s *session) trialRouter() (*router.Router, error) {
	o := s.r.o.Router
	o.Types = s.lookup.Types(nil).Lookup
	r, err := router.NewRouter(o, s.catalog)
	if err != nil {
		return nil, err
	}
	r.Outboxes(s.outboxes)
	return r, nil
}

// entryOf names the outbox entry of a table, whatever the WAL has it under; its own name where
// it has none.
func (s *session) entryOf(rel *replication.Relation) string {
	return s.entry(rel.OID, rel.Schema+"."+rel.Name)
}

func (s *session) entry(oid uint32, name string) string {
	if entry, ok := s.outboxes[oid]; ok {
		return entry
	}
	return name
}

// outboxTable describes an outbox table to those who work on its rows.
func outboxTable(ctx context.Context, conn *replication.Conn, r *router.Router, rel *replication.Relation, after string) (outbox.Table, error) {
	facts, err := replication.ReadColumnFacts(ctx, conn, rel.OID)
	if err != nil {
		return outbox.Table{}, err
	}
	columns, err := r.OutboxColumns(rel)
	if err != nil {
		return outbox.Table{}, err
	}
	b, err := r.Backlog(rel, columns.Seq, facts)
	if err != nil {
		return outbox.Table{}, err
	}
	return outbox.NewTable(rel, after, columns, b), nil
}

// countPending counts what waits to be delivered, on its own and for as long as Run lasts,
// so that it is known while Kafka cannot be reached. The function that it returns ends it.
func (r *Relay) countPending(ctx context.Context) func() {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.pending.Run(ctx, r.primary, r.pendingTables, r.o.Logger.With().Str("part", "outbox").Logger())
	}()
	return func() {
		cancel()
		<-ended
	}
}

// pendingTables describes the tables whose rows are marked or deleted. Those that cannot be
// described are the error, beside the others.
func (r *Relay) pendingTables(ctx context.Context, conn *replication.Conn) ([]outbox.Table, error) {
	tables, misfits, err := r.outboxTables(ctx, conn)
	problems := []error{err}
	for _, name := range slices.Sorted(maps.Keys(misfits)) {
		problems = append(problems, misfits[name])
	}
	return tables, errors.Join(problems...)
}

// outboxTables does so for the tables with an entry in After. misfits tells, by their names, why
// some do not fit their configuration.
func (r *Relay) outboxTables(ctx context.Context, conn *replication.Conn) (fit []outbox.Table, misfits map[string]error, err error) {
	s := session{r: r, conn: conn, lookup: lookup.New(r.base, conn), catalog: router.NewCatalog(nil)} // to ask about tables with
	tables, err := replication.Tables(ctx, conn)
	if err != nil {
		return nil, nil, err
	}
	var oids []uint32
	for _, t := range tables {
		if r.o.afterOf(t.String()) != outbox.Keep {
			oids = append(oids, t.OID)
		}
	}
	described, err := replication.Describe(ctx, conn, oids)
	if err != nil {
		return nil, nil, err
	}
	trial, err := s.trialRouter()
	if err != nil {
		return nil, nil, err
	}
	misfits = map[string]error{}
	for _, oid := range oids {
		rel := described[oid]
		if rel == nil {
			continue // dropped this moment
		}
		name := rel.Schema + "." + rel.Name
		if _, err := trial.Check(rel, true); err != nil {
			if conn.IsClosed() { // it looked a type up
				return nil, nil, err
			}
			misfits[name] = err
			continue
		}
		t, err := outboxTable(ctx, conn, trial, rel, r.o.afterOf(name))
		if err != nil {
			return nil, nil, err
		}
		fit = append(fit, t)
	}
	return fit, misfits, nil
}

// newAfter makes the loop's part in marks.
func (s *session) newAfter(ctx context.Context, l *loop, cp checkpoint.Checkpoint) (*after, error) {
	if cp.After != nil {
		for oid, known := range cp.After.Tables {
			if err := s.addTarget(oid, known); err != nil {
				return nil, err
			}
		}
	}
	a, err := newAfter(l, s.targets, cp)
	if err != nil {
		return nil, err
	}
	a.marker = outbox.NewMarker(ctx, s.r.primary, s.log.With().Str("part", "outbox").Logger())
	return a, nil
}

// addTarget adds an outbox table that has another name by now, and rows of a snapshot to be
// marked, which the stream will not show.
func (s *session) addTarget(oid uint32, known checkpoint.AfterTable) error {
	entry := s.entry(oid, "")
	if len(known.Rows) == 0 || s.r.o.afterOf(entry) == outbox.Keep ||
		slices.ContainsFunc(s.targets, func(t *outbox.Target) bool { return t.OID == oid }) {
		return nil
	}
	t, err := s.newTarget(oid, entry)
	if err == nil && t != nil {
		s.targets = append(s.targets, t)
	}
	return err
}

// close ends the marks of a session; what is not marked the next one finds.
func (a *after) close() { a.marker.Close() }

// crowded tells whether the batch in hand holds as many dead letters as a checkpoint has
// room for, so that it has to leave.
func (a *after) crowded() bool {
	if len(a.dead) < maxAfterKept {
		return false
	}
	at, _ := slices.BinarySearchFunc(a.dead, a.sealed, checkpoint.ChangeID.Compare)
	return len(a.dead)-at >= maxAfterKept
}

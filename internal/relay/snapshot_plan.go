package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/snapshot"
)

// published lists the tables that the stream's publications publish and that are
// captured, as they are read. Only named publications count: changes of a table in another
// one are not sent yet, and would be missing behind its rows.
func (s *session) published(ctx context.Context, conn *replication.Conn) ([]snapshot.Table, error) {
	list, err := snapshot.Tables(ctx, conn, s.named)
	if err != nil {
		return nil, err
	}
	var tables []snapshot.Table
	for _, p := range list {
		name := p.Schema + "." + p.Name
		outbox := slices.Contains(s.r.o.Publications.Outbox, name)
		if !outbox && !s.r.o.Router.Tables(p.Schema, p.Name) {
			continue
		}
		t := p.Table(s.r.o.Router.Keys[name])
		t.Outbox = outbox
		tables = append(tables, t)
	}
	return tables, nil
}

// publishedBefore notes what is published before the slot is created. A table that joins
// while it is being created has to wait like any that joins later.
func (s *session) publishedBefore(ctx context.Context) error {
	s.named = nil
	for _, p := range s.publications() {
		s.named = append(s.named, p.Name)
	}
	tables, err := s.published(ctx, s.conn)
	if err != nil {
		return err
	}
	s.before = map[uint32]bool{}
	for _, t := range tables {
		s.before[t.OID] = true
	}
	return nil
}

// wanted tells whether a table is read by itself.
func (s *session) wanted(t snapshot.Table) bool {
	o := &s.r.o.Snapshot
	if t.Outbox {
		return !o.Never && o.Outbox[t.String()] != BacklogNone
	}
	return !o.Never && (o.Exclude == nil || !o.Exclude(t.Schema, t.Name))
}

// newMerging makes the loop's part in the snapshot, from what the checkpoint has of it.
func (s *session) newMerging(ctx context.Context, l *loop, cp checkpoint.Checkpoint) (*merging, error) {
	tables, err := s.published(ctx, s.conn)
	if err != nil {
		return nil, err
	}
	o := snapshot.Options{ChunkRows: s.r.o.Snapshot.Rows, ChunkBytes: s.r.o.Snapshot.Bytes, Readers: s.r.o.Snapshot.Readers, Discover: s.discover}
	if cp.SlotSnapshot != "" {
		if o.SlotSnapshot, err = snapshot.ParseMVCC(cp.SlotSnapshot); err != nil {
			return nil, fmt.Errorf("read the slot's snapshot from the checkpoint: %w", err)
		}
	}
	o.Delivered = cp.Position
	g := &merging{l: l, merger: snapshot.NewMerger(o, l.sent), slotSnapshot: cp.SlotSnapshot}
	present := map[uint32]bool{}
	for _, t := range tables {
		present[t.OID] = true
		p, known := cp.Tables[t.OID]
		switch {
		case known && p.State != checkpoint.TableDone && p.Request == nil && !s.wanted(t):
			s.log.Warn().Str("table", t.String()).Msg("the configuration does not want this table's rows any more: its snapshot ends here")
			p = checkpoint.TableProgress{Table: t.String(), State: checkpoint.TableDone, Rows: p.Rows}
			known = false
		case known:
		case !s.wanted(t):
			continue
		case s.created && s.before[t.OID] && s.slotSnapshot != "":
			// The publication is older than the slot: whatever the slot does not send is
			// visible to every snapshot that covers the slot's.
			p.State = checkpoint.TablePending
		default:
			p.State = checkpoint.TableWaiting
		}
		if t.Outbox && p.State != checkpoint.TableDone {
			if t, err = s.backlogOf(ctx, t); err != nil {
				return nil, err
			}
			if t.Key == nil { // nothing to read, so that what comes is the stream's
				p, known = checkpoint.TableProgress{Table: t.String(), State: checkpoint.TableDone}, false
			}
		}
		g.merger.Add(t, p)
		if !known {
			g.merger.Note(t.OID)
		}
	}
	for oid, p := range cp.Tables {
		if !present[oid] {
			g.merger.Add(snapshot.Table{OID: oid, Name: p.Table}, checkpoint.TableProgress{State: checkpoint.TableDone})
			g.merger.Remove(oid)
			if p.State != checkpoint.TableDone {
				s.log.Warn().Str("table", p.Table).Msg("table is not published any more: its snapshot ends here")
			}
		}
	}
	// Those that are there already belong to what a run until caught up has to do.
	n := news{from: cp.Requests}
	if n.requests, n.next, err = s.store.Requests(ctx, cp.Requests); err != nil {
		return nil, onKafka(err)
	}
	g.published = tables
	g.requests.take(g, n)
	g.shareWaiting()
	return g, nil
}

// backlogOf says how an outbox table's rows are read. Without a Key it has none to read.
func (s *session) backlogOf(ctx context.Context, t snapshot.Table) (snapshot.Table, error) {
	b, err := s.readBacklog(ctx, t.OID, t.String())
	if err != nil {
		return t, err
	}
	t.Key, t.Identity, t.Whole, t.Where = b.order, b.primary, false, b.where
	return t, nil
}

// backlog is how an outbox table's rows, there at the first start, are read.
type backlog struct {
	order   []string // nil: there are none to read
	primary []string
	where   string
}

// readBacklog looks at an outbox table, and refuses where its rows cannot be told apart:
// published ones from those that are not, or one from the other.
func (s *session) readBacklog(ctx context.Context, oid uint32, name string) (backlog, error) {
	var none backlog
	setting := s.r.o.Snapshot.Outbox[name]
	described, err := replication.Describe(ctx, s.conn, []uint32{oid})
	if err != nil {
		return none, err
	}
	rel := described[oid]
	if rel == nil {
		return none, nil
	}
	primary, err := replication.PrimaryKey(ctx, s.conn, oid)
	if err != nil {
		return none, err
	}
	notNull, err := replication.NotNullColumns(ctx, s.conn, oid)
	if err != nil {
		return none, err
	}
	trial, err := s.trialRouter()
	if err != nil {
		return none, err
	}
	b, err := trial.Backlog(rel, primary, func(column string) bool { return slices.Contains(notNull, column) })
	if err != nil {
		return none, err
	}
	out := backlog{order: b.Order, primary: primary}
	if setting == BacklogPending {
		out.where = b.Pending
	}
	if (setting != BacklogPending || b.Mark != "") && primary != nil {
		return out, nil
	}
	rows, err := replication.HasRows(ctx, s.conn, rel.Schema, rel.Name)
	if err != nil || !rows {
		return none, err
	}
	if primary == nil {
		return none, &checkpoint.Refusal{
			What:   fmt.Sprintf("outbox table %s has rows and no primary key", name),
			Risk:   "a row that is there already and is written while it is read could go out twice",
			Remedy: "give it a primary key, or set snapshot: none under its outbox entry to send only what is inserted from now on",
		}
	}
	return none, &checkpoint.Refusal{
		What:   fmt.Sprintf("outbox table %s has rows, and no column published_at or status that tells which of them were published", name),
		Risk:   "events that were published before would be published again, or others never",
		Remedy: "set snapshot: all under its outbox entry to send every row, or snapshot: none to send only what is inserted from now on",
	}
}

// checkReadable refuses, before anything is created, what would end the snapshot later.
func (s *session) checkReadable(ctx context.Context) error {
	o := &s.r.o.Snapshot
	if o.Never {
		return nil
	}
	if s.facts.Database.InRecovery && o.PrimaryDSN == "" {
		return &checkpoint.Refusal{
			What:   "source.dsn is a standby, and snapshots are read on the primary",
			Risk:   "a standby does not tell which transactions a snapshot sees, so that rows would be lost or go back in time",
			Remedy: "set source.primary-dsn, or snapshot.mode: never",
		}
	}
	var oids []uint32
	names := map[uint32]string{}
	var problems []error
	done := func(oid uint32) bool { return s.facts.Checkpoint.Tables[oid].State == checkpoint.TableDone }
	tables, err := s.planned(ctx)
	if err != nil {
		return err
	}
	outbox := map[uint32]bool{}
	for _, t := range tables {
		if done(t.OID) || !s.wanted(t) {
			continue
		}
		oids = append(oids, t.OID)
		names[t.OID] = t.String()
		outbox[t.OID] = t.Outbox && s.facts.Checkpoint.Tables[t.OID].State == ""
	}
	access, err := replication.ReadAccess(ctx, s.conn, oids)
	if err != nil {
		return err
	}
	for _, a := range access {
		name := names[a.OID]
		switch {
		case !a.Select:
			problems = append(problems, &checkpoint.Refusal{
				What:   fmt.Sprintf("role %s may not read table %s", s.facts.Database.Role.Name, name),
				Risk:   "the rows that are in it could not be sent",
				Remedy: fmt.Sprintf("GRANT SELECT ON %s TO %s; and USAGE on its schema; or name it under snapshot.exclude to send only changes from now on", a.Quoted, a.Role),
			})
		case a.RowSecurity:
			problems = append(problems, &checkpoint.Refusal{
				What:   fmt.Sprintf("query would be affected by row-level security policy for table %q (%s)", a.Name, name),
				Risk:   "a policy hides rows from the snapshot, while the stream sends the changes of all rows",
				Remedy: fmt.Sprintf("ALTER ROLE %s BYPASSRLS; or name the table under snapshot.exclude", a.Role),
			})
		case outbox[a.OID]:
			if _, err := s.readBacklog(ctx, a.OID, name); err != nil {
				problems = append(problems, err)
			}
		}
	}
	return errors.Join(problems...)
}

// planned lists the tables that will be published, which on a first start are not yet.
func (s *session) planned(ctx context.Context) ([]snapshot.Table, error) {
	if s.r.o.Existing {
		if !s.facts.PublicationFound {
			return nil, nil
		}
		s.named = []string{s.facts.Publication}
		return s.published(ctx, s.conn)
	}
	var tables []snapshot.Table
	for _, list := range [][]replication.Table{s.plan.All, s.plan.Insert} {
		for _, t := range list {
			tables = append(tables, snapshot.Table{OID: t.OID, Schema: t.Schema, Name: t.Name, Outbox: slices.Contains(s.r.o.Publications.Outbox, t.String())})
		}
	}
	return tables, nil
}

// discover describes a table that the stream sends and that was not published when this
// session looked: it is read once the monitor has found since when it is.
func (s *session) discover(rel *replication.Relation) (snapshot.Table, checkpoint.TableProgress, bool) {
	t := snapshot.Table{OID: rel.OID, Schema: rel.Schema, Name: rel.Name, Estimate: -1}
	waiting := checkpoint.TableProgress{State: checkpoint.TableWaiting}
	if slices.Contains(s.r.o.Publications.Outbox, t.String()) || !s.r.o.Router.Tables(rel.Schema, rel.Name) || !s.wanted(t) {
		return t, waiting, false
	}
	for _, i := range rel.Key() {
		t.Key = append(t.Key, rel.Columns[i].Name)
	}
	if t.Key == nil {
		t.Whole, t.Key = true, s.r.o.Router.Keys[t.String()]
		// Changes of such a table are left to the rows that will be read. Of one that was
		// dropped since there are none, and the changes are all there is.
		ctx, cancel := context.WithTimeout(s.r.base, lookupTimeout)
		defer cancel()
		if found, err := replication.Describe(ctx, s.conn, []uint32{rel.OID}); err == nil && found[rel.OID] == nil {
			return t, waiting, false
		}
	}
	return t, waiting, true
}

// waits are the tables that wait for transactions to end; the loop fills it, the monitor
// looks at it.
type waits struct {
	mu   sync.Mutex
	oids []uint32
}

func (w *waits) set(oids []uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.oids = oids
}

func (w *waits) list() []uint32 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.oids)
}

package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/lookup"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/snapshot"
)

// published lists the tables that the publications publish and that are captured, as they
// are read. Of a publication that the stream does not name yet no table is to be read: its
// changes would be missing behind its rows.
func (s *session) published(ctx context.Context, conn *replication.Conn, publications []string) ([]snapshot.Table, error) {
	list, err := snapshot.Tables(ctx, conn, publications)
	if err != nil {
		return nil, err
	}
	var tables []snapshot.Table
	for _, p := range list {
		name := p.Schema + "." + p.Name
		isOutbox := slices.Contains(s.r.o.Publications.Outbox, s.entry(p.OID, name))
		if !isOutbox && !s.r.o.Router.Tables(p.Schema, p.Name) {
			continue
		}
		t := p.Table(s.r.o.Router.Keys[name])
		t.Outbox = isOutbox
		tables = append(tables, t)
	}
	return tables, nil
}

// names lists publications.
func names(list []checkpoint.Publication) []string {
	out := make([]string, len(list))
	for i, p := range list {
		out[i] = p.Name
	}
	return out
}

// publishedBefore lists what is published before the slot is created. A table that joins
// while it is being created has to wait like any that joins later.
func (s *session) publishedBefore(ctx context.Context) ([]uint32, error) {
	tables, err := s.published(ctx, s.conn, names(s.publications()))
	var oids []uint32
	for _, t := range tables {
		oids = append(oids, t.OID)
	}
	return oids, err
}

// emptyBefore looks, within the slot's snapshot, which outbox tables have nothing that the
// slot does not send.
func (s *session) emptyBefore(b *checkpoint.Birth) func(context.Context, *replication.Conn) error {
	return func(ctx context.Context, conn *replication.Conn) error {
		b.Empty = nil // of a creation before this one, which was thrown away
		if s.facts.Database.InRecovery {
			return nil // as with the slot's snapshot
		}
		tables, err := s.published(ctx, s.conn, names(s.publications()))
		if err != nil {
			return err
		}
		for _, t := range tables {
			if !t.Outbox || !b.Had(t.OID) || !s.wanted(t) {
				continue
			}
			rows, err := replication.HasRows(ctx, conn, t.Schema, t.Name)
			if err != nil {
				// Rows that come meanwhile are taken for older ones, and perhaps refused.
				s.log.Warn().Err(err).Str("table", t.String()).Msg("whether the outbox table was empty when the slot was created is not known")
				return err
			}
			if !rows {
				b.Empty = append(b.Empty, t.OID)
			}
		}
		return nil
	}
}

// wanted tells whether a table is read by itself.
func (s *session) wanted(t snapshot.Table) bool {
	o := &s.r.o.Snapshot
	if t.Outbox {
		return !o.Never && o.Outbox[s.entry(t.OID, t.String())] != BacklogNone
	}
	return !o.Never && (o.Exclude == nil || !o.Exclude(t.Schema, t.Name))
}

// newMerging makes the loop's part in the snapshot, from what the checkpoint has of it.
func (s *session) newMerging(ctx context.Context, l *loop, cp checkpoint.Checkpoint) (*merging, error) {
	tables, err := s.published(ctx, s.conn, s.named)
	if err != nil {
		return nil, err
	}
	all, err := s.published(ctx, s.conn, names(s.publications()))
	if err != nil {
		return nil, err
	}
	g := &merging{l: l, slotSnapshot: cp.SlotSnapshot, published: tables, partitions: newPartitions(cp.Trees)}
	o := snapshot.Options{ChunkRows: s.r.o.Snapshot.Rows, ChunkBytes: s.r.o.Snapshot.Bytes, Readers: s.r.o.Snapshot.Readers, Discover: g.discover,
		Delivered: cp.Position, Flushed: s.facts.Database.InRecovery}
	if cp.SlotSnapshot != "" {
		if o.SlotSnapshot, err = snapshot.ParseMVCC(cp.SlotSnapshot); err != nil {
			return nil, fmt.Errorf("read the slot's snapshot from the checkpoint: %w", err)
		}
	}
	g.merger = snapshot.NewMerger(o, l.sent)
	for _, t := range tables {
		p, known := cp.Tables[t.OID]
		switch {
		case known && p.State != checkpoint.TableDone && p.Request == nil && !s.wanted(t):
			s.log.Warn().Str("table", t.String()).Msg("the configuration does not want this table's rows any more: its snapshot ends here")
			p = checkpoint.TableProgress{Table: t.String(), State: checkpoint.TableDone, Rows: p.Rows}
			known = false
		case known:
		case !s.wanted(t):
			continue
		case s.birth.Had(t.OID) && s.birth.Snapshot != "":
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
		if parts := attachedTo(p.Request); parts != nil && p.State != checkpoint.TableDone {
			if t, err = s.inParts(ctx, t, parts); err != nil {
				return nil, err
			}
		}
		g.merger.Add(t, p)
		if !known {
			g.merger.Note(t.OID)
		}
	}
	for oid, p := range cp.Tables {
		if !slices.ContainsFunc(all, func(t snapshot.Table) bool { return t.OID == oid }) {
			g.merger.Add(snapshot.Table{OID: oid, Name: p.Table}, checkpoint.TableProgress{State: checkpoint.TableDone})
			g.merger.Remove(oid)
			if p.State != checkpoint.TableDone {
				s.log.Warn().Str("table", p.Table).Msg("table is not published any more: its snapshot ends here")
			}
		}
	}
	for root := range cp.Trees {
		if !slices.ContainsFunc(all, func(t snapshot.Table) bool { return t.OID == root }) {
			g.partitions.remove(g, root)
		}
	}
	// What is there already belongs to what a run until caught up has to do.
	n := news{from: cp.Requests}
	s.watch = newTreeWatch(g.partitions.known)
	if n.trees, err = s.watch.look(ctx, s.conn, s.named, tables); err != nil {
		return nil, err
	}
	if n.requests, n.next, err = s.store.Requests(ctx, cp.Requests); err != nil {
		return nil, onKafka(err)
	}
	g.requests.take(g, n)
	g.partitions.take(g, n.trees)
	g.shareWaiting()
	return g, nil
}

// inParts says how single partitions of a table are read.
func (s *session) inParts(ctx context.Context, t snapshot.Table, parts []uint32) (snapshot.Table, error) {
	bounds, err := replication.ReadPartBounds(ctx, s.conn, parts)
	t.Where, t.Estimate = bounded(parts, func(oid uint32) string { return bounds[oid].Condition }), -1
	return t, err
}

// backlogOf says how an outbox table's rows are read. Without a Key it has none to read.
func (s *session) backlogOf(ctx context.Context, t snapshot.Table) (snapshot.Table, error) {
	b, err := s.readBacklog(ctx, t.OID, t.String())
	t.Key, t.Identity, t.Whole, t.Where = b.Order, b.Primary, false, b.Pending
	if err == nil && t.Key != nil && !b.Settled {
		err = s.sayUnsettled(ctx, t, b.Ordered)
	}
	return t, err
}

// sayUnsettled says once of a table with rows that their order is not known. Ordered tells that
// they go out by time.
func (s *session) sayUnsettled(ctx context.Context, t snapshot.Table, ordered bool) error {
	if s.r.saidUnsettled[t.OID] || s.birth.WasEmpty(t.OID) {
		return nil
	}
	rows, err := replication.HasRows(ctx, s.conn, t.Schema, t.Name)
	if err != nil || !rows {
		return err
	}
	if s.r.saidUnsettled == nil {
		s.r.saidUnsettled = map[uint32]bool{}
	}
	s.r.saidUnsettled[t.OID] = true
	order := "no number and no time tells in which order the rows that are there already were written: they go out in the order of the key"
	if ordered {
		order = "rows that are there already go out by time, and those of the same time, as within a transaction, in the order of the key"
	}
	s.log.Warn().Str("table", t.String()).Strs("order", t.Key).
		Msg(order + ", so that events of one aggregate may change places; a NOT NULL integer such as aggregate_seq keeps them in order")
	return nil
}

// readBacklog looks at an outbox table, and refuses where its rows cannot be told apart:
// published ones from those that are not, or one from the other. Without an Order there
// are none to read.
func (s *session) readBacklog(ctx context.Context, oid uint32, name string) (b router.Backlog, err error) {
	var none router.Backlog
	entry := s.entry(oid, name)
	setting := s.r.o.Snapshot.Outbox[entry]
	described, err := replication.Describe(ctx, s.conn, []uint32{oid})
	if err != nil {
		return none, err
	}
	rel := described[oid]
	if rel == nil {
		return none, nil
	}
	facts, err := replication.ReadColumnFacts(ctx, s.conn, oid)
	if err != nil {
		return none, err
	}
	trial, err := s.trialRouter()
	if err != nil {
		return none, err
	}
	columns, err := trial.OutboxColumns(rel)
	if err != nil {
		return none, err
	}
	b, err = trial.Backlog(rel, columns.Seq, facts)
	if err != nil {
		return none, err
	}
	if begun := s.facts.Checkpoint.Tables[oid].Key; keepsOrder(begun, b, facts.NotNull) {
		b.Order = begun // in another one, rows that are out would go out again
	}
	if setting != BacklogPending {
		b.Pending = ""
	}
	copied := setting == BacklogPending && s.r.o.afterOf(entry) == outbox.Keep && s.madeAnew(oid, entry)
	if (setting != BacklogPending || b.Mark != "" && !copied) && b.Primary != nil {
		return b, nil
	}
	if s.birth.WasEmpty(oid) {
		return none, nil
	}
	rows, err := replication.HasRows(ctx, s.conn, rel.Schema, rel.Name)
	if err != nil || !rows {
		return none, err
	}
	if b.Primary == nil {
		return none, &checkpoint.Refusal{
			What:   fmt.Sprintf("outbox table %s has rows and no primary key", name),
			Risk:   "a row that is there already and is written while it is read could go out twice",
			Remedy: "give it a primary key, or set snapshot: none under its outbox entry to send only what is inserted from now on",
		}
	}
	if copied {
		return none, &checkpoint.Refusal{
			What:   fmt.Sprintf("outbox table %s was made anew since the connector has run, and has rows", name),
			Risk:   "rows that were copied from the table of that name before would be published again: with after: keep nothing tells them",
			Remedy: "set snapshot: all under its outbox entry where all of its rows are new, or snapshot: none to send only what is inserted from now on",
		}
	}
	return none, &checkpoint.Refusal{
		What:   fmt.Sprintf("outbox table %s has rows, and no column published_at or status that tells which of them were published", name),
		Risk:   "events that were published before would be published again, or others never",
		Remedy: "set snapshot: all under its outbox entry to send every row, or snapshot: none to send only what is inserted from now on",
	}
}

// keepsOrder tells whether the rows of an outbox table can still be read in the order in which
// that was begun.
func keepsOrder(begun []string, b router.Backlog, notNull []string) bool {
	for _, column := range begun {
		if !slices.Contains(notNull, column) {
			return false
		}
	}
	for _, column := range b.Primary {
		if !slices.Contains(begun, column) {
			return false
		}
	}
	return begun != nil && b.Primary != nil
}

// madeAnew tells whether another table was the outbox of that name before.
func (s *session) madeAnew(oid uint32, name string) bool {
	for known, p := range s.facts.Checkpoint.Tables {
		if known != oid && p.Table == name {
			return true
		}
	}
	return false
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
	var problems []error
	done := func(oid uint32) bool { return s.facts.Checkpoint.Tables[oid].State == checkpoint.TableDone }
	tables, err := s.planned(ctx)
	if err != nil {
		return err
	}
	backlogs := map[uint32]string{}
	for _, t := range tables {
		if done(t.OID) || !s.wanted(t) {
			continue
		}
		oids = append(oids, t.OID)
		if t.Outbox && s.facts.Checkpoint.Tables[t.OID].State == "" {
			backlogs[t.OID] = t.String()
		}
	}
	refused, err := snapshot.Access(ctx, s.conn, oids)
	if err != nil {
		return err
	}
	for _, oid := range oids {
		switch {
		case refused[oid] != nil:
			problems = append(problems, refused[oid])
		case backlogs[oid] != "":
			if _, err := s.readBacklog(ctx, oid, backlogs[oid]); err != nil {
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
		return s.published(ctx, s.conn, []string{s.facts.Publication})
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
func (s *session) discover(rel *replication.Relation) (t snapshot.Table, waiting checkpoint.TableProgress, found bool, err error) {
	t = snapshot.Table{OID: rel.OID, Schema: rel.Schema, Name: rel.Name, Estimate: -1}
	waiting.State = checkpoint.TableWaiting
	if slices.Contains(s.r.o.Publications.Outbox, s.entryOf(rel)) {
		return t, waiting, false, s.discoverOutbox(rel.OID)
	}
	if !s.r.o.Router.Tables(rel.Schema, rel.Name) || !s.wanted(t) {
		return t, waiting, false, nil
	}
	for _, i := range rel.Key() {
		t.Key = append(t.Key, rel.Columns[i].Name)
	}
	if t.Key == nil {
		t.Whole, t.Key = true, s.r.o.Router.Keys[t.String()]
		// Changes of such a table are left to the rows that will be read. Of one that was
		// dropped since there are none, and the changes are all there is.
		ctx, cancel := context.WithTimeout(s.r.base, lookup.Timeout)
		defer cancel()
		described, err := replication.Describe(ctx, s.conn, []uint32{rel.OID})
		if err != nil || described[rel.OID] == nil {
			return t, waiting, false, err
		}
	}
	return t, waiting, true, nil
}

// discoverOutbox ends the session where the rows of an outbox table are to be read that was
// not published when it looked, before one of them goes out: what the stream sends of it is
// an event or one of those rows, and only a session that knows the table tells which. Of a
// table that is gone, or has another name, there is nothing but what is sent.
func (s *session) discoverOutbox(oid uint32) error {
	ctx, cancel := context.WithTimeout(s.r.base, lookup.Timeout)
	defer cancel()
	tables, err := s.published(ctx, s.conn, s.named)
	if err != nil {
		return err
	}
	for _, t := range tables {
		if t.OID == oid && t.Outbox && s.wanted(t) {
			return errNewOutbox
		}
	}
	return nil
}

// waits are those of tables for transactions to end; the loop fills it, the monitor looks
// at it.
type waits struct {
	mu   sync.Mutex
	open []snapshot.Wait
}

func (w *waits) set(open []snapshot.Wait) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open = open
}

func (w *waits) list() []snapshot.Wait {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.open)
}

package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/snapshot"
)

// SnapshotOptions says what is read of the tables beside the stream.
type SnapshotOptions struct {
	// Never tells that tables are read only where a request asks for it.
	Never bool
	// Only ends Run once every table is read.
	Only    bool
	Exclude func(schema, table string) bool
	Rows    int   // of a chunk
	Bytes   int64 // of a chunk
	Readers int
	// PrimaryDSN is where chunks are read; empty: at DSN.
	PrimaryDSN string
	// Outbox says by "schema.table" which rows of an outbox table, there at the first
	// start, go out as events: BacklogPending, BacklogAll or BacklogNone.
	Outbox map[string]string
}

// The rows of an outbox table that go out at the first start.
const (
	BacklogPending = "pending" // those not marked as published
	BacklogAll     = "all"
	BacklogNone    = "none"
)

// merging is the loop's part in the snapshot: it hands the stream's changes to the merger,
// the merger's orders to the readers, and the rows that may go out to the router. It
// belongs to the loop.
type merging struct {
	l       *loop
	merger  *snapshot.Merger
	readers *snapshot.Readers

	newOutbox    bool
	slotSnapshot string // for the checkpoint; empty once it is of no use
	requests     requests
	partitions   partitions

	// sealed is how far the batch on its way may be confirmed, and free how far the
	// committed position may: what the memory of a restart needs has to be sent again.
	sealed, free checkpoint.LSN

	// held are the changes of tables that are read whole, which go out behind their rows.
	held map[uint32]*router.Batch

	bytes      int       // of rows in the batch in hand
	lastChange time.Time // when the stream last sent a change
	more       bool      // rows may go out and did not fit
	failed     error     // the catalog could not be asked about a table
	report     progressReport

	published []snapshot.Table // as last looked
	missing   map[uint32]bool  // tables that were not published when last looked
	counted   uint32           // the table of counter
	counter   prometheus.Counter
}

const (
	// rowsPerLook is how many rows go out between two looks at everything else.
	rowsPerLook = 512
	// quietAfter is how long the stream must have sent nothing for the rows to have whole
	// batches; beside a stream they have a part, so that its changes do not wait for long
	// deliveries.
	quietAfter = time.Second
	rowsShare  = 8 // the part, of a batch's limits
)

// passing hands a change of the stream to the merger and gives what becomes of it.
func (g *merging) passing(c *replication.Change) (snapshot.Verdict, error) {
	if c.Relation == nil {
		return snapshot.Emit, nil
	}
	g.lastChange = g.l.now
	if c.Op == replication.OpTruncate {
		g.partitions.truncated(g, c)
	}
	verdict := g.merger.Change(c)
	if g.failed != nil {
		return verdict, g.failed
	}
	return verdict, g.merger.Err()
}

// discover is asked for a table that the stream sends and nobody knows.
func (g *merging) discover(rel *replication.Relation) (snapshot.Table, checkpoint.TableProgress, bool) {
	t, p, found, err := g.l.s.discover(rel)
	if errors.Is(err, errNewOutbox) {
		g.failed = err
	} else if err != nil {
		g.failed = fmt.Errorf("describe table %s, which is new: %w", t, err)
	}
	return t, p, found
}

// hold routes a change into its table's side batch.
func (g *merging) hold(ctx context.Context, c *replication.Change) error {
	b := g.held[c.Relation.OID]
	if b == nil {
		b = router.NewBatch(g.l.s.r.o.Limits)
		if g.held == nil {
			g.held = map[uint32]*router.Batch{}
		}
		g.held[c.Relation.OID] = b
	}
	// While a source transaction is open the stream cannot wait for the rows. Read again
	// from the beginning, the table has them contain the transaction.
	if limit := heldFactor * g.l.s.r.o.Limits.Bytes; b.Bytes() > limit {
		return fmt.Errorf("%w: a transaction changes more than %d bytes of table %s while its rows are being read; the table is read again behind it",
			snapshot.ErrBroken, limit, g.merger.Label(c.Relation.OID))
	}
	return g.l.route(ctx, c, b)
}

// heldFactor times a batch is what is held of one table at most.
const heldFactor = 8

// paused tells whether no further source transaction is to be taken for the moment.
func (g *merging) paused() (bool, time.Time) {
	if !g.merger.Active() {
		return false, time.Time{}
	}
	for oid, b := range g.held {
		// Memory is bounded: beyond the limits of a batch the stream waits until the table's
		// rows are out.
		if b.Full() && g.merger.HeldMayWait(oid) {
			return true, time.Time{}
		}
	}
	return g.merger.Paused(g.l.now)
}

// pump takes what has arrived and gives out what is to be read.
func (g *merging) pump() error {
	for {
		select {
		case c := <-g.readers.Chunks():
			if err := g.arrived(c); err != nil {
				return err
			}
			continue
		default:
		}
		break
	}
	if !g.merger.Active() {
		g.report.end(g)
		return nil
	}
	for {
		o := g.merger.Order(g.l.now)
		if o == nil {
			break
		}
		g.readers.Do(o)
	}
	g.report.look(g)
	return nil
}

func (g *merging) arrived(c *snapshot.Chunk) error {
	err := g.merger.Arrived(c, g.l.now)
	g.recycle()
	return err
}

func (g *merging) recycle() {
	for c := g.merger.Recycle(); c != nil; c = g.merger.Recycle() {
		g.readers.Recycle(c)
	}
}

// share is how many bytes of rows a batch takes.
func (g *merging) share() int {
	limit := g.l.s.r.o.Limits.Bytes
	if g.l.now.Sub(g.lastChange) < quietAfter {
		return max(limit/rowsShare, 64<<10)
	}
	return limit
}

// emit moves rows that may go out into the batch in hand. The stream is between source
// transactions.
func (g *merging) emit(ctx context.Context) error {
	g.more = false
	l := g.l
	share := g.share()
	moved := false
	for range rowsPerLook {
		if g.bytes >= share || l.filling.Full() {
			g.more = true
			break
		}
		if !l.after.mayRead() {
			break // until those that went out are marked
		}
		before := l.filling.Bytes()
		row, ok := g.merger.Next()
		if !ok {
			break
		}
		c := replication.Change{
			Op: replication.OpRead, Relation: row.Relation, New: row.Tuple,
			Read: &replication.ReadPoint{CommitLSN: l.pos.CommitLSN, Time: row.Time, Xmin: row.Xmin},
		}
		if row.Truncate {
			c.Op, c.New = replication.OpTruncate, nil
			l.s.r.clearPartitions(row.Table)
		}
		if err := l.route(ctx, &c, l.filling); err != nil {
			return err
		}
		if err := l.after.passed(&c, l.filling.LastIsDeadLetter()); err != nil {
			return err
		}
		g.count(row.Table)
		g.bytes += l.filling.Bytes() - before
		moved = true
		g.more = true
	}
	g.recycle()
	if !g.more {
		if err := g.release(share, &moved); err != nil {
			return err
		}
	}
	if moved {
		l.advance(false)
	}
	return nil
}

// release moves held changes behind the rows of their table.
func (g *merging) release(share int, moved *bool) error {
	oid, ok := g.merger.Released()
	if !ok {
		return nil
	}
	b := g.held[oid]
	if b == nil {
		g.merger.HeldOut(oid)
		g.more = true
		return nil
	}
	if g.bytes >= share || g.l.filling.Full() {
		g.more = true
		return nil
	}
	before := g.l.filling.Bytes()
	if !g.l.filling.Take(b, rowsPerLook) {
		delete(g.held, oid)
		g.merger.HeldOut(oid)
	}
	g.bytes += g.l.filling.Bytes() - before
	*moved, g.more = true, true
	return nil
}

// due tells whether the batch in hand has its part of rows, or holds progress that is to
// be kept.
func (g *merging) due(drained bool) bool {
	switch {
	case g.bytes >= g.share():
		return true
	case !g.l.filling.Ready():
		return drained && g.moving()
	}
	return false
}

// rowsComing tells whether more rows are about to come into the batch in hand.
func (g *merging) rowsComing() bool { return g.more && g.bytes < g.share() }

// checkpoint adds what the batch's checkpoint holds of the snapshot.
func (g *merging) checkpoint(cp *checkpoint.Checkpoint) {
	if g.slotSnapshot != "" && g.merger.Covered() {
		g.slotSnapshot = ""
	}
	cp.Tables = g.merger.Progress()
	cp.SlotSnapshot = g.slotSnapshot
	g.requests.checkpoint(cp)
	g.partitions.checkpoint(cp)
	g.bytes = 0
	// Taken with the progress: what a table needs no more once it is done, a restart needs
	// that does not find it done.
	g.sealed = cp.Position.LSN
	if hold, ok := g.merger.Hold(); ok {
		g.sealed = min(g.sealed, hold)
	}
}

// delivered notes that the checkpoint is durable.
func (g *merging) delivered() { g.free = max(g.free, g.sealed) }

// finished tells whether every table is read, and a checkpoint holds that.
func (g *merging) finished() bool {
	return !g.merger.Active() && !g.moving() && len(g.requests.queue) == 0 && g.partitions.finished()
}

// moving tells whether something changed that no checkpoint holds yet.
func (g *merging) moving() bool {
	return g.merger.Moving() || g.requests.moving || len(g.partitions.changed) > 0
}

// wake is when something may have to be done though nothing arrives; 0 for never.
func (g *merging) wake() time.Duration {
	if !g.merger.Active() {
		return 0
	}
	if t := g.merger.Wake(); !t.IsZero() {
		return max(t.Sub(g.l.now), time.Millisecond)
	}
	return 0
}

// news takes what the monitor found.
func (g *merging) news(n news) {
	if !n.seen.IsZero() {
		g.merger.Saw(n.seen)
	}
	if n.looked {
		g.compare(n.tables)
	}
	for _, w := range n.released {
		g.merger.Release(w)
		g.merger.Note(w.OID)
	}
	g.requests.take(g, n)
	g.partitions.take(g, n.trees)
	g.shareWaiting()
}

// compare takes the published tables as the monitor found them: it adds those that are
// new, and removes those that are gone. One that the stream brought meanwhile may not be
// among them yet, so that only who is missing twice is gone.
func (g *merging) compare(tables []snapshot.Table) {
	g.published = tables
	g.requests.looks++
	present := map[uint32]bool{}
	for _, t := range tables {
		present[t.OID] = true
		if _, known := g.merger.Known(t.OID); known || !g.l.s.wanted(t) {
			continue
		}
		if t.Outbox {
			g.newOutbox = true
			g.l.s.log.Info().Str("table", t.String()).Msg("outbox table is new: starting over to read what was written before it was published")
			continue
		}
		g.merger.Add(t, checkpoint.TableProgress{State: checkpoint.TableWaiting})
		g.merger.Note(t.OID)
		g.l.s.log.Info().Str("table", t.String()).Msg("table is new: its rows are read once every transaction that is running now has ended")
	}
	missing := map[uint32]bool{}
	g.merger.Each(func(t snapshot.Table, _ checkpoint.TableProgress) {
		if !present[t.OID] {
			missing[t.OID] = true
		}
	})
	for oid := range missing {
		if g.missing[oid] {
			g.l.s.log.Info().Str("table", g.merger.Label(oid)).Msg("table is not published any more")
			g.merger.Remove(oid)
			g.partitions.remove(g, oid)
			delete(missing, oid)
		}
	}
	g.missing = missing
}

// shareWaiting tells the monitor which tables wait for transactions to end.
func (g *merging) shareWaiting() {
	g.l.s.waits.set(g.merger.Waiting())
}

// count counts a row that went into a batch.
func (g *merging) count(oid uint32) {
	if g.counter == nil || g.counted != oid {
		g.counted, g.counter = oid, g.l.s.r.metrics.snapshotRows.WithLabelValues(g.merger.Label(oid))
	}
	g.counter.Inc()
}

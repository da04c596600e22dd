package snapshot_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/snapshot"
)

// merger is a snapshot.Merger, or a wrong one.
type merger interface {
	Add(snapshot.Table, checkpoint.TableProgress)
	Release(snapshot.Wait)
	Waiting() []snapshot.Wait
	Active() bool
	Begin(checkpoint.XID, checkpoint.LSN)
	Change(*replication.Change) snapshot.Verdict
	Reached(checkpoint.LSN)
	Saw(snapshot.MVCC)
	Arrived(*snapshot.Chunk, time.Time) error
	Order(time.Time) *snapshot.Order
	Paused(time.Time) (bool, time.Time)
	Next() (*snapshot.Row, bool)
	Released() (uint32, bool)
	HeldOut(uint32)
	Progress() map[uint32]checkpoint.TableProgress
	Hold() (checkpoint.LSN, bool)
	Recycle() *snapshot.Chunk
	Note(uint32)
}

// mergerMaker makes a Merger for a session that begins at an LSN.
type mergerMaker func(o snapshot.Options, since checkpoint.LSN) merger

// newMerger makes a real Merger.
func newMerger(o snapshot.Options, since checkpoint.LSN) merger { return snapshot.NewMerger(o, since) }

// position is how far the stream has been delivered.
type position struct {
	lsn checkpoint.LSN
	cut checkpoint.LSN // the commit LSN of a transaction of which only some changes are out
	seq int            // how many
}

// batch is what one Kafka transaction makes durable.
type batch struct {
	records  int
	position position
	progress map[uint32]checkpoint.TableProgress
	// upTo is how far may be confirmed once this is durable: what the Merger let be
	// confirmed when the batch was closed.
	upTo checkpoint.LSN
}

// sim runs a script of commands: the application, PostgreSQL, the readers, and a relay
// that does with a Merger what the real one does. A command that cannot be done at
// its moment does nothing and says so; thus a script may be shortened line by line.
type sim struct {
	make    mergerMaker
	options snapshot.Options
	now     time.Time
	trace   strings.Builder
	quiet   bool // no trace

	w     *world
	txns  map[string]*modelTxn
	reads []*modelRead
	snaps []snapshot.MVCC // taken and not shown to the Merger yet
	lent  map[*snapshot.Chunk]bool

	m       merger
	oracle  *oracle
	started bool
	used    map[string]bool                     // ids of events
	first   int                                 // the stream's first transaction ever, in the WAL
	asked   map[*modelTable]int                 // how often a table was to be read again
	wanted  map[uint32]checkpoint.TableProgress // what a start adds where the checkpoint knows nothing
	waiting map[snapshot.Wait]checkpoint.XID    // to be released
	told    map[uint32]checkpoint.TableProgress // the progress that the Merger told of so far
	out     []record
	held    map[uint32][]record
	sent    int // transactions of the WAL
	open    *modelTxn
	seq     int // of open's changes
	reached checkpoint.LSN
	batches []batch // sealed, not durable yet
	durable batch
	// confirmed is the slot's; persisted what of it outlives the server's crash.
	confirmed, persisted checkpoint.LSN
}

func newSim(create mergerMaker) *sim {
	s := &sim{make: create, options: snapshot.Options{ChunkRows: 2, ChunkBytes: 1 << 20, Readers: 1}, w: newWorld(),
		txns: map[string]*modelTxn{}, used: map[string]bool{}, lent: map[*snapshot.Chunk]bool{}, asked: map[*modelTable]int{}, wanted: map[uint32]checkpoint.TableProgress{},
		now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	s.oracle = newOracle(s.w)
	s.durable.progress = map[uint32]checkpoint.TableProgress{}
	return s
}

func (s *sim) printf(format string, args ...any) {
	if !s.quiet {
		fmt.Fprintf(&s.trace, "    "+format+"\n", args...)
	}
}

// errNotNow is given by commands that cannot be done at their moment.
var errNotNow = errors.New("not now")

// run does one line of a script.
func (s *sim) run(line string) error {
	f := strings.Fields(line)
	if len(f) == 0 || strings.HasPrefix(f[0], "#") {
		return nil
	}
	if !s.quiet {
		fmt.Fprintf(&s.trace, "> %s\n", line)
	}
	ok, err := s.command(f)
	if !ok {
		return fmt.Errorf("unknown command %q", f[0])
	}
	if errors.Is(err, errNotNow) {
		s.printf("not now")
		err = nil
	}
	if err == nil && s.started {
		err = s.settle()
	}
	return err
}

// settle takes back memory that is free, and looks at what must hold always.
func (s *sim) settle() error {
	for c := s.m.Recycle(); c != nil; c = s.m.Recycle() {
		if !s.lent[c] {
			return fmt.Errorf("a chunk comes back twice, or was never handed in")
		}
		delete(s.lent, c)
		if c.Shape.Relation != nil {
			spoil(c)
		}
	}
	// Without a time to ask again it is a truncate, or an outbox's rows from before the
	// slot, that goes out first.
	paused, wake := s.m.Paused(s.now)
	if paused && !wake.IsZero() && wake.Sub(s.now) > time.Second {
		return fmt.Errorf("the stream is to stand still for another %v", wake.Sub(s.now))
	}
	if paused && !wake.IsZero() && !wake.After(s.now) {
		return fmt.Errorf("the stream stands still, until a time that is past")
	}
	return nil
}

// session begins one: the stream starts at the slot's confirmed LSN.
func (s *sim) session() {
	o, p := s.options, s.durable.position
	o.Delivered = checkpoint.Position{LSN: p.lsn, Cut: checkpoint.Cut{CommitLSN: p.cut, Changes: uint64(p.seq)}}
	s.m = s.make(o, s.confirmed)
	s.reached, s.sent, s.open, s.seq = s.confirmed, 0, nil, 0
	for s.sent < len(s.w.wal) && s.w.wal[s.sent].end <= s.confirmed {
		s.sent++
	}
	s.reads, s.snaps, s.batches = nil, nil, nil
	s.lent, s.held, s.waiting = map[*snapshot.Chunk]bool{}, map[uint32][]record{}, map[snapshot.Wait]checkpoint.XID{}
	for _, t := range s.w.tables {
		t.readers = 0
	}
	s.durable.upTo = s.confirmed
	s.out = s.out[:s.durable.records]
	s.oracle = newOracle(s.w)
	for _, r := range s.out {
		_ = s.oracle.add(r) // it was judged before, perhaps while the topic was torn
	}
	s.told = maps.Clone(s.durable.progress)
	for _, t := range s.w.tables {
		p, ok := s.durable.progress[t.oid]
		if !ok {
			if p, ok = s.wanted[t.oid]; !ok {
				continue
			}
		}
		s.oracle.of(t).torn = t.whole && p.State == checkpoint.TableReading
		s.add(t, p)
	}
}

func (s *sim) add(t *modelTable, p checkpoint.TableProgress) {
	s.told[t.oid] = p
	s.m.Add(t.captured(), p)
	for _, w := range s.m.Waiting() {
		if _, known := s.waiting[w]; !known {
			s.waiting[w] = s.w.next
		}
	}
}

// emit sends a record out.
func (s *sim) emit(r record) error {
	s.printf("%s", r)
	s.out = append(s.out, r)
	if err := s.oracle.add(r); err != nil {
		return fmt.Errorf("record %s: %w", r, err)
	}
	return nil
}

// skip tells whether a change of x is out already, by the durable position.
func (s *sim) skip(x *modelTxn, seq int) bool {
	p := s.durable.position
	return x.end <= p.lsn || x.commit == p.cut && seq < p.seq
}

// at is the position after what was taken so far.
func (s *sim) at() position {
	p := position{lsn: max(s.reached, s.durable.position.lsn)}
	if x := s.open; x != nil && x.end > p.lsn && s.seq > 0 {
		p.cut, p.seq = x.commit, s.seq
	}
	if d := s.durable.position; p.lsn == d.lsn && (p.cut == 0 || p.cut == d.cut && p.seq < d.seq) {
		return d
	}
	return p
}

// deliver takes up to n changes of the next source transaction from the stream, -1 for
// all of it.
func (s *sim) deliver(n int) error {
	if s.open == nil {
		for s.sent < len(s.w.wal) && len(s.w.wal[s.sent].changes) == 0 && s.w.wal[s.sent].end <= s.w.flushed {
			s.sent++ // an empty one is not sent
		}
		if s.sent == len(s.w.wal) || s.w.wal[s.sent].end > s.w.flushed {
			return errNotNow
		}
		if paused, _ := s.m.Paused(s.now); paused {
			s.printf("paused")
			return nil
		}
		s.open, s.seq = s.w.wal[s.sent], 0
		s.m.Begin(s.open.xid, s.reached)
	}
	x := s.open
	for ; s.seq < len(x.changes) && n != 0; n-- {
		if err := s.change(x, s.seq); err != nil {
			return err
		}
		s.seq++
	}
	if s.seq == len(x.changes) && n != 0 {
		s.reached, s.open = x.end, nil
		s.sent++
		s.m.Reached(s.reached)
	}
	return nil
}

// change hands one change to the Merger and does what it says.
func (s *sim) change(x *modelTxn, seq int) error {
	c := x.changes[seq]
	skip := s.skip(x, seq)
	wire, text := c.wire(x, seq)
	verdict := s.m.Change(wire)
	if verdict != snapshot.Emit && !c.table.whole {
		return fmt.Errorf("verdict %d for a change of %s, whose rows have a key", verdict, c.table.name)
	}
	r := c.record(wire)
	for i := range text { // it is the stream's memory, and free
		text[i] = 'X'
	}
	switch {
	case skip:
		s.printf("skipped: %s", r)
	case verdict == snapshot.Drop:
		s.printf("dropped: %s", r)
	case verdict == snapshot.Hold:
		s.printf("held: %s", r)
		s.held[c.table.oid] = append(s.held[c.table.oid], r)
	default:
		return s.emit(r)
	}
	return nil
}

// next takes up to n rows; false where there are none.
func (s *sim) next(n int) (bool, error) {
	if s.open != nil {
		return false, errNotNow
	}
	took := false
	for ; n > 0; n-- {
		row, ok := s.m.Next()
		if !ok {
			break
		}
		took = true
		t := s.w.byOID(row.Table)
		r := record{table: t, op: replication.OpTruncate, snapshot: true}
		if !row.Truncate {
			if row.Relation != t.read {
				return false, fmt.Errorf("the row's relation is not the chunk's")
			}
			if row.Outbox != t.outbox {
				return false, fmt.Errorf("the row's mark as an event is %v", row.Outbox)
			}
			r = record{table: t, op: replication.OpRead, snapshot: true, values: texts(row.Tuple)}
			r.key = t.keyOf(r.values)
		}
		if err := s.emit(r); err != nil {
			return false, err
		}
	}
	return took, nil
}

// heldOut sends what was held, where it may go.
func (s *sim) heldOut() (bool, error) {
	if s.open != nil {
		return false, errNotNow
	}
	oid, ok := s.m.Released()
	if !ok {
		return false, nil
	}
	for _, r := range s.held[oid] {
		if err := s.emit(r); err != nil {
			return false, err
		}
	}
	delete(s.held, oid)
	s.m.HeldOut(oid)
	return true, nil
}

// seal closes a batch: what was taken so far, with the progress and the position.
func (s *sim) seal() {
	progress := s.m.Progress()
	maps.Copy(s.told, progress)
	b := batch{records: len(s.out), position: s.at(), progress: progress, upTo: s.reached}
	if hold, ok := s.m.Hold(); ok {
		b.upTo = min(b.upTo, hold)
	}
	s.batches = append(s.batches, b)
	var told []string
	for oid, p := range progress {
		told = append(told, fmt.Sprintf("%s: %s", s.w.byOID(oid).name, describeProgress(p)))
	}
	slices.Sort(told)
	for _, t := range told {
		s.printf("%s", t)
	}
}

func describeProgress(p checkpoint.TableProgress) string {
	s := fmt.Sprintf("%s rows=%d", p.State, p.Rows)
	for _, r := range p.Ranges {
		s += fmt.Sprintf(" (%s,%s]", strings.Join(r.After, "/"), strings.Join(r.To, "/"))
	}
	for _, k := range p.Again {
		s += " again=" + strings.Join(k, "/")
	}
	if p.Whole {
		s += " whole"
	}
	return s
}

// deliverBatch makes the oldest sealed batch durable.
func (s *sim) deliverBatch() bool {
	if len(s.batches) == 0 {
		return false
	}
	b := s.batches[0]
	s.batches = s.batches[1:]
	s.durable.records, s.durable.position, s.durable.upTo = b.records, b.position, b.upTo
	for oid, p := range b.progress {
		if p.State == "" {
			delete(s.durable.progress, oid)
		} else {
			s.durable.progress[oid] = p
		}
	}
	return true
}

// confirm tells PostgreSQL how far the durable position is, as far as the Merger let it.
func (s *sim) confirm() error {
	if hold, ok := s.m.Hold(); ok && hold < s.confirmed {
		return fmt.Errorf("hold at %s, and %s was confirmed", hold, s.confirmed)
	}
	if to := min(s.durable.position.lsn, s.durable.upTo); to > s.confirmed {
		s.confirmed = to
		s.printf("confirmed %s", to)
	}
	return nil
}

func (w *world) byOID(oid uint32) *modelTable { return w.tables[oid-16384] }

func number(s string, otherwise int) int {
	if n, err := strconv.Atoi(s); err == nil {
		return n
	}
	return otherwise
}

package snapshot_test

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/snapshot"
)

// command does one command of a script:
//
//	options ROWS READERS [PASSED [AGAIN]] of the Merger
//	table T KIND                  a table that is captured; see tableKinds
//	later T KIND                  one that `publish T` captures while the stream runs
//	row T KEY [BIG]               a row that is there before everything
//	start                         makes the slot, and begins
//	publish T · request T [replace|where]
//	                              a table joins; a table is to be read again
//	begin X · insert X T KEY BIG · update X T KEY [BIG] · move X T KEY TO [BIG] · delete X T KEY · truncate X T
//	                              without BIG the column is left unchanged; subinsert: in a subtransaction
//	prepare X · abort X
//	commit X [async|wait]         async: seen but not flushed; wait: flushed but not seen, until `show X`
//	show X · flush · noise        noise is WAL that is none of ours
//	deliver [N]                   the stream's next transaction, or N changes of it
//	keepalive                     the stream says how far it is
//	order · read [I] · arrive [I] an order is given; is carried out; its next chunk arrives
//	saw · snap · sawold           the Merger sees an MVCC snapshot of now; one is taken; the oldest taken is seen
//	next [N] · held               rows go out; held changes do
//	release                       tables that need wait no longer
//	seal · durable · confirm      a batch closes; the oldest becomes durable; the LSN is confirmed
//	checkpoint                    these three
//	persist                       the slot's confirmed LSN would outlive a crash of the server
//	crash · servercrash
//	tick MS                       time passes
//	drain                         the application ends, and everything runs to its end; folds and compares
//	state                         tells of the Merger's hold, pause and activity
//
// ok is false for an unknown one.
func (s *sim) command(f []string) (ok bool, err error) {
	args := append(slices.Clone(f[1:]), "", "", "", "", "")
	for _, group := range []func(string, []string) (bool, error){s.setUp, s.application, s.write} {
		if ok, err := group(f[0], args); ok {
			return true, err
		}
	}
	if !s.started {
		return true, errNotNow
	}
	for _, group := range []func(string, []string) (bool, error){s.stream, s.reader, s.relay} {
		if ok, err := group(f[0], args); ok {
			return true, err
		}
	}
	return false, nil
}

func (s *sim) setUp(word string, args []string) (bool, error) {
	switch word {
	case "options":
		o := &s.options
		o.ChunkRows, o.Readers, o.MaxPassed, o.MaxAgain = number(args[0], 2), number(args[1], 1), number(args[2], 0), number(args[3], 0)
	case "table", "later":
		if s.started || s.w.table(args[0]) != nil {
			return true, errNotNow
		}
		s.w.create(args[0], args[1]).published = word == "table"
	case "row":
		t := s.w.table(args[0])
		if s.started || t == nil || !t.whole && s.w.current(nil, t, args[1]) != nil {
			return true, errNotNow
		}
		s.w.put(nil, t, args[1], args[2], false)
	case "start":
		return true, s.start()
	case "publish":
		t := s.w.table(args[0])
		if !s.started || t == nil || t.published {
			return true, errNotNow
		}
		t.published = true
		s.want(t, checkpoint.TableWaiting)
		s.add(t, s.wanted[t.oid])
	case "request":
		t := s.w.table(args[0])
		if !s.started || t == nil || t.whole && args[1] != "replace" || t.outbox || s.told[t.oid].State != checkpoint.TableDone {
			return true, errNotNow
		}
		p := checkpoint.TableProgress{Table: t.captured().String(), State: checkpoint.TableWaiting,
			Request: &checkpoint.Request{ID: "q", Tables: []string{t.captured().String()}, Replace: args[1] == "replace", At: s.now}}
		if args[1] == "where" {
			p.Request.Where = oddRows
		}
		s.add(t, p)
		s.m.Note(t.oid)
		s.asked[t]++
	default:
		return false, nil
	}
	return true, nil
}

func (s *sim) want(t *modelTable, state checkpoint.TableState) {
	s.wanted[t.oid] = checkpoint.TableProgress{Table: t.captured().String(), State: state}
}

// start makes the slot: not while a transaction is running. One that is committed and
// not seen yet is not in the stream, and tables have to wait for it.
func (s *sim) start() error {
	state := checkpoint.TablePending
	for _, x := range s.w.open {
		if x.commit == 0 {
			return errNotNow
		}
		state = checkpoint.TableWaiting
	}
	if s.started {
		return errNotNow
	}
	s.started = true
	s.w.flushed = s.w.end
	s.confirmed, s.persisted, s.durable.position.lsn = s.w.end, s.w.end, s.w.end
	s.first = len(s.w.wal)
	s.options.SlotSnapshot = s.w.mvcc()
	for _, t := range s.w.tables {
		if t.published {
			s.want(t, state)
		}
	}
	s.session()
	return nil
}

func (s *sim) application(word string, args []string) (bool, error) {
	x := s.txns[args[0]]
	switch word {
	case "flush":
		s.w.flushed = s.w.end
		return true, nil
	case "noise":
		s.w.end += 16
		return true, nil
	case "begin":
		if x != nil {
			return true, errNotNow
		}
		s.txns[args[0]] = s.w.begin(args[0])
		s.printf("xid %s", shortXID(s.txns[args[0]].xid))
		return true, nil
	case "prepare", "abort", "commit", "show":
	default:
		return false, nil
	}
	if x == nil || x.over() || (word == "show") != (x.commit != 0) || word == "prepare" && x.prepared {
		return true, errNotNow
	}
	switch word {
	case "prepare":
		x.prepared = true
		s.w.flushed = s.w.end
	case "commit":
		s.w.commit(x)
		s.printf("commit %s end %s", x.commit, x.end)
		if args[1] != "async" {
			s.w.flushed = s.w.end
		}
		if args[1] != "wait" {
			s.w.finish(x)
		}
	default:
		s.w.finish(x)
	}
	return true, nil
}

func (s *sim) write(word string, args []string) (bool, error) {
	x, t := s.txns[args[0]], s.w.table(args[1])
	switch word {
	case "insert", "subinsert", "update", "move", "delete", "truncate":
	default:
		return false, nil
	}
	if x == nil || x.over() || x.commit != 0 || x.prepared || t == nil || t.kind == "log" && !strings.HasSuffix(word, "insert") {
		return true, errNotNow // only inserts are published, so let there be no others
	}
	var ok bool
	switch word {
	case "insert", "subinsert":
		if t.outbox && s.used[args[2]] { // an event's id is never used again
			break
		}
		if ok = s.w.insert(x, t, args[2], args[3], word == "subinsert"); ok && t.outbox {
			s.used[args[2]] = true
		}
	case "update":
		ok = s.w.update(x, t, args[2], args[2], args[3], false)
	case "move":
		ok = !t.outbox && s.w.update(x, t, args[2], args[3], args[4], false)
	case "delete":
		ok = s.w.remove(x, t, args[2])
	case "truncate":
		ok = s.w.truncate(x, t)
	}
	if !ok {
		return true, errNotNow
	}
	return true, nil
}

func (s *sim) stream(word string, args []string) (bool, error) {
	switch word {
	case "deliver":
		return true, s.deliver(number(args[0], -1))
	case "keepalive":
		if s.open != nil {
			return true, errNotNow
		}
		for _, x := range s.w.wal[s.sent:] {
			if x.end <= s.w.flushed && len(x.changes) > 0 {
				return true, errNotNow
			}
		}
		s.reached = max(s.reached, s.w.flushed)
		s.m.Reached(s.reached)
		s.printf("reached %s", s.reached)
	case "seal":
		s.seal()
	case "durable":
		if !s.deliverBatch() {
			return true, errNotNow
		}
	case "confirm":
		return true, s.confirm()
	case "checkpoint":
		s.seal()
		for s.deliverBatch() {
		}
		return true, s.confirm()
	default:
		return false, nil
	}
	return true, nil
}

func (s *sim) reader(word string, args []string) (bool, error) {
	switch word {
	case "order":
		o := s.m.Order(s.now)
		if o == nil {
			s.printf("none")
			return true, nil
		}
		r := &modelRead{order: o}
		if o.Kind != snapshot.OrderSnapshot {
			r.table = s.w.byOID(o.Table.OID)
		}
		s.printf("%s", describe(o, r.table))
		if s.reads = append(s.reads, r); len(s.reads) > s.options.Readers+1 {
			return true, fmt.Errorf("%d orders at once for %d readers", len(s.reads), s.options.Readers)
		}
	case "read", "arrive":
		var fit []*modelRead
		for _, r := range s.reads {
			if r.begun == (word == "arrive") {
				fit = append(fit, r)
			}
		}
		if len(fit) == 0 {
			return true, errNotNow
		}
		r := fit[number(args[0], 0)%len(fit)]
		if word == "arrive" {
			return true, s.arrive(r)
		}
		if !s.w.read(r, s.now) {
			s.printf("%s waits for a lock", describe(r.order, r.table))
			return true, nil
		}
		s.printf("%s:", describe(r.order, r.table))
		for _, c := range r.chunks {
			s.printf("  %s", describeChunk(c))
		}
	case "saw":
		s.m.Saw(s.w.mvcc())
		s.printf("%s", shortMVCC(s.w.mvcc()))
	case "snap":
		s.snaps = append(s.snaps, s.w.mvcc())
	case "sawold":
		if len(s.snaps) == 0 {
			return true, errNotNow
		}
		s.m.Saw(s.snaps[0])
		s.printf("%s", shortMVCC(s.snaps[0]))
		s.snaps = s.snaps[1:]
	default:
		return false, nil
	}
	return true, nil
}

// arrive hands a read's next chunk to the Merger.
func (s *sim) arrive(r *modelRead) error {
	c := r.chunks[0]
	if r.order.Flushed && c.LSN > s.w.flushed {
		return errNotNow
	}
	r.chunks = r.chunks[1:]
	if len(r.chunks) == 0 {
		s.reads = slices.DeleteFunc(s.reads, func(o *modelRead) bool { return o == r })
		if r.order.Kind == snapshot.OrderWhole {
			r.table.readers--
		}
	}
	s.lent[c] = true
	s.printf("%s", describe(r.order, r.table))
	return s.m.Arrived(c, s.now)
}

func (s *sim) relay(word string, args []string) (bool, error) {
	switch word {
	case "next":
		_, err := s.next(number(args[0], 1))
		return true, err
	case "held":
		_, err := s.heldOut()
		return true, err
	case "release":
		for _, w := range s.m.Waiting() {
			if s.waiting[w] <= s.w.mvcc().Xmin {
				delete(s.waiting, w)
				s.m.Release(w)
				s.printf("%s", s.w.byOID(w.OID).name)
			}
		}
	case "persist":
		s.persisted = s.confirmed
	case "servercrash":
		s.w.crash()
		s.confirmed = s.persisted
		s.session()
	case "crash":
		s.session()
	case "tick":
		s.now = s.now.Add(time.Duration(number(args[0], 100)) * time.Millisecond)
	case "drain":
		return true, s.drain()
	case "state":
		hold, ok := s.m.Hold()
		paused, _ := s.m.Paused(s.now)
		s.printf("active=%v paused=%v hold=%v %s", s.m.Active(), paused, ok, hold)
	default:
		return false, nil
	}
	return true, nil
}

// drainRounds bounds how long a Merger may take when nothing disturbs it.
const drainRounds = 400

// drain ends the application, and lets everything run to its end.
func (s *sim) drain() error {
	for _, x := range slices.Clone(s.w.open) {
		if x.prepared && x.commit == 0 {
			s.w.commit(x)
		}
		s.w.finish(x)
	}
	for round := 0; ; round++ {
		s.w.flushed = s.w.end
		progress := fmt.Sprint(len(s.out), s.reached)
		for _, line := range []string{"release", "deliver", "keepalive", "order", "order", "order", "read", "read", "arrive", "arrive",
			"arrive", "saw", "next 1000", "held", "checkpoint", "tick 200"} {
			if err := s.quietly(line); err != nil {
				return fmt.Errorf("drain, %s: %w", line, err)
			}
		}
		hold, held := s.m.Hold()
		if !s.m.Active() && !held && s.sent == len(s.w.wal) && len(s.held) == 0 && len(s.lent) == 0 {
			break
		}
		if round > drainRounds && progress == fmt.Sprint(len(s.out), s.reached) {
			return fmt.Errorf("drain: after %d rounds active=%v, hold=%v %s, %d of %d transactions delivered, %d tables with held changes, %d chunks not given back",
				round, s.m.Active(), held, hold, s.sent, len(s.w.wal), len(s.held), len(s.lent))
		}
	}
	asked := s.asked
	if s.options.MaxAgain > 0 {
		asked = nil
	}
	if err := s.oracle.final(s.first, asked); err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	return nil
}

// quietly runs a line without a word of what is not now.
func (s *sim) quietly(line string) error {
	before := s.trace.Len()
	err := s.run(line)
	if text := s.trace.String(); strings.HasSuffix(text[before:], "not now\n") || strings.Count(text[before:], "\n") == 1 {
		s.trace.Reset()
		s.trace.WriteString(text[:before])
	}
	return err
}

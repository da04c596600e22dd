package verify

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// events is what is particular to an outbox table: each of its rows has to be one event,
// in the topic that the row names.
type events struct {
	began   time.Time       // when the snapshot of the table began; zero where there was none
	dead    map[string]bool // ids of events that are dead letters
	setting string
	mark    int    // the column that marks published rows; -1 for none
	marked  string // what it holds then; empty for a timestamp, of which each does
}

// What the first byte of a row's value says.
const (
	rowMust byte = iota
	rowMay       // it may be from before the first start, and never have been sent
)

// open takes what the table's columns tell.
func (e *events) open(ctx context.Context, c *compared) error {
	e.dead = map[string]bool{}
	if c.named == nil {
		c.named = map[string]bool{}
		if topic := c.form.Topic(); topic != "" {
			c.named[topic] = true // its rows may all be gone
		}
	}
	e.setting = c.o.Backlogs[c.table.String()]
	facts, err := replication.ReadColumnFacts(ctx, c.conn, c.rel.OID)
	if err != nil {
		return err
	}
	backlog, err := c.router.Backlog(c.rel, "", facts)
	if err != nil {
		return fmt.Errorf("look for the column that marks published rows: %w", err)
	}
	e.marks(c.rel, backlog)
	return nil
}

// marks takes which column tells that a row was published. It is the one by which the
// backlog of the first start was chosen.
func (e *events) marks(rel *replication.Relation, b router.Backlog) {
	e.mark = slices.IndexFunc(rel.Columns, func(c replication.Column) bool { return c.Name == b.Mark })
	e.marked = ""
	if b.Mark == "status" {
		e.marked = strings.Trim(b.Published, "'")
	}
}

// mayBeOlder tells whether a row may be from before the connector's first start and not
// have been sent then: it is marked, and not provably marked since.
func (e *events) mayBeOlder(tuple replication.Tuple) bool {
	switch {
	case e.setting == "none":
		return true
	case e.setting == "all", e.mark < 0, tuple[e.mark].Kind != replication.ValueText:
		return false
	}
	text := string(tuple[e.mark].Text)
	if e.marked != "" {
		return strings.TrimRight(text, " ") == e.marked // of a char(n) there are blanks behind it
	}
	at, ok := markTime(text)
	return !ok || e.began.IsZero() || at.Before(e.began)
}

// markTime reads a timestamp of a session whose time zone is UTC. One without a zone counts
// as UTC too. Infinity and years that do not have four digits tell no time.
func markTime(text string) (at time.Time, ok bool) {
	at, err := time.Parse("2006-01-02 15:04:05.999999", strings.TrimSuffix(text, "+00"))
	return at, err == nil
}

// row puts aside the event that a row has to be.
func (e *events) row(c *compared, tuple replication.Tuple) error {
	event, err := c.form.Event(tuple)
	if err != nil {
		return c.unencodable(err)
	}
	if !c.named[event.Topic] {
		c.named[event.Topic] = true
	}
	c.value = appendEventKey(c.value[:0], event.Topic, event.ID)
	n := len(c.value)
	hash := c.hash(c.value)
	if !c.sample.take(hash) || !c.only.has(hash) {
		return nil
	}
	flag := rowMust
	if e.mayBeOlder(tuple) {
		flag = rowMay
	}
	if c.value = appendEvent(append(c.value, flag), event.Key, event.Value); c.digests {
		c.value = append(c.value[:n+1], c.digest(&c.hashed, c.value[n+1:])...)
	}
	return c.put(hash, row{key: c.value[:n], value: c.value[n:]})
}

// appendEventKey appends what an event is found by: Kafka takes no line break in a topic's
// name.
func appendEventKey(dst []byte, topic string, id []byte) []byte {
	return append(append(append(dst, topic...), '\n'), id...)
}

func appendEvent(dst, key, value []byte) []byte {
	dst = appendBytes(dst, key)
	if value == nil {
		return append(dst, 0)
	}
	return append(append(dst, 1), value...)
}

// cutEvent gives key and value; the value is nil for a tombstone.
func cutEvent(b []byte) (key, value []byte) {
	key, b = cutBytes(b)
	if b[0] == 0 {
		return key, nil
	}
	return key, b[1:]
}

// readTopics puts aside the events of every topic that a row names.
func (e *events) readTopics(ctx context.Context, c *compared, out *spill) error {
	if err := e.readLetters(ctx, c); err != nil {
		return err
	}
	topics := slices.Sorted(maps.Keys(c.named))
	c.report.Topic = strings.Join(topics, ",")
	if len(topics) > maxFound {
		c.report.Topic = fmt.Sprintf("%s and %d more", strings.Join(topics[:maxFound], ","), len(topics)-maxFound)
	}
	for _, topic := range topics {
		start, end, err := c.topics.list(ctx, topic)
		if checkpoint.IsRefusal(err) {
			continue // its events are missing
		}
		if err != nil {
			return err
		}
		for _, offset := range start {
			c.deleted = c.deleted || offset > 0
		}
		s := &eventRecords{topic: topic, c: c, out: out}
		if err := c.topics.read(ctx, topic, start, end, s.take); err != nil {
			return err
		}
	}
	return nil
}

// readLetters finds which of the table's rows are dead letters.
func (e *events) readLetters(ctx context.Context, c *compared) error {
	topic := c.o.Router.DeadLetterTopic
	start, end, err := c.topics.list(ctx, topic)
	if checkpoint.IsRefusal(err) {
		return nil // there are none
	}
	if err != nil {
		return err
	}
	name, id, err := quoted(c.table.String(), c.form.IDColumn())
	if err != nil {
		return err
	}
	return c.topics.read(ctx, topic, start, end, func(r *kgo.Record) error {
		e.letter(r.Value, name, id)
		return nil
	})
}

// letter takes a dead letter, where it is of a row of the table; id is the column of its id.
func (e *events) letter(value, table, id []byte) {
	if !bytes.Equal(member(value, `"table"`), table) {
		return
	}
	if text := member(member(value, `"row"`), string(id)); len(text) > 2 && text[0] == '"' {
		e.dead[unquote(text)] = true
	}
}

// eventRecords takes the records of one topic.
type eventRecords struct {
	topic  string
	c      *compared
	out    *spill
	key    []byte
	entry  []byte
	hashed [2][digestSize]byte
}

func (s *eventRecords) take(r *kgo.Record) error {
	x := change{kind: kindSet, flags: flagUnplaced, order: order{partition: r.Partition, offset: r.Offset}}
	var id, seq []byte
	for i := range r.Headers {
		switch h := &r.Headers[i]; h.Key {
		case "id", "ce_id":
			id = h.Value
		case "aggregate_seq":
			seq = h.Value
		case headerReplay:
			x.flags |= flagReplayed
		case headerPosition:
			if commit, seq, isRead, err := checkpoint.ParseHeader(string(h.Value)); err == nil {
				x.order.commit, x.order.seq = commit, seq
				if isRead {
					x.order.seq = snapshotSeq
				}
				x.flags &^= flagUnplaced
			}
		}
	}
	if id == nil {
		return nil // another producer's
	}
	s.c.report.Records++
	s.key = appendEventKey(s.key[:0], s.topic, id)
	if hash, wanted := s.wants(); wanted {
		n := len(s.key)
		s.key = appendEvent(s.key, r.Key, r.Value)
		x.key, x.row = s.key[:n], s.c.digest(&s.hashed[1], s.key[n:])
		if err := s.put(hash, &x); err != nil {
			return err
		}
	}
	if len(r.Key) == 0 || x.flags&flagReplayed != 0 {
		return nil
	}
	// Once more, by its aggregate, for the order.
	s.key = append(appendEventKey(s.key[:0], s.topic, aggregateMark), r.Key...)
	hash, wanted := s.wants()
	if !wanted {
		return nil
	}
	x.key, x.row = s.key, seq
	x.flags |= flagAggregate
	return s.put(hash, &x)
}

// aggregateMark begins the key of entries that tell the order of an aggregate's events. No
// text of PostgreSQL holds it.
var aggregateMark = []byte{0}

// wants tells whether the key is one to be compared.
func (s *eventRecords) wants() (hash uint64, wanted bool) {
	hash = s.c.hash(s.key)
	return hash, hash <= s.c.comparison.threshold && s.c.only.has(hash)
}

func (s *eventRecords) put(hash uint64, x *change) error {
	if s.c.digests {
		binary.LittleEndian.PutUint64(s.hashed[0][:], hash)
		x.key = s.hashed[0][:]
	}
	s.entry = x.append(s.entry[:0])
	return s.out.add(hash, s.entry)
}

// judgeOrder finds events that stand behind a later one of their aggregate in a partition:
// by position,
// and by the aggregate's seq where an event has none. (A seq that goes back while positions
// rise is the order in which the application has committed.)
func judgeOrder(changes []change, found func(*change)) {
	if len(changes) == 1 {
		return
	}
	slices.SortFunc(changes, func(a, b change) int {
		return cmp.Or(cmp.Compare(a.order.partition, b.order.partition), cmp.Compare(a.order.offset, b.order.offset))
	})
	type position struct {
		commit checkpoint.LSN
		seq    uint64
	}
	seen := map[position]bool{}
	var latest *change
	largest := int64(math.MinInt64)
	for i := range changes {
		x := &changes[i]
		if i > 0 && changes[i-1].order.partition != x.order.partition {
			latest, largest = nil, math.MinInt64 // partitions have no order
		}
		seq, err := strconv.ParseInt(string(x.row), 10, 64)
		counted := err == nil
		back := false
		if x.flags&flagUnplaced != 0 {
			back = counted && seq < largest
		} else {
			p := position{x.order.commit, x.order.seq}
			switch {
			case seen[p] && p.seq != snapshotSeq: // doubled, and counted as that
			case latest != nil && x.order.comparePosition(latest.order) < 0:
				back = true
			default:
				latest = x
			}
			seen[p] = true
		}
		if counted {
			largest = max(largest, seq)
		}
		if back {
			found(x)
		}
	}
}

// judge holds the records of one event against its row.
func (e *events) judge(c *comparison, w *worker, key []byte, changes []change, rows []row) {
	topic, id, _ := bytes.Cut(key, []byte{'\n'})
	if len(changes) > 0 && changes[0].flags&flagAggregate != 0 {
		judgeOrder(changes, func(x *change) {
			w.report.add(Difference{
				Kind: kindDisordered, Key: bytes.Join([][]byte{topic, id[len(aggregateMark):]}, []byte(" ")),
				Where: fmt.Sprintf("%s[%d]@%d", topic, x.order.partition, x.order.offset),
			}, false)
		})
		return
	}
	shown := func() Value { return bytes.Join([][]byte{topic, id}, []byte(" ")) }
	slices.SortFunc(changes, func(a, b change) int { return a.order.compare(b.order) })
	where := func(o order) string { return fmt.Sprintf("%s[%d]@%d", topic, o.partition, o.offset) }
	originals := 0
	for i := range changes {
		if changes[i].flags&flagReplayed != 0 {
			continue
		}
		if originals++; originals > 1 {
			_, value := cutEvent(changes[i].row)
			w.report.add(Difference{Kind: kindDoubled, Key: shown(), Topic: value, Where: where(changes[i].order)}, false)
		}
	}
	x := delivered(changes)
	for _, r := range rows {
		w.report.Compared++
		wantKey, want := cutEvent(r.value[1:])
		switch {
		case x == nil && e.dead[string(id)]:
			w.report.letters++
		case x == nil && r.value[0] == rowMay:
			w.report.unjudged++
		case x == nil:
			w.report.add(Difference{Kind: kindMissing, Key: shown(), Table: want}, false)
		default:
			gotKey, got := cutEvent(x.row)
			if bytes.Equal(gotKey, wantKey) && bytes.Equal(got, want) && (got == nil) == (want == nil) {
				w.report.Equal++
				continue
			}
			d := Difference{Kind: kindDiffering, Key: shown(), Table: want, Topic: got, Where: where(x.order)}
			if !bytes.Equal(gotKey, wantKey) {
				d.Columns = append(d.Columns, fmt.Sprintf("key %q instead of %q", gotKey, wantKey))
			}
			w.report.add(d, false)
		}
	}
}

// judgeDigests settles the events that are sound, and leaves the others to the next look.
func (e *events) judgeDigests(c *comparison, w *worker, key []byte, changes []change, rows []row) {
	if len(changes) > 0 && changes[0].flags&flagAggregate != 0 {
		disordered := false
		judgeOrder(changes, func(*change) { disordered = true })
		if disordered {
			c.leave(w, key)
		}
		return
	}
	originals := 0
	for i := range changes {
		if changes[i].flags&flagReplayed == 0 {
			originals++
		}
	}
	x := delivered(changes)
	switch {
	case originals <= 1 && len(rows) == 0:
	case originals <= 1 && x != nil && len(rows) == 1 && bytes.Equal(x.row, rows[0].value[1:]):
		w.report.Compared++
		w.report.Equal++
	case x == nil && len(rows) == 1 && rows[0].value[0] == rowMay && len(e.dead) == 0:
		w.report.Compared++
		w.report.unjudged++
	default:
		c.leave(w, key)
	}
}

// delivered gives the record that counts: the connector's own or, where the topic has it not,
// one that a replay has brought; nil where there is none.
func delivered(changes []change) *change {
	for i := range changes {
		if changes[i].flags&flagReplayed == 0 {
			return &changes[i]
		}
	}
	if len(changes) > 0 {
		return &changes[0]
	}
	return nil
}

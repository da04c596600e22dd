package verify

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// events is what is particular to an outbox table: each of its rows has to be one event,
// in the topic that the row names.
type events struct {
	comparison comparison
	began      time.Time // when the snapshot of the table began; zero where there was none
	topics     map[string]bool
	letters    int64
	dead       map[string]bool // ids of events that are dead letters
	published  int             // the column published_at; -1 for none
	status     int             // the column status; -1 for none
	setting    string
}

// What the first byte of a row's value says.
const (
	rowMust byte = iota
	rowMay       // it may be from before the first start, and never have been sent
)

// open takes what the table's columns tell.
func (e *events) open(c *compared) error {
	e.topics, e.dead = map[string]bool{}, map[string]bool{}
	e.published, e.status, e.setting = -1, -1, c.o.Backlogs[c.table.String()]
	for i, column := range c.rel.Columns {
		switch column.Name {
		case "published_at":
			e.published = i
		case "status":
			e.status = i
		}
	}
	return nil
}

// mayBeOlder tells whether a row may be from before the connector's first start and not
// have been sent then: it is marked, and not provably marked since.
func (e *events) mayBeOlder(tuple replication.Tuple) bool {
	if e.setting == "none" {
		return true
	}
	if e.setting == "all" {
		return false
	}
	if e.published >= 0 {
		v := tuple[e.published]
		if v.Kind != replication.ValueText {
			return false
		}
		at, err := time.Parse("2006-01-02 15:04:05.999999-07", string(v.Text))
		return err != nil || e.began.IsZero() || at.Before(e.began)
	}
	if e.status >= 0 {
		text := string(tuple[e.status].Text)
		return text == "1" || text == "processed"
	}
	return false
}

// row puts aside the event that a row has to be.
func (e *events) row(c *compared, tuple replication.Tuple) error {
	event, err := c.form.Event(tuple)
	if err != nil {
		return c.unencodable(err)
	}
	if !e.topics[event.Topic] {
		e.topics[event.Topic] = true
	}
	r := row{}
	r.key = eventKey(event.Topic, event.ID)
	hash := maphash.Bytes(c.seed, r.key)
	if !c.sample.take(hash) {
		return nil
	}
	flag := rowMust
	if e.mayBeOlder(tuple) {
		flag = rowMay
	}
	r.value = appendEvent([]byte{flag}, event.Key, event.Value)
	c.entry = r.append(c.entry[:0])
	return c.rows.add(hash, c.entry)
}

// eventKey is what an event is found by: Kafka takes no line break in a topic's name.
func eventKey(topic string, id []byte) []byte {
	return append(append([]byte(topic), '\n'), id...)
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
	topics := make([]string, 0, len(e.topics))
	for topic := range e.topics {
		topics = append(topics, topic)
	}
	slices.Sort(topics)
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
	_, name, err := quoted("", c.table.String())
	if err != nil {
		return err
	}
	_, id, err := quoted("", c.form.IDColumn())
	if err != nil {
		return err
	}
	return c.topics.read(ctx, topic, start, end, func(r *kgo.Record) error {
		if bytes.Equal(member(r.Value, `"table"`), name) {
			if text := member(member(r.Value, `"row"`), string(id)); len(text) > 2 {
				e.dead[string(text[1:len(text)-1])] = true
			}
		}
		return nil
	})
}

// eventRecords takes the records of one topic.
type eventRecords struct {
	topic string
	c     *compared
	out   *spill
	entry []byte
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
	x.key = eventKey(s.topic, id)
	x.row = appendEvent(nil, r.Key, r.Value)
	if err := s.put(&x); err != nil || len(r.Key) == 0 || x.flags&flagReplayed != 0 {
		return err
	}
	// Once more, by its aggregate, for the order.
	x.key = eventKey(s.topic, append([]byte{aggregateMark}, r.Key...))
	x.row = seq
	return s.put(&x)
}

// aggregateMark begins the key of entries that tell the order of an aggregate's events. No
// text of PostgreSQL holds it.
const aggregateMark = 0

func (s *eventRecords) put(x *change) error {
	hash := maphash.Bytes(s.c.seed, x.key)
	if hash > s.c.events.comparison.threshold {
		return nil
	}
	s.entry = x.append(s.entry[:0])
	return s.out.add(hash, s.entry)
}

// judgeOrder finds events that stand behind a later one of their aggregate: by position,
// and by the aggregate's seq where an event has none. (A seq that goes back while positions
// rise is the order in which the application has committed.)
func judgeOrder(w *worker, topic, aggregate []byte, changes []change) {
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
			w.report.add(Difference{
				Kind: kindDisordered, Key: bytes.Join([][]byte{topic, aggregate}, []byte(" ")),
				Where: fmt.Sprintf("%s[%d]@%d", topic, x.order.partition, x.order.offset),
			}, false)
		}
	}
}

// judge holds the records of one event against its row.
func (e *events) judge(c *comparison, w *worker, key []byte, changes []change, rows []row) {
	topic, id, _ := bytes.Cut(key, []byte{'\n'})
	if len(id) > 0 && id[0] == aggregateMark {
		judgeOrder(w, topic, id[1:], changes)
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
	for _, r := range rows {
		w.report.Compared++
		wantKey, want := cutEvent(r.value[1:])
		switch {
		case originals == 0 && e.dead[string(id)]:
			w.report.letters++
		case originals == 0 && r.value[0] == rowMay:
			w.report.unjudged++
		case originals == 0:
			w.report.add(Difference{Kind: kindMissing, Key: shown(), Table: want}, false)
		default:
			x := firstOriginal(changes)
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

func firstOriginal(changes []change) *change {
	for i := range changes {
		if changes[i].flags&flagReplayed == 0 {
			return &changes[i]
		}
	}
	return nil
}

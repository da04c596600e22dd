package polling

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

const (
	mostChunk = 2000 // rows that are read at a time
	// Long values are compressed where they lie. How much larger they are taken to be, until
	// some are read, and then at the least: the server's compression gains up to 90.
	unpacked, unpackedLeast = 32, 8
)

// head is a pending row before it is read.
type head struct {
	row
	key   int64 // the hash of its key
	bytes int   // as it lies in the table
}

// row tells which version of a row is meant: where it is, and who wrote it. The place
// alone does not: between two statements it may be given to another row.
type row struct{ table, ctid, xmin string }

// taken is a row that is locked and in the batch.
type taken struct {
	row
	dead bool // its record is a dead letter
}

// list gives the pending rows of the shards in their order. It must be a statement of its
// own, after the locks are taken: its snapshot then has what their last holder committed.
func (s *session) list(ctx context.Context, t *table, locked []int64) ([]head, error) {
	if len(locked) == 0 {
		return nil, nil
	}
	rows, err := s.query(ctx, t.listSQL, numbers(locked), numbers(t.held))
	if err != nil {
		return nil, fmt.Errorf("list pending rows of %s: %w", t.name(), err)
	}
	heads := make([]head, len(rows))
	for i, r := range rows {
		key, err1 := strconv.ParseInt(string(r[3]), 10, 64)
		bytes, err2 := strconv.Atoi(string(r[4]))
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		heads[i] = head{row{string(r[0]), string(r[1]), string(r[2])}, key, bytes}
	}
	return heads, s.checkShape(ctx, t)
}

// checkShape makes sure that the table is still what the session takes it for. The list
// has locked it: from here on, until the transaction ends, nobody can alter it.
func (s *session) checkShape(ctx context.Context, t *table) error {
	now, err := replication.Describe(ctx, s.conn, []uint32{t.relation.OID})
	if err != nil {
		return err
	}
	if !reflect.DeepEqual(now[t.relation.OID], t.relation) {
		return fmt.Errorf("%w: %s", errShape, t.name())
	}
	return nil
}

// read locks and routes the listed rows into the batch, until that is full, and gives those
// that are in it, and the keys of which a row could not be locked. After a
// *router.StopError the batch holds what comes before.
func (s *session) read(ctx context.Context, t *table, locked []int64, heads []head) (rows []taken, held map[int64]bool, err error) {
	s.batch.Reset()
	held = map[int64]bool{}
	for len(heads) > 0 && !s.batch.Full() && err == nil {
		room := float64(max(s.p.o.Limits.Bytes-s.batch.Bytes(), 0))
		n, packed := 1, heads[0].bytes
		for n < min(len(heads), mostChunk) && float64(packed+heads[n].bytes)*t.ratio <= room {
			packed += heads[n].bytes
			n++
		}
		var bytes int
		rows, bytes, err = s.readChunk(ctx, t, locked, heads[:n], held, rows)
		heads = heads[n:]
		if bytes > 0 {
			t.ratio = max(float64(bytes)/float64(packed), unpackedLeast)
		}
	}
	if s.batch.Records() > 0 {
		s.batch.Advance(checkpoint.Position{}, false)
	}
	return rows, held, err
}

func (s *session) readChunk(ctx context.Context, t *table, locked []int64, chunk []head, held map[int64]bool, rows []taken) ([]taken, int, error) {
	ctids := make([]string, len(chunk))
	var oids []string
	for i, h := range chunk {
		ctids[i] = h.ctid
		if !slices.Contains(oids, h.table) {
			oids = append(oids, h.table)
		}
	}
	found, err := s.query(ctx, t.readSQL, array(ctids), array(oids), numbers(locked))
	if err != nil {
		return rows, 0, fmt.Errorf("read pending rows of %s: %w", t.name(), err)
	}
	byPlace := make(map[row][][]byte, len(found))
	bytes := 0
	for _, r := range found {
		byPlace[row{string(r[0]), string(r[1]), string(r[2])}] = r[3:]
		for _, v := range r {
			bytes += len(v)
		}
	}
	c := replication.Change{Op: replication.OpRead, Relation: t.relation, Read: &replication.ReadPoint{}}
	for _, h := range chunk {
		if s.batch.Full() {
			break // they were larger than they looked
		}
		values, ok := byPlace[h.row]
		if !ok || held[h.key] {
			held[h.key] = true
			continue
		}
		c.New = tuple(c.New, values)
		if err := s.route(ctx, &c); err != nil {
			return rows, bytes, err
		}
		r := taken{row: h.row, dead: s.batch.LastIsDeadLetter()}
		rows = append(rows, r)
		if r.dead && t.markSQL == "" && s.batch.LastIsCut() {
			return rows, bytes, refuseToDelete(t)
		}
	}
	return rows, bytes, nil
}

// refuseToDelete is about a row whose dead letter lacks a part of it.
func refuseToDelete(t *table) error {
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("an event of %s cannot be published and does not fit into the dead-letter topic either, and its row would be deleted (after: delete)", t.name()),
		Risk:   "what the dead letter has no room for would be lost",
		Remedy: fmt.Sprintf("ALTER TABLE %s ADD COLUMN published_at timestamptz, so that rows of dead letters are marked and stay; or raise max.message.bytes of the topics", t.mark.SQL()),
	}
}

func tuple(to replication.Tuple, values [][]byte) replication.Tuple {
	to = to[:0]
	for _, v := range values {
		kind := replication.ValueText
		if v == nil {
			kind = replication.ValueNull
		}
		to = append(to, replication.Value{Kind: kind, Text: v})
	}
	return to
}

// route appends the row's record, whose topic is looked up or created first where it is
// not known yet.
func (s *session) route(ctx context.Context, c *replication.Change) error {
	for {
		err := s.router.Route(c, s.batch)
		var missing *router.MissingTopicError
		if !errors.As(err, &missing) {
			return err
		}
		if err := s.ensure(ctx, missing.Topic); err != nil {
			if s.router.RejectTopic(c, missing.Topic, err) {
				continue // it becomes a dead letter
			}
			return fmt.Errorf("look at topic %s: %w", missing.Topic, err)
		}
	}
}

// ensure waits for Kafka no longer than a publication does: rows are locked.
func (s *session) ensure(ctx context.Context, topic string) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	return s.catalog.Ensure(ctx, []string{topic}, s.p.o.Topics)
}

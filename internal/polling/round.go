package polling

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/killpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

const (
	// shareFrom is how many pending rows make it worth to leave shards to the other
	// instances: with fewer, a round is over before another could begin.
	shareFrom = 1000
	// shareShards is how many of them a round takes then.
	shareShards = shards / 4
	// publishTimeout is how long a round waits for Kafka before it lets its rows go again.
	// A broker's restart takes seconds; a transaction that stays open for longer holds
	// vacuum back in the whole database.
	publishTimeout = 30 * time.Second

	firstChunk = 64 // rows that are read at a time, until their size is known
	leastChunk = 16
	mostChunk  = 2000
)

// outcome is what a round came to.
type outcome struct {
	published int
	// complete: every row that was pending when the round began is published.
	complete bool
}

// head is a pending row before it is read.
type head struct {
	row
	key int64 // the hash of its key
}

// row tells where a row is; it holds while the row is locked.
type row struct{ table, ctid string }

// round publishes what the table has for us; see the package's documentation for its steps.
func (s *session) round(ctx context.Context, t *table) (o outcome, err error) {
	if ctx.Err() != nil {
		return outcome{}, nil
	}
	wanted, pending, err := s.look(ctx, t)
	if err != nil || pending == 0 {
		return outcome{complete: err == nil}, err
	}
	all := len(wanted)
	if pending >= shareFrom && all > shareShards {
		at := rand.N(all)
		wanted = append(wanted[at:], wanted[:at]...)[:shareShards]
	}
	// From here on the signal to stop leaves time to finish what is in hand.
	working, cancel := s.untilStop(ctx)
	defer cancel()
	if err := s.exec(working, "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"); err != nil {
		return outcome{}, err
	}
	defer func() {
		if err != nil {
			// The connection may be gone; then the server rolls back.
			_ = s.exec(working, "ROLLBACK")
		}
	}()
	locked, err := s.lock(working, t, wanted)
	if err != nil {
		return outcome{}, err
	}
	heads, err := s.list(working, t, locked)
	if err != nil {
		return outcome{}, err
	}
	rows, stopped := s.read(working, t, locked, heads)
	var stop *router.StopError
	if stopped != nil && !errors.As(stopped, &stop) {
		return outcome{}, stopped
	}
	o = outcome{
		published: len(rows),
		complete:  len(locked) == all && pending < s.p.o.Limits.Records && len(rows) == len(heads),
	}
	if err := s.publish(working, t, rows); err != nil {
		return outcome{}, err
	}
	if stopped != nil {
		// What comes before the row that cannot be delivered is; the row stays pending.
		return o, stopped
	}
	return o, nil
}

// untilStop gives a context that ends StopTimeout after ctx does.
func (s *session) untilStop(ctx context.Context) (context.Context, context.CancelFunc) {
	working, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	release := context.AfterFunc(ctx, func() {
		t := time.NewTimer(s.p.o.StopTimeout)
		defer t.Stop()
		select {
		case <-t.C:
			cancel(fmt.Errorf("the batch in hand was not published within stop-timeout (%s); the next start publishes it", s.p.o.StopTimeout))
		case <-working.Done():
		}
	})
	return working, func() { release(); cancel(nil) }
}

// look gives the shards that have pending rows among the oldest, and how many rows that are.
func (s *session) look(ctx context.Context, t *table) (found []int64, pending int, err error) {
	rows, err := s.query(ctx, t.lookSQL)
	if err != nil {
		return nil, 0, fmt.Errorf("look for pending rows of %s: %w", t.name(), err)
	}
	for _, r := range rows {
		shard, err1 := strconv.ParseInt(string(r[0]), 10, 64)
		n, err2 := strconv.Atoi(string(r[1]))
		if err := errors.Join(err1, err2); err != nil {
			return nil, 0, err
		}
		found, pending = append(found, shard), pending+n
	}
	return found, pending, nil
}

// lock takes the locks of those shards that no other instance has; they end with the
// transaction.
func (s *session) lock(ctx context.Context, t *table, wanted []int64) (locked []int64, err error) {
	rows, err := s.query(ctx, t.lockSQL, numbers(wanted), t.lock)
	if err != nil {
		return nil, fmt.Errorf("lock shards of %s: %w", t.name(), err)
	}
	for _, r := range rows {
		n, err := strconv.ParseInt(string(r[0]), 10, 64)
		if err != nil {
			return nil, err
		}
		locked = append(locked, n)
	}
	return locked, nil
}

// list gives the pending rows of the shards in their order. It must be a statement of its
// own, after the locks are taken: its snapshot then has what their last holder committed.
func (s *session) list(ctx context.Context, t *table, locked []int64) ([]head, error) {
	if len(locked) == 0 {
		return nil, nil
	}
	rows, err := s.query(ctx, t.listSQL, numbers(locked))
	if err != nil {
		return nil, fmt.Errorf("list pending rows of %s: %w", t.name(), err)
	}
	heads := make([]head, len(rows))
	for i, r := range rows {
		key, err := strconv.ParseInt(string(r[2]), 10, 64)
		if err != nil {
			return nil, err
		}
		heads[i] = head{row{table: string(r[0]), ctid: string(r[1])}, key}
	}
	return heads, nil
}

// read locks and routes the listed rows into the batch, until that is full, and gives those
// that are in it. After a *router.StopError the batch holds what comes before.
func (s *session) read(ctx context.Context, t *table, locked []int64, heads []head) (rows []row, err error) {
	s.batch.Reset()
	held := map[int64]bool{} // keys with a row that could not be locked
	size := firstChunk
	for len(heads) > 0 && !s.batch.Full() && err == nil {
		chunk := heads[:min(size, len(heads))]
		heads = heads[len(chunk):]
		var bytes int
		rows, bytes, err = s.readChunk(ctx, t, locked, chunk, held, rows)
		if bytes > 0 {
			room := max(s.p.o.Limits.Bytes-s.batch.Bytes(), 0)
			size = min(max(room/(bytes/len(chunk)+1), leastChunk), mostChunk)
		}
	}
	if s.batch.Records() > 0 {
		s.batch.Advance(checkpoint.Position{}, false)
	}
	return rows, err
}

func (s *session) readChunk(ctx context.Context, t *table, locked []int64, chunk []head, held map[int64]bool, rows []row) ([]row, int, error) {
	ctids := make([]string, len(chunk))
	for i, h := range chunk {
		ctids[i] = h.ctid
	}
	found, err := s.query(ctx, t.readSQL, array(ctids), numbers(locked))
	if err != nil {
		return rows, 0, fmt.Errorf("read pending rows of %s: %w", t.name(), err)
	}
	byPlace := make(map[row][][]byte, len(found))
	bytes := 0
	for _, r := range found {
		byPlace[row{string(r[0]), string(r[1])}] = r[2:]
		for _, v := range r {
			bytes += len(v)
		}
	}
	c := replication.Change{Op: replication.OpRead, Relation: t.relation, Read: &replication.ReadPoint{}}
	for _, h := range chunk {
		values, ok := byPlace[h.row]
		if !ok || held[h.key] {
			held[h.key] = true
			continue
		}
		c.New = tuple(c.New, values)
		if err := s.route(ctx, &c); err != nil {
			return rows, bytes, err
		}
		rows = append(rows, h.row)
	}
	return rows, bytes, nil
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
		if err := s.catalog.Ensure(ctx, []string{missing.Topic}, s.p.o.Topics); err != nil {
			var name *router.TopicNameError
			if errors.As(err, &name) && s.router.RejectTopic(c, missing.Topic, err) {
				continue // it becomes a dead letter
			}
			return fmt.Errorf("look at topic %s: %w", missing.Topic, err)
		}
	}
}

// publish publishes the batch, marks or deletes those of its rows that Kafka has, and
// commits. Nothing is marked that is not acknowledged: so nothing is lost.
func (s *session) publish(ctx context.Context, t *table, rows []row) error {
	if len(rows) == 0 {
		return s.exec(ctx, "COMMIT")
	}
	limited, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	acked, fault := s.publisher.Publish(limited, s.batch)
	killpoint.At(killpoint.Committed)
	places := map[string][]string{}
	n := 0
	for i, ok := range acked {
		if ok {
			places[rows[i].table] = append(places[rows[i].table], rows[i].ctid)
			n++
		}
	}
	for oid, ctids := range places {
		if err := s.done(ctx, t, oid, ctids); err != nil {
			return errors.Join(fault, err)
		}
	}
	if err := s.exec(ctx, "COMMIT"); err != nil {
		return errors.Join(fault, fmt.Errorf("commit the marks of %s: %w", t.name(), err))
	}
	killpoint.At(killpoint.Confirmed)
	s.p.published(t, n)
	return fault
}

// done marks or deletes rows, and makes sure that they are.
func (s *session) done(ctx context.Context, t *table, oid string, ctids []string) error {
	rows, err := s.query(ctx, t.doneSQL, oid, array(ctids))
	if err != nil {
		return fmt.Errorf("mark published rows of %s: %w", t.name(), err)
	}
	changed, err1 := strconv.Atoi(string(rows[0][0]))
	pending, err2 := strconv.Atoi(string(rows[0][1]))
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	if changed == len(ctids) && pending == 0 {
		return nil
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("%d of %d published rows of %s could not be marked or deleted: a trigger or a rule of the table keeps them pending", len(ctids)-changed+pending, len(ctids), t.name()),
		Risk:   "their events would be published again and again; they are in Kafka once more than they are marked",
		Remedy: fmt.Sprintf("let UPDATE and DELETE by role of source.dsn through in the triggers of %s", t.mark.SQL()),
	}
}

func (s *session) exec(ctx context.Context, sql string) error {
	_, err := s.query(ctx, sql)
	return err
}

// query runs one statement and gives its rows as text. Arguments are text too.
func (s *session) query(ctx context.Context, sql string, args ...string) ([][][]byte, error) {
	values := make([][]byte, len(args))
	for i, a := range args {
		values[i] = []byte(a)
	}
	r := s.conn.PgConn().ExecParams(ctx, sql, values, nil, nil, nil).Read()
	return r.Rows, r.Err
}

// array writes the text of an array whose elements need quotes and no escapes.
func array(list []string) string { return `{"` + strings.Join(list, `","`) + `"}` }

func numbers(list []int64) string {
	texts := make([]string, len(list))
	for i, n := range list {
		texts[i] = strconv.FormatInt(n, 10)
	}
	return "{" + strings.Join(texts, ",") + "}"
}

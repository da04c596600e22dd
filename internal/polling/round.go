package polling

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/killpoint"
	"github.com/walrelay/walrelay/internal/phase"
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
	// abandonedAfter is when the server ends a transaction that does nothing: the longest
	// that one of ours does nothing is publishTimeout.
	abandonedAfter = 2 * time.Minute
)

// outcome is what a round came to.
type outcome struct {
	published int
	// complete: every row that was pending when the round began is published.
	complete bool
}

// round publishes what the table has for us; see the package's documentation for its steps.
func (s *session) round(ctx context.Context, t *table) (o outcome, err error) {
	if ctx.Err() != nil {
		return outcome{}, nil
	}
	wanted, pending, err := s.look(ctx, t)
	if err != nil || pending == 0 {
		o.complete = err == nil && len(t.held) == 0
		t.held = nil
		return o, err
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
		if err == nil {
			return
		}
		// The connection may be gone; then the server rolls back.
		_ = s.exec(working, "ROLLBACK")
		if working.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Cause(working), err)
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
	rows, held, stopped := s.read(working, t, locked, heads)
	var stop *router.StopError
	if stopped != nil && !errors.As(stopped, &stop) {
		return outcome{}, stopped
	}
	limit := s.p.o.Limits.Records
	o = outcome{
		published: len(rows),
		complete:  len(locked) == all && len(t.held) == 0 && pending < limit && len(rows) == len(heads),
	}
	if err := s.publish(working, t, rows); err != nil {
		return outcome{}, err
	}
	t.hold(held, max(pending, len(heads)) >= limit, limit)
	// What comes before a row that cannot be delivered is; the row stays pending.
	return o, stopped
}

// hold notes the keys that the next look leaves out. more tells that it would otherwise
// find them alone.
func (t *table) hold(keys map[int64]bool, more bool, most int) {
	if !more || len(t.held)+len(keys) > most {
		t.held = nil
		return
	}
	for key := range keys {
		t.held = append(t.held, key)
	}
}

// errUnfinished says that the time to stop was not enough for the batch in hand.
var errUnfinished = errors.New("the batch in hand was not published and marked within stop-timeout")

// untilStop gives a context that ends StopTimeout after ctx does.
func (s *session) untilStop(ctx context.Context) (context.Context, context.CancelFunc) {
	working, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	release := context.AfterFunc(ctx, func() {
		s.p.setPhase(phase.Stopping)
		t := time.NewTimer(s.p.o.StopTimeout)
		defer t.Stop()
		select {
		case <-t.C:
			cancel(fmt.Errorf("%w (%s): the next start publishes it, or publishes it again", errUnfinished, s.p.o.StopTimeout))
		case <-working.Done():
		}
	})
	return working, func() { release(); cancel(nil) }
}

// look gives the shards that have pending rows among the oldest, and how many rows that are.
func (s *session) look(ctx context.Context, t *table) (found []int64, pending int, err error) {
	rows, err := s.query(ctx, t.lookSQL, numbers(t.held))
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

// publish publishes the batch, marks or deletes those of its rows that Kafka has, and
// commits. Nothing is marked that is not acknowledged: so nothing is lost.
func (s *session) publish(ctx context.Context, t *table, rows []taken) error {
	if len(rows) == 0 {
		return s.exec(ctx, "COMMIT")
	}
	limited, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	s.p.stall.Delivering(time.Now())
	acked, fault := s.publisher.Publish(limited, s.batch)
	s.p.stall.Delivering(time.Time{})
	killpoint.At(killpoint.Committed)
	type group struct {
		table string
		mark  bool
	}
	places := map[group][]string{}
	n := 0
	for i, ok := range acked {
		if ok {
			// A row whose event went aside stays where it can be marked: the dead letter need not
			// have all of it.
			g := group{rows[i].table, !t.Delete || rows[i].dead && t.markSQL != ""}
			places[g] = append(places[g], rows[i].ctid)
			n++
		}
	}
	for g, ctids := range places {
		sql := t.deleteSQL
		if g.mark {
			sql = t.markSQL
		}
		if err := s.done(ctx, t, sql, g.table, ctids); err != nil {
			return because(err, fault)
		}
	}
	if err := s.exec(ctx, "COMMIT"); err != nil {
		return because(fmt.Errorf("commit the marks of %s: %w", t.name(), err), fault)
	}
	killpoint.At(killpoint.Confirmed)
	s.p.published(t, n)
	return fault
}

// because adds what went wrong before, if anything did.
func because(err, before error) error {
	if before == nil {
		return err
	}
	return fmt.Errorf("%w; and %w", before, err)
}

// done marks or deletes rows, and makes sure that they are. What keeps them pending would
// do so each time, and each time behind their publication: so it ends the poller.
func (s *session) done(ctx context.Context, t *table, sql, oid string, ctids []string) error {
	rows, err := s.query(ctx, sql, oid, array(ctids))
	var answer *pgconn.PgError
	switch {
	case err == nil:
	case errors.As(err, &answer) && isPermanent(answer):
		return s.refuseMark(t, len(ctids), len(ctids), err)
	default:
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
	return s.refuseMark(t, len(ctids)-changed+pending, len(ctids), nil)
}

func (s *session) refuseMark(t *table, n, of int, err error) error {
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("%d of %d published rows of %s could not be marked or deleted: a trigger, a rule or a constraint of the table keeps them pending", n, of, t.name()),
		Risk:   "their events would be published again and again; they are in Kafka once more than they are marked",
		Remedy: fmt.Sprintf("let UPDATE and DELETE by the role of source.dsn through in the triggers and constraints of %s", t.mark.SQL()),
		Err:    err,
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

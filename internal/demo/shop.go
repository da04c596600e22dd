package demo

import (
	"context"
	_ "embed" // for shop.sql
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

// shopSchema creates the shop's tables and its customers.
//
//go:embed shop.sql
var shopSchema string

// customers is how many rows shopSchema puts there.
const customers = 8

// stepTimeout bounds one transaction of the shop. It is reached when somebody
// holds a lock at psql; the shop then gives that transaction up and goes on.
const stepTimeout = 5 * time.Second

// maxFailures is how many transactions in a row may fail before the shop gives up.
const maxFailures = 5

// errDeclined makes the shop roll back: the card was declined.
var errDeclined = errors.New("card declined")

// errGone says that a row the shop knew is not there any more; somebody has
// deleted it by hand.
var errGone = errors.New("the order is gone")

// eventTypes are the outbox events that the shop writes.
var eventTypes = [...]string{"order.created", "payment.charged", "order.shipped", "order.delivered", "order.cancelled"}

// Shop writes what a shop writes: orders with their items and an event in the
// same transaction, changes of status, now and then a cancelled order (its rows
// are deleted) or a transaction that is rolled back. It has one connection and
// is not safe for concurrent use.
type Shop struct {
	conn   *pgx.Conn
	rand   *rand.Rand
	ledger *Ledger
	say    func(string)
	orders []order // those that are not delivered yet
}

// order is the shop's view of an order under way. Its fields change only when the
// transaction that changes them has committed.
type order struct {
	id     int64
	status string
	seq    int // of its last event
	total  cents
}

// cents is an amount of money.
type cents int64

// String gives the amount as PostgreSQL's numeric reads it.
func (c cents) String() string { return fmt.Sprintf("%d.%02d", c/100, c%100) }

// OpenShop creates the shop's tables in the database dsn and gives a Shop that
// enters what it does in ledger. say gets a line for each rollback and each
// transaction that failed. The caller closes the Shop.
func OpenShop(ctx context.Context, dsn string, seed uint64, ledger *Ledger, say func(string)) (*Shop, error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return nil, fmt.Errorf("connect the shop: %w", err)
	}
	if _, err := conn.Exec(ctx, shopSchema); err != nil {
		return nil, errors.Join(fmt.Errorf("create the shop's tables: %w", err), conn.Close(ctx))
	}
	return &Shop{conn: conn, rand: rand.New(rand.NewPCG(seed, 1)), ledger: ledger, say: say}, nil
}

// Close closes the connection.
func (s *Shop) Close(ctx context.Context) error { return s.conn.Close(ctx) }

// Run does rate transactions a second until ctx ends, which is no error. The
// transaction in hand is always finished: whether it committed must be known.
func (s *Shop) Run(ctx context.Context, rate float64) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	failures := 0
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		err := s.Step(context.WithoutCancel(ctx))
		if err != nil {
			failures++
			s.say(fmt.Sprintf("the shop: %v", err))
		} else {
			failures = 0
		}
		if failures == maxFailures || s.conn.IsClosed() {
			return fmt.Errorf("run the shop: %w", err)
		}
		// Half to one and a half of the pace: a metronome looks like a machine.
		timer.Reset(time.Duration(float64(time.Second) / rate * (0.5 + s.rand.Float64())))
	}
}

// Step does one transaction, drawn by lot.
func (s *Shop) Step(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	lot := s.rand.IntN(100)
	switch {
	case lot < 7:
		return s.declined(ctx)
	case lot < 14:
		return s.customerMoves(ctx)
	case len(s.orders) < 3 || lot < 45:
		return s.newOrder(ctx)
	case lot < 53:
		return s.cancel(ctx)
	default:
		return s.advance(ctx)
	}
}

// txn is one transaction of the shop together with its entry in the ledger.
type txn struct {
	pgx.Tx
	entry *Entry
	rand  *rand.Rand
}

// inTx runs f in a transaction: it commits where f returns nil and rolls back
// where f returns an error, which it returns.
func (s *Shop) inTx(ctx context.Context, f func(*txn) error) error {
	tx, err := s.conn.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	var xid uint64
	// The xid is what a record's source.tx_id says: it ties the two books together.
	err = tx.QueryRow(ctx, `SELECT pg_current_xact_id()::text::bigint`).Scan(&xid)
	t := &txn{Tx: tx, entry: s.ledger.Begin(xid), rand: s.rand}
	if err == nil {
		err = f(t)
	}
	if err != nil {
		// Not under ctx, which may be what has ended; the server rolls back when the
		// connection goes, so that a failure here changes nothing.
		rollback, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
		defer cancel()
		_ = tx.Rollback(rollback)
		t.entry.Rollback()
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		t.entry.Unknown()
		return fmt.Errorf("commit: %w", err)
	}
	t.entry.Commit()
	return nil
}

// newOrder places an order.
func (s *Shop) newOrder(ctx context.Context) error {
	var o order
	err := s.inTx(ctx, func(t *txn) (err error) {
		o, err = t.placeOrder(ctx)
		return err
	})
	if err == nil {
		s.orders = append(s.orders, o)
	}
	return err
}

// declined places an order and takes it back before it commits.
func (s *Shop) declined(ctx context.Context) error {
	var o order
	err := s.inTx(ctx, func(t *txn) (err error) {
		if o, err = t.placeOrder(ctx); err != nil {
			return err
		}
		return errDeclined
	})
	if errors.Is(err, errDeclined) {
		s.say(fmt.Sprintf("order %d, its items and its event: rolled back (card declined). You will see nothing of it.", o.id))
		return nil
	}
	return err
}

// advance brings an order one status further, with the event that says so.
func (s *Shop) advance(ctx context.Context) error {
	i := s.rand.IntN(len(s.orders))
	o := s.orders[i]
	var event string
	switch o.status {
	case "new":
		o.status, event = "paid", "payment.charged"
	case "paid":
		o.status, event = "shipped", "order.shipped"
	default:
		o.status, event = "delivered", "order.delivered"
	}
	o.seq++
	err := s.inTx(ctx, func(t *txn) error {
		tag, err := t.Exec(ctx, `UPDATE orders SET status = $2 WHERE id = $1`, o.id, o.status)
		if err != nil {
			return fmt.Errorf("update order: %w", err)
		}
		if tag.RowsAffected() == 0 {
			return errGone
		}
		t.entry.Row("u", "public.orders", o.id)
		return t.event(ctx, o, event)
	})
	if err != nil || o.status == "delivered" {
		return s.drop(i, err)
	}
	s.orders[i] = o
	return nil
}

// cancel deletes an order that is under way, and its items.
func (s *Shop) cancel(ctx context.Context) error {
	i := s.rand.IntN(len(s.orders))
	o := s.orders[i]
	o.seq++
	err := s.inTx(ctx, func(t *txn) error {
		rows, err := t.Query(ctx, `DELETE FROM order_items WHERE order_id = $1 RETURNING id`, o.id)
		if err != nil {
			return fmt.Errorf("delete items: %w", err)
		}
		items, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			return fmt.Errorf("delete items: %w", err)
		}
		for _, id := range items {
			t.entry.Row("d", "public.order_items", id)
		}
		tag, err := t.Exec(ctx, `DELETE FROM orders WHERE id = $1`, o.id)
		if err != nil {
			return fmt.Errorf("delete order: %w", err)
		}
		if tag.RowsAffected() == 0 {
			return errGone
		}
		t.entry.Row("d", "public.orders", o.id)
		return t.event(ctx, o, "order.cancelled")
	})
	return s.drop(i, err)
}

// drop forgets the i-th order: it is done, or gone, or what failed with it would
// fail again. That it is gone is no failure of the shop.
func (s *Shop) drop(i int, err error) error {
	s.orders = append(s.orders[:i], s.orders[i+1:]...)
	if errors.Is(err, errGone) {
		return nil
	}
	return err
}

// customerMoves is a change that no event tells of.
func (s *Shop) customerMoves(ctx context.Context) error {
	cities := [...]string{"Berlin", "Kraków", "Oslo", "São Paulo", "Zürich", "東京"}
	id := int64(1 + s.rand.IntN(customers))
	return s.inTx(ctx, func(t *txn) error {
		tag, err := t.Exec(ctx, `UPDATE customers SET city = $2 WHERE id = $1`, id, cities[s.rand.IntN(len(cities))])
		if err != nil {
			return fmt.Errorf("update customer: %w", err)
		}
		if tag.RowsAffected() > 0 {
			t.entry.Row("u", "public.customers", id)
		}
		return nil
	})
}

package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
)

// placeOrder inserts an order of one to three items and its event.
func (t *txn) placeOrder(ctx context.Context) (order, error) {
	products := [...]struct {
		name  string
		price cents
	}{{"coffee", 1250}, {"tea", 890}, {"cup", 650}, {"kettle", 4900}, {"filter", 320}, {"grinder", 12800}}
	type item struct {
		product  string
		quantity int
		price    cents
	}
	var items []item
	o := order{status: "new", seq: 1}
	for range 1 + t.rand.IntN(3) {
		p := products[t.rand.IntN(len(products))]
		it := item{p.name, 1 + t.rand.IntN(3), p.price}
		o.total += it.price * cents(it.quantity)
		items = append(items, it)
	}
	// The customer is looked up: somebody may have deleted one at psql.
	err := t.QueryRow(ctx, `INSERT INTO orders (customer_id, total)
		SELECT id, $2::text::numeric FROM customers ORDER BY id = $1 DESC LIMIT 1 RETURNING id`,
		1+t.rand.IntN(customers), o.total.String()).Scan(&o.id)
	if err != nil {
		return o, fmt.Errorf("insert order: %w", err)
	}
	t.entry.Row("c", "public.orders", o.id)
	for _, it := range items {
		var id int64
		err := t.QueryRow(ctx, `INSERT INTO order_items (order_id, product, quantity, price)
			VALUES ($1, $2, $3, $4::text::numeric) RETURNING id`, o.id, it.product, it.quantity, it.price.String()).Scan(&id)
		if err != nil {
			return o, fmt.Errorf("insert item: %w", err)
		}
		t.entry.Row("c", "public.order_items", id)
	}
	return o, t.event(ctx, o, "order.created")
}

// event writes the outbox row that tells of what this transaction does to o.
func (t *txn) event(ctx context.Context, o order, eventType string) error {
	aggregate := fmt.Sprintf("order-%d", o.id)
	payload, err := json.Marshal(map[string]any{
		"order_id": aggregate, "amount_cents": int64(o.total), "currency": "EUR",
	})
	if err != nil {
		return fmt.Errorf("encode event: %w", err)
	}
	id := newUUID(t.rand)
	_, err = t.Exec(ctx, `INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload)
		VALUES ($1::text::uuid, $2, $3, $4, $5)`, id, aggregate, o.seq, eventType, payload)
	if err != nil {
		return fmt.Errorf("insert event: %w", err)
	}
	t.entry.Event(id)
	return nil
}

// newUUID gives a random (version 4) UUID. Its randomness follows the shop's
// seed, so that a run can be repeated; it is no secret.
func newUUID(r *rand.Rand) string {
	hi, lo := r.Uint64(), r.Uint64()
	hi = hi&^0xf000 | 0x4000
	lo = lo&^(0b11<<62) | 0b10<<62
	return fmt.Sprintf("%08x-%04x-%04x-%04x-%012x", hi>>32, hi>>16&0xffff, hi&0xffff, lo>>48, lo&0xffffffffffff)
}

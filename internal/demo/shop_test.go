package demo

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/internal/pgserver"
)

// mustDatabase starts a PostgreSQL for the length of a test.
func mustDatabase(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "demo-shop-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	db, err := pgserver.Start(t.Context(), pgserver.Options{Dir: dir + "/postgres"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
		_ = os.RemoveAll(dir)
	})
	return db.DSN()
}

func TestTheShopsBookIsTheDatabases(t *testing.T) {
	ctx := t.Context()
	dsn := mustDatabase(t)
	ledger := NewLedger()
	var said []string
	shop, err := OpenShop(ctx, dsn, 1, ledger, func(s string) { said = append(said, s) })
	if err != nil {
		t.Fatal(err)
	}
	defer shop.Close(context.WithoutCancel(ctx))
	for range 300 {
		if err := shop.Step(ctx); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	number := func(sql string) (n int) {
		t.Helper()
		if err := conn.QueryRow(ctx, sql).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	// Every event in the table is in the book, and the book holds no other.
	events := 0
	for _, m := range ledger.Missing(1 << 20) {
		if strings.HasPrefix(m, "event ") {
			events++
		}
	}
	if n := number(`SELECT count(*) FROM outbox`); n != events || n == 0 {
		t.Errorf("%d events in the table, %d in the book", n, events)
	}
	if n := number(`SELECT count(DISTINCT event_type) FROM outbox`); n != len(eventTypes) {
		t.Errorf("%d event types, want %d", n, len(eventTypes))
	}
	// An order that is there has the events of its status, from 1 on without a gap.
	if n := number(`SELECT count(*) FROM (SELECT max(aggregate_seq) - count(*) AS gap FROM outbox GROUP BY aggregate_id) x WHERE gap <> 0`); n != 0 {
		t.Errorf("%d orders with gaps in their events", n)
	}
	if n := number(`SELECT count(*) FROM orders o WHERE status <> (SELECT CASE count(*) WHEN 1 THEN 'new' WHEN 2 THEN 'paid' WHEN 3 THEN 'shipped' ELSE 'delivered' END
		FROM outbox WHERE aggregate_id = 'order-' || o.id)`); n != 0 {
		t.Errorf("%d orders whose status is not that of their events", n)
	}
	if n := number(`SELECT count(*) FROM orders o WHERE total <> (SELECT sum(quantity * price) FROM order_items WHERE order_id = o.id)`); n != 0 {
		t.Errorf("%d orders whose total is not that of their items", n)
	}
	if c := ledger.Count(); c.RolledBack == 0 || c.RolledBack != len(said) {
		t.Errorf("%d transactions rolled back, %d said", c.RolledBack, len(said))
	}
}

func TestTheShopGoesOnWhenSomebodyDeletesItsOrders(t *testing.T) {
	ctx := t.Context()
	dsn := mustDatabase(t)
	shop, err := OpenShop(ctx, dsn, 2, NewLedger(), func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer shop.Close(context.WithoutCancel(ctx))
	for range 100 {
		if _, err := shop.conn.Exec(ctx, `TRUNCATE orders, order_items`); err != nil {
			t.Fatal(err)
		}
		if err := shop.Step(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTheShopGivesUpWhenNothingWorks(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	dsn := mustDatabase(t)
	shop, err := OpenShop(ctx, dsn, 3, NewLedger(), func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer shop.Close(context.WithoutCancel(ctx))
	if _, err := shop.conn.Exec(ctx, `DROP TABLE outbox; ALTER TABLE customers RENAME TO guests`); err != nil {
		t.Fatal(err)
	}
	if err := shop.Run(ctx, 1000); err == nil {
		t.Error("no error")
	}
}

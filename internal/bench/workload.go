package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// backlogSlot holds the WAL of a workload; it is copied and never read.
const backlogSlot = "bench_backlog"

// schema is the outbox that all workloads write, its publication, and the payload:
// a JSON object of about 180 bytes.
const schema = `
CREATE TABLE outbox (
  id bigserial PRIMARY KEY, event_id uuid NOT NULL UNIQUE,
  aggregate_id text NOT NULL, aggregate_seq bigint NOT NULL,
  event_type text NOT NULL, payload jsonb NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz,
  UNIQUE (aggregate_id, aggregate_seq));
CREATE PUBLICATION bench FOR TABLE outbox WITH (publish = 'insert');
CREATE FUNCTION payload(n bigint) RETURNS jsonb LANGUAGE sql AS $$
  SELECT jsonb_build_object('order_id', 'order-' || n, 'amount_cents', 12800, 'currency', 'CNY',
    'customer', md5(n::text), 'address', 'Unter den Linden 1, 10117 Berlin', 'note', 'leave it with the neighbours')
$$;
CREATE PROCEDURE fill(total bigint, per_txn bigint) LANGUAGE plpgsql AS $$
DECLARE done bigint := 0;
BEGIN
  WHILE done < total LOOP
    INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload)
      SELECT gen_random_uuid(), 'order-' || n % 10000, n, 'order.created', payload(n)
      FROM generate_series(done + 1, least(done + per_txn, total)) n;
    done := done + per_txn;
    COMMIT;
  END LOOP;
END $$`

// workload is one backlog.
type workload struct {
	letter, name string
	rows, perTxn int
	runs         int
	// pause, where not 0, makes Kafka stand still for so long in the middle; then
	// only the peak of memory means anything, and there is no floor.
	pause time.Duration
	// after is what becomes of delivered rows; empty for nothing.
	after string
}

func workloads(o options) []workload {
	return []workload{
		{letter: "A", name: "transactions of 1,000 rows", rows: o.rows, perTxn: min(1000, o.rows), runs: o.runs},
		{letter: "B", name: "transactions of one row", rows: o.rows, perTxn: 1, runs: o.runs},
		{letter: "C", name: "one transaction", rows: 3 * o.rows, perTxn: 3 * o.rows, runs: o.runs},
		{letter: "R", name: "replay", rows: o.rows, perTxn: min(1000, o.rows), runs: o.runs},
		{letter: "S", name: "snapshot", rows: 2 * o.rows, runs: o.runs},
		{letter: "V", name: "verify", rows: 2 * o.rows, runs: o.runs},
		{letter: "D", name: "Kafka stands still for " + o.pause.String(), rows: o.rows, perTxn: min(1000, o.rows), runs: 1, pause: o.pause},
	}
}

// result is what was measured of a workload. The i-th floor and the i-th relay
// were neighbours in time.
type result struct {
	workload
	floor, relay []usage
}

// measure writes the backlog of w and reads it w.runs times from both sides.
func (b *bench) measure(ctx context.Context, w workload) (r result, err error) {
	r.workload = w
	conn, err := pgx.Connect(ctx, b.dsn)
	if err != nil {
		return r, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	end, err := b.prepare(ctx, conn, w)
	if err != nil {
		return r, err
	}
	for i := range w.runs {
		if w.pause == 0 {
			u, err := b.onCopy(ctx, conn, func(slot string) (usage, error) { return b.runFloor(ctx, slot, end) })
			if err != nil {
				return r, fmt.Errorf("read with pg_recvlogical: %w", err)
			}
			b.say("%s %d/%d  floor     %s", w.letter, i+1, w.runs, u)
			r.floor = append(r.floor, u)
		}
		u, err := b.onCopy(ctx, conn, func(slot string) (usage, error) { return b.runRelay(ctx, slot, w) })
		if err != nil {
			return r, fmt.Errorf("read with walrelay: %w", err)
		}
		b.say("%s %d/%d  walrelay  %s", w.letter, i+1, w.runs, u)
		r.relay = append(r.relay, u)
	}
	return r, b.exec(ctx, conn, `SELECT pg_drop_replication_slot($1)`, backlogSlot)
}

// prepare makes the slot and writes the backlog behind it. It gives the LSN at
// which the backlog ends. One more row is committed behind that LSN: it is what
// lets pg_recvlogical see at once that it has passed the end.
func (b *bench) prepare(ctx context.Context, conn *pgx.Conn, w workload) (end string, err error) {
	b.say("%s: writing %d rows", w.letter, w.rows)
	statements := []string{
		`DROP PUBLICATION IF EXISTS bench`, `DROP TABLE IF EXISTS outbox`, `DROP FUNCTION IF EXISTS payload`, `DROP PROCEDURE IF EXISTS fill`,
		schema,
	}
	for _, s := range statements {
		if err := b.exec(ctx, conn, s); err != nil {
			return "", err
		}
	}
	if err := b.exec(ctx, conn, `SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, backlogSlot); err != nil {
		return "", err
	}
	// As text: a procedure that commits must be called outside a prepared statement's
	// implicit transaction.
	call := fmt.Sprintf(`CALL fill(%d, %d)`, w.rows, w.perTxn)
	if _, err := conn.Exec(ctx, call, pgx.QueryExecModeSimpleProtocol); err != nil {
		return "", fmt.Errorf("write the backlog: %w", err)
	}
	if err := conn.QueryRow(ctx, `SELECT pg_current_wal_insert_lsn()::text`).Scan(&end); err != nil {
		return "", fmt.Errorf("read the end of WAL: %w", err)
	}
	// Committed synchronously, so that all before it is flushed: a walsender sends
	// only what is.
	if err := b.exec(ctx, conn, `SET synchronous_commit = on`); err != nil {
		return "", err
	}
	err = b.exec(ctx, conn, `INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload)
		VALUES (gen_random_uuid(), 'end', 1, 'order.created', payload(0))`)
	return end, err
}

// readerSlot is the copy of the backlog's slot that is read.
const readerSlot = "bench_reader"

// onCopy runs f with a slot of its own, a copy of the backlog's.
func (b *bench) onCopy(ctx context.Context, conn *pgx.Conn, f func(slot string) (usage, error)) (usage, error) {
	const slot = readerSlot
	if err := b.exec(ctx, conn, `SELECT pg_copy_logical_replication_slot($1, $2)`, backlogSlot, slot); err != nil {
		return usage{}, err
	}
	u, err := f(slot)
	if err != nil {
		return u, err // the server goes with the bench, and the slot with it
	}
	return u, b.dropSlots(ctx, conn, slot)
}

// dropSlots drops the slots whose names are like a pattern. A walsender may take a moment to
// notice that its reader has gone.
func (b *bench) dropSlots(ctx context.Context, conn *pgx.Conn, like string) error {
	return b.exec(ctx, conn, fmt.Sprintf(`DO $$ BEGIN
		FOR i IN 1..1000 LOOP
			EXIT WHEN NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name LIKE '%[1]s' AND active);
			PERFORM pg_sleep(0.01);
		END LOOP;
		PERFORM pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name LIKE '%[1]s';
	END $$`, like))
}

func (b *bench) exec(ctx context.Context, conn *pgx.Conn, sql string, args ...any) error {
	if _, err := conn.Exec(ctx, sql, args...); err != nil {
		return fmt.Errorf("run %.60q: %w", sql, err)
	}
	return nil
}

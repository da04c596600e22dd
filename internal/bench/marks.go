package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// measureMarks measures the same backlog of an outbox whose delivered rows are left as they
// are, marked, and deleted. Each measurement has a table of its own, whose rows stand as
// the application inserted them; the three take turns.
func (b *bench) measureMarks(ctx context.Context) (out []result, err error) {
	conn, err := pgx.Connect(ctx, b.dsn)
	if err != nil {
		return nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	for _, after := range []string{"keep", "mark", "delete"} {
		w := workload{letter: "M", name: "after: " + after, rows: b.rows, perTxn: min(1000, b.rows), runs: b.runs, after: after}
		out = append(out, result{workload: w})
	}
	for i := range b.runs {
		for n := range out {
			r := &out[n]
			if _, err := b.prepare(ctx, conn, r.workload); err != nil {
				return nil, err
			}
			u, err := b.onCopy(ctx, conn, func(slot string) (usage, error) { return b.runRelay(ctx, slot, r.workload) })
			if err != nil {
				return nil, fmt.Errorf("%s: %w", r.name, err)
			}
			if err := b.allMarked(ctx, conn, r.after); err != nil {
				return nil, err
			}
			b.say("M %d/%d  %-12s  %s", i+1, b.runs, r.name, u)
			r.relay = append(r.relay, u)
			if err := b.exec(ctx, conn, `SELECT pg_drop_replication_slot($1)`, backlogSlot); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// allMarked makes sure that what was measured is the whole work.
func (b *bench) allMarked(ctx context.Context, conn *pgx.Conn, after string) error {
	left := map[string]string{"keep": "published_at IS NOT NULL", "mark": "published_at IS NULL", "delete": "true"}[after]
	var n int64
	if err := conn.QueryRow(ctx, "SELECT count(*) FROM outbox WHERE "+left).Scan(&n); err != nil {
		return fmt.Errorf("count what is left: %w", err)
	}
	if n > 0 {
		return fmt.Errorf("walrelay ended well, but %d rows are not as after: %s leaves them", n, after)
	}
	return nil
}

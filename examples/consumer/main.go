// Command consumer is how to consume an outbox's events so that each takes effect once: the
// event's id, the aggregate's last sequence number and the effect are written in one database
// transaction. The effect here is a balance per aggregate. See README.md.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, os.Getenv("DSN"), os.Getenv("BROKERS"), os.Getenv("TOPIC"), os.Getenv("GROUP")); err != nil {
		fmt.Fprintf(os.Stderr, "consumer: %v\n", err)
		os.Exit(1)
	}
}

const schema = `
CREATE TABLE IF NOT EXISTS processed_events (event_id text PRIMARY KEY, processed_at timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS aggregates (aggregate_id text PRIMARY KEY, last_seq bigint NOT NULL, balance bigint NOT NULL)`

func run(ctx context.Context, dsn, brokers, topic, group string) error {
	db, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer db.Close(context.WithoutCancel(ctx))
	if _, err := db.Exec(ctx, schema); err != nil {
		return fmt.Errorf("make tables: %w", err)
	}
	client, err := kgo.NewClient(
		kgo.SeedBrokers(brokers), kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), // without it, events of aborted transactions are seen too
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(), // an offset is committed after the effect, never before
		kgo.SessionTimeout(6*time.Second),
	)
	if err != nil {
		return err
	}
	defer client.Close()
	for {
		fetches := client.PollFetches(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("read %s: %w", topic, err)
		}
		for _, r := range fetches.Records() {
			e, err := parse(r)
			if err != nil {
				return fmt.Errorf("partition %d, offset %d: %w", r.Partition, r.Offset, err)
			}
			if err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return apply(ctx, tx, e) }); err != nil {
				return fmt.Errorf("apply event %s: %w", e.id, err)
			}
		}
		// A kill before this line delivers the records again; processed_events knows them.
		if err := client.CommitUncommittedOffsets(ctx); err != nil {
			return fmt.Errorf("commit offsets: %w", err)
		}
	}
}

// event is what the effect needs of a record.
type event struct {
	id, aggregate string
	seq, amount   int64
}

func parse(r *kgo.Record) (event, error) {
	e := event{aggregate: string(r.Key)} // where the key is another one (partition_key), the header tells
	for _, h := range r.Headers {
		switch h.Key {
		case "id":
			e.id = string(h.Value)
		case "aggregate_id":
			e.aggregate = string(h.Value)
		case "aggregate_seq":
			var err error
			if e.seq, err = strconv.ParseInt(string(h.Value), 10, 64); err != nil {
				return e, fmt.Errorf("header aggregate_seq: %w", err)
			}
		}
	}
	var payload struct {
		Amount int64 `json:"amount_cents"`
	}
	if err := json.Unmarshal(r.Value, &payload); err != nil {
		return e, fmt.Errorf("payload: %w", err)
	}
	e.amount = payload.Amount
	if e.id == "" || e.seq == 0 {
		return e, errors.New("headers id and aggregate_seq are needed")
	}
	return e, nil
}

// apply gives e its effect, in tx, unless it has had it. Numbers rise, and may leave gaps:
// others of the aggregate's events may be in other topics.
func apply(ctx context.Context, tx pgx.Tx, e event) error {
	// The row's lock keeps a second consumer of the aggregate (a rebalance) waiting.
	var last int64
	if err := tx.QueryRow(ctx, `INSERT INTO aggregates VALUES ($1, 0, 0)
ON CONFLICT (aggregate_id) DO UPDATE SET last_seq = aggregates.last_seq RETURNING last_seq`, e.aggregate).Scan(&last); err != nil {
		return err
	}
	first, err := tx.Exec(ctx, `INSERT INTO processed_events (event_id) VALUES ($1) ON CONFLICT DO NOTHING`, e.id)
	if err != nil || first.RowsAffected() == 0 {
		return err // a repeat: it has had its effect
	}
	if e.seq <= last {
		return fmt.Errorf("aggregate %s has had event %d, and number %d comes behind it, under another id: look at how the numbers are made", e.aggregate, last, e.seq)
	}
	_, err = tx.Exec(ctx, `UPDATE aggregates SET last_seq = $2, balance = balance + $3 WHERE aggregate_id = $1`, e.aggregate, e.seq, e.amount)
	return err
}

// Command payment is how to call somebody else's system for an event, once: a payment
// provider cannot take part in our transaction, so the intent is written before the call,
// the provider is asked what it knows before it is asked to charge, and the event's id is its
// idempotency key. See README.md.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	p := payer{provider: os.Getenv("PROVIDER"), client: &http.Client{Timeout: 10 * time.Second}}
	if err := p.run(ctx, os.Getenv("DSN"), os.Getenv("BROKERS"), os.Getenv("TOPIC"), os.Getenv("GROUP")); err != nil {
		fmt.Fprintf(os.Stderr, "payment: %v\n", err)
		os.Exit(1)
	}
}

const schema = `CREATE TABLE IF NOT EXISTS payments (
  event_id text PRIMARY KEY, amount_cents bigint NOT NULL,
  state text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'charged')), charge_id text)`

type payer struct {
	db       *pgx.Conn
	provider string // its URL
	client   *http.Client
}

func (p *payer) run(ctx context.Context, dsn, brokers, topic, group string) (err error) {
	if p.db, err = pgx.Connect(ctx, dsn); err != nil {
		return err
	}
	defer p.db.Close(context.WithoutCancel(ctx))
	if _, err := p.db.Exec(ctx, schema); err != nil {
		return fmt.Errorf("make tables: %w", err)
	}
	client, err := kgo.NewClient(
		kgo.SeedBrokers(brokers), kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),
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
			if err := p.pay(ctx, r); err != nil {
				return fmt.Errorf("partition %d, offset %d: %w", r.Partition, r.Offset, err)
			}
		}
		if err := client.CommitUncommittedOffsets(ctx); err != nil {
			return fmt.Errorf("commit offsets: %w", err)
		}
	}
}

// pay charges for an event, once, however often it is called for it.
func (p *payer) pay(ctx context.Context, r *kgo.Record) error {
	id := ""
	for _, h := range r.Headers {
		if h.Key == "id" {
			id = string(h.Value)
		}
	}
	var payload struct {
		Amount int64 `json:"amount_cents"`
	}
	if err := json.Unmarshal(r.Value, &payload); err != nil {
		return fmt.Errorf("payload: %w", err)
	}
	if id == "" {
		return errors.New("header id is needed: it is the idempotency key")
	}
	// 1. The intent is durable before anything leaves the house.
	var state string
	if err := p.db.QueryRow(ctx, `INSERT INTO payments (event_id, amount_cents) VALUES ($1, $2)
ON CONFLICT (event_id) DO UPDATE SET event_id = excluded.event_id RETURNING state`, id, payload.Amount).Scan(&state); err != nil {
		return fmt.Errorf("write the intent: %w", err)
	}
	if state == "charged" {
		return nil
	}
	// 2. Whether the provider has it already: an earlier run may have been killed behind the
	// call, and a provider forgets its idempotency keys sooner than its charges.
	charge, found, err := p.query(ctx, id)
	if err != nil {
		return fmt.Errorf("query charge %s: %w", id, err)
	}
	// 3. The charge, under the event's id: two of us at once are one charge.
	if !found {
		if charge, err = p.charge(ctx, id, payload.Amount); err != nil {
			return fmt.Errorf("charge %s: %w", id, err)
		}
	}
	// 4. The outcome.
	_, err = p.db.Exec(ctx, `UPDATE payments SET state = 'charged', charge_id = $2 WHERE event_id = $1`, id, charge)
	return err
}

func (p *payer) query(ctx context.Context, key string) (charge string, found bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.provider+"/charges?key="+url.QueryEscape(key), nil)
	if err != nil {
		return "", false, err
	}
	status, charge, err := p.do(req)
	switch {
	case err != nil:
		return "", false, err
	case status == http.StatusNotFound:
		return "", false, nil
	case status != http.StatusOK:
		return "", false, fmt.Errorf("status %d", status)
	}
	return charge, true, nil
}

func (p *payer) charge(ctx context.Context, key string, amount int64) (string, error) {
	body, err := json.Marshal(map[string]int64{"amount_cents": amount})
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.provider+"/charges", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Idempotency-Key", key)
	status, charge, err := p.do(req)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("status %d", status)
	}
	return charge, err
}

func (p *payer) do(req *http.Request) (status int, charge string, err error) {
	resp, err := p.client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return resp.StatusCode, "", nil
	}
	var answer struct {
		ID string `json:"id"`
	}
	err = json.NewDecoder(resp.Body).Decode(&answer)
	return resp.StatusCode, answer.ID, err
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// outboxSQL makes the outbox that is streamed, or polled.
const outboxSQL = `
CREATE TABLE outbox (id bigserial PRIMARY KEY, event_id uuid NOT NULL DEFAULT gen_random_uuid(), aggregate_id text NOT NULL,
  event_type text NOT NULL, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz);
CREATE INDEX ON outbox (id) WHERE published_at IS NULL`

var outboxLoad = load{
	insert: `INSERT INTO outbox (aggregate_id, event_type, payload) VALUES ($1::int8::text, 'ticked', '{"amount_cents": 12800}')`,
	topic:  "outbox.event.ticked",
	id:     func(key []byte) (int64, error) { return strconv.ParseInt(string(key), 10, 64) },
}

// measurePolling measures latency, and what the server does for it, of an outbox whose
// events are marked: streamed, and polled at two intervals.
func (b *bench) measurePolling(ctx context.Context) (out []latency, err error) {
	for _, how := range []struct{ name, source string }{
		{"outbox, wal", "tables: [public.outbox]"},
		{"outbox, polling every 500 ms", "mode: polling"},
		{"outbox, polling every 50 ms", "mode: polling, poll-interval: 50ms"},
	} {
		l, err := b.outboxLatency(ctx, how.name, how.source)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", how.name, err)
		}
		b.say("P  %s", l)
		out = append(out, l)
	}
	return out, nil
}

func (b *bench) outboxLatency(ctx context.Context, name, source string) (l latency, err error) {
	conn, err := pgx.Connect(ctx, b.dsn)
	if err != nil {
		return l, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	if err := b.exec(ctx, conn, `DROP TABLE IF EXISTS filled, ticks, outbox`); err != nil {
		return l, err
	}
	if err := b.exec(ctx, conn, outboxSQL); err != nil {
		return l, err
	}
	kafka, err := b.startKafka(ctx)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, kafka.stop(), b.dropSlot(ctx, conn)) }()
	config := filepath.Join(b.dir, "walrelay.yaml")
	text := fmt.Sprintf("name: bench\nsource: {dsn: %q, %s}\noutbox: [{table: public.outbox, after: mark}]\nkafka: {brokers: [%q]}\nadmin: {listen: \"\"}\nlog: {level: warn}\n",
		b.dsn, source, kafka.addr)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return l, fmt.Errorf("write walrelay's configuration: %w", err)
	}
	cmd := exec.CommandContext(ctx, b.binary, "run", "-c", config)
	var times []time.Duration
	var server time.Duration
	_, err = timed(cmd, func(<-chan struct{}) (err error) {
		defer func() { err = errors.Join(err, cmd.Process.Signal(syscall.SIGTERM)) }()
		if err := sleep(ctx, pauseAfter); err != nil { // it connects, and makes what it needs
			return err
		}
		before, err := serverCPU(ctx, conn)
		if err != nil {
			return err
		}
		stop := make(chan struct{})
		timer := time.AfterFunc(aloneFor, func() { close(stop) })
		defer timer.Stop()
		if times, err = b.ticks(ctx, kafka, outboxLoad, stop); err != nil {
			return err
		}
		after, err := serverCPU(ctx, conn)
		for pid, cpu := range after {
			server += cpu - before[pid]
		}
		return err
	})
	if err != nil {
		return l, err
	}
	if len(times) == 0 {
		return l, errors.New("no event arrived")
	}
	l = latencyOf(name, times)
	l.server = server
	return l, nil
}

// serverCPU gives the CPU time of each process of the server; of one that has ended by the
// second look nothing is known.
func serverCPU(ctx context.Context, conn *pgx.Conn) (map[uint32]time.Duration, error) {
	rows, err := conn.Query(ctx, `SELECT pid::text FROM pg_stat_activity`)
	if err != nil {
		return nil, fmt.Errorf("list the server's processes: %w", err)
	}
	pids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("list the server's processes: %w", err)
	}
	out := map[uint32]time.Duration{}
	for _, text := range pids {
		pid, err := strconv.ParseUint(strings.TrimSpace(text), 10, 32)
		if err != nil {
			return nil, err
		}
		out[uint32(pid)] = cpuOf(uint32(pid))
	}
	return out, nil
}

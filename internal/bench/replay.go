package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// anchorSteps is into how many steps the backlog is cut when an anchor is moved over it,
	// as many as the connector cuts its window into.
	anchorSteps = 16
	// writeRate is how many transactions per second are written beside a replay, by so many
	// writers.
	writeRate, writers = 2000, 8
)

// measureReplay lets a connector deliver a backlog, and replays the same to topics beside,
// in turns with the floor; then it moves an anchor over it; and last it measures the live
// stream under a load of writes, alone and beside a replay.
func (b *bench) measureReplay(ctx context.Context, w workload) (r result, beside []latency, err error) {
	r.workload = w
	conn, err := pgx.Connect(ctx, b.dsn)
	if err != nil {
		return r, nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	end, err := b.prepare(ctx, conn, w)
	if err != nil {
		return r, nil, err
	}
	kafka, err := b.startKafka(ctx)
	if err != nil {
		return r, nil, err
	}
	defer func() { err = errors.Join(err, kafka.stop()) }()
	run := replayBench{bench: b, conn: conn, kafka: kafka, end: end}
	if run.config, run.metrics, err = b.replayConfig(kafka); err != nil {
		return r, nil, err
	}
	if err := run.live(ctx, w); err != nil {
		return r, nil, err
	}
	for i := range w.runs {
		u, err := b.runFloor(ctx, readerSlot+"_floor", end)
		if err == nil {
			err = run.copyBacklog(ctx, "_floor") // for the next
		}
		if err != nil {
			return r, nil, fmt.Errorf("read with pg_recvlogical: %w", err)
		}
		b.say("%s %d/%d  floor     %s", w.letter, i+1, w.runs, u)
		r.floor = append(r.floor, u)
		if u, err = run.replay(ctx, fmt.Sprintf("again%d", i), w.rows, nothing); err != nil {
			return r, nil, err
		}
		b.say("%s %d/%d  walrelay  %s", w.letter, i+1, w.runs, u)
		r.relay = append(r.relay, u)
	}
	if err := run.moveAnchor(ctx); err != nil {
		return r, nil, err
	}
	if beside, err = run.besideReplay(ctx, w.rows); err != nil {
		return r, nil, err
	}
	return r, beside, errors.Join(b.dropSlots(ctx, conn, readerSlot+"%"), b.exec(ctx, conn, `SELECT pg_drop_replication_slot($1)`, backlogSlot))
}

// replayBench is a connector that has delivered a backlog, with an anchor at its beginning.
type replayBench struct {
	*bench
	conn            *pgx.Conn
	kafka           *kafkaProcess
	end             string // of the backlog, an LSN
	config, metrics string
}

// replayConfig writes the configuration; metrics is where the connector shows its own.
func (b *bench) replayConfig(kafka *kafkaProcess) (config, metrics string, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", "", fmt.Errorf("find a free port: %w", err)
	}
	listen := l.Addr().String()
	if err := l.Close(); err != nil {
		return "", "", fmt.Errorf("find a free port: %w", err)
	}
	config = filepath.Join(b.dir, "replay.yaml")
	text := fmt.Sprintf(`name: bench
source: {dsn: %q, slot: %s, publication: bench, publication-mode: existing}
snapshot: {mode: never}
replay: {retain-wal: 1TiB, retain-time: 1000h}
outbox: [{table: public.outbox}]
kafka: {brokers: [%q]}
admin: {listen: %q}
log: {level: warn}
`, b.dsn, readerSlot, kafka.addr, listen)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return "", "", fmt.Errorf("write walrelay's configuration: %w", err)
	}
	return config, "http://" + listen + "/metrics", nil
}

// copyBacklog makes the reader's slot with a suffix anew, at the beginning of the backlog.
func (r *replayBench) copyBacklog(ctx context.Context, suffix string) error {
	if err := r.dropSlots(ctx, r.conn, readerSlot+suffix); err != nil {
		return err
	}
	return r.exec(ctx, r.conn, `SELECT pg_copy_logical_replication_slot($1, $2)`, backlogSlot, readerSlot+suffix)
}

// live delivers the backlog as the connector does, and says how long that took; then it puts
// the anchor at the beginning.
func (r *replayBench) live(ctx context.Context, w workload) error {
	for _, suffix := range []string{"", "_floor"} {
		if err := r.copyBacklog(ctx, suffix); err != nil {
			return err
		}
	}
	u, err := timed(exec.CommandContext(ctx, r.binary, "run", "--until-caught-up", "-c", r.config), nothing)
	if err != nil {
		return fmt.Errorf("deliver the backlog: %w", err)
	}
	r.say("%s      live      %s", w.letter, u)
	r.notes = append(r.notes, fmt.Sprintf("R: the connector delivered the backlog once, with %s", strings.Join(strings.Fields(u.String()), " ")))
	if err := r.kafka.holds(ctx, "outbox.event.", w.rows); err != nil {
		return err
	}
	return r.copyBacklog(ctx, "_anchor")
}

// replay replays what is behind the anchor, the backlog at the least.
func (r *replayBench) replay(ctx context.Context, prefix string, rows int, during func(<-chan struct{}) error) (u usage, err error) {
	var from string
	if err := r.conn.QueryRow(ctx, `SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1`, readerSlot+"_anchor").Scan(&from); err != nil {
		return u, fmt.Errorf("read where the anchor stands: %w", err)
	}
	u, err = timed(exec.CommandContext(ctx, r.binary, "replay", "-c", r.config, "--from-lsn", from, "--topic-prefix", prefix), during)
	if err != nil {
		return u, fmt.Errorf("replay: %w", err)
	}
	return u, r.kafka.holds(ctx, prefix+".outbox.event.", rows)
}

// moveAnchor moves a slot over the backlog in steps, as the anchor is moved, and notes what
// that costs the server.
func (r *replayBench) moveAnchor(ctx context.Context) error {
	var begin string
	var bytes int64
	err := r.conn.QueryRow(ctx, `SELECT confirmed_flush_lsn::text, ($2::text::pg_lsn - confirmed_flush_lsn)::int8 FROM pg_replication_slots WHERE slot_name = $1`,
		readerSlot+"_floor", r.end).Scan(&begin, &bytes)
	if err != nil {
		return fmt.Errorf("read where the slot stands: %w", err)
	}
	pid := r.conn.PgConn().PID()
	cpu, longest, start := cpuOf(pid), time.Duration(0), time.Now()
	for i := range int64(anchorSteps) {
		step := time.Now()
		if err := r.exec(ctx, r.conn, `SELECT pg_replication_slot_advance($1, $2::text::pg_lsn + $3::int8::numeric)`, readerSlot+"_floor", begin, bytes*(i+1)/anchorSteps); err != nil {
			return err
		}
		longest = max(longest, time.Since(step))
	}
	wall, gib := time.Since(start), float64(bytes)/(1<<30)
	cpu = cpuOf(pid) - cpu
	r.notes = append(r.notes, fmt.Sprintf("R: an anchor moved over %.2f GiB of WAL in %d steps: %.2f s and %.2f s CPU of the server per GiB, the longest step %.2f s",
		gib, anchorSteps, wall.Seconds()/gib, cpu.Seconds()/gib, longest.Seconds()))
	return nil
}

// besideReplay measures the live stream under a load of writes, alone and beside a replay of
// everything behind the anchor.
func (r *replayBench) besideReplay(ctx context.Context, rows int) (out []latency, err error) {
	cmd := exec.CommandContext(ctx, r.binary, "run", "-c", r.config)
	_, err = timed(cmd, func(ended <-chan struct{}) (err error) {
		defer func() { err = errors.Join(err, cmd.Process.Signal(syscall.SIGTERM)) }()
		if err := sleep(ctx, pauseAfter); err != nil { // it connects
			return err
		}
		alone := make(chan struct{})
		timer := time.AfterFunc(aloneFor, func() { close(alone) })
		defer timer.Stop()
		l, err := r.underLoad(ctx, "stream alone", alone)
		if err != nil {
			return err
		}
		out = append(out, l)
		replayed := make(chan struct{})
		failed := make(chan error, 1)
		go func() {
			defer close(replayed)
			u, err := r.replay(ctx, "beside", rows, nothing)
			r.say("R      beside    %s", u)
			failed <- err
		}()
		if l, err = r.underLoad(ctx, "stream beside a replay", replayed); err == nil {
			out = append(out, l)
		}
		select {
		case <-ended:
			return errors.New("the connector ended beside the replay")
		default:
		}
		return errors.Join(err, <-failed, r.undisturbed(ctx))
	})
	return out, err
}

var replayLoad = load{
	insert: `INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload) VALUES (gen_random_uuid(), $1::int8::text, 1, 'ticked', '{}')`,
	topic:  "outbox.event.ticked",
	id:     outboxLoad.id,
}

// underLoad writes writeRate transactions a second until ended, and measures meanwhile.
func (r *replayBench) underLoad(ctx context.Context, name string, ended <-chan struct{}) (l latency, err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var written atomic.Int64
	var wg sync.WaitGroup
	failed := make(chan error, writers+1)
	start := time.Now()
	for range writers {
		wg.Go(func() { failed <- r.write(ctx, &written, ended) })
	}
	lag := 0.0
	wg.Go(func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ended:
				failed <- nil
				return
			case <-tick.C:
			}
			v, err := r.metric(ctx, "walrelay_lag_seconds")
			if err != nil {
				failed <- err
				return
			}
			lag = max(lag, v)
		}
	})
	times, err := r.ticks(ctx, r.kafka, replayLoad, ended)
	stop()
	wg.Wait()
	for range writers + 1 {
		err = errors.Join(err, <-failed)
	}
	if err != nil {
		return l, err
	}
	if len(times) == 0 {
		return l, fmt.Errorf("%s: no event arrived", name)
	}
	rate := float64(written.Load()) / time.Since(start).Seconds()
	l = latencyOf(fmt.Sprintf("%s, %.0f transactions/s, walrelay_lag_seconds at most %.2f", name, rate, lag), times)
	r.say("R      %s", l)
	return l, nil
}

// write is one of the writers.
func (r *replayBench) write(ctx context.Context, written *atomic.Int64, ended <-chan struct{}) error {
	conn, err := pgx.Connect(ctx, r.dsn)
	if err != nil {
		return fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	start := time.Now()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for mine := 0; ; {
		select {
		case <-ended:
			return nil
		case <-ctx.Done():
			return nil // the measurement failed, and tells
		case <-tick.C:
		}
		for due := int(time.Since(start).Seconds() * writeRate / writers); mine < due; mine++ {
			_, err := conn.Exec(ctx, `INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload) VALUES (gen_random_uuid(), 'w-' || $1::int8, $2::int8, 'written', '{"amount_cents": 12800}')`, conn.PgConn().PID(), mine)
			if err != nil && ctx.Err() == nil {
				return fmt.Errorf("write: %w", err)
			}
			written.Add(1)
		}
	}
}

// undisturbed makes sure that the connector did not start over.
func (r *replayBench) undisturbed(ctx context.Context) error {
	n, err := r.metric(ctx, "walrelay_restarts_total")
	if err == nil && n > 0 {
		err = fmt.Errorf("the connector started over %.0f times beside the replay", n)
	}
	return err
}

// metric sums a metric of the connector.
func (r *replayBench) metric(ctx context.Context, name string) (sum float64, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.metrics, nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, fmt.Errorf("read the connector's metrics: %w", err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		series, value, ok := strings.Cut(lines.Text(), " ")
		if !ok || series != name && !strings.HasPrefix(series, name+"{") {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("read the connector's metric %s: %w", name, err)
		}
		sum += v
	}
	return sum, lines.Err()
}

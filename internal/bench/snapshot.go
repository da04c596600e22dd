package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"
)

// filledSQL makes the table that a snapshot reads, of rows of about 200 bytes, and the one
// that is written to meanwhile.
const filledSQL = `
CREATE TABLE filled (id bigint PRIMARY KEY, customer uuid NOT NULL, state text NOT NULL, amount numeric(12,2) NOT NULL,
  created_at timestamptz NOT NULL, address text NOT NULL, note text);
CREATE TABLE ticks (id bigint PRIMARY KEY)`

const fillSQL = `
INSERT INTO filled SELECT g, md5(g::text)::uuid, (ARRAY['new','paid','sent','closed'])[1 + g % 4], g % 100000 / 100.0,
  timestamptz '2026-01-01 00:00:00+00' + g * interval '1 second', 'Unter den Linden ' || g % 200 || ', 10117 Berlin',
  CASE WHEN g % 3 > 0 THEN repeat('leave it with the neighbours ', 2) || g END FROM generate_series(1::bigint, $1) g`

// snapshotSlot is of the connector that takes the snapshots.
const snapshotSlot = "walrelay_bench"

// measureSnapshot reads a filled table: the server alone, which writes it to /dev/null,
// and walrelay with its Kafka, in turns.
func (b *bench) measureSnapshot(ctx context.Context, w workload) (r result, err error) {
	r.workload = w
	conn, err := b.fill(ctx, w.rows)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	for i := range w.runs {
		u, err := b.copyAway(ctx, conn)
		if err != nil {
			return r, fmt.Errorf("copy the table away: %w", err)
		}
		b.say("%s %d/%d  floor     %s", w.letter, i+1, w.runs, u)
		r.floor = append(r.floor, u)
		if u, err = b.snapshot(ctx, conn, w.rows); err != nil {
			return r, fmt.Errorf("take a snapshot with walrelay: %w", err)
		}
		b.say("%s %d/%d  walrelay  %s", w.letter, i+1, w.runs, u)
		r.relay = append(r.relay, u)
	}
	return r, nil
}

// fill makes the tables, with rows in the first one.
func (b *bench) fill(ctx context.Context, rows int) (*pgx.Conn, error) {
	b.say("filling a table with %d rows", rows)
	conn, err := pgx.Connect(ctx, b.dsn)
	if err != nil {
		return nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	err = b.exec(ctx, conn, `DROP TABLE IF EXISTS filled, ticks, outbox`)
	if err == nil {
		err = b.exec(ctx, conn, filledSQL)
	}
	if err == nil {
		err = b.exec(ctx, conn, fillSQL, rows)
	}
	if err == nil {
		err = b.exec(ctx, conn, `VACUUM ANALYZE filled`)
	}
	if err == nil {
		err = b.exec(ctx, conn, `CHECKPOINT`)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close(ctx))
	}
	return conn, nil
}

// copyAway lets the server write the table to /dev/null. The CPU is that of its one
// backend, where the system tells it.
func (b *bench) copyAway(ctx context.Context, conn *pgx.Conn) (usage, error) {
	pid := conn.PgConn().PID()
	before, start := cpuOf(pid), time.Now()
	if err := b.exec(ctx, conn, `COPY filled TO '/dev/null'`); err != nil {
		return usage{}, err
	}
	return usage{wall: time.Since(start), cpu: cpuOf(pid) - before}, nil
}

// cpuOf gives the user and system time of a process, 0 where there is no /proc. Its unit
// there is a hundredth of a second, whatever the kernel's own (proc(5), USER_HZ).
func cpuOf(pid uint32) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// Behind the name, which may hold anything, the state is field 3; 14 and 15 are times.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 13 {
		return 0
	}
	sum := 0
	for _, f := range fields[11:13] {
		n, _ := strconv.Atoi(f)
		sum += n
	}
	return time.Duration(sum) * time.Second / 100
}

// snapshot lets walrelay read the table into a new Kafka, and makes sure that it did.
func (b *bench) snapshot(ctx context.Context, conn *pgx.Conn, rows int) (u usage, err error) {
	kafka, err := b.startKafka(ctx)
	if err != nil {
		return u, err
	}
	defer func() { err = errors.Join(err, kafka.stop(), b.dropSlot(ctx, conn)) }()
	config, err := b.snapshotConfig(kafka, "initial")
	if err != nil {
		return u, err
	}
	u, err = timed(exec.CommandContext(ctx, b.binary, "run", "--until-caught-up", "-c", config), nothing)
	if err != nil {
		return u, err
	}
	return u, kafka.holds(ctx, "bench.public.filled", rows)
}

func (b *bench) snapshotConfig(kafka *kafkaProcess, mode string) (string, error) {
	config := filepath.Join(b.dir, "walrelay.yaml")
	text := fmt.Sprintf(`name: bench
source: {dsn: %q, tables: [public.filled, public.ticks]}
snapshot: {mode: %s}
kafka: {brokers: [%q]}
admin: {listen: ""}
log: {level: warn}
`, b.dsn, mode, kafka.addr)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return "", fmt.Errorf("write walrelay's configuration: %w", err)
	}
	return config, nil
}

// dropSlot takes away what a run left in the database. The walsender may take a moment to
// notice that its reader has gone.
func (b *bench) dropSlot(ctx context.Context, conn *pgx.Conn) error {
	return b.exec(context.WithoutCancel(ctx), conn, fmt.Sprintf(`DO $$ BEGIN
		FOR i IN 1..1000 LOOP
			EXIT WHEN NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name IN ('%[1]s', '%[1]s_anchor') AND active);
			PERFORM pg_sleep(0.01);
		END LOOP;
		PERFORM pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name IN ('%[1]s', '%[1]s_anchor');
		DROP PUBLICATION IF EXISTS %[1]s;
		DROP PUBLICATION IF EXISTS %[1]s_insert;
	END $$`, snapshotSlot))
}

// latency is how long changes took from their commit until a read_committed consumer had
// them.
type latency struct {
	name     string
	changes  int
	p50, p99 time.Duration
	// server is the CPU time of the server's processes meanwhile, without the writer's; 0
	// where it was not measured.
	server time.Duration
}

// load is what is written and waited for: insert takes an id, which the key of its record
// in topic gives back.
type load struct {
	insert, topic string
	id            func(key []byte) (int64, error)
}

// ticksLoad is that of a plain table.
var ticksLoad = load{`INSERT INTO ticks VALUES ($1)`, "bench.public.ticks", func(key []byte) (int64, error) {
	var k struct{ ID int64 }
	err := json.Unmarshal(key, &k)
	return k.ID, err
}}

// tickPause is the time between two changes whose latency is measured.
const tickPause = 5 * time.Millisecond

// aloneFor is how long the stream is measured without a snapshot.
const aloneFor = 10 * time.Second

// measureLatency measures the stream's latency without a snapshot, and beside one of rows
// rows for as long as it takes.
func (b *bench) measureLatency(ctx context.Context, rows int) (out []latency, err error) {
	conn, err := b.fill(ctx, rows)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	for _, beside := range []bool{false, true} {
		l, err := b.latency(ctx, conn, beside)
		if err != nil {
			return nil, err
		}
		b.say("L  %s", l)
		out = append(out, l)
	}
	return out, nil
}

func (l latency) String() string {
	text := fmt.Sprintf("%s: %d changes, p50 %.1f ms, p99 %.1f ms", l.name, l.changes, float64(l.p50.Microseconds())/1e3, float64(l.p99.Microseconds())/1e3)
	if l.server > 0 {
		text += fmt.Sprintf(", CPU of the server %.2f ms per change", float64(l.server.Microseconds())/1e3/float64(max(l.changes, 1)))
	}
	return text
}

// latency measures one of the two.
func (b *bench) latency(ctx context.Context, conn *pgx.Conn, beside bool) (l latency, err error) {
	kafka, err := b.startKafka(ctx)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, kafka.stop(), b.dropSlot(ctx, conn)) }()
	name, mode, args := "stream alone", "never", []string{"run"}
	if beside {
		name, mode, args = "stream beside a snapshot", "initial", []string{"run", "--until-caught-up"}
	}
	config, err := b.snapshotConfig(kafka, mode)
	if err != nil {
		return l, err
	}
	cmd := exec.CommandContext(ctx, b.binary, append(args, "-c", config)...)
	var times []time.Duration
	_, err = timed(cmd, func(ended <-chan struct{}) (err error) {
		if !beside {
			stop := make(chan struct{})
			timer := time.AfterFunc(aloneFor, func() { close(stop) })
			defer timer.Stop()
			times, err = b.ticks(ctx, kafka, ticksLoad, stop)
			return errors.Join(err, cmd.Process.Signal(syscall.SIGTERM))
		}
		times, err = b.ticks(ctx, kafka, ticksLoad, ended)
		return err
	})
	if err != nil {
		return l, err
	}
	if len(times) == 0 {
		return l, fmt.Errorf("%s: no change arrived", name)
	}
	return latencyOf(name, times), nil
}

func latencyOf(name string, times []time.Duration) latency {
	slices.Sort(times)
	return latency{name: name, changes: len(times), p50: times[len(times)/2], p99: times[len(times)*99/100]}
}

// ticks writes changes until ended, one transaction each, and gives the times of those that
// arrived by then.
func (b *bench) ticks(ctx context.Context, kafka *kafkaProcess, what load, ended <-chan struct{}) ([]time.Duration, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var mu sync.Mutex
	committed := map[int64]time.Time{}
	arrived := map[int64]time.Time{}
	client, err := kgo.NewClient(kgo.SeedBrokers(kafka.addr), kgo.ConsumeTopics(what.topic), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxWait(50*time.Millisecond),
		kgo.MetadataMinAge(50*time.Millisecond), kgo.MetadataMaxAge(200*time.Millisecond))
	if err != nil {
		return nil, fmt.Errorf("connect to Kafka: %w", err)
	}
	defer client.Close()
	var consumer sync.WaitGroup
	consumer.Go(func() {
		for ctx.Err() == nil {
			fetches := client.PollFetches(ctx)
			now := time.Now()
			mu.Lock()
			fetches.EachRecord(func(r *kgo.Record) {
				if id, err := what.id(r.Key); err == nil {
					arrived[id] = now
				}
			})
			mu.Unlock()
		}
	})
	err = b.tick(ctx, what.insert, ended, func(id int64) {
		mu.Lock()
		defer mu.Unlock()
		committed[id] = time.Now()
	})
	stop()
	consumer.Wait()
	var times []time.Duration
	for id, at := range arrived {
		if begun, ok := committed[id]; ok {
			times = append(times, max(0, at.Sub(begun)))
		}
	}
	return times, err
}

// tick inserts rows, with a new id each, until ended.
func (b *bench) tick(ctx context.Context, insert string, ended <-chan struct{}, done func(id int64)) error {
	conn, err := pgx.Connect(ctx, b.dsn)
	if err != nil {
		return fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	// Flushed at once: with the server's own setting the stream would wait for the WAL writer.
	if err := b.exec(ctx, conn, `SET synchronous_commit = on`); err != nil {
		return err
	}
	ticker := time.NewTicker(tickPause)
	defer ticker.Stop()
	for id := time.Now().UnixNano(); ; id++ {
		select {
		case <-ended:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
		if err := b.exec(ctx, conn, insert, id); err != nil {
			return err
		}
		done(id)
	}
}

// Command bench compares walrelay with the fastest reader there can be, on this
// machine and in this run: pg_recvlogical, which asks for the same pgoutput stream
// and throws it away. What walrelay takes longer is what delivery to Kafka costs.
//
// Each workload first writes a backlog behind a slot that nobody reads. The slot
// is then copied for each measurement, so that all read the same WAL; floor and
// walrelay take turns, so that a machine that becomes slower slows both. The
// embedded Kafka is a process of its own, and a new one for each measurement:
// what it uses is not walrelay's.
//
// A snapshot, and verify, are compared with the server that writes the same table to
// /dev/null by itself; and the stream's latency without a snapshot with that beside one. P compares an outbox
// that is streamed with one that is polled, M one whose delivered rows are marked or deleted with one that
// is left as it is.
//
// It prints a table and leaves nothing behind. Numbers of different machines, or
// of different runs, are not to be compared; the ratios are.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/walrelay/walrelay/internal/pgserver"
)

// kafkaMode as the only argument makes this program the embedded Kafka.
const kafkaMode = "-as-kafka"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	rows   int           // of the workloads A, B, D and M; C has three times as many, S, V and L twice
	runs   int           // measurements of each side
	only   string        // letters of the workloads; empty: all
	pause  time.Duration // of Kafka, in D
	binary string        // a built walrelay; empty: build one
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&o.rows, "rows", 1_000_000, "rows of the workloads A, B, D and M; C has three times as many, S, V and L twice")
	flags.IntVar(&o.runs, "runs", 3, "measurements of each side")
	flags.StringVar(&o.only, "only", "", "workloads to run, for example AB; empty: all")
	flags.DurationVar(&o.pause, "pause", 30*time.Second, "how long Kafka stands still in D")
	flags.StringVar(&o.binary, "binary", "", "a built walrelay to measure; empty: build one")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if o.rows < 1 || o.runs < 1 || o.pause < 0 || flags.NArg() > 0 {
		return o, errors.New("-rows and -runs must be 1 or more, -pause 0 or more, and nothing may follow the flags")
	}
	return o, nil
}

// database is a running PostgreSQL with wal_level logical.
type database interface {
	DSN() string
	Close() error
}

// startDatabase starts the PostgreSQL that is measured against. Checkpoints and
// autovacuum would disturb one side and not the other.
func startDatabase(ctx context.Context, dir string) (database, error) {
	return pgserver.Start(ctx, pgserver.Options{Dir: dir, Settings: map[string]string{
		"shared_buffers": "256MB", "max_wal_size": "16GB", "checkpoint_timeout": "1h", "autovacuum": "off", "synchronous_commit": "off",
	}})
}

// bench is one run of this program.
type bench struct {
	options
	dsn      string
	dir      string
	binary   string // walrelay
	receiver string // pg_recvlogical
	self     string // this program, as the embedded Kafka
	progress io.Writer
	notes    []string // lines for the end of the report
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	if len(args) == 1 && args[0] == kafkaMode {
		return serveKafka(ctx, stdout)
	}
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	b := &bench{options: o, binary: o.binary, progress: stderr}
	if b.receiver, err = findReceiver(); err != nil {
		return err
	}
	if b.self, err = os.Executable(); err != nil {
		return fmt.Errorf("find this program's file: %w", err)
	}
	if b.dir, err = os.MkdirTemp("", "walrelay-bench-"); err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	if err := os.Chmod(b.dir, 0o711); err != nil { // PostgreSQL's user passes through
		return fmt.Errorf("make a directory: %w", err)
	}
	if b.binary == "" {
		if err := b.build(ctx); err != nil {
			return err
		}
	}
	db, err := startDatabase(ctx, filepath.Join(b.dir, "postgres"))
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	b.dsn = db.DSN()
	results, latencies, err := b.measureAll(ctx)
	if err != nil {
		return err
	}
	return report(stdout, results, latencies, b.notes)
}

// build builds the walrelay under test as it is released.
func (b *bench) build(ctx context.Context) error {
	b.binary = filepath.Join(b.dir, "walrelay")
	b.say("building walrelay")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", b.binary, "github.com/walrelay/walrelay/cmd/walrelay")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build walrelay: %w: %s", err, out)
	}
	return nil
}

func (b *bench) measureAll(ctx context.Context) (results []result, latencies []latency, err error) {
	asked := func(letter string) bool { return b.only == "" || strings.Contains(strings.ToUpper(b.only), letter) }
	for _, w := range workloads(b.options) {
		if !asked(w.letter) {
			continue
		}
		measure := b.measure
		switch w.letter {
		case "S":
			measure = b.measureSnapshot
		case "V":
			measure = b.measureVerify
		case "R":
			measure = func(ctx context.Context, w workload) (result, error) {
				r, beside, err := b.measureReplay(ctx, w)
				latencies = append(latencies, beside...)
				return r, err
			}
		}
		r, err := measure(ctx, w)
		if err != nil {
			return nil, nil, fmt.Errorf("measure workload %s: %w", w.letter, err)
		}
		results = append(results, r)
	}
	if asked("L") {
		l, err := b.measureLatency(ctx, 2*b.rows)
		if err != nil {
			return nil, nil, fmt.Errorf("measure workload L: %w", err)
		}
		latencies = append(latencies, l...)
	}
	if asked("P") {
		polled, err := b.measurePolling(ctx)
		if err != nil {
			return nil, nil, fmt.Errorf("measure workload P: %w", err)
		}
		latencies = append(latencies, polled...)
	}
	if asked("M") {
		marked, err := b.measureMarks(ctx)
		if err != nil {
			return nil, nil, fmt.Errorf("measure workload M: %w", err)
		}
		results = append(results, marked...)
	}
	if len(results)+len(latencies) == 0 {
		return nil, nil, fmt.Errorf("-only %s: no such workload; there are A, B, C, D, R, S, V, L, P and M", b.only)
	}
	return results, latencies, nil
}

// say tells on stderr what is going on: a run takes minutes.
func (b *bench) say(format string, args ...any) {
	_, _ = fmt.Fprintf(b.progress, format+"\n", args...)
}

// findReceiver finds pg_recvlogical.
func findReceiver() (string, error) {
	p, err := pgserver.ClientTool("pg_recvlogical")
	if err != nil {
		return "", fmt.Errorf("find pg_recvlogical, which gives the floor: %w", err)
	}
	return p, nil
}

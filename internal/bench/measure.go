package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

// pauseAfter is how long walrelay works in D before Kafka stops: long enough to
// have connected and begun, short enough not to have ended.
const pauseAfter = time.Second

// usage is what one process used.
type usage struct {
	wall time.Duration
	cpu  time.Duration // user and system
	rss  int64         // peak, bytes
}

func (u usage) String() string {
	return fmt.Sprintf("%6.2f s wall  %6.2f s CPU  %4d MiB peak", u.wall.Seconds(), u.cpu.Seconds(), u.rss>>20)
}

// timed runs cmd, and during once it has started; what during is handed is closed when cmd
// has ended. The peak includes this
// program's size when it started cmd (Linux counts it, since both share their
// memory until exec), so that this program has to stay small; it does.
func timed(cmd *exec.Cmd, during func(ended <-chan struct{}) error) (usage, error) {
	var stderr tail
	cmd.Stderr = &stderr
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return usage{}, fmt.Errorf("start %s: %w", filepath.Base(cmd.Path), err)
	}
	ended := make(chan struct{})
	var waitErr error
	var wall time.Duration
	go func() {
		waitErr = cmd.Wait()
		wall = time.Since(start)
		close(ended)
	}()
	err := during(ended)
	<-ended
	if waitErr != nil {
		err = errors.Join(err, fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), waitErr, stderr.text))
	}
	u := usage{
		wall: wall,
		cpu:  cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(),
	}
	if r, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		u.rss = int64(r.Maxrss)
		if runtime.GOOS != "darwin" {
			u.rss <<= 10 // kilobytes everywhere else
		}
	}
	return u, err
}

func nothing(<-chan struct{}) error { return nil }

// tail keeps the end of what is written.
type tail struct{ text []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.text = append(t.text, p...)
	t.text = t.text[max(0, len(t.text)-2000):]
	return len(p), nil
}

// runFloor reads slot up to the LSN end and throws it away.
func (b *bench) runFloor(ctx context.Context, slot, end string) (usage, error) {
	return timed(exec.CommandContext(ctx, b.receiver, "--start", "--slot", slot, "--dbname", b.dsn,
		"--option", "proto_version=1", "--option", "publication_names=bench",
		"--file", os.DevNull, "--endpos", end, "--no-loop"), nothing)
}

// runRelay lets walrelay deliver what is behind slot to a new Kafka, and makes
// sure that it did.
func (b *bench) runRelay(ctx context.Context, slot string, w workload) (u usage, err error) {
	kafka, err := b.startKafka(ctx)
	if err != nil {
		return u, err
	}
	defer func() { err = errors.Join(err, kafka.stop()) }()
	config := filepath.Join(b.dir, "walrelay.yaml")
	text := fmt.Sprintf(`name: bench
source: {dsn: %q, slot: %s, publication: bench, publication-mode: existing}
snapshot: {mode: never}
replay: {retain-wal: 0}
outbox: [{table: public.outbox, after: %s}]
kafka: {brokers: [%q]}
admin: {listen: ""}
log: {level: warn}
`, b.dsn, slot, cmp.Or(w.after, "keep"), kafka.addr)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return u, fmt.Errorf("write walrelay's configuration: %w", err)
	}
	during := nothing
	if w.pause > 0 {
		during = func(<-chan struct{}) error { return kafka.pause(ctx, w.pause) }
	}
	u, err = timed(exec.CommandContext(ctx, b.binary, "run", "--until-caught-up", "-c", config), during)
	if err != nil {
		return u, err
	}
	if w.pause > 0 && u.wall < pauseAfter+w.pause {
		return u, fmt.Errorf("walrelay was done after %s, before Kafka stood still: give more -rows", u.wall)
	}
	return u, kafka.holds(ctx, "outbox.event.", w.rows)
}

// kafkaProcess is an embedded Kafka in a process of its own.
type kafkaProcess struct {
	cmd  *exec.Cmd
	addr string
}

// startKafka starts this program as Kafka. It ends with its standard input, which
// is ours, so that it does not outlive us.
func (b *bench) startKafka(ctx context.Context) (*kafkaProcess, error) {
	cmd := exec.CommandContext(ctx, b.self, kafkaMode)
	cmd.Stderr = os.Stderr
	if _, err := cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start the embedded Kafka: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start the embedded Kafka: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the embedded Kafka: %w", err)
	}
	k := &kafkaProcess{cmd: cmd}
	line, err := bufio.NewReader(out).ReadString('\n')
	if k.addr = strings.TrimSpace(line); err != nil || k.addr == "" {
		return nil, errors.Join(fmt.Errorf("start the embedded Kafka: no address from it: %w", err), k.stop())
	}
	if _, _, err := net.SplitHostPort(k.addr); err != nil {
		return nil, errors.Join(fmt.Errorf("start the embedded Kafka: %w", err), k.stop())
	}
	return k, nil
}

// stop kills it: nothing in it is worth a shutdown.
func (k *kafkaProcess) stop() error {
	if err := k.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop the embedded Kafka: %w", err)
	}
	_ = k.cmd.Wait() // killed, which Wait reports
	return nil
}

// pause makes Kafka stand still for d, as a machine does that swaps.
func (k *kafkaProcess) pause(ctx context.Context, d time.Duration) error {
	if err := sleep(ctx, pauseAfter); err != nil {
		return err
	}
	if err := k.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return fmt.Errorf("stop Kafka: %w", err)
	}
	err := sleep(ctx, d)
	if contErr := k.cmd.Process.Signal(syscall.SIGCONT); contErr != nil {
		err = errors.Join(err, fmt.Errorf("continue Kafka: %w", contErr))
	}
	return err
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// holds makes sure that the topics with a prefix have at least rows records; markers of
// transactions count as offsets, so that it may be more. A fast connector that
// delivers nothing is no fast connector.
func (k *kafkaProcess) holds(ctx context.Context, prefix string, rows int) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(k.addr))
	if err != nil {
		return fmt.Errorf("connect to Kafka: %w", err)
	}
	defer client.Close()
	ends, err := kadm.NewClient(client).ListCommittedOffsets(ctx)
	if err != nil {
		return fmt.Errorf("count records: %w", err)
	}
	n := int64(0)
	ends.Each(func(o kadm.ListedOffset) {
		if strings.HasPrefix(o.Topic, prefix) {
			n += o.Offset
		}
	})
	if n < int64(rows) {
		return fmt.Errorf("walrelay ended well, but Kafka holds %d of %d records", n, rows)
	}
	return nil
}

// serveKafka is the embedded Kafka's process: it prints its address and serves
// until standard input ends.
func serveKafka(ctx context.Context, stdout io.Writer) error {
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
	if err != nil {
		return fmt.Errorf("start the embedded Kafka: %w", err)
	}
	defer cluster.Close()
	if _, err := fmt.Fprintln(stdout, cluster.ListenAddrs()[0]); err != nil {
		return fmt.Errorf("print the address: %w", err)
	}
	ended := make(chan struct{})
	go func() { // ends with the input, which ends with the parent
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
	return nil
}

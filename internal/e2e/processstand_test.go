package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

// newStand gives the stand of a test: a database and a Kafka of its own, and the binary,
// which reaches both through proxies, so that connections can be cut.
func newStand(t *testing.T) stand {
	t.Helper()
	return newProcessStand(t, "snapshot: {mode: never}")
}

// newProcessStand is newStand with the configuration's part on snapshots, and with what the
// database is to be like.
func newProcessStand(t *testing.T, snapshot string, options ...harness.PGOption) *processStand {
	t.Helper()
	pg := harness.Postgres(t, append(options, harness.Setting("logical_decoding_work_mem", "64kB"))...)
	kafka := harness.Kafka(t, harness.WithProxy())
	proxy := harness.StartProxy(t, pg.Server.Addr())
	name := kafka.Unique()
	s := &processStand{
		pg: pg, dsn: pg.DSN(), brokers: kafka.Brokers(), binary: harness.Binary(t), slot: "walrelay_" + name,
		toDatabase: proxy, toKafka: kafka.Proxies, holder: map[process]int32{},
	}
	s.config = filepath.Join(t.TempDir(), "walrelay.yaml")
	yaml := fmt.Sprintf(`name: %s
source:
  dsn: %q
  tables: ["public.*"]
  messages: ["*"]
outbox:
  - table: public.outbox
topics: {prefix: shop, partitions: 6, replication-factor: 1}
kafka: {brokers: ["%s"]}
admin: {listen: ""}
%s
`, name, pg.ProxyDSN(proxy.Addr()), strings.Join(s.brokers, `", "`), snapshot)
	if err := os.WriteFile(s.config, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	return s
}

// processStand is the one kind of stand: real servers, and the binary as a process.
type processStand struct {
	pg                        *harness.PG
	dsn, binary, config, slot string
	brokers                   []string
	toDatabase                *harness.Proxy
	toKafka                   []*harness.Proxy
	mu                        sync.Mutex
	holder                    map[process]int32 // the slot's walsender when the process was started
}

func (s *processStand) DSN() string { return s.dsn }

func (s *processStand) Kafka() []kgo.Opt { return []kgo.Opt{kgo.SeedBrokers(s.brokers...)} }

// Faults cut the connections of the process. A cut that hits nothing is an error: the
// process has connections to both all the time.
func (s *processStand) Faults() []cdctest.Fault {
	return []cdctest.Fault{
		{Name: "cut-database", Weight: 2, Do: func(context.Context, *rand.Rand) (string, error) {
			return fmt.Sprintf("cut %d connections to PostgreSQL", s.toDatabase.Cut()), nil
		}},
		{Name: "cut-kafka", Weight: 2, Do: func(context.Context, *rand.Rand) (string, error) {
			n := 0
			for _, p := range s.toKafka {
				n += p.Cut()
			}
			return fmt.Sprintf("cut %d connections to Kafka", n), nil
		}},
	}
}

func (s *processStand) Start(t *testing.T, env []string, args ...string) process {
	t.Helper()
	before, err := s.slotHolder(context.WithoutCancel(t.Context()))
	if err != nil {
		t.Errorf("read the slot's holder: %v", err)
	}
	p := &envProcess{cmd: exec.Command(s.binary, append([]string{"run", "-c", s.config}, args...)...), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = p
	if err := p.cmd.Start(); err != nil {
		t.Errorf("start %s: %v", s.binary, err)
		close(p.ended)
		return p
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() { _ = p.Kill() })
	s.mu.Lock()
	s.holder[p] = before
	s.mu.Unlock()
	return p
}

// slotHolder gives the process id of the walsender that streams from the slot, 0 where there
// is none: the one that creates a slot holds it too, and may throw it away.
func (s *processStand) slotHolder(ctx context.Context) (int32, error) {
	conn, err := pgx.Connect(ctx, s.dsn)
	if err != nil {
		return 0, err
	}
	defer conn.Close(ctx)
	var pid int32
	err = conn.QueryRow(ctx, `SELECT s.active_pid FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid
		WHERE s.slot_name = $1 AND r.state IN ('catchup', 'streaming')`, s.slot).Scan(&pid)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil
	}
	return pid, err
}

// Streaming waits for another walsender than the one that was there when p started.
func (s *processStand) Streaming(ctx context.Context, p process) error {
	s.mu.Lock()
	before := s.holder[p]
	s.mu.Unlock()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		now, err := s.slotHolder(ctx)
		if err != nil && ctx.Err() != nil {
			return err // a server that is down for a moment is waited for
		}
		if now != 0 && now != before {
			return nil
		}
		select {
		case <-p.(*envProcess).ended:
			return errors.New("the process ended")
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// envProcess is a process of processStand; as a writer it keeps the end of its stderr.
type envProcess struct {
	cmd   *exec.Cmd
	ended chan struct{}
	err   error // of Wait, once ended is closed
	mu    sync.Mutex
	tail  []byte
}

func (p *envProcess) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tail = append(p.tail, b...)
	if n := len(p.tail) - 8192; n > 0 {
		p.tail = bytes.Clone(p.tail[n:])
	}
	return len(b), nil
}

func (p *envProcess) Stderr() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(p.tail)
}

// signal sends sig; to a process that has ended that is no error.
func (p *envProcess) signal(sig syscall.Signal) error {
	if p.cmd.Process == nil {
		return errors.New("the process was never started")
	}
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %v: %w", sig, err)
	}
	return nil
}

func (p *envProcess) Kill() error {
	err := p.signal(syscall.SIGKILL)
	<-p.ended
	return err
}

func (p *envProcess) Pause() error  { return p.signal(syscall.SIGSTOP) }
func (p *envProcess) Resume() error { return p.signal(syscall.SIGCONT) }

func (p *envProcess) Terminate(ctx context.Context) error {
	if err := p.signal(syscall.SIGTERM); err != nil {
		return err
	}
	return p.Wait(ctx)
}

func (p *envProcess) Wait(ctx context.Context) error {
	select {
	case <-p.ended:
		return p.err
	case <-ctx.Done():
		return fmt.Errorf("wait for the process to end: %w", ctx.Err())
	}
}

func (p *envProcess) Ended() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

func (p *envProcess) KilledBySignal() bool {
	if !p.Ended() {
		return false
	}
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

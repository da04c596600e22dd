//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/walrelay/walrelay/internal/cdctest"
)

// newStand gives the stand of a test.
func newStand(t *testing.T) stand { return newEnvStand(t) }

// envStand uses servers that run already and a binary that is built already:
// WALRELAY_TEST_DSN (a superuser's, wal_level=logical), WALRELAY_TEST_BROKERS and
// WALRELAY_TEST_BINARY.
type envStand struct {
	dsn, brokers, binary, config, slot string
	admin                              string // the DSN of the server's own database
	mu                                 sync.Mutex
	holder                             map[process]int32 // the slot's walsender when the process was started
}

func newEnvStand(t *testing.T) *envStand {
	t.Helper()
	need := func(name string) string {
		v := os.Getenv(name)
		if v == "" {
			t.Fatalf("set %s, %s and %s to a PostgreSQL, a Kafka and the binary to test", "WALRELAY_TEST_DSN", "WALRELAY_TEST_BROKERS", "WALRELAY_TEST_BINARY")
		}
		return v
	}
	s := &envStand{admin: need("WALRELAY_TEST_DSN"), brokers: need("WALRELAY_TEST_BROKERS"), binary: need("WALRELAY_TEST_BINARY"), holder: map[process]int32{}}
	name := fmt.Sprintf("e2e_%d", time.Now().UnixNano())
	s.slot = "walrelay_" + name
	dsn, err := url.Parse(s.admin)
	if err != nil {
		t.Fatal(err)
	}
	s.mustExec(t, "CREATE DATABASE "+name)
	dsn.Path = "/" + name
	s.dsn = dsn.String()
	s.mustClearTopics(t)
	s.config = filepath.Join(t.TempDir(), "walrelay.yaml")
	yaml := fmt.Sprintf(`name: %s
source:
  dsn: %q
  tables: ["public.*"]
  messages: ["*"]
outbox:
  - table: public.outbox
topics: {prefix: shop, partitions: 6, replication-factor: 1}
kafka: {brokers: [%s]}
`, name, s.dsn, s.brokers)
	if err := os.WriteFile(s.config, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.clean(t, name) })
	return s
}

// clean runs behind the processes' own clean-ups.
func (s *envStand) clean(t *testing.T, name string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.admin)
	if err != nil {
		t.Error(err)
		return
	}
	defer conn.Close(ctx)
	for {
		var active bool
		err := conn.QueryRow(ctx, "SELECT coalesce(bool_or(active), false) FROM pg_replication_slots WHERE database = $1", name).Scan(&active)
		if err != nil {
			t.Error(err)
			return
		}
		if !active {
			break
		}
	}
	if _, err := conn.Exec(ctx, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = $1", name); err != nil {
		t.Error(err)
	}
	if _, err := conn.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
		t.Error(err)
	}
}

func (s *envStand) mustExec(t *testing.T, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.admin)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

// mustClearTopics removes the topics of earlier tests.
func (s *envStand) mustClearTopics(t *testing.T) {
	t.Helper()
	client, err := kgo.NewClient(s.Kafka()...)
	if err != nil {
		t.Fatal(err)
	}
	admin := kadm.NewClient(client)
	defer admin.Close()
	found, err := admin.ListTopics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var old []string
	for _, name := range found.Names() {
		if strings.HasPrefix(name, "shop.") || strings.HasPrefix(name, "outbox.event.") {
			old = append(old, name)
		}
	}
	if len(old) > 0 {
		if _, err := admin.DeleteTopics(t.Context(), old...); err != nil {
			t.Fatal(err)
		}
	}
}

func (s *envStand) DSN() string { return s.dsn }

func (s *envStand) Kafka() []kgo.Opt {
	return []kgo.Opt{kgo.SeedBrokers(strings.Split(s.brokers, ",")...)}
}

func (s *envStand) Faults() []cdctest.Fault { return nil }

func (s *envStand) Start(t *testing.T, env []string, args ...string) process {
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

// slotHolder gives the process id of the slot's walsender, 0 where there is none.
func (s *envStand) slotHolder(ctx context.Context) (int32, error) {
	conn, err := pgx.Connect(ctx, s.admin)
	if err != nil {
		return 0, err
	}
	defer conn.Close(ctx)
	var pid int32
	err = conn.QueryRow(ctx, "SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1 AND active_pid IS NOT NULL", s.slot).Scan(&pid)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil
	}
	return pid, err
}

// Streaming waits for another walsender than the one that was there when p started.
func (s *envStand) Streaming(ctx context.Context, p process) error {
	s.mu.Lock()
	before := s.holder[p]
	s.mu.Unlock()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		now, err := s.slotHolder(ctx)
		if err != nil {
			return err
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

// envProcess is a process of envStand; as a writer it keeps the end of its stderr.
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
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

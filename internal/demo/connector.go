package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"
)

// stopBudget bounds how long the connector may take to end after SIGTERM. Its own
// stop-timeout is 10 s; what takes longer hangs and is killed.
const stopBudget = 15 * time.Second

// connector runs `walrelay run` as a child process and starts it again when it
// was killed on purpose. The child is in a process group of its own, so that
// Ctrl-C reaches the demo alone, which ends the parts in their order.
type connector struct {
	command []string // program and arguments
	log     *os.File // the child's stdout and stderr

	mu    sync.Mutex
	child *child
	kills int
}

// child is one run of the connector.
type child struct {
	cmd    *exec.Cmd
	ended  chan struct{} // closed when err is set
	err    error
	killed bool // by us, guarded by connector.mu
}

// newConnector gives a connector whose output goes to dir/connector.log. The
// caller closes it, after run has returned.
func newConnector(command []string, dir string) (*connector, error) {
	log, err := os.OpenFile(filepath.Join(dir, "connector.log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the connector's log: %w", err)
	}
	return &connector{command: command, log: log}, nil
}

func (c *connector) close() error { return c.log.Close() }

// run starts the connector, and starts it again after each kill, until ctx ends.
// Then the connector gets SIGTERM; run returns when it has ended, with an error
// if it did not end well. A connector that ends by itself is an error.
func (c *connector) run(ctx context.Context) error {
	for {
		ch, err := c.start()
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return c.stop(ch)
		case <-ch.ended:
		}
		c.mu.Lock()
		killed := ch.killed
		c.mu.Unlock()
		if ctx.Err() != nil && killed {
			return nil
		}
		if !killed {
			return c.failure(ch)
		}
	}
}

// kill sends SIGKILL to the connector and gives its process id; ok is false when
// none runs.
func (c *connector) kill() (pid int, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.child == nil || c.child.killed {
		return 0, false
	}
	select {
	case <-c.child.ended:
		return 0, false
	default:
	}
	if err := c.child.cmd.Process.Kill(); err != nil {
		return 0, false // it ended this moment
	}
	c.child.killed = true
	c.kills++
	return c.child.cmd.Process.Pid, true
}

func (c *connector) killed() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.kills
}

func (c *connector) start() (*child, error) {
	cmd := exec.Command(c.command[0], c.command[1:]...)
	cmd.Stdout, cmd.Stderr = c.log, c.log
	detach(cmd)
	ch := &child{cmd: cmd, ended: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The parent-death signal fires when the thread that started the child ends,
		// which Go's scheduler would decide; this goroutine keeps its thread until the
		// child has gone.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			ch.err = cmd.Wait()
			close(ch.ended)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start the connector: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.child = ch
	return ch, nil
}

// stop ends the connector as an operator would.
func (c *connector) stop(ch *child) error {
	if err := terminate(ch.cmd.Process); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop the connector: %w", err)
	}
	timer := time.NewTimer(stopBudget)
	defer timer.Stop()
	select {
	case <-ch.ended:
	case <-timer.C:
		_ = ch.cmd.Process.Kill() // it may have ended this moment
		<-ch.ended
		return fmt.Errorf("stop the connector: it had not ended %s after SIGTERM and was killed%s", stopBudget, c.lastLines())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if ch.err != nil && !ch.killed {
		return c.failure(ch)
	}
	return nil
}

func (c *connector) failure(ch *child) error {
	if ch.err == nil {
		return fmt.Errorf("run the connector: it ended by itself%s", c.lastLines())
	}
	return fmt.Errorf("run the connector: %w%s", ch.err, c.lastLines())
}

// lastLines gives the end of the connector's log, which goes with the directory.
func (c *connector) lastLines() string {
	text, err := os.ReadFile(c.log.Name())
	if err != nil || len(text) == 0 {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	lines = lines[max(0, len(lines)-5):]
	return "; its last lines:\n  " + strings.Join(lines, "\n  ")
}

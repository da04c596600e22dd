package harness

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/walrelay/walrelay/internal/child"
)

// shownLines is how much of a process's log a failed test prints.
const shownLines = 200

// Proc is a running walrelay, or another program. Its methods are safe for concurrent use.
type Proc struct {
	// ConfigFile is the file that was passed with -c; empty if there was none.
	ConfigFile string

	t       testing.TB
	name    string
	process *child.Process
	log     *logBuffer
	stdout  *lockedBuffer
}

// Start runs the walrelay under test. args begins with the command, `run` when there is none. config is the text of a
// YAML file, or anything that marshals to one; it is written to a file that is passed with -c, unless config is nil.
//
// At the test's end the process is killed if it still runs, and if the test failed its last log lines are printed.
func Start(t testing.TB, config any, args ...string) *Proc {
	t.Helper()
	return StartProgram(t, Binary(t), config, args...)
}

// StartProgram is Start for another program with the same manners.
func StartProgram(t testing.TB, program string, config any, args ...string) *Proc {
	t.Helper()
	if len(args) == 0 {
		args = []string{"run"}
	}
	p := &Proc{t: t, name: strings.Join(args, " "), log: newLogBuffer(), stdout: &lockedBuffer{}}
	if config != nil {
		p.ConfigFile = writeConfig(t, config)
		args = slices.Insert(slices.Clone(args), 1, "-c", p.ConfigFile)
	}
	cmd := exec.Command(program, args...)
	cmd.Dir = t.TempDir()
	cmd.Stdout, cmd.Stderr = p.stdout, p.log
	var err error
	if p.process, err = child.Start(cmd, child.Identity{}, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.end)
	return p
}

func writeConfig(t testing.TB, config any) string {
	t.Helper()
	text, ok := config.(string)
	if !ok {
		b, err := yaml.Marshal(config)
		if err != nil {
			t.Fatalf("write the configuration: %v", err)
		}
		text = string(b)
	}
	file := filepath.Join(t.TempDir(), "walrelay.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatalf("write the configuration: %v", err)
	}
	return file
}

// end kills the process and shows what it said, if the test went wrong.
func (p *Proc) end() {
	if err := p.process.End(syscall.SIGKILL, DefaultTimeout); err != nil {
		p.t.Errorf("kill %s: %v", p.name, err)
	}
	if !p.t.Failed() {
		return
	}
	lines := p.Lines()
	first := max(0, len(lines)-shownLines)
	p.t.Logf("--- %s (pid %d, exit code %d), the last %d of %d lines:", p.name, p.PID(), p.process.ExitCode(), len(lines)-first, len(lines))
	for _, line := range lines[first:] {
		p.t.Log(line.Raw)
	}
}

// PID is the process id.
func (p *Proc) PID() int { return p.process.PID() }

// Running says whether the process has not ended yet.
func (p *Proc) Running() bool { return p.process.Running() }

// Kill sends SIGKILL and waits for the end.
func (p *Proc) Kill() {
	p.t.Helper()
	p.Signal(syscall.SIGKILL)
	p.process.ExitCode() // waits
}

// Term sends SIGTERM and does not wait: see Wait.
func (p *Proc) Term() {
	p.t.Helper()
	p.Signal(syscall.SIGTERM)
}

// Pause stops the process with SIGSTOP: it holds its connections and does nothing, like one on a host that hangs.
func (p *Proc) Pause() {
	p.t.Helper()
	p.Signal(syscall.SIGSTOP)
}

// Resume lets a paused process go on.
func (p *Proc) Resume() {
	p.t.Helper()
	p.Signal(syscall.SIGCONT)
}

// Signal sends any signal. One to a process that has ended does nothing.
func (p *Proc) Signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// Wait waits for the end and returns the exit code, -1 if it was a signal. The test fails if it does not end in time.
func (p *Proc) Wait(timeout time.Duration) int {
	p.t.Helper()
	if !p.process.WaitTimeout(timeout) {
		p.t.Fatalf("waited %s for %s to end, in vain", timeout, p.name)
	}
	return p.process.ExitCode()
}

// Stdout is what the process has written to its standard output so far; all of it, once Wait has returned. A log line
// may arrive before output that was written earlier: these are two pipes.
func (p *Proc) Stdout() string { return p.stdout.String() }

// Stderr is what it has written to its standard error: the log and everything else.
func (p *Proc) Stderr() string {
	var text strings.Builder
	for _, line := range p.Lines() {
		text.WriteString(line.Raw + "\n")
	}
	return text.String()
}

// Lines are the lines on standard error so far.
func (p *Proc) Lines() []Line { return p.log.snapshot() }

// WaitLog waits until a line that matches is on standard error, also one that was there before, and returns the first.
// The test fails when there is none in time, or when the process ends without one.
func (p *Proc) WaitLog(timeout time.Duration, matches ...Match) Line {
	p.t.Helper()
	return p.WaitLogAfter(0, timeout, matches...)
}

// WaitLogAfter is WaitLog for the lines from index first on; len(p.Lines()) means: from now on.
func (p *Proc) WaitLogAfter(first int, timeout time.Duration, matches ...Match) Line {
	p.t.Helper()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for ended := false; ; {
		lines, more := p.log.watch()
		if ended {
			lines = p.Lines() // with the last one, even if the end cut it short
		}
		for ; first < len(lines); first++ {
			if lines[first].Matches(matches...) {
				return lines[first]
			}
		}
		if ended {
			p.t.Fatalf("%s ended (exit code %d) without the awaited log line", p.name, p.process.ExitCode())
		}
		select {
		case <-more:
		case <-p.process.Done():
			ended = true // one more look: the last lines came before the end
		case <-timer.C:
			p.t.Fatalf("waited %s for a log line of %s, in vain", timeout, p.name)
		}
	}
}

// lockedBuffer is written by os/exec's goroutine while a test reads.
type lockedBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

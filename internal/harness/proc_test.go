package harness_test

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/internal/harness"
)

const soon = 10 * time.Second

func startTalker(t *testing.T, config any, args ...string) *harness.Proc {
	t.Helper()
	return harness.StartProgram(t, harness.Build(t, "./internal/harness/testdata/talker"), config, args...)
}

func TestAProcessGetsItsConfigurationAndItsLogIsParsed(t *testing.T) {
	p := startTalker(t, map[string]any{"name": "shop"}, "run", "--until-caught-up")
	line := p.WaitLog(soon, harness.Message("streaming"), harness.Field("component", "relay"))
	if line.Field("lsn") != "0/1A2B3C8" || line.Field("xid") != "12345678901234567890" || line.Level() != "info" {
		t.Errorf("parsed as %+v", line)
	}
	if text, err := os.ReadFile(p.ConfigFile); err != nil || string(text) != "name: shop\n" {
		t.Errorf("the configuration is %q (%v)", text, err)
	}
	p.Term()
	if code := p.Wait(soon); code != 0 {
		t.Errorf("exit code %d after SIGTERM", code)
	}
	p.WaitLog(soon, harness.Message("stopped"))
	if want := "args [run -c " + p.ConfigFile + " --until-caught-up]\n"; p.Stdout() != want {
		t.Errorf("standard output %q, want %q", p.Stdout(), want)
	}
}

func TestAKilledProcessHasNoExitCode(t *testing.T) {
	p := startTalker(t, nil)
	p.WaitLog(soon, harness.Text("streaming"))
	p.Kill()
	if code := p.Wait(soon); code != -1 || p.Running() {
		t.Errorf("exit code %d, running %t", code, p.Running())
	}
	if p.ConfigFile != "" || p.Stdout() != "args [run]\n" {
		t.Errorf("config %q, output %q", p.ConfigFile, p.Stdout())
	}
}

func TestAnExitCodeAndAnUnfinishedLineAreSeen(t *testing.T) {
	p := startTalker(t, nil, "fail")
	p.WaitLog(soon, harness.Text("no newline"))
	if code := p.Wait(soon); code != 4 {
		t.Errorf("exit code %d, want 4", code)
	}
	if p.Stderr() != "no newline at the end\n" {
		t.Errorf("standard error %q", p.Stderr())
	}
}

func TestAPausedProcessIsSilentUntilItIsResumed(t *testing.T) {
	p := startTalker(t, nil)
	p.WaitLog(soon, harness.Message("tick"))
	p.Pause()
	// SIGSTOP takes effect asynchronously, and lines may be in the pipe: wait until a tenth of a second brings none.
	still := func() int {
		before := -1
		for now := len(p.Lines()); now != before; now = len(p.Lines()) {
			before = now
			<-time.After(100 * time.Millisecond)
		}
		return before
	}
	n := still()
	if now := still(); now != n {
		t.Fatalf("%d lines while paused", now-n)
	}
	p.Resume()
	p.WaitLogAfter(n, soon, harness.Message("tick"))
}

// failing is a TB that records instead of ending the test, so that the harness's own failures can be tested.
type failing struct {
	testing.TB
	failed   bool
	logged   []string
	cleanups []func()
}

func (f *failing) Helper()          {}
func (f *failing) Failed() bool     { return f.failed }
func (f *failing) Cleanup(c func()) { f.cleanups = append(f.cleanups, c) }
func (f *failing) Log(args ...any)  { f.logged = append(f.logged, args[0].(string)) }
func (f *failing) Logf(format string, args ...any) {
	f.logged = append(f.logged, format)
}

func TestAFailedTestShowsTheLogAndKillsTheProcess(t *testing.T) {
	tb := &failing{TB: t}
	p := harness.StartProgram(tb, harness.Build(t, "./internal/harness/testdata/talker"), nil)
	p.WaitLog(soon, harness.Message("tick"))
	tb.failed = true
	for _, cleanup := range slices.Backward(tb.cleanups) {
		cleanup()
	}
	if p.Running() {
		t.Error("still running after the cleanup")
	}
	if !strings.Contains(strings.Join(tb.logged, "\n"), `"message":"streaming"`) {
		t.Errorf("the log was not shown: %q", tb.logged)
	}
}

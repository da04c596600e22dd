package child_test

import (
	"bufio"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/walrelay/walrelay/internal/child"
)

// TestMain lets this test binary be the parent that dies: it starts a child, prints its pid and waits to be killed.
func TestMain(m *testing.M) {
	if os.Getenv("CHILD_TEST_PARENT") != "" {
		p, err := child.Start(exec.Command("sleep", "60"), child.Identity{}, syscall.SIGKILL)
		if err != nil {
			panic(err)
		}
		os.Stdout.WriteString(strconv.Itoa(p.PID()) + "\n")
		<-p.Done()
		return
	}
	os.Exit(m.Run())
}

func TestAChildDiesWithItsParent(t *testing.T) {
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), "CHILD_TEST_PARENT=1")
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	if !alive(pid) {
		t.Fatal("the child does not run")
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait() // it was killed; the error says only that
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(5 * time.Second); alive(pid); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("child %d outlived its parent", pid)
		}
	}
}

// alive reads the state from /proc, because an orphan that nobody waits for stays a zombie in a bare container.
func alive(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func TestEndKillsWhoDoesNotListen(t *testing.T) {
	p, err := child.Start(exec.Command("sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"), child.Identity{}, syscall.SIGKILL)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.End(syscall.SIGTERM, 100*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if p.Running() {
		t.Fatal("still running after End")
	}
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Fatalf("a signal to an ended process is no error: %v", err)
	}
}

func TestExitCodeIsTheProcesss(t *testing.T) {
	p, err := child.Start(exec.Command("sh", "-c", "exit 4"), child.Identity{}, syscall.SIGKILL)
	if err != nil {
		t.Fatal(err)
	}
	if got := p.ExitCode(); got != 4 {
		t.Fatalf("exit code %d, want 4", got)
	}
}

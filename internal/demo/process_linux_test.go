package demo

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// runParent starts a child as the demo starts the connector, prints its process
// id, and waits to be killed.
func runParent() {
	c, err := newConnector([]string{"sleep", "600"}, os.TempDir())
	if err != nil {
		fmt.Println(err)
		return
	}
	ch, err := c.start()
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(ch.cmd.Process.Pid)
	<-ch.ended
}

func TestTheConnectorDiesWithADemoThatIsKilled(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	parent := exec.Command(self(t, "parent")[0])
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatalf("no process id in %q", line)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Fatalf("the child does not run: %v", err)
	}
	_ = parent.Process.Kill()
	_ = parent.Wait() // killed, which Wait reports
	deadline := time.Now().Add(10 * time.Second)
	for alive(pid) {
		if time.Now().After(deadline) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			t.Fatal("the child outlives its parent")
		}
		<-time.After(10 * time.Millisecond)
	}
}

// alive tells whether a process runs; one that nobody has waited for does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

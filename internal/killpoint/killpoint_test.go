package killpoint

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

func TestPointKillsAtTheNthPassageOnly(t *testing.T) {
	p, err := parse(Spec(CheckpointAcked, 3))
	if err != nil {
		t.Fatal(err)
	}
	kills := 0
	p.kill = func() { kills++ }
	for pass := 1; pass <= 5; pass++ {
		p.pass(RecordsAcked) // another step does not count
		p.pass(CheckpointAcked)
		want := 0
		if pass >= 3 {
			want = 1
		}
		if kills != want {
			t.Fatalf("after passage %d: killed %d times, want %d", pass, kills, want)
		}
	}
}

func TestParseRefusesWhatIsNoSpec(t *testing.T) {
	for _, spec := range []string{"5", "0:1", "10:1", "3:0", "3:-1", "x:1", "3:x", ":", "3:1:2"} {
		if _, err := parse(spec); err == nil {
			t.Errorf("parse(%q): no error", spec)
		}
	}
	if p, err := parse(""); p != nil || err != nil {
		t.Errorf("parse of nothing: %v, %v", p, err)
	}
}

func TestAtWithoutArmDoesNothing(t *testing.T) {
	for s := Step(1); int(s) <= Steps; s++ {
		At(s)
	}
	if n := testing.AllocsPerRun(100, func() { At(Committed) }); n != 0 {
		t.Errorf("At allocates %v times", n)
	}
}

// TestArmedProcessDiesBySIGKILL runs this test binary again as the process to be killed.
func TestArmedProcessDiesBySIGKILL(t *testing.T) {
	if os.Getenv("KILLPOINT_CHILD") == "1" {
		if err := Arm(os.Getenv(Env)); err != nil {
			t.Fatal(err)
		}
		At(Begun)
		fmt.Println("once")
		At(Begun)
		fmt.Println("twice")
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestArmedProcessDiesBySIGKILL$")
	cmd.Env = append(os.Environ(), "KILLPOINT_CHILD=1", Env+"="+Spec(Begun, 2))
	out, err := cmd.Output()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the process ended with %v, want SIGKILL", err)
	}
	if string(out) != "once\n" {
		t.Fatalf("it got as far as %q, want %q", out, "once\n")
	}
}

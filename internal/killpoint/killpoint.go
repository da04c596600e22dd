// Package killpoint lets a test end the process at a numbered step of a delivery.
//
// A SIGKILL sent from outside lands somewhere; the moments that matter (between
// the broker's commit and our note of it, for one) last microseconds and are
// hardly ever hit. So the relay names them, and the process kills itself at the
// n-th passage of one.
//
// Without Arm, as in every production run, At is one atomic load and a branch.
package killpoint

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// Env is the environment variable whose value main passes to Arm.
const Env = "WALRELAY_TEST_KILL_AT"

// Step is a moment in the delivery of one batch.
type Step int

// The steps, in the order in which a delivery passes them. They fall between any
// two effects that the outside can see, so that a kill at each of them covers
// every state that a restart can find.
const (
	BatchFilled     Step = iota + 1 // the batch is complete, no Kafka transaction is open
	Begun                           // the transaction was begun, nothing is produced
	FirstProduced                   // the first record was handed to the client
	RecordsAcked                    // every record is acknowledged, the checkpoint is not
	CheckpointAcked                 // the checkpoint record is acknowledged, EndTxn was not sent
	Committed                       // EndTxn returned, nothing notes it yet
	Confirmed                       // the LSN was confirmed to PostgreSQL

	// Those of outbox rows that are marked or deleted, which follow a delivery beside the
	// next one.
	Marking // the rows are known to be delivered, the statement was not sent
	Marked  // the statement is committed, nothing notes it yet
)

// Steps is the number of steps of a delivery; they are 1 to Steps. Those of marks come
// behind, up to AllSteps.
const (
	Steps    = int(Confirmed)
	AllSteps = int(Marked)
)

// String gives the step's name.
func (s Step) String() string {
	names := [...]string{"batch filled", "begun", "first record produced", "records acknowledged",
		"checkpoint acknowledged", "committed", "confirmed", "marking", "marked"}
	if s < 1 || int(s) > len(names) {
		return "step " + strconv.Itoa(int(s))
	}
	return names[s-1]
}

// Spec gives the text that makes a process kill itself at its n-th passage of s,
// n counting from 1.
func Spec(s Step, n int) string { return fmt.Sprintf("%d:%d", int(s), n) }

// point is a step armed; left counts the passages down to the one that kills.
type point struct {
	step Step
	left atomic.Int64
	kill func()
}

// armed is nil in every run but a test's. It is process state on purpose: the
// thing to be killed is the process, and a parameter through relay and producer
// would put the test's concern into each of their signatures.
var armed atomic.Pointer[point]

// Arm reads a spec "<step>:<n>" and makes the process end itself by SIGKILL when it
// passes that step for the n-th time; deferred calls do not run, nothing is
// flushed. An empty spec arms nothing. Call it once, from main, before the relay starts.
func Arm(spec string) error {
	p, err := parse(spec)
	if err != nil || p == nil {
		return err
	}
	p.kill = killSelf
	armed.Store(p)
	return nil
}

// At marks that the process passes step.
func At(step Step) {
	if p := armed.Load(); p != nil {
		p.pass(step)
	}
}

// Armed tells whether the process is to end at step: for a step that exists only where
// effects that otherwise share a moment are pulled apart.
func Armed(step Step) bool {
	p := armed.Load()
	return p != nil && p.step == step
}

func (p *point) pass(step Step) {
	if step == p.step && p.left.Add(-1) == 0 {
		p.kill()
	}
}

func parse(spec string) (*point, error) {
	if spec == "" {
		return nil, nil
	}
	head, tail, ok := strings.Cut(spec, ":")
	step, errStep := strconv.Atoi(head)
	n, errN := strconv.ParseInt(tail, 10, 64)
	if !ok || errStep != nil || errN != nil || step < 1 || step > AllSteps || n < 1 {
		return nil, fmt.Errorf("parse %s %q: want <step>:<n> with a step from 1 to %d and n from 1, for example 5:3", Env, spec, AllSteps)
	}
	p := &point{step: Step(step)}
	p.left.Store(n)
	return p, nil
}

// killSelf does not return: the signal cannot be caught, and the empty select keeps
// this goroutine from taking another step until it arrives.
func killSelf() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

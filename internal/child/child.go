// Package child starts processes that do not outlive the one that started them.
//
// The servers of the tests and of the demo are children in this sense: they hold ports, memory and directories, and a
// test binary that is killed by its timeout runs no cleanup. Where the kernel offers it (Linux), the child gets a signal
// at the moment its parent is gone, however the parent ended.
package child

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// waitDelay bounds how long Wait goes on copying output after the process has ended, because grandchildren that
// inherited the pipe may keep it open for as long as they like.
const waitDelay = 2 * time.Second

// Identity is the user a child runs as. The zero value means: as the parent.
type Identity struct {
	UID, GID uint32
	Set      bool
}

// Process is a started child. Its methods are safe for concurrent use.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // why Wait ended; read only after done is closed
}

// Start starts cmd in a process group of its own, so that a ^C at the terminal reaches the parent alone, which then
// stops its children in the right order. When the parent dies, the child gets onParentDeath (Linux only).
//
// The caller sets everything else in cmd beforehand; cmd belongs to Process afterwards. A goroutine waits for the
// process, so that it never stays a zombie; it ends with the process.
func Start(cmd *exec.Cmd, as Identity, onParentDeath syscall.Signal) (*Process, error) {
	attr := &syscall.SysProcAttr{Setpgid: true}
	if as.Set {
		attr.Credential = &syscall.Credential{Uid: as.UID, Gid: as.GID}
	}
	setParentDeathSignal(attr, onParentDeath)
	cmd.SysProcAttr = attr
	if cmd.WaitDelay == 0 {
		cmd.WaitDelay = waitDelay
	}
	p := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// The kernel ties the parent-death signal to the thread that forked, not to the process. So that thread must
		// live as long as the child: it is locked to this goroutine, which waits right here.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := cmd.Start(); err != nil {
			started <- err
			return
		}
		started <- nil
		p.err = cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return p, nil
}

// PID is the process id. It may have been reused once Done is closed.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended and been waited for.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running says whether the process has not ended yet.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Signal sends sig. A process that has already ended is no error: whoever asks for an end has it.
func (p *Process) Signal(sig syscall.Signal) error {
	if !p.Running() {
		return nil
	}
	// os.Process guards against a pid that was waited for in the meantime.
	err := p.cmd.Process.Signal(sig)
	if err == nil || errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return fmt.Errorf("send %s to process %d: %w", sig, p.PID(), err)
}

// ExitCode waits for the end and returns the exit code; -1 stands for an end by signal, which Err names.
func (p *Process) ExitCode() int {
	<-p.done
	return p.cmd.ProcessState.ExitCode()
}

// Err waits for the end and returns what os/exec's Wait returned.
func (p *Process) Err() error {
	<-p.done
	return p.err
}

// WaitTimeout waits for the end and says whether it came within d.
func (p *Process) WaitTimeout(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-p.done:
		return true
	case <-timer.C:
		return false
	}
}

// End asks with sig, waits up to grace, and then kills. It returns once the process is gone.
func (p *Process) End(sig syscall.Signal, grace time.Duration) error {
	if err := p.Signal(sig); err != nil {
		return err
	}
	if p.WaitTimeout(grace) {
		return nil
	}
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.done
	return nil
}

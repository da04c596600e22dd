package demo

import (
	"os"
	"os/exec"
	"syscall"
)

// detach puts cmd into a process group of its own, away from the terminal's
// Ctrl-C, and lets it die with us, even when we are killed with SIGKILL.
func detach(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

func terminate(p *os.Process) error { return p.Signal(syscall.SIGTERM) }

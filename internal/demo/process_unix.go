//go:build unix && !linux

package demo

import (
	"os"
	"os/exec"
	"syscall"
)

// detach puts cmd into a process group of its own, away from the terminal's
// Ctrl-C. Only Linux has a signal for the parent's death: elsewhere a connector
// outlives a demo that is killed with SIGKILL.
func detach(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}

func terminate(p *os.Process) error { return p.Signal(syscall.SIGTERM) }

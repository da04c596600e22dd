//go:build !unix

package demo

import (
	"os"
	"os/exec"
)

func detach(*exec.Cmd) {}

// terminate kills: there is no SIGTERM here. The connector survives it, as it
// survives every kill.
func terminate(p *os.Process) error { return p.Kill() }

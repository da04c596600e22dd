//go:build !linux

package pgserver

import (
	"errors"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// childrenOf asks pgrep. When that is missing the children end by themselves, as soon as they notice that the
// postmaster is gone.
func childrenOf(pid int) []int {
	out, err := exec.Command("pgrep", "-P", strconv.Itoa(pid)).Output()
	if err != nil {
		return nil
	}
	var children []int
	for _, field := range strings.Fields(string(out)) {
		if child, err := strconv.Atoi(field); err == nil {
			children = append(children, child)
		}
	}
	return children
}

func gone(pid int) bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }

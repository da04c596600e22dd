package pgserver

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// childrenOf lists the processes whose parent is pid. Each of PostgreSQL's is a session leader of its own, so no
// process group holds them together.
func childrenOf(pid int) []int {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil { // only for a bad pattern
		return nil
	}
	var children []int
	for _, path := range stats {
		child, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			continue
		}
		if _, ppid := procStat(child); ppid == pid {
			children = append(children, child)
		}
	}
	return children
}

// gone says whether a process runs no longer. A zombie that nobody waits for, as orphans are in a bare container, is gone.
func gone(pid int) bool {
	state, _ := procStat(pid)
	return state == "" || state == "Z" || state == "X"
}

// procStat reads state and parent; the command before them is in parentheses and may hold anything.
func procStat(pid int) (state string, ppid int) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "", 0
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 2 {
		return "", 0
	}
	ppid, err = strconv.Atoi(fields[1])
	if err != nil {
		return "", 0
	}
	return fields[0], ppid
}

package pgserver

import (
	"fmt"
	"slices"
	"time"
)

// waitGone waits for the end of processes that are not our children, so that only looking tells.
func waitGone(pids []int, limit time.Duration) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(limit); ; <-tick.C {
		pids = slices.DeleteFunc(pids, gone)
		if len(pids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("wait for PostgreSQL's processes: %v are still there after %s", pids, limit)
		}
	}
}

package e2e

import (
	"syscall"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// SIGHUP, which others take for an order to read their configuration again, ends nothing.
func TestAHangupEndsNothing(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.proc.Signal(syscall.SIGHUP)
	c.proc.WaitLog(harness.DefaultTimeout, harness.Message("SIGHUP: "))
	c.pg.Exec("INSERT INTO t VALUES (1)")
	c.fence()
	c.kafka.WaitCommitted(t, c.name+".public.t", 1)
	c.stop()
}

package e2e

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/pgserver"
)

// A database that was put back to an older state of itself has the same identity and
// timeline, and after enough writes its WAL end is past the checkpoint again.
func TestADatabaseThatWasPutBackIsRefusedThoughItsWALHasGrown(t *testing.T) {
	c := caseNew(t, harness.Dedicated())
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.pg.Exec("INSERT INTO t VALUES (1)")
	c.fence()
	c.stop()
	data := filepath.Join(c.pg.Server.Dir(), "data")
	server := func(commands ...string) {
		t.Helper()
		if err := c.pg.Server.Stop(pgserver.Fast); err != nil {
			t.Fatal(err)
		}
		for _, command := range commands {
			if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s", command, err, out)
			}
		}
		if err := c.pg.Server.Restart(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		harness.WaitFor(t, "the server", harness.DefaultTimeout, func() (bool, error) {
			_, err := c.pg.TryQuery("SELECT 1") // a connection from before is of no use
			return err == nil, nil
		})
	}
	server(fmt.Sprintf("cp -a %[1]s %[1]s.old", data))
	c.start()
	c.pg.Exec("INSERT INTO t VALUES (2)")
	c.fence()
	at := c.checkpoint().Position
	c.stop()
	server(fmt.Sprintf("mv %[1]s %[1]s.new && mv %[1]s.old %[1]s", data))
	c.refuses("behind the checkpoint")
	c.pg.Exec("INSERT INTO t VALUES (3)")
	harness.WaitFor(t, "the WAL to be past the checkpoint", harness.DefaultTimeout, func() (bool, error) {
		c.pg.Exec("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 10000)); CHECKPOINT")
		return c.walEnd() > at.LSN, nil
	})
	c.pg.Exec("INSERT INTO t VALUES (4)")
	c.refuses("the WAL below the checkpoint is not what was delivered")
	// What it says goes on without a gap.
	slot := c.confirmed()
	if code, _, stderr := c.command("checkpoint", "set", "--yes", "--lsn", slot.String()); code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	c.start()
	c.fence()
	keys := map[string]int{}
	for _, r := range c.kafka.Committed(t, c.name+".public.t") {
		keys[string(r.Key)]++
	}
	for _, key := range []string{`{"id":1}`, `{"id":2}`, `{"id":3}`, `{"id":4}`} {
		if keys[key] == 0 {
			t.Errorf("delivered %v; %s is missing", keys, key)
		}
	}
}

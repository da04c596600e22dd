package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

func TestStatusShowsAConnectorThatRunsAndOneThatStands(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	if code, out, stderr := c.command("status"); code != 1 || !strings.Contains(stderr, "admin.listen is empty") || !strings.Contains(out, "has not run yet") {
		t.Errorf("without an address: exit code %d, %q, %q", code, out, stderr)
	}
	c.set(caseMap{"admin": caseMap{"listen": "127.0.0.1:0", "token": "t0k3n"}})
	code, out, stderr := c.command("status")
	if code != 1 || !strings.Contains(stderr, "nothing answers") || !strings.Contains(out, "has not run yet") {
		t.Errorf("before the first start: exit code %d, %q, %q", code, out, stderr)
	}
	c.start()
	c.anchored()
	if code, _, stderr := c.command("status", "--addr", "127.0.0.1:1"); code != 1 || !strings.Contains(stderr, "nothing answers") {
		t.Errorf("at a wrong address: exit code %d, %s", code, stderr)
	}
	harness.WaitFor(t, "status to show lag and replay", harness.DefaultTimeout, func() (bool, error) {
		code, out, _ := c.command("status", "--addr", c.admin())
		return code == 0 && strings.Contains(out, c.name+" ") && strings.Contains(out, "streaming for") && strings.Contains(out, "caught up: ") &&
			strings.Contains(out, "replay ") && strings.Contains(out, "walrelay_"+c.name+"_anchor keeps") && !strings.Contains(out, "snapshot "), nil
	})
	var s struct {
		Phase   string  `json:"phase"`
		CatchUp float64 `json:"catch_up_seconds"`
		Lag     *int64  `json:"lag_bytes"`
		Replay  struct {
			LSN string `json:"oldest_lsn"`
		} `json:"replay"`
	}
	code, out, _ = c.command("status", "--addr", c.admin(), "-o", "json")
	if err := json.Unmarshal([]byte(out), &s); err != nil || code != 0 || s.Phase != "streaming" || s.Lag == nil || s.Replay.LSN == "" {
		t.Errorf("exit code %d, %v: %s", code, err, out)
	}
	c.stop()

	c.pg.Exec("INSERT INTO t SELECT generate_series(1, 1000)")
	code, out, _ = c.command("status", "-o", "json")
	if err := json.Unmarshal([]byte(out), &s); err != nil || code != 1 || s.Phase != "stopped" || s.Lag == nil || *s.Lag < 50_000 || s.Replay.LSN == "" {
		t.Errorf("stopped: exit code %d, %v: %s", code, err, out)
	}
	c.pg.Exec("SELECT pg_drop_replication_slot($1)", "walrelay_"+c.name)
	if _, out, _ := c.command("status"); !strings.Contains(out, "is gone, and the next start will refuse") {
		t.Errorf("without its slot: %s", out)
	}
}

func TestCatchUpIsNeverWhileKafkaStandsStill(t *testing.T) {
	k := harness.Kafka(t, harness.WithProxy())
	b := newFaultBed(t, harness.Postgres(t), k)
	b.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	p := b.stream()
	b.pg.Exec("INSERT INTO t VALUES (1)")
	b.wantIDs("t", []int{1})
	k.Pause(0)
	b.pg.Exec("INSERT INTO t SELECT generate_series(2, 3000)")
	harness.WaitFor(t, "catch-up to be never", harness.DefaultTimeout, func() (bool, error) {
		_, metrics := b.get(p, "/metrics")
		_, status := b.get(p, "/status")
		return strings.Contains(metrics, "walrelay_catch_up_seconds +Inf\n") && strings.Contains(status, `"catch_up_seconds": "never"`), nil
	})
	k.Resume(0)
	b.wantIDs("t", faultRange(1, 3000))
	harness.WaitFor(t, "catch-up to be 0", harness.DefaultTimeout, func() (bool, error) {
		m := b.metrics(p)
		return m["walrelay_catch_up_seconds"] == 0 && m["walrelay_lag_seconds"] == 0, nil
	})
	b.stop(p)
}

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
)

// pollingStatus is what tests look at of /status.
type pollingStatus struct {
	Mode       string
	Phase      string
	LagSeconds float64 `json:"lag_seconds"`
	Records    int
	Tables     []struct {
		Table   string
		Pending int     `json:"pending_rows"`
		Oldest  float64 `json:"oldest_pending_seconds"`
	}
	Problems []string
}

func (c *caseRun) pollingStatus() (s pollingStatus) {
	c.t.Helper()
	_, body := c.get(c.admin() + "/status")
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		c.t.Fatalf("/status: %v: %s", err, body)
	}
	return s
}

// marked are the events that the table says are published.
func (c *caseRun) markedEvents() []string {
	c.t.Helper()
	var ids []string
	for _, row := range c.pg.Query(`SELECT event_id::text FROM outbox WHERE published_at IS NOT NULL`) {
		ids = append(ids, row[0])
	}
	return ids
}

// inKafka wants these events in the topic, as they are there now.
func (c *caseRun) inKafka(ids []string) {
	c.t.Helper()
	there := map[string]bool{}
	for _, r := range c.kafka.Committed(c.t, c.eventTopic()) {
		for _, h := range r.Headers {
			if h.Key == "id" {
				there[string(h.Value)] = true
			}
		}
	}
	for _, id := range ids {
		if !there[id] {
			c.t.Errorf("event %s is marked and not in Kafka", id)
		}
	}
}

// Two instances share the work of an application that goes on writing, with transactions
// that take long, and are killed at every step: nothing is lost, nothing is marked before it
// is in Kafka, and what is there twice is a kill's batch.
func TestPollingThroughKillsOfTwoInstances(t *testing.T) {
	const batch, aggregates, writers, each = 40, 10, 3, 180
	c := pollingNew(t, batch)
	var load errgroup.Group
	for w := range writers {
		conn := c.session()
		load.Go(func() error {
			_, err := conn.PgConn().Exec(t.Context(), fmt.Sprintf(`DO $$ BEGIN FOR s IN 0..%d LOOP FOR a IN 1..%d LOOP
				INSERT INTO outbox (aggregate_id, aggregate_seq) SELECT '%d-' || a, 3 * s + n FROM generate_series(1, 3) n;
				PERFORM pg_sleep(CASE WHEN a = 1 THEN 0.1 ELSE 0.003 END); -- ids of others come and are visible before
				COMMIT;
			END LOOP; END LOOP; END $$`, each/3-1, aggregates, w)).ReadAll()
			return err
		})
	}
	done := make(chan error, 1)
	go func() { done <- load.Wait() }()
	steps := []killpoint.Step{killpoint.Committed, killpoint.FirstProduced, killpoint.BatchFilled, killpoint.Confirmed}
	kills := 0
	running := []*harness.Proc{nil, nil}
	writing := true
	for n := 0; writing; n++ {
		for i := range running {
			if running[i] == nil {
				running[i] = c.launch(killpoint.Env + "=" + killpoint.Spec(steps[(n+i)%len(steps)], 1+n%3))
			}
		}
		harness.WaitFor(t, "an instance to kill itself", faultLong, func() (bool, error) {
			select {
			case err := <-done:
				writing = false
				return true, err
			default:
			}
			return !running[0].Running() || !running[1].Running(), nil
		})
		ids := c.markedEvents()
		for i, p := range running {
			if p != nil && !p.Running() {
				if code := p.Wait(faultLong); code != -1 {
					t.Fatalf("an instance ended with exit code %d: %s", code, p.Stderr())
				}
				kills++
				running[i] = nil
			}
		}
		c.inKafka(ids)
	}
	for _, p := range running {
		if p != nil {
			p.Kill() // like any other
			kills++
		}
	}
	c.catchUp()
	if left := c.pg.Value(pollingPending); left != "0" {
		t.Errorf("%s rows are left", left)
	}
	repeats := c.pollingCheck(c.kafka.Committed(t, c.eventTopic()))
	t.Logf("%d kills, %d of %d events twice", kills, repeats, writers*aggregates*each)
	if kills < 4 || repeats == 0 || repeats > kills*batch {
		t.Errorf("%d kills and %d repeats, want at least 4, and between 1 and a batch of %d for each", kills, repeats, batch)
	}
}

// The server is restarted, and once killed, in the middle of the work.
func TestPollingThroughRestartsOfPostgreSQL(t *testing.T) {
	c := pollingNew(t, 50, harness.Dedicated())
	c.launch()
	for n := 1; n <= 3; n++ {
		c.pg.Exec(fmt.Sprintf(`INSERT INTO outbox (aggregate_id, aggregate_seq) SELECT 'a' || a, s FROM generate_series(%d, %d) s, generate_series(1, 50) a ORDER BY s, a`, n*40-39, n*40))
		c.pg.WaitValue("t", `SELECT count(*) > $1 FROM outbox WHERE published_at IS NOT NULL`, (n-1)*2000)
		if n == 2 {
			if err := c.pg.Server.Kill(); err != nil {
				t.Fatal(err)
			}
		}
		first := len(c.proc.Lines())
		if err := c.pg.Server.Restart(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		c.proc.WaitLogAfter(first, faultLong, faultMessage("recovered"))
		harness.WaitFor(t, "the test's own connection to be made again", faultLong, func() (bool, error) {
			_, err := c.pg.TryQuery("SELECT 1")
			return err == nil, nil
		})
	}
	c.pg.WaitValue("0", pollingPending)
	c.stop()
	repeats := c.pollingCheck(c.kafka.Committed(t, c.eventTopic()))
	if repeats > 3*50 {
		t.Errorf("%d repeats of 3 restarts, want at most a batch each", repeats)
	}
}

// While Kafka cannot be reached, from the start and then in the middle, the metrics tell
// how many rows wait and for how long, the instance is not ready and says why.
func TestPollingTellsWhatWaitsWhileKafkaIsAway(t *testing.T) {
	c := caseKafkaOwn(t).set(caseMap{"admin": caseMap{"listen": "127.0.0.1:0"}})
	c.pg.Exec(pollingTable)
	c.setPolling(caseMap{"topic": c.eventTopic()})
	const label = `table="public.outbox"`
	wait := func(rows, oldest float64) {
		t.Helper()
		harness.WaitFor(t, fmt.Sprintf("%v pending rows", rows), faultLong, func() (bool, error) {
			return c.metric("walrelay_outbox_pending_rows", label) == rows, nil
		})
		for name, got := range map[string]float64{"walrelay_outbox_oldest_pending_seconds": c.metric("walrelay_outbox_oldest_pending_seconds", label), "walrelay_lag_seconds": c.metric("walrelay_lag_seconds"), "/status": c.pollingStatus().LagSeconds} {
			if got < oldest || got > oldest+100 {
				t.Errorf("%s says %v s, want %v and a little", name, got, oldest)
			}
		}
	}
	c.kafka.Kill(0)
	c.launch()
	c.pg.Exec(`INSERT INTO outbox (aggregate_id, aggregate_seq, created_at) SELECT 'a', g, now() - (ARRAY[600, 60, 0])[g] * interval '1 second' FROM generate_series(1, 3) g`)
	wait(3, 600)
	if code, body := c.get(c.admin() + "/readyz"); code != 503 {
		t.Errorf("/readyz says %d: %s", code, body)
	}
	c.kafka.Restart(0)
	c.pg.WaitValue("0", pollingPending)
	wait(0, 0)

	c.kafka.Kill(0)
	c.pg.Exec(`INSERT INTO outbox (aggregate_id, aggregate_seq, created_at) SELECT 'b', g, now() - interval '1 hour' FROM generate_series(1, 5) g`)
	wait(5, 3600)
	harness.WaitFor(t, "a status that tells of Kafka", faultLong, func() (bool, error) {
		s := c.pollingStatus()
		return len(s.Problems) > 0 && strings.Contains(s.Problems[0], "Kafka") && s.Tables[0].Pending == 5, nil
	})
	if code, body := c.get(c.admin() + "/readyz"); code != 503 {
		t.Errorf("/readyz says %d: %s", code, body)
	}
	c.pg.Exec(`INSERT INTO outbox (aggregate_id, aggregate_seq) VALUES ('c', 1)`)
	wait(6, 3600)
	c.kafka.Restart(0)
	c.pg.WaitValue("0", pollingPending)
	wait(0, 0)
	harness.WaitFor(t, "the instance to be ready", faultLong, func() (bool, error) {
		code, _ := c.get(c.admin() + "/readyz")
		s := c.pollingStatus()
		return code == 200 && s.Mode == "polling" && s.Phase == "polling" && len(s.Problems) == 0 && s.Records == 9, nil
	})
	if n := c.metric("walrelay_records_total", `outcome="delivered"`); n != 9 {
		t.Errorf("%v records are counted, want 9", n)
	}
	c.stop()
}

// pollingHeld makes a connector whose first batch Kafka is asked to take, and does not yet.
func pollingHeld(t *testing.T, stopTimeout time.Duration) (*caseRun, *faultWire) {
	t.Helper()
	t.Parallel()
	kafka := harness.Kafka(t, harness.WithProxy())
	w := newFaultWire(t, kafka)
	c := caseOn(t, harness.Postgres(t), kafka)
	c.pg.Exec(pollingTable)
	c.setPolling(caseMap{"topic": c.eventTopic()})
	c.set(caseMap{"admin": caseMap{"listen": "127.0.0.1:0"}, "stop-timeout": stopTimeout.String()})
	w.on(faultKeyProduce, func(int) faultAct { return faultHold })
	c.launch()
	c.pollingFill(3, 3)
	harness.WaitFor(t, "a batch to be held", faultLong, func() (bool, error) { return w.heldNow() > 0, nil })
	return c, w
}

func TestPollingFinishesTheBatchInHandWhenItIsStopped(t *testing.T) {
	c, w := pollingHeld(t, 30*time.Second)
	// A broker that has taken nothing for a while is a problem that is said.
	harness.WaitFor(t, "the instance not to be ready", faultLong, func() (bool, error) {
		code, body := c.get(c.admin() + "/readyz")
		return code == 503 && strings.Contains(body, "Kafka has not taken a batch"), nil
	})
	c.proc.Term()
	harness.WaitFor(t, "the phase stopping", faultLong, func() (bool, error) {
		return c.pollingStatus().Phase == "stopping" && c.metric("walrelay_state", `phase="stopping"`) == 1, nil
	})
	if left := c.pg.Value(pollingPending); left != "9" {
		t.Errorf("%s rows are pending before Kafka has them, want 9", left)
	}
	w.release()
	c.ends(0)
	if left := c.pg.Value(pollingPending); left != "0" {
		t.Errorf("%s rows are pending after the end", left)
	}
	if repeats := c.pollingCheck(c.kafka.Committed(t, c.eventTopic())); repeats != 0 {
		t.Errorf("%d repeats", repeats)
	}
}

// Where the time does not suffice, the end says so, by its exit code too.
func TestPollingThatCannotFinishInTimeFails(t *testing.T) {
	c, w := pollingHeld(t, time.Second)
	c.proc.Term()
	c.ends(1, "not published and marked within stop-timeout (1s)")
	if left := c.pg.Value(pollingPending); left != "9" {
		t.Errorf("%s rows are pending, want 9", left)
	}
	w.discard()
	c.catchUp()
	c.pollingCheck(c.kafka.Committed(t, c.eventTopic()))
}

func TestPollingCleansAndShowsWhatTheWALLeft(t *testing.T) {
	c := pollingNew(t, 100)
	c.pollingFill(3, 4)
	c.catchUp()
	c.pg.Exec(`INSERT INTO outbox (aggregate_id, aggregate_seq, created_at) SELECT 'later', g, now() - interval '1 year' FROM generate_series(1, 3) g`)
	c.clean(0, []string{"--older-than", "7d"}, "public.outbox: 0 rows deleted")
	c.clean(0, []string{"--older-than", "0s"}, "public.outbox: 12 rows deleted")
	if left := c.pg.Value("SELECT count(*) FROM outbox"); left != "3" {
		t.Errorf("%s rows are left, want the 3 that are not published", left)
	}
	if code, out, said := c.command("slot", "show"); code != 0 || !strings.Contains(out, `"slot":null`) && !strings.Contains(out, `"slot": null`) {
		t.Errorf("slot show: exit code %d, %s%s", code, out, said)
	}

	// A connector that was of the WAL before leaves a slot, which keeps WAL: it is said, shown
	// and dropped.
	c.pg.Exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", "walrelay_"+c.name)
	c.launch()
	c.proc.WaitLog(faultLong, harness.Field("slot", "walrelay_"+c.name), harness.Message("run walrelay slot drop"))
	c.stop()
	if code, out, said := c.command("slot", "show"); code != 0 || !strings.Contains(out, "walrelay_"+c.name) {
		t.Errorf("slot show: exit code %d, %s%s", code, out, said)
	}
	if code, out, said := c.command("slot", "drop", "--yes"); code != 0 {
		t.Errorf("slot drop: exit code %d, %s%s", code, out, said)
	}
	if n := c.pg.Value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1", "walrelay_"+c.name); n != "0" {
		t.Error("the slot is still there")
	}
}

// However large the rows are, and however well the server has packed them, a poll takes no
// more memory than some batches.
func TestPollingOfLargeRowsTakesLittleMemory(t *testing.T) {
	for name, value := range map[string]string{
		"packed":     `repeat('x', 4000000)`,
		"not packed": `(SELECT string_agg(md5(g::text || random()), '') FROM generate_series(1, 120000) g)`,
	} {
		t.Run(name, func(t *testing.T) {
			c := pollingNew(t, 20000)
			c.set(caseMap{"topics": caseMap{"config": caseMap{"max.message.bytes": "5000000"}}, "batch": caseMap{"max-bytes": "8MiB"}})
			c.pg.Exec(`INSERT INTO outbox (aggregate_id, aggregate_seq, payload) SELECT 'a', s, jsonb_build_object('v', ` + value + `) FROM generate_series(1, 50) s`)
			c.launch()
			c.pg.WaitValue("0", pollingPending)
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.proc.PID()))
			if err != nil {
				t.Fatal(err)
			}
			peak := 0
			for line := range strings.Lines(string(status)) {
				_, _ = fmt.Sscanf(line, "VmHWM: %d kB", &peak)
			}
			t.Logf("at most %d MB", peak/1024)
			if peak == 0 || peak > 200<<10 {
				t.Errorf("the process had %d kB at the most, want less than 200 MB for 200 MB of rows", peak)
			}
			c.stop()
			c.pollingCheck(c.kafka.Committed(t, c.eventTopic()))
		})
	}
}

func TestPollingRefusesAStandby(t *testing.T) {
	c := pollingNew(t, 100, harness.Dedicated())
	c.pollingFill(1, 3)
	c.catchUp()
	signal := filepath.Join(c.pg.Server.Dir(), "data", "standby.signal")
	if err := os.WriteFile(signal, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := c.pg.Server.Restart(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	c.launch()
	c.refused("source.dsn leads to a standby", "name the primary")
}

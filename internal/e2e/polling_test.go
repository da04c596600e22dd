package e2e

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
)

// pollingTable is an outbox whose events go to one topic of the test's own.
const pollingTable = `CREATE TABLE outbox (id bigserial PRIMARY KEY, event_id uuid NOT NULL UNIQUE DEFAULT gen_random_uuid(),
  aggregate_id text NOT NULL, aggregate_seq bigint NOT NULL, event_type text NOT NULL DEFAULT 'e', payload jsonb NOT NULL DEFAULT '{}',
  created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz, UNIQUE (aggregate_id, aggregate_seq))`

const pollingPending = `SELECT count(*) FROM outbox WHERE published_at IS NULL`

// pollingNew makes a case whose connector polls, with batches of at most batch records.
func pollingNew(t *testing.T, batch int, options ...harness.PGOption) *caseRun {
	t.Helper()
	c := caseNew(t, options...)
	delete(c.config, "snapshot")
	c.config["source"] = caseMap{"dsn": c.pg.DSN(), "mode": "polling", "poll-interval": "20ms"}
	c.set(caseMap{
		"outbox": []caseMap{{"table": "public.outbox", "after": "mark", "topic": c.eventTopic()}},
		"topics": caseMap{"replication-factor": 1},
		"batch":  caseMap{"max-records": batch},
	})
	c.pg.Exec(pollingTable)
	return c
}

// pollingFill inserts events 1..n of each of a number of aggregates, in turns.
func (c *caseRun) pollingFill(aggregates, n int) {
	c.pg.Exec(fmt.Sprintf(`INSERT INTO outbox (aggregate_id, aggregate_seq) SELECT 'a' || a, s FROM generate_series(1, %d) s, generate_series(1, %d) a ORDER BY s, a`, n, aggregates))
}

// pollingCheck wants each event of the table in the topic, first appearances in the order
// of each aggregate and each key in one partition, and returns how many are there twice.
func (c *caseRun) pollingCheck(records []*kgo.Record) (repeats int) {
	c.t.Helper()
	seen, last, partition := map[string]bool{}, map[string]int{}, map[string]int32{}
	for _, r := range records {
		headers := map[string]string{}
		for _, h := range r.Headers {
			headers[h.Key] = string(h.Value)
		}
		if _, there := headers["position"]; there || headers["id"] == "" {
			c.t.Fatalf("headers %v: want an id and no position", headers)
		}
		key := string(r.Key)
		if p, ok := partition[key]; ok && p != r.Partition {
			c.t.Fatalf("key %s in partitions %d and %d", key, p, r.Partition)
		}
		partition[key] = r.Partition
		if seen[headers["id"]] {
			repeats++
			continue
		}
		seen[headers["id"]] = true
		seq, err := strconv.Atoi(headers["aggregate_seq"])
		if err != nil || seq != last[key]+1 {
			c.t.Fatalf("aggregate %s: event %s comes first behind %d", key, headers["aggregate_seq"], last[key])
		}
		last[key] = seq
	}
	if want := c.pg.Value(`SELECT count(*) FROM outbox`); strconv.Itoa(len(seen)) != want {
		c.t.Fatalf("%d events are in the topic, %s in the table", len(seen), want)
	}
	return repeats
}

func TestPollingLosesNothingAndRepeatsABatchPerKill(t *testing.T) {
	const batch = 50
	c := pollingNew(t, batch)
	c.pollingFill(20, 30)
	kills := 0
	for _, step := range []killpoint.Step{killpoint.BatchFilled, killpoint.FirstProduced, killpoint.Committed, killpoint.Confirmed} {
		c.launch(killpoint.Env + "=" + killpoint.Spec(step, 2))
		c.killed()
		kills++
	}
	c.launch()
	c.pg.WaitValue("0", pollingPending)
	c.stop()
	repeats := c.pollingCheck(c.kafka.Committed(t, c.eventTopic()))
	if repeats < batch || repeats > kills*batch {
		t.Errorf("%d repeats, want at least the batch that was published and not marked (%d), and at most a batch per kill (%d)", repeats, batch, kills*batch)
	}
}

func TestPollingInstancesShareTheWorkInOrder(t *testing.T) {
	c := pollingNew(t, 100)
	// All of them poll before there is work, or the first would have done it.
	instances := []*harness.Proc{c.launch(), c.launch(), c.launch()}
	for _, p := range instances {
		p.WaitLog(faultLong, faultMessage("polling"))
	}
	c.pollingFill(200, 30)
	c.pg.WaitValue("0", pollingPending)
	worked := 0
	for _, p := range instances {
		c.proc = p
		c.stop()
		if p.WaitLog(faultLong, faultMessage("polling ended")).Field("records") != "0" {
			worked++
		}
	}
	if repeats := c.pollingCheck(c.kafka.Committed(t, c.eventTopic())); repeats != 0 || worked < 2 {
		t.Errorf("%d repeats without a fault; %d instances of 3 published something", repeats, worked)
	}
}

func TestPollingDoesNotOvertakeARowThatSomebodyHolds(t *testing.T) {
	c := pollingNew(t, 100)
	c.pollingFill(2, 5)
	holder := c.session()
	c.exec(holder, `BEGIN; SELECT FROM outbox WHERE aggregate_id = 'a1' AND aggregate_seq = 2 FOR UPDATE`)
	c.launch()
	c.pg.WaitValue("4", pollingPending)
	if left := c.pg.Value(`SELECT string_agg(aggregate_id || ':' || aggregate_seq, ' ' ORDER BY id) FROM outbox WHERE published_at IS NULL`); left != "a1:2 a1:3 a1:4 a1:5" {
		t.Errorf("pending: %s", left)
	}
	c.exec(holder, `COMMIT`)
	c.pg.WaitValue("0", pollingPending)
	c.stop()
	if repeats := c.pollingCheck(c.kafka.Committed(t, c.eventTopic())); repeats != 0 {
		t.Errorf("%d repeats", repeats)
	}
}

func TestPollingPublishesARowThatCommitsLateWithALowerId(t *testing.T) {
	c := pollingNew(t, 100)
	late := c.session()
	c.exec(late, `BEGIN; INSERT INTO outbox (aggregate_id, aggregate_seq) VALUES ('late', 1)`)
	c.pg.Exec(`INSERT INTO outbox (aggregate_id, aggregate_seq) VALUES ('early', 1)`)
	c.launch()
	c.pg.WaitValue("1", `SELECT count(*) FROM outbox WHERE published_at IS NOT NULL`)
	c.exec(late, `COMMIT`)
	c.pg.WaitValue("2", `SELECT count(*) FROM outbox WHERE published_at IS NOT NULL`)
	c.stop()
	c.pollingCheck(c.kafka.Committed(t, c.eventTopic()))
}

func TestPollingRefusesATableThatCannotBeMarked(t *testing.T) {
	c := pollingNew(t, 100)
	c.pg.Exec(`ALTER TABLE outbox DROP COLUMN published_at`)
	c.launch()
	if code := c.proc.Wait(faultLong); code != 4 || !strings.Contains(c.proc.Stderr(), "published_at") {
		t.Errorf("exit code %d: %s", code, c.proc.Stderr())
	}
	c.set(caseMap{"outbox": []caseMap{{"table": "public.outbox", "after": "delete", "topic": c.eventTopic()}}})
	c.pollingFill(3, 3)
	records := 9
	c.launch()
	c.pg.WaitValue("0", `SELECT count(*) FROM outbox`)
	c.stop()
	if got := c.kafka.Committed(t, c.eventTopic()); len(got) != records {
		t.Errorf("%d records, want %d", len(got), records)
	}
}

func TestPollingRefusesATriggerThatKeepsRowsPending(t *testing.T) {
	c := pollingNew(t, 100)
	c.pg.Exec(`CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.published_at := NULL; RETURN NEW; END';
CREATE TRIGGER keep BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION keep()`)
	c.pollingFill(1, 1)
	c.launch()
	if code := c.proc.Wait(faultLong); code != 4 || !strings.Contains(c.proc.Stderr(), "trigger") {
		t.Errorf("exit code %d: %s", code, c.proc.Stderr())
	}
}

func TestPollingWaitsForKafkaAndForTheDatabase(t *testing.T) {
	t.Parallel()
	kafka := harness.Kafka(t, harness.WithProxy())
	c := caseOn(t, harness.Postgres(t), kafka)
	delete(c.config, "snapshot")
	proxy := harness.StartProxy(t, c.pg.Server.Addr())
	c.config["source"] = caseMap{"dsn": c.pg.ProxyDSN(proxy.Addr()), "mode": "polling", "poll-interval": "20ms"}
	c.set(caseMap{"outbox": []caseMap{{"table": "public.outbox", "after": "mark", "topic": c.eventTopic()}}, "topics": caseMap{"replication-factor": 1}})
	c.pg.Exec(pollingTable)
	c.launch()
	p := c.proc
	p.WaitLog(faultLong, faultMessage("polling"))

	proxy.Refuse()
	if proxy.Cut() == 0 {
		t.Fatal("no connection to the database was cut")
	}
	c.pollingFill(5, 2)
	p.WaitLog(faultLong, harness.Message("starting over"))
	proxy.Accept()
	c.pg.WaitValue("0", pollingPending)

	// Kafka is away when rows come: they stay pending, and none is marked.
	for _, k := range kafka.Proxies {
		k.Refuse()
		k.Cut()
	}
	c.pg.Exec(`INSERT INTO outbox (aggregate_id, aggregate_seq) VALUES ('a1', 3)`)
	first := len(p.Lines())
	p.WaitLogAfter(first, 2*faultLong, harness.Message("starting over"))
	if n := c.pg.Value(pollingPending); n != "1" {
		t.Errorf("%s rows are pending while Kafka is away, want 1", n)
	}
	for _, k := range kafka.Proxies {
		k.Accept()
	}
	c.pg.WaitValue("0", pollingPending)
	c.stop()
	c.pollingCheck(c.kafka.Committed(t, c.eventTopic()))
}

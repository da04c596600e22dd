package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
)

// caseOutbox is the outbox table of most cases.
const caseOutbox = `CREATE TABLE outbox (
  id bigserial PRIMARY KEY, event_id uuid NOT NULL UNIQUE,
  aggregate_id text NOT NULL, aggregate_seq bigint NOT NULL,
  event_type text NOT NULL, payload jsonb NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz,
  UNIQUE (aggregate_id, aggregate_seq))`

// caseOutboxNew makes a case with an outbox table.
func caseOutboxNew(t *testing.T, table, schema string) *caseRun {
	t.Helper()
	c := caseNew(t)
	c.pg.Exec(schema)
	return c.set(caseMap{"outbox": []caseMap{{"table": table}}})
}

// insertEvent writes one event; its type is the connector's name, so that its topic is
// the case's own.
func (c *caseRun) insertEvent(aggregate string, seq int) string {
	return fmt.Sprintf("INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload) VALUES (gen_random_uuid(), '%s', %d, '%s', '{\"n\":%d}');",
		aggregate, seq, c.name, seq)
}

// events gives the topic of the events that insertEvent wrote.
func (c *caseRun) eventTopic() string { return "outbox.event." + c.name }

// expectEvent checks a record, all headers but the position among it.
func (c *caseRun) expectEvent(r cdctest.Record, partition int32, key, value string, headers map[string]string) {
	c.t.Helper()
	if r.Partition != partition || string(r.Key) != key || string(r.Value) != value {
		c.t.Errorf("partition %d, key %s, value %s; want %d, %s, %s", r.Partition, r.Key, r.Value, partition, key, value)
	}
	if _, err := r.Position(); err != nil {
		c.t.Errorf("header position: %v", err)
	}
	got := maps.Clone(r.Headers)
	delete(got, "position")
	if !maps.Equal(got, headers) {
		c.t.Errorf("headers %v, want %v", got, headers)
	}
}

// expectOnly checks that a topic has one record and gives it.
func (c *caseRun) expectOnly(log *cdctest.Log, topic string) cdctest.Record {
	c.t.Helper()
	records := c.topic(log, topic)
	if len(records) != 1 {
		c.t.Fatalf("%d records in %s, want 1", len(records), topic)
	}
	return records[0]
}

// expectNoTopic checks that a topic does not even exist.
func (c *caseRun) expectNoTopic(log *cdctest.Log, topic string) {
	c.t.Helper()
	if _, exists := log.Partitions[topic]; exists {
		c.t.Errorf("there is a topic %s", topic)
	}
}

// A JSON converter would quote the payload once more, or take the id from the bigserial.
func TestAnOutboxRowIsExactlyThisRecord(t *testing.T) {
	c := caseOutboxNew(t, "public.outbox", caseOutbox)
	c.start()
	c.pg.Exec(`INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload, created_at)
		VALUES ('3fa85f64-5717-4562-b3fc-2c963f66afa6','order-8891',7,'payment.charged',
			'{"order_id":"order-8891","amount_cents":12800,"currency":"CNY"}','2026-10-19 09:31:02.114+00')`)
	log := c.settled()
	c.expectEvent(c.expectOnly(log, "outbox.event.payment.charged"), 5, "order-8891",
		`{"currency": "CNY", "order_id": "order-8891", "amount_cents": 12800}`, map[string]string{
			"id": "3fa85f64-5717-4562-b3fc-2c963f66afa6", "type": "payment.charged", "aggregate_id": "order-8891",
			"aggregate_seq": "7", "occurred_at": "2026-10-19T09:31:02.114Z"})
	c.expectNoTopic(log, c.name+".public.outbox")
	c.quiet()
}

// Without an aggregate there is no natural key, and a null key would scatter an event's
// copies.
func TestAnOutboxWithoutAnAggregateIsKeyedByTheEvent(t *testing.T) {
	c := caseOutboxNew(t, "public.outbox", `CREATE TABLE outbox (id uuid PRIMARY KEY, event_type text, payload jsonb, created_at timestamptz, status text DEFAULT 'pending')`)
	c.start()
	c.pg.Exec(`INSERT INTO outbox (id, event_type, payload) VALUES ('3fa85f64-5717-4562-b3fc-2c963f66afa6', 'order.created', '{}')`)
	c.pg.Exec(`UPDATE outbox SET status='processing'`)
	c.pg.Exec(`UPDATE outbox SET status='processed'`)
	const id = "3fa85f64-5717-4562-b3fc-2c963f66afa6"
	c.expectEvent(c.expectOnly(c.settled(), "outbox.event.order.created"), 1, id, `{}`, map[string]string{"id": id, "type": "order.created"})
	c.quiet()
}

// Parsing and printing JSON would drop the doubled member and the .0.
func TestAPayloadOfTypeJSONIsUntouchedAndTheAggregateTypeRoutes(t *testing.T) {
	c := caseOutboxNew(t, "public.domain_event_outbox", `CREATE TABLE domain_event_outbox (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, event_id varchar(64) NOT NULL UNIQUE,
  aggregate_type varchar(64) NOT NULL, aggregate_id varchar(64) NOT NULL, event_type varchar(64) NOT NULL,
  payload json NOT NULL, status smallint NOT NULL DEFAULT 0, retry_count int NOT NULL DEFAULT 0,
  created_at timestamptz(3) NOT NULL DEFAULT now())`)
	c.start()
	c.pg.Exec(`INSERT INTO domain_event_outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES ('e-1','Order','42','OrderPaid', E'{"amountFen": 12800,\n  "amountFen": 12800.0}')`)
	occurred := c.pg.Value(`SELECT replace((created_at AT TIME ZONE 'UTC')::text, ' ', 'T') || 'Z' FROM domain_event_outbox`)
	c.expectEvent(c.expectOnly(c.settled(), "outbox.event.Order"), 4, "42", "{\"amountFen\": 12800,\n  \"amountFen\": 12800.0}", map[string]string{
		"id": "e-1", "type": "OrderPaid", "aggregate_type": "Order", "aggregate_id": "42", "occurred_at": occurred})
}

// Reading the table instead of the WAL would miss event 2.
func TestOutboxRowsCountAsTheirTransactionEnds(t *testing.T) {
	c := caseOutboxNew(t, "public.outbox", caseOutbox)
	c.start()
	conn := c.session()
	c.exec(conn, "BEGIN;"+c.insertEvent("a", 1)+"ROLLBACK")
	c.exec(conn, "BEGIN;"+c.insertEvent("a", 2)+"DELETE FROM outbox; COMMIT")
	c.exec(conn, "BEGIN; SAVEPOINT s;"+c.insertEvent("a", 3)+"ROLLBACK TO s;"+c.insertEvent("a", 4)+"COMMIT")
	log := c.settled()
	var got []string
	for _, r := range c.topic(log, c.eventTopic()) {
		got = append(got, fmt.Sprintf("%s %s %s", r.Key, r.Headers["aggregate_seq"], r.Value))
	}
	if want := []string{`a 2 {"n": 2}`, `a 4 {"n": 4}`}; !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
}

// caseKafkaOwn makes a case with a Kafka of its own, whose broker may be restarted.
func caseKafkaOwn(t *testing.T) *caseRun {
	t.Helper()
	t.Parallel()
	return caseOn(t, harness.Postgres(t), harness.Kafka(t, harness.OwnKafka()))
}

// Redelivery from an older point would put event 1 behind event 2, and since their ids
// differ no consumer that removes duplicates by id would notice.
func TestAStaleEventNeverFollowsANewerOne(t *testing.T) {
	const aggregates, writers = 100, 10
	c := caseKafkaOwn(t).set(caseMap{"outbox": []caseMap{{"table": "public.outbox"}}, "topics": caseMap{"partitions": 6}})
	c.pg.Exec(caseOutbox)
	c.start()
	kill := func() {
		c.proc.Kill()
		c.start()
	}
	takeover := func() {
		old := c.proc
		next := c.launch()
		next.WaitLog(harness.DefaultTimeout, harness.Message("standing by"))
		old.Kill()
		c.streaming()
	}
	restartBroker := func() {
		if c.kafka.IsReal() {
			// Stopped in a controlled way: a single broker that is killed between a commit's
			// decision and its markers has been seen to lose the markers for good, and this is
			// about the connector.
			c.kafka.Restart(0)
			// The same goes for an instance that is killed in the transaction that was open
			// while the broker was gone.
			end := c.lsn("SELECT pg_current_wal_lsn()")
			harness.WaitFor(c.t, "the outbox to be delivered again", 3*harness.DefaultTimeout, func() (bool, error) { return c.confirmed() > end, nil })
			return
		}
		c.kafka.Kill(0)
		c.kafka.Restart(0)
	}
	seq := 0
	for _, disturb := range []func(){kill, kill, restartBroker, kill, takeover, kill, kill} {
		first, last := seq+1, min(seq+15, 100)
		seq = last
		before := c.pg.Value("SELECT count(*) FROM outbox")
		group, ctx := errgroup.WithContext(t.Context())
		for w := range writers {
			group.Go(func() error { return c.writeEvents(ctx, w, aggregates/writers, first, last) })
		}
		// In the middle of it: some are there, more are to come.
		c.pg.WaitValue("t", "SELECT count(*) > $1::int8 + 100 FROM outbox", before)
		if rest := c.pg.Value("SELECT count(*) FROM outbox"); rest == strconv.Itoa(aggregates*last) {
			t.Errorf("everything was written before the fault came")
		}
		disturb()
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	if seq != 100 {
		t.Fatalf("%d events per aggregate, want 100", seq)
	}
	log := c.settled()
	lastSeq, where, total := map[string]int{}, map[string]int32{}, 0
	records := c.topic(log, c.eventTopic())
	slices.SortStableFunc(records, func(a, b cdctest.Record) int { return int(a.Offset - b.Offset) })
	for _, r := range records {
		key := string(r.Key)
		n, err := strconv.Atoi(r.Headers["aggregate_seq"])
		if err != nil || n != lastSeq[key]+1 {
			t.Fatalf("%s: aggregate_seq %s of %s follows %d", r.Where(), r.Headers["aggregate_seq"], key, lastSeq[key])
		}
		lastSeq[key] = n
		if p, seen := where[key]; seen && p != r.Partition {
			t.Fatalf("key %s is in the partitions %d and %d", key, p, r.Partition)
		}
		where[key] = r.Partition
		total++
	}
	if total != aggregates*100 || len(lastSeq) != aggregates {
		t.Errorf("%d events of %d aggregates, want %d of %d", total, len(lastSeq), aggregates*100, aggregates)
	}
	c.check(cdctest.Partition(log))
}

// writeEvents writes events first to last of a writer's aggregates, one transaction each,
// at a pace that leaves time for a fault.
func (c *caseRun) writeEvents(ctx context.Context, writer, aggregates, first, last int) error {
	conn, err := pgx.Connect(ctx, c.pg.DSN())
	if err != nil {
		return err
	}
	sql := fmt.Sprintf(`DO $$ BEGIN FOR s IN %d..%d LOOP FOR a IN 1..%d LOOP
		INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload)
			VALUES (gen_random_uuid(), 'agg-%d-' || a, s, '%s', '{}');
		COMMIT;
		PERFORM pg_sleep(0.002);
	END LOOP; END LOOP; END $$`, first, last, aggregates, writer, c.name)
	_, err = conn.PgConn().Exec(ctx, sql).ReadAll()
	return errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
}

// Marking and cleaning are an outbox's normal life.
func TestUpdatesDeletesAndTruncateOfAnOutboxAreNotEvents(t *testing.T) {
	mark := []string{"UPDATE outbox SET published_at = now()", "DELETE FROM outbox WHERE aggregate_seq = 1", "TRUNCATE outbox"}
	prepare := func(c *caseRun) {
		c.start()
		c.pg.Exec(c.insertEvent("a", 1) + c.insertEvent("a", 2) + c.insertEvent("a", 3))
		c.fence()
		for _, sql := range mark {
			c.pg.Exec(sql)
		}
		log := c.settled()
		if n := len(c.topic(log, c.eventTopic())); n != 3 {
			c.t.Errorf("%d events, want 3", n)
		}
		c.expectNoTopic(log, c.name+".public.outbox")
	}
	admin := caseMap{"admin": caseMap{"listen": "127.0.0.1:0"}}
	t.Run("a managed publication does not ask for them", func(t *testing.T) {
		c := caseOutboxNew(t, "public.outbox", caseOutbox).set(admin)
		prepare(c)
		got := c.pg.Query("SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname = $1", "walrelay_"+c.name+"_insert")
		if len(got) != 1 || !slices.Equal(got[0], []string{"t", "f", "f", "f"}) {
			t.Errorf("the second publication publishes %v, want inserts alone", got)
		}
		in := c.pg.Query("SELECT pubname FROM pg_publication_tables WHERE tablename = 'outbox'")
		if len(in) != 1 || in[0][0] != "walrelay_"+c.name+"_insert" {
			t.Errorf("the outbox table is in the publications %v", in)
		}
		if n := c.metric("walrelay_records_total", `outcome="excluded"`, "outbox"); n != 0 {
			t.Errorf("%v changes of the outbox table were sent", n)
		}
	})
	t.Run("of an existing one they are excluded and counted", func(t *testing.T) {
		c := caseOutboxNew(t, "public.outbox", caseOutbox).set(admin)
		c.set(caseMap{"source": caseMap{"publication-mode": "existing", "publication": "walrelay_case"}})
		c.pg.Exec("CREATE PUBLICATION walrelay_case FOR TABLE outbox")
		prepare(c)
		// 3 updates, 1 delete, 1 truncate
		harness.WaitFor(t, "5 changes to count as excluded", harness.DefaultTimeout, func() (bool, error) {
			return c.metric("walrelay_records_total", `outcome="excluded"`, "outbox") == 5, nil
		})
	})
}

// Ids or times made at the time of delivery would differ from one delivery to the next.
func TestAnEventDeliveredAgainAfterACrashIsTheSame(t *testing.T) {
	c := caseOutboxNew(t, "public.outbox", caseOutbox).set(caseMap{"batch": caseMap{"max-records": 10}})
	c.start()
	c.stop()
	var sql strings.Builder
	for seq := 1; seq <= 100; seq++ {
		sql.WriteString(c.insertEvent("a", seq))
	}
	c.exec(c.session(), "BEGIN;"+sql.String()+"COMMIT")
	// The instance dies when the records of a Kafka transaction are in the topics and the
	// transaction is open. One without records, which only moves the position, passes that
	// step too, so it may take more than one.
	twice := func(log *cdctest.Log) (pairs [][]cdctest.Record) {
		byID := map[string][]cdctest.Record{}
		for _, r := range c.topic(log, c.eventTopic()) {
			byID[r.Headers["id"]] = append(byID[r.Headers["id"]], r)
		}
		for _, copies := range byID {
			if len(copies) > 1 {
				pairs = append(pairs, copies)
			}
		}
		return pairs
	}
	for attempt := 1; len(twice(c.uncommitted())) == 0; attempt++ {
		if attempt > 8 {
			t.Fatal("no event was delivered twice")
		}
		c.launch(killpoint.Env + "=" + killpoint.Spec(killpoint.RecordsAcked, 2))
		c.killed()
	}
	c.start()
	committed := c.topic(c.settled(), c.eventTopic())
	if len(committed) != 100 {
		t.Errorf("a read_committed consumer sees %d events, want 100", len(committed))
	}
	ids := map[string]bool{}
	for _, r := range committed {
		ids[r.Headers["id"]] = true
	}
	if len(ids) != 100 {
		t.Errorf("%d different events, want 100", len(ids))
	}
	for _, copies := range twice(c.uncommitted()) {
		for _, r := range copies[1:] {
			if string(r.Key) != string(copies[0].Key) || string(r.Value) != string(copies[0].Value) || !maps.Equal(r.Headers, copies[0].Headers) {
				t.Errorf("copies of one event differ: %s %s %v and %s %s %v", copies[0].Key, copies[0].Value, copies[0].Headers, r.Key, r.Value, r.Headers)
			}
		}
	}
}

// uncommitted reads what a read_uncommitted consumer sees.
func (c *caseRun) uncommitted() *cdctest.Log {
	c.t.Helper()
	log, err := cdctest.ReadUncommitted(c.t.Context(), `outbox\.event\.`+c.name, kgo.SeedBrokers(c.kafka.Brokers()...))
	if err != nil {
		c.t.Fatal(err)
	}
	return log
}

// Topic names allow letters, digits, ".", "_" and "-" alone: a broker's error would kill
// the whole batch, and replacing characters would merge topics.
func TestAnEventThatCannotBeRouted(t *testing.T) {
	insert := func(c *caseRun) {
		c.exec(c.session(), fmt.Sprintf(`BEGIN;
			INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload) VALUES
			('00000000-0000-0000-0000-000000000001', 'k1', 1, 'a-%[1]s', '{}'),
			('00000000-0000-0000-0000-000000000002', 'k2', 2, 'bad type/ü', '{"x":1}'),
			('00000000-0000-0000-0000-000000000003', 'k3', 3, 'b-%[1]s', '{}');
			COMMIT`, c.name))
	}
	configured := func(t *testing.T) *caseRun {
		c := caseOutboxNew(t, "public.outbox", caseOutbox)
		return c.set(caseMap{"outbox": []caseMap{{"table": "public.outbox", "topic": "ev.{event_type}"}}, "admin": caseMap{"listen": "127.0.0.1:0"}})
	}
	t.Run("goes to the dead-letter topic in the same Kafka transaction", func(t *testing.T) {
		c := configured(t)
		c.start()
		insert(c)
		log := c.settled()
		a, b := c.expectOnly(log, "ev.a-"+c.name), c.expectOnly(log, "ev.b-"+c.name)
		dead := c.expectOnly(log, c.name+".dead-letter")
		if string(a.Key) != "k1" || string(b.Key) != "k3" {
			t.Errorf("keys %s and %s", a.Key, b.Key)
		}
		var letter struct {
			Reason, Error, Table, Position string
			Row                            map[string]*string
		}
		if err := json.Unmarshal(dead.Value, &letter); err != nil {
			t.Fatalf("%v: %s", err, dead.Value)
		}
		if string(dead.Key) != "k2" || dead.Headers["reason"] != "route" || letter.Reason != "route" {
			t.Errorf("dead letter: key %s, headers %v, reason %s", dead.Key, dead.Headers, letter.Reason)
		}
		if dead.Headers["source-topic"] == "" || !strings.Contains(letter.Error, "ev.bad type/ü") {
			t.Errorf("dead letter: source-topic %q, error %q", dead.Headers["source-topic"], letter.Error)
		}
		if letter.Table != "public.outbox" || letter.Position != dead.Headers["position"] {
			t.Errorf("dead letter: table %s, position %s and %s", letter.Table, letter.Position, dead.Headers["position"])
		}
		if p := letter.Row["payload"]; p == nil || *p != `{"x": 1}` || letter.Row["published_at"] != nil || len(letter.Row) != 8 {
			t.Errorf("dead letter: row %s", dead.Value)
		}
		if dead.ProducerID != a.ProducerID || dead.ProducerEpoch != a.ProducerEpoch || dead.ProducerEpoch != b.ProducerEpoch {
			t.Errorf("dead letter and events were written by the producers %d/%d, %d/%d, %d/%d",
				dead.ProducerID, dead.ProducerEpoch, a.ProducerID, a.ProducerEpoch, b.ProducerID, b.ProducerEpoch)
		}
		if n := c.metric("walrelay_records_total", `outcome="dead_lettered"`, `topic="public.outbox"`); n != 1 {
			t.Errorf("%v changes of the table count as dead-lettered, want 1", n)
		}
	})
	t.Run("stops the connector where that is configured", func(t *testing.T) {
		c := configured(t).set(caseMap{"dead-letter": caseMap{"on-error": "stop"}})
		c.start()
		insert(c)
		if code := c.proc.Wait(harness.DefaultTimeout); code != 1 {
			t.Errorf("exit code %d, want 1", code)
		}
		if !strings.Contains(c.proc.Stderr(), "ev.bad type/ü") {
			t.Error("the last words do not name the topic")
		}
		for _, topic := range []string{"ev.a-" + c.name, "ev.b-" + c.name, c.name + ".dead-letter"} {
			if n := len(c.topic(c.log(), topic)); n != 0 {
				t.Errorf("%d records in %s, want none", n, topic)
			}
		}
	})
}

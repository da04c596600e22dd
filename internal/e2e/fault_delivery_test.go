package e2e

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

const faultTable = `CREATE TABLE t (id int PRIMARY KEY)`

func TestACrashAfterTheKafkaCommitAndBeforeTheConfirmRepeatsNothing(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	proxy := harness.StartProxy(t, b.pg.Server.Addr())
	b.set("source.dsn", b.pg.ProxyDSN(proxy.Addr()))
	p := b.stream()
	proxy.Hold(harness.ToServer) // status updates among the rest
	before := b.lsn(`SELECT pg_current_wal_insert_lsn()`)
	b.pg.Exec(`INSERT INTO t SELECT generate_series(1, 100)`)
	b.wantIDs("t", faultRange(1, 100))
	p.Kill()
	if at := b.confirmed(); at > before {
		t.Fatalf("confirmed %s is past %s: the status updates were not held back", at, before)
	}
	proxy.Cut()
	b.set("source.dsn", b.pg.DSN())
	p = b.stream()
	b.pg.Exec(`INSERT INTO t VALUES (101)`)
	b.wantIDs("t", faultRange(1, 101))
	b.stop(p)
}

func TestNothingIsConfirmedBeforeItIsCommitted(t *testing.T) {
	t.Parallel()
	b, w := newWireBed(t, faultTable)
	p := b.stream()
	b.holdCommit(w, 1, 10)
	samples := 0
	for until := time.Now().Add(4 * time.Second); time.Now().Before(until); samples++ {
		b.durable(b.confirmed())
		if m := b.metrics(p); m["walrelay_confirmed_position"] > m["walrelay_checkpoint_position"] {
			t.Fatalf("metrics: confirmed %f is past the checkpoint %f", m["walrelay_confirmed_position"], m["walrelay_checkpoint_position"])
		}
	}
	if samples < 10 || w.heldNow() == 0 {
		t.Fatalf("%d samples, %d requests held at the end", samples, w.heldNow())
	}
	p.Kill()
	w.discard()
	p = b.stream()
	b.wantIDs("t", faultRange(1, 10))
	b.stop(p)
}

func TestALostEndTxnReplyOrRequestDeliversOnce(t *testing.T) {
	t.Parallel()
	for _, fault := range []struct {
		name string
		act  faultAct
	}{{"reply", faultDropReply}, {"request", faultDropRequest}} {
		t.Run("the "+fault.name+" is lost once", func(t *testing.T) {
			b, w := newWireBed(t, faultTable)
			p := b.stream()
			w.on(faultKeyEndTxn, func(n int) faultAct {
				if n == 1 {
					return fault.act
				}
				return faultPass
			})
			b.pg.Exec(`INSERT INTO t SELECT generate_series(1, 10)`)
			b.wantIDs("t", faultRange(1, 10))
			harness.WaitFor(t, "the fault", faultLong, func() (bool, error) { return w.judged(faultKeyEndTxn) > 0, nil })
			b.pg.Exec(`INSERT INTO t VALUES (11)`)
			b.wantIDs("t", faultRange(1, 11))
			b.stop(p)
		})
		t.Run("the "+fault.name+" is lost with every repeat", func(t *testing.T) {
			b, w := newWireBed(t, faultTable)
			p := b.stream()
			fences := w.count(faultKeyInitPID)
			w.on(faultKeyEndTxn, func(int) faultAct { return fault.act })
			b.pg.Exec(`INSERT INTO t SELECT generate_series(1, 10)`)
			line := p.WaitLog(2*faultLong, faultMessage("starting over from the checkpoint"))
			t.Logf("gave up after %d tries: %s", w.judged(faultKeyEndTxn), line.Raw)
			w.off(faultKeyEndTxn)
			p.WaitLog(faultLong, faultMessage("recovered"))
			b.wantIDs("t", faultRange(1, 10))
			if w.count(faultKeyInitPID) <= fences {
				t.Error("the transactional id was not initialised again")
			}
			if n := faultSum(b.metrics(p), "walrelay_restarts_total", ""); n == 0 {
				t.Error("walrelay_restarts_total did not grow")
			}
			if n := faultSum(b.metrics(p), "walrelay_kafka_connects_total", ""); n == 0 {
				t.Error("there are no metrics of the Kafka clients")
			}
			b.pg.Exec(`INSERT INTO t VALUES (11)`)
			b.wantIDs("t", faultRange(1, 11))
			b.stop(p)
		})
	}
}

func TestAZombieIsFencedAndConfirmsNothing(t *testing.T) {
	t.Parallel()
	b, w := newWireBed(t, faultTable, harness.Setting("wal_sender_timeout", "3s"))
	a := b.stream()
	load := b.load(5 * time.Millisecond)
	harness.WaitFor(t, "some rows", faultLong, func() (bool, error) { return load.written() > 50, nil })
	w.on(faultKeyEndTxn, func(n int) faultAct {
		if n == 1 {
			return faultHold
		}
		return faultPass
	})
	harness.WaitFor(t, "EndTxn to be held", faultLong, func() (bool, error) { return w.heldNow() == 1, nil })
	a.Pause()
	if !b.openTransaction(b.topic("t")) {
		t.Fatal("the paused instance has no open transaction")
	}
	other := b.start()
	other.WaitLog(faultLong, harness.Message("standing by"))
	faultStreaming(other)
	first := load.written()
	harness.WaitFor(t, "the new instance to go on", faultLong, func() (bool, error) { return load.written() > first+50, nil })
	w.release() // what the broker gets now is the zombie's EndTxn, after it was fenced
	seen := len(a.Lines())
	a.Resume()
	a.WaitLogAfter(seen, faultLong, harness.Message("starting over"))
	a.WaitLogAfter(seen, faultLong, harness.Message("standing by"))
	last, err := load.end()
	if err != nil {
		t.Fatal(err)
	}
	b.wantIDs("t", faultRange(1, last))
	b.durable(b.confirmed())
	b.stop(a)
	b.stop(other)
}

func TestAStandbyDoesNotDisturbTheHolder(t *testing.T) {
	t.Parallel()
	b, w := newWireBed(t, faultTable)
	a := b.stream()
	load := b.load(2 * time.Millisecond)
	fences := w.count(faultKeyInitPID)
	other := b.start()
	other.WaitLog(faultLong, harness.Message("standing by"))
	b.phase(other, "standby")
	if code, body := b.get(other, "/readyz"); code != 503 {
		t.Errorf("a standby's /readyz: %d %s", code, body)
	}
	first := load.written()
	for until := time.Now().Add(5 * time.Second); time.Now().Before(until); {
		harness.WaitFor(t, "rows", faultLong, func() (bool, error) { return load.written() > first+50, nil })
		first = load.written()
	}
	if n := w.count(faultKeyInitPID); n != fences {
		t.Errorf("%d InitProducerId beside a healthy holder", n-fences)
	}
	if n := faultSum(b.metrics(a), "walrelay_restarts_total", ""); n != 0 {
		t.Errorf("the holder restarted %f times", n)
	}
	b.stop(a)
	other.WaitLog(5*time.Second, faultMessage("streaming"))
	last, err := load.end()
	if err != nil {
		t.Fatal(err)
	}
	b.wantIDs("t", faultRange(1, last))
	b.stop(other)
}

func TestAnOpenTransactionIsAbortedBeforeTheCheckpointIsRead(t *testing.T) {
	t.Parallel()
	b, w := newWireBed(t, faultTable)
	a := b.stream()
	b.holdCommit(w, 1, 50)
	a.Kill()
	w.discard()
	if n := len(b.kafka.Consume(t, b.topic("t"), kgo.ReadUncommitted())); n != 50 {
		t.Fatalf("the open transaction has %d records, want 50", n)
	}
	if !b.openTransaction(b.checkpointTopic()) || len(b.kafka.Committed(t, b.topic("t"))) != 0 {
		t.Fatal("no transaction is open with a checkpoint in it")
	}
	p := b.stream()
	b.wantIDs("t", faultRange(1, 50))
	harness.WaitFor(t, "nothing above the last stable offset", faultLong,
		func() (bool, error) { return !b.openTransaction(b.checkpointTopic()), nil })
	b.stop(p)
}

func TestATransactionThatACrashLeftOpenHoldsConsumersBackOnlyUntilTheNextStart(t *testing.T) {
	t.Parallel()
	b, w := newWireBed(t, faultTable)
	b.set("topics.partitions", 1)
	a := b.stream()
	b.holdCommit(w, 1, 1)
	a.Kill()
	w.discard()
	other := b.kafka.Client(t)
	foreign := []byte(`{"op":"c","after":{"id":2}}`)
	if err := other.ProduceSync(t.Context(), &kgo.Record{Topic: b.topic("t"), Value: foreign}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	if n := len(b.kafka.Committed(t, b.topic("t"))); n != 0 || !b.openTransaction(b.topic("t")) {
		t.Fatalf("%d records are visible behind an open transaction", n)
	}
	began := time.Now()
	p := b.stream()
	b.wantIDs("t", []int{1, 2})
	if took := time.Since(began); took > 40*time.Second {
		t.Errorf("released after %s: that was the transaction's timeout and not the fence", took)
	}
	b.stop(p)
}

func TestNoTransactionStaysOpenWhilePostgresIsSilentInTheMiddleOfALargeOne(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	proxy := harness.StartProxy(t, b.pg.Server.Addr())
	b.set("source.dsn", b.pg.ProxyDSN(proxy.Addr()))
	b.set("topics.partitions", 1)
	b.set("batch.max-records", 500)
	p := b.stream()
	start := proxy.Bytes(harness.ToClient)
	const rows = 200000
	b.pg.Exec(fmt.Sprintf(`INSERT INTO t SELECT generate_series(1, %d)`, rows))
	harness.WaitFor(t, "the stream to be in the middle of the transaction", faultLong,
		func() (bool, error) { return proxy.Bytes(harness.ToClient)-start > 1<<20, nil })
	proxy.Hold(harness.ToClient)
	// What has arrived is delivered; then nothing may be open.
	stable := 0
	last := -1
	harness.WaitFor(t, "the delivery of what has arrived", faultLong, func() (bool, error) {
		n := len(b.kafka.Committed(t, b.topic("t")))
		if n != last || n == 0 {
			last, stable = n, 0
			return false, nil
		}
		stable++
		return stable == 20, nil
	})
	if last >= rows {
		t.Fatal("all rows had arrived before the silence")
	}
	if b.openTransaction(b.topic("t")) || b.openTransaction(b.checkpointTopic()) {
		t.Errorf("a Kafka transaction is open while PostgreSQL is silent, after %d of %d rows", last, rows)
	}
	proxy.Release()
	b.wantIDs("t", faultRange(1, rows))
	b.stop(p)
}

func TestRetriesDoNotReorder(t *testing.T) {
	t.Parallel()
	b, w := newWireBed(t, `CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 0)`)
	b.set("topics.partitions", 1)
	p := b.stream()
	w.on(faultKeyProduce, func(n int) faultAct {
		if n%3 == 0 {
			return faultDropReply
		}
		return faultPass
	})
	var notLeader *kfake.FaultHandle
	if fake := b.kafka.Fake(); fake != nil {
		n := 0
		notLeader = fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: b.topic("t"), Err: kerr.NotLeaderForPartition, Count: -1,
			When: func(kmsg.Request) bool { n++; return n%4 == 0 }})
	}
	// In parts, since a busy machine delivers all of them in one request.
	var records []*kgo.Record
	for part := 1; part <= 10; part++ {
		b.pg.Exec(`DO $$ BEGIN FOR i IN 1..100 LOOP UPDATE t SET n = n + 1; COMMIT; END LOOP; END $$`)
		records = b.kafka.WaitCommitted(t, b.topic("t"), 100*part)
	}
	for i, r := range records {
		if got := int(faultDecode(t, r).After["n"].(float64)); got != i+1 {
			t.Fatalf("offset %d has n %d, want %d", r.Offset, got, i+1)
		}
	}
	if len(records) != 1000 {
		t.Errorf("%d records", len(records))
	}
	if w.judged(faultKeyProduce) < 3 {
		t.Error("no reply was dropped")
	}
	if notLeader != nil && notLeader.Hits() == 0 {
		t.Error("no produce request was refused")
	}
	w.off(faultKeyProduce)
	b.stop(p)
}

func TestTooFewInSyncReplicasAreWaitedOut(t *testing.T) {
	t.Parallel()
	nodes := 1
	if harness.KafkaIsReal() {
		nodes = 3
	}
	k := harness.Kafka(t, harness.Nodes(nodes))
	b := newFaultBed(t, harness.Postgres(t), k)
	b.pg.Exec(faultTable)
	if nodes == 3 {
		b.set("topics.replication-factor", 3)
		b.set("topics.config", map[string]string{"min.insync.replicas": "2"})
	}
	p := b.stream()
	sender := b.walsender()
	b.pg.Exec(`INSERT INTO t SELECT generate_series(1, 10)`)
	b.wantIDs("t", faultRange(1, 10))
	last := 10
	var refused *kfake.FaultHandle
	if nodes == 3 {
		k.Kill(2)
		// The controller takes its session timeout to notice; until then, and after, rows flow.
		harness.WaitFor(t, "walrelay_isr_short_partitions to rise", faultLong, func() (bool, error) {
			last++
			b.pg.Exec(`INSERT INTO t VALUES ($1)`, last)
			b.wantIDs("t", faultRange(1, last))
			return b.metrics(p)["walrelay_isr_short_partitions"] > 0, nil
		})
		k.Kill(1)
	} else { // kfake keeps no in-sync sets; the refusal is what a leader alone would answer
		refused = k.Fake().Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.NotEnoughReplicas, Count: -1})
	}
	b.pg.Exec(fmt.Sprintf(`INSERT INTO t SELECT generate_series(%d, %d)`, last+1, last+10))
	end := b.lsn(`SELECT pg_current_wal_insert_lsn()`)
	if refused != nil {
		ctx, cancel := context.WithTimeout(t.Context(), faultLong)
		defer cancel()
		if err := refused.Wait(ctx, 20); err != nil {
			t.Fatalf("no produce request was refused: %v", err)
		}
	}
	for until := time.Now().Add(8 * time.Second); time.Now().Before(until); {
		if at := b.confirmed(); at >= end {
			t.Fatalf("confirmed %s although ids up to %s are not in Kafka", at, end)
		}
	}
	if nodes == 1 {
		refused.Remove()
		if now := b.walsender(); now != sender {
			t.Errorf("walsender %s, it was %s", now, sender)
		}
	} else {
		k.Restart(1)
		k.Restart(2)
	}
	b.wantIDs("t", faultRange(1, last+10))
	b.stop(p)
}

func TestAGrownTopicIsSaidOnceAndKept(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE t (id int PRIMARY KEY, n int)`)
	b.set("topics.partitions", 4)
	p := b.stream()
	b.pg.Exec(`INSERT INTO t VALUES (1, 1), (2, 1), (-1, 1)`)
	want := func(records []*kgo.Record, partitions map[int]int32) {
		t.Helper()
		for _, r := range records {
			v := faultDecode(t, r)
			id := int(v.After["id"].(float64))
			if v.Op == map[bool]string{true: "c", false: "u"}[len(records) == 3] && r.Partition != partitions[id] {
				t.Errorf("%s of id %d is in partition %d, want %d", v.Op, id, r.Partition, partitions[id])
			}
		}
	}
	want(b.kafka.WaitCommitted(t, b.topic("t"), 3), map[int]int32{1: 0, 2: 0, -1: 3})
	admin := kadm.NewClient(b.kafka.Client(t))
	if _, err := admin.UpdatePartitions(t.Context(), 8, b.topic("t")); err != nil {
		t.Fatal(err)
	}
	harness.WaitFor(t, "eight partitions, and walrelay to have looked since", faultLong, func() (bool, error) {
		details, err := admin.ListTopics(t.Context(), b.topic("t"))
		return err == nil && len(details[b.topic("t")].Partitions) == 8, nil
	})
	grown := faultMessage("partition count changed: keys move between partitions, and the order of a key's records is broken across the change; order them by the header position")
	// The counts are looked at once a second: an update every now and then meets the new one.
	n := 1
	harness.WaitFor(t, "the warning", faultLong, func() (bool, error) {
		n++
		b.pg.Exec(`UPDATE t SET n = $1`, n)
		b.kafka.WaitCommitted(t, b.topic("t"), 3*n)
		return slices.ContainsFunc(p.Lines(), func(l harness.Line) bool { return l.Matches(grown) }), nil
	})
	line := p.WaitLog(faultLong, grown)
	if line.Level() != "warn" || line.Field("topic") != b.topic("t") || line.Field("partitions_before") != "4" || line.Field("partitions") != "8" {
		t.Errorf("the warning: %s", line.Raw)
	}
	n++
	b.pg.Exec(`UPDATE t SET n = $1`, n)
	var newest []*kgo.Record
	for _, r := range b.kafka.WaitCommitted(t, b.topic("t"), 3*n) {
		if int(faultDecode(t, r).After["n"].(float64)) == n {
			newest = append(newest, r)
		}
	}
	moved := map[int]int32{1: 4, 2: 0, -1: 3}
	for _, r := range newest {
		id := int(faultDecode(t, r).After["id"].(float64))
		if r.Partition != moved[id] {
			t.Errorf("id %d is in partition %d of 8, want %d", id, r.Partition, moved[id])
		}
	}
	b.stop(p)
	p = b.stream()
	b.pg.Exec(`UPDATE t SET n = n + 1`)
	b.kafka.WaitCommitted(t, b.topic("t"), 3*n+3)
	b.stop(p)
	if strings.Contains(p.Stderr(), "partition count changed") {
		t.Error("the restart warns again")
	}
}

func TestKeysLandInThePartitionsOfTheJavaClient(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE t (id bigint PRIMARY KEY);
		CREATE TABLE outbox (id bigserial PRIMARY KEY, event_id uuid DEFAULT gen_random_uuid(), aggregate_id text, event_type text, payload jsonb)`)
	events := b.name + ".events"
	b.set("outbox", []any{map[string]any{"table": "public.outbox", "topic": events}})
	b.set("topics.partitions", 6)
	p := b.stream()
	b.pg.Exec(`INSERT INTO t VALUES (1),(2),(3),(4),(5),(6),(-1),(9223372036854775807)`)
	b.pg.Exec(`INSERT INTO outbox (aggregate_id, event_type, payload) VALUES ('order-8891','x','{}'),('order-1','x','{}'),('order-2','x','{}'),('é','x','{}')`)
	want := map[string]int32{`{"id":1}`: 0, `{"id":2}`: 4, `{"id":3}`: 3, `{"id":4}`: 2, `{"id":5}`: 5, `{"id":6}`: 1, `{"id":-1}`: 1, `{"id":9223372036854775807}`: 1,
		"order-8891": 5, "order-1": 4, "order-2": 3, "é": 3}
	for _, r := range append(b.kafka.WaitCommitted(t, b.topic("t"), 8), b.kafka.WaitCommitted(t, events, 4)...) {
		partition, known := want[string(r.Key)]
		if !known || partition != r.Partition {
			t.Errorf("key %s is in partition %d, want %d (a known key: %t)", r.Key, r.Partition, partition, known)
		}
		delete(want, string(r.Key))
	}
	if len(want) > 0 {
		t.Errorf("missing: %v", want)
	}
	b.stop(p)
}

func TestOneKeyHasOneByteSequence(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE pkr (b int, a int, v text, PRIMARY KEY (a, b)); INSERT INTO pkr VALUES (1, 2, 's')`)
	p := b.stream()
	for _, sql := range []string{`UPDATE pkr SET v='t'`, `ALTER TABLE pkr ADD c int`, `UPDATE pkr SET v='u'`, `ALTER TABLE pkr REPLICA IDENTITY FULL`,
		`UPDATE pkr SET v='w'`, `DELETE FROM pkr`, `INSERT INTO pkr VALUES (1,2,'n')`} {
		b.pg.Exec(sql)
	}
	records := b.kafka.WaitCommitted(t, b.topic("pkr"), 6)
	ops := ""
	for _, r := range records {
		op := "tombstone"
		if r.Value != nil {
			op = faultDecode(t, r).Op
		}
		ops += op + " "
		if !bytes.Equal(r.Key, records[0].Key) || r.Partition != records[0].Partition {
			t.Errorf("%s has key %s in partition %d, the first has %s in %d", op, r.Key, r.Partition, records[0].Key, records[0].Partition)
		}
	}
	if ops != "u u u d tombstone c " || string(records[0].Key) != `{"b":1,"a":2}` {
		t.Errorf("%s with key %s", ops, records[0].Key)
	}
	b.stop(p)
}

func TestPositionsSortAsText(t *testing.T) {
	t.Parallel()
	var got []string
	for _, p := range []struct {
		lsn string
		seq uint64
	}{{"0/FFFFFFFF", 7}, {"1/0", 0}, {"9/FF000000", 0}, {"A/1", 0}, {"10/0", 12}} {
		lsn, err := checkpoint.ParseLSN(p.lsn)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, string(checkpoint.AppendHeader(nil, lsn, p.seq)))
	}
	want := []string{"00000000FFFFFFFF-0000000007", "0000000100000000-0000000000", "00000009FF000000-0000000000", "0000000A00000001-0000000000", "0000001000000000-0000000012"}
	if !slices.Equal(got, want) || !slices.IsSorted(got) {
		t.Errorf("got %q, want %q", got, want)
	}
}

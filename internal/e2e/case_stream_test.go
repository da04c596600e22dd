package e2e

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

// A resume by "LSN at or below the last one seen" skips 15 rows here, one by "below"
// repeats 5.
func TestRowsOfOneCopyShareOneLSNAndAreDeliveredOnceAcrossAKill(t *testing.T) {
	c := caseNew(t).set(caseMap{"batch": caseMap{"max-records": 5}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.startUntil(2)
	var rows strings.Builder
	for id := 1; id <= 20; id++ {
		fmt.Fprintln(&rows, id)
	}
	conn := c.session()
	if _, err := conn.PgConn().CopyFrom(t.Context(), strings.NewReader(rows.String()), "COPY t FROM STDIN"); err != nil {
		t.Fatal(err)
	}
	c.killed()
	cut := c.checkpoint().Position.Cut
	c.start()
	changes := c.changes()
	c.expectIDs(changes, caseRange(1, 20)...)
	c.oneTransaction(changes)
	if cut.Changes != 5 || cut.CommitLSN.String() != changes[0].Source.CommitLSN {
		t.Errorf("the checkpoint after the first Kafka transaction is cut at %v, the commit LSN is %s", cut, changes[0].Source.CommitLSN)
	}
	for _, r := range changes {
		if r.Op != "c" || *r.Source.LSN != *changes[0].Source.LSN {
			t.Errorf("op %s with source.lsn %s, the first one has %s", r.Op, *r.Source.LSN, *changes[0].Source.LSN)
		}
	}
}

// adjacentAttempts bounds how often a case tries to have two records written one right
// behind the other: the server now and then writes one of its own in between.
const adjacentAttempts = 8

// The row's own LSN equals the stored position, so that a test for "already seen" by LSN
// drops it.
func TestARowWhoseLSNIsTheStoredPositionIsDelivered(t *testing.T) {
	c := caseNew(t, harness.Dedicated(), harness.Setting("autovacuum", "off"))
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	for attempt := range adjacentAttempts {
		first, second := 2*attempt+1, 2*attempt+2
		c.start()
		c.pg.Exec(fmt.Sprintf("INSERT INTO t VALUES (%d)", first))
		end := c.walEnd()
		stored := c.waitCheckpoint(end).Position.LSN
		c.stop()
		c.pg.Exec(fmt.Sprintf("INSERT INTO t VALUES (%d)", second))
		c.quiet()
		c.start()
		changes := c.changes()
		c.expectIDs(changes, caseRange(1, second)...)
		c.quiet()
		last := changes[len(changes)-1].Source
		if commit := mustLSN(t, last.CommitLSN); commit <= stored {
			t.Fatalf("id %d has commit_lsn %s, at or below the stored position %s", second, commit, stored)
		}
		if *last.LSN == stored.String() {
			return
		}
		t.Logf("the row is at %s, behind the stored position %s: once more", *last.LSN, stored)
		c.stop()
	}
	t.Fatal("no row's LSN was the stored position")
}

// Comparing the commit LSN with the position, where the commit's end belongs, loses the
// whole transaction.
func TestATransactionWhoseCommitLSNIsTheStoredPositionIsDelivered(t *testing.T) {
	c := caseNew(t, harness.Dedicated(), harness.Setting("autovacuum", "off"))
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)")
	a := c.session()
	for id := 1; id <= adjacentAttempts; id++ {
		c.start()
		c.exec(a, fmt.Sprintf("BEGIN; INSERT INTO t VALUES (%d,'A')", id))
		c.pg.Exec(fmt.Sprintf("INSERT INTO u VALUES (%d,'B')", id))
		stored := c.waitCheckpoint(c.walEnd()).Position.LSN
		c.proc.Kill()
		c.exec(a, "COMMIT")
		c.start()
		var ofA []caseRecord
		for _, r := range c.changes() {
			if r.Source.Table == "t" {
				ofA = append(ofA, r)
			}
		}
		c.expectIDs(ofA, caseRange(1, id)...)
		last := ofA[len(ofA)-1]
		if last.Source.CommitLSN == stored.String() {
			if want := fmt.Sprintf("%016X-0000000000", uint64(stored)); last.Headers["position"] != want {
				t.Errorf("header position %s, want %s", last.Headers["position"], want)
			}
			return
		}
		t.Logf("A committed at %s, behind the stored position %s: once more", last.Source.CommitLSN, stored)
		c.stop()
	}
	t.Fatal("no commit LSN was the stored position")
}

// Changes' LSNs go backwards when an older transaction commits later; only commits are
// ordered.
func TestAnOldTransactionThatCommitsLateIsDeliveredLast(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.start()
	a := c.session()
	c.exec(a, "BEGIN; INSERT INTO t VALUES (1,'A')")
	c.exec(c.session(), "DO $$ BEGIN FOR i IN 1001..2000 LOOP INSERT INTO t VALUES (i, 'B'); COMMIT; END LOOP; END $$")
	c.fence()
	c.waitConfirmed(c.walEnd())
	c.stop()
	c.exec(a, "COMMIT")
	c.start()
	changes := c.changes()
	c.expectIDs(changes, append(caseRange(1001, 2000), 1)...)
	first := mustLSN(t, *changes[len(changes)-1].Source.LSN)
	for i, r := range changes {
		if i > 0 && r.Headers["position"] <= changes[i-1].Headers["position"] {
			t.Fatalf("position %s follows %s", r.Headers["position"], changes[i-1].Headers["position"])
		}
		if i < len(changes)-1 && mustLSN(t, *r.Source.LSN) <= first {
			t.Fatalf("the row of A at %s was not written first: one of B is at %s", first, *r.Source.LSN)
		}
	}
}

// An abort of a subtransaction that is taken for the abort of the whole transaction
// leaves 10 of 5,010 rows.
func TestASavepointRolledBackInASpilledTransactionTakesOnlyItsOwnRows(t *testing.T) {
	c := caseNew(t)
	c.setDatabase("logical_decoding_work_mem", "64kB")
	c.pg.Exec("CREATE TABLE sp (id int PRIMARY KEY, v text)")
	c.start()
	c.exec(c.session(), `BEGIN; INSERT INTO sp SELECT g, 'keep' FROM generate_series(1,5000) g;
		SAVEPOINT s; INSERT INTO sp SELECT g, 'drop' FROM generate_series(5001,10000) g; ROLLBACK TO s;
		INSERT INTO sp SELECT g, 'tail' FROM generate_series(10001,10010) g; COMMIT`)
	changes := c.changes()
	c.expectIDs(changes, append(caseRange(1, 5000), caseRange(10001, 10010)...)...)
	c.oneTransaction(changes)
	c.expectSpilled()
}

// expectSpilled checks that the server did spill a transaction, or the case is another.
func (c *caseRun) expectSpilled() {
	c.t.Helper()
	c.pg.WaitValue("t", "SELECT spill_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = $1", "walrelay_"+c.name)
}

// With one buffer for all transactions the small commit flushes rows of the big one.
func TestASpilledTransactionThatRollsBackLeavesNothing(t *testing.T) {
	c := caseNew(t)
	c.setDatabase("logical_decoding_work_mem", "64kB")
	c.pg.Exec("CREATE TABLE big (id int PRIMARY KEY, v text); CREATE TABLE small (id int PRIMARY KEY)")
	c.start()
	a := c.session()
	c.exec(a, "BEGIN; INSERT INTO big SELECT g, repeat('x',200) FROM generate_series(1,5000) g")
	c.pg.Exec("INSERT INTO small VALUES (1)")
	c.kafka.WaitCommitted(t, c.name+".public.small", 1)
	c.exec(a, "ROLLBACK")
	c.pg.Exec("INSERT INTO small VALUES (2)")
	c.expect("the records", c.changes(),
		`small c 0 {"id":1} null {"id":1}`,
		`small c 0 {"id":2} null {"id":2}`)
	if n := c.endOffsets(c.name + ".public.big"); n != 0 {
		t.Errorf("the topic of the table big ends at %d for a read_uncommitted consumer, want 0", n)
	}
	c.expectSpilled()
}

// endOffsets sums the end offsets of an existing topic's partitions.
func (c *caseRun) endOffsets(topic string) (sum int64) {
	c.t.Helper()
	ends, err := kadm.NewClient(c.kafka.Client(c.t)).ListEndOffsets(c.t.Context(), topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		c.t.Fatalf("read where %s ends: %v", topic, err)
	}
	ends.Each(func(o kadm.ListedOffset) { sum += o.Offset })
	return sum
}

// Storing the cut transaction's own end as the position skips the rest of it; storing the
// end before it repeats the part that was delivered.
func TestATransactionCutByTwoKillsIsDeliveredOnce(t *testing.T) {
	c := caseNew(t).set(caseMap{"batch": caseMap{"max-records": 1000}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.startUntil(4)
	before := c.walEnd()
	c.exec(c.session(), "BEGIN; INSERT INTO t SELECT g, 'x' FROM generate_series(1,10000) g; COMMIT; INSERT INTO t VALUES (10001,'y')")
	c.killed()
	commit := c.expectCut(before, 3000)
	c.startUntil(3)
	c.killed()
	if again := c.expectCut(before, 5000); again != commit {
		t.Errorf("the checkpoint is cut in the transaction of commit LSN %s, it was %s", again, commit)
	}
	c.start()
	changes := c.changes()
	c.expectIDs(changes, caseRange(1, 10001)...)
	c.oneTransaction(changes[:10000])
	if changes[0].Source.CommitLSN != commit.String() {
		t.Errorf("commit_lsn %s, the checkpoint was cut at %s", changes[0].Source.CommitLSN, commit)
	}
}

// expectCut checks that the checkpoint is cut behind so many changes of a transaction
// that was written after the LSN before, and that the server was not told more than what
// came before that transaction.
func (c *caseRun) expectCut(before checkpoint.LSN, changes uint64) checkpoint.LSN {
	c.t.Helper()
	p := c.checkpoint().Position
	if p.Cut.Changes != changes || p.Cut.CommitLSN < before || p.LSN > p.Cut.CommitLSN {
		c.t.Errorf("the checkpoint is %s, want one cut behind %d changes of a transaction after %s", p, changes, before)
	}
	if confirmed := c.confirmed(); confirmed > p.LSN {
		c.t.Errorf("confirmed up to %s, past the checkpoint %s", confirmed, p)
	}
	return p.Cut.CommitLSN
}

// A filter that waits for a stored LSN which never comes again would skip for ever.
func TestSkippingEndsWhereTheDeliveredPartEnds(t *testing.T) {
	c := caseNew(t, harness.Dedicated()).set(caseMap{"batch": caseMap{"max-records": 1000}, "admin": caseMap{"listen": "127.0.0.1:0"}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.startUntil(4)
	before := c.walEnd()
	c.exec(c.session(), "INSERT INTO t SELECT g, 'x' FROM generate_series(1,10000) g")
	c.killed()
	c.expectCut(before, 3000)
	a := c.session()
	c.exec(a, "BEGIN; INSERT INTO t VALUES (20000,'open')")
	c.exec(c.session(), `DO $$ BEGIN FOR i IN 10001..10050 LOOP INSERT INTO t VALUES (i, 'later'); COMMIT; END LOOP; END $$`)
	c.exec(a, "COMMIT")
	end := c.walEnd()
	c.start()
	c.waitConfirmed(end)
	harness.WaitFor(t, "walrelay_lag_bytes to be 0", harness.DefaultTimeout, func() (bool, error) {
		// Before the first sample it is 0 as well: then the WAL that the slot keeps is.
		return c.metric("walrelay_slot_retained_wal_bytes") > 0 && c.metric("walrelay_lag_bytes") == 0, nil
	})
	changes := c.changes()
	c.expectIDs(changes, append(caseRange(1, 10050), 20000)...)
	c.oneTransaction(changes[:10000])
}

// Subtransactions that abort must not end the stream, or clear a transaction that is not
// the aborted one.
func TestAbortedSubtransactionsLeaveTheOthers(t *testing.T) {
	harness.EachMajor(t, func(t *testing.T, major int) {
		c := caseNew(t, harness.Major(major))
		c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
		c.start()
		c.pg.Exec(`DO $$ BEGIN FOR i IN 1..300 LOOP
			BEGIN INSERT INTO t VALUES (i); IF i % 3 = 0 THEN RAISE EXCEPTION 'x'; END IF;
			EXCEPTION WHEN OTHERS THEN NULL; END;
		END LOOP; END $$`)
		changes := c.changes()
		var want []int
		for id := 1; id <= 300; id++ {
			if id%3 != 0 {
				want = append(want, id)
			}
		}
		c.expectIDs(changes, want...)
		c.oneTransaction(changes)
		c.quiet()
	})
}

func TestTheCommitOfASpilledTransactionMovesTheConfirmedLSN(t *testing.T) {
	c := caseNew(t)
	c.setDatabase("logical_decoding_work_mem", "64kB")
	c.pg.Exec("CREATE TABLE big (id int PRIMARY KEY, v text)")
	c.start()
	c.exec(c.session(), "INSERT INTO big SELECT g, repeat('x',200) FROM generate_series(1,50000) g")
	end := c.walEnd()
	c.waitConfirmed(end) // nothing more is written
	c.expectSpilled()
	if n := len(c.kafka.WaitCommitted(t, c.name+".public.big", 50000)); n != 50000 {
		t.Errorf("%d records, want 50000", n)
	}
	offset := c.endOffsets(c.name + ".public.big")
	c.stop()
	c.start()
	c.fence()
	if again := c.endOffsets(c.name + ".public.big"); again != offset {
		t.Errorf("the topic ended at %d, after a restart at %d", offset, again)
	}
}

// A counter behind the filter, or messages that the server was not asked for, would give
// one change two identities.
func TestSeqCountsWhatIsNotCapturedAndMessages(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE audit_x (id int PRIMARY KEY); CREATE PUBLICATION walrelay_case FOR ALL TABLES")
	c.set(caseMap{
		"source": caseMap{"publication-mode": "existing", "publication": "walrelay_case", "tables": []string{"public.t"}, "messages": []string{}},
		"admin":  caseMap{"listen": "127.0.0.1:0"},
	})
	c.start()
	c.pg.Exec(`BEGIN; INSERT INTO audit_x VALUES (1); INSERT INTO t VALUES (1);
		SELECT pg_logical_emit_message(true,'p','x'); INSERT INTO t VALUES (2); COMMIT`)
	c.kafka.WaitCommitted(t, c.name+".public.t", 2)
	c.expect("the records", c.changesOf(c.log()),
		`t c 1 {"id":1} null {"id":1}`,
		`t c 3 {"id":2} null {"id":2}`)
	harness.WaitFor(t, "the row of audit_x to count as excluded", harness.DefaultTimeout, func() (bool, error) {
		return c.metric("walrelay_records_total", `outcome="excluded"`, "audit_x") >= 1, nil
	})
}

// Collecting the changes of a transaction per key would lose the last create behind a
// tombstone.
func TestAKeyMovedAwayAndBackInOneTransactionKeepsItsRow(t *testing.T) {
	c := caseNew(t).set(caseMap{"topics": caseMap{"partitions": 1}}) // so that offsets are the order of delivery
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.start()
	c.pg.Exec("INSERT INTO t VALUES (900,'b')")
	c.exec(c.session(), "BEGIN; UPDATE t SET id = 901 WHERE id = 900; UPDATE t SET id = 900 WHERE id = 901; COMMIT")
	log := c.settled()
	changes := c.changesOf(log)
	c.expect("the records", changes,
		`t c 0 {"id":900} null {"id":900,"v":"b"}`,
		`t d 0 {"id":900} {"id":900} null`,
		`t x {"id":900}`,
		`t c 0 {"id":901} null {"id":901,"v":"b"}`,
		`t d 1 {"id":901} {"id":901} null`,
		`t x {"id":901}`,
		`t c 1 {"id":900} null {"id":900,"v":"b"}`)
	c.fold(log, "t", "id:int4 v:text", []string{"900", "b"})
}

// pgoutput sends one message for both tables; the records need two identities.
func TestOneTruncateOfTwoTablesIsTwoChanges(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
	c.start()
	c.pg.Exec("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1)")
	c.pg.Exec("TRUNCATE a, b")
	c.pg.Exec("INSERT INTO a VALUES (1)")
	log := c.settled()
	changes := c.changesOf(log)
	want := []string{`a c 0 {"id":1} null {"id":1}`, `b c 1 {"id":1} null {"id":1}`}
	for range 6 { // one in every partition
		want = append(want, `a t 0 - null null`)
	}
	for range 6 {
		want = append(want, `b t 1 - null null`)
	}
	want = append(want, `a c 0 {"id":1} null {"id":1}`)
	c.expect("the records", changes, want...)
	if a, b := changes[2].Source.CommitLSN, changes[8].Source.CommitLSN; a != b {
		t.Errorf("the truncates have the commit LSNs %s and %s", a, b)
	}
	c.fold(log, "a", "id:int4", []string{"1"})
	c.fold(log, "b", "id:int4")
}

// No commit follows such a message, so a position that moves on commits only would deliver
// it again after a crash; one that moves past its LSN would lose the transaction behind.
func TestAMessageOutsideTransactionsIsDeliveredOnceAndStaysAfterARollback(t *testing.T) {
	c := caseNew(t).set(caseMap{"source": caseMap{"messages": []string{"nt", caseFencePrefix}}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	rows := c.pg.Query("BEGIN; SELECT pg_logical_emit_message(false,'nt','one')")
	one := mustLSN(t, rows[0][0])
	c.pg.Exec("INSERT INTO t VALUES (1); ROLLBACK")
	two := c.lsn("SELECT pg_logical_emit_message(false,'nt','two')")
	// A message alone does not wait for its record to be flushed, and only flushed WAL is
	// decoded.
	c.exec(c.session(), "CHECKPOINT")
	c.kafka.WaitCommitted(t, c.name+".message", 2)
	c.proc.Kill()
	c.start()
	c.pg.Exec("INSERT INTO t VALUES (2)")
	log := c.settled()
	c.expect("the records of the table", c.changesOf(log), `t c 0 {"id":2} null {"id":2}`)
	var got []caseRecord
	for _, r := range c.parse(c.topic(log, c.name+".message")) {
		if r.Message.Prefix == "nt" {
			got = append(got, r)
		}
	}
	if len(got) != 2 {
		t.Fatalf("%d messages, want 2", len(got))
	}
	for i, want := range []struct {
		content string
		end     checkpoint.LSN
	}{{"one", one}, {"two", two}} {
		r := got[i]
		if string(r.Message.Content) != want.content || r.Message.Transactional || r.Op != "m" {
			t.Errorf("message %d: op %s, transactional %t, %q; want m, false, %q", i, r.Op, r.Message.Transactional, r.Message.Content, want.content)
		}
		if r.Source.CommitLSN != (want.end-1).String() || *r.Source.Seq != 0 || r.Source.TxID != nil || r.TsMs != nil {
			t.Errorf("message %q: %s, want commit_lsn %s, seq 0, tx_id and ts_ms null", want.content, r.Value, want.end-1)
		}
	}
}

// The LSN of such a message on the wire is the end of its record, where the commit record of
// another transaction may begin.
func TestATransactionThatCommitsRightBehindAMessageIsDelivered(t *testing.T) {
	// Before 17 such a message could not be had flushed without a record behind it.
	c := caseNew(t, harness.Dedicated(), harness.Major(18), harness.Setting("autovacuum", "off"))
	c.set(caseMap{"source": caseMap{"messages": []string{"nt", caseFencePrefix}}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	a := c.session()
	for id := 1; id <= adjacentAttempts; id++ {
		c.start()
		c.exec(a, fmt.Sprintf("BEGIN; INSERT INTO t VALUES (%d)", id))
		end := c.lsn("SELECT pg_logical_emit_message(false, 'nt', 'x', true)")
		stored := c.waitCheckpoint(end).Position.LSN
		c.proc.Kill()
		c.exec(a, "COMMIT")
		c.start()
		log := c.settled()
		changes := c.changesOf(log)
		c.expectIDs(changes, caseRange(1, id)...)
		messages := 0
		for _, r := range c.parse(c.topic(log, c.name+".message")) {
			if r.Message.Prefix == "nt" {
				messages++
			}
		}
		if messages != id {
			t.Fatalf("%d messages, want %d", messages, id)
		}
		if commit := changes[id-1].Source.CommitLSN; stored == end && commit == end.String() {
			return
		}
		t.Logf("the message ended at %s, the transaction committed at %s: once more", end, changes[id-1].Source.CommitLSN)
		c.stop()
	}
	t.Fatal("no commit LSN was a message's LSN")
}

// Per-topic counters, or a Kafka transaction per topic, would lose the consistent cut.
func TestOneTransactionOverSeveralTopicsIsOne(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric); CREATE TABLE items (id int PRIMARY KEY, order_id int)")
	c.start()
	c.exec(c.session(), `BEGIN; INSERT INTO orders VALUES (1, 12.50); INSERT INTO items VALUES (1,1),(2,1); UPDATE orders SET total = 13 WHERE id = 1; COMMIT`)
	log := c.settled()
	changes := c.changesOf(log)
	c.expect("the records by position", changes,
		`orders c 0 {"id":1} null {"id":1,"total":"12.50"}`,
		`items c 1 {"id":1} null {"id":1,"order_id":1}`,
		`items c 2 {"id":2} null {"id":2,"order_id":1}`,
		`orders u 3 {"id":1} null {"id":1,"total":"13"}`)
	c.oneTransaction(changes)
	for _, r := range changes {
		if *r.TsMs != *changes[0].TsMs {
			t.Errorf("ts_ms %d and %d in one transaction", *r.TsMs, *changes[0].TsMs)
		}
	}
	c.check(cdctest.Atomic(log, 10))
}

// The slot's confirmed LSN is written to disk lazily; trusting it repeats what Kafka has.
func TestASlotThatGoesBackInAServerCrashRepeatsNothing(t *testing.T) {
	c := caseNew(t, harness.Dedicated())
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.pg.Exec("CHECKPOINT")
	for id := 1; id <= 3; id++ {
		c.pg.Exec(fmt.Sprintf("INSERT INTO t VALUES (%d)", id))
		c.waitConfirmed(c.walEnd())
	}
	before := c.confirmed()
	c.proc.Pause() // so that it does not connect before the slot was looked at
	if err := c.pg.Server.Quit(); err != nil {
		t.Fatal(err)
	}
	if err := c.pg.Server.Restart(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	harness.WaitFor(t, "the server to answer again", harness.DefaultTimeout, func() (bool, error) {
		_, err := c.pg.TryQuery("SELECT 1") // the old connection is gone
		return err == nil, nil
	})
	if after := c.confirmed(); after >= before {
		t.Fatalf("the slot was confirmed up to %s before the crash and is now at %s: nothing went back", before, after)
	}
	seen := len(c.proc.Lines())
	c.proc.Resume()
	c.proc.WaitLogAfter(seen, harness.DefaultTimeout, harness.Field("message", "streaming"))
	c.pg.Exec("INSERT INTO t VALUES (4)")
	c.expectIDs(c.changes(), 1, 2, 3, 4)
}

// Liveness by confirmed positions or answered heartbeats looks dead while megabytes flow.
// The rows hold some 90 MB, and a batch 1 MiB.
func TestOneHugeTransactionKeepsConnectionHealthAndMemory(t *testing.T) {
	const rows, memory = 300_000, 120 << 20
	c := caseNew(t).set(caseMap{
		"batch": caseMap{"max-bytes": "1MiB"},
		"admin": caseMap{"listen": "127.0.0.1:0"},
	})
	c.setDatabase("wal_sender_timeout", "10s")
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.start()
	health := c.admin() + "/healthz"
	c.exec(c.session(), fmt.Sprintf("INSERT INTO t SELECT g, repeat('x', 300) FROM generate_series(1,%d) g", rows))
	client := c.kafka.Client(t, kgo.ConsumeTopics(c.name+".public.t"), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	seen, commits := make([]bool, rows), map[string]int{}
	for n := 0; n < rows; {
		fetches := client.PollFetches(ctx)
		if ctx.Err() != nil {
			t.Fatalf("%d of %d records were delivered", n, rows)
		}
		if code, body := c.get(health); code != 200 {
			t.Fatalf("/healthz says %d %s", code, body)
		}
		for r := range fetches.RecordsAll() {
			commit, seq, found := strings.Cut(casePosition(r), "-")
			i, err := strconv.Atoi(seq)
			if !found || err != nil || i >= rows || seen[i] {
				t.Fatalf("position %q is wrong, or there twice", casePosition(r))
			}
			seen[i] = true
			commits[commit]++
			n++
		}
	}
	if len(commits) != 1 {
		t.Errorf("%d commit LSNs, want 1", len(commits))
	}
	if peak := casePeakMemory(t, c.proc.PID()); peak > memory {
		t.Errorf("the process held %d MiB, want at most %d", peak>>20, memory>>20)
	} else {
		t.Logf("the process held at most %d MiB", peak>>20)
	}
	if n := c.metric("walrelay_restarts_total"); n != 0 {
		t.Errorf("the stream started over %v times", n)
	}
	c.quiet()
}

// casePosition is a record's header position.
func casePosition(r *kgo.Record) string {
	for _, h := range r.Headers {
		if h.Key == "position" {
			return string(h.Value)
		}
	}
	return ""
}

// casePeakMemory is the most resident memory that a process has had, in bytes.
func casePeakMemory(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "VmHWM:" {
			kib, err := strconv.Atoi(fields[1])
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("no VmHWM in the process's status")
	return 0
}

func mustLSN(t *testing.T, text string) checkpoint.LSN {
	t.Helper()
	lsn, err := checkpoint.ParseLSN(text)
	if err != nil {
		t.Fatal(err)
	}
	return lsn
}

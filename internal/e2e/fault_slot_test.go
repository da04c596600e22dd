package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/replication"
)

// faultWriteElsewhere writes WAL in another database of the same server.
func faultWriteElsewhere(neighbour *harness.PG, megabytes int) {
	neighbour.Exec(`CREATE TABLE IF NOT EXISTS filler (v text)`)
	neighbour.Exec(fmt.Sprintf(`INSERT INTO filler SELECT repeat(md5(g::text), 32) FROM generate_series(1, %d) g`, megabytes*1000))
}

func TestAKeepaliveDoesNotRaiseTheConfirmWhileSomethingIsUnacknowledged(t *testing.T) {
	t.Parallel()
	timeout := harness.Setting("wal_sender_timeout", "3s")
	k := harness.Kafka(t, harness.OwnKafka())
	b := newFaultBed(t, harness.Postgres(t, timeout), k)
	neighbour := harness.Postgres(t, timeout)
	if neighbour.Server != b.pg.Server {
		t.Fatal("the neighbour is on another server")
	}
	b.pg.Exec(faultTable)
	p := b.stream()
	sender := b.walsender()
	k.Pause(0)
	b.pg.Exec(`INSERT INTO t SELECT generate_series(1, 10)`)
	end := b.lsn(`SELECT pg_current_wal_insert_lsn()`)
	confirmed := b.confirmed()
	faultWriteElsewhere(neighbour, 50)
	neighbour.Exec(`CHECKPOINT`)
	replies := map[string]bool{}
	for began := time.Now(); len(replies) < 6 || time.Since(began) < 7*time.Second; { // two walsender timeouts and more
		if time.Since(began) > faultLong {
			t.Fatalf("%d status updates in %s", len(replies), faultLong)
		}
		row := b.pg.Query(`SELECT reply_time, sent_lsn FROM pg_stat_replication WHERE pid = $1`, sender)
		if len(row) != 1 {
			t.Fatal("the walsender has given up: no status updates came")
		}
		replies[row[0][0]] = true
		if at := b.confirmed(); at != confirmed {
			t.Fatalf("confirmed went from %s to %s, and ids 1 to 10 end at %s", confirmed, at, end)
		}
	}
	p.Kill()
	k.Resume(0)
	p = b.stream()
	b.wantIDs("t", faultRange(1, 10))
	b.stop(p)
}

func TestACleanStopLeavesNothingToRepeat(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	neighbour := harness.Postgres(t)
	p := b.stream()
	b.pg.Exec(`INSERT INTO t SELECT generate_series(1, 100)`)
	b.wantIDs("t", faultRange(1, 100))
	b.stop(p)
	confirmed, position := b.confirmed(), b.checkpoint().Position
	if confirmed < position.LSN || position.CommitLSN.IsZero() || confirmed <= position.CommitLSN {
		t.Errorf("confirmed %s after the stop, the checkpoint is %s", confirmed, position)
	}
	p = b.stream()
	faultWriteElsewhere(neighbour, 1)
	harness.WaitFor(t, "the slot to move on", faultLong, func() (bool, error) { return b.confirmed() > confirmed, nil })
	if n := faultSum(b.metrics(p), "walrelay_records_total", `outcome="delivered"`); n != 0 {
		t.Errorf("%f records delivered again", n)
	}
	b.stop(p)
	if n := len(b.kafka.Committed(t, b.topic("t"))); n != 100 {
		t.Errorf("%d records", n)
	}
}

func TestTheSlotOfAnIdleDatabaseFollowsABusyNeighbour(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	neighbour := harness.Postgres(t)
	p := b.stream()
	faultWriteElsewhere(neighbour, 60)
	const limit = 16 << 20
	end := b.lsn(`SELECT pg_current_wal_lsn()`)
	harness.WaitFor(t, "the slot to follow", faultLong, func() (bool, error) {
		at := b.confirmed()
		b.durable(at)
		return at+limit > end && b.metrics(p)["walrelay_slot_retained_wal_bytes"] < limit, nil
	})
	if got := b.pg.Value(`SELECT string_agg(relname, ' ') FROM pg_stat_user_tables`); got != "t" {
		t.Errorf("tables in the source database: %s", got)
	}
	if n := b.pg.Value(`SELECT count(*) FROM t`); n != "0" {
		t.Errorf("%s rows in the source table", n)
	}
	b.stop(p)
}

func TestWriteFlushAndApplyFollowTheCheckpoint(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	neighbour := harness.Postgres(t)
	p := b.start()
	started := b.slot()
	samples := 0
	sample := func() {
		rows := b.pg.Query(`SELECT sent_lsn, coalesce(write_lsn, '0/0'), coalesce(flush_lsn, '0/0'), coalesce(replay_lsn, '0/0') FROM pg_stat_replication
			WHERE pid = (SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1) AND sent_lsn IS NOT NULL`, started)
		if len(rows) != 1 {
			return
		}
		samples++
		var at [4]checkpoint.LSN
		for i, text := range rows[0] {
			lsn, err := checkpoint.ParseLSN(text)
			if err != nil {
				t.Fatal(err)
			}
			at[i] = lsn
		}
		if max(at[1], at[2], at[3]) > at[0] {
			t.Errorf("write %s, flush %s or replay %s is above what was sent, %s", at[1], at[2], at[3], at[0])
		}
		if durable := max(at[2], at[3]); durable > 0 {
			b.durable(durable)
		}
	}
	harness.WaitFor(t, "the walsender", faultLong, func() (bool, error) { sample(); return samples > 0, nil })
	end := b.lsn(`SELECT pg_current_wal_insert_lsn()`)
	faultWriteElsewhere(neighbour, 40)
	harness.WaitFor(t, "the slot to pass what was written elsewhere", faultLong, func() (bool, error) {
		sample()
		return samples > 20 && b.confirmed() > end+(30<<20), nil
	})
	b.stop(p)
}

func TestASlotThatWasMadeAgainIsRefused(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	p := b.stream()
	b.pg.Exec(`INSERT INTO t SELECT generate_series(1, 10)`)
	b.wantIDs("t", faultRange(1, 10))
	b.stop(p)
	position := b.checkpoint().Position.LSN
	b.pg.Exec(`SELECT pg_drop_replication_slot($1)`, b.slot())
	b.pg.Exec(`INSERT INTO t SELECT generate_series(11, 20)`)
	b.pg.Exec(`SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, b.slot())
	texts := []string{b.slot(), b.confirmed().String(), position.String(), "may be missing", "walrelay checkpoint set"}
	b.refused(b.start(), texts...)
	b.pg.Exec(`INSERT INTO t VALUES (21)`)
	b.refused(b.start(), texts...)
	if n := len(b.kafka.Committed(t, b.topic("t"))); n != 10 {
		t.Errorf("%d records after the refusals", n)
	}
	if at := b.checkpoint().Position.LSN; at != position {
		t.Errorf("the checkpoint went from %s to %s", position, at)
	}
}

func TestASlotThatWasAdvancedByHandIsRefused(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	p := b.stream()
	b.pg.Exec(`INSERT INTO t SELECT generate_series(1, 10)`)
	b.wantIDs("t", faultRange(1, 10))
	b.stop(p)
	position := b.checkpoint().Position.LSN
	b.pg.Exec(`INSERT INTO t SELECT generate_series(11, 20)`)
	b.pg.Exec(`SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())`, b.slot())
	confirmed := b.confirmed()
	if confirmed <= position {
		t.Fatalf("the slot is at %s, the checkpoint at %s", confirmed, position)
	}
	b.refused(b.start(), b.slot(), confirmed.String(), position.String(), fmt.Sprintf("%d bytes", uint64(confirmed-position)))
	if n := len(b.kafka.Committed(t, b.topic("t"))); n != 10 {
		t.Errorf("%d records after the refusal", n)
	}
}

func TestASlotThatIsOlderThanItsPublicationIsRefused(t *testing.T) {
	t.Parallel()
	t.Run("managed", func(t *testing.T) {
		t.Parallel()
		b := newPlainBed(t, faultTable)
		b.pg.Exec(`SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, b.slot())
		b.pg.Exec(`INSERT INTO t VALUES (1)`)
		b.refused(b.start(), b.slot(), "a slot cannot be used with a publication made after it", "pg_drop_replication_slot")
		if n := b.pg.Value(`SELECT count(*) FROM pg_publication`); n != "0" {
			t.Errorf("%s publications were made", n)
		}
	})
	t.Run("existing", func(t *testing.T) {
		t.Parallel()
		b := newPlainBed(t, faultTable)
		b.set("source.publication-mode", "existing")
		b.pg.Exec(`SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, b.slot())
		b.pg.Exec(`INSERT INTO t VALUES (1)`)
		b.pg.Exec(`CREATE PUBLICATION ` + b.slot() + ` FOR TABLE t`)
		b.refused(b.start(), b.slot(), "a slot cannot be used with a publication made after it")
	})
}

func TestAStaleWalsenderIsWaitedOut(t *testing.T) {
	t.Parallel()
	k := harness.Kafka(t, harness.WithProxy())
	w := newFaultWire(t, k)
	b := newFaultBed(t, harness.Postgres(t, harness.Setting("wal_sender_timeout", "6s")), k)
	b.pg.Exec(faultTable)
	proxy := harness.StartProxy(t, b.pg.Server.Addr())
	b.set("source.dsn", b.pg.ProxyDSN(proxy.Addr()))
	p := b.stream()
	b.pg.Exec(`INSERT INTO t VALUES (1)`)
	b.wantIDs("t", []int{1})
	sender := b.walsender()
	proxy.Blackhole()
	p.Kill()
	if b.walsender() != sender {
		t.Fatal("the stale walsender has let go at once")
	}
	fences := w.count(faultKeyInitPID)
	b.set("source.dsn", b.pg.DSN()) // the way around the cut
	p = b.start()
	p.WaitLog(faultLong, harness.Message("standing by"), harness.Text(sender))
	b.phase(p, "standby")
	if code, body := b.get(p, "/readyz"); code != 503 || !strings.Contains(body, "standby") {
		t.Errorf("/readyz: %d %s", code, body)
	}
	if n := w.count(faultKeyInitPID); n != fences {
		t.Errorf("%d InitProducerId while another one held the slot", n-fences)
	}
	p.WaitLog(16*time.Second, faultMessage("streaming"))
	b.pg.Exec(`INSERT INTO t VALUES (2)`)
	b.wantIDs("t", []int{1, 2})
	if n := b.pg.Value(`SELECT count(*) FROM pg_replication_slots WHERE database = current_database() AND slot_name NOT LIKE '%_anchor'`); n != "1" {
		t.Errorf("%s slots", n)
	}
	b.stop(p)
}

func TestANarrowedSetOfTablesNarrowsThePublication(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)`)
	b.set("source.tables", []string{"public.*"})
	b.stop(b.stream())
	b.set("source.tables", []string{"public.a"})
	p := b.stream()
	p.WaitLog(faultLong, faultMessage("table removed from the publication"), harness.Field("table", "public.b"))
	if got := b.pg.Value(`SELECT string_agg(tablename, ' ') FROM pg_publication_tables WHERE pubname = $1`, b.slot()); got != "a" {
		t.Errorf("published: %s", got)
	}
	b.pg.Exec(`INSERT INTO b VALUES (1)`)
	b.pg.Exec(`INSERT INTO a VALUES (1)`)
	b.wantIDs("a", []int{1})
	if n := len(b.kafka.Committed(t, b.topic("b"))); n != 0 {
		t.Errorf("%d records of b", n)
	}
	b.stop(p)
}

func TestAnExistingPublicationIsLeftAloneAndTheRestIsExcluded(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY); CREATE PUBLICATION mine FOR TABLE a, b`)
	b.set("source.publication-mode", "existing")
	b.set("source.publication", "mine")
	b.set("source.tables", []string{"public.a"})
	p := b.stream()
	b.pg.Exec(`INSERT INTO b VALUES (1)`)
	b.pg.Exec(`INSERT INTO a VALUES (1)`)
	b.wantIDs("a", []int{1})
	if got := b.pg.Value(`SELECT string_agg(tablename, ' ' ORDER BY 1) FROM pg_publication_tables WHERE pubname = 'mine'`); got != "a b" {
		t.Errorf("published: %s", got)
	}
	harness.WaitFor(t, "b's change to be counted as excluded", faultLong, func() (bool, error) {
		m := b.metrics(p)
		return faultSum(m, "walrelay_records_total", `outcome="excluded"`) == 1 && faultSum(m, "walrelay_records_total", `outcome="delivered"`) == 1, nil
	})
	b.stop(p)
}

func TestATableThatIsMadeAgainComesBackIntoTheManagedPublication(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE e (id int PRIMARY KEY)`)
	p := b.stream()
	b.pg.Exec(`INSERT INTO e VALUES (1)`)
	b.wantIDs("e", []int{1})
	b.pg.Exec(`DROP TABLE e; CREATE TABLE e (id int PRIMARY KEY); INSERT INTO e VALUES (2)`)
	line := p.WaitLog(faultLong, harness.Message("streaming this table from here on"), harness.Field("table", "public.e"))
	if line.Level() != "warn" || !strings.Contains(line.Message(), "rows written to it before are not sent") {
		t.Errorf("the warning: %s", line.Raw)
	}
	if got := b.pg.Value(`SELECT string_agg(tablename, ' ') FROM pg_publication_tables WHERE pubname = $1`, b.slot()); got != "e" {
		t.Errorf("published: %s", got)
	}
	b.pg.Exec(`INSERT INTO e VALUES (3)`)
	b.wantIDs("e", []int{1, 3}) // 2 is the snapshot's
	b.stop(p)
}

func TestATableThatLeftAnExistingPublicationIsAnError(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE e (id int PRIMARY KEY); CREATE PUBLICATION mine FOR TABLE e`)
	b.set("source.publication-mode", "existing")
	b.set("source.publication", "mine")
	p := b.stream()
	b.pg.Exec(`INSERT INTO e VALUES (1)`)
	b.wantIDs("e", []int{1})
	b.pg.Exec(`DROP TABLE e; CREATE TABLE e (id int PRIMARY KEY); INSERT INTO e VALUES (2)`)
	line := p.WaitLog(faultLong, harness.Field("level", "error"))
	if !strings.Contains(line.Raw, "configured but not published") || !strings.Contains(line.Raw, "public.e") {
		t.Errorf("the error: %s", line.Raw)
	}
	if code, body := b.get(p, "/readyz"); code != 503 || !strings.Contains(body, "public.e") {
		t.Errorf("/readyz: %d %s", code, body)
	}
	b.stop(p)
	b.refused(b.start(), "configured but not published", "public.e", "ALTER PUBLICATION")
}

func TestATableWithoutIdentityIsRefusedBeforeAnythingIsMade(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE npk (a int, b text); INSERT INTO npk VALUES (1, 'x')`)
	b.refused(b.start(), "public.npk", "source.tables", "REPLICA IDENTITY FULL", "keyless: inserts")
	if n := b.pg.Value(`SELECT (SELECT count(*) FROM pg_publication) + (SELECT count(*) FROM pg_replication_slots WHERE database = current_database())`); n != "0" {
		t.Errorf("%s publications and slots were made", n)
	}
	b.pg.Exec(`UPDATE npk SET b = 'y'`)

	b.set("source.keyless", "inserts")
	p := b.stream()
	if got := b.pg.Value(`SELECT pubname FROM pg_publication_tables WHERE tablename = 'npk'`); got != b.slot()+"_insert" {
		t.Errorf("npk is in publication %s", got)
	}
	b.pg.Exec(`UPDATE npk SET b = 'z'`)
	b.pg.Exec(`INSERT INTO npk VALUES (2, 'n')`)
	if n := len(b.kafka.WaitCommitted(t, b.topic("npk"), 1)); n != 1 {
		t.Errorf("%d records, want the insert's alone", n)
	}
	p.WaitLog(faultLong, harness.Text("public.npk"), harness.Text("updates"), harness.Text("not captured"))
	b.stop(p)
}

func TestWhatCannotWorkOnATableIsRefusedBeforeAnythingIsMade(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE outbox (id int PRIMARY KEY, foo text); CREATE TABLE k (a int PRIMARY KEY, b text); CREATE TABLE "x y" (a int PRIMARY KEY); CREATE TABLE x_y (a int PRIMARY KEY)`)
	b.set("outbox", []map[string]any{{"table": "public.outbox"}})
	b.set("source.keys", map[string][]string{"public.k": {"b"}})
	nothing := func() {
		t.Helper()
		if n := b.pg.Value(`SELECT (SELECT count(*) FROM pg_publication) + (SELECT count(*) FROM pg_replication_slots WHERE database = current_database())`); n != "0" {
			t.Errorf("%s publications and slots were made", n)
		}
	}
	b.refused(b.start(), "public.outbox", "payload", "id integer, foo text", "public.k", "REPLICA IDENTITY FULL")
	nothing()
	b.pg.Exec(`ALTER TABLE outbox ADD aggregatetype text, ADD aggregateid text, ADD type text, ADD payload json; ALTER TABLE k REPLICA IDENTITY FULL`)
	b.refused(b.start(), "public.x_y", "public.x y", "meet in topic")
	nothing()
	b.pg.Exec(`DROP TABLE "x y"`)
	p := b.stream()
	p.WaitLog(faultLong, faultMessage("outbox table recognised"), harness.Text("aggregate_id=aggregateid"))
	b.stop(p)
}

func TestAStandbyTakesOverWithThePublicationsOfToday(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	holder := b.stream()
	standby := b.start()
	standby.WaitLog(faultLong, harness.Text("standing by"))
	// It comes while the standby waits, and only the holder can know.
	b.pg.Exec(`CREATE TABLE late (id int PRIMARY KEY)`)
	b.pg.WaitValue("1", `SELECT count(*) FROM pg_publication_tables WHERE tablename = 'late'`)
	b.pg.Exec(`INSERT INTO late SELECT generate_series(1, 10)`)
	b.kafka.WaitCommitted(t, b.topic("late"), 10)
	holder.Kill()
	stop := make(chan struct{})
	done := make(chan int)
	go func() { // without a pause over the whole takeover
		n := 10
		for {
			select {
			case <-stop:
				done <- n
				return
			default:
				n++
				b.pg.Exec(`INSERT INTO late VALUES ($1)`, n)
			}
		}
	}()
	standby.WaitLog(faultLong, faultMessage("streaming"))
	b.kafka.WaitCommitted(t, b.topic("late"), 20)
	close(stop)
	n := <-done
	want := make([]int, n)
	for i := range want {
		want[i] = i + 1
	}
	b.wantIDs("late", want)
	for _, line := range standby.Lines() {
		if line.Message() == "table removed from the publication" {
			t.Errorf("the standby took a table out: %s", line.Raw)
		}
	}
	b.stop(standby)
}

func TestASlotWithoutACheckpointIsAdopted(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	late := b.session()
	b.pg.Exec(`CREATE PUBLICATION ` + b.slot() + ` FOR TABLE t`)
	b.pg.Exec(`SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, b.slot())
	b.pg.Exec(`INSERT INTO t VALUES (1)`)
	// Written before the second publication is made, committed after.
	b.must(late, `BEGIN; INSERT INTO t VALUES (2)`)
	from := b.confirmed()
	p := b.stream()
	if line := p.WaitLog(faultLong, harness.Message("adopted the slot")); line.Field("lsn") != from.String() {
		t.Errorf("adopted from %s: %s", from, line.Raw)
	}
	b.wantIDs("t", []int{1})
	named := func(p *harness.Proc) string {
		return fmt.Sprint(p.WaitLog(faultLong, faultMessage("holding the slot")).Fields["publications"])
	}
	if got := named(p); got != "["+b.slot()+"]" {
		t.Errorf("START_REPLICATION names %s", got)
	}
	b.stop(p)
	p = b.stream()
	if got := named(p); got != "["+b.slot()+"]" {
		t.Errorf("after a restart START_REPLICATION names %s", got)
	}
	b.must(late, `COMMIT`)
	b.wantIDs("t", []int{1, 2})
	both := "[" + b.slot() + " " + b.slot() + "_insert]"
	harness.WaitFor(t, "the second publication to be named", faultLong, func() (bool, error) {
		b.pg.Exec(`SELECT pg_logical_emit_message(true, 'wake', 'x')`)
		for _, line := range p.Lines() {
			if line.Message() == "holding the slot" && fmt.Sprint(line.Fields["publications"]) == both {
				return true, nil
			}
		}
		return false, nil
	})
	b.pg.Exec(`INSERT INTO t VALUES (3)`)
	b.wantIDs("t", []int{1, 2, 3})
	if op := faultDecode(t, b.kafka.Committed(t, b.topic("t"))[0]).Op; op != "c" {
		t.Errorf("op %s", op)
	}
	b.stop(p)
}

func TestASlotIsNotAdoptedWhereTheConnectorRanBefore(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable+`; CREATE PUBLICATION mine FOR TABLE t`)
	b.set("source.publication", "mine")
	b.pg.Exec(`SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, b.slot())
	b.kafka.CreateTopic(t, b.checkpointTopic(), 1, "cleanup.policy", "compact")
	other := b.kafka.Client(t)
	if err := other.ProduceSync(t.Context(), &kgo.Record{Topic: b.checkpointTopic(), Key: []byte("foreign"), Value: []byte("x")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	b.refused(b.start(), "no checkpoint", b.checkpointTopic(), "ran before")
}

func TestACheckpointOfAnotherClusterIsRefused(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	p := b.stream()
	b.pg.Exec(`INSERT INTO t VALUES (1)`)
	b.wantIDs("t", []int{1})
	b.stop(p)
	first := b.checkpoint()

	other := harness.Postgres(t, harness.Dedicated())
	if other.Server == b.pg.Server {
		t.Fatal("one cluster for both")
	}
	other.Exec(`CREATE DATABASE ` + b.pg.Name)
	twin := &faultBed{t: t, pg: other, kafka: b.kafka, name: b.name, yaml: b.yaml}
	dsn := other.Server.Database(b.pg.Name)
	conn := faultConnect(t, dsn)
	twin.must(conn, faultTable)
	twin.must(conn, `CREATE PUBLICATION `+b.slot()+` FOR TABLE t`)
	twin.must(conn, `SELECT pg_create_logical_replication_slot('`+b.slot()+`', 'pgoutput')`)
	twin.set("source.dsn", dsn)
	id := other.Value(`SELECT system_identifier FROM pg_control_system()`)
	b.refused(twin.start(), id, first.Source.SystemID, "another cluster", "--accept-source")
	if now := b.checkpoint(); now.Source != first.Source || now.Position != first.Position {
		t.Errorf("the checkpoint went from %v to %v", first, now)
	}
}

func TestAFailoverThatLostCommitsIsRefused(t *testing.T) {
	t.Parallel()
	source := checkpoint.Source{SystemID: "7", Database: "shop", Timeline: 1}
	facts := func(end, confirmed checkpoint.LSN) replication.Facts {
		return replication.Facts{
			Managed:  true,
			Database: replication.Database{Version: 180000, SystemID: "7", Name: "shop", Timeline: 2, WALEnd: end, WALLevel: "logical", MaxSlots: 10},
			SlotName: "walrelay_shop", SlotFound: true,
			Slot:        replication.Slot{Name: "walrelay_shop", Plugin: replication.Plugin, Type: "logical", Database: "shop", ConfirmedFlush: confirmed},
			Publication: "walrelay_shop", PublicationFound: true,
			Checkpoint: checkpoint.Checkpoint{Source: source, Position: checkpoint.Position{LSN: 0x3000, CommitLSN: 0x2F00}},
			History:    []replication.TimelineSwitch{{Timeline: 1, At: 0x2000}},
		}
	}
	for name, end := range map[string]checkpoint.LSN{"while its WAL is behind the checkpoint": 0x2800, "after its WAL has grown past the checkpoint": 0x9000} {
		t.Run(name, func(t *testing.T) {
			err := replication.VerifyResume(facts(end, 0x1F00))
			if !checkpoint.IsRefusal(err) {
				t.Fatalf("not refused: %v", err)
			}
			for _, text := range []string{"timeline", "0/3000", "0/2000"} {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("the refusal does not say %q: %v", text, err)
				}
			}
		})
	}
	t.Run("but not where the new timeline took the checkpoint with it", func(t *testing.T) {
		f := facts(0x9000, 0x2000)
		f.History[0].At = 0x4000
		if err := replication.VerifyResume(f); err != nil {
			t.Error(err)
		}
	})
}

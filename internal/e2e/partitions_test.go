package e2e

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

// partsBed is a bed with a partitioned table p of two months, and another one, looks, by
// which a test learns that the connector has looked at the catalog.
type partsBed struct {
	*snapBed
	looks int
}

const (
	partsAttached = "partition with rows was attached: they are read once every transaction that is running now has ended"
	partsLost     = "partitions changed beside the stream: rows that this took out of the table are in the topic still"
)

func newPartsBed(t *testing.T, sql string, options ...harness.PGOption) *partsBed {
	t.Helper()
	b := newSnapBed(t, `CREATE TABLE p (id int, d date, v text, PRIMARY KEY (id, d)) PARTITION BY RANGE (d);
		CREATE TABLE p_jan PARTITION OF p FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
		CREATE TABLE p_feb PARTITION OF p FOR VALUES FROM ('2026-02-01') TO ('2026-03-01');
		INSERT INTO p VALUES (1, '2026-01-05', 'a'), (2, '2026-02-05', 'b');
		CREATE TABLE looks (id int PRIMARY KEY) PARTITION BY RANGE (id);`+sql, options...)
	b.set("source.tables", []string{"public.p", "public.looks"})
	return &partsBed{snapBed: b}
}

// begin starts the connector and waits until it has read p.
func (b *partsBed) begin() *harness.Proc {
	b.t.Helper()
	p := b.stream()
	b.waitTable(p, "public.p", allRows)
	return p
}

// looked waits until the connector has looked at all partitions that there are now, and
// has done what it found.
func (b *partsBed) looked(p *harness.Proc) {
	b.t.Helper()
	b.looks++
	b.pg.Exec(fmt.Sprintf(`CREATE TABLE look_%[1]d (id int PRIMARY KEY); INSERT INTO look_%[1]d VALUES (%[1]d);
		ALTER TABLE looks ATTACH PARTITION look_%[1]d FOR VALUES FROM (%[1]d) TO (%[1]d + 1)`, b.looks))
	harness.WaitFor(b.t, "the connector to look at partitions", snapLong, func() (bool, error) {
		if !p.Running() {
			return false, fmt.Errorf("the connector ended: %s", p.Stderr())
		}
		return b.reads(b.log(), "looks") == b.looks, nil
	})
	b.idle(p)
}

// idle waits until no table is being read, or waits to be.
func (b *partsBed) idle(p *harness.Proc) {
	b.t.Helper()
	harness.WaitFor(b.t, "every snapshot to be done", snapLong, func() (bool, error) {
		s := b.status(p).Snapshot
		return s.Done == s.Total, nil
	})
}

func (b *partsBed) exec(sql ...string) {
	b.t.Helper()
	for _, s := range sql {
		b.pg.Exec(s)
	}
}

// said gives the names in the field partitions of each line with a message.
func (b *partsBed) said(p *harness.Proc, message, field string) (list []string) {
	for _, line := range p.Lines() {
		if line.Field("message") == message && line.Field("table") != "public.looks" {
			list = append(list, line.Field(field))
		}
	}
	return list
}

// wantSaid checks what was said of lost rows: lines of "what: partitions".
func (b *partsBed) wantSaid(p *harness.Proc, want ...string) {
	b.t.Helper()
	what, parts := b.said(p, partsLost, "what"), b.said(p, partsLost, "partitions")
	for i := range what {
		what[i] += ": " + parts[i]
	}
	if !slices.Equal(what, want) {
		b.t.Errorf("said of lost rows: %q, want %q", what, want)
	}
}

// wantRead checks which attached partitions were said to be read.
func (b *partsBed) wantRead(p *harness.Proc, want ...string) {
	b.t.Helper()
	if got := b.said(p, partsAttached, "partitions"); !slices.Equal(got, want) {
		b.t.Errorf("said of attached partitions: %q, want %q", got, want)
	}
}

// warnings are those of /status.
func (b *partsBed) warnings(p *harness.Proc) []string {
	b.t.Helper()
	var s struct{ Warnings []string }
	_, body := b.get(p, "/status")
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		b.t.Fatal(err)
	}
	return s.Warnings
}

// foldsP checks that the topic of p is the table.
func (b *partsBed) foldsP(p *harness.Proc) *cdctest.Log {
	b.t.Helper()
	log := b.settled(p)
	b.folds(log, "", snapTable("p", "id:int4:key d:date:key v:text"))
	return log
}

const partsApril = `CREATE TABLE apr (v text, id int, d date, PRIMARY KEY (id, d)); INSERT INTO apr VALUES ('pre', 9, '2026-04-01'), ('pre', 8, '2026-04-02');`

const partsAttach = `ALTER TABLE p ATTACH PARTITION apr FOR VALUES FROM ('2026-04-01') TO ('2026-05-01')`

// Rows that were written before the ATTACH are read, once, and no other rows with them.
func TestTheRowsOfAnAttachedPartitionAreRead(t *testing.T) {
	b := newPartsBed(t, partsApril)
	p := b.begin()
	b.exec(partsAttach, "INSERT INTO p VALUES (10, '2026-04-02', 'post'); UPDATE p SET v = 'changed' WHERE id = 8")
	b.looked(p)
	log := b.foldsP(p)
	if ops := b.ops(log, "p"); ops[1] != "r" || ops[2] != "r" || ops[9] != "r" || !strings.HasPrefix(ops[8], "u") || !strings.HasPrefix(ops[10], "c") {
		t.Errorf("records by id: %v", ops)
	}
	b.wantRead(p, "public.apr")
	b.wantSaid(p)
	if reads := b.gate.seen(rowsOf("p")); !slices.ContainsFunc(reads, func(sql string) bool {
		return strings.Contains(sql, "tableoid IN (") && strings.Contains(sql, "'2026-05-01'::date")
	}) {
		t.Errorf("the rows were not read within the partition's bounds:\n%s", strings.Join(reads, "\n"))
	}
	b.stop(p)
	p = b.start("--until-caught-up")
	if code := p.Wait(snapLong); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	b.wantRead(p) // not again
}

// A transaction that creates, fills and attaches a table: nothing in the catalog but the
// order of its commands tells it from a partition that is created as one.
func TestATableFilledAndAttachedInOneTransactionIsRead(t *testing.T) {
	b := newPartsBed(t, "")
	p := b.begin()
	b.must(b.session(), `BEGIN; CREATE TABLE apr (LIKE p); INSERT INTO apr VALUES (9, '2026-04-01', 'pre');`+partsAttach+
		`; INSERT INTO p VALUES (10, '2026-04-02', 'post'); COMMIT`)
	b.looked(p)
	b.wantOps(b.foldsP(p), "p", 9, 9, "r")
	b.wantRead(p, "public.apr")
}

// Partitions that are created as such have all of their rows in the stream: they cause no
// read and no word, nor do those that are attached empty.
func TestNewPartitionsMakeNoNoise(t *testing.T) {
	b := newPartsBed(t, "")
	p := b.begin()
	b.exec("CREATE TABLE p_default PARTITION OF p DEFAULT; INSERT INTO p VALUES (5, '2030-01-01', 'x')",
		"CREATE TABLE p_apr PARTITION OF p FOR VALUES FROM ('2026-04-01') TO ('2026-05-01'); INSERT INTO p VALUES (6, '2026-04-01', 'x')",
		"CREATE TABLE p_may PARTITION OF p FOR VALUES FROM ('2026-05-01') TO ('2026-06-01') PARTITION BY LIST (id)",
		"CREATE TABLE p_may_7 PARTITION OF p_may FOR VALUES IN (7); INSERT INTO p VALUES (7, '2026-05-01', 'x')",
		"CREATE TABLE jun (LIKE p INCLUDING ALL); ALTER TABLE p ATTACH PARTITION jun FOR VALUES FROM ('2026-06-01') TO ('2026-07-01'); INSERT INTO p VALUES (8, '2026-06-01', 'x')")
	b.must(b.session(), `BEGIN; SAVEPOINT s; CREATE TABLE p_jul PARTITION OF p FOR VALUES FROM ('2026-07-01') TO ('2026-08-01');
		RELEASE s; INSERT INTO p VALUES (9, '2026-07-01', 'x'); COMMIT`)
	b.looked(p)
	log := b.foldsP(p)
	b.wantOps(log, "p", 5, 7, "c")
	b.wantOps(log, "p", 9, 9, "c")
	b.stop(p)
	b.exec("CREATE TABLE p_sep PARTITION OF p FOR VALUES FROM ('2026-09-01') TO ('2026-10-01'); INSERT INTO p VALUES (11, '2026-09-01', 'x')")
	p = b.stream()
	b.looked(p)
	b.wantOps(b.foldsP(p), "p", 11, 11, "c")
	b.wantRead(p)
	b.wantSaid(p)
}

// What is attached or detached while the connector is not there is noticed when it comes
// back.
func TestPartitionsThatChangeWhileStopped(t *testing.T) {
	b := newPartsBed(t, partsApril)
	p := b.begin()
	b.looked(p)
	b.stop(p)
	b.exec(partsAttach, "ALTER TABLE p DETACH PARTITION p_feb; TRUNCATE p_jan")
	p = b.start("--until-caught-up")
	if code := p.Wait(snapLong); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	b.wantOps(b.log(), "p", 8, 9, "r")
	b.wantRead(p, "public.apr")
	b.wantSaid(p, "detached: public.p_feb", "truncated: public.p_jan")

	// The same partition, attached again: its rows of meanwhile are not in the stream.
	b.exec("ALTER TABLE p DETACH PARTITION apr; INSERT INTO apr VALUES ('while', 7, '2026-04-03'); UPDATE apr SET v = 'while' WHERE id = 8; DELETE FROM apr WHERE id = 9;" + partsAttach)
	p = b.stream()
	b.looked(p)
	log := b.settled(p)
	b.wantOps(log, "p", 7, 7, "r")
	b.wantOps(log, "p", 8, 8, "rr")
	b.wantRead(p, "public.apr")
	b.wantSaid(p, "detached and attached again: public.apr")
	b.mustAsk(p, "--table", "public.p", "--replace")
	harness.WaitFor(t, "the repair to be done", snapLong, func() (bool, error) { return len(b.warnings(p)) == 0, nil })
	b.idle(p)
	b.foldsP(p)
}

// A partition that leaves takes its rows along without a delete: it is said loudly, with
// the command that repairs, and the command does.
func TestDetachedAndDroppedPartitionsAreSaid(t *testing.T) {
	b := newPartsBed(t, "CREATE TABLE p_mar PARTITION OF p FOR VALUES FROM ('2026-03-01') TO ('2026-04-01'); INSERT INTO p VALUES (3, '2026-03-01', 'c')")
	p := b.begin()
	b.exec("ALTER TABLE p DETACH PARTITION p_mar")
	b.must(b.session(), "ALTER TABLE p DETACH PARTITION p_feb CONCURRENTLY")
	b.exec("DROP TABLE p_jan", "INSERT INTO p_mar VALUES (4, '2026-03-02', 'gone')")
	b.looked(p)
	said := strings.Join(append(b.said(p, partsLost, "partitions"), b.said(p, partsLost, "what")...), " ")
	for _, want := range []string{"public.p_mar", "public.p_feb", "public.p_jan", "detached", "dropped"} {
		if !strings.Contains(said, want) {
			t.Errorf("%q does not name %s", said, want)
		}
	}
	hints := b.said(p, partsLost, "hint")
	if len(hints) == 0 || hints[0] != "walrelay snapshot -c FILE --table public.p --replace" {
		t.Fatalf("hints: %q", hints)
	}
	for _, line := range p.Lines() {
		if line.Field("message") == partsLost && line.Level() != "error" {
			t.Errorf("level %s", line.Level())
		}
	}
	warnings := strings.Join(b.warnings(p), "\n")
	if !strings.Contains(warnings, "public.p_mar") || !strings.Contains(warnings, hints[0]) {
		t.Errorf("warnings of /status: %s", warnings)
	}
	if code, _ := b.get(p, "/readyz"); code != 200 {
		t.Errorf("/readyz gives %d", code)
	}
	b.repair(p, hints[0])
	if w := b.warnings(p); len(w) > 0 {
		t.Errorf("warnings after the repair: %q", w)
	}
	b.foldsP(p)
}

// repair runs a command as it was said.
func (b *partsBed) repair(p *harness.Proc, command string) {
	b.t.Helper()
	args := strings.Fields(strings.Replace(command, "FILE", p.ConfigFile, 1))
	if out, err := exec.CommandContext(b.t.Context(), harness.Binary(b.t), args[1:]...).CombinedOutput(); err != nil {
		b.t.Fatalf("%s: %v: %s", command, err, out)
	}
	harness.WaitFor(b.t, "the table to be emptied", snapLong, func() (bool, error) {
		return slices.ContainsFunc(b.records(b.log(), "p"), func(r snapRecord) bool { return r.Op == "t" && r.Source.Snapshot }), nil
	})
	b.idle(p)
}

// TRUNCATE of a leaf is not in the stream, TRUNCATE of the root is; and whoever rewrites a
// leaf with its rows takes nothing away.
func TestTruncatedPartitionsAreToldFromRewrittenOnes(t *testing.T) {
	b := newPartsBed(t, "CREATE TABLE p_mar PARTITION OF p FOR VALUES FROM ('2026-03-01') TO ('2026-04-01'); INSERT INTO p VALUES (3, '2026-03-01', 'c')")
	p := b.begin()
	b.exec("VACUUM FULL p_jan", "CLUSTER p_feb USING p_feb_pkey", "ALTER TABLE p ALTER v TYPE varchar(9)", "ALTER TABLE p ALTER v TYPE text USING v || ''")
	b.looked(p)
	b.wantSaid(p)
	b.exec("TRUNCATE p_mar")
	b.looked(p)
	b.wantSaid(p, "truncated: public.p_mar")
	b.exec("TRUNCATE p_jan; INSERT INTO p VALUES (4, '2026-01-06', 'new')")
	b.looked(p)
	b.wantSaid(p, "truncated: public.p_mar", "truncated, or rewritten: public.p_jan")
	if len(b.warnings(p)) != 2 {
		t.Errorf("warnings: %q", b.warnings(p))
	}

	b.exec("TRUNCATE p")
	b.looked(p)
	b.must(b.session(), "BEGIN; SAVEPOINT s; TRUNCATE p; RELEASE s; INSERT INTO p VALUES (5, '2026-01-06', 'new'); COMMIT")
	b.looked(p)
	if len(b.warnings(p)) != 0 {
		t.Errorf("the whole table was truncated, and that is in the stream; warnings: %q", b.warnings(p))
	}
	log := b.foldsP(p)
	truncates := map[int32]int{}
	for _, r := range b.records(log, "p") {
		if r.Op == "t" {
			truncates[r.Partition]++
		}
	}
	if len(truncates) != 6 || truncates[0] != 2 || truncates[5] != 2 {
		t.Errorf("truncates by partition of the topic: %v, want 2 in each of 6", truncates)
	}
	b.stop(p)
	b.exec("TRUNCATE p")
	p = b.stream()
	b.looked(p)
	b.wantSaid(p)
	b.foldsP(p)
}

// A tree that is attached brings the rows of all its leaves; one that is detached takes
// them along.
func TestTreesOfPartitionsAreAttachedAndDetached(t *testing.T) {
	b := newPartsBed(t, `CREATE TABLE q2 (id int, d date, v text, PRIMARY KEY (id, d)) PARTITION BY RANGE (d);
		CREATE TABLE q2_apr PARTITION OF q2 FOR VALUES FROM ('2026-04-01') TO ('2026-05-01');
		CREATE TABLE q2_may PARTITION OF q2 FOR VALUES FROM ('2026-05-01') TO ('2026-06-01');
		INSERT INTO q2 VALUES (21, '2026-04-01', 'x'), (22, '2026-05-01', 'y')`)
	p := b.begin()
	b.exec("ALTER TABLE p ATTACH PARTITION q2 FOR VALUES FROM ('2026-04-01') TO ('2026-07-01')")
	b.looked(p)
	b.wantOps(b.foldsP(p), "p", 21, 22, "r")
	b.wantRead(p, "public.q2_apr, public.q2_may")
	b.exec("CREATE TABLE q2_jun PARTITION OF q2 FOR VALUES FROM ('2026-06-01') TO ('2026-07-01'); INSERT INTO p VALUES (23, '2026-06-01', 'z')")
	b.looked(p)
	b.wantOps(b.foldsP(p), "p", 23, 23, "c")
	b.wantRead(p, "public.q2_apr, public.q2_may")
	b.exec("ALTER TABLE p DETACH PARTITION q2")
	b.looked(p)
	b.wantSaid(p, "detached: public.q2_apr, public.q2_jun, public.q2_may")
}

// The read waits for transactions that are older than it, as any does; a kill meanwhile
// does not lose it.
func TestTheReadOfAnAttachedPartitionOutlivesAKill(t *testing.T) {
	b := newPartsBed(t, partsApril)
	p := b.begin()
	open := b.session()
	b.must(open, "BEGIN; SELECT pg_current_xact_id()")
	b.exec(partsAttach)
	p.WaitLog(snapLong, faultMessage(partsAttached))
	p.WaitLog(snapLong, harness.Field("message", "reading tables waits until these transactions end: commit or roll them back, or end them with pg_terminate_backend(pid)"))
	p.Kill()
	b.exec("UPDATE p SET v = 'changed' WHERE id = 8")
	p = b.stream()
	b.must(open, "COMMIT")
	b.waitTable(p, "public.p", allRows)
	log := b.foldsP(p)
	b.wantOps(log, "p", 9, 9, "r")
	b.wantRead(p) // it was asked for before
}

// With publish_via_partition_root off each leaf is a table of its own.
func TestPartitionsPublishedUnderTheirOwnNames(t *testing.T) {
	b := newPartsBed(t, "CREATE PUBLICATION leaves FOR TABLE p")
	b.set("source.tables", []string{"public.p*", "public.apr"})
	b.set("source.publication", "leaves")
	b.set("source.publication-mode", "existing")
	p := b.stream()
	b.waitTable(p, "public.p_jan", allRows)
	b.exec("CREATE TABLE p_mar PARTITION OF p FOR VALUES FROM ('2026-03-01') TO ('2026-04-01'); INSERT INTO p VALUES (3, '2026-03-01', 'c')", partsApril, partsAttach)
	b.waitTable(p, "public.apr", allRows)
	b.waitTable(p, "public.p_mar", allRows)
	b.stop(p)
	// Between two looks: the table never seems to have been away.
	b.exec("ALTER TABLE p DETACH PARTITION apr; UPDATE apr SET v = 'while' WHERE id = 8; INSERT INTO apr VALUES ('while', 7, '2026-04-03');" + partsAttach)
	p = b.start("--until-caught-up")
	if code := p.Wait(snapLong); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	log := b.log()
	for _, table := range []string{"p_jan", "p_feb", "p_mar"} {
		b.folds(log, "", snapTable(table, "id:int4:key d:date:key v:text"))
	}
	b.folds(log, "", snapTable("apr", "v:text id:int4:key d:date:key"))
	if n := len(b.records(log, "p")); n > 0 {
		t.Errorf("%d records in the topic of the root", n)
	}
	b.wantOps(log, "apr", 7, 7, "r")
}

// Rows that cannot be read by themselves are said, and never missing in silence.
func TestAttachedRowsThatAreNotRead(t *testing.T) {
	b := newPartsBed(t, `CREATE TABLE k (id int, v text) PARTITION BY RANGE (id); ALTER TABLE k REPLICA IDENTITY FULL;
		CREATE TABLE k_1 PARTITION OF k FOR VALUES FROM (0) TO (10); INSERT INTO k VALUES (1, 'x');
		CREATE TABLE k_2 (id int, v text); INSERT INTO k_2 VALUES (11, 'y');
		CREATE TABLE ev (event_id uuid, at timestamptz, event_type text, aggregate_id text, payload json, PRIMARY KEY (event_id, at)) PARTITION BY RANGE (at);
		CREATE TABLE ev_1 PARTITION OF ev FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
		CREATE TABLE ev_2 (LIKE ev INCLUDING ALL); INSERT INTO ev_2 VALUES (gen_random_uuid(), '2026-02-02', 'made', 'a', '{}')`)
	b.set("source.tables", []string{"public.p", "public.looks", "public.k"})
	b.set("source.keyless", "inserts")
	b.set("outbox", []map[string]any{{"table": "public.ev", "topic": b.name + ".ev", "snapshot": "all"}})
	p := b.begin()
	b.waitTable(p, "public.k", allRows)
	b.exec("ALTER TABLE k ATTACH PARTITION k_2 FOR VALUES FROM (10) TO (20); ALTER TABLE ev ATTACH PARTITION ev_2 FOR VALUES FROM ('2026-02-01') TO ('2026-03-01')",
		"CREATE TABLE ev_3 PARTITION OF ev FOR VALUES FROM ('2026-03-01') TO ('2026-04-01'); INSERT INTO ev VALUES (gen_random_uuid(), '2026-03-02', 'made', 'b', '{}'); DROP TABLE ev_1")
	b.looked(p)
	warnings := b.warnings(p)
	for _, want := range []string{
		"public.k_2 was attached to public.k, which can only be read whole: its rows from before are missing; repair with: walrelay snapshot -c FILE --table public.k --replace",
		"public.ev_2 was attached to outbox table public.ev: its rows from before are not sent as events",
	} {
		if !slices.ContainsFunc(warnings, func(w string) bool { return strings.HasPrefix(w, want) }) {
			t.Errorf("warnings %q lack %q", warnings, want)
		}
	}
	if strings.Contains(strings.Join(warnings, "\n"), "ev_1") || strings.Contains(strings.Join(warnings, "\n"), "ev_3") {
		t.Errorf("warnings: %q", warnings)
	}
	events := 0
	for _, r := range b.log().Records {
		if r.Topic == b.name+".ev" {
			events++
		}
	}
	if events != 1 {
		t.Errorf("%d events, want 1", events)
	}
}

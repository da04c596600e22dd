package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/harness"
)

// formTables are tables of every kind, each with a column v whose value is 'here' in one
// row; tables without a key have it too.
const formTables = `
CREATE TYPE mood AS ENUM ('sad', 'gl"ad');
CREATE TYPE pair AS (a int, "B c" text);
CREATE DOMAIN short AS varchar(10);
CREATE TABLE types (id bigint PRIMARY KEY, v text, m mood, p pair, ps pair[], r int4range, mr nummultirange, d short, n numeric, f float8, ts timestamptz, iv interval,
  b bytea, j jsonb, js json, u uuid, ip inet, bits varbit, h money, t time, dt date, arr int[][], x xml);
INSERT INTO types VALUES (1, 'here', 'gl"ad', ROW(1, 'x,"y'), ARRAY[ROW(1, NULL)::pair], '[1,5)', '{[1.5,2),(3,)}', 'd', 'NaN', '-Infinity', 'infinity', '1 mon 2 days 00:00:01.5',
  '\x00ff', '{"a": [1, null]}', '{"a" : 1.0 }', '00000000-0000-0000-0000-000000000001', '10.0.0.0/8', B'101', 1.5, '24:00', 'infinity', '{{1,2},{3,NULL}}', '<a/>');
INSERT INTO types (id, v) SELECT g, g::text FROM generate_series(2, 30) g;
CREATE TABLE whole (id int PRIMARY KEY, v text, big text);
ALTER TABLE whole REPLICA IDENTITY FULL; ALTER TABLE whole ALTER COLUMN big SET STORAGE EXTERNAL;
CREATE TABLE indexed (id int, code text NOT NULL, v text);
CREATE UNIQUE INDEX indexed_code ON indexed (code); ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_code;
CREATE TABLE other_key (id int PRIMARY KEY, email text NOT NULL UNIQUE, v text);
ALTER TABLE other_key REPLICA IDENTITY FULL;
CREATE TABLE computed (id int PRIMARY KEY, v text, twice int GENERATED ALWAYS AS (id * 2) STORED);
CREATE TABLE empty_rows (id int PRIMARY KEY, v text, w int);
CREATE TABLE bag (v text, n int);
CREATE TABLE nothing ();
CREATE TABLE "Odd ""Name.x" ("ID" int PRIMARY KEY, v text, "a b" int);
CREATE TABLE tree (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY RANGE (k);
CREATE TABLE tree_low PARTITION OF tree FOR VALUES FROM (0) TO (10) PARTITION BY LIST (k);
CREATE TABLE tree_low_rest PARTITION OF tree_low DEFAULT;
CREATE TABLE tree_high (v text, k int NOT NULL, id int NOT NULL, extra_dropped int);
ALTER TABLE tree_high DROP COLUMN extra_dropped;
ALTER TABLE tree ATTACH PARTITION tree_high FOR VALUES FROM (10) TO (20);
INSERT INTO whole SELECT g, CASE g WHEN 1 THEN 'here' END, repeat('x', 4000) FROM generate_series(1, 30) g;
INSERT INTO indexed SELECT g, 'c' || g, CASE g WHEN 1 THEN 'here' END FROM generate_series(1, 30) g;
INSERT INTO other_key SELECT g, 'm' || g, CASE g WHEN 1 THEN 'here' END FROM generate_series(1, 30) g;
INSERT INTO computed SELECT g, CASE g WHEN 1 THEN 'here' END FROM generate_series(1, 30) g;
INSERT INTO empty_rows SELECT g FROM generate_series(2, 30) g; INSERT INTO empty_rows VALUES (1, 'here', 1);
INSERT INTO bag SELECT 'x', 1 FROM generate_series(1, 30) g; INSERT INTO bag VALUES ('here', 1);
INSERT INTO nothing SELECT FROM generate_series(1, 3);
INSERT INTO "Odd ""Name.x" SELECT g, CASE g WHEN 1 THEN 'here' END FROM generate_series(1, 30) g;
INSERT INTO tree SELECT g, g % 20, CASE g WHEN 1 THEN 'here' END FROM generate_series(1, 60) g`

// formStep writes the rows from 2 on.
func formStep(ctx context.Context, conn *pgx.Conn, session, i int) error {
	id := 2 + (session*7+i)%28
	for _, sql := range []string{
		`UPDATE types SET v = v || '.', m = 'sad' WHERE id = $1 AND length(v) < 100`,
		`UPDATE whole SET v = coalesce(v, '') || '.' WHERE id = $1`,
		`UPDATE indexed SET v = coalesce(v, '') || '.', code = 'd' || code WHERE id = $1 AND length(code) < 50`,
		`UPDATE other_key SET v = coalesce(v, '') || '.', email = 'n' || email WHERE id = $1 AND length(email) < 50`,
		`UPDATE computed SET id = id + 1000 WHERE id = $1`,
		`UPDATE computed SET id = id - 1000, v = v || '.' WHERE id = $1::int + 1000`,
		`UPDATE empty_rows SET w = CASE WHEN w IS NULL THEN 1 END WHERE id = $1`,
		`INSERT INTO bag VALUES ('x', $1::int % 3)`,
		`INSERT INTO nothing SELECT FROM generate_series(1, $1::int % 2)`,
		`DELETE FROM "Odd ""Name.x" WHERE "ID" = $1`,
		`INSERT INTO "Odd ""Name.x" VALUES ($1, 'again', 1) ON CONFLICT ("ID") DO UPDATE SET v = excluded.v`,
	} {
		if _, err := conn.Exec(ctx, sql, id); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	// Rows of its own, since of two sessions that move one row one gets an error.
	if _, err := conn.Exec(ctx, "UPDATE tree SET k = (k + 7) % 20 WHERE id = $1", 2*id+session%2); err != nil {
		return fmt.Errorf("move a row: %w", err)
	}
	return nil
}

// TestVerifyOfEveryForm finds nothing in tables and records of every kind, and the one
// value that was changed in each topic.
func TestVerifyOfEveryForm(t *testing.T) {
	for name, settings := range map[string]map[string]any{
		"plain":         {},
		"debezium":      {"format.types": "debezium", "format.debezium.schemas-enable": true},
		"no schema":     {"format.types": "debezium", "format.debezium.schemas-enable": false},
		"marker":        {"format.toast": "marker"},
		"bare":          {"format.envelope": false},
		"bare field":    {"format.envelope": false, "format.deletes": "field"},
		"no tombstones": {"format.tombstones": false},
		"one partition": {"topics.partitions": 1},
		"hidden": {"source.columns": map[string]any{
			"public.types": map[string]any{"exclude": []string{"b"}, "mask": map[string]any{"u": "sha256", "n": "null"}},
			"public.whole": map[string]any{"exclude": []string{"big"}},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newSnapBed(t, formTables)
			b.set("source.keyless", "inserts")
			b.set("source.keys", map[string]any{"public.other_key": []string{"email"}})
			for path, value := range settings {
				b.set(path, value)
			}
			p := b.start()
			tables := []string{"types", "whole", "indexed", "other_key", "computed", "empty_rows", "bag", "nothing", `Odd "Name.x`, "tree"}
			for _, table := range tables {
				b.waitRead(p, "public."+table)
			}
			w := b.write(2, 40*time.Millisecond, formStep)
			for range 2 {
				b.sound(p)
			}
			b.sound(p, "--memory", "32KiB")
			w.end()
			if r := b.sound(p); len(r.Tables) != len(tables) {
				t.Errorf("%d tables, want %d", len(r.Tables), len(tables))
			}
			var out []*kgo.Record
			log := b.settled(p)
			seen := map[string]bool{}
			for _, r := range log.Records {
				if bytes.Contains(r.Value, []byte(`"here"`)) && !seen[r.Topic] {
					seen[r.Topic] = true
					x := again(r)
					x.Headers, x.Value = nil, bytes.ReplaceAll(r.Value, []byte(`"here"`), []byte(`"gone"`))
					out = append(out, x)
				}
			}
			b.produce(out...)
			r, code, said := b.verify(p)
			if code != 3 || len(out) != len(tables)-1 {
				t.Fatalf("exit code %d, want 3; %d records changed: %s", code, len(out), said)
			}
			for _, table := range r.Tables {
				switch table.Table {
				case "public.nothing":
					if table.Found != nil {
						t.Errorf("%s: %+v", table.Table, table.Found)
					}
				case "public.bag": // a row more, which the table may have had
					if table.Found != nil || len(table.Notes) == 0 {
						t.Errorf("%s: %+v, notes %q", table.Table, table.Found, table.Notes)
					}
				default:
					if len(table.Found) != 1 || table.Found[0].Kind != "differing" || strings.Join(table.Found[0].Columns, ",") != "v" ||
						string(table.Found[0].Table) != `{"v":"here"}` || string(table.Found[0].Topic) != `{"v":"gone"}` {
						t.Errorf("%s: %+v", table.Table, table.Found)
					}
				}
			}
		})
	}
}

// TestVerifyOfTablesThatNoSnapshotHasRead says why rows are missing, and finds nothing in
// those that were changed since.
func TestVerifyOfTablesThatNoSnapshotHasRead(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1), (2);
		CREATE TABLE left_out (id int PRIMARY KEY, v text); INSERT INTO left_out VALUES (1)`)
	b.set("snapshot.exclude", []string{"public.left_out"})
	p := b.start()
	b.waitRead(p, "public.t")
	b.pg.Exec("INSERT INTO left_out VALUES (2, 'x')")
	if r := b.finds(p, "public.left_out", `missing {"id":1}`); !strings.Contains(strings.Join(r.Tables[0].Notes, " "), "no snapshot has read") {
		t.Errorf("notes %q", r.Tables[0].Notes)
	}
	b.sound(p, "--table", "public.t")
	// A table that joins later is read by the next start.
	b.pg.Exec("CREATE TABLE later (id int PRIMARY KEY, v text); INSERT INTO later SELECT g FROM generate_series(1, 10) g")
	b.stop(p)
	p = b.start()
	b.waitRead(p, "public.later")
	b.sound(p, "--table", "public.later", "--table", "public.t")
}

// TestVerifySeesWhatIsWrongAndOnlyThat looks at a topic that a foreign producer has written
// to, in a transaction that it committed and in one that it aborted.
func TestVerifySeesWhatIsWrongAndOnlyThat(t *testing.T) {
	b := newSnapBed(t, "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 1000) g")
	p := b.start()
	b.waitRead(p, "public.t")
	w := b.write(2, time.Millisecond, func(ctx context.Context, conn *pgx.Conn, session, i int) error {
		_, err := conn.Exec(ctx, "INSERT INTO t VALUES ($1, 'w') ON CONFLICT (id) DO UPDATE SET v = excluded.v || $2::int", 10+(session*450+i)%900, i)
		return err
	})
	b.sound(p)
	topic := b.topic("t")
	record := func(id int, value string) *kgo.Record {
		r := &kgo.Record{Topic: topic, Key: fmt.Appendf(nil, `{"id":%d}`, id), Partition: int32(id % 6)}
		if value != "" {
			r.Value = []byte(value)
		}
		return r
	}
	foreign := `{"before":null,"after":{"id":%d,"v":"foreign"},"source":{"schema":"public","table":"t","tx_id":3,"lsn":1},"op":"%s"}`
	b.abort(record(3, ""), record(6000, fmt.Sprintf(foreign, 6000, "c")))
	b.sound(p)
	b.produce(record(1, ""), record(5000, fmt.Sprintf(foreign, 5000, "c")), record(2, fmt.Sprintf(foreign, 2, "u")))
	r := b.finds(p, "public.t", `missing {"id":1}`, `extra {"id":5000}`, `differing {"id":2}`)
	for _, d := range r.Tables[0].Found {
		if d.Kind == "differing" && (strings.Join(d.Columns, ",") != "v" || string(d.Table) != `{"v":"v2"}` || string(d.Topic) != `{"v":"foreign"}`) {
			t.Errorf("%+v", d)
		}
	}
	w.end()
	// Nothing was changed on either side.
	b.settled(p)
	before, rows := b.topicEnds(topic), b.pg.Value("SELECT md5(string_agg(t::text, ',' ORDER BY id)) || pg_current_wal_insert_lsn() FROM t")
	b.finds(p, "public.t", `missing {"id":1}`, `extra {"id":5000}`, `differing {"id":2}`)
	if after := b.topicEnds(topic); after != before {
		t.Errorf("the topic ended at %s, and ends at %s", before, after)
	}
	if after := b.pg.Value("SELECT md5(string_agg(t::text, ',' ORDER BY id)) || pg_current_wal_insert_lsn() FROM t"); strings.Split(after, "/")[0] != strings.Split(rows, "/")[0] {
		t.Errorf("the table was %s, and is %s", rows, after)
	}
}

// abort produces records in a Kafka transaction that is aborted.
func (b *snapBed) abort(records ...*kgo.Record) {
	b.t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(b.kafka.Brokers()...), kgo.TransactionalID(b.name+"-aborted"), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		b.t.Fatal(err)
	}
	defer cl.Close()
	if err := cl.BeginTransaction(); err != nil {
		b.t.Fatal(err)
	}
	if err := cl.ProduceSync(b.t.Context(), records...).FirstErr(); err != nil {
		b.t.Fatal(err)
	}
	if err := cl.EndTransaction(b.t.Context(), kgo.TryAbort); err != nil {
		b.t.Fatal(err)
	}
}

// topicEnds tells where the partitions of a topic end.
func (b *snapBed) topicEnds(topic string) string {
	b.t.Helper()
	listed, err := kadm.NewClient(b.kafka.Client(b.t)).ListEndOffsets(b.t.Context(), topic)
	if err != nil {
		b.t.Fatal(err)
	}
	var out []string
	for partition, o := range listed[topic] {
		out = append(out, fmt.Sprint(partition, "@", o.Offset))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// TestVerifyInBadSurroundings ends with a clear error, and leaves nothing behind.
func TestVerifyInBadSurroundings(t *testing.T) {
	b := newSnapBed(t, verifyTables)
	p := b.start()
	for _, table := range []string{"t", "Mixed Case", "parted", "emptied"} {
		b.waitRead(p, "public."+table)
	}
	b.caughtUp(p)
	dir := t.TempDir()
	want := func(code int, text string) func(verifyReport, int, string) {
		return func(_ verifyReport, got int, said string) {
			t.Helper()
			if got != code || !strings.Contains(said, text) {
				t.Errorf("exit code %d, want %d and %q: %s", got, code, text, said)
			}
		}
	}
	want(1, "--temp-dir")(b.verify(p, "--memory", "1KiB", "--temp-dir", filepath.Join(dir, "nowhere")))
	want(1, "kafka.brokers")(b.verify(b.altered(p, b.kafka.Brokers()[0], "127.0.0.1:1")))
	want(1, "connect")(b.verify(b.altered(p, b.gate.addr(), "127.0.0.1:1")))

	// A role that may not read one of the tables.
	b.pg.Exec(`DO $$ BEGIN CREATE ROLE verify_reader LOGIN REPLICATION PASSWORD 'reader'; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
		GRANT USAGE ON SCHEMA public TO verify_reader; GRANT SELECT ON t, "Mixed Case", emptied TO verify_reader`)
	r, code, said := b.verify(b.altered(p, regexp.MustCompile(`postgres:[^:@/]*@`).FindString(b.pg.DSN()), "verify_reader:reader@"))
	if code != 4 || r.Refused != 1 || r.Differences != 0 || !strings.Contains(said, "parted") || !strings.Contains(said, "GRANT") {
		t.Errorf("exit code %d, %d refused, want 4 and the table that cannot be read: %s", code, r.Refused, said)
	}

	// Connections that are lost while the table is read.
	b.gate.on(gateOnce(gateHold, rowsOf("t")))
	proc := b.verifying(p, "--table", "public.t")
	b.gate.waitHeld(t)
	b.gate.cut()
	b.gate.release()
	if code := proc.wait(); code != 1 || !strings.Contains(proc.out.String(), "verify public.t: ") {
		t.Errorf("exit code %d, want 1 and the table: %s", code, proc.out.String())
	}

	// An interrupt while rows are in files.
	b.gate.on(gateOnce(gateHold, rowsOf("parted")))
	proc = b.verifying(p, "--memory", "1KiB", "--temp-dir", dir)
	b.gate.waitHeld(t)
	if err := proc.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := proc.wait(); code != 1 {
		t.Errorf("exit code %d after an interrupt, want 1: %s", code, proc.out.String())
	}
	b.gate.release()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("files are left: %v, %v", left, err)
	}

	// A topic that is gone keeps none of the others from being compared. The connector, whose
	// connections were cut too, makes topics when it begins again: that is behind it.
	b.caughtUp(p)
	if _, err := kadm.NewClient(b.kafka.Client(t)).DeleteTopics(t.Context(), b.topic("parted")); err != nil {
		t.Fatal(err)
	}
	r, code, said = b.verify(p)
	if code != 4 || r.Refused != 1 || !strings.Contains(said, "topic "+b.topic("parted")+" does not exist") {
		t.Errorf("exit code %d, want 4 and the topic: %s", code, said)
	}
}

// altered is the connector's configuration with one text in place of another.
func (b *snapBed) altered(p *harness.Proc, from, to string) *harness.Proc {
	b.t.Helper()
	text, err := os.ReadFile(p.ConfigFile)
	if err != nil {
		b.t.Fatal(err)
	}
	if !bytes.Contains(text, []byte(from)) {
		b.t.Fatalf("the configuration has no %q: %s", from, text)
	}
	file := filepath.Join(b.t.TempDir(), "walrelay.yaml")
	if err := os.WriteFile(file, bytes.ReplaceAll(text, []byte(from), []byte(to)), 0o600); err != nil {
		b.t.Fatal(err)
	}
	return &harness.Proc{ConfigFile: file}
}

// verifying is a verify that runs.
type verifying struct {
	t   *testing.T
	cmd *exec.Cmd
	out *bytes.Buffer
}

func (b *snapBed) verifying(p *harness.Proc, args ...string) *verifying {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), snapLong)
	b.t.Cleanup(cancel)
	v := &verifying{t: b.t, out: &bytes.Buffer{}, cmd: exec.CommandContext(ctx, harness.Binary(b.t), append([]string{"verify", "-c", p.ConfigFile}, args...)...)}
	v.cmd.Stdout, v.cmd.Stderr = v.out, v.out
	if err := v.cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	return v
}

func (v *verifying) wait() int {
	v.t.Helper()
	_ = v.cmd.Wait() // the code says it
	return v.cmd.ProcessState.ExitCode()
}

// TestVerifyFoldsReplayedRecordsByTheirPosition looks at a topic in which old records stand
// behind newer ones, delivered again in place.
func TestVerifyFoldsReplayedRecordsByTheirPosition(t *testing.T) {
	b := newSnapBed(t, "CREATE TABLE t (id int PRIMARY KEY, v text, big text); ALTER TABLE t ALTER COLUMN big SET STORAGE EXTERNAL")
	p := b.start()
	b.waitRead(p, "public.t")
	begin := b.pg.Value("SELECT pg_current_wal_insert_lsn()")
	b.pg.Exec("INSERT INTO t SELECT g, 'old', repeat('x', 3000) FROM generate_series(1, 50) g")
	b.pg.Exec("DELETE FROM t WHERE id > 40; TRUNCATE t; INSERT INTO t SELECT g, 'old', repeat('y', 3000) FROM generate_series(1, 50) g")
	b.pg.Exec("UPDATE t SET id = id + 1000 WHERE id < 10")
	b.caughtUp(p)
	end := b.pg.Value("SELECT pg_current_wal_insert_lsn()")
	b.pg.Exec("UPDATE t SET v = 'new' WHERE id % 2 = 0; DELETE FROM t WHERE id = 31")
	records := len(b.settled(p).Records)
	cmd := exec.CommandContext(t.Context(), harness.Binary(t), "replay", "-c", p.ConfigFile, "--from-lsn", begin, "--to-lsn", end, "--in-place", "--yes")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("walrelay replay: %v: %s", err, out)
	}
	log := b.log()
	replayed := 0
	for _, r := range log.Records {
		if _, marked := r.Headers["replay"]; marked {
			replayed++
		}
	}
	if replayed < 100 || len(log.Records) < records+replayed {
		t.Fatalf("%d records are replayed, of %d", replayed, len(log.Records))
	}
	b.sound(p)
	b.sound(p, "--memory", "32KiB")
	// A record that comes again without the mark is doubled.
	for _, r := range log.Records {
		if _, marked := r.Headers["replay"]; !marked && string(r.Key) == `{"id":20}` && bytes.Contains(r.Value, []byte(`"new"`)) {
			b.produce(again(r))
		}
	}
	b.finds(p, "public.t", `doubled {"id":20}`)
}

// TestVerifyOfHotKeysWithoutAnEnvelope finds nothing in keys that are written all the time,
// and what is wrong with the others.
func TestVerifyOfHotKeysWithoutAnEnvelope(t *testing.T) {
	b := newSnapBed(t, "CREATE TABLE t (id int PRIMARY KEY, v text, n int); INSERT INTO t SELECT g, 'v' || g, 0 FROM generate_series(1, 100) g")
	b.set("format.envelope", false)
	p := b.start()
	b.waitRead(p, "public.t")
	log := b.log()
	w := b.write(3, 3*time.Millisecond, func(ctx context.Context, conn *pgx.Conn, session, i int) error {
		id := 1 + (session*3+i)%8
		sql := "INSERT INTO t VALUES ($1, 'hot', 1) ON CONFLICT (id) DO UPDATE SET n = t.n + 1"
		if i%10 == 9 {
			sql = "DELETE FROM t WHERE id = $1"
		}
		_, err := conn.Exec(ctx, sql, id)
		return err
	})
	for range 4 {
		b.sound(p)
	}
	wrong := b.last(log, b.topic("t"), `{"id":50}`)
	wrong.Headers, wrong.Value = nil, bytes.Replace(wrong.Value, []byte(`"v50"`), []byte(`"wrong"`), 1)
	b.produce(wrong)
	for range 3 {
		b.finds(p, "public.t", `differing {"id":50}`)
	}
	w.end()
	b.finds(p, "public.t", `differing {"id":50}`)
}

// TestVerifyOfATopicThatRetentionHasCut says that it was cut, and finds nothing wrong with
// the rows whose records are still there.
func TestVerifyOfATopicThatRetentionHasCut(t *testing.T) {
	b := newSnapBed(t, "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'v' FROM generate_series(1, 12) g")
	b.set("topics.partitions", 1)
	p := b.start()
	b.waitRead(p, "public.t")
	b.pg.Exec("UPDATE t SET v = 'newer' WHERE id > 2")
	b.caughtUp(p)
	adm := kadm.NewClient(b.kafka.Client(t))
	cut := kadm.Offsets{}
	cut.AddOffset(b.topic("t"), 0, 12, -1)
	if _, err := adm.DeleteRecords(t.Context(), cut); err != nil {
		t.Fatal(err)
	}
	r := b.finds(p, "public.t", `missing {"id":1}`, `missing {"id":2}`)
	if !strings.Contains(strings.Join(r.Tables[0].Notes, " "), "retention") {
		t.Errorf("notes %q", r.Tables[0].Notes)
	}
}

// TestVerifyOfLeavesThatArePublishedByThemselves compares each with its own topic.
func TestVerifyOfLeavesThatArePublishedByThemselves(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE tree (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY LIST (k);
		CREATE TABLE leaf_0 PARTITION OF tree FOR VALUES IN (0); CREATE TABLE leaf_1 PARTITION OF tree FOR VALUES IN (1);
		INSERT INTO tree SELECT g, g % 2, 'v' FROM generate_series(1, 40) g; CREATE PUBLICATION by_leaf FOR TABLE tree`)
	b.set("source.publication", "by_leaf")
	b.set("source.publication-mode", "existing")
	p := b.start()
	b.waitRead(p, "public.leaf_0")
	b.waitRead(p, "public.leaf_1")
	w := b.write(2, 10*time.Millisecond, func(ctx context.Context, conn *pgx.Conn, session, i int) error {
		_, err := conn.Exec(ctx, "UPDATE tree SET k = 1 - k, v = v || '.' WHERE id = $1 AND length(v) < 50", 1+(session*20+i)%40)
		return err
	})
	b.sound(p)
	w.end()
	if r := b.sound(p); len(r.Tables) != 2 || r.Tables[0].Rows+r.Tables[1].Rows != 40 {
		t.Errorf("%+v", r.Tables)
	}
	b.produce(&kgo.Record{Topic: b.topic("leaf_1"), Key: []byte(`{"id":1000,"k":1}`)}, &kgo.Record{
		Topic: b.topic("leaf_0"), Key: []byte(`{"id":1000,"k":0}`),
		Value: []byte(`{"before":null,"after":{"id":1000,"k":0,"v":"x"},"source":{"schema":"public","table":"leaf_0","tx_id":3},"op":"c"}`),
	})
	b.finds(p, "public.leaf_0", `extra {"id":1000,"k":0}`)
	b.sound(p, "--table", "public.leaf_1")
}

// TestVerifyIsRefusedWithPolling names the mode, and looks at nothing.
func TestVerifyIsRefusedWithPolling(t *testing.T) {
	b := newSnapBed(t, fmt.Sprintf(eventsTable, ", PRIMARY KEY (event_id)", ""))
	file := filepath.Join(t.TempDir(), "walrelay.yaml")
	text := fmt.Sprintf("name: %s\nsource: {dsn: %q, mode: polling}\nkafka: {brokers: [%q]}\noutbox: [{table: public.outbox, after: mark}]\n", b.name, b.pg.DSN(), b.kafka.Brokers()[0])
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, code, said := b.verify(&harness.Proc{ConfigFile: file}); code != 2 || !strings.Contains(said, "source.mode is polling") {
		t.Errorf("exit code %d, want 2 and the mode: %s", code, said)
	}
}

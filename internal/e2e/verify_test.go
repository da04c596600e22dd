package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

// verifyReport is what verify -o json prints, as far as the tests look at it.
type verifyReport struct {
	Tables []struct {
		Table, Kind, Refused, LSN                                         string
		Rows, Records, Compared, Equal                                    int64
		Missing, Extra, Differing, Doubled, Disordered, Unreadable, Total int64
		Sampled                                                           bool
		Notes                                                             []string
		Found                                                             []struct {
			Kind         string
			Key          json.RawMessage
			Columns      []string
			Table, Topic json.RawMessage
		}
	}
	Differences int64
	Refused     int
	Notes       []string
}

// verify runs "walrelay verify -o json" with a connector's configuration.
func (b *snapBed) verify(p *harness.Proc, args ...string) (r verifyReport, code int, said string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), snapLong)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Binary(b.t), append([]string{"verify", "-c", p.ConfigFile, "-o", "json"}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if cmd.ProcessState == nil {
		b.t.Fatalf("run walrelay verify: %v", err)
	}
	if code = cmd.ProcessState.ExitCode(); stdout.Len() > 0 {
		// Values are compared as text, and those in the report are indented with it.
		var compact bytes.Buffer
		if err := json.Compact(&compact, stdout.Bytes()); err != nil {
			b.t.Fatalf("verify printed %s: %v", stdout.Bytes(), err)
		}
		if err := json.Unmarshal(compact.Bytes(), &r); err != nil {
			b.t.Fatalf("verify printed %s: %v", stdout.Bytes(), err)
		}
	}
	return r, code, stderr.String() + stdout.String() // the shorter one first
}

// sound checks that verify finds nothing.
func (b *snapBed) sound(p *harness.Proc, args ...string) verifyReport {
	b.t.Helper()
	r, code, said := b.verify(p, args...)
	if code != 0 || r.Differences != 0 || r.Refused != 0 {
		b.t.Fatalf("verify: exit code %d, want 0: %s", code, said)
	}
	return r
}

// finds checks that verify finds these differences of one table and no other ones, each
// written "kind key".
func (b *snapBed) finds(p *harness.Proc, table string, want ...string) verifyReport {
	b.t.Helper()
	r, code, said := b.verify(p, "--table", table)
	if code != 3 || len(r.Tables) != 1 {
		b.t.Fatalf("verify: exit code %d, want 3: %s", code, said)
	}
	var got []string
	for _, d := range r.Tables[0].Found {
		got = append(got, d.Kind+" "+string(d.Key))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) || r.Differences != int64(len(want)) {
		b.t.Errorf("verify found %q, want %q: %s", got, want, said)
	}
	return r
}

// produce writes records in one Kafka transaction, as whoever damages a topic would.
func (b *snapBed) produce(records ...*kgo.Record) {
	b.t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(b.kafka.Brokers()...), kgo.TransactionalID(b.name+"-damage"), kgo.RecordPartitioner(kgo.ManualPartitioner()))
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
	if err := cl.EndTransaction(b.t.Context(), kgo.TryCommit); err != nil {
		b.t.Fatal(err)
	}
}

// last gives the last record of a key with a value.
func (b *snapBed) last(log *cdctest.Log, topic, key string) *kgo.Record {
	b.t.Helper()
	var found *kgo.Record
	for _, r := range log.Records {
		if r.Topic == topic && string(r.Key) == key && r.Value != nil && (found == nil || r.Offset > found.Offset) {
			found = again(r)
			found.Offset = r.Offset
		}
	}
	if found == nil {
		b.t.Fatalf("topic %s has no record of key %s", topic, key)
	}
	return found
}

// again is a record to be produced that is the same as r.
func again(r cdctest.Record) *kgo.Record {
	x := &kgo.Record{Topic: r.Topic, Partition: r.Partition, Key: r.Key, Value: r.Value}
	for name, value := range r.Headers {
		x.Headers = append(x.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
	}
	return x
}

const verifyTables = `
CREATE TABLE t (id int PRIMARY KEY, v text, big text);
ALTER TABLE t ALTER COLUMN big SET STORAGE EXTERNAL;
INSERT INTO t SELECT i, 'v' || i, repeat('x', CASE WHEN i % 10 = 0 THEN 5000 ELSE 3 END) FROM generate_series(1, 500) i;
CREATE TABLE "Mixed Case" ("Key A" text, b int, "Val""ue" jsonb, PRIMARY KEY ("Key A", b));
INSERT INTO "Mixed Case" SELECT 'k' || i, i % 3, json_build_object('n', i, 'q', 'a"b\c')::jsonb FROM generate_series(1, 100) i;
CREATE TABLE parted (id int, part int, v numeric, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
CREATE TABLE parted_0 PARTITION OF parted FOR VALUES IN (0);
CREATE TABLE parted_1 PARTITION OF parted DEFAULT;
INSERT INTO parted SELECT i, i % 2, i / 3.0 FROM generate_series(1, 100) i;
CREATE SEQUENCE moves;
CREATE TABLE emptied (id int PRIMARY KEY);
INSERT INTO emptied SELECT generate_series(1, 20)`

// verifyStep is one transaction of a writer, which touches everything that is hard to fold:
// keys that change with columns that are not in the WAL, deletes, truncates.
func verifyStep(ctx context.Context, conn *pgx.Conn, session, i int) error {
	id := session*1000 + i%150
	var sql string
	switch i % 9 {
	case 0:
		sql = `INSERT INTO t VALUES ($1, 'new', repeat('y', 4000)) ON CONFLICT (id) DO UPDATE SET v = excluded.v`
	case 1:
		sql = `UPDATE t SET v = v || '+' WHERE id % 97 = $1::int % 97 AND length(v) < 200`
	case 2:
		sql = `DELETE FROM t WHERE id = $1::int - 20`
	case 3:
		sql = `UPDATE t SET id = id + 100000 WHERE id = $1::int - 5`
	case 4:
		sql = `UPDATE "Mixed Case" SET "Val""ue" = jsonb_build_object('n', $1::int) WHERE b = $1::int % 3`
	case 5:
		sql = `INSERT INTO parted VALUES ($1, $1::int % 2, random()) ON CONFLICT (id, part) DO UPDATE SET v = excluded.v`
	case 6:
		sql = `UPDATE parted SET part = 10 + nextval('moves')::int WHERE id = $1::int - 1 AND part < 10`
	case 7:
		sql = `INSERT INTO emptied VALUES ($1) ON CONFLICT DO NOTHING`
	default:
		if i%900 != 8 {
			sql = `DELETE FROM emptied WHERE id = $1::int - 1`
			break
		}
		_, err := conn.Exec(ctx, "TRUNCATE emptied")
		return err
	}
	_, err := conn.Exec(ctx, sql, id)
	return err
}

// TestVerifyFindsNothingUnderLiveWrites looks again and again while sessions write.
func TestVerifyFindsNothingUnderLiveWrites(t *testing.T) {
	for name, settings := range map[string]map[string]any{
		"plain":    {},
		"debezium": {"format.types": "debezium", "format.debezium.schemas-enable": true},
		"marker":   {"format.toast": "marker"},
		"bare":     {"format.envelope": false},
		"masked":   {"source.columns": map[string]any{"public.t": map[string]any{"mask": map[string]any{"v": "sha256"}, "exclude": []string{"big"}}}},
		"compact":  {"topics.config": map[string]any{"cleanup.policy": "compact"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newSnapBed(t, verifyTables)
			for path, value := range settings {
				b.set(path, value)
			}
			p := b.start()
			for _, table := range []string{"public.t", "public.Mixed Case", "public.parted", "public.emptied"} {
				b.waitRead(p, table)
			}
			pause := 2 * time.Millisecond
			if name == "bare" {
				pause = 30 * time.Millisecond // its records do not tell their transaction, so that hot keys stay in doubt
			}
			w := b.write(3, pause, verifyStep)
			for range 2 {
				b.sound(p)
			}
			b.sound(p, "--memory", "64KiB")
			if r := b.sound(p, "--sample", "20", "--table", "public.t"); !r.Tables[0].Sampled || r.Tables[0].Compared > 40 {
				t.Errorf("a sample of 20 keys beside writers compared %d, sampled %t", r.Tables[0].Compared, r.Tables[0].Sampled)
			}
			w.end()
			// Beside writers some of the sample may be deleted before they are looked at again.
			if r := b.sound(p, "--sample", "20", "--table", "public.t"); !r.Tables[0].Sampled || r.Tables[0].Compared < 20 || r.Tables[0].Compared > 40 {
				t.Errorf("a sample of 20 keys compared %d, sampled %t", r.Tables[0].Compared, r.Tables[0].Sampled)
			}
			r := b.sound(p)
			for _, table := range r.Tables {
				want := b.pg.Value("SELECT count(*) FROM " + pgx.Identifier(strings.SplitN(table.Table, ".", 2)).Sanitize())
				if got := strconv.FormatInt(table.Rows, 10); got != want || table.Equal != table.Rows {
					t.Errorf("%s: %s rows, %d equal, want %s", table.Table, got, table.Equal, want)
				}
			}
		})
	}
}

// TestVerifyFindsInjectedDifferences damages a topic in each way that a consumer would
// suffer from, while other rows are written.
func TestVerifyFindsInjectedDifferences(t *testing.T) {
	b := newSnapBed(t, verifyTables)
	p := b.start()
	b.waitRead(p, "public.t")
	b.pg.Exec("UPDATE t SET v = 'twice' WHERE id = 40; DELETE FROM t WHERE id = 41")
	log := b.settled(p)
	w := b.write(2, 5*time.Millisecond, func(ctx context.Context, conn *pgx.Conn, session, i int) error {
		_, err := conn.Exec(ctx, "UPDATE t SET v = v || '.' WHERE id = $1", 100+session*100+i%100)
		return err
	})
	topic := b.topic("t")
	key := func(id int) string { return `{"id":` + strconv.Itoa(id) + `}` }

	// A record that comes once more, of the stream and of the snapshot.
	doubled, read := b.last(log, topic, key(40)), b.last(log, topic, key(50))
	// A changed value, in place of the last one and without a trace of where it comes from.
	changed := b.last(log, topic, key(60))
	changed.Value = bytes.Replace(changed.Value, []byte(`"v60"`), []byte(`"v6O"`), 1)
	changed.Headers = nil
	// A delete too many, which is a row lost; and a row that was deleted and comes back, which
	// is a delete lost.
	lost := b.last(log, topic, key(70))
	lost.Value, lost.Headers = nil, nil
	undeleted := b.last(log, topic, key(41))
	undeleted.Headers = nil
	undeleted.Value = bytes.Replace(bytes.Replace(undeleted.Value, []byte(`"before":{`), []byte(`"before":null,"after":{`), 1), []byte(`,"after":null,"op":"d"`), []byte(`,"op":"c"`), 1)
	unreadable := b.last(log, topic, key(80))
	unreadable.Value, unreadable.Headers = []byte(`{"half":`), nil
	b.produce(doubled, read, changed, lost, undeleted, unreadable)
	// A row that never came: the publication did not have the table for a moment.
	b.pg.Exec(fmt.Sprintf(`ALTER PUBLICATION %q SET (publish = 'update, delete, truncate'); INSERT INTO t VALUES (90000, 'unseen', 'x'); DELETE FROM t WHERE id = 90`, b.slot()))
	b.pg.Exec(fmt.Sprintf(`ALTER PUBLICATION %q SET (publish = 'insert, update, truncate'); DELETE FROM t WHERE id = 91`, b.slot()))
	b.pg.Exec(fmt.Sprintf(`ALTER PUBLICATION %q SET (publish = 'insert, update, delete, truncate')`, b.slot()))

	r := b.finds(p, "public.t", "doubled "+key(40), "doubled "+key(50), "differing "+key(60), "missing "+key(70), "extra "+key(41),
		"unreadable "+key(80), "missing "+key(90000), "extra "+key(91))
	for _, d := range r.Tables[0].Found {
		if d.Kind == "differing" && (string(d.Table) != `{"v":"v60"}` || string(d.Topic) != `{"v":"v6O"}`) {
			t.Errorf("the values of key 60 are %s and %s", d.Table, d.Topic)
		}
	}
	w.end()
	// The other tables are as they were.
	b.sound(p, "--table", "public.Mixed Case", "--table", "public.parted")
}

// TestVerifyOfAConnectorThatDoesNotRun is exact for what is delivered, and refused while
// something is not.
func TestVerifyOfAConnectorThatDoesNotRun(t *testing.T) {
	b := newSnapBed(t, verifyTables)
	p := b.start()
	b.waitRead(p, "public.t")
	b.pg.Exec("UPDATE t SET v = 'before' WHERE id <= 50")
	b.caughtUp(p)
	p.Kill()
	b.pg.Exec("CREATE TABLE elsewhere (a int PRIMARY KEY)") // WAL that no consumer waits for
	b.sound(p, "--table", "public.t")
	b.pg.Exec("UPDATE t SET v = 'after' WHERE id = 1")
	if _, code, said := b.verify(p, "--table", "public.t"); code != 4 || !strings.Contains(said, "does not run") {
		t.Errorf("exit code %d, want 4 and why: %s", code, said)
	}
	b.untilCaughtUp()
	b.sound(p, "--table", "public.t")
}

// TestVerifyRefusesWhatCannotBeCompared gives 4 with what to do, and 2 for flags.
func TestVerifyRefusesWhatCannotBeCompared(t *testing.T) {
	b := newSnapBed(t, verifyTables)
	b.set("source.tables", []string{"public.*"})
	b.gate.on(gateOnce(gateHold, rowsOf("t")))
	p := b.start()
	b.gate.waitHeld(t)
	for _, c := range []struct {
		code int
		text string
		args []string
	}{
		{4, "snapshot of public.t is not done", []string{"--table", "public.t"}},
		{4, "is not published", []string{"--table", "public.nowhere"}},
		{2, "does not capture", []string{"--table", "pg_catalog.pg_class"}},
		{2, "--sample -1", []string{"--sample", "-1"}},
	} {
		if _, code, said := b.verify(p, c.args...); code != c.code || !strings.Contains(said, c.text) {
			t.Errorf("verify %v: exit code %d, want %d and %q: %s", c.args, code, c.code, c.text, said)
		}
	}
	b.gate.release()
	b.waitRead(p, "public.t")
	b.sound(p)
}

// TestVerifyOfTablesWithoutAKey compares them as multisets.
func TestVerifyOfTablesWithoutAKey(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE bag (a int, b text); INSERT INTO bag SELECT i % 5, 'x' FROM generate_series(1, 50) i;
		CREATE TABLE full_bag (a int, b text); ALTER TABLE full_bag REPLICA IDENTITY FULL; INSERT INTO full_bag SELECT i % 5, 'x' FROM generate_series(1, 50) i`)
	b.set("source.keyless", "inserts")
	p := b.start()
	b.waitRead(p, "public.bag")
	b.waitRead(p, "public.full_bag")
	b.pg.Exec("INSERT INTO bag VALUES (1, 'x'), (9, 'y'); INSERT INTO full_bag VALUES (1, 'x'), (9, 'y'); UPDATE full_bag SET b = 'z' WHERE a = 2; DELETE FROM full_bag WHERE a = 3")
	b.sound(p)
	b.pg.Exec("DELETE FROM bag WHERE a = 4")
	if r := b.sound(p, "--table", "public.bag"); len(r.Tables[0].Notes) == 0 {
		t.Error("no note tells of the rows that the table has no longer")
	}
	log := b.settled(p)
	for _, table := range []string{"bag", "full_bag"} {
		for _, r := range log.Records {
			if r.Topic == b.topic(table) && bytes.Contains(r.Value, []byte(`"op":"c"`)) && bytes.Contains(r.Value, []byte(`"y"`)) {
				b.produce(again(r))
			}
		}
	}
	b.finds(p, "public.bag", `doubled {"a":9,"b":"y"}`)
	b.finds(p, "public.full_bag", `doubled {"a":9,"b":"y"}`, `extra {"a":9,"b":"y"}`)
}

// TestVerifyOfAnOutbox finds events that are lost, doubled, altered or out of order.
func TestVerifyOfAnOutbox(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE outbox (id bigserial PRIMARY KEY, event_id uuid NOT NULL DEFAULT gen_random_uuid(), aggregate_id text NOT NULL,
		aggregate_seq bigint NOT NULL, event_type text NOT NULL, payload jsonb, created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz);
		INSERT INTO outbox (aggregate_id, aggregate_seq, event_type, payload, published_at) SELECT 'old', i, 'done', '{}', now() FROM generate_series(1, 5) i`)
	b.set("outbox", []map[string]any{{"table": "public.outbox", "topic": "{prefix}.events"}})
	p := b.start()
	b.waitRead(p, "public.outbox")
	w := b.write(2, 3*time.Millisecond, func(ctx context.Context, conn *pgx.Conn, session, i int) error {
		_, err := conn.Exec(ctx, "INSERT INTO outbox (aggregate_id, aggregate_seq, event_type, payload) VALUES ($1, $2, 'live', $3)", fmt.Sprintf("a%d", session), i, fmt.Sprintf(`{"n":%d}`, i))
		return err
	})
	if r := b.sound(p); r.Tables[0].Kind != "outbox" {
		t.Errorf("kind %q, want outbox", r.Tables[0].Kind)
	}
	w.end()
	b.pg.Exec("UPDATE outbox SET published_at = now() WHERE published_at IS NULL AND id % 2 = 0")
	b.sound(p)

	topic := b.name + ".events"
	log := b.settled(p)
	event := func(seq int) (id string, r *kgo.Record) {
		id = b.pg.Value("SELECT event_id FROM outbox WHERE aggregate_id = 'a0' AND aggregate_seq = $1", seq)
		for _, x := range log.Records {
			if x.Topic == topic && x.Headers["id"] == id {
				return id, again(x)
			}
		}
		t.Fatalf("no event %s", id)
		return "", nil
	}
	twice, copied := event(0)
	b.produce(copied)
	_, behind := event(1)
	for i := range behind.Headers {
		if behind.Headers[i].Key == "id" {
			behind.Headers[i].Value = []byte("another")
		}
		if behind.Headers[i].Key == "position" {
			behind.Headers[i].Value = []byte("0000000000000001-0000000000")
		}
	}
	b.produce(behind)
	changed, _ := event(2)
	b.pg.Exec("UPDATE outbox SET payload = '{\"n\":-1}' WHERE event_id = $1", changed)
	b.pg.Exec("UPDATE outbox SET event_id = '00000000-0000-0000-0000-000000000001', published_at = NULL WHERE aggregate_id = 'a0' AND aggregate_seq = 3")
	name := func(id string) string { return strconv.Quote(topic + " " + id) }
	b.finds(p, "public.outbox", "doubled "+name(twice), "disordered "+name("a0"), "differing "+name(changed), "missing "+name("00000000-0000-0000-0000-000000000001"))
}

// waitRead waits until a table is read, and until the checkpoint says so.
func (b *snapBed) waitRead(p *harness.Proc, table string) {
	b.t.Helper()
	b.waitTable(p, table, allRows)
	harness.WaitFor(b.t, "the checkpoint to say that "+table+" is read", harness.DefaultTimeout, func() (bool, error) {
		return b.progress(table) == checkpoint.TableDone, nil
	})
}

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

// damagedTables are one whose topic is damaged while others of its rows are written, and
// one that is changed behind the publication's back. Rows below 1000 are left alone by the
// writers.
const damagedTables = `
CREATE TYPE mood AS ENUM ('sad', 'glad');
CREATE TABLE t (id int PRIMARY KEY, v text, big text, n numeric, tags text[], m mood, nothing text);
ALTER TABLE t ALTER COLUMN big SET STORAGE EXTERNAL;
CREATE TABLE behind (id int, part text, v text, PRIMARY KEY (part, id));
INSERT INTO t SELECT i, 'v' || i, repeat('x', 3000 * (i % 5 / 4)), i / 7.0, ARRAY['a"', i::text], 'sad' FROM generate_series(1, 400) i;
INSERT INTO behind SELECT i, 'p', 'v' || i FROM generate_series(1, 400) i;
CREATE SEQUENCE moved`

// damagedStep writes rows of its session, their keys and big columns included.
func damagedStep(ctx context.Context, conn *pgx.Conn, session, i int) error {
	id := 1000 + session*1000 + i%50
	var sql string
	switch i % 5 {
	case 0, 1:
		sql = `INSERT INTO t VALUES ($1, 'live', repeat('y', 3000), 1, '{}', 'glad') ON CONFLICT (id) DO UPDATE SET v = excluded.v || length(t.v)`
	case 2:
		sql = `UPDATE t SET n = coalesce(n, 0) + 1 WHERE id = $1`
	case 3:
		sql = `UPDATE t SET id = id + 100000 + 10000 * nextval('moved')::int WHERE id = $1::int - 3`
	default:
		sql = `DELETE FROM t WHERE id = $1::int - 7`
	}
	_, err := conn.Exec(ctx, sql, id)
	return err
}

// damage injects differences and gives what verify has to say of each table.
type damage struct {
	b      *snapBed
	rnd    *rand.Rand
	ids    []int // of rows that nothing was done to
	newest map[int]*kgo.Record
	bare   bool
	out    []*kgo.Record
	want   map[string][]string
}

var keyID = regexp.MustCompile(`"id":(\d+)`)

func newDamage(b *snapBed, log *cdctest.Log, rnd *rand.Rand, bare bool) *damage {
	d := &damage{b: b, rnd: rnd, ids: rnd.Perm(400), newest: map[int]*kgo.Record{}, bare: bare, want: map[string][]string{}}
	at := map[int]int64{}
	for _, r := range log.Records {
		if m := keyID.FindSubmatch(r.Key); r.Topic == b.topic("t") && m != nil && r.Value != nil {
			if id, err := strconv.Atoi(string(m[1])); err == nil && (d.newest[id] == nil || r.Offset > at[id]) {
				d.newest[id], at[id] = again(r), r.Offset
			}
		}
	}
	return d
}

// next is a row that was not damaged yet, and its newest record.
func (d *damage) next() (int, *kgo.Record) {
	d.b.t.Helper()
	id := d.ids[0] + 1
	d.ids = d.ids[1:]
	if d.newest[id] == nil {
		d.b.t.Fatalf("no record of row %d", id)
	}
	return id, d.newest[id]
}

func (d *damage) expect(table, kind string, id int) {
	key := fmt.Sprintf(`{"id":%d}`, id)
	if table == "behind" {
		key = fmt.Sprintf(`{"id":%d,"part":"p"}`, id)
	}
	d.want[table] = append(d.want[table], kind+" "+key)
}

// inject puts one difference into the topic of t. What has no position stands behind all
// that is there.
func (d *damage) inject() {
	id, r := d.next()
	kind := d.rnd.IntN(5)
	if kind == 0 && d.bare && d.rnd.IntN(2) == 0 {
		kind = 1
	}
	switch kind {
	case 0: // of the stream: rows of a snapshot that are equal may be two readings, without an envelope
		d.b.pg.Exec("UPDATE t SET m = 'glad' WHERE id = $1", id)
		harness.WaitFor(d.b.t, "the update", snapLong, func() (bool, error) {
			fresh := newDamage(d.b, d.b.log(), d.rnd, d.bare).newest[id]
			done := !bytes.Equal(fresh.Value, r.Value)
			if done {
				r = fresh
			}
			return done, nil
		})
		d.expect("t", "doubled", id)
	case 1:
		r.Headers = nil
		r.Value = bytes.ReplaceAll(r.Value, fmt.Appendf(nil, `"v%d"`, id), []byte(`"wrong"`))
		d.expect("t", "differing", id)
	case 2: // a row lost
		r.Headers, r.Value = nil, nil
		d.expect("t", "missing", id)
	case 3: // a row too many
		r.Headers = nil
		other := id + 700000
		from, to := fmt.Appendf(nil, `"id":%d`, id), fmt.Appendf(nil, `"id":%d`, other)
		r.Key, r.Value = bytes.ReplaceAll(r.Key, from, to), bytes.ReplaceAll(r.Value, from, to)
		d.expect("t", "extra", other)
	default: // an array's element
		r.Headers = nil
		r.Value = bytes.ReplaceAll(r.Value, []byte(`"a\""`), []byte(`"a\\"`))
		d.expect("t", "differing", id)
	}
	d.out = append(d.out, r)
}

// behind changes rows while the publications do not have their table.
func (d *damage) behind(n int) {
	name := d.b.slot()
	d.b.pg.Exec(fmt.Sprintf(`ALTER PUBLICATION %q DROP TABLE behind`, name))
	for i := range n {
		id := 1 + i*7 + d.rnd.IntN(7)
		switch d.rnd.IntN(3) {
		case 0:
			d.b.pg.Exec("DELETE FROM behind WHERE id = $1", id)
			d.expect("behind", "extra", id)
		case 1:
			d.b.pg.Exec("UPDATE behind SET v = 'unseen' WHERE id = $1", id)
			d.expect("behind", "differing", id)
		default:
			d.b.pg.Exec("INSERT INTO behind VALUES ($1, 'p', 'unseen')", 5000+id)
			d.expect("behind", "missing", 5000+id)
		}
	}
	d.b.pg.Exec(fmt.Sprintf(`ALTER PUBLICATION %q ADD TABLE behind`, name))
}

// TestVerifyFindsExactlyTheRandomDamage injects differences while sessions write and the
// connector is killed, and wants each of them and nothing else.
func TestVerifyFindsExactlyTheRandomDamage(t *testing.T) {
	settings := []struct {
		name   string
		values map[string]any
	}{
		{"plain", map[string]any{}},
		{"bare", map[string]any{"format.envelope": false}},
		{"debezium", map[string]any{"format.types": "debezium", "format.debezium.schemas-enable": true}},
		{"marker", map[string]any{"format.toast": "marker"}},
		{"compacted", map[string]any{"topics.config": map[string]any{"cleanup.policy": "compact"}}},
	}
	for i, s := range settings {
		t.Run(s.name, func(t *testing.T) {
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			rnd := rand.New(rand.NewPCG(seed, uint64(i)))
			b := newSnapBed(t, damagedTables)
			for path, value := range s.values {
				b.set(path, value)
			}
			p := b.start()
			b.waitRead(p, "public.t")
			b.waitRead(p, "public.behind")
			w := b.write(3, 20*time.Millisecond, damagedStep)
			b.sound(p)
			d := newDamage(b, b.log(), rnd, s.name == "bare")
			for range 5 + rnd.IntN(10) {
				d.inject()
			}
			b.produce(d.out...)
			d.behind(3 + rnd.IntN(10))
			p.Kill()
			p = b.start()
			d.check(p, "--memory", "64KiB")
			d.check(p)
			w.end()
			d.check(p)
		})
	}
}

// check wants exactly what was injected.
func (d *damage) check(p *harness.Proc, args ...string) {
	t := d.b.t
	t.Helper()
	var r verifyReport
	var code int
	var said string
	harness.WaitFor(t, "the connector to be there again", snapLong, func() (bool, error) {
		r, code, said = d.b.verify(p, args...)
		return code != 4, nil
	})
	if code != 3 {
		t.Fatalf("exit code %d, want 3: %s", code, said)
	}
	for _, table := range r.Tables {
		name := table.Table[len("public."):]
		var got []string
		for _, x := range table.Found {
			got = append(got, x.Kind+" "+string(x.Key))
		}
		want := slices.Sorted(slices.Values(d.want[name]))
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("%s: found\n%q, want\n%q\nnotes %q", name, got, want, table.Notes)
		}
	}
}

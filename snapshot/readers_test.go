package snapshot

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/replication"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// stand is a database, and readers on it.
type stand struct {
	t *testing.T
	*harness.PG
	readers *Readers
	id      uint64
}

const testPublication = "walrelay_test"

// mustStand makes a database with setup, and a publication of all tables unless setup
// makes it.
func mustStand(t *testing.T, major int, setup ...string) *stand {
	t.Helper()
	pg := harness.Postgres(t, harness.Major(major))
	s := &stand{t: t, PG: pg}
	for _, sql := range setup {
		pg.Exec(sql)
	}
	if pg.Value("SELECT count(*) FROM pg_publication") == "0" {
		pg.Exec("CREATE PUBLICATION " + testPublication + " FOR ALL TABLES WITH (publish_via_partition_root = true)")
	}
	s.readers = s.mustReaders(pg.DSN(), 2)
	return s
}

func (s *stand) mustReaders(dsn string, n int) *Readers {
	s.t.Helper()
	r := NewReaders(s.t.Context(), ReaderOptions{
		Connect: replication.NewConnector(dsn, "walrelay_test"), N: n, Publications: []string{testPublication},
		Logger: zerolog.New(zerolog.NewTestWriter(s.t)),
	})
	s.t.Cleanup(r.Close)
	return r
}

// mustTables lists the published tables by name.
func (s *stand) mustTables() map[string]Published {
	s.t.Helper()
	conn, err := replication.Connect(s.t.Context(), s.DSN(), "walrelay_test")
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = conn.Close(s.t.Context()) }()
	list, err := Tables(s.t.Context(), conn, []string{testPublication})
	if err != nil {
		s.t.Fatal(err)
	}
	tables := map[string]Published{}
	for _, p := range list {
		if _, twice := tables[p.String()]; twice {
			s.t.Fatalf("%s is listed twice", p)
		}
		tables[p.String()] = p
	}
	return tables
}

func (s *stand) mustTable(name string, keys ...string) Table {
	s.t.Helper()
	p, ok := s.mustTables()[name]
	if !ok {
		s.t.Fatalf("%s is not published", name)
	}
	return p.Table(keys)
}

func (s *stand) next() *Chunk {
	s.t.Helper()
	select {
	case c := <-s.readers.Chunks():
		return c
	case <-time.After(harness.DefaultTimeout):
		s.t.Fatal("no chunk came")
		return nil
	}
}

// do carries an order out that has one answer.
func (s *stand) do(o *Order) *Chunk {
	s.t.Helper()
	s.id++
	o.ID = s.id
	s.readers.Do(o)
	c := s.next()
	if c.Order != o {
		s.t.Fatalf("the answer is to order %d, want %d", c.Order.ID, o.ID)
	}
	return c
}

func (s *stand) mustDo(o *Order) *Chunk {
	s.t.Helper()
	c := s.do(o)
	if c.Err != nil {
		s.t.Fatalf("read %s: %v", o.Table, c.Err)
	}
	return c
}

// text gives rows as (a,b,…) with null as Null.
func text(c *Chunk) []string {
	var out []string
	var tuple replication.Tuple
	for i := range c.Rows.Len() {
		tuple = c.Rows.Tuple(i, tuple)
		values := make([]string, len(tuple))
		for j, v := range tuple {
			values[j] = string(v.Text)
			if v.Kind == replication.ValueNull {
				values[j] = harness.Null
			}
		}
		out = append(out, "("+strings.Join(values, ",")+")")
	}
	return out
}

func keyOf(c *Chunk, i int) []string {
	tuple := c.Rows.Tuple(i, nil)
	key := make([]string, len(c.Shape.Key))
	for j, at := range c.Shape.Key {
		key[j] = string(tuple[at].Text)
	}
	return key
}

// all reads a table, or the range (after, to], in chunks.
func (s *stand) all(o *Order) []string {
	s.t.Helper()
	var rows []string
	after := o.After
	for range 100000 {
		next := &Order{Kind: OrderRange, Table: o.Table, Key: o.Table.Key, After: after, To: o.To, Rows: o.Rows, Bytes: o.Bytes, Where: o.Where}
		c := s.mustDo(next)
		if c.Shape.Whole || c.Gone {
			s.t.Fatalf("%s cannot be read by ranges: %+v", o.Table, c.Shape)
		}
		if o.Rows > 0 && c.Rows.Len() > o.Rows {
			s.t.Fatalf("%d rows, want at most %d", c.Rows.Len(), o.Rows)
		}
		rows = append(rows, text(c)...)
		if n := c.Rows.Len(); n > 0 {
			after = keyOf(c, n-1)
		} else if !c.Last {
			s.t.Fatalf("a chunk of %s without rows, and not the last", o.Table)
		}
		s.readers.Recycle(c)
		if c.Last {
			return rows
		}
	}
	s.t.Fatalf("reading %s does not end", o.Table)
	return nil
}

// keyTypes are tables t whose key is of every kind that orders rows in a way of its own.
var keyTypes = map[string]string{
	"bigint":    `CREATE TABLE t (k bigint PRIMARY KEY); INSERT INTO t VALUES (-9223372036854775808),(-1),(0),(1),(2),(9223372036854775807)`,
	"numeric":   `CREATE TABLE t (k numeric PRIMARY KEY); INSERT INTO t VALUES ('-Infinity'),('-1e300'),(-0.5),(0),(1e-20),(2),('Infinity'),('NaN')`,
	"float":     `CREATE TABLE t (k float8 PRIMARY KEY); INSERT INTO t VALUES ('-Infinity'),(-0.1),(0.1),(0.30000000000000004),(1e300),('NaN')`,
	"text":      `CREATE TABLE t (k text PRIMARY KEY, v int); INSERT INTO t VALUES (''),('a'),('B'),('ä'),('a''b'),('a\b'),('a"b'),(E'\n'),('日本'),('$1'),('--'),('a b')`,
	"icu":       `CREATE TABLE t (k text COLLATE "en-x-icu" PRIMARY KEY); INSERT INTO t VALUES ('a'),('B'),('b'),('A'),('ä'),('z'),('Z'),('a-b'),('ab')`,
	"loose":     `CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false); CREATE TABLE t (k text COLLATE loose PRIMARY KEY); INSERT INTO t VALUES ('a'),('B'),('c'),('D'),('Ä'),('z')`,
	"uuid":      `CREATE TABLE t (k uuid PRIMARY KEY); INSERT INTO t SELECT gen_random_uuid() FROM generate_series(1,20)`,
	"enum":      `CREATE SCHEMA "Od""d"; CREATE TYPE "Od""d"."M d" AS ENUM ('sad','ok','a''b','happy'); CREATE TABLE t (k "Od""d"."M d" PRIMARY KEY); INSERT INTO t VALUES ('happy'),('sad'),('a''b'),('ok')`,
	"timestamp": `CREATE TABLE t (k timestamptz PRIMARY KEY); INSERT INTO t VALUES ('-infinity'),('infinity'),('2026-01-01 00:00:00.000001+00'),('0044-03-15 BC'),('294276-12-31')`,
	"bpchar":    `CREATE TABLE t (k char(5) PRIMARY KEY); INSERT INTO t VALUES ('a'),('b '),('abcde'),('')`,
	"varchar":   `CREATE TABLE t (k varchar(5) PRIMARY KEY); INSERT INTO t VALUES ('a'),('b '),('b'),('abcde')`,
	"bytea":     `CREATE TABLE t (k bytea PRIMARY KEY); INSERT INTO t VALUES ('\x'),('\x00'),('\xff00'),('\x61')`,
	"bit":       `CREATE TABLE t (k bit(3) PRIMARY KEY); INSERT INTO t VALUES ('101'),('000'),('111')`,
	"interval":  `CREATE TABLE t (k interval PRIMARY KEY); INSERT INTO t VALUES ('1 mon'),('29 days'),('-1 day'),('1 year 2 mons -3 days 04:05:06.7')`,
	"inet":      `CREATE TABLE t (k inet PRIMARY KEY); INSERT INTO t VALUES ('10.0.0.1'),('10.0.0.0/8'),('::1')`,
	"bool":      `CREATE TABLE t (k boolean PRIMARY KEY, v text); INSERT INTO t VALUES (true,null),(false,'')`,
	"array":     `CREATE TABLE t (k int[] PRIMARY KEY); INSERT INTO t VALUES ('{}'),('{1,2}'),('{1}'),('{NULL}'),('{-1,5}')`,
	"range":     `CREATE TABLE t (k int4range PRIMARY KEY); INSERT INTO t VALUES ('empty'),('[1,5)'),('(,)'),('[1,4)')`,
	"jsonb":     `CREATE TABLE t (k jsonb PRIMARY KEY); INSERT INTO t VALUES ('{"a":1}'),('[]'),('"x''y"'),('12')`,
	"composite": `CREATE TYPE pair AS (a int, b text); CREATE TABLE t (k pair PRIMARY KEY); INSERT INTO t VALUES ('(1,a)'),('(1,b)'),('(-1,"x y")')`,
	"domain":    `CREATE DOMAIN pos AS int CHECK (VALUE > 0); CREATE TABLE t (k pos PRIMARY KEY); INSERT INTO t SELECT generate_series(1,10)`,
	"char":      `CREATE TABLE t (k "char" PRIMARY KEY); INSERT INTO t VALUES ('a'),('b'),('Z')`,
	"name":      `CREATE TABLE t (k name PRIMARY KEY); INSERT INTO t VALUES ('a'),('b'),('Z')`,
	"pair":      `CREATE TABLE t (v text, b text, a int, PRIMARY KEY (a, b)); INSERT INTO t SELECT null, chr(97 + g % 5), g / 5 - 3 FROM generate_series(0,29) g`,
	"quoted":    `CREATE TABLE t ("select" int, "A b""c" text, PRIMARY KEY ("A b""c", "select")); INSERT INTO t SELECT g % 4, 'x' || g / 4 FROM generate_series(0,19) g`,
	"citext":    `CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE TABLE t (k ext.citext PRIMARY KEY); INSERT INTO t VALUES ('a'),('B'),('c'),('D'),('e'),('F')`,
	"mixed":     `CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE TABLE t (a int, k ext.citext, b int, PRIMARY KEY (a, k, b)); INSERT INTO t SELECT g / 12, (ARRAY['a','B','c','D'])[g / 3 % 4 + 1]::ext.citext, g % 3 FROM generate_series(0,35) g`,
	"collated":  `CREATE TABLE t (k text COLLATE "en-x-icu" NOT NULL); CREATE UNIQUE INDEX i ON t (k COLLATE "C"); ALTER TABLE t REPLICA IDENTITY USING INDEX i; INSERT INTO t VALUES ('a'),('B'),('b'),('A'),('z'),('Z')`,
	"down":      `CREATE TABLE t (k int NOT NULL, v int NOT NULL); CREATE UNIQUE INDEX i ON t (v DESC, k DESC); ALTER TABLE t REPLICA IDENTITY USING INDEX i; INSERT INTO t SELECT g, g / 3 FROM generate_series(1,20) g`,
}

// TestEveryRowOnceWhateverTheKey reads tables in chunks of 1, 2 and 7 rows: each row comes
// exactly once, as the server's text gives it.
func TestEveryRowOnceWhateverTheKey(t *testing.T) {
	harness.EachMajor(t, func(t *testing.T, major int) {
		for name, setup := range keyTypes {
			t.Run(name, func(t *testing.T) {
				s := mustStand(t, major, setup)
				table := s.mustTable("public.t")
				if table.Whole || table.Key == nil {
					t.Fatalf("table %+v", table)
				}
				var want []string
				for _, row := range s.Query("SET TimeZone = 'UTC'; TABLE t") {
					want = append(want, "("+strings.Join(row, ",")+")")
				}
				slices.Sort(want)
				for _, n := range []int{1, 2, 7, 1000} {
					got := s.all(&Order{Table: table, Rows: n})
					slices.Sort(got)
					if !slices.Equal(got, want) {
						t.Errorf("in chunks of %d: %q, want %q", n, got, want)
					}
				}
				// Each key alone, and all of them.
				c := s.mustDo(&Order{Kind: OrderRange, Table: table, Key: table.Key, Rows: 1000})
				var keys [][]string
				for i := range c.Rows.Len() {
					keys = append(keys, keyOf(c, i))
				}
				got := text(s.mustDo(&Order{Kind: OrderKeys, Table: table, Key: table.Key, Keys: keys}))
				slices.Sort(got)
				if !slices.Equal(got, want) {
					t.Errorf("by keys: %q, want %q", got, want)
				}
				for i, key := range keys {
					if got := text(s.mustDo(&Order{Kind: OrderKeys, Table: table, Key: table.Key, Keys: [][]string{key}})); len(got) != 1 {
						t.Errorf("key %q: %q", key, got)
					}
					if got := s.all(&Order{Table: table, Rows: 2, After: key}); len(got) != len(keys)-i-1 {
						t.Errorf("behind %q: %d rows, want %d", key, len(got), len(keys)-i-1)
					}
					if got := s.all(&Order{Table: table, Rows: 2, To: key}); len(got) != i+1 {
						t.Errorf("up to %q: %d rows, want %d", key, len(got), i+1)
					}
				}
			})
		}
	})
}

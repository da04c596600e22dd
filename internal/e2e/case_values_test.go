package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/internal/harness"
)

// valueCase is a table, what is inserted into it and what after must be, byte for byte,
// row by row.
type valueCase struct {
	name, columns, rows string
	types               string // statements that make the columns' types
	after               []string
}

// valueCases are the types, one table each. {s} in types and columns stands for what makes
// names the case's own.
var valueCases = []valueCase{
	{
		name: "integers and booleans", columns: "i2 smallint, i4 int, i8 bigint, b bool",
		rows: "(1,-32768,2147483647,9223372036854775807,true), (2,0,0,-9223372036854775808,false), (3,NULL,NULL,NULL,NULL)",
		after: []string{
			`{"id":1,"i2":-32768,"i4":2147483647,"i8":9223372036854775807,"b":true}`,
			`{"id":2,"i2":0,"i4":0,"i8":-9223372036854775808,"b":false}`,
			`{"id":3,"i2":null,"i4":null,"i8":null,"b":null}`,
		},
	},
	{
		name: "floats", columns: "f4 real, f8 double precision",
		rows: "(1,0.1,0.1), (2,1e10,1e-7), (3,16777216,1e22), (4,3.4028235e38,1.7976931348623157e308), (5,NULL,'-0')",
		after: []string{
			`{"id":1,"f4":0.1,"f8":0.1}`,
			`{"id":2,"f4":1e+10,"f8":1e-07}`,
			`{"id":3,"f4":1.6777216e+07,"f8":1e+22}`,
			`{"id":4,"f4":3.4028235e+38,"f8":1.7976931348623157e+308}`,
			`{"id":5,"f4":null,"f8":-0}`,
		},
	},
	{
		name: "NaN and the infinities, and a row behind them", columns: "f4 real, f8 double precision, n numeric",
		rows: "(1,'NaN','NaN','NaN'), (2,'Infinity','Infinity','Infinity'), (3,'-Infinity','-Infinity','-Infinity'), (4,1,1,1)",
		after: []string{
			`{"id":1,"f4":"NaN","f8":"NaN","n":"NaN"}`,
			`{"id":2,"f4":"Infinity","f8":"Infinity","n":"Infinity"}`,
			`{"id":3,"f4":"-Infinity","f8":"-Infinity","n":"-Infinity"}`,
			`{"id":4,"f4":1,"f8":1,"n":"1"}`,
		},
	},
	{
		name: "numeric keeps its digits", columns: "n numeric, n2 numeric(12,2)",
		rows: "(1,12345678901234567890.123456789,1.10), (2,1e-20,0), (3,1000000000000000000000000000000,-0.00), (4,0,9999999999.99)",
		after: []string{
			`{"id":1,"n":"12345678901234567890.123456789","n2":"1.10"}`,
			`{"id":2,"n":"0.00000000000000000001","n2":"0.00"}`,
			`{"id":3,"n":"1000000000000000000000000000000","n2":"0.00"}`,
			`{"id":4,"n":"0","n2":"9999999999.99"}`,
		},
	},
	{
		name: "text that JSON must escape", columns: "t text, c char(5), vc varchar(10)",
		rows: `(1, E'a"b\\c\u0001\t\u2028😀', 'ab', E'x\ny'), (2,'','',''), (3,'NULL',NULL,NULL)`,
		after: []string{
			`{"id":1,"t":"a\"b\\c\u0001\t` + "\u2028" + `😀","c":"ab   ","vc":"x\ny"}`,
			`{"id":2,"t":"","c":"     ","vc":""}`,
			`{"id":3,"t":"NULL","c":null,"vc":null}`,
		},
	},
	{
		name: "bytea", columns: "b bytea",
		rows:  `(1,'\x00ff10'), (2,'\x'), (3,NULL)`,
		after: []string{`{"id":1,"b":"AP8Q"}`, `{"id":2,"b":""}`, `{"id":3,"b":null}`},
	},
	{
		name: "date", columns: "d date",
		rows: "(1,'2026-12-01'), (2,'infinity'), (3,'-infinity'), (4,'0044-03-15 BC'), (5,'10000-01-01'), (6,'5874897-12-31')",
		after: []string{
			`{"id":1,"d":"2026-12-01"}`, `{"id":2,"d":"infinity"}`, `{"id":3,"d":"-infinity"}`,
			`{"id":4,"d":"0044-03-15 BC"}`, `{"id":5,"d":"10000-01-01"}`, `{"id":6,"d":"5874897-12-31"}`,
		},
	},
	{
		name: "timestamp", columns: "ts timestamp, ts3 timestamp(3)",
		rows: `(1,'2026-12-01 05:54:20.123456','2026-12-01 05:54:20.1'), (2,'infinity','-infinity'), (3,'10000-01-01',NULL),
			(4,'294276-12-31 23:59:59.999999',NULL), (5,'0044-03-15 12:00:00 BC','2026-12-01')`,
		after: []string{
			`{"id":1,"ts":"2026-12-01T05:54:20.123456","ts3":"2026-12-01T05:54:20.1"}`,
			`{"id":2,"ts":"infinity","ts3":"-infinity"}`,
			`{"id":3,"ts":"10000-01-01T00:00:00","ts3":null}`,
			`{"id":4,"ts":"294276-12-31T23:59:59.999999","ts3":null}`,
			`{"id":5,"ts":"0044-03-15T12:00:00 BC","ts3":"2026-12-01T00:00:00"}`,
		},
	},
	{
		name: "timestamptz", columns: "t timestamptz",
		rows: `(1,'2026-12-01 11:24:20.123456+05:30'), (2,'infinity'), (3,'10000-01-01 00:00:00+00'),
			(4,'0044-03-15 12:00:00+00 BC'), (5,'1582-10-10 00:00:00+00')`,
		after: []string{
			`{"id":1,"t":"2026-12-01T05:54:20.123456Z"}`, `{"id":2,"t":"infinity"}`, `{"id":3,"t":"10000-01-01T00:00:00Z"}`,
			`{"id":4,"t":"0044-03-15T12:00:00Z BC"}`, `{"id":5,"t":"1582-10-10T00:00:00Z"}`,
		},
	},
	{
		name: "what the settings of a database change", columns: "iv interval, d date, ts timestamptz, f double precision, b bytea, r tstzrange, a date[]",
		rows: `(1,'1 year 2 mons 3 days 04:05:06.78','2026-12-01','2026-12-01 05:54:20.123456+00',0.1234567890123456,'\x00ff',
			'["2026-12-01 05:54:20+00","2026-12-02 00:00:00+00")','{2026-12-01}')`,
		after: []string{`{"id":1,"iv":"1 year 2 mons 3 days 04:05:06.78","d":"2026-12-01","ts":"2026-12-01T05:54:20.123456Z","f":0.1234567890123456,` +
			`"b":"AP8=","r":"[\"2026-12-01 05:54:20+00\",\"2026-12-02 00:00:00+00\")","a":["2026-12-01"]}`},
	},
	{
		name: "json byte for byte", columns: "j json",
		rows: `(1, E'{"a": 1.10,  "a":2,\n "z":"\\u0000"}'), (2,' "x" '), (3,'null'), (4,NULL), (5,'1e400'), (6,'-0')`,
		after: []string{
			"{\"id\":1,\"j\":{\"a\": 1.10,  \"a\":2,\n \"z\":\"\\u0000\"}}", `{"id":2,"j": "x" }`, `{"id":3,"j":null}`,
			`{"id":4,"j":null}`, `{"id":5,"j":1e400}`, `{"id":6,"j":-0}`,
		},
	},
	{
		name: "jsonb as PostgreSQL prints it", columns: "j jsonb",
		rows: `(1,'{"b":1.10,"a":9007199254740993,"a":2}'), (2,'{"a":9007199254740993,"b":1.10}'), (3,'1e400'), (4,'-0.0')`,
		after: []string{
			`{"id":1,"j":{"a": 2, "b": 1.10}}`, `{"id":2,"j":{"a": 9007199254740993, "b": 1.10}}`,
			`{"id":3,"j":1` + strings.Repeat("0", 400) + `}`, `{"id":4,"j":0.0}`,
		},
	},
	{
		name: "arrays of one dimension", columns: "i int[], t text[], n numeric[], z timestamptz[], b bytea[], o bool[], f float8[], j jsonb[]",
		rows: `(1,'{1,NULL,3}', ARRAY['NULL',NULL,'a,b',E'q"q',E'b\\s','',' x ','{}'], ARRAY[1.10,'NaN'::numeric,NULL],
			ARRAY['2026-12-01 11:24:20.123456+05:30'::timestamptz,'infinity',NULL], ARRAY['\x00ff'::bytea,''::bytea,NULL],
			ARRAY[true,false,NULL], ARRAY[0.1,'NaN',1e300]::float8[], ARRAY['{"a":1.10}'::jsonb,'"s"','null',NULL]),
			(2,'{}','{}','{}','{}','{}','{}','{}','{}')`,
		after: []string{
			`{"id":1,"i":[1,null,3],"t":["NULL",null,"a,b","q\"q","b\\s",""," x ","{}"],"n":["1.10","NaN",null],` +
				`"z":["2026-12-01T05:54:20.123456Z","infinity",null],"b":["AP8=","",null],"o":[true,false,null],` +
				`"f":[0.1,"NaN",1e+300],"j":[{"a": 1.10},"s",null,null]}`,
			`{"id":2,"i":[],"t":[],"n":[],"z":[],"b":[],"o":[],"f":[],"j":[]}`,
		},
	},
	{
		name: "composite", types: "CREATE TYPE addr AS (street text, no int, price numeric, at timestamptz, tags text[])", columns: "a addr",
		rows: `(1, ROW('12 "Main" St, N',7,1.10,'2026-12-01 11:24:20+05:30',ARRAY['a','b "c"'])), (2, ROW('',0,0,NULL,NULL)),
			(3, ROW(NULL,NULL,NULL,NULL,NULL)), (4, NULL)`,
		after: []string{
			`{"id":1,"a":{"street":"12 \"Main\" St, N","no":7,"price":"1.10","at":"2026-12-01T05:54:20Z","tags":["a","b \"c\""]}}`,
			`{"id":2,"a":{"street":"","no":0,"price":"0","at":null,"tags":null}}`,
			`{"id":3,"a":{"street":null,"no":null,"price":null,"at":null,"tags":null}}`,
			`{"id":4,"a":null}`,
		},
	},
	{
		name: "enum and domains", columns: "e mood, ea mood[], d posint, p price",
		types: `CREATE TYPE mood AS ENUM ('sad','ok','happy'); CREATE DOMAIN posint AS int CHECK (VALUE > 0); CREATE DOMAIN price AS numeric(12,2)`,
		rows:  `(1,'happy','{sad,happy}',5,1.5)`,
		after: []string{`{"id":1,"e":"happy","ea":["sad","happy"],"d":5,"p":"1.50"}`},
	},
	{
		name: "ranges and multiranges", columns: "r int4range, n numrange, t tstzrange, d daterange, m int4multirange",
		rows: `(1,'[1,10]','(1.50,2.5]','["2026-12-01 05:54:20+00","2026-12-02 00:00:00+00")','[2026-12-01,)','{[1,3),[5,8)}'),
			(2,'empty','(,)',NULL,'empty','{}')`,
		after: []string{
			`{"id":1,"r":"[1,11)","n":"(1.50,2.5]","t":"[\"2026-12-01 05:54:20+00\",\"2026-12-02 00:00:00+00\")","d":"[2026-12-01,)","m":"{[1,3),[5,8)}"}`,
			`{"id":2,"r":"empty","n":"(,)","t":null,"d":"empty","m":"{}"}`,
		},
	},
	{
		name:    "network, geometry, uuid and the rest",
		columns: "ip inet, ip2 inet, net cidr, mac macaddr, pt point, bx box, pl polygon, ln line, u uuid, tv tsvector, jp jsonpath, ls pg_lsn",
		rows: `(1,'10.0.0.1','10.0.0.1/24','::/0','08:00:2b:01:02:03','(1.5,-2)','(1,1),(0,0)','((0,0),(1,1),(1,0))','{1,-1,0}',
			'3FA85F64-5717-4562-B3FC-2C963F66AFA6','a fat cat','$.a[*]','16/B374D848')`,
		after: []string{`{"id":1,"ip":"10.0.0.1","ip2":"10.0.0.1/24","net":"::/0","mac":"08:00:2b:01:02:03","pt":"(1.5,-2)","bx":"(1,1),(0,0)",` +
			`"pl":"((0,0),(1,1),(1,0))","ln":"{1,-1,0}","u":"3fa85f64-5717-4562-b3fc-2c963f66afa6","tv":"'a' 'cat' 'fat'","jp":"$.\"a\"[*]","ls":"16/B374D848"}`},
	},
	{
		name: "NULL in a column with a default", columns: "a int DEFAULT 7, c timestamptz DEFAULT now()",
		rows:  `(1, NULL, NULL)`,
		after: []string{`{"id":1,"a":null,"c":null}`},
	},
}

// hostileSettings are those of a database that change the text of values. The connector's
// connections inherit them.
var hostileSettings = [][2]string{
	{"intervalstyle", "iso_8601"}, {"datestyle", "German, DMY"}, {"bytea_output", "escape"},
	{"extra_float_digits", "-3"}, {"timezone", "Asia/Kolkata"},
}

// A server whose own zone is one of half hours, and a database whose settings change the
// text of nearly every type: neither may show.
func TestEachTypeUnderAnySettings(t *testing.T) {
	for _, settings := range []struct {
		name     string
		server   []harness.PGOption
		database [][2]string
	}{
		{"the server's zone", []harness.PGOption{harness.Setting("timezone", "Asia/Kolkata")}, nil},
		{"the database's settings", nil, hostileSettings},
	} {
		t.Run(settings.name, func(t *testing.T) {
			c := caseNew(t, settings.server...).set(caseMap{"snapshot": caseMap{"mode": "initial"}})
			insert := func() {
				for i, v := range valueCases {
					c.pg.Exec(fmt.Sprintf("INSERT INTO v%02d VALUES %s", i, v.rows))
				}
			}
			for i, v := range valueCases {
				c.pg.Exec(v.types)
				c.pg.Exec(fmt.Sprintf("CREATE TABLE v%02d (id int PRIMARY KEY, %s)", i, v.columns))
			}
			for _, s := range settings.database {
				c.setDatabase(s[0], s[1])
			}
			// The session that writes was opened before the settings changed.
			insert()
			c.catchUp()
			for i := range valueCases {
				c.pg.Exec(fmt.Sprintf("DELETE FROM v%02d", i))
			}
			insert()
			c.catchUp()
			got := map[string][]string{}
			for _, r := range c.parse(c.log().Records) {
				of := r.Op + " " + r.Source.Table
				got[of] = append(got[of], string(r.After))
			}
			for i, v := range valueCases {
				for _, op := range []string{"r", "c"} {
					after := got[fmt.Sprintf("%s v%02d", op, i)]
					slices.Sort(after) // a chunk's rows share one position
					if !slices.Equal(after, v.after) {
						t.Errorf("%s, op %s:\ngot\n\t%s\nwant\n\t%s", v.name, op, strings.Join(after, "\n\t"), strings.Join(v.after, "\n\t"))
					}
				}
			}
		})
	}
}

// toastTable is a table whose large values are stored out of line, uncompressed.
const toastTable = `CREATE TABLE v (id int PRIMARY KEY, big text, n int, j jsonb, a text[]);
	ALTER TABLE v ALTER big SET STORAGE EXTERNAL, ALTER j SET STORAGE EXTERNAL, ALTER a SET STORAGE EXTERNAL;`

const toastRow = `INSERT INTO v VALUES (1, repeat('a',9000), 1, jsonb_build_object('k', repeat('c',9000)), ARRAY[repeat('d',9000)])`

// The large values of that row as JSON.
var (
	toastBig = `"` + strings.Repeat("a", 9000) + `"`
	toastJ   = `{"k": "` + strings.Repeat("c", 9000) + `"}`
	toastA   = `["` + strings.Repeat("d", 9000) + `"]`
)

// On the wire an unchanged value stands next to NULL, and is neither NULL nor empty.
func TestUnchangedTOASTValuesAreAbsentOrMarked(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec(toastTable)
	c.start()
	c.pg.Exec(toastRow)
	c.pg.Exec("UPDATE v SET n = 2")
	log := c.settled()
	inserted := `v c 0 {"id":1} null {"id":1,"big":` + toastBig + `,"n":1,"j":` + toastJ + `,"a":` + toastA + `}`
	c.expect("omitted", c.changesOf(log), inserted, `v u 0 {"id":1} null {"id":1,"n":2}`)
	c.fold(log, "v", "id:int4 big:text n:int4 j:jsonb a:jsonb", // an array is compared as the JSON that it is
		[]string{"1", strings.Repeat("a", 9000), "2", toastJ, toastA})
	c.stop()
	c.set(caseMap{"format": caseMap{"toast": "marker"}})
	c.start()
	c.pg.Exec("UPDATE v SET n = 3")
	changes := c.changes()
	const marker = `"__walrelay_unchanged"`
	c.expect("marked", changes[2:], `v u 0 {"id":1} null {"id":1,"big":`+marker+`,"n":3,"j":`+marker+`,"a":`+marker+`}`)
}

// The new row says "unchanged" under FULL too; the old one has the value. Where a value was
// set to NULL, that is a change, and not to be filled.
func TestUnchangedTOASTValuesAreWholeUnderFull(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec(toastTable + "ALTER TABLE v REPLICA IDENTITY FULL")
	c.start()
	c.pg.Exec(toastRow)
	c.pg.Exec("UPDATE v SET n = 2")
	c.pg.Exec("UPDATE v SET big = NULL")
	row := func(big, n string) string {
		return `{"id":1,"big":` + big + `,"n":` + n + `,"j":` + toastJ + `,"a":` + toastA + `}`
	}
	c.expect("the records", c.changes(),
		`v c 0 {"id":1} null `+row(toastBig, "1"),
		`v u 0 {"id":1} `+row(toastBig, "1")+" "+row(toastBig, "2"),
		`v u 0 {"id":1} `+row(toastBig, "2")+" "+row("null", "2"))
}

// The wire has "n" for every column outside the key, NOT NULL ones too: 0, "" and 1970 would
// look like data.
func TestBeforeOfADeleteHasNoInventions(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE v (id int PRIMARY KEY, n int NOT NULL DEFAULT 7, s text NOT NULL, t timestamptz NOT NULL DEFAULT now(), j jsonb NOT NULL DEFAULT '{}')")
	c.start()
	c.pg.Exec("INSERT INTO v (id, s) VALUES (1, 'x')")
	c.pg.Exec("DELETE FROM v")
	changes := c.changes()
	if len(changes) != 3 {
		t.Fatalf("%d records, want 3", len(changes))
	}
	c.expect("the delete", changes[1:], `v d 0 {"id":1} {"id":1} null`, `v x {"id":1}`)
}

// caseWithoutEncoding moves the case to a database without an encoding, of which it
// returns a connection.
func caseWithoutEncoding(c *caseRun) *pgx.Conn {
	t := c.t
	name := "sqa_" + c.name
	c.pg.Exec("CREATE DATABASE " + name + " ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
	dsn := c.pg.Server.Database(name)
	t.Cleanup(func() { c.pg.Exec("DROP DATABASE " + name + " WITH (FORCE)") })
	conn := caseConnect(t, dsn)
	caseExec(t, conn, "CREATE TABLE v (id int PRIMARY KEY, t text)")
	c.set(caseMap{"source": caseMap{"dsn": dsn}})
	// Registered behind the instance's own clean-up, which comes later, so it is stopped here.
	t.Cleanup(func() {
		c.proc.Kill()
		harness.WaitFor(t, "the slot to be dropped", harness.DefaultTimeout, func() (bool, error) {
			_, err := conn.PgConn().Exec(context.Background(), "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()").ReadAll()
			return err == nil, nil // the walsender takes a moment to notice
		})
	})
	return conn
}

// To a UTF-8 client the server would end the stream at row 2: nothing behind it would
// arrive, and a restart would meet it again.
func TestARowWithBytesThatAreNotUTF8IsADeadLetterAndTheOthersArrive(t *testing.T) {
	c := caseNew(t)
	conn := caseWithoutEncoding(c)
	c.start()
	for _, sql := range []string{"INSERT INTO v VALUES (1,'a')", `INSERT INTO v VALUES (2, E'\351')`, "INSERT INTO v VALUES (3,'c')"} {
		caseExec(t, conn, sql)
	}
	c.kafka.WaitCommitted(t, c.name+".public.v", 2)
	log := c.log()
	c.expect("the records of the table", c.changesOf(log),
		`v c 0 {"id":1} null {"id":1,"t":"a"}`,
		`v c 0 {"id":3} null {"id":3,"t":"c"}`)
	dead := c.expectOnly(log, c.name+".dead-letter")
	if dead.Headers["reason"] != "encode" || string(dead.Key) != `{"id":2}` || !strings.Contains(string(dead.Value), `"t":"\\xe9"`) {
		t.Errorf("dead letter: reason %s, key %s, %s", dead.Headers["reason"], dead.Key, dead.Value)
	}
}

// So are rows that a snapshot reads; a key of such bytes has no record either.
func TestSnapshotRowsWithBytesThatAreNotUTF8AreDeadLetters(t *testing.T) {
	for _, types := range []string{"plain", "debezium"} {
		t.Run(types, func(t *testing.T) {
			c := caseNew(t).set(caseMap{"snapshot": caseMap{"mode": "initial"}, "format": caseMap{"types": types}})
			conn := caseWithoutEncoding(c)
			caseExec(t, conn, `INSERT INTO v VALUES (1,'a'), (2, E'\351'), (3,'c'); CREATE TABLE k (t text PRIMARY KEY); INSERT INTO k VALUES (E'\351'), ('e')`)
			c.catchUp()
			log := c.log()
			if rows := c.topic(log, c.name+".public.v"); len(rows) != 2 {
				t.Errorf("%d rows of v, want 2", len(rows))
			}
			if rows := c.topic(log, c.name+".public.k"); len(rows) != 1 || string(rows[0].Key) != `{"t":"e"}` {
				t.Errorf("%d rows of k, want 1", len(rows))
			}
			dead := c.topic(log, c.name+".dead-letter")
			if len(dead) != 2 {
				t.Fatalf("%d dead letters, want 2", len(dead))
			}
			for _, d := range dead {
				if d.Headers["reason"] != "encode" || !strings.HasSuffix(d.Headers["position"], "-snapshot") || !strings.Contains(string(d.Value), `"t":"\\xe9"`) {
					t.Errorf("%v %s", d.Headers, d.Value)
				}
			}
		})
	}
}

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// The stream says nothing of an ALTER TYPE, and a row value has no names. While the
// connector is there a value has the names of its own time; what it reads later, when the
// type is another, is PostgreSQL's text rather than another's names.
func TestAValueNeverGetsTheNamesOfAnotherTime(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TYPE pair AS (a int, b text); CREATE TABLE v (id int PRIMARY KEY, p pair, ps pair[])")
	c.start()
	for _, sql := range []string{ // each in a transaction of its own
		"INSERT INTO v VALUES (1, '(1,x)', '{\"(2,y)\"}')",
		"ALTER TYPE pair ADD ATTRIBUTE c int",
		"INSERT INTO v VALUES (2, '(1,x,3)', NULL)",
		"UPDATE v SET id = 11 WHERE id = 1", // a value from before, as the server shows it now
		"ALTER TYPE pair RENAME ATTRIBUTE b TO bb",
		"INSERT INTO v VALUES (3, '(1,x,3)', NULL)",
	} {
		c.pg.Exec(sql)
		c.fence()
	}
	// Of a transaction that altered the type itself nothing tells what was first.
	c.exec(c.session(), "BEGIN; INSERT INTO v VALUES (4, '(1,x,3)', NULL); ALTER TYPE pair DROP ATTRIBUTE bb, ADD ATTRIBUTE d int; INSERT INTO v VALUES (5, '(1,3,4)', NULL); COMMIT")
	c.pg.Exec("INSERT INTO v VALUES (6, '(1,3,4)', NULL)")
	c.fence()
	c.stop()
	for _, sql := range []string{
		"INSERT INTO v VALUES (7, '(1,3,4)', '{\"(1,3,4)\"}')",
		"ALTER TYPE pair DROP ATTRIBUTE c, ADD ATTRIBUTE e int",
		"INSERT INTO v VALUES (8, '(1,4,5)', '{\"(1,4,5)\"}')",
	} {
		c.pg.Exec(sql)
	}
	c.start()
	log := c.settled()
	c.expect("the records", c.changesOf(log),
		`v c 0 {"id":1} null {"id":1,"p":{"a":1,"b":"x"},"ps":[{"a":2,"b":"y"}]}`,
		`v c 0 {"id":2} null {"id":2,"p":{"a":1,"b":"x","c":3},"ps":null}`,
		`v d 0 {"id":1} {"id":1} null`,
		`v x {"id":1}`,
		`v c 0 {"id":11} null {"id":11,"p":{"a":1,"b":"x","c":null},"ps":[{"a":2,"b":"y","c":null}]}`,
		`v c 0 {"id":3} null {"id":3,"p":{"a":1,"bb":"x","c":3},"ps":null}`,
		`v c 0 {"id":4} null {"id":4,"p":"(1,x,3)","ps":null}`,
		`v c 1 {"id":5} null {"id":5,"p":"(1,3,4)","ps":null}`,
		`v c 0 {"id":6} null {"id":6,"p":{"a":1,"c":3,"d":4},"ps":null}`,
		`v c 0 {"id":7} null {"id":7,"p":"(1,3,4)","ps":"{\"(1,3,4)\"}"}`,
		`v c 0 {"id":8} null {"id":8,"p":{"a":1,"d":4,"e":5},"ps":[{"a":1,"d":4,"e":5}]}`)
	if dead := c.topic(log, c.name+".dead-letter"); len(dead) != 0 {
		t.Errorf("%d dead letters, the first %s", len(dead), dead[0].Value)
	}
}

// A snapshot reads the values as the type is now, and a table whose row is another's
// column is such a type, too.
func TestASnapshotHasTheNamesOfNow(t *testing.T) {
	c := caseNew(t).set(caseMap{"snapshot": caseMap{"mode": "initial"}})
	c.pg.Exec("CREATE TYPE pair AS (a int, b text); CREATE TABLE part (x int, y int); CREATE TABLE v (id int PRIMARY KEY, p pair, r part); INSERT INTO v VALUES (1, '(1,x)', '(1,2)')")
	c.pg.Exec("ALTER TYPE pair DROP ATTRIBUTE b, ADD ATTRIBUTE c int; ALTER TABLE part RENAME x TO xx")
	c.set(caseMap{"source": caseMap{"tables": []string{"public.v"}}})
	c.catchUp()
	c.pg.Exec("INSERT INTO v VALUES (2, '(1,2)', '(1,2)')")
	c.pg.Exec("ALTER TABLE part ADD z int")
	c.pg.Exec("INSERT INTO v VALUES (3, '(1,2)', '(1,2,3)')")
	c.catchUp()
	var after []string
	for _, r := range c.parse(c.log().Records) {
		after = append(after, string(r.After))
	}
	want := []string{
		`{"id":1,"p":{"a":1,"c":null},"r":{"xx":1,"y":2}}`,
		`{"id":2,"p":{"a":1,"c":2},"r":"(1,2)"}`,
		`{"id":3,"p":{"a":1,"c":2},"r":{"xx":1,"y":2,"z":3}}`,
	}
	slices.Sort(after)
	if !slices.Equal(after, want) {
		t.Errorf("got\n\t%s\nwant\n\t%s", strings.Join(after, "\n\t"), strings.Join(want, "\n\t"))
	}
}

// The catalog has neither table nor types any more. What the stream announced of the types
// still tells of a domain that it is a number, and of an hstore that it is an object.
func TestTypesThatAreGoneKeepTheirForm(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec(`CREATE EXTENSION hstore; CREATE DOMAIN posint AS int CHECK (VALUE > 0); CREATE DOMAIN price AS numeric(12,2);
		CREATE TYPE mood AS ENUM ('sad'); CREATE TYPE pair AS (a int, b text);
		CREATE TABLE v (id int PRIMARY KEY, d posint, n price, m mood, p pair, h hstore)`)
	c.start()
	c.fence()
	c.stop()
	for _, sql := range []string{
		`INSERT INTO v VALUES (1, 5, 1.5, 'sad', '(1,x)', '"k"=>"v"')`,
		"ALTER TYPE mood ADD VALUE 'happy'",
		`INSERT INTO v VALUES (2, 6, 0, 'happy', NULL, NULL)`,
		"DROP TABLE v; DROP DOMAIN posint; DROP DOMAIN price; DROP TYPE mood; DROP TYPE pair; DROP EXTENSION hstore",
		"CREATE TYPE pair AS (x text); CREATE TABLE v (id int PRIMARY KEY, p pair)", // others by the same names
	} {
		c.pg.Exec(sql)
	}
	c.start()
	c.expect("the records", c.changes(),
		`v c 0 {"id":1} null {"id":1,"d":5,"n":"1.50","m":"sad","p":"(1,x)","h":{"k":"v"}}`,
		`v c 0 {"id":2} null {"id":2,"d":6,"n":"0.00","m":"happy","p":null,"h":null}`)
}

// What the WAL holds of a row is a matter of its replica identity; what the records hold
// follows from it, and nothing is made up.
func TestEachReplicaIdentityGivesWhatItHas(t *testing.T) {
	const big = "repeat('a', 9000)"
	a := `"` + strings.Repeat("a", 9000) + `"`
	for _, mode := range []struct{ toast, kept string }{{"omit", ""}, {"marker", `,"big":"__walrelay_unchanged"`}} {
		t.Run(mode.toast, func(t *testing.T) {
			c := caseNew(t).set(caseMap{"format": caseMap{"toast": mode.toast}, "source": caseMap{"keyless": "inserts"}, "topics": caseMap{"partitions": 1}})
			for _, table := range []struct{ name, alter string }{
				{"def", ""}, {"ful", "REPLICA IDENTITY FULL"}, {"ind", "REPLICA IDENTITY USING INDEX ind_code"}, {"non", "REPLICA IDENTITY NOTHING"},
			} {
				c.pg.Exec(fmt.Sprintf(`CREATE TABLE %[1]s (id int PRIMARY KEY, code text NOT NULL, big text, n int);
					CREATE UNIQUE INDEX %[1]s_code ON %[1]s (code); ALTER TABLE %[1]s ALTER big SET STORAGE EXTERNAL`, table.name))
				if table.alter != "" {
					c.pg.Exec("ALTER TABLE " + table.name + " " + table.alter)
				}
			}
			c.start()
			for _, table := range []string{"def", "ful", "ind", "non"} {
				for _, sql := range []string{
					"INSERT INTO %s VALUES (1, 'x', " + big + ", 1)",
					"UPDATE %s SET n = 2",
					"UPDATE %s SET code = 'y'",
					"UPDATE %s SET big = NULL",
					"UPDATE %s SET id = 2, big = 'b'",
					"DELETE FROM %s",
				} {
					c.pg.Exec(fmt.Sprintf(sql, table))
				}
			}
			row := func(id, code, big, n string) string {
				if big != "" && !strings.HasPrefix(big, ",") {
					big = `,"big":` + big
				}
				return fmt.Sprintf(`{"id":%s,"code":"%s"%s,"n":%s}`, id, code, big, n)
			}
			c.expect("the records", c.changes(),
				`def c 0 {"id":1} null `+row("1", "x", a, "1"),
				`def u 0 {"id":1} null `+row("1", "x", mode.kept, "2"),
				`def u 0 {"id":1} null `+row("1", "y", mode.kept, "2"),
				`def u 0 {"id":1} null `+row("1", "y", "null", "2"),
				`def d 0 {"id":1} {"id":1} null`,
				`def x {"id":1}`,
				`def c 0 {"id":2} null `+row("2", "y", `"b"`, "2"),
				`def d 0 {"id":2} {"id":2} null`,
				`def x {"id":2}`,

				`ful c 0 {"id":1} null `+row("1", "x", a, "1"),
				`ful u 0 {"id":1} `+row("1", "x", a, "1")+" "+row("1", "x", a, "2"),
				`ful u 0 {"id":1} `+row("1", "x", a, "2")+" "+row("1", "y", a, "2"),
				`ful u 0 {"id":1} `+row("1", "y", a, "2")+" "+row("1", "y", "null", "2"),
				`ful d 0 {"id":1} `+row("1", "y", "null", "2")+" null",
				`ful x {"id":1}`,
				`ful c 0 {"id":2} null `+row("2", "y", `"b"`, "2"),
				`ful d 0 {"id":2} `+row("2", "y", `"b"`, "2")+" null",
				`ful x {"id":2}`,

				`ind c 0 {"code":"x"} null `+row("1", "x", a, "1"),
				`ind u 0 {"code":"x"} null `+row("1", "x", mode.kept, "2"),
				`ind d 0 {"code":"x"} {"code":"x"} null`,
				`ind x {"code":"x"}`,
				`ind c 0 {"code":"y"} null `+row("1", "y", mode.kept, "2"),
				`ind u 0 {"code":"y"} null `+row("1", "y", "null", "2"),
				`ind u 0 {"code":"y"} null `+row("2", "y", `"b"`, "2"),
				`ind d 0 {"code":"y"} {"code":"y"} null`,
				`ind x {"code":"y"}`,

				`non c 0 {"id":1} null `+row("1", "x", a, "1")) // published for inserts only
		})
	}
}

// A key that is stored out of line is not in the new row of an update that leaves it alone.
func TestAKeyThatIsStoredOutOfLine(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE v (k text PRIMARY KEY, n int) WITH (toast_tuple_target = 128); ALTER TABLE v ALTER k SET STORAGE EXTERNAL")
	c.start()
	c.pg.Exec("INSERT INTO v VALUES (repeat('k', 2500), 1)")
	c.pg.Exec("UPDATE v SET n = 2")
	c.pg.Exec("DELETE FROM v")
	key := `{"k":"` + strings.Repeat("k", 2500) + `"}`
	changes := c.changes()
	for _, r := range changes {
		if string(r.Key) != key {
			t.Errorf("op %s: key %.100s", r.Op, r.Key)
		}
	}
	if len(changes) != 4 || string(changes[1].After) != strings.TrimSuffix(key, "}")+`,"n":2}` {
		t.Errorf("%d records, the second %.100s…", len(changes), changes[1].After)
	}
}

// Each row has the columns and the key of its own moment, though the connector reads it
// when the table is another one.
func TestTablesThatAreMadeAnewAndKeysThatChange(t *testing.T) {
	c := caseNew(t).set(caseMap{"source": caseMap{"publication-mode": "existing", "publication": "walrelay_case"}, "topics": caseMap{"partitions": 1}})
	c.pg.Exec(`CREATE TABLE k (a int PRIMARY KEY, b int NOT NULL); CREATE TABLE m (id int PRIMARY KEY, v text);
		CREATE TYPE mood AS ENUM ('sad'); CREATE TABLE e (id int PRIMARY KEY, m mood, ms mood[]);
		CREATE SCHEMA old; CREATE TABLE old.s (id int PRIMARY KEY);
		CREATE PUBLICATION walrelay_case FOR ALL TABLES`)
	c.start()
	c.fence()
	c.stop()
	for _, sql := range []string{
		"INSERT INTO k VALUES (1, 10)",
		"ALTER TABLE k DROP CONSTRAINT k_pkey, ADD PRIMARY KEY (b, a)",
		"INSERT INTO k VALUES (2, 20)",
		"UPDATE k SET b = 11 WHERE a = 1",
		"ALTER TABLE k DROP CONSTRAINT k_pkey, ADD PRIMARY KEY (b)",
		"UPDATE k SET a = 3 WHERE b = 20",
		"ALTER TABLE k RENAME b TO bb",
		"DELETE FROM k WHERE a = 3",

		"INSERT INTO m VALUES (1, 'first')",
		"DROP TABLE m; CREATE TABLE m (code text PRIMARY KEY, n numeric)",
		"INSERT INTO m VALUES ('x', 1.10)",
		"ALTER TABLE m RENAME TO mm; CREATE TABLE m (id bigint PRIMARY KEY)",
		"INSERT INTO m VALUES (5); INSERT INTO mm VALUES ('y', 2)",
		"DROP TABLE m, mm",

		"INSERT INTO e VALUES (1, 'sad', '{sad}')",
		"ALTER TYPE mood ADD VALUE 'so so' BEFORE 'sad'",
		"INSERT INTO e VALUES (2, 'so so', '{sad,\"so so\"}')",
		"ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",
		"INSERT INTO e VALUES (3, 'blue', '{}')",

		"INSERT INTO old.s VALUES (1)",
		"ALTER SCHEMA old RENAME TO renamed",
		"INSERT INTO renamed.s VALUES (2)",
		"CREATE SCHEMA other",
		"ALTER TABLE renamed.s SET SCHEMA other",
		"INSERT INTO other.s VALUES (3)",
	} {
		c.pg.Exec(sql)
	}
	c.start()
	changes := c.changes()
	c.expect("the records", changes,
		`k c 0 {"a":1} null {"a":1,"b":10}`,
		`k c 0 {"a":2,"b":20} null {"a":2,"b":20}`,
		`k d 0 {"a":1,"b":10} {"a":1,"b":10} null`,
		`k x {"a":1,"b":10}`,
		`k c 0 {"a":1,"b":11} null {"a":1,"b":11}`,
		`k u 0 {"b":20} null {"a":3,"b":20}`,
		`k d 0 {"bb":20} {"bb":20} null`,
		`k x {"bb":20}`,
		`m c 0 {"id":1} null {"id":1,"v":"first"}`,
		`m c 0 {"code":"x"} null {"code":"x","n":"1.10"}`,
		`m c 0 {"id":5} null {"id":5}`,
		`mm c 1 {"code":"y"} null {"code":"y","n":"2"}`,
		`e c 0 {"id":1} null {"id":1,"m":"sad","ms":["sad"]}`,
		`e c 0 {"id":2} null {"id":2,"m":"so so","ms":["sad","so so"]}`,
		`e c 0 {"id":3} null {"id":3,"m":"blue","ms":[]}`,
		`s c 0 {"id":1} null {"id":1}`,
		`s c 0 {"id":2} null {"id":2}`,
		`s c 0 {"id":3} null {"id":3}`)
	schemas := []string{"old", "renamed", "other"}
	if c.pg.Server.Version() < 16 {
		schemas[1] = "old" // the server does not tell of the new name before something else changes
	}
	for i, schema := range schemas {
		if r := changes[len(changes)-3+i]; r.Source.Schema != schema || r.Topic != c.name+"."+schema+".s" {
			t.Errorf("the row %s says schema %s and is in %s", r.Key, r.Source.Schema, r.Topic)
		}
	}
}

// Rows that a snapshot reads are put aside as the stream's are, or stop the connector.
func TestSnapshotRowsThatCannotBeDelivered(t *testing.T) {
	for _, types := range []string{"plain", "debezium"} {
		for _, onError := range []string{"dead-letter", "stop"} {
			t.Run(types+"/"+onError, func(t *testing.T) {
				c := caseNew(t).set(caseMap{
					"snapshot": caseMap{"mode": "initial"}, "format": caseMap{"types": types}, "dead-letter": caseMap{"on-error": onError},
					"topics": caseMap{"config": caseMap{"max.message.bytes": "100000"}}, "kafka": caseMap{"compression": "none"},
				})
				c.pg.Exec("CREATE TABLE v (id int PRIMARY KEY, v text)")
				c.pg.Exec("INSERT INTO v VALUES (1, 'a'), (2, repeat('x', 200000)), (3, 'c')")
				if onError == "stop" {
					for range 2 { // the next start meets it again
						c.proc = harness.StartProgram(t, harness.Binary(t), nil, "run", "-c", c.file(), "--until-caught-up")
						if code := c.proc.Wait(3 * harness.DefaultTimeout); code != 1 {
							t.Errorf("exit code %d, want 1", code)
						}
						for _, text := range []string{"public.v", "2", "snapshot", "100000", "dead-letter"} {
							if !strings.Contains(c.proc.Stderr(), text) {
								t.Errorf("the error does not say %q", text)
							}
						}
					}
					return
				}
				c.catchUp()
				log := c.log()
				if rows := c.topic(log, c.name+".public.v"); len(rows) != 2 || string(rows[0].Key) != `{"id":1}` || string(rows[1].Key) != `{"id":3}` {
					t.Errorf("%d rows", len(rows))
				}
				dead := c.expectOnly(log, c.name+".dead-letter")
				if dead.Headers["reason"] != "oversize" || dead.Headers["source-topic"] != c.name+".public.v" || string(dead.Key) != `{"id":2}` || !strings.HasSuffix(dead.Headers["position"], "-snapshot") {
					t.Errorf("the dead letter has %v, key %s", dead.Headers, dead.Key)
				}
			})
		}
	}
}

// A row that comes into the filter of a publication is an insert, one that leaves it a
// delete; a snapshot reads by the filter, too.
func TestThePublicationsRowFilter(t *testing.T) {
	major := max(harness.DefaultMajor(t), 15) // the first with filters
	c := caseNew(t, harness.Major(major)).set(caseMap{
		"source":   caseMap{"publication-mode": "existing", "publication": "walrelay_case"},
		"topics":   caseMap{"partitions": 1},
		"snapshot": caseMap{"mode": "initial"},
	})
	c.pg.Exec("CREATE TABLE rf (id int PRIMARY KEY, v text); CREATE PUBLICATION walrelay_case FOR TABLE rf WHERE (id > 10)")
	c.catchUp()
	c.pg.Exec("INSERT INTO rf VALUES (5,'no'), (11,'yes')")
	c.pg.Exec("UPDATE rf SET id = 12 WHERE id = 5")
	c.pg.Exec("UPDATE rf SET id = 6 WHERE id = 11")
	c.catchUp()
	c.expect("the records", c.changesOf(c.log()),
		`rf c 0 {"id":11} null {"id":11,"v":"yes"}`,
		`rf c 0 {"id":12} null {"id":12,"v":"no"}`,
		`rf d 0 {"id":11} {"id":11} null`,
		`rf x {"id":11}`)
	again := harness.StartProgram(t, harness.Binary(t), nil, "snapshot", "-c", c.file(), "--table", "public.rf")
	if code := again.Wait(harness.DefaultTimeout); code != 0 {
		t.Fatalf("snapshot ended with exit code %d: %s", code, again.Stderr())
	}
	c.catchUp()
	read := 0
	for _, r := range c.topic(c.log(), c.name+".public.rf") {
		if strings.Contains(string(r.Value), `"op":"r"`) {
			read++
			if string(r.Key) != `{"id":12}` {
				t.Errorf("the snapshot read %s", r.Key)
			}
		}
	}
	if read != 1 {
		t.Errorf("%d rows were read, want 1", read)
	}
}

package e2e

import (
	"testing"
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

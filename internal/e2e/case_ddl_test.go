package e2e

import (
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// Today's catalog has no such table; what the stream said of its columns was right all
// along.
func TestRowsHaveTheColumnsOfTheirMoment(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE d1 (id int PRIMARY KEY, a int, b text)")
	c.start()
	c.fence()
	c.stop()
	for _, sql := range []string{ // each in a transaction of its own
		"INSERT INTO d1 VALUES (1,10,'x')",
		"ALTER TABLE d1 ADD COLUMN c numeric DEFAULT 1.50",
		"INSERT INTO d1 VALUES (2,20,'y',2.50)",
		"ALTER TABLE d1 DROP COLUMN a",
		"INSERT INTO d1 VALUES (3,'z',3.50)",
		"ALTER TABLE d1 RENAME b TO bb",
		"INSERT INTO d1 VALUES (4,'w',4.50)",
		"ALTER TABLE d1 ALTER c TYPE text USING c::text || '!'",
		"INSERT INTO d1 VALUES (5,'v','5.50!')",
		"UPDATE d1 SET bb='q' WHERE id=1",
		"DROP TABLE d1",
	} {
		c.pg.Exec(sql)
	}
	c.start()
	c.expect("the records", c.changes(),
		`d1 c 0 {"id":1} null {"id":1,"a":10,"b":"x"}`,
		`d1 c 0 {"id":2} null {"id":2,"a":20,"b":"y","c":"2.50"}`,
		`d1 c 0 {"id":3} null {"id":3,"b":"z","c":"3.50"}`,
		`d1 c 0 {"id":4} null {"id":4,"bb":"w","c":"4.50"}`,
		`d1 c 0 {"id":5} null {"id":5,"bb":"v","c":"5.50!"}`,
		`d1 u 0 {"id":1} null {"id":1,"bb":"q","c":"1.50!"}`)
}

// A tuple is shorter than its table here: indexes from the catalog run out of range, or
// shift.
func TestAColumnListChangedWhileStreaming(t *testing.T) {
	major := harness.DefaultMajor(t)
	if major < 15 {
		major = 15 // the first with column lists
	}
	c := caseNew(t, harness.Major(major))
	c.pg.Exec("CREATE TABLE cl (id int PRIMARY KEY, a int, b int, secret text); CREATE PUBLICATION walrelay_case FOR TABLE cl (id, a)")
	c.set(caseMap{"source": caseMap{"publication-mode": "existing", "publication": "walrelay_case"}})
	c.start()
	for _, sql := range []string{
		"INSERT INTO cl VALUES (1,2,3,'hush-hush')",
		"UPDATE cl SET b=4",
		"ALTER PUBLICATION walrelay_case SET TABLE cl (id, b)",
		"UPDATE cl SET b=5",
	} {
		c.pg.Exec(sql)
	}
	log := c.settled()
	c.expect("the records", c.changesOf(log),
		`cl c 0 {"id":1} null {"id":1,"a":2}`,
		`cl u 0 {"id":1} null {"id":1,"a":2}`,
		`cl u 0 {"id":1} null {"id":1,"b":5}`)
	for _, r := range log.Records {
		if strings.Contains(string(r.Value), "hush-hush") {
			t.Errorf("%s holds what the publication does not list: %s", r.Where(), r.Value)
		}
	}
	if strings.Contains(c.proc.Stderr(), "hush-hush") {
		t.Error("the log holds what the publication does not list")
	}
}

// A cache by transaction or by table misses the second description of the table.
func TestAColumnAddedWithinATransaction(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE d3 (id int PRIMARY KEY)")
	c.start()
	c.exec(c.session(), "BEGIN; INSERT INTO d3 VALUES (1); ALTER TABLE d3 ADD x int; INSERT INTO d3 VALUES (2,3); COMMIT")
	changes := c.changes()
	c.expect("the records", changes,
		`d3 c 0 {"id":1} null {"id":1}`,
		`d3 c 1 {"id":2} null {"id":2,"x":3}`)
	c.oneTransaction(changes)
}

// The publication follows the table, the configuration its name.
func TestATableRenamedAndMovedToAnotherSchema(t *testing.T) {
	c := caseNew(t).set(caseMap{
		"source": caseMap{"tables": []string{"public.*"}},
		"admin":  caseMap{"listen": "127.0.0.1:0"},
	})
	c.pg.Exec("CREATE SCHEMA arch; CREATE TABLE d (id int PRIMARY KEY)")
	c.start()
	for _, sql := range []string{
		"INSERT INTO d VALUES (1)",
		"ALTER TABLE d RENAME TO d_new",
		"INSERT INTO d_new VALUES (2)",
	} {
		c.pg.Exec(sql)
	}
	// The insert must be sent by the publication still, so it is written with the move,
	// before the publication is brought in step.
	c.exec(c.session(), "ALTER TABLE d_new SET SCHEMA arch; INSERT INTO arch.d_new VALUES (3)")
	log := c.settled()
	changes := c.changesOf(log)
	c.expect("the records", changes,
		`d c 0 {"id":1} null {"id":1}`,
		`d_new c 0 {"id":2} null {"id":2}`)
	for i, table := range []string{"d", "d_new"} {
		if s := changes[i].Source; s.Schema != "public" || s.Table != table {
			t.Errorf("source names %s.%s, want public.%s", s.Schema, s.Table, table)
		}
		if want := c.name + ".public." + table; changes[i].Topic != want {
			t.Errorf("topic %s, want %s", changes[i].Topic, want)
		}
	}
	c.expectNoTopic(log, c.name+".arch.d_new")
	harness.WaitFor(t, "id 3 to count as excluded", harness.DefaultTimeout, func() (bool, error) {
		return c.metric("walrelay_records_total", `outcome="excluded"`, "arch") == 1, nil
	})
	c.pg.WaitValue("0", "SELECT count(*) FROM pg_publication_tables WHERE pubname = $1", "walrelay_"+c.name)
	c.proc.WaitLog(harness.DefaultTimeout, harness.Field("table", "arch.d_new"), harness.Message("removed from the publication"))
}

// Two relations share one topic in one transaction; what is remembered of one must not be
// taken for the other's.
func TestARowThatMovesBetweenPartitions(t *testing.T) {
	c := caseNew(t).set(caseMap{"topics": caseMap{"partitions": 1}})
	c.pg.Exec(`CREATE TABLE p (id int, d date, v text, PRIMARY KEY (id, d)) PARTITION BY RANGE (d);
		CREATE TABLE p_a PARTITION OF p FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
		CREATE TABLE p_b PARTITION OF p FOR VALUES FROM ('2026-02-01') TO ('2026-03-01')`)
	c.start()
	for _, sql := range []string{
		"INSERT INTO p VALUES (1,'2026-01-05','x')",
		"UPDATE p SET v='y'",
		"UPDATE p SET d='2026-02-05'",
	} {
		c.pg.Exec(sql)
	}
	c.expect("the records", c.changes(),
		`p c 0 {"id":1,"d":"2026-01-05"} null {"id":1,"d":"2026-01-05","v":"x"}`,
		`p u 0 {"id":1,"d":"2026-01-05"} null {"id":1,"d":"2026-01-05","v":"y"}`,
		`p d 0 {"id":1,"d":"2026-01-05"} {"id":1,"d":"2026-01-05"} null`,
		`p x {"id":1,"d":"2026-01-05"}`,
		`p c 1 {"id":1,"d":"2026-02-05"} null {"id":1,"d":"2026-02-05","v":"y"}`)
}

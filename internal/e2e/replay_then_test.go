package e2e

import (
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// sameAsLive replays everything behind begin and compares each of the live topics with its
// part of the replay, from position on. skip are topics that are not compared.
func (c *caseRun) sameAsLive(begin string, topics ...string) {
	c.t.Helper()
	r := c.mustReplay("--from-lsn", begin)
	total := int64(0)
	for _, topic := range topics {
		live := c.kafka.Committed(c.t, topic)
		if len(live) == 0 {
			c.t.Errorf("topic %s is empty", topic)
			continue
		}
		total += int64(len(live))
		again := c.kafka.WaitCommitted(c.t, r.Prefix+strings.TrimPrefix(topic, c.name), len(live))
		sameButReplay(c.t, live, again, r.ID)
	}
	if fences := int64(len(c.kafka.Committed(c.t, c.name+".message"))); r.Records != total+fences {
		c.t.Errorf("%d records are replayed, and %d were live: %+v", r.Records, total+fences, r.Topics)
	}
}

// steps runs statements, each its own transaction, and waits after each until it is delivered,
// so that the live stream met each in its time.
func (c *caseRun) steps(statements ...string) {
	c.t.Helper()
	conn := c.session()
	for _, sql := range statements {
		c.exec(conn, sql)
		c.fence()
	}
}

// What was published is decided by the catalog of the change's time, then as now.
func TestReplayOfAPublicationThatWasAltered(t *testing.T) {
	c := caseNew(t)
	pub := "pub_" + c.name
	c.set(caseMap{"source": caseMap{"publication": pub, "publication-mode": "existing", "tables": []string{"public.a", "public.b", "public.p"}, "keyless": "inserts"}})
	c.pg.Exec("CREATE TABLE a (id int PRIMARY KEY, v text, w text)")
	c.pg.Exec("CREATE TABLE b (id int PRIMARY KEY, v text)")
	c.pg.Exec("CREATE TABLE p (id int, d int, v text, PRIMARY KEY (id, d)) PARTITION BY RANGE (d)")
	c.pg.Exec("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)")
	c.pg.Exec("CREATE TABLE p2 (id int NOT NULL, d int NOT NULL, v text, PRIMARY KEY (id, d))")
	c.pg.Exec("CREATE PUBLICATION " + pub + " FOR TABLE a, b, p WITH (publish_via_partition_root = true)")
	c.start()
	c.anchored()
	begin := c.walEnd().String()
	c.steps(
		"INSERT INTO a VALUES (1, 'x', 'y'); INSERT INTO b VALUES (1, 'x'); INSERT INTO p VALUES (1, 1, 'x')",
		"ALTER PUBLICATION "+pub+" DROP TABLE b",
		"BEGIN; INSERT INTO b VALUES (2, 'unpublished'); INSERT INTO a VALUES (2, 'x', 'y'); COMMIT",
		"ALTER PUBLICATION "+pub+" ADD TABLE b",
		"BEGIN; INSERT INTO b VALUES (3, 'x'); UPDATE b SET v = 'z' WHERE id = 2; DELETE FROM b WHERE id = 1; COMMIT",
		"INSERT INTO p2 VALUES (5, 15, 'before it was attached')",
		"ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (10) TO (20)",
		"INSERT INTO p VALUES (2, 12, 'x'), (3, 3, 'x')",
		"ALTER TABLE p DETACH PARTITION p2",
		"INSERT INTO p2 VALUES (4, 14, 'detached')",
		"ALTER PUBLICATION "+pub+" SET (publish = 'insert, delete')",
		"BEGIN; UPDATE a SET v = 'unpublished'; DELETE FROM a WHERE id = 1; INSERT INTO a VALUES (9, 'x', 'y'); COMMIT",
		"ALTER PUBLICATION "+pub+" SET (publish = 'insert, update, delete, truncate')",
	)
	if harness.DefaultMajor(t) >= 15 {
		c.steps(
			"ALTER PUBLICATION "+pub+" SET TABLE a (id, v), b WHERE (id > 100), p",
			"BEGIN; INSERT INTO a VALUES (10, 'x', 'hidden'); INSERT INTO b VALUES (10, 'filtered'), (110, 'x'); COMMIT",
			"ALTER PUBLICATION "+pub+" SET TABLE a (id, w), b WHERE (id < 100), p",
			"BEGIN; INSERT INTO a VALUES (11, 'hidden', 'y'); INSERT INTO b VALUES (11, 'x'), (111, 'filtered'); COMMIT",
			"ALTER PUBLICATION "+pub+" SET TABLE a, b, p",
		)
	}
	c.steps("BEGIN; UPDATE a SET w = 'q'; INSERT INTO b VALUES (12, 'x'); COMMIT", "TRUNCATE b")
	c.sameAsLive(begin, c.name+".public.a", c.name+".public.b", c.name+".public.p")
	for _, r := range c.kafka.Committed(t, c.name+".public.b") {
		if strings.Contains(string(r.Value), "unpublished") || strings.Contains(string(r.Value), "filtered") {
			t.Errorf("the live stream has %s", r.Value)
		}
	}
	c.stop()
}

// Tables without a key are published insert-only, beside; one that gets a key moves.
func TestReplayOfTablesWithoutAKey(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"source": caseMap{"keyless": "inserts", "keys": caseMap{"public.n": []string{"b"}}}})
	c.pg.Exec("CREATE TABLE k (a int, b text)")
	c.pg.Exec("CREATE TABLE n (a int, b text NOT NULL)")
	c.pg.Exec("CREATE TABLE f (a int, b text)")
	c.pg.Exec("ALTER TABLE f REPLICA IDENTITY FULL")
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	begin := c.walEnd().String()
	c.steps(
		"BEGIN; INSERT INTO k VALUES (1, 'x'); INSERT INTO t VALUES (1); INSERT INTO n VALUES (1, 'x'); COMMIT",
		"BEGIN; UPDATE k SET a = 2; INSERT INTO k VALUES (3, 'y'); DELETE FROM t; INSERT INTO n VALUES (2, 'y'); COMMIT",
		"BEGIN; INSERT INTO f VALUES (1, 'x'); UPDATE f SET a = 2; DELETE FROM f; COMMIT",
		"ALTER TABLE k ADD PRIMARY KEY (a)",
		"INSERT INTO k VALUES (4, 'z')",
	)
	c.sameAsLive(begin, c.name+".public.k", c.name+".public.t", c.name+".public.n", c.name+".public.f")
	c.stop()
}

// Rows come out with the columns, names and types of their time.
func TestReplayOfRowsFromBeforeDDL(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TYPE mood AS ENUM ('sad', 'ok')")
	c.pg.Exec("CREATE TYPE gone AS ENUM ('was')")
	c.pg.Exec("CREATE TYPE pair AS (x int, y text)")
	c.pg.Exec("CREATE DOMAIN dom AS int CHECK (VALUE > 0)")
	c.pg.Exec("CREATE TABLE a (id int PRIMARY KEY, m mood, p pair, d dom, n int, s text, arr mood[], w gone DEFAULT 'was')")
	c.pg.Exec("CREATE TABLE b (id int PRIMARY KEY, v text)")
	c.pg.Exec("CREATE TABLE g (id int PRIMARY KEY, v text)")
	c.start()
	c.anchored()
	begin := c.walEnd().String()
	c.steps(
		"INSERT INTO a VALUES (1, 'sad', '(1,one)', 7, 5, 'x', '{ok,sad}'); INSERT INTO b VALUES (1, 'x'); INSERT INTO g VALUES (1, 'x')",
		"ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",
		"ALTER TABLE a RENAME COLUMN s TO renamed",
		"INSERT INTO a VALUES (2, 'blue', '(2,two)', 8, 6, 'y', '{blue}')",
		"ALTER TABLE a ALTER COLUMN n TYPE text USING 'n' || n",
		"UPDATE a SET renamed = 'z' WHERE id = 1",
		"ALTER TABLE a DROP COLUMN m, DROP COLUMN arr, DROP COLUMN w",
		"ALTER TABLE a ADD COLUMN late timestamptz DEFAULT '2026-01-01'",
		"INSERT INTO a VALUES (3, '(3,three)', 9, 'n7', 'w')",
		"ALTER TABLE a DROP COLUMN d",
		"DROP DOMAIN dom; DROP TYPE gone",
		"BEGIN; DELETE FROM a WHERE id = 2; UPDATE a SET id = 11 WHERE id = 1; COMMIT",
		"ALTER TABLE b DROP CONSTRAINT b_pkey, ADD PRIMARY KEY (v)",
		"UPDATE b SET v = 'y'; DELETE FROM b",
		"DROP TABLE g",
	)
	c.sameAsLive(begin, c.name+".public.a", c.name+".public.b", c.name+".public.g")
	c.stop()
}

// What the WAL does not tell is not guessed: a composite value from before its type was
// altered, and an array whose type is gone, is PostgreSQL's text.
func TestReplayGuessesNoTypeOfThen(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TYPE pair AS (x int, y text)")
	c.pg.Exec("CREATE TYPE gone AS ENUM ('was')")
	c.pg.Exec("CREATE TABLE a (id int PRIMARY KEY, p pair, w gone[])")
	c.start()
	c.anchored()
	begin := c.walEnd().String()
	c.steps(
		"INSERT INTO a VALUES (1, '(1,one)', '{was}')",
		"ALTER TABLE a DROP COLUMN w",
		"DROP TYPE gone",
		"ALTER TYPE pair ADD ATTRIBUTE z int",
		"INSERT INTO a VALUES (2, '(2,two,22)')",
		"ALTER TYPE pair RENAME ATTRIBUTE y TO why",
		"INSERT INTO a VALUES (3, '(3,three,33)')",
	)
	r := c.mustReplay("--from-lsn", begin, "--table", "public.a")
	again := c.kafka.WaitCommitted(t, r.Prefix+".public.a", 3)
	replayKeys(again)
	for i, want := range []string{`"p":"(1,one)","w":"{was}"`, `"p":"(2,two,22)"`, `"p":{"x":3,"why":"three","z":33}`} {
		if !strings.Contains(string(again[i].Value), want) {
			t.Errorf("replayed %s, want %s", again[i].Value, want)
		}
	}
	c.stop()
}

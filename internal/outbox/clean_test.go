package outbox

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

func (s *stand) clean(t Table, o CleanOptions) (Cleaned, error) {
	return Clean(s.t.Context(), replication.NewConnector(s.dsn, "walrelay_test"), t, o)
}

func TestWhichRowsAreCleaned(t *testing.T) {
	for name, tt := range map[string]struct {
		table Table
		want  string
	}{
		"published_at": {Table{Mark: "published_at", Pending: `"published_at" IS NULL`, Created: "created_at"},
			`NOT ("published_at" IS NULL) AND "published_at" <= pg_catalog.now() - interval '3600000000 microseconds'`},
		"status": {Table{Mark: "status", Pending: `"status" IS DISTINCT FROM 1`, Created: "Created"},
			`NOT ("status" IS DISTINCT FROM 1) AND "Created" <= pg_catalog.now() - interval '3600000000 microseconds'`},
	} {
		if got, err := tt.table.cleanable(time.Hour); err != nil || got != tt.want {
			t.Errorf("%s: %s, %v; want %s", name, got, err, tt.want)
		}
	}
	var refusal *checkpoint.Refusal
	for _, table := range []Table{{Created: "created_at"}, {Mark: "status", Pending: "true"}} {
		if _, err := table.cleanable(time.Hour); !errors.As(err, &refusal) {
			t.Errorf("%+v: error %v, want a refusal", table, err)
		}
	}
	table := Table{Mark: "status", Pending: "x"}
	if got, err := table.cleanable(0); err != nil || got != "NOT (x)" {
		t.Errorf("of any age: %s, %v", got, err)
	}
}

// A row that somebody holds is left for the next run, and the rest of the table is not.
func TestCleaningLeavesWhatIsLocked(t *testing.T) {
	s := newStand(t, schema+`; ALTER TABLE outbox ADD COLUMN filler text;
		UPDATE outbox SET published_at = now() - interval '1 day' WHERE id > 1;
		INSERT INTO outbox (id, published_at, filler) SELECT g, now() - interval '1 day', repeat(md5(g::text), 60) FROM generate_series(11, 6000) g`)
	app := s.connect()
	if _, err := app.Exec(t.Context(), "BEGIN; SELECT FROM outbox WHERE id = 2 FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	c, err := s.clean(byPublishedAt(s, Mark), CleanOptions{OlderThan: time.Hour, Batch: 1000})
	if err != nil || len(c.Left) != 1 || !strings.Contains(c.Left[0], "locked") || c.Deleted == 0 {
		t.Fatalf("%+v, %v; want that some are locked, and some deleted", c, err)
	}
	if _, err := app.Exec(t.Context(), "COMMIT"); err != nil {
		t.Fatal(err)
	}
	first := c.Deleted
	c, err = s.clean(byPublishedAt(s, Mark), CleanOptions{OlderThan: time.Hour, Batch: 1000})
	if err != nil || len(c.Left) != 0 || first+c.Deleted != 5999 {
		t.Errorf("%+v, %v; want the rest of 5999, %d are deleted already", c, err, first)
	}
	if got := s.Value("SELECT string_agg(id::text, ',') FROM outbox"); got != "1" {
		t.Errorf("left: %s, want the row that is not published", got)
	}
}

func TestCleaningKeepsPartitionsThatOthersNeed(t *testing.T) {
	s := newStand(t, `CREATE TABLE outbox (event_id int, published_at timestamptz, created_at date, PRIMARY KEY (event_id, created_at)) PARTITION BY RANGE (created_at);
		CREATE TABLE "O 1" PARTITION OF outbox FOR VALUES FROM ('2020-01-01') TO ('2020-02-01');
		CREATE TABLE o2 PARTITION OF outbox FOR VALUES FROM ('2020-02-01') TO ('2020-03-01');
		CREATE TABLE o3 PARTITION OF outbox FOR VALUES FROM ('2020-03-01') TO (MAXVALUE);
		CREATE VIEW seen AS SELECT * FROM o2;
		INSERT INTO outbox SELECT g, '2020-06-01', date '2020-01-15' + 31 * (g % 3) FROM generate_series(0, 8) g`)
	c, err := s.clean(byPublishedAt(s, Mark), CleanOptions{OlderThan: time.Hour, Batch: 2, DropPartitions: true})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(c.Dropped, []string{`public."O 1"`}) || c.Deleted != 6 || len(c.Left) != 2 || !strings.Contains(c.Left[0], "public.o2: something depends on it") || !strings.Contains(c.Left[1], "public.o3: its bounds") {
		t.Errorf("%+v", c)
	}
}

// byMonth is an outbox in two partitions whose time is over, of one published row each.
const byMonth = `CREATE TABLE outbox (event_id int, published_at timestamptz, created_at date) PARTITION BY RANGE (created_at);
	CREATE TABLE o1 PARTITION OF outbox FOR VALUES FROM ('2020-01-01') TO ('2020-02-01');
	CREATE TABLE o2 PARTITION OF outbox FOR VALUES FROM ('2020-02-01') TO ('2020-03-01');
	INSERT INTO outbox VALUES (1, '2020-06-01', '2020-01-15'), (2, '2020-06-01', '2020-02-15')`

var dropAll = CleanOptions{OlderThan: time.Hour, Batch: 1000, DropPartitions: true}

// Nobody is kept waiting for the look at a partition that stays, nor does it wait for writers.
func TestCleaningLooksAtAPartitionWithoutALock(t *testing.T) {
	s := newStand(t, byMonth+"; DROP TABLE o2; INSERT INTO outbox VALUES (3, NULL, '2020-01-16')")
	app := s.connect()
	if _, err := app.Exec(t.Context(), "BEGIN; UPDATE o1 SET event_id = 4 WHERE event_id = 3"); err != nil {
		t.Fatal(err)
	}
	c, err := s.clean(byPublishedAt(s, Mark), dropAll)
	if err != nil || c.Deleted != 1 || len(c.Left) != 1 || !strings.Contains(c.Left[0], "public.o1: it holds rows that are not published") {
		t.Errorf("%+v, %v; want that o1 holds an unpublished row", c, err)
	}
}

// A row that was written behind the look, and before nobody could write any more, is seen.
func TestCleaningSeesARowThatComesBehindItsLook(t *testing.T) {
	s := newStand(t, byMonth)
	app := s.connect()
	if _, err := app.Exec(t.Context(), "BEGIN; INSERT INTO outbox VALUES (3, NULL, '2020-01-16')"); err != nil {
		t.Fatal(err)
	}
	type result struct {
		Cleaned
		err error
	}
	done := make(chan result, 1)
	go func() {
		c, err := s.clean(byPublishedAt(s, Mark), dropAll)
		done <- result{c, err}
	}()
	s.WaitValue("1", "SELECT count(*) FROM pg_locks WHERE relation = 'o1'::regclass AND mode = 'ShareRowExclusiveLock' AND NOT granted")
	if _, err := app.Exec(t.Context(), "COMMIT"); err != nil {
		t.Fatal(err)
	}
	c := <-done
	if c.err != nil || !slices.Equal(c.Dropped, []string{"public.o2"}) || len(c.Left) != 1 || !strings.Contains(c.Left[0], "public.o1: it holds rows that are not published") {
		t.Errorf("%+v; want that o1 holds an unpublished row", c)
	}
	if got := s.Value("SELECT string_agg(event_id::text, ',') FROM outbox"); got != "3" {
		t.Errorf("left: %s, want the row that is not published", got)
	}
}

// Writers are not kept waiting for a partition in which the last look takes long: it is cleaned
// row by row, and the others are dropped. An index on what is not published makes it short.
func TestCleaningKeepsAPartitionThatTakesTooLong(t *testing.T) {
	s := newStand(t, byMonth+"; INSERT INTO outbox SELECT g, '2020-06-01', '2020-01-16' FROM generate_series(3, 300000) g")
	o := dropAll
	o.LookFor = time.Millisecond
	c, err := s.clean(byPublishedAt(s, Mark), o)
	if err != nil || len(c.Dropped) > 1 || len(c.Left) == 0 || !strings.Contains(c.Left[0], "public.o1: a look for rows") || !strings.Contains(c.Left[0], `CREATE INDEX ON "public"."outbox" ("published_at") WHERE "published_at" IS NULL`) || c.Deleted < 299999 {
		t.Errorf("%+v, %v; want that the look at o1 takes too long, and its rows to be deleted", c, err)
	}
}

// A trigger that takes its time ends neither the run nor the other partitions'.
func TestCleaningGoesOnBehindASlowTable(t *testing.T) {
	s := newStand(t, byMonth+`; CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION USING ERRCODE = ''57014''; END';
		CREATE TRIGGER slow BEFORE DELETE ON o1 FOR EACH ROW EXECUTE FUNCTION slow()`)
	c, err := s.clean(byPublishedAt(s, Mark), CleanOptions{OlderThan: time.Hour, Batch: 1000})
	if err != nil || c.Deleted != 1 || len(c.Left) != 1 || !strings.Contains(c.Left[0], "public.o1: deleting up to 1000 of its rows took longer than 30s") {
		t.Errorf("%+v, %v; want that o1 takes too long, and the row of o2 to be deleted", c, err)
	}
}

// Between the look and the lock a partition may have become a table that is kept.
func TestCleaningDropsNothingThatIsNoPartitionAnyMore(t *testing.T) {
	s := newStand(t, byMonth+"; ALTER TABLE outbox DETACH PARTITION o1")
	d := dropping{condition: "true", table: byPublishedAt(s, Mark), lookFor: time.Second}
	for _, name := range []string{"o1", "o2"} {
		l := leaf{oid: s.oid("o1"), name: name} // o2 is another one by now
		if dropped, why, err := l.tryDrop(t.Context(), s.connect(), d); dropped || err != nil || why != "it has just been detached or renamed" {
			t.Errorf("%s: dropped %v, %s, %v", name, dropped, why, err)
		}
	}
}

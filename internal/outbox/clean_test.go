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

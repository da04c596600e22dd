package e2e

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// sequence gives the aggregate_seq of the events in the topic, in their order, by the payload
// that insertEvent gives them.
func (c *caseRun) sequence() (seq []int) {
	c.t.Helper()
	for _, r := range c.kafka.Committed(c.t, c.eventTopic()) {
		digits := strings.Trim(string(r.Value), "{}\"n: ")
		n, err := strconv.Atoi(digits)
		if err != nil {
			c.t.Fatalf("payload %s", r.Value)
		}
		seq = append(seq, n)
	}
	return seq
}

// renamedOutbox is an outbox table whose three first events are delivered.
func renamedOutbox(t *testing.T, after string) *caseRun {
	t.Helper()
	c := caseNew(t)
	c.pg.Exec(caseOutbox)
	c.set(caseMap{
		"source": caseMap{"tables": []string{"public.orders"}}, "snapshot": caseMap{"mode": "initial"},
		"outbox": []caseMap{{"table": "public.outbox", "topic": "outbox.event.{event_type}", "after": after}},
	})
	c.start()
	c.insertEvents(1, 3)
	c.fence()
	return c
}

func (c *caseRun) insertEvents(from, to int) {
	c.t.Helper()
	for seq := from; seq <= to; seq++ {
		c.pg.Exec(c.insertEvent("a", seq))
	}
}

// wantSequence wants each event once, and of the rows in table that they were marked, or
// deleted, if that is what becomes of them.
func (c *caseRun) wantSequence(after, table string, n int) {
	c.t.Helper()
	c.kafka.WaitCommitted(c.t, c.eventTopic(), n)
	c.fence()
	want := make([]int, n)
	for i := range want {
		want[i] = i + 1
	}
	if got := c.sequence(); !slices.Equal(got, want) {
		c.t.Errorf("events %v, want %v", got, want)
	}
	left := strconv.Itoa(n)
	switch after {
	case "mark":
		c.pg.WaitValue(left, "SELECT count(*) FROM "+table+" WHERE published_at IS NOT NULL")
	case "delete":
		left = "0"
	}
	c.pg.WaitValue(left, "SELECT count(*) FROM "+table)
}

func eachAfter(t *testing.T, test func(t *testing.T, after string)) {
	for _, after := range []string{"keep", "mark", "delete"} {
		t.Run(after, func(t *testing.T) { test(t, after) })
	}
}

func TestAnOutboxThatWasRenamedWhileNobodyRanLosesNoEvent(t *testing.T) {
	eachAfter(t, func(t *testing.T, after string) {
		c := renamedOutbox(t, after)
		c.stop()
		c.insertEvents(4, 4)
		c.pg.Exec("ALTER TABLE outbox RENAME TO events")
		c.pg.Exec(strings.Replace(c.insertEvent("a", 5), "INTO outbox", "INTO events", 1))
		c.refuses("outbox table public.outbox was renamed to public.events")
		c.config["outbox"].([]caseMap)[0]["table"] = "public.events"
		c.start()
		c.wantSequence(after, "events", 5)
	})
}

func TestAnOutboxThatIsRenamedWhileItIsReadLosesNoEvent(t *testing.T) {
	eachAfter(t, func(t *testing.T, after string) {
		c := renamedOutbox(t, after)
		c.pg.Exec("ALTER TABLE outbox RENAME TO events")
		insert := func(seq int) {
			c.pg.Exec(strings.Replace(c.insertEvent("a", seq), "INTO outbox", "INTO events", 1))
		}
		insert(4)
		c.wantSequence(after, "events", 4)
		c.proc.WaitLog(harness.DefaultTimeout, harness.Text("outbox table public.outbox was renamed to public.events"))
		insert(5)
		c.wantSequence(after, "events", 5)
		c.stop()
		insert(6)
		c.config["outbox"].([]caseMap)[0]["table"] = "public.events"
		c.start()
		insert(7)
		c.wantSequence(after, "events", 7)
	})
}

func TestAnOutboxThatIsRenamedAndBackLosesNoEvent(t *testing.T) {
	for _, tables := range []string{"*.*", "public.orders"} {
		t.Run(tables, func(t *testing.T) {
			eachAfter(t, func(t *testing.T, after string) {
				c := renamedOutbox(t, after)
				c.stop()
				c.set(caseMap{"source": caseMap{"tables": []string{tables}}})
				c.pg.Exec("ALTER TABLE outbox RENAME TO other")
				c.pg.Exec(strings.Replace(c.insertEvent("a", 4), "INTO outbox", "INTO other", 1))
				c.pg.Exec("ALTER TABLE other RENAME TO outbox")
				c.insertEvents(5, 5)
				c.start()
				c.wantSequence(after, "outbox", 5)
			})
		})
	}
}

// The migration to a partitioned outbox: the old table becomes its first partition.
func TestAnOutboxThatBecomesAPartitionLosesNoEvent(t *testing.T) {
	for _, after := range []string{"mark", "delete"} {
		t.Run(after, func(t *testing.T) {
			c := renamedOutbox(t, after)
			c.pg.Exec(`BEGIN; ALTER TABLE outbox RENAME TO outbox_p0; ALTER TABLE outbox_p0 DROP CONSTRAINT outbox_pkey, DROP CONSTRAINT outbox_event_id_key, DROP CONSTRAINT outbox_aggregate_id_aggregate_seq_key;
				CREATE TABLE outbox (LIKE outbox_p0 INCLUDING DEFAULTS, PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at);
				ALTER TABLE outbox ATTACH PARTITION outbox_p0 FOR VALUES FROM (MINVALUE) TO (MAXVALUE); ` + c.insertEvent("a", 4) + ` COMMIT`)
			c.insertEvents(5, 5)
			c.wantSequence(after, "outbox", 5)
			c.proc.WaitLog(2*harness.DefaultTimeout, harness.Message("outbox table is new"))
			c.insertEvents(6, 6)
			c.wantSequence(after, "outbox", 6)
		})
	}
}

// A rotation: the table of that name is another one, and rows come before and after the
// connector knows it. Each event goes out once.
func TestARotatedOutboxSendsEachEventOnce(t *testing.T) {
	eachAfter(t, func(t *testing.T, after string) {
		c := renamedOutbox(t, after)
		c.stop()
		c.config["outbox"].([]caseMap)[0]["snapshot"] = "all"
		c.start()
		c.pg.Exec("BEGIN; ALTER TABLE outbox RENAME TO outbox_old; CREATE TABLE outbox (LIKE outbox_old INCLUDING ALL); COMMIT")
		seq := 3
		harness.WaitFor(t, "the new table to be seen", 2*harness.DefaultTimeout, func() (bool, error) {
			for range 10 {
				seq++
				c.insertEvents(seq, seq)
			}
			return c.said("table read"), nil
		})
		seq++
		c.insertEvents(seq, seq)
		c.kafka.WaitCommitted(t, c.eventTopic(), seq)
		c.fence()
		count := map[int]int{}
		for _, n := range c.sequence() {
			count[n]++
		}
		for n := 1; n <= seq; n++ {
			if count[n] != 1 {
				t.Errorf("event %d of %d comes %d times", n, seq, count[n])
			}
		}
		switch after { // the rows of either table
		case "mark":
			c.pg.WaitValue("0", "SELECT count(*) FROM (TABLE outbox UNION ALL TABLE outbox_old) r WHERE published_at IS NULL")
		case "delete":
			c.pg.WaitValue("0", "SELECT count(*) FROM (TABLE outbox UNION ALL TABLE outbox_old) r")
		}
	})
}

// Rows that wait to be marked while the table is rotated are marked where they are by then.
func TestRowsOfARotatedOutboxAreMarkedByTheNextStart(t *testing.T) {
	c := renamedOutbox(t, "mark")
	c.waitMarked("1,2,3")
	c.refuseMarks("old.aggregate_seq = 4")
	c.insertEvents(4, 5)
	c.fence()
	c.waitMarked("1,2,3,5")
	c.proc.Kill()
	c.pg.Exec("BEGIN; ALTER TABLE outbox RENAME TO outbox_old; CREATE TABLE outbox (LIKE outbox_old INCLUDING ALL); COMMIT")
	// Twice, since the second start knows of it only what the first one wrote down.
	for seq := 6; seq <= 7; seq++ {
		c.start()
		c.insertEvents(seq, seq)
		c.fence()
		c.pg.WaitValue("t", "SELECT published_at IS NOT NULL FROM outbox WHERE aggregate_seq = $1", seq)
		c.proc.Kill()
	}
	c.pg.Exec("DROP TRIGGER refuse ON outbox_old")
	c.start()
	c.pg.WaitValue("0", "SELECT count(*) FROM (TABLE outbox UNION ALL TABLE outbox_old) r WHERE published_at IS NULL")
	if got := c.sequence(); !slices.Equal(got, []int{1, 2, 3, 4, 5, 6, 7}) {
		t.Errorf("events %v", got)
	}
}

// With after: keep nothing tells which rows of a table that takes the outbox's place are new.
func TestAnOutboxThatWasMadeAnewWithRowsIsRefusedWhereNothingTellsThem(t *testing.T) {
	c := renamedOutbox(t, "keep")
	c.stop()
	c.pg.Exec("CREATE TABLE copy (LIKE outbox INCLUDING ALL); INSERT INTO copy SELECT * FROM outbox")
	c.pg.Exec("ALTER TABLE outbox RENAME TO outbox_old; ALTER TABLE copy RENAME TO outbox")
	c.refuses("outbox table public.outbox was made anew since the connector has run, and has rows")
	c.config["outbox"].([]caseMap)[0]["snapshot"] = "none"
	c.start()
	c.insertEvents(4, 4)
	c.wantSequence("keep", "outbox", 4)
}

func TestAnOutboxInASchemaWithADot(t *testing.T) {
	eachAfter(t, func(t *testing.T, after string) {
		c := caseNew(t)
		c.pg.Exec(`CREATE SCHEMA "My.Sch"; SET search_path TO "My.Sch"; ` + caseOutbox)
		c.set(caseMap{"outbox": []caseMap{{"table": "My.Sch.outbox", "topic": "outbox.event.{event_type}", "after": after}}})
		c.start()
		for seq := 1; seq <= 3; seq++ {
			c.pg.Exec(strings.Replace(c.insertEvent("a", seq), "INTO outbox", `INTO "My.Sch".outbox`, 1))
		}
		c.wantSequence(after, `"My.Sch".outbox`, 3)
	})
}

func TestMarksAreMadeByARoleThatIsReadOnlyByDefault(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec(caseOutbox)
	c.pg.Exec(fmt.Sprintf("ALTER DATABASE %s SET default_transaction_read_only = on", c.pg.Name))
	c.set(caseMap{"outbox": []caseMap{{"table": "public.outbox", "topic": "outbox.event.{event_type}", "after": "mark"}}})
	c.start()
	c.pg.Exec("SET default_transaction_read_only = off; " + c.insertEvent("a", 1))
	c.wantSequence("mark", "outbox", 1)
}

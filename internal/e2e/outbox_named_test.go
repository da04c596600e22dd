package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// Events of an outbox table whose publication the session does not name yet, written while
// the slot is held back by rows that cannot be marked, are delivered once it is named.
func TestEventsOfAPublicationThatIsNamedLateAreDelivered(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec(caseOutbox + `; CREATE TABLE blocked (seq bigint); CREATE TABLE late (LIKE outbox INCLUDING ALL);
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF EXISTS (SELECT FROM blocked WHERE seq = old.aggregate_seq) THEN RAISE 'not this one'; END IF; RETURN new; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION refuse();
		INSERT INTO blocked VALUES (1), (2)`)
	c.set(caseMap{
		"source":   caseMap{"tables": []string{"public.none_of_them"}},
		"snapshot": caseMap{"mode": "initial"},
		"outbox": []caseMap{
			{"table": "public.outbox", "topic": "outbox.event.{event_type}", "after": "mark"},
			{"table": "public.late", "topic": "late.{event_type}", "snapshot": "all"},
		},
	})
	c.pg.Exec("CREATE PUBLICATION walrelay_" + c.name + " FOR TABLE outbox")
	c.pg.Exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", "walrelay_"+c.name)
	running := c.session()
	if _, err := running.Exec(t.Context(), "BEGIN; SELECT pg_current_xact_id()"); err != nil {
		t.Fatal(err)
	}
	p := c.start()
	c.pg.Exec(c.insertEvent("a", 1))
	c.kafka.WaitCommitted(t, c.eventTopic(), 1)
	if _, err := running.Exec(t.Context(), "COMMIT"); err != nil {
		t.Fatal(err)
	}
	p.WaitLog(harness.DefaultTimeout, harness.Message("publication can be named once"))
	c.pg.Exec(c.insertEvent("a", 2))
	c.kafka.WaitCommitted(t, c.eventTopic(), 2)
	late := func(seq int) string { return strings.Replace(c.insertEvent("b", seq), "INTO outbox", "INTO late", 1) }
	for seq := range 5 {
		c.pg.Exec(late(seq))
	}
	c.pg.Exec(c.insertEvent("a", 3))
	c.kafka.WaitCommitted(t, c.eventTopic(), 3)
	c.pg.Exec("DELETE FROM blocked WHERE seq = 1")
	c.waitMarked("1,3")
	c.pg.Exec(c.insertEvent("a", 4))
	c.waitMarked("1,3,4")
	c.pg.Exec("DELETE FROM blocked")
	c.waitMarked("1,2,3,4")
	both := fmt.Sprintf("[walrelay_%[1]s walrelay_%[1]s_insert]", c.name)
	n := 4
	harness.WaitFor(t, "the second publication to be named", harness.DefaultTimeout, func() (bool, error) {
		for _, line := range p.Lines() {
			if line.Message() == "holding the slot" && fmt.Sprint(line.Fields["publications"]) == both {
				return true, nil
			}
		}
		n++
		c.pg.Exec(c.insertEvent("a", n))
		return false, nil
	})
	c.pg.Exec(late(5))
	c.kafka.WaitCommitted(t, "late."+c.name, 6)
	c.stop()
	if got := len(c.kafka.Committed(t, "late."+c.name)); got != 6 {
		t.Errorf("%d events, want 6", got)
	}
}

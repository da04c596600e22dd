package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
)

func (c *caseRun) emit(transactional bool, prefix, content string) string {
	return fmt.Sprintf("SELECT pg_logical_emit_message(%t, '%s', '%s');", transactional, prefix, strings.ReplaceAll(content, "'", "''"))
}

// The payload is cut out of the message as bytes; decoded and printed it would be 1.1.
func TestAMessageOfAnOutboxPrefixIsAnEvent(t *testing.T) {
	c := caseNew(t).set(caseMap{"outbox": []caseMap{{"message-prefix": "outbox"}}})
	c.start()
	event := fmt.Sprintf(`{"event_id":"ev-1","event_type":"order.created","aggregate_type":"%s","aggregate_id":"order-1","payload":{"n":1.10}}`, c.name)
	conn := c.session()
	c.exec(conn, "BEGIN;"+c.emit(true, "outbox", event)+"ROLLBACK")
	c.exec(conn, "BEGIN;"+c.emit(true, "outbox", event)+"COMMIT")
	c.exec(conn, "BEGIN;"+c.emit(true, "other", event)+"COMMIT")
	r := c.expectOnly(c.settled(), c.eventTopic())
	c.expectEvent(r, 4, "order-1", `{"n":1.10}`, map[string]string{
		"id": "ev-1", "type": "order.created", "aggregate_type": c.name, "aggregate_id": "order-1"})
	c.quiet()
}

func TestAMalformedMessageIsADeadLetterWithItsText(t *testing.T) {
	c := caseNew(t).set(caseMap{"outbox": []caseMap{{"message-prefix": "outbox", "columns": caseMap{"id": "uid"}}}})
	c.start()
	good := func(id string) string {
		return fmt.Sprintf(`{"uid":"%s","type":"%s","payload":[1]}`, id, c.name)
	}
	bad := []string{`not JSON`, `[1]`, `{"type":"x","payload":{}}`, `{"uid":"e", "payload":{}, "type":"bad type"}`}
	c.exec(c.session(), "BEGIN;"+c.emit(true, "outbox", good("1"))+c.emit(true, "outbox", bad[0])+c.emit(true, "outbox", bad[1])+
		c.emit(true, "outbox", bad[2])+c.emit(true, "outbox", bad[3])+c.emit(true, "outbox", good("2"))+"COMMIT")
	log := c.settled()
	if n := len(c.topic(log, c.eventTopic())); n != 2 {
		t.Errorf("%d events, want 2", n)
	}
	// Each kind is said once, so that somebody looks.
	for _, reason := range []string{"malformed", "route"} {
		c.proc.WaitLog(harness.DefaultTimeout, harness.Field("level", "warn"), harness.Field("table", `message "outbox"`), harness.Field("reason", reason))
	}
	letters := c.topic(log, c.name+".dead-letter")
	if len(letters) != len(bad) {
		t.Fatalf("%d dead letters, want %d", len(letters), len(bad))
	}
	for _, r := range letters {
		var letter struct {
			Reason  string
			Message struct{ Prefix, Text string }
		}
		if err := json.Unmarshal(r.Value, &letter); err != nil {
			t.Fatal(err)
		}
		position, err := r.Position()
		if err != nil {
			t.Fatal(err)
		}
		want, reason := bad[position.Seq-1], "malformed"
		if position.Seq == 4 {
			reason = "route"
		}
		if letter.Message.Text != want || letter.Message.Prefix != "outbox" || letter.Reason != reason || r.Headers["reason"] != reason {
			t.Errorf("dead letter %s (%s), want the text %s and the reason %s", r.Value, r.Headers["reason"], want, reason)
		}
	}
}

// One that is not transactional is an event where it stands in the WAL, also of a
// transaction that is rolled back, and is not repeated after a crash.
func TestAMessageOutsideOfTransactionsIsAnEventOnce(t *testing.T) {
	c := caseNew(t).set(caseMap{"outbox": []caseMap{{"message-prefix": "outbox"}}})
	c.start()
	event := func(n int) string {
		return fmt.Sprintf(`{"event_id":"ev-%d","event_type":"%s","payload":{}}`, n, c.name)
	}
	conn := c.session()
	for n := range 5 {
		if n == 2 {
			c.stop()
			c.launch(killpoint.Env + "=" + killpoint.Spec(killpoint.Committed, 1))
		}
		c.exec(conn, "BEGIN;"+c.emit(false, "outbox", event(n))+"ROLLBACK")
		if n == 2 {
			c.killed()
			c.start()
		}
	}
	records := c.kafka.WaitCommitted(t, c.eventTopic(), 5)
	log := c.settled()
	if got := c.topic(log, c.eventTopic()); len(got) != 5 || len(records) != 5 {
		t.Errorf("%d events, want 5", len(got))
	}
}

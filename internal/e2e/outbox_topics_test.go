package e2e

import (
	"strings"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// Where topics are not to be created, one row that names a topic which is not there does not
// hold up the others, and once the topic is made its events reach it.
func TestARowWhoseTopicIsNotThereHoldsUpNobody(t *testing.T) {
	c := caseOutboxNew(t, "public.outbox", caseOutbox).set(caseMap{"topics": caseMap{"create": false}})
	absent := c.name + ".absent"
	for _, topic := range []string{c.eventTopic(), c.name + ".dead-letter", c.name + ".message"} {
		c.kafka.CreateTopic(t, topic, 1)
	}
	c.start()
	insert := func(kind string, seq int) {
		c.pg.Exec(strings.Replace(c.insertEvent("a", seq), "'"+c.name+"'", "'"+kind+"'", 1))
	}
	insert(absent, 1)
	insert(c.name, 2)
	insert(absent, 3)
	c.kafka.WaitCommitted(t, c.eventTopic(), 1)
	letters := c.kafka.WaitCommitted(t, c.name+".dead-letter", 2)
	for _, r := range letters {
		headers := map[string]string{}
		for _, h := range r.Headers {
			headers[h.Key] = string(h.Value)
		}
		if headers["reason"] != "route" || headers["source-topic"] != "outbox.event."+absent || !strings.Contains(string(r.Value), "does not exist and topics.create is false") {
			t.Errorf("dead letter %s, %v", r.Value, headers)
		}
	}
	c.kafka.CreateTopic(t, "outbox.event."+absent, 1)
	seq := 3
	harness.WaitFor(t, "an event in the topic that was made", 2*harness.DefaultTimeout, func() (bool, error) {
		seq++
		insert(absent, seq)
		return len(c.kafka.Committed(t, "outbox.event."+absent)) > 0, nil
	})
	c.fence()
	n := len(c.kafka.Committed(t, "outbox.event."+absent)) + len(c.kafka.Committed(t, c.name+".dead-letter"))
	if n != seq-1 {
		t.Errorf("%d of %d events are in the topic or dead letters", n, seq-1)
	}
}

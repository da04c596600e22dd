package router

import (
	"errors"
	"fmt"
	"time"

	"github.com/walrelay/walrelay/replication"
)

// rejection is why a topic of events cannot be had.
type rejection struct {
	why   string
	until time.Time // when Kafka is asked again; zero for never
}

// absentFor is how long a topic that is not there is not asked for again.
const absentFor = 10 * time.Second

// RejectTopic takes the reason why the topic of an event, as c showed, cannot be had:
// events that name it become dead letters, if Kafka does not take the name, or for a while, if
// the row chose a topic that is not there and is not to be created. False where that is not the
// reason, or not for an event: what the configuration names is for the configuration to change.
func (r *Router) RejectTopic(c *replication.Change, topic string, err error) bool {
	p := r.outboxOf(c)
	if p == nil || r.event.Topic != topic {
		return false
	}
	var (
		name   *TopicNameError
		absent *AbsentTopicError
		no     rejection
	)
	switch {
	case errors.As(err, &name): // what is around it speaks of tables
		no.why = fmt.Sprintf("%v; correct the row's column, or the outbox's topic or route, so that it names another topic", name)
	case errors.As(err, &absent) && p.fixedTopic() == "":
		no.why = fmt.Sprintf("topic %s does not exist and topics.create is false; correct the row's column, or set topics.create: true, or run: %s", topic, absent.Create)
		no.until = time.Now().Add(absentFor)
	default:
		return false
	}
	if r.rejected == nil || len(r.rejected) >= maxCachedTopics {
		r.rejected = map[string]rejection{}
	}
	r.rejected[topic] = no
	return true
}

// rejection gives why the topic cannot be had; false where that is not known, or has to be
// asked again.
func (r *Router) rejection(topic string) (why string, ok bool) {
	no, ok := r.rejected[topic]
	return no.why, ok && (no.until.IsZero() || time.Now().Before(no.until))
}

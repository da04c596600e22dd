package router

import (
	"fmt"

	"github.com/walrelay/walrelay/replication"
)

// planMessages compiles the outboxes that are logical messages.
func (r *Router) planMessages() error {
	r.messageOutboxes = map[string]*outboxPlan{}
	for i := range r.o.Outbox {
		o := &r.o.Outbox[i]
		if o.Prefix == "" {
			continue
		}
		p, err := compileOutbox(messageSource(o.Prefix), o, r.outboxEnv())
		if err != nil {
			return fmt.Errorf("outbox message-prefix %s: %w", o.Prefix, err)
		}
		r.messageOutboxes[o.Prefix] = p
	}
	return nil
}

// messageEvent turns a logical message into an event on its topic.
func (r *Router) messageEvent(p *outboxPlan, c *replication.Change, b *Batch) error {
	r.scratch.reset()
	r.event = event{}
	row, err := p.objectRow(c.Message.Content)
	if err != nil {
		return err
	}
	return r.appendOutbox(p, row, c, b)
}

// outboxOf gives the plan by which a change is an event; nil where it is none.
func (r *Router) outboxOf(c *replication.Change) *outboxPlan {
	if c.Relation == nil {
		return r.messageOutboxes[c.Message.Prefix]
	}
	p, err := r.plan(c)
	if err != nil {
		return nil
	}
	return p.outbox
}

package relay

import (
	"context"
	"errors"
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/router"
)

// prepareRouting brings publications and topics in step with the configuration.
func (s *session) prepareRouting(ctx context.Context) (err error) {
	if s.facts.Managed && !s.created {
		// Planned anew: while this instance stood by, tables have come that the holder
		// published, and a plan from before would drop them.
		if err := s.planTables(ctx); err != nil {
			return err
		}
		s.plan.InsertPending = !slices.Contains(s.named, s.plan.InsertPublication)
		if err := s.syncPublications(ctx); err != nil {
			return err
		}
	}
	types := s.lookup.Types(s.stream.TypeName)
	ro := s.r.o.Router
	ro.Database = s.facts.Database.Name
	ro.Types, ro.TypesAt = types.Lookup, types.Current
	ro.Sequence = s.sequenceFault
	if s.router, err = router.NewRouter(ro, s.catalog); err != nil {
		return err
	}
	if err := s.lookup.Guard(ctx, s.router, ro.Columns); err != nil {
		return err
	}
	if s.outboxes, err = s.lookup.Outboxes(ctx, s.router, ro.Outbox, s.facts.Checkpoint.Tables); err != nil {
		return err
	}
	topics, err := s.claimTopics(s.router)
	if err != nil {
		return err
	}
	if ro.DeadLetterTopic != "" {
		topics = append(topics, ro.DeadLetterTopic)
	}
	if len(s.r.o.MessagePrefixes) > 0 {
		topics = append(topics, ro.MessageTopic)
	}
	return s.ensureTopics(ctx, topics...)
}

// sequenceFault counts an event out of its aggregate's sequence, and says so of each
// aggregate once. The event is delivered: nothing here could repair it.
func (s *session) sequenceFault(f *router.SequenceFault) {
	s.r.routerMetrics.Sequences.WithLabelValues(f.Table, f.Kind()).Inc()
	if f.First {
		s.log.Warn().Str("table", f.Table).Str("aggregate", f.Aggregate).Str("kind", f.Kind()).Int64("last", f.Last).Int64("seq", f.Seq).
			Msg("aggregate_seq does not follow: see how the application numbers events; the aggregate's further faults are only counted")
	}
}

// ensureTopics looks topics up, and creates the missing ones where that is allowed.
func (s *session) ensureTopics(ctx context.Context, names ...string) error {
	err := s.catalog.Ensure(ctx, names, s.r.o.Topics)
	var name *router.TopicNameError
	if errors.As(err, &name) {
		return &checkpoint.Refusal{
			What:   "a topic cannot be had",
			Risk:   "its records could not be delivered",
			Remedy: "change topics.table or topics.prefix, or exclude the table under source.tables",
			Err:    err,
		}
	}
	return onKafka(err)
}

package kafka

import (
	"context"
	"testing"
	"time"
)

// A command that only looks must not wait for a topic that nobody makes.
func TestPeekKnowsAtOnceThatATopicIsMissing(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		ctx, cancel := context.WithTimeout(t.Context(), leaderTimeout/2)
		defer cancel()
		start := time.Now()
		s := NewStore(c.client(t), Options{Topic: "_walrelay.nowhere"})
		if cp, found, err := s.Peek(ctx); err != nil || found || !cp.IsZero() {
			t.Errorf("after %s: %v, found %t, %v", time.Since(start), cp, found, err)
		}
		if topic, err := s.topic(ctx); err != nil || len(topic.Partitions) > 0 {
			t.Errorf("looking made the topic: %v, %v", topic, err)
		}
	})
}

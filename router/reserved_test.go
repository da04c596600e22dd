package router

import (
	"errors"
	"testing"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// A row may name any topic; the connector's own position and Kafka's own topics are
// not among those that it can reach.
func TestReservedTopicsAreNoTargets(t *testing.T) {
	r, err := NewRouter(Options{
		Name: "shop", Database: "shop", CheckpointTopic: "_walrelay.shop", DeadLetterTopic: "shop.dead-letter",
		Tables:     func(_, _ string) bool { return true },
		TableTopic: func(_, table string) string { return table },
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"_walrelay.shop", "_walrelay.shop2", "_walrelay.", "__transaction_state", ""} {
		var tn *TopicNameError
		if err := r.validTopic(name); !errors.As(err, &tn) {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"_walrelay", "_walrelays.shop", "a._walrelay.shop", "shop.dead-letter"} {
		if err := r.validTopic(name); err != nil {
			t.Error(err)
		}
	}
	var tn *TopicNameError
	if err := r.validEventTopic("shop.dead-letter"); !errors.As(err, &tn) {
		t.Errorf("an event between the dead letters: %v", err)
	}
	if err := r.validEventTopic("shop.dead-letters"); err != nil {
		t.Error(err)
	}
	_, err = r.newPlan(&replication.Relation{OID: 1, Schema: "public", Name: "_walrelay.shop"}, false)
	if !checkpoint.IsRefusal(err) {
		t.Errorf("a table whose topic is the checkpoint topic: %v", err)
	}
}

// Tables that meet in one topic are told apart at the start, where the template does not
// want them together.
func TestTablesThatMeetInATopicAreRefusedAtTheStart(t *testing.T) {
	for _, tt := range []struct {
		template string
		refused  bool
	}{{"{prefix}.{schema}.{table}", true}, {"{prefix}.{schema}", false}} {
		topic, err := TableTopics(tt.template, "shop")
		if err != nil {
			t.Fatal(err)
		}
		r, err := NewRouter(Options{Name: "shop", TableTopic: topic}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.ClaimTopic(1, "public", "a b"); err != nil {
			t.Error(err)
		}
		if err := r.ClaimTopic(1, "public", "a b"); err != nil {
			t.Errorf("the same table again: %v", err)
		}
		if err := r.ClaimTopic(2, "public", "a_b"); checkpoint.IsRefusal(err) != tt.refused {
			t.Errorf("%s: %v", tt.template, err)
		}
	}
}

package router

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/walrelay/walrelay/checkpoint"
)

// findOrCreate looks and creates in turns until Kafka shows all of names.
func (c *Catalog) findOrCreate(ctx context.Context, names []string, spec TopicSpec) ([]found, error) {
	var all []found
	created := make(map[string]time.Time)
	ctx, cancel := context.WithTimeoutCause(ctx, topicTimeout, errors.New("the topics have no leaders yet: see the brokers and the controller"))
	defer cancel()
	for todo := names; ; {
		md, err := c.metadata(ctx, todo)
		if err != nil {
			return nil, err
		}
		var missing, waiting []string
		for i := range md {
			t := &md[i]
			name := *t.Topic
			switch err := kerr.ErrorForCode(t.ErrorCode); {
			case err == nil && (created[name].IsZero() || allLed(t.Partitions)):
				all = append(all, found{&Topic{Name: name}, t.Partitions})
			case errors.Is(err, kerr.UnknownTopicOrPartition):
				missing = append(missing, name)
			case err == nil || kerr.IsRetriable(err):
				waiting = append(waiting, name)
			default:
				return nil, topicError("look up", name, err, "")
			}
		}
		var create []string
		for _, name := range missing {
			// What was asked for is on its way to the broker that answers; it is asked for
			// again only when that takes so long that it must have failed.
			if at, ok := created[name]; !ok || c.now().Sub(at) > createAgain {
				create = append(create, name)
			}
		}
		if len(create) > 0 && !spec.exists {
			if !spec.Create {
				return nil, missingTopics(create, spec)
			}
			if err := c.create(ctx, create, spec); err != nil {
				return nil, err
			}
			for _, name := range create {
				created[name] = c.now()
			}
		}
		if todo = append(missing, waiting...); len(todo) == 0 {
			return all, nil
		}
		if err := c.pause(ctx); err != nil {
			return nil, fmt.Errorf("wait for topics %s: %w", listed(todo), err)
		}
	}
}

// allLed tells whether each partition can be written to.
func allLed(ps []kmsg.MetadataResponseTopicPartition) bool {
	for i := range ps {
		if ps[i].Leader < 0 {
			return false
		}
	}
	return len(ps) > 0
}

// create asks for the topics. That one exists already is fine (someone was faster),
// and what may succeed later is left to the next look.
func (c *Catalog) create(ctx context.Context, names []string, spec TopicSpec) error {
	for chunk := range slices.Chunk(names, topicsPerRequest) {
		req := kmsg.NewPtrCreateTopicsRequest()
		req.TimeoutMillis = int32(requestTimeout / time.Millisecond)
		for _, name := range chunk {
			t := kmsg.NewCreateTopicsRequestTopic()
			t.Topic, t.NumPartitions, t.ReplicationFactor = name, spec.Partitions, spec.ReplicationFactor
			for _, k := range slices.Sorted(maps.Keys(spec.Config)) {
				cfg := kmsg.NewCreateTopicsRequestTopicConfig()
				cfg.Name, cfg.Value = k, kmsg.StringPtr(spec.Config[k])
				t.Configs = append(t.Configs, cfg)
			}
			req.Topics = append(req.Topics, t)
		}
		resp, err := req.RequestWith(ctx, c.cl)
		if err != nil {
			return fmt.Errorf("create topics %s: %w", listed(chunk), err)
		}
		for i := range resp.Topics {
			t := &resp.Topics[i]
			err := kerr.ErrorForCode(t.ErrorCode)
			if err == nil || errors.Is(err, kerr.TopicAlreadyExists) || kerr.IsRetriable(err) {
				continue
			}
			message := ""
			if t.ErrorMessage != nil {
				message = *t.ErrorMessage
			}
			return topicError("create", t.Topic, err, message)
		}
	}
	return nil
}

// topicError says what to do about the broker's answer.
func topicError(verb, name string, err error, message string) error {
	if errors.Is(err, kerr.InvalidTopicException) {
		if message == "" {
			message = err.Error()
		}
		return &TopicNameError{Name: name, Reason: "Kafka refuses it: " + message}
	}
	if message != "" {
		err = fmt.Errorf("%w (%s)", err, message)
	}
	remedy := "see topics.partitions, topics.replication-factor and topics.config, or create the topic by hand"
	if errors.Is(err, kerr.TopicAuthorizationFailed) || errors.Is(err, kerr.ClusterAuthorizationFailed) {
		remedy = "the Kafka user needs the ACLs Describe, DescribeConfigs, Write and, to create topics, Create on it"
	}
	if kerr.IsRetriable(err) {
		return fmt.Errorf("%s topic %s: %w; %s", verb, name, err, remedy)
	}
	// A retry would get the same answer.
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("Kafka does not let us %s topic %s", verb, name),
		Risk:   "its records cannot be delivered",
		Remedy: remedy,
		Err:    err,
	}
}

// missingTopics is an *AbsentTopicError.
func missingTopics(names []string, spec TopicSpec) error {
	var flags strings.Builder
	if spec.Partitions > 0 {
		fmt.Fprintf(&flags, " --partitions %d", spec.Partitions)
	}
	if spec.ReplicationFactor > 0 {
		fmt.Fprintf(&flags, " --replication-factor %d", spec.ReplicationFactor)
	}
	for _, k := range slices.Sorted(maps.Keys(spec.Config)) {
		fmt.Fprintf(&flags, " --config %s=%s", k, spec.Config[k])
	}
	remedy := fmt.Sprintf("kafka-topics.sh --bootstrap-server HOST:PORT --create --topic %s%s", names[0], flags.String())
	return &AbsentTopicError{Create: remedy, Refusal: &checkpoint.Refusal{
		What:   fmt.Sprintf("topics.create is false and Kafka does not have the topics %s", listed(names)),
		Risk:   "their changes could not be delivered",
		Remedy: "set topics.create: true, or for each run: " + remedy,
	}}
}

// AbsentTopicError is the refusal where topics are not to be created. For an event that names
// its own topic it is the reason of a dead letter.
type AbsentTopicError struct {
	*checkpoint.Refusal
	Create string // the command that makes the first of them
}

// Unwrap gives the refusal.
func (e *AbsentTopicError) Unwrap() error { return e.Refusal }

// listed names the first ten topics.
func listed(names []string) string {
	const most = 10
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

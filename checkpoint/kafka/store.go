package kafka

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/walrelay/walrelay/checkpoint"
)

// Options of a Store.
type Options struct {
	// Topic is the checkpoint topic. It has one partition, 0: the order of positions
	// is the order of one log.
	Topic string
	// ReplicationFactor of a topic that is created; 0 or -1 takes the broker's default.
	ReplicationFactor int16
	// MinInsyncReplicas of a topic that is created; 0 takes the broker's default.
	MinInsyncReplicas int
	// StableTimeout bounds the wait for transactions that are open above the last
	// stable offset. DefaultStableTimeout when zero.
	StableTimeout time.Duration
}

// DefaultStableTimeout is long enough for a broker to write the abort markers of
// the transaction that fencing ended, also while partitions change leaders.
const DefaultStableTimeout = 15 * time.Second

// Waits between attempts, and the time one request may take before the leader is
// looked up again.
const (
	pollInterval   = 50 * time.Millisecond
	requestTimeout = 5 * time.Second
	leaderTimeout  = 30 * time.Second
)

// ErrOpenTransaction says that a transaction stays open in the checkpoint topic
// although this connector's own were ended by fencing: another producer writes
// there. What it may commit is unknown, so no checkpoint is read. It can pass by
// itself, when that transaction times out.
var ErrOpenTransaction = errors.New("a transaction of another producer is open in the checkpoint topic")

// Store reads the checkpoint topic, and writes requests. It works on a plain client,
// neither transactional nor consuming, which stays the caller's to close. A Store
// belongs to one goroutine.
type Store struct {
	cl  *kgo.Client
	adm *kadm.Client
	o   Options

	// Where partition 0 is led and the topic's id, as last seen; -1 for not known.
	leader int32
	id     [16]byte

	decompressor kgo.Decompressor
	stats        stats
}

// stats counts what was read, for tests of how little that is.
type stats struct {
	fetches int
	bytes   int
}

// NewStore makes a Store on cl; it asks nothing of Kafka yet.
func NewStore(cl *kgo.Client, o Options) *Store {
	if o.ReplicationFactor == 0 {
		o.ReplicationFactor = -1
	}
	if o.StableTimeout == 0 {
		o.StableTimeout = DefaultStableTimeout
	}
	return &Store{cl: cl, adm: kadm.NewClient(cl), o: o, leader: -1, decompressor: kgo.DefaultDecompressor()}
}

// EnsureTopic creates the checkpoint topic where it is missing, and waits until it
// has a leader. An existing topic is never altered: one that retention may empty,
// or with more than one partition, is a *checkpoint.Refusal.
func (s *Store) EnsureTopic(ctx context.Context) error {
	t, err := s.topic(ctx)
	if err != nil {
		return err
	}
	if t.ErrorCode == kerr.UnknownTopicOrPartition.Code {
		if err := s.create(ctx); err != nil {
			return err
		}
	}
	if t, err = s.awaitLeader(ctx); err != nil {
		return err
	}
	if n := len(t.Partitions); n != 1 {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("checkpoint topic %s has %d partitions", s.o.Topic, n),
			Risk:   "positions in several partitions have no order, and a restart could take an old one",
			Remedy: "name a topic of its own in kafka.checkpoint-topic; walrelay creates it with one partition",
		}
	}
	return s.checkCompacted(ctx)
}

// maxMessageBytes of a topic that is created: the state record of 20,000 tables has
// some 4 MB, and more while many of them are read.
const maxMessageBytes = 16 << 20

// create makes the topic. Another instance may be faster, which is fine.
func (s *Store) create(ctx context.Context) error {
	// Small segments: only closed ones are compacted, and with hundreds of positions
	// a second this much is a few minutes. Ratio 0.1 keeps the log within about a
	// tenth more than what is not cleaned yet.
	configs := map[string]*string{
		"cleanup.policy":            kadm.StringPtr("compact"),
		"segment.bytes":             kadm.StringPtr(strconv.Itoa(64 << 20)),
		"segment.ms":                kadm.StringPtr(strconv.Itoa(int(time.Hour / time.Millisecond))),
		"min.cleanable.dirty.ratio": kadm.StringPtr("0.1"),
		"max.message.bytes":         kadm.StringPtr(strconv.Itoa(maxMessageBytes)),
	}
	if s.o.MinInsyncReplicas > 0 {
		configs["min.insync.replicas"] = kadm.StringPtr(strconv.Itoa(s.o.MinInsyncReplicas))
	}
	r, err := s.adm.CreateTopic(ctx, 1, s.o.ReplicationFactor, configs, s.o.Topic)
	if errors.Is(err, kerr.InvalidConfig) || errors.Is(err, kerr.PolicyViolation) {
		// Hosted clusters bound max.message.bytes. Their default does for thousands of
		// tables, and a state record that does not fit is refused with the setting's name.
		delete(configs, "max.message.bytes")
		r, err = s.adm.CreateTopic(ctx, 1, s.o.ReplicationFactor, configs, s.o.Topic)
	}
	if err == nil || errors.Is(err, kerr.TopicAlreadyExists) {
		return nil
	}
	if r.ErrMessage != "" {
		err = fmt.Errorf("%w (%s)", err, r.ErrMessage)
	}
	return fmt.Errorf("create checkpoint topic %s: %w (the user needs the ACL Create on it, and topics.replication-factor at most as many brokers as there are; or create it by hand with 1 partition, cleanup.policy=compact and max.message.bytes=%d)", s.o.Topic, err, maxMessageBytes)
}

// checkCompacted refuses every cleanup.policy but compact. With compact,delete
// retention removes the position of a connector that stood still for a week.
func (s *Store) checkCompacted(ctx context.Context) error {
	rcs, err := s.adm.DescribeTopicConfigs(ctx, s.o.Topic)
	if err == nil {
		var rc kadm.ResourceConfig
		if rc, err = rcs.On(s.o.Topic, nil); err == nil {
			err = rc.Err
		}
		for _, c := range rc.Configs {
			if err != nil || c.Key != "cleanup.policy" {
				continue
			}
			if policy := c.MaybeValue(); strings.TrimSpace(policy) != "compact" {
				return &checkpoint.Refusal{
					What:   fmt.Sprintf("checkpoint topic %s has cleanup.policy=%s", s.o.Topic, policy),
					Risk:   "retention would delete the position, and a restart would not know what was delivered",
					Remedy: fmt.Sprintf("run: kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics --entity-name %s --add-config cleanup.policy=compact", s.o.Topic),
				}
			}
			return nil
		}
	}
	if err == nil {
		err = errors.New("cleanup.policy is not among the configs")
	}
	return fmt.Errorf("read configuration of checkpoint topic %s: %w (the user needs the ACL DescribeConfigs on it)", s.o.Topic, err)
}

// topic looks the topic up, past the client's cache, which keeps "unknown topic" and
// an old leader for five seconds. That the topic does not exist, or has no leader
// for the moment, is told by the answer's ErrorCode and is no error here.
func (s *Store) topic(ctx context.Context) (*kmsg.MetadataResponseTopic, error) {
	rt := kmsg.NewMetadataRequestTopic()
	rt.Topic = kmsg.StringPtr(s.o.Topic)
	req := kmsg.NewPtrMetadataRequest()
	req.Topics = append(req.Topics, rt)
	resp, err := req.RequestWith(ctx, s.cl)
	if err != nil {
		return nil, fmt.Errorf("look up checkpoint topic %s: %w", s.o.Topic, err)
	}
	if len(resp.Topics) != 1 {
		return nil, fmt.Errorf("look up checkpoint topic %s: the broker answered for %d topics", s.o.Topic, len(resp.Topics))
	}
	t := &resp.Topics[0]
	if err := kerr.ErrorForCode(t.ErrorCode); err != nil && !kerr.IsRetriable(err) {
		return nil, fmt.Errorf("look up checkpoint topic %s: %w (check its name and the ACL Describe on it)", s.o.Topic, err)
	}
	return t, nil
}

// awaitLeader waits until partition 0 has a leader, and remembers it.
func (s *Store) awaitLeader(ctx context.Context) (*kmsg.MetadataResponseTopic, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, leaderTimeout, fmt.Errorf("checkpoint topic %s has no leader after %s: see its brokers, and whether it exists", s.o.Topic, leaderTimeout))
	defer cancel()
	for {
		t, err := s.topic(ctx)
		if err != nil {
			return nil, err
		}
		for _, p := range t.Partitions {
			if t.ErrorCode == 0 && p.Partition == 0 && p.ErrorCode == 0 && p.Leader >= 0 {
				s.leader, s.id = p.Leader, t.TopicID
				return t, nil
			}
		}
		if err := pause(ctx); err != nil {
			return nil, err
		}
	}
}

// pause waits one poll interval, or until ctx ends and then gives its cause.
func pause(ctx context.Context) error {
	t := time.NewTimer(pollInterval)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

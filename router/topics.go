package router

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/walrelay/walrelay/checkpoint"
)

// Topic is what is known of a topic that records go to.
type Topic struct {
	Name            string
	Compacted       bool  // cleanup.policy has compact: Kafka takes no null key
	MaxMessageBytes int32 // max.message.bytes: of a record batch

	partitions atomic.Int32
	isrShort   atomic.Int32 // partitions whose in-sync replicas are fewer than their replicas
	looked     atomic.Int64 // when the two were read, Unix nanoseconds
}

// Partitions is the partition count as last seen.
func (t *Topic) Partitions() int32 { return t.partitions.Load() }

// TopicSpec says how a missing topic is made.
type TopicSpec struct {
	Create            bool
	Partitions        int32
	ReplicationFactor int16 // -1: the broker's default
	Config            map[string]string
}

// Growth is a partition count that is not what it was.
type Growth struct {
	Topic    string
	Old, New int32
}

// Catalog knows the topics that records go to. An existing topic is never altered.
// Lookup is safe from any goroutine.
type Catalog struct {
	client *kgo.Client

	mu     sync.RWMutex
	topics map[string]*Topic
}

// NewCatalog makes an empty catalog on a client that stays the caller's.
func NewCatalog(client *kgo.Client) *Catalog {
	return &Catalog{client: client, topics: map[string]*Topic{}}
}

// Lookup gives a topic that Ensure has seen, or nil.
func (c *Catalog) Lookup(name string) *Topic {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.topics[name]
}

// ISRShort counts the partitions whose in-sync replicas are fewer than their replicas.
func (c *Catalog) ISRShort() int {
	c.mu.RLock()
	defer c.mu.RUnlock()
	n := 0
	for _, t := range c.topics {
		n += int(t.isrShort.Load())
	}
	return n
}

const (
	// topicsPerRequest keeps requests for tens of thousands of topics below the sizes
	// that brokers answer in good time.
	topicsPerRequest = 500
	createTimeout    = 30 * time.Second
	leaderPoll       = 20 * time.Millisecond
)

// Ensure makes topics known, in few requests, and creates those that are missing. A
// topic that cannot be had is a *checkpoint.Refusal.
func (c *Catalog) Ensure(ctx context.Context, names []string, spec TopicSpec) error {
	var unknown []string
	for _, name := range names {
		if err := ValidTopicName(name); err != nil {
			return &checkpoint.Refusal{
				What: err.Error(), Risk: "its records cannot be delivered",
				Remedy: "change topics.table, topics.prefix or the topic's own setting",
			}
		}
		if c.Lookup(name) == nil {
			unknown = append(unknown, name)
		}
	}
	for chunk := range slices.Chunk(unknown, topicsPerRequest) {
		if err := c.ensure(ctx, chunk, spec); err != nil {
			return err
		}
	}
	return nil
}

func (c *Catalog) ensure(ctx context.Context, names []string, spec TopicSpec) error {
	found := make(map[string]*Topic, len(names))
	missing, err := c.read(ctx, names, found)
	if err != nil {
		return err
	}
	if len(missing) > 0 {
		if !spec.Create {
			return refuseMissing(missing, spec)
		}
		if err := c.create(ctx, missing, spec); err != nil {
			return err
		}
		if err := c.awaitLeaders(ctx, missing, found); err != nil {
			return err
		}
	}
	if err := c.describe(ctx, found); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.Copy(c.topics, found)
	return nil
}

// read asks for metadata and fills found; missing are topics that do not exist, or
// not yet on all brokers.
func (c *Catalog) read(ctx context.Context, names []string, found map[string]*Topic) (missing []string, err error) {
	resp, err := c.metadata(ctx, names)
	if err != nil {
		return nil, err
	}
	for _, t := range resp.Topics {
		name := *t.Topic
		switch err := kerr.ErrorForCode(t.ErrorCode); {
		case err == nil && leaders(t):
			topic := &Topic{Name: name}
			topic.note(t)
			found[name] = topic
		case err == nil, errors.Is(err, kerr.UnknownTopicOrPartition), errors.Is(err, kerr.LeaderNotAvailable):
			missing = append(missing, name)
		case errors.Is(err, kerr.TopicAuthorizationFailed):
			return nil, refuseAuthorization(name, "Describe", err)
		default:
			return nil, fmt.Errorf("read Kafka metadata of topic %s: %w", name, err)
		}
	}
	return missing, nil
}

func (c *Catalog) metadata(ctx context.Context, names []string) (*kmsg.MetadataResponse, error) {
	req := kmsg.NewPtrMetadataRequest()
	for i := range names {
		t := kmsg.NewMetadataRequestTopic()
		t.Topic = &names[i]
		req.Topics = append(req.Topics, t)
	}
	resp, err := req.RequestWith(ctx, c.client)
	if err != nil {
		return nil, fmt.Errorf("read Kafka metadata: %w", err)
	}
	return resp, nil
}

func leaders(t kmsg.MetadataResponseTopic) bool {
	for _, p := range t.Partitions {
		if p.Leader < 0 {
			return false
		}
	}
	return len(t.Partitions) > 0
}

// note takes over what metadata says.
func (t *Topic) note(m kmsg.MetadataResponseTopic) {
	short := 0
	for _, p := range m.Partitions {
		if len(p.ISR) < len(p.Replicas) {
			short++
		}
	}
	t.partitions.Store(int32(len(m.Partitions)))
	t.isrShort.Store(int32(short))
	t.looked.Store(time.Now().UnixNano())
}

func (c *Catalog) create(ctx context.Context, names []string, spec TopicSpec) error {
	req := kmsg.NewPtrCreateTopicsRequest()
	req.TimeoutMillis = int32(createTimeout.Milliseconds())
	for _, name := range names {
		t := kmsg.NewCreateTopicsRequestTopic()
		t.Topic, t.NumPartitions, t.ReplicationFactor = name, spec.Partitions, spec.ReplicationFactor
		for _, key := range slices.Sorted(maps.Keys(spec.Config)) {
			value := spec.Config[key]
			cfg := kmsg.NewCreateTopicsRequestTopicConfig()
			cfg.Name, cfg.Value = key, &value
			t.Configs = append(t.Configs, cfg)
		}
		req.Topics = append(req.Topics, t)
	}
	resp, err := req.RequestWith(ctx, c.client)
	if err != nil {
		return fmt.Errorf("create Kafka topics: %w", err)
	}
	for _, t := range resp.Topics {
		err := kerr.ErrorForCode(t.ErrorCode)
		switch {
		case err == nil, errors.Is(err, kerr.TopicAlreadyExists): // somebody was faster
		case errors.Is(err, kerr.TopicAuthorizationFailed), errors.Is(err, kerr.ClusterAuthorizationFailed):
			return refuseAuthorization(t.Topic, "Create", err)
		case kerr.IsRetriable(err):
			return fmt.Errorf("create Kafka topic %s: %w", t.Topic, err)
		default:
			if t.ErrorMessage != nil {
				err = fmt.Errorf("%w: %s", err, *t.ErrorMessage)
			}
			return &checkpoint.Refusal{
				What:   fmt.Sprintf("Kafka does not create topic %s (%d partitions, replication factor %d)", t.Topic, spec.Partitions, spec.ReplicationFactor),
				Risk:   "its records cannot be delivered",
				Remedy: "correct topics.partitions, topics.replication-factor or topics.config, or create the topic by hand",
				Err:    err,
			}
		}
	}
	return nil
}

// awaitLeaders waits until new topics are known to the broker that answers and every
// partition has a leader.
func (c *Catalog) awaitLeaders(ctx context.Context, names []string, found map[string]*Topic) error {
	ctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	tick := time.NewTicker(leaderPoll)
	defer tick.Stop()
	for {
		var err error
		if names, err = c.read(ctx, names, found); err != nil || len(names) == 0 {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for leaders of new Kafka topics (%s): %w", someNames(names), context.Cause(ctx))
		}
	}
}

// defaultMaxMessageBytes is Kafka's default of max.message.bytes.
const defaultMaxMessageBytes = 1048588

// describe reads the two settings that decide what a record may look like. Where the
// cluster does not let us, its defaults are taken: a broker that wants something else
// refuses the record, which stops the stream and loses nothing.
func (c *Catalog) describe(ctx context.Context, topics map[string]*Topic) error {
	req := kmsg.NewPtrDescribeConfigsRequest()
	for _, name := range slices.Sorted(maps.Keys(topics)) {
		topics[name].MaxMessageBytes = defaultMaxMessageBytes
		r := kmsg.NewDescribeConfigsRequestResource()
		r.ResourceType, r.ResourceName = kmsg.ConfigResourceTypeTopic, name
		r.ConfigNames = []string{"cleanup.policy", "max.message.bytes"}
		req.Resources = append(req.Resources, r)
	}
	// Sharded by nature: topics' settings may be asked of any broker, the client picks.
	for _, shard := range c.client.RequestSharded(ctx, req) {
		if shard.Err != nil {
			return fmt.Errorf("read Kafka topic settings: %w", shard.Err)
		}
		for _, r := range shard.Resp.(*kmsg.DescribeConfigsResponse).Resources {
			if err := kerr.ErrorForCode(r.ErrorCode); err != nil {
				if errors.Is(err, kerr.TopicAuthorizationFailed) {
					continue
				}
				return fmt.Errorf("read settings of Kafka topic %s: %w", r.ResourceName, err)
			}
			if t := topics[r.ResourceName]; t != nil {
				t.configure(r.Configs)
			}
		}
	}
	return nil
}

func (t *Topic) configure(settings []kmsg.DescribeConfigsResponseResourceConfig) {
	for _, s := range settings {
		switch {
		case s.Value == nil:
		case s.Name == "cleanup.policy":
			t.Compacted = slices.Contains(strings.Split(*s.Value, ","), "compact")
		case s.Name == "max.message.bytes":
			if n, err := strconv.ParseInt(*s.Value, 10, 32); err == nil && n > 0 {
				t.MaxMessageBytes = int32(n)
			}
		}
	}
}

// Refresh looks again at those of names whose last look is older than age, a few
// hundred at most, and tells whose partition count changed.
func (c *Catalog) Refresh(ctx context.Context, names []string, age time.Duration) ([]Growth, error) {
	var stale []string
	before := time.Now().Add(-age).UnixNano()
	for _, name := range names {
		if t := c.Lookup(name); t != nil && t.looked.Load() < before && len(stale) < topicsPerRequest {
			stale = append(stale, name)
		}
	}
	if len(stale) == 0 {
		return nil, nil
	}
	resp, err := c.metadata(ctx, stale)
	if err != nil {
		return nil, err
	}
	var grown []Growth
	for _, m := range resp.Topics {
		if err := kerr.ErrorForCode(m.ErrorCode); err != nil {
			if kerr.IsRetriable(err) && !errors.Is(err, kerr.UnknownTopicOrPartition) {
				continue // an election; the count stands
			}
			return nil, fmt.Errorf("read Kafka metadata of topic %s: %w", *m.Topic, err)
		}
		t := c.Lookup(*m.Topic)
		old := t.Partitions()
		t.note(m)
		if now := t.Partitions(); now != old {
			grown = append(grown, Growth{Topic: t.Name, Old: old, New: now})
		}
	}
	return grown, nil
}

func refuseMissing(names []string, spec TopicSpec) error {
	return &checkpoint.Refusal{
		What: fmt.Sprintf("topics are missing and topics.create is false: %s", someNames(names)),
		Risk: "their records cannot be delivered",
		Remedy: fmt.Sprintf("kafka-topics.sh --bootstrap-server BROKER --create --topic %s --partitions %d, and so on for each; or set topics.create: true",
			names[0], spec.Partitions),
	}
}

func refuseAuthorization(topic, operation string, err error) error {
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("the Kafka user may not %s topic %s", strings.ToLower(operation), topic),
		Risk:   "its records cannot be delivered",
		Remedy: fmt.Sprintf("kafka-acls.sh --bootstrap-server BROKER --add --allow-principal User:NAME --operation %s --operation Write --topic %s", operation, topic),
		Err:    err,
	}
}

func someNames(names []string) string {
	const shown = 10
	if len(names) <= shown {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:shown], ", "), len(names)-shown)
}

// maxTopicName is Kafka's limit for a topic's name (Kafka's Topic class).
const maxTopicName = 249

func topicCharacter(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-'
}

// ValidTopicName tells what is wrong with a topic's name, or nil.
func ValidTopicName(name string) error {
	switch {
	case name == "":
		return errors.New("the topic name is empty")
	case name == "." || name == "..":
		return fmt.Errorf("%q is no topic name", name)
	case len(name) > maxTopicName:
		return fmt.Errorf("topic name %q… has %d characters, Kafka takes %d", name[:40], len(name), maxTopicName)
	}
	for i := range len(name) {
		if !topicCharacter(name[i]) {
			return fmt.Errorf("topic name %q has characters that Kafka does not take: letters, digits, dots, underscores and dashes only", name)
		}
	}
	return nil
}

// TableTopics compiles topics.table, a template over {prefix}, {schema} and {table}.
// Characters of a table's name that Kafka does not take become underscores, one per
// byte.
func TableTopics(template, prefix string) func(schema, table string) string {
	return func(schema, table string) string {
		name := []byte(strings.NewReplacer("{prefix}", prefix, "{schema}", schema, "{table}", table).Replace(template))
		for i, c := range name {
			if !topicCharacter(c) {
				name[i] = '_'
			}
		}
		return string(name)
	}
}

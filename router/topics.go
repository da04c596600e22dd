package router

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Bounds of one request, and of the wait for new topics. Five hundred topics keep a
// request far below a broker's limits and a start with ten thousand tables at some
// sixty requests.
const (
	topicsPerRequest = 500
	topicsPerRefresh = 300
	topicTimeout     = 60 * time.Second
	topicPause       = 50 * time.Millisecond
	createAgain      = 5 * time.Second

	// A topic that metadata does not know this many times in a row is deleted, and
	// not only late in reaching one broker.
	missingLooks = 5
)

// Topic is what the producer knows of one Kafka topic. It belongs to its Catalog,
// which updates it in place, so a pointer to it may be kept.
type Topic struct {
	Name            string
	Partitions      int32
	Compacted       bool  // cleanup.policy has compact: null keys are refused by Kafka
	MaxMessageBytes int32 // largest record batch that Kafka takes, compressed

	// count is Partitions for the goroutine that routes.
	count atomic.Int32

	minInsync int
	isrShort  int // partitions that lack replicas
	missing   int // looks in a row that did not find it
	seen      time.Time
}

// partitions is the number of partitions, for the goroutine that routes. They may become
// more at any time, never fewer.
func (t *Topic) partitions() int32 {
	if n := t.count.Load(); n > 0 {
		return n
	}
	return t.Partitions // a topic of no Catalog
}

// TopicSpec says how a missing topic is made.
type TopicSpec struct {
	Partitions        int32
	ReplicationFactor int16 // -1: the broker's default
	Config            map[string]string
	Create            bool // false: a missing topic is a refusal

	// exists tells that the topic was seen: a broker that does not know it is behind.
	exists bool
}

// Growth is a change of a topic's partition count. It moves keys to other
// partitions, so order per key is broken across it, and that must be said.
type Growth struct {
	Topic    string
	Old, New int32
}

// Catalog holds the topics that the producer writes to. Existing topics are never
// altered. The goroutine that routes calls Ensure, the one that delivers Refresh and
// reads Partitions, which only Refresh changes; Lookup and ISRShort are for any.
type Catalog struct {
	cl       *kgo.Client
	now      func() time.Time
	isrShort atomic.Int64

	mu     sync.RWMutex // guards the map, not the topics
	topics map[string]*Topic
}

// NewCatalog makes an empty Catalog on a plain client, which stays the caller's to
// close.
func NewCatalog(cl *kgo.Client) *Catalog {
	return &Catalog{cl: cl, now: time.Now, topics: make(map[string]*Topic)}
}

// Lookup gives the topic, or nil where Ensure has not been called for it.
func (c *Catalog) Lookup(name string) *Topic {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.topics[name]
}

// ISRShort is the number of partitions with fewer in-sync replicas than replicas, or
// than min.insync.replicas, as last seen. It may be called from any goroutine.
func (c *Catalog) ISRShort() int64 { return c.isrShort.Load() }

// Ensure makes the topics known that are not yet, and creates those that Kafka does
// not have. It blocks until each new one has its leaders.
//
// A name that Kafka does not take is a *TopicNameError. Missing topics are a
// *checkpoint.Refusal where spec.Create is false. After an error some of the topics
// may be there; calling again is safe.
func (c *Catalog) Ensure(ctx context.Context, names []string, spec TopicSpec) error {
	var todo []string
	for _, name := range names {
		if c.Lookup(name) == nil {
			if err := ValidTopicName(name); err != nil {
				return err
			}
			todo = append(todo, name)
		}
	}
	slices.Sort(todo)
	todo = slices.Compact(todo)
	if len(todo) == 0 {
		return nil
	}
	found, err := c.findOrCreate(ctx, todo, spec)
	if err != nil {
		return err
	}
	if err := c.describe(ctx, found); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range found {
		c.update(f.topic, f.partitions)
		c.topics[f.topic.Name] = f.topic
	}
	return nil
}

// Preview makes topics known as Ensure would find or make them, and creates none: a topic
// that Kafka does not have is what spec says of it, with Kafka's defaults, and refused where
// Ensure would refuse it. It is for counting what a delivery would write; nothing can be
// delivered with it.
func (c *Catalog) Preview(ctx context.Context, names []string, spec TopicSpec) error {
	for _, name := range names {
		if c.Lookup(name) != nil {
			continue
		}
		if err := ValidTopicName(name); err != nil {
			return err
		}
		md, err := c.metadata(ctx, []string{name})
		if err != nil {
			return err
		}
		if !spec.Create || len(md) == 1 && md[0].ErrorCode == 0 {
			if err := c.Ensure(ctx, []string{name}, spec); err != nil {
				return err
			}
			continue
		}
		t := &Topic{Name: name, Partitions: max(spec.Partitions, 1), MaxMessageBytes: defaultMaxMessage, seen: c.now()}
		if v := spec.Config["max.message.bytes"]; v != "" {
			n, err := strconv.Atoi(v)
			if err != nil {
				return fmt.Errorf("topics.config: max.message.bytes is %q, not a number", v)
			}
			t.MaxMessageBytes = int32(min(n, 1<<31-1))
		}
		t.Compacted = strings.Contains(spec.Config["cleanup.policy"], "compact")
		c.mu.Lock()
		c.topics[name] = t
		c.mu.Unlock()
	}
	return nil
}

// defaultMaxMessage is Kafka's default of max.message.bytes.
const defaultMaxMessage = 1048588

// found is a topic that Kafka has, before it is in the Catalog.
type found struct {
	topic      *Topic
	partitions []kmsg.MetadataResponseTopicPartition
}

// metadata asks for the topics, past the client's cache, and never creates one by
// asking.
func (c *Catalog) metadata(ctx context.Context, names []string) ([]kmsg.MetadataResponseTopic, error) {
	var all []kmsg.MetadataResponseTopic
	for chunk := range slices.Chunk(names, topicsPerRequest) {
		req := kmsg.NewPtrMetadataRequest()
		req.AllowAutoTopicCreation = false
		for _, name := range chunk {
			t := kmsg.NewMetadataRequestTopic()
			t.Topic = kmsg.StringPtr(name)
			req.Topics = append(req.Topics, t)
		}
		resp, err := req.RequestWith(ctx, c.cl)
		if err != nil {
			return nil, fmt.Errorf("look up %d topics: %w", len(chunk), err)
		}
		if len(resp.Topics) != len(chunk) {
			return nil, fmt.Errorf("look up %d topics: the broker answered for %d", len(chunk), len(resp.Topics))
		}
		for i := range resp.Topics {
			if resp.Topics[i].Topic == nil {
				return nil, errors.New("look up topics: the broker answered without a name")
			}
		}
		all = append(all, resp.Topics...)
	}
	return all, nil
}

// describe fills in what the topics' configuration says.
func (c *Catalog) describe(ctx context.Context, all []found) error {
	byName := make(map[string]*Topic, len(all))
	for _, f := range all {
		byName[f.topic.Name] = f.topic
	}
	for chunk := range slices.Chunk(all, topicsPerRequest) {
		req := kmsg.NewPtrDescribeConfigsRequest()
		for _, f := range chunk {
			r := kmsg.NewDescribeConfigsRequestResource()
			r.ResourceType, r.ResourceName = kmsg.ConfigResourceTypeTopic, f.topic.Name
			r.ConfigNames = []string{"cleanup.policy", "max.message.bytes", "min.insync.replicas"}
			req.Resources = append(req.Resources, r)
		}
		resp, err := req.RequestWith(ctx, c.cl)
		if err != nil {
			return fmt.Errorf("read configuration of %d topics: %w", len(chunk), err)
		}
		for i := range resp.Resources {
			r := &resp.Resources[i]
			t := byName[r.ResourceName]
			if t == nil {
				continue
			}
			if err := kerr.ErrorForCode(r.ErrorCode); err != nil {
				return topicError("read configuration of", r.ResourceName, err, "")
			}
			if err := t.configure(r.Configs); err != nil {
				return err
			}
			delete(byName, r.ResourceName)
		}
	}
	for name := range byName {
		return fmt.Errorf("read configuration of topic %s: the broker left it out of its answer", name)
	}
	return nil
}

func (t *Topic) configure(configs []kmsg.DescribeConfigsResponseResourceConfig) error {
	for _, cfg := range configs {
		if cfg.Value == nil {
			continue
		}
		var n int
		var err error
		switch cfg.Name {
		case "cleanup.policy":
			for policy := range strings.SplitSeq(*cfg.Value, ",") {
				t.Compacted = t.Compacted || strings.TrimSpace(policy) == "compact"
			}
		case "max.message.bytes":
			n, err = strconv.Atoi(*cfg.Value)
			t.MaxMessageBytes = int32(min(n, 1<<31-1))
		case "min.insync.replicas":
			t.minInsync, err = strconv.Atoi(*cfg.Value)
		}
		if err != nil {
			return fmt.Errorf("read configuration of topic %s: %s is %q, not a number", t.Name, cfg.Name, *cfg.Value)
		}
	}
	if t.MaxMessageBytes <= 0 {
		return fmt.Errorf("read configuration of topic %s: the broker does not tell max.message.bytes (the Kafka user needs the ACL DescribeConfigs on it)", t.Name)
	}
	return nil
}

// Refresh looks again at those of names that are known and were last looked at
// longer than maxAge ago, at most a few hundred, the longest unseen first. It
// reports the partition counts that have changed.
//
// It is cheap to call for each batch: where nothing is due it asks nothing.
func (c *Catalog) Refresh(ctx context.Context, names []string, maxAge time.Duration) (grown []Growth, err error) {
	now := c.now()
	var due []string
	for _, name := range names {
		if t := c.Lookup(name); t != nil && now.Sub(t.seen) > maxAge {
			due = append(due, name)
		}
	}
	if len(due) == 0 {
		return nil, nil
	}
	slices.SortFunc(due, func(a, b string) int {
		if d := c.Lookup(a).seen.Compare(c.Lookup(b).seen); d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	due = slices.Compact(due)
	md, err := c.metadata(ctx, due[:min(len(due), topicsPerRefresh)])
	if err != nil {
		return nil, err
	}
	for i := range md {
		t := c.Lookup(*md[i].Topic)
		if t == nil {
			continue
		}
		err := kerr.ErrorForCode(md[i].ErrorCode)
		if err == nil && len(md[i].Partitions) > 0 {
			if old := c.update(t, md[i].Partitions); old != t.Partitions {
				grown = append(grown, Growth{t.Name, old, t.Partitions})
			}
			continue
		}
		t.seen = now
		if err != nil && !kerr.IsRetriable(err) {
			return grown, topicError("look up", t.Name, err, "")
		}
		if t.missing++; t.missing >= missingLooks && errors.Is(err, kerr.UnknownTopicOrPartition) {
			return grown, fmt.Errorf("topic %s was deleted while it was written to (create it again, or restart to have it created)", t.Name)
		}
	}
	return grown, nil
}

// update takes over what metadata says, and gives the partition count before.
func (c *Catalog) update(t *Topic, ps []kmsg.MetadataResponseTopicPartition) (old int32) {
	old = t.Partitions
	short := 0
	for i := range ps {
		if n := len(ps[i].ISR); n < len(ps[i].Replicas) || n < t.minInsync {
			short++
		}
	}
	c.isrShort.Add(int64(short - t.isrShort))
	t.Partitions, t.isrShort, t.missing, t.seen = int32(len(ps)), short, 0, c.now()
	t.count.Store(t.Partitions)
	return old
}

// pause waits a little, or until ctx ends and then gives its cause.
func (c *Catalog) pause(ctx context.Context) error {
	timer := time.NewTimer(topicPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

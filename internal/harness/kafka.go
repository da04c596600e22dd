package harness

import (
	"context"
	"crypto/rand"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/kafkaserver"
)

const kafkaTimeout = time.Minute // for one administrative request or one read of a topic

// Cluster is a Kafka of one of three kinds: kfake in this process (one per test), real brokers started here (shared, or
// the test's own), or brokers that run elsewhere. Nodes are counted from 0.
type Cluster struct {
	// Proxies stand before the brokers, one each, when WithProxy was asked for; and always with kfake.
	Proxies []*Proxy

	t       testing.TB
	brokers []string
	unique  string
	fake    *kfake.Cluster
	real    *kafkaserver.Cluster
	owned   bool // no other test uses it, so that nodes may be killed
}

type kafkaOptions struct {
	nodes     int
	proxy     bool
	dedicated bool
	settings  map[string]string
	fake      []kfake.Opt
}

// KafkaOption is an option of Kafka.
type KafkaOption func(*kafkaOptions)

// Nodes asks for 1 or 3 brokers, of the test's own. The default is one, shared if real.
func Nodes(n int) KafkaOption {
	return func(o *kafkaOptions) { o.nodes, o.dedicated = n, true }
}

// WithProxy puts a Proxy before each broker, in Cluster.Proxies, of the test's own. The brokers advertise the proxies'
// addresses, so no client gets around them.
func WithProxy() KafkaOption {
	return func(o *kafkaOptions) { o.proxy, o.dedicated = true, true }
}

// OwnKafka asks for brokers that no other test uses: for tests that kill, pause or restart them.
func OwnKafka() KafkaOption { return func(o *kafkaOptions) { o.dedicated = true } }

// BrokerSetting sets a broker's configuration, of real brokers and of kfake as far as it knows it. It implies OwnKafka.
func BrokerSetting(name, value string) KafkaOption {
	return func(o *kafkaOptions) { o.settings[name], o.dedicated = value, true }
}

// FakeOption passes an option to kfake; it means nothing to real brokers.
func FakeOption(option kfake.Opt) KafkaOption {
	return func(o *kafkaOptions) { o.fake = append(o.fake, option) }
}

// KafkaIsReal says what WALRELAY_TEST_KAFKA asks for, without starting anything.
func KafkaIsReal() bool {
	kind := os.Getenv("WALRELAY_TEST_KAFKA")
	return kind != "" && kind != "kfake"
}

// Kafka returns a cluster of the kind that WALRELAY_TEST_KAFKA names. On a shared one, topics of other tests are around:
// name yours with Unique.
func Kafka(t testing.TB, options ...KafkaOption) *Cluster {
	t.Helper()
	o := &kafkaOptions{nodes: 1, settings: map[string]string{}}
	for _, option := range options {
		option(o)
	}
	c := &Cluster{t: t, unique: "t" + strings.ToLower(rand.Text()[:8])}
	switch kind := os.Getenv("WALRELAY_TEST_KAFKA"); kind {
	case "", "kfake":
		c.startFake(o)
	case "kafka":
		c.startReal(o)
	default:
		if o.dedicated {
			t.Fatalf("this test starts, stops or cuts off brokers, which WALRELAY_TEST_KAFKA=%s does not allow: set it to kfake or kafka", kind)
		}
		c.brokers = strings.Split(kind, ",")
	}
	return c
}

// Brokers are the addresses for a client's configuration: those of the proxies where there are any.
func (c *Cluster) Brokers() []string { return c.brokers }

// IsReal is false for kfake.
func (c *Cluster) IsReal() bool { return c.fake == nil }

// Fake is the kfake cluster, for its Control and Fault; nil when the brokers are real.
func (c *Cluster) Fake() *kfake.Cluster { return c.fake }

// Unique is a short name of the test's own, fit for a connector's name, and so for topics, ids and slots. It begins
// with a letter and has only small letters and digits.
func (c *Cluster) Unique() string { return c.unique }

// Client returns a client that is closed at the test's end.
func (c *Cluster) Client(t testing.TB, options ...kgo.Opt) *kgo.Client {
	t.Helper()
	client, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(c.brokers...)}, options...)...)
	if err != nil {
		t.Fatalf("make a Kafka client: %v", err)
	}
	t.Cleanup(client.Close)
	return client
}

// CreateTopic creates a topic with the brokers' replication factor. config is pairs of name and value.
func (c *Cluster) CreateTopic(t testing.TB, topic string, partitions int32, config ...string) {
	t.Helper()
	if len(config)%2 != 0 {
		t.Fatalf("create topic %s: config is pairs of name and value, got %d strings", topic, len(config))
	}
	configs := map[string]*string{}
	for i := 0; i < len(config); i += 2 {
		configs[config[i]] = &config[i+1]
	}
	ctx, cancel := context.WithTimeout(context.Background(), kafkaTimeout)
	defer cancel()
	if _, err := c.admin(t).CreateTopic(ctx, partitions, -1, configs, topic); err != nil {
		t.Fatalf("create topic %s: %v", topic, err)
	}
}

func (c *Cluster) admin(t testing.TB) *kadm.Client { return kadm.NewClient(c.Client(t)) }

package router

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

// catalogOnEach runs fn on kfake and, where WALRELAY_TEST_KAFKA asks for real brokers,
// on these too. Topic names begin with prefix, so that runs do not meet.
func catalogOnEach(t *testing.T, fn func(t *testing.T, cl *kgo.Client, prefix string)) {
	t.Run("kfake", func(t *testing.T) {
		cl, _ := fakeKafka(t)
		fn(t, cl, "p")
	})
	if harness.KafkaIsReal() {
		t.Run("kafka", func(t *testing.T) {
			kafka := harness.Kafka(t)
			fn(t, adminClient(t, kafka.Brokers()), kafka.Unique())
		})
	}
}

func fakeKafka(t *testing.T, opts ...kfake.Opt) (*kgo.Client, *kfake.Cluster) {
	t.Helper()
	c, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(1)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return adminClient(t, c.ListenAddrs()), c
}

func adminClient(t *testing.T, brokers []string) *kgo.Client {
	t.Helper()
	cl, err := NewAdminClient(ClientOptions{Brokers: brokers, ClientID: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

// requests counts the requests of one key from now on.
func requests(c *kfake.Cluster, key int16) *int {
	n := new(int)
	c.ControlKey(key, func(kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		*n++
		return nil, nil, false
	})
	return n
}

func TestEnsureCreatesWhatIsMissing(t *testing.T) {
	catalogOnEach(t, func(t *testing.T, cl *kgo.Client, prefix string) {
		adm := kadm.NewClient(cl)
		old, compacted, made := prefix+".old", prefix+".compacted", prefix+".new"
		if _, err := adm.CreateTopic(t.Context(), 2, 1, map[string]*string{"max.message.bytes": kadm.StringPtr("5000")}, old); err != nil {
			t.Fatal(err)
		}
		if _, err := adm.CreateTopic(t.Context(), 1, 1, map[string]*string{"cleanup.policy": kadm.StringPtr("delete,compact")}, compacted); err != nil {
			t.Fatal(err)
		}
		c := NewCatalog(cl)
		if c.Lookup(old) != nil {
			t.Error("nothing is known before Ensure")
		}
		spec := TopicSpec{Partitions: 6, ReplicationFactor: 1, Config: map[string]string{"max.message.bytes": "70000"}, Create: true}
		for range 2 { // the second time all is known
			if err := c.Ensure(t.Context(), []string{made, old, compacted, made}, spec); err != nil {
				t.Fatal(err)
			}
		}
		type facts struct {
			Partitions, MaxMessageBytes int32
			Compacted                   bool
		}
		got := map[string]facts{}
		for _, n := range []string{old, compacted, made} {
			topic := c.Lookup(n)
			got[strings.TrimPrefix(n, prefix)] = facts{topic.Partitions, topic.MaxMessageBytes, topic.Compacted}
		}
		want := map[string]facts{".old": {2, 5000, false}, ".compacted": {1, 1048588, true}, ".new": {6, 70000, false}}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
		if c.ISRShort() != 0 {
			t.Error("all replicas are in sync:", c.ISRShort())
		}
		// A second connector's catalog finds them all.
		c2 := NewCatalog(cl)
		spec.Create = false
		if err := c2.Ensure(t.Context(), []string{made, old}, spec); err != nil || c2.Lookup(made).Partitions != 6 {
			t.Error(err)
		}
	})
}

func TestEnsureRefusesMissingTopicsWhenNotToCreate(t *testing.T) {
	catalogOnEach(t, func(t *testing.T, cl *kgo.Client, prefix string) {
		c := NewCatalog(cl)
		err := c.Ensure(t.Context(), []string{prefix + ".b", prefix + ".a"}, TopicSpec{Partitions: 3, ReplicationFactor: 2, Config: map[string]string{"x": "y"}})
		if !checkpoint.IsRefusal(err) {
			t.Fatal(err)
		}
		for _, s := range []string{prefix + ".a, " + prefix + ".b", "--create --topic " + prefix + ".a --partitions 3 --replication-factor 2 --config x=y"} {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%v\nlacks %q", err, s)
			}
		}
	})
}

func TestPreviewRefusesWhatEnsureWouldRefuse(t *testing.T) {
	cl, cluster := fakeKafka(t)
	creates := requests(cluster, kmsg.CreateTopics.Int16())
	c := NewCatalog(cl)
	spec := TopicSpec{Partitions: 6, ReplicationFactor: -1}
	want := c.Ensure(t.Context(), []string{"p.absent"}, spec)
	var absent *AbsentTopicError
	if err := c.Preview(t.Context(), []string{"p.absent"}, spec); !errors.As(err, &absent) || err.Error() != want.Error() {
		t.Errorf("Preview: %v, Ensure: %v", err, want)
	}
	spec.Create = true
	if err := c.Preview(t.Context(), []string{"p.absent"}, spec); err != nil || c.Lookup("p.absent") == nil {
		t.Errorf("of a topic that would be made: %v", err)
	}
	if *creates > 0 {
		t.Errorf("%d requests to create topics", *creates)
	}
}

func TestEnsureSaysWhichTopicKafkaDoesNotTake(t *testing.T) {
	catalogOnEach(t, func(t *testing.T, cl *kgo.Client, prefix string) {
		c := NewCatalog(cl)
		spec := TopicSpec{Partitions: 1, ReplicationFactor: 1, Create: true}
		var tn *TopicNameError
		if err := c.Ensure(t.Context(), []string{"a b"}, spec); !errors.As(err, &tn) || tn.Name != "a b" {
			t.Error(err)
		}
		// Kafka takes a.b and a_b for the same metric name.
		if err := c.Ensure(t.Context(), []string{prefix + ".x"}, spec); err != nil {
			t.Fatal(err)
		}
		if err := c.Ensure(t.Context(), []string{prefix + "_x"}, spec); !errors.As(err, &tn) || tn.Name != prefix+"_x" {
			t.Error(err)
		}
		spec.ReplicationFactor = 9
		err := c.Ensure(t.Context(), []string{prefix + ".y"}, spec)
		if !errors.Is(err, kerr.InvalidReplicationFactor) || !strings.Contains(err.Error(), "topics.replication-factor") {
			t.Error(err)
		}
	})
}

func TestEnsureAsksLittleForManyTopics(t *testing.T) {
	cl, k := fakeKafka(t)
	metadata, create, describe := requests(k, 3), requests(k, 19), requests(k, 32)
	var names []string
	for i := range 1200 {
		names = append(names, fmt.Sprint("t", i))
	}
	c := NewCatalog(cl)
	if err := c.Ensure(t.Context(), names, TopicSpec{Partitions: 1, ReplicationFactor: 1, Create: true}); err != nil {
		t.Fatal(err)
	}
	if *create != 3 || *describe != 3 || *metadata > 3*4+2 {
		t.Errorf("%d create, %d describe and %d metadata requests for %d topics", *create, *describe, *metadata, len(names))
	}
}

// Someone else creates the topic between the look and the creation.
func TestEnsureIsFineWithSomeoneFaster(t *testing.T) {
	cl, k := fakeKafka(t)
	if _, err := kadm.NewClient(cl).CreateTopic(t.Context(), 3, 1, nil, "t"); err != nil {
		t.Fatal(err)
	}
	// The look comes too early: the topic that is there is not seen.
	raced := false
	k.ControlKey(3, func(kreq kmsg.Request) (kmsg.Response, error, bool) {
		req := kreq.(*kmsg.MetadataRequest)
		if len(req.Topics) != 1 {
			k.KeepControl()
			return nil, nil, false
		}
		raced = true
		resp := req.ResponseKind().(*kmsg.MetadataResponse)
		st := kmsg.NewMetadataResponseTopic()
		st.Topic, st.ErrorCode = req.Topics[0].Topic, kerr.UnknownTopicOrPartition.Code
		resp.Topics = append(resp.Topics, st)
		return resp, nil, true
	})
	creates := requests(k, 19)
	c := NewCatalog(cl)
	if err := c.Ensure(t.Context(), []string{"t"}, TopicSpec{Partitions: 9, ReplicationFactor: 1, Create: true}); err != nil {
		t.Fatal(err)
	}
	if !raced || *creates != 1 || c.Lookup("t").Partitions != 3 {
		t.Error("the other's topic is taken as it is:", raced, *creates, c.Lookup("t").Partitions)
	}
}

// Growth is reported once.
func TestRefreshReportsGrowth(t *testing.T) {
	catalogOnEach(t, func(t *testing.T, cl *kgo.Client, prefix string) {
		c := NewCatalog(cl)
		now := time.Unix(1000, 0)
		c.now = func() time.Time { return now }
		names := []string{prefix + ".a", prefix + ".b"}
		if err := c.Ensure(t.Context(), names, TopicSpec{Partitions: 4, ReplicationFactor: 1, Create: true}); err != nil {
			t.Fatal(err)
		}
		if _, err := kadm.NewClient(cl).UpdatePartitions(t.Context(), 8, names[0]); err != nil {
			t.Fatal(err)
		}
		refresh := func() []Growth {
			g, err := c.Refresh(t.Context(), append(names, "not known"), time.Second)
			if err != nil {
				t.Fatal(err)
			}
			return g
		}
		if g := refresh(); g != nil {
			t.Error("the last look is not a second old:", g)
		}
		deadline := time.Now().Add(10 * time.Second)
		var got []Growth
		for got == nil && time.Now().Before(deadline) { // the controller's word travels
			now = now.Add(2 * time.Second)
			got = refresh()
		}
		if d := cmp.Diff([]Growth{{names[0], 4, 8}}, got); d != "" {
			t.Error(d)
		}
		now = now.Add(2 * time.Second)
		if g := refresh(); g != nil || c.Lookup(names[0]).Partitions != 8 {
			t.Error("said once, and kept:", g)
		}
	})
}

func TestRefreshLooksAtFewAndAtEach(t *testing.T) {
	cl, k := fakeKafka(t)
	c := NewCatalog(cl)
	now := time.Unix(1000, 0)
	c.now = func() time.Time { return now }
	var names []string
	for i := range 2*topicsPerRefresh + 1 {
		names = append(names, fmt.Sprint("t", i))
	}
	if err := c.Ensure(t.Context(), names, TopicSpec{Partitions: 1, ReplicationFactor: 1, Create: true}); err != nil {
		t.Fatal(err)
	}
	looks := requests(k, 3)
	now = now.Add(time.Minute)
	for range 3 {
		if _, err := c.Refresh(t.Context(), names, time.Second); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range names {
		if !c.Lookup(n).seen.Equal(now) {
			t.Fatalf("%s was not looked at in three rounds", n)
		}
	}
	before := *looks
	if _, err := c.Refresh(t.Context(), names, time.Second); err != nil || *looks != before || before < 3 {
		t.Error("nothing is due, nothing is asked:", err, *looks, before)
	}
}

func TestRefreshCountsShortPartitionsAndDeletedTopics(t *testing.T) {
	cl, k := fakeKafka(t)
	c := NewCatalog(cl)
	now := time.Unix(1000, 0)
	c.now = func() time.Time { return now }
	if err := c.Ensure(t.Context(), []string{"a", "b"}, TopicSpec{Partitions: 3, ReplicationFactor: 1, Create: true}); err != nil {
		t.Fatal(err)
	}
	isr, code := 1, int16(0)
	k.ControlKey(3, func(kreq kmsg.Request) (kmsg.Response, error, bool) {
		k.KeepControl()
		req := kreq.(*kmsg.MetadataRequest)
		if len(req.Topics) != 1 || *req.Topics[0].Topic != "a" {
			return nil, nil, false
		}
		resp := req.ResponseKind().(*kmsg.MetadataResponse)
		st := kmsg.NewMetadataResponseTopic()
		st.Topic, st.ErrorCode = req.Topics[0].Topic, code
		for p := range int32(3) {
			sp := kmsg.NewMetadataResponseTopicPartition()
			sp.Partition, sp.Replicas, sp.ISR = p, []int32{0, 1, 2}, []int32{0, 1, 2}[:3-isr]
			st.Partitions = append(st.Partitions, sp)
		}
		resp.Topics = append(resp.Topics, st)
		return resp, nil, true
	})
	refresh := func() error {
		now = now.Add(2 * time.Second)
		_, err := c.Refresh(t.Context(), []string{"a"}, time.Second)
		return err
	}
	for _, tt := range []struct {
		short int
		want  int64
	}{{1, 3}, {2, 3}, {0, 0}} {
		isr = tt.short
		if err := refresh(); err != nil || c.ISRShort() != tt.want {
			t.Errorf("%d of 3 replicas out of sync: %d short partitions, want %d, %v", tt.short, c.ISRShort(), tt.want, err)
		}
	}
	code = kerr.UnknownTopicOrPartition.Code
	for i := range missingLooks {
		if err := refresh(); (err != nil) != (i == missingLooks-1) {
			t.Errorf("look %d at a deleted topic: %v", i, err)
		}
	}
}

func TestEnsureEndsWithItsContext(t *testing.T) {
	cl, k := fakeKafka(t)
	k.ControlKey(19, func(kreq kmsg.Request) (kmsg.Response, error, bool) { // never creates
		k.KeepControl()
		return kreq.ResponseKind(), nil, true
	})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	err := NewCatalog(cl).Ensure(ctx, []string{"t"}, TopicSpec{Partitions: 1, ReplicationFactor: 1, Create: true})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

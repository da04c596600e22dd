package harness_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/harness"
)

// mustProduce writes records in one transaction and ends it as told; an open one is left to the client's end.
func mustProduce(t *testing.T, client *kgo.Client, topic string, end kgo.TransactionEndTry, values ...string) {
	t.Helper()
	if err := client.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	for _, value := range values {
		if err := client.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Key: []byte("k"), Value: []byte(value)}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	if err := client.EndTransaction(t.Context(), end); err != nil {
		t.Fatal(err)
	}
}

func values(records []*kgo.Record) string {
	var out []string
	for _, r := range records {
		out = append(out, string(r.Value))
	}
	return fmt.Sprint(out)
}

func TestConsumeEndsWhereTheIsolationLevelEnds(t *testing.T) {
	k := harness.Kafka(t)
	topic := k.Unique() + ".things"
	k.CreateTopic(t, topic, 1, "cleanup.policy", "compact")
	if got := k.Committed(t, topic); got != nil {
		t.Fatalf("an empty topic has %d records", len(got))
	}
	client := k.Client(t, kgo.TransactionalID(topic))
	mustProduce(t, client, topic, kgo.TryCommit, "a", "b")
	mustProduce(t, client, topic, kgo.TryAbort, "c")
	if got := values(k.WaitCommitted(t, topic, 2)); got != "[a b]" {
		t.Errorf("committed %s", got)
	}
	if got := values(k.Consume(t, topic, kgo.ReadUncommitted())); got != "[a b c]" {
		t.Errorf("uncommitted %s", got)
	}
}

func TestWaitCommittedWaitsForATopicThatIsNotThereYet(t *testing.T) {
	k := harness.Kafka(t)
	topic := k.Unique()
	client := k.Client(t, kgo.TransactionalID(topic))
	got := make(chan string)
	go func() { got <- values(k.WaitCommitted(t, topic, 2)) }()
	k.CreateTopic(t, topic, 1)
	mustProduce(t, client, topic, kgo.TryCommit, "a")
	mustProduce(t, client, topic, kgo.TryCommit, "b")
	if got := <-got; got != "[a b]" {
		t.Errorf("got %s", got)
	}
}

func TestEveryConnectionGoesThroughTheProxies(t *testing.T) {
	k := harness.Kafka(t, harness.WithProxy())
	k.CreateTopic(t, "things", 1)
	client := k.Client(t, kgo.TransactionalID("x"))
	mustProduce(t, client, "things", kgo.TryCommit, "a")
	if n := k.Proxies[0].Cut(); n == 0 {
		t.Fatal("there was no connection to cut")
	}
	mustProduce(t, client, "things", kgo.TryCommit, "b") // the client connects again
	if got := values(k.WaitCommitted(t, "things", 2)); got != "[a b]" {
		t.Errorf("committed %s", got)
	}
}

func TestAKilledBrokerComesBackWithItsData(t *testing.T) {
	k := harness.Kafka(t, harness.OwnKafka())
	k.CreateTopic(t, "things", 1)
	mustProduce(t, k.Client(t, kgo.TransactionalID("x")), "things", kgo.TryCommit, "a")
	k.WaitCommitted(t, "things", 1) // see Kill
	k.Kill(0)
	if err := ping(k.Client(t), 300*time.Millisecond); err == nil {
		t.Fatal("a killed broker answered")
	}
	k.Restart(0)
	if got := values(k.WaitCommitted(t, "things", 1)); got != "[a]" {
		t.Errorf("committed %s", got)
	}
}

func TestAPausedBrokerAnswersWhenItIsResumed(t *testing.T) {
	k := harness.Kafka(t, harness.OwnKafka())
	client := k.Client(t)
	if err := ping(client, soon); err != nil {
		t.Fatal(err)
	}
	k.Pause(0)
	if err := ping(client, 300*time.Millisecond); err == nil {
		t.Fatal("a paused broker answered")
	}
	k.Resume(0)
	if err := ping(client, harness.DefaultTimeout); err != nil {
		t.Fatal(err)
	}
}

func ping(client *kgo.Client, d time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return client.Ping(ctx)
}

package cdctest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/harness"
)

// mustBrokers gives a Kafka of the kind that the tests are told to use.
func mustBrokers(t *testing.T) kgo.Opt {
	t.Helper()
	return kgo.SeedBrokers(harness.Kafka(t).Brokers()...)
}

func mustProducer(t *testing.T, id string, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	c, err := kgo.NewClient(append(opts, kgo.TransactionalID(id), kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// mustWrite begins a transaction and writes texts to partitions 0, 1, 0, 1, ...
func mustWrite(t *testing.T, c *kgo.Client, topic string, texts ...string) {
	t.Helper()
	if err := c.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	for i, s := range texts {
		rec := &kgo.Record{Topic: topic, Partition: int32(i % 2), Key: []byte(s), Value: []byte(s), Headers: []kgo.RecordHeader{{Key: "h", Value: []byte(s)}}}
		if err := c.ProduceSync(t.Context(), rec).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
}

func mustEnd(t *testing.T, c *kgo.Client, commit kgo.TransactionEndTry) {
	t.Helper()
	if err := c.EndTransaction(t.Context(), commit); err != nil {
		t.Fatal(err)
	}
}

func values(log *Log) map[string]bool {
	out := map[string]bool{}
	for _, r := range log.Records {
		out[string(r.Value)] = r.Committed
	}
	return out
}

func TestReadTellsCommittedAbortedAndOpenApart(t *testing.T) {
	brokers := mustBrokers(t)
	topic := fmt.Sprintf("read-%d", time.Now().UnixNano())
	a, b := mustProducer(t, topic+"a", brokers), mustProducer(t, topic+"b", brokers)
	admin := kadm.NewClient(a)
	if _, err := admin.CreateTopics(t.Context(), 2, 1, nil, topic, topic+"-empty"); err != nil {
		t.Fatal(err)
	}
	mustWrite(t, a, topic, "one", "two")
	mustEnd(t, a, kgo.TryCommit)
	mustWrite(t, a, topic, "bad", "worse")
	mustEnd(t, a, kgo.TryAbort)
	mustWrite(t, a, topic, "three", "four")
	mustEnd(t, a, kgo.TryCommit)
	mustWrite(t, b, topic, "open") // partition 0 is stable up to here
	mustWrite(t, a, topic, "behind it", "five")
	mustEnd(t, a, kgo.TryCommit)

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	committed, err := ReadCommitted(ctx, topic+".*", brokers)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(values(committed)), "map[five:true four:true one:true three:true two:true]"; got != want {
		t.Errorf("read_committed gives %s, want %s", got, want)
	}
	if got, want := fmt.Sprint(committed.Partitions), fmt.Sprintf("map[%s:2 %s-empty:2]", topic, topic); got != want {
		t.Errorf("partitions %s, want %s", got, want)
	}
	all, err := ReadUncommitted(ctx, topic, brokers)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(values(all)), "map[bad:false behind it:true five:true four:true one:true open:false three:true two:true worse:false]"; got != want {
		t.Errorf("read_uncommitted gives %s, want %s", got, want)
	}
	for _, r := range all.Records {
		if string(r.Key) != string(r.Value) || r.Headers["h"] != string(r.Value) {
			t.Errorf("record %+v: key, value and header should agree", r)
		}
		if want := map[string]int{"one": 0, "two": 0, "bad": 1, "worse": 1, "three": 2, "four": 2, "five": 3}; r.Value != nil {
			if n, ok := want[string(r.Value)]; ok && r.Segment != n {
				t.Errorf("%s is in segment %d, want %d", r.Value, r.Segment, n)
			}
		}
	}
	brief, end := context.WithTimeout(ctx, 300*time.Millisecond)
	defer end()
	if _, err := ReadSettled(brief, topic, brokers); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a transaction is open, and waiting for none gives %v", err)
	}
	mustEnd(t, b, kgo.TryAbort)
	if committed, err = ReadSettled(ctx, topic, brokers); err != nil || len(committed.Records) != 6 {
		t.Fatalf("after the open transaction was aborted: %v records, %v", len(committed.Records), err)
	}
}

func TestReadOfNoTopicsIsAnEmptyLog(t *testing.T) {
	log, err := ReadCommitted(t.Context(), "none-such", mustBrokers(t))
	if err != nil || len(log.Records) != 0 || len(log.Partitions) != 0 {
		t.Fatalf("%+v, %v", log, err)
	}
}

package kafka

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

// cluster is a Kafka that the suite runs on, the fake one or a real one.
type cluster struct {
	brokers []string
	compact func() // nil: the broker's own cleaner does it
}

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// eachCluster runs fn on kfake and, where WALRELAY_TEST_KAFKA asks for real brokers, on
// these too.
func eachCluster(t *testing.T, fn func(t *testing.T, c cluster)) {
	t.Run("kfake", func(t *testing.T) { fn(t, fake(t)) })
	if harness.KafkaIsReal() {
		t.Run("kafka", func(t *testing.T) { fn(t, cluster{brokers: harness.Kafka(t).Brokers()}) })
	}
}

func fake(t *testing.T, opts ...kfake.Opt) cluster {
	t.Helper()
	c, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(1)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return cluster{brokers: c.ListenAddrs(), compact: c.Compact}
}

func (c cluster) client(t *testing.T, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(c.brokers...)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

func (c cluster) topic(t *testing.T, configs map[string]string) string {
	t.Helper()
	name := fmt.Sprintf("_test.%s.%d", strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			return r
		}
		return '-'
	}, t.Name()), time.Now().UnixNano())
	if configs == nil {
		return name
	}
	ptr := map[string]*string{}
	for k, v := range configs {
		ptr[k] = &v
	}
	adm := kadm.NewClient(c.client(t))
	if _, err := adm.CreateTopic(t.Context(), 1, 1, ptr, name); err != nil {
		t.Fatal(err)
	}
	return name
}

// store gives a Store on a topic that it created.
func (c cluster) store(t *testing.T) *Store {
	t.Helper()
	s := NewStore(c.client(t), Options{Topic: c.topic(t, nil), ReplicationFactor: 1, MinInsyncReplicas: 1})
	if err := s.EnsureTopic(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// writer is a producer with a Log, as the connector has one.
type writer struct {
	*kgo.Client
	topic string
	log   *checkpoint.Log
	lsn   checkpoint.LSN
}

func (c cluster) writer(t *testing.T, s *Store, last checkpoint.Checkpoint, opts ...kgo.Opt) *writer {
	t.Helper()
	cl := c.client(t, append([]kgo.Opt{
		kgo.TransactionalID(s.o.Topic), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ConcurrentTransactionsBackoff(time.Millisecond),
	}, opts...)...)
	return &writer{cl, s.o.Topic, checkpoint.NewLog(last), last.Position.LSN}
}

func (w *writer) begin(t *testing.T) {
	t.Helper()
	if err := w.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
}

func (w *writer) produce(t *testing.T, records ...checkpoint.Record) (state int64) {
	t.Helper()
	var rs []*kgo.Record
	for _, r := range records {
		rs = append(rs, &kgo.Record{Topic: w.topic, Key: r.Key, Value: bytes.Clone(r.Value)})
	}
	if err := w.ProduceSync(t.Context(), rs...).FirstErr(); err != nil {
		t.Fatal(err)
	}
	for _, r := range rs {
		if string(r.Key) == checkpoint.KeyState {
			return r.Offset
		}
	}
	return checkpoint.StateBeside
}

func (w *writer) end(t *testing.T, commit kgo.TransactionEndTry) {
	t.Helper()
	if err := w.EndTransaction(t.Context(), commit); err != nil {
		t.Fatal(err)
	}
}

func (w *writer) next() checkpoint.Checkpoint {
	w.lsn += 8
	return checkpoint.Checkpoint{
		Position: checkpoint.Position{LSN: w.lsn, CommitLSN: w.lsn - 8, CommitTime: time.UnixMicro(int64(w.lsn)).UTC()},
		Source:   checkpoint.Source{SystemID: "7", Database: "shop", Timeline: 1},
	}
}

// deliver is one transaction with the next checkpoint.
func (w *writer) deliver(t *testing.T, commit kgo.TransactionEndTry) checkpoint.Checkpoint {
	t.Helper()
	c := w.next()
	w.write(t, &c, commit)
	return c
}

// write is one transaction with the checkpoint c.
func (w *writer) write(t *testing.T, c *checkpoint.Checkpoint, commit kgo.TransactionEndTry) {
	t.Helper()
	records, err := w.log.Records(c)
	if err != nil {
		t.Fatal(err)
	}
	w.begin(t)
	state := w.produce(t, records...)
	w.end(t, commit)
	if commit {
		w.log.Committed(state)
	}
}

// wantLoad loads and compares.
func wantLoad(t *testing.T, s *Store, want checkpoint.Checkpoint, partitions map[string]int32) checkpoint.Checkpoint {
	t.Helper()
	got, found, err := s.Load(t.Context())
	if err != nil || !found {
		t.Fatalf("found %v, %v", found, err)
	}
	if got.Position != want.Position || got.Source != want.Source || !maps.Equal(got.Partitions, partitions) {
		t.Fatalf("loaded %+v, want %+v with %v", got, want, partitions)
	}
	return got
}

func wantVirgin(t *testing.T, s *Store, want bool, reason string) {
	t.Helper()
	got, why, err := s.Virgin(t.Context())
	if err != nil || got != want || !strings.Contains(why, reason) || want != (why == "") {
		t.Fatalf("Virgin() = %v, %q, %v; want %v, %q", got, why, err, want, reason)
	}
}

func TestEnsureTopicCreatesCompacted(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		s := c.store(t)
		if err := s.EnsureTopic(t.Context()); err != nil {
			t.Fatal("the second time it is there:", err)
		}
		rcs, err := s.adm.DescribeTopicConfigs(t.Context(), s.o.Topic)
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]string{"cleanup.policy": "compact", "min.insync.replicas": "1", "segment.bytes": "67108864", "max.message.bytes": "16777216"}
		for _, cfg := range rcs[0].Configs {
			if w, ok := want[cfg.Key]; ok && w != cfg.MaybeValue() {
				t.Errorf("%s is %s, want %s", cfg.Key, cfg.MaybeValue(), w)
			}
		}
		wantVirgin(t, s, true, "")
		if _, found, err := s.Load(t.Context()); found || err != nil {
			t.Fatal("an empty topic has no checkpoint:", found, err)
		}
	})
}

func TestEnsureTopicRefusesWhatLosesThePosition(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		for _, policy := range []string{"delete", "compact,delete"} {
			s := NewStore(c.client(t), Options{Topic: c.topic(t, map[string]string{"cleanup.policy": policy})})
			err := s.EnsureTopic(t.Context())
			if !checkpoint.IsRefusal(err) || !strings.Contains(err.Error(), "cleanup.policy="+policy) || !strings.Contains(err.Error(), s.o.Topic) {
				t.Errorf("%s: %v", policy, err)
			}
		}
		s := NewStore(c.client(t), Options{Topic: c.topic(t, map[string]string{"cleanup.policy": "compact"})})
		if err := s.EnsureTopic(t.Context()); err != nil {
			t.Errorf("a compacted topic made by hand is taken: %v", err)
		}
		if _, err := s.adm.CreatePartitions(t.Context(), 1, s.o.Topic); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "two partitions", func() bool {
			topic, err := s.topic(t.Context())
			return err == nil && len(topic.Partitions) == 2
		})
		if err := s.EnsureTopic(t.Context()); !checkpoint.IsRefusal(err) {
			t.Errorf("two partitions: %v", err)
		}
	})
}

// Aborted records and markers at the end of the log.
func TestLoadFindsTheLastCommitted(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		s := c.store(t)
		w := c.writer(t, s, checkpoint.Checkpoint{})
		w.log.SetPartitions("a", 6)

		w.deliver(t, kgo.TryAbort)
		wantVirgin(t, s, true, "")
		if _, found, err := s.Load(t.Context()); found || err != nil {
			t.Fatal("an aborted checkpoint is none:", found, err)
		}

		last := w.deliver(t, kgo.TryCommit)
		wantLoad(t, s, last, map[string]int32{"a": 6})
		wantVirgin(t, s, false, "committed record")

		w.log.SetPartitions("b", 3)
		for range 100 {
			last = w.deliver(t, kgo.TryCommit)
		}
		wantLoad(t, s, last, map[string]int32{"a": 6, "b": 3})

		// More aborted records than the first two windows hold.
		garbage := w.next()
		w.begin(t)
		for range firstWindow * growth * 2 {
			w.Produce(t.Context(), &kgo.Record{Topic: w.topic, Key: []byte("position"), Value: checkpoint.EncodePosition(nil, &garbage, 0, nil)}, nil)
		}
		if err := w.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.end(t, kgo.TryAbort)
		loaded := wantLoad(t, s, last, map[string]int32{"a": 6, "b": 3})

		// A new instance goes on, with records of another kind in between.
		w = c.writer(t, s, loaded)
		w.log.SetPartitions("c", 1)
		last = w.deliver(t, kgo.TryCommit)
		w.begin(t)
		w.produce(t, checkpoint.Record{Key: []byte("request"), Value: []byte("{}")})
		w.end(t, kgo.TryCommit)
		wantLoad(t, s, last, map[string]int32{"a": 6, "b": 3, "c": 1})
		// The next position names the second state record, not the first in the log.
		last = w.deliver(t, kgo.TryCommit)
		wantLoad(t, s, last, map[string]int32{"a": 6, "b": 3, "c": 1})
	})
}

// A position in an open transaction is neither taken nor passed over.
func TestLoadWaitsForOpenTransactions(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		s := c.store(t)
		w := c.writer(t, s, checkpoint.Checkpoint{})
		last := w.deliver(t, kgo.TryCommit)

		w.begin(t)
		c2 := w.next()
		records, err := w.log.Records(&c2)
		if err != nil {
			t.Fatal(err)
		}
		w.produce(t, records...)
		s.o.StableTimeout = 200 * time.Millisecond
		if _, _, err := s.Load(t.Context()); !errors.Is(err, ErrOpenTransaction) {
			t.Fatalf("a transaction stays open: %v", err)
		}
		if _, _, err := s.Virgin(t.Context()); !errors.Is(err, ErrOpenTransaction) {
			t.Fatalf("a transaction stays open: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		s.o.StableTimeout = time.Minute
		if _, _, err := s.Load(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("the wait ends with its context: %v", err)
		}

		// Fencing ends it, and then the older checkpoint is the last.
		w2 := c.writer(t, s, last)
		w2.begin(t)
		w2.produce(t, checkpoint.Record{Key: []byte("x")})
		w2.end(t, kgo.TryAbort)
		wantLoad(t, s, last, nil)
	})
}

func TestLoadAfterCompaction(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		// Kafka cleans only closed segments; the smallest that 4.x takes is 1 MiB.
		topic := c.topic(t, map[string]string{"cleanup.policy": "compact", "segment.ms": "200", "min.cleanable.dirty.ratio": "0.01"})
		s := NewStore(c.client(t), Options{Topic: topic})
		w := c.writer(t, s, checkpoint.Checkpoint{})
		w.log.SetPartitions("a", 6)
		var last checkpoint.Checkpoint
		for i := range 60 {
			if i == 20 {
				w = c.writer(t, s, wantLoad(t, s, last, map[string]int32{"a": 6})) // a second state record
				w.log.SetPartitions("b", 2)
			}
			if i == 40 {
				w.log.SetPartitions("c", 3) // a delta
			}
			last = w.deliver(t, kgo.TryCommit)
		}
		want := map[string]int32{"a": 6, "b": 2, "c": 3}
		written, err := s.stableSpan(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		count := func() (n int) {
			start, err := s.offset(t.Context(), earliest, readUncommitted) // kfake moves it
			if err != nil {
				t.Fatal(err)
			}
			err = s.scan(t.Context(), start, written.end, readCommitted, false, func(*kgo.Record) (bool, error) { n++; return true, nil })
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		// A cleaner that runs while records are written has some of the work done by now.
		if n := count(); c.compact != nil && n < 60 {
			t.Fatalf("%d records to be compacted", n)
		}
		if c.compact != nil {
			c.compact()
		}
		waitFor(t, "compaction", func() bool {
			if c.compact == nil { // records roll the segment and wake the cleaner
				last = w.deliver(t, kgo.TryCommit)
			}
			return count() < 5
		})
		wantLoad(t, s, last, want)
		wantVirgin(t, s, false, "")
	})
}

// A position that names a state record which is gone must not load with half of
// the counts.
func TestLoadRefusesWithoutState(t *testing.T) {
	c := fake(t)
	for _, at := range []int64{checkpoint.StateBeside, 0, 1 << 40} {
		s := c.store(t)
		w := c.writer(t, s, checkpoint.Checkpoint{})
		p := w.next()
		w.begin(t)
		w.produce(t, checkpoint.Record{Key: []byte("position"), Value: checkpoint.EncodePosition(nil, &p, at, nil)})
		w.end(t, kgo.TryCommit)
		if _, _, err := s.Load(t.Context()); !checkpoint.IsRefusal(err) {
			t.Errorf("state at %d: %v", at, err)
		}
	}
	s := c.store(t)
	w := c.writer(t, s, checkpoint.Checkpoint{})
	w.deliver(t, kgo.TryCommit)
	w.begin(t)
	w.produce(t, checkpoint.Record{Key: []byte("position"), Value: []byte(`{"version":"2.0"}`)})
	w.end(t, kgo.TryCommit)
	var ve *checkpoint.VersionError
	if _, found, err := s.Load(t.Context()); !errors.As(err, &ve) || found {
		t.Errorf("a newer format must not fall back to an older position: %v, %v", found, err)
	}
}

func TestVirginSeesDeletedAndCompacted(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		// Kafka lets nobody delete from a topic that is only compacted, but the policy
		// may have been another one before.
		s := NewStore(c.client(t), Options{Topic: c.topic(t, map[string]string{"cleanup.policy": "delete"})})
		w := c.writer(t, s, checkpoint.Checkpoint{})
		w.deliver(t, kgo.TryCommit)
		w.deliver(t, kgo.TryAbort)
		// The committed transaction: two records and its marker.
		r, err := s.adm.DeleteRecords(t.Context(), kadm.Offsets{s.o.Topic: {0: {Topic: s.o.Topic, At: 3}}})
		if err != nil || r.Error() != nil {
			t.Fatal(err, r.Error())
		}
		wantVirgin(t, s, false, "begins at offset 3")
	})
}

// A transaction may commit in a partition without a record in it, and leaves only
// its marker: no offset is missing, but somebody has committed.
func TestVirginSeesCommitMarkers(t *testing.T) {
	c := fake(t)
	s := c.store(t)
	cl := c.client(t)
	initReq := kmsg.NewPtrInitProducerIDRequest()
	initReq.TransactionalID = kmsg.StringPtr(s.o.Topic)
	initReq.TransactionTimeoutMillis = 10_000
	id, err := initReq.RequestWith(t.Context(), cl)
	if err != nil || id.ErrorCode != 0 {
		t.Fatal(id, err)
	}
	rt := kmsg.NewAddPartitionsToTxnRequestTopic()
	rt.Topic, rt.Partitions = s.o.Topic, []int32{0}
	add := kmsg.NewPtrAddPartitionsToTxnRequest()
	add.TransactionalID, add.ProducerID, add.ProducerEpoch = s.o.Topic, id.ProducerID, id.ProducerEpoch
	add.Topics = append(add.Topics, rt)
	if _, err := add.RequestWith(t.Context(), cl); err != nil {
		t.Fatal(err)
	}
	end := kmsg.NewPtrEndTxnRequest()
	end.TransactionalID, end.ProducerID, end.ProducerEpoch, end.Commit = s.o.Topic, id.ProducerID, id.ProducerEpoch, true
	if r, err := end.RequestWith(t.Context(), cl); err != nil || r.ErrorCode != 0 {
		t.Fatal(r, err)
	}
	wantVirgin(t, s, false, "commit marker at offset 0")
}

// What a start reads does not grow with the log.
func TestLoadReadsLittleOfALongLog(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		s := c.store(t)
		w := c.writer(t, s, checkpoint.Checkpoint{}, kgo.ProducerBatchMaxBytes(1024), kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.MaxBufferedRecords(1<<18))
		w.log.SetPartitions("a", 6)
		w.deliver(t, kgo.TryCommit)
		const n = 200_000
		for range 4 {
			w.begin(t)
			for range n / 4 {
				p := w.next()
				w.Produce(t.Context(), &kgo.Record{Topic: w.topic, Key: []byte("position"), Value: checkpoint.EncodePosition(nil, &p, 0, nil)}, nil)
			}
			if err := w.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.end(t, kgo.TryCommit)
		}
		last := w.deliver(t, kgo.TryCommit)
		w.deliver(t, kgo.TryAbort)

		s.stats = stats{}
		began := time.Now()
		wantLoad(t, s, last, map[string]int32{"a": 6})
		t.Logf("%d fetches, %d bytes, %s after %d records", s.stats.fetches, s.stats.bytes, time.Since(began), n)
		// The end takes one fetch; the state record's comes with what follows it, up to
		// the bytes of one fetch.
		if s.stats.fetches > 4 || s.stats.bytes > fetchBytes+64<<10 {
			t.Errorf("%d fetches and %d bytes to load", s.stats.fetches, s.stats.bytes)
		}
	})
}

// waitFor polls until ok, and fails after a minute.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for !ok() {
		if err := pause(ctx); err != nil {
			t.Fatalf("no %s within a minute", what)
		}
	}
}

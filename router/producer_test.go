package router

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/rs/zerolog"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/replication"
)

// shop is a connector's Kafka side: router, catalog and producers on one cluster.
type shop struct {
	t       testing.TB
	kafka   *harness.Cluster
	name    string
	admin   *kgo.Client
	catalog *Catalog
	router  *Router
	store   *ckafka.Store
	metrics *Metrics
	log     bytes.Buffer
	faults  *faults
	timeout time.Duration // of transactions

	pos checkpoint.Position
}

// newShop makes the topics' catalog and a router on kafka; outbox rows of the table
// public.outbox are events.
func newShop(t testing.TB, kafka *harness.Cluster) *shop {
	t.Helper()
	s := &shop{t: t, kafka: kafka, name: kafka.Unique(), faults: newFaults(), timeout: time.Minute, pos: checkpoint.Position{LSN: 0x1000000}}
	s.admin = kafka.Client(t)
	s.catalog = NewCatalog(s.admin)
	s.metrics = NewMetrics(prometheus.NewRegistry())
	tables, err := TableTopics("{prefix}.{schema}.{table}", s.name)
	if err != nil {
		t.Fatal(err)
	}
	_, outbox := testEvents(t)
	outbox.Topic = "{prefix}.{event_type}"
	o := testOptions()
	o.TableTopic, o.Prefix, o.Outbox = tables, s.name, []OutboxOptions{outbox}
	o.MessageTopic, o.DeadLetterTopic = s.name+".message", s.name+".dead-letter"
	s.router = mustRouter(t, o, s.catalog)
	s.store = ckafka.NewStore(s.admin, ckafka.Options{Topic: s.checkpointTopic()})
	if err := s.store.EnsureTopic(s.context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *shop) checkpointTopic() string { return "_walrelay." + s.name }

// topic is the topic of a table of the schema public.
func (s *shop) topic(table string) string { return s.name + ".public." + table }

func (s *shop) context() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	s.t.Cleanup(cancel)
	return ctx
}

// newProducer makes a producer that is not fenced yet.
func (s *shop) newProducer() *Producer {
	s.t.Helper()
	p, err := NewProducer(ProducerOptions{
		Client:             ClientOptions{Brokers: s.kafka.Brokers(), ClientID: "test", Logger: zerolog.Nop(), Dial: s.faults.dial},
		TransactionalID:    s.name,
		TransactionTimeout: s.timeout,
		Compression:        kgo.Lz4Compression(),
		CheckpointTopic:    s.checkpointTopic(),
		MaxRecords:         20000,
		Logger:             zerolog.New(&s.log),
	}, s.catalog, s.metrics)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(p.Close)
	return p
}

// start does what a start does: fence, then read, then go on from there.
func (s *shop) start() (*Producer, checkpoint.Checkpoint) {
	s.t.Helper()
	p := s.newProducer()
	if err := p.Fence(s.context()); err != nil {
		s.t.Fatal(err)
	}
	cp, _, err := s.store.Load(s.context())
	if err != nil {
		s.t.Fatal(err)
	}
	p.Resume(cp)
	return p, cp
}

func (s *shop) newBatch() *Batch { return NewBatch(Limits{Bytes: 8 << 20, Records: 20000}) }

// batch routes changes as one source transaction.
func (s *shop) batch(changes ...*replication.Change) *Batch {
	s.t.Helper()
	b := s.newBatch()
	s.add(b, changes...)
	return b
}

// add routes changes as one more source transaction, ending the prefix behind it.
func (s *shop) add(b *Batch, changes ...*replication.Change) {
	s.t.Helper()
	commit := s.pos.LSN + 0x100
	txn := &replication.Transaction{XID: 1, CommitLSN: commit, CommitTime: time.Now()}
	for i, c := range changes {
		c.Txn, c.Seq = txn, uint64(i)
		s.route(b, c)
	}
	s.pos = checkpoint.Position{LSN: commit + 0x40, CommitLSN: commit, CommitTime: txn.CommitTime}
	b.Advance(s.pos, true)
}

func (s *shop) route(b *Batch, c *replication.Change) {
	s.t.Helper()
	for {
		err := s.router.Route(c, b)
		var missing *MissingTopicError
		if !errors.As(err, &missing) {
			if err != nil {
				s.t.Fatal(err)
			}
			return
		}
		spec := TopicSpec{Partitions: 6, ReplicationFactor: -1, Create: true}
		if err := s.catalog.Ensure(s.context(), []string{missing.Topic}, spec); err != nil {
			s.t.Fatal(err)
		}
	}
}

func (s *shop) checkpoint(b *Batch) *checkpoint.Checkpoint {
	return &checkpoint.Checkpoint{Position: b.Position(), Source: checkpoint.Source{SystemID: "7", Database: "shop", Timeline: 1}}
}

func (s *shop) deliver(p *Producer, b *Batch) {
	s.t.Helper()
	if err := p.Deliver(s.context(), b, s.checkpoint(b)); err != nil {
		s.t.Fatal(err)
	}
}

// ids are the ids of a topic's committed records.
func (s *shop) wantIDs(topic string, want ...string) {
	s.t.Helper()
	var got []string
	for _, r := range s.kafka.WaitCommitted(s.t, topic, len(want)) {
		got = append(got, strings.TrimSuffix(strings.TrimPrefix(string(r.Key), `{"id":`), "}"))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		s.t.Errorf("%s has the ids %v, want %v", topic, got, want)
	}
}

func testTable(t testing.TB) *replication.Relation {
	rel := relationOf(t, "t", "id bigint", "n bigint", "v text")
	rel.OID = 20000
	return rel
}

func ids(rel *replication.Relation, ids ...string) (changes []*replication.Change) {
	for _, id := range ids {
		changes = append(changes, insertOf(rel, id, "1", "v"))
	}
	return changes
}

// DESIGN, invariant 2: records and checkpoint commit together. And metrics speak of
// committed work only.
func TestRecordsAndCheckpointCommitTogether(t *testing.T) {
	s := newShop(t, harness.Kafka(t))
	p, _ := s.start()
	rel := testTable(t)
	delivered := s.metrics.Records.WithLabelValues(s.topic("t"), "delivered")

	reached, goOn := make(chan struct{}), make(chan struct{})
	s.faults.set(func(api int16, n int) fate {
		if api == apiEndTxn && n == 1 {
			close(reached)
			<-goOn
		}
		return pass
	})
	b := s.batch(ids(rel, "1", "2", "3")...)
	done := make(chan error, 1)
	go func() { done <- p.Deliver(s.context(), b, s.checkpoint(b)) }()
	<-reached
	if n := len(s.kafka.Consume(t, s.topic("t"), kgo.ReadUncommitted())); n != 3 {
		t.Errorf("before the commit, %d records are written", n)
	}
	for _, topic := range []string{s.topic("t"), s.checkpointTopic()} {
		if records := s.kafka.Committed(t, topic); len(records) != 0 {
			t.Errorf("before the commit, %s has %d committed records", topic, len(records))
		}
	}
	if n := testutil.ToFloat64(delivered) + testutil.ToFloat64(s.metrics.Transactions); n != 0 {
		t.Errorf("before the commit, the metrics count %v", n)
	}
	close(goOn)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	s.wantIDs(s.topic("t"), "1", "2", "3")
	if got, n := testutil.ToFloat64(delivered), testutil.ToFloat64(s.metrics.Transactions); got != 3 || n != 1 {
		t.Errorf("the metrics count %v records in %v transactions", got, n)
	}
	_, cp := s.start()
	if cp.Position.LSN != s.pos.LSN || cp.Partitions[s.topic("t")] != 6 {
		t.Errorf("the checkpoint is %+v, want position %s", cp, s.pos)
	}
}

// A checkpoint alone, as an idle stream or excluded changes make it.
func TestCheckpointWithoutRecords(t *testing.T) {
	s := newShop(t, harness.Kafka(t))
	p, _ := s.start()
	for range 3 {
		b := s.newBatch()
		b.tally("x", outcomeExcluded)
		s.add(b)
		s.deliver(p, b)
	}
	if _, cp := s.start(); cp.Position.LSN != s.pos.LSN {
		t.Errorf("the checkpoint is %+v, want position %s", cp, s.pos)
	}
	written := map[string]int{}
	for _, r := range s.kafka.WaitCommitted(t, s.checkpointTopic(), 4) {
		written[string(r.Key)]++
	}
	// The state record is large where topics are many: once a start is enough.
	if want := map[string]int{checkpoint.KeyState: 1, checkpoint.KeyPosition: 3}; !maps.Equal(written, want) {
		t.Errorf("records in the checkpoint topic: %v, want %v", written, want)
	}
	if n := testutil.ToFloat64(s.metrics.Records.WithLabelValues("x", "excluded")); n != 3 {
		t.Errorf("%v changes are counted as excluded", n)
	}
}

// A record that cannot be produced ends the transaction as an abort at once: nothing
// of it is seen, and nothing hangs that read_committed consumers would wait for.
func TestProduceErrorAborts(t *testing.T) {
	s := newShop(t, harness.Kafka(t))
	p, _ := s.start()
	rel := testTable(t)
	s.deliver(p, s.batch(ids(rel, "1")...))

	b := s.batch(ids(rel, "2", "3")...)
	s.catalog.Lookup(s.topic("t")).MaxMessageBytes = 4 << 20
	s.add(b, insertOf(rel, "4", "1", strings.Repeat("v", 2<<20)))
	s.catalog.Lookup(s.topic("t")).MaxMessageBytes = defaultMessageBytes
	err := p.Deliver(s.context(), b, s.checkpoint(b))
	if !errors.Is(err, kerr.MessageTooLarge) || errors.Is(err, ErrUnknownOutcome) || errors.Is(err, ErrFenced) {
		t.Errorf("error %v, want MESSAGE_TOO_LARGE", err)
	}
	if n := testutil.ToFloat64(s.metrics.Records.WithLabelValues(s.topic("t"), "delivered")); n != 1 {
		t.Errorf("%v records are counted", n)
	}
	harness.WaitFor(t, "the transaction's end", harness.DefaultTimeout, func() (bool, error) { return s.stable(s.topic("t")) })
	s.wantIDs(s.topic("t"), "1")

	p, cp := s.start()
	if cp.Position.LSN >= b.Position().LSN {
		t.Errorf("the checkpoint %s holds what was aborted", cp.Position)
	}
	s.deliver(p, s.batch(ids(rel, "2", "3")...))
	s.wantIDs(s.topic("t"), "1", "2", "3")
}

const defaultMessageBytes = 1048588

// stable tells whether no transaction is open in the topic.
func (s *shop) stable(topic string) (bool, error) {
	admin := kadm.NewClient(s.admin)
	ends, err := admin.ListEndOffsets(s.context(), topic)
	if err != nil {
		return false, err
	}
	stable, err := admin.ListCommittedOffsets(s.context(), topic)
	if err != nil {
		return false, err
	}
	open := false
	ends.Each(func(end kadm.ListedOffset) {
		at, ok := stable.Lookup(end.Topic, end.Partition)
		open = open || !ok || at.Offset != end.Offset
	})
	return !open, nil
}

// The partitions of keys, exactly; truncates are in every one.
func TestPartitionsAreTheJavaClients(t *testing.T) {
	s := newShop(t, harness.Kafka(t))
	p, _ := s.start()
	rel := testTable(t)
	events, _ := testEvents(t)
	b := s.batch(ids(rel, "1", "2", "3", "4", "5", "6", "-1", "9223372036854775807")...)
	s.add(b, insertOf(events, "e1", "order-8891", "events", "p"), insertOf(events, "e2", "order-1", "events", "p"),
		insertOf(events, "e3", "order-2", "events", "p"), insertOf(events, "e4", "é", "events", "p"))
	s.add(b, &replication.Change{Op: replication.OpTruncate, Relation: rel})
	s.deliver(p, b)

	got := map[string]int32{}
	truncates := map[int32]int{}
	for _, r := range s.kafka.WaitCommitted(t, s.topic("t"), 8+6) {
		if r.Key == nil {
			truncates[r.Partition]++
			continue
		}
		got[string(r.Key)] = r.Partition
	}
	for _, r := range s.kafka.WaitCommitted(t, s.name+".events", 4) {
		got[string(r.Key)] = r.Partition
	}
	want := map[string]int32{
		`{"id":1}`: 0, `{"id":2}`: 4, `{"id":3}`: 3, `{"id":4}`: 2, `{"id":5}`: 5, `{"id":6}`: 1, `{"id":-1}`: 1, `{"id":9223372036854775807}`: 1,
		"order-8891": 5, "order-1": 4, "order-2": 3, "é": 3,
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("partitions %v, want %v", got, want)
	}
	if want := (map[int32]int{0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}); fmt.Sprint(truncates) != fmt.Sprint(want) {
		t.Errorf("truncates by partition: %v", truncates)
	}
}

// What is null, what is empty, and the headers arrive as they were routed.
func TestNullAndEmptyArriveAsSuch(t *testing.T) {
	s := newShop(t, harness.Kafka(t))
	p, _ := s.start()
	events, _ := testEvents(t)
	s.deliver(p, s.batch(insertOf(events, "e1", "", "events", ""), insertOf(events, "e2", "k", "events", null)))
	var got []string
	for _, r := range s.kafka.WaitCommitted(t, s.name+".events", 2) {
		got = append(got, fmt.Sprintf("%s %q %v %q %v", r.Headers[0].Value, r.Key, r.Key == nil, r.Value, r.Value == nil))
	}
	slices.Sort(got)
	if want := []string{`e1 "" false "" false`, `e2 "k" false "" true`}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// The partition count grows between two batches.
func TestPartitionCountGrows(t *testing.T) {
	s := newShop(t, harness.Kafka(t))
	s.kafka.CreateTopic(t, s.topic("t"), 4)
	p, _ := s.start()
	rel := testTable(t)
	s.deliver(p, s.batch(ids(rel, "1", "2", "-1")...))

	admin := kadm.NewClient(s.admin)
	if _, err := admin.UpdatePartitions(s.context(), 8, s.topic("t")); err != nil {
		t.Fatal(err)
	}
	harness.WaitFor(t, "8 partitions", harness.DefaultTimeout, func() (bool, error) {
		topics, err := admin.ListTopics(s.context(), s.topic("t"))
		return len(topics[s.topic("t")].Partitions) == 8, err
	})
	s.catalog.now = func() time.Time { return time.Now().Add(2 * refreshAge) }
	for range 2 {
		s.deliver(p, s.batch(ids(rel, "1", "2", "-1")...))
	}
	got := map[string][]int32{}
	for _, r := range s.kafka.WaitCommitted(t, s.topic("t"), 9) {
		got[string(r.Key)] = append(got[string(r.Key)], r.Partition)
	}
	want := map[string][]int32{`{"id":1}`: {0, 4, 4}, `{"id":2}`: {0, 0, 0}, `{"id":-1}`: {3, 3, 3}}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("partitions %v, want %v", got, want)
	}
	warned := func() int { return strings.Count(s.log.String(), `"level":"warn"`) }
	if log := s.log.String(); warned() != 1 || !strings.Contains(log, `"topic":"`+s.topic("t")+`","partitions_before":4,"partitions":8`) {
		t.Errorf("the log has not one warning of the growth:\n%s", log)
	}
	p, cp := s.start()
	if n := cp.Partitions[s.topic("t")]; n != 8 {
		t.Errorf("the checkpoint has %d partitions", n)
	}
	s.deliver(p, s.batch(ids(rel, "1")...))
	if warned() != 1 {
		t.Errorf("a restart warns again:\n%s", s.log.String())
	}
}

// The older of two producers with one id is fenced, what it had open is
// gone, and the newer one goes on.
func TestFencedProducerLosesItsTransaction(t *testing.T) {
	s := newShop(t, harness.Kafka(t))
	old, _ := s.start()
	rel := testTable(t)
	s.deliver(old, s.batch(ids(rel, "1")...))

	reached, goOn := make(chan struct{}), make(chan struct{})
	s.faults.set(func(api int16, n int) fate {
		if api == apiEndTxn && n == 1 {
			close(reached)
			<-goOn
		}
		return pass
	})
	b := s.batch(ids(rel, "2", "3")...)
	done := make(chan error, 1)
	go func() { done <- old.Deliver(s.context(), b, s.checkpoint(b)) }()
	<-reached
	young, cp := s.start()
	if cp.Position.LSN >= b.Position().LSN {
		t.Errorf("the checkpoint %s holds what was not committed", cp.Position)
	}
	s.deliver(young, s.batch(ids(rel, "2", "3", "4")...))
	close(goOn)
	if err := <-done; !errors.Is(err, ErrFenced) {
		t.Errorf("the older producer's error is %v, want ErrFenced", err)
	}
	b = s.batch(ids(rel, "5")...)
	if err := old.Deliver(s.context(), b, s.checkpoint(b)); err == nil {
		t.Error("the older producer delivers again")
	}
	s.deliver(young, s.batch(ids(rel, "6")...))
	s.wantIDs(s.topic("t"), "1", "2", "3", "4", "6")
}

// A producer that is fenced before it produces.
func TestFencedBeforeProducing(t *testing.T) {
	s := newShop(t, harness.Kafka(t))
	old, _ := s.start()
	rel := testTable(t)
	s.deliver(old, s.batch(ids(rel, "1")...))
	young, _ := s.start()
	b := s.batch(ids(rel, "2")...)
	if err := old.Deliver(s.context(), b, s.checkpoint(b)); !errors.Is(err, ErrFenced) {
		t.Errorf("the older producer's error is %v, want ErrFenced", err)
	}
	s.deliver(young, s.batch(ids(rel, "2")...))
	s.wantIDs(s.topic("t"), "1", "2")
}

// EndTxn or its answer is lost, once or for as long as is tried. Either
// the outcome is learnt, or it is said to be unknown; the next start finds out, and
// nothing is there twice.
func TestLostEndTxn(t *testing.T) {
	for _, tt := range []struct {
		name string
		what fate
		most int // how many of them are lost
	}{
		{"the answer, once", loseReply, 1},
		{"the request, once", loseRequest, 1},
		{"every answer", loseReply, 1 << 30},
		{"every request", loseRequest, 1 << 30},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newShop(t, harness.Kafka(t))
			p, _ := s.start()
			rel := testTable(t)
			s.deliver(p, s.batch(ids(rel, "0")...))
			s.faults.set(func(api int16, n int) fate {
				if api == apiEndTxn && n <= tt.most {
					return tt.what
				}
				return pass
			})
			b := s.batch(ids(rel, "1", "2")...)
			ctx := s.context()
			if tt.most > 1 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, 2*time.Second)
				defer cancel()
			}
			err := p.Deliver(ctx, b, s.checkpoint(b))
			if n := s.faults.count(apiEndTxn); n == 0 {
				t.Fatal("there was no EndTxn to lose")
			}
			if err != nil && !errors.Is(err, ErrUnknownOutcome) {
				t.Errorf("error %v, want none or ErrUnknownOutcome", err)
			}
			if err == nil && tt.most > 1 {
				t.Error("no error, though no answer ever came")
			}
			t.Logf("the outcome: %v", err)
			s.faults.set(nil)

			next, cp := s.start()
			committed := cp.Position.LSN == b.Position().LSN
			switch {
			case err == nil && !committed:
				t.Errorf("the delivery succeeded, and the checkpoint is %s", cp.Position)
			case tt.what == loseRequest && tt.most > 1 && committed:
				t.Error("the broker never saw the commit, and it is there")
			case tt.what == loseReply && !committed:
				t.Error("the broker executed the commit, and it is not there")
			}
			if !committed {
				s.deliver(next, s.batch(ids(rel, "1", "2")...))
			}
			s.deliver(next, s.batch(ids(rel, "3")...))
			s.wantIDs(s.topic("t"), "0", "1", "2", "3")
		})
	}
}

// Produce requests fail again and again, and the order stays. Five requests
// are in flight at a time, so that a lost answer takes those of the following ones with
// it; the connection after it is left alone, or there would be no progress.
func TestRetriesKeepTheOrder(t *testing.T) {
	const updates = 120
	run := func(t *testing.T, s *shop, failed func() int) {
		s.kafka.CreateTopic(t, s.topic("t"), 1, "max.message.bytes", "8000")
		p, _ := s.start()
		rel := testTable(t)
		next := 0
		for range 2 {
			b := s.newBatch()
			for range updates / 2 {
				next++
				// Large and noisy, so that one delivery takes many requests.
				c := insertOf(rel, "1", fmt.Sprint(next), noise(1000))
				c.Op = replication.OpUpdate
				s.add(b, c)
			}
			s.deliver(p, b)
		}
		if n := failed(); n < 3 {
			t.Errorf("only %d produce requests failed", n)
		}
		records := s.kafka.WaitCommitted(t, s.topic("t"), updates)
		if len(records) != updates {
			t.Errorf("%d records, want %d", len(records), updates)
		}
		for i, r := range records {
			if want := fmt.Sprintf(`"after":{"id":1,"n":%d,`, i+1); !bytes.Contains(r.Value, []byte(want)) {
				t.Fatalf("record %d is %s, want %s", i, r.Value, want)
			}
		}
	}
	t.Run("answers are lost", func(t *testing.T) {
		s := newShop(t, harness.Kafka(t))
		s.faults.set(func(api int16, n int) fate {
			if api == apiProduce && n%8 == 0 {
				return loseReply
			}
			return pass
		})
		run(t, s, func() int { return s.faults.count(apiProduce) / 8 })
	})
	if harness.KafkaIsReal() {
		return // real brokers cannot be made to answer so
	}
	t.Run("not the leader", func(t *testing.T) {
		s := newShop(t, harness.Kafka(t))
		n, failed := 0, 0
		fake := s.kafka.Fake()
		fake.ControlKey(apiProduce, func(req kmsg.Request) (kmsg.Response, error, bool) {
			fake.KeepControl()
			if n++; n%3 != 0 {
				return nil, nil, false
			}
			failed++
			return notLeader(req.(*kmsg.ProduceRequest)), nil, true
		})
		run(t, s, func() int { return failed })
	})
}

func notLeader(req *kmsg.ProduceRequest) *kmsg.ProduceResponse {
	resp := req.ResponseKind().(*kmsg.ProduceResponse)
	for i := range req.Topics {
		topic := kmsg.NewProduceResponseTopic()
		topic.Topic, topic.TopicID = req.Topics[i].Topic, req.Topics[i].TopicID
		for j := range req.Topics[i].Partitions {
			partition := kmsg.NewProduceResponseTopicPartition()
			partition.Partition = req.Topics[i].Partitions[j].Partition
			partition.ErrorCode = kerr.NotLeaderForPartition.Code
			topic.Partitions = append(topic.Partitions, partition)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	return resp
}

// A full batch; and the metrics agree with what is in the topics.
func TestMetricsAgreeWithTheTopics(t *testing.T) {
	s := newShop(t, harness.Kafka(t))
	p, _ := s.start()
	rel := testTable(t)
	events, _ := testEvents(t)
	b := s.newBatch()
	const rows = 20000
	for i := range rows / 10 {
		var changes []*replication.Change
		for j := range 10 {
			changes = append(changes, insertOf(rel, fmt.Sprint(10*i+j), "1", "v"))
		}
		s.add(b, changes...)
	}
	deletion := insertOf(rel)
	deletion.Op, deletion.New, deletion.Old, deletion.OldIsKey = replication.OpDelete, nil, rowOf("1", null, null), true
	marking := insertOf(events, "e1", "k", "events", "p")
	marking.Op = replication.OpUpdate
	s.add(b, deletion, &replication.Change{Op: replication.OpTruncate, Relation: rel},
		insertOf(events, "e1", "k", "events", "p"), marking, insertOf(events, "e2", "k", "not a topic\xff", "p"), insertOf(rel, "1", "1", "\xff"))
	s.deliver(p, b)

	for topic, want := range map[string]int{s.topic("t"): rows + 2 + 6, s.name + ".events": 1} {
		n := len(s.kafka.WaitCommitted(t, topic, want))
		if got := testutil.ToFloat64(s.metrics.Records.WithLabelValues(topic, "delivered")); n != want || got != float64(want) {
			t.Errorf("%s has %d records, and %v are counted; want %d", topic, n, got, want)
		}
	}
	if n := len(s.kafka.WaitCommitted(t, s.name+".dead-letter", 2)); n != 2 {
		t.Errorf("%d dead letters", n)
	}
	for _, tt := range []struct {
		topic, outcome string
		want           float64
	}{
		{"public.outbox", "excluded", 1},
		{"public.outbox", "dead_lettered", 1},
		{s.topic("t"), "dead_lettered", 1},
		{s.name + ".dead-letter", "delivered", 0},
	} {
		if got := testutil.ToFloat64(s.metrics.Records.WithLabelValues(tt.topic, tt.outcome)); got != tt.want {
			t.Errorf("%s, %s: %v, want %v", tt.topic, tt.outcome, got, tt.want)
		}
	}
	if got := testutil.ToFloat64(s.metrics.Transactions); got != rows/10+1 {
		t.Errorf("%v transactions", got)
	}
}

// The largest record that the router lets through passes the client and the broker,
// and so do record batches that are filled to their topic's limit.
func TestRecordsUpToTheTopicsLimitPass(t *testing.T) {
	for _, limit := range []int{700, 2000, defaultMessageBytes, 5 << 20} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			s := newShop(t, harness.Kafka(t))
			s.kafka.CreateTopic(t, s.name+".events", 1, "max.message.bytes", fmt.Sprint(limit))
			p, _ := s.start()
			events, _ := testEvents(t)
			b := s.batch(insertOf(events, "e1", "k", "events", ""))
			// Noise, so that compression does not make it small.
			payload := noise(limit - recordSize(b, &b.records[0]))
			changes := []*replication.Change{insertOf(events, "e2", "k", "events", payload), insertOf(events, "e3", "k", "events", payload+"x")}
			want := 2
			for range 200 {
				want++
				changes = append(changes, insertOf(events, "e4", "k", "events", payload[:len(payload)/100]))
			}
			s.add(b, changes...)
			s.deliver(p, b)
			if records := s.kafka.WaitCommitted(t, s.name+".events", want); len(records) != want || len(records[1].Value) != len(payload) {
				t.Errorf("%d records, want %d", len(records), want)
			}
			if n := len(s.kafka.WaitCommitted(t, s.name+".dead-letter", 1)); n != 1 {
				t.Errorf("%d dead letters, want the record that is one byte longer", n)
			}
		})
	}
}

// The state record of very many tables passes where the topic is walrelay's own, and is
// refused with the way out where a topic made by hand takes less.
func TestLargeStateRecord(t *testing.T) {
	s := newShop(t, harness.Kafka(t))
	small := s.name + ".small"
	s.kafka.CreateTopic(t, small, 1, "cleanup.policy", "compact", "max.message.bytes", fmt.Sprint(defaultMessageBytes))
	cp := checkpoint.Checkpoint{Source: checkpoint.Source{SystemID: "7"}, Tables: map[uint32]checkpoint.TableProgress{}}
	const tables = 20000
	for oid := range uint32(tables) {
		cp.Tables[oid+1] = checkpoint.TableProgress{Table: noise(200), State: checkpoint.TableDone}
	}
	b := s.batch(ids(testTable(t), "1")...)
	cp.Position = b.Position()

	p := s.newProducer()
	p.o.CheckpointTopic = small
	if err := p.Fence(s.context()); err != nil {
		t.Fatal(err)
	}
	p.Resume(checkpoint.Checkpoint{})
	err := p.Deliver(s.context(), b, &cp)
	var refusal *checkpoint.Refusal
	if !errors.As(err, &refusal) || !strings.Contains(refusal.Remedy, "--entity-name "+small+" --add-config max.message.bytes=16777216") || !strings.Contains(refusal.What, fmt.Sprint(defaultMessageBytes)) {
		t.Fatalf("error %v, want a refusal", err)
	}

	p, _ = s.start()
	if err := p.Deliver(s.context(), b, &cp); err != nil {
		t.Fatal(err)
	}
	s.wantIDs(s.topic("t"), "1")
	got, found, err := s.store.Load(s.context())
	if err != nil || !found || !reflect.DeepEqual(got.Tables, cp.Tables) {
		t.Errorf("found %v with %d tables, %v", found, len(got.Tables), err)
	}
}

// noise is n printable bytes that do not compress well.
func noise(n int) string {
	out := make([]byte, n)
	x := uint64(88172645463325252)
	for i := range out {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		out[i] = ' ' + byte(x>>32)%94
	}
	return string(out)
}

func TestTransactionTimeoutAboveTheBrokersIsRefused(t *testing.T) {
	s := newShop(t, harness.Kafka(t))
	s.timeout = 24 * time.Hour
	p := s.newProducer()
	var refusal *checkpoint.Refusal
	if err := p.Fence(s.context()); !errors.As(err, &refusal) || !strings.Contains(refusal.What, "kafka.transaction-timeout 24h") {
		t.Errorf("error %v, want a refusal", err)
	}
}

func BenchmarkDeliver(b *testing.B) {
	s := newShop(b, harness.Kafka(b))
	p, _ := s.start()
	row := wideRow(b)
	row.Relation.OID++
	batch := NewBatch(Limits{Bytes: 64 << 20, Records: 20000})
	for i := range 20000 {
		row.New[0].Text = fmt.Append(nil, i)
		s.add(batch, row)
	}
	b.SetBytes(int64(len(batch.arena)))
	b.ReportAllocs()
	for b.Loop() {
		if err := p.Deliver(b.Context(), batch, s.checkpoint(batch)); err != nil {
			b.Fatal(err)
		}
	}
}

package router

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/killpoint"
)

// PublisherOptions configures a Publisher.
type PublisherOptions struct {
	Client      ClientOptions
	Compression kgo.CompressionCodec
	MaxRecords  int // of a batch
	Logger      zerolog.Logger
}

// Publisher writes batches without a Kafka transaction, at least once: for records that
// have no position which could commit with them. Its producer is idempotent, so that what
// the client repeats within one Publish is in the log once, and each partition has the
// records in their order. One goroutine owns it.
type Publisher struct {
	o       PublisherOptions
	client  *kgo.Client
	catalog *Catalog
	metrics *Metrics
	records []kgo.Record // reused from batch to batch
	headers []kgo.RecordHeader
}

// NewPublisher makes a publisher; it connects on first use.
func NewPublisher(o PublisherOptions, catalog *Catalog, m *Metrics) (*Publisher, error) {
	p := &Publisher{o: o, catalog: catalog, metrics: m}
	opts := append(o.Client.Opts(),
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.ProducerBatchCompression(o.Compression, kgo.NoCompression()),
		kgo.RecordPartitioner(chosenPartitioner{}),
		kgo.ProducerBatchMaxBytesFn(p.maxBatchBytes),
		kgo.ProducerLinger(time.Second), // until Publish flushes
		kgo.MaxBufferedRecords(2*o.MaxRecords+1<<16),
		kgo.MetadataMaxAge(30*time.Second),
		kgo.MetadataMinAge(250*time.Millisecond),
	)
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return nil, fmt.Errorf("make Kafka producer: %w", err)
	}
	p.client = client
	return p, nil
}

// Close ends the client. What it has not sent yet is not sent any more; what is under way
// may still arrive.
func (p *Publisher) Close() { p.client.Close() }

func (p *Publisher) maxBatchBytes(topic string) int32 { return maxBatchBytes(p.catalog, topic) }

// Publish writes the records of b and waits until Kafka has each of them on all in-sync
// replicas, or has refused it, or ctx ends. acked says which it has, by their index in the
// order of Route; the others may be in the log all the same. The publisher is of no use
// any more after an error.
func (p *Publisher) Publish(ctx context.Context, b *Batch) (acked []bool, err error) {
	if err := p.refresh(ctx, b); err != nil {
		return nil, err
	}
	killpoint.At(killpoint.BatchFilled)
	records := b.records[:b.done.records]
	p.records, p.headers = grow(p.records, len(records)), grow(p.headers, b.done.headers)
	for i, h := range b.headers[:b.done.headers] {
		p.headers[i] = kgo.RecordHeader{Key: h.name, Value: b.bytes(h.value)}
	}
	var (
		mu    sync.Mutex // the client calls back from its own goroutines
		fault error
	)
	now := time.Now()
	answered := make([]bool, len(records))
	for i := range records {
		r := &records[i]
		key := b.bytes(r.key)
		partition, _ := r.partitions(key) // one: nothing that is polled goes to every partition
		p.records[i] = kgo.Record{
			Topic: r.topic.Name, Partition: partition, Key: key, Value: b.bytes(r.value),
			Headers:   p.headers[r.headers.at : r.headers.at+r.headers.n : r.headers.at+r.headers.n],
			Timestamp: now,
		}
		p.client.Produce(ctx, &p.records[i], func(r *kgo.Record, err error) {
			mu.Lock()
			defer mu.Unlock()
			answered[i] = err == nil
			if err != nil && fault == nil {
				fault = fmt.Errorf("produce to topic %s: %w", r.Topic, err)
			}
		})
		if i == 0 {
			killpoint.At(killpoint.FirstProduced)
		}
	}
	err = p.client.Flush(ctx)
	mu.Lock()
	defer mu.Unlock()
	// A copy: after a failed flush the client may still call back.
	acked = append([]bool(nil), answered...)
	p.count(b, acked)
	if err == nil {
		err = fault
	} else {
		err = fmt.Errorf("wait for Kafka's acknowledgements: %w", err)
	}
	return acked, err
}

// refresh looks at the topics of the batch again: partitions that were added move keys,
// which has to be said.
func (p *Publisher) refresh(ctx context.Context, b *Batch) error {
	var names []string
	seen := map[*Topic]bool{}
	for i := range b.records[:b.done.records] {
		if t := b.records[i].topic; !seen[t] {
			seen[t] = true
			names = append(names, t.Name)
		}
	}
	grown, err := p.catalog.Refresh(ctx, names, publisherRefreshAge)
	if err != nil {
		return fmt.Errorf("refresh partition counts: %w", err)
	}
	for _, g := range grown {
		p.o.Logger.Warn().Str("topic", g.Topic).Int32("partitions_before", g.Old).Int32("partitions", g.New).
			Msg("partition count changed: keys move between partitions, and the order of a key's records is broken across the change")
	}
	return nil
}

// publisherRefreshAge is how old the partition counts of a batch's topics may be. The
// client looks for itself; this is only to say it.
const publisherRefreshAge = 30 * time.Second

// count moves the metrics by what Kafka has acknowledged.
func (p *Publisher) count(b *Batch, acked []bool) {
	delivered := map[string]int{}
	complete := true
	for i, ok := range acked {
		switch r := &b.records[i]; {
		case !ok:
			complete = false
		case !r.dead:
			delivered[r.topic.Name]++
		}
	}
	for topic, n := range delivered {
		p.metrics.Records.WithLabelValues(topic, outcomeDelivered.String()).Add(float64(n))
	}
	if !complete {
		return // which of the dead letters are there is not told apart; they come again
	}
	for _, c := range b.counts[:b.done.counts] {
		p.metrics.Records.WithLabelValues(c.topic, c.outcome.String()).Add(float64(c.n))
	}
}

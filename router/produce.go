package router

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/killpoint"
)

// lookAtTopics makes sure that the partition counts are fresh, and notes them for
// the checkpoint.
func (p *Producer) lookAtTopics(ctx context.Context, b *Batch) error {
	clear(p.topics)
	p.names = p.names[:0]
	var last *Topic
	for i := range b.records[:b.done.records] {
		t := b.records[i].topic
		if t == last {
			continue
		}
		last = t
		if _, seen := p.topics[t]; !seen {
			p.topics[t] = 0
			p.names = append(p.names, t.Name)
		}
	}
	grown, err := p.catalog.Refresh(ctx, p.names, refreshAge)
	if err != nil {
		return fmt.Errorf("refresh partition counts: %w", err)
	}
	for _, g := range grown {
		if err := p.awaitPartition(ctx, g.Topic, g.New-1); err != nil {
			return err
		}
	}
	for t := range p.topics {
		if old := p.log.SetPartitions(t.Name, t.Partitions); old != 0 && old != t.Partitions {
			p.o.Logger.Warn().Str("topic", t.Name).Int32("partitions_before", old).Int32("partitions", t.Partitions).
				Msg("partition count changed: keys move between partitions, and the order of a key's records is broken across the change; order them by the header position")
		}
	}
	return nil
}

// awaitPartition waits until the producing client knows a partition that is new.
func (p *Producer) awaitPartition(ctx context.Context, topic string, partition int32) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for known := false; ; {
		// A topic that was not produced to yet is loaded, whole, by the first record.
		if leader, _, _ := p.client.PartitionLeader(topic, 0); leader == -1 && !known {
			return nil
		}
		known = true
		if leader, _, _ := p.client.PartitionLeader(topic, partition); leader != -1 {
			return nil
		}
		p.client.ForceMetadataRefresh()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// pause keeps txnPause between two transactions.
func (p *Producer) pause(ctx context.Context) error {
	wait := txnPause - time.Since(p.ended)
	if wait <= 0 {
		return nil
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// produce hands the prefix's records to the client and returns how many.
func (p *Producer) produce(ctx context.Context, b *Batch) int {
	total := 0
	for i := range b.records[:b.done.records] {
		total += b.records[i].copies()
	}
	p.records = grow(p.records, total)
	p.headers = grow(p.headers, b.done.headers)
	for i, h := range b.headers[:b.done.headers] {
		p.headers[i] = kgo.RecordHeader{Key: h.name, Value: b.bytes(h.value)}
	}
	// Once a batch and not once a record: the method value allocates, and the client would
	// read the clock.
	promise, now := p.answered.promise, time.Now()
	next := 0
	for i := range b.records[:b.done.records] {
		r := &b.records[i]
		key := b.bytes(r.key)
		first, end := r.partitions(key)
		for partition := first; partition < end; partition++ {
			out := &p.records[next]
			next++
			*out = kgo.Record{
				Topic:     r.topic.Name,
				Partition: partition,
				Key:       key,
				Value:     b.bytes(r.value),
				Headers:   p.headers[r.headers.at : r.headers.at+r.headers.n : r.headers.at+r.headers.n],
				Timestamp: now,
			}
			p.client.Produce(ctx, out, promise)
			if next == 1 {
				killpoint.At(killpoint.FirstProduced)
			}
		}
	}
	return next
}

// copies is how many Kafka records r becomes.
func (r *record) copies() int {
	if r.where == placeEvery {
		return int(r.topic.Partitions)
	}
	return 1
}

// partitions gives the partitions that r goes to, from first to before end.
func (r *record) partitions(key []byte) (first, end int32) {
	switch r.where {
	case placeAlone:
		return 0, 1
	case placeEvery:
		return 0, r.topic.Partitions
	case placeAt:
		return r.partition, r.partition + 1
	}
	first = Partition(key, r.topic.Partitions)
	return first, first + 1
}

func grow[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n, n+n/4)
	}
	return s[:n]
}

func (p *Producer) checkpointPromise(key []byte) func(*kgo.Record, error) {
	if string(key) != checkpoint.KeyState {
		return p.answered.promise
	}
	return func(r *kgo.Record, err error) {
		p.answered.stateOffset = r.Offset
		if errors.Is(err, kerr.MessageTooLarge) {
			err = p.refuseLargeState(len(r.Value), err)
		}
		p.answered.promise(r, err)
	}
}

// refuseLargeState says how to make room for the state record. The client compares its
// size before compression, brokers after it, so that what the client lets pass fits.
func (p *Producer) refuseLargeState(size int, err error) error {
	limit := int32(0)
	if t := p.catalog.Lookup(p.o.CheckpointTopic); t != nil {
		limit = t.MaxMessageBytes
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("the state record, with every table and topic, has %d bytes, and checkpoint topic %s takes %d (max.message.bytes)", size, p.o.CheckpointTopic, limit),
		Risk:   "nothing can be delivered, as the checkpoint belongs to every delivery",
		Remedy: fmt.Sprintf("run: kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics --entity-name %s --add-config max.message.bytes=%d", p.o.CheckpointTopic, max(16<<20, 2*size)),
		Err:    err,
	}
}

// count moves the metrics, which only ever speak of committed work.
func (p *Producer) count(b *Batch) {
	var last *Topic
	n := 0
	flush := func(next *Topic) {
		if last != next && n > 0 {
			p.topics[last] += n
			n = 0
		}
		last = next
	}
	for i := range b.records[:b.done.records] {
		r := &b.records[i]
		if r.dead {
			continue // counted as a dead letter of its topic, below
		}
		flush(r.topic)
		n += r.copies()
	}
	flush(nil)
	for t, n := range p.topics {
		if n > 0 {
			p.metrics.Records.WithLabelValues(t.Name, outcomeDelivered.String()).Add(float64(n))
		}
	}
	for _, c := range b.counts[:b.done.counts] {
		p.metrics.Records.WithLabelValues(c.topic, c.outcome.String()).Add(float64(c.n))
	}
	p.metrics.Transactions.Add(float64(b.transactions))
	if !b.oldest.IsZero() {
		p.metrics.Delivery.Observe(time.Since(b.oldest).Seconds())
	}
}

// chosenPartitioner takes the partition that the record names. Its number is chosen
// from the counts that the checkpoint holds, not from what the client's metadata says
// at some moment within a transaction.
type chosenPartitioner struct{}

// ForTopic is the same for every topic.
func (chosenPartitioner) ForTopic(string) kgo.TopicPartitioner { return chosenPartitioner{} }

// RequiresConsistency keeps a record on its partition while that has no leader.
func (chosenPartitioner) RequiresConsistency(*kgo.Record) bool { return true }

// Partition is the one that the record names; the client fails the record, and with it
// the transaction, where it does not know that partition.
func (chosenPartitioner) Partition(r *kgo.Record, n int) int {
	if int(r.Partition) >= n {
		return -1
	}
	return int(r.Partition)
}

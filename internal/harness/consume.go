package harness

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// metadataAge bounds how late a client notices a topic that was created meanwhile.
const metadataAge = 100 * time.Millisecond

// Consume returns the records that are in a topic now, ordered by partition and offset, up to the end that the isolation
// level sees: the last stable offset for read_committed, the high watermark for read_uncommitted.
func (c *Cluster) Consume(t testing.TB, topic string, isolation kgo.IsolationLevel) []*kgo.Record {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kafkaTimeout)
	defer cancel()
	ends := c.ends(ctx, t, topic, isolation)
	var records []*kgo.Record
	if len(ends) == 0 {
		return nil
	}
	start := map[int32]kgo.Offset{}
	for partition := range ends {
		start[partition] = kgo.NewOffset().AtStart()
	}
	client := c.Client(t, kgo.FetchIsolationLevel(isolation), kgo.KeepControlRecords(),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: start}))
	for len(ends) > 0 {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			t.Fatalf("consume %s, %d partitions not read to their end: %v", topic, len(ends), err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			end, open := ends[r.Partition]
			if !open || r.Offset >= end {
				return
			}
			// Markers are asked for because the last record before an end may be one: without them, the end of an
			// aborted transaction would never come in sight.
			if !r.Attrs.IsControl() {
				records = append(records, r)
			}
			if r.Offset == end-1 {
				delete(ends, r.Partition)
			}
		})
	}
	client.Close()
	slices.SortStableFunc(records, func(a, b *kgo.Record) int {
		return cmp.Or(cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
	})
	return records
}

// Committed is Consume with read_committed. A real broker answers EndTxn before the commit's markers are in the topics,
// so a transaction that has just ended may be missing here for a moment: where the number of records is known, use
// WaitCommitted.
func (c *Cluster) Committed(t testing.TB, topic string) []*kgo.Record {
	t.Helper()
	return c.Consume(t, topic, kgo.ReadCommitted())
}

// WaitCommitted waits until a topic has at least n committed records and returns all that it has then. The topic need
// not exist yet.
func (c *Cluster) WaitCommitted(t testing.TB, topic string, n int) []*kgo.Record {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kafkaTimeout)
	defer cancel()
	client := c.Client(t, kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.MetadataMinAge(metadataAge), kgo.MetadataMaxAge(metadataAge))
	seen := 0
	for seen < n {
		fetches := client.PollFetches(ctx)
		if ctx.Err() != nil {
			t.Fatalf("waited %s for %d committed records in %s: there are %d", kafkaTimeout, n, topic, seen)
		}
		// Other errors, such as a topic that is not there yet, pass.
		seen += fetches.NumRecords()
	}
	client.Close()
	return c.Committed(t, topic)
}

// ends returns the exclusive end of each partition that has something before it; of a
// topic that is not there, nothing.
func (c *Cluster) ends(ctx context.Context, t testing.TB, topic string, isolation kgo.IsolationLevel) map[int32]int64 {
	t.Helper()
	admin := c.admin(t)
	defer admin.Close()
	list := admin.ListEndOffsets
	if isolation == kgo.ReadCommitted() {
		list = admin.ListCommittedOffsets
	}
	starts, err := admin.ListStartOffsets(ctx, topic)
	if err == nil {
		err = starts.Error()
	}
	if errors.Is(err, kerr.UnknownTopicOrPartition) {
		return nil // nobody has written to it
	}
	if err != nil {
		t.Fatalf("read where %s starts: %v", topic, err)
	}
	offsets, err := list(ctx, topic)
	if err == nil {
		err = offsets.Error()
	}
	if err != nil {
		t.Fatalf("read where %s ends: %v", topic, err)
	}
	ends := map[int32]int64{}
	offsets.Each(func(o kadm.ListedOffset) {
		if start, _ := starts.Lookup(topic, o.Partition); o.Offset > start.Offset {
			ends[o.Partition] = o.Offset
		}
	})
	return ends
}

package verify

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"golang.org/x/sync/errgroup"

	"github.com/walrelay/walrelay/checkpoint"
)

const (
	// fetchShare of the memory bounds one answer, within the two limits: as records it is
	// many times as large. A broker always sends at least one batch.
	fetchShare         = 256
	minFetch, maxFetch = 64 << 10, 1 << 20
	// fetchers read at a time, however many partitions a topic has.
	fetchers = 3
	// fetchWait is how long a broker waits for what is not there yet.
	fetchWait = 100 * time.Millisecond
	// requestTimeout bounds one request, after which the leader is looked up again.
	requestTimeout = 15 * time.Second
	// stallTimeout bounds the time without progress: longer than a transaction may stay
	// open with kafka.transaction-timeout's default.
	stallTimeout = 3 * time.Minute
)

// ends are the offsets of a topic's partitions.
type ends map[int32]int64

// topicReader reads topics as a read_committed consumer does, up to ends that were listed
// before. It speaks the protocol itself: a consumer does not tell that it has reached an
// end behind which there are only markers, or what was aborted.
type topicReader struct {
	cl    *kgo.Client
	adm   *kadm.Client
	bytes int32 // of one answer
}

// list gives where the partitions of a topic begin and end, open transactions included. A
// topic that does not exist is a *checkpoint.Refusal.
func (t *topicReader) list(ctx context.Context, topic string) (start, end ends, err error) {
	starts, err := t.adm.ListStartOffsets(ctx, topic)
	if err == nil {
		var listed kadm.ListedOffsets
		if listed, err = t.adm.ListEndOffsets(ctx, topic); err == nil {
			if start, err = offsetsOf(starts, topic); err == nil {
				end, err = offsetsOf(listed, topic)
			}
		}
	}
	if errors.Is(err, kerr.UnknownTopicOrPartition) || err == nil && len(end) == 0 {
		return nil, nil, &checkpoint.Refusal{
			What:   fmt.Sprintf("topic %s does not exist", topic),
			Risk:   "there is nothing to compare with",
			Remedy: "start walrelay run, which creates the topic with the table's first record; or correct topics.table and topics.prefix",
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("list offsets of topic %s: %w", topic, err)
	}
	return start, end, nil
}

func offsetsOf(listed kadm.ListedOffsets, topic string) (ends, error) {
	out := ends{}
	for partition, o := range listed[topic] {
		if o.Err != nil {
			return nil, o.Err
		}
		out[partition] = o.Offset
	}
	return out, nil
}

// read hands the committed records from start up to end to take, those of a partition in
// their order, one call at a time.
func (t *topicReader) read(ctx context.Context, topic string, start, end ends, take func(*kgo.Record) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(fetchers)
	var mu sync.Mutex
	for partition, to := range end {
		g.Go(func() error {
			f := &fetcher{t: t, topic: topic, partition: partition, leader: -1, decompressor: kgo.DefaultDecompressor()}
			return f.run(ctx, start[partition], to, func(records []*kgo.Record) error {
				mu.Lock()
				defer mu.Unlock()
				for _, r := range records {
					if r.Offset >= to {
						return nil
					}
					if err := take(r); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
	return g.Wait()
}

// fetcher reads one partition.
type fetcher struct {
	t            *topicReader
	topic        string
	id           [16]byte
	partition    int32
	leader       int32 // -1: not known
	decompressor kgo.Decompressor
}

func (f *fetcher) run(ctx context.Context, from, to int64, take func([]*kgo.Record) error) error {
	progress := time.Now()
	for from < to {
		fp, next, err := f.fetch(ctx, from)
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case kerr.IsRetriable(err), errors.Is(err, context.DeadlineExceeded):
			f.leader = -1
		default:
			return fmt.Errorf("read partition %d of topic %s at offset %d: %w", f.partition, f.topic, from, err)
		}
		if err == nil && next > from {
			if err := take(fp.Records); err != nil {
				return err
			}
			from, progress = next, time.Now()
			continue
		}
		if time.Since(progress) > stallTimeout {
			if err == nil {
				err = errors.New("a transaction is open there (find it with kafka-transactions.sh find-hanging)")
			}
			return fmt.Errorf("read partition %d of topic %s: nothing new at offset %d, of %d, for %s: %w", f.partition, f.topic, from, to, stallTimeout, err)
		}
		if err := pause(ctx, fetchWait); err != nil {
			return err
		}
	}
	return nil
}

func (f *fetcher) fetch(ctx context.Context, offset int64) (fp kgo.FetchPartition, next int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if f.leader < 0 {
		if err := f.lookUp(ctx); err != nil {
			return fp, 0, err
		}
	}
	rp := kmsg.NewFetchRequestTopicPartition()
	rp.Partition, rp.FetchOffset, rp.PartitionMaxBytes = f.partition, offset, f.t.bytes
	rt := kmsg.NewFetchRequestTopic()
	rt.Topic, rt.TopicID = f.topic, f.id
	rt.Partitions = append(rt.Partitions, rp)
	req := kmsg.NewPtrFetchRequest()
	req.MinBytes, req.MaxBytes, req.MaxWaitMillis = 1, f.t.bytes, int32(fetchWait/time.Millisecond)
	req.IsolationLevel = 1 // read_committed
	req.SessionEpoch = -1  // no fetch session
	req.Topics = append(req.Topics, rt)
	kresp, err := f.t.cl.Broker(int(f.leader)).RetriableRequest(ctx, req)
	if err != nil {
		return fp, 0, err
	}
	resp := kresp.(*kmsg.FetchResponse)
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return fp, 0, err
	}
	if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
		return fp, 0, fmt.Errorf("the broker answered for %d topics instead of one partition of one", len(resp.Topics))
	}
	opts := kgo.ProcessFetchPartitionOpts{Offset: offset, Topic: f.topic, Partition: f.partition, IsolationLevel: kgo.ReadCommitted()}
	fp, next = kgo.ProcessFetchPartition(opts, &resp.Topics[0].Partitions[0], f.decompressor, nil)
	return fp, next, fp.Err
}

func (f *fetcher) lookUp(ctx context.Context) error {
	rt := kmsg.NewMetadataRequestTopic()
	rt.Topic = kmsg.StringPtr(f.topic)
	req := kmsg.NewPtrMetadataRequest()
	req.Topics = append(req.Topics, rt)
	resp, err := req.RequestWith(ctx, f.t.cl)
	if err != nil {
		return err
	}
	for i := range resp.Topics {
		topic := &resp.Topics[i]
		if err := kerr.ErrorForCode(topic.ErrorCode); err != nil {
			return err
		}
		for _, p := range topic.Partitions {
			if p.Partition == f.partition && p.Leader >= 0 {
				f.leader, f.id = p.Leader, topic.TopicID
				return nil
			}
		}
	}
	return kerr.LeaderNotAvailable
}

// pause waits, or until ctx ends and then gives its cause.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

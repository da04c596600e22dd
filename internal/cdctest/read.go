package cdctest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// ReadCommitted reads what a read_committed consumer gets, up to the last stable
// offset of every partition at the call's beginning. topics is a regular expression
// over whole topic names; internal topics are left out. opts are the client's (seed
// brokers, security); they must not say what to consume.
//
// The log is read twice: with read_uncommitted, to work out from the control
// records which transactions were committed, and with read_committed. If the two
// disagree, broker or client is wrong, and the error says so.
func ReadCommitted(ctx context.Context, topics string, opts ...kgo.Opt) (*Log, error) {
	r, err := newReader(ctx, topics, opts)
	if err != nil {
		return nil, err
	}
	defer r.admin.Close()
	if len(r.topics) == 0 {
		return &Log{Partitions: r.partitions}, nil
	}
	stable, err := r.admin.ListCommittedOffsets(ctx, r.topics...)
	if err != nil {
		return nil, fmt.Errorf("list last stable offsets: %w", err)
	}
	ends := offsets(stable)
	raw, err := r.consume(ctx, ends, kgo.ReadUncommitted())
	if err != nil {
		return nil, fmt.Errorf("read uncommitted: %w", err)
	}
	resolved := resolve(raw)
	want := slices.DeleteFunc(slices.Clone(resolved), func(r Record) bool { return !r.Committed })
	got, err := r.consume(ctx, lastVisible(want), kgo.ReadCommitted())
	if err != nil {
		return nil, fmt.Errorf("read committed: %w", err)
	}
	if err := agree(want, got); err != nil {
		return nil, err
	}
	return &Log{Records: want, Partitions: r.partitions}, nil
}

// ReadSettled waits until no transaction is open in the topics, and reads as
// ReadCommitted does. It is for logs whose writers have ended: EndTxn returns when
// the commit is decided, and the partitions' control records, which make it visible,
// follow a moment later.
func ReadSettled(ctx context.Context, topics string, opts ...kgo.Opt) (*Log, error) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		open, err := firstOpen(ctx, topics, opts)
		if err != nil {
			return nil, err
		}
		if open == "" {
			return ReadCommitted(ctx, topics, opts...)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait until no transaction is open in %s: %w", open, ctx.Err())
		case <-tick.C:
		}
	}
}

// firstOpen names a partition whose last stable offset is below its end.
func firstOpen(ctx context.Context, topics string, opts []kgo.Opt) (string, error) {
	r, err := newReader(ctx, topics, opts)
	if err != nil {
		return "", err
	}
	defer r.admin.Close()
	if len(r.topics) == 0 {
		return "", nil
	}
	// In this order: what is written in between makes the end look larger, and the
	// answer "open", never the other way round.
	stable, err := r.admin.ListCommittedOffsets(ctx, r.topics...)
	if err != nil {
		return "", fmt.Errorf("list last stable offsets: %w", err)
	}
	high, err := r.admin.ListEndOffsets(ctx, r.topics...)
	if err != nil {
		return "", fmt.Errorf("list end offsets: %w", err)
	}
	lso := offsets(stable)
	open := ""
	high.Each(func(o kadm.ListedOffset) {
		if lso[o.Topic][o.Partition] < o.Offset {
			open = fmt.Sprintf("%s[%d]", o.Topic, o.Partition)
		}
	})
	return open, nil
}

// ReadUncommitted reads everything up to the high watermark, records of aborted and
// of open transactions included; Record.Committed tells them apart. Parameters as in
// ReadCommitted.
func ReadUncommitted(ctx context.Context, topics string, opts ...kgo.Opt) (*Log, error) {
	r, err := newReader(ctx, topics, opts)
	if err != nil {
		return nil, err
	}
	defer r.admin.Close()
	if len(r.topics) == 0 {
		return &Log{Partitions: r.partitions}, nil
	}
	high, err := r.admin.ListEndOffsets(ctx, r.topics...)
	if err != nil {
		return nil, fmt.Errorf("list end offsets: %w", err)
	}
	raw, err := r.consume(ctx, offsets(high), kgo.ReadUncommitted())
	if err != nil {
		return nil, fmt.Errorf("read uncommitted: %w", err)
	}
	return &Log{Records: resolve(raw), Partitions: r.partitions}, nil
}

// reader reads a set of topics.
type reader struct {
	opts       []kgo.Opt
	admin      *kadm.Client
	topics     []string
	partitions map[string]int32
	starts     map[string]map[int32]int64
}

func newReader(ctx context.Context, topics string, opts []kgo.Opt) (*reader, error) {
	want, err := regexp.Compile("^(?:" + topics + ")$")
	if err != nil {
		return nil, fmt.Errorf("topics to read: %w", err)
	}
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	r := &reader{opts: opts, admin: kadm.NewClient(client), partitions: map[string]int32{}}
	found, err := r.admin.ListTopics(ctx)
	if err != nil {
		r.admin.Close()
		return nil, fmt.Errorf("list topics: %w", err)
	}
	for _, t := range found.Sorted() {
		if want.MatchString(t.Topic) {
			r.topics = append(r.topics, t.Topic)
			r.partitions[t.Topic] = int32(len(t.Partitions))
		}
	}
	starts := kadm.ListedOffsets{}
	if len(r.topics) > 0 { // no topics would mean all of them
		if starts, err = r.admin.ListStartOffsets(ctx, r.topics...); err != nil {
			r.admin.Close()
			return nil, fmt.Errorf("list start offsets: %w", err)
		}
	}
	r.starts = offsets(starts)
	return r, nil
}

func offsets(l kadm.ListedOffsets) map[string]map[int32]int64 {
	out := map[string]map[int32]int64{}
	l.Each(func(o kadm.ListedOffset) {
		if out[o.Topic] == nil {
			out[o.Topic] = map[int32]int64{}
		}
		out[o.Topic][o.Partition] = o.Offset
	})
	return out
}

// lastVisible gives, per partition, the offset behind the last of records.
func lastVisible(records []Record) map[string]map[int32]int64 {
	out := map[string]map[int32]int64{}
	for _, r := range records {
		if out[r.Topic] == nil {
			out[r.Topic] = map[int32]int64{}
		}
		out[r.Topic][r.Partition] = max(out[r.Topic][r.Partition], r.Offset+1)
	}
	return out
}

// consume reads each partition from its start up to the offset end, which is
// exclusive, control records included. Every end must be reachable: a record or a
// control record that the isolation level shows lies right in front of it, or
// compaction would have it wait until ctx is done.
func (r *reader) consume(ctx context.Context, ends map[string]map[int32]int64, isolation kgo.IsolationLevel) ([]*kgo.Record, error) {
	assign := map[string]map[int32]kgo.Offset{}
	left := map[partitionID]int64{}
	for topic, partitions := range ends {
		if _, ok := r.partitions[topic]; !ok {
			continue
		}
		for partition, end := range partitions {
			if start := r.starts[topic][partition]; end > start {
				if assign[topic] == nil {
					assign[topic] = map[int32]kgo.Offset{}
				}
				assign[topic][partition] = kgo.NewOffset().At(start)
				left[partitionID{topic, partition}] = end
			}
		}
	}
	if len(left) == 0 {
		return nil, nil
	}
	client, err := kgo.NewClient(append(slices.Clone(r.opts), kgo.ConsumePartitions(assign),
		kgo.FetchIsolationLevel(isolation), kgo.KeepControlRecords())...)
	if err != nil {
		return nil, fmt.Errorf("make Kafka consumer: %w", err)
	}
	defer client.Close()
	var out []*kgo.Record
	for len(left) > 0 {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return nil, fmt.Errorf("%d partitions not read to their end, %v among them: %w", len(left), slices.Collect(maps.Keys(left))[0], err)
		}
		fetches.EachRecord(func(rec *kgo.Record) {
			id := partitionID{rec.Topic, rec.Partition}
			end, ok := left[id]
			if !ok || rec.Offset >= end {
				return // written since
			}
			out = append(out, rec)
			if rec.Offset == end-1 {
				delete(left, id)
			}
		})
	}
	return out, nil
}

// resolve drops the control records and marks each record with what became of its
// transaction. A transaction's records and its end stand in one partition in order,
// and one producer has one transaction open at a time.
func resolve(raw []*kgo.Record) []Record {
	type producer struct {
		partitionID
		id int64
	}
	open := map[producer][]int{}
	ended := map[partitionID]int{}
	var out []Record
	for _, rec := range raw { // in order within each partition
		id := partitionID{rec.Topic, rec.Partition}
		from := producer{id, rec.ProducerID}
		if rec.Attrs.IsControl() {
			if commit := controlCommits(rec.Key); commit {
				for _, i := range open[from] {
					out[i].Committed = true
				}
			}
			delete(open, from)
			ended[id]++
			continue
		}
		headers := make(map[string]string, len(rec.Headers))
		for _, h := range rec.Headers {
			headers[h.Key] = string(h.Value)
		}
		transactional := rec.Attrs.IsTransactional()
		out = append(out, Record{Topic: rec.Topic, Partition: rec.Partition, Offset: rec.Offset, Key: rec.Key, Value: rec.Value,
			Headers: headers, Committed: !transactional, ProducerID: rec.ProducerID, ProducerEpoch: rec.ProducerEpoch, Segment: ended[id]})
		if transactional {
			open[from] = append(open[from], len(out)-1)
		}
	}
	return out
}

// controlCommits reads a control record's key: version and type, two bytes each;
// type 1 is a commit (Kafka's ControlRecordType).
func controlCommits(key []byte) bool {
	return len(key) >= 4 && binary.BigEndian.Uint16(key[2:]) == 1
}

// agree compares what was worked out with what a read_committed consumer was given.
func agree(want []Record, got []*kgo.Record) error {
	type place struct {
		partitionID
		offset int64
	}
	given := map[place]bool{}
	for _, r := range got {
		if !r.Attrs.IsControl() {
			given[place{partitionID{r.Topic, r.Partition}, r.Offset}] = true
		}
	}
	var errs []error
	for i := range want {
		at := place{partitionID{want[i].Topic, want[i].Partition}, want[i].Offset}
		if !given[at] {
			errs = append(errs, fmt.Errorf("%s is committed, but a read_committed consumer is not given it", want[i].Where()))
		}
		delete(given, at)
	}
	for at := range given {
		errs = append(errs, fmt.Errorf("%s[%d]@%d is not committed, but a read_committed consumer is given it", at.topic, at.partition, at.offset))
	}
	return errors.Join(errs...)
}

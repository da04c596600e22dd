package kafka

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// fetchBytes bounds one answer. A broker always sends at least one batch, however
// large, so a larger state record is read too.
const fetchBytes = 1 << 20

// isolation levels, as the protocol numbers them.
const (
	readUncommitted int8 = 0
	readCommitted   int8 = 1
)

// Timestamps that ask ListOffsets for an end of the log.
const (
	latest   int64 = -1 // the last stable offset for readCommitted, else the high watermark
	earliest int64 = -2
)

// span is what the log held at one moment.
type span struct {
	start int64 // log start offset
	end   int64 // high watermark; everything below it is stable
}

// stableSpan lists the log's offsets once no transaction is open below its end.
//
// The end is taken first and then waited for: a foreign producer that goes on
// writing moves the end on, but not the one taken. ListOffsets, unlike the
// watermark in a fetch, is not answered by a new leader before it knows the
// committed end (KIP-207), so nothing committed lies behind it.
func (s *Store) stableSpan(ctx context.Context) (span, error) {
	var sp span
	var err error
	if sp.start, err = s.offset(ctx, earliest, readUncommitted); err != nil {
		return sp, err
	}
	if sp.end, err = s.offset(ctx, latest, readUncommitted); err != nil {
		return sp, err
	}
	deadline := time.Now().Add(s.o.StableTimeout)
	for {
		stable, err := s.offset(ctx, latest, readCommitted)
		if err != nil {
			return sp, err
		}
		if stable >= sp.end {
			return sp, nil
		}
		if time.Now().After(deadline) {
			return sp, fmt.Errorf("%w: %s is stable up to offset %d and ends at %d after %s (find it with kafka-transactions.sh find-hanging, and end whatever else writes there)",
				ErrOpenTransaction, s.o.Topic, stable, sp.end, s.o.StableTimeout)
		}
		if err := pause(ctx); err != nil {
			return sp, err
		}
	}
}

// offset asks for the first or last offset of partition 0.
func (s *Store) offset(ctx context.Context, timestamp int64, isolation int8) (offset int64, err error) {
	rp := kmsg.NewListOffsetsRequestTopicPartition()
	rp.Timestamp = timestamp
	rt := kmsg.NewListOffsetsRequestTopic()
	rt.Topic = s.o.Topic
	rt.Partitions = append(rt.Partitions, rp)
	req := kmsg.NewPtrListOffsetsRequest()
	req.IsolationLevel = isolation
	req.Topics = append(req.Topics, rt)
	err = s.ask(ctx, func() kmsg.Request { return req }, func(kresp kmsg.Response) error {
		resp := kresp.(*kmsg.ListOffsetsResponse)
		if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
			return fmt.Errorf("the broker answered for %d topics instead of one partition of one", len(resp.Topics))
		}
		p := &resp.Topics[0].Partitions[0]
		offset = p.Offset
		return kerr.ErrorForCode(p.ErrorCode)
	})
	if err != nil {
		return 0, fmt.Errorf("list offsets of checkpoint topic %s: %w", s.o.Topic, err)
	}
	return offset, nil
}

// ask sends a request to the partition's leader and gives the answer to read,
// again with the leader looked up anew while either says that a repeat may help.
func (s *Store) ask(ctx context.Context, request func() kmsg.Request, read func(kmsg.Response) error) error {
	deadline := time.Now().Add(leaderTimeout)
	for {
		err := s.askOnce(ctx, request, read)
		if err == nil {
			return nil
		}
		// A request that took too long is like a leader that is gone.
		again := kerr.IsRetriable(err) || errors.Is(err, context.DeadlineExceeded)
		if !again || ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
		s.leader = -1
		if err := pause(ctx); err != nil {
			return err
		}
	}
}

func (s *Store) askOnce(ctx context.Context, request func() kmsg.Request, read func(kmsg.Response) error) error {
	if s.leader < 0 {
		if _, err := s.awaitLeader(ctx); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := s.cl.Broker(int(s.leader)).RetriableRequest(ctx, request())
	if err != nil {
		return err
	}
	return read(resp)
}

// scan gives fn the records in [from, to) in the order of the log until fn returns
// false or an error. read_committed leaves out what was aborted; control tells
// whether markers are given too. to must not be above the log's stable end.
func (s *Store) scan(ctx context.Context, from, to int64, isolation int8, control bool, fn func(*kgo.Record) (more bool, err error)) error {
	deadline := time.Now().Add(leaderTimeout)
	for from < to {
		fp, next, err := s.fetch(ctx, from, isolation, control)
		if err != nil {
			return fmt.Errorf("read checkpoint topic %s at offset %d: %w", s.o.Topic, from, err)
		}
		for _, r := range fp.Records {
			if r.Offset >= to {
				return nil
			}
			if more, err := fn(r); err != nil || !more {
				return err
			}
		}
		if next > from {
			from, deadline = next, time.Now().Add(leaderTimeout)
			continue
		}
		// Nothing, though to was listed: a new leader has not learned its watermark yet.
		if time.Now().After(deadline) {
			return fmt.Errorf("read checkpoint topic %s: nothing at offset %d after %s though the log ends at %d (see the brokers of the topic)", s.o.Topic, from, leaderTimeout, to)
		}
		if err := pause(ctx); err != nil {
			return err
		}
	}
	return nil
}

// fetch reads some records from offset on, and gives the offset to go on with. It
// speaks the protocol itself: a consumer would need a client of its own for each
// range, and prefetches beyond it.
func (s *Store) fetch(ctx context.Context, offset int64, isolation int8, control bool) (fp kgo.FetchPartition, next int64, err error) {
	opts := kgo.ProcessFetchPartitionOpts{KeepControlRecords: control, Offset: offset, Topic: s.o.Topic, IsolationLevel: kgo.ReadUncommitted()}
	if isolation == readCommitted {
		opts.IsolationLevel = kgo.ReadCommitted()
	}
	err = s.ask(ctx, func() kmsg.Request { return s.fetchRequest(offset, isolation) }, func(kresp kmsg.Response) error {
		resp := kresp.(*kmsg.FetchResponse)
		if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
			return err
		}
		if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
			return fmt.Errorf("the broker answered for %d topics instead of one partition of one", len(resp.Topics))
		}
		p := &resp.Topics[0].Partitions[0]
		s.stats.fetches++
		s.stats.bytes += len(p.RecordBatches)
		fp, next = kgo.ProcessFetchPartition(opts, p, s.decompressor, nil)
		return fp.Err // holds the partition's error code too
	})
	return fp, next, err
}

// fetchRequest addresses the topic by name and id: which of them is sent depends on
// the version that the broker takes.
func (s *Store) fetchRequest(offset int64, isolation int8) *kmsg.FetchRequest {
	rp := kmsg.NewFetchRequestTopicPartition()
	rp.FetchOffset = offset
	rp.PartitionMaxBytes = fetchBytes
	rt := kmsg.NewFetchRequestTopic()
	rt.Topic, rt.TopicID = s.o.Topic, s.id
	rt.Partitions = append(rt.Partitions, rp)
	req := kmsg.NewPtrFetchRequest()
	req.MinBytes, req.MaxBytes = 1, fetchBytes
	req.MaxWaitMillis = int32(pollInterval / time.Millisecond)
	req.IsolationLevel = isolation
	req.SessionEpoch = -1 // no fetch session
	req.Topics = append(req.Topics, rt)
	return req
}

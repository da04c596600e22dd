package kafka

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
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
	if sp.start, err = s.offset(ctx, "start", s.adm.ListStartOffsets); err != nil {
		return sp, err
	}
	if sp.end, err = s.offset(ctx, "end", s.adm.ListEndOffsets); err != nil {
		return sp, err
	}
	deadline := time.Now().Add(s.o.StableTimeout)
	for {
		stable, err := s.offset(ctx, "last stable", s.adm.ListCommittedOffsets)
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

// offset asks for one offset of partition 0, again while the partition moves.
func (s *Store) offset(ctx context.Context, which string, list func(context.Context, ...string) (kadm.ListedOffsets, error)) (int64, error) {
	deadline := time.Now().Add(leaderTimeout)
	for {
		listed, err := list(ctx, s.o.Topic)
		if err == nil {
			o, ok := listed.Lookup(s.o.Topic, 0)
			if !ok {
				o, ok = listed.Lookup(s.o.Topic, -1)
			}
			if !ok {
				err = kerr.UnknownTopicOrPartition
			} else if o.Err == nil {
				return o.Offset, nil
			} else {
				err = o.Err
			}
		}
		if !kerr.IsRetriable(err) || time.Now().After(deadline) {
			return 0, fmt.Errorf("list %s offset of checkpoint topic %s: %w", which, s.o.Topic, err)
		}
		if err := pause(ctx); err != nil {
			return 0, err
		}
	}
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
func (s *Store) fetch(ctx context.Context, offset int64, isolation int8, control bool) (kgo.FetchPartition, int64, error) {
	deadline := time.Now().Add(leaderTimeout)
	for {
		rp, err := s.fetchOnce(ctx, offset, isolation)
		if err == nil {
			s.stats.fetches++
			s.stats.bytes += len(rp.RecordBatches)
			level := kgo.ReadUncommitted()
			if isolation == readCommitted {
				level = kgo.ReadCommitted()
			}
			fp, next := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{
				KeepControlRecords: control, Offset: offset, IsolationLevel: level, Topic: s.o.Topic,
			}, rp, s.decompressor, nil)
			if err = fp.Err; err == nil {
				return fp, next, nil
			}
		}
		// A request that took too long is like a leader that is gone.
		again := kerr.IsRetriable(err) || errors.Is(err, context.DeadlineExceeded)
		if !again || ctx.Err() != nil || time.Now().After(deadline) {
			return kgo.FetchPartition{}, 0, err
		}
		s.leader = -1
		if err := pause(ctx); err != nil {
			return kgo.FetchPartition{}, 0, err
		}
	}
}

func (s *Store) fetchOnce(ctx context.Context, offset int64, isolation int8) (*kmsg.FetchResponseTopicPartition, error) {
	if s.leader < 0 {
		if _, err := s.awaitLeader(ctx); err != nil {
			return nil, err
		}
	}
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

	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	kresp, err := s.cl.Broker(int(s.leader)).RetriableRequest(ctx, req)
	if err != nil {
		return nil, err
	}
	resp := kresp.(*kmsg.FetchResponse)
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return nil, err
	}
	if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
		return nil, fmt.Errorf("the broker answered for %d topics instead of one partition of one", len(resp.Topics))
	}
	p := &resp.Topics[0].Partitions[0]
	return p, kerr.ErrorForCode(p.ErrorCode)
}

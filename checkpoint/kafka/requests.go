package kafka

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
)

// Bounds of the look back for requests that is made once, by the first session after a
// connector came to a release that takes them: records read in all, and the offsets of
// one step.
const (
	lookBack     = 2_000
	lookBackStep = 1 << 9
)

// Request writes a request into the topic and gives its offset; it is there for good
// when that returns. No connector need run, and one that runs is not disturbed: the
// record is not part of a transaction. The client must be a plain one, which is
// idempotent and waits for all in-sync replicas.
//
// After an error the request may be there or not. To write it again with the same ID
// is harmless as long as it is not taken over.
func (s *Store) Request(ctx context.Context, r checkpoint.Request) (offset int64, err error) {
	if err := r.Check(); err != nil {
		return 0, fmt.Errorf("write request: %w", err)
	}
	rec := &kgo.Record{Topic: s.o.Topic, Key: []byte(checkpoint.RequestKey(r.ID)), Value: checkpoint.EncodeRequest(nil, &r)}
	if err := s.cl.ProduceSync(ctx, rec).FirstErr(); err != nil {
		return 0, fmt.Errorf("write request to checkpoint topic %s: %w (the user needs the ACL Write on it, and before Kafka 2.8 IdempotentWrite on the cluster)", s.o.Topic, err)
	}
	return rec.Offset, nil
}

// Requests gives the requests that were committed from the offset from on, in their
// order, and the offset to go on with. Transactions that are open hold back what was
// written behind their begin. Those removed since are left out.
//
// From 0, which is where a checkpoint stands that no release with requests has written
// yet, the log may be long. It is then read backwards from its end, 2,000 records and
// no more: only who asked for a snapshot while the previous release ran, and let that
// many deliveries pass before the connector was upgraded, has to ask again.
//
// One that cannot be read is a *checkpoint.Refusal.
func (s *Store) Requests(ctx context.Context, from int64) (list []checkpoint.Request, next int64, err error) {
	for range 3 {
		// See Load: the start of the log can move on meanwhile.
		if list, next, err = s.requests(ctx, from); !errors.Is(err, kerr.OffsetOutOfRange) {
			break
		}
	}
	return list, next, err
}

func (s *Store) requests(ctx context.Context, from int64) (list []checkpoint.Request, next int64, err error) {
	end, err := s.offset(ctx, latest, readCommitted)
	if err != nil {
		return nil, from, err
	}
	if end <= from {
		return nil, from, nil
	}
	start, err := s.offset(ctx, earliest, readUncommitted)
	if err != nil {
		return nil, from, err
	}
	var found []*kgo.Record
	if from > 0 {
		found, _, err = s.requestRecords(ctx, max(from, start), end)
	} else {
		found, err = s.lastRequestRecords(ctx, start, end)
	}
	if err != nil {
		return nil, from, err
	}
	if list, err = s.decodeRequests(found); err != nil {
		return nil, from, err
	}
	return list, end, nil
}

// requestRecords gives the request records in [from, to), and how many records there
// are of any kind.
func (s *Store) requestRecords(ctx context.Context, from, to int64) (found []*kgo.Record, all int, err error) {
	err = s.scan(ctx, from, to, readCommitted, false, func(r *kgo.Record) (bool, error) {
		all++
		if _, ok := checkpoint.RequestID(r.Key); ok {
			found = append(found, r)
		}
		return true, nil
	})
	return found, all, err
}

// lastRequestRecords gives those among the last records of [start, end).
func (s *Store) lastRequestRecords(ctx context.Context, start, end int64) (found []*kgo.Record, err error) {
	for read := 0; end > start && read < lookBack; {
		from := max(start, end-lookBackStep)
		part, n, err := s.requestRecords(ctx, from, end)
		if err != nil {
			return nil, err
		}
		found = append(part, found...)
		read, end = read+n, from
	}
	return found, nil
}

// decodeRequests reads the newest record of each request, in the order of the log.
func (s *Store) decodeRequests(found []*kgo.Record) ([]checkpoint.Request, error) {
	newest := make(map[string]int64, len(found))
	for _, r := range found {
		newest[string(r.Key)] = r.Offset
	}
	var list []checkpoint.Request
	for _, r := range found {
		if r.Value == nil || newest[string(r.Key)] != r.Offset {
			continue
		}
		id, _ := checkpoint.RequestID(r.Key)
		req, err := checkpoint.DecodeRequest(id, r.Value)
		if err != nil {
			return nil, &checkpoint.Refusal{
				What:   fmt.Sprintf("the request at offset %d of checkpoint topic %s cannot be read", r.Offset, s.o.Topic),
				Risk:   "what it asks for would not be done",
				Remedy: fmt.Sprintf("run the release that wrote it, or remove it with a record that has its key, %s, and a null value", r.Key),
				Err:    err,
			}
		}
		list = append(list, req)
	}
	return list, nil
}

package kafka

import (
	"context"
	"fmt"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
)

// NoteBirth writes what is known of a slot that was just created; it is there for good when
// that returns. Like a request it is no part of a transaction, and says nothing of what was
// delivered.
func (s *Store) NoteBirth(ctx context.Context, b *checkpoint.Birth) error {
	rec := &kgo.Record{Topic: s.o.Topic, Key: []byte(checkpoint.KeySlot), Value: checkpoint.EncodeBirth(nil, b)}
	if err := s.cl.ProduceSync(ctx, rec).FirstErr(); err != nil {
		return fmt.Errorf("write the slot's creation to checkpoint topic %s: %w", s.o.Topic, err)
	}
	return nil
}

// Birth gives the newest such record, nil where there is none. They come before the first
// checkpoint, so that it reads the beginning of the log.
func (s *Store) Birth(ctx context.Context) (b *checkpoint.Birth, err error) {
	start, err := s.offset(ctx, earliest, readUncommitted)
	if err != nil {
		return nil, err
	}
	end, err := s.offset(ctx, latest, readCommitted)
	if err != nil {
		return nil, err
	}
	err = s.scan(ctx, start, end, readCommitted, false, func(r *kgo.Record) (bool, error) {
		if string(r.Key) != checkpoint.KeySlot {
			return string(r.Key) != checkpoint.KeyPosition, nil
		}
		if b, err = checkpoint.DecodeBirth(r.Value); err != nil {
			return false, fmt.Errorf("offset %d of checkpoint topic %s: %w", r.Offset, s.o.Topic, err)
		}
		return true, nil
	})
	return b, err
}

package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/snapshot"
)

// verdict is what an error that ended a session means.
type verdict uint8

const (
	retry   verdict = iota // wait, then start over from the checkpoint
	restart                // start over at once
	fatal                  // end: a retry would meet it again
)

// classify is the one place that decides what an error means; the reason is the label
// of walrelay_restarts_total.
func (r *Relay) classify(err error) (verdict, string) {
	var (
		stop     *router.StopError
		protocol *replication.ProtocolError
		kafka    *kafkaError
		altered  *replication.AlteredError
	)
	switch {
	case errors.Is(err, checkpoint.ErrBroken):
		return fatal, "bug"
	case errors.Is(err, errPublicationsReady):
		return restart, "publication"
	case errors.Is(err, errNewOutbox):
		return restart, "outbox"
	case checkpoint.IsRefusal(err):
		return fatal, "refused"
	case errors.Is(err, snapshot.ErrBroken):
		return retry, "snapshot"
	case errors.As(err, &stop), errors.As(err, &protocol):
		return fatal, "change"
	case errors.Is(err, router.ErrFenced):
		if r.o.ExitOnFenced {
			return fatal, "fenced"
		}
		return retry, "fenced"
	case errors.Is(err, router.ErrUnknownOutcome):
		return retry, "unknown-outcome"
	case replication.IsConfiguration(err):
		if !r.sourceSeen {
			return fatal, "source"
		}
		return retry, "source"
	case replication.PublicationTooYoung(err):
		return fatal, "refused"
	case replication.DecodingFailed(err):
		return fatal, "decoding"
	case replication.IsServer(err), errors.As(err, &altered):
		return retry, "source"
	case errors.Is(err, ckafka.ErrOpenTransaction):
		return retry, "open-transaction"
	case errors.As(err, &kafka):
		if !r.kafkaSeen && router.IsConfiguration(err) {
			return fatal, "kafka"
		}
		return retry, "kafka"
	case isNetwork(err):
		return retry, "connection"
	case errors.Is(err, context.DeadlineExceeded):
		return retry, "timeout"
	}
	return fatal, "bug"
}

// kafkaError marks an error of work with Kafka. The client has many errors that are no
// answer of a broker; all of them may pass.
type kafkaError struct{ err error }

func (e *kafkaError) Error() string { return e.err.Error() }
func (e *kafkaError) Unwrap() error { return e.err }

func onKafka(err error) error {
	if err == nil {
		return nil
	}
	return &kafkaError{err}
}

func isNetwork(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || replication.IsTimeout(err) || strings.Contains(err.Error(), "conn closed")
}

// backoff waits longer from time to time, with jitter.
type backoff struct{ first, most, next time.Duration }

func newBackoff(first, most time.Duration) *backoff {
	return &backoff{first: first, most: most, next: first}
}

func (b *backoff) reset() { b.next = b.first }

// sleep waits; its error is the cause of ctx's end.
func (b *backoff) sleep(ctx context.Context) error {
	d := b.next/2 + rand.N(b.next/2+1)
	b.next = min(2*b.next, b.most)
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stopped while waiting to try again: %w", context.Cause(ctx))
	}
}

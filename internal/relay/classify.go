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

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
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
		pgErr    *pgconn.PgError
	)
	switch {
	case errors.Is(err, errPublicationsReady):
		return restart, "publication"
	case checkpoint.IsRefusal(err):
		return fatal, "refused"
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
	case errors.As(err, &pgErr):
		if decodingFailed(pgErr) {
			return fatal, "decoding"
		}
		return retry, "source"
	case errors.Is(err, ckafka.ErrOpenTransaction):
		return retry, "open-transaction"
	case isKafka(err):
		if !r.kafkaSeen && kafkaConfiguration(err) {
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

// decodingFailed tells that the server cannot decode the WAL at this place, so that
// every retry meets the same error: it comes from within the output plugin, and it is
// about data and not about the connection.
func decodingFailed(e *pgconn.PgError) bool {
	if !strings.Contains(e.Where, "output plugin") {
		return false
	}
	class := e.Code[:min(2, len(e.Code))]
	switch class {
	case "57", "53", "08", "58": // shutdown, resources, connection, I/O
		return false
	}
	return true
}

// isKafka tells whether the error came from the Kafka side.
func isKafka(err error) bool {
	var ke *kerr.Error
	var ge *kgo.ErrGroupSession
	return errors.As(err, &ke) || errors.As(err, &ge) || errors.Is(err, kgo.ErrClientClosed) ||
		errors.Is(err, kgo.ErrRecordTimeout) || errors.Is(err, kgo.ErrRecordRetries) || strings.Contains(err.Error(), "Kafka")
}

// kafkaConfiguration tells whether Kafka cannot be reached for something that is
// written in the configuration.
func kafkaConfiguration(err error) bool {
	var dns *net.DNSError
	return errors.As(err, &dns) && dns.IsNotFound ||
		errors.Is(err, kerr.SaslAuthenticationFailed) || errors.Is(err, kerr.UnsupportedSaslMechanism) ||
		errors.Is(err, kerr.ClusterAuthorizationFailed) || errors.Is(err, kerr.TransactionalIDAuthorizationFailed)
}

func isNetwork(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || pgconn.Timeout(err) || strings.Contains(err.Error(), "conn closed")
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

package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

func TestEveryErrorHasOneMeaning(t *testing.T) {
	seen := &Relay{sourceSeen: true, kafkaSeen: true}
	exits := &Relay{sourceSeen: true, kafkaSeen: true, o: Options{ExitOnFenced: true}}
	fresh := &Relay{}
	plugin := `slot "walrelay_shop", output plugin "pgoutput", in the change callback, associated LSN 0/1`
	unknownHost := &net.DNSError{Err: "no such host", Name: "nowhere", IsNotFound: true}
	for _, tt := range []struct {
		name   string
		relay  *Relay
		err    error
		want   verdict
		reason string
	}{
		{"a refusal ends the run", seen, fmt.Errorf("start: %w", &checkpoint.Refusal{What: "x"}), fatal, "refused"},
		{"a refusal from Kafka's side too", seen, onKafka(&checkpoint.Refusal{What: "x"}), fatal, "refused"},
		{"a broken position is a bug", seen, onKafka(fmt.Errorf("write: %w", checkpoint.ErrBroken)), fatal, "bug"},
		{"a change that may not be a dead letter ends the run", seen, &router.StopError{Err: io.EOF}, fatal, "change"},
		{"a message that is not the protocol's ends the run", seen, &replication.ProtocolError{}, fatal, "change"},
		{"fenced: stand by", seen, onKafka(fmt.Errorf("commit: %w", router.ErrFenced)), retry, "fenced"},
		{"fenced: exit where that is wanted", exits, onKafka(fmt.Errorf("commit: %w", router.ErrFenced)), fatal, "fenced"},
		{"an unknown outcome starts over", exits, onKafka(fmt.Errorf("commit: %w: %w", router.ErrUnknownOutcome, io.EOF)), retry, "unknown-outcome"},
		{"a wrong password ends a start", fresh, fmt.Errorf("connect: %w", replication.ErrAuth), fatal, "source"},
		{"and is waited out later", seen, fmt.Errorf("connect: %w", replication.ErrAuth), retry, "source"},
		{"WAL that cannot be decoded ends the run", seen, &pgconn.PgError{Code: "XX000", Where: plugin}, fatal, "decoding"},
		{"so does a change of a table that the server does not find", seen, &pgconn.PgError{Code: "XX000", Routine: "ReorderBufferProcessTXN"}, fatal, "decoding"},
		{"tables that are altered whenever a slot is created are waited out", fresh, fmt.Errorf("create: %w", &replication.AlteredError{}), retry, "source"},
		{"a server that goes down while it decodes is waited for", seen, &pgconn.PgError{Code: "57P01", Where: plugin}, retry, "source"},
		{"a server's other errors are waited out", seen, &pgconn.PgError{Code: "57P03"}, retry, "source"},
		{"an unknown Kafka host ends a start", fresh, onKafka(unknownHost), fatal, "kafka"},
		{"and is waited out later", seen, onKafka(unknownHost), retry, "kafka"},
		{"wrong Kafka credentials end a start", fresh, onKafka(fmt.Errorf("ping: %w", kerr.SaslAuthenticationFailed)), fatal, "kafka"},
		{"any other error of the Kafka client passes", fresh, onKafka(errors.New("whatever the client says")), retry, "kafka"},
		{"another producer's open transaction may end", seen, onKafka(fmt.Errorf("load: %w", ckafka.ErrOpenTransaction)), retry, "open-transaction"},
		{"a lost connection starts over", seen, fmt.Errorf("read: %w", io.ErrUnexpectedEOF), retry, "connection"},
		{"a refused connection starts over", fresh, &net.OpError{Op: "dial", Err: errors.New("refused")}, retry, "connection"},
		{"a publication that can be named starts over at once", seen, errPublicationsReady, restart, "publication"},
		{"so does an outbox table that is new", seen, errNewOutbox, restart, "outbox"},
		{"what nobody thought of is a bug", seen, errors.New("what nobody thought of"), fatal, "bug"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, reason := tt.relay.classify(tt.err); got != tt.want || reason != tt.reason {
				t.Errorf("verdict %d, %s; want %d, %s", got, reason, tt.want, tt.reason)
			}
		})
	}
}

func TestBackoffGrowsToItsMostAndEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBackoff(100*time.Millisecond, time.Second)
		for _, most := range []time.Duration{100, 200, 400, 800, 1000, 1000} {
			begun := time.Now()
			if err := b.sleep(t.Context()); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(begun); took > most*time.Millisecond || took < most*time.Millisecond/2 {
				t.Errorf("waited %v, want between half of %v ms and that", took, int(most))
			}
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		stopped := errors.New("stopped by signal")
		cancel(stopped)
		if err := b.sleep(ctx); !errors.Is(err, stopped) {
			t.Errorf("error %v, want the cause of the end", err)
		}
	})
}

package e2e

import (
	"context"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/cdctest"
)

// stand is the world that a test runs in: an empty database, a Kafka with no topics
// of this test, and one connector between them, configured with topics.prefix
// "shop", 6 partitions, every table, public.outbox as outbox, every message, and
// every event of public.outbox routed to its default topic.
//
// Everything that it starts ends with the test.
type stand interface {
	// DSN is a superuser's, of the database.
	DSN() string
	// Kafka gives the options of a client that reads the topics, past any proxy.
	Kafka() []kgo.Opt
	// Start runs the binary ("walrelay run -c FILE" and args) with extra environment
	// variables. It returns once the process exists.
	Start(t *testing.T, env []string, args ...string) process
	// Streaming waits until p holds the slot. It fails where p ends before.
	Streaming(ctx context.Context, p process) error
	// Faults are those of the servers and the network between, beside those of the
	// process, which the test knows itself.
	Faults() []cdctest.Fault
}

// process is a running binary.
type process interface {
	// Kill sends SIGKILL and waits for the end.
	Kill() error
	// Pause and Resume send SIGSTOP and SIGCONT.
	Pause() error
	Resume() error
	// Terminate sends SIGTERM and waits; an exit code other than 0 is an error.
	Terminate(ctx context.Context) error
	// Wait waits for the end; an exit code other than 0 or a signal is an error.
	Wait(ctx context.Context) error
	// Ended tells whether the process has ended.
	Ended() bool
	// KilledBySignal tells whether the process, which has ended, was ended by SIGKILL.
	KilledBySignal() bool
	// Stderr gives the end of its log, for a failure's message.
	Stderr() string
}

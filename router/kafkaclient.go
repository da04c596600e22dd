package router

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"time"

	"github.com/rs/zerolog"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
)

// ClientOptions says how Kafka is reached; every client of the process has them.
type ClientOptions struct {
	Brokers []string
	TLS     *tls.Config    // nil: plain text
	SASL    sasl.Mechanism // nil: none
	Logger  zerolog.Logger
	// Dial replaces the dialer, for tests that cut or delay a connection.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

const (
	// dialTimeout is short, because the client goes on to the next broker.
	dialTimeout = 5 * time.Second
	// requestOverhead is what a broker may take beyond a request's own timeout before
	// the connection counts as dead.
	requestOverhead = 10 * time.Second
)

// Opts are the options that every client shares.
func (o ClientOptions) Opts() []kgo.Opt {
	opts := []kgo.Opt{
		kgo.SeedBrokers(o.Brokers...),
		kgo.ClientID("walrelay"),
		kgo.SoftwareNameAndVersion("walrelay", "1"),
		kgo.WithLogger(clientLogger{o.Logger}),
		kgo.RequestTimeoutOverhead(requestOverhead),
	}
	dialer := &net.Dialer{Timeout: dialTimeout, KeepAlive: 15 * time.Second}
	switch {
	case o.Dial != nil:
		opts = append(opts, kgo.Dialer(o.Dial))
	case o.TLS != nil:
		opts = append(opts, kgo.Dialer((&tls.Dialer{NetDialer: dialer, Config: o.TLS}).DialContext))
	default:
		opts = append(opts, kgo.Dialer(dialer.DialContext))
	}
	if o.SASL != nil {
		opts = append(opts, kgo.SASL(o.SASL))
	}
	return opts
}

// NewAdminClient makes a client for metadata, topics and the checkpoint topic; it has
// no transactional id and produces nothing. A request gives up after a few tries, so
// that whoever asked can say that Kafka is not there.
func NewAdminClient(o ClientOptions) (*kgo.Client, error) {
	client, err := kgo.NewClient(append(o.Opts(), kgo.RetryTimeout(adminRetryTimeout))...)
	if err != nil {
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	return client, nil
}

// adminRetryTimeout bounds the retries of one administrative request.
const adminRetryTimeout = 15 * time.Second

// clientLogger hands the client's log to ours. What the client calls information and
// warning is its daily bread (a broker's restart makes hundreds of lines), so it is
// debug here; whatever matters comes back as an error and is logged, once, by whoever
// asked.
type clientLogger struct{ log zerolog.Logger }

// Level tells the client what to bother with.
func (l clientLogger) Level() kgo.LogLevel {
	switch l.log.GetLevel() {
	case zerolog.TraceLevel:
		return kgo.LogLevelDebug
	case zerolog.DebugLevel:
		return kgo.LogLevelInfo
	}
	return kgo.LogLevelNone
}

// Log writes one line of the client.
func (l clientLogger) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	e := l.log.Debug()
	if level == kgo.LogLevelDebug {
		e = l.log.Trace()
	}
	for i := 0; i+1 < len(keyvals); i += 2 {
		key := fmt.Sprint(keyvals[i])
		switch v := keyvals[i+1].(type) {
		case error:
			e = e.AnErr(key, v)
		case string:
			e = e.Str(key, v)
		case fmt.Stringer:
			e = e.Stringer(key, v)
		default:
			e = e.Interface(key, v)
		}
	}
	e.Msg(msg)
}

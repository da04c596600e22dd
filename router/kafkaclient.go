package router

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/aws"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// Timeouts of every client. A broker that does not answer within requestTimeout is
// taken for gone and another one is asked, so that a leader's death costs seconds
// and not the client's default of nearly a minute; how long to go on trying in all
// is the relay's decision, which starts over with back-off.
const (
	dialTimeout    = 5 * time.Second
	requestTimeout = 10 * time.Second
	retryTimeout   = 30 * time.Second
)

// ClientOptions is what all Kafka clients of a process share. The secrets in it
// stay in it: nothing here prints them.
type ClientOptions struct {
	Brokers  []string         // host:port of some brokers; the others are learned from them
	ClientID string           // shown in the brokers' logs and quotas
	TLS      *tls.Config      // nil for plain text
	SASL     []sasl.Mechanism // tried in order; none for no authentication
	Logger   zerolog.Logger   // the component's logger, for what the client does by itself
	Hooks    []kgo.Hook       // for example metrics; each client has them

	// Dial replaces the dialer, so that tests can put a faulty connection in between;
	// TLS is put on top of what it returns. Nil dials TCP.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Opts gives the options for kgo.NewClient. What a producer or a consumer needs
// comes on top; a later option wins.
func (o ClientOptions) Opts() []kgo.Opt {
	opts := []kgo.Opt{
		kgo.SeedBrokers(o.Brokers...),
		kgo.WithLogger(&kgoLogger{o.Logger}),
		kgo.DialTimeout(dialTimeout),
		kgo.RequestTimeoutOverhead(requestTimeout),
		kgo.RetryTimeout(retryTimeout),
		// How soon a moved leader is looked up; the client's default is five seconds.
		// Auto-creation is off by default: Catalog.Ensure creates topics as configured.
		kgo.MetadataMinAge(time.Second),
	}
	if o.ClientID != "" {
		opts = append(opts, kgo.ClientID(o.ClientID))
	}
	if len(o.SASL) > 0 {
		opts = append(opts, kgo.SASL(o.SASL...))
	}
	if len(o.Hooks) > 0 {
		opts = append(opts, kgo.WithHooks(o.Hooks...))
	}
	switch {
	case o.Dial != nil && o.TLS != nil:
		opts = append(opts, kgo.Dialer(o.dialTLS))
	case o.Dial != nil:
		opts = append(opts, kgo.Dialer(o.Dial))
	case o.TLS != nil:
		opts = append(opts, kgo.DialTLSConfig(o.TLS))
	}
	return opts
}

// dialTLS does what kgo does by itself where no dialer is given: the name that the
// certificate must have is the broker's, as the brokers advertise it.
func (o ClientOptions) dialTLS(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := o.Dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	cfg := o.TLS.Clone()
	if cfg.ServerName == "" {
		if cfg.ServerName, _, err = net.SplitHostPort(addr); err != nil {
			conn.Close()
			return nil, fmt.Errorf("split address %q of a broker: %w", addr, err)
		}
	}
	tlsConn := tls.Client(conn, cfg)
	if err := tlsConn.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, fmt.Errorf("TLS with broker %s: %w", addr, err)
	}
	return tlsConn, nil
}

// NewAdminClient makes the plain client, neither transactional nor consuming, that
// Catalog and the checkpoint store work on. It connects on first use. The caller
// closes it.
func NewAdminClient(o ClientOptions) (*kgo.Client, error) {
	cl, err := kgo.NewClient(o.Opts()...)
	if err != nil {
		return nil, fmt.Errorf("configure Kafka client: %w (see the keys under kafka)", err)
	}
	return cl, nil
}

// kgoLogger passes the client's own log on, lower than kgo has it: its info is a line per
// connection and transaction, its warnings one per attempt while a broker is away, of
// use only to who looks for a fault in the client. What matters comes back as an error,
// or as a delivery that takes too long, and is said once.
type kgoLogger struct{ log zerolog.Logger }

// Level gives the most talkative level that would be seen.
func (l *kgoLogger) Level() kgo.LogLevel {
	switch level := l.log.GetLevel(); {
	case level <= zerolog.TraceLevel:
		return kgo.LogLevelDebug
	case level == zerolog.DebugLevel:
		return kgo.LogLevelInfo
	case level <= zerolog.ErrorLevel:
		return kgo.LogLevelError
	default:
		return kgo.LogLevelNone
	}
}

// Log writes one line; facts become fields.
func (l *kgoLogger) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	var e *zerolog.Event
	switch level {
	case kgo.LogLevelError:
		e = l.log.Error()
	case kgo.LogLevelWarn, kgo.LogLevelInfo:
		e = l.log.Debug()
	case kgo.LogLevelDebug:
		e = l.log.Trace()
	default:
		return
	}
	if !e.Enabled() {
		return
	}
	for i := 0; i+1 < len(keyvals); i += 2 {
		key, ok := keyvals[i].(string)
		if !ok {
			key = fmt.Sprint(keyvals[i])
		}
		if secretKey(key) {
			e = e.Str(key, "***")
			continue
		}
		switch v := keyvals[i+1].(type) {
		case error:
			e = e.AnErr(key, v)
		case string:
			e = e.Str(key, v)
		case time.Duration:
			e = e.Str(key, v.String())
		case bool, int, int16, int32, int64, uint64:
			e = e.Interface(key, v)
		default:
			e = e.Str(key, fmt.Sprint(v))
		}
	}
	e.Msg(msg)
}

// secretKey is the last line of defence: kgo 1.22 logs no credentials, and a later
// one that did would say so in the key.
func secretKey(key string) bool {
	key = strings.ToLower(key)
	for _, s := range []string{"pass", "secret", "token", "credential"} {
		if strings.Contains(key, s) {
			return true
		}
	}
	return false
}

// Client is the Kafka client, for those who only hold one and pass it on.
type Client = kgo.Client

// SASLOptions are a user's credentials; which of them count depends on the mechanism.
type SASLOptions struct {
	Mechanism                          string // plain, scram-sha-256, scram-sha-512, oauthbearer or aws-msk-iam
	Username, Password                 string
	Token                              string // oauthbearer
	AccessKey, SecretKey, SessionToken string // aws-msk-iam
}

// Mechanisms gives what ClientOptions.SASL wants; none for an empty Mechanism.
func (o SASLOptions) Mechanisms() ([]sasl.Mechanism, error) {
	switch o.Mechanism {
	case "":
		return nil, nil
	case "plain":
		return []sasl.Mechanism{plain.Auth{User: o.Username, Pass: o.Password}.AsMechanism()}, nil
	case "scram-sha-256":
		return []sasl.Mechanism{scram.Auth{User: o.Username, Pass: o.Password}.AsSha256Mechanism()}, nil
	case "scram-sha-512":
		return []sasl.Mechanism{scram.Auth{User: o.Username, Pass: o.Password}.AsSha512Mechanism()}, nil
	case "oauthbearer":
		return []sasl.Mechanism{oauth.Auth{Token: o.Token}.AsMechanism()}, nil
	case "aws-msk-iam":
		return []sasl.Mechanism{aws.Auth{AccessKey: o.AccessKey, SecretKey: o.SecretKey, SessionToken: o.SessionToken}.AsManagedStreamingIAMMechanism()}, nil
	}
	return nil, fmt.Errorf("SASL mechanism %q is not known", o.Mechanism)
}

// Compression gives the codec of a name of kafka.compression; none for any other.
func Compression(name string) kgo.CompressionCodec {
	switch name {
	case "gzip":
		return kgo.GzipCompression()
	case "snappy":
		return kgo.SnappyCompression()
	case "lz4":
		return kgo.Lz4Compression()
	case "zstd":
		return kgo.ZstdCompression()
	}
	return kgo.NoCompression()
}

// IsConfiguration tells whether Kafka cannot be reached for something that is written
// in the configuration, so that a start ends instead of being retried.
func IsConfiguration(err error) bool {
	var dns *net.DNSError
	return errors.As(err, &dns) && dns.IsNotFound ||
		errors.Is(err, kerr.SaslAuthenticationFailed) || errors.Is(err, kerr.UnsupportedSaslMechanism) ||
		errors.Is(err, kerr.ClusterAuthorizationFailed) || errors.Is(err, kerr.TransactionalIDAuthorizationFailed)
}

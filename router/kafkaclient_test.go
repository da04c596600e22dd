package router

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// serverCert makes a self-signed certificate for 127.0.0.1 and a pool with it.
func serverCert(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tpl, tpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// lines is a log that may be written to from several goroutines.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestClientConnectsAsConfigured(t *testing.T) {
	const password = "s3cr3t-passw0rd"
	cert, pool := serverCert(t)
	mechanisms := []sasl.Mechanism{scram.Sha512(func(context.Context) (scram.Auth, error) {
		return scram.Auth{User: "walrelay", Pass: password}, nil
	})}
	var dials atomic.Int32
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		dials.Add(1)
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	login := []kfake.Opt{kfake.EnableSASL(), kfake.Superuser("SCRAM-SHA-512", "walrelay", password)}
	server := kfake.TLS(&tls.Config{Certificates: []tls.Certificate{cert}})
	for name, tt := range map[string]struct {
		kafka []kfake.Opt
		o     ClientOptions
		dials bool
	}{
		"plain":               {nil, ClientOptions{}, false},
		"dialer":              {nil, ClientOptions{Dial: dial}, true},
		"TLS and SASL":        {append(login, server), ClientOptions{TLS: &tls.Config{RootCAs: pool}, SASL: mechanisms}, false},
		"TLS, SASL, a dialer": {append(login, server), ClientOptions{TLS: &tls.Config{RootCAs: pool}, SASL: mechanisms, Dial: dial}, true},
	} {
		t.Run(name, func(t *testing.T) {
			k, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(1)}, tt.kafka...)...)
			if err != nil {
				t.Fatal(err)
			}
			defer k.Close()
			log := &lines{}
			tt.o.Brokers, tt.o.Logger = k.ListenAddrs(), zerolog.New(log).Level(zerolog.TraceLevel)
			dials.Store(0)
			cl, err := NewAdminClient(tt.o)
			if err != nil {
				t.Fatal(err)
			}
			defer cl.Close()
			if err := cl.Ping(t.Context()); err != nil {
				t.Fatal(err)
			}
			if (dials.Load() > 0) != tt.dials {
				t.Errorf("the given dialer dialed %d times", dials.Load())
			}
			if log.String() == "" || strings.Contains(log.String(), password) {
				t.Errorf("the client's log is empty or holds the password: %s", log)
			}
		})
	}
}

func TestClientRefusesAnotherCertificate(t *testing.T) {
	cert, _ := serverCert(t)
	_, otherPool := serverCert(t)
	k, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.TLS(&tls.Config{Certificates: []tls.Certificate{cert}}))
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	cl, err := NewAdminClient(ClientOptions{Brokers: k.ListenAddrs(), TLS: &tls.Config{RootCAs: otherPool}, Dial: new(net.Dialer).DialContext})
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := cl.Ping(ctx); err == nil {
		t.Error("a certificate of an unknown authority must not do")
	}
}

func TestClientLogLevels(t *testing.T) {
	for _, tt := range []struct {
		at   zerolog.Level
		want kgo.LogLevel
		seen string // of one line a level
	}{
		{zerolog.TraceLevel, kgo.LogLevelDebug, "error debug debug trace"},
		{zerolog.DebugLevel, kgo.LogLevelInfo, "error debug debug"},
		{zerolog.InfoLevel, kgo.LogLevelError, "error"},
		{zerolog.WarnLevel, kgo.LogLevelError, "error"},
		{zerolog.ErrorLevel, kgo.LogLevelError, "error"},
		{zerolog.Disabled, kgo.LogLevelNone, ""},
	} {
		var out bytes.Buffer
		l := &kgoLogger{zerolog.New(&out).Level(tt.at)}
		if got := l.Level(); got != tt.want {
			t.Errorf("at %s kgo logs at %s, want %s", tt.at, got, tt.want)
		}
		for _, level := range []kgo.LogLevel{kgo.LogLevelError, kgo.LogLevelWarn, kgo.LogLevelInfo, kgo.LogLevelDebug} {
			l.Log(level, "m")
		}
		var seen []string
		for line := range strings.Lines(out.String()) {
			seen = append(seen, strings.Split(line, `"`)[3])
		}
		if got := strings.Join(seen, " "); got != tt.seen {
			t.Errorf("at %s: %q, want %q", tt.at, got, tt.seen)
		}
	}
}

func TestClientLogFields(t *testing.T) {
	var out bytes.Buffer
	l := &kgoLogger{zerolog.New(&out)}
	l.Log(kgo.LogLevelWarn, "msg", "err", errors.New("e"), "n", int32(5), "took", 2*time.Second, "ok", true, "list", []int{1}, "sasl_password", "x", "odd")
	want := `{"level":"debug","err":"e","n":5,"took":"2s","ok":true,"list":"[1]","sasl_password":"***","message":"msg"}` + "\n"
	if out.String() != want {
		t.Errorf("got  %swant %s", &out, want)
	}
}

package admin

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/walrelay/walrelay/internal/config"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what must happen.
const patience = 20 * time.Second

// lines is a log that can be read while it is written.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{} // told of each line
}

func newLines() *lines { return &lines{more: make(chan struct{}, 100)} }

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case l.more <- struct{}{}:
	default:
	}
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// waitFor waits until the log contains text.
func (l *lines) waitFor(t *testing.T, text string) {
	t.Helper()
	deadline := time.After(patience)
	for !strings.Contains(l.String(), text) {
		select {
		case <-l.more:
		case <-deadline:
			t.Fatalf("no %q in the log:\n%s", text, l)
		}
	}
}

// start runs the server on a free port until the test ends, and returns its URL
// and a function that stops it and returns what Run returned.
func start(t *testing.T, o Options) (string, func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	listening := make(chan net.Addr, 1)
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
	o.OnListen = func(a net.Addr) { listening <- a }
	done := make(chan error, 1)
	go func() { done <- Run(ctx, o) }()
	stop := sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(patience):
			return errors.New("Run did not return")
		}
	})
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	select {
	case a := <-listening:
		return "http://" + a.String(), stop
	case <-time.After(patience):
		t.Fatal("the server does not listen")
		return "", nil
	}
}

// get returns status, body and headers of one request.
func get(t *testing.T, method, url, auth string) (int, string, http.Header) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if auth != "" {
		req.Header.Set("Authorization", auth)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body), resp.Header
}

func TestPages(t *testing.T) {
	registry := prometheus.NewRegistry()
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "walrelay_tests_total", Help: "Tests."})
	registry.MustRegister(counter)
	counter.Add(3)
	url, _ := start(t, Options{
		Gatherer: registry, Logger: zerolog.Nop(),
		Status: func() any { return map[string]any{"phase": "streaming"} },
		Ready:  func() error { return errors.New("waiting for the slot") },
	})
	for _, c := range []struct {
		method, path string
		code         int
		body, kind   string
	}{
		{"GET", "/metrics", 200, "walrelay_tests_total 3", "text/plain"},
		{"GET", "/status", 200, `"phase": "streaming"`, "application/json"},
		{"GET", "/healthz", 200, "ok\n", "text/plain"},
		{"GET", "/readyz", 503, "not ok: waiting for the slot\n", "text/plain"},
		{"GET", "/", 200, "/status ", "text/plain"},
		{"HEAD", "/healthz", 200, "", "text/plain"},
		{"GET", "/else", 404, "", "text/plain"},
		{"POST", "/status", 405, "", "text/plain"},
	} {
		code, body, header := get(t, c.method, url+c.path, "")
		if code != c.code || !strings.Contains(body, c.body) || !strings.HasPrefix(header.Get("Content-Type"), c.kind) {
			t.Errorf("%s %s: %d %q %q", c.method, c.path, code, header.Get("Content-Type"), body)
		}
	}
}

func TestTokenIsAskedForByAllButTheProbes(t *testing.T) {
	url, _ := start(t, Options{
		Token: config.NewSecret("s3cr3t-token"), Logger: zerolog.Nop(),
		Healthy: func() error { return errors.New("inner details") },
	})
	for path, open := range map[string]bool{"/metrics": false, "/status": false, "/": false, "/healthz": true, "/readyz": true} {
		for auth, right := range map[string]bool{
			"": false, "Bearer wrong": false, "Bearer": false, "Bearer s3cr3t-token2": false, "Basic s3cr3t-token": false,
			"Bearer s3cr3t-token": true, "bearer s3cr3t-token": true,
		} {
			code, body, _ := get(t, "GET", url+path, auth)
			if refused := code == http.StatusUnauthorized; refused == (open || right) {
				t.Errorf("%s with %q: %d", path, auth, code)
			}
			if strings.Contains(body, "s3cr3t") || strings.Contains(body, "inner details") {
				t.Errorf("%s with %q says %q", path, auth, body)
			}
		}
	}
}

func TestStatusWithoutAJSONFormIsAnError(t *testing.T) {
	log := newLines()
	url, _ := start(t, Options{Logger: zerolog.New(log), Status: func() any { return math.Inf(1) }})
	if code, body, _ := get(t, "GET", url+"/status", ""); code != 500 || !strings.Contains(body, "no JSON form") {
		t.Errorf("%d %q", code, body)
	}
	log.waitFor(t, "status has no JSON form")
}

func TestAddressInUseIsWaitedFor(t *testing.T) {
	var lc net.ListenConfig
	first, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	log := newLines()
	ctx, cancel := context.WithCancel(t.Context())
	listening := make(chan net.Addr, 1)
	done := make(chan error, 1)
	o := Options{Listen: first.Addr().String(), Logger: zerolog.New(log), OnListen: func(a net.Addr) { listening <- a }}
	go func() { done <- Run(ctx, o) }()
	log.waitFor(t, "admin address in use, trying again")
	select {
	case err := <-done:
		t.Fatalf("Run ended: %v", err)
	case <-listening:
		t.Fatal("listens beside the first")
	case <-time.After(2 * retryFirst): // one retry must have failed by now, without another word
	}
	_ = first.Close()
	select {
	case <-listening:
	case <-time.After(patience):
		t.Fatalf("does not take the address that became free:\n%s", log)
	}
	if n := strings.Count(log.String(), `"level":"warn"`); n != 1 {
		t.Errorf("%d warnings:\n%s", n, log)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestStopWhileTheAddressIsInUse(t *testing.T) {
	var lc net.ListenConfig
	first, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = first.Close() }()
	log := newLines()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, Options{Listen: first.Addr().String(), Logger: zerolog.New(log)}) }()
	log.waitFor(t, "in use")
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestOffAndWrongAddresses(t *testing.T) {
	if err := Run(t.Context(), Options{Logger: zerolog.Nop()}); err != nil {
		t.Errorf("turned off: %v", err)
	}
	err := Run(t.Context(), Options{Listen: "192.0.2.1:1", Logger: zerolog.Nop()}) // TEST-NET-1: nobody's address
	if err == nil || !strings.Contains(err.Error(), "admin.listen") {
		t.Errorf("an address that is not ours: %v", err)
	}
}

func TestRequestsInFlightAreAnsweredOnStop(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	url, stop := start(t, Options{Logger: zerolog.Nop(), Status: func() any {
		close(entered)
		<-leave
		return "late"
	}})
	answer := make(chan string, 1)
	go func() {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
		resp, err := client.Get(url + "/status") //nolint:noctx // ended by the client's timeout
		if err != nil {
			answer <- err.Error()
			return
		}
		defer func() { _ = resp.Body.Close() }()
		body, _ := io.ReadAll(resp.Body)
		answer <- string(body)
	}()
	<-entered
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	close(leave)
	if got := <-answer; got != "\"late\"\n" {
		t.Errorf("answer %q", got)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

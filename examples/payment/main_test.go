package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// provider charges at every POST: it has forgotten its idempotency keys, so that only who
// queries first charges once.
type provider struct {
	mu      sync.Mutex
	charges map[string]int // by idempotency key
	queries int            // that found a charge
	kill    int            // at this charge, counted over all, the consumer is killed
	total   int
	victim  *os.Process
}

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := r.Header.Get("Idempotency-Key")
	if r.Method == http.MethodGet {
		key = r.URL.Query().Get("key")
		if p.charges[key] == 0 {
			http.NotFound(w, r)
			return
		}
		p.queries++
	} else {
		p.charges[key]++
		p.total++
		if p.total == p.kill {
			// The charge is made, the answer never arrives.
			_ = p.victim.Kill()
			return
		}
	}
	fmt.Fprintf(w, `{"id": "ch-%s"}`, key)
}

func TestAKillBetweenChargeAndCommitChargesOnce(t *testing.T) {
	pg, kafka := harness.Postgres(t), harness.Kafka(t)
	program := filepath.Join(t.TempDir(), "payment")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
	p := &provider{charges: map[string]int{}, kill: 7}
	server := httptest.NewServer(p)
	defer server.Close()
	topic := "outbox.event." + kafka.Unique()
	client, err := kgo.NewClient(kgo.SeedBrokers(kafka.Brokers()...))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := kadm.NewClient(client).CreateTopic(t.Context(), 6, 1, nil, topic); err != nil {
		t.Fatal(err)
	}
	const events = 20
	for range 2 { // each is delivered twice
		for i := range events {
			id := fmt.Sprintf("e-%d", i)
			r := &kgo.Record{Topic: topic, Key: []byte(id), Value: []byte(`{"amount_cents": 12800}`), Headers: []kgo.RecordHeader{{Key: "id", Value: []byte(id)}}}
			if err := client.ProduceSync(t.Context(), r).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
	}
	start := func() *exec.Cmd {
		cmd := exec.Command(program)
		cmd.Env = append(os.Environ(), "DSN="+pg.DSN(), "BROKERS="+kafka.Brokers()[0], "TOPIC="+topic, "GROUP="+topic, "PROVIDER="+server.URL)
		cmd.Stderr = os.Stderr
		p.mu.Lock()
		defer p.mu.Unlock()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		p.victim = cmd.Process
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		return cmd
	}
	if err := start().Wait(); err == nil {
		t.Fatal("the consumer ended by itself, it should have been killed")
	}
	if n := pg.Value(`SELECT count(*) FROM payments WHERE state = 'pending'`); n != "1" {
		t.Fatalf("%s payments are pending behind the kill, want the one that was under way", n)
	}
	start()
	harness.WaitFor(t, "all payments", 3*harness.DefaultTimeout, func() (bool, error) {
		return pg.Value(`SELECT count(*) FROM payments WHERE state = 'charged'`) == fmt.Sprint(events), nil
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, n := range p.charges {
		if n != 1 {
			t.Errorf("%s was charged %d times", key, n)
		}
	}
	if len(p.charges) != events || p.queries != 1 {
		t.Errorf("%d events were charged, want %d; %d queries found a charge, want 1", len(p.charges), events, p.queries)
	}
}

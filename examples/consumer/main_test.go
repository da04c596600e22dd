package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// TestEachEventTakesEffectOnce delivers every event twice, of aggregates whose other events
// are elsewhere, and kills the consumer in the middle, three times, with SIGKILL. Two aggregates share
// a key. At last a number comes again under another id.
func TestEachEventTakesEffectOnce(t *testing.T) {
	pg, kafka := harness.Postgres(t), harness.Kafka(t)
	program := filepath.Join(t.TempDir(), "consumer")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
	topic := "outbox.event." + kafka.Unique()
	client, err := kgo.NewClient(kgo.SeedBrokers(kafka.Brokers()...))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := kadm.NewClient(client).CreateTopic(t.Context(), 6, 1, nil, topic); err != nil {
		t.Fatal(err)
	}
	const aggregates, events = 10, 60
	send := func(id string, a, seq int) {
		r := &kgo.Record{
			Topic: topic, Key: []byte(fmt.Sprintf("account-%d", a/2)), Value: []byte(fmt.Sprintf(`{"amount_cents": %d}`, seq)),
			Headers: []kgo.RecordHeader{
				{Key: "id", Value: []byte(id)},
				{Key: "aggregate_id", Value: []byte(fmt.Sprintf("order-%d", a))},
				{Key: "aggregate_seq", Value: []byte(fmt.Sprint(seq))},
			},
		}
		if err := client.ProduceSync(t.Context(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		for n := 1; n <= events; n++ {
			for a := range aggregates {
				send(fmt.Sprintf("e-%d-%d", a, n), a, 3*n+4) // 7, 10, 13, …
			}
		}
	}
	var said strings.Builder // of the last one
	start := func() *exec.Cmd {
		said.Reset()
		cmd := exec.Command(program)
		cmd.Env = append(os.Environ(), "DSN="+pg.DSN(), "BROKERS="+kafka.Brokers()[0], "TOPIC="+topic, "GROUP="+topic)
		cmd.Stderr = io.MultiWriter(os.Stderr, &said)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		return cmd
	}
	count := func() int {
		rows, err := pg.TryQuery(`SELECT count(*) FROM processed_events`)
		if err != nil || len(rows) == 0 {
			return 0 // the consumer has not made its tables yet
		}
		n := 0
		if _, err := fmt.Sscan(rows[0][0], &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for kill := range 3 {
		cmd := start()
		harness.WaitFor(t, "some effects", harness.DefaultTimeout, func() (bool, error) { return count() > (kill+1)*20, nil })
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // its error is the signal
		if n := count(); n == aggregates*events && kill == 0 {
			t.Fatal("the kill came too late to prove anything")
		}
	}
	last := start()
	want := fmt.Sprint(aggregates * (3*events*(events+1)/2 + 4*events))
	harness.WaitFor(t, "all effects", 3*harness.DefaultTimeout, func() (bool, error) { return count() == aggregates*events, nil })
	sound := func() {
		t.Helper()
		if got := pg.Value(`SELECT sum(balance)::text FROM aggregates`); got != want {
			t.Errorf("the balances add up to %s, want %s", got, want)
		}
		if n := pg.Value(`SELECT count(*) FROM aggregates WHERE last_seq = $1`, 3*events+4); n != fmt.Sprint(aggregates) {
			t.Errorf("%s aggregates have had their last event, want %d", n, aggregates)
		}
	}
	sound()
	send("another id", 0, 3*events+1)
	ended := make(chan error, 1)
	go func() { ended <- last.Wait() }()
	select {
	case err = <-ended:
	case <-time.After(harness.DefaultTimeout):
		t.Fatal("an old number under a new id does not end the consumer")
	}
	if err == nil || !strings.Contains(said.String(), "aggregate order-0 has had event 184, and number 181 comes behind it, under another id") {
		t.Errorf("an old number under a new id: %v: %s", err, said.String())
	}
	sound()
	if n := count(); n != aggregates*events {
		t.Errorf("%d events are processed, want %d", n, aggregates*events)
	}
}

package kafkaserver_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/kafkaserver"
)

func TestWithoutJavaTheErrorSaysWhatToInstall(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := kafkaserver.Start(t.Context(), kafkaserver.Options{})
	if !errors.Is(err, kafkaserver.ErrMissing) {
		t.Fatalf("got %v, want ErrMissing", err)
	}
}

// TestRealBroker runs where the suite is asked to use real brokers; elsewhere it proves the refusals above only.
func TestRealBroker(t *testing.T) {
	if os.Getenv("WALRELAY_TEST_KAFKA") != "kafka" {
		t.Log("WALRELAY_TEST_KAFKA is not kafka: no broker started")
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	began := time.Now()
	c, err := kafkaserver.Start(ctx, kafkaserver.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	t.Logf("up after %s", time.Since(began))
	client, err := kgo.NewClient(kgo.SeedBrokers(c.Brokers()...))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	admin := kadm.NewClient(client)
	if _, err := admin.CreateTopic(ctx, 1, -1, nil, "kept"); err != nil {
		t.Fatal(err)
	}
	if err := client.ProduceSync(ctx, &kgo.Record{Topic: "kept", Value: []byte("x")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	if err := c.Kill(0); err != nil {
		t.Fatal(err)
	}
	if err := c.Restart(ctx, 0); err != nil {
		t.Fatal(err)
	}
	ends, err := admin.ListEndOffsets(ctx, "kept")
	if err != nil {
		t.Fatal(err)
	}
	if end, _ := ends.Lookup("kept", 0); end.Offset != 1 || end.Err != nil {
		t.Fatalf("after the kill the topic ends at %d (%v), want 1", end.Offset, end.Err)
	}
}

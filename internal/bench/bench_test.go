package main

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// stubMode in the environment makes this test binary a walrelay that delivers
// without reading.
const stubMode = "WALRELAY_BENCH_TEST_STUB"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == kafkaMode {
		if err := serveKafka(context.Background(), os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if n := os.Getenv(stubMode); n != "" && len(os.Args) > 1 && os.Args[1] == "run" {
		if err := stub(n, os.Args[len(os.Args)-1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func stub(count, config string) error {
	var n int
	if _, err := fmt.Sscan(count, &n); err != nil {
		return err
	}
	text, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	addr := regexp.MustCompile(`brokers: \["(.*)"\]`).FindStringSubmatch(string(text))[1]
	client, err := kgo.NewClient(kgo.SeedBrokers(addr), kgo.DefaultProduceTopic("outbox.event.order.created"))
	if err != nil {
		return err
	}
	defer client.Close()
	if _, err := kadm.NewClient(client).CreateTopic(context.Background(), 1, 1, nil, "outbox.event.order.created"); err != nil {
		return err
	}
	// One by one, so that it lasts until Kafka stands still.
	deadline := time.Now().Add(pauseAfter + pauseAfter/2)
	for i := 0; i < n || strings.Contains(os.Getenv(stubMode), "slow") && time.Now().Before(deadline); i++ {
		if err := client.ProduceSync(context.Background(), kgo.StringRecord("x")).FirstErr(); err != nil {
			return err
		}
	}
	return nil
}

func runBench(t *testing.T, args ...string) (string, string, error) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out, progress strings.Builder
	err = run(t.Context(), append(args, "-binary", exe), &out, &progress)
	return out.String(), progress.String(), err
}

func TestBenchMeasuresFloorAndWalrelayOnTheSameBacklog(t *testing.T) {
	t.Setenv(stubMode, "600")
	out, progress, err := runBench(t, "-rows", "200", "-runs", "2", "-only", "abc")
	if err != nil {
		t.Fatalf("%v\n%s", err, progress)
	}
	for _, re := range []string{
		`A transactions of 1,000 rows +200 +floor +[\d.]+ / [\d.]+ / [\d.]+`, `B transactions of one row +200 +floor`, `C one transaction +600 +floor`,
		`600 +walrelay .* [\d.]+ / [\d.]+ / [\d.]+\n`,
	} {
		if !regexp.MustCompile(re).MatchString(out) {
			t.Errorf("no %s in\n%s", re, out)
		}
	}
}

func TestBenchPausesKafka(t *testing.T) {
	t.Setenv(stubMode, "100 slow")
	out, progress, err := runBench(t, "-rows", "100", "-only", "D", "-pause", "1s")
	if err != nil {
		t.Fatalf("%v\n%s", err, progress)
	}
	if !regexp.MustCompile(`D Kafka stands still for 1s +100 +walrelay +[2-9]\.`).MatchString(out) {
		t.Errorf("not paused:\n%s", out)
	}
}

func TestBenchRefusesAConnectorThatDeliversNothing(t *testing.T) {
	t.Setenv(stubMode, "5")
	if _, _, err := runBench(t, "-rows", "200", "-runs", "1", "-only", "A"); err == nil || !strings.Contains(err.Error(), "5 of 200") {
		t.Fatalf("error %v, want one that says how many", err)
	}
}

func TestSpreadIsLeastMiddleAndGreatest(t *testing.T) {
	for _, tt := range []struct {
		in   []float64
		want spread
	}{
		{[]float64{3}, spread{3, 3, 3}},
		{[]float64{3, 1}, spread{1, 2, 3}},
		{[]float64{9, 1, 2}, spread{1, 2, 9}},
	} {
		got := spreadOf(len(tt.in), func(i int) float64 { return tt.in[i] })
		if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(spread{})); diff != "" {
			t.Errorf("%v (-want +got):\n%s", tt.in, diff)
		}
	}
}

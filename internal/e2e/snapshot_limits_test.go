package e2e

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"
)

// TestRowsOfAMegabyteAreReadInBoundedMemory reads 400 MB in rows that no chunk-rows bounds.
func TestRowsOfAMegabyteAreReadInBoundedMemory(t *testing.T) {
	const rows = 400
	b := newSnapBed(t, fmt.Sprintf(`CREATE TABLE t (id int PRIMARY KEY, big text); ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
		INSERT INTO t SELECT g, repeat(chr(97 + g %% 26), 1000000 - 1000) FROM generate_series(1, %d) g`, rows))
	b.set("snapshot.chunk-bytes", "4MiB")
	p := b.start()
	b.waitTable(p, "public.t", allRows)
	peak := casePeakMemory(t, p.PID())
	t.Logf("peak memory %d MiB for %d MB of rows", peak>>20, rows)
	if most := 300 << 20; peak > most {
		t.Errorf("peak memory %d MiB, want at most %d: 4 chunks of 4 MiB, a batch and the client's buffers", peak>>20, most>>20)
	}
	b.wantOps(b.settled(p), "t", 1, rows, "r")
}

// TestTheStreamsLatencyBesideASnapshotIsReported measures how long a change takes from its
// commit to a consumer, with and without a snapshot beside it. What a busy machine makes of
// it is no failure; that changes arrive at all while the snapshot runs is checked.
func TestTheStreamsLatencyBesideASnapshotIsReported(t *testing.T) {
	const rows = 300_000
	b := newSnapBed(t, fmt.Sprintf(`CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, repeat('x', 150) FROM generate_series(1, %d) g;
		CREATE TABLE ticks (id bigserial PRIMARY KEY)`, rows))
	client := b.kafka.Client(t, kgo.ConsumeTopics(b.topic("ticks")), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.FetchMaxWait(20*time.Millisecond),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.MetadataMinAge(50*time.Millisecond), kgo.MetadataMaxAge(100*time.Millisecond))
	p := b.stream()
	conn := b.session()
	during, done := b.latencies(conn, client, func(n int) bool {
		return b.status(p).Snapshot.Tables["public.t"].State != "done"
	})
	if done == 0 {
		t.Log("the snapshot was over before the first change arrived; nothing to report")
		return
	}
	b.waitTable(p, "public.t", allRows)
	alone, _ := b.latencies(conn, client, func(n int) bool { return n < 200 })
	t.Logf("beside the snapshot %d changes, p50 %s, p99 %s; alone p50 %s, p99 %s", done, at(during, 50), at(during, 99), at(alone, 50), at(alone, 99))
}

// latencies inserts one row at a time, waits for it, and gives the sorted times.
func (b *snapBed) latencies(conn *pgx.Conn, client *kgo.Client, more func(n int) bool) ([]time.Duration, int) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), snapLong)
	defer cancel()
	var times []time.Duration
	for more(len(times)) {
		begun := time.Now()
		b.must(conn, "INSERT INTO ticks DEFAULT VALUES")
		for {
			fetches := client.PollFetches(ctx)
			if ctx.Err() != nil {
				b.t.Fatal("a change did not arrive")
			}
			if fetches.NumRecords() > 0 {
				break
			}
		}
		times = append(times, time.Since(begun))
	}
	slices.Sort(times)
	return times, len(times)
}

func at(sorted []time.Duration, percent int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, len(sorted)*percent/100)].Round(100 * time.Microsecond)
}

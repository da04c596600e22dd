package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
	"github.com/walrelay/walrelay/internal/replay"
)

// replayBatch is the stand's batch.max-records: small, so that a replay has many Kafka
// transactions and cuts large source transactions, at other places than the live stream.
const replayBatch = 250

// After a random workload, any stretch of it that is replayed is what the live topics hold
// of it, in each partition in the same order; one replay is killed on its way.
func TestRandomRangesAreReplayedAsTheyWereLive(t *testing.T) {
	seed := drawSeed(t)
	s := newProcessStand(t, fmt.Sprintf("snapshot: {mode: never}\nbatch: {max-records: %d}", replayBatch))
	r := startRun(t, s, seed)
	harness.WaitFor(t, "the anchor", harness.DefaultTimeout, func() (bool, error) {
		return s.pg.Value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1", s.slot+"_anchor") == "1", nil
	})
	log := r.finish(r.underLoad(func(ctx context.Context) error {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for r.workload.Progress() < 400 {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	}))
	commits := rangeBounds(t, log)
	if len(commits) < 100 {
		t.Fatalf("only %d source transactions to choose from", len(commits))
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	for i := range 4 {
		a, b := rng.IntN(len(commits)), rng.IntN(len(commits))
		if a > b {
			a, b = b, a
		}
		kill := i == 0
		if kill { // it needs something to be killed in
			a, b = rng.IntN(len(commits)/10), len(commits)-1-rng.IntN(len(commits)/10)
		}
		from, to := commits[a], commits[b]
		want := inRange(t, log, from, to)
		// Anywhere in a commit record is before its end, so this changes nothing.
		args := []string{"--from-lsn", (from + checkpoint.LSN(rng.IntN(9))).String(), "--to-lsn", (to + checkpoint.LSN(rng.IntN(9))).String()}
		if from == to {
			args[3] = to.String()
			args[1] = args[3]
		}
		id := ""
		if kill {
			n := len(want) / replayBatch / 2
			if n < 2 {
				t.Fatalf("%d records are too few to be killed in", len(want))
			}
			code, _, stderr := s.replay(t, []string{killpoint.Env + "=" + killpoint.Spec(killpoint.FirstProduced, n)}, args)
			if code != -1 {
				t.Fatalf("the replay ended with exit code %d instead of killing itself: %s", code, stderr)
			}
			id = regexp.MustCompile(`"replay":"([^"]+)"`).FindStringSubmatch(stderr)[1]
			args = append(args, "--resume", id)
		}
		code, out, stderr := s.replay(t, nil, args)
		if code != 0 {
			t.Fatalf("replay %v: exit code %d: %s", args, code, stderr)
		}
		var report replay.Report
		if err := json.Unmarshal([]byte(out), &report); err != nil {
			t.Fatalf("replay printed %q: %v", out, err)
		}
		if kill && (report.ID != id || report.Records >= int64(len(want))) || !kill && report.Records != int64(len(want)) {
			t.Errorf("replay %s (killed before: %s) reports %d records, the range has %d", report.ID, id, report.Records, len(want))
		}
		t.Logf("replay %v: %d of %d records, %d in this process", args, len(want), len(log.Records), report.Records)
		again, err := cdctest.ReadSettled(t.Context(), regexp.QuoteMeta(report.Prefix)+`\..*`, s.Kafka()...)
		if err != nil {
			t.Fatal(err)
		}
		sameRange(t, want, again.Records, report)
	}
}

// replay runs walrelay replay with the stand's configuration. env are variables in the form
// NAME=value.
func (s *processStand) replay(t *testing.T, env, args []string) (code int, stdout, stderr string) {
	t.Helper()
	p := harness.StartProgram(t, "env", nil, slices.Concat(env, []string{s.binary, "replay", "-o", "json", "-c", s.config}, args)...)
	code = p.Wait(patience)
	return code, p.Stdout(), p.Stderr()
}

func positionOf(t *testing.T, r cdctest.Record) checkpoint.LSN {
	t.Helper()
	return positionHeader(t, r.Headers["position"])
}

func positionHeader(t *testing.T, header string) checkpoint.LSN {
	t.Helper()
	lsn, _, _, err := checkpoint.ParseHeader(header)
	if err != nil {
		t.Fatal(err)
	}
	return lsn
}

// rangeBounds gives the commit LSNs of the log, in order. Those of messages are left out:
// one without a transaction ends where the commit record behind it begins, and is on the
// other side of a bound there than that transaction.
func rangeBounds(t *testing.T, log *cdctest.Log) []checkpoint.LSN {
	t.Helper()
	messages, all := map[checkpoint.LSN]bool{}, map[checkpoint.LSN]bool{}
	for _, r := range log.Records {
		if lsn := positionOf(t, r); r.Topic == "shop.message" {
			messages[lsn] = true
		} else {
			all[lsn] = true
		}
	}
	return slices.DeleteFunc(slices.Sorted(maps.Keys(all)), func(l checkpoint.LSN) bool { return messages[l] })
}

// inRange gives what the log holds of the commits from the first to before the last.
func inRange(t *testing.T, log *cdctest.Log, from, to checkpoint.LSN) (in []cdctest.Record) {
	t.Helper()
	for _, r := range log.Records {
		if lsn := positionOf(t, r); from <= lsn && lsn < to {
			in = append(in, r)
		}
	}
	return in
}

// sameRange compares record by record: all but topics' prefixes, offsets and the header
// replay. It sorts both.
func sameRange(t *testing.T, want, got []cdctest.Record, report replay.Report) {
	t.Helper()
	// The place that a live record has in the replay.
	target := func(topic string) string {
		if rest, ok := strings.CutPrefix(topic, "shop."); ok {
			return report.Prefix + "." + rest
		}
		return report.Prefix + "." + topic
	}
	want = slices.Clone(want)
	for i := range want {
		want[i].Topic = target(want[i].Topic)
	}
	order := func(a, b cdctest.Record) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
	}
	slices.SortFunc(want, order)
	slices.SortFunc(got, order)
	same := func(a, b []byte) bool { return bytes.Equal(a, b) && (a == nil) == (b == nil) }
	for i := range max(len(want), len(got)) {
		if i >= len(want) || i >= len(got) {
			t.Fatalf("replay %s: %d records, want %d", report.ID, len(got), len(want))
		}
		w, g := want[i], got[i]
		headers := maps.Clone(g.Headers)
		delete(headers, "replay")
		if w.Topic != g.Topic || w.Partition != g.Partition || !same(w.Key, g.Key) || !same(w.Value, g.Value) || !maps.Equal(headers, w.Headers) || g.Headers["replay"] != report.ID {
			t.Fatalf("replay %s: record %d of %d at %s is %s %s %v,\nwant at %s[%d] %s %s %v", report.ID, i, len(want),
				g.Where(), g.Key, g.Value, g.Headers, w.Topic, w.Partition, w.Key, w.Value, w.Headers)
		}
	}
}

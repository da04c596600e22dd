package e2e

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
)

var seedsFlag = flag.Int("seeds", 3, "how many seeds the random workload with snapshots runs with, unless -seed gives one")

// snapshotDuration is how long one seed of the random workload with snapshots disturbs; a
// longer -duration holds for it too.
const snapshotDuration = 8 * time.Second

// startFilledRun makes tables with rows. The connector is started by the test.
func startFilledRun(t *testing.T, seed uint64, fill int, options ...harness.PGOption) *run {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 0x736e6170))
	snapshot := fmt.Sprintf("snapshot: {chunk-rows: %d, readers: %d}", 20+rng.IntN(60), 1+rng.IntN(3))
	s := newProcessStand(t, snapshot, append(options, harness.Setting("max_prepared_transactions", "20"))...)
	t.Log(snapshot)
	r := &run{t: t, stand: s, workload: &cdctest.Workload{DSN: s.DSN(), Seed: seed, BigRows: 300, Fill: fill}}
	if err := r.workload.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := shortenSenderTimeout(t.Context(), s.DSN()); err != nil {
		t.Fatal(err)
	}
	return r
}

// first starts the connector for the first time, beside the load.
func (r *run) first(ctx context.Context) error {
	if err := r.restart(ctx); err != nil {
		return err
	}
	r.workload.SlotSeen()
	return nil
}

// disturb brings faults about while ctx lasts.
func (r *run) disturb(ctx context.Context, seed uint64, faults []cdctest.Fault) error {
	n := &cdctest.Nemesis{Seed: seed, Faults: faults, MinGap: 100 * time.Millisecond, MaxGap: 1500 * time.Millisecond, Log: r.t.Logf}
	done, err := n.Run(ctx, 0)
	if err == nil && len(done) == 0 {
		return errors.New("the nemesis did nothing")
	}
	return err
}

// TestSnapshotsAreExactBesideRandomWritesThroughEveryFault reads tables of every kind
// while random transactions change all of them, from before the slot on, and while the
// connector, its connections and its Kafka are cut off at random moments: each row that
// goes out is the one of its moment, once, and the topics fold to the tables.
func TestSnapshotsAreExactBesideRandomWritesThroughEveryFault(t *testing.T) {
	seeds := *seedsFlag
	if *seedFlag != 0 {
		seeds = 1
	}
	for range seeds {
		seed := *seedFlag
		if seed == 0 {
			seed = rand.Uint64()
		}
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Logf("to repeat: -run '%s' -seed %d", strings.Split(t.Name(), "/")[0], seed)
			r := startFilledRun(t, seed, 600)
			s := r.stand.(*processStand)
			faults := slices.Concat(r.faults(), s.Faults(), s.snapshotFaults(r))
			truth := r.underLoad(func(ctx context.Context) error {
				ctx, cancel := context.WithTimeout(ctx, max(snapshotDuration, explicitDuration()))
				defer cancel()
				if err := r.first(ctx); err != nil {
					return err
				}
				return r.disturb(ctx, seed, faults)
			})
			log := r.finish(truth)
			r.checkReads(log, truth)
			r.checkNothingAgain(log)
		})
	}
}

// explicitDuration is -duration where it was given.
func explicitDuration() (d time.Duration) {
	flag.Visit(func(f *flag.Flag) {
		if f.Name == "duration" {
			d = *durationFlag
		}
	})
	return d
}

// TestSnapshotKilledAtEachStepOfADelivery kills the process at each numbered step, when
// what is delivered are rows that were read as much as changes.
func TestSnapshotKilledAtEachStepOfADelivery(t *testing.T) {
	for s := killpoint.Step(1); int(s) <= killpoint.Steps; s++ {
		t.Run(strings.ReplaceAll(s.String(), " ", "-"), func(t *testing.T) {
			seed := drawSeed(t)
			r := startFilledRun(t, seed, 300)
			r.workload.Sessions = 2
			truth := r.underLoad(func(ctx context.Context) error {
				if err := r.first(ctx); err != nil {
					return err
				}
				for _, n := range []int{1, 2, 5} {
					if err := r.killAt(ctx, s, n); err != nil {
						return err
					}
				}
				return nil
			})
			log := r.finish(truth)
			r.checkReads(log, truth)
			r.checkNothingAgain(log)
		})
	}
}

// TestSnapshotsSurviveServersThatLoseCommits crashes the server while rows are read that
// nobody flushed: what a chunk saw of them is gone, and nothing of it may be in Kafka.
func TestSnapshotsSurviveServersThatLoseCommits(t *testing.T) {
	seed := drawSeed(t)
	r := startFilledRun(t, seed, 400, harness.Dedicated(), harness.Setting("wal_writer_delay", "10s"))
	r.workload.Crashes = true
	s := r.stand.(*processStand)
	crash := cdctest.Fault{Name: "crash", Weight: 3, Do: func(ctx context.Context, _ *rand.Rand) (string, error) {
		if err := r.alive(); err != nil {
			return "", err
		}
		if err := s.pg.Server.Quit(); err != nil {
			return "", err
		}
		return "crashed the server", s.pg.Server.Restart(ctx, nil)
	}}
	kill := r.faults()[0]
	truth := r.underLoad(func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, max(2*snapshotDuration, explicitDuration()))
		defer cancel()
		if err := r.first(ctx); err != nil {
			return err
		}
		return r.disturb(ctx, seed, []cdctest.Fault{crash, kill, s.ask(r)})
	})
	log := r.finish(truth)
	r.checkReads(log, truth)
	r.checkNothingAgain(log)
}

// snapshotFaults are those that only the database can bring about, and requests to read
// tables again.
func (s *processStand) snapshotFaults(r *run) []cdctest.Fault {
	return []cdctest.Fault{
		{Name: "terminate backends", Weight: 2, Do: func(context.Context, *rand.Rand) (string, error) {
			rows, err := s.pg.TryQuery(`SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
				WHERE datname = current_database() AND application_name LIKE 'walrelay%'`)
			if err != nil {
				return "", err
			}
			return fmt.Sprintf("terminated %s backends", rows[0][0]), nil
		}},
		s.ask(r),
	}
}

// ask asks for another snapshot of a table.
func (s *processStand) ask(r *run) cdctest.Fault {
	return cdctest.Fault{Name: "ask", Weight: 3, Do: func(ctx context.Context, rng *rand.Rand) (string, error) {
		tables := []string{"items", "notes", "lines", "docs", "ledger", "tokens", "parts", "accounts"}
		table := "public." + tables[rng.IntN(len(tables))]
		args := []string{"snapshot", "-c", s.config, "--table", table}
		if rng.IntN(3) == 0 {
			args = append(args, "--replace")
		}
		// Before it is asked, since the connector may be quick.
		r.workload.Asked(table)
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		for {
			out, err := exec.CommandContext(ctx, s.binary, args...).CombinedOutput()
			switch {
			case err == nil:
				return strings.Join(args[3:], " "), nil
			case ctx.Err() == nil && bytes.Contains(out, []byte("the connector has not run yet")): // or not for long enough
			default:
				return "", fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
			}
		}
	}}
}

// checkReads makes sure that there was a snapshot to be judged.
func (r *run) checkReads(log *cdctest.Log, truth *cdctest.Truth) {
	r.t.Helper()
	reads := map[string]int{}
	events := 0
	for i := range log.Records {
		rec := &log.Records[i]
		position, err := rec.Position()
		switch {
		case err != nil || !position.Snapshot:
		case rec.Headers["id"] != "":
			events++
		default:
			reads[rec.Topic]++
		}
	}
	r.t.Logf("%d events of the backlog, rows read %v, asked for again %v", events, reads, truth.Passes)
	for _, table := range []string{"items", "notes", "lines", "docs", "ledger", "tokens", "parts", "heap", "accounts", "savings"} {
		if reads["shop.public."+table] == 0 {
			r.t.Errorf("no row of %s was read", table)
		}
	}
}

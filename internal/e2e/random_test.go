package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/killpoint"
)

var (
	seedFlag     = flag.Uint64("seed", 0, "seed of workload and nemesis; 0 draws one and prints it")
	durationFlag = flag.Duration("duration", 20*time.Second, "how long the random workload runs")
)

// patience bounds every wait; it is there for what hangs, not for what is slow.
const patience = 90 * time.Second

// topics matches those that the connector writes records to, dead letters included.
const topics = `shop\..*|outbox\.event\..*`

// smallRecords is the number of records up to which a source transaction must be
// delivered in one Kafka transaction. The stand's batch limits must lie above.
const smallRecords = 200

func layout() cdctest.Layout { return cdctest.Layout{Prefix: "shop", Partitions: 6} }

func drawSeed(t *testing.T) uint64 {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("to repeat: -run '%s' -seed %d", t.Name(), seed)
	return seed
}

// TestRandomWorkloadIsDeliveredExactlyOnceThroughEveryFault is the main promise:
// while random transactions run, the connector is killed, stopped, paused and taken
// over at random moments and steps; then every committed change and event must be
// there once, in order, and nothing else.
func TestRandomWorkloadIsDeliveredExactlyOnceThroughEveryFault(t *testing.T) {
	seed := drawSeed(t)
	r := startRun(t, newStand(t), seed)
	var done []cdctest.Done
	var snapshots []*cdctest.Log
	truth := r.underLoad(func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, *durationFlag)
		defer cancel()
		group := new(errgroup.Group)
		group.Go(func() (err error) {
			snapshots, err = r.watch(ctx)
			return err
		})
		n := &cdctest.Nemesis{Seed: seed, Faults: append(r.faults(), r.stand.Faults()...), MinGap: 200 * time.Millisecond, MaxGap: 2 * time.Second, Log: t.Logf}
		var err error
		done, err = n.Run(ctx, 0)
		cancel()
		return errors.Join(err, group.Wait())
	})
	if len(done) == 0 {
		t.Error("the nemesis did nothing")
	}
	log := r.finish(truth)
	r.check(cdctest.Visible(append(snapshots, log), smallRecords))
	r.checkNothingAgain(log)
}

// TestKilledAtEachStepOfADelivery kills the process at each numbered step, at
// several of its passages, while the workload runs.
func TestKilledAtEachStepOfADelivery(t *testing.T) {
	for s := killpoint.Step(1); int(s) <= killpoint.Steps; s++ {
		t.Run(strings.ReplaceAll(s.String(), " ", "-"), func(t *testing.T) {
			seed := drawSeed(t)
			r := startRun(t, newStand(t), seed)
			r.workload.Sessions = 2 // it is the kill that counts, not the load
			truth := r.underLoad(func(ctx context.Context) error {
				for _, n := range []int{1, 2, 5} {
					if err := r.killAt(ctx, s, n); err != nil {
						return err
					}
				}
				return nil
			})
			r.checkNothingAgain(r.finish(truth))
		})
	}
}

// run is one stand with the connector that runs in it. Only the nemesis starts and
// ends processes while a workload runs.
type run struct {
	t        *testing.T
	stand    stand
	workload *cdctest.Workload
	current  process
}

// startRun makes the tables, then starts the connector and waits for its slot: what
// is written from then on is in the stream.
func startRun(t *testing.T, s stand, seed uint64) *run {
	t.Helper()
	r := &run{t: t, stand: s, workload: &cdctest.Workload{DSN: s.DSN(), Seed: seed, BigRows: 600}}
	if err := r.workload.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := shortenSenderTimeout(t.Context(), s.DSN()); err != nil {
		t.Fatal(err)
	}
	if err := r.restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
}

// shortenSenderTimeout makes the database's walsenders give up a client that is
// silent for 5 s instead of 60 s.
func shortenSenderTimeout(ctx context.Context, dsn string) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return fmt.Errorf("connect to set wal_sender_timeout: %w", err)
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, "ALTER DATABASE "+pgx.Identifier{conn.Config().Database}.Sanitize()+" SET wal_sender_timeout = '5s'"); err != nil {
		return fmt.Errorf("set wal_sender_timeout: %w", err)
	}
	return nil
}

// underLoad runs disturb while the workload runs, and the workload for as long as
// disturb does: a kill at a step needs deliveries to come.
func (r *run) underLoad(disturb func(ctx context.Context) error) *cdctest.Truth {
	r.t.Helper()
	load, ended := context.WithCancel(r.t.Context())
	group, ctx := errgroup.WithContext(load)
	r.workload.Duration = time.Hour // disturb ends it
	var truth *cdctest.Truth
	group.Go(func() (err error) {
		truth, err = r.workload.Run(ctx)
		return err
	})
	group.Go(func() error {
		defer ended()
		return disturb(ctx)
	})
	if err := group.Wait(); err != nil {
		r.t.Fatalf("%v\nthe connector's log ends:\n%s", err, r.current.Stderr())
	}
	return truth
}

// alive fails where the connector has ended without being told to: the next kill
// would hide it.
func (r *run) alive() error {
	if r.current.Ended() {
		return fmt.Errorf("the connector ended by itself; its log ends:\n%s", r.current.Stderr())
	}
	return nil
}

// kill ends the current instance, which must be alive.
func (r *run) kill() error {
	return errors.Join(r.alive(), r.current.Kill())
}

// restart starts an instance and waits until it streams.
func (r *run) restart(ctx context.Context, env ...string) error {
	r.current = r.stand.Start(r.t, env)
	return r.streaming(ctx, r.current)
}

func (r *run) streaming(ctx context.Context, p process) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := r.stand.Streaming(ctx, p); err != nil {
		return fmt.Errorf("wait until the connector streams: %w; its log ends:\n%s", err, p.Stderr())
	}
	return nil
}

// faults are those of the process.
func (r *run) faults() []cdctest.Fault {
	return []cdctest.Fault{
		{Name: "kill", Weight: 4, Do: func(ctx context.Context, _ *rand.Rand) (string, error) {
			if err := r.kill(); err != nil {
				return "", err
			}
			return "killed and started", r.restart(ctx)
		}},
		{Name: "kill at a step", Weight: 6, Do: func(ctx context.Context, rng *rand.Rand) (string, error) {
			step, n := killpoint.Step(1+rng.IntN(killpoint.Steps)), 1+rng.IntN(8)
			return fmt.Sprintf("killed at passage %d of step %q", n, step), r.killAt(ctx, step, n)
		}},
		{Name: "kill while starting", Weight: 2, Do: func(ctx context.Context, rng *rand.Rand) (string, error) {
			if err := r.kill(); err != nil {
				return "", err
			}
			half := r.stand.Start(r.t, nil)
			after := time.Duration(rng.Int64N(int64(400 * time.Millisecond)))
			<-time.After(after)
			if err := half.Kill(); err != nil {
				return "", err
			}
			return fmt.Sprintf("killed %v after its start", after), r.restart(ctx)
		}},
		{Name: "stop", Do: func(ctx context.Context, _ *rand.Rand) (string, error) {
			if err := r.terminate(ctx, r.current); err != nil {
				return "", err
			}
			return "stopped and started", r.restart(ctx)
		}},
		{Name: "pause", Weight: 2, Do: func(_ context.Context, rng *rand.Rand) (string, error) {
			pause := time.Duration(100+rng.IntN(1500)) * time.Millisecond
			if err := r.current.Pause(); err != nil {
				return "", err
			}
			<-time.After(pause)
			return fmt.Sprintf("paused for %v", pause), r.current.Resume()
		}},
		{Name: "takeover", Weight: 2, Do: func(ctx context.Context, _ *rand.Rand) (string, error) {
			next := r.stand.Start(r.t, nil)
			if err := r.kill(); err != nil {
				return "", err
			}
			r.current = next
			return "a standby took over from a killed instance", r.streaming(ctx, next)
		}},
		{Name: "zombie", Weight: 2, Do: r.zombie},
	}
}

// killAt runs an instance that kills itself at the n-th passage of step, and starts
// another. It fails where the instance does not get there: a step that is never
// passed would otherwise look survived.
func (r *run) killAt(ctx context.Context, step killpoint.Step, n int) error {
	if err := r.kill(); err != nil {
		return err
	}
	doomed := r.stand.Start(r.t, []string{killpoint.Env + "=" + killpoint.Spec(step, n)})
	r.current = doomed
	wait, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := doomed.Wait(wait); err == nil || !doomed.KilledBySignal() {
		return fmt.Errorf("the process did not kill itself at passage %d of step %q: %v", n, step, err)
	}
	return r.restart(ctx)
}

// zombie pauses the holder, lets another instance take the slot and work, and wakes
// the first one, which must find itself shut out. The slot gets free when the server
// misses the holder's replies; pg_terminate_backend is no way to it, since a
// walsender that cannot write to a stopped client does not get to die either.
func (r *run) zombie(ctx context.Context, rng *rand.Rand) (string, error) {
	old := r.current
	if err := r.alive(); err != nil {
		return "", err
	}
	if err := old.Pause(); err != nil {
		return "", err
	}
	r.current = r.stand.Start(r.t, nil)
	if err := r.streaming(ctx, r.current); err != nil {
		return "", err
	}
	<-time.After(time.Duration(rng.IntN(1000)) * time.Millisecond)
	if err := old.Resume(); err != nil {
		return "", err
	}
	<-time.After(time.Duration(rng.IntN(1000)) * time.Millisecond)
	return "a paused holder was taken over and woke up", old.Kill()
}

func (r *run) terminate(ctx context.Context, p process) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := p.Terminate(ctx); err != nil {
		return fmt.Errorf("stop the connector: %w; its log ends:\n%s", err, p.Stderr())
	}
	return nil
}

// watch reads the log again and again, until ctx is done.
func (r *run) watch(ctx context.Context) ([]*cdctest.Log, error) {
	var snapshots []*cdctest.Log
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return snapshots, nil
		case <-tick.C:
		}
		reading, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		log, err := cdctest.ReadCommitted(reading, topics, r.stand.Kafka()...)
		cancel()
		if err != nil {
			return snapshots, fmt.Errorf("read a snapshot of the log: %w", err)
		}
		snapshots = append(snapshots, log)
	}
}

// finish stops the connector, delivers what is left and holds the log against the
// truth.
func (r *run) finish(truth *cdctest.Truth) *cdctest.Log {
	r.t.Helper()
	if err := r.terminate(r.t.Context(), r.current); err != nil {
		r.t.Fatal(err)
	}
	log := r.catchUp()
	r.t.Logf("%d transactions committed, %d rolled back, %d records", len(truth.Committed), len(truth.RolledBack), len(log.Records))
	r.check(cdctest.Validate(log, truth, layout()))
	r.check(cdctest.Atomic(log, smallRecords, keyless(truth)...))
	r.check(cdctest.Sum(log, layout(), "balance", money(truth)...))
	return log
}

// keyless gives the topics of tables without a key.
func keyless(truth *cdctest.Truth) (topics []string) {
	for _, t := range truth.Tables {
		if t.Keyless() {
			topics = append(topics, "shop."+t.ID())
		}
	}
	return topics
}

// money gives the tables between which money moves.
func money(truth *cdctest.Truth) (tables []*cdctest.Table) {
	for _, table := range truth.Tables {
		if table.Name == "accounts" || table.Name == "savings" {
			tables = append(tables, table)
		}
	}
	return tables
}

// catchUp runs the connector until everything is delivered, and reads the log.
func (r *run) catchUp() *cdctest.Log {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	last := r.stand.Start(r.t, nil, "--until-caught-up")
	if err := last.Wait(ctx); err != nil {
		r.t.Fatalf("run until caught up: %v; its log ends:\n%s", err, last.Stderr())
	}
	log, err := cdctest.ReadSettled(ctx, topics, r.stand.Kafka()...)
	if err != nil {
		r.t.Fatalf("read the log: %v", err)
	}
	return log
}

// checkNothingAgain starts once more: what is delivered stays delivered.
func (r *run) checkNothingAgain(log *cdctest.Log) {
	r.t.Helper()
	if again := r.catchUp(); len(again.Records) != len(log.Records) {
		r.t.Errorf("a restart without new changes wrote %d records", len(again.Records)-len(log.Records))
	}
}

func (r *run) check(violations []cdctest.Violation) {
	r.t.Helper()
	if len(violations) > 0 {
		r.t.Errorf("%d violations:\n%s", len(violations), cdctest.Report(violations, 30))
	}
}

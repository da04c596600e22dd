package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

// fillTimeout bounds the snapshot that fills the topic which is verified.
const fillTimeout = 10 * time.Minute

// measureVerify compares a filled table with its topic, beside the connector that wrote it.
// The floor is the server alone, which writes the table to /dev/null.
func (b *bench) measureVerify(ctx context.Context, w workload) (r result, err error) {
	r.workload = w
	conn, err := b.fill(ctx, w.rows)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	kafka, err := b.startKafka(ctx)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, kafka.stop(), b.dropSlot(ctx, conn)) }()
	config, err := b.snapshotConfig(kafka, "initial")
	if err != nil {
		return r, err
	}
	cmd := exec.CommandContext(ctx, b.binary, "run", "-c", config)
	_, err = timed(cmd, func(<-chan struct{}) error {
		err := b.verifyRuns(ctx, &r, kafka, config, func() (usage, error) { return b.copyAway(ctx, conn) })
		return errors.Join(err, cmd.Process.Signal(syscall.SIGTERM))
	})
	return r, err
}

// verifyRuns waits until the topic is filled, and measures.
func (b *bench) verifyRuns(ctx context.Context, r *result, kafka *kafkaProcess, config string, floor func() (usage, error)) error {
	w := r.workload
	for deadline := time.Now().Add(fillTimeout); ; {
		err := kafka.holds(ctx, "bench.public.filled", w.rows)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			return err
		}
		if err := sleep(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
	for i := range w.runs {
		u, err := floor()
		if err != nil {
			return fmt.Errorf("copy the table away: %w", err)
		}
		b.say("%s %d/%d  floor     %s", w.letter, i+1, w.runs, u)
		r.floor = append(r.floor, u)
		u, err = timed(exec.CommandContext(ctx, b.binary, "verify", "-c", config, "--table", "public.filled"), nothing)
		if err != nil {
			return fmt.Errorf("verify with walrelay: %w", err)
		}
		b.say("%s %d/%d  walrelay  %s", w.letter, i+1, w.runs, u)
		r.relay = append(r.relay, u)
	}
	return nil
}

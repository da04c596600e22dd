package main

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/config"
	"github.com/walrelay/walrelay/internal/verify"
	"github.com/walrelay/walrelay/replication"
)

// minMemory is what the collector leaves to verify in any case: the answers of Kafka that
// are at hand take most of it.
const minMemory = 48 << 20

// verifyFlags are the flags of the command verify.
type verifyFlags struct {
	tables  []string
	sample  int
	tempDir string
	memory  string
	timeout time.Duration
	output  choice
}

// newVerifyCommand is verify: topics held against tables.
func newVerifyCommand(a *app) *cobra.Command {
	f := verifyFlags{output: choice{choices: []string{"text", "json"}}}
	cmd := &cobra.Command{
		Use:   "verify -c FILE [--table T] [--sample N]",
		Short: "Compare the topics with the tables, while the connector runs",
		Long: "Reads each table under one snapshot, folds its topic (read_committed) up to the\n" +
			"same transactions, and lists keys that are missing, extra or different, and\n" +
			"records that are there twice. Of an outbox table each row has to be one event.\n" +
			"It is exact on a live system, changes nothing, and takes bounded memory; what\n" +
			"does not fit goes to temporary files.\n\n" +
			"Exit code 0: no difference; 3: differences; 4: a table could not be compared,\n" +
			"such as while its snapshot is not done; 1: failed.",
		Example: "  walrelay verify -c walrelay.yaml\n" +
			"  walrelay verify -c walrelay.yaml --table public.orders -o json\n" +
			"  walrelay verify -c walrelay.yaml --sample 10000",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.verify(cmd.Context(), f) },
	}
	a.addConfigFlag(cmd.Flags())
	flags := cmd.Flags()
	flags.StringArrayVar(&f.tables, "table", nil, "compare table `T`, written schema.table as the catalog spells it, without SQL quotes; may be repeated (default every captured one)")
	flags.IntVar(&f.sample, "sample", 0, "compare `N` keys of each table, chosen by hash; 0: all")
	flags.StringVar(&f.tempDir, "temp-dir", "", "`DIR` for what does not fit into memory (default the system's)")
	flags.StringVar(&f.memory, "memory", "256MiB", "`SIZE` of the rows held in memory")
	flags.DurationVar(&f.timeout, "timeout", verify.DefaultTimeout, "how long to wait for the connector to catch up")
	flags.VarP(&f.output, "output", "o", "form of the answer: "+f.output.Type())
	return cmd
}

func (a *app) verify(ctx context.Context, f verifyFlags) error {
	memory, err := config.ParseSize(f.memory)
	if err != nil {
		err = fmt.Errorf("--memory: %w", err)
	}
	if err := errors.Join(err, f.validate()); err != nil {
		return &exitError{exitUsage, err}
	}
	c, err := a.loadWALConfig("which publishes at least once and stores no position, so that topics and tables cannot be held against each other exactly: what is published is what is marked in the outbox table")
	if err != nil {
		return err
	}
	o, err := verifyOptions(c, a)
	if err != nil {
		return err
	}
	o.Tables, o.Sample, o.TempDir, o.Memory, o.Timeout = f.tables, f.sample, f.tempDir, int64(memory), f.timeout
	// What is freed is collected before the process grows beyond what it was given.
	debug.SetMemoryLimit(min(debug.SetMemoryLimit(-1), max(int64(memory), minMemory)))
	report, err := verify.Run(ctx, o)
	var usage *verify.UsageError
	switch {
	case errors.As(err, &usage):
		return &exitError{exitUsage, err}
	case checkpoint.IsRefusal(err):
		return &exitError{exitRefused, err}
	case err != nil:
		return err
	}
	if f.output.value == "json" {
		err = printJSON(a.stdout, report)
	} else if err = report.Write(a.stdout); err != nil {
		err = fmt.Errorf("print the report: %w", err)
	}
	switch {
	case err != nil:
		return err
	case report.Differences > 0:
		return &exitError{exitDifference, fmt.Errorf("%d differences between topics and tables", report.Differences)}
	case report.Refused > 0:
		return &exitError{exitRefused, fmt.Errorf("%d of %d tables could not be compared, for the reasons above", report.Refused, len(report.Tables))}
	}
	return nil
}

// validate gives every problem of the flags at once.
func (f verifyFlags) validate() error {
	var errs []error
	if f.sample < 0 {
		errs = append(errs, fmt.Errorf("--sample %d: give 0, for all keys, or more", f.sample))
	}
	if f.timeout <= 0 {
		errs = append(errs, fmt.Errorf("--timeout %s: give more than 0", f.timeout))
	}
	return errors.Join(errs...)
}

// verifyOptions turns the configuration into a comparison's options.
func verifyOptions(c config.Config, a *app) (verify.Options, error) {
	log, err := newLogger(c, a.stderr)
	if err != nil {
		return verify.Options{}, err
	}
	o, err := relayOptions(c, log, prometheus.NewRegistry())
	if err != nil {
		return verify.Options{}, &exitError{exitUsage, err}
	}
	source := replication.NewConnector(o.DSN, o.AppName, o.ConnOptions...)
	primary := source
	if o.Snapshot.PrimaryDSN != "" {
		primary = replication.NewConnector(o.Snapshot.PrimaryDSN, o.AppName, o.ConnOptions...)
	}
	var messages []string
	for _, outbox := range c.Outbox {
		if outbox.Prefix != "" {
			messages = append(messages, outbox.Prefix)
		}
	}
	return verify.Options{
		Messages:     messages,
		Name:         c.Name,
		Connect:      primary,
		Source:       source,
		Slot:         o.Slot,
		Publications: o.Publications,
		Existing:     o.Existing,
		Kafka:        o.Kafka,
		Checkpoint:   o.Checkpoint,
		Router:       o.Router,
		Format:       verify.Format{Bare: o.Router.Unwrapped, Schemas: o.Router.Debezium != nil && o.Router.Debezium.Schemas},
		Backlogs:     o.Snapshot.Outbox,
		Logger:       log.With().Str("component", "verify").Logger(),
	}, nil
}

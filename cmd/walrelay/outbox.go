package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/internal/relay"
)

// newOutboxCommand is outbox: what is done to outbox tables beside the stream.
func newOutboxCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "outbox",
		Short: "Clean outbox tables",
		Args:  unknownCommand,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newOutboxCleanCommand(a))
	return cmd
}

type cleanFlags struct {
	olderThan      string
	batch          int
	dropPartitions bool
	output         choice
}

func newOutboxCleanCommand(a *app) *cobra.Command {
	f := cleanFlags{output: choice{choices: []string{"text", "json"}}}
	cmd := &cobra.Command{
		Use:   "clean -c FILE [--older-than 7d] [--batch 10000] [--drop-partitions]",
		Short: "Delete published outbox rows",
		Long: "Deletes published rows of the configured outbox tables, in batches of a\n" +
			"transaction each; it may run beside the connector. A row is published if\n" +
			"published_at is set or, where there is no such column, status is 1 or\n" +
			"'processed'. One that is not is never deleted, whatever its age.",
		Example: "  walrelay outbox clean -c walrelay.yaml\n" +
			"  walrelay outbox clean -c walrelay.yaml --older-than 36h --drop-partitions",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.cleanOutbox(cmd.Context(), f) },
	}
	a.addConfigFlag(cmd.Flags())
	flags := cmd.Flags()
	flags.StringVar(&f.olderThan, "older-than", "7d", "delete rows that were published longer ago than this `DURATION`: 7d, 36h, 0s; by published_at where there is one")
	flags.IntVar(&f.batch, "batch", 10000, "delete at most `N` rows at a time")
	flags.BoolVar(&f.dropPartitions, "drop-partitions", false, "drop whole partitions whose time is over and whose rows are all published and old enough")
	flags.VarP(&f.output, "output", "o", "form of the answer: "+f.output.Type())
	return cmd
}

func (a *app) cleanOutbox(ctx context.Context, f cleanFlags) error {
	age, err := parseAge(f.olderThan)
	if err != nil {
		return &exitError{exitUsage, fmt.Errorf("--older-than %s: %w", f.olderThan, err)}
	}
	if f.batch < 1 {
		return &exitError{exitUsage, fmt.Errorf("--batch %d: must be 1 or more", f.batch)}
	}
	c, err := a.loadConfig()
	if err != nil {
		return err
	}
	log, err := newLogger(c, a.stderr)
	if err != nil {
		return err
	}
	o, err := relayOptions(c, log, prometheus.NewRegistry())
	if err != nil {
		return &exitError{exitUsage, err}
	}
	if len(o.Publications.Outbox) == 0 {
		return &exitError{exitUsage, errors.New("the configuration names no outbox table; list them under outbox")}
	}
	list, err := relay.CleanOutbox(ctx, o, outbox.CleanOptions{OlderThan: age, Batch: f.batch, DropPartitions: f.dropPartitions})
	if perr := a.printCleaned(f.output.value, list); perr != nil {
		err = errors.Join(err, perr)
	}
	if checkpoint.IsRefusal(err) {
		return &exitError{exitRefused, err}
	}
	return err
}

// parseAge reads a duration that may have days in front.
func parseAge(s string) (time.Duration, error) {
	bad := errors.New("want a duration such as 7d, 36h or 0s")
	var days time.Duration
	if n, rest, ok := strings.Cut(s, "d"); ok {
		d, err := strconv.ParseUint(n, 10, 16)
		if err != nil {
			return 0, bad
		}
		if days, s = time.Duration(d)*24*time.Hour, rest; s == "" {
			return days, nil
		}
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, bad
	}
	return days + d, nil
}

func (a *app) printCleaned(form string, list []outbox.Cleaned) error {
	if form == "json" {
		return printJSON(a.stdout, list)
	}
	var b strings.Builder
	for _, c := range list {
		fmt.Fprintf(&b, "%s: %d rows deleted", c.Table, c.Deleted)
		if len(c.Dropped) > 0 {
			fmt.Fprintf(&b, ", %d partitions dropped: %s", len(c.Dropped), strings.Join(c.Dropped, ", "))
		}
		b.WriteByte('\n')
		for _, left := range c.Left {
			fmt.Fprintf(&b, "  partition %s\n", left)
		}
	}
	if _, err := fmt.Fprint(a.stdout, b.String()); err != nil {
		return fmt.Errorf("print the answer: %w", err)
	}
	return nil
}

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/config"
	"github.com/walrelay/walrelay/internal/replay"
	"github.com/walrelay/walrelay/router"
)

type replayFlags struct {
	fromLSN, toLSN, fromTime, toTime string
	tables                           []string
	prefix                           string
	inPlace, yes, dryRun             bool
	resume                           string
	output                           choice
}

// newReplayCommand is replay: a stretch of the WAL delivered again.
func newReplayCommand(a *app) *cobra.Command {
	f := replayFlags{output: choice{choices: []string{"text", "json"}}}
	cmd := &cobra.Command{
		Use:   "replay -c FILE (--from-lsn L | --from-time T) [--to-lsn L | --to-time T] [--table T] [--topic-prefix P | --in-place [--yes]] [--dry-run] [--resume ID]",
		Short: "Deliver a stretch of the WAL again, beside the connector",
		Long: "Delivers a stretch of the WAL again, from a copy of the anchor slot and through a\n" +
			"transactional id of its own: the connector goes on. The records are the original\n" +
			"ones, byte for byte, with the header replay beside them, and go to topics of their\n" +
			"own, unless --in-place says otherwise.\n\n" +
			"From an LSN means what is committed behind it; a record's commit_lsn or position\n" +
			"includes that record. Snapshot rows are not in the WAL: walrelay snapshot reads\n" +
			"them again.",
		Example: "  walrelay replay -c walrelay.yaml --from-lsn 0/1A2B3C8 --dry-run\n" +
			"  walrelay replay -c walrelay.yaml --from-time 2026-12-01T08:00:00Z --to-time 2026-12-01T09:00:00Z --table public.orders",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.replay(cmd.Context(), f) },
	}
	a.addConfigFlag(cmd.Flags())
	flags := cmd.Flags()
	flags.StringVar(&f.fromLSN, "from-lsn", "", "begin behind this LSN, `X/Y` or a record's position")
	flags.StringVar(&f.toLSN, "to-lsn", "", "end at this LSN, `X/Y` or a record's position")
	flags.StringVar(&f.fromTime, "from-time", "", "begin with the first transaction committed at this `time` or later (RFC 3339)")
	flags.StringVar(&f.toTime, "to-time", "", "end with the last transaction committed at this `time` or before (RFC 3339)")
	flags.StringArrayVar(&f.tables, "table", nil, "only table `T`, written schema.table; may be repeated")
	flags.StringVar(&f.prefix, "topic-prefix", "", "what {prefix} is in the topics' names, and stands in front of those without (default replay.ID)")
	flags.BoolVar(&f.inPlace, "in-place", false, "write to the live topics")
	flags.BoolVar(&f.yes, "yes", false, "do not ask")
	flags.BoolVar(&f.dryRun, "dry-run", false, "only count, and change nothing anywhere")
	flags.StringVar(&f.resume, "resume", "", "go on with the replay `ID` that was ended, with the same range")
	flags.VarP(&f.output, "output", "o", "form of the answer: "+f.output.Type())
	cmd.MarkFlagsMutuallyExclusive("topic-prefix", "in-place")
	cmd.MarkFlagsMutuallyExclusive("from-lsn", "from-time")
	cmd.MarkFlagsMutuallyExclusive("to-lsn", "to-time")
	cmd.MarkFlagsOneRequired("from-lsn", "from-time")
	return cmd
}

// parseLSN reads X/Y, or a record's position, whose seq is ignored.
func parseLSN(flag, s string) (checkpoint.LSN, error) {
	if s == "" {
		return 0, nil
	}
	if lsn, err := checkpoint.ParseLSN(s); err == nil && lsn > 0 {
		return lsn, nil
	}
	if lsn, _, _, err := checkpoint.ParseHeader(s); err == nil && lsn > 0 {
		return lsn, nil
	}
	return 0, &exitError{exitUsage, fmt.Errorf("%s %q is neither an LSN, such as 0/1A2B3C8, nor a record's position", flag, s)}
}

func parseTime(flag, s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return t, &exitError{exitUsage, fmt.Errorf("%s %q is not a time; write for example 2026-12-01T08:00:00Z", flag, s)}
	}
	return t, nil
}

// parseRange reads the four flags of a range, all problems at once.
func (f replayFlags) parseRange() (r replay.Range, err error) {
	var errs [4]error
	r.From, errs[0] = parseLSN("--from-lsn", f.fromLSN)
	r.To, errs[1] = parseLSN("--to-lsn", f.toLSN)
	r.FromTime, errs[2] = parseTime("--from-time", f.fromTime)
	r.ToTime, errs[3] = parseTime("--to-time", f.toTime)
	if err := errors.Join(errs[:]...); err != nil {
		return r, &exitError{exitUsage, err}
	}
	if r.To > 0 && r.To < r.From || !r.ToTime.IsZero() && r.ToTime.Before(r.FromTime) {
		return r, &exitError{exitUsage, errors.New("the range ends before it begins; exchange its two ends")}
	}
	for _, t := range f.tables {
		if schema, name, ok := strings.Cut(t, "."); !ok || schema == "" || name == "" {
			errs[0] = errors.Join(errs[0], fmt.Errorf("--table %q is not written schema.table, such as public.orders", t))
		}
	}
	if errs[0] != nil {
		return r, &exitError{exitUsage, errs[0]}
	}
	return r, nil
}

func (a *app) replay(ctx context.Context, f replayFlags) error {
	r, err := f.parseRange()
	if err != nil {
		return err
	}
	c, err := a.loadWALConfig("which reads no WAL that could be delivered again: take the mark off the outbox rows that are to be published again")
	if err != nil {
		return err
	}
	o, err := a.replayOptions(c, f)
	if err != nil {
		return err
	}
	o.Range = r
	if f.inPlace && !f.yes && !f.dryRun {
		if err := a.confirm(ctx, "The records go to the live topics: old states stand behind newer ones, with an older\n"+
			"position and the header replay. Consumers that take the last record of a key, and those\n"+
			"that do not drop positions they have seen, go back to an old state. A compacted topic is\n"+
			"refused, since its newest state would be lost for all.\nReplay in place?"); err != nil {
			return err
		}
	}
	terminal := isTerminal(a.stderr)
	said := time.Now()
	o.Progress = func(p replay.Progress) {
		if terminal {
			_, _ = fmt.Fprintf(a.stderr, "\r%s", bar(p))
		} else if now := time.Now(); now.Sub(said) >= progressInterval {
			said = now
			o.Logger.Info().Str("replay", o.ID).Stringer("lsn", p.At).Stringer("to", p.To).Int("percent", int(100*p.Part())).Int64("records", p.Records).Msg("replay goes on")
		}
	}
	o.Logger.Info().Str("replay", o.ID).Str("prefix", o.Prefix).Bool("dry_run", o.DryRun).Msg("replay begins")
	report, err := replay.Run(ctx, o)
	if terminal {
		_, _ = fmt.Fprintln(a.stderr)
	}
	if err != nil {
		return replayExit(err)
	}
	o.Logger.Info().Str("replay", o.ID).Int64("records", report.Records).Msg("replay ends")
	if f.output.value == "json" {
		return printJSON(a.stdout, report)
	}
	if _, err := fmt.Fprint(a.stdout, reportText(report)); err != nil {
		return fmt.Errorf("print the answer: %w", err)
	}
	return nil
}

// progressInterval is between two log lines that tell how far a replay is, where no terminal
// shows it.
const progressInterval = 10 * time.Second

// bar is a progress bar of one line.
func bar(p replay.Progress) string {
	const width = 40
	part := p.Part()
	n := int(part * width)
	return fmt.Sprintf("[%s%s] %3.0f%%  %d records, at %s", strings.Repeat("#", n), strings.Repeat(".", width-n), 100*part, p.Records, p.At)
}

// confirm asks on stderr and reads the answer from standard input, until a signal ends it.
func (a *app) confirm(ctx context.Context, question string) error {
	_, _ = fmt.Fprint(a.stderr, question+" [yes/no] ")
	answer := make(chan string, 1)
	go func() { // it ends with the process: a read cannot be broken off
		line, _ := bufio.NewReader(os.Stdin).ReadString('\n') // the end of the input is a no
		answer <- line
	}()
	var line string
	select {
	case line = <-answer:
	case <-ctx.Done():
		return fmt.Errorf("nothing was done: %w", context.Cause(ctx))
	}
	if s := strings.ToLower(strings.TrimSpace(line)); s == "y" || s == "yes" {
		return nil
	}
	return &exitError{exitUsage, errors.New("not confirmed, so nothing was done; say --yes where nobody can be asked")}
}

func replayExit(err error) error {
	var usage *replay.UsageError
	switch {
	case errors.As(err, &usage):
		return &exitError{exitUsage, err}
	case checkpoint.IsRefusal(err):
		return &exitError{exitRefused, err}
	}
	return err
}

// replayOptions turns the configuration into a replay's options.
func (a *app) replayOptions(c config.Config, f replayFlags) (replay.Options, error) {
	log, err := newLogger(c, a.stderr)
	if err != nil {
		return replay.Options{}, err
	}
	live, err := relayOptions(c, log, prometheus.NewRegistry())
	if err != nil {
		return replay.Options{}, &exitError{exitUsage, err}
	}
	id := f.resume
	if id == "" {
		id = replay.NewID(time.Now())
	}
	o := replay.Options{
		DSN: live.DSN, AppName: live.AppName + "_replay", ConnOptions: live.ConnOptions, Slot: live.Slot, Publication: c.Source.Publication,
		Kafka: live.Kafka, Topics: live.Topics, Producer: live.Producer, Live: live.Checkpoint, Own: live.Checkpoint,
		Router: live.Router, LivePrefix: c.Topics.Prefix, Prefix: f.prefix, InPlace: f.inPlace,
		Limits: live.Limits, Buffer: live.Buffer, ID: id, Resume: f.resume != "", Tables: f.tables, DryRun: f.dryRun, Logger: log,
	}
	o.Own.Topic += ".replay." + id
	o.Producer.CheckpointTopic = o.Own.Topic
	o.Producer.TransactionalID += "-replay-" + id
	if err := router.ValidTopicName(o.Own.Topic); err != nil {
		return o, &exitError{exitUsage, fmt.Errorf("--resume: %w", err)}
	}
	if f.inPlace {
		o.Prefix = c.Topics.Prefix
		return o, nil
	}
	if o.Prefix == "" {
		o.Prefix = "replay." + id
	}
	if err := router.ValidTopicName(o.Prefix); err != nil {
		return o, &exitError{exitUsage, fmt.Errorf("--topic-prefix: %w", err)}
	}
	// {prefix} is the replay's; a template without it gets the prefix in front.
	moved := func(t string) string {
		if !strings.Contains(t, "{prefix}") {
			t = "{prefix}." + t
		}
		return t
	}
	fixed := func(t string) string { return strings.ReplaceAll(moved(t), "{prefix}", o.Prefix) }
	if o.Router.TableTopic, err = router.TableTopics(moved(c.Topics.Table), o.Prefix); err != nil {
		return o, &exitError{exitUsage, fmt.Errorf("topics.table: %w", err)}
	}
	o.Router.MessageTopic, o.Router.DeadLetterTopic = fixed(c.Topics.Message), fixed(c.DeadLetter.Topic)
	o.Router.TopicPrefix = o.Prefix
	return o, nil
}

// reportText is the answer for people.
func reportText(r replay.Report) string {
	var b strings.Builder
	verb := "delivered"
	if r.DryRun {
		verb = "would deliver"
	}
	fmt.Fprintf(&b, "replay %s %s %d records of %d transactions, behind %s up to %s\n", r.ID, verb, r.Records, r.Transactions, r.From, r.To)
	for _, t := range r.Topics {
		fmt.Fprintf(&b, "  %s: %d records", t.Topic, t.Records)
		if t.Tombstones > 0 {
			fmt.Fprintf(&b, ", %d of them tombstones", t.Tombstones)
		}
		if t.DeadLetters > 0 {
			fmt.Fprintf(&b, ", %d of them dead letters", t.DeadLetters)
		}
		fmt.Fprintf(&b, "; commits %s%s to %s%s\n", t.FirstLSN, at(t.FirstTime), t.LastLSN, at(t.LastTime))
	}
	return b.String()
}

func at(t *time.Time) string {
	if t == nil {
		return ""
	}
	return " (" + t.UTC().Format(time.RFC3339Nano) + ")"
}

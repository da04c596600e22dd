package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/config"
	"github.com/walrelay/walrelay/internal/request"
	"github.com/walrelay/walrelay/replication"
)

// snapshotFlags are the flags of the command snapshot.
type snapshotFlags struct {
	tables  []string
	where   string
	replace bool
	output  choice
}

// newSnapshotCommand is snapshot: tables read again beside the stream.
func newSnapshotCommand(a *app) *cobra.Command {
	f := snapshotFlags{output: choice{choices: []string{"text", "json"}}}
	cmd := &cobra.Command{
		Use:   "snapshot -c FILE --table T [--where SQL] [--replace]",
		Short: "Ask the connector to read tables again, beside the stream",
		Long: "Asks the running connector, or the next run, to read these tables again: their\n" +
			"rows go to their topics as op r, merged into the stream so that no key goes\n" +
			"back in time. The request is kept in the checkpoint topic and outlives restarts;\n" +
			"this command ends when it is written there.\n\n" +
			"Rows that the table no longer has stay in the topic, unless --replace sends a\n" +
			"truncate (op t) first. A table without a key is always replaced.",
		Example: "  walrelay snapshot -c walrelay.yaml --table public.orders\n" +
			"  walrelay snapshot -c walrelay.yaml --table public.orders --where \"id <= 1000\"\n" +
			"  walrelay snapshot -c walrelay.yaml --table public.orders --table public.items --replace",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.snapshot(cmd.Context(), f) },
	}
	a.addConfigFlag(cmd.Flags())
	flags := cmd.Flags()
	flags.StringArrayVar(&f.tables, "table", nil, "read table `T`, written schema.table as the catalog spells it, without SQL quotes; may be repeated")
	flags.StringVar(&f.where, "where", "", "read only the rows that meet this `SQL` condition")
	flags.BoolVar(&f.replace, "replace", false, "send a truncate first, so that rows that the table no longer has disappear too")
	flags.VarP(&f.output, "output", "o", "form of the answer: "+f.output.Type())
	return cmd
}

func (a *app) snapshot(ctx context.Context, f snapshotFlags) error {
	r, err := request.New(f.tables, f.where, f.replace, time.Now())
	if err != nil {
		return snapshotExit(err)
	}
	c, err := a.loadWALConfig("which reads pending outbox rows and no others: take the mark off the rows that are to be published again")
	if err != nil {
		return err
	}
	o, err := requestOptions(c, a)
	if err != nil {
		return err
	}
	offset, err := request.Send(ctx, o, r)
	if err != nil {
		return snapshotExit(err)
	}
	return a.printRequest(f.output.value, newAnswer(c, r, offset))
}

// snapshotExit gives an error of the request its exit code.
func snapshotExit(err error) error {
	var usage *request.UsageError
	switch {
	case errors.As(err, &usage):
		return &exitError{exitUsage, err}
	case checkpoint.IsRefusal(err):
		return &exitError{exitRefused, err}
	}
	return err
}

// requestOptions turns the configuration into a request's options.
func requestOptions(c config.Config, a *app) (request.Options, error) {
	log, err := newLogger(c, a.stderr)
	if err != nil {
		return request.Options{}, err
	}
	o, err := relayOptions(c, log, prometheus.NewRegistry())
	if err != nil {
		return request.Options{}, &exitError{exitUsage, err}
	}
	dsn := c.Source.DSN
	if !c.Source.PrimaryDSN.IsZero() {
		dsn = c.Source.PrimaryDSN
	}
	return request.Options{
		Connect:      replication.NewConnector(dsn.Reveal(), o.AppName, o.ConnOptions...),
		Publications: o.Publications,
		Existing:     o.Existing,
		Keys:         c.Source.Keys,
		Kafka:        o.Kafka,
		Checkpoint:   o.Checkpoint,
	}, nil
}

// answer is what snapshot -o json prints.
type answer struct {
	Request string   `json:"request"`
	Tables  []string `json:"tables"`
	Where   *string  `json:"where"`
	Replace bool     `json:"replace"`
	Topic   string   `json:"topic"`
	Offset  int64    `json:"offset"`
	// Status is where progress is seen; null where admin.listen is off.
	Status *string `json:"status"`
}

func newAnswer(c config.Config, r checkpoint.Request, offset int64) answer {
	out := answer{Request: r.ID, Tables: r.Tables, Replace: r.Replace, Topic: c.Kafka.CheckpointTopic, Offset: offset}
	if r.Where != "" {
		out.Where = &r.Where
	}
	if c.Admin.Listen != "" {
		url := "http://" + c.Admin.Listen + "/status"
		out.Status = &url
	}
	return out
}

func (a *app) printRequest(form string, out answer) error {
	if form == "json" {
		return printJSON(a.stdout, out)
	}
	if _, err := fmt.Fprint(a.stdout, out.text()); err != nil {
		return fmt.Errorf("print the answer: %w", err)
	}
	return nil
}

// text is the answer for people.
func (out answer) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "asked for a snapshot of %s", strings.Join(out.Tables, ", "))
	if out.Where != nil {
		fmt.Fprintf(&b, " where %s", *out.Where)
	}
	if out.Replace {
		b.WriteString(", each emptied in its topic first")
	}
	fmt.Fprintf(&b, "\nrequest %s, at offset %d of %s: a running connector takes it at once, a stopped one when it starts\n", out.Request, out.Offset, out.Topic)
	if out.Status != nil {
		fmt.Fprintf(&b, "progress: %s, and the log of walrelay run\n", *out.Status)
	} else {
		b.WriteString("progress: in the log of walrelay run\n")
	}
	return b.String()
}

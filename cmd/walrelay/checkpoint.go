package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/config"
	"github.com/walrelay/walrelay/internal/replay"
	"github.com/walrelay/walrelay/router"
)

// noCheckpoint says why polling has none.
const noCheckpoint = "which stores no position: what is published is what is marked in the outbox table"

// newCheckpointCommand is checkpoint: the stored position, and how to move it.
func newCheckpointCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "checkpoint", Short: "Show or move the stored position", Args: unknownCommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	show := &cobra.Command{
		Use: "show -c FILE", Short: "Show the stored checkpoint, as JSON", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.checkpointShow(cmd.Context()) },
	}
	a.addConfigFlag(show.Flags())
	var f setFlags
	set := &cobra.Command{
		Use:   "set -c FILE [--lsn L] [--accept-source] [--yes]",
		Short: "Move the connector to another position",
		Long: "Moves the stopped connector: forwards, which skips what is committed between (it is\n" +
			"counted and said), or backwards to an LSN that the anchor still holds, by replacing\n" +
			"the slot with a copy of the anchor. --accept-source takes another system identifier,\n" +
			"after pg_upgrade or a restore of a dump. Refused beside a live instance.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.checkpointSet(cmd.Context(), f) },
	}
	a.addConfigFlag(set.Flags())
	set.Flags().StringVar(&f.lsn, "lsn", "", "go on behind this LSN, `X/Y` or a record's position")
	set.Flags().BoolVar(&f.acceptSource, "accept-source", false, "take the server as the checkpoint's")
	set.Flags().BoolVar(&f.yes, "yes", false, "do not ask")
	set.MarkFlagsOneRequired("lsn", "accept-source")
	cmd.AddCommand(show, set)
	return cmd
}

type setFlags struct {
	lsn               string
	acceptSource, yes bool
}

// shownCheckpoint is what checkpoint show prints.
type shownCheckpoint struct {
	Topic        string                           `json:"topic"`
	LSN          string                           `json:"lsn"`
	CommitLSN    string                           `json:"commit_lsn"`
	CommitTime   *time.Time                       `json:"commit_time"`
	CutCommitLSN string                           `json:"cut_commit_lsn,omitempty"`
	CutChanges   uint64                           `json:"cut_changes,omitempty"`
	SystemID     string                           `json:"system_id"`
	Database     string                           `json:"database"`
	Timeline     int32                            `json:"timeline"`
	Publications map[string]string                `json:"publications"`
	Partitions   map[string]int32                 `json:"partitions"`
	Tables       map[string]checkpoint.TableState `json:"tables"`
}

func (a *app) checkpointShow(ctx context.Context) error {
	c, err := a.loadWALConfig(noCheckpoint)
	if err != nil {
		return err
	}
	o, err := a.replayOptions(c, replayFlags{})
	if err != nil {
		return err
	}
	client, err := router.NewAdminClient(o.Kafka)
	if err != nil {
		return err
	}
	defer client.Close()
	cp, found, err := ckafka.NewStore(client, o.Live).Look(ctx)
	if err != nil {
		return err
	}
	if !found {
		return fmt.Errorf("there is no checkpoint in topic %s: the connector has not run yet", o.Live.Topic)
	}
	out := shownCheckpoint{
		Topic: o.Live.Topic, LSN: cp.Position.LSN.String(), CommitLSN: cp.Position.CommitLSN.String(),
		SystemID: cp.Source.SystemID, Database: cp.Source.Database, Timeline: cp.Source.Timeline,
		Publications: map[string]string{}, Partitions: cp.Partitions, Tables: map[string]checkpoint.TableState{},
	}
	if t := cp.Position.CommitTime; !t.IsZero() {
		out.CommitTime = &t
	}
	if cut := cp.Position.Cut; !cut.IsZero() {
		out.CutCommitLSN, out.CutChanges = cut.CommitLSN.String(), cut.Changes
	}
	for _, p := range cp.Publications {
		out.Publications[p.Name] = p.Horizon.String()
	}
	for _, t := range cp.Tables {
		out.Tables[t.Table] = t.State
	}
	return printJSON(a.stdout, out)
}

// setOptions turns the configuration into the options by which the connector is moved: its
// own transactional id, and its own checkpoint topic.
func (a *app) setOptions(c config.Config) (replay.SetOptions, error) {
	o, err := a.replayOptions(c, replayFlags{inPlace: true})
	o.Producer.CheckpointTopic, o.Producer.TransactionalID = c.Kafka.CheckpointTopic, c.Kafka.TransactionalID
	return replay.SetOptions{Options: o}, err
}

func (a *app) checkpointSet(ctx context.Context, f setFlags) error {
	lsn, err := parseLSN("--lsn", f.lsn)
	if err != nil {
		return err
	}
	c, err := a.loadWALConfig(noCheckpoint)
	if err != nil {
		return err
	}
	o, err := a.setOptions(c)
	if err != nil {
		return err
	}
	o.LSN, o.AcceptSource = lsn, f.acceptSource
	o.Confirm = func(text string) error {
		if f.yes {
			_, err := fmt.Fprintln(a.stderr, text)
			return err
		}
		return a.confirm(ctx, text+"\nMove the connector?")
	}
	r, err := replay.Set(ctx, o)
	var usage *replay.UsageError
	switch {
	case errors.As(err, &usage):
		return &exitError{exitUsage, err}
	case checkpoint.IsRefusal(err):
		return &exitError{exitRefused, err}
	case err != nil:
		return err
	}
	return printJSON(a.stdout, r)
}

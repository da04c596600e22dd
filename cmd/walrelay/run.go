package main

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/admin"
	"github.com/walrelay/walrelay/internal/config"
	"github.com/walrelay/walrelay/internal/polling"
	"github.com/walrelay/walrelay/internal/relay"
)

// newRunCommand is run: the connector.
func newRunCommand(a *app) *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run -c FILE",
		Short: "Stream the database into Kafka until SIGTERM or SIGINT",
		Long: "Streams committed changes and outbox rows into Kafka, exactly once, and reads\n" +
			"beside the stream what was in the tables before (snapshot.mode), until\n" +
			"SIGTERM or SIGINT: then the batch in hand is delivered and confirmed within\n" +
			"stop-timeout, and the exit code is 0. A second signal aborts.\n\n" +
			"Another instance with the same configuration stands by and takes over.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.run(cmd.Context(), f) },
	}
	a.addConfigFlag(cmd.Flags())
	cmd.Flags().BoolVar(&f.untilCaughtUp, "until-caught-up", false, "end (exit 0) once everything committed before the start is in Kafka and every table is read")
	cmd.Flags().BoolVar(&f.takeover, "takeover", false, "first end the walsender that holds this connector's slot")
	return cmd
}

type runFlags struct {
	untilCaughtUp bool
	takeover      bool
}

func (a *app) run(ctx context.Context, f runFlags) error {
	c, err := a.loadConfig()
	if err != nil {
		return err
	}
	log, err := newLogger(c, a.stderr)
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	r, err := newConnector(c, f, log, registry)
	if err != nil {
		return &exitError{exitUsage, err}
	}
	info, _ := debug.ReadBuildInfo()
	log.Info().Str("version", versionLine(version, info)).Str("name", c.Name).Msg("walrelay starts")

	// The admin server ends with the relay and not with the signal: while the last batch
	// is delivered, whoever asks gets an answer.
	adminCtx, endAdmin := context.WithCancel(context.WithoutCancel(ctx))
	defer endAdmin()
	var g errgroup.Group
	relayCtx, endRelay := context.WithCancelCause(ctx)
	defer endRelay(nil)
	g.Go(func() error {
		err := admin.Run(adminCtx, admin.Options{
			Listen:   c.Admin.Listen,
			Token:    c.Admin.Token,
			Gatherer: registry,
			Status:   r.status,
			Healthy:  func() error { return nil },
			Ready:    r.ready,
			Logger:   log.With().Str("component", "admin").Logger(),
		})
		if err != nil {
			endRelay(err)
			return fmt.Errorf("admin server: %w", err)
		}
		return nil
	})
	g.Go(func() error {
		defer endAdmin()
		return r.run(relayCtx)
	})
	err = g.Wait()
	switch {
	case err == nil:
		log.Info().Msg("walrelay ends")
		return nil
	case checkpoint.IsRefusal(err):
		return &exitError{exitRefused, err}
	}
	return err
}

// connector is what run runs, in either mode.
type connector struct {
	run    func(context.Context) error
	status func() any
	ready  func() error
}

func newConnector(c config.Config, f runFlags, log zerolog.Logger, registry prometheus.Registerer) (connector, error) {
	o, err := relayOptions(c, log, registry)
	if err != nil {
		return connector{}, err
	}
	if c.Source.Mode == config.ModePolling {
		if f.takeover {
			return connector{}, errors.New("--takeover ends the session that holds the slot, and source.mode polling has none; leave it out: instances share the work")
		}
		p := polling.New(pollingOptions(c, f, o, log))
		return connector{p.Run, func() any { return p.Status() }, p.Ready}, nil
	}
	o.UntilCaughtUp, o.Takeover = f.untilCaughtUp, f.takeover
	r := relay.New(o)
	return connector{r.Run, func() any { return r.Status() }, r.Ready}, nil
}

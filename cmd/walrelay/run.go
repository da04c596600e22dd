package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

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
	"github.com/walrelay/walrelay/internal/replay"
	"github.com/walrelay/walrelay/router"
)

// newRunCommand is run: the connector.
func newRunCommand(a *app) *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run -c FILE [--from-lsn L] [--takeover] [--until-caught-up]",
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
	cmd.Flags().StringVar(&f.fromLSN, "from-lsn", "", "first go back to this LSN, `X/Y` or a record's position, once: a restart with the same one goes on")
	return cmd
}

type runFlags struct {
	untilCaughtUp bool
	takeover      bool
	fromLSN       string
}

func (a *app) run(ctx context.Context, f runFlags) error {
	from, err := parseLSN("--from-lsn", f.fromLSN)
	if err != nil {
		return err
	}
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
	r, err := a.newConnector(c, f, from, log, registry)
	if err != nil {
		return &exitError{exitUsage, err}
	}
	info, _ := debug.ReadBuildInfo()
	log.Info().Str("version", versionLine(version, info)).Str("name", c.Name).Msg("walrelay starts")
	deafen := hearHangups(log)
	defer deafen()

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

// hearHangups keeps SIGHUP, which tells others to read their configuration again, from
// ending the process. The function that it returns ends it.
func hearHangups(log zerolog.Logger) func() {
	signals, ended := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(signals, syscall.SIGHUP)
	go func() {
		defer close(ended)
		for range signals {
			log.Warn().Msg("SIGHUP: the configuration is read at the start alone; restart to apply a changed one, which loses and doubles nothing")
		}
	}()
	return func() {
		signal.Stop(signals)
		close(signals)
		<-ended
	}
}

// connector is what run runs, in either mode.
type connector struct {
	run    func(context.Context) error
	status func() any
	ready  func() error
}

func (a *app) newConnector(c config.Config, f runFlags, from checkpoint.LSN, log zerolog.Logger, registry prometheus.Registerer) (connector, error) {
	o, err := relayOptions(c, log, registry)
	if err != nil {
		return connector{}, err
	}
	o.Kafka.Hooks = router.ClientMetrics(registry)
	o.Producer.Client.Hooks = o.Kafka.Hooks
	if c.Source.Mode == config.ModePolling {
		if f.takeover {
			return connector{}, errors.New("--takeover ends the session that holds the slot, and source.mode polling has none; leave it out: instances share the work")
		}
		if from > 0 {
			return connector{}, errors.New("--from-lsn goes back in the WAL, which source.mode polling does not read; leave it out")
		}
		p := polling.New(pollingOptions(c, f, o, log))
		return connector{p.Run, func() any { return p.Status() }, p.Ready}, nil
	}
	o.UntilCaughtUp, o.Takeover = f.untilCaughtUp, f.takeover
	if from > 0 {
		set, err := a.setOptions(c)
		if err != nil {
			return connector{}, err
		}
		set.LSN, set.Once, set.Takeover = from, true, f.takeover
		o.Rewind = func(ctx context.Context) error { return rewind(ctx, set, log) }
	}
	r := relay.New(o)
	return connector{r.Run, func() any { return r.Status() }, r.Ready}, nil
}

// rewind is --from-lsn.
func rewind(ctx context.Context, o replay.SetOptions, log zerolog.Logger) error {
	o.Confirm = func(text string) error {
		log.Warn().Stringer("lsn", o.LSN).Msg(text)
		return nil
	}
	r, err := replay.Set(ctx, o)
	if err != nil {
		return fmt.Errorf("--from-lsn: %w", err)
	}
	if r.Already {
		log.Info().Stringer("lsn", o.LSN).Msg("--from-lsn was done by an earlier start and is recorded in the checkpoint: going on; to go back to it again: walrelay checkpoint set -c FILE --lsn")
		return nil
	}
	log.Info().Str("from", r.From).Str("to", r.To).Msg("--from-lsn is done and recorded in the checkpoint")
	return nil
}

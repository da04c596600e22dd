package admin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/internal/config"
)

// Options says what the server shows and where. Functions are called from the
// server's goroutines, several at a time; a nil one means that there is nothing
// to say (healthy, ready, empty status).
type Options struct {
	Listen   string        // host:port; empty turns the server off
	Token    config.Secret // asked for as a Bearer token by all but /healthz and /readyz; empty: none
	Gatherer prometheus.Gatherer
	Status   func() any   // encoded as JSON by /status
	Healthy  func() error // nil while the process makes sense; otherwise /healthz is 503
	Ready    func() error // nil while it does its job; otherwise /readyz is 503
	Logger   zerolog.Logger

	// OnListen, if there, is told the address once the server listens: with port
	// 0 nobody else knows it.
	OnListen func(net.Addr)
}

const (
	// A second walrelay on the same machine stands by with the same
	// configuration, so the address is in use until the first one ends. The
	// retry must be quick enough for a takeover to be seen, and cost nothing.
	retryFirst = 250 * time.Millisecond
	retryMax   = 5 * time.Second

	// shutdownBudget is for requests in flight. They take milliseconds; a
	// scraper that hangs must not hold the exit up.
	shutdownBudget = 2 * time.Second
)

// Run serves until ctx ends, and returns nil then. It returns nil at once where
// Listen is empty.
//
// An address that is in use does not end it: that is said once, and Run tries
// again until it succeeds, because pages are not worth a connector. Any other
// reason not to listen (a wrong address, a forbidden port) is an error.
func Run(ctx context.Context, o Options) error {
	if o.Listen == "" {
		return nil
	}
	listener, err := listen(ctx, o)
	if err != nil || listener == nil {
		return err
	}
	o.Logger.Info().Stringer("address", listener.Addr()).Msg("admin server listening")
	if o.OnListen != nil {
		o.OnListen(listener.Addr())
	}
	return serve(ctx, newServer(o), listener)
}

// listen opens the address, waiting for it to become free. It returns nil, nil
// when ctx ended first.
func listen(ctx context.Context, o Options) (net.Listener, error) {
	var lc net.ListenConfig
	for retry, waited := retryFirst, false; ; retry = min(2*retry, retryMax) {
		l, err := lc.Listen(ctx, "tcp", o.Listen)
		switch {
		case err == nil:
			if waited {
				o.Logger.Info().Str("address", o.Listen).Msg("admin address became free")
			}
			return l, nil
		case ctx.Err() != nil:
			return nil, nil
		case !errors.Is(err, syscall.EADDRINUSE):
			return nil, fmt.Errorf("listen on admin.listen: %w; correct the address, or set it to \"\" to turn the server off", err)
		case !waited:
			waited = true
			o.Logger.Warn().Str("address", o.Listen).Err(err).
				Str("hint", "another process has it, perhaps a second walrelay; the pages are missing here until it is free, or set another admin.listen").
				Msg("admin address in use, trying again")
		}
		select {
		case <-ctx.Done():
			return nil, nil
		case <-time.After(retry):
		}
	}
}

// newServer sets every timeout: the server is often reachable by more than its
// scraper, and a slow client must not pile up connections in a process that
// has a stream to serve.
func newServer(o Options) *http.Server {
	return &http.Server{
		Handler:           newHandler(o),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
}

// serve runs the server and takes it down in order when ctx ends: no new
// connections, then those in flight within the budget, then all.
func serve(ctx context.Context, server *http.Server, listener net.Listener) error {
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve admin pages: %w", err)
	case <-ctx.Done():
	}
	// ctx has ended; the requests in flight have a budget of their own.
	budget, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownBudget)
	defer cancel()
	if server.Shutdown(budget) != nil {
		_ = server.Close() // nothing is written here that could be lost
	}
	<-failed
	return nil
}

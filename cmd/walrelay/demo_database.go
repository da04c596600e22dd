package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/internal/demo"
	"github.com/walrelay/walrelay/internal/pgserver"
)

// demoDatabase is a server that is shut down at the end before it is removed.
type demoDatabase struct{ *pgserver.Server }

func (d demoDatabase) Close() error {
	return errors.Join(d.Stop(pgserver.Fast), d.Server.Close())
}

// startDemoDatabase starts the demo's PostgreSQL in dir.
func startDemoDatabase(ctx context.Context, dir string, say func(string)) (demo.Database, error) {
	major, err := demoMajor(ctx, noteWriter{say})
	if err != nil {
		return nil, err
	}
	// Log stays nil: it would get the server's own log, too.
	server, err := pgserver.Start(ctx, pgserver.Options{Major: major, Dir: dir})
	if err != nil {
		return nil, err
	}
	return demoDatabase{server}, nil
}

// demoMajor obtains the newest PostgreSQL, or finds out which version the system
// has: unlike a test, the demo works with any.
func demoMajor(ctx context.Context, log noteWriter) (int, error) {
	_, fetchErr := pgserver.Binaries(ctx, pgserver.DefaultMajor, log)
	if fetchErr == nil {
		return pgserver.DefaultMajor, nil
	}
	for _, major := range slices.Backward(pgserver.Majors()) {
		if _, err := os.Stat(filepath.Join("/usr/lib/postgresql", strconv.Itoa(major), "bin", "initdb")); err != nil {
			continue
		}
		if _, err := pgserver.Binaries(ctx, major, log); err == nil {
			return major, nil
		}
	}
	return 0, fmt.Errorf("%w; any of the versions %v will do", fetchErr, pgserver.Majors())
}

// noteWriter passes whole lines on.
type noteWriter struct{ say func(string) }

func (w noteWriter) Write(p []byte) (int, error) {
	w.say(strings.TrimSpace(string(p)))
	return len(p), nil
}

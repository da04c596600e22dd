package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/walrelay/walrelay/internal/demo"
	"github.com/walrelay/walrelay/internal/pgserver"
)

// startDemoDatabase starts the demo's PostgreSQL: fetched once, or the system's.
func startDemoDatabase(ctx context.Context, dir string, say func(string)) (demo.Database, error) {
	// The fetch is worth a line; what the server itself says is not.
	if _, err := pgserver.Binaries(ctx, pgserver.DefaultMajor, lines(say)); err != nil {
		return nil, fmt.Errorf("start the demo's PostgreSQL: %w", err)
	}
	server, err := pgserver.Start(ctx, pgserver.Options{Dir: dir})
	if err != nil {
		return nil, fmt.Errorf("start the demo's PostgreSQL: %w", err)
	}
	return server, nil
}

// lines hands what is written to it on, line by line.
type lines func(string)

func (l lines) Write(p []byte) (int, error) {
	for line := range strings.Lines(string(p)) {
		l(strings.TrimRight(line, "\n"))
	}
	return len(p), nil
}

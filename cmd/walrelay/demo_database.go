package main

import (
	"context"

	"github.com/walrelay/walrelay/internal/demo"
	"github.com/walrelay/walrelay/internal/demo/localpg"
)

// startDemoDatabase starts the demo's PostgreSQL in dir.
func startDemoDatabase(ctx context.Context, dir string, _ func(string)) (demo.Database, error) {
	return localpg.Start(ctx, dir)
}

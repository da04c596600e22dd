package replication

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
)

// ReadSource is ReadDatabase with the system identifier for certain: where the role may not
// read it from SQL, a replication connection by cfg (WalsenderConfig) tells it.
func ReadSource(ctx context.Context, conn *pgx.Conn, cfg *pgconn.Config) (Database, error) {
	db, err := ReadDatabase(ctx, conn)
	if err != nil || db.SystemID != "" {
		return db, err
	}
	side, err := Open(ctx, cfg)
	if err != nil {
		return db, err
	}
	defer side.Abort()
	system, err := side.Identify(ctx)
	db.SystemID = system.SystemID
	return db, err
}

// ReadHistory reads the switches to the server's timeline that the timeline of a checkpoint
// is looked up in (CheckTimeline); none where the two are the same or the server's is the first.
func ReadHistory(ctx context.Context, cfg *pgconn.Config, cp checkpoint.Source, timeline int32) ([]TimelineSwitch, error) {
	if timeline == cp.Timeline || timeline <= 1 {
		return nil, nil
	}
	side, err := Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer side.Abort()
	content, err := side.TimelineHistory(ctx, timeline)
	if err != nil {
		return nil, err
	}
	return ParseTimelineHistory(content)
}

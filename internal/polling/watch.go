package polling

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/walrelay/walrelay/replication"
)

// errShape says that a table's columns are not those that the session knows: it begins
// anew, with the new ones.
var errShape = errors.New("an outbox table was altered")

const (
	watchInterval = 5 * time.Second
	watchTimeout  = 10 * time.Second
)

// watch measures the tables beside the rounds, on a connection of its own, until ctx ends.
// Counting a table without an index on what is pending takes long, and no round waits for
// it. Where a table was altered it says so, with errShape, and ends.
func (s *session) watch(ctx context.Context, altered chan<- error) {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	w := watcher{s: s}
	defer w.disconnect(ctx)
	for {
		err := w.look(ctx)
		switch {
		case errors.Is(err, errShape):
			altered <- err
			return
		case err != nil && ctx.Err() == nil:
			if err.Error() != w.said {
				s.log.Warn().Err(err).Msg("measuring the outbox tables: trying again")
			}
			w.said = err.Error()
			w.disconnect(ctx)
		case err == nil:
			w.said = ""
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

type watcher struct {
	s    *session
	conn *replication.Conn
	said string
}

func (w *watcher) disconnect(ctx context.Context) {
	if w.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := w.conn.Close(ctx); err != nil {
		w.s.log.Debug().Err(err).Msg("watching connection closed")
	}
	w.conn = nil
}

func (w *watcher) look(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, watchTimeout)
	defer cancel()
	if w.conn == nil {
		if w.conn, err = w.s.p.connect(ctx); err != nil {
			return err
		}
	}
	var oids []uint32
	for _, t := range w.s.tables {
		oids = append(oids, t.relation.OID)
	}
	now, err := replication.Describe(ctx, w.conn, oids)
	if err != nil {
		return err
	}
	list := make([]TableStatus, len(w.s.tables))
	for i, t := range w.s.tables {
		if !reflect.DeepEqual(now[t.relation.OID], t.relation) {
			return fmt.Errorf("%w: %s", errShape, t.name())
		}
		n, age, err := w.s.p.pending.Count(ctx, w.conn, &t.mark)
		if err != nil {
			return err
		}
		list[i] = TableStatus{Table: t.name(), Pending: n, OldestSeconds: age}
	}
	w.s.p.measured(list, w.s.catalog.ISRShort())
	return nil
}

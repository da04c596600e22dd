package relay

import (
	"context"
	"slices"

	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/snapshot"
)

// news is what the monitor found, for the loop.
type news struct {
	seen     snapshot.MVCC    // the primary's current one; zero for none
	tables   []snapshot.Table // all that are published, if looked
	looked   bool
	released []uint32 // tables that need not wait any more
	requests []request
	next     int64 // the offset up to which requests were read; 0 where none were
	down     error // the server is shutting down
}

func (m *monitor) tell(ctx context.Context, n news) {
	select {
	case m.news <- n:
	case <-ctx.Done():
	}
}

// snapshots looks at what concerns the snapshot: which transactions the primary shows by
// now, which tables came and went, and who asked for tables to be read again.
func (m *monitor) snapshots(ctx context.Context, catalog bool) error {
	conn, err := m.primaryConn(ctx)
	if err != nil {
		return err
	}
	var n news
	if catalog {
		if err := m.tables(ctx, &n); err != nil {
			return err
		}
	}
	if err := m.requests(ctx, &n); err != nil {
		return err
	}
	waiting := m.s.waits.list()
	for oid := range m.bounds {
		if !slices.Contains(waiting, oid) {
			delete(m.bounds, oid)
		}
	}
	if n.seen, err = snapshot.Current(ctx, conn); err != nil {
		return err
	}
	var running []replication.RunningTransaction
	for _, oid := range waiting {
		bound, ok := m.bounds[oid]
		if !ok {
			// Only now: the loop remembers what passes of a table from the moment on at which it
			// says that it waits.
			if bound, err = replication.RunningBound(ctx, conn); err != nil {
				return err
			}
			m.bounds[oid] = bound
			continue
		}
		if n.seen.Xmin >= bound {
			n.released = append(n.released, oid)
			continue
		}
		if running == nil {
			if _, _, running, err = replication.HorizonReached(ctx, conn, bound); err != nil {
				return err
			}
			m.sayWaiting(running)
		}
	}
	if len(waiting) == 0 && m.saidWaiting {
		m.sayWaiting(nil)
	}
	m.tell(ctx, n)
	return nil
}

// sayWaiting says for which transactions tables wait, once.
func (m *monitor) sayWaiting(running []replication.RunningTransaction) {
	var list []string
	for _, t := range running {
		list = append(list, t.String())
	}
	m.s.r.setWaiting(list)
	if len(list) > 0 && !m.saidWaiting {
		m.log.Warn().Strs("transactions", list).Msg("reading tables waits until these transactions end: commit or roll them back, or end them with pg_terminate_backend(pid)")
	}
	m.saidWaiting = len(list) > 0
}

// primaryConn gives the connection to where tables are read.
func (m *monitor) primaryConn(ctx context.Context) (*replication.Conn, error) {
	if m.s.r.o.Snapshot.PrimaryDSN == "" {
		return m.conn, nil
	}
	if m.primary == nil {
		var err error
		if m.primary, err = m.s.r.primary(ctx); err != nil {
			return nil, err
		}
	}
	return m.primary, nil
}

// tables lists the published tables.
func (m *monitor) tables(ctx context.Context, n *news) error {
	tables, err := m.s.published(ctx, m.conn)
	if err != nil {
		return err
	}
	m.current = tables
	n.tables, n.looked = tables, true
	return nil
}

// requests reads who asked for tables to be read again.
func (m *monitor) requests(ctx context.Context, n *news) error {
	if m.current == nil {
		return nil // the tables were not looked at yet; next time
	}
	list, next, err := readRequests(ctx, m.store, m.from, m.current)
	if err != nil {
		return err
	}
	m.from, n.requests, n.next = next, list, next
	return nil
}

// newStore makes the monitor's own: a Store belongs to one goroutine.
func (s *session) newStore() *ckafka.Store { return ckafka.NewStore(s.admin, s.r.o.Checkpoint) }

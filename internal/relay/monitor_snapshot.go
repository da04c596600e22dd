package relay

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/snapshot"
)

// news is what the monitor found, for the loop.
type news struct {
	seen     snapshot.MVCC    // the primary's current one; zero for none
	tables   []snapshot.Table // all that are published, if looked
	looked   bool
	trees    []treeNews      // what changed in the partitions of tables
	released []snapshot.Wait // that are over
	requests []checkpoint.Request
	from     int64 // the offset from which requests were read
	next     int64 // the offset up to which they were; 0 where none were
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
		if n.tables, err = m.s.published(ctx, m.conn, m.s.named); err != nil {
			return err
		}
		n.looked = true
	}
	waiting := m.s.waits.list()
	maps.DeleteFunc(m.bounds, func(w snapshot.Wait, _ checkpoint.XID) bool { return !slices.Contains(waiting, w) })
	if n.seen, err = snapshot.Current(ctx, conn); err != nil {
		return err
	}
	var running []replication.RunningTransaction
	for _, w := range waiting {
		bound, ok := m.bounds[w]
		if !ok {
			// Only now: the loop remembers what passes of a table from the moment on at which it
			// says that it waits.
			if bound, err = replication.RunningBound(ctx, conn); err != nil {
				return err
			}
			m.bounds[w] = bound
			continue
		}
		// A table that the stream brought is not read before its partitions were looked at:
		// one that is attached later has to be noticed.
		if listed := func(t snapshot.Table) bool { return t.OID == w.OID }; n.seen.Xmin >= bound && !slices.ContainsFunc(m.listed, listed) {
			continue
		}
		if n.seen.Xmin >= bound {
			n.released = append(n.released, w)
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
	if catalog {
		// At the end: what it has found once it finds no more, so that it has to be told.
		if n.trees, err = m.s.watch.look(ctx, m.conn, m.s.named, n.tables); err != nil {
			return err
		}
		m.listed = n.tables
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
	if m.s.primary == nil {
		return m.conn, nil
	}
	if m.primary == nil {
		var err error
		m.primary, err = m.s.primary.connect(ctx)
		return m.primary, err
	}
	return m.primary, m.s.primary.alive(ctx)
}

// watchRequests reads who asks for tables to be read again, on its own: a Kafka that
// stands still must not keep the monitor from looking.
func (s *session) watchRequests(ctx context.Context, from int64, tell chan<- news) {
	store := ckafka.NewStore(s.admin, s.r.o.Checkpoint) // a Store belongs to one goroutine
	tick := time.NewTicker(sampleInterval)
	defer tick.Stop()
	said := ""
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		list, next, err := store.Requests(ctx, from)
		switch {
		case err != nil && ctx.Err() == nil && err.Error() != said:
			said = err.Error()
			s.log.Warn().Err(err).Msg("looking for requests for snapshots: trying again")
		case err == nil:
			said = ""
			select {
			case tell <- news{requests: list, from: from, next: next}:
			case <-ctx.Done():
				return
			}
			from = next
		}
	}
}

package relay

import (
	"context"
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/snapshot"
)

// request is one from the checkpoint topic, with the tables that it is about.
type request struct {
	checkpoint.Request
	tables []snapshot.Table
	from   int64 // the offset from which it was read
	// unknown are the tables that it names and that are not captured.
	unknown []string
}

// requests are those not taken over yet. They are taken in their order, each once none of
// its tables is being read any more.
type requests struct {
	queue  []request
	next   int64 // the offset up to which requests were read
	taken  []string
	moving bool // a checkpoint has to hold what changed
}

// take takes over what the monitor read, and what could not be taken over before.
func (q *requests) take(g *merging, n news) {
	q.queue = append(q.queue, n.requests...)
	if n.next > q.next {
		q.next = n.next
	}
	for len(q.queue) > 0 && q.free(g) {
		r := q.queue[0]
		q.queue = q.queue[1:]
		q.start(g, r)
	}
}

// readRequests reads those written from an offset on, and finds their tables among the
// published ones. next is the offset to go on with.
func readRequests(ctx context.Context, store *ckafka.Store, from int64, published []snapshot.Table) (list []request, next int64, err error) {
	asked, next, err := store.Requests(ctx, from)
	if err != nil {
		return nil, from, onKafka(err)
	}
	for _, a := range asked {
		r := request{Request: a, from: from}
		for _, name := range a.Tables {
			i := slices.IndexFunc(published, func(t snapshot.Table) bool { return t.String() == name && !t.Outbox })
			if i < 0 {
				r.unknown = append(r.unknown, name)
				continue
			}
			r.tables = append(r.tables, published[i])
		}
		list = append(list, r)
	}
	return list, next, nil
}

// free tells whether none of the first request's tables is being read.
func (q *requests) free(g *merging) bool {
	for _, t := range q.queue[0].tables {
		if p, known := g.merger.Known(t.OID); known && p.State != checkpoint.TableDone {
			return false
		}
	}
	return true
}

func (q *requests) start(g *merging, r request) {
	log := g.l.s.log
	q.taken, q.moving = append(q.taken, r.ID), true
	for _, name := range r.unknown {
		log.Error().Str("request", r.ID).Str("table", name).Msg("snapshot asked for a table that is not captured (see source.tables): left out")
	}
	for _, t := range r.tables {
		if t.Whole && r.Where != "" {
			log.Error().Str("request", r.ID).Str("table", t.String()).Msg("snapshot asked for a part of a table that can only be read whole: left out; ask for it without a condition")
			continue
		}
		asked := r.Request
		g.merger.Add(t, checkpoint.TableProgress{Table: t.String(), State: checkpoint.TableWaiting, Request: &asked})
		g.merger.Note(t.OID)
		log.Info().Str("request", r.ID).Str("table", t.String()).Str("where", r.Where).Bool("replace", r.Replace).
			Msg("snapshot asked for: rows are read once every transaction that is running now has ended")
	}
}

// checkpoint puts what was taken over into a checkpoint.
func (q *requests) checkpoint(cp *checkpoint.Checkpoint) {
	cp.Requests = q.next
	if len(q.queue) > 0 {
		cp.Requests = q.queue[0].from
	}
	cp.TakenOver = q.taken
	q.taken, q.moving = nil, false
}

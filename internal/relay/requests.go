package relay

import (
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/snapshot"
)

// request is one from the checkpoint topic.
type request struct {
	checkpoint.Request
	from  int64 // the offset from which it was read
	looks int   // how often the catalog had been looked at when it came
}

// requests are those not taken over yet. They are taken in their order, each once none of
// its tables is being read any more.
type requests struct {
	queue  []request
	next   int64 // the offset up to which requests were read
	looks  int   // how often the catalog was looked at
	taken  []string
	moving bool // a checkpoint has to hold what changed
}

// take takes over what was read, and what could not be taken over before.
func (q *requests) take(g *merging, n news) {
	for _, r := range n.requests {
		q.queue = append(q.queue, request{r, n.from, q.looks})
	}
	if n.next > q.next {
		q.next = n.next
	}
	for len(q.queue) > 0 {
		r := q.queue[0]
		tables, unknown := resolve(r.Request, g.published)
		if len(unknown) > 0 && q.looks < r.looks+2 {
			return // a table that was made a moment ago may not have been seen yet
		}
		if !free(g, tables) {
			return
		}
		q.queue = q.queue[1:]
		q.start(g, r, tables, unknown)
	}
}

// resolve finds a request's tables among the published ones.
func resolve(r checkpoint.Request, published []snapshot.Table) (tables []snapshot.Table, unknown []string) {
	for _, name := range r.Tables {
		i := slices.IndexFunc(published, func(t snapshot.Table) bool { return t.String() == name && !t.Outbox })
		if i < 0 {
			unknown = append(unknown, name)
			continue
		}
		tables = append(tables, published[i])
	}
	return tables, unknown
}

// free tells whether none of the tables is being read.
func free(g *merging, tables []snapshot.Table) bool {
	for _, t := range tables {
		if p, known := g.merger.Known(t.OID); known && p.State != checkpoint.TableDone {
			return false
		}
	}
	return true
}

func (q *requests) start(g *merging, r request, tables []snapshot.Table, unknown []string) {
	log := g.l.s.log
	q.taken, q.moving = append(q.taken, r.ID), true
	for _, name := range unknown {
		log.Error().Str("request", r.ID).Str("table", name).Msg("snapshot asked for a table that is not captured (see source.tables): left out")
	}
	for _, t := range tables {
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

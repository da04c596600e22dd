package relay

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/snapshot"
)

// partitions is the loop's part in watching them: it has the rows of those that were
// attached read, and says which rows left a table without a delete.
//
// A tree goes into the checkpoint only when all that its look asked for was taken over:
// with the request for the rows, in the same Kafka transaction. What a restart finds
// otherwise it finds again.
type partitions struct {
	known   map[uint32]checkpoint.Tree // what the checkpoint has, or the next one
	next    map[uint32]checkpoint.Tree // what becomes known
	wanted  map[uint32]map[uint32]attachedPart
	files   []treeNews // whose files are to be judged
	changed map[uint32]bool
}

func newPartitions(known map[uint32]checkpoint.Tree) partitions {
	p := partitions{
		known: maps.Clone(known), next: map[uint32]checkpoint.Tree{},
		wanted: map[uint32]map[uint32]attachedPart{}, changed: map[uint32]bool{},
	}
	if p.known == nil {
		p.known = map[uint32]checkpoint.Tree{}
	}
	return p
}

// take takes what a look found, and what could not be done before.
func (p *partitions) take(g *merging, list []treeNews) {
	for _, n := range list {
		p.next[n.root] = n.tree
		for oid, part := range n.attached {
			if p.wanted[n.root] == nil {
				p.wanted[n.root] = map[uint32]attachedPart{}
			}
			p.wanted[n.root][oid] = part
		}
		if t, ok := publishedTable(g, n.root); ok && !t.Outbox { // whose deletes are no events
			for _, l := range n.lost {
				p.lost(g, t, l)
			}
			if len(n.files) > 0 {
				p.files = append(p.files, n)
			}
		}
	}
	p.judge(g)
	for root, parts := range p.wanted {
		if p.read(g, root, parts) {
			delete(p.wanted, root)
		}
	}
	for root, tree := range p.next {
		if p.wanted[root] == nil && !slices.ContainsFunc(p.files, func(n treeNews) bool { return n.root == root }) {
			p.settle(root, tree)
		}
	}
}

// settle takes a tree into the next checkpoint.
func (p *partitions) settle(root uint32, tree checkpoint.Tree) {
	tree = maps.Clone(tree)
	for oid, part := range tree {
		if old := p.known[root][oid]; old.File == part.File {
			part.Truncated = old.Truncated
			tree[oid] = part
		}
	}
	p.known[root], p.changed[root] = tree, true
	delete(p.next, root)
}

// read has the rows of attached partitions read, as far as that is possible now: true
// once there is nothing left to do.
func (p *partitions) read(g *merging, root uint32, parts map[uint32]attachedPart) bool {
	t, ok := publishedTable(g, root)
	if !ok {
		return true // should it come back it is read from the beginning
	}
	var names []string
	for _, part := range parts {
		names = append(names, part.name)
	}
	slices.Sort(names)
	log := g.l.s.log.With().Str("table", t.String()).Str("partitions", shown(names)).Logger()
	s, known := g.merger.Known(root)
	switch {
	case !g.l.s.wanted(t):
		log.Warn().Msg("partition with rows was attached: these rows are not sent, as the configuration does not want the rows that a table has before it is streamed")
		return true
	case t.Outbox:
		g.l.s.r.warnPartitions(root, fmt.Sprintf("%s was attached to outbox table %s: its rows from before are not sent as events; detach it, and insert those that are events through the table", shown(names), t))
		log.Error().Msg("partition with rows was attached to an outbox table: these rows are not sent as events, since nothing tells whether they were before; detach it, and insert those that are events through the table")
		return true
	case known && s.State == checkpoint.TableWaiting && unbounded(s), known && s.State == checkpoint.TablePending && unbounded(s) && !s.Whole && !t.Whole:
		return true // nothing of it is read yet, and what is to be has these rows
	case t.Whole || s.Whole:
		g.l.s.r.warnPartitions(root, fmt.Sprintf("%s was attached to %s, which can only be read whole: its rows from before are missing; repair with: %s", shown(names), t, repair(t)))
		log.Error().Str("hint", repair(t)).Msg("partition with rows was attached to a table without a key, which can only be read whole: these rows are missing in the topic")
		return true
	case known && s.State != checkpoint.TableDone:
		return false
	}
	asked := checkpoint.Request{ID: attachPrefix + checkpoint.NewRequestID(g.l.now), Tables: []string{t.String()}, At: g.l.now}
	oids := slices.Sorted(maps.Keys(parts))
	if !slices.Equal(oids, []uint32{root}) { // a partition that is published under its own name
		asked.Where = replication.InParts(oids)
		t.Where = bounded(oids, func(oid uint32) string { return parts[oid].condition })
		t.Estimate = -1
	}
	g.merger.Add(t, checkpoint.TableProgress{Table: t.String(), State: checkpoint.TableWaiting, Request: &asked})
	g.merger.Note(root)
	log.Info().Str("request", asked.ID).Msg("partition with rows was attached: they are read once every transaction that is running now has ended")
	return true
}

// unbounded tells that every row of a table is read.
func unbounded(p checkpoint.TableProgress) bool { return p.Request == nil || p.Request.Where == "" }

// attachPrefix begins the IDs of requests that the connector makes for attached partitions.
const attachPrefix = "attach-"

// attachedTo gives the partitions that such a request is for; nil for another one.
func attachedTo(r *checkpoint.Request) (oids []uint32) {
	if r == nil || !strings.HasPrefix(r.ID, attachPrefix) {
		return nil
	}
	for _, field := range strings.FieldsFunc(r.Where, func(c rune) bool { return c < '0' || c > '9' }) {
		if oid, err := strconv.ParseUint(field, 10, 32); err == nil {
			oids = append(oids, uint32(oid))
		}
	}
	return oids
}

// maxBounds is up to how many partitions' constraints a query names, and maxBound the
// length of one. Beyond it every partition is looked through for rows of those wanted.
const (
	maxBounds = 100
	maxBound  = 2000 // a default partition's names all others
)

// bounded joins the conditions of partitions, so that the planner leaves out all others;
// empty where one of them is not known.
func bounded(oids []uint32, condition func(uint32) string) string {
	if len(oids) > maxBounds {
		return ""
	}
	var list []string
	for _, oid := range oids {
		c := condition(oid)
		if c == "" || len(c) > maxBound {
			return ""
		}
		list = append(list, "("+c+")")
	}
	return strings.Join(list, " OR ")
}

// judge decides on leaves that have another file, once the stream has passed the look: a
// truncate of the whole table has been sent by then.
func (p *partitions) judge(g *merging) {
	p.files = slices.DeleteFunc(p.files, func(n treeNews) bool {
		if g.l.sent < n.end {
			return false
		}
		names := map[lostHow][]string{}
		for _, f := range n.files {
			k := p.known[n.root][f.oid]
			// Where a savepoint stands between, the catalog has the subtransaction.
			if k.Truncated != 0 && (k.Truncated == f.xid || f.all) {
				continue
			}
			names[f.how] = append(names[f.how], f.name)
		}
		if t, ok := publishedTable(g, n.root); ok {
			for _, how := range []lostHow{lostTruncated, lostMaybe} {
				if len(names[how]) > 0 {
					p.lost(g, t, lostParts{how, names[how]})
				}
			}
		}
		return true
	})
}

// lost says loudly that rows left a table without a delete.
func (p *partitions) lost(g *merging, t snapshot.Table, l lostParts) {
	slices.Sort(l.names)
	g.l.s.r.warnPartitions(t.OID, fmt.Sprintf("%s of %s: %s; the stream does not say which rows that took away, and they are in the topic still; repair with: %s",
		shown(l.names), t, l.how, repair(t)))
	g.l.s.log.Error().Str("table", t.String()).Str("partitions", shown(l.names)).Str("what", string(l.how)).Str("hint", repair(t)).
		Msg("partitions changed beside the stream: rows that this took out of the table are in the topic still")
}

// repair is the command that brings a topic in step with its table.
func repair(t snapshot.Table) string {
	return "walrelay snapshot -c FILE --table " + shellWord(t.String()) + " --replace"
}

// shellWord quotes a word where a shell needs it.
func shellWord(s string) string {
	if strings.IndexFunc(s, func(c rune) bool {
		return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '.' || c == '-')
	}) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// truncated takes a truncate of a whole table that the stream sends.
func (p *partitions) truncated(g *merging, c *replication.Change) {
	root := c.Relation.OID
	g.l.s.r.clearPartitions(root)
	tree := p.known[root]
	if len(tree) == 0 || c.Txn == nil {
		return
	}
	tree = maps.Clone(tree)
	for oid, part := range tree {
		if part.File != 0 {
			part.Truncated = uint32(c.Txn.XID)
			tree[oid] = part
		}
	}
	p.known[root], p.changed[root] = tree, true
}

// remove forgets a table that is not published any more.
func (p *partitions) remove(g *merging, root uint32) {
	delete(p.next, root)
	delete(p.wanted, root)
	g.l.s.r.clearPartitions(root)
	if p.known[root] != nil {
		delete(p.known, root)
		p.changed[root] = true
	}
}

// checkpoint puts what changed into a checkpoint.
func (p *partitions) checkpoint(cp *checkpoint.Checkpoint) {
	if len(p.changed) == 0 {
		return
	}
	cp.Trees = make(map[uint32]checkpoint.Tree, len(p.changed))
	for root := range p.changed {
		cp.Trees[root] = p.known[root]
	}
	clear(p.changed)
}

// finished tells whether nothing is left to do, and a checkpoint holds what was done.
func (p *partitions) finished() bool {
	return len(p.changed) == 0 && len(p.wanted) == 0 && len(p.files) == 0
}

func publishedTable(g *merging, oid uint32) (snapshot.Table, bool) {
	i := slices.IndexFunc(g.published, func(t snapshot.Table) bool { return t.OID == oid })
	if i < 0 {
		return snapshot.Table{}, false
	}
	return g.published[i], true
}

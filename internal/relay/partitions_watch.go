package relay

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/snapshot"
)

// treeWatch compares the partitions of the published tables with those of the last look:
// whoever attaches, detaches or truncates a partition changes what is in its root, and the
// stream says nothing of it. It belongs to whoever looks at the catalog: to the session
// while it starts, then to the monitor.
type treeWatch struct {
	known  map[uint32]checkpoint.Tree // as last looked, or as the checkpoint has it
	digest string
	gone   map[uint32]bool // roots that were not published when last looked
}

// treeNews is what a look found of one table.
type treeNews struct {
	root     uint32
	tree     checkpoint.Tree
	attached map[uint32]attachedPart // whose rows are to be read
	lost     []lostParts
	files    []newFile
	end      checkpoint.LSN // of the WAL at the look, where files is not empty
}

// attachedPart is a partition whose rows the stream has not sent.
type attachedPart struct {
	name string
	// condition holds for its rows, so that no other partition need be looked at; empty
	// where nothing is known.
	condition string
}

// lostParts are partitions whose rows left their table without a delete.
type lostParts struct {
	how   lostHow
	names []string
}

// lostHow says how rows left their table, for people.
type lostHow string

const (
	lostDetached  lostHow = "detached"
	lostDropped   lostHow = "dropped"
	lostAgain     lostHow = "detached and attached again"
	lostTruncated lostHow = "truncated"
	lostMaybe     lostHow = "truncated, or rewritten"
)

// newFile is a leaf that has another file than before. Whether rows are lost is decided
// when the stream has passed the look: it may be about to send a truncate of the root.
type newFile struct {
	oid  uint32
	name string
	xid  uint32 // of the transaction that made the file, as far as the catalog shows
	how  lostHow
	// all tells that every leaf of the table got its file from that transaction.
	all bool
}

func newTreeWatch(known map[uint32]checkpoint.Tree) *treeWatch {
	w := &treeWatch{known: maps.Clone(known), gone: map[uint32]bool{}}
	if w.known == nil {
		w.known = map[uint32]checkpoint.Tree{}
	}
	return w
}

// look gives what has changed since the last look at tables.
func (w *treeWatch) look(ctx context.Context, conn *replication.Conn, publications []string, tables []snapshot.Table) ([]treeNews, error) {
	oids := make([]uint32, len(tables))
	for i, t := range tables {
		oids[i] = t.OID
	}
	trees, digest, err := replication.PartitionTrees(ctx, conn, publications, oids, w.digest)
	if err != nil {
		return nil, err
	}
	w.forget(oids)
	var list []treeNews
	for _, t := range trees {
		n, err := w.compare(ctx, conn, publications, t)
		if replication.IsLocked(err) {
			digest = "" // somebody is at work on a partition: at the next look
			continue
		}
		if err != nil {
			return nil, err
		}
		if n != nil {
			list = append(list, *n)
		}
	}
	for _, n := range list {
		w.known[n.root] = n.tree
	}
	w.digest = digest
	return list, nil
}

// forget drops tables that are not published, as the loop does: who is missing twice.
func (w *treeWatch) forget(published []uint32) {
	gone := map[uint32]bool{}
	for root := range w.known {
		if slices.Contains(published, root) {
			continue
		}
		if w.gone[root] {
			delete(w.known, root)
			continue
		}
		gone[root] = true
	}
	w.gone = gone
}

// compare gives what changed of one table; nil for nothing.
func (w *treeWatch) compare(ctx context.Context, conn *replication.Conn, publications []string, t replication.PartitionTree) (*treeNews, error) {
	old, known := w.known[t.Root]
	d := diffTree(old, t)
	n := &treeNews{root: t.Root, tree: d.tree}
	if !known {
		return n, nil // taken as it is: whoever reads the table now finds all of it
	}
	if sameTree(old, d.tree) {
		return nil, nil
	}
	if err := w.bounds(ctx, conn, n, d); err != nil {
		return nil, err
	}
	return n, w.losses(ctx, conn, publications, n, d)
}

// bounds asks for the partitions that are to be read.
func (w *treeWatch) bounds(ctx context.Context, conn *replication.Conn, n *treeNews, d treeDiff) error {
	var oids []uint32
	for _, p := range d.attached {
		oids = append(oids, p.OID)
	}
	bounds, err := replication.ReadPartBounds(ctx, conn, oids)
	if err != nil {
		return err
	}
	n.attached = map[uint32]attachedPart{}
	for _, p := range d.attached {
		if b := bounds[p.OID]; b.Rows {
			n.attached[p.OID] = attachedPart{name: p.Name, condition: b.Condition}
		}
	}
	return nil
}

// losses looks at what left the table without the stream saying so. Where a publication
// does not send deletes or truncates in the first place, nothing is missed.
func (w *treeWatch) losses(ctx context.Context, conn *replication.Conn, publications []string, n *treeNews, d treeDiff) error {
	if len(d.gone)+len(d.again)+len(d.files) == 0 {
		return nil
	}
	deletes, truncates, err := replication.Removals(ctx, conn, publications, n.root)
	if err != nil {
		return err
	}
	if deletes {
		there, err := replication.Existing(ctx, conn, slices.Collect(maps.Keys(d.gone)))
		if err != nil {
			return err
		}
		var detached, dropped []string
		for oid, name := range d.gone {
			if there[oid] {
				detached = append(detached, name)
			} else {
				dropped = append(dropped, name)
			}
		}
		n.lose(lostDetached, detached)
		n.lose(lostDropped, dropped)
		n.lose(lostAgain, d.again)
	}
	if !truncates || len(d.files) == 0 {
		return nil
	}
	for _, p := range d.files {
		f, err := replication.ReadNewFile(ctx, conn, p.OID)
		if err != nil {
			return err
		}
		moved := f.Pages && w.known[n.root][p.OID].Space != p.Space
		if f.Gone || f.Kept || f.Altered || moved {
			continue // rewritten, with its rows; or for the next look
		}
		how := lostMaybe
		if f.Empty {
			how = lostTruncated
		}
		n.files = append(n.files, newFile{oid: p.OID, name: p.Name, xid: f.XID, how: how})
	}
	all := len(n.files) == d.leaves && !slices.ContainsFunc(n.files, func(f newFile) bool { return f.xid != n.files[0].xid })
	for i := range n.files {
		n.files[i].all = all
	}
	database, err := replication.ReadDatabase(ctx, conn)
	n.end = database.WALEnd
	return err
}

func (n *treeNews) lose(how lostHow, names []string) {
	if len(names) > 0 {
		slices.Sort(names)
		n.lost = append(n.lost, lostParts{how, names})
	}
}

// treeDiff is what differs between two looks at a table.
type treeDiff struct {
	tree     checkpoint.Tree
	leaves   int
	attached []replication.Part // leaves whose rows may be older than their attachment
	gone     map[uint32]string  // leaves that are not below the root any more
	again    []string           // attached anew, having been below the root before
	files    []replication.Part // leaves with another file
}

// diffTree compares a tree with what is known of it. A leaf's rows are all in the stream
// if each table from it up to the root was attached when last looked, in the same way, or
// was created as a partition: then nobody could write to the leaf before. Otherwise they
// are to be read.
func diffTree(old checkpoint.Tree, t replication.PartitionTree) treeDiff {
	d := treeDiff{tree: checkpoint.Tree{}, gone: map[uint32]string{}}
	parts := make(map[uint32]replication.Part, len(t.Parts))
	for _, p := range t.Parts {
		parts[p.OID] = p
	}
	strange := func(p replication.Part) bool {
		k, known := old[p.OID]
		return !(known && k.Link == p.Link) && !p.Born
	}
	for _, p := range t.Parts {
		d.tree[p.OID] = checkpoint.Part{Name: p.Name, Link: p.Link, File: p.File, Space: p.Space}
		if k, known := old[p.OID]; known && k.Link != p.Link {
			d.again = append(d.again, p.Name)
		}
		if !p.Leaf {
			continue
		}
		d.leaves++
		read := false
		for q, below := p, true; below && !read; q, below = parts[q.Parent] {
			read = strange(q)
		}
		switch k, known := old[p.OID]; {
		case read:
			d.attached = append(d.attached, p)
		case known && k.File != 0 && k.File != p.File:
			d.files = append(d.files, p)
		}
	}
	for oid, k := range old {
		if _, there := parts[oid]; !there && k.File != 0 {
			d.gone[oid] = k.Name
		}
	}
	return d
}

// sameTree tells whether nothing that is watched differs.
func sameTree(a, b checkpoint.Tree) bool {
	return maps.EqualFunc(a, b, func(p, q checkpoint.Part) bool {
		p.Truncated, q.Truncated = 0, 0
		return p == q
	})
}

// shown gives names for people, not too many of them.
func shown(names []string) string {
	const most = 5
	if n := len(names); n > most {
		return strings.Join(names[:most], ", ") + fmt.Sprintf(" and %d more", n-most)
	}
	return strings.Join(names, ", ")
}

package relay

import (
	"slices"
	"testing"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// A tree of a root, 1: a leaf, 2, and a partitioned table, 3, with a leaf, 4.
func treeOf(change func(parts map[uint32]*replication.Part)) replication.PartitionTree {
	parts := map[uint32]*replication.Part{
		2: {OID: 2, Parent: 1, Name: "leaf", Link: 10, File: 2, Leaf: true},
		3: {OID: 3, Parent: 1, Name: "mid", Link: 10},
		4: {OID: 4, Parent: 3, Name: "below", Link: 10, File: 4, Leaf: true},
	}
	if change != nil {
		change(parts)
	}
	t := replication.PartitionTree{Root: 1}
	for _, oid := range []uint32{2, 3, 4, 5} {
		if p := parts[oid]; p != nil {
			t.Parts = append(t.Parts, *p)
		}
	}
	return t
}

func TestWhatDiffersBetweenTwoLooksAtPartitions(t *testing.T) {
	known := diffTree(nil, treeOf(nil)).tree
	type parts = map[uint32]*replication.Part
	for what, c := range map[string]struct {
		change                       func(parts)
		attached, gone, again, files []string
	}{
		"nothing":                      {},
		"a leaf attached":              {change: func(p parts) { p[5] = &replication.Part{OID: 5, Parent: 1, Name: "new", Link: 11, File: 5, Leaf: true} }, attached: []string{"new"}},
		"a leaf attached further down": {change: func(p parts) { p[5] = &replication.Part{OID: 5, Parent: 3, Name: "new", Link: 11, File: 5, Leaf: true} }, attached: []string{"new"}},
		"a leaf created": {change: func(p parts) {
			p[5] = &replication.Part{OID: 5, Parent: 3, Name: "new", Link: 11, File: 5, Leaf: true, Born: true}
		}},
		"a leaf attached anew": {change: func(p parts) { p[2].Link = 11 }, attached: []string{"leaf"}, again: []string{"leaf"}},
		"a tree attached anew": {change: func(p parts) { p[3].Link = 11 }, attached: []string{"below"}, again: []string{"mid"}},
		"created while its parent was off": {change: func(p parts) {
			p[3].Link = 11
			p[5] = &replication.Part{OID: 5, Parent: 3, Name: "new", Link: 11, File: 5, Leaf: true, Born: true}
		}, attached: []string{"below", "new"}, again: []string{"mid"}},
		"a leaf gone":  {change: func(p parts) { delete(p, 2) }, gone: []string{"leaf"}},
		"a tree gone":  {change: func(p parts) { delete(p, 3); delete(p, 4) }, gone: []string{"below"}},
		"another file": {change: func(p parts) { p[4].File = 9 }, files: []string{"below"}},
		"another file of a leaf that is read": {change: func(p parts) { p[2].Link, p[2].File = 11, 9 },
			attached: []string{"leaf"}, again: []string{"leaf"}},
	} {
		d := diffTree(known, treeOf(c.change))
		names := func(list []replication.Part) (out []string) {
			for _, p := range list {
				out = append(out, p.Name)
			}
			return out
		}
		var gone []string
		for _, name := range d.gone {
			gone = append(gone, name)
		}
		if !slices.Equal(names(d.attached), c.attached) || !slices.Equal(gone, c.gone) || !slices.Equal(d.again, c.again) || !slices.Equal(names(d.files), c.files) {
			t.Errorf("%s: %+v", what, d)
		}
		if sameTree(known, d.tree) != (c.change == nil) {
			t.Errorf("%s: the trees are the same: %t", what, c.change != nil)
		}
	}
}

// A truncate of the root is remembered until the files were looked at, and no longer.
func TestATreeKeepsATruncateUntilItsFilesWereSeen(t *testing.T) {
	p := newPartitions(map[uint32]checkpoint.Tree{1: {2: {Name: "a", File: 2, Truncated: 77}, 3: {Name: "b", File: 3, Truncated: 77}}})
	p.settle(1, checkpoint.Tree{2: {Name: "a", File: 2}, 3: {Name: "b", File: 9}})
	if got := p.known[1]; got[2].Truncated != 77 || got[3].Truncated != 0 {
		t.Errorf("%+v", got)
	}
	var cp checkpoint.Checkpoint
	if p.checkpoint(&cp); len(cp.Trees) != 1 || !p.finished() {
		t.Errorf("%+v, %+v", cp.Trees, p)
	}
}

func TestThePartitionsOfARequestAreFoundInIt(t *testing.T) {
	asked := &checkpoint.Request{ID: attachPrefix + "x", Where: replication.InParts([]uint32{7, 4294967295})}
	if got := attachedTo(asked); !slices.Equal(got, []uint32{7, 4294967295}) {
		t.Error(got)
	}
	for _, r := range []*checkpoint.Request{nil, {ID: "20261202", Where: "id = 1"}} {
		if got := attachedTo(r); got != nil {
			t.Errorf("%+v: %v", r, got)
		}
	}
	conditions := map[uint32]string{1: "a", 2: "b"}
	of := func(oid uint32) string { return conditions[oid] }
	if got := bounded([]uint32{1, 2}, of) + "; " + bounded([]uint32{1, 3}, of); got != "(a) OR (b); " {
		t.Error(got)
	}
}

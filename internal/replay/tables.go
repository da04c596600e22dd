package replay

import (
	"slices"

	"github.com/walrelay/walrelay/replication"
)

// tableFilter lets the changes of some tables pass, or, without tables, everything.
type tableFilter struct {
	seen map[string]bool // by schema.table: whether it had a change
	last *replication.Relation
	pass bool // last's
}

func newTableFilter(tables []string) tableFilter {
	if len(tables) == 0 {
		return tableFilter{}
	}
	f := tableFilter{seen: map[string]bool{}}
	for _, t := range tables {
		f.seen[t] = false
	}
	return f
}

// wants tells whether a change passes; rel is nil for a message.
func (f *tableFilter) wants(rel *replication.Relation) bool {
	if f.seen == nil {
		return true
	}
	if rel == nil {
		return false
	}
	if rel != f.last {
		name := rel.Schema + "." + rel.Name
		f.last = rel
		if _, f.pass = f.seen[name]; f.pass {
			f.seen[name] = true
		}
	}
	return f.pass
}

// unseen gives the tables that had no change.
func (f *tableFilter) unseen() (list []string) {
	for t, seen := range f.seen {
		if !seen {
			list = append(list, t)
		}
	}
	slices.Sort(list)
	return list
}

package router

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// ColumnOptions says which columns of a table are masked or left out.
type ColumnOptions struct {
	Exclude []string
	Masks   map[string]format.Mask
	// Gone are those of them that the table has no more, dropped or under another name:
	// the WAL may still hold rows that have them.
	Gone []string
}

func (o *ColumnOptions) excludes(column string) bool {
	return o != nil && slices.Contains(o.Exclude, column)
}

func (o *ColumnOptions) mask(column string) (format.Mask, bool) {
	if o == nil {
		return format.Mask{}, false
	}
	m, ok := o.Masks[column]
	return m, ok
}

// names lists the columns that the table must have.
func (o *ColumnOptions) names() []string {
	list := slices.Concat(o.Exclude, slices.Collect(maps.Keys(o.Masks)))
	list = slices.DeleteFunc(list, func(name string) bool { return slices.Contains(o.Gone, name) })
	slices.Sort(list)
	return list
}

// AllGone tells whether the table need not be there.
func (o ColumnOptions) AllGone() bool { return len(o.names()) == 0 }

// guard watches a table of Options.Columns.
//
// Columns are hidden by their names, and RELATION messages have nothing else by which to
// know a column: one that is renamed would leave in clear from then on. So a column may
// be missing only where it cannot be there under another name: where every column that is
// there and leaves in clear stood beside it in a shape of the table that had it. See admit.
type guard struct {
	hidden  ColumnOptions
	catalog *replication.Relation // as the table was at the start; nil: not known
	stream  map[string]*witness   // by column
	reads   map[string]*witness   // likewise, of the shapes that the snapshot read
}

// witness is the last shape of a table that had a column.
type witness struct {
	rel *replication.Relation
	// gone tells that a later shape did not have it, and nothing new in its place. What
	// comes later cannot be that column.
	gone bool
}

// Guard remembers tables of Options.Columns as the catalog has them now. It refuses where a
// column that is to be hidden is not there: it may be misspelt, and the one that is meant
// would leave in clear. Tables without an entry are none of its business. It must be called
// before the first change, with all tables that have an entry and are there: without their
// OIDs the router does not know them under other names.
func (r *Router) Guard(rels ...*replication.Relation) error {
	if r.guards == nil {
		r.guards = map[uint32]*guard{}
	}
	for _, rel := range rels {
		if err := r.guardTable(rel); err != nil {
			return err
		}
	}
	return nil
}

func (r *Router) guardTable(rel *replication.Relation) error {
	label := rel.Schema + "." + rel.Name
	o, ok := r.o.Columns[label]
	if !ok {
		return nil
	}
	for _, name := range o.names() {
		if hasColumn(rel, name) {
			continue
		}
		return &checkpoint.Refusal{
			What: fmt.Sprintf("source.columns names column %q of %s, whose columns are %s", name, label, listNames(columnNames(rel))),
			Risk: "the column that is meant would leave in clear",
			Remedy: "correct the name; where the column was renamed, give its new name the same entry, and name the old one under gone there, " +
				"as where it was dropped: rows that the WAL still has with it keep their mask",
		}
	}
	r.guards[rel.OID] = &guard{hidden: o, catalog: rel, stream: map[string]*witness{}, reads: map[string]*witness{}}
	return nil
}

var errUnguarded = errors.New("source.columns is not in force: Guard was not called; this is a bug, and nothing was sent")

// hidden gives what is hidden of a relation, nil for nothing: by the entry of its name, or
// the one that the same table has under another name, since a table that is renamed is not
// to leave in clear.
func (r *Router) hidden(rel *replication.Relation, read bool) (*ColumnOptions, error) {
	if len(r.o.Columns) == 0 {
		return nil, nil
	}
	if r.guards == nil {
		return nil, errUnguarded
	}
	g := r.guards[rel.OID]
	if o, ok := r.o.Columns[rel.Schema+"."+rel.Name]; ok {
		if g == nil {
			g = &guard{stream: map[string]*witness{}, reads: map[string]*witness{}}
			r.guards[rel.OID] = g
		}
		g.hidden = o
	}
	if g == nil {
		return nil, nil
	}
	seen := g.stream
	if read {
		seen = g.reads
	}
	return &g.hidden, g.admit(rel, seen)
}

// admit lets a shape of the table pass, or refuses it where a hidden column is missing and
// may be there under another name.
func (g *guard) admit(rel *replication.Relation, seen map[string]*witness) error {
	for _, name := range g.hidden.names() {
		if hasColumn(rel, name) {
			seen[name] = &witness{rel: rel}
			continue
		}
		w := seen[name]
		if w == nil {
			// The WAL is older than the catalog: the column was added later, or had another
			// name.
			w = &witness{rel: g.catalog}
		}
		if w.gone {
			continue
		}
		if strange := g.strangers(rel, w.rel); len(strange) > 0 {
			return refuseStrangers(rel, name, strange)
		}
		if w = seen[name]; w != nil {
			w.gone = true
		}
	}
	return nil
}

// strangers gives the columns of a shape that another one does not have. Those that are
// hidden themselves may be whatever they like.
func (g *guard) strangers(rel, known *replication.Relation) (list []string) {
	for _, c := range rel.Columns {
		if _, masked := g.hidden.mask(c.Name); masked || g.hidden.excludes(c.Name) {
			continue
		}
		if known == nil || !slices.ContainsFunc(known.Columns, func(k replication.Column) bool { return k.Name == c.Name && k.TypeOID == c.TypeOID }) {
			list = append(list, c.Name)
		}
	}
	return list
}

func refuseStrangers(rel *replication.Relation, name string, strange []string) error {
	label := rel.Schema + "." + rel.Name
	return &checkpoint.Refusal{
		What: fmt.Sprintf("column %q of %s, which source.columns hides, is not in the rows that come now, and %s may be it under another name", name, label, listNames(strange)),
		Risk: "its values would leave in clear",
		Remedy: fmt.Sprintf("if it was renamed, give the other name the same entry under source.columns.%s; then, or if it was dropped or came later, name %q under gone there: rows that have it keep their mask",
			label, name),
	}
}

func hasColumn(rel *replication.Relation, name string) bool {
	return slices.ContainsFunc(rel.Columns, func(c replication.Column) bool { return c.Name == name })
}

// listNames quotes names for a message, at most 20 of them.
func listNames(names []string) string {
	const most = 20
	var list []string
	for _, name := range names[:min(len(names), most)] {
		list = append(list, strconv.Quote(name))
	}
	if n := len(names) - most; n > 0 {
		list = append(list, fmt.Sprintf("and %d more", n))
	}
	return strings.Join(list, ", ")
}

// keepsIdentity refuses to hide a key's column by what makes different keys one.
func (p *tablePlan) keepsIdentity(hidden *ColumnOptions) error {
	for _, i := range p.key {
		name, how := p.rel.Columns[i].Name, ""
		if m, ok := hidden.mask(name); ok && !m.KeepsApart() {
			how = "the mask " + m.String()
		}
		if hidden.excludes(name) {
			how = "exclude"
		}
		if how == "" {
			continue
		}
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("source.columns has %s for column %q of %s, which is part of the record key", how, name, p.label),
			Risk:   "different rows would have one key, and replace and delete each other in the topic",
			Remedy: "use sha256 or hmac-sha256 there, under which different values stay different; or choose another key under source.keys",
		}
	}
	return nil
}

// columnsOf gives the plans of the columns of a change's row; nil for none.
func (r *Router) columnsOf(c *replication.Change) []columnPlan {
	if c.Relation == nil {
		return nil
	}
	if p, err := r.plan(c); err == nil {
		return p.columns
	}
	return nil
}

// Package lookup asks the catalog for what the stream does not tell: primary keys, types,
// and how the tables look whose columns are hidden. Whoever routes changes needs it, the
// connector and a replay alike.
package lookup

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/router/format"
)

// Timeout bounds a catalog query that the stream waits for.
const Timeout = 30 * time.Second

// Lookup asks on one connection. It is for the goroutine that takes the stream's events.
type Lookup struct {
	base context.Context // without the end of the run, so that a stop does not fail a change in hand
	conn *replication.Conn
	keys map[uint32][]string
}

// New makes one on conn, which stays the caller's.
func New(base context.Context, conn *replication.Conn) *Lookup {
	return &Lookup{base: base, conn: conn}
}

// ReadKeys reads every table's primary key at once, so that a table's first change asks
// nothing.
func (l *Lookup) ReadKeys(ctx context.Context) (err error) {
	l.keys, err = replication.PrimaryKeys(ctx, l.conn)
	return err
}

// PrimaryKey looks a table's key up. The keys that were read at the start serve for a
// table's first RELATION message; another one comes after DDL, which may have changed
// the key, and asks anew.
func (l *Lookup) PrimaryKey(oid uint32) ([]string, error) {
	if names, ok := l.keys[oid]; ok {
		delete(l.keys, oid)
		return names, nil
	}
	ctx, cancel := context.WithTimeout(l.base, Timeout)
	defer cancel()
	return replication.PrimaryKey(ctx, l.conn, oid)
}

// Types describes types by the catalog. name is what the stream says of a type; nil where
// there is no stream.
func (l *Lookup) Types(name func(oid uint32) (replication.TypeName, bool)) *format.Cache {
	return &format.Cache{TypeName: name, Ask: func(queries ...string) ([][][][]byte, error) {
		ctx, cancel := context.WithTimeout(l.base, Timeout)
		defer cancel()
		return replication.TextResults(ctx, l.conn, queries...)
	}}
}

// Outboxes tells the router which tables its outbox entries mean, by their OIDs, before anything is
// routed: those that have the entries' names now, and those that had them when the checkpoint
// was written. It gives them with the names of their entries.
func (l *Lookup) Outboxes(ctx context.Context, r *router.Router, entries []router.OutboxOptions, known map[uint32]checkpoint.TableProgress) (map[uint32]string, error) {
	if len(entries) == 0 {
		return nil, nil
	}
	names := map[string]bool{}
	for _, o := range entries {
		names[o.Schema+"."+o.Table] = true
	}
	outboxes := map[uint32]string{}
	for oid, p := range known {
		if names[p.Table] {
			outboxes[oid] = p.Table
		}
	}
	tables, err := replication.Tables(ctx, l.conn)
	if err != nil {
		return nil, err
	}
	for _, t := range tables {
		if names[t.String()] {
			outboxes[t.OID] = t.String()
		}
	}
	r.Outboxes(outboxes)
	return outboxes, nil
}

// Guard tells the router how the tables of columns (Options.Columns) look now, before
// anything is routed.
func (l *Lookup) Guard(ctx context.Context, r *router.Router, columns map[string]router.ColumnOptions) error {
	if len(columns) == 0 {
		return nil
	}
	tables, err := replication.Tables(ctx, l.conn)
	if err != nil {
		return err
	}
	var oids []uint32
	for _, t := range tables {
		if _, hidden := columns[t.String()]; hidden {
			oids = append(oids, t.OID)
		}
	}
	described, err := replication.Describe(ctx, l.conn, oids)
	if err != nil {
		return err
	}
	return r.Guard(slices.Collect(maps.Values(described))...)
}

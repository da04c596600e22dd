package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// checkColumns refuses an entry of source.columns that names no table, or one whose rows
// come under other names. absent holds those refusals; the columns themselves are the
// router's to check.
func (s *session) checkColumns(ctx context.Context, tables []replication.Table) (absent, err error) {
	entries := s.r.o.Router.Columns
	if len(entries) == 0 {
		return nil, nil
	}
	byLeaf := false
	if s.r.o.Existing {
		p, found, err := replication.ReadPublication(ctx, s.conn, s.facts.Publication)
		if err != nil {
			return nil, err
		}
		byLeaf = found && !p.ViaRoot
	}
	var problems []error
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		at := slices.IndexFunc(tables, func(t replication.Table) bool { return t.String() == name })
		switch {
		case at < 0 && !s.wasDropped(name, tables) && !entries[name].AllGone():
			problems = append(problems, &checkpoint.Refusal{
				What: fmt.Sprintf("source.columns names %s, and there is no such table", name),
				Risk: "the table that is meant would leave in clear",
				Remedy: fmt.Sprintf("correct the name, which is not that of a partition; where the table was renamed, its new name needs an entry; of one that is gone name all columns under gone, or, to send nothing of it that the WAL still has, "+
					"remove the entry and add \"!%s\" to source.tables", name),
			})
		case at >= 0 && byLeaf && tables[at].Partitioned:
			problems = append(problems, &checkpoint.Refusal{
				What:   fmt.Sprintf("source.columns names the partitioned table %s, and publication %s sends rows under the names of the partitions", name, s.facts.Publication),
				Risk:   "they would leave in clear",
				Remedy: fmt.Sprintf("ALTER PUBLICATION %s SET (publish_via_partition_root = true)", s.facts.Publication),
			})
		}
	}
	return errors.Join(problems...), nil
}

// wasDropped tells whether this connector knew a table of this name that is gone by now:
// the WAL may still have its rows. One that has another name is not gone.
func (s *session) wasDropped(name string, tables []replication.Table) bool {
	for oid, t := range s.facts.Checkpoint.Tables {
		if t.Table == name {
			return !slices.ContainsFunc(tables, func(t replication.Table) bool { return t.OID == oid })
		}
	}
	return false
}

// guardColumns tells the router how the tables of source.columns look now.
func (s *session) guardColumns(ctx context.Context) error {
	if len(s.r.o.Router.Columns) == 0 {
		return nil
	}
	tables, err := replication.Tables(ctx, s.conn)
	if err != nil {
		return err
	}
	var oids []uint32
	for _, t := range tables {
		if _, hidden := s.r.o.Router.Columns[t.String()]; hidden {
			oids = append(oids, t.OID)
		}
	}
	described, err := replication.Describe(ctx, s.conn, oids)
	if err != nil {
		return err
	}
	return s.router.Guard(slices.Collect(maps.Values(described))...)
}

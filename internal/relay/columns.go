package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
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

// checkSent refuses an outbox table of which the stream does not bring a column that its
// events are made of: they would leave without it, under another key even.
func (s *session) checkSent(ctx context.Context, trial *router.Router, rel *replication.Relation) error {
	publication := ""
	if s.r.o.Existing {
		publication = s.facts.Publication
		if !s.facts.PublicationFound {
			return nil // that is another refusal
		}
	}
	unsent, err := replication.UnsentColumns(ctx, s.conn, rel.OID, publication)
	if err != nil || len(unsent) == 0 {
		return err
	}
	uses, err := trial.OutboxUses(rel)
	if err != nil {
		return err
	}
	var problems []error
	for _, column := range unsent {
		if uses[column] == nil {
			continue
		}
		remedy := "make it a plain column that the application or a trigger fills; or publish stored generated columns, which PostgreSQL 18 can; or let columns: under outbox name another"
		if publication != "" {
			remedy = fmt.Sprintf("add it to the column list of publication %s; of a generated column make a plain one, or publish it (publish_generated_columns = stored, PostgreSQL 18); or let columns: under outbox name another", publication)
		}
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("column %q of outbox table %s.%s is used (%s), and the stream does not bring it", column, rel.Schema, rel.Name, strings.Join(uses[column], ", ")),
			Risk:   "events would leave without it, or not at all",
			Remedy: remedy,
		})
	}
	return errors.Join(problems...)
}

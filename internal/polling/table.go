package polling

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/router/format"
	"github.com/walrelay/walrelay/snapshot"
)

// shards is into how many parts the keys of a table are divided. It is the same for every
// instance and version, since the locks are. With more, a round would take more locks and
// share more evenly among more than a dozen instances, which nobody runs.
const shards = 64

// Outbox is an outbox table and what becomes of its published rows.
type Outbox struct {
	Schema, Table string
	Delete        bool // instead of marking them
}

func (o Outbox) name() string { return o.Schema + "." + o.Table }

// table is an outbox table as a session has found it.
type table struct {
	Outbox
	relation *replication.Relation
	mark     outbox.Table
	lock     string // the text that advisory locks are made of

	// The statements of a round; see the functions that run them.
	lookSQL, lockSQL, listSQL, readSQL, doneSQL string
}

// newTable writes the statements. limit is how many rows a round takes at most.
func newTable(o Outbox, rel *replication.Relation, b router.Backlog, c router.OutboxColumns, limit int) *table {
	after := outbox.Mark
	if o.Delete {
		after = outbox.Delete
	}
	t := &table{Outbox: o, relation: rel, lock: "walrelay polling " + o.name(), mark: outbox.NewTable(rel, after, c, b)}
	name, pending, hash := t.mark.SQL(), t.mark.NotPublished(), hashSQL(c.Key)
	shard := "(" + hash + " & " + strconv.Itoa(shards-1) + ")"
	order := orderSQL(b.Order)
	t.lookSQL = "SELECT shard::text, count(*)::text FROM (SELECT " + shard + " AS shard FROM " + name +
		" WHERE " + pending + order + " LIMIT " + strconv.Itoa(limit) + ") AS head GROUP BY shard ORDER BY shard"
	t.lockSQL = "SELECT s::text FROM unnest($1::int8[]) AS s" +
		" WHERE pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended($2, s))"
	t.listSQL = "SELECT tableoid::oid::text, ctid::text, " + hash + "::text FROM " + name +
		" WHERE " + pending + " AND " + shard + " = ANY ($1::int8[])" + order + " LIMIT " + strconv.Itoa(limit)
	var columns []string
	for _, col := range rel.Columns {
		columns = append(columns, ident(col.Name))
	}
	t.readSQL = "SELECT tableoid::oid::text, ctid::text, " + strings.Join(columns, ", ") + " FROM " + name +
		" WHERE ctid = ANY ($1::tid[]) AND " + pending + " AND " + shard + " = ANY ($2::int8[]) FOR UPDATE SKIP LOCKED"
	const these = "tableoid = $1::oid AND ctid = ANY ($2::tid[])"
	if o.Delete {
		t.doneSQL = "WITH done AS (DELETE FROM " + name + " WHERE " + these + " RETURNING 1) SELECT count(*)::text, '0' FROM done"
	} else {
		t.doneSQL = "WITH done AS (UPDATE " + name + " SET " + t.mark.Set() + " WHERE " + these + " RETURNING (" + pending + ") AS pending)" +
			" SELECT count(*)::text, count(*) FILTER (WHERE pending)::text FROM done"
	}
	return t
}

// hashSQL gives the hash of a row's key. Where a template makes the key, all rows have the
// same: their keys cannot be told apart here.
func hashSQL(key []string) string {
	if len(key) == 0 {
		return "0::int8"
	}
	texts := make([]string, len(key))
	for i, name := range key {
		texts[i] = ident(name) + "::pg_catalog.text"
	}
	// The collation decides nothing but has to be one.
	return `pg_catalog.hashtextextended(coalesce(` + strings.Join(texts, ", ") + `, '') COLLATE "C", 0)`
}

func orderSQL(columns []string) string {
	if len(columns) == 0 {
		return ""
	}
	list := make([]string, len(columns))
	for i, name := range columns {
		list[i] = ident(name)
	}
	return " ORDER BY " + strings.Join(list, ", ")
}

func ident(name string) string { return pgx.Identifier{name}.Sanitize() }

// inspect looks at the configured tables and refuses what cannot be polled.
func (s *session) inspect(ctx context.Context) error {
	db, err := replication.ReadDatabase(ctx, s.conn)
	if err != nil {
		return err
	}
	if db.InRecovery {
		return &checkpoint.Refusal{
			What:   "source.dsn leads to a standby, on which no row can be marked or deleted",
			Risk:   "every event would be published again and again",
			Remedy: "name the primary under source.dsn",
		}
	}
	all, err := replication.Tables(ctx, s.conn)
	if err != nil {
		return err
	}
	var oids []uint32
	var problems []error
	byName := map[string]uint32{}
	for _, t := range all {
		byName[t.String()] = t.OID
	}
	for _, o := range s.p.o.Outbox {
		oid, ok := byName[o.name()]
		if !ok {
			problems = append(problems, &checkpoint.Refusal{
				What: "outbox table " + o.name() + " does not exist, or our role does not see it", Risk: "its events would not be published",
				Remedy: "create the table, or correct outbox[].table",
			})
			continue
		}
		oids = append(oids, oid)
	}
	if len(problems) > 0 {
		return errors.Join(problems...)
	}
	relations, err := replication.Describe(ctx, s.conn, oids)
	if err != nil {
		return err
	}
	if err := s.learnTypes(ctx, relations); err != nil {
		return err
	}
	if s.router, err = router.NewRouter(s.routerOptions(db.Name), s.catalog); err != nil {
		return err
	}
	for i, o := range s.p.o.Outbox {
		t, err := s.inspectTable(ctx, o, relations[oids[i]])
		if err != nil {
			problems = append(problems, err)
			continue
		}
		s.tables = append(s.tables, t)
	}
	if err := s.checkRights(ctx, oids); err != nil {
		problems = append(problems, err)
	}
	return errors.Join(problems...)
}

// learnTypes reads what the columns' types are that are not built in.
func (s *session) learnTypes(ctx context.Context, relations map[uint32]*replication.Relation) error {
	var oids []uint32
	for _, rel := range relations {
		for _, c := range rel.Columns {
			oids = append(oids, c.TypeOID)
		}
	}
	missing := s.types.Missing(oids)
	if len(missing) == 0 {
		return nil
	}
	rows, err := replication.TextRows(ctx, s.conn, format.TypesQueryFor(missing))
	if err != nil {
		return fmt.Errorf("look up types: %w", err)
	}
	for _, values := range rows {
		row, err := format.ParseTypeRow(values)
		if err != nil {
			return err
		}
		s.types.Add(row)
	}
	return nil
}

func (s *session) inspectTable(ctx context.Context, o Outbox, rel *replication.Relation) (*table, error) {
	if rel == nil {
		return nil, fmt.Errorf("table %s was dropped this moment", o.name())
	}
	recognised, err := s.router.Check(rel, true)
	if err != nil {
		return nil, err
	}
	notNull, err := replication.NotNullColumns(ctx, s.conn, rel.OID)
	if err != nil {
		return nil, err
	}
	b, err := s.router.Backlog(rel, func(c string) bool { return slices.Contains(notNull, c) })
	if err != nil {
		return nil, err
	}
	if b.Mark == "" && !o.Delete {
		return nil, &checkpoint.Refusal{
			What:   fmt.Sprintf("outbox table %s has no column that could mark a published row: published_at, a timestamp, or status, a number or a text", o.name()),
			Risk:   "every event would be published again and again",
			Remedy: fmt.Sprintf("ALTER TABLE %s ADD COLUMN published_at timestamptz; or set outbox[].after: delete", pgx.Identifier{o.Schema, o.Table}.Sanitize()),
		}
	}
	if len(b.Order) == 0 {
		return nil, &checkpoint.Refusal{
			What:   fmt.Sprintf("outbox table %s has no primary key and no column by which its rows could be ordered", o.name()),
			Risk:   "events would be published in any order",
			Remedy: fmt.Sprintf("ALTER TABLE %s ADD COLUMN id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY", pgx.Identifier{o.Schema, o.Table}.Sanitize()),
		}
	}
	columns, err := s.router.OutboxColumns(rel)
	if err != nil {
		return nil, err
	}
	s.say(o.name(), func() {
		e := s.log.Info().Str("table", o.name()).Strs("columns", recognised).Strs("order", b.Order)
		if len(columns.Key) == 0 {
			e.Bool("one_instance_at_a_time", true)
		}
		e.Msg("outbox table recognised")
	})
	return newTable(o, rel, b, columns, s.p.o.Limits.Records), nil
}

// checkRights refuses tables that our role may not read, lock and mark.
func (s *session) checkRights(ctx context.Context, oids []uint32) error {
	refused, err := snapshot.Access(ctx, s.conn, oids)
	if err != nil {
		return err
	}
	var problems []error
	for _, t := range s.tables {
		if err := refused[t.relation.OID]; err != nil {
			problems = append(problems, err)
			continue
		}
		rights := "UPDATE" // which FOR UPDATE asks for, too
		if t.Delete {
			rights = "UPDATE, DELETE"
		}
		var role string
		var may bool
		if err := s.conn.QueryRow(ctx, `SELECT quote_ident(current_user), (SELECT bool_and(has_table_privilege($1::oid, trim(p))) FROM unnest(string_to_array($2, ',')) p)`,
			t.relation.OID, rights).Scan(&role, &may); err != nil {
			return fmt.Errorf("read privileges on %s: %w", t.name(), err)
		}
		if !may {
			problems = append(problems, &checkpoint.Refusal{
				What: fmt.Sprintf("role %s may not lock and mark the rows of %s", role, t.name()), Risk: "its events would not be published",
				Remedy: fmt.Sprintf("GRANT %s ON %s TO %s", rights, t.mark.SQL(), role),
			})
		}
	}
	return errors.Join(problems...)
}

package polling

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/router/format"
	"github.com/walrelay/walrelay/snapshot"
)

// found is what the database has of the configured tables.
type found struct {
	router    *router.Router
	relations []*replication.Relation // as Options.Outbox; nil where the table is not there
}

// find looks the configured tables up.
func (p *Poller) find(ctx context.Context, conn *replication.Conn, catalog *router.Catalog, database string) (f found, err error) {
	all, err := replication.Tables(ctx, conn)
	if err != nil {
		return found{}, err
	}
	oids := make([]uint32, len(p.o.Outbox)) // 0 where it is not there
	for i, o := range p.o.Outbox {
		for _, t := range all {
			if t.Schema == o.Schema && t.Name == o.Table {
				oids[i] = t.OID
			}
		}
	}
	relations, err := replication.Describe(ctx, conn, oids)
	if err != nil {
		return found{}, err
	}
	types := &format.Resolver{}
	if err := learnTypes(ctx, conn, types, relations); err != nil {
		return found{}, err
	}
	o := p.o.Router
	o.Database = database
	o.Types = func(oid uint32) (*format.Type, error) { return types.Type(oid), nil }
	if f.router, err = router.NewRouter(o, catalog); err != nil {
		return found{}, err
	}
	for _, oid := range oids {
		f.relations = append(f.relations, relations[oid])
	}
	return f, nil
}

// learnTypes reads what the columns' types are that are not built in.
func learnTypes(ctx context.Context, conn *replication.Conn, types *format.Resolver, relations map[uint32]*replication.Relation) error {
	var oids []uint32
	for _, rel := range relations {
		for _, c := range rel.Columns {
			oids = append(oids, c.TypeOID)
		}
	}
	missing := types.Missing(oids)
	if len(missing) == 0 {
		return nil
	}
	rows, err := replication.TextRows(ctx, conn, format.TypesQueryFor(missing))
	if err != nil {
		return fmt.Errorf("look up types: %w", err)
	}
	for _, values := range rows {
		row, err := format.ParseTypeRow(values)
		if err != nil {
			return err
		}
		types.Add(row)
	}
	return nil
}

// describe says how the rows of a table are ordered, told apart and marked.
func (f *found) describe(o Outbox, rel *replication.Relation, facts replication.ColumnFacts) (outbox.Table, router.Backlog, router.OutboxColumns, error) {
	c, err := f.router.OutboxColumns(rel)
	if err != nil {
		return outbox.Table{}, router.Backlog{}, c, err
	}
	b, err := f.router.Backlog(rel, c.Seq, facts)
	after := outbox.Mark
	if o.Delete {
		after = outbox.Delete
	}
	return outbox.NewTable(rel, after, c, b), b, c, err
}

// pendingTables describes the tables whose pending rows are counted. Those that cannot be
// described are the error, beside the others.
func (p *Poller) pendingTables(ctx context.Context, conn *replication.Conn) ([]outbox.Table, error) {
	f, err := p.find(ctx, conn, router.NewCatalog(nil), "")
	if err != nil {
		return nil, err
	}
	var out []outbox.Table
	var problems []error
	for i, rel := range f.relations {
		if rel == nil {
			continue // a session will say so
		}
		facts, err := replication.ReadColumnFacts(ctx, conn, rel.OID)
		if err != nil {
			return nil, err
		}
		t, _, _, err := f.describe(p.o.Outbox[i], rel, facts)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		out = append(out, t)
	}
	return out, errors.Join(problems...)
}

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
	if slot, found, err := replication.ReadSlot(ctx, s.conn, s.p.o.Slot); err != nil {
		return err
	} else if found {
		s.say("slot", func() {
			s.log.Warn().Str("slot", slot.Name).Bool("active", slot.Active).
				Msg("this connector has a replication slot, of a time with source.mode wal: with nobody to read it the server keeps its WAL for ever, and an instance that does read it publishes each event, too; stop that one, and run walrelay slot drop")
		})
	}
	f, err := s.p.find(ctx, s.conn, s.catalog, db.Name)
	if err != nil {
		return err
	}
	s.router = f.router
	var problems []error
	for i, o := range s.p.o.Outbox {
		t, err := s.inspectTable(ctx, &f, o, f.relations[i])
		if err != nil {
			problems = append(problems, err)
			continue
		}
		s.tables = append(s.tables, t)
	}
	if err := s.checkRights(ctx); err != nil {
		problems = append(problems, err)
	}
	if len(problems) > 0 {
		return errors.Join(problems...)
	}
	for _, t := range s.tables {
		problems = append(problems, s.prepare(ctx, t))
	}
	return errors.Join(problems...)
}

func (s *session) inspectTable(ctx context.Context, f *found, o Outbox, rel *replication.Relation) (*table, error) {
	if rel == nil {
		return nil, &checkpoint.Refusal{
			What: "outbox table " + o.name() + " does not exist, or our role does not see it", Risk: "its events would not be published",
			Remedy: "create the table, or correct outbox[].table",
		}
	}
	recognised, err := s.router.Check(rel, true)
	if err != nil {
		return nil, err
	}
	facts, err := replication.ReadColumnFacts(ctx, s.conn, rel.OID)
	if err != nil {
		return nil, err
	}
	mark, b, c, err := f.describe(o, rel, facts)
	if err != nil {
		return nil, err
	}
	if err := checkMark(o, mark, facts); err != nil {
		return nil, err
	}
	s.say(o.name(), func() {
		e := s.log.Info().Str("table", o.name()).Strs("columns", recognised)
		if b.Ordered {
			e.Str("order", b.Order[0])
		}
		if len(c.Key) == 0 {
			e.Bool("one_instance_at_a_time", true)
		}
		e.Msg("outbox table recognised")
		if !b.Ordered {
			s.log.Warn().Str("table", o.name()).Msg("no number and no time tells in which order the rows were written: they are published in the order in which their transactions began to write; a column such as id bigint GENERATED ALWAYS AS IDENTITY makes it exact")
		}
	})
	return newTable(o, mark, rel, b, c, s.p.o.Limits.Records), nil
}

// checkMark refuses a table whose published rows could not be told from others.
func checkMark(o Outbox, mark outbox.Table, facts replication.ColumnFacts) error {
	if mark.Mark != "" || o.Delete {
		return nil
	}
	if slices.Contains(slices.Concat(facts.NotNull, facts.Filled), "published_at") {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("column published_at of outbox table %s is NOT NULL, or has a default, so that every row counts as published", o.name()),
			Risk:   "no event would ever be published",
			Remedy: fmt.Sprintf("ALTER TABLE %s ALTER COLUMN published_at DROP NOT NULL, ALTER COLUMN published_at DROP DEFAULT; or set outbox[].after: delete", mark.SQL()),
		}
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("outbox table %s has no column that could mark a published row: published_at, a timestamp, or status, a number or a text", o.name()),
		Risk:   "every event would be published again and again",
		Remedy: fmt.Sprintf("ALTER TABLE %s ADD COLUMN published_at timestamptz; or set outbox[].after: delete", mark.SQL()),
	}
}

// checkRights refuses tables that our role may not read, lock and mark.
func (s *session) checkRights(ctx context.Context) error {
	var oids []uint32
	for _, t := range s.tables {
		oids = append(oids, t.relation.OID)
	}
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

// prepare lets the server look at names and types of every statement now: what it cannot
// do ends the start, and not each round behind its publication. Where rows are deleted a mark is
// for dead letters alone, and done without where it cannot be made.
func (s *session) prepare(ctx context.Context, t *table) error {
	for _, sql := range []string{t.lookSQL, t.listSQL, t.readSQL, t.markSQL, t.deleteSQL} {
		if sql == "" {
			continue
		}
		_, err := s.conn.PgConn().Prepare(ctx, "", sql, nil)
		var answer *pgconn.PgError
		switch {
		case err == nil:
		case !errors.As(err, &answer) || !isPermanent(answer):
			return fmt.Errorf("prepare to poll %s: %w", t.name(), err)
		case t.Delete && sql == t.markSQL:
			t.markSQL = ""
			s.say(t.name()+" unmarked", func() {
				s.log.Warn().Err(err).Str("table", t.name()).Str("column", t.mark.Mark).Msg("the column cannot mark a row: rows of dead letters are deleted, as those of events are")
			})
		default:
			return t.refuseStatement(err)
		}
	}
	return nil
}

func (t *table) refuseStatement(err error) error {
	remedy := "correct the table"
	if !t.Delete {
		remedy = "correct the table (a status that is an enum needs the label processed), or set outbox[].after: delete"
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("the rows of outbox table %s cannot be read, or marked or deleted", t.name()),
		Risk:   "its events would not be published, or again and again",
		Remedy: remedy,
		Err:    err,
	}
}

// isPermanent tells that a statement fails for what it says or for what the table, its
// triggers and constraints are, so that a retry would meet the same. The other classes are
// the connection's, the transaction's and the server's.
func isPermanent(err *pgconn.PgError) bool {
	if len(err.Code) < 2 {
		return false
	}
	return !slices.Contains([]string{"08", "25", "40", "53", "55", "57", "58", "XX"}, err.Code[:2])
}

package request

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// checkDatabase looks whether every table can be read as the request wants it.
func (o *Options) checkDatabase(ctx context.Context, r checkpoint.Request) (replication.Database, error) {
	conn, err := o.Connect(ctx)
	if err != nil {
		return replication.Database{}, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // nothing hangs on it
	db, err := replication.ReadDatabase(ctx, conn)
	if err != nil {
		return db, err
	}
	if db.InRecovery {
		return db, &checkpoint.Refusal{
			What:   "the server is a standby, which does not tell which transactions are in progress",
			Risk:   "what a snapshot sees could not be told from what the stream brings",
			Remedy: "name the primary in source.primary-dsn; the stream stays where it is",
		}
	}
	tables, err := replication.Tables(ctx, conn)
	if err != nil {
		return db, err
	}
	var usage, refused []error
	for _, name := range r.Tables {
		err := o.checkTable(ctx, conn, tables, name, r.Where)
		var u *UsageError
		switch {
		case errors.As(err, &u):
			usage = append(usage, err)
		case err != nil && !checkpoint.IsRefusal(err):
			return db, err
		case err != nil:
			refused = append(refused, err)
		}
	}
	if len(usage) > 0 {
		return db, &UsageError{errors.Join(append(usage, refused...)...)}
	}
	return db, errors.Join(refused...)
}

func (o *Options) checkTable(ctx context.Context, conn *pgx.Conn, tables []replication.Table, name, where string) error {
	var t *replication.Table
	for i := range tables {
		if tables[i].String() == name {
			t = &tables[i]
		}
	}
	if t == nil {
		return refuseTable(ctx, conn, tables, name)
	}
	if err := o.checkPublished(ctx, conn, t); err != nil {
		return err
	}
	if err := checkRead(ctx, conn, t, where); err != nil {
		return err
	}
	if where == "" {
		return nil
	}
	keyed, err := o.keyed(ctx, conn, t)
	if err != nil || keyed {
		return err
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("%s has no key by which its rows can be told apart, so that it can only be read as a whole, with a truncate before", name),
		Risk:   "the rows outside of --where would be lost in the topic",
		Remedy: "leave --where out",
	}
}

// refuseTable says why a table cannot be captured, or which one may have been meant.
func refuseTable(ctx context.Context, conn *pgx.Conn, tables []replication.Table, name string) error {
	var (
		kind, persistence string
		partition         bool
		root              *string
	)
	err := conn.QueryRow(ctx, `
SELECT c.relkind::text, c.relpersistence::text, c.relispartition,
       (SELECT n2.nspname || '.' || r.relname FROM pg_catalog.pg_class r JOIN pg_catalog.pg_namespace n2 ON n2.oid = r.relnamespace
         WHERE c.relispartition AND r.oid = pg_catalog.pg_partition_root(c.oid))
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname || '.' || c.relname = $1 AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
 LIMIT 1`, name).Scan(&kind, &persistence, &partition, &root)
	if errors.Is(err, pgx.ErrNoRows) {
		remedy := "correct --table; names are those of the catalog, in its spelling and without SQL quotes"
		if near := nearest(tables, name); near != "" {
			remedy = "did you mean --table " + near + "?"
		}
		return &checkpoint.Refusal{What: fmt.Sprintf("table %s does not exist in this database", name), Remedy: remedy}
	}
	if err != nil {
		return fmt.Errorf("look up table %s: %w", name, err)
	}
	what, remedy := "belongs to the system or to an extension", "name a table of the application"
	switch {
	case partition && root != nil:
		what, remedy = "is a partition of "+*root+", through which its rows are published and read", "name the root: --table "+*root
	case kind == "v", kind == "m", kind == "f":
		what = map[string]string{"v": "is a view", "m": "is a materialized view", "f": "is a foreign table"}[kind] + ", which no stream of changes has"
	case persistence != "p":
		what, remedy = "is not logged, so that its changes are not in the WAL", "ALTER TABLE … SET LOGGED, which captures it"
	}
	return &checkpoint.Refusal{What: fmt.Sprintf("%s %s", name, what), Remedy: remedy}
}

// nearest gives a table that differs in case or schema only.
func nearest(tables []replication.Table, name string) string {
	near := ""
	_, wanted, _ := strings.Cut(name, ".")
	for _, t := range tables {
		switch {
		case strings.EqualFold(t.String(), strings.ReplaceAll(name, `"`, "")):
			return t.String()
		case t.Name == wanted && near == "":
			near = t.String()
		}
	}
	return near
}

// checkPublished refuses a table whose changes the stream does not have: without them
// its rows could not be kept up to date.
func (o *Options) checkPublished(ctx context.Context, conn *pgx.Conn, t *replication.Table) error {
	names := []string{o.Publications.Publication}
	if !o.Existing {
		names = append(names, names[0]+replication.InsertSuffix)
	}
	var there, published bool
	err := conn.QueryRow(ctx, `
WITH published AS (SELECT DISTINCT t.relid FROM pg_catalog.pg_publication p, pg_catalog.pg_get_publication_tables(p.pubname) t WHERE p.pubname = ANY ($1))
SELECT EXISTS (SELECT FROM pg_catalog.pg_publication WHERE pubname = ANY ($1)),
       EXISTS (SELECT FROM published WHERE relid = $2)
    OR EXISTS (SELECT FROM pg_catalog.pg_partition_tree($2) l WHERE l.isleaf AND l.relid <> $2)
       AND NOT EXISTS (SELECT FROM pg_catalog.pg_partition_tree($2) l WHERE l.isleaf AND l.relid NOT IN (SELECT relid FROM published))`,
		names, t.OID).Scan(&there, &published)
	switch {
	case err != nil:
		return fmt.Errorf("look up the publications of %s: %w", t, err)
	case published:
		return nil
	case !there && !o.Existing:
		return refuseNotStarted("publication " + names[0] + " does not exist")
	case !o.Existing:
		plan := o.Publications
		plan.Outbox = nil
		if _, err := replication.NewPlan([]replication.Table{*t}, plan); err != nil {
			return err // why it is not published
		}
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("%s is captured by source.tables, and not published yet", t),
			Risk:   "its changes since then would be missing",
			Remedy: "start walrelay run anew: it adds the table to the publication and reads it by itself",
		}
	}
	return &checkpoint.Refusal{
		What: fmt.Sprintf("publication %s does not publish %s", names[0], t),
		Risk: "its rows would never change in the topic",
		Remedy: fmt.Sprintf("ALTER PUBLICATION %s ADD TABLE %s, and then again; or set source.publication-mode: managed",
			pgx.Identifier{names[0]}.Sanitize(), pgx.Identifier{t.Schema, t.Name}.Sanitize()),
	}
}

// keyed tells whether the table can be read by ranges of a key: its replica identity's
// index, the primary key under FULL or NOTHING, else a unique index of NOT NULL columns
// that is exactly source.keys.
func (o *Options) keyed(ctx context.Context, conn *pgx.Conn, t *replication.Table) (ok bool, err error) {
	columns := o.Keys[t.String()]
	if columns == nil {
		columns = []string{}
	}
	err = conn.QueryRow(ctx, `
SELECT EXISTS (
  SELECT FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indrelid
   WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
     AND (CASE c.relreplident WHEN 'i' THEN i.indisreplident WHEN 'd' THEN i.indisprimary AND i.indimmediate ELSE i.indisprimary END
       OR i.indnkeyatts = pg_catalog.cardinality($2::text[])
          AND NOT EXISTS (SELECT FROM pg_catalog.generate_series(0, i.indnkeyatts - 1) k
                           WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a
                                  WHERE a.attrelid = i.indrelid AND a.attnum = i.indkey[k] AND a.attnotnull AND a.attname = ANY ($2)))))`,
		t.OID, columns).Scan(&ok)
	if err != nil {
		return false, fmt.Errorf("look up the key of %s: %w", t, err)
	}
	return ok, nil
}

// lockTimeout is how long a look at a table waits for who alters it. In milliseconds.
const lockTimeout = "10000"

// checkRead lets the server plan the query that will be run, without running it: it
// says whether the condition is one, and whether the role may read the table.
func checkRead(ctx context.Context, conn *pgx.Conn, t *replication.Table, where string) error {
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return fmt.Errorf("look at %s: %w", t, err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // it has written nothing
	if _, err := tx.Exec(ctx, `SELECT pg_catalog.set_config('row_security', 'off', true), pg_catalog.set_config('lock_timeout', $1, true)`, lockTimeout); err != nil {
		return fmt.Errorf("look at %s: %w", t, err)
	}
	from := "EXPLAIN SELECT 1 FROM " + pgx.Identifier{t.Schema, t.Name}.Sanitize()
	if err := explain(ctx, tx, from); err != nil {
		return readError(t, err)
	}
	if where == "" {
		return nil
	}
	// Both forms, so that a condition which closes our parenthesis and opens one of its
	// own does not pass for one. The line break ends a comment.
	for _, form := range [][2]string{{" WHERE (", "\n)"}, {" WHERE CASE WHEN ", "\nTHEN true END"}} {
		if err := explain(ctx, tx, from+form[0]+where+form[1]); err != nil {
			var pgErr *pgconn.PgError
			if !errors.As(err, &pgErr) || !aboutTheQuery(pgErr.Code) {
				return readError(t, err)
			}
			text := pgErr.Message
			if at := int(pgErr.Position) - len([]rune(from+form[0])); at > 0 && at <= len([]rune(where)) {
				text += fmt.Sprintf(" at character %d of it", at)
			}
			if pgErr.Hint != "" {
				text += " (" + pgErr.Hint + ")"
			}
			return &UsageError{fmt.Errorf("--where %q is no condition on %s: %s (SQLSTATE %s); nothing was asked for", where, t, text, pgErr.Code)}
		}
	}
	return nil
}

// explain runs one statement, as the extended protocol takes no more than one.
func explain(ctx context.Context, tx pgx.Tx, sql string) error {
	return tx.Conn().PgConn().ExecParams(ctx, sql, nil, nil, nil, nil).Read().Err
}

// aboutTheQuery tells whether a SQLSTATE is about what was asked, and not about rights,
// locks, resources or the connection: syntax and names, data, cardinality, features.
func aboutTheQuery(code string) bool {
	class := code[:min(2, len(code))]
	return class == "42" && code != "42501" || class == "22" || class == "21" || class == "0A" || class == "08" && code == "08P01"
}

func readError(t *replication.Table, err error) error {
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &pgErr) && pgErr.Code == "55P03":
		return fmt.Errorf("look at %s: %w; another session has it locked for itself (see pg_blocking_pids()); ask again when it is done", t, err)
	case pgErr == nil || pgErr.Code != "42501":
		return fmt.Errorf("look at %s: %w", t, err)
	}
	remedy := "GRANT SELECT ON " + pgx.Identifier{t.Schema, t.Name}.Sanitize() + " to the role of source.dsn, and USAGE on its schema"
	if strings.Contains(pgErr.Message, "row-level security") || t.RowSecurity {
		remedy = "ALTER ROLE … BYPASSRLS for the role of source.dsn, since a policy would leave rows out; or " + remedy
	}
	return &checkpoint.Refusal{
		What: fmt.Sprintf("the role may not read %s", t), Risk: "the connector could not either", Remedy: remedy, Err: err,
	}
}

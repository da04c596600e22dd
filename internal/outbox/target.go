package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// What is done to a row that was delivered (outbox[].after).
const (
	Keep   = "keep" // nothing
	Mark   = "mark"
	Delete = "delete"
)

// Target is a table whose rows can be marked or deleted. It is not changed once made.
type Target struct {
	Table
	// Key holds the columns by which a row is found: a unique key, and the event's id
	// beside it, so that a row which took the key of one that is gone is not taken for it.
	Key []string
	// Loose tells that the table has no unique key. Rows whose event id is there twice are
	// then left alone, since one of them may not have been delivered.
	Loose bool
	sql   string // with one text array per column of Key
	// columns are the numbers of Key's columns in the table, which a renaming leaves as
	// they are.
	columns []int16
	byEvent *Target
}

// ByEvent finds rows by the event's id alone, as where the table has no unique key.
func (t *Target) ByEvent() *Target {
	if t.Loose {
		return t
	}
	return t.byEvent
}

// Same tells whether o does the same with the same rows.
func (t *Target) Same(o *Target) bool { return t.SameKey(o) && t.sql == o.sql }

// SameKey tells whether a key of o is one of t: the columns are the same, under whatever
// names.
func (t *Target) SameKey(o *Target) bool {
	return t.OID == o.OID && t.Loose == o.Loose && slices.Equal(t.columns, o.columns)
}

// NewTarget looks at a table and refuses (*checkpoint.Refusal) where its rows could not be
// marked: without a column to mark, or without the rights. It changes nothing.
func NewTarget(ctx context.Context, conn *pgx.Conn, t Table) (*Target, error) {
	target := &Target{Table: t}
	if t.After == Mark && t.Mark == "" {
		return nil, &checkpoint.Refusal{
			What:   fmt.Sprintf("outbox table %s has no column to mark: neither published_at (a timestamp that is NULL in a new row) nor status (an integer, a text or an enum)", t.String()),
			Risk:   "delivered rows could not be told from others",
			Remedy: fmt.Sprintf("ALTER TABLE %s ADD COLUMN published_at timestamptz; or set after: delete, or after: keep, under its outbox entry", t.SQL()),
		}
	}
	if err := target.readKey(ctx, conn); err != nil {
		return nil, err
	}
	if err := t.checkRights(ctx, conn, target.Key); err != nil {
		return nil, err
	}
	types, err := target.readColumns(ctx, conn)
	if err != nil {
		return nil, err
	}
	target.sql = target.statement(types)
	at := slices.Index(target.Key, t.EventID)
	target.byEvent = &Target{Table: t, Key: target.Key[at : at+1 : at+1], Loose: true, columns: target.columns[at : at+1]}
	target.byEvent.sql = target.byEvent.statement(types[at:])
	if err := target.try(ctx, conn); err != nil {
		return nil, err
	}
	return target, nil
}

// try has the server look at the statement's names and types now, so that what it cannot do ends the
// start. Where somebody has the table locked for longer it is left to the first marks.
func (t *Target) try(ctx context.Context, conn *pgx.Conn) (err error) {
	if _, err := conn.Exec(ctx, fmt.Sprintf("SET lock_timeout = %d", LockWait.Milliseconds())); err != nil {
		return fmt.Errorf("set lock_timeout: %w", err)
	}
	defer func() {
		if _, resetErr := conn.Exec(ctx, "RESET lock_timeout"); resetErr != nil {
			err = errors.Join(err, fmt.Errorf("reset lock_timeout: %w", resetErr))
		}
	}()
	if _, err = conn.PgConn().Prepare(ctx, "", t.sql, nil); err == nil || IsLocked(err) {
		return nil
	}
	var answer *pgconn.PgError
	if !errors.As(err, &answer) {
		return fmt.Errorf("prepare to %s rows of %s: %w", t.After, t.String(), err)
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("rows of outbox table %s cannot be worked on with after: %s", t.String(), t.After),
		Risk:   "delivered rows would stay as they are",
		Remedy: "correct the table (a status that is an enum needs the label processed), or set after: keep under its outbox entry",
		Err:    err,
	}
}

// readKey finds the columns by which a row is found.
func (t *Target) readKey(ctx context.Context, conn *pgx.Conn) error {
	err := conn.QueryRow(ctx, `
SELECT array_agg(a.attname::text ORDER BY k.ord)
  FROM pg_catalog.pg_index i, unnest(i.indkey) WITH ORDINALITY AS k(attnum, ord), pg_catalog.pg_attribute a
 WHERE i.indrelid = $1 AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
   AND k.ord <= i.indnkeyatts AND a.attrelid = i.indrelid AND a.attnum = k.attnum
 GROUP BY i.indexrelid, i.indisprimary
HAVING bool_and(a.attnotnull)
 ORDER BY i.indisprimary DESC, count(*), i.indexrelid
 LIMIT 1`, t.OID).Scan(&t.Key)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("read the keys of %s: %w", t.String(), err)
	}
	t.Loose = len(t.Key) == 0
	if !slices.Contains(t.Key, t.EventID) {
		t.Key = append(t.Key, t.EventID)
	}
	return nil
}

// checkRights refuses what our role may not do, with the statement that allows it.
func (t *Table) checkRights(ctx context.Context, conn *pgx.Conn, key []string) error {
	var (
		role                                string
		schema, reads, writes, rowsFiltered bool
	)
	read := key
	if t.After == Mark && !slices.Contains(read, t.Mark) {
		read = append(slices.Clone(key), t.Mark)
	}
	err := conn.QueryRow(ctx, `
SELECT quote_ident(current_user), has_schema_privilege(c.relnamespace, 'USAGE'),
       (SELECT bool_and(has_column_privilege(c.oid, name, 'SELECT')) FROM unnest($2::text[]) AS name),
       CASE WHEN $3::text = 'delete' THEN has_table_privilege(c.oid, 'DELETE') ELSE has_column_privilege(c.oid, $4::text, 'UPDATE') END,
       row_security_active(c.oid)
  FROM pg_catalog.pg_class c WHERE c.oid = $1`, t.OID, read, t.After, orEventID(t)).Scan(&role, &schema, &reads, &writes, &rowsFiltered)
	if err != nil {
		return fmt.Errorf("read the rights on %s: %w", t.String(), err)
	}
	grant := "DELETE"
	if t.After == Mark {
		grant = "UPDATE (" + pgx.Identifier{t.Mark}.Sanitize() + ")"
	}
	switch {
	case !schema || !reads || !writes:
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("role %s may not %s delivered rows of outbox table %s", role, t.After, t.String()),
			Risk:   "delivered rows would stay as they are, and with them the WAL that the slot keeps",
			Remedy: fmt.Sprintf("GRANT SELECT, %s ON %s TO %s; and USAGE on its schema; or set after: keep under its outbox entry", grant, t.SQL(), role),
		}
	case rowsFiltered:
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("a row-level security policy hides rows of outbox table %s from role %s", t.String(), role),
			Risk:   "a delivered row that is hidden would be taken for one that is gone, and stay as it is",
			Remedy: fmt.Sprintf("ALTER ROLE %s BYPASSRLS; or set after: keep under its outbox entry", role),
		}
	}
	return nil
}

// orEventID gives a column that is surely there where the mark is not asked about.
func orEventID(t *Table) string {
	if t.Mark != "" {
		return t.Mark
	}
	return t.EventID
}

// readColumns looks Key's columns up, and gives their SQL types.
func (t *Target) readColumns(ctx context.Context, conn *pgx.Conn) (types []string, err error) {
	err = conn.QueryRow(ctx, `
SELECT array_agg(pg_catalog.format_type(a.atttypid, a.atttypmod) ORDER BY c.ord), array_agg(a.attnum ORDER BY c.ord)
  FROM unnest($2::text[]) WITH ORDINALITY AS c(name, ord)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = $1 AND a.attname = c.name AND NOT a.attisdropped`, t.OID, t.Key).Scan(&types, &t.columns)
	if err != nil {
		return nil, fmt.Errorf("read the column types of %s: %w", t.String(), err)
	}
	if len(types) != len(t.Key) {
		return nil, fmt.Errorf("read the column types of %s: its columns have just changed", t.String())
	}
	return types, nil
}

// statement works on the rows whose keys it is given, and tells whether the table is still
// the one that is meant. One that is gone, or marked by
// whomever, is left alone.
func (t *Target) statement(types []string) string {
	var arrays, names, match []string
	for i, column := range t.Key {
		arrays = append(arrays, fmt.Sprintf("pg_catalog.unnest($%d::pg_catalog.text[])", i+1))
		names = append(names, fmt.Sprintf("k%d", i))
		match = append(match, fmt.Sprintf("t.%s = k.k%d::%s", pgx.Identifier{column}.Sanitize(), i, types[i]))
	}
	keys := fmt.Sprintf("ROWS FROM (%s) AS k(%s)", strings.Join(arrays, ", "), strings.Join(names, ", "))
	where := strings.Join(match, " AND ")
	if t.Loose {
		id := pgx.Identifier{t.EventID}.Sanitize()
		where += fmt.Sprintf(" AND NOT EXISTS (SELECT FROM %s o WHERE o.%s = t.%s AND (o.tableoid, o.ctid) <> (t.tableoid, t.ctid))", t.SQL(), id, id)
	}
	// Another table may have the name by now (a rotation). By the time that this is looked at
	// the lock is held, and the name cannot go to another one.
	same := fmt.Sprintf("pg_catalog.to_regclass(%s)::pg_catalog.oid = %d", replication.QuoteLiteral(t.SQL()), t.OID)
	work := fmt.Sprintf("UPDATE %s AS t SET %s FROM %s WHERE %s AND %s AND (%s)", t.SQL(), t.Set(), keys, same, where, t.Pending)
	if t.After == Delete {
		work = fmt.Sprintf("DELETE FROM %s AS t USING %s WHERE %s AND %s", t.SQL(), keys, same, where)
	}
	return fmt.Sprintf("WITH work AS (%s) SELECT %s", work, same)
}

// read reads what the statement answers.
func (t *Target) read(result *pgconn.Result) error {
	if result.Err != nil {
		return result.Err
	}
	if len(result.Rows) != 1 || len(result.Rows[0]) != 1 || string(result.Rows[0][0]) != "t" {
		return &pgconn.PgError{Severity: "ERROR", Code: codeUndefinedTable, Message: t.String() + " is the name of another table by now"}
	}
	return nil
}

package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// CleanOptions says what of an outbox table is cleaned away.
type CleanOptions struct {
	OlderThan      time.Duration
	Batch          int // rows deleted at a time, at the most
	DropPartitions bool
	// LookFor is how long the application's writers of a partition may be kept waiting for the last
	// look at its rows; 0: a second.
	LookFor time.Duration
}

// Cleaned is what came of it.
type Cleaned struct {
	Table   string   `json:"table"`
	Deleted int64    `json:"deleted"`
	Dropped []string `json:"dropped"` // partitions
	// Left are old partitions that were not dropped, and tables of which rows were not
	// deleted, and why.
	Left []string `json:"left"`
}

// pagesPerStep is how much of a table one look for rows reads: 8 MiB, so that what was
// deleted before is not read again and again.
const pagesPerStep = 1024

// Clean deletes the published rows of a table that are old enough, in transactions of one
// batch each. A row that is not published, whatever its age, is never touched: what is not
// marked stays. Age counts from published_at where that is the mark, else from the time at which the row
// was written. connect must lead to the primary.
func Clean(ctx context.Context, connect replication.Connector, t Table, o CleanOptions) (Cleaned, error) {
	c := Cleaned{Table: t.String(), Dropped: []string{}, Left: []string{}}
	condition, err := t.cleanable(o.OlderThan)
	if err != nil {
		return c, err
	}
	if o.LookFor == 0 {
		o.LookFor = time.Second
	}
	conn, err := open(ctx, connect)
	if err != nil {
		return c, err
	}
	defer func() { closeQuietly(ctx, conn) }()
	leaves, err := t.leaves(ctx, conn)
	if err != nil {
		return c, err
	}
	for _, leaf := range leaves {
		if o.DropPartitions && leaf.partition {
			dropped, why, err := leaf.drop(ctx, conn, dropping{condition, t, o.OlderThan, o.LookFor})
			switch {
			case err != nil:
				return c, err
			case dropped:
				c.Dropped = append(c.Dropped, leaf.name)
				continue
			case why != "":
				c.Left = append(c.Left, leaf.name+": "+why)
			}
		}
		n, why, err := leaf.deleteRows(ctx, conn, condition, o.Batch)
		c.Deleted += n
		if err != nil {
			return c, err
		}
		if why != "" {
			c.Left = append(c.Left, leaf.name+": "+why)
		}
	}
	return c, nil
}

// cleanable is the condition of rows that may go; it is never NULL for one that may not.
func (t *Table) cleanable(olderThan time.Duration) (string, error) {
	at := t.Created
	if t.Mark == "published_at" {
		at = t.Mark
	}
	switch {
	case t.Mark == "":
		return "", &checkpoint.Refusal{
			What:   fmt.Sprintf("outbox table %s has no column published_at (NULL in a new row) or status that tells which rows are published", t.String()),
			Risk:   "rows that were never published would be deleted",
			Remedy: "add such a column and set after: mark under its outbox entry, or set after: delete",
		}
	case at == "" && olderThan > 0:
		return "", &checkpoint.Refusal{
			What:   fmt.Sprintf("outbox table %s has no column that tells how old a row is: neither published_at nor created_at or occurred_at", t.String()),
			Risk:   "rows that are not old enough would be deleted",
			Remedy: "give --older-than 0s to delete every published row, or add such a column",
		}
	}
	published := "NOT (" + t.Pending + ")"
	if at == "" {
		return published, nil
	}
	return fmt.Sprintf("%s AND %s <= pg_catalog.now() - interval '%d microseconds'", published, pgx.Identifier{at}.Sanitize(), olderThan.Microseconds()), nil
}

// leaf is a table that holds rows itself: the table, or one of its partitions.
type leaf struct {
	oid       uint32
	name      string // as SQL
	partition bool
	bytes     int64
	// Of a partition: upper is the end of its range where that is one column of a time, as
	// SQL text, and columnType that column's.
	upper, columnType string
}

func (t *Table) leaves(ctx context.Context, conn *pgx.Conn) ([]leaf, error) {
	rows, err := conn.Query(ctx, `
SELECT c.oid, quote_ident(n.nspname) || '.' || quote_ident(c.relname), c.relispartition, pg_relation_size(c.oid),
       coalesce(substring(pg_get_expr(c.relpartbound, c.oid) FROM '^FOR VALUES FROM \([^,]*\) TO \(''([^'',]*)''\)$'), ''),
       coalesce((SELECT format_type(a.atttypid, a.atttypmod)
                   FROM pg_catalog.pg_inherits h
                   JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = h.inhparent AND p.partstrat = 'r' AND p.partnatts = 1
                   JOIN pg_catalog.pg_attribute a ON a.attrelid = h.inhparent AND a.attnum = p.partattrs[0]
                  WHERE h.inhrelid = c.oid AND a.atttypid IN ('date'::regtype, 'timestamp'::regtype, 'timestamptz'::regtype)), '')
  FROM pg_catalog.pg_partition_tree($1::oid::regclass) tree
  JOIN pg_catalog.pg_class c ON c.oid = tree.relid AND tree.isleaf AND c.relkind = 'r'
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
UNION ALL
SELECT c.oid, quote_ident(n.nspname) || '.' || quote_ident(c.relname), false, pg_relation_size(c.oid), '', ''
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = $1::oid AND c.relkind = 'r' AND NOT EXISTS (SELECT FROM pg_catalog.pg_partition_tree($1::oid::regclass))
 ORDER BY 2`, t.OID)
	if err != nil {
		return nil, fmt.Errorf("list the partitions of %s: %w", t.String(), err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (l leaf, err error) {
		err = row.Scan(&l.oid, &l.name, &l.partition, &l.bytes, &l.upper, &l.columnType)
		return l, err
	})
	if err != nil {
		return nil, fmt.Errorf("list the partitions of %s: %w", t.String(), err)
	}
	return list, nil
}

// deleteRows deletes what meets the condition, a stretch of pages after the other. A stretch
// is left as it is where somebody holds a row's lock for too long, and the rest of the table where
// one takes too long; why tells so.
func (l *leaf) deleteRows(ctx context.Context, conn *pgx.Conn, condition string, batch int) (total int64, why string, err error) {
	var block int64
	if err := conn.QueryRow(ctx, "SELECT current_setting('block_size')::int8").Scan(&block); err != nil {
		return 0, "", fmt.Errorf("read block_size: %w", err)
	}
	sql := fmt.Sprintf(`DELETE FROM ONLY %[1]s WHERE ctid = ANY (ARRAY(
		SELECT ctid FROM ONLY %[1]s WHERE ctid >= $1::text::tid AND ctid < $2::text::tid AND (%[2]s) LIMIT $3)) AND (%[2]s)`, l.name, condition)
	pages := (l.bytes + block - 1) / block
	for from := int64(0); from < pages; from += pagesPerStep {
		for attempt := 1; ; {
			tag, err := conn.Exec(ctx, sql, fmt.Sprintf("(%d,0)", from), fmt.Sprintf("(%d,0)", from+pagesPerStep), batch)
			if IsLocked(err) {
				if attempt++; attempt <= lockAttempts {
					continue
				}
				why = "some of its rows are locked by the application; the next run deletes them"
				break
			}
			if IsSlow(err) {
				return total, fmt.Sprintf("deleting up to %d of its rows took longer than %s; try a smaller --batch", batch, statementTimeout), nil
			}
			if err != nil {
				return total, why, l.explain("delete from", "DELETE", err)
			}
			total += tag.RowsAffected()
			if tag.RowsAffected() < int64(batch) {
				break
			}
		}
	}
	return total, why, nil
}

// lockAttempts is how often a lock of the application is waited for, for LockWait each.
const lockAttempts = 20

func (l *leaf) explain(what, right string, err error) error {
	var answer *pgconn.PgError
	if errors.As(err, &answer) && answer.Code == "42501" {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("our role may not %s %s", what, l.name),
			Risk:   "nothing; its published rows stay",
			Remedy: fmt.Sprintf("grant the role SELECT and %s on %s, or run this with the table's owner as user in source.dsn", right, l.name),
			Err:    err,
		}
	}
	return fmt.Errorf("%s %s: %w", what, l.name, err)
}

// dropping says which partitions may be dropped.
type dropping struct {
	condition string // of rows that may go
	table     Table
	olderThan time.Duration
	lookFor   time.Duration
}

// drop drops a partition that can get no more rows and holds nothing but what may go. why
// tells what keeps one that is old.
//
// All of its rows are looked at first, which keeps nobody waiting, for as long as it takes.
// What is written until nobody can write any more, a second look has to find; it is for rows that
// are not published alone, so that an index on these serves.
func (l *leaf) drop(ctx context.Context, conn *pgx.Conn, d dropping) (dropped bool, why string, err error) {
	if l.upper == "" || l.columnType == "" {
		return false, "its bounds are not a range of time that ends, so that rows may still come", nil
	}
	var past bool
	err = conn.QueryRow(ctx, fmt.Sprintf("SELECT $1::text::%s <= pg_catalog.now() - interval '%d microseconds'", l.columnType, d.olderThan.Microseconds()), l.upper).Scan(&past)
	if err != nil {
		return false, "", fmt.Errorf("read the bounds of %s: %w", l.name, err)
	}
	if !past {
		return false, "", nil
	}
	if others, err := l.holds(ctx, conn, "("+d.condition+") IS NOT TRUE"); IsLocked(err) {
		return false, "it is locked by the application", nil
	} else if err != nil {
		return false, "", err
	} else if others {
		return false, "it holds rows that are not published, or not old enough", nil
	}
	for attempt := range dropAttempts {
		if attempt > 0 { // whoever waits behind our locks goes first
			if err := pause(ctx, LockWait); err != nil {
				return false, "", err
			}
		}
		dropped, why, err = l.tryDrop(ctx, conn, d)
		if !IsLocked(err) {
			return dropped, why, err
		}
	}
	return false, "it is locked by the application", nil
}

// holds tells whether it has a row that meets the condition.
func (l *leaf) holds(ctx context.Context, conn *pgx.Conn, condition string) (found bool, err error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return false, fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // nothing was changed
	if _, err := tx.Exec(ctx, "SET LOCAL statement_timeout = 0"); err != nil {
		return false, fmt.Errorf("set statement_timeout: %w", err)
	}
	if err := tx.QueryRow(ctx, fmt.Sprintf("SELECT EXISTS (SELECT FROM ONLY %s WHERE %s)", l.name, condition)).Scan(&found); err != nil {
		return false, l.explain("read", "SELECT", err)
	}
	return found, nil
}

// dropAttempts is how often is tried to get the locks of a drop, each time for LockWait.
const dropAttempts = 10

// tryDrop keeps writers out of the partition from the look at its rows to the end, so that no
// row comes in between. LockWait and lookFor keep those who wait behind us from waiting for long.
func (l *leaf) tryDrop(ctx context.Context, conn *pgx.Conn, d dropping) (dropped bool, why string, err error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return false, "", fmt.Errorf("begin: %w", err)
	}
	defer func() {
		if !dropped {
			_ = tx.Rollback(context.WithoutCancel(ctx)) // nothing was changed
		}
	}()
	if _, err := tx.Exec(ctx, "LOCK TABLE ONLY "+l.name+" IN SHARE ROW EXCLUSIVE MODE"); err != nil {
		return false, "", l.explain("lock", "ownership", err)
	}
	limits := fmt.Sprintf("SET LOCAL statement_timeout = %d; SET LOCAL idle_in_transaction_session_timeout = %d", d.lookFor.Milliseconds(), statementTimeout.Milliseconds())
	if _, err := tx.Exec(ctx, limits); err != nil {
		return false, "", fmt.Errorf("set statement_timeout: %w", err)
	}
	var same, unpublished bool
	err = tx.QueryRow(ctx, fmt.Sprintf(`
SELECT EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = $1 AND oid = $2::text::pg_catalog.regclass AND relispartition),
       EXISTS (SELECT FROM ONLY %s WHERE %s)`, l.name, d.table.Pending), l.oid, l.name).Scan(&same, &unpublished)
	switch {
	case IsSlow(err):
		return false, fmt.Sprintf("a look for rows that are not published takes longer than the %s for which its writers are kept waiting; CREATE INDEX ON %s (%s) WHERE %s makes it short",
			d.lookFor, d.table.SQL(), pgx.Identifier{d.table.Mark}.Sanitize(), d.table.Pending), nil
	case err != nil:
		return false, "", l.explain("read", "SELECT", err)
	case !same:
		return false, "it has just been detached or renamed", nil
	case unpublished:
		return false, "it holds rows that are not published", nil
	}
	if _, err := tx.Exec(ctx, "DROP TABLE "+l.name); err != nil {
		var answer *pgconn.PgError
		switch {
		case errors.As(err, &answer) && answer.Code == "2BP01":
			return false, "something depends on it: " + answer.Detail, nil
		case IsSlow(err):
			return false, fmt.Sprintf("to drop it took longer than %s", d.lookFor), nil
		}
		return false, "", l.explain("drop", "ownership", err)
	}
	if err := tx.Commit(ctx); err != nil {
		return false, "", fmt.Errorf("drop %s: %w", l.name, err)
	}
	return true, "", nil
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

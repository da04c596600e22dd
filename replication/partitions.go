package replication

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// PartitionTree is a published table whose rows come and go with partitions: one that is
// partitioned and published through its root, with every table below it; or a partition
// that is published under its own name because an ancestor is, with its ancestors.
type PartitionTree struct {
	Root  uint32 `json:"root"`
	Parts []Part `json:"parts"` // Root itself only where it is a partition
}

// Part is a table of a PartitionTree, and how it is attached to its parent.
type Part struct {
	OID    uint32 `json:"oid"`
	Parent uint32 `json:"parent"`
	Name   string `json:"name"` // schema.table, unquoted
	// Link is the transaction that attached it. ATTACH writes a new row into pg_inherits,
	// so that whoever is detached and attached again has another one.
	Link  uint32 `json:"link"`
	File  uint32 `json:"file"` // relfilenode; 0 for a table that is partitioned itself
	Space uint32 `json:"space"`
	// Leaf tells that rows of the tree are in it.
	Leaf bool `json:"leaf"`
	// Born tells that it was created as a partition (CREATE TABLE … PARTITION OF), so that
	// no row was written to it before. Not every such is recognised.
	Born bool `json:"born"`
}

// PartitionTrees gives the trees among published tables, ordered. digest is what the last
// call gave; where nothing differs it comes back, and the trees are nil.
func PartitionTrees(ctx context.Context, conn *pgx.Conn, publications []string, tables []uint32, digest string) ([]PartitionTree, string, error) {
	if len(tables) == 0 {
		return nil, "", nil
	}
	var list *string
	var now string
	err := conn.QueryRow(ctx, partitionTreesSQL(ServerMajor(conn.PgConn())), tables, publications, digest).Scan(&list, &now)
	if err != nil {
		return nil, "", fmt.Errorf("list partitions: %w", err)
	}
	if list == nil {
		return nil, now, nil
	}
	var trees []PartitionTree
	if err := json.Unmarshal([]byte(*list), &trees); err != nil {
		return nil, "", fmt.Errorf("list partitions: %w", err)
	}
	return trees, now, nil
}

// partitionTreesSQL takes tables, publications and the digest. A partition whose DETACH
// CONCURRENTLY is pending is detached already: no query finds its rows through the root.
//
// A table that was created as a partition has inherited columns that are as the CREATE
// TABLE wrote them, in one command with the system columns: an ATTACH counts attinhcount up
// in a new version of every column's row, and a DETACH down. That it was attached by the
// creating transaction is not enough, which may have filled it before. Where xmax is set
// somebody tried to change the row, and its cmin says nothing any more.
func partitionTreesSQL(major int) string {
	schemas, inSchema := "", ""
	if major >= 15 {
		schemas = "LEFT JOIN pg_catalog.pg_publication_namespace n ON n.pnpubid = p.oid AND n.pnnspid = c.relnamespace"
		inSchema = " OR n.oid IS NOT NULL"
	}
	return `
WITH RECURSIVE link AS (
  SELECT inhrelid AS oid, inhparent AS parent, xmin FROM pg_catalog.pg_inherits WHERE NOT inhdetachpending
), root AS (
  SELECT c.oid, c.relkind FROM pg_catalog.pg_class c
   WHERE c.oid = ANY ($1::oid[]) AND (c.relkind = 'p' OR c.relkind = 'r' AND c.relispartition AND NOT EXISTS (
     SELECT FROM pg_catalog.pg_publication p
       LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid ` + schemas + `
      WHERE p.pubname = ANY ($2::name[]) AND (p.puballtables OR r.oid IS NOT NULL` + inSchema + `)))
), part AS (
  SELECT r.oid AS root, r.relkind, l.* FROM root r JOIN link l ON CASE r.relkind WHEN 'p' THEN l.parent ELSE l.oid END = r.oid
   UNION ALL
  SELECT p.root, p.relkind, l.* FROM part p JOIN link l ON CASE p.relkind WHEN 'p' THEN l.parent = p.oid ELSE l.oid = p.parent END
), listed AS (
  SELECT p.root, json_agg(json_build_object('oid', p.oid::int8, 'parent', p.parent::int8, 'name', n.nspname || '.' || c.relname,
           'link', p.xmin::text::int8, 'file', CASE WHEN p.relkind = 'p' THEN c.relfilenode::int8 ELSE 0 END,
           'space', CASE WHEN p.relkind = 'p' AND c.relkind = 'r' THEN c.reltablespace::int8 ELSE 0 END, 'leaf', c.relkind = 'r',
           'born', a.xmin = p.xmin AND a.xmax = '0' AND EXISTS (
              SELECT FROM pg_catalog.pg_attribute i
               WHERE i.attrelid = p.oid AND i.attnum > 0 AND i.attinhcount > 0 AND i.xmin = a.xmin AND i.cmin = a.cmin AND i.xmax = '0')) ORDER BY p.oid) AS parts
    FROM part p
    JOIN pg_catalog.pg_class c ON c.oid = p.oid AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_catalog.pg_attribute a ON a.attrelid = p.oid AND a.attname = 'tableoid'
   GROUP BY p.root
), every AS (
  SELECT coalesce(json_agg(json_build_object('root', r.oid::int8, 'parts', coalesce(l.parts, '[]')) ORDER BY r.oid), '[]')::text AS list
    FROM root r LEFT JOIN listed l ON l.root = r.oid
)
SELECT CASE WHEN pg_catalog.md5(list) <> $3 THEN list END, pg_catalog.md5(list) FROM every`
}

// lookTimeout bounds the wait for the lock of a partition that somebody rewrites at this
// moment: the next look will find it.
const lookTimeout = "SET LOCAL lock_timeout = '1s'"

// look runs f in a read-only transaction that waits for no lock for long, and in which
// expressions are written with every name qualified.
func look(ctx context.Context, conn *pgx.Conn, f func(tx pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		for _, sql := range []string{lookTimeout, "SET LOCAL search_path = pg_catalog"} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return f(tx)
	})
}

// PartBounds is what is asked of a partition before its rows are read.
type PartBounds struct {
	// Rows tells that there may be some: its file has pages.
	Rows bool
	// Condition is the partition's constraint in SQL, its ancestors' included; empty where
	// there is none.
	Condition string
}

// ReadPartBounds reads them; a partition that is gone is left out.
func ReadPartBounds(ctx context.Context, conn *pgx.Conn, parts []uint32) (map[uint32]PartBounds, error) {
	out := map[uint32]PartBounds{}
	if len(parts) == 0 {
		return out, nil
	}
	err := look(ctx, conn, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `
SELECT oid, coalesce(pg_catalog.pg_relation_size(oid) > 0, false), coalesce(pg_catalog.pg_get_partition_constraintdef(oid), '')
  FROM pg_catalog.pg_class WHERE oid = ANY ($1::oid[])`, parts)
		if err != nil {
			return err
		}
		var oid uint32
		var b PartBounds
		_, err = pgx.ForEachRow(rows, []any{&oid, &b.Rows, &b.Condition}, func() error {
			out[oid] = b
			return nil
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the bounds of partitions: %w", err)
	}
	return out, nil
}

// NewFile is what can be seen of a table whose file is another one than before.
type NewFile struct {
	Gone bool // the table is not there any more
	XID  uint32
	// Empty tells that it has no page, and no statistics either, as TRUNCATE leaves it.
	Empty bool
	// Pages tells that there are some.
	Pages bool
	// Kept tells that rows are in it that are older than the file, and than its relfrozenxid,
	// which TRUNCATE sets to the oldest transaction that runs: somebody rewrote it, and did
	// not truncate it. (Rows may be older than the file alone where that was made in a
	// savepoint: the transaction has a lower xid.)
	Kept bool
	// Altered tells that the same transaction changed a column: ALTER TABLE rewrote it.
	Altered bool
}

// keptSample is how many rows are looked at for one that is older than the file. VACUUM
// FULL and CLUSTER keep each row's xmin, so that nearly every row is.
const keptSample = 10_000

// ReadNewFile looks at a table whose relfilenode has changed.
func ReadNewFile(ctx context.Context, conn *pgx.Conn, oid uint32) (f NewFile, err error) {
	err = look(ctx, conn, func(tx pgx.Tx) error {
		var schema, name string
		var readable bool
		var tuples float32
		var xid, frozen string
		err := tx.QueryRow(ctx, `
SELECT n.nspname, c.relname, c.xmin::text, c.relfrozenxid::text, c.reltuples, coalesce(pg_relation_size(c.oid) > 0, false),
       has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE') AND NOT row_security_active(c.oid),
       EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND a.xmin = c.xmin)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1`, oid).
			Scan(&schema, &name, &xid, &frozen, &tuples, &f.Pages, &readable, &f.Altered)
		if errors.Is(err, pgx.ErrNoRows) {
			f.Gone = true
			return nil
		}
		if err != nil {
			return err
		}
		x, err := strconv.ParseUint(xid, 10, 32)
		if err != nil {
			return err
		}
		f.XID, f.Empty = uint32(x), !f.Pages && tuples < 0
		if !f.Pages || !readable {
			return nil
		}
		return tx.QueryRow(ctx, fmt.Sprintf(`SELECT EXISTS (SELECT FROM (SELECT xmin AS x FROM ONLY %s LIMIT %d) s WHERE age(x) > greatest(age('%s'::xid), age('%s'::xid)))`,
			pgx.Identifier{schema, name}.Sanitize(), keptSample, xid, frozen)).Scan(&f.Kept)
	})
	if err != nil {
		return f, fmt.Errorf("look at the rewritten table %d: %w", oid, err)
	}
	return f, nil
}

// Existing tells which tables are there still.
func Existing(ctx context.Context, conn *pgx.Conn, oids []uint32) (map[uint32]bool, error) {
	rows, err := conn.Query(ctx, `SELECT oid FROM pg_catalog.pg_class WHERE oid = ANY ($1::oid[])`, oids)
	if err != nil {
		return nil, fmt.Errorf("look for tables: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[uint32])
	if err != nil {
		return nil, fmt.Errorf("look for tables: %w", err)
	}
	there := map[uint32]bool{}
	for _, oid := range list {
		there[oid] = true
	}
	return there, nil
}

// Removals tells whether the publications send a table's deletes, and its truncates.
func Removals(ctx context.Context, conn *pgx.Conn, publications []string, oid uint32) (deletes, truncates bool, err error) {
	err = conn.QueryRow(ctx, `
SELECT coalesce(bool_or(p.pubdelete), false), coalesce(bool_or(p.pubtruncate), false)
  FROM pg_catalog.pg_publication p JOIN pg_catalog.pg_publication_tables t ON t.pubname = p.pubname
  JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
 WHERE p.pubname = ANY ($1::name[]) AND c.oid = $2`, publications, oid).Scan(&deletes, &truncates)
	if err != nil {
		return false, false, fmt.Errorf("read what publications send: %w", err)
	}
	return deletes, truncates, nil
}

// InParts is the SQL condition of the rows of single partitions, whatever becomes of them.
func InParts(parts []uint32) string {
	list := make([]string, len(parts))
	for i, oid := range parts {
		list[i] = strconv.FormatUint(uint64(oid), 10)
	}
	return "tableoid IN (" + strings.Join(list, ", ") + ")"
}

// PartitionColumns gives the columns by which rows of a table are put into partitions, on
// any level, expressions included; none for one that is not partitioned.
func PartitionColumns(ctx context.Context, conn *pgx.Conn, oid uint32) (columns []string, err error) {
	// A partition key's columns depend on their table as a whole (heap.c, StorePartitionKey).
	err = conn.QueryRow(ctx, `
SELECT coalesce(array_agg(DISTINCT a.attname::text ORDER BY a.attname::text), '{}')
  FROM pg_catalog.pg_partition_tree($1::oid) t
  JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_class'::regclass AND d.refclassid = d.classid AND d.objid = t.relid AND d.refobjid = t.relid AND d.refobjsubid = 0 AND d.deptype = 'i'
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.relid AND a.attnum = d.objsubid
 WHERE NOT t.isleaf`, oid).Scan(&columns)
	if err != nil {
		return nil, fmt.Errorf("read partition keys: %w", err)
	}
	return columns, nil
}

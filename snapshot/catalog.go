package snapshot

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/replication"
)

// Published is a table that the publications publish under its own name: a table, the
// root of a partition tree, or a leaf of one, as publish_via_partition_root has it.
type Published struct {
	OID         uint32
	Schema      string
	Name        string
	Partitioned bool // a root; its rows are those of its leaves
	Identity    replication.ReplicaIdentity
	// Key holds the columns that identify a row in every change of the stream, in the
	// order of their index: those of the replica identity's index, or the primary key's
	// under DEFAULT, FULL and NOTHING. Nil where there are none.
	Key []string
	// PrimaryKey holds the primary key's columns, in the order of their index; nil where
	// there is none.
	PrimaryKey []string
	NotNull    []string // the columns that cannot be null
	// Estimate is the planner's number of rows, those of the leaves for a root; -1 where
	// nothing is known.
	Estimate int64

	indexes []index
	ordered bool // rows can be read in the order of Key
}

// String gives schema.table, unquoted.
func (p Published) String() string { return p.Schema + "." + p.Name }

// Table gives the table as the Merger takes it. keys are the columns of source.keys for
// this table, used where it has no key of its own; nil for none.
func (p Published) Table(keys []string) Table {
	key, _, whole := p.choose(keys)
	t := Table{OID: p.OID, Schema: p.Schema, Name: p.Name, Key: key, Configured: slices.Clone(keys), Whole: whole, Estimate: p.Estimate}
	return t
}

// choose gives the key that identifies rows, the index behind it, and whether the rows
// can only be read whole.
func (p Published) choose(keys []string) (key []string, behind *index, whole bool) {
	if p.Key != nil {
		return p.Key, p.identityIndex(), !p.ordered
	}
	if len(keys) == 0 {
		return nil, nil, true
	}
	want := slices.Sorted(slices.Values(keys))
	for i := range p.indexes {
		x := &p.indexes[i]
		if x.NotNull && x.Ordered && slices.Equal(slices.Sorted(slices.Values(x.Columns)), want) {
			return x.Columns, x, false
		}
	}
	return keys, nil, true
}

// identityIndex is the index behind Key.
func (p Published) identityIndex() *index {
	for i := range p.indexes {
		x := &p.indexes[i]
		switch p.Identity {
		case replication.IdentityIndex:
			if x.Replica && x.Immediate {
				return x
			}
		case replication.IdentityDefault:
			if x.Primary && x.Immediate {
				return x
			}
		default:
			if x.Primary {
				return x
			}
		}
	}
	return nil
}

// index is a unique index over columns that is valid and not partial.
type index struct {
	OID       uint32   `json:"oid"`
	Primary   bool     `json:"primary"`
	Replica   bool     `json:"replica"` // REPLICA IDENTITY USING INDEX names it
	Immediate bool     `json:"immediate"`
	Columns   []string `json:"columns"` // in the index's order
	NotNull   bool     `json:"notnull"` // all of them
	// Ordered tells that the index gives the rows in the order of its columns' types, all
	// ascending or all descending.
	Ordered bool `json:"ordered"`
}

// row is a published table as the catalog's query gives it.
type row struct {
	OID       uint32  `json:"oid"`
	Schema    string  `json:"schema"`
	Name      string  `json:"name"`
	Kind      string  `json:"kind"`
	Identity  string  `json:"identity"`
	Attrs     *string `json:"attrs"` // numbers of the column list; null without one
	Generated bool    `json:"generated"`
	Filter    *string `json:"filter"`
	Estimate  float64 `json:"estimate"`
	NotNull   []string
	Indexes   []index `json:"indexes"`
}

func (r *row) published() (Published, error) {
	if r.Identity == "" {
		return Published{}, fmt.Errorf("relreplident of %s.%s is empty", r.Schema, r.Name)
	}
	p := Published{
		OID: r.OID, Schema: r.Schema, Name: r.Name, Partitioned: r.Kind == "p", Identity: replication.ReplicaIdentity(r.Identity[0]),
		NotNull: r.NotNull, Estimate: int64(r.Estimate), indexes: r.Indexes,
	}
	for _, x := range r.Indexes {
		if x.Primary {
			p.PrimaryKey = x.Columns
		}
	}
	if x := p.identityIndex(); x != nil {
		p.Key, p.ordered = x.Columns, x.Ordered
	}
	return p, nil
}

// Tables gives every table that the publications publish, each once and under the name
// under which the stream sends it. It is one query, and changes nothing.
func Tables(ctx context.Context, conn *pgx.Conn, publications []string) ([]Published, error) {
	major := replication.ServerMajor(conn.PgConn())
	query := publishedSQL(major, publications, 0) + " SELECT coalesce(pg_catalog.json_agg(j ORDER BY j ->> 'schema', j ->> 'name'), '[]')::text FROM tables"
	var rows []row
	if err := queryJSON(ctx, conn, query, &rows); err != nil {
		return nil, fmt.Errorf("list published tables: %w", err)
	}
	tables := make([]Published, len(rows))
	for i := range rows {
		var err error
		if tables[i], err = rows[i].published(); err != nil {
			return nil, fmt.Errorf("list published tables: %w", err)
		}
	}
	return tables, nil
}

func queryJSON(ctx context.Context, conn *pgx.Conn, sql string, to any) error {
	rows, err := replication.TextRows(ctx, conn, sql)
	if err != nil {
		return err
	}
	if len(rows) != 1 || len(rows[0]) != 1 {
		return fmt.Errorf("query gave %d rows, want 1", len(rows))
	}
	return json.Unmarshal(rows[0][0], to)
}

// publishedSQL is a WITH clause that ends with tables(j): one JSON object per table that
// the publications publish under its own name. oid restricts it to one table; 0: all.
//
// The rules are pgoutput's (get_rel_sync_entry). A table is in a publication if that is
// FOR ALL TABLES, or names it, its schema, or an ancestor of it or the ancestor's schema. If
// a publication that it is in through an ancestor publishes via the root, the ancestor
// is sent and not the table. A partitioned table is sent as itself only by a publication
// that publishes via the root. A column list, or a row filter, is the publication's for
// the very table that is sent; none applies where the publication has the whole schema or
// all tables, and one publication without a filter sends all rows.
func publishedSQL(major int, publications []string, oid uint32) string {
	restrict := ""
	if oid != 0 {
		restrict = " AND c.oid = " + strconv.FormatUint(uint64(oid), 10)
	}
	names := make([]string, len(publications))
	for i, p := range publications {
		names[i] = literal(p)
	}
	if len(names) == 0 {
		names = []string{"NULL"}
	}
	generated, attrs, filter, schemas, inSchema := "false", "NULL::text", "NULL::text", "", "false"
	if major >= 15 {
		attrs, filter = "pr.prattrs::text", "pg_catalog.pg_get_expr(pr.prqual, pr.prrelid)"
		schemas = "LEFT JOIN pg_catalog.pg_publication_namespace pn ON pn.pnpubid = p.oid AND pn.pnnspid = l.relnamespace"
		inSchema = "pn.oid IS NOT NULL"
	}
	if major >= 18 {
		generated = "p.pubgencols = 's'"
	}
	return `
WITH rel AS MATERIALIZED (
  SELECT c.oid, c.relname, c.relnamespace, c.relkind, c.relreplident, c.relispartition, c.reltuples
    FROM pg_catalog.pg_class c
   WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384` + restrict + `
), line AS (
  SELECT oid, oid AS ancestor, relnamespace FROM rel
  UNION ALL
  SELECT r.oid, a.relid, c.relnamespace
    FROM rel r CROSS JOIN LATERAL pg_catalog.pg_partition_ancestors(r.oid) a JOIN pg_catalog.pg_class c ON c.oid = a.relid
   WHERE r.relispartition AND a.relid <> r.oid
), named AS (
  SELECT p.* FROM pg_catalog.pg_publication p WHERE p.pubname IN (` + strings.Join(names, ", ") + `)
), pub AS (
  SELECT l.oid, l.ancestor, p.oid AS pub, p.pubviaroot AS viaroot, ` + generated + ` AS gen,
         p.puballtables OR ` + inSchema + ` AS wide, ` + attrs + ` AS attrs, ` + filter + ` AS filter
    FROM line l CROSS JOIN named p
    LEFT JOIN pg_catalog.pg_publication_rel pr ON pr.prpubid = p.oid AND pr.prrelid = l.ancestor ` + schemas + `
   WHERE p.puballtables OR pr.oid IS NOT NULL OR ` + inSchema + `
), taken AS (
  SELECT r.oid, p.pub, bool_or(p.gen) AS gen,
         max(p.attrs) FILTER (WHERE p.ancestor = r.oid AND NOT p.wide) AS attrs,
         max(p.filter) FILTER (WHERE p.ancestor = r.oid AND NOT p.wide) AS filter
    FROM rel r JOIN pub p ON p.oid = r.oid
   WHERE (r.relkind = 'r' OR p.viaroot AND p.ancestor = r.oid)
     AND NOT EXISTS (SELECT FROM pub q WHERE q.oid = r.oid AND q.ancestor <> q.oid AND q.viaroot)
   GROUP BY r.oid, p.pub
), published AS (
  SELECT oid, bool_or(gen) AS gen, max(attrs) AS attrs,
         CASE WHEN bool_and(filter IS NOT NULL) THEN string_agg(DISTINCT '(' || filter || ')', ' OR ') END AS filter
    FROM taken GROUP BY oid
), part AS (
  SELECT i.indrelid, i.indexrelid, i.indisprimary, i.indisreplident, i.indimmediate,
         json_agg(a.attname ORDER BY k.n) AS columns, bool_and(a.attnotnull) AS nonnull,
         bool_and(o.opcdefault AND o.opcmethod = 403) AND count(DISTINCT k.option & 1) = 1 AS ordered
    FROM published p JOIN pg_catalog.pg_index i ON i.indrelid = p.oid
   CROSS JOIN LATERAL unnest(i.indkey::int2[], i.indclass::oid[], i.indoption::int2[]) WITH ORDINALITY AS k(attnum, class, option, n)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
    JOIN pg_catalog.pg_opclass o ON o.oid = k.class
   WHERE i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL AND k.n <= i.indnkeyatts
   GROUP BY 1, 2, 3, 4, 5
), indexes AS (
  SELECT indrelid, json_agg(json_build_object('oid', indexrelid::int8, 'primary', indisprimary, 'replica', indisreplident,
           'immediate', indimmediate, 'columns', columns, 'notnull', nonnull, 'ordered', ordered) ORDER BY indexrelid) AS list
    FROM part GROUP BY indrelid
), nonnull AS (
  SELECT a.attrelid, json_agg(a.attname ORDER BY a.attnum) AS list
    FROM published p JOIN pg_catalog.pg_attribute a ON a.attrelid = p.oid
   WHERE a.attnum > 0 AND a.attnotnull AND NOT a.attisdropped GROUP BY 1
), tables AS (
  SELECT json_build_object('oid', r.oid::int8, 'schema', n.nspname, 'name', r.relname, 'kind', r.relkind::text,
           'identity', r.relreplident::text, 'attrs', p.attrs, 'generated', p.gen, 'filter', p.filter,
           'estimate', CASE WHEN r.relkind = 'r' THEN r.reltuples ELSE (
              SELECT coalesce(sum(l.reltuples) FILTER (WHERE l.reltuples >= 0), -1) FROM pg_catalog.pg_partition_tree(r.oid) t
                JOIN pg_catalog.pg_class l ON l.oid = t.relid WHERE t.isleaf) END,
           'notnull', x.list, 'indexes', i.list) AS j
    FROM published p
    JOIN rel r ON r.oid = p.oid
    JOIN pg_catalog.pg_namespace n ON n.oid = r.relnamespace
    LEFT JOIN indexes i ON i.indrelid = r.oid
    LEFT JOIN nonnull x ON x.attrelid = r.oid
)`
}

// literal quotes a text, or a key's text, as an SQL literal: as an escape string, which
// means the same whatever standard_conforming_strings is.
func literal(s string) string {
	return "E'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'"
}

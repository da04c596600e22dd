package replication

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
)

// Table is a user table as the catalog has it now. It is what publications are made
// of; the columns of a change come from its RELATION message, never from here.
type Table struct {
	OID         uint32
	Schema      string
	Name        string
	Owner       string
	Owned       bool // our role may alter it, so also add it to a publication
	Partitioned bool // the root of a partition tree; its leaves are reached through it
	Identity    ReplicaIdentity
	// Updatable tells that a publication of updates and deletes leaves the
	// application's UPDATE and DELETE working: the table, and every leaf of a
	// partitioned one, has a replica identity that the server accepts.
	Updatable bool
	// Obstacle says why Updatable is false.
	Obstacle    string
	RowSecurity bool
	// Publications that name the table itself, sorted.
	Publications []string
}

// String gives schema.table, unquoted, as the configuration's globs see it.
func (t Table) String() string { return t.Schema + "." + t.Name }

func quote(ident string) string { return pgx.Identifier{ident}.Sanitize() }

// Role is what our role may do.
type Role struct {
	Name        string
	Superuser   bool
	Replication bool // the REPLICATION attribute, or what Amazon RDS has in its place
	Create      bool // CREATE on the database, needed for CREATE PUBLICATION
}

// Database is what the server says about itself and our database.
type Database struct {
	// SystemID is the cluster's; empty where the role may not read it, then
	// IDENTIFY_SYSTEM on the replication connection gives it.
	SystemID   string
	Name       string
	Timeline   int32
	Version    int // server_version_num, for example 150008
	WALLevel   string
	InRecovery bool
	// WALEnd is the end of the last record written (on a standby: replayed).
	WALEnd         checkpoint.LSN
	MaxSlots       int
	Slots          int // slots in use, of the whole cluster
	MaxWALSenders  int
	MaxSlotKeep    string // max_slot_wal_keep_size as SHOW prints it; -1: no limit
	Role           Role
	TransactionEnd checkpoint.XID // the first xid not yet completed
}

// Source gives d as the checkpoint keeps it.
func (d Database) Source() checkpoint.Source {
	return checkpoint.Source{SystemID: d.SystemID, Database: d.Name, Timeline: d.Timeline}
}

const databaseSQL = `
SELECT d.datname::text,
       current_setting('server_version_num')::int,
       current_setting('wal_level'),
       pg_is_in_recovery(),
       CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int END,
       (CASE WHEN pg_is_in_recovery() THEN coalesce(pg_last_wal_replay_lsn(), '0/0') ELSE pg_current_wal_insert_lsn() END)::text,
       current_setting('wal_block_size')::int,
       pg_size_bytes(current_setting('wal_segment_size')),
       current_setting('max_replication_slots')::int,
       (SELECT count(*)::int FROM pg_catalog.pg_replication_slots),
       current_setting('max_wal_senders')::int,
       current_setting('max_slot_wal_keep_size'),
       r.rolname::text, r.rolsuper,
       r.rolreplication OR EXISTS (SELECT FROM pg_catalog.pg_roles g
                                    WHERE g.rolname = 'rds_replication' AND pg_has_role(g.oid, 'USAGE')),
       has_database_privilege(d.oid, 'CREATE'),
       pg_snapshot_xmax(pg_current_snapshot())::text
  FROM pg_catalog.pg_database d, pg_catalog.pg_roles r
 WHERE d.datname = current_database() AND r.rolname = current_user`

// ReadDatabase reads what the checks before a start need. It changes nothing.
func ReadDatabase(ctx context.Context, conn *pgx.Conn) (Database, error) {
	var (
		d          Database
		walEnd     string
		block      int32
		segment    int64
		transition string
	)
	err := conn.QueryRow(ctx, databaseSQL).Scan(&d.Name, &d.Version, &d.WALLevel, &d.InRecovery, &d.Timeline,
		&walEnd, &block, &segment, &d.MaxSlots, &d.Slots, &d.MaxWALSenders, &d.MaxSlotKeep,
		&d.Role.Name, &d.Role.Superuser, &d.Role.Replication, &d.Role.Create, &transition)
	if err != nil {
		return Database{}, fmt.Errorf("read database: %w", err)
	}
	lsn, err := checkpoint.ParseLSN(walEnd)
	if err != nil {
		return Database{}, fmt.Errorf("read database: %w", err)
	}
	d.WALEnd = RecordEnd(lsn, uint64(block), uint64(segment))
	if d.TransactionEnd, err = parseXID(transition); err != nil {
		return Database{}, fmt.Errorf("read database: %w", err)
	}
	// A statement of its own, because some managed services take this right away.
	err = conn.QueryRow(ctx, `SELECT system_identifier::text FROM pg_catalog.pg_control_system()`).Scan(&d.SystemID)
	if err != nil && !hasCode(err, codeInsufficientPrivilege) {
		return Database{}, fmt.Errorf("read system identifier: %w", err)
	}
	return d, nil
}

const (
	shortPageHeader = 24 // SizeOfXLogShortPHD, at the start of every WAL page
	longPageHeader  = 40 // SizeOfXLogLongPHD, at the start of every segment
)

// RecordEnd turns an insert position into the end of the last record. Directly behind
// a page header they differ: nothing of that page is used yet, so the record before
// ended at the page's start or earlier, and that is as far as an idle stream ever gets.
func RecordEnd(insert checkpoint.LSN, block, segment uint64) checkpoint.LSN {
	l := uint64(insert)
	switch {
	case block == 0 || segment == 0:
		return insert
	case l%segment == longPageHeader:
		return checkpoint.LSN(l - longPageHeader)
	case l%segment >= block && l%block == shortPageHeader:
		return checkpoint.LSN(l - shortPageHeader)
	}
	return insert
}

// tablesSQL lists every user table in one query, however many there are.
//
// An index serves as replica identity if it is unique, immediate, valid and not
// partial; a DEFERRABLE primary key does not, though DEFAULT asks for the primary key.
// With a partitioned table the server checks the leaf that an UPDATE touches, and a
// leaf does not inherit the root's REPLICA IDENTITY, so all of them count; a foreign
// leaf is never checked. From 18 on, FULL and a virtual generated column exclude each
// other in a publication of updates.
const tablesSQL = `
WITH rel AS (
  SELECT c.oid, c.relname, c.relnamespace, c.relowner, c.relkind, c.relreplident, c.relispartition,
         c.relpersistence, c.relrowsecurity,
         CASE c.relreplident
           WHEN 'f' THEN NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a
                          WHERE a.attrelid = c.oid AND a.attgenerated = 'v' AND NOT a.attisdropped)
           WHEN 'n' THEN false
           ELSE EXISTS (SELECT FROM pg_catalog.pg_index i
                 WHERE i.indrelid = c.oid AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
                   AND CASE c.relreplident WHEN 'd' THEN i.indisprimary ELSE i.indisreplident END)
         END AS updatable
    FROM pg_catalog.pg_class c
   WHERE c.relkind IN ('r', 'p') AND c.oid >= 16384
), bad_leaf AS (
  SELECT root.oid, min(n.nspname || '.' || l.relname) AS leaf
    FROM rel root
    CROSS JOIN LATERAL pg_catalog.pg_partition_tree(root.oid) tree
    JOIN rel l ON l.oid = tree.relid AND l.relkind = 'r'
    JOIN pg_catalog.pg_namespace n ON n.oid = l.relnamespace
   WHERE root.relkind = 'p' AND NOT root.relispartition AND NOT l.updatable
   GROUP BY root.oid
)
SELECT r.oid, n.nspname::text, r.relname::text, pg_catalog.pg_get_userbyid(r.relowner)::text,
       pg_catalog.pg_has_role(r.relowner, 'USAGE'),
       r.relkind = 'p', r.relreplident::text, r.updatable, coalesce(b.leaf, ''), r.relrowsecurity,
       ARRAY(SELECT p.pubname::text FROM pg_catalog.pg_publication_rel pr
               JOIN pg_catalog.pg_publication p ON p.oid = pr.prpubid
              WHERE pr.prrelid = r.oid ORDER BY 1)
  FROM rel r
  JOIN pg_catalog.pg_namespace n ON n.oid = r.relnamespace
  LEFT JOIN bad_leaf b ON b.oid = r.oid
 WHERE NOT r.relispartition AND r.relpersistence = 'p'
   AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d
                    WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = r.oid
                      AND d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass AND d.deptype = 'e')
 ORDER BY 2, 3`

// Tables lists the tables that can be captured: ordinary and partitioned ones that are
// logged, and belong neither to the system nor to an extension. Partitions are left
// out, because they are published through their root.
func Tables(ctx context.Context, conn *pgx.Conn) ([]Table, error) {
	rows, err := conn.Query(ctx, tablesSQL)
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	tables, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Table, error) {
		var (
			t              Table
			identity, leaf string
		)
		if err := row.Scan(&t.OID, &t.Schema, &t.Name, &t.Owner, &t.Owned, &t.Partitioned,
			&identity, &t.Updatable, &leaf, &t.RowSecurity, &t.Publications); err != nil {
			return Table{}, err
		}
		if identity == "" {
			return Table{}, errors.New("relreplident is empty")
		}
		t.Identity = ReplicaIdentity(identity[0])
		t.Obstacle = obstacle(t, leaf)
		t.Updatable = t.Obstacle == ""
		return t, nil
	})
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	return tables, nil
}

// obstacle words why updates of t cannot be published; leaf is a partition that
// stands in the way, if any.
func obstacle(t Table, leaf string) string {
	switch {
	case !t.Updatable && t.Identity == IdentityFull:
		return "REPLICA IDENTITY FULL does not work with its virtual generated column"
	case !t.Updatable && t.Identity == IdentityNothing:
		return "REPLICA IDENTITY NOTHING"
	case !t.Updatable && t.Identity == IdentityIndex:
		return "its replica identity index is gone or not valid"
	case !t.Updatable:
		return "no primary key that is not deferrable"
	case leaf != "":
		return "its partition " + leaf + " has no replica identity"
	}
	return ""
}

// PrimaryKeys gives, for every table and partition with a primary key, the key's
// columns in the table's column order. It is asked where RELATION does not tell
// (REPLICA IDENTITY FULL or USING INDEX), once for all tables.
func PrimaryKeys(ctx context.Context, conn *pgx.Conn) (map[uint32][]string, error) {
	rows, err := conn.Query(ctx, `
SELECT i.indrelid, array_agg(a.attname::text ORDER BY a.attnum)
  FROM pg_catalog.pg_index i
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
 WHERE i.indisprimary AND i.indisvalid AND i.indrelid >= 16384
   AND array_position(i.indkey, a.attnum) < i.indnkeyatts
 GROUP BY i.indrelid`)
	if err != nil {
		return nil, fmt.Errorf("read primary keys: %w", err)
	}
	keys := map[uint32][]string{}
	var (
		oid     uint32
		columns []string
	)
	_, err = pgx.ForEachRow(rows, []any{&oid, &columns}, func() error {
		keys[oid] = append([]string(nil), columns...)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read primary keys: %w", err)
	}
	return keys, nil
}

// names lists tables for a message, at most limit of them.
func names(tables []Table, limit int) string {
	var b strings.Builder
	for i, t := range tables {
		if i == limit {
			fmt.Fprintf(&b, " and %d more", len(tables)-limit)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(t.String())
	}
	return b.String()
}

// PrimaryKey reads the primary key of one table, its columns in the table's order; nil
// where it has none or is there no longer.
func PrimaryKey(ctx context.Context, conn *pgx.Conn, oid uint32) ([]string, error) {
	var columns []string
	err := conn.QueryRow(ctx, `
SELECT array_agg(a.attname::text ORDER BY a.attnum)
  FROM pg_catalog.pg_index i
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
 WHERE i.indisprimary AND i.indisvalid AND i.indrelid = $1
   AND array_position(i.indkey, a.attnum) < i.indnkeyatts`, oid).Scan(&columns)
	if err != nil {
		return nil, fmt.Errorf("read primary key: %w", err)
	}
	return columns, nil
}

// Describe gives tables as the catalog has them now, in the form of a RELATION message,
// by OID: to try a configuration on them before anything is created. What the stream
// says of them later is what counts.
func Describe(ctx context.Context, conn *pgx.Conn, oids []uint32) (map[uint32]*Relation, error) {
	rows, err := conn.Query(ctx, `
SELECT c.oid, n.nspname::text, c.relname::text, c.relreplident::text,
       a.attname::text, a.atttypid, a.atttypmod, coalesce(x.attnum IS NOT NULL, false) OR c.relreplident = 'f', coalesce(p.attnum IS NOT NULL, false)
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN LATERAL (SELECT k.attnum FROM pg_catalog.pg_index i, unnest(i.indkey) AS k(attnum)
         WHERE i.indrelid = c.oid AND k.attnum = a.attnum
           AND (c.relreplident = 'd' AND i.indisprimary OR c.relreplident = 'i' AND i.indisreplident) LIMIT 1) x ON true
  LEFT JOIN LATERAL (SELECT k.attnum FROM pg_catalog.pg_index i, unnest(i.indkey) AS k(attnum)
         WHERE i.indrelid = c.oid AND k.attnum = a.attnum AND i.indisprimary LIMIT 1) p ON true
 WHERE c.oid = ANY($1)
 ORDER BY c.oid, a.attnum`, oids)
	if err != nil {
		return nil, fmt.Errorf("describe tables: %w", err)
	}
	tables := make(map[uint32]*Relation, len(oids))
	var (
		oid                    uint32
		schema, name, identity string
		column                 Column
		primary                bool
	)
	_, err = pgx.ForEachRow(rows, []any{&oid, &schema, &name, &identity, &column.Name, &column.TypeOID, &column.TypeMod, &column.Identity, &primary}, func() error {
		rel := tables[oid]
		if rel == nil {
			rel = &Relation{OID: oid, Schema: schema, Name: name, Identity: ReplicaIdentity(identity[0])}
			tables[oid] = rel
		}
		if primary {
			rel.PrimaryKey = append(rel.PrimaryKey, len(rel.Columns))
		}
		rel.Columns = append(rel.Columns, column)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("describe tables: %w", err)
	}
	return tables, nil
}

// WAL is where the write-ahead log stands.
type WAL struct {
	End      checkpoint.LSN // of the last record flushed to disk
	Retained int64          // bytes that the slot keeps from being removed
	Now      time.Time      // by the server's clock
}

// ReadWAL measures the lag; it is cheap enough for once a second.
func ReadWAL(ctx context.Context, conn *pgx.Conn, slot string) (WAL, error) {
	var (
		end      string
		retained *int64
		w        WAL
	)
	err := conn.QueryRow(ctx, `
SELECT pg_catalog.clock_timestamp(), w.lsn::text, (SELECT (w.lsn - s.restart_lsn)::int8 FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = $1)
  FROM (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_flush_lsn() END AS lsn) w`, slot).Scan(&w.Now, &end, &retained)
	if err != nil {
		return WAL{}, fmt.Errorf("read WAL end: %w", err)
	}
	if w.End, err = checkpoint.ParseLSN(end); err != nil {
		return WAL{}, fmt.Errorf("read WAL end: %w", err)
	}
	if retained != nil {
		w.Retained = *retained
	}
	return w, nil
}

// TextRows runs a query and gives its rows as text, for queries that another room
// brings along.
func TextRows(ctx context.Context, conn *pgx.Conn, sql string) ([][][]byte, error) {
	results, err := TextResults(ctx, conn, sql)
	if err != nil {
		return nil, err
	}
	return results[0], nil
}

// TextResults is TextRows of several queries in one round trip, each under a snapshot of
// its own.
func TextResults(ctx context.Context, conn *pgx.Conn, queries ...string) ([][][][]byte, error) {
	results, err := conn.PgConn().Exec(ctx, strings.Join(queries, ";")).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) != len(queries) {
		return nil, fmt.Errorf("queries gave %d results, want %d", len(results), len(queries))
	}
	rows := make([][][][]byte, len(results))
	for i, r := range results {
		if r.Err != nil {
			return nil, r.Err
		}
		rows[i] = r.Rows
	}
	return rows, nil
}

// WALEndQuery gives where the WAL ends now, on a standby where its replay does.
const WALEndQuery = `SELECT (CASE WHEN pg_is_in_recovery() THEN coalesce(pg_last_wal_replay_lsn(), '0/0') ELSE pg_current_wal_insert_lsn() END)::text`

// ColumnFacts are what RELATION does not tell of a table's columns.
type ColumnFacts struct {
	NotNull []string // declared NOT NULL
	// Filled have a value in a row whose INSERT does not name them: by a default that is not
	// NULL, or because they are generated.
	Filled []string
}

// ReadColumnFacts reads them.
func ReadColumnFacts(ctx context.Context, conn *pgx.Conn, oid uint32) (f ColumnFacts, err error) {
	err = conn.QueryRow(ctx, `
SELECT coalesce(array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.attnotnull), '{}'),
       coalesce(array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE pg_get_expr(d.adbin, d.adrelid) !~ '^NULL(::|$)'), '{}')
  FROM pg_catalog.pg_attribute a
  LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
 WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped`, oid).Scan(&f.NotNull, &f.Filled)
	if err != nil {
		return f, fmt.Errorf("read the columns of table %d: %w", oid, err)
	}
	return f, nil
}

// HasRows tells whether a table holds any row.
func HasRows(ctx context.Context, conn *pgx.Conn, schema, table string) (bool, error) {
	var rows bool
	err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM "+pgx.Identifier{schema, table}.Sanitize()+")").Scan(&rows)
	if err != nil {
		return false, fmt.Errorf("look for rows in %s.%s: %w", schema, table, err)
	}
	return rows, nil
}

package polling

import (
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/internal/outbox"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
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

	// The statements of a round; see the functions that run them. deleteSQL is empty unless
	// rows are deleted, markSQL where the table has no mark or, of rows that are deleted, it
	// cannot be made.
	lookSQL, lockSQL, listSQL, readSQL, markSQL, deleteSQL string

	// held are the keys that the next look leaves out: a row of each could not be locked,
	// and behind as many rows as a round takes at most there may be others.
	held []int64
	// ratio is how much larger rows were than they lie in the table, when some were read last.
	ratio float64
}

// newTable writes the statements. limit is how many rows a round takes at most.
func newTable(o Outbox, mark outbox.Table, rel *replication.Relation, b router.Backlog, c router.OutboxColumns, limit int) *table {
	t := &table{Outbox: o, relation: rel, lock: "walrelay polling " + o.name(), mark: mark, ratio: unpacked}
	name, pending, hash := mark.SQL()+" AS t", mark.NotPublished(), hashSQL(c.Key)
	shard := "(" + hash + " & " + strconv.Itoa(shards-1) + ")"
	order := " ORDER BY " + strings.Join(orderSQL(b, c), ", ") + " LIMIT " + strconv.Itoa(limit)
	t.lookSQL = "SELECT shard::text, count(*)::text FROM (SELECT " + shard + " AS shard FROM " + name +
		" WHERE " + pending + " AND " + hash + " <> ALL ($1::int8[])" + order + ") AS head GROUP BY head.shard"
	t.lockSQL = "SELECT s::text FROM unnest($1::int8[]) AS s" +
		" WHERE pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended($2, s))"
	var columns, sizes []string
	for _, col := range rel.Columns {
		columns = append(columns, "t."+ident(col.Name))
		sizes = append(sizes, "coalesce(pg_catalog.pg_column_size(t."+ident(col.Name)+"), 0)")
	}
	const place = "t.tableoid::oid::text, t.ctid::text, t.xmin::text, "
	t.listSQL = "SELECT " + place + hash + "::text, (" + strings.Join(sizes, " + ") + ")::text FROM " + name +
		" WHERE " + pending + " AND " + shard + " = ANY ($1::int8[]) AND " + hash + " <> ALL ($2::int8[])" + order
	t.readSQL = "SELECT " + place + strings.Join(columns, ", ") + " FROM " + name +
		" WHERE t.ctid = ANY ($1::tid[]) AND t.tableoid = ANY ($2::oid[]) AND " + pending + " AND " + shard + " = ANY ($3::int8[]) FOR UPDATE SKIP LOCKED"
	const these = " WHERE t.tableoid = $1::oid AND t.ctid = ANY ($2::tid[])"
	if o.Delete {
		t.deleteSQL = "WITH done AS (DELETE FROM " + name + these + " RETURNING 1) SELECT count(*)::text, '0' FROM done"
	}
	if mark.Mark != "" {
		t.markSQL = "WITH done AS (UPDATE " + name + " SET " + mark.Set() + these + " RETURNING (" + pending + ") AS pending)" +
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
		texts[i] = "t." + ident(name) + "::pg_catalog.text"
	}
	// The collation decides nothing but has to be one.
	return `pg_catalog.hashtextextended(coalesce(` + strings.Join(texts, ", ") + `, '') COLLATE "C", 0)`
}

// orderSQL gives the expressions by which rows are ordered. What the table has for it comes
// first; where that leaves rows equal, or says nothing of when they were written, as a
// uuid does, the server's own traces follow: within a transaction its commands count up,
// and a command writes its rows one behind the other.
func orderSQL(b router.Backlog, c router.OutboxColumns) []string {
	traces := []string{"t.cmin::text::int8", "t.ctid"}
	switch {
	case !b.Ordered:
		return append([]string{"pg_catalog.age(t.xmin) DESC"}, traces...)
	case len(b.Order) == 1 && slices.Equal(b.Order, b.Primary):
		return []string{"t." + ident(b.Order[0])} // which is another one in each row
	case c.Seq == "":
		return append([]string{"t." + ident(b.Order[0])}, traces...)
	}
	return append([]string{"t." + ident(b.Order[0]), "t." + ident(c.Seq)}, traces...)
}

func ident(name string) string { return pgx.Identifier{name}.Sanitize() }

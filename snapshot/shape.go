package snapshot

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// description is a table under the snapshot of a transaction that holds its lock.
type description struct {
	snapshot MVCC
	lsn      checkpoint.LSN
	time     time.Time

	gone   bool // not there, or not published
	table  Published
	shape  Shape
	filter string      // the publications' row filter; empty: none
	keys   []keyColumn // of shape.Key
	// identity are the columns that single keys are of.
	identity []keyColumn
}

// keyColumn is what SQL must say about a column of a key so that it means what the index
// behind it means, whatever search_path is: citext compared by the operators of text is
// another order, and rows would be lost between two chunks.
type keyColumn struct {
	Index uint32 `json:"index"`
	Name  string `json:"name"`
	// Collation is the index's, qualified, where it is not the column's.
	Collation []string `json:"collation"`
	// Cast is the type, qualified, where a literal without a type would not take it on.
	Cast []string `json:"cast"`
	// Ops holds schema and name of the operators by strategy.
	Ops map[string][]string `json:"ops"`
}

type attribute struct {
	Number    int    `json:"number"`
	Name      string `json:"name"`
	Type      uint32 `json:"type"`
	Mod       int32  `json:"mod"`
	Generated string `json:"generated"`
}

// nowSQL is the snapshot, the LSN behind every commit that it sees, and the clock. The
// statement's snapshot is taken before its functions run, and a transaction leaves the
// list of running ones only after its commit record is in the WAL.
const nowSQL = `pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_current_wal_insert_lsn()::text,
       pg_catalog.current_setting('wal_block_size'), pg_catalog.pg_size_bytes(pg_catalog.current_setting('wal_segment_size'))::text,
       (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::int8::text`

// describeSQL describes one table, in one statement.
func describeSQL(major int, publications []string, oid uint32) string {
	id := strconv.FormatUint(uint64(oid), 10)
	return publishedSQL(major, publications, oid) + `
SELECT ` + nowSQL + `,
       (SELECT j::text FROM tables),
       (SELECT json_agg(json_build_object('number', a.attnum, 'name', a.attname, 'type', a.atttypid::int8, 'mod', a.atttypmod,
                 'generated', a.attgenerated::text) ORDER BY a.attnum)::text
          FROM pg_catalog.pg_attribute a WHERE a.attrelid = ` + id + ` AND a.attnum > 0 AND NOT a.attisdropped),
       (SELECT json_agg(json_build_object('index', i.indexrelid::int8, 'name', a.attname,
                 'collation', CASE WHEN k.coll <> 0 AND k.coll <> a.attcollation THEN json_build_array(cn.nspname, co.collname) END,
                 'cast', CASE WHEN t.typtype = 'c' THEN json_build_array(tn.nspname, t.typname) END,
                 'ops', (SELECT json_object_agg(am.amopstrategy::text, json_build_array(opn.nspname, op.oprname))
                           FROM pg_catalog.pg_amop am JOIN pg_catalog.pg_operator op ON op.oid = am.amopopr
                           JOIN pg_catalog.pg_namespace opn ON opn.oid = op.oprnamespace
                          WHERE am.amopfamily = o.opcfamily AND am.amoplefttype = o.opcintype AND am.amoprighttype = o.opcintype
                            AND am.amopstrategy BETWEEN 1 AND 5)) ORDER BY i.indexrelid, k.n)::text
          FROM pg_catalog.pg_index i
         CROSS JOIN LATERAL unnest(i.indkey::int2[], i.indclass::oid[], i.indcollation::oid[]) WITH ORDINALITY AS k(attnum, class, coll, n)
          JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
          JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
          JOIN pg_catalog.pg_namespace tn ON tn.oid = t.typnamespace
          JOIN pg_catalog.pg_opclass o ON o.oid = k.class
          LEFT JOIN pg_catalog.pg_collation co ON co.oid = k.coll
          LEFT JOIN pg_catalog.pg_namespace cn ON cn.oid = co.collnamespace
         WHERE i.indrelid = ` + id + ` AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
           AND k.n <= i.indnkeyatts)`
}

// parseNow reads the columns of nowSQL.
func parseNow(values [][]byte) (d description, err error) {
	if len(values) < 5 {
		return d, fmt.Errorf("query gave %d columns", len(values))
	}
	if d.snapshot, err = ParseMVCC(string(values[0])); err != nil {
		return d, err
	}
	insert, err := checkpoint.ParseLSN(string(values[1]))
	if err != nil {
		return d, err
	}
	block, err1 := strconv.ParseUint(string(values[2]), 10, 64)
	segment, err2 := strconv.ParseUint(string(values[3]), 10, 64)
	micros, err3 := strconv.ParseInt(string(values[4]), 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return d, err
	}
	d.lsn = replication.RecordEnd(insert, block, segment)
	d.time = time.UnixMicro(micros).UTC()
	return d, nil
}

// parseDescription reads the row of describeSQL.
func parseDescription(values [][]byte, t Table) (d description, err error) {
	if d, err = parseNow(values); err != nil {
		return d, err
	}
	if values[5] == nil {
		d.gone = true
		return d, nil
	}
	var (
		r       row
		columns []attribute
		keys    []keyColumn
	)
	if err := json.Unmarshal(values[5], &r); err != nil {
		return d, err
	}
	if values[6] != nil {
		if err := json.Unmarshal(values[6], &columns); err != nil {
			return d, err
		}
	}
	if values[7] != nil {
		if err := json.Unmarshal(values[7], &keys); err != nil {
			return d, err
		}
	}
	if d.table, err = r.published(); err != nil {
		return d, err
	}
	if r.Filter != nil {
		d.filter = *r.Filter
	}
	rel, err := relationOf(&r, d.table, columns)
	if err != nil {
		return d, err
	}
	d.shape = Shape{Relation: rel, Estimate: d.table.Estimate}
	d.chooseKey(t, keys)
	return d, nil
}

// relationOf gives the table as the stream's RELATION message does.
func relationOf(r *row, p Published, columns []attribute) (*replication.Relation, error) {
	rel := &replication.Relation{OID: p.OID, Schema: p.Schema, Name: p.Name, Identity: p.Identity}
	var list map[int]bool
	if r.Attrs != nil {
		list = map[int]bool{}
		for _, field := range strings.Fields(*r.Attrs) {
			n, err := strconv.Atoi(field)
			if err != nil {
				return nil, fmt.Errorf("column list %q of %s: %w", *r.Attrs, p, err)
			}
			list[n] = true
		}
	}
	var identity []string
	if p.Identity == replication.IdentityDefault || p.Identity == replication.IdentityIndex {
		identity = p.Key
	}
	for _, a := range columns {
		switch {
		case list != nil && !list[a.Number],
			list == nil && a.Generated != "" && (!r.Generated || a.Generated != "s"):
			continue
		}
		if slices.Contains(p.PrimaryKey, a.Name) {
			rel.PrimaryKey = append(rel.PrimaryKey, len(rel.Columns))
		}
		rel.Columns = append(rel.Columns, replication.Column{
			Name: a.Name, TypeOID: a.Type, TypeMod: a.Mod,
			Identity: p.Identity == replication.IdentityFull || slices.Contains(identity, a.Name),
		})
	}
	// As in the stream: where RELATION's flags are the key nothing is looked up, and a key
	// of which a column is not published is not shorter, but none.
	if identity != nil || p.Identity == replication.IdentityDefault || p.Identity == replication.IdentityIndex || len(rel.PrimaryKey) < len(p.PrimaryKey) {
		rel.PrimaryKey = nil
	}
	return rel, nil
}

// chooseKey fills in Shape.Key and what is to be known of its columns.
func (d *description) chooseKey(t Table, columns []keyColumn) {
	key, behind, whole := d.table.choose(t.Configured)
	if t.Identity != nil && sameSet(key, t.Identity) {
		// Rows are read in an order of their own, which is total as it ends with the key.
		key, behind, whole = t.Key, nil, false
	}
	var at []int
	for _, name := range key {
		i := slices.IndexFunc(d.shape.Relation.Columns, func(c replication.Column) bool { return c.Name == name })
		if i < 0 {
			key, whole, at = nil, true, nil // a column list leaves it out, or it is gone
			break
		}
		at = append(at, i)
	}
	d.shape.Key, d.shape.Whole, d.keys = at, whole, nil
	find := func(names []string) (list []keyColumn) {
		for _, name := range names {
			k := keyColumn{Name: name}
			for _, c := range columns {
				if c.Name == name && (behind == nil || c.Index == behind.OID) {
					k = c
					break
				}
			}
			list = append(list, k)
		}
		return list
	}
	d.keys = find(key)
	d.identity = d.keys
	if t.Identity != nil && key != nil {
		d.identity = find(t.Identity)
	}
}

func sameSet(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

func sameRelation(a, b *replication.Relation) bool {
	return a.OID == b.OID && a.Schema == b.Schema && a.Name == b.Name && a.Identity == b.Identity &&
		slices.Equal(a.Columns, b.Columns) && slices.Equal(a.PrimaryKey, b.PrimaryKey)
}

// place is where a table is found.
type place struct {
	schema, name string
	partitioned  bool
}

func (p Published) place() place { return place{p.Schema, p.Name, p.Partitioned} }

// String gives schema.table, unquoted.
func (p place) String() string { return p.schema + "." + p.name }

func (p place) sql() string { return pgx.Identifier{p.schema, p.name}.Sanitize() }

// from is the table in a FROM clause, or a LOCK: without its inheritance children, which
// are tables of their own to a publication, and with its partitions.
func (p place) from() string {
	if p.partitioned {
		return p.sql()
	}
	return "ONLY " + p.sql()
}

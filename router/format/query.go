package format

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
)

// TypesQuery reads the types whose OIDs are in $1 (oid[]) and everything that they are
// made of, however deep, in one go. Its rows are for ParseTypeRow. It runs on
// PostgreSQL 14 to 18 and needs no rights beyond those that everybody has.
//
// OIDs without a row in the answer are types that exist no longer.
const TypesQuery = typesHead + `SELECT unnest($1::pg_catalog.oid[])` + typesTail

// AllTypesQuery reads every type that a column of an ordinary or partitioned table has
// and that Builtin does not know, and everything that they are made of. It has no
// parameters; its rows are for ParseTypeRow.
//
// It starts from the columns, not from pg_type: there every table has two types of its
// own, which hardly any column uses.
const AllTypesQuery = typesHead + `
  SELECT a.atttypid
    FROM pg_catalog.pg_attribute a
    JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
   WHERE c.relkind IN ('r', 'p') AND c.oid >= 16384
     AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 10000` + typesTail

// All names carry their schema, as the search_path is somebody else's. The functions
// within the query are pg_catalog's even so, as that is searched first by default and
// walrelay's sessions set nothing else.
//
// UNION, not UNION ALL, ends the recursion should types ever refer to each other.
// Attributes whose rows are not of the transaction that made the type were altered since,
// dropped ones, whose rows stay, included. Their 32-bit xids are widened to the last one
// below the next; a row that is more than 2^32 transactions old seems newer than it is, and
// its type's values are text for as long as the stream is behind that.
//
// Whether a type is an array is told by its output function: typelem alone is set for
// point, name and int2vector as well, which print nothing of an array's form.
const (
	typesHead = `
WITH RECURSIVE wanted(oid) AS (`
	typesTail = `
  UNION
  SELECT part.oid
    FROM wanted w
    JOIN pg_catalog.pg_type t ON t.oid = w.oid
   CROSS JOIN LATERAL (
      SELECT t.typelem AS oid WHERE t.typelem <> 0 AND t.typoutput = 'pg_catalog.array_out'::pg_catalog.regproc
      UNION ALL
      SELECT t.typbasetype WHERE t.typbasetype <> 0
      UNION ALL
      SELECT a.atttypid FROM pg_catalog.pg_attribute a
       WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
   ) part
)
SELECT t.oid, n.nspname, t.typname, t.typtype, t.typdelim,
       CASE WHEN t.typoutput = 'pg_catalog.array_out'::pg_catalog.regproc THEN t.typelem ELSE 0 END,
       t.typbasetype,
       CASE WHEN t.typtype = 'c' THEN
         (SELECT pg_catalog.json_agg(pg_catalog.json_build_object('name', a.attname, 'oid', a.atttypid::pg_catalog.int8, 'mod', a.atttypmod) ORDER BY a.attnum)
            FROM pg_catalog.pg_attribute a
           WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped)
       END,
       t.typtypmod,
       CASE WHEN t.typtype = 'e' THEN
         (SELECT pg_catalog.json_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_catalog.pg_enum e WHERE e.enumtypid = t.oid)
       END,
       CASE WHEN t.typtype = 'c' THEN
         (SELECT max(next.xid - ((next.xid - a.xmin::pg_catalog.text::pg_catalog.int8) & 4294967295))
            FROM pg_catalog.pg_attribute a,
                 (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::pg_catalog.text::pg_catalog.int8 AS xid) next
           WHERE a.attrelid = t.typrelid AND a.attnum > 0
          HAVING bool_or(a.xmin <> t.xmin))
       END
  FROM wanted w
  JOIN pg_catalog.pg_type t ON t.oid = w.oid
  JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
 ORDER BY t.oid`
)

// AlteringQueryFor reads which of these types a transaction is altering: it holds a lock
// on them until its effects can be seen. It is to be run after the WAL's end is read and
// before TypesQueryFor, so that whatever committed before that end is either seen by the
// types or told by this.
func AlteringQueryFor(oids []uint32) string {
	return `SELECT t.oid FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_type t ON t.typrelid = l.relation
 WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' AND l.granted
   AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
   AND t.oid = ANY ('` + oidArray(oids) + `'::pg_catalog.oid[])`
}

// TypesQueryFor is TypesQuery with the OIDs in the text, for the simple query
// protocol, which is all that a replication connection speaks.
func TypesQueryFor(oids []uint32) string {
	return strings.Replace(TypesQuery, "$1", "'"+oidArray(oids)+"'", 1)
}

func oidArray(oids []uint32) string {
	list := make([]string, len(oids))
	for i, oid := range oids {
		list[i] = strconv.FormatUint(uint64(oid), 10)
	}
	return "{" + strings.Join(list, ",") + "}"
}

// TypeRow is one type as the catalog has it.
type TypeRow struct {
	OID    uint32
	Schema string
	Name   string
	Class  byte   // pg_type.typtype: b base, c composite, d domain, e enum, r range, m multirange, p pseudo
	Delim  byte   // pg_type.typdelim
	Elem   uint32 // of an array its element's OID, else 0
	Base   uint32 // of a domain the OID of what it is over, else 0
	Mod    int32  // pg_type.typtypmod: what a domain gives to Base, else NoMod
	Fields []FieldRow
	Labels []string // of an enum
	// Altered is as in Type.
	Altered checkpoint.XID
}

// FieldRow is one attribute of a composite type as the catalog has it.
type FieldRow struct {
	Name string `json:"name"`
	OID  uint32 `json:"oid"`
	Mod  int32  `json:"mod"`
}

func (r TypeRow) equal(o TypeRow) bool {
	return r.OID == o.OID && r.Schema == o.Schema && r.Name == o.Name && r.Class == o.Class &&
		r.Delim == o.Delim && r.Elem == o.Elem && r.Base == o.Base && r.Mod == o.Mod && slices.Equal(r.Fields, o.Fields) && slices.Equal(r.Labels, o.Labels) && r.Altered == o.Altered
}

// ParseTypeRow reads a row of TypesQuery or AllTypesQuery, whose values are in
// PostgreSQL's text form, nil for NULL.
func ParseTypeRow(values [][]byte) (TypeRow, error) {
	const columns = 11
	if len(values) != columns {
		return TypeRow{}, fmt.Errorf("read type: the row has %d columns, not %d; run TypesQuery or AllTypesQuery as they stand", len(values), columns)
	}
	row := TypeRow{Schema: string(values[1]), Name: string(values[2])}
	for _, n := range []struct {
		column int
		to     *uint32
	}{{0, &row.OID}, {5, &row.Elem}, {6, &row.Base}} {
		v, err := strconv.ParseUint(string(values[n.column]), 10, 32)
		if err != nil {
			return TypeRow{}, fmt.Errorf("read type %s.%s, column %d as an OID: %w; ask for the results in text format", row.Schema, row.Name, n.column, err)
		}
		*n.to = uint32(v)
	}
	if len(values[3]) != 1 || len(values[4]) != 1 {
		return TypeRow{}, fmt.Errorf("read type %s.%s: typtype or typdelim is not one byte; ask for the results in text format", row.Schema, row.Name)
	}
	row.Class, row.Delim = values[3][0], values[4][0]
	if values[7] != nil {
		if err := json.Unmarshal(values[7], &row.Fields); err != nil {
			return TypeRow{}, fmt.Errorf("read the fields of type %s.%s: %w; ask for the results in text format", row.Schema, row.Name, err)
		}
	}
	mod, err := strconv.ParseInt(string(values[8]), 10, 32)
	if err != nil {
		return TypeRow{}, fmt.Errorf("read type %s.%s, column 8 as a modifier: %w; ask for the results in text format", row.Schema, row.Name, err)
	}
	row.Mod = int32(mod)
	if values[9] != nil {
		if err := json.Unmarshal(values[9], &row.Labels); err != nil {
			return TypeRow{}, fmt.Errorf("read the labels of type %s.%s: %w; ask for the results in text format", row.Schema, row.Name, err)
		}
	}
	if values[10] != nil {
		xid, err := strconv.ParseUint(string(values[10]), 10, 64)
		if err != nil {
			return TypeRow{}, fmt.Errorf("read type %s.%s, column 10 as a transaction id: %w; ask for the results in text format", row.Schema, row.Name, err)
		}
		row.Altered = checkpoint.XID(xid)
	}
	return row, nil
}

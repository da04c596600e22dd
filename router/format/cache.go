package format

import (
	"fmt"
	"strconv"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// Cache describes types that are not built in, asking the catalog once for each, and
// for composite types again as the WAL goes on. One goroutine owns it.
type Cache struct {
	// Ask runs queries and gives the rows of each as text.
	Ask func(queries ...string) ([][][][]byte, error)
	// TypeName is what the stream says of a type; nil before there is one.
	TypeName func(oid uint32) (name replication.TypeName, ok bool)

	resolver Resolver
	missing  map[uint32]bool // looked for in vain: dropped since
	// asOf is up to where in the WAL the composite types are what they are here.
	asOf checkpoint.LSN
}

// Lookup gives a type, nil for one that is nowhere.
func (c *Cache) Lookup(oid uint32) (*Type, error) {
	if len(c.resolver.Missing([]uint32{oid})) > 0 && !c.missing[oid] {
		results, err := c.Ask(TypesQueryFor([]uint32{oid}))
		if err != nil {
			return nil, fmt.Errorf("look up type %d: %w", oid, err)
		}
		rows, err := parseTypes(results[0])
		if err != nil {
			return nil, err
		}
		for _, row := range rows {
			// What has come along and is known already is for Current to replace, which
			// tells that it did.
			if len(c.resolver.Missing([]uint32{row.OID})) > 0 {
				c.resolver.Add(row)
			}
		}
		if len(rows) == 0 {
			if c.missing == nil {
				c.missing = map[uint32]bool{}
			}
			c.missing[oid] = true
		}
		c.asOf = 0 // not for these
	}
	if c.TypeName != nil {
		if name, ok := c.TypeName(oid); ok && c.missing[oid] {
			c.resolver.Learn(oid, name.Schema, name.Name)
		}
	}
	return c.resolver.Type(oid), nil
}

// Current makes sure that the composite types are known as they were when lsn was
// written, or as a later transaction has made them, which Type.Altered tells; changed
// tells that types given before are out of date.
//
// An ALTER TYPE changes what the values of other tables look like, and the stream says
// nothing of it. So the catalog is asked when a change is newer than the last answer. The
// WAL's end is read before the catalog, so one answer holds for all that was written by
// then: behind a busy database the stream asks once for many transactions.
//
// The commit record of an ALTER TYPE is in the WAL, and may be decoded, before the catalog
// shows what it did; its lock is there until it does (AlteringQueryFor).
func (c *Cache) Current(lsn checkpoint.LSN) (changed bool, err error) {
	if lsn < c.asOf {
		return false, nil
	}
	oids := c.resolver.Composites()
	results, err := c.Ask(replication.WALEndQuery, AlteringQueryFor(oids), TypesQueryFor(oids))
	if err != nil {
		return false, fmt.Errorf("read the composite types again: %w", err)
	}
	if len(results[0]) != 1 {
		return false, fmt.Errorf("read the WAL's end: %d rows, want 1", len(results[0]))
	}
	end, err := checkpoint.ParseLSN(string(results[0][0][0]))
	if err != nil {
		return false, fmt.Errorf("read the WAL's end: %w", err)
	}
	rows, err := parseTypes(results[2])
	if err != nil {
		return false, err
	}
	for _, altering := range results[1] {
		for i := range rows {
			if strconv.FormatUint(uint64(rows[i].OID), 10) == string(altering[0]) {
				rows[i].Altered = Altering
			}
		}
	}
	c.asOf = end
	return c.resolver.Add(rows...), nil
}

func parseTypes(rows [][][]byte) ([]TypeRow, error) {
	types := make([]TypeRow, 0, len(rows))
	for _, values := range rows {
		row, err := ParseTypeRow(values)
		if err != nil {
			return nil, err
		}
		types = append(types, row)
	}
	return types, nil
}

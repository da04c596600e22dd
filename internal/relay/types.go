package relay

import (
	"context"
	"fmt"

	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// typeCache describes types that are not built in, asking the catalog once for each.
// It belongs to the loop.
type typeCache struct {
	s        *session
	resolver format.Resolver
	missing  map[uint32]bool // looked for in vain: dropped since
}

func (c *typeCache) lookup(oid uint32) (*format.Type, error) {
	if len(c.resolver.Missing([]uint32{oid})) > 0 && !c.missing[oid] {
		if err := c.ask(oid); err != nil {
			return nil, err
		}
	}
	return c.resolver.Type(oid), nil
}

func (c *typeCache) ask(oid uint32) error {
	ctx, cancel := context.WithTimeout(c.s.r.base, lookupTimeout)
	defer cancel()
	rows, err := replication.TextRows(ctx, c.s.conn, format.TypesQueryFor([]uint32{oid}))
	if err != nil {
		return fmt.Errorf("look up type %d: %w", oid, err)
	}
	for _, values := range rows {
		row, err := format.ParseTypeRow(values)
		if err != nil {
			return err
		}
		c.resolver.Add(row)
	}
	if len(rows) == 0 {
		if c.missing == nil {
			c.missing = map[uint32]bool{}
		}
		c.missing[oid] = true
	}
	return nil
}

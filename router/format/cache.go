package format

import "fmt"

// Cache describes types that are not built in, asking the catalog once for each. One
// goroutine owns it.
type Cache struct {
	// Query runs a query and gives its rows as text.
	Query func(sql string) ([][][]byte, error)

	resolver Resolver
	missing  map[uint32]bool // looked for in vain: dropped since
}

// Lookup gives a type, nil for one that is nowhere.
func (c *Cache) Lookup(oid uint32) (*Type, error) {
	if len(c.resolver.Missing([]uint32{oid})) > 0 && !c.missing[oid] {
		if err := c.ask(oid); err != nil {
			return nil, err
		}
	}
	return c.resolver.Type(oid), nil
}

func (c *Cache) ask(oid uint32) error {
	rows, err := c.Query(TypesQueryFor([]uint32{oid}))
	if err != nil {
		return fmt.Errorf("look up type %d: %w", oid, err)
	}
	for _, values := range rows {
		row, err := ParseTypeRow(values)
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

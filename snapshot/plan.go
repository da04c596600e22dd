package snapshot

import "strconv"

// plan answers an OrderPlan.
func (w *reader) plan(o *Order, d *description) error {
	c := d.chunk(o)
	if o.Pieces > 1 && !d.shape.Whole && len(d.keys) > 0 {
		var err error
		if c.Splits, err = w.splits(o, d); err != nil {
			return w.classify(err, o, d.table.place(), true)
		}
	}
	if o.End && !d.shape.Whole && len(d.keys) > 0 {
		results, err := w.simple(d.endSQL())
		if err != nil {
			return w.classify(err, o, d.table.place(), false)
		}
		for _, row := range results[0].Rows {
			c.End = texts(row)
		}
	}
	if err := w.commit(); err != nil {
		return err
	}
	w.send(c)
	return nil
}

// texts are a row's values, none of which is null.
func texts(row [][]byte) []string {
	list := make([]string, len(row))
	for i, value := range row {
		list[i] = string(value)
	}
	return list
}

// splits samples pages of a large table.
func (w *reader) splits(o *Order, d *description) ([][]string, error) {
	oid := strconv.FormatUint(uint64(o.Table.OID), 10)
	results, err := w.simple(`SELECT coalesce(sum(pg_catalog.pg_relation_size(t.oid)), 0)::int8::text FROM (SELECT ` + oid +
		`::oid UNION SELECT relid::oid FROM pg_catalog.pg_partition_tree(` + oid + `) WHERE isleaf) AS t(oid)`)
	if err != nil {
		return nil, err
	}
	size, err := strconv.ParseFloat(string(results[0].Rows[0][0]), 64)
	if err != nil || size < float64(o.Pieces)*minSplit {
		return nil, nil
	}
	percent := min(percentAll, percentAll*samplePages*float64(o.Pieces)/(size/pageSize))
	if results, err = w.simple(d.splitsSQL(o, percent)); err != nil {
		return nil, err
	}
	var splits [][]string
	for _, row := range results[0].Rows {
		splits = append(splits, texts(row))
	}
	return splits, nil
}

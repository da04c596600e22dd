package verify

// counted leaves out, of the changes of one row of a table without a key, what walrelay
// replay has delivered again: it would be a further row. Of all records of one change that
// do the same to the row, one counts: the connector's own, or where the topic has it not,
// lost or removed by retention, the first that is marked. A change that the table's snapshot
// contains has no record but marked ones, and counts by the snapshot's row. Changes are in
// their order, and are overwritten.
func (c *comparison) counted(changes []change) []change {
	kept := changes[:0]
	for from := 0; from < len(changes); {
		to := from + 1
		for to < len(changes) && changes[to].order.comparePosition(changes[from].order) == 0 {
			to++
		}
		var there [kindTombstone]bool // by kind: an update may take a row away and bring it back
		for i := from; i < to; i++ {
			if x := &changes[i]; x.flags&(flagReplayed|flagUnplaced) == 0 {
				there[x.kind] = true
			}
		}
		for i := from; i < to; i++ {
			x := changes[i]
			if x.flags&(flagReplayed|flagUnplaced) == flagReplayed {
				if there[x.kind] || x.order.commit <= c.read {
					continue
				}
				there[x.kind] = true
			}
			kept = append(kept, x)
		}
		from = to
	}
	return kept
}

package checkpoint

// Delta is what has changed since a state record was written. Every position record
// carries it, so that the state record, which is large, need not be written again.
//
// It sets and never adds up. That is why it does not matter when the state record that
// it is applied to is newer than the one that it was made for, and holds some of it
// already (FORMAT.md, "Why two records").
type Delta struct {
	Partitions map[string]int32
	// Tables holds those whose progress has changed; nil takes a table out.
	Tables map[uint32]*TableDelta
	// Trees holds those that have changed, each whole; nil takes one out.
	Trees map[uint32]Tree
}

// TableDelta is the progress of a table as it is now, but for Again: a busy stream may
// leave thousands of keys there, and repeats only what became of them since.
type TableDelta struct {
	TableProgress            // Again holds only the keys that have come since
	AgainRead     [][]string // keys that are not in Again any more
}

// IsZero tells whether nothing has changed.
func (d *Delta) IsZero() bool { return d == nil || len(d.Partitions)+len(d.Tables)+len(d.Trees) == 0 }

// Apply sets what d holds in c.
func (c *Checkpoint) Apply(d Delta) {
	if c.Partitions == nil {
		c.Partitions = make(map[string]int32, len(d.Partitions))
	}
	for topic, n := range d.Partitions {
		c.Partitions[topic] = n
	}
	if c.Trees == nil && len(d.Trees) > 0 {
		c.Trees = make(map[uint32]Tree, len(d.Trees))
	}
	for oid, tree := range d.Trees {
		setTree(c.Trees, oid, tree)
	}
	if c.Tables == nil && len(d.Tables) > 0 {
		c.Tables = make(map[uint32]TableProgress, len(d.Tables))
	}
	for oid, t := range d.Tables {
		if t == nil {
			delete(c.Tables, oid)
			continue
		}
		p := t.TableProgress
		p.Again = applyAgain(c.Tables[oid].Again, t.AgainRead, t.Again)
		c.Tables[oid] = p
	}
}

// applyAgain gives keys without read and with added behind them. Of a key that is there
// twice as many go as read holds; one that is there is not added.
func applyAgain(keys, read, added [][]string) [][]string {
	if len(read)+len(added) == 0 {
		return keys
	}
	gone := make(map[string]int, len(read))
	for _, k := range read {
		gone[joinKey(k)]++
	}
	there := make(map[string]bool, len(keys))
	var out [][]string
	for _, k := range keys {
		id := joinKey(k)
		if gone[id] > 0 {
			gone[id]--
			continue
		}
		there[id] = true
		out = append(out, k)
	}
	for _, k := range added {
		if id := joinKey(k); !there[id] {
			there[id] = true
			out = append(out, k)
		}
	}
	return out
}

// joinKey makes one string of a key's columns; no two keys have the same.
func joinKey(key []string) string { return string(appendKey(nil, key)) }

// diffAgain gives what applyAgain needs to make now out of base: keys of base that are
// gone, appended to read, and the end of now that is new. Keys leave anywhere and come
// at the end; any other order gives more than is needed, and the same result.
func diffAgain(read, base, now [][]string) (_, added [][]string) {
	for _, k := range base {
		if len(now) > 0 && equalKeys(k, now[0]) {
			now = now[1:]
		} else {
			read = append(read, k)
		}
	}
	return read, now
}

// equalKeys is slices.Equal; keys that were carried over share their memory, which
// makes it cheap.
func equalKeys(a, b []string) bool {
	if len(a) != len(b) {
		return false
	}
	if len(a) > 0 && &a[0] == &b[0] {
		return true
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

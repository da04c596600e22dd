package cdctest

// NoDuplicate checks that each change gave each of its records once over all
// partitions. A truncate is one record in every partition, a snapshot row one per
// key and position.
func NoDuplicate(log *Log) []Violation {
	f := &findings{rule: "NoDuplicate"}
	return f.noDuplicate(log.items(f))
}

func (f *findings) noDuplicate(items []item) []Violation {
	type identity struct {
		topic     string
		kind      Kind
		pos       Position
		partition int32  // truncates alone
		key       string // snapshot rows alone, which share a position
	}
	seen := map[identity]*Record{}
	for _, it := range items {
		id := identity{topic: it.Topic, kind: it.kind, pos: it.pos}
		if it.kind == KindTruncate {
			id.partition = it.Partition
		}
		if it.pos.Snapshot {
			id.key = string(it.Key)
		}
		if first, ok := seen[id]; ok {
			f.at(it.Record, "%c at position %s is already at %s", it.kind, it.pos, first.Where())
			continue
		}
		seen[id] = it.Record
	}
	return f.list
}

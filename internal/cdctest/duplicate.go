package cdctest

// NoDuplicate checks that each change gave each of its records once over all
// partitions. A truncate is one record in every partition. How often a snapshot may
// read a row is Once's business.
func NoDuplicate(log *Log) []Violation {
	f := &findings{rule: "NoDuplicate"}
	return f.noDuplicate(log.items(f))
}

func (f *findings) noDuplicate(items []item) []Violation {
	type identity struct {
		topic     string
		kind      Kind
		pos       Position
		partition int32 // truncates alone
	}
	seen := map[identity]*Record{}
	for _, it := range items {
		if it.pos.Snapshot {
			continue
		}
		id := identity{topic: it.Topic, kind: it.kind, pos: it.pos}
		if it.kind == KindTruncate {
			id.partition = it.Partition
		}
		if first, ok := seen[id]; ok {
			f.at(it.Record, "%c at position %s is already at %s", it.kind, it.pos, first.Where())
			continue
		}
		seen[id] = it.Record
	}
	return f.list
}

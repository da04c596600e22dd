package cdctest

// Partition checks where records lie: each key in the partition that the Java
// client's murmur2 gives it, and so in one; a key in one byte sequence; a truncate
// in every partition of its topic; the records without a key (a table's that has
// none) in one.
func Partition(log *Log) []Violation {
	f := &findings{rule: "Partition"}
	return f.partition(log.items(f), log.Partitions)
}

func (f *findings) partition(items []item, partitions map[string]int32) []Violation {
	type place struct{ topic, key string }
	spelling := map[place]item{}
	keyless := map[string]item{}
	truncates := map[string]map[Position]int32{}
	for _, it := range items {
		n := partitions[it.Topic]
		switch {
		case n < 1 || it.Partition >= n:
			f.at(it.Record, "the topic has %d partitions", n)
		case it.kind == KindTruncate:
			if it.Key != nil && string(it.Key) != "{}" {
				f.at(it.Record, "truncate with the key %s, want null", shorten(it.Key))
			}
			if truncates[it.Topic] == nil {
				truncates[it.Topic] = map[Position]int32{}
			}
			truncates[it.Topic][it.pos]++
		case it.Key == nil:
			if first, ok := keyless[it.Topic]; ok && first.Partition != it.Partition {
				f.at(it.Record, "no key and not in the partition of %s", first.Where())
			} else if !ok {
				keyless[it.Topic] = it
			}
		default:
			if want := PartitionOf(it.Key, n); it.Partition != want {
				f.at(it.Record, "key %s belongs in partition %d of %d", shorten(it.Key), want, n)
			}
			canonical, err := canonicalKey(it.Key)
			if it.kind == KindEvent || err != nil {
				continue // an event's key is plain text; another one that is no object is NoGap's to judge
			}
			at := place{it.Topic, canonical}
			if first, ok := spelling[at]; !ok {
				spelling[at] = it
			} else if string(first.Key) != string(it.Key) {
				f.at(it.Record, "key %s is spelled %s at %s: two byte sequences, two partitions", shorten(it.Key), shorten(first.Key), first.Where())
			}
		}
	}
	for topic, byPos := range truncates {
		for pos, count := range byPos {
			n := partitions[topic]
			if n > 0 && pos.Snapshot && count%n == 0 {
				continue // a snapshot may begin again where nothing was committed meanwhile
			}
			if count != n {
				f.add(topic, "the truncate at %s is in %d of %d partitions", pos, count, n)
			}
		}
	}
	return f.list
}

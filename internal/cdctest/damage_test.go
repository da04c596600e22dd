package cdctest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// damage makes a right log wrong in one way; do tells whether the log had what it
// takes. by names the validators that must object.
type damage struct {
	name string
	do   func(r *rand.Rand, log *Log, truth *Truth) bool
	by   []string
}

// choose gives the index of a random record for which ok holds, -1 where there is none.
func choose(r *rand.Rand, log *Log, ok func(it item) bool) int {
	var at []int
	for i := range log.Records {
		it, err := log.Records[i].read()
		if err == nil && ok(it) {
			at = append(at, i)
		}
	}
	if len(at) == 0 {
		return -1
	}
	return at[r.IntN(len(at))]
}

func kinds(set string) func(item) bool {
	return func(it item) bool { return strings.ContainsRune(set, rune(it.kind)) }
}

// atEnd appends a copy of a record to a partition.
func atEnd(log *Log, rec Record, partition int32) {
	rec.Partition = partition
	rec.Offset = 1 << 40
	for _, r := range log.Records {
		if r.Topic == rec.Topic && r.Partition == partition && r.Offset >= rec.Offset {
			rec.Offset = r.Offset + 1
		}
	}
	log.Records = append(log.Records, rec)
}

// edit replaces the value of a random record for which ok holds.
func edit(ok func(item) bool, change func(it item, r *Record) bool) func(*rand.Rand, *Log, *Truth) bool {
	return func(r *rand.Rand, log *Log, _ *Truth) bool {
		i := choose(r, log, ok)
		if i < 0 {
			return false
		}
		it, _ := log.Records[i].read()
		rec := log.Records[i]
		rec.Headers = map[string]string{}
		for k, v := range log.Records[i].Headers {
			rec.Headers[k] = v
		}
		if !change(it, &rec) {
			return false
		}
		log.Records[i] = rec
		return true
	}
}

func drop(ok func(item) bool) func(*rand.Rand, *Log, *Truth) bool {
	return func(r *rand.Rand, log *Log, _ *Truth) bool {
		i := choose(r, log, ok)
		if i < 0 {
			return false
		}
		log.Records = slices.Delete(log.Records, i, i+1)
		return true
	}
}

func replaceOnce(r *Record, from, to string) bool {
	v := bytes.Replace(r.Value, []byte(from), []byte(to), 1)
	changed := !bytes.Equal(v, r.Value)
	r.Value = v
	return changed
}

func docs(it item) bool {
	return it.env != nil && it.env.Source.Table == "docs" && it.env.After != nil
}

func damages() []damage {
	return []damage{
		{"a record dropped", drop(func(item) bool { return true }), []string{"NoGap"}},
		{"an event dropped", drop(kinds("e")), []string{"NoGap", "OutboxOrder"}},
		{"a message dropped", drop(kinds("m")), []string{"NoGap"}},
		{"a tombstone missing", drop(kinds("x")), []string{"Order", "NoGap"}},
		{"a truncate missing in one partition", drop(kinds("t")), []string{"NoGap", "Partition"}},
		{"the delete of a key change missing", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, func(it item) bool { return it.kind == KindCreate && it.Headers["previous-key"] != "" })
			if i < 0 {
				return false
			}
			pos, key := log.Records[i].Headers["position"], log.Records[i].Headers["previous-key"]
			log.Records = slices.DeleteFunc(log.Records, func(x Record) bool { return x.Headers["position"] == pos && string(x.Key) == key })
			return true
		}, []string{"Order", "NoGap"}},
		{"a delete missing with its tombstone", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, kinds("d"))
			if i < 0 {
				return false
			}
			pos, key := log.Records[i].Headers["position"], string(log.Records[i].Key)
			log.Records = slices.DeleteFunc(log.Records, func(x Record) bool { return x.Headers["position"] == pos && string(x.Key) == key })
			return true
		}, []string{"NoGap"}},
		{"a row's last delete missing", dropLastDelete, []string{"NoGap", "Fold"}},
		{"a transaction missing", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, kinds("cud"))
			if i < 0 {
				return false
			}
			commit := log.Records[i].Headers["position"][:16]
			log.Records = slices.DeleteFunc(log.Records, func(x Record) bool { return x.Headers["position"][:16] == commit })
			return true
		}, []string{"NoGap"}},
		{"the end missing", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, func(item) bool { return true })
			if i < 0 {
				return false
			}
			pos := log.Records[i].Headers["position"]
			log.Records = slices.DeleteFunc(log.Records, func(x Record) bool { return x.Headers["position"] >= pos })
			return true
		}, []string{"NoGap"}},
		{"a record doubled", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, func(item) bool { return true })
			if i >= 0 {
				atEnd(log, log.Records[i], log.Records[i].Partition)
			}
			return i >= 0
		}, []string{"NoDuplicate"}},
		{"a record doubled in another partition", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, kinds("cude"))
			if i >= 0 {
				atEnd(log, log.Records[i], (log.Records[i].Partition+1)%6)
			}
			return i >= 0
		}, []string{"NoDuplicate", "Partition", "NoGap"}},
		{"a stretch delivered twice", func(r *rand.Rand, log *Log, _ *Truth) bool {
			n := len(log.Records)
			if n == 0 {
				return false
			}
			from := r.IntN(n)
			for _, rec := range slices.Clone(log.Records[from:min(n, from+10)]) {
				atEnd(log, rec, rec.Partition)
			}
			return true
		}, []string{"NoDuplicate"}},
		{"a record in the wrong partition", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, kinds("cude"))
			if i < 0 {
				return false
			}
			rec := log.Records[i]
			log.Records = slices.Delete(log.Records, i, i+1)
			atEnd(log, rec, (rec.Partition+1+int32(r.IntN(5)))%6)
			return true
		}, []string{"Partition"}},
		{"partitions swapped", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, kinds("cude"))
			if i < 0 {
				return false
			}
			topic, a := log.Records[i].Topic, log.Records[i].Partition
			b := (a + 1) % 6
			for j := range log.Records {
				switch rec := &log.Records[j]; {
				case rec.Topic == topic && rec.Partition == a:
					rec.Partition = b
				case rec.Topic == topic && rec.Partition == b:
					rec.Partition = a
				}
			}
			return true
		}, []string{"Partition"}},
		{"two records swapped", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, kinds("cudem"))
			if i < 0 {
				return false
			}
			a := &log.Records[i]
			j := choose(r, log, func(it item) bool {
				return it.Topic == a.Topic && it.Partition == a.Partition && it.Offset != a.Offset
			})
			if j < 0 {
				return false
			}
			a.Offset, log.Records[j].Offset = log.Records[j].Offset, a.Offset
			return true
		}, []string{"Order"}},
		{"delete and tombstone swapped", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, kinds("d"))
			if i < 0 {
				return false
			}
			a := &log.Records[i]
			j := slices.IndexFunc(log.Records, func(x Record) bool {
				return x.Topic == a.Topic && x.Partition == a.Partition && x.Offset == a.Offset+1
			})
			a.Offset, log.Records[j].Offset = log.Records[j].Offset, a.Offset
			return true
		}, []string{"Order"}},
		{"a position that goes back", edit(kinds("cud"), func(it item, r *Record) bool {
			back := it.pos
			back.Commit -= 1 << 20
			r.Headers["position"] = back.String()
			return replaceOnce(r, `"commit_lsn":"`+it.pos.Commit.String()+`"`, `"commit_lsn":"`+back.Commit.String()+`"`)
		}), []string{"NoGap"}},
		{"a header that differs from the source block", edit(kinds("cudtm"), func(it item, r *Record) bool {
			return replaceOnce(r, fmt.Sprintf(`"seq":%d,`, it.pos.Seq), fmt.Sprintf(`"seq":%d,`, it.pos.Seq+1))
		}), []string{"Order"}},
		{"no position", edit(func(item) bool { return true }, func(_ item, r *Record) bool {
			delete(r.Headers, "position")
			return true
		}), []string{"Read", "NoGap"}},
		{"a position that does not sort", edit(func(it item) bool { return strings.ContainsAny(it.Headers["position"], "ABCDEF") }, func(_ item, r *Record) bool {
			r.Headers["position"] = strings.ToLower(r.Headers["position"])
			return true
		}), []string{"Read"}},
		{"a seq that is counted too far", edit(kinds("cud"), func(it item, r *Record) bool {
			next := it.pos
			next.Seq += 100
			r.Headers["position"] = next.String()
			return replaceOnce(r, fmt.Sprintf(`"seq":%d,`, it.pos.Seq), fmt.Sprintf(`"seq":%d,`, next.Seq))
		}), []string{"NoGap"}},
		{"a wrong tx_id", edit(kinds("cud"), func(it item, r *Record) bool {
			return replaceOnce(r, fmt.Sprintf(`"tx_id":%d`, *it.env.Source.TxID), fmt.Sprintf(`"tx_id":%d`, *it.env.Source.TxID+1000000))
		}), []string{"NoGap"}},
		{"a rolled-back row present", rolledBackRow, []string{"NoGap"}},
		{"a wrong value", edit(func(it item) bool { return docs(it) && it.env.After[len(it.env.After)-1].Name == "n" }, func(it item, r *Record) bool {
			return replaceOnce(r, `"n":`+string(it.env.After[len(it.env.After)-1].Raw)+"}", `"n":-1}`)
		}), []string{"NoGap"}},
		{"the last value of a row wrong", lastValueWrong, []string{"NoGap", "Fold"}},
		{"a column missing", edit(docs, func(it item, r *Record) bool {
			title, _ := it.env.After.Get("title")
			return replaceOnce(r, `"title":`+string(title)+`,`, "")
		}), []string{"NoGap"}},
		{"an unchanged value invented as null", edit(func(it item) bool {
			_, there := it.env.afterColumn("body")
			return docs(it) && !there
		}, func(_ item, r *Record) bool {
			return replaceOnce(r, `"title":`, `"body":null,"title":`) || true
		}), []string{"NoGap"}},
		{"columns in another order", edit(docs, func(it item, r *Record) bool {
			title, _ := it.env.After.Get("title")
			n, _ := it.env.After.Get("n")
			return replaceOnce(r, fmt.Sprintf(`"title":%s,"n":%s`, title, n), fmt.Sprintf(`"n":%s,"title":%s`, n, title))
		}), []string{"NoGap"}},
		{"a create as update", edit(kinds("c"), func(_ item, r *Record) bool {
			delete(r.Headers, "previous-key")
			return replaceOnce(r, `"op":"c"`, `"op":"u"`)
		}), []string{"NoGap"}},
		{"a key change that does not name the old key", edit(func(it item) bool { return it.Headers["previous-key"] != "" }, func(_ item, r *Record) bool {
			delete(r.Headers, "previous-key")
			return true
		}), []string{"NoGap"}},
		{"a key spelled otherwise", otherSpelling, []string{"Partition"}},
		{"the key of another row", edit(kinds("cu"), func(it item, r *Record) bool {
			r.Key = []byte(`{"id":4711}`)
			return true
		}), []string{"NoGap"}},
		{"an event's payload encoded anew", edit(kinds("e"), func(_ item, r *Record) bool {
			return replaceOnce(r, `: 1.`, `:1.`)
		}), []string{"NoGap"}},
		{"an event without its type", edit(kinds("e"), func(_ item, r *Record) bool {
			delete(r.Headers, "type")
			return true
		}), []string{"NoGap"}},
		{"an event without a key", edit(kinds("e"), func(_ item, r *Record) bool {
			r.Key = nil
			return true
		}), []string{"NoGap", "OutboxOrder"}},
		{"an event in another topic", edit(kinds("e"), func(_ item, r *Record) bool {
			r.Topic += ".x"
			return true
		}), []string{"NoGap", "Partition"}},
		{"a message's content wrong", edit(kinds("m"), func(it item, r *Record) bool {
			return replaceOnce(r, `"content":"`, `"content":"AAAA`)
		}), []string{"NoGap"}},
		{"two transactions that changed places", changedPlaces, []string{"NoGap"}},
		{"no JSON", edit(kinds("cudtm"), func(_ item, r *Record) bool {
			r.Value = r.Value[:len(r.Value)-1]
			return true
		}), []string{"Read", "NoGap"}},
	}
}

func (e *Envelope) afterColumn(name string) ([]byte, bool) {
	if e == nil {
		return nil, false
	}
	return e.After.Get(name)
}

// otherSpelling puts a blank into one of a row's several keys, and the record where
// that key belongs.
func otherSpelling(r *rand.Rand, log *Log, _ *Truth) bool {
	seen := map[string]int{}
	for _, rec := range log.Records {
		seen[rec.Topic+string(rec.Key)]++
	}
	i := choose(r, log, func(it item) bool { return kinds("cu")(it) && seen[it.Topic+string(it.Key)] > 1 })
	if i < 0 {
		return false
	}
	rec := &log.Records[i]
	rec.Key = bytes.Replace(rec.Key, []byte(":"), []byte(": "), 1)
	rec.Partition = PartitionOf(rec.Key, 6)
	rec.Offset += 1 << 41
	return true
}

// dropLastDelete removes the delete of a row that never came back.
func dropLastDelete(r *rand.Rand, log *Log, truth *Truth) bool {
	layout, f := testLayout(), &findings{}
	items := log.items(f)
	byPosition(items)
	last := map[string]item{}
	for _, it := range items {
		switch it.kind {
		case KindTruncate:
			for key, was := range last {
				if was.Topic == it.Topic {
					delete(last, key)
				}
			}
		case KindTombstone:
		default:
			last[it.Topic+string(it.Key)] = it
		}
	}
	_ = truth
	i := choose(r, log, func(it item) bool {
		was, ok := last[it.Topic+string(it.Key)]
		return it.kind == KindDelete && ok && was.Offset == it.Offset && it.Topic != layout.Prefix+".message"
	})
	if i < 0 {
		return false
	}
	pos, key := log.Records[i].Headers["position"], string(log.Records[i].Key)
	log.Records = slices.DeleteFunc(log.Records, func(x Record) bool { return x.Headers["position"] == pos && string(x.Key) == key })
	return true
}

// rolledBackRow adds what a connector would deliver that flushed a transaction too
// early: its rows, in front of the next commit.
func rolledBackRow(r *rand.Rand, log *Log, truth *Truth) bool {
	for _, tx := range truth.RolledBack {
		for _, c := range tx.Changes {
			if c.Table == nil || c.Table.Outbox || c.Op != 'c' {
				continue
			}
			b := newBuilder(testLayout())
			xid, ts := tx.XID, int64(1)
			b.change(meta{commit: 0x7000000000 + 8*1, xid: &xid, ts: &ts}, c, nil)
			rec := b.log.Records[0]
			atEnd(log, rec, rec.Partition)
			return true
		}
	}
	return false
}

// lastValueWrong alters the value that the table ends with.
func lastValueWrong(r *rand.Rand, log *Log, truth *Truth) bool {
	t := truth.table("public.accounts")
	for _, row := range truth.Final[t.ID()] {
		key := rowKey(t, row)
		last := -1
		for i := range log.Records {
			if log.Records[i].Topic == "shop.public.accounts" && bytes.Equal(log.Records[i].Key, key) {
				last = i
			}
		}
		if last >= 0 {
			return replaceOnce(&log.Records[last], `"balance":"`, `"balance":"9`)
		}
	}
	return false
}

// changedPlaces gives two transactions each other's commit LSN: each is complete,
// but they were delivered in the wrong order.
func changedPlaces(r *rand.Rand, log *Log, truth *Truth) bool {
	size := map[string]int{}
	for i := range log.Records {
		if it, err := log.Records[i].read(); err == nil && it.env != nil && it.env.Source.TxID != nil {
			size[log.Records[i].Headers["position"][:16]]++
		}
	}
	var commits []string
	for c := range size {
		commits = append(commits, c)
	}
	if len(commits) < 2 {
		return false
	}
	slices.Sort(commits)
	i := r.IntN(len(commits) - 1)
	swap := map[string]string{commits[i]: commits[i+1], commits[i+1]: commits[i]}
	for i := range log.Records {
		rec := &log.Records[i]
		other, ok := swap[rec.Headers["position"][:16]]
		if !ok {
			continue
		}
		it, _ := rec.read()
		headers := map[string]string{}
		for k, v := range rec.Headers {
			headers[k] = v
		}
		headers["position"] = other + rec.Headers["position"][16:]
		rec.Headers = headers
		p, err := rec.Position()
		if err != nil {
			panic(err)
		}
		if it.env != nil {
			replaceOnce(rec, `"commit_lsn":"`+it.pos.Commit.String()+`"`, `"commit_lsn":"`+p.Commit.String()+`"`)
		}
	}
	return true
}

func TestRightLogsPass(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		truth, log := simulate(rapid.Uint64().Draw(t, "seed"), rapid.IntRange(0, 60).Draw(t, "transactions"))
		vs := Validate(log, truth, testLayout())
		vs = append(vs, Sum(log, testLayout(), "balance", truth.table("public.accounts"))...)
		vs = append(vs, Atomic(log, 1000)...)
		if len(vs) > 0 {
			t.Fatalf("a right log:\n%s", Report(vs, 10))
		}
	})
}

func TestEachDamageIsFoundByTheValidatorsInCharge(t *testing.T) {
	for _, d := range damages() {
		t.Run(d.name, func(t *testing.T) {
			applied := 0
			for seed := range uint64(6) {
				truth, log := simulate(seed, 100)
				if !d.do(rand.New(rand.NewPCG(seed, 2)), log, truth) {
					continue
				}
				applied++
				vs := Validate(log, truth, testLayout())
				for _, rule := range d.by {
					if !slices.ContainsFunc(vs, func(v Violation) bool { return v.Rule == rule }) {
						t.Errorf("seed %d: %s found nothing; the others:\n%s", seed, rule, Report(vs, 5))
					}
				}
			}
			if applied < 3 {
				t.Errorf("the damage could be done to %d of 6 logs only", applied)
			}
		})
	}
}

func TestAnyDamageToAnyLogIsFound(t *testing.T) {
	all := damages()
	rapid.Check(t, func(t *rapid.T) {
		truth, log := simulate(rapid.Uint64().Draw(t, "seed"), rapid.IntRange(1, 60).Draw(t, "transactions"))
		d := all[rapid.IntRange(0, len(all)-1).Draw(t, "damage")]
		if !d.do(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "where"), 3)), log, truth) {
			t.Skip("this log cannot be damaged so")
		}
		if len(Validate(log, truth, testLayout())) == 0 {
			t.Fatalf("%s, and no validator objects", d.name)
		}
	})
}

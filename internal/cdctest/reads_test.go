package cdctest

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/walrelay/walrelay/checkpoint"
)

func TestRightSnapshotsPass(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		truth, log := simulateSnapshot(rapid.Uint64().Draw(t, "seed"), rapid.IntRange(0, 60).Draw(t, "transactions"))
		vs := Validate(log, truth, testLayout())
		vs = append(vs, Sum(log, testLayout(), "balance", truth.table("public.accounts"))...)
		for _, table := range truth.Tables {
			if !table.Outbox && !table.Keyless() {
				vs = append(vs, NeverBack(log, testLayout().tableTopic(table), "")...)
			}
		}
		if len(vs) > 0 {
			t.Fatalf("a right log:\n%s", Report(vs, 10))
		}
	})
}

func read(table string) func(item) bool {
	return func(it item) bool { return it.kind == KindRead && it.env.Source.Table == table }
}

// lastOf tells whether it is the last record of its key.
func lastOf(log *Log) func(item) bool {
	last := map[string]string{}
	for _, r := range log.Records {
		last[r.Topic+" "+string(r.Key)] = r.Headers["position"]
	}
	return func(it item) bool { return last[it.Topic+" "+string(it.Key)] == it.Headers["position"] }
}

// snapshotDamages are those of what a snapshot wrote.
func snapshotDamages() []damage {
	return []damage{
		{"a row that was never read", func(r *rand.Rand, log *Log, _ *Truth) bool {
			last := lastOf(log)
			return drop(func(it item) bool { return read("docs")(it) && last(it) })(r, log, nil)
		}, []string{"Fold"}},
		{"an early row that no record tells of", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, read("notes"))
			if i < 0 {
				return false
			}
			key := log.Records[i].Key
			log.Records = slices.DeleteFunc(log.Records, func(x Record) bool {
				return x.Topic == "shop.public.notes" && bytes.Equal(x.Key, key)
			})
			return true
		}, []string{"Reads|NoGap"}},
		{"a row as it was before the last change", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, read("accounts"))
			j := slices.IndexFunc(log.Records, func(x Record) bool {
				return i >= 0 && x.Topic == log.Records[i].Topic && bytes.Equal(x.Key, log.Records[i].Key) && x.Offset > log.Records[i].Offset && x.Value != nil && bytes.Contains(x.Value, []byte(`"op":"u"`))
			})
			if j < 0 {
				return false
			}
			late := log.Records[i]
			at, _ := log.Records[j].Position()
			late.Headers = map[string]string{"position": Position{Commit: at.Commit, Snapshot: true}.String()}
			before, _ := log.Records[i].Position()
			late.Value = bytes.Replace(late.Value, []byte(before.Commit.String()), []byte(at.Commit.String()), 1)
			log.Records = slices.Delete(log.Records, i, i+1)
			atEnd(log, late, late.Partition)
			return true
		}, []string{"Reads"}},
		{"a row behind its delete", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, func(it item) bool { return it.kind == KindDelete && it.env.Source.Table == "items" })
			if i < 0 {
				return false
			}
			it, _ := log.Records[i].read()
			b := newBuilder(testLayout())
			b.read(it.pos.Commit, Tables()[0], texts("1", "1", "1", "1", "t", "1", "2026-10-19 09:31:02.114+00", "x"))
			ghost := b.log.Records[0]
			ghost.Key, ghost.Partition = it.Key, it.Partition
			atEnd(log, ghost, ghost.Partition)
			return true
		}, []string{"Reads"}},
		{"a row that shows what is yet to come", func(r *rand.Rand, log *Log, truth *Truth) bool {
			return edit(read("accounts"), func(_ item, rec *Record) bool {
				return replaceOnce(rec, `"balance":"`, `"balance":"7`)
			})(r, log, truth)
		}, []string{"Reads"}},
		{"a row without its big column", edit(read("docs"), func(it item, rec *Record) bool {
			body, ok := it.env.After.Get("body")
			return ok && replaceOnce(rec, `"body":`+string(body)+`,`, "")
		}), []string{"Reads"}},
		{"a row read twice", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, read("accounts"))
			if i >= 0 {
				atEnd(log, log.Records[i], log.Records[i].Partition)
			}
			return i >= 0
		}, []string{"Once"}},
		{"a row of a table without key missing", drop(read("heap")), []string{"Fold"}},
		{"a row of a table without key twice", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, read("heap"))
			if i >= 0 {
				atEnd(log, log.Records[i], log.Records[i].Partition)
			}
			return i >= 0
		}, []string{"Fold"}},
		{"a change of a table without key in front of its row", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, func(it item) bool {
				return it.kind == KindDelete && it.env.Source.Table == "heap" && bytes.Contains(it.Value, []byte("same"))
			})
			if i < 0 {
				return false
			}
			log.Records[i].Offset = -1
			return true
		}, []string{"Fold"}},
		{"a change of a table without key lost behind its rows", func(r *rand.Rand, log *Log, _ *Truth) bool {
			last := Position{}
			for _, rec := range log.Records {
				if it, err := rec.read(); err == nil && read("heap")(it) && it.pos.Compare(last) > 0 {
					last = it.pos
				}
			}
			return drop(func(it item) bool {
				return it.env != nil && it.env.Source.Table == "heap" && it.kind == KindUpdate && it.pos.Compare(last) > 0
			})(r, log, nil)
		}, []string{"NoGap", "Fold"}},
		{"an event of the backlog missing", drop(func(it item) bool { return it.kind == KindEvent && it.pos.Snapshot }), []string{"OutboxOrder"}},
		{"an event of the backlog twice", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, func(it item) bool { return it.kind == KindEvent && it.pos.Snapshot })
			if i >= 0 {
				atEnd(log, log.Records[i], log.Records[i].Partition)
			}
			return i >= 0
		}, []string{"OutboxOrder"}},
		{"an event of the stream read too", func(r *rand.Rand, log *Log, _ *Truth) bool {
			i := choose(r, log, func(it item) bool { return it.kind == KindEvent && !it.pos.Snapshot })
			if i < 0 {
				return false
			}
			again := log.Records[i]
			it, _ := log.Records[i].read()
			again.Headers = map[string]string{}
			for k, v := range it.Headers {
				again.Headers[k] = v
			}
			again.Headers["position"] = Position{Commit: it.pos.Commit, Snapshot: true}.String()
			atEnd(log, again, again.Partition)
			return true
		}, []string{"OutboxOrder"}},
		{"a snapshot row with a seq", edit(read("notes"), func(_ item, rec *Record) bool {
			return replaceOnce(rec, `"seq":null`, `"seq":0`)
		}), []string{"Order"}},
		{"a snapshot row without its time", edit(read("notes"), func(_ item, rec *Record) bool {
			return replaceOnce(rec, `"ts_ms":1764550000000`, `"ts_ms":null`)
		}), []string{"Order"}},
		{"a snapshot row as a create", edit(read("notes"), func(_ item, rec *Record) bool {
			return replaceOnce(rec, `"op":"r"`, `"op":"c"`)
		}), []string{"Order"}},
	}
}

func TestEachDamageOfASnapshotIsFoundByTheValidatorsInCharge(t *testing.T) {
	for _, d := range snapshotDamages() {
		t.Run(d.name, func(t *testing.T) {
			applied := 0
			for seed := range uint64(8) {
				truth, log := simulateSnapshot(seed, 60)
				if !d.do(rand.New(rand.NewPCG(seed, 2)), log, truth) {
					continue
				}
				applied++
				vs := Validate(log, truth, testLayout())
				for _, rule := range d.by {
					found := slices.ContainsFunc(vs, func(v Violation) bool {
						return slices.Contains(strings.Split(rule, "|"), v.Rule)
					})
					if !found {
						t.Errorf("seed %d: %s found nothing; the others:\n%s", seed, rule, Report(vs, 5))
					}
				}
			}
			if applied < 3 {
				t.Errorf("the damage could be done to %d of 8 logs only", applied)
			}
		})
	}
}

// TestNeverBackFindsWhatGoesBack writes the records of one row, r c u d in each order.
func TestNeverBackFindsWhatGoesBack(t *testing.T) {
	table := table("counters", "id:int4:key n:int4")
	for _, tt := range []struct {
		records string // kind and version
		wrong   bool
	}{
		{"r1 u2 u3", false}, {"u2 r2 u3", false}, {"c1 r1", false}, {"r1 d0 c5", false}, {"r1 t0 c1", false}, {"r1 T0 r1 u2", false},
		{"u2 r1", true}, {"u3 u2", true}, {"r1 d0 r1", true}, {"d0 r1", true}, {"r1 d0 u2", true}, {"r1 t0 r1", true},
	} {
		b := newBuilder(testLayout())
		commit := checkpoint.LSN(0x1000)
		for record := range strings.FieldsSeq(tt.records) {
			commit += 8
			row := texts("1", record[1:])
			xid, ts := uint64(commit), int64(1)
			m := meta{commit: commit, xid: &xid, ts: &ts}
			switch record[0] {
			case 'r':
				b.read(commit, table, row)
			case 'T':
				b.again(commit, table)
			case 'd':
				b.change(m, Change{Op: 'd', Table: table, Old: row}, nil)
			case 'u':
				b.change(m, Change{Op: 'u', Table: table, Old: row, New: row}, nil)
			default:
				b.change(m, Change{Op: record[0], Table: table, New: row}, nil)
			}
		}
		if vs := NeverBack(b.log, "shop.public.counters", "n"); (len(vs) > 0) != tt.wrong {
			t.Errorf("%s: %d violations:\n%s", tt.records, len(vs), Report(vs, 5))
		}
	}
}

// TestSumOfTwoTablesSeesWhatOneDoesNot moves money between tables.
func TestSumOfTwoTablesSeesWhatOneDoesNot(t *testing.T) {
	left, right := table("accounts", "id:int4:key balance:numeric"), table("savings", "id:int4:key balance:numeric")
	log := func(lost bool) *Log {
		b := newBuilder(testLayout())
		b.read(0x1000, left, texts("1", "100"))
		b.read(0x1000, right, texts("1", "100"))
		for i := range uint64(3) {
			xid, ts := i+1, int64(1)
			m := meta{commit: checkpoint.LSN(0x1008 + 8*i), xid: &xid, ts: &ts}
			row := texts("1", strconv.FormatUint(99-i, 10))
			b.change(m, Change{Op: 'u', Table: left, Old: row, New: row}, nil)
			m.seq++
			if row = texts("1", strconv.FormatUint(101+i, 10)); lost && i == 1 {
				continue
			}
			b.change(m, Change{Op: 'u', Table: right, Old: row, New: row}, nil)
		}
		return b.log
	}
	if vs := Sum(log(false), testLayout(), "balance", left, right); len(vs) > 0 {
		t.Errorf("a right log:\n%s", Report(vs, 5))
	}
	if vs := Sum(log(true), testLayout(), "balance", left, right); len(vs) == 0 {
		t.Error("half of a transfer is missing, and nothing found")
	}
}

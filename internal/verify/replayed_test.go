package verify

import (
	"fmt"
	"hash/maphash"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"
)

// updated is the value of an update of a table without a key.
func updated(before, after string, xid int) string {
	return fmt.Sprintf(`{"before":%s,"after":%s,"op":"u","source":{"schema":"public","table":"t","tx_id":%d}}`, before, after, xid)
}

// TestReplayedRowsWithoutAKeyCountOnce holds each case against one look, and against the
// first of several, which leaves what differs to the next.
func TestReplayedRowsWithoutAKeyCountOnce(t *testing.T) {
	again := func(id string) kgo.RecordHeader { return kgo.RecordHeader{Key: headerReplay, Value: []byte(id)} }
	const one, two = `{"a":1}`, `{"a":2}`
	for name, c := range map[string]struct {
		do   func(b *bed)
		want []string // under REPLICA IDENTITY FULL
		lost []string // with inserts alone
		gone int64    // with inserts alone
	}{
		"a copy hides no row that is lost": {do: func(b *bed) {
			b.record("6-0", "", value("c", one, 50))
			b.record("6-0", "", value("c", one, 50), again("a"))
			b.row(one, "")
			b.row(one, "")
		}, want: []string{"missing " + one}, lost: []string{"missing " + one}},
		"several replays of everything": {do: func(b *bed) {
			for i := range 3 {
				var headers []kgo.RecordHeader
				if i > 0 {
					headers = append(headers, again(fmt.Sprint(i)))
				}
				b.record("6-0", "", value("c", one, 50), headers...)
				b.record("6-1", "", value("c", one, 50), headers...)
				b.record("6-2", "", value("c", two, 50), headers...)
			}
			b.row(one, "")
			b.row(one, "")
			b.row(two, "")
		}},
		"the copy of a record that is not there": {do: func(b *bed) {
			b.record("6-0", "", value("c", one, 50))
			for _, id := range []string{"a", "b"} {
				b.record("6-0", "", value("c", one, 50), again(id))
				b.record("6-1", "", value("c", one, 50), again(id))
			}
			b.row(one, "")
			b.row(one, "")
		}},
		"a row that is no longer in the table": {do: func(b *bed) {
			b.record("6-0", "", value("c", one, 50))
			b.record("6-1", "", value("c", one, 50))
			b.record("6-0", "", value("c", one, 50), again("a"))
			b.row(one, "")
		}, want: []string{"extra " + one}, gone: 1},
		"the copy stands before the record": {do: func(b *bed) { // in another partition
			b.record("6-0", "", value("c", one, 50), again("a"))
			b.record("6-0", "", value("c", one, 50))
			b.row(one, "")
		}},
		"a copy of a transaction that the snapshot does not see": {do: func(b *bed) {
			b.record("6-0", "", value("c", one, 150))
			b.record("6-0", "", value("c", one, 150), again("a"))
		}},
		"a change that a snapshot contains": {do: func(b *bed) {
			b.record("7-snapshot", "", value("r", one, 0))
			b.record("7-snapshot", "", value("r", one, 0))
			b.record("8-0", "", value("c", one, 51))
			b.record("7-1", "", value("c", one, 50), again("a"))
			b.record("8-0", "", value("c", one, 51), again("a"))
			b.record("8-1", "", value("c", one, 51), again("a"))
			for range 4 {
				b.row(one, "")
			}
		}},
		"behind a truncate": {do: func(b *bed) {
			b.record("6-0", "", value("c", one, 50))
			b.record("7-0", "", value("t", "", 51))
			b.record("8-0", "", value("c", one, 52))
			b.record("6-0", "", value("c", one, 50), again("a"))
			b.record("7-0", "", value("t", "", 51), again("a"))
			b.record("8-0", "", value("c", one, 52), again("a"))
			b.row(one, "")
		}},
		"doubled by the connector and replayed": {do: func(b *bed) {
			b.record("6-0", "", value("c", one, 50))
			b.record("6-0", "", value("c", one, 50))
			b.record("6-0", "", value("c", one, 50), again("a"))
			b.row(one, "")
		}, want: []string{"doubled " + one, "extra " + one}, lost: []string{"doubled " + one}, gone: 1},
	} {
		for _, exact := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/%t", name, exact), func(t *testing.T) {
				want, gone := c.want, int64(0)
				if !exact {
					want, gone = c.lost, c.gone
				}
				keylessLooks(t, exact, c.do, want, gone)
			})
		}
	}
}

// TestReplayedChangesOfRowsWithoutAKey is of updates and deletes, which REPLICA IDENTITY FULL
// alone has.
func TestReplayedChangesOfRowsWithoutAKey(t *testing.T) {
	again := kgo.RecordHeader{Key: headerReplay, Value: []byte("a")}
	const one, two = `{"a":1}`, `{"a":2}`
	for name, c := range map[string]struct {
		do   func(b *bed)
		want []string
	}{
		"an update and a delete": {do: func(b *bed) {
			for _, headers := range [][]kgo.RecordHeader{nil, {again}, {again}} {
				b.record("6-0", "", value("c", one, 50), headers...)
				b.record("6-1", "", value("c", one, 50), headers...)
				b.record("6-2", "", value("c", one, 50), headers...)
				b.record("7-0", "", updated(one, two, 51), headers...)
				b.record("8-0", "", value("d", one, 52), headers...)
			}
			b.row(one, "")
			b.row(two, "")
		}},
		"an update that changes nothing": {do: func(b *bed) {
			b.record("6-0", "", value("c", one, 50))
			b.record("7-0", "", updated(one, one, 51))
			b.record("7-0", "", updated(one, one, 51), again)
			b.row(one, "")
		}},
		"one that was lost": {do: func(b *bed) {
			b.record("6-0", "", value("c", one, 50))
			b.record("7-0", "", updated(one, one, 51), again)
			b.row(one, "")
		}},
		"a delete that was lost": {do: func(b *bed) {
			b.record("6-0", "", value("c", one, 50))
			b.record("6-0", "", value("c", one, 50), again)
			b.record("8-0", "", value("d", one, 52), again)
			b.record("8-0", "", value("d", one, 52), again)
		}},
		"a delete is not hidden": {do: func(b *bed) {
			b.record("6-0", "", value("c", one, 50))
			b.record("6-1", "", value("c", one, 50))
			b.record("8-0", "", value("d", one, 52))
			b.record("8-0", "", value("d", one, 52), again)
		}, want: []string{"extra " + one}},
	} {
		t.Run(name, func(t *testing.T) { keylessLooks(t, true, c.do, c.want, 0) })
	}
}

// keylessLooks compares a table without a key in one look, and in two.
func keylessLooks(t *testing.T, exact bool, do func(*bed), want []string, gone int64) {
	t.Helper()
	for _, limit := range []int64{1 << 20, 512} { // in memory, and in files
		newLook := func(l look) *bed {
			b := newBed(t, limit, l)
			b.s.keyless, b.c.judge = true, judgeRows(exact)
			do(b)
			return b
		}
		b := newLook(onlyLook())
		b.want(want...)
		if got := b.c.report.gone; got != gone {
			t.Errorf("%d rows are no longer in the table, want %d", got, gone)
		}
		b = newLook(look{seed: maphash.MakeSeed(), digests: true})
		b.run()
		total := b.k.report
		second, looks := b.k.next()
		if looks {
			second.final = true
			b = newLook(second)
			b.run()
			total.take(&b.k.report)
		}
		if total.Differences() != int64(len(want)) || total.gone != gone {
			t.Errorf("two looks found %d differences and %d rows that are gone, want %d and %d", total.Differences(), total.gone, len(want), gone)
		}
		if looks != (len(want) > 0) {
			t.Errorf("another look was taken: %t", looks)
		}
	}
}

// TestAnEventThatAReplayBroughtIsThere holds an event's records against its row.
func TestAnEventThatAReplayBroughtIsThere(t *testing.T) {
	event := appendEvent(nil, []byte("k"), []byte("v"))
	key := appendEventKey(nil, "events", []byte("7"))
	own := change{key: key, row: event}
	marked := change{key: key, row: event, flags: flagReplayed}
	wrong := change{key: key, row: appendEvent(nil, []byte("k"), []byte("w")), flags: flagReplayed}
	for name, c := range map[string]struct {
		changes []change
		want    string
	}{
		"none":                   {nil, "missing"},
		"its own":                {[]change{own}, ""},
		"its own behind a copy":  {[]change{wrong, own}, ""},
		"a copy alone":           {[]change{marked}, ""},
		"copies alone":           {[]change{marked, marked}, ""},
		"a copy that is another": {[]change{wrong}, "differing"},
		"its own twice":          {[]change{own, marked, own}, "doubled"},
	} {
		t.Run(name, func(t *testing.T) {
			e := &events{}
			rows := []row{{key: key, value: append([]byte{rowMust}, event...)}}
			b := newBed(t, 1<<20, onlyLook())
			var w worker
			e.judge(b.c, &w, key, c.changes, rows)
			found := ""
			for _, d := range w.report.Found {
				found += d.Kind
			}
			if found != c.want {
				t.Errorf("found %q, want %q", found, c.want)
			}
			w = worker{}
			if e.judgeDigests(b.c, &w, key, c.changes, rows); w.report.Equal == 1 != (c.want == "") {
				t.Errorf("the first look settled it: %t", w.report.Equal == 1)
			}
		})
	}
}

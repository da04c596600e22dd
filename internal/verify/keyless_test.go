package verify

import (
	"hash/maphash"
	"testing"
)

func TestRowsWithoutAKeyAreAMultiset(t *testing.T) {
	for name, c := range map[string]struct {
		exact bool
		want  []string
	}{
		"with updates and deletes": {true, []string{`missing {"a":1}`, `extra {"a":3}`, `extra {"a":4}`}},
		"inserts alone":            {false, []string{`missing {"a":1}`}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, 1<<20, onlyLook())
			b.s.keyless, b.c.judge = true, judgeRows(c.exact)
			b.record("5-snapshot", "", value("r", `{"a":1}`, 0))
			b.record("5-snapshot", "", value("r", `{"a":2}`, 0))
			b.record("6-0", "", value("c", `{"a":3}`, 50))
			b.record("6-1", "", value("c", `{"a":4}`, 50))
			b.row(`{"a":1}`, "")
			b.row(`{"a":1}`, "")
			b.row(`{"a":2}`, "")
			b.want(c.want...)
		})
	}
}

func TestRowsFromWhenTheTableHadAKey(t *testing.T) {
	keyed := func(b *bed) {
		b.s.keyless, b.c.judge = true, judgeRows(true)
		b.record("5-0", "1", value("c", `{"a":1}`, 50))
		b.record("6-0", "1", value("u", `{"a":2}`, 51)) // without the row before
	}
	b := newBed(t, 1<<20, onlyLook())
	keyed(b)
	b.record("6-snapshot", "", value("t", "", 0))
	b.record("6-snapshot", "", value("r", `{"a":2}`, 0))
	b.row(`{"a":2}`, "")
	b.want()
	b = newBed(t, 1<<20, onlyLook())
	keyed(b)
	b.row(`{"a":1}`, "")
	b.want("unreadable 1")
}

// TestDigestsAreNoLastWord leaves what differs to another look, however many there were:
// nobody could tell which rows they are of.
func TestDigestsAreNoLastWord(t *testing.T) {
	b := newBed(t, 1<<20, look{seed: maphash.MakeSeed(), digests: true, final: true})
	b.s.keyless, b.c.judge = true, judgeRows(true)
	b.row(`{"a":1}`, "")
	b.want()
	if _, again := b.k.next(); !again {
		t.Error("a row that is missing is not looked at again")
	}
}

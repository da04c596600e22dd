package verify

import (
	"cmp"
	"errors"
	"hash/maphash"
	"slices"
	"testing"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// moment is what a look finds: the records that have come since the one before it, and
// the rows as they are then.
type moment struct {
	records, rows func(b *bed)
	settled       checkpoint.LSN // without an envelope; 0: the bed's
}

// lookedAt takes a look at each moment, the last of them final where final is set, and
// gives what they found together, each written "kind key columns".
func lookedAt(t *testing.T, keys int, final bool, moments ...moment) (found []string, total TableReport) {
	t.Helper()
	next := look{seed: maphash.MakeSeed(), digests: true}
	for n := range moments {
		next.final = final && n == len(moments)-1
		b := newBed(t, 1<<20, next)
		b.c.left.limit, b.k.moved.limit = keys, keys
		b.s.settled = cmp.Or(moments[n].settled, b.s.settled)
		for _, m := range moments[:n+1] {
			m.records(b)
		}
		moments[n].rows(b)
		b.run()
		total.join(b.k)
		again := false
		if next, again = b.k.next(); again != (n < len(moments)-1) {
			t.Fatalf("look %d is followed by another one: %t", n+1, again)
		}
	}
	for i := range total.Found {
		found = append(found, shown(&total.Found[i]))
	}
	slices.Sort(found)
	return found, total
}

// TestALaterLookKnowsWhatTheFirstDoes changes table and topic between the looks.
func TestALaterLookKnowsWhatTheFirstDoes(t *testing.T) {
	const one, five, nine = `{"id":1}`, `{"id":5}`, `{"id":9}`
	nothing := func(*bed) {}
	// A row of which two records tell is left to the second look.
	left := moment{
		records: func(b *bed) {
			b.record("10-0", one, value("c", `{"id":1,"v":"a","x":"big"}`, 50))
			b.record("12-0", one, value("u", `{"id":1,"v":"b"}`, 51))
		},
		rows: func(b *bed) { b.row(one, `{"id":1,"v":"b","x":"big"}`) },
	}
	others := moment{
		records: func(b *bed) {
			left.records(b)
			b.record("13-0", five, value("c", `{"id":5,"v":"y","x":"huge"}`, 52))
			b.record("14-0", nine, value("c", `{"id":9,"v":"z","x":"large"}`, 52))
		},
		rows: func(b *bed) {
			left.rows(b)
			b.row(five, `{"id":5,"v":"y","x":"huge"}`)
			b.row(nine, `{"id":9,"v":"z","x":"large"}`)
		},
	}
	// Row 9 takes the place of row 1, and brings a column along that no record of 1 holds.
	gone := func(b *bed) {
		b.record("20-0", one, value("d", one, 60))
		b.record("20-0", one, "")
	}
	taken := func(b *bed) {
		b.record("22-0", nine, value("d", nine, 62))
		b.record("22-0", nine, "")
		b.record("22-0", one, value("c", `{"id":1,"v":"z"}`, 62), moved(nine))
	}
	large := func(b *bed) { b.row(one, `{"id":1,"v":"z","x":"large"}`) }
	for name, c := range map[string]struct {
		keys    int // that may be left; 0: many
		final   bool
		moments []moment
		want    []string
		partial bool
	}{
		"a truncate of a compacted topic, and a lost insert of the same row": {moments: []moment{
			{
				records: func(b *bed) {
					b.record("10-0", one, value("c", `{"id":1,"v":"a"}`, 50))
					b.record("20-0", `{}`, value("t", "", 60))
				},
				rows: func(b *bed) { b.row(one, `{"id":1,"v":"a"}`) },
			},
			{records: nothing, rows: func(b *bed) { b.row(one, `{"id":1,"v":"a"}`) }},
		}, want: []string{"missing " + one}},
		"a truncate of a compacted topic after the first look": {moments: []moment{
			left, {records: func(b *bed) { b.record("20-0", `{}`, value("t", "", 60)) }, rows: nothing},
		}},
		"a row moves onto a key that is left": {moments: []moment{
			others,
			{records: func(b *bed) { gone(b); taken(b) }, rows: large},
			{records: nothing, rows: large},
		}},
		"it has another value than its records": {moments: []moment{
			others,
			{records: func(b *bed) { gone(b); taken(b) }, rows: large},
			{records: nothing, rows: func(b *bed) { b.row(one, `{"id":1,"v":"z","x":"small"}`) }},
		}, want: []string{"differing " + one + " x"}},
		"it had moved before that": {moments: []moment{
			others,
			{
				records: func(b *bed) {
					gone(b)
					b.record("21-0", nine, value("d", nine, 61))
					b.record("21-1", five, value("d", five, 61))
					b.record("21-1", nine, value("c", `{"id":9,"v":"y"}`, 61), moved(five))
					taken(b)
				},
				rows: func(b *bed) { b.row(one, `{"id":1,"v":"z","x":"huge"}`) },
			},
			{records: nothing, rows: func(b *bed) { b.row(one, `{"id":1,"v":"z","x":"huge"}`) }},
		}},
		"what is doubled counts once": {moments: []moment{
			others,
			{
				records: func(b *bed) {
					gone(b)
					taken(b)
					b.record("22-0", one, value("c", `{"id":1,"v":"z"}`, 62), moved(nine))
				},
				rows: large,
			},
			{records: nothing, rows: large},
		}, want: []string{"doubled " + one}},
		"each key of a chain is asked for": {moments: []moment{
			others,
			{records: func(b *bed) { gone(b); taken(b) }, rows: large},
			{
				records: func(b *bed) {
					b.record("23-0", one, value("d", one, 63))
					b.record("24-0", five, value("d", five, 64))
					b.record("24-0", nine, value("c", `{"id":9,"v":"z"}`, 64), moved(five))
					b.record("25-0", nine, value("d", nine, 65))
					b.record("25-0", one, value("c", `{"id":1,"v":"z"}`, 65), moved(nine))
				},
				rows: func(b *bed) { b.row(one, `{"id":1,"v":"z","x":"huge"}`) },
			},
			{records: nothing, rows: func(b *bed) { b.row(one, `{"id":1,"v":"z","x":"huge"}`) }},
		}},
		"a row moves before the last look": {final: true, moments: []moment{
			others, {records: func(b *bed) { gone(b); taken(b) }, rows: large},
		}, partial: true},
		"a row that had moved, after a look at all keys": {keys: 2, final: true, moments: []moment{
			{
				records: func(b *bed) {
					b.s.format.Bare = true
					b.record("10-0", nine, `{"id":9,"v":"a","x":"big"}`)
					b.record("11-0", nine, "")
					b.record("11-0", one, `{"id":1,"v":"b"}`, moved(nine))
					b.record("12-0", five, `{"id":5,"v":"a","x":"big"}`)
					b.record("13-0", five, `{"id":5,"v":"b"}`)
				},
				rows: func(b *bed) {
					b.row(one, `{"id":1,"v":"b","x":"big"}`)
					b.row(five, `{"id":5,"v":"b","x":"big"}`)
				},
			},
			{
				records: func(b *bed) { b.record("950-0", one, `{"id":1,"v":"c"}`) }, // perhaps seen
				rows: func(b *bed) {
					b.row(one, `{"id":1,"v":"c","x":"big"}`)
					b.row(five, `{"id":5,"v":"b","x":"big"}`)
				},
			},
			{records: nothing, rows: func(b *bed) { b.row(one, `{"id":1,"v":"c","x":"big"}`) }, settled: 960},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			found, total := lookedAt(t, cmp.Or(c.keys, 1000), c.final, c.moments...)
			if !slices.Equal(found, c.want) || total.Differences() != int64(len(c.want)) {
				t.Errorf("found %q of %d, want %q", found, total.Differences(), c.want)
			}
			if total.partial != c.partial {
				t.Errorf("some columns were not compared: %t", total.partial)
			}
			wrong := total.Missing + total.Extra + total.Differing
			if total.Compared != total.Equal+wrong {
				t.Errorf("%d keys compared, %d equal, %d not", total.Compared, total.Equal, wrong)
			}
		})
	}
}

// TestKeysThatAreLeftAreOfOneShape starts over where the table is altered: their hashes are
// of other keys then, or rows.
func TestKeysThatAreLeftAreOfOneShape(t *testing.T) {
	rel := func(identity replication.ReplicaIdentity, typ uint32) *replication.Relation {
		return &replication.Relation{OID: 7, Schema: "public", Name: "t", Identity: identity, Columns: []replication.Column{{Name: "id", TypeOID: typ, Identity: true}}}
	}
	b := newBed(t, 1<<20, look{seed: maphash.MakeSeed(), digests: true})
	if err := b.k.begin(rel(replication.IdentityDefault, 23)); err != nil {
		t.Fatal(err)
	}
	b.row("1", "{}")
	b.run()
	next, _ := b.k.next()
	if err := next.begin(rel(replication.IdentityDefault, 23)); err != nil {
		t.Error(err)
	}
	for _, altered := range []*replication.Relation{rel(replication.IdentityDefault, 25), rel(replication.IdentityFull, 23)} {
		if err := next.begin(altered); !errors.Is(err, errAltered) || !errors.Is(err, errAgain) {
			t.Errorf("the look goes on with %v", err)
		}
	}
	next.only = nil // all keys are looked at
	if err := next.begin(rel(replication.IdentityFull, 25)); err != nil {
		t.Error(err)
	}
}

package cdctest

import (
	"fmt"
	"strings"
)

// bag is a table without a key: how many times each row is there.
type bag map[string]int

// bagOf gives the bag of a table's rows.
func bagOf(t *Table, rows []Row) bag {
	b := bag{}
	for _, row := range rows {
		b[t.bagRow(row)]++
	}
	return b
}

// bagRow gives a row in one form whatever its escapes are.
func (t *Table) bagRow(row Row) string {
	var b strings.Builder
	for i, c := range t.Columns {
		fmt.Fprintf(&b, "%q=%s ", c.Name, canonicalValue(PlainJSON(c.Type, row[i])))
	}
	return b.String()
}

func bagObject(o Object) string {
	var b strings.Builder
	for _, m := range o {
		fmt.Fprintf(&b, "%q=%s ", m.Name, canonicalValue(m.Raw))
	}
	return b.String()
}

// foldBag folds the topic of a table without a key, by offset: its changes may have been
// held while its rows were read, so that positions do not give the order. Nothing is
// removed or changed that is not there.
func foldBag(f *findings, t *Table, of []item) bag {
	b := bag{}
	take := func(it item) {
		row := bagObject(it.env.Before)
		if b[row] == 0 {
			f.at(it.Record, "%c of a row of %s that no record before it has: %s", it.kind, t.ID(), shorten([]byte(row)))
			return
		}
		if b[row]--; b[row] == 0 {
			delete(b, row)
		}
	}
	home := int32(-1) // the one partition of the rows
	for _, it := range of {
		if it.kind != KindTruncate {
			home = it.Partition
		}
	}
	for _, it := range of {
		switch it.kind {
		case KindRead, KindCreate:
			b[bagObject(it.env.After)]++
		case KindUpdate:
			take(it)
			b[bagObject(it.env.After)]++
		case KindDelete:
			take(it)
		case KindTruncate:
			if it.Partition == home {
				clear(b)
			}
		default:
			f.at(it.Record, "a record %c in the topic of a table without a key", it.kind)
		}
	}
	return b
}

func compareBags(f *findings, t *Table, got, want bag) {
	for row, n := range want {
		if got[row] != n {
			f.add(t.ID(), "the table has %d times the row %s, the fold of its topic has %d", n, shorten([]byte(row)), got[row])
		}
	}
	for row, n := range got {
		if want[row] == 0 {
			f.add(t.ID(), "the fold of the topic has %d times the row %s, the table has it not", n, shorten([]byte(row)))
		}
	}
}

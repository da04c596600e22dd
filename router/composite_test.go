package router

import (
	"errors"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// compositeRun is a router over a table with a column of a composite type that is altered
// as the run goes on.
type compositeRun struct {
	t     *testing.T
	r     *Router
	b     *Batch
	typ   *format.Type // as the catalog has it now
	seen  *format.Type // as it was when the router last asked
	asked []checkpoint.LSN
	rel   *replication.Relation
	// seenBy is the xmin of the chunks.
	seenBy checkpoint.XID
}

func newCompositeRun(t *testing.T, change func(o *Options)) *compositeRun {
	c := &compositeRun{t: t, b: NewBatch(Limits{Bytes: 1 << 20, Records: 1000}), rel: relationOf(t, "t", "id int", "v text")}
	c.rel.Columns[1].TypeOID = 90000
	c.alter(0, "a", "b")
	c.seen = c.typ
	o := testOptions()
	o.Types = func(uint32) (*format.Type, error) { return c.seen, nil }
	o.TypesAt = func(lsn checkpoint.LSN) (bool, error) {
		c.asked = append(c.asked, lsn)
		changed := c.seen != c.typ
		c.seen = c.typ
		return changed, nil
	}
	if change != nil {
		change(&o)
	}
	c.r = mustRouter(t, o, newFixedTopics())
	return c
}

// alter gives the type these attributes, by the transaction xid.
func (c *compositeRun) alter(xid checkpoint.XID, attributes ...string) {
	c.typ = &format.Type{OID: 90000, Name: "pair", Kind: format.KindComposite, Delim: ',', Altered: xid}
	for _, a := range attributes {
		c.typ.Fields = append(c.typ.Fields, format.Field{Name: a, Type: format.Builtin(oidInt4), Mod: format.NoMod})
	}
}

// expect routes a row of the transaction xid, of a snapshot where it is 0, and wants this
// JSON of the column.
func (c *compositeRun) expect(xid checkpoint.XID, text, want string) {
	c.t.Helper()
	row := insertOf(c.rel, "1", text)
	row.Txn.XID = xid
	if xid == 0 {
		row = readOf(row)
		row.Relation, row.Read.Xmin = c.rel, c.seenBy
	}
	c.b.Reset()
	if err := c.r.Route(row, c.b); err != nil {
		c.t.Fatal(err)
	}
	if got := string(c.b.bytes(c.b.records[0].value)); !strings.Contains(got, `"v":`+want+`}`) {
		c.t.Errorf("%s by transaction %d: %s, want %s", text, xid, got, want)
	}
}

// Neither the stream nor a row value says which attributes a composite type had: a value
// gets names only where they are surely its own.
func TestValuesOfAnAlteredTypeGetNoNamesOfAnotherTime(t *testing.T) {
	c := newCompositeRun(t, nil)
	c.expect(100, "(1,2)", `{"a":1,"b":2}`)
	c.alter(200, "a", "c") // b dropped, c added: as many as before
	c.expect(199, "(1,2)", `"(1,2)"`)
	c.expect(200, "(1,2)", `"(1,2)"`) // before or after the ALTER in its own transaction
	c.expect(201, "(1,2)", `{"a":1,"c":2}`)
	c.expect(150, "(1,2)", `"(1,2)"`) // began early, committed late
	c.expect(202, "(3,4)", `{"a":3,"c":4}`)
	c.expect(203, "(3,4,5)", `"(3,4,5)"`) // by a long transaction's type, which is not committed
	c.alter(format.Altering, "a", "c")
	c.expect(204, "(1,2)", `"(1,2)"`)
	c.alter(200, "a", "c")
	c.expect(204, "(1,2)", `{"a":1,"c":2}`)
}

// What changes between two chunks is seen, and within one the catalog is asked once.
func TestEachChunkIsReadByTheTypesOfItsTime(t *testing.T) {
	c := newCompositeRun(t, nil)
	c.seenBy = 150
	c.expect(0, "(1,2)", `{"a":1,"b":2}`)
	c.expect(0, "(1,2)", `{"a":1,"b":2}`)
	if len(c.asked) != 1 {
		t.Errorf("asked %d times for one chunk", len(c.asked))
	}
	c.alter(200, "a", "c")
	c.seenBy = 200 // read before, maybe
	c.expect(0, "(1,2)", `"(1,2)"`)
	c.seenBy = 201
	c.expect(0, "(1,2)", `{"a":1,"c":2}`)
	c.expect(0, "(1)", `"(1)"`)
	if len(c.asked) != 3 {
		t.Errorf("asked %d times for three chunks", len(c.asked))
	}
}

// An array, a domain and another composite are made of the type that was altered.
func TestWhatIsMadeOfAnAlteredTypeIsTextAsAWhole(t *testing.T) {
	c := newCompositeRun(t, nil)
	c.alter(200, "a", "b")
	array := &format.Type{Name: "_pair", Kind: format.KindArray, Delim: ',', Elem: c.typ}
	outer := &format.Type{Name: "outer", Kind: format.KindComposite, Fields: []format.Field{{Name: "p", Type: array, Mod: format.NoMod}}}
	c.typ = &format.Type{Name: "d", Kind: format.KindDomain, Base: outer, Mod: format.NoMod}
	const text = `("{""(1,2)""}")`
	c.expect(200, text, `"(\"{\"\"(1,2)\"\"}\")"`)
	c.expect(201, text, `{"p":[{"a":1,"b":2}]}`)
	c.expect(201, `("{""(1,2,3)""}")`, `"(\"{\"\"(1,2,3)\"\"}\")"`)
}

func TestAValueOfAnAlteredTypeIsTextInDebeziumsFormatToo(t *testing.T) {
	c := newCompositeRun(t, func(o *Options) { o.Debezium = &DebeziumOptions{} })
	c.alter(200, "a", "b")
	c.expect(200, "(1,2)", `"(1,2)"`)
	c.expect(201, "(1,2)", `{"a":1,"b":2}`)
}

// Debezium's values with their schema say struct: a text would not be what they say.
func TestAValueOfAnAlteredTypeWithASchemaIsADeadLetter(t *testing.T) {
	c := newCompositeRun(t, func(o *Options) { o.Debezium = &DebeziumOptions{Schemas: true}; o.DeadLetterOn = nil })
	c.alter(200, "a", "b")
	c.expect(201, "(1,2)", `{"a":1,"b":2}`)
	row := insertOf(c.rel, "1", "(1,2)")
	row.Txn.XID = 200
	var stop *StopError
	if err := c.r.Route(row, c.b); !errors.As(err, &stop) || stop.Reason != ReasonEncode {
		t.Errorf("%v", err)
	}
}

func TestACatalogThatDoesNotAnswerStopsTheStream(t *testing.T) {
	gone := errors.New("connection lost")
	c := newCompositeRun(t, func(o *Options) {
		o.TypesAt = func(checkpoint.LSN) (bool, error) { return false, gone }
	})
	if err := c.r.Route(insertOf(c.rel, "1", "(1,2)"), c.b); !errors.Is(err, gone) {
		t.Errorf("%v", err)
	}
}

func TestARowWithACompositeDoesNotAllocate(t *testing.T) {
	c := newCompositeRun(t, func(o *Options) { o.TypesAt = func(checkpoint.LSN) (bool, error) { return false, nil } })
	row := insertOf(c.rel, "1", "(1,2)")
	read := readOf(row)
	allocs := testing.AllocsPerRun(100, func() {
		c.b.Reset()
		for _, change := range []*replication.Change{row, read, row, read} {
			if err := c.r.Route(change, c.b); err != nil {
				t.Fatal(err)
			}
		}
	})
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}

package format

import (
	"slices"
	"strings"
	"testing"
)

func TestBuiltinKnowsEveryTypeOnce(t *testing.T) {
	for _, types := range [][]Type{builtinBases[:], builtinArrays[:]} {
		for i := range types {
			typ := &types[i]
			if Builtin(typ.OID) != typ {
				t.Errorf("Builtin(%d) is not %s: the table is out of order or has an OID twice", typ.OID, typ)
			}
			if typ.OID >= FirstUserOID || (typ.Kind == KindArray) != (typ.Elem != nil) {
				t.Errorf("%+v", typ)
			}
		}
	}
	for _, oid := range []uint32{0, 1, 71, 2249, 2277, 9999, 10000, 1 << 31} {
		if typ := Builtin(oid); typ != nil {
			t.Errorf("Builtin(%d) = %s", oid, typ)
		}
	}
	if b := Builtin(1020); b.Elem.Name != "box" || b.Elem.Delim != ';' {
		t.Errorf("box[] = %+v", b)
	}
}

func TestResolverPutsTypesTogether(t *testing.T) {
	r := mustTypes(t)
	person := r.Type(oidPerson)
	if person.Kind != KindComposite || len(person.Fields) != 4 || person.String() != "public.person" {
		t.Fatalf("person = %+v", person)
	}
	if addr := r.Type(oidAddr); person.Fields[1].Type != addr || person.Fields[2].Type.Elem != addr {
		t.Error("addr is made more than once")
	}
	if person.Fields[0].Type != Builtin(25) || person.Fields[3].Type.Kind != KindHstore {
		t.Errorf("person = %+v", person)
	}
	if ints := r.Type(oidIntsDomainArray); ints.Kind != KindArray || ints.Elem.Kind != KindDomain || ints.Elem.Underlying() != Builtin(1007) {
		t.Errorf("ints[] = %+v", ints)
	}
}

func TestTypesThatContainThemselvesEnd(t *testing.T) {
	var r Resolver
	r.Add(
		TypeRow{OID: 20001, Schema: "s", Name: "a", Class: 'c', Fields: []FieldRow{{"b", 20002, NoMod}, {"n", 23, NoMod}}},
		TypeRow{OID: 20002, Schema: "s", Name: "_a", Class: 'b', Elem: 20003},
		TypeRow{OID: 20003, Schema: "s", Name: "d", Class: 'd', Base: 20001},
	)
	for _, oid := range []uint32{20001, 20002, 20003} {
		var e Encoder
		e.Plain(r.Type(oid)) // must return
	}
	if got := r.Type(20001).Fields[0].Type.Elem.Underlying(); got.Kind != KindUnknown {
		t.Errorf("the inner one is %+v", got)
	}
	r = Resolver{}
	r.Add(TypeRow{OID: 20004, Schema: "s", Name: "self", Class: 'd', Base: 20004})
	if got := r.Type(20004).Underlying(); got.Kind != KindUnknown {
		t.Errorf("a domain over itself is %+v", got)
	}
}

func TestMissingAsksOnceForWhatIsUnknown(t *testing.T) {
	r := mustTypes(t)
	got := r.Missing([]uint32{23, oidAddr, 30001, 1007, 30002, 30001})
	if want := []uint32{30001, 30002}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	var empty Resolver
	if got := empty.Missing([]uint32{16, oidAddr}); !slices.Equal(got, []uint32{oidAddr}) {
		t.Errorf("got %v", got)
	}
}

func TestAddTellsWhetherTypesChanged(t *testing.T) {
	r := mustTypes(t)
	before := r.Type(oidAddrArray)
	row := r.rows[oidAddr]
	if r.Add(row) {
		t.Error("the same row again is a change")
	}
	if r.Type(oidAddrArray) != before {
		t.Error("the pointer changed without a change")
	}
	row.Fields = append(slices.Clone(row.Fields), FieldRow{"zip", 25, NoMod})
	if !r.Add(row) {
		t.Error("a new field is no change")
	}
	if after := r.Type(oidAddrArray); after == before || len(after.Elem.Fields) != 6 || len(before.Elem.Fields) != 5 {
		t.Errorf("before %+v, after %+v", before.Elem, after.Elem)
	}
}

func TestTypeMessagesHelpWhereTheCatalogHasNoRow(t *testing.T) {
	r := mustTypes(t)
	if got := r.Type(30001); got.Kind != KindUnknown || got.OID != 30001 {
		t.Errorf("unknown: %+v", got)
	}
	if !r.Learn(30001, "", "int4") || r.Learn(30001, "", "int4") {
		t.Error("Learn does not tell what is new")
	}
	r.Learn(30002, "", "_numeric")
	r.Learn(30003, "ext", "hstore")
	r.Learn(30004, "public", "gone")
	r.Learn(30005, "", "nonsense")
	for oid, want := range map[uint32]Kind{30002: KindArray, 30003: KindHstore, 30004: KindUnknown, 30005: KindUnknown} {
		if got := r.Type(oid).Underlying(); got.Kind != want {
			t.Errorf("%d: %+v, want kind %d", oid, got, want)
		}
	}
	var e Encoder
	if got, err := e.Plain(r.Type(30001))(nil, []byte("5")); err != nil || string(got) != "5" {
		t.Errorf("domain over int4 that was dropped: %s, %v", got, err)
	}
	if r.Learn(oidAddr, "", "int4") || r.Type(oidAddr).Kind != KindComposite {
		t.Error("a TYPE message wins over the catalog")
	}
	if !r.Add(TypeRow{OID: 30004, Schema: "public", Name: "gone", Class: 'e', Delim: ','}) || r.Type(30004).Kind != KindEnum {
		t.Error("the catalog does not win over a TYPE message")
	}
}

func TestParseTypeRow(t *testing.T) {
	row := func(s ...string) (v [][]byte) {
		for _, s := range s {
			v = append(v, []byte(s))
		}
		return v
	}
	good := append(row("20000", "public", "addr", "c", ",", "0", "0"), []byte(`[{"name" : "a\"b", "oid" : 25, "mod" : 9}]`), []byte("-1"), nil, []byte("4294967300"))
	got, err := ParseTypeRow(good)
	want := TypeRow{OID: 20000, Schema: "public", Name: "addr", Class: 'c', Delim: ',', Fields: []FieldRow{{`a"b`, 25, 9}}, Mod: NoMod, Altered: 4294967300}
	if err != nil || !got.equal(want) {
		t.Errorf("got %+v, %v", got, err)
	}
	enum := append(row("20000", "public", "mood", "e", ",", "0", "0"), nil, []byte("-1"), []byte(`["sad", "o,k"]`), nil)
	if got, err := ParseTypeRow(enum); err != nil || got.Fields != nil || !slices.Equal(got.Labels, []string{"sad", "o,k"}) {
		t.Errorf("got %+v, %v", got, err)
	}
	domain := append(row("20000", "public", "price", "d", ",", "0", "1700"), nil, []byte("786438"), nil, nil)
	if got, err := ParseTypeRow(domain); err != nil || got.Mod != 786438 {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, bad := range [][][]byte{
		nil, good[:10],
		append(row("x", "public", "mood", "e", ",", "0", "0"), nil, []byte("-1"), nil, nil),
		append(row("1", "public", "mood", "", ",", "0", "0"), nil, []byte("-1"), nil, nil),
		append(row("1", "public", "mood", "e", ",", "-1", "0"), nil, []byte("-1"), nil, nil),
		append(row("1", "public", "mood", "e", ",", "0", "0"), nil, []byte("x"), nil, nil),
		append(row("1", "public", "mood", "c", ",", "0", "0"), []byte("{"), []byte("-1"), nil, nil),
		append(row("1", "public", "mood", "e", ",", "0", "0"), nil, []byte("-1"), []byte("{"), nil),
		append(row("1", "public", "mood", "c", ",", "0", "0"), nil, []byte("-1"), nil, []byte("x")),
	} {
		if _, err := ParseTypeRow(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func TestTypesQueryFor(t *testing.T) {
	q := TypesQueryFor([]uint32{20000, 4294967295})
	if !strings.Contains(q, "unnest('{20000,4294967295}'::") || strings.Contains(q, "$1") {
		t.Error(q)
	}
}

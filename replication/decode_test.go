package replication

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/walrelay/walrelay/checkpoint"
)

// decodeAll feeds messages, 16 bytes of WAL apart, and renders all events.
func decodeAll(t testing.TB, d *Decoder, messages ...wire) []string {
	t.Helper()
	var got []string
	for i, m := range messages {
		ev, err := d.Decode(checkpoint.LSN(0x1000+16*i), m)
		if err != nil {
			t.Fatalf("message %d (%q): %v", i, m, err)
		}
		for ; ev != nil; ev = d.More() {
			got = append(got, describe(ev))
		}
	}
	return got
}

func TestDecodeEachMessage(t *testing.T) {
	table := relation(1, "public", "t", IdentityDefault, "*id", "v")
	other := relation(2, "app", "u", IdentityFull, "*a")
	for _, tt := range []struct {
		name     string
		messages []wire
		want     []string
	}{
		{
			"an insert has a new tuple, with nulls and empty texts kept apart",
			[]wire{begin(0x2000, 7), table, insert(1, "1", cellNull), insert(1, "2", ""), commit(0x2000, 0x2030)},
			[]string{"begin", "0 c public.t new(id=1 v=null)", "1 c public.t new(id=2 v=)", "commit"},
		},
		{
			"an update without an old tuple left its key alone",
			[]wire{begin(0x2000, 7), table, update(1, 0, nil, []string{"1", "b"})},
			[]string{"begin", "0 u public.t new(id=1 v=b)"},
		},
		{
			"an update that changed the key has the old key",
			[]wire{begin(0x2000, 7), table, update(1, 'K', []string{"1", cellNull}, []string{"2", cellUnchanged})},
			[]string{"begin", "0 u public.t key(id=1 v=null) new(id=2 v=unchanged)"},
		},
		{
			"an update under FULL has the old row",
			[]wire{begin(0x2000, 7), table, update(1, 'O', []string{"1", "a"}, []string{"1", "b"})},
			[]string{"begin", "0 u public.t old(id=1 v=a) new(id=1 v=b)"},
		},
		{
			"an update without an old tuple does not show the one before it",
			[]wire{begin(0x2000, 7), table, update(1, 'O', []string{"1", "a"}, []string{"1", "b"}), update(1, 0, nil, []string{"1", "c"})},
			[]string{"begin", "0 u public.t old(id=1 v=a) new(id=1 v=b)", "1 u public.t new(id=1 v=c)"},
		},
		{
			"a delete has the key, or under FULL the row",
			[]wire{begin(0x2000, 7), table, remove(1, 'K', "1", cellNull), remove(1, 'O', "2", "b")},
			[]string{"begin", "0 d public.t key(id=1 v=null)", "1 d public.t old(id=2 v=b)"},
		},
		{
			"a truncate of several tables is one change for each, with a seq of its own",
			[]wire{begin(0x2000, 7), table, other, insert(2, "x"), truncate(2, 1), insert(1, "1", "a")},
			[]string{"begin", "0 c app.u new(a=x)", "1 t app.u", "2 t public.t", "3 c public.t new(id=1 v=a)"},
		},
		{
			"a truncate of no table is no change",
			[]wire{begin(0x2000, 7), truncate(), commit(0x2000, 0x2030)},
			[]string{"begin", "commit"},
		},
		{
			"a transactional message counts in seq",
			[]wire{begin(0x2000, 7), table, logicalMessage(true, 0x1800, "p", "x"), insert(1, "1", "a")},
			[]string{"begin", `0 m "p" "x"`, "1 c public.t new(id=1 v=a)"},
		},
		{
			"a message that is not transactional stands outside",
			[]wire{logicalMessage(false, 0x1800, "nt", "one"), begin(0x2000, 7), commit(0x2000, 0x2030), logicalMessage(false, 0x1900, "nt", "")},
			[]string{`- m "nt" "one"`, "begin", "commit", `- m "nt" ""`},
		},
		{
			"seq begins anew in the next transaction",
			[]wire{begin(0x2000, 7), table, insert(1, "1", "a"), commit(0x2000, 0x2030), begin(0x3000, 8), insert(1, "2", "b")},
			[]string{"begin", "0 c public.t new(id=1 v=a)", "commit", "begin", "0 c public.t new(id=2 v=b)"},
		},
		{
			"the abort of a subtransaction, which 18 sends unasked, takes nothing back",
			[]wire{begin(0x2000, 7), table, insert(1, "1", "a"), wire{'A'}.u32(7).u32(8), insert(1, "2", "b"), commit(0x2000, 0x2030)},
			[]string{"begin", "0 c public.t new(id=1 v=a)", "1 c public.t new(id=2 v=b)", "commit"},
		},
		{
			"types and origins yield nothing",
			[]wire{begin(0x2000, 7), wire{'O'}.u64(1).str("node"), wire{'Y'}.u32(9).str("app").str("mood"), commit(0x2000, 0x2030)},
			[]string{"begin", "commit"},
		},
		{
			"a schema that is left out is pg_catalog",
			[]wire{begin(0x2000, 7), relation(1, "", "t", IdentityDefault, "*id"), insert(1, "1")},
			[]string{"begin", "0 c pg_catalog.t new(id=1)"},
		},
		{
			"a table without columns has rows all the same",
			[]wire{begin(0x2000, 7), relation(1, "public", "t", IdentityDefault), insert(1)},
			[]string{"begin", "0 c public.t"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := decodeAll(t, NewDecoder(7, nil), tt.messages...)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDecodeKeepsWhatTheMessageSays(t *testing.T) {
	d := NewDecoder(0x5_0000_0010, nil)
	mustDecode := func(lsn checkpoint.LSN, m wire) *Event {
		t.Helper()
		ev, err := d.Decode(lsn, m)
		if err != nil {
			t.Fatal(err)
		}
		return ev
	}
	if d.InTransaction() {
		t.Error("in a transaction before BEGIN")
	}
	ev := mustDecode(0x1000, begin(0x2000, 0x20))
	want := Transaction{XID: 0x5_0000_0020, CommitLSN: 0x2000, CommitTime: testCommitTime}
	if *ev.Txn != want || ev.LSN != 0x2000 || !d.InTransaction() {
		t.Errorf("begin: %+v at %s, want %+v", *ev.Txn, ev.LSN, want)
	}
	mustDecode(0x1000, relation(1, "public", "t", IdentityDefault, "*id"))
	if ev := mustDecode(0x1010, insert(1, "1")); ev.LSN != 0x1010 || ev.Change.LSN != 0x1010 || ev.Change.Txn.CommitLSN != 0x2000 || ev.Txn != ev.Change.Txn {
		t.Errorf("insert: %+v of %+v", ev.Change, ev.Txn)
	}
	if ev := mustDecode(0x1020, logicalMessage(true, 0x1018, "p", "x")); ev.Change.LSN != 0x1018 || !ev.Change.Message.Transactional || ev.Change.Relation != nil {
		t.Errorf("message: %+v", ev.Change)
	}
	ev = mustDecode(0x2000, commit(0x2000, 0x2030))
	want.EndLSN = 0x2030
	if *ev.Txn != want || ev.LSN != 0x2030 || d.InTransaction() {
		t.Errorf("commit: %+v at %s, want %+v", *ev.Txn, ev.LSN, want)
	}
	if ev := mustDecode(0x2040, logicalMessage(false, 0x2038, "p", "x")); ev.Txn != nil || ev.Change.Txn != nil || ev.Change.Seq != 0 || ev.Change.Message.Transactional {
		t.Errorf("message outside: %+v", ev.Change)
	}
}

func TestDecodeRefusesWhatTheProtocolDoesNotAllow(t *testing.T) {
	table := relation(1, "public", "t", IdentityDefault, "*id", "v")
	open := []wire{begin(0x2000, 7), table}
	for _, tt := range []struct {
		name   string
		before []wire
		bad    wire
		reason string
	}{
		{"an empty message", nil, wire{}, "empty message"},
		{"a message of streaming mode", nil, wire{'S'}.u32(7).u8(1), "not asked for"},
		{"a message of two-phase mode", nil, wire{'b'}, "not asked for"},
		{"BEGIN inside a transaction", open, begin(0x3000, 8), "BEGIN inside the transaction with commit LSN 0/2000"},
		{"COMMIT outside a transaction", nil, commit(0x2000, 0x2030), "open: false"},
		{"COMMIT of another transaction", open, commit(0x2001, 0x2030), "does not close the transaction with commit LSN 0/2000"},
		{"COMMIT that ends where it starts", open, commit(0x2000, 0x2000), "does not close"},
		{"an insert outside a transaction", []wire{begin(0x2000, 7), table, commit(0x2000, 0x2030)}, insert(1, "1", "a"), "outside a transaction"},
		{"a truncate outside a transaction", nil, truncate(1), "outside a transaction"},
		{"a table that was never described", open, insert(2, "1", "a"), "relation 2 was never described"},
		{"a truncate of a table that was never described", open, truncate(1, 2), "relation 2 was never described"},
		{"an insert with an old tuple", open, wire{'I'}.u32(1).u8('O').tuple("1", "a"), "want a new tuple"},
		{"an update with two old tuples", open, wire{'U'}.u32(1).u8('K').tuple("1", "a").u8('K').tuple("1", "a"), "want a new tuple"},
		{"a delete with a new tuple", open, wire{'D'}.u32(1).u8('N').tuple("1", "a"), "want an old tuple"},
		{"a tuple with too few columns", open, insert(1, "1"), "tuple of public.t has 1 columns, its relation 2"},
		{"an old tuple with too many columns", open, remove(1, 'K', "1", "2", "3"), "has 3 columns"},
		{"a binary value", open, wire{'I'}.u32(1).u8('N').u16(2).u8('b').u32(1).u8(1).u8('n'), "value of kind 'b'"},
		{"a transactional message outside a transaction", nil, logicalMessage(true, 1, "p", "x"), "outside a transaction"},
		{"a message that is not transactional inside a transaction", open, logicalMessage(false, 1, "p", "x"), "inside the transaction with commit LSN 0/2000"},
		{"a value longer than its message", open, wire{'I'}.u32(1).u8('N').u16(2).u8('n').u8('t').u32(0xffffffff).u8('x'), "ends too early"},
		{"a truncate of more tables than fit", open, wire{'T'}.u32(0xffffffff).u8(0).u32(1), "ends too early"},
		{"a relation of more columns than fit", open, wire{'R'}.u32(1).str("public").str("t").u8('d').u16(0xffff), "ends too early"},
		{"a table whose name is not UTF-8", nil, relation(1, "public", "t\xff", IdentityDefault), "not UTF-8"},
		{"a column whose name is not UTF-8", nil, relation(1, "public", "t", IdentityDefault, "c\xff"), "not UTF-8"},
		{"a message that goes on behind its end", open, insert(1, "1", "a").u8(0), "1 bytes behind its end"},
		{"a relation that goes on behind its end", nil, relation(1, "public", "t", IdentityDefault, "*id").u8(0), "1 bytes behind its end"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := NewDecoder(7, nil)
			decodeAll(t, d, tt.before...)
			ev, err := d.Decode(0x1234, tt.bad)
			var protocol *ProtocolError
			if !errors.As(err, &protocol) || ev != nil {
				t.Fatalf("event %v, error %v, want a ProtocolError", ev, err)
			}
			if protocol.LSN != 0x1234 || !strings.Contains(err.Error(), tt.reason) || !strings.Contains(err.Error(), "0/1234") {
				t.Errorf("error %q, want it to tell of %q at 0/1234", err, tt.reason)
			}
		})
	}
}

// goodMessages are one of each kind, in an order that decodes.
func goodMessages() []wire {
	return []wire{
		logicalMessage(false, 0x900, "nt", "one"),
		begin(0x2000, 7),
		wire{'O'}.u64(1).str("node"),
		wire{'Y'}.u32(9).str("app").str("mood"),
		relation(1, "public", "t", IdentityDefault, "*id", "v"),
		insert(1, "1", cellNull),
		update(1, 'K', []string{"1", cellNull}, []string{"2", cellUnchanged}),
		update(1, 0, nil, []string{"2", "b"}),
		remove(1, 'O', "2", "b"),
		truncate(1, 1),
		logicalMessage(true, 0x1800, "p", "content"),
		wire{'A'}.u32(7).u32(8),
		commit(0x2000, 0x2030),
	}
}

func TestAMessageCutShortIsAProtocolError(t *testing.T) {
	messages := goodMessages()
	for i, m := range messages {
		if strings.ContainsRune("OYA", rune(m[0])) {
			continue // their content is not read
		}
		for n := range m {
			d := NewDecoder(7, nil)
			decodeAll(t, d, messages[:i]...)
			var protocol *ProtocolError
			if _, err := d.Decode(0x1000, m[:n]); !errors.As(err, &protocol) {
				t.Errorf("%q cut to %d of %d bytes: %v, want a ProtocolError", m[0], n, len(m), err)
			}
		}
	}
}

func TestTheSameShapeKeepsItsPointer(t *testing.T) {
	keys := []string{"id"}
	d := NewDecoder(7, func(uint32) ([]string, error) { return keys, nil })
	decodeAll(t, d, begin(0x2000, 7))
	shape := func(r wire, cells ...string) *Relation {
		t.Helper()
		decodeAll(t, d, r)
		ev, err := d.Decode(0x1000, insert(1, cells...))
		if err != nil {
			t.Fatal(err)
		}
		return ev.Change.Relation
	}
	first := shape(relation(1, "public", "t", IdentityFull, "*id", "*v"), "1", "a")
	if again := shape(relation(1, "public", "t", IdentityFull, "*id", "*v"), "1", "a"); again != first {
		t.Error("the same shape has another pointer")
	}
	before := *first
	seen := []*Relation{first}
	for _, tt := range []struct {
		what  string
		r     wire
		cells []string
	}{
		{"a column more", relation(1, "public", "t", IdentityFull, "*id", "*v", "*w"), []string{"1", "a", "b"}},
		{"another column name", relation(1, "public", "t", IdentityFull, "*id", "*w"), []string{"1", "a"}},
		{"another identity", relation(1, "public", "t", IdentityDefault, "*id", "*v"), []string{"1", "a"}},
		{"another key column", relation(1, "public", "t", IdentityDefault, "*id", "v"), []string{"1", "a"}},
		{"another name", relation(1, "public", "u", IdentityFull, "*id", "*v"), []string{"1", "a"}},
		{"another schema", relation(1, "app", "u", IdentityFull, "*id", "*v"), []string{"1", "a"}},
	} {
		rel := shape(tt.r, tt.cells...)
		if slices.Contains(seen, rel) {
			t.Errorf("%s: has the pointer of another shape", tt.what)
		}
		seen = append(seen, rel)
	}
	keys = []string{"v"}
	last := shape(relation(1, "public", "t", IdentityFull, "*id", "*v"), "1", "a")
	if slices.Contains(seen, last) || !slices.Equal(last.PrimaryKey, []int{1}) {
		t.Errorf("another primary key: %v", last.PrimaryKey)
	}
	if !cmp.Equal(*first, before) {
		t.Errorf("a relation was changed behind its users: %+v, was %+v", *first, before)
	}
}

func TestKeyOfARelation(t *testing.T) {
	for _, tt := range []struct {
		name     string
		identity ReplicaIdentity
		columns  []string
		catalog  []string
		want     []int
	}{
		{"the primary key by its flags", IdentityDefault, []string{"a", "*b", "*c"}, []string{"a"}, []int{1, 2}},
		{"none without a primary key", IdentityDefault, []string{"a", "b"}, []string{"a"}, nil},
		{"the index that is the identity, not the primary key", IdentityIndex, []string{"a", "*b"}, []string{"a"}, []int{1}},
		{"the catalog's under FULL", IdentityFull, []string{"*a", "*b", "*c"}, []string{"b"}, []int{1}},
		{"the catalog's under FULL, in the table's column order", IdentityFull, []string{"*a", "*b", "*c"}, []string{"c", "a"}, []int{0, 2}},
		{"none under FULL without a primary key", IdentityFull, []string{"*a", "*b"}, nil, nil},
		{"none where a key column is not published", IdentityFull, []string{"*a", "*b"}, []string{"b", "renamed"}, nil},
		{"the catalog's under NOTHING", IdentityNothing, []string{"a", "b"}, []string{"a"}, []int{0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := NewDecoder(7, func(oid uint32) ([]string, error) {
				if oid != 42 {
					t.Errorf("asked for the key of %d", oid)
				}
				return tt.catalog, nil
			})
			decodeAll(t, d, relation(42, "public", "t", tt.identity, tt.columns...))
			if got := d.relations[42].Key(); !slices.Equal(got, tt.want) {
				t.Errorf("key %v, want %v", got, tt.want)
			}
		})
	}
}

func TestAFailedKeyLookupFailsTheMessage(t *testing.T) {
	gone := errors.New("connection gone")
	d := NewDecoder(7, func(uint32) ([]string, error) { return nil, gone })
	_, err := d.Decode(0x1000, relation(1, "public", "t", IdentityFull, "*id"))
	if !errors.Is(err, gone) || !strings.Contains(err.Error(), "public.t") {
		t.Errorf("error %v, want the lookup's with the table's name", err)
	}
	if _, err := d.Decode(0x1000, relation(1, "public", "t", IdentityDefault, "*id")); err != nil {
		t.Errorf("the flags tell the key, and yet: %v", err)
	}
}

func TestXIDIsWidenedToTheNearest(t *testing.T) {
	for _, tt := range []struct {
		name string
		near checkpoint.XID
		x    uint32
		want checkpoint.XID
	}{
		{"the same", 0x5_0000_0007, 7, 0x5_0000_0007},
		{"over the epoch's end", 0x5_ffff_fff0, 3, 0x6_0000_0003},
		{"back over the epoch's start", 0x6_0000_0003, 0xffff_fff0, 0x5_ffff_fff0},
		{"almost 2^31 ahead", 0x5_0000_0000, 0x7fff_ffff, 0x5_7fff_ffff},
		{"2^31 - 1 behind", 0x5_8000_0000, 1, 0x5_0000_0001},
		{"never below the first epoch", 3, 0xffff_fff0, 0xffff_fff0},
	} {
		if got := widen(tt.x, tt.near); got != tt.want {
			t.Errorf("%s: widen(%#x, %#x) = %#x, want %#x", tt.name, tt.x, uint64(tt.near), uint64(got), uint64(tt.want))
		}
	}
}

// TestXIDsSurviveTheEpoch decodes transactions whose ids wander, as they do in a WAL: each
// less than 2^31 from the one before it.
func TestXIDsSurviveTheEpoch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const half = 1 << 31
		xid := rapid.Int64Range(half, 1<<40).Draw(t, "first")
		near := xid + rapid.Int64Range(1-half, half-1).Draw(t, "near")
		d := NewDecoder(checkpoint.XID(near), nil)
		for i, step := range rapid.SliceOfN(rapid.Int64Range(1-half, half-1), 1, 20).Draw(t, "steps") {
			lsn := checkpoint.LSN(0x1000 * (i + 1))
			ev, err := d.Decode(lsn, begin(lsn, uint32(xid)))
			if err != nil {
				t.Fatal(err)
			}
			if ev.Txn.XID != checkpoint.XID(xid) {
				t.Fatalf("transaction %d: xid %s, want %d", i, ev.Txn.XID, xid)
			}
			if _, err := d.Decode(lsn, commit(lsn, lsn+8)); err != nil {
				t.Fatal(err)
			}
			xid = max(3, xid+step)
		}
	})
}

func TestARowAllocatesNothing(t *testing.T) {
	d := NewDecoder(7, nil)
	decodeAll(t, d, begin(0x2000, 7), relation(1, "public", "t", IdentityDefault, "*id", "v", "w"))
	row := insert(1, "1", cellNull, "some text")
	change := update(1, 'O', []string{"1", "a", "b"}, []string{"1", "a", cellUnchanged})
	note := logicalMessage(true, 0x1000, "", "content")
	for name, m := range map[string]wire{"insert": row, "update": change, "message": note} {
		if n := testing.AllocsPerRun(100, func() {
			if _, err := d.Decode(0x1000, m); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations, want none", name, n)
		}
	}
}

// FuzzDecoder: whatever arrives, the decoder does not panic, and what it refuses it refuses
// with a ProtocolError. The input is a run of messages, each behind two bytes of length.
func FuzzDecoder(f *testing.F) {
	pack := func(messages ...wire) (b []byte) {
		for _, m := range messages {
			b = append(append(b, wire(nil).u16(len(m))...), m...)
		}
		return b
	}
	f.Add(pack(goodMessages()...))
	for i := range goodMessages() {
		f.Add(pack(goodMessages()[:i]...))
		f.Add(pack(begin(0x2000, 7), relation(1, "public", "t", IdentityFull, "*id", "*v"), goodMessages()[i].cut(1)))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		d := NewDecoder(7, func(uint32) ([]string, error) { return []string{"id"}, nil })
		for len(data) >= 2 {
			n := min(int(data[0])<<8|int(data[1]), len(data)-2)
			ev, err := d.Decode(0x1000, data[2:2+n])
			var protocol *ProtocolError
			if err != nil && (!errors.As(err, &protocol) || ev != nil) {
				t.Fatalf("event %v, error %v", ev, err)
			}
			for ; ev != nil; ev = d.More() {
				if c := ev.Change; c != nil && c.Op != OpMessage && len(c.New) > 0 && len(c.New) != len(c.Relation.Columns) {
					t.Fatalf("%d values for %d columns", len(c.New), len(c.Relation.Columns))
				}
				describe(ev)
			}
			data = data[2+n:]
		}
	})
}

func BenchmarkDecodeInsert(b *testing.B) {
	d := NewDecoder(7, nil)
	decodeAll(b, d, begin(0x2000, 7), relation(1, "public", "t", IdentityDefault, "*id", "v", "w", "x"))
	row := insert(1, "1234567", "a name of some length", cellNull, "2026-01-01 00:00:00+00")
	b.SetBytes(int64(len(row)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Decode(0x1000, row); err != nil {
			b.Fatal(err)
		}
	}
}

// What a TYPE message said of a type stays known, the latest of it.
func TestTypeNamesAreKept(t *testing.T) {
	d := NewDecoder(7, nil)
	for _, m := range []wire{wire{'Y'}.u32(9).str("app").str("mood"), wire{'Y'}.u32(10).str("").str("int4"), wire{'Y'}.u32(9).str("app").str("feeling")} {
		if _, err := d.Decode(0x1000, m); err != nil {
			t.Fatal(err)
		}
	}
	for oid, want := range map[uint32]TypeName{9: {"app", "feeling"}, 10: {"", "int4"}} {
		if got, ok := d.TypeName(oid); !ok || got != want {
			t.Errorf("type %d is %+v, want %+v", oid, got, want)
		}
	}
	if name, ok := d.TypeName(11); ok {
		t.Errorf("type 11 is %+v", name)
	}
}

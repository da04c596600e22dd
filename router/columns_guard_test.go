package router

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// guarded makes a router that masks email and leaves password out of public.users.
func guarded(t testing.TB, gone ...string) *Router {
	t.Helper()
	o := testOptions()
	o.Columns = map[string]ColumnOptions{"public.users": {
		Exclude: []string{"password"}, Masks: map[string]format.Mask{"email": {Kind: format.MaskSHA256}}, Gone: gone,
	}}
	return mustRouter(t, o, newFixedTopics())
}

// Shapes are lists of columns; one in capitals has another type. "catalog:" is how the
// table is at the start, "read:" what the snapshot reads, "name:" another name of it.
func TestAHiddenColumnThatMayHaveAnotherNameStops(t *testing.T) {
	for _, c := range []struct {
		name   string
		shapes []string
		gone   []string
		refuse bool // the last shape
	}{
		{name: "nothing happens", shapes: []string{"catalog:id email password", "id email password", "id email password x"}},
		{name: "renamed", shapes: []string{"catalog:id email password", "id email password", "id mail password"}, refuse: true},
		{name: "renamed before the first row", shapes: []string{"catalog:id email password", "id mail password"}, refuse: true},
		{name: "renamed and said so", shapes: []string{"catalog:id email password", "id email password", "id mail password"}, gone: []string{"email"}},
		{name: "the other one renamed", shapes: []string{"catalog:id email password", "id email password", "id email hash"}, gone: []string{"email"}, refuse: true},
		{name: "dropped", shapes: []string{"catalog:id email password x", "id email password x", "id password x"}},
		{name: "dropped, and later another column", shapes: []string{"catalog:id email password", "id email password", "id password", "id password y"}},
		{name: "dropped for another column", shapes: []string{"catalog:id email password", "id email password", "id password y"}, refuse: true},
		{name: "dropped, and another one takes its place with another type", shapes: []string{"catalog:id x email password", "id x email password", "id X password"}, refuse: true},
		{name: "dropped, come back and renamed", shapes: []string{"catalog:id email password", "id email password", "id password", "id password email", "id password mail"}, refuse: true},
		{name: "the WAL is older than the column", shapes: []string{"catalog:id email password x", "id x", "id x email", "id x email password"}},
		{name: "the WAL is older, and the column had another name", shapes: []string{"catalog:id email password", "id mail password"}, refuse: true},
		{name: "a column that is gone by now", shapes: []string{"catalog:id email password", "id y"}, refuse: true},
		{name: "renamed to what is hidden too", shapes: []string{"catalog:id email password", "id password email", "id email"}},
		{name: "unknown at the start", shapes: []string{"id x"}, refuse: true},
		{name: "unknown at the start, with both", shapes: []string{"id email password"}},
		{name: "the snapshot is ahead of the stream", shapes: []string{"catalog:id email password", "id email password", "read:id email password y", "id email password"}},
		{name: "renamed as the snapshot reads", shapes: []string{"catalog:id email password", "id email password", "read:id mail password"}, refuse: true},
		{name: "the snapshot does not see what the stream did", shapes: []string{"catalog:id email password", "read:id email password", "id email password", "id password", "read:id password y"}, refuse: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := guarded(t, c.gone...)
			for i, shape := range c.shapes {
				kind, columns, ok := strings.Cut(shape, ":")
				if !ok {
					kind, columns = "", shape
				}
				rel := shapeOf(t, "users", columns)
				if kind == "catalog" {
					if err := r.Guard(rel); err != nil {
						t.Fatal(err)
					}
					continue
				}
				change := insertOf(rel, strings.Fields(columns)...)
				if kind == "read" {
					change = readOf(change)
				}
				b := NewBatch(Limits{Bytes: 1 << 20, Records: 10})
				err := r.Route(change, b)
				last := i == len(c.shapes)-1
				switch {
				case last && c.refuse:
					if !checkpoint.IsRefusal(err) || b.Records() != 0 {
						t.Errorf("%s: %v and %d records, want a refusal", shape, err, b.Records())
					}
					if again := r.Route(change, b); !checkpoint.IsRefusal(again) {
						t.Errorf("%s again: %v", shape, again)
					}
				case err != nil:
					t.Errorf("%s: %v", shape, err)
				}
			}
		})
	}
}

// shapeOf is a relation with these columns, the first one its key.
func shapeOf(t testing.TB, name, columns string) *replication.Relation {
	t.Helper()
	var list []string
	for column := range strings.FieldsSeq(columns) {
		typ := "text"
		if column == strings.ToUpper(column) {
			typ = "int"
		}
		list = append(list, strings.ToLower(column)+" "+typ)
	}
	return relationOf(t, name, list...)
}

func TestARefusalNamesBothColumnsAndNoValue(t *testing.T) {
	r := guarded(t)
	if err := r.Guard(shapeOf(t, "users", "id email password")); err != nil {
		t.Fatal(err)
	}
	err := r.Route(insertOf(shapeOf(t, "users", "id mail password"), "1", "a@b.c", "hush"), NewBatch(Limits{Bytes: 1 << 20, Records: 10}))
	var refusal *checkpoint.Refusal
	if !errors.As(err, &refusal) {
		t.Fatal(err)
	}
	for _, want := range []string{`column "email" of public.users`, `"mail"`, "in clear", "source.columns.public.users", "gone"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %s", err, want)
		}
	}
	if strings.Contains(err.Error(), "a@b.c") || strings.Contains(err.Error(), "hush") {
		t.Errorf("%v holds the row", err)
	}
}

func TestAMisspeltColumnIsRefusedBeforeTheStart(t *testing.T) {
	r := guarded(t)
	_, err := r.Check(shapeOf(t, "users", "id e_mail password"), false)
	if !checkpoint.IsRefusal(err) || !strings.Contains(err.Error(), `source.columns names column "email" of public.users, whose columns are "id", "e_mail", "password"`) {
		t.Error(err)
	}
	if _, err := r.Check(shapeOf(t, "users", "id email password"), false); err != nil {
		t.Error(err)
	}
	if _, err := r.Check(shapeOf(t, "others", "id"), false); err != nil {
		t.Errorf("a table without an entry: %v", err)
	}
	if _, err := guarded(t, "email").Check(shapeOf(t, "users", "id e_mail password"), false); err != nil {
		t.Errorf("gone: %v", err)
	}
	if _, err := r.Check(shapeOf(t, "users", "email password"), false); err != nil {
		t.Errorf("a hashed key: %v", err)
	}
	if _, err := r.Check(shapeOf(t, "users", "password email"), false); !checkpoint.IsRefusal(err) {
		t.Errorf("an excluded key: %v", err)
	}
}

func TestNothingIsSentBeforeTheTablesAreGuarded(t *testing.T) {
	o := testOptions()
	o.Columns = map[string]ColumnOptions{"public.users": {Exclude: []string{"password"}}}
	r, err := NewRouter(o, newFixedTopics())
	if err != nil {
		t.Fatal(err)
	}
	b := NewBatch(Limits{Bytes: 1 << 20, Records: 10})
	if err := r.Route(insertOf(shapeOf(t, "people", "id password"), "1", "hush"), b); !errors.Is(err, errUnguarded) || b.Records() != 0 {
		t.Errorf("%v and %d records", err, b.Records())
	}
}

// A table keeps its OID whatever its name is, before the start and after.
func TestATableUnderAnotherNameIsStillHidden(t *testing.T) {
	r := guarded(t)
	b := NewBatch(Limits{Bytes: 1 << 20, Records: 100})
	if err := r.Guard(shapeOf(t, "users", "id email password")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"users", "people", "users", "archive"} {
		c := insertOf(shapeOf(t, name, "id email password"), "1", "a@b.c", "hush")
		if err := r.Route(c, b); err != nil {
			t.Fatal(err)
		}
		if err := r.Route(readOf(c), b); err != nil {
			t.Fatal(err)
		}
	}
	if b.Records() != 8 || bytes.Contains(b.arena, []byte("a@b.c")) || bytes.Contains(b.arena, []byte("hush")) {
		t.Errorf("%d records: %s", b.Records(), b.arena)
	}
	other := shapeOf(t, "copy", "id email password")
	other.OID++
	if err := r.Route(insertOf(other, "1", "a@b.c", "hush"), b); err != nil || !bytes.Contains(b.arena, []byte("a@b.c")) {
		t.Errorf("another table is hidden too: %v", err)
	}
}

// clearTexts are values of every family of types, each with a part that is in no other
// place of a record.
func clearTexts() map[uint32]string {
	return map[uint32]string{
		20: "7418529637418", 23: "741852963", 701: "7418529.63", 1700: "741852963741852963.7400", 790: "$741,852,963.00",
		25: "clear-text-741", 1043: "clear-varchar-741", 17: `\x7418529637418529`, 114: `{"clear": "741852963"}`, 3802: `{"clear": 741852963}`,
		1082: "7418-05-29", 1114: "7418-05-29 06:37:41", 1184: "7418-05-29 06:37:41+00", 1186: "741 days 08:52:09.637", 1083: "07:41:52.963741",
		2950: "74185296-3741-8529-6374-185296374185", 1009: `{clear-741,"clear, 742"}`, 1007: "{741852963,741852964}", 869: "74.185.29.63",
		600: "(741852.5,963741.5)", 3904: "[741852,963741)", 99999: "clear-unknown-741",
	}
}

// Whatever type a hidden column has, and whatever the record looks like: nothing of a
// value is in any record, dead letter or error, and what is there is JSON.
func TestNothingOfAHiddenValueLeaves(t *testing.T) {
	masks := map[string]*format.Mask{
		"exclude": nil, "null": {Kind: format.MaskNull}, "fixed": {Kind: format.MaskFixed, Text: "-"}, "sha256": {Kind: format.MaskSHA256},
		"hmac": {Kind: format.MaskHMAC, Salt: []byte("pepper")}, "truncate": {Kind: format.MaskTruncate, Length: 1},
	}
	for name, mask := range masks {
		for shape := range 8 {
			o := testOptions()
			hide := ColumnOptions{Exclude: []string{"hidden"}}
			if mask != nil {
				hide = ColumnOptions{Masks: map[string]format.Mask{"hidden": *mask}}
			}
			o.Columns = map[string]ColumnOptions{"public.t": hide}
			if shape&1 != 0 {
				o.Debezium = &DebeziumOptions{Schemas: shape&2 != 0}
			}
			if o.Unwrapped = shape&4 != 0; o.Unwrapped {
				o.DeletedField = shape&2 != 0
			}
			for oid, text := range clearTexts() {
				t.Run(fmt.Sprintf("%s/%d/%d", name, shape, oid), func(t *testing.T) {
					everyChange(t, o, oid, text)
				})
			}
		}
	}
}

func everyChange(t *testing.T, o Options, oid uint32, text string) {
	t.Helper()
	rel := relationOf(t, "t", "id int", "hidden text", "bad text")
	rel.Columns[1].TypeOID, rel.Identity = oid, replication.IdentityFull
	rel.PrimaryKey = []int{0}
	for i := range rel.Columns {
		rel.Columns[i].Identity = true
	}
	r := mustRouter(t, o, newFixedTopics())
	b := NewBatch(Limits{Bytes: 1 << 20, Records: 1000})
	unchanged := replication.Value{Kind: replication.ValueUnchanged}
	for _, bad := range []string{"fine", "\xff"} { // the second one is a dead letter
		row := rowOf("1", text, bad)
		lacking := replication.Tuple{row[0], unchanged, row[2]}
		for _, c := range []*replication.Change{
			{Op: replication.OpCreate, New: row},
			{Op: replication.OpUpdate, Old: row, New: lacking},
			{Op: replication.OpUpdate, Old: rowOf("2", text, bad), New: lacking},
			{Op: replication.OpUpdate, New: lacking},
			{Op: replication.OpDelete, Old: row},
		} {
			c.Relation, c.Txn, c.LSN = rel, testTxn(), 0x2FFFF00
			one := NewBatch(b.limits)
			err := r.Route(c, one)
			checkRouted(t, r, c, one, err)
			if err == nil {
				err = r.Route(c, b)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := r.Route(readOf(insertOf(rel, "1", text, bad)), b); err != nil {
			t.Fatal(err)
		}
	}
	// Hashes are digits too; without them no three of the value's are left.
	hash := regexp.MustCompile(`"[0-9a-f]{64}"`)
	for i := range b.records {
		rec := hash.ReplaceAllString(describeRecord(b, i), "HASH")
		if strings.Contains(rec, "741") || strings.Contains(rec, "clear") {
			t.Errorf("the value %s is in a record:\n%s", text, rec)
		}
	}
}

package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var typesSeed = flag.Int("types-seed", 0, "seed of the random tables of random types; 0: another one each time")

// randomTypes are types with a generator of SQL expressions for each. Those whose JSON
// json_populate_record reads back as it is may stand within others.
var randomTypes = []struct {
	name  string
	value *rapid.Generator[string]
}{
	{"bool", rapid.SampledFrom([]string{"true", "false"})},
	{"int2", sqlOf("%d", rapid.Int16())}, {"int4", sqlOf("'%d'", rapid.Int32())}, {"int8", sqlOf("'%d'", rapid.Int64())},
	{"float4", rapid.OneOf(sqlOf("'%g'", rapid.Float32Range(-3e38, 3e38)), rapid.SampledFrom([]string{"'NaN'", "'-Infinity'", "'-0'", "'1e-45'"}))},
	{"float8", rapid.OneOf(sqlOf("'%g'", rapid.Float64Range(-1e308, 1e308)), rapid.SampledFrom([]string{"'NaN'", "'Infinity'", "'-0'", "'5e-324'"}))},
	{"numeric", rapid.OneOf(sqlOf("%s", rapid.StringMatching(`-?[1-9][0-9]{0,60}(\.[0-9]{1,40})?`)), rapid.SampledFrom([]string{"'NaN'", "'Infinity'", "0.00"}))},
	{"numeric(20,6)", sqlOf("%s", rapid.StringMatching(`-?[0-9]{1,14}(\.[0-9]{1,9})?`))},
	{"price", sqlOf("%s", rapid.StringMatching(`-?[0-9]{1,10}(\.[0-9]{1,2})?`))},
	{"money", sqlOf("%d::numeric / 100", rapid.Int32())},
	{"text", randomText}, {"varchar(60)", sqlOf("left(%s, 60)", randomText)}, {"char(40)", sqlOf("left(%s, 40)", randomText)},
	{"date", rapid.OneOf(sqlOf("date '2000-01-01' + %d", rapid.IntRange(-2451545, 2145031948-2451545)), infinite)},
	{"timestamp", rapid.OneOf(sqlOf("timestamp '2000-01-01' + %d * interval '1 microsecond'", randomMicros), infinite)},
	{"timestamp(2)", sqlOf("timestamp '2000-01-01' + %d * interval '1 microsecond'", randomMicros)},
	{"timestamptz", rapid.OneOf(sqlOf("timestamptz '2000-01-01 00:00+05:30' + %d * interval '1 microsecond'", randomMicros), infinite)},
	{"time", sqlOf("time '00:00' + %d * interval '1 microsecond'", rapid.Int64Range(0, 86399999999))},
	{"timetz", rapid.SampledFrom([]string{"'24:00-15:59'", "'05:54:20.000001+05:45'", "'00:00+00'"})},
	{"interval", rapid.Custom(func(t *rapid.T) string {
		return fmt.Sprintf("'%d mons %d days'::interval + %d * interval '1 microsecond'", rapid.Int32Range(-1e8, 1e8).Draw(t, "months"), rapid.Int32().Draw(t, "days"), rapid.Int64Range(-9e18, 9e18).Draw(t, "us"))
	})},
	{"uuid", sqlOf("md5('%d')::uuid", rapid.Int())},
	{"json", randomJSON}, {"jsonb", randomJSON},
	{"inet", rapid.SampledFrom([]string{"'10.0.0.1/24'", "'::1'", "'255.255.255.255'"})}, {"macaddr8", rapid.Just("'08:00:2b:01:02:03:04:05'")},
	{"bit(11)", sqlOf("%d::bit(11)", rapid.IntRange(0, 2047))}, {"varbit", sqlOf("B'%s'", rapid.StringMatching(`[01]{0,80}`))},
	{"point", sqlOf("point(%d, 0.1)", rapid.Int16())}, {"box", rapid.Just("'(1,1),(0,0)'")}, {"polygon", rapid.Just("'((0,0),(1,1),(1,0))'")},
	{"int4range", sqlOf("int4range(%d, NULL)", rapid.Int16())}, {"tstzrange", rapid.SampledFrom([]string{"'empty'", "tstzrange('2026-12-01 05:54:20.1+00', 'infinity')"})},
	{"nummultirange", rapid.SampledFrom([]string{"'{}'", "'{[1.50,2),(3,)}'"})},
	{"mood", rapid.SampledFrom([]string{"'sad'", `'it''s "ok", is it'`})}, {"xid8", sqlOf("'%d'", rapid.Uint64())}, {"pg_lsn", sqlOf("'%X/1'", rapid.Uint32())},
	{"oid", sqlOf("'%d'", rapid.Uint32())}, {"tsvector", sqlOf("to_tsvector('simple', %s)", randomText)}, {"citext", randomText}, {"ltree", rapid.Just("'a.b.c'")},
}

var (
	randomText   = sqlOf("%s", rapid.Map(rapid.StringOf(rapid.RuneFrom([]rune("{}\"\\,;()[]= \n\t\u0001nul NULé€😀/<>&'0aZ\u2028"))), sqlString))
	randomMicros = rapid.Int64Range(-200000000000000000, 9e18)
	infinite     = rapid.SampledFrom([]string{"'infinity'", "'-infinity'"})
	randomJSON   = rapid.Map(rapid.Custom(func(t *rapid.T) any { return drawJSON(t, jsonDepth) }), func(v any) string {
		text, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		return sqlString(string(text))
	})
)

// jsonDepth is how deep a random json is.
const jsonDepth = 4

// drawJSON draws anything but null, which json_populate_record reads as NULL, and an array,
// which it takes for a dimension of the array that the json may be in.
func drawJSON(t *rapid.T, depth int) any {
	switch kind := rapid.IntRange(0, 5).Draw(t, "kind"); {
	case kind == 0:
		return json.Number(rapid.StringMatching(`-?[1-9][0-9]{0,25}(\.[0-9]{1,20})?`).Draw(t, "number"))
	case kind == 1:
		return rapid.Bool().Draw(t, "bool")
	case kind < 4 || depth == 0:
		return rapid.StringOf(rapid.RuneFrom([]rune("\"\\ \n\u0001é😀aZ"))).Draw(t, "string")
	case kind == 4 && depth < jsonDepth:
		list := []any{nil}
		for range rapid.IntRange(0, 3).Draw(t, "n") {
			list = append(list, drawJSON(t, depth-1))
		}
		return list
	}
	object := map[string]any{"null": nil}
	for range rapid.IntRange(0, 3).Draw(t, "n") {
		object[rapid.StringN(0, 5, -1).Filter(func(s string) bool { return !strings.ContainsRune(s, 0) }).Draw(t, "key")] = drawJSON(t, depth-1)
	}
	return object
}

func sqlString(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

func sqlOf[T any](format string, g *rapid.Generator[T]) *rapid.Generator[string] {
	return rapid.Map(g, func(v T) string { return fmt.Sprintf(format, v) })
}

// randomTable is a table of random types, and the rows that are inserted into it.
type randomTable struct {
	types   []string // of the columns c0, c1, …
	made    string   // statements that make the types
	inserts []string
}

// drawTable draws columns of the types themselves, of arrays of them and of composite types
// made of both.
func drawTable(t *rapid.T, n int) randomTable {
	var table randomTable
	var values []*rapid.Generator[string]
	for i := range rapid.IntRange(1, 12).Draw(t, "columns") {
		name, value := drawType(t)
		if rapid.IntRange(0, 4).Draw(t, "composite") == 0 {
			inner, innerValue := drawType(t)
			composite := fmt.Sprintf("ct_%d_%d", n, i)
			table.made += fmt.Sprintf(`CREATE TYPE %s AS ("a ""1" %s, b %s, c text);`, composite, name, inner)
			a, b := value, innerValue
			name, value = composite, rapid.Custom(func(t *rapid.T) string {
				return fmt.Sprintf("ROW(%s, %s, %s)::%s", orNull(a).Draw(t, "a"), orNull(b).Draw(t, "b"), orNull(randomText).Draw(t, "c"), composite)
			})
			if rapid.Bool().Draw(t, "array") {
				name, value = arrayOf(name, value)
			}
		}
		table.types, values = append(table.types, name), append(values, orNull(value))
	}
	for id := range 6 {
		row := []string{fmt.Sprint(id)}
		for i, v := range values {
			row = append(row, fmt.Sprintf("(%s)::%s", v.Draw(t, "value"), table.types[i]))
		}
		table.inserts = append(table.inserts, strings.Join(row, ", "))
	}
	return table
}

func drawType(t *rapid.T) (name string, value *rapid.Generator[string]) {
	typ := rapid.SampledFrom(randomTypes).Draw(t, "type")
	if rapid.IntRange(0, 3).Draw(t, "array") == 0 {
		return arrayOf(typ.name, typ.value)
	}
	return typ.name, typ.value
}

func orNull(g *rapid.Generator[string]) *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		if rapid.IntRange(0, 5).Draw(t, "null") == 0 {
			return "NULL"
		}
		return g.Draw(t, "value")
	})
}

// arrayOf gives arrays of one and two dimensions, whose bounds are 1: JSON has none.
func arrayOf(name string, value *rapid.Generator[string]) (string, *rapid.Generator[string]) {
	return name + "[]", rapid.Custom(func(t *rapid.T) string {
		var elements []string
		for range 2 * rapid.IntRange(0, 2).Draw(t, "pairs") {
			elements = append(elements, fmt.Sprintf("(%s)::%s", orNull(value).Draw(t, "element"), name))
		}
		if half := len(elements) / 2; half > 0 && rapid.Bool().Draw(t, "two dimensions") {
			return fmt.Sprintf("ARRAY[[%s],[%s]]", strings.Join(elements[:half], ", "), strings.Join(elements[half:], ", "))
		}
		return fmt.Sprintf("ARRAY[%s]::%s[]", strings.Join(elements, ", "), name)
	})
}

// A row of any types is the same bytes from a snapshot and from the stream, and PostgreSQL
// reads the row out of the plain ones again.
func TestRandomRowsOfRandomTypesComeBack(t *testing.T) {
	for _, types := range []string{"plain", "debezium"} {
		t.Run(types, func(t *testing.T) { testRandomTypes(t, types) })
	}
}

func testRandomTypes(t *testing.T, types string) {
	c := caseNew(t).set(caseMap{"snapshot": caseMap{"mode": "initial"}, "format": caseMap{"types": types}})
	seed := *typesSeed
	if seed == 0 {
		seed = int(time.Now().UnixNano() % 1e9)
	}
	t.Logf("the seed is %d; -types-seed=%d repeats it", seed, seed)
	c.pg.Exec(`CREATE EXTENSION citext; CREATE EXTENSION ltree; CREATE DOMAIN price AS numeric(12,2); CREATE TYPE mood AS ENUM ('sad', 'it''s "ok", is it')`)
	const tables = 40
	again := "" // writes every row anew
	for n := range tables {
		table := rapid.Custom(func(t *rapid.T) randomTable { return drawTable(t, n) }).Example(seed + n)
		columns := []string{"id int PRIMARY KEY"}
		for i, typ := range table.types {
			columns = append(columns, fmt.Sprintf("c%d %s", i, typ))
		}
		c.pg.Exec(table.made)
		c.pg.Exec(fmt.Sprintf("CREATE TABLE r%d (%s)", n, strings.Join(columns, ", ")))
		for _, values := range table.inserts {
			c.pg.Exec(fmt.Sprintf("INSERT INTO r%d VALUES (%s)", n, values))
		}
		again += fmt.Sprintf("CREATE TEMP TABLE s%[1]d AS SELECT * FROM r%[1]d; DELETE FROM r%[1]d; INSERT INTO r%[1]d SELECT * FROM s%[1]d;", n)
	}
	c.catchUp()
	c.exec(c.session(), again)
	c.catchUp()

	read := map[string]string{} // table and id, and what the snapshot said
	rows := 0
	for _, record := range c.log().Records {
		var r struct {
			Op     string
			After  json.RawMessage
			Source struct{ Table string }
		}
		if record.Value == nil {
			continue // a tombstone
		}
		if err := json.Unmarshal(record.Value, &r); err != nil {
			t.Fatalf("%s: %v: %s", record.Where(), err, record.Value)
		}
		id := r.Source.Table + " " + string(record.Key)
		switch r.Op {
		case "r":
			read[id] = string(r.After)
			rows++
			if types != "plain" {
				continue
			}
			// What differs is what the JSON reads back as and the row; nothing if all is well.
			if differs := c.pg.Query(fmt.Sprintf("SELECT x::text, t::text FROM json_populate_record(NULL::%[1]s, $1::text::json) x LEFT JOIN %[1]s t USING (id) WHERE x::text IS DISTINCT FROM t::text", r.Source.Table), string(r.After)); len(differs) > 0 {
				t.Errorf("%s: PostgreSQL reads %s, and has %s, from %s", id, differs[0][0], differs[0][1], r.After)
			}
		case "c":
			if read[id] != string(r.After) {
				t.Errorf("%s: the snapshot has\n\t%s\nthe stream\n\t%s", id, read[id], r.After)
			}
			rows++
		}
	}
	if want := 2 * 6 * tables; rows != want {
		t.Errorf("%d rows came, want %d", rows, want)
	}
}

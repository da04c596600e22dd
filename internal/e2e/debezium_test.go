package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/harness"
)

// object is a JSON object; numbers in it are json.Number.
type object = map[string]any

// captured is a record as it stands in testdata/debezium.
type captured struct {
	Topic   string
	Key     any
	Value   any
	Headers [][2]any
	// KeyText is the key byte for byte: partition and compaction go by its bytes.
	KeyText string `json:"-"`
}

// debeziumCapture is a run of Debezium's and the configuration that gives the same
// records.
type debeziumCapture struct {
	file     string
	debezium caseMap
	format   caseMap
	// differ edits what Debezium sent into what we send: each entry is a difference that
	// docs/debezium.md lists.
	differ []difference
}

// difference changes a row, before or after, of a table.
type difference struct {
	table string // as in source.schema and source.table
	row   func(r *debeziumRow)
}

// debeziumRow is a row of a captured record.
type debeziumRow struct {
	op, side string
	columns  object
}

// put sets columns to what is in the database and Debezium leaves out. NULLs of a row
// with nothing but the key are NULL.
func (r *debeziumRow) put(values map[string]object) {
	for column, byID := range values {
		r.columns[column] = byID[fmt.Sprint(r.columns["id"])]
	}
}

// otherwise sets a column that has the value was to the value is.
func (r *debeziumRow) otherwise(column string, was, is any) {
	if value, there := r.columns[column]; there && fmt.Sprint(value) == fmt.Sprint(was) {
		r.columns[column] = is
	}
}

// rows gives the same value for rows of rows.sql and their copies of changes.sql, whose
// id is 100 higher.
func rowsByID(values ...any) object {
	o := object{}
	for i, v := range values {
		o[fmt.Sprint(i+1)], o[fmt.Sprint(i+101)] = v, v
	}
	return o
}

// The differences that do not depend on Debezium's options.
var debeziumDiffers = []difference{
	// Types that Debezium drops.
	{"public.nets", func(r *debeziumRow) {
		r.put(map[string]object{"lsn": rowsByID("0/16B3748", nil), "x8": rowsByID("771", nil)})
	}},
	{"public.geos", func(r *debeziumRow) {
		for column, text := range map[string]string{
			"ln": "{1,2,3}", "ls": "[(0,0),(1,1)]", "bx": "(2,2),(0,0)", "pa": "[(0,0),(1,1),(2,0)]", "po": "((0,0),(1,1),(2,0))", "ci": "<(1,2),3>",
		} {
			r.put(map[string]object{column: rowsByID(text, nil)})
		}
	}},
	{"public.ranges", func(r *debeziumRow) {
		r.put(map[string]object{"mr": rowsByID("{[1,3),[5,7)}", "{}")})
	}},
	{"public.comps", func(r *debeziumRow) {
		r.put(map[string]object{
			"a":  rowsByID(object{"street": `Main "St", 1`, "no": json.Number("5")}, nil),
			"aa": rowsByID([]any{object{"street": "x", "no": json.Number("1")}, nil, object{"street": nil, "no": json.Number("2")}}, nil),
		})
	}},
	// A name is null in its stream.
	{"public.texts", func(r *debeziumRow) {
		if r.side == "after" {
			r.put(map[string]object{"nm": rowsByID("name", "", nil, "n")})
		}
	}},
	// Arrays of two dimensions lose their elements.
	{"public.arrays", func(r *debeziumRow) {
		one, two, three, four := json.Number("1"), json.Number("2"), json.Number("3"), json.Number("4")
		r.otherwise("i2", "[<nil> <nil>]", []any{[]any{one, two}, []any{three, four}})
	}},
	// Values of an old row that are not in the WAL, where the column is NOT NULL or has a
	// default.
	{"public.nums", func(r *debeziumRow) {
		if r.side == "before" {
			r.columns["s"] = nil
		}
	}},
	{"public.idx_ident", func(r *debeziumRow) {
		if r.side == "before" {
			r.columns["id"] = nil
		}
	}},
	{"public.defs", func(r *debeziumRow) {
		if r.side == "before" {
			for column := range r.columns {
				if column != "id" {
					r.columns[column] = nil
				}
			}
		}
	}},
	// Defaults in place of NULL.
	{"public.defs", func(r *debeziumRow) {
		if id := fmt.Sprint(r.columns["id"]); id == "1" || id == "101" {
			for _, column := range []string{"a", "t", "c", "n"} {
				r.columns[column] = nil
			}
		}
	}},
	{"public.ddl", func(r *debeziumRow) {
		if id := fmt.Sprint(r.columns["id"]); id == "5" || id == "6" {
			r.columns["c"] = nil
		}
	}},
}

// snapshotDates are the differences of dates that only Debezium's snapshot has, which
// counts in the Julian calendar before 1582, and cuts infinities in another way than its
// stream.
func snapshotDates(wrong, right [4]any) difference {
	return difference{"public.times", func(r *debeziumRow) {
		if r.op == "r" {
			for i := range wrong {
				r.otherwise("d", wrong[i], right[i])
			}
		}
	}}
}

var (
	daysWrong = [4]any{-622191234, -625821272, -703383, -141422}
	daysRight = [4]any{json.Number("-2147472692"), json.Number("-2147472691"), json.Number("-735160"), json.Number("-141432")}
)

// A numeric(5,-2) has a scale of -2, not of 2046, and NaN is not NULL.
var preciseDiffers = difference{"public.nums", func(r *debeziumRow) {
	if r.side == "before" {
		return
	}
	r.put(map[string]object{"nneg": rowsByID("ew==", "/w==", "AA==", nil, "AQ==", "AQ==")})
	id := fmt.Sprint(r.columns["id"])
	if id == "201" {
		r.columns["nneg"] = "/w=="
	}
	if id == "2" || id == "102" || id == "201" {
		r.columns["n"] = "NaN"
	}
}}

var debeziumCaptures = []debeziumCapture{
	{file: "default", differ: []difference{preciseDiffers, snapshotDates(daysWrong, daysRight)}},
	{file: "schemas", debezium: caseMap{"schemas-enable": true}, differ: []difference{preciseDiffers, snapshotDates(daysWrong, daysRight)}},
	{
		file:     "strings",
		debezium: caseMap{"decimal-handling": "string", "time-precision": "isostring", "interval-handling": "string"},
		differ: []difference{
			{"public.nums", func(r *debeziumRow) {
				if text, ok := r.columns["nneg"].(string); ok {
					r.columns["nneg"], _, _ = strings.Cut(text, ".")
				}
			}},
			// Infinities become dates, and 24:00 becomes 00:00.
			snapshotDates([4]any{"+292278994-08-16Z", "+292269055-12-02Z", "0044-03-15Z", "1582-10-20Z"}, [4]any{"infinity", "-infinity", "-0043-03-15Z", "1582-10-10Z"}),
			{"public.times", func(r *debeziumRow) {
				r.otherwise("d", "-5877611-06-21Z", "infinity")
				r.otherwise("d", "-5877611-06-22Z", "-infinity")
				for _, column := range []string{"ts", "ts0", "ts3"} {
					r.otherwise(column, "+294247-01-10T04:00:25.2Z", "infinity")
					r.otherwise(column, "-290308-12-21T19:59:27.6Z", "-infinity")
				}
				if id := fmt.Sprint(r.columns["id"]); id == "2" || id == "102" {
					r.otherwise("t", "00:00:00Z", "24:00:00Z")
				}
			}},
			{"public.arrays", func(r *debeziumRow) {
				if days, ok := r.columns["da"].([]any); ok && len(days) == 2 {
					days[1] = "infinity"
				}
			}},
		},
	},
	{
		file:     "microhex",
		debezium: caseMap{"time-precision": "connect", "decimal-handling": "double", "binary-handling": "hex", "hstore-handling": "map"},
		format:   caseMap{"tombstones": false},
		differ:   []difference{snapshotDates(daysWrong, daysRight)},
	},
}

// editHeaders makes JSON of a key with a date of Connect's own type, of which Connect's
// header converter makes a text that is none.
func editHeaders(headers [][2]any) {
	for i := range headers {
		h := &headers[i]
		if value, _ := h[1].(object); value["text"] != nil {
			text := strings.ReplaceAll(fmt.Sprint(value["text"]), "2026-02-02", "20486")
			d := json.NewDecoder(strings.NewReader(text))
			d.UseNumber()
			var key any
			if d.Decode(&key) == nil {
				h[1] = key
			}
		}
	}
}

// Our records are those that Debezium sent for the same statements, compared as parsed
// JSON: keys, values, source, headers and their order in each topic. What depends on the
// run is left out, and so are the differences above. Rows of Debezium's snapshot are
// compared with the same rows when they are inserted.
func TestRecordsAreThoseOfDebezium(t *testing.T) {
	for _, capture := range debeziumCaptures {
		t.Run(capture.file, func(t *testing.T) {
			c := caseNew(t)
			c.set(caseMap{
				"source": caseMap{
					"messages": []string{"pre"}, "keyless": "inserts",
					"keys": caseMap{"public.comp_key": []string{"b", "a", "c"}}, // as PRIMARY KEY has them
				},
				"topics": caseMap{"partitions": 1},
				"format": caseMap{"types": "debezium", "debezium": capture.debezium},
			})
			if capture.format != nil {
				c.set(caseMap{"format": capture.format})
			}
			conn := c.session()
			c.exec(conn, mustText(t, "schema.sql"))
			c.start()
			c.exec(conn, mustText(t, "rows.sql"))
			for _, statement := range debeziumStatements(t) {
				c.exec(conn, statement)
			}
			c.waitConfirmed(c.walEnd())

			capture.differ = append(slices.Clone(capture.differ), generatedColumn(harness.DefaultMajor(t)))
			want := mustCaptured(t, c.name, capture)
			for _, topic := range slices.Sorted(maps.Keys(want)) {
				got := parsedRecords(t, c.kafka.Committed(t, topic))
				if capture.file == "schemas" { // the file has some of the records only
					for _, r := range want[topic] {
						if best := closestRecord(r, got); !cmp.Equal(r, best) {
							t.Errorf("%s (-Debezium +walrelay):\n%s", topic, cmp.Diff(r, best))
						}
					}
					continue
				}
				for i := range max(len(want[topic]), len(got)) {
					if i >= len(got) || i >= len(want[topic]) {
						t.Errorf("%s: %d records, Debezium has %d", topic, len(got), len(want[topic]))
						break
					}
					if diff := cmp.Diff(want[topic][i], got[i]); diff != "" {
						t.Errorf("%s, record %d (-Debezium +walrelay):\n%s", topic, i, diff)
					}
				}
			}
		})
	}
}

// closestRecord is the record that is r, else one of the same key and kind.
func closestRecord(r captured, among []captured) (closest captured) {
	for _, other := range among {
		if cmp.Equal(r, other) {
			return other
		}
		value, _ := payload(r.Value)
		otherValue, _ := payload(other.Value)
		if cmp.Equal(r.Key, other.Key) && value["op"] == otherValue["op"] && closest.Topic == "" {
			closest = other
		}
	}
	return closest
}

// generatedColumn is the difference of comps.g, which pgoutput sends from PostgreSQL 18
// on and which Debezium, here on 17, has in its snapshot only.
func generatedColumn(major int) difference {
	return difference{"public.comps", func(r *debeziumRow) {
		id, _ := r.columns["id"].(json.Number).Int64()
		delete(r.columns, "g")
		if major >= 18 {
			r.columns["g"] = json.Number(fmt.Sprint(2 * id))
		}
	}}
}

// droppedColumns are those of types that Debezium drops, so that its schemas lack them.
var droppedColumns = []string{"lsn", "x8", "ln", "ls", "bx", "pa", "po", "ci", "mr", "a", "aa", "g"}

// editSchema takes off what our schemas of a value say otherwise: which columns may be
// null, which is not in the WAL, and defaults; and columns that only ours have.
func editSchema(schema object, table string) {
	fields, _ := schema["fields"].([]any)
	for _, f := range fields {
		side, _ := f.(object)
		switch {
		case side["field"] == "source" && table == "message":
			// Of a message that is not transactional, the WAL has no time.
			member, _ := side["fields"].([]any)[3].(object)
			member["optional"] = true
			continue
		case side["field"] != "before" && side["field"] != "after":
			continue
		}
		columns, _ := side["fields"].([]any)
		side["fields"] = slices.DeleteFunc(columns, func(f any) bool {
			column, _ := f.(object)
			name := column["field"]
			delete(column, "optional")
			delete(column, "default")
			if parameters, _ := column["parameters"].(object); parameters["scale"] == "2046" {
				parameters["scale"] = "-2"
			}
			if items, _ := column["items"].(object); items["name"] == "io.debezium.data.Enum" {
				items["optional"] = true // an element may be NULL
			}
			has := func(dropped string) bool {
				return name == dropped && (strings.HasSuffix(fmt.Sprint(side["name"]), "."+table+".Value"))
			}
			return slices.ContainsFunc(droppedColumns, has) && table != "public.defs" && table != "public.ddl" && table != "public.nopk" && table != "public.nopk_full" && table != "public.comp_key"
		})
	}
}

// debeziumStatements are those of changes.sql, by lines: of one string with them all,
// the server would make one transaction.
func debeziumStatements(t *testing.T) (statements []string) {
	t.Helper()
	for line := range strings.Lines(mustText(t, "changes.sql")) {
		if strings.HasPrefix(line, "BEGIN") {
			statements = append(statements, line)
			continue
		}
		for statement := range strings.SplitSeq(line, ";") {
			if statement = strings.TrimSpace(statement); statement != "" {
				statements = append(statements, statement)
			}
		}
	}
	return statements
}

func mustText(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "debezium", file))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// mustCaptured reads a capture, edits it by its differences and gives its records by
// topic, with our prefix.
func mustCaptured(t *testing.T, prefix string, capture debeziumCapture) map[string][]captured {
	t.Helper()
	byTopic := map[string][]captured{}
	ours := strings.NewReplacer(`"app.`, `"`+prefix+`.`, `"app"`, `"`+prefix+`"`)
	lines := bufio.NewScanner(strings.NewReader(ours.Replace(mustText(t, capture.file+".jsonl"))))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r captured
		var raw struct{ Key json.RawMessage }
		mustJSON(t, lines.Bytes(), &r)
		mustJSON(t, lines.Bytes(), &raw)
		if r.KeyText = string(raw.Key); r.Key == nil {
			r.KeyText = ""
		}
		table := strings.TrimPrefix(r.Topic, prefix+".")
		// A partitioned table is one topic, as publish.via.partition.root has it in one
		// capture; but for its snapshot, which reads the partitions once more.
		if strings.HasPrefix(table, "public.parted") && (capture.file != "strings" || table != "public.parted") {
			continue
		}
		edit(&r, table, slices.Concat(debeziumDiffers, capture.differ))
		withoutRun(&r)
		byTopic[r.Topic] = append(byTopic[r.Topic], r)
	}
	if len(byTopic) < 20 {
		t.Fatalf("%d topics in %s.jsonl", len(byTopic), capture.file)
	}
	return byTopic
}

// edit applies the differences of a table to the rows of a record.
func edit(r *captured, table string, differ []difference) {
	editHeaders(r.Headers)
	value, schema := payload(r.Value)
	if value == nil {
		return
	}
	for _, side := range []string{"before", "after"} {
		columns, _ := value[side].(object)
		if columns == nil {
			continue
		}
		row := &debeziumRow{op: fmt.Sprint(value["op"]), side: side, columns: columns}
		for _, d := range differ {
			if d.table == table {
				d.row(row)
			}
		}
	}
	if schema != nil {
		editSchema(schema, table)
	}
}

// payload gives what a value says, and its schema if there is one.
func payload(v any) (value, schema object) {
	value, _ = v.(object)
	if inner, ok := value["payload"].(object); ok {
		schema, _ = value["schema"].(object)
		return inner, schema
	}
	return value, nil
}

// withoutRun takes off what depends on the run, after it has been looked at for its type.
func withoutRun(r *captured) {
	value, _ := payload(r.Value)
	if value == nil {
		return
	}
	for _, name := range []string{"ts_ms", "ts_us", "ts_ns"} {
		dropNumber(value, name)
	}
	if value["op"] == "r" { // ours were inserted
		value["op"] = "c"
	}
	value["transaction"] = nil // only Debezium's provide.transaction.metadata has it
	source, _ := value["source"].(object)
	for _, name := range []string{"ts_ms", "ts_us", "ts_ns", "lsn", "txId"} {
		dropNumber(source, name)
	}
	if source["snapshot"] != "false" {
		source["snapshot"] = "false"
	}
	if sequence, ok := source["sequence"].(string); ok {
		var pair []*string
		if json.Unmarshal([]byte(sequence), &pair) == nil && len(pair) == 2 {
			source["sequence"] = "pair"
		}
	}
	source["db"] = "db"
}

// dropNumber takes a member off; one that is neither a number nor null stays to be seen.
func dropNumber(o object, name string) {
	_, number := o[name].(json.Number)
	if value, there := o[name]; there && (number || value == nil) {
		o[name] = "number"
	}
}

// parsedRecords are our records in the form of a capture.
func parsedRecords(t *testing.T, records []*kgo.Record) []captured {
	t.Helper()
	var all []captured
	for _, record := range records {
		r := captured{Topic: record.Topic, Headers: [][2]any{}, KeyText: string(record.Key)}
		mustJSON(t, record.Key, &r.Key)
		mustJSON(t, record.Value, &r.Value)
		for _, h := range record.Headers {
			if h.Key == "position" { // an addition
				continue
			}
			var value any
			mustJSON(t, h.Value, &value)
			r.Headers = append(r.Headers, [2]any{h.Key, value})
		}
		if value, schema := payload(r.Value); schema != nil {
			source, _ := value["source"].(object)
			editSchema(schema, fmt.Sprintf("%s.%s", source["schema"], source["table"]))
		}
		withoutRun(&r)
		all = append(all, r)
	}
	return all
}

// mustJSON reads JSON with its digits; nothing at all is null.
func mustJSON(t *testing.T, text []byte, v any) {
	t.Helper()
	if text == nil {
		return
	}
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber()
	if err := d.Decode(v); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	switch v := v.(type) {
	case *any:
		*v = withFloats(*v)
	case *captured:
		v.Key, v.Value = withFloats(v.Key), withFloats(v.Value)
	}
}

// withFloats makes floats of numbers with a fraction or an exponent: 1.0E30 is 1e+30.
func withFloats(v any) any {
	switch v := v.(type) {
	case json.Number:
		if strings.ContainsAny(v.String(), ".eE") {
			f, _ := v.Float64()
			return f
		}
	case object:
		for name, member := range v {
			v[name] = withFloats(member)
		}
	case []any:
		for i, element := range v {
			v[i] = withFloats(element)
		}
	}
	return v
}

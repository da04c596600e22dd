package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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
	major  int // of the PostgreSQL that ours are of
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

// hasNegativeScales tells whether a numeric can have a negative scale.
func hasNegativeScales(major int) bool { return major >= 15 }

// negativeScale is the difference of nums.nneg, whose scale is 0 before PostgreSQL 15.
func negativeScale(major int) difference {
	return difference{"public.nums", func(r *debeziumRow) {
		if !hasNegativeScales(major) {
			unscaled := map[string]string{"ew==": "MAw=", "/w==": "nA==", "AQ==": "ZA=="} // times 100
			if wide, there := unscaled[fmt.Sprint(r.columns["nneg"])]; there {
				r.columns["nneg"] = wide
			}
		}
	}}
}

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
// JSON: keys, values, source, headers and their order in each topic, of rows that were
// there before the start and are read, and of the same rows inserted beside the stream.
// What depends on the run is left out, and so are the differences above.
func TestRecordsAreThoseOfDebezium(t *testing.T) {
	harness.EachMajor(t, func(t *testing.T, major int) {
		for _, capture := range debeziumCaptures {
			capture.differ, capture.major = append(slices.Clone(capture.differ), generatedColumn(major), negativeScale(major)), major
			t.Run(capture.file+" with the rows streamed", func(t *testing.T) {
				c := newDebeziumCase(t, capture)
				c.start()
				c.exec(c.session(), mustText(t, "rows.sql"))
				c.compareChanges(capture, true)
			})
			t.Run(capture.file+" with the rows read", func(t *testing.T) {
				c := newDebeziumCase(t, capture)
				c.set(caseMap{"snapshot": caseMap{"mode": "initial"}})
				c.exec(c.session(), mustText(t, "rows.sql"))
				c.catchUp()
				c.start()
				c.compareChanges(capture, false)
			})
		}
	})
}

// debeziumCase is a case whose database has the tables of the captures.
type debeziumCase struct{ *caseRun }

func newDebeziumCase(t *testing.T, capture debeziumCapture) debeziumCase {
	t.Helper()
	c := debeziumCase{caseNew(t, harness.Major(capture.major))}
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
	schema := mustText(t, "schema.sql")
	if !hasNegativeScales(capture.major) {
		schema = strings.Replace(schema, "numeric(5,-2)", "numeric(5)", 1)
	}
	c.exec(c.session(), schema)
	return c
}

// compareChanges runs changes.sql beside the stream, and compares all that was delivered
// with the capture; streamed says that its rows, which Debezium read, were inserted
// beside our stream.
func (c debeziumCase) compareChanges(capture debeziumCapture, streamed bool) {
	t := c.t
	t.Helper()
	conn := c.session()
	for _, statement := range debeziumStatements(t) {
		c.exec(conn, statement)
	}
	c.waitConfirmed(c.walEnd())

	want := mustCaptured(t, c.name, capture, streamed)
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
}

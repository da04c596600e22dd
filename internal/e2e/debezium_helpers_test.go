package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kgo"
)

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

// droppedColumns are those of types that Debezium drops, so that its schemas lack them,
// and the generated one, which our schemas have from PostgreSQL 18 on.
var droppedColumns = map[string][]string{
	"public.nets": {"lsn", "x8"}, "public.geos": {"ln", "ls", "bx", "pa", "po", "ci"},
	"public.ranges": {"mr"}, "public.comps": {"a", "aa", "g"},
}

// ourSchema makes of Debezium's schema of a value what ours says otherwise: no column
// but those of the key is known to be NOT NULL or has a default, for before may lack it.
func ourSchema(schema object, table string, key object, major int) {
	fields, _ := schema["fields"].([]any)
	for _, f := range fields {
		side, _ := f.(object)
		columns, _ := side["fields"].([]any)
		switch {
		case side["field"] == "source" && table == "message":
			// Of a message that is not transactional, the WAL has no time.
			member, _ := columns[3].(object)
			member["optional"] = true
			continue
		case side["field"] != "before" && side["field"] != "after":
			continue
		}
		side["fields"] = withoutColumns(columns, table)
		for _, f := range columns {
			column, _ := f.(object)
			_, isKey := key[fmt.Sprint(column["field"])]
			column["optional"] = !isKey
			delete(column, "default")
			if parameters, _ := column["parameters"].(object); parameters["scale"] == "2046" {
				parameters["scale"] = "0"
				if hasNegativeScales(major) {
					parameters["scale"] = "-2"
				}
			}
			if items, _ := column["items"].(object); items["name"] == "io.debezium.data.Enum" {
				items["optional"] = true // an element may be NULL
			}
		}
	}
}

// withoutDropped takes the columns that Debezium drops off our schema of a value.
func withoutDropped(schema object, table string) {
	fields, _ := schema["fields"].([]any)
	for _, f := range fields {
		side, _ := f.(object)
		if columns, _ := side["fields"].([]any); side["field"] == "before" || side["field"] == "after" {
			side["fields"] = withoutColumns(columns, table)
		}
	}
}

func withoutColumns(columns []any, table string) []any {
	return slices.DeleteFunc(slices.Clone(columns), func(f any) bool {
		column, _ := f.(object)
		return slices.Contains(droppedColumns[table], fmt.Sprint(column["field"]))
	})
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
func mustCaptured(t *testing.T, prefix string, capture debeziumCapture, streamed bool) map[string][]captured {
	t.Helper()
	byTopic, keys := map[string][]captured{}, map[string]object{} // a TRUNCATE has no key
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
		if key, _ := payload(r.Key); key != nil {
			keys[table] = key
		}
		edit(&r, table, capture, keys[table])
		withoutRun(&r)
		ourEnvelope(&r, streamed)
		byTopic[r.Topic] = append(byTopic[r.Topic], r)
	}
	if len(byTopic) < 20 {
		t.Fatalf("%d topics in %s.jsonl", len(byTopic), capture.file)
	}
	return byTopic
}

// edit applies the differences of a table, whose keys are like key, to a record.
func edit(r *captured, table string, capture debeziumCapture, key object) {
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
		for _, d := range slices.Concat(debeziumDiffers, capture.differ) {
			if d.table == table {
				d.row(row)
			}
		}
	}
	if schema != nil {
		ourSchema(schema, table, key, capture.major)
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

// withoutRun takes off what depends on the run; that it is a number, or null, stays.
func withoutRun(r *captured) {
	value, _ := payload(r.Value)
	if value == nil {
		return
	}
	for _, name := range []string{"ts_ms", "ts_us", "ts_ns"} {
		dropNumber(value, name)
	}
	source, _ := value["source"].(object)
	for _, name := range []string{"ts_ms", "ts_us", "ts_ns", "lsn", "txId"} {
		dropNumber(source, name)
	}
	source["sequence"] = digits.ReplaceAllString(fmt.Sprint(source["sequence"]), "number")
	source["db"] = "db"
}

var digits = regexp.MustCompile(`\d+`)

// dropNumber replaces a number, of which null differs.
func dropNumber(o object, name string) {
	if _, number := o[name].(json.Number); number {
		o[name] = "number"
	}
}

// ourEnvelope makes of what Debezium says around the rows what we say; streamed says that
// we have streamed what it has read.
func ourEnvelope(r *captured, streamed bool) {
	value, _ := payload(r.Value)
	if value == nil {
		return
	}
	value["transaction"] = nil // only Debezium's provide.transaction.metadata has it
	source, _ := value["source"].(object)
	commit := `["number","number"]`
	switch {
	case value["op"] == "r" && streamed:
		value["op"], source["snapshot"], source["sequence"] = "c", "false", commit
	case value["op"] == "r":
		// Chunks beside a stream have no first and last, and are no transaction's.
		source["snapshot"], source["txId"] = "true", nil
	case value["op"] == "m" && source["txId"] == nil:
		// Of a message that is not transactional, the WAL has no time.
		value["ts_ms"], source["ts_ms"], source["ts_us"], source["ts_ns"] = nil, nil, nil, nil
	default:
		source["sequence"] = commit // the first transaction's has a null
	}
}

// checkOurs looks at what our records have beside Debezium's: the header position, and
// times and a sequence that follow from the change.
func checkOurs(t *testing.T, record *kgo.Record, r *captured) {
	t.Helper()
	var positions []string
	for _, h := range record.Headers {
		if h.Key == "position" {
			positions = append(positions, string(h.Value))
		}
	}
	if len(positions) != 1 {
		t.Errorf("%s, offset %d: headers position %q, want one", record.Topic, record.Offset, positions)
		return
	}
	value, _ := payload(r.Value)
	if value == nil {
		return
	}
	source, _ := value["source"].(object)
	for _, name := range []string{"ts_ms", "ts_us", "ts_ns"} {
		if at, there := value[name]; there && at != source[name] {
			t.Errorf("%s, offset %d: %s is %v, in source %v", record.Topic, record.Offset, name, at, source[name])
		}
	}
	hex, _, _ := strings.Cut(positions[0], "-")
	lsn, err := strconv.ParseUint(hex, 16, 64)
	if err != nil {
		t.Errorf("%s, offset %d: position %q", record.Topic, record.Offset, positions[0])
		return
	}
	want := fmt.Sprintf(`["%d","%v"]`, lsn, source["lsn"])
	if value["op"] == "r" {
		want = fmt.Sprintf(`[null,"%d"]`, lsn)
	}
	if source["sequence"] != want {
		t.Errorf("%s, offset %d: the sequence %v, want %s", record.Topic, record.Offset, source["sequence"], want)
	}
	if value["op"] == "r" && fmt.Sprint(source["lsn"]) != fmt.Sprint(lsn) {
		t.Errorf("%s, offset %d: source.lsn %v, want that of the position %s", record.Topic, record.Offset, source["lsn"], positions[0])
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
			withoutDropped(schema, fmt.Sprintf("%s.%s", source["schema"], source["table"]))
		}
		checkOurs(t, record, &r)
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

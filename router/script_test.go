package router

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

var rewrite = flag.Bool("rewrite", false, "write what the router does into testdata, to be reviewed as a diff")

// TestRouteScripts routes the changes of testdata/route/*.txtar and compares every
// record with the file's section `want`. The section `input` has a line for each thing:
//
//	option NAME VALUE…        see routeScript.option; before the first relation
//	option debezium K=V…      see routeScript.debezium
//	option columns T K=V…     see routeScript.columns
//	relation T SCHEMA NAME I  table T, I its replica identity (d, n, f or i), its columns in the indented lines:
//	  NAME TYPE [key] [pk]    key: part of the replica identity; pk: of the primary key that the catalog tells
//	begin XID LSN TIME        a source transaction with this commit LSN and time; its changes have seq 0, 1, …
//	insert T VALUE…           null is NULL, ~ an unchanged TOAST value, "…" a Go string
//	update T [key VALUE…|old VALUE…] new VALUE…
//	delete T key|old VALUE…
//	truncate T
//	message PREFIX CONTENT    in the transaction; after `commit` one that is not transactional
//	commit
//	snapshot LSN TIME         where the following snapshot rows stand, and when they were read
//	read T VALUE…             a snapshot row
//	anew T                    the truncate before T is read anew
//
// `want` repeats each change and has below it what became of it: records as topic and
// place, key, value and headers; counts; or the error.
func TestRouteScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/route/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("find scripts: %v, %d files", err, len(files))
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if archive.Files[0].Name != "input" {
				t.Fatalf("the first section is %q, not input", archive.Files[0].Name)
			}
			got := runRouteScript(t, string(archive.Files[0].Data))
			if *rewrite {
				archive.Files = []txtar.File{archive.Files[0], {Name: "want", Data: []byte(got)}}
				if err := os.WriteFile(file, txtar.Format(archive), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if len(archive.Files) != 2 || archive.Files[1].Name != "want" {
				t.Fatal("there is no section want; run with -rewrite and review it")
			}
			if diff := cmp.Diff(string(archive.Files[1].Data), got); diff != "" {
				t.Errorf("records (-want +got):\n%s", diff)
			}
		})
	}
}

// fixedTopics is a Topics of topics that are all there, unless absent.
type fixedTopics struct {
	topics map[string]*Topic
	absent map[string]bool
}

func newFixedTopics() *fixedTopics {
	return &fixedTopics{topics: map[string]*Topic{}, absent: map[string]bool{}}
}

func (f *fixedTopics) Lookup(name string) *Topic {
	if f.absent[name] {
		return nil
	}
	return f.get(name)
}

func (f *fixedTopics) get(name string) *Topic {
	t := f.topics[name]
	if t == nil {
		t = &Topic{Name: name, Partitions: 6, MaxMessageBytes: 1048588}
		f.topics[name] = t
	}
	return t
}

// testOptions are the defaults of the configuration, as far as the router sees them.
func testOptions() Options {
	return Options{
		Name: "shop", Database: "shop", Prefix: "shop",
		Tables:          func(string, string) bool { return true },
		Messages:        func(string) bool { return true },
		TableTopic:      mustTableTopics("{prefix}.{schema}.{table}"),
		MessageTopic:    "shop.message",
		Tombstones:      true,
		DeadLetterTopic: "shop.dead-letter",
		DeadLetterOn:    []string{ReasonOversize, ReasonRoute, ReasonEncode, ReasonMalformed},
	}
}

func mustTableTopics(template string) func(schema, table string) string {
	f, err := TableTopics(template, "shop")
	if err != nil {
		panic(err)
	}
	return f
}

// routeScript is a script under way.
type routeScript struct {
	t         *testing.T
	o         Options
	topics    *fixedTopics
	router    *Router
	relations map[string]*replication.Relation
	chunks    map[string]*replication.Relation // the same, as the snapshot's readers describe them
	read      replication.ReadPoint
	last      *replication.Relation // whose columns are being read
	txn       *replication.Transaction
	seq       uint64
	lsn       checkpoint.LSN
	out       strings.Builder
}

func runRouteScript(t *testing.T, input string) string {
	t.Helper()
	s := &routeScript{t: t, o: testOptions(), topics: newFixedTopics(), relations: map[string]*replication.Relation{}, chunks: map[string]*replication.Relation{}, lsn: 0x1A2B300}
	for n, line := range strings.Split(input, "\n") {
		words := scriptWords(t, line)
		if len(words) == 0 || words[0].text == "#" {
			continue
		}
		if err := s.line(line, words); err != nil {
			t.Fatalf("line %d, %s: %v", n+1, line, err)
		}
	}
	return s.out.String()
}

// word is a word of a line; quoted tells null from "null".
type word struct {
	text   string
	quoted bool
}

func scriptWords(t *testing.T, line string) (words []word) {
	t.Helper()
	for {
		line = strings.TrimLeft(line, " ")
		if line == "" {
			return words
		}
		if line[0] == '"' {
			quoted, err := strconv.QuotedPrefix(line)
			if err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			text, _ := strconv.Unquote(quoted)
			words = append(words, word{text, true})
			line = line[len(quoted):]
			continue
		}
		text, rest, _ := strings.Cut(line, " ")
		words = append(words, word{text, false})
		line = rest
	}
}

func (s *routeScript) line(line string, w []word) error {
	if strings.HasPrefix(line, "  ") {
		return s.column(w)
	}
	switch w[0].text {
	case "option":
		return s.option(w[1].text, w[2:])
	case "relation":
		s.last = &replication.Relation{
			OID: uint32(16384 + len(s.relations)), Schema: w[2].text, Name: w[3].text,
			Identity: replication.ReplicaIdentity(w[4].text[0]),
		}
		if old := s.relations[w[1].text]; old != nil {
			s.last.OID = old.OID // another shape of the same table
		}
		s.relations[w[1].text] = s.last
		delete(s.chunks, w[1].text)
		return nil
	case "begin":
		return s.begin(w)
	case "snapshot":
		return s.snapshot(w)
	case "commit":
		s.txn = nil
		return nil
	}
	c, err := s.change(w)
	if err != nil {
		return err
	}
	s.route(line, c)
	return nil
}

var scriptTypes = map[string]uint32{
	"bool": 16, "bytea": 17, "int8": 20, "int4": 23, "text": 25, "json": 114, "float8": 701, "numeric": 1700,
	"timestamp": 1114, "timestamptz": 1184, "uuid": 2950, "jsonb": 3802, "text[]": 1009, "unknown": 99999,
}

func (s *routeScript) column(w []word) error {
	oid, ok := scriptTypes[w[1].text]
	if !ok {
		return fmt.Errorf("no type %s", w[1].text)
	}
	c := replication.Column{Name: w[0].text, TypeOID: oid, TypeMod: -1}
	for _, mark := range w[2:] {
		switch mark.text {
		case "key":
			c.Identity = true
		case "pk":
			s.last.PrimaryKey = append(s.last.PrimaryKey, len(s.last.Columns))
		default:
			return fmt.Errorf("no flag %s", mark.text)
		}
	}
	s.last.Columns = append(s.last.Columns, c)
	return nil
}

func (s *routeScript) option(name string, w []word) error {
	text := func(i int) string { return w[i].text }
	switch name {
	case "tombstones":
		s.o.Tombstones = text(0) == "true"
	case "toast-marker":
		marker := text(0)
		s.o.ToastMarker = &marker
	case "debezium":
		return s.debezium(w)
	case "unwrapped":
		s.o.Unwrapped = true
	case "deleted-field":
		s.o.DeletedField = true
	case "keys":
		if s.o.Keys == nil {
			s.o.Keys = map[string][]string{}
		}
		s.o.Keys[text(0)] = strings.Split(text(1), ",")
	case "columns":
		return s.columns(w)
	case "table-topic":
		s.o.TableTopic = mustTableTopics(text(0))
	case "exclude":
		s.o.Tables = func(schema, table string) bool { return schema+"."+table != text(0) }
	case "messages":
		s.o.Messages = func(prefix string) bool { return prefix == text(0) }
	case "dead-letter-on":
		s.o.DeadLetterOn = strings.Split(text(0), ",")
	case "max-message-bytes":
		n, err := strconv.Atoi(text(1))
		s.topics.get(text(0)).MaxMessageBytes = int32(n)
		return err
	case "compacted":
		s.topics.get(text(0)).Compacted = true
	case "outbox":
		o := OutboxOptions{}
		o.Schema, o.Table, _ = strings.Cut(text(0), ".")
		for _, v := range w[1:] {
			switch key, value, _ := strings.Cut(v.text, "="); key {
			case "topic":
				o.Topic = value
			case "null-payload":
				o.NullPayload = value
			default:
				return fmt.Errorf("no outbox option %s", key)
			}
		}
		s.o.Outbox = append(s.o.Outbox, o)
	default:
		return fmt.Errorf("no option %s", name)
	}
	return nil
}

// debezium reads OPTION=VALUE… of format.debezium.
func (s *routeScript) debezium(w []word) error {
	d := &DebeziumOptions{}
	for _, v := range w {
		switch key, value, _ := strings.Cut(v.text, "="); key {
		case "schemas":
			d.Schemas = true
		case "binary":
			d.Binary = value
		case "decimal":
			d.Decimal = value
		case "placeholder":
			d.Unavailable = value
		default:
			return fmt.Errorf("no Debezium option %s", key)
		}
	}
	s.o.Debezium = d
	return nil
}

func (s *routeScript) begin(w []word) error {
	xid, err := strconv.ParseUint(w[1].text, 10, 64)
	if err != nil {
		return err
	}
	lsn, err := checkpoint.ParseLSN(w[2].text)
	if err != nil {
		return err
	}
	at, err := time.Parse(time.RFC3339Nano, w[3].text)
	s.txn = &replication.Transaction{XID: checkpoint.XID(xid), CommitLSN: lsn, CommitTime: at.UTC()}
	s.seq, s.lsn = 0, lsn-0x100
	return err
}

func (s *routeScript) snapshot(w []word) (err error) {
	if s.read.CommitLSN, err = checkpoint.ParseLSN(w[1].text); err != nil {
		return err
	}
	at, err := time.Parse(time.RFC3339Nano, w[2].text)
	s.read.Time = at.UTC()
	return err
}

// readChange makes the change of a snapshot's line. Its relation is another pointer
// than the stream's, as in the relay.
func (s *routeScript) readChange(w []word) (*replication.Change, error) {
	streamed := s.relations[w[1].text]
	if streamed == nil {
		return nil, fmt.Errorf("no relation %s", w[1].text)
	}
	rel := s.chunks[w[1].text]
	if rel == nil {
		copied := *streamed
		rel = &copied
		s.chunks[w[1].text] = rel
	}
	c := &replication.Change{Op: replication.OpTruncate, Relation: rel, Read: &s.read}
	if w[0].text == "read" {
		c.Op, c.New = replication.OpRead, scriptRow(w[2:])
	}
	if n := len(c.New); n != 0 && n != len(rel.Columns) {
		return nil, fmt.Errorf("%d values for %d columns", n, len(rel.Columns))
	}
	return c, nil
}

// change makes the change of a line, numbered as the decoder does it.
func (s *routeScript) change(w []word) (*replication.Change, error) {
	if w[0].text == "read" || w[0].text == "anew" {
		return s.readChange(w)
	}
	c := &replication.Change{Txn: s.txn, LSN: s.lsn}
	if s.txn != nil {
		c.Seq = s.seq
		s.seq++
		s.lsn += 8
	}
	if w[0].text == "message" {
		c.Op = replication.OpMessage
		c.Message = replication.Message{Prefix: w[1].text, Transactional: s.txn != nil, Content: []byte(w[2].text)}
		return c, nil
	}
	c.Relation = s.relations[w[1].text]
	if c.Relation == nil {
		return nil, fmt.Errorf("no relation %s", w[1].text)
	}
	n := len(c.Relation.Columns)
	rest := w[2:]
	row := func() (replication.Tuple, error) {
		if len(rest) < n {
			return nil, fmt.Errorf("%d values for %d columns", len(rest), n)
		}
		t := scriptRow(rest[:n])
		rest = rest[n:]
		return t, nil
	}
	var err error
	switch w[0].text {
	case "truncate":
		c.Op = replication.OpTruncate
	case "insert":
		c.Op = replication.OpCreate
		c.New, err = row()
	case "update", "delete":
		c.Op = replication.OpUpdate
		if rest[0].text != "new" {
			c.OldIsKey = rest[0].text == "key"
			rest = rest[1:]
			if c.Old, err = row(); err != nil {
				return nil, err
			}
		}
		if w[0].text == "delete" {
			c.Op = replication.OpDelete
			break
		}
		rest = rest[1:]
		c.New, err = row()
	default:
		return nil, fmt.Errorf("no command %s", w[0].text)
	}
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%d values too many", len(rest))
	}
	return c, err
}

func scriptRow(words []word) replication.Tuple {
	row := make(replication.Tuple, len(words))
	for i, w := range words {
		switch {
		case w == word{text: "null"}:
			row[i].Kind = replication.ValueNull
		case w == word{text: "~"}:
			row[i].Kind = replication.ValueUnchanged
		default:
			row[i] = replication.Value{Kind: replication.ValueText, Text: []byte(w.text)}
		}
	}
	return row
}

// route routes c and writes down what became of it. What holds for every change is
// checked here: see checkRouted.
func (s *routeScript) route(line string, c *replication.Change) {
	if s.router == nil {
		var err error
		if s.router, err = NewRouter(s.o, s.topics); err == nil {
			err = s.router.Guard()
		}
		if err != nil {
			s.t.Fatal(err)
		}
	}
	fmt.Fprintf(&s.out, "%s\n", line)
	b := NewBatch(Limits{Bytes: 1 << 20, Records: 1000})
	err := s.router.Route(c, b)
	checkRouted(s.t, s.router, c, b, err)
	for i := range b.records {
		s.out.WriteString(describeRecord(b, i))
	}
	for _, n := range b.counts {
		fmt.Fprintf(&s.out, "  count %s %s %d\n", n.topic, n.outcome, n.n)
	}
	var stop *StopError
	var refusal *checkpoint.Refusal
	switch {
	case errors.As(err, &stop):
		fmt.Fprintf(&s.out, "  stop: %v\n", err)
	case errors.As(err, &refusal):
		fmt.Fprintf(&s.out, "  refused: %s\n  risk: %s\n  remedy: %s\n", refusal.What, refusal.Risk, refusal.Remedy)
	case err != nil:
		fmt.Fprintf(&s.out, "  error: %v\n", err)
	}
}

// checkRouted holds one change's outcome against what must be true of each: either
// records or exactly one count or an error and then nothing in the batch (DESIGN,
// invariant 6); JSON wherever we made it; and the same bytes when it comes again.
func checkRouted(t *testing.T, r *Router, c *replication.Change, b *Batch, err error) {
	t.Helper()
	if err != nil && b.Tail() {
		t.Errorf("after the error %v the batch has %+v", err, b.mark())
	}
	if err == nil && len(b.records) == 0 && len(b.counts) != 1 {
		t.Errorf("no record, no error and %d counts", len(b.counts))
	}
	for i := range b.records {
		rec := &b.records[i]
		// An event's key and payload are the row's own.
		isEvent := c.Relation != nil && r.last.outbox != nil
		if key := b.bytes(rec.key); !isEvent && key != nil && !json.Valid(key) {
			t.Errorf("this key is not JSON: %s", key)
		}
		if value := b.bytes(rec.value); (!isEvent || rec.dead) && value != nil && !json.Valid(value) {
			t.Errorf("this value is not JSON: %s", value)
		}
	}
	again := NewBatch(b.limits)
	if err2 := r.Route(c, again); fmt.Sprint(err2) != fmt.Sprint(err) {
		t.Errorf("routed again: %v; at first: %v", err2, err)
	}
	if !bytes.Equal(b.arena, again.arena) || !slices.Equal(b.headers, again.headers) || !slices.Equal(b.records, again.records) {
		t.Errorf("routed again, the change has other records:\n%s\n%s", b.arena, again.arena)
	}
}

func describeRecord(b *Batch, i int) string {
	rec := &b.records[i]
	place := [...]string{"by key", "alone", "every partition", "fixed"}[rec.where]
	out := fmt.Sprintf("  %s, %s\n", rec.topic.Name, place)
	line := func(name string, data []byte) {
		switch {
		case data == nil:
			out += fmt.Sprintf("    %s (null)\n", name)
		case bytes.ContainsFunc(data, func(r rune) bool { return r < ' ' || r == '\uFFFD' }):
			out += fmt.Sprintf("    %s %q\n", name, data)
		default:
			out += fmt.Sprintf("    %s %s\n", name, data)
		}
	}
	line("key", b.bytes(rec.key))
	line("value", b.bytes(rec.value))
	for _, h := range b.headers[rec.headers.at : rec.headers.at+rec.headers.n] {
		line(h.name+":", b.bytes(h.value))
	}
	return out
}

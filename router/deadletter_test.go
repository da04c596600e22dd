package router

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// readLetter is a dead letter as a consumer reads it.
type readLetter struct {
	Reason, Error string
	Table         *string
	Position, Op  string
	Row, Old      map[string]*string
	Message       *struct {
		Prefix        string
		Transactional bool
		Content       string
	}
	Truncated      bool
	Cut            []readCut
	Escaped        []readCut
	OmittedColumns int `json:"omitted_columns"`
}

type readCut struct {
	In, Name, SHA256 string
	Size             int
}

func mustReadLetter(t testing.TB, value []byte) readLetter {
	t.Helper()
	var l readLetter
	d := json.NewDecoder(bytes.NewReader(value))
	d.DisallowUnknownFields()
	if err := d.Decode(&l); err != nil {
		t.Fatalf("%v in %s", err, value)
	}
	if !utf8.Valid(value) || !json.Valid(value) {
		t.Fatalf("not valid: %q", value)
	}
	return l
}

func letterOf(c *replication.Change) *deadLetter {
	return &deadLetter{Reason: ReasonOversize, Error: "too large", Table: "public.t",
		Position: checkpoint.AppendHeader(nil, 0x1A2B3C8, 3), Change: c}
}

func TestDeadLetterExact(t *testing.T) {
	rel := relationOf(t, "t", "id int", "v text", "w text")
	tests := []struct {
		name   string
		change replication.Change
		want   string
	}{
		{"an insert", replication.Change{Op: replication.OpCreate, Relation: rel, New: rowOf("2", "a\"\\\n\x01é", null)},
			`{"reason":"oversize","error":"too large","table":"public.t","position":"0000000001A2B3C8-0000000003","op":"c","row":{"id":"2","v":"a\"\\\n\u0001é","w":null}}`},
		{"an update names what PostgreSQL sent of the old row, and no unchanged value",
			replication.Change{Op: replication.OpUpdate, Relation: rel, Old: rowOf("1", null, null), OldIsKey: true,
				New: replication.Tuple{rowOf("2")[0], {Kind: replication.ValueUnchanged}, rowOf("x")[0]}},
			`{"reason":"oversize","error":"too large","table":"public.t","position":"0000000001A2B3C8-0000000003","op":"u","row":{"id":"2","w":"x"},"old":{"id":"1"}}`},
		{"a delete", replication.Change{Op: replication.OpDelete, Relation: rel, Old: rowOf("1", null, null), OldIsKey: true},
			`{"reason":"oversize","error":"too large","table":"public.t","position":"0000000001A2B3C8-0000000003","op":"d","row":{"id":"1"}}`},
		{"a truncate", replication.Change{Op: replication.OpTruncate, Relation: rel},
			`{"reason":"oversize","error":"too large","table":"public.t","position":"0000000001A2B3C8-0000000003","op":"t","row":null}`},
		{"a logical message", replication.Change{Op: replication.OpMessage, Message: replication.Message{Prefix: "p", Transactional: true, Content: []byte("hi\xff")}},
			`{"reason":"oversize","error":"too large","table":null,"position":"0000000001A2B3C8-0000000003","op":"m","message":{"prefix":"p","transactional":true,"content":"aGn/"}}`},
		{"bytes that are not UTF-8", replication.Change{Op: replication.OpCreate, Relation: rel, New: rowOf("2", "a\xff\\xff", `\xff`)},
			`{"reason":"oversize","error":"too large","table":"public.t","position":"0000000001A2B3C8-0000000003","op":"c","row":{"id":"2","v":"a\\xff\\\\xff","w":"\\xff"},"escaped":[{"in":"row","name":"v"}]}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := letterOf(&tt.change)
			if tt.change.Op == replication.OpMessage {
				d.Table = ""
			}
			got, _ := appendDeadLetter([]byte("kept"), d, 1<<20)
			if diff := cmp.Diff("kept"+tt.want, string(got)); diff != "" {
				t.Errorf("dead letter (-want +got):\n%s", diff)
			}
			mustReadLetter(t, got[len("kept"):])
		})
	}
}

func TestDeadLetterCutsTheLongValueToFit(t *testing.T) {
	value := strings.Repeat("c4ca4238a0b92382", 1<<17) // 2 MiB
	rel := relationOf(t, "t", "id int", "v text")
	const limit = 1_000_000
	got, whole := appendDeadLetter(nil, letterOf(&replication.Change{Op: replication.OpCreate, Relation: rel, New: rowOf("2", value)}), limit)
	if len(got) > limit || len(got) < limit-500 {
		t.Errorf("%d bytes; want little less than %d", len(got), limit)
	}
	l := mustReadLetter(t, got)
	sum := sha256.Sum256([]byte(value))
	want := []readCut{{In: "row", Name: "v", Size: len(value), SHA256: hex.EncodeToString(sum[:])}}
	if diff := cmp.Diff(want, l.Cut); diff != "" || !l.Truncated || whole {
		t.Errorf("truncated %v, cut (-want +got):\n%s", l.Truncated, diff)
	}
	if *l.Row["id"] != "2" || !strings.HasPrefix(value, *l.Row["v"]) {
		t.Errorf("row %v", l.Row)
	}
}

func TestDeadLetterOfVeryManyColumns(t *testing.T) {
	var columns, texts []string
	for i := range 1600 {
		columns = append(columns, fmt.Sprintf("%s_%d text", strings.Repeat("\x01", 50), i))
		texts = append(texts, strings.Repeat("ü\"", 500))
	}
	c := &replication.Change{Op: replication.OpCreate, Relation: relationOf(t, "t", columns...), New: rowOf(texts...)}
	for _, limit := range []int{0, 1024, 1025, 4096, 65536, 1 << 20} {
		got, _ := appendDeadLetter(nil, letterOf(c), limit)
		l := mustReadLetter(t, got)
		if len(got) > max(limit, minDeadLetterLimit) || len(l.Row)+l.OmittedColumns != 1600 || !l.Truncated {
			t.Errorf("limit %d: %d bytes, %d columns, %d omitted", limit, len(got), len(l.Row), l.OmittedColumns)
		}
		if limit >= 65536 && len(l.Row) < limit/2000 {
			t.Errorf("limit %d: only %d columns", limit, len(l.Row))
		}
	}
}

// unescapeLetter restores a value that is named in escaped.
func unescapeLetter(s string) string {
	var b []byte
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] != '\\':
			b = append(b, s[i])
		case s[i+1] == 'x':
			c, _ := hex.DecodeString(s[i+2 : i+4])
			b = append(b, c...)
			i += 3
		default:
			b = append(b, '\\')
			i++
		}
	}
	return string(b)
}

// Whatever the change holds: valid JSON, valid UTF-8, never above the limit, every
// cut value a prefix, and everything that is not cut restorable.
func FuzzDeadLetter(f *testing.F) {
	f.Add("too large", "public.t", "a", "b\xff\\", "c\"\n", 1024, 1, false)
	f.Add("", "", "", "\x00\x1f\u2028", "é", 1100, 400, true)
	f.Add(strings.Repeat("\x01", 3000), strings.Repeat("\xfe", 999), strings.Repeat("n", 63), strings.Repeat("\\", 5000), "x", 2000, 3, true)
	f.Fuzz(func(t *testing.T, errText, table, name, a, b string, limit, columns int, message bool) {
		columns = max(0, min(columns, 500))
		limit = max(-1, min(limit, 1<<20))
		rel := &replication.Relation{}
		var row replication.Tuple
		for i := range columns {
			rel.Columns = append(rel.Columns, replication.Column{Name: fmt.Sprint(i, name), Identity: true})
			row = append(row, replication.Value{Kind: replication.ValueText, Text: []byte([]string{a, b}[i%2])})
		}
		c := &replication.Change{Op: replication.OpUpdate, Relation: rel, New: row, Old: row}
		if message {
			c = &replication.Change{Op: replication.OpMessage, Message: replication.Message{Prefix: a, Content: []byte(b)}}
		}
		d := letterOf(c)
		d.Error, d.Table = errText, table
		got, whole := appendDeadLetter(nil, d, limit)
		if len(got) > max(limit, minDeadLetterLimit) {
			t.Fatalf("%d bytes with limit %d", len(got), limit)
		}
		l := mustReadLetter(t, got)
		if whole != (len(l.Cut) == 0 && l.OmittedColumns == 0) {
			t.Fatalf("whole: %t, cut %v, %d columns omitted", whole, l.Cut, l.OmittedColumns)
		}
		cut, escaped := map[string]bool{}, map[string]bool{}
		for _, x := range l.Cut {
			cut[x.In+"."+x.Name] = true
		}
		for _, x := range l.Escaped {
			escaped[x.In+"."+x.Name] = true
		}
		check := func(id, read, original string) {
			if escaped[id] {
				read = unescapeLetter(read)
			}
			if cut[id] && strings.HasPrefix(original, read) || read == original {
				return
			}
			t.Errorf("%s: read %q of %q", id, read, original)
		}
		if message {
			if l.Message == nil {
				return
			}
			check("message.prefix", l.Message.Prefix, a)
			content, err := base64.StdEncoding.DecodeString(l.Message.Content)
			if err != nil {
				t.Fatal(err)
			}
			check("message.content", string(content), b)
			return
		}
		if !utf8.ValidString(name) {
			return
		}
		for i := range columns {
			key := fmt.Sprint(i, name)
			if v, ok := l.Row[key]; ok {
				check("row."+key, *v, []string{a, b}[i%2])
			}
		}
	})
}

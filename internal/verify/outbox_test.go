package verify

import (
	"testing"
	"time"

	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// TestWhichRowsMayBeFromBeforeTheFirstStart holds marks of each type against a snapshot that
// began at noon.
func TestWhichRowsMayBeFromBeforeTheFirstStart(t *testing.T) {
	const null = ""
	const text, integer, char, date, timestamp, timestamptz = 25, 23, 1042, 1082, 1114, 1184
	noon := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	r, err := router.NewRouter(router.Options{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		published, status uint32 // their types; 0 for none
		setting           string
		unread            bool // no snapshot has read the table
		at, is            string
		want              bool
	}{
		"marked before":                          {published: timestamptz, at: "2026-06-01 11:59:59.999999+00", want: true},
		"marked since":                           {published: timestamptz, at: "2026-06-01 12:00:00.5+00"},
		"not marked":                             {published: timestamptz, at: null},
		"marked before, without a zone":          {published: timestamp, at: "2026-06-01 11:59:59", want: true},
		"marked since, without a zone":           {published: timestamp, at: "2026-06-01 12:00:00.5"},
		"at no time":                             {published: timestamptz, at: "infinity", want: true},
		"before Christ":                          {published: timestamp, at: "0044-03-15 12:00:00 BC", want: true},
		"marked since, of no snapshot":           {published: timestamp, at: "2026-06-01 12:00:00.5", unread: true, want: true},
		"all are sent":                           {published: timestamptz, at: "2026-06-01 11:00:00+00", setting: "all"},
		"none is sent":                           {published: timestamptz, at: null, setting: "none", want: true},
		"a status":                               {status: integer, is: "1", want: true},
		"another status":                         {status: integer, is: "0"},
		"no status":                              {status: integer, is: null},
		"a status that is a text":                {status: text, is: "processed", want: true},
		"a status that is a text, of blanks":     {status: char, is: "processed  ", want: true},
		"a number in a text is no mark":          {status: text, is: "1"},
		"published_at wins":                      {published: timestamptz, at: null, status: integer, is: "1"},
		"a date is no mark, the status is":       {published: date, at: null, status: integer, is: "1", want: true},
		"a date is no mark, the status is not 1": {published: date, at: "2026-05-01", status: integer, is: "0"},
		"no mark":                                {},
	} {
		t.Run(name, func(t *testing.T) {
			rel := &replication.Relation{Columns: []replication.Column{{Name: "event_id", TypeOID: text}}}
			tuple := replication.Tuple{{Kind: replication.ValueText, Text: []byte("7")}}
			add := func(name string, oid uint32, value string) {
				if oid == 0 {
					return
				}
				rel.Columns = append(rel.Columns, replication.Column{Name: name, TypeOID: oid})
				v := replication.Value{Kind: replication.ValueNull}
				if value != null {
					v = replication.Value{Kind: replication.ValueText, Text: []byte(value)}
				}
				tuple = append(tuple, v)
			}
			add("published_at", c.published, c.at)
			add("status", c.status, c.is)
			backlog, err := r.Backlog(rel, "", replication.ColumnFacts{})
			if err != nil {
				t.Fatal(err)
			}
			e := &events{setting: c.setting, began: noon}
			if c.unread {
				e.began = time.Time{}
			}
			e.marks(rel, backlog)
			if got := e.mayBeOlder(tuple); got != c.want {
				t.Errorf("it may be older: %t, want %t", got, c.want)
			}
		})
	}
}

// TestADeadLetterIsOfItsRow compares names and ids as they are, however JSON has them.
func TestADeadLetterIsOfItsRow(t *testing.T) {
	table, id, err := quoted("shop & co.outbox", "event<id>")
	if err != nil {
		t.Fatal(err)
	}
	e := &events{dead: map[string]bool{}}
	for _, letter := range []string{
		`{"table":"shop & co.outbox","row":{"event<id>":"7"}}`,
		`{"table":"shop & co.outbox","row":{"event<id>":"a\"b\\\u0001"}}`,
		`{"table":"shop & co.outbox","row":{"event<id>":null}}`,
		`{"table":"public.t","row":{"event<id>":"8"}}`,
	} {
		e.letter([]byte(letter), table, id)
	}
	if len(e.dead) != 2 || !e.dead["7"] || !e.dead["a\"b\\\x01"] {
		t.Errorf("%v", e.dead)
	}
}

package verify

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// Report is what a run found. Its JSON is what -o json prints.
type Report struct {
	Name   string        `json:"name"`
	Tables []TableReport `json:"tables"`
	// Differences is the number of all tables'.
	Differences int64 `json:"differences"`
	// Refused is the number of tables that could not be compared.
	Refused int     `json:"refused"`
	Seconds float64 `json:"seconds"`
	// Notes say what was left out.
	Notes []string `json:"notes,omitempty"`
}

// The kinds of tables, as they are compared.
const (
	KindTable   = "table"   // by key
	KindKeyless = "keyless" // as a multiset of rows
	KindOutbox  = "outbox"  // event by event
)

// TableReport is what was found of one table.
type TableReport struct {
	Table string `json:"table"`
	Kind  string `json:"kind"`
	Topic string `json:"topic,omitempty"` // of an outbox: those of its rows, joined by commas
	// Snapshot is the MVCC snapshot that was compared, and LSN where the WAL ended then.
	Snapshot string `json:"snapshot,omitempty"`
	LSN      string `json:"lsn,omitempty"`

	Rows     int64 `json:"rows"`     // of the table
	Records  int64 `json:"records"`  // of the topic, those that the snapshot does not see left out
	Compared int64 `json:"compared"` // keys, rows or events that were looked at on both sides
	Equal    int64 `json:"equal"`

	Missing    int64 `json:"missing"`    // in the table, not in the topic
	Extra      int64 `json:"extra"`      // in the topic, not in the table
	Differing  int64 `json:"differing"`  // in both, with other values
	Doubled    int64 `json:"doubled"`    // records that stand in the topic once more
	Disordered int64 `json:"disordered"` // events behind a later one of their aggregate
	Unreadable int64 `json:"unreadable"` // records that no connector writes so

	Sampled bool     `json:"sampled,omitempty"`
	Seconds float64  `json:"seconds"`
	Notes   []string `json:"notes,omitempty"`
	// Refused says why the table could not be compared; nothing above holds then.
	Refused string `json:"refused,omitempty"`
	// Found are the first differences; the counts above are those of all.
	Found []Difference `json:"found,omitempty"`

	unsettled int64 // differences that may be of a transaction which the snapshot does not see
	doubtful  int64 // equal to what they were at one moment while they were written
	partial   bool  // columns were not compared
	defaulted int64
	gone      int64 // keyless: rows of the topic that the table has no longer
	unjudged  int64 // outbox: missing rows that may be older than the connector
	letters   int64 // outbox: events that are dead letters
}

// Differences counts all of them.
func (t *TableReport) Differences() int64 {
	return t.Missing + t.Extra + t.Differing + t.Doubled + t.Disordered + t.Unreadable
}

// Difference is one key, row or event that is not the same on both sides.
type Difference struct {
	Kind string `json:"kind"` // missing, extra, differing, doubled, disordered or unreadable
	Key  Value  `json:"key"`
	// Columns are those that differ; empty for whole rows.
	Columns []string `json:"columns,omitempty"`
	Table   Value    `json:"table,omitempty"` // the value there; of Columns, where these are given
	Topic   Value    `json:"topic,omitempty"`
	// Where tells topic, partition and offset of a record.
	Where string `json:"where,omitempty"`
}

// Value is JSON as it stands on one side; nil where there is nothing.
type Value []byte

const maxShown = 2 << 10 // bytes of a value in the report

// MarshalJSON gives the value itself, and as a string what is no JSON or too long.
func (v Value) MarshalJSON() ([]byte, error) {
	if len(v) == 0 {
		return []byte("null"), nil
	}
	if len(v) <= maxShown && json.Valid(v) {
		return v, nil
	}
	return json.Marshal(v.String())
}

// String gives the value for people, cut where it is long.
func (v Value) String() string {
	if len(v) == 0 {
		return "(none)"
	}
	if len(v) <= maxShown {
		return strings.ToValidUTF8(string(v), "\uFFFD")
	}
	cut := maxShown
	for cut > 0 && !utf8.RuneStart(v[cut]) {
		cut--
	}
	return fmt.Sprintf("%s… (%d bytes)", strings.ToValidUTF8(string(v[:cut]), "\uFFFD"), len(v))
}

// maxFound is how many differences of a table are listed.
const maxFound = 20

// add counts a difference, and keeps the first ones.
func (t *TableReport) add(d Difference, unsettled bool) {
	switch d.Kind {
	case kindMissing:
		t.Missing++
	case kindExtra:
		t.Extra++
	case kindDiffering:
		t.Differing++
	case kindDoubled:
		t.Doubled++
	case kindDisordered:
		t.Disordered++
	case kindUnreadable:
		t.Unreadable++
	}
	if unsettled {
		t.unsettled++
	}
	if len(t.Found) < maxFound {
		d.Key, d.Table, d.Topic = clone(d.Key), clone(d.Table), clone(d.Topic)
		t.Found = append(t.Found, d)
	}
}

// clone keeps no more of a value than the report shows.
func clone(v Value) Value {
	if v == nil {
		return nil
	}
	return append(Value{}, v...)
}

// The kinds of differences.
const (
	kindMissing    = "missing"
	kindExtra      = "extra"
	kindDiffering  = "differing"
	kindDoubled    = "doubled"
	kindDisordered = "disordered"
	kindUnreadable = "unreadable"
)

// Write prints the report for people.
func (r *Report) Write(w io.Writer) error {
	var b strings.Builder
	for i := range r.Tables {
		r.Tables[i].write(&b)
	}
	for _, note := range r.Notes {
		fmt.Fprintf(&b, "note: %s\n", note)
	}
	switch {
	case r.Differences > 0:
		fmt.Fprintf(&b, "%d differences in %d tables, %s\n", r.Differences, len(r.Tables), seconds(r.Seconds))
	case r.Refused == 0:
		fmt.Fprintf(&b, "no difference in %d tables, %s\n", len(r.Tables), seconds(r.Seconds))
	}
	if r.Refused > 0 {
		fmt.Fprintf(&b, "%d of %d tables could not be compared, %s\n", r.Refused, len(r.Tables), seconds(r.Seconds))
	}
	_, err := io.WriteString(w, b.String())
	if err != nil {
		return fmt.Errorf("print the report: %w", err)
	}
	return nil
}

func seconds(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(10 * time.Millisecond).String()
}

func (t *TableReport) write(b *strings.Builder) {
	if t.Refused != "" {
		fmt.Fprintf(b, "%s: refused: %s\n", t.Table, t.Refused)
		return
	}
	verdict := "equal"
	if n := t.Differences(); n > 0 {
		verdict = fmt.Sprintf("%d DIFFERENCES", n)
	}
	fmt.Fprintf(b, "%s: %s: %d rows, %d records of %s, as of %s, %s\n", t.Table, verdict, t.Rows, t.Records, t.Topic, t.LSN, seconds(t.Seconds))
	if t.Differences() > 0 {
		fmt.Fprintf(b, "  missing %d, extra %d, differing %d, doubled %d, disordered %d, unreadable %d\n",
			t.Missing, t.Extra, t.Differing, t.Doubled, t.Disordered, t.Unreadable)
	}
	for _, note := range t.Notes {
		fmt.Fprintf(b, "  note: %s\n", note)
	}
	for _, d := range t.Found {
		fmt.Fprintf(b, "  %s %s", d.Kind, d.Key)
		if d.Where != "" {
			fmt.Fprintf(b, " at %s", d.Where)
		}
		if len(d.Columns) > 0 {
			fmt.Fprintf(b, ": %s", strings.Join(d.Columns, ", "))
		}
		b.WriteByte('\n')
		if d.Table != nil {
			fmt.Fprintf(b, "    table %s\n", d.Table)
		}
		if d.Topic != nil {
			fmt.Fprintf(b, "    topic %s\n", d.Topic)
		}
	}
	if n := t.Differences() - int64(len(t.Found)); n > 0 {
		fmt.Fprintf(b, "  and %d more\n", n)
	}
}

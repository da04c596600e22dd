package demo

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
)

// eventTopicPrefix starts the topics of outbox events; all other topics of the
// demo carry table changes.
const eventTopicPrefix = "outbox.event."

// Kind tells the two sorts of records apart that a reader must not confuse.
type Kind uint8

// The kinds of records.
const (
	KindTable Kind = iota + 1 // a row change, or the tombstone behind a delete
	KindEvent                 // an outbox row as an event
)

// Event is one Kafka record, taken apart for printing and checking.
type Event struct {
	Kind      Kind
	Topic     string
	Partition int32
	Offset    int64
	Key       string // as it stands in Kafka; a table's is a JSON object
	// Op is a table change's c, u, d, t, r or m; empty for an event and a tombstone.
	Op        string
	Type      string // an event's type, from its header
	ID        string // an event's id, from its header
	Table     string // schema.table; empty for an event and a tombstone
	XID       uint64 // the source transaction; 0 where the record does not say
	Tombstone bool
	Before    []Field // columns in the table's order; nil where absent
	After     []Field
	Payload   []byte // an event's value
	// Position is the header of that name, CommitLSN and Seq its parts.
	Position  string
	CommitLSN checkpoint.LSN
	Seq       uint64
	Snapshot  bool
	// Committed is when the source transaction committed, in whole milliseconds;
	// zero where the record does not say (events, tombstones).
	Committed time.Time
	Arrived   time.Time
}

// Field is one column of a row image. Value is JSON.
type Field struct {
	Name  string
	Value json.RawMessage
}

// row is a row image whose columns keep the order in which they stand in the
// record, which a map would lose.
type row []Field

// UnmarshalJSON reads a JSON object or null.
func (r *row) UnmarshalJSON(data []byte) error {
	*r = nil
	if bytes.Equal(data, []byte("null")) {
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return fmt.Errorf("read row image: want a JSON object, have %.40q", data)
	}
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return fmt.Errorf("read row image: %w", err)
		}
		var v json.RawMessage
		if err := dec.Decode(&v); err != nil {
			return fmt.Errorf("read column %v: %w", name, err)
		}
		*r = append(*r, Field{Name: fmt.Sprint(name), Value: v})
	}
	return nil
}

// change is the part of a table record's value that the demo looks at.
type change struct {
	Before row    `json:"before"`
	After  row    `json:"after"`
	Op     string `json:"op"`
	TsMs   int64  `json:"ts_ms"`
	Source struct {
		Schema string `json:"schema"`
		Table  string `json:"table"`
		TxID   uint64 `json:"tx_id"`
	} `json:"source"`
}

// ParseRecord takes a record of the connector apart. A record that is not one of
// its own (someone may write to the demo's topics) is an error: the checker could
// say nothing true about it.
func ParseRecord(r *kgo.Record, arrived time.Time) (Event, error) {
	e := Event{
		Kind: KindTable, Topic: r.Topic, Partition: r.Partition, Offset: r.Offset,
		Key: string(r.Key), Arrived: arrived, Tombstone: r.Value == nil,
	}
	for _, h := range r.Headers {
		switch h.Key {
		case "position":
			e.Position = string(h.Value)
		case "id":
			e.ID = string(h.Value)
		case "type":
			e.Type = string(h.Value)
		}
	}
	var err error
	if e.CommitLSN, e.Seq, e.Snapshot, err = checkpoint.ParseHeader(e.Position); err != nil {
		return e, fmt.Errorf("read record %s/%d@%d: %w", r.Topic, r.Partition, r.Offset, err)
	}
	if strings.HasPrefix(r.Topic, eventTopicPrefix) {
		e.Kind, e.Payload = KindEvent, r.Value
		return e, nil
	}
	if e.Tombstone {
		return e, nil
	}
	var c change
	if err := json.Unmarshal(r.Value, &c); err != nil {
		return e, fmt.Errorf("read record %s/%d@%d: %w", r.Topic, r.Partition, r.Offset, err)
	}
	e.Op, e.Before, e.After, e.XID = c.Op, c.Before, c.After, c.Source.TxID
	e.Table = c.Source.Schema + "." + c.Source.Table
	if c.TsMs > 0 {
		e.Committed = time.UnixMilli(c.TsMs)
	}
	return e, nil
}

// column gives the value of the column name in fields as text, without quotes.
func column(fields []Field, name string) (string, bool) {
	for _, f := range fields {
		if f.Name == name {
			return plain(f.Value), true
		}
	}
	return "", false
}

// plain gives a JSON value as a person would write it: a string without its
// quotes, everything else as it stands.
func plain(v json.RawMessage) string {
	var s string
	if len(v) > 0 && v[0] == '"' && json.Unmarshal(v, &s) == nil {
		return s
	}
	return string(v)
}

// ShortKey gives the key for people: the bare value where a table's key has one
// column, all values separated by commas where it has more.
func (e *Event) ShortKey() string {
	var r row
	if e.Kind == KindEvent || json.Unmarshal([]byte(e.Key), &r) != nil {
		return e.Key
	}
	vals := make([]string, len(r))
	for i, f := range r {
		vals[i] = plain(f.Value)
	}
	return strings.Join(vals, ",")
}

// Detail says in a few words what happened: for an update the columns that
// changed, as old→new; for an insert the new row; for a delete the old one; for
// an event its payload.
func (e *Event) Detail() string {
	switch {
	case e.Kind == KindEvent:
		return string(e.Payload)
	case e.Tombstone:
		return "(tombstone)"
	case e.Op == "u":
		return diff(e.Before, e.After)
	case e.After != nil:
		return list(e.beside(e.After))
	default:
		return list(e.beside(e.Before))
	}
}

// beside gives what fields say beside the key, which has a column of its own; all
// of them where that is nothing.
func (e *Event) beside(fields []Field) []Field {
	var key row
	if json.Unmarshal([]byte(e.Key), &key) != nil {
		return fields
	}
	var rest []Field
	for _, f := range fields {
		if _, inKey := column(key, f.Name); !inKey {
			rest = append(rest, f)
		}
	}
	if rest == nil {
		return fields
	}
	return rest
}

// diff lists what differs. A column that before lacks (the server sends the key
// alone, unless the table's replica identity is FULL) is listed with its new value.
func diff(before, after []Field) string {
	old := make(map[string]json.RawMessage, len(before))
	for _, f := range before {
		old[f.Name] = f.Value
	}
	var parts []string
	for _, f := range after {
		o, ok := old[f.Name]
		switch {
		case !ok:
			parts = append(parts, f.Name+"="+plain(f.Value))
		case !bytes.Equal(o, f.Value):
			parts = append(parts, f.Name+" "+plain(o)+"→"+plain(f.Value))
		}
	}
	if len(parts) == 0 {
		return "(nothing changed)"
	}
	return strings.Join(parts, "  ")
}

func list(fields []Field) string {
	parts := make([]string, len(fields))
	for i, f := range fields {
		parts[i] = f.Name + "=" + plain(f.Value)
	}
	return strings.Join(parts, "  ")
}

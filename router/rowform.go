package router

import (
	"bytes"

	"github.com/walrelay/walrelay/replication"
)

// RowForm gives the rows of one table the form that their records have, for who compares
// topics with tables. It is for one goroutine.
type RowForm struct {
	p       *tablePlan
	event   event
	scratch scratch
}

// RowForm makes the form of a table as rel describes it.
func (r *Router) RowForm(rel *replication.Relation) (*RowForm, error) {
	p, err := r.newPlan(rel, true)
	if err != nil {
		return nil, err
	}
	p.keyHead = nil // the schema beside a key says nothing of the row
	return &RowForm{p: p}, nil
}

// Topic is the topic of the table's records; of an outbox that of all its events, and
// empty where each has its own.
func (f *RowForm) Topic() string {
	if p := f.p.outbox; p != nil {
		return p.fixedTopic()
	}
	return f.p.topicName
}

// Keyed tells whether the table's records have a key.
func (f *RowForm) Keyed() bool { return f.p.key != nil }

// AppendKey appends the key of a row's records, without a schema. The row is whole.
func (f *RowForm) AppendKey(dst []byte, row replication.Tuple) ([]byte, error) {
	return f.p.appendKey(dst, row, nil)
}

// AppendRow appends a row as it stands in its records.
func (f *RowForm) AppendRow(dst []byte, row replication.Tuple) ([]byte, error) {
	return f.p.appendRow(dst, row, nil, false)
}

// Unavailable gives what stands for a column's unchanged TOAST value, by the column's name
// as a JSON string; nothing for columns that are left out then.
func (f *RowForm) Unavailable() map[string][]byte {
	marks := map[string][]byte{}
	for _, c := range f.p.columns {
		if c.unavailable != nil {
			marks[string(bytes.TrimSuffix(c.name, []byte(":")))] = c.unavailable
		}
	}
	return marks
}

// Event is the event that an outbox row becomes.
type Event struct {
	Topic string
	ID    []byte
	Key   []byte
	Value []byte // nil for a tombstone
}

// Event gives a row's event, valid until the next call. An error that is a *RouteError
// says that the row is none.
func (f *RowForm) Event(row replication.Tuple) (Event, error) {
	f.scratch.reset()
	if err := f.p.outbox.appendEvent(&f.event, &f.scratch, row); err != nil {
		return Event{}, err
	}
	e := Event{Topic: f.event.Topic, ID: row[f.p.outbox.fields[fieldID]].Text, Key: f.event.Key, Value: f.event.Value}
	if f.event.NullValue {
		e.Value = nil
	}
	return e, nil
}

// IDColumn is the column of an outbox table that holds the event's id.
func (f *RowForm) IDColumn() string { return f.p.outbox.columnName(f.p.outbox.fields[fieldID]) }

package router

import (
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// shape is what records look like: format.types and format.envelope. Which records a
// change gives, and to which topics they go, is not its business.
type shape interface {
	// column makes the plan of a column.
	column(c replication.Column, t *format.Type, enc *format.Encoder) columnPlan
	// plan adds to the plan of a table what its records share. Columns, key and the
	// topic's name are there; types are those of the columns.
	plan(p *tablePlan, types []*format.Type) error
	// beginTxn and beginRead cache what the records of a transaction and of a chunk
	// share. One of them comes before what follows, but for messages without one.
	beginTxn(t *replication.Transaction)
	beginRead(at *replication.ReadPoint)
	// appendRow appends the value of a row's record.
	appendRow(dst []byte, p *tablePlan, c *replication.Change, w *rowRecord) ([]byte, error)
	// appendTruncate appends the value of a truncate.
	appendTruncate(dst []byte, p *tablePlan, c *replication.Change) []byte
	// appendMessageKey and appendMessage append key and value of a logical message.
	appendMessageKey(dst []byte, c *replication.Change) ([]byte, error)
	appendMessage(dst []byte, c *replication.Change) ([]byte, error)
}

func newShape(o Options) (shape, error) {
	var s shape
	var err error
	if o.Debezium != nil {
		s, err = newDebeziumShape(o)
	} else {
		s, err = newPlainShape(o)
	}
	if err != nil || !o.Unwrapped {
		return s, err
	}
	return &bareShape{shape: s}, nil
}

// deletedField is the member that marks the last value of an unwrapped row.
const deletedField = "__deleted"

const oidBool = 16

// bareShape is `envelope: false`: the row itself. Messages, which are no rows, are as
// the shape within has them.
type bareShape struct{ shape }

func (s *bareShape) appendRow(dst []byte, p *tablePlan, _ *replication.Change, w *rowRecord) ([]byte, error) {
	dst = append(dst, p.valueHead...)
	row, onlyKey := w.after, false
	if w.op == replication.OpDelete {
		row, onlyKey = w.before, w.beforeIsKey
	}
	dst, err := p.appendRow(dst, row, w.fill, onlyKey)
	if err != nil {
		return dst, err
	}
	if w.op == replication.OpDelete {
		dst = dst[:len(dst)-1] // the closing brace
		if dst[len(dst)-1] != '{' {
			dst = append(dst, ',')
		}
		dst = append(dst, `"`+deletedField+`":true}`...)
	}
	if len(p.valueHead) > 0 {
		dst = append(dst, '}')
	}
	return dst, nil
}

// appendTruncate says that all rows are gone. No row can.
func (s *bareShape) appendTruncate(dst []byte, p *tablePlan, _ *replication.Change) []byte {
	const value = `{"__truncated":true}`
	if len(p.valueHead) > 0 {
		return append(dst, `{"schema":null,"payload":`+value+`}`...)
	}
	return append(dst, value...)
}

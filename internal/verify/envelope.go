package verify

import (
	"bytes"
	"strconv"

	"github.com/walrelay/walrelay/checkpoint"
)

// envelope is what a record's value says of its change. The slices point into the value.
type envelope struct {
	op            byte
	before, after []byte // objects; nil for none
	xid           checkpoint.XID
	hasXID        bool
	schema, table []byte // JSON strings
}

// parseEnvelope reads a value of format.envelope: true, of either format.types. False
// where it is none.
func parseEnvelope(value []byte, schemas bool) (e envelope, ok bool) {
	if schemas {
		if value = member(value, `"payload"`); value == nil {
			return e, false
		}
	}
	var source []byte
	m := object(value)
	for name, v, more := m.next(); more; name, v, more = m.next() {
		switch string(name) {
		case `"op"`:
			if len(v) == len(`"c"`) && v[0] == '"' {
				e.op = v[1]
			}
		case `"before"`:
			if !isNull(v) {
				e.before = v
			}
		case `"after"`:
			if !isNull(v) {
				e.after = v
			}
		case `"source"`:
			source = v
		}
	}
	if m.bad || e.op == 0 || source == nil {
		return e, false
	}
	m = object(source)
	for name, v, more := m.next(); more; name, v, more = m.next() {
		switch string(name) {
		case `"tx_id"`, `"txId"`:
			if n, err := strconv.ParseUint(string(v), 10, 64); err == nil {
				e.xid, e.hasXID = checkpoint.XID(n), true
			}
		case `"schema"`:
			e.schema = v
		case `"table"`:
			e.table = v
		}
	}
	return e, !m.bad && e.whole()
}

// whole tells whether the envelope has the rows that its operation needs.
func (e *envelope) whole() bool {
	switch e.op {
	case 'c', 'u', 'r':
		return isObject(e.after)
	case 'd', 't':
		return true
	}
	return false
}

// deleted is the member that marks the last value of a row without an envelope, and
// truncated that of a truncate.
var deleted, truncated = `"__deleted"`, []byte(`{"__truncated":true}`)

// parseBare reads a value of format.envelope: false: the row itself.
func parseBare(value []byte, schemas bool) (e envelope, ok bool) {
	if schemas {
		if value = member(value, `"payload"`); value == nil {
			return e, false
		}
	}
	switch {
	case !isObject(value):
		return e, false
	case bytes.Equal(value, truncated):
		e.op = 't'
	case bytes.Contains(value, []byte(deleted)) && string(member(value, deleted)) == "true":
		e.op, e.before = 'd', value
	default:
		e.op, e.after = 'c', value
	}
	return e, true
}

func isObject(b []byte) bool { return len(b) >= 2 && b[0] == '{' && b[len(b)-1] == '}' }

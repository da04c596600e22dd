package snapshot

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"strconv"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// inserted remembers which rows of an outbox table the stream has brought while the
// table's rows are read: such a row is an event that is delivered, and is struck out of
// every chunk, whatever its snapshot sees.
//
// Memory is bounded by the end of what is read, the greatest key that there was when the
// table was planned. Rows that the stream brings mostly lie behind it, and are not remembered. That
// can be told where the first column of the order is an integer or a timestamp. Of others,
// as of event ids that are random, DefaultMaxInserted are remembered, and then the merger
// refuses to go on.
type inserted struct {
	keys map[insertedKey]struct{}
	// relation and column are where the order's first column, name, was last found.
	relation *replication.Relation
	name     string
	column   int
	buf      []byte
}

// insertedKey stands for a joined key: half of its SHA-256, of which no two are ever
// equal, is shorter than most keys.
type insertedKey [16]byte

// DefaultMaxInserted is some 60 MB.
const DefaultMaxInserted = 2_000_000

func hashKey[T string | []byte](key T) insertedKey {
	sum := sha256.Sum256([]byte(key))
	return insertedKey(sum[:len(insertedKey{})])
}

// note remembers a row that the stream brings, where it may be read. end is the last key
// to be read; nil where that is not known.
func (n *inserted) note(c *replication.Change, key string, order, end []string) {
	if end != nil && n.beyond(c, order[0], end[0]) {
		return
	}
	if n.keys == nil {
		n.keys = map[insertedKey]struct{}{}
	}
	n.keys[hashKey(key)] = struct{}{}
}

// strike strikes what the stream has brought out of a chunk.
func (n *inserted) strike(ch *chunk) {
	if len(n.keys) == 0 {
		return
	}
	for i := range ch.Rows.Len() {
		n.buf = ch.appendKey(n.buf[:0], i)
		if _, ok := n.keys[hashKey(n.buf)]; ok {
			ch.strikeRow(i)
		}
	}
}

// beyond tells whether a row surely lies behind the end of what is read.
func (n *inserted) beyond(c *replication.Change, column, end string) bool {
	if n.relation != c.Relation || n.name != column {
		n.relation, n.name, n.column = c.Relation, column, -1
		for i := range c.Relation.Columns {
			if c.Relation.Columns[i].Name == column {
				n.column = i
			}
		}
	}
	if n.column < 0 || c.New[n.column].Kind != replication.ValueText {
		return false
	}
	text := c.New[n.column].Text
	switch c.Relation.Columns[n.column].TypeOID {
	case oidInt2, oidInt4, oidInt8:
		a, err := strconv.ParseInt(string(text), 10, 64)
		if err != nil {
			return false
		}
		b, err := strconv.ParseInt(end, 10, 64)
		return err == nil && a > b
	case oidTimestamp, oidTimestamptz:
		// Both are in UTC, and in the ISO form: of the years with four digits the order is
		// that of the bytes.
		a, ok := isoTime(text)
		b, okEnd := isoTime([]byte(end))
		return ok && okEnd && bytes.Compare(a, b) > 0
	}
	return false
}

// The types of which the order of texts is known.
const (
	oidInt8        = 20
	oidInt2        = 21
	oidInt4        = 23
	oidTimestamp   = 1114
	oidTimestamptz = 1184
)

// isoTime gives a timestamp of a year with four digits without its zone, which is UTC.
func isoTime(text []byte) ([]byte, bool) {
	const form = "0000-00-00 00:00:00"
	text = bytes.TrimSuffix(text, []byte("+00"))
	if len(text) < len(form) {
		return nil, false
	}
	for i, c := range text {
		digit := c >= '0' && c <= '9'
		switch {
		case i < len(form) && form[i] != '0':
			if c != form[i] {
				return nil, false
			}
		case i == len(form):
			if c != '.' {
				return nil, false
			}
		case !digit:
			return nil, false
		}
	}
	return text, true
}

// overfull refuses to remember more.
func (t *table) overfull() error {
	return &checkpoint.Refusal{
		What: fmt.Sprintf("more than %d rows were inserted into outbox table %s while the rows from before were read, and its key %v does not tell them apart",
			t.m.o.MaxInserted, t.def, t.key),
		Risk: "each has to be remembered, or its event would go out twice: memory would grow without bound",
		Remedy: "start again at a time of fewer inserts (what is read stays read); or set snapshot: none under its outbox entry, which leaves the rows from before that are still to be read unsent; " +
			"for other first starts, an id that is an integer, or created_at NOT NULL, tells old rows from new ones",
	}
}

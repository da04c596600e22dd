package snapshot

import (
	"encoding/binary"
	"sync/atomic"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// Table is a table to be read, as the catalog has it and the configuration wants it.
type Table struct {
	OID    uint32
	Schema string
	Name   string
	// Key holds the columns that identify a row in every change, in the order in which
	// they are read: the replica identity's, the primary key's under FULL or NOTHING,
	// else source.keys. Nil where there are none.
	Key []string
	// Identity holds the columns by which a change finds its row, where that is not Key: an
	// outbox table's primary key, whose rows are read in another order.
	Identity []string
	// Whole tells that the table cannot be read by ranges of Key: there is none, or no
	// unique index on NOT NULL columns is behind it.
	Whole bool
	// Configured holds the columns of source.keys, which are Key where the table has no
	// key of its own. Nil where the configuration names none.
	Configured []string
	// Estimate is the planner's number of rows, -1 for not known.
	Estimate int64
	// Outbox tells that rows are events, which must not go out twice.
	Outbox bool
	// Where is an SQL condition that rows must meet: an outbox's pending ones. A
	// request's condition comes with its Order.
	Where string
}

// String gives schema.table, unquoted.
func (t Table) String() string { return t.Schema + "." + t.Name }

// OrderKind says what an Order wants.
type OrderKind uint8

// The kinds of orders.
const (
	// OrderPlan looks at the table: Chunk.Shape, Chunk.Splits where Pieces > 1, and
	// Chunk.End where asked for.
	OrderPlan OrderKind = iota + 1
	// OrderRange reads rows in the order of Key, behind After, up to To, until Rows or
	// Bytes are reached.
	OrderRange
	// OrderKeys reads the rows of Keys.
	OrderKeys
	// OrderWhole reads the table in one transaction. It is answered by several Chunks:
	// first one without rows, as soon as the MVCC snapshot is known, then pieces of at
	// most Rows and Bytes, the last one with Last.
	OrderWhole
	// OrderSnapshot reads nothing but the current MVCC snapshot and LSN.
	OrderSnapshot
)

// Order is what a reader is to do, in one REPEATABLE READ READ ONLY transaction that
// locks the table before it takes its snapshot.
type Order struct {
	ID    uint64
	Kind  OrderKind
	Table Table
	Where string // of a request; empty: none

	Key    []string // for OrderRange and OrderKeys: the columns that After, To and Keys are of
	After  []string // nil: from the beginning
	To     []string // nil: to the end
	Keys   [][]string
	Pieces int  // for OrderPlan: how many ranges are wanted
	End    bool // for OrderPlan: asks for the greatest key

	Rows  int
	Bytes int64

	// Xmin asks for each row's xmin (Chunk.Xmins).
	Xmin bool
	// Flushed asks for an answer only once the WAL up to LSN is on disk, so that a server
	// crash cannot undo what was read.
	Flushed bool

	// The Merger's own: which of the table's ranges this reads, and the newest snapshot
	// known when it was given out, which its own is not older than.
	span      *span
	floor     MVCC
	cancelled atomic.Bool
}

// Cancelled tells whether the answer is not wanted any more: whoever carries the order
// out may stop, and answers it all the same.
func (o *Order) Cancelled() bool { return o.cancelled.Load() }

// Chunk is the answer to an Order.
type Chunk struct {
	Order *Order
	// Gone tells that the table is not there, or not published, any more.
	Gone bool
	// Err is why the order cannot be carried out, now or later: a *checkpoint.Refusal
	// where a right or a setting is missing. Lost connections are not among it, those
	// the reader waits out.
	Err error

	Snapshot MVCC
	// LSN is where the WAL ended at the snapshot or a moment later: the commit record of
	// every transaction that the snapshot sees ends at or before it.
	LSN  checkpoint.LSN
	Time time.Time // the server's clock, UTC

	// Shape is the table under the snapshot. Its Relation's pointer stays the same while
	// the shape does.
	Shape Shape
	// Splits are the keys that part the table into Order.Pieces ranges of about equal
	// size, for OrderPlan; fewer where the table is small.
	Splits [][]string
	// End is the greatest key, where asked for; nil for no rows.
	End []string

	Rows  Rows
	Xmins []checkpoint.XID // by row, where asked for
	// Last tells that nothing is behind the last row in the range, or in the table.
	Last bool
	// Broken tells that an OrderWhole ended before its end, because the connection was
	// lost: its rows are void, and the table is to be read anew. It is the order's last.
	Broken bool

	slot chan struct{} // of an OrderWhole: where the piece's place is given back
}

// Shape is what a table looks like.
type Shape struct {
	// Relation is as the stream's RELATION message would describe the table: the
	// published columns in the table's order.
	Relation *replication.Relation
	// Key holds the key's columns as indexes into Relation.Columns, in the order of
	// Table.Key; it may differ from Order.Key after DDL. Nil where there is none.
	Key      []int
	Whole    bool
	Estimate int64
}

// Rows are rows in their text form, in one arena: per row and column the length as a
// 32-bit number, -1 for null, and the bytes, as in a DataRow message.
type Rows struct {
	arena   []byte
	at      []int // where each row begins
	columns int
}

// Reset empties r for rows of a number of columns and keeps its memory.
func (r *Rows) Reset(columns int) {
	r.arena, r.at, r.columns = r.arena[:0], r.at[:0], columns
}

// Add appends a row; nil values are null. It copies them.
func (r *Rows) Add(values [][]byte) {
	r.at = append(r.at, len(r.arena))
	for _, v := range values {
		n := int32(len(v))
		if v == nil {
			n = -1
		}
		r.arena = binary.BigEndian.AppendUint32(r.arena, uint32(n))
		r.arena = append(r.arena, v...)
	}
}

// Len is the number of rows.
func (r *Rows) Len() int { return len(r.at) }

// Bytes is the memory of the rows.
func (r *Rows) Bytes() int { return len(r.arena) }

// Tuple gives row i, written over dst. Its values lie in the arena and are valid until
// Reset.
func (r *Rows) Tuple(i int, dst replication.Tuple) replication.Tuple {
	dst = dst[:0]
	at := r.at[i]
	for range r.columns {
		n := int(int32(binary.BigEndian.Uint32(r.arena[at:])))
		at += 4
		if n < 0 {
			dst = append(dst, replication.Value{Kind: replication.ValueNull})
			continue
		}
		dst = append(dst, replication.Value{Kind: replication.ValueText, Text: r.arena[at : at+n : at+n]})
		at += n
	}
	return dst
}

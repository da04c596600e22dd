package replication

import (
	"time"

	"github.com/walrelay/walrelay/checkpoint"
)

// Op is what a change does to its table.
type Op byte

// The operations, by the letter that a record's "op" carries.
const (
	OpCreate   Op = 'c'
	OpUpdate   Op = 'u'
	OpDelete   Op = 'd'
	OpTruncate Op = 't'
	OpMessage  Op = 'm'
	OpRead     Op = 'r' // a snapshot row
)

// String gives the record's "op".
func (o Op) String() string { return string(byte(o)) }

// EventKind tells which of an Event's fields hold.
type EventKind uint8

// The kinds of events, in the order in which a source transaction sends them.
const (
	// KindBegin opens a source transaction; Event.Txn is set.
	KindBegin EventKind = iota + 1
	// KindChange is one change; Event.Change is set. Outside KindBegin and
	// KindCommit it is a logical message that is not transactional.
	KindChange
	// KindCommit closes the source transaction; Event.Txn is set, EndLSN included.
	KindCommit
	// KindProgress says that everything that ends at or before Event.LSN has been
	// sent; it comes only outside a source transaction.
	KindProgress
)

// Event is what the stream yields. It and all that it points to are valid until
// the next call of Stream.Next.
type Event struct {
	Kind   EventKind
	Txn    *Transaction
	Change *Change
	LSN    checkpoint.LSN
	// Urgent goes with KindProgress: the server asked for a reply. A server that is
	// shutting down waits until LSN is confirmed.
	Urgent bool
}

// Transaction is a source transaction.
type Transaction struct {
	XID        checkpoint.XID
	CommitLSN  checkpoint.LSN // where the commit record starts
	EndLSN     checkpoint.LSN // where it ends; 0 until KindCommit
	CommitTime time.Time      // UTC, microseconds
}

// Change is one row event or one logical message, decoded from the WAL.
type Change struct {
	Op  Op
	Seq uint64         // index within the source transaction, captured or not
	LSN checkpoint.LSN // the change's own; neither unique nor ordered
	// Txn is nil for a logical message that is not transactional.
	Txn *Transaction
	// Relation is nil for a logical message.
	Relation *Relation
	// Old is what PostgreSQL sent of the old row. OldIsKey tells that only the
	// replica identity's columns hold and the others are meaningless nulls.
	// Empty when nothing was sent.
	Old      Tuple
	OldIsKey bool
	// New is the new row; empty for deletes, truncates and messages.
	New Tuple
	// Message holds for OpMessage.
	Message Message
	// Read is set for what comes from a snapshot and not from the WAL: a row (OpRead),
	// or a truncate before a table is read anew. Txn is nil then.
	Read *ReadPoint
}

// ReadPoint is where in the stream a snapshot's rows stand.
type ReadPoint struct {
	CommitLSN checkpoint.LSN // of the last source transaction delivered before
	Time      time.Time      // when the rows were read, by the server's clock
	// Xmin is the first transaction that the rows need not be newer than: what every one
	// before it did had been seen when they were read.
	Xmin checkpoint.XID
}

// Message is a logical message (pg_logical_emit_message).
type Message struct {
	Prefix        string
	Transactional bool
	Content       []byte
}

// Tuple is a row as pgoutput sent it: one value per column of the relation, in
// its order.
type Tuple []Value

// ValueKind is pgoutput's letter for how a column's value stands in a tuple.
type ValueKind byte

// The kinds of values (PostgreSQL documentation, "Logical Replication Message
// Formats", TupleData).
const (
	ValueNull      ValueKind = 'n'
	ValueUnchanged ValueKind = 'u' // an unchanged TOAST value, which is not in the WAL
	ValueText      ValueKind = 't'
)

// Value is one column's value: the text form of PostgreSQL under our session's
// settings (UTF-8, TimeZone UTC, DateStyle ISO, IntervalStyle postgres, bytea hex).
type Value struct {
	Kind ValueKind
	Text []byte
}

// ReplicaIdentity is pg_class.relreplident.
type ReplicaIdentity byte

// The replica identities.
const (
	IdentityDefault ReplicaIdentity = 'd' // the primary key
	IdentityNothing ReplicaIdentity = 'n'
	IdentityFull    ReplicaIdentity = 'f' // the whole row
	IdentityIndex   ReplicaIdentity = 'i'
)

// Relation is a table as the RELATION message of that moment describes it. A
// value is never changed once a change points to it: another shape is another
// *Relation, so that the pointer may serve as a cache key.
type Relation struct {
	OID      uint32
	Schema   string
	Name     string
	Identity ReplicaIdentity
	Columns  []Column
	// PrimaryKey holds the indexes into Columns of the primary key, in the table's
	// column order, looked up in the catalog where RELATION does not tell (identity
	// FULL or NOTHING). Nil where there is none or RELATION's key flags are it.
	PrimaryKey []int
}

// Column is a column of a Relation.
type Column struct {
	Name     string
	TypeOID  uint32
	TypeMod  int32
	Identity bool // part of the replica identity; set on every column under FULL
}

// TypeName is a type as a TYPE message names it. A domain is named by the type at the
// bottom of it; pg_catalog is an empty schema.
type TypeName struct{ Schema, Name string }

// Key gives the indexes into Columns of the columns that identify a row, in the
// table's column order: the primary key, or the index that is the replica
// identity. Nil where the table has neither.
func (r *Relation) Key() []int {
	switch r.Identity {
	case IdentityFull, IdentityNothing:
		return r.PrimaryKey
	}
	var at []int
	for i, c := range r.Columns {
		if c.Identity {
			at = append(at, i)
		}
	}
	return at
}

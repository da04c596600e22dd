package cdctest

import (
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
)

// Truth is what a workload did to the database: the oracle that a log is held
// against. It is exact as long as every COMMIT's outcome is known.
type Truth struct {
	Tables []*Table
	// Committed holds every transaction that was committed, in the order in which the
	// commits returned, which is not the commit order.
	Committed []*Txn
	// RolledBack holds those that left nothing behind. Their changes are what was done
	// before the end, so that a record of them can be told from plain nonsense.
	RolledBack []*Txn
	// Messages holds the logical messages that are not transactional. They stay,
	// whatever became of the transaction around them.
	Messages []Message
	// EarlyMessages are those from before Started, which the stream need not have.
	EarlyMessages []Message
	// Final holds each table's rows after the last transaction.
	Final map[string][]Row
	// Started is a tick, taken when the connector's slot was seen: what was sent to
	// commit after it must be in the stream. 0 means that all of it must be. What
	// committed earlier may lie before the slot's beginning, and is then in the tables
	// that the snapshot reads.
	Started int64
	// Passes is, per table, how many times a snapshot of it was asked for beside the
	// first one.
	Passes map[string]int
}

// Table is a table as the workload made it.
type Table struct {
	Schema, Name string
	Columns      []Column
	Full         bool // REPLICA IDENTITY FULL
	Outbox       bool
}

// Keyless tells whether the table has no key: its records have the key null and lie in
// one partition, and its snapshot is read in one piece.
func (t *Table) Keyless() bool {
	return !slices.ContainsFunc(t.Columns, func(c Column) bool { return c.Key })
}

// Column is a column of a Table.
type Column struct {
	Name string
	Type string // PostgreSQL's internal type name: int4, text, timestamptz, ...
	Key  bool   // part of the primary key
	Big  bool   // storage external: may be an unchanged TOAST value, absent from an update
}

// ID gives schema.table.
func (t *Table) ID() string { return t.Schema + "." + t.Name }

// Row is a row: the text of each column of its table in a session with TimeZone
// UTC, nil for NULL.
type Row []*string

// Txn is a source transaction.
type Txn struct {
	XID     uint64
	Session int // the session that ran it
	Index   int // its number within the session
	// CommitSent and CommitDone are ticks of one counter, taken before COMMIT was sent
	// and after it returned: where one transaction's CommitDone is below another's
	// CommitSent, its commit record comes first.
	CommitSent, CommitDone int64
	// Begun is a tick of the same counter, from before its first statement.
	Begun int64
	// Commit is where the commit record starts; 0 where nobody asked the WAL (see Ledger).
	Commit  checkpoint.LSN
	Changes []Change // in the order in which they were made, rolled back savepoints left out
}

// Change is one change that a transaction made.
type Change struct {
	Op    byte   // c u d t, or m for a transactional message
	Table *Table // nil for a message
	// Old is the row before, where it is known; nil otherwise. New is the row after.
	Old, New Row
	Message  Message
}

// Message is a logical message.
type Message struct {
	Prefix  string
	Content string
}

// table finds a table by its ID.
func (t *Truth) table(id string) *Table {
	i := slices.IndexFunc(t.Tables, func(x *Table) bool { return x.ID() == id })
	if i < 0 {
		return nil
	}
	return t.Tables[i]
}

// Layout is how the connector under test was configured, as far as it decides what
// a log must hold.
type Layout struct {
	// Prefix is topics.prefix.
	Prefix string
	// Partitions is the partition count of every topic.
	Partitions int32
	// Captured tells whether a table's changes become records. Nil captures all.
	Captured func(table string) bool
	// CapturedMessage tells the same of a message's prefix. Nil captures all.
	CapturedMessage func(prefix string) bool
	// PublishesAll is true where the publication also sends an outbox table's updates,
	// deletes and truncates (publication-mode existing): they give no record, but
	// count in seq.
	PublishesAll bool
	// NoTombstones is format.tombstones: false.
	NoTombstones bool
}

func (l Layout) captured(table string) bool { return l.Captured == nil || l.Captured(table) }

func (l Layout) capturedMessage(prefix string) bool {
	return l.CapturedMessage == nil || l.CapturedMessage(prefix)
}

// published tells whether the server sends the change at all; what it sends counts
// in seq.
func (l Layout) published(c Change) bool {
	if c.Table == nil {
		return true // messages are always asked for
	}
	if c.Table.Outbox && c.Op != 'c' {
		return l.PublishesAll
	}
	return l.PublishesAll || l.captured(c.Table.ID())
}

// delivered tells whether the change becomes records.
func (l Layout) delivered(c Change) bool {
	switch {
	case c.Table == nil:
		return l.capturedMessage(c.Message.Prefix)
	case c.Table.Outbox:
		return c.Op == 'c' && l.captured(c.Table.ID())
	default:
		return l.captured(c.Table.ID())
	}
}

// topic gives the topic of a change's records.
func (l Layout) topic(c Change) string {
	switch {
	case c.Table == nil:
		return l.Prefix + ".message"
	case c.Table.Outbox:
		return "outbox.event." + c.text(c.New, "event_type")
	default:
		return l.tableTopic(c.Table)
	}
}

func (l Layout) tableTopic(t *Table) string { return l.Prefix + "." + t.ID() }

// text gives a column's text, "" for NULL and for a column that is not there.
func (c Change) text(row Row, column string) string {
	if p := c.Table.value(row, column); p != nil {
		return *p
	}
	return ""
}

func (t *Table) value(row Row, column string) *string {
	i := slices.IndexFunc(t.Columns, func(x Column) bool { return x.Name == column })
	if i < 0 || i >= len(row) {
		return nil
	}
	return row[i]
}

// sameKey tells whether two rows have the same primary key.
func (t *Table) sameKey(a, b Row) bool {
	for i, c := range t.Columns {
		if c.Key && !equalText(a[i], b[i]) {
			return false
		}
	}
	return true
}

func equalText(a, b *string) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

package checkpoint

import "time"

// TableState is how far the snapshot of a table is.
type TableState string

// The states, in their order. A table that has none is not known yet.
const (
	// TableWaiting: its publication change, or a request, is younger than transactions
	// that are still running, so that no chunk is opened before they have ended.
	TableWaiting TableState = "waiting"
	// TablePending: its turn has not come.
	TablePending TableState = "pending"
	// TableReading: some of its rows are delivered, or are about to be.
	TableReading TableState = "reading"
	// TableDone: every row is delivered; it is never read again by itself.
	TableDone TableState = "done"
)

// TableProgress is the progress of one table's snapshot, kept under the table's OID. It
// is written in the Kafka transaction of the rows that it counts (DESIGN, invariant 2).
type TableProgress struct {
	Table string // schema.table, for people
	State TableState
	// Key holds the columns by which the ranges are read, in their order. Nil before the
	// first chunk, and for a table that is read whole.
	Key []string
	// Ranges are those not finished; nil before the first chunk and when all are read.
	Ranges []Range
	// Again holds keys whose rows are to be read once more before the table is done,
	// because an incomplete change went out without them. Each stands there once; new
	// ones come at the end.
	Again [][]string
	// Whole tells that the table is read in one piece, which a restart begins again.
	Whole bool
	// Beside tells that the stream runs beside an outbox table's rows, and no longer waits
	// until those from before the slot are out.
	Beside bool
	Rows   int64 // delivered as reads so far
	// Began is when the first chunk was ordered; zero before.
	Began time.Time
	// Request is the one that asked for this snapshot; nil for a table's first.
	Request *Request
}

// Range is a stretch of a table's keys that is not wholly delivered. Keys are the
// columns' text under our session's settings, any bytes.
type Range struct {
	After []string // the last key delivered; nil: from the beginning
	To    []string // the last key that belongs to the range; nil: to the end
}

// Request asks for tables to be read again. It is a record of its own in the checkpoint
// topic, with the key "request/" and the ID.
type Request struct {
	ID      string
	Tables  []string // schema.table
	Where   string   // SQL condition; empty: every row
	Replace bool     // a truncate goes out first
	At      time.Time
}

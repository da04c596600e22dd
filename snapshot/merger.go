package snapshot

import (
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// Options of a Merger.
type Options struct {
	ChunkRows  int
	ChunkBytes int64
	Readers    int // orders carried out at once; twice as many chunks are in hand
}

// Verdict is what becomes of a change of the stream.
type Verdict uint8

// The verdicts.
const (
	// Emit: the change goes out now.
	Emit Verdict = iota
	// Drop: the rows that will be read contain it (tables that are read whole).
	Drop
	// Hold: it goes out when the table's rows are out (tables that are read whole).
	Hold
)

// Row is a row of a chunk that goes out as a read; or, with Truncate, a truncate before
// a table is read anew.
type Row struct {
	Table    uint32
	Relation *replication.Relation
	Tuple    replication.Tuple // valid until the next call of Next
	Time     time.Time
	Truncate bool
	Outbox   bool
}

// Merger merges chunks into the stream. It is pure: no I/O, no clock but the one handed
// in, no goroutine. One goroutine owns it, the one that takes the stream's events; it
// calls, in the order in which things happen:
//
//   - Begin, Change and Reached with what the stream sends, what is skipped as delivered
//     before included;
//   - Saw and Arrived with what the readers answer;
//   - Order for what to read next, Paused for whether the stream has to stand still;
//   - Next for the rows that may go out, only between source transactions.
type Merger struct{ impl }

// NewMerger makes a Merger for tables, with the progress that the checkpoint has of them.
// since is where the stream begins: nothing before it is sent.
func NewMerger(o Options, since checkpoint.LSN) *Merger { panic("not yet") }

// Add makes a table known, with its progress (State pending where it is new and safe to
// be read, waiting where it must first be released with Release).
func (m *Merger) Add(t Table, p checkpoint.TableProgress) { panic("not yet") }

// Remove forgets a table that is no longer published or captured.
func (m *Merger) Remove(oid uint32) { panic("not yet") }

// Release lets a waiting table be read: every transaction that its publication change, or
// its request, had to wait for has ended.
func (m *Merger) Release(oid uint32) { panic("not yet") }

// Active tells whether any table is not done.
func (m *Merger) Active() bool { panic("not yet") }

// Begin opens a source transaction; before is the LSN up to which the stream has sent
// everything.
func (m *Merger) Begin(xid checkpoint.XID, before checkpoint.LSN) { panic("not yet") }

// Change takes a row change of the transaction that Begin opened. Where the change lacks
// unchanged TOAST values that a chunk in memory has, they are filled in, in c.New.
func (m *Merger) Change(c *replication.Change) Verdict { panic("not yet") }

// Reached says that the stream has sent everything that ends at or before lsn, and that
// no source transaction is open.
func (m *Merger) Reached(lsn checkpoint.LSN) { panic("not yet") }

// Saw takes an MVCC snapshot that was taken at any time, by anybody, on the primary.
func (m *Merger) Saw(s MVCC) { panic("not yet") }

// Arrived takes the answer to an order. The chunk's memory is the Merger's until it comes
// back through Recycle.
func (m *Merger) Arrived(c *Chunk, now time.Time) error { panic("not yet") }

// Order gives what is to be read next; nil while nothing is, or as much is in hand
// already as Options allow.
func (m *Merger) Order(now time.Time) *Order { panic("not yet") }

// Paused tells whether no further source transaction must be taken from the stream for
// the moment: a read is under way that has to see everything that has passed. It lasts
// a second at most; wake is when to ask again.
func (m *Merger) Paused(now time.Time) (paused bool, wake time.Time) { panic("not yet") }

// Next gives the next row that may go out, in the order of its range. To be called
// between source transactions only. What it gave counts as delivered in Progress.
func (m *Merger) Next() (*Row, bool) { panic("not yet") }

// Released tells whether the held changes of a table may go out now, and after them its
// progress: the caller delivers them and then calls HeldOut.
func (m *Merger) Released() (oid uint32, ok bool) { panic("not yet") }

// HeldOut says that every held change of the table has been handed out.
func (m *Merger) HeldOut(oid uint32) { panic("not yet") }

// Progress gives the tables whose progress changed since the last call, to go into the
// checkpoint of the batch that holds the rows and changes taken so far. Nil for none.
func (m *Merger) Progress() map[uint32]checkpoint.TableProgress { panic("not yet") }

// Hold gives the LSN beyond which nothing may be confirmed to PostgreSQL, so that a
// restart is sent again what its memory needs; false where there is no such bound.
func (m *Merger) Hold() (checkpoint.LSN, bool) { panic("not yet") }

// Recycle gives back a chunk whose memory is free again; nil for none.
func (m *Merger) Recycle() *Chunk { panic("not yet") }

type impl struct{}

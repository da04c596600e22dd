package snapshot

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/walrelay/walrelay/checkpoint"
)

// wireBuffer is how much is read from the socket at once: the frontend alone would take
// 8 KiB, a system call per 40 rows.
const wireBuffer = 128 << 10

const (
	headerSize = 5 // a message's letter, and its length that counts itself
	lengthSize = 4
	dataRow    = 'D'
)

// wire stands between the socket and pgconn. While a sink is set it takes the rows out,
// straight into the chunk's memory, and pgconn sees a result without rows: its state
// machine, contexts and errors work as ever, but nothing is allocated or copied per row
// on the way. What a DataRow holds is what Rows hold.
type wire struct {
	r    *bufio.Reader
	pass int   // bytes of the message at hand that still go through
	sink *sink // nil: everything goes through
}

func newWire(r io.Reader) *wire { return &wire{r: bufio.NewReaderSize(r, wireBuffer)} }

// Read gives pgconn what is for it.
func (w *wire) Read(p []byte) (int, error) {
	for w.pass == 0 {
		head, err := w.r.Peek(headerSize)
		if err != nil {
			return 0, err
		}
		n := int(int32(binary.BigEndian.Uint32(head[1:])))
		if n < lengthSize {
			return 0, fmt.Errorf("message %q of length %d from the server", head[0], n)
		}
		if w.sink == nil || head[0] != dataRow {
			w.pass = 1 + n
			break
		}
		if err := w.take(n - lengthSize); err != nil {
			return 0, err
		}
	}
	n, err := w.r.Read(p[:min(len(p), w.pass)])
	w.pass -= n
	return n, err
}

// take hands one row, n bytes behind the header, to the sink.
func (w *wire) take(n int) error {
	s := w.sink
	if s.done {
		_, err := w.r.Discard(headerSize + n)
		return err
	}
	if headerSize+n <= w.r.Size() {
		message, err := w.r.Peek(headerSize + n)
		if err != nil {
			return err
		}
		if err := s.add(message[headerSize:]); err != nil {
			return err
		}
		_, err = w.r.Discard(headerSize + n)
		return err
	}
	if _, err := w.r.Discard(headerSize); err != nil {
		return err
	}
	// A row that is larger than the buffer goes where it will stay.
	at := len(s.rows.arena)
	s.rows.grow(n, s.limit)
	row := s.rows.arena[at : at+n]
	if _, err := io.ReadFull(w.r, row); err != nil {
		return err
	}
	return s.addInPlace(row)
}

// sink takes the rows of one query.
type sink struct {
	rows    *Rows
	columns int  // of a row, xmin not counted
	xmin    bool // the first column is xmin
	next    checkpoint.XID
	xmins   []checkpoint.XID

	limit int64 // bytes; 0: none
	count int   // rows; 0: none
	// full is called when a limit is reached; it empties the sink, or sets done.
	full func() error
	done bool // what follows is thrown away
	cut  bool // done was set by a limit in bytes
}

var errRow = errors.New("a row from the server does not have the columns that were asked for")

// add copies a DataRow's content.
func (s *sink) add(row []byte) error {
	row, err := s.open(row)
	if err != nil {
		return err
	}
	at := len(s.rows.arena)
	s.rows.grow(len(row), s.limit)
	s.rows.arena = append(s.rows.arena, row...)
	return s.added(at)
}

// addInPlace takes a DataRow's content that lies right behind the arena already.
func (s *sink) addInPlace(row []byte) error {
	at := len(s.rows.arena)
	values, err := s.open(row)
	if err != nil {
		return err
	}
	s.rows.arena = append(s.rows.arena, values...) // moves it over the column count
	return s.added(at)
}

func (s *sink) added(at int) error {
	s.rows.at = append(s.rows.at, at)
	if s.limit > 0 && int64(len(s.rows.arena)) >= s.limit || s.count > 0 && len(s.rows.at) >= s.count {
		if s.full != nil {
			return s.full()
		}
	}
	return nil
}

// open checks a DataRow and takes the number of columns and xmin off.
func (s *sink) open(row []byte) ([]byte, error) {
	columns := s.columns
	if s.xmin {
		columns++
	}
	if len(row) < 2 || int(binary.BigEndian.Uint16(row)) != columns {
		return nil, errRow
	}
	row = row[2:]
	if s.xmin {
		text, rest, ok := cutValue(row)
		if !ok {
			return nil, errRow
		}
		x, err := strconv.ParseUint(string(text), 10, 32)
		if err != nil {
			return nil, errRow
		}
		s.xmins = append(s.xmins, widenXmin(uint32(x), s.next))
		row = rest
	}
	rest := row
	for range s.columns {
		_, after, ok := cutValue(rest)
		if !ok {
			return nil, errRow
		}
		rest = after
	}
	if len(rest) != 0 {
		return nil, errRow
	}
	return row, nil
}

// cutValue takes the first value off a DataRow; nil for null.
func cutValue(row []byte) (value, rest []byte, ok bool) {
	if len(row) < lengthSize {
		return nil, nil, false
	}
	n := int(int32(binary.BigEndian.Uint32(row)))
	row = row[lengthSize:]
	if n == -1 {
		return nil, row, true
	}
	if n < 0 || n > len(row) {
		return nil, nil, false
	}
	return row[:n], row[n:], true
}

// widenXmin gives the 64-bit transaction id of a row's xmin: the largest below next, the
// first id that is not given out. The ids below 3 are not transactions: such a row has
// been there for ever.
func widenXmin(x uint32, next checkpoint.XID) checkpoint.XID {
	const firstNormal = 3
	if x < firstNormal || next == 0 {
		return checkpoint.XID(x)
	}
	wide := (next-1)&^0xFFFFFFFF | checkpoint.XID(x)
	if wide >= next && wide >= 1<<32 {
		wide -= 1 << 32
	}
	return wide
}

// grow makes room for n more bytes. It doubles, as append does, but not past limit while
// that suffices, so that a chunk takes no more memory than it may.
func (r *Rows) grow(n int, limit int64) {
	need := len(r.arena) + n
	if need <= cap(r.arena) {
		return
	}
	size := max(2*cap(r.arena), 64<<10)
	if limit > 0 && int64(size) > limit {
		size = int(limit)
	}
	arena := make([]byte, len(r.arena), max(size, need))
	copy(arena, r.arena)
	r.arena = arena
}

package checkpoint

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Position says how far the stream has been delivered. It is the one value a
// restart needs to continue without a gap and without a repeat.
//
// What must hold:
//
//  1. Every source transaction whose commit record ends at or before LSN, and
//     every non-transactional message whose record ends at or before LSN, has
//     been delivered or excluded. Because records do not overlap, a transaction
//     with commit LSN C is delivered exactly if C < LSN.
//  2. If Cut is set, the first Cut.Changes changes of the source transaction
//     with that commit LSN have been delivered too, and LSN <= Cut.CommitLSN.
//  3. LSN never goes back, and is always the end of a WAL record.
type Position struct {
	LSN LSN
	// CommitLSN and CommitTime are those of the last source transaction delivered,
	// wholly or (when cut) partly. Before the first they are what Beginning gives.
	CommitLSN  LSN
	CommitTime time.Time
	// Cut is set while a large source transaction is delivered in pieces.
	Cut Cut
}

// Cut names the delivered part of a source transaction that did not fit into one
// batch.
type Cut struct {
	CommitLSN LSN
	Changes   uint64 // delivered or excluded: those with seq < Changes
}

// Beginning is the position of a stream that begins at lsn, with nothing delivered. The
// commit LSN, which the rows of a snapshot carry, is the byte before: a commit record may
// stand at lsn itself, and that transaction comes behind those rows.
func Beginning(lsn LSN) Position { return Position{LSN: lsn, CommitLSN: max(lsn, 1) - 1} }

// IsZero tells whether no transaction is cut.
func (c Cut) IsZero() bool { return c == Cut{} }

// IsZero tells whether p is the position before anything.
func (p Position) IsZero() bool { return p.LSN == 0 && p.Cut.IsZero() }

// HasTransaction tells whether the source transaction with the commit LSN commit
// was delivered completely.
func (p Position) HasTransaction(commit LSN) bool { return commit < p.LSN }

// HasMessage tells whether the non-transactional message whose record ends at end
// was delivered.
func (p Position) HasMessage(end LSN) bool { return end <= p.LSN }

// Skip gives the number of changes at the start of the source transaction with
// the commit LSN commit that were delivered before it was cut.
func (p Position) Skip(commit LSN) uint64 {
	if p.Cut.CommitLSN == commit {
		return p.Cut.Changes
	}
	return 0
}

// Check tells whether p keeps property 2: a cut transaction is not one that was
// delivered completely. Who makes a position or reads a stored one checks it.
func (p Position) Check() error {
	if !p.Cut.IsZero() && p.Cut.CommitLSN < p.LSN {
		return fmt.Errorf("position %s is cut in a transaction that it has delivered", p)
	}
	return nil
}

// String gives the position for people: the LSN and, when cut, where.
func (p Position) String() string {
	if p.Cut.IsZero() {
		return p.LSN.String()
	}
	return fmt.Sprintf("%s+%s:%d", p.LSN, p.Cut.CommitLSN, p.Cut.Changes)
}

// AppendHeader appends the header "position" of a change's records,
// %016X-%010d of its commit LSN and seq: sorted as text it orders changes as they
// were delivered.
func AppendHeader(dst []byte, commit LSN, seq uint64) []byte {
	dst = appendHex16(dst, commit)
	dst = append(dst, '-')
	var buf [20]byte
	d := strconv.AppendUint(buf[:0], seq, 10)
	for i := len(d); i < 10; i++ {
		dst = append(dst, '0')
	}
	return append(dst, d...)
}

// AppendSnapshotHeader appends the header "position" of a snapshot row,
// %016X-snapshot of the commit LSN delivered before it.
func AppendSnapshotHeader(dst []byte, commit LSN) []byte {
	return append(appendHex16(dst, commit), "-snapshot"...)
}

func appendHex16(dst []byte, l LSN) []byte {
	for shift := 60; shift >= 0; shift -= 4 {
		dst = append(dst, upperHex[l>>shift&0xf])
	}
	return dst
}

// ParseHeader reads what AppendHeader wrote. For a snapshot row snapshot is true
// and seq is 0.
func ParseHeader(s string) (commit LSN, seq uint64, snapshot bool, err error) {
	head, tail, ok := strings.Cut(s, "-")
	c, errC := strconv.ParseUint(head, 16, 64)
	if !ok || len(head) != 16 || errC != nil {
		return 0, 0, false, fmt.Errorf("parse position %q: want 16 hexadecimal digits, a dash and a number", s)
	}
	if tail == "snapshot" {
		return LSN(c), 0, true, nil
	}
	n, errN := strconv.ParseUint(tail, 10, 64)
	if errN != nil || len(tail) < 10 {
		return 0, 0, false, fmt.Errorf("parse position %q: want at least 10 digits or \"snapshot\" behind the dash", s)
	}
	return LSN(c), n, false, nil
}

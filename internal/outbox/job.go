package outbox

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/snapshot"
)

// Job is work on rows of one target, for a Marker. It is reused: filled by whoever hands
// it out, and looked at when it is back.
type Job struct {
	Target *Target
	// LockWait is how long a lock of the application is waited for.
	LockWait time.Duration
	// Err tells why nothing was done. Everything or nothing is.
	Err error

	rows   []jobRow
	keys   []byte
	arrays [][]byte // parameters of the statement, one per column
}

type jobRow struct {
	xid     checkpoint.XID
	at      int // its key in keys
	settled bool
}

// Reset empties the job, for rows of a target.
func (j *Job) Reset(t *Target) {
	*j = Job{Target: t, LockWait: LockWait, rows: j.rows[:0], keys: j.keys[:0], arrays: j.arrays}
}

// Add adds a row by its key, as AppendKey makes it. xid is the transaction that wrote it,
// and must be visible before anything is done: the stream shows a commit before queries see it, and a row that
// is not seen yet would be taken for one that is gone. Zero: it was seen.
func (j *Job) Add(xid checkpoint.XID, key []byte) {
	j.rows = append(j.rows, jobRow{xid: xid, at: len(j.keys)})
	j.keys = append(j.keys, key...)
}

// Len is the number of rows.
func (j *Job) Len() int { return len(j.rows) }

// Settled tells whether nothing is left to be done about row i: it is worked on, or was
// gone. If not, and Err is nil, its transaction was not visible yet.
func (j *Job) Settled(i int) bool { return j.rows[i].settled }

// Key gives the texts of row i's key.
func (j *Job) Key(i int) []string { return SplitKey(j.keys[j.rows[i].at:], len(j.Target.Key)) }

// Settle notes that nothing is left to be done about row i.
func (j *Job) Settle(i int) { j.rows[i].settled = true }

// look settles the rows whose transactions are seen, provided that the statement
// succeeds, and tells whether there are any.
func (j *Job) look(seen snapshot.MVCC) bool {
	found := false
	for i := range j.rows {
		r := &j.rows[i]
		r.settled = r.xid == 0 || seen.Sees(r.xid)
		found = found || r.settled
	}
	return found
}

// wantsLook tells whether it has to be known which transactions are visible.
func (j *Job) wantsLook() bool {
	for i := range j.rows {
		if j.rows[i].xid != 0 {
			return true
		}
	}
	return false
}

// failed notes that nothing was done.
func (j *Job) failed(err error) {
	j.Err = err
	for i := range j.rows {
		j.rows[i].settled = false
	}
}

// parameters gives the keys of the settled rows as text arrays, one per column.
func (j *Job) parameters() [][]byte {
	n := len(j.Target.Key)
	for len(j.arrays) < n {
		j.arrays = append(j.arrays, nil)
	}
	list := j.arrays[:n]
	for i := range list {
		list[i] = append(list[i][:0], '{')
	}
	first := true
	for _, r := range j.rows {
		if !r.settled {
			continue
		}
		key := j.keys[r.at:]
		for i := range list {
			var text []byte
			text, key = cutColumn(key)
			if !first {
				list[i] = append(list[i], ',')
			}
			list[i] = appendElement(list[i], text)
		}
		first = false
	}
	for i := range list {
		list[i] = append(list[i], '}')
	}
	return list
}

// appendElement appends an element of an array's text form, quoted.
func appendElement(dst, text []byte) []byte {
	dst = append(dst, '"')
	for _, c := range text {
		if c == '"' || c == '\\' {
			dst = append(dst, '\\')
		}
		dst = append(dst, c)
	}
	return append(dst, '"')
}

// AppendColumn appends the text of a key's next column to the key.
func AppendColumn(key, text []byte) []byte {
	key = binary.AppendUvarint(key, uint64(len(text)))
	return append(key, text...)
}

// SplitKey gives the texts of a key's n columns.
func SplitKey(key []byte, n int) []string {
	list := make([]string, n)
	for i := range list {
		var text []byte
		text, key = cutColumn(key)
		list[i] = string(text)
	}
	return list
}

func cutColumn(key []byte) (text, rest []byte) {
	n, used := binary.Uvarint(key)
	if used <= 0 || uint64(len(key)-used) < n {
		panic(fmt.Sprintf("outbox: a key of %d bytes ends within a column", len(key)))
	}
	return key[used : used+int(n)], key[used+int(n):]
}

package verify

import (
	"cmp"
	"encoding/binary"

	"github.com/walrelay/walrelay/checkpoint"
)

// Every entry begins with its key: the length as a varint, and the bytes.

func appendBytes(dst, b []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(b)))
	return append(dst, b...)
}

func cutBytes(b []byte) (value, rest []byte) {
	if n := int(b[0]); n < 0x80 {
		return b[1 : 1+n], b[1+n:]
	}
	n, width := binary.Uvarint(b)
	end := width + int(n)
	return b[width:end], b[end:]
}

func entryKey(entry []byte) []byte {
	key, _ := cutBytes(entry)
	return key
}

// order is where a record stands among those of its key: by position, then offset. seq is
// the largest number for a row of a snapshot, which stands behind its transaction.
type order struct {
	commit    checkpoint.LSN
	seq       uint64
	partition int32
	offset    int64
}

const snapshotSeq = ^uint64(0)

func (o order) compare(p order) int {
	return cmp.Or(o.comparePosition(p), cmp.Compare(o.offset, p.offset))
}

func (o order) comparePosition(p order) int {
	return cmp.Or(cmp.Compare(o.commit, p.commit), cmp.Compare(o.seq, p.seq))
}

// What a record does to the row of its key.
const (
	kindSet       byte = iota // sets the columns that it holds
	kindDelete                // d
	kindTombstone             // a null value
)

// What is to be known of a record beside.
const (
	flagUnsettled byte = 1 << iota // whether the snapshot sees its transaction is not certain
	flagReplayed                   // delivered again by walrelay replay
	flagUnplaced                   // without a position
	flagMoved                      // previous is the key that the row had before
	flagAggregate                  // tells the order of an aggregate's events; row is the seq
)

// change is a record of a topic, as far as folding needs it. The slices point into the
// entry it was read from.
type change struct {
	key      []byte
	kind, op byte
	flags    byte
	order    order
	sum      uint64 // of the whole value, where it is a snapshot's; else 0
	previous []byte
	row      []byte // the columns that the record holds; an event's value
}

func (c *change) append(dst []byte) []byte {
	dst = appendBytes(dst, c.key)
	dst = append(dst, c.kind, c.op, c.flags)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(c.order.commit))
	dst = binary.AppendUvarint(dst, c.order.seq+1) // 0 for a snapshot's
	dst = binary.AppendUvarint(dst, uint64(c.order.partition))
	dst = binary.AppendUvarint(dst, uint64(c.order.offset))
	if c.order.seq == snapshotSeq {
		dst = binary.LittleEndian.AppendUint64(dst, c.sum)
	}
	if c.flags&flagMoved != 0 {
		dst = appendBytes(dst, c.previous)
	}
	return append(dst, c.row...)
}

func parseChange(entry []byte) (c change) {
	c.key, entry = cutBytes(entry)
	c.kind, c.op, c.flags = entry[0], entry[1], entry[2]
	c.order.commit = checkpoint.LSN(binary.LittleEndian.Uint64(entry[3:]))
	entry = entry[3+8:]
	seq, n := binary.Uvarint(entry)
	entry = entry[n:]
	partition, n := binary.Uvarint(entry)
	entry = entry[n:]
	offset, n := binary.Uvarint(entry)
	entry = entry[n:]
	c.order.seq, c.order.partition, c.order.offset = seq-1, int32(partition), int64(offset)
	if c.order.seq == snapshotSeq {
		c.sum, entry = binary.LittleEndian.Uint64(entry), entry[8:]
	}
	if c.flags&flagMoved != 0 {
		c.previous, entry = cutBytes(entry)
	}
	c.row = entry
	return c
}

// row is a row of the table: what its key's record has to hold.
type row struct {
	key, value []byte
}

func (r *row) append(dst []byte) []byte { return append(appendBytes(dst, r.key), r.value...) }

// appendRow appends a row whose key is told by its hash.
func appendRow(dst []byte, hash uint64, value []byte) []byte {
	dst = append(dst, digestSize)
	dst = binary.LittleEndian.AppendUint64(dst, hash)
	return append(dst, value...)
}

func parseRow(entry []byte) (r row) {
	r.key, r.value = cutBytes(entry)
	return r
}

// carry asks for columns that a key's records name by their absence: the row had them
// under its previous key, before that change.
type carry struct {
	previous []byte // the entry's key
	before   order
	found    []byte // the columns known so far, an object
	row      row    // the table's
	flags    byte
}

func (c *carry) append(dst []byte) []byte {
	dst = appendBytes(dst, c.previous)
	dst = append(dst, c.flags)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(c.before.commit))
	dst = binary.LittleEndian.AppendUint64(dst, c.before.seq)
	dst = appendBytes(dst, c.found)
	return c.row.append(dst)
}

func parseCarry(entry []byte) (c carry) {
	c.previous, entry = cutBytes(entry)
	c.flags, entry = entry[0], entry[1:]
	c.before.commit = checkpoint.LSN(binary.LittleEndian.Uint64(entry))
	c.before.seq = binary.LittleEndian.Uint64(entry[8:])
	c.found, entry = cutBytes(entry[16:])
	c.row = parseRow(entry)
	return c
}

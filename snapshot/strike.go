package snapshot

import (
	"encoding/binary"
	"hash/maphash"

	"github.com/walrelay/walrelay/replication"
)

// chunk is a chunk in memory, with what is struck out of it.
type chunk struct {
	*Chunk
	cursor int // rows before it are out, or struck out
	all    bool
	bits   []uint64 // struck rows
	// identity are the columns by which changes find rows.
	identity []int

	// slots is an open hash table of row numbers + 1, by key, made when first asked for.
	slots []int32
	// relation and mapped are the last relation of a change that was filled, and its
	// columns' places in the chunk's.
	relation *replication.Relation
	mapped   []int
	buf      []byte
	tuple    replication.Tuple
}

var seed = maphash.MakeSeed()

func newChunk(c *Chunk) *chunk {
	ch := &chunk{Chunk: c, identity: c.Shape.Key}
	if names := c.Order.Table.Identity; names != nil {
		ch.identity = nil
		for _, name := range names {
			for i := range c.Shape.Relation.Columns {
				if c.Shape.Relation.Columns[i].Name == name {
					ch.identity = append(ch.identity, i)
				}
			}
		}
	}
	return ch
}

func (c *chunk) strikeAll() { c.all = true }

func (c *chunk) struck(i int) bool {
	return c.all || len(c.bits) > 0 && c.bits[i>>6]&(1<<(i&63)) != 0
}

// strike strikes out the row of a joined key, if it is there.
func (c *chunk) strike(key string) {
	if i := c.lookup(key); i >= 0 {
		c.strikeRow(i)
	}
}

func (c *chunk) strikeRow(i int) {
	if c.bits == nil {
		c.bits = make([]uint64, (c.Rows.Len()+63)/64)
	}
	c.bits[i>>6] |= 1 << (i & 63)
}

// has tells whether the row of a joined key was read, struck out or not.
func (c *chunk) has(key string) bool { return c.lookup(key) >= 0 }

// find gives the row of a joined key that is neither out nor struck out; -1 for none.
func (c *chunk) find(key string) int {
	i := c.lookup(key)
	if i < c.cursor || c.struck(i) {
		return -1
	}
	return i
}

func (c *chunk) lookup(key string) int {
	if c.Rows.Len() == 0 || key == "" {
		return -1
	}
	if c.slots == nil {
		c.index()
	}
	mask := uint64(len(c.slots) - 1)
	for at := maphash.String(seed, key) & mask; ; at = (at + 1) & mask {
		n := c.slots[at]
		if n == 0 {
			return -1
		}
		c.buf = c.appendKey(c.buf[:0], int(n-1))
		if string(c.buf) == key {
			return int(n - 1)
		}
	}
}

func (c *chunk) index() {
	size := 16
	for size < 2*c.Rows.Len() {
		size *= 2
	}
	c.slots = make([]int32, size)
	mask := uint64(size - 1)
	for i := range c.Rows.Len() {
		c.buf = c.appendKey(c.buf[:0], i)
		at := maphash.Bytes(seed, c.buf) & mask
		for c.slots[at] != 0 {
			at = (at + 1) & mask
		}
		c.slots[at] = int32(i + 1)
	}
}

func (c *chunk) appendKey(dst []byte, i int) []byte {
	c.tuple = c.Rows.Tuple(i, c.tuple)
	return appendKey(dst, c.tuple, nil, c.identity)
}

// identityOf is what changes find row i by.
func (c *chunk) identityOf(i int) []string {
	c.buf = c.appendKey(c.buf[:0], i)
	return splitKey(string(c.buf), len(c.identity))
}

// keyOf is the key of row i.
func (c *chunk) keyOf(i int) []string {
	c.tuple = c.Rows.Tuple(i, c.tuple)
	key := make([]string, len(c.Shape.Key))
	for n, at := range c.Shape.Key {
		key[n] = string(c.tuple[at].Text)
	}
	return key
}

// fill gives a change the columns that it lacks, from the row that it supersedes. The
// values lie in the chunk and are valid for as long as it is.
func (c *chunk) fill(ch *replication.Change, row int) {
	filled := false
	for i := range ch.New {
		if ch.New[i].Kind != replication.ValueUnchanged {
			continue
		}
		if !filled {
			c.mapColumns(ch.Relation)
			c.tuple = c.Rows.Tuple(row, c.tuple)
			filled = true
		}
		if at := c.mapped[i]; at >= 0 {
			ch.New[i] = c.tuple[at]
		}
	}
}

// mapColumns finds the columns of a change's relation in the chunk's, which may be of
// another shape after DDL.
func (c *chunk) mapColumns(rel *replication.Relation) {
	if c.relation == rel {
		return
	}
	c.relation, c.mapped = rel, c.mapped[:0]
	for i := range rel.Columns {
		at := -1
		for j := range c.Shape.Relation.Columns {
			own := &c.Shape.Relation.Columns[j]
			if own.Name == rel.Columns[i].Name && own.TypeOID == rel.Columns[i].TypeOID {
				at = j
			}
		}
		c.mapped = append(c.mapped, at)
	}
}

// appendKey joins the values of key columns into one string of bytes that no other key
// has. A value that is unchanged stands in old.
func appendKey(dst []byte, row, old replication.Tuple, index []int) []byte {
	for _, i := range index {
		v := &row[i]
		if v.Kind == replication.ValueUnchanged && len(old) > 0 {
			v = &old[i]
		}
		n := uint32(len(v.Text))
		if v.Kind != replication.ValueText {
			n = 1<<32 - 1
		}
		dst = binary.BigEndian.AppendUint32(dst, n)
		dst = append(dst, v.Text...)
	}
	return dst
}

func joinKey(key []string) string {
	var b []byte
	for _, k := range key {
		b = binary.BigEndian.AppendUint32(b, uint32(len(k)))
		b = append(b, k...)
	}
	return string(b)
}

// splitKey is the inverse of appendKey; null becomes the empty string.
func splitKey(joined string, columns int) []string {
	key := make([]string, columns)
	for i := range key {
		n := binary.BigEndian.Uint32([]byte(joined[:4]))
		joined = joined[4:]
		if n == 1<<32-1 {
			continue
		}
		key[i], joined = joined[:n], joined[n:]
	}
	return key
}

// keyCache finds key columns in relations.
type keyCache struct {
	relation *replication.Relation
	key      []string
	index    []int
}

// of gives the places of key's columns in rel; nil where one is missing.
func (k *keyCache) of(rel *replication.Relation, key []string) []int {
	if k.relation == rel && len(k.key) == len(key) && (len(key) == 0 || &k.key[0] == &key[0]) {
		return k.index
	}
	k.relation, k.key, k.index = rel, key, nil
	index := make([]int, 0, len(key))
	for _, name := range key {
		for i := range rel.Columns {
			if rel.Columns[i].Name == name {
				index = append(index, i)
			}
		}
	}
	if len(index) == len(key) && len(key) > 0 {
		k.index = index
	}
	return k.index
}

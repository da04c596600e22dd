package replication

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/walrelay/walrelay/checkpoint"
)

// Decoder turns pgoutput messages (protocol version 1, text format; PostgreSQL
// documentation, "Logical Replication Message Formats") into events. It is pure:
// no connection, no clock. Values are slices of the message and stay valid as
// long as the message does; nothing is allocated per column or per change.
//
// What must hold:
//
//  1. Messages arrive in the order in which the server sent them, from the start
//     of a source transaction.
//  2. seq counts every change that the server sends, captured or not, so that a
//     change has the same identity whatever a configuration captures.
type Decoder struct {
	relations map[uint32]*Relation
	types     map[uint32]TypeName
	keys      KeyLookup
	near      checkpoint.XID

	open   bool
	seq    uint64
	txn    Transaction
	change Change
	event  Event
	old    Tuple
	new    Tuple

	// truncated are relations of a TRUNCATE whose changes are still to be given.
	truncated []*Relation
}

// KeyLookup gives the names of the primary key columns of the table with that OID,
// nil where it has none or no longer exists. The decoder asks where RELATION does
// not tell: under replica identity FULL, where every column is flagged, and
// NOTHING, where none is.
type KeyLookup func(oid uint32) ([]string, error)

// NewDecoder makes a decoder. near is a recent transaction id of the cluster with
// its epoch: the ids on the wire, 32 bits wide, are widened to the nearest one.
func NewDecoder(near checkpoint.XID, keys KeyLookup) *Decoder {
	return &Decoder{relations: map[uint32]*Relation{}, keys: keys, near: near}
}

// InTransaction tells whether a source transaction is open: its BEGIN has been
// decoded and its COMMIT has not.
func (d *Decoder) InTransaction() bool { return d.open }

// Decode takes one message that begins at lsn and returns its event, or nil where
// the message yields none (RELATION, TYPE, ORIGIN). After a TRUNCATE further events
// are to be taken with More before the next message. The event is valid until the
// next call and as long as msg is.
func (d *Decoder) Decode(lsn checkpoint.LSN, msg []byte) (*Event, error) {
	if len(msg) == 0 {
		return nil, d.errorf(lsn, 0, "empty message")
	}
	r := reader{buf: msg[1:]}
	ev, err := d.decode(lsn, msg[0], &r)
	if err != nil {
		return nil, err
	}
	if r.short {
		return nil, d.errorf(lsn, msg[0], "message of %d bytes ends too early", len(msg))
	}
	if r.len() > 0 && (ev != nil || msg[0] == 'R') {
		return nil, d.errorf(lsn, msg[0], "message of %d bytes goes on for %d bytes behind its end", len(msg), r.len())
	}
	return ev, nil
}

// More returns the next event of the message decoded last, or nil.
func (d *Decoder) More() *Event {
	if len(d.truncated) == 0 {
		return nil
	}
	rel := d.truncated[0]
	d.truncated = d.truncated[1:]
	return d.emit(Change{Op: OpTruncate, LSN: d.change.LSN, Relation: rel})
}

func (d *Decoder) decode(lsn checkpoint.LSN, kind byte, r *reader) (*Event, error) {
	switch kind {
	case 'B':
		return d.begin(lsn, r)
	case 'C':
		return d.commit(lsn, r)
	case 'I':
		return d.insert(lsn, r)
	case 'U':
		return d.update(lsn, r)
	case 'D':
		return d.delete(lsn, r)
	case 'T':
		return d.truncate(lsn, r)
	case 'M':
		return d.message(lsn, r)
	case 'R':
		return nil, d.relation(lsn, r)
	case 'Y':
		d.announce(r)
		return nil, nil
	case 'O':
		// ORIGIN names the node a transaction came from, which changes nothing that a
		// row holds.
		return nil, nil
	case 'A':
		// STREAM ABORT. PostgreSQL 18 sends it for a rolled-back subtransaction even
		// where streaming was not asked for. Nothing of that subtransaction was sent,
		// so there is nothing to take back.
		return nil, nil
	}
	return nil, d.errorf(lsn, kind, "this message was not asked for (protocol version 1, no streaming)")
}

// announce learns what TYPE says of a type of our database.
func (d *Decoder) announce(r *reader) {
	oid := r.uint32()
	name := TypeName{Schema: r.string(), Name: r.string()}
	if r.short {
		return
	}
	if d.types == nil {
		d.types = map[uint32]TypeName{}
	}
	d.types[oid] = name
}

// TypeName gives what the last TYPE message said of the type with this OID. It comes
// ahead of RELATION for each column whose type is not built in, and from the time of the
// change, so that it tells of types that are gone.
func (d *Decoder) TypeName(oid uint32) (name TypeName, ok bool) {
	name, ok = d.types[oid]
	return name, ok
}

func (d *Decoder) begin(lsn checkpoint.LSN, r *reader) (*Event, error) {
	if d.open {
		return nil, d.errorf(lsn, 'B', "BEGIN inside the transaction with commit LSN %s", d.txn.CommitLSN)
	}
	commit, at, xid := checkpoint.LSN(r.uint64()), int64(r.uint64()), r.uint32()
	d.near = widen(xid, d.near)
	d.txn = Transaction{XID: d.near, CommitLSN: commit, CommitTime: pgTime(at)}
	d.open, d.seq = true, 0
	d.event = Event{Kind: KindBegin, Txn: &d.txn, LSN: commit}
	return &d.event, nil
}

func (d *Decoder) commit(lsn checkpoint.LSN, r *reader) (*Event, error) {
	r.uint8() // flags, unused
	commit, end := checkpoint.LSN(r.uint64()), checkpoint.LSN(r.uint64())
	r.uint64() // the commit time, which BEGIN has told
	if !d.open || commit != d.txn.CommitLSN || end <= commit {
		return nil, d.errorf(lsn, 'C', "COMMIT %s..%s does not close the transaction with commit LSN %s (open: %t)", commit, end, d.txn.CommitLSN, d.open)
	}
	d.open = false
	d.txn.EndLSN = end
	d.event = Event{Kind: KindCommit, Txn: &d.txn, LSN: end}
	return &d.event, nil
}

func (d *Decoder) insert(lsn checkpoint.LSN, r *reader) (*Event, error) {
	rel, err := d.target(lsn, 'I', r.uint32())
	if err != nil {
		return nil, err
	}
	if k := r.uint8(); k != 'N' {
		return nil, d.errorf(lsn, 'I', "want a new tuple, got %q", k)
	}
	if d.new, err = d.tuple(lsn, rel, d.new, r); err != nil {
		return nil, err
	}
	return d.emit(Change{Op: OpCreate, LSN: lsn, Relation: rel, New: d.new}), nil
}

func (d *Decoder) update(lsn checkpoint.LSN, r *reader) (*Event, error) {
	rel, err := d.target(lsn, 'U', r.uint32())
	if err != nil {
		return nil, err
	}
	c := Change{Op: OpUpdate, LSN: lsn, Relation: rel}
	k := r.uint8()
	if k == 'K' || k == 'O' {
		c.OldIsKey = k == 'K'
		if d.old, err = d.tuple(lsn, rel, d.old, r); err != nil {
			return nil, err
		}
		c.Old = d.old
		k = r.uint8()
	}
	if k != 'N' {
		return nil, d.errorf(lsn, 'U', "want a new tuple, got %q", k)
	}
	if d.new, err = d.tuple(lsn, rel, d.new, r); err != nil {
		return nil, err
	}
	c.New = d.new
	return d.emit(c), nil
}

func (d *Decoder) delete(lsn checkpoint.LSN, r *reader) (*Event, error) {
	rel, err := d.target(lsn, 'D', r.uint32())
	if err != nil {
		return nil, err
	}
	k := r.uint8()
	if k != 'K' && k != 'O' {
		return nil, d.errorf(lsn, 'D', "want an old tuple, got %q", k)
	}
	if d.old, err = d.tuple(lsn, rel, d.old, r); err != nil {
		return nil, err
	}
	return d.emit(Change{Op: OpDelete, LSN: lsn, Relation: rel, Old: d.old, OldIsKey: k == 'K'}), nil
}

// truncate gives one change per table, in the order in which the message lists
// them; the first at once, the others through More.
func (d *Decoder) truncate(lsn checkpoint.LSN, r *reader) (*Event, error) {
	n := int(r.uint32())
	r.uint8() // CASCADE and RESTART IDENTITY: what they did to other tables comes as changes of those
	// Below 0 where an int has 32 bits.
	if n < 0 || n > r.len()/4 {
		r.short = true
		return nil, nil
	}
	rels := make([]*Relation, 0, n)
	for range n {
		rel, err := d.target(lsn, 'T', r.uint32())
		if err != nil {
			return nil, err
		}
		rels = append(rels, rel)
	}
	d.truncated = rels
	d.change.LSN = lsn
	return d.More(), nil
}

func (d *Decoder) message(lsn checkpoint.LSN, r *reader) (*Event, error) {
	transactional := r.uint8()&1 != 0
	at := checkpoint.LSN(r.uint64())
	prefix := r.string()
	content := r.bytes(int(r.uint32()))
	if transactional && !d.open {
		return nil, d.errorf(lsn, 'M', "transactional message outside a transaction")
	}
	if !transactional && d.open {
		// Non-transactional messages are sent when their record is decoded, a
		// transaction when its commit record is: one cannot stand inside the other.
		return nil, d.errorf(lsn, 'M', "non-transactional message inside the transaction with commit LSN %s", d.txn.CommitLSN)
	}
	return d.emit(Change{Op: OpMessage, LSN: at, Message: Message{Prefix: prefix, Transactional: transactional, Content: content}}), nil
}

// emit numbers c and makes it the current event.
func (d *Decoder) emit(c Change) *Event {
	d.change = c
	if d.open {
		d.change.Txn, d.change.Seq = &d.txn, d.seq
		d.seq++
	}
	d.event = Event{Kind: KindChange, Change: &d.change, LSN: c.LSN}
	if d.open {
		d.event.Txn = &d.txn
	}
	return &d.event
}

func (d *Decoder) target(lsn checkpoint.LSN, kind byte, oid uint32) (*Relation, error) {
	if !d.open {
		return nil, d.errorf(lsn, kind, "change outside a transaction")
	}
	rel := d.relations[oid]
	if rel == nil {
		return nil, d.errorf(lsn, kind, "relation %d was never described", oid)
	}
	return rel, nil
}

// tuple reads TupleData into dst, which it reuses.
func (d *Decoder) tuple(lsn checkpoint.LSN, rel *Relation, dst Tuple, r *reader) (Tuple, error) {
	n := int(r.uint16())
	if n != len(rel.Columns) {
		return dst, d.errorf(lsn, 0, "tuple of %s.%s has %d columns, its relation %d", rel.Schema, rel.Name, n, len(rel.Columns))
	}
	dst = dst[:0]
	for range n {
		v := Value{Kind: ValueKind(r.uint8())}
		switch v.Kind {
		case ValueNull, ValueUnchanged:
		case ValueText:
			v.Text = r.bytes(int(r.uint32()))
		default:
			if r.short {
				return dst, nil
			}
			return dst, d.errorf(lsn, 0, "value of kind %q in a tuple of %s.%s", byte(v.Kind), rel.Schema, rel.Name)
		}
		dst = append(dst, v)
	}
	return dst, nil
}

// relation learns a table's shape. The server repeats the message whenever its
// cache was invalidated; the same shape keeps the same pointer, so that plans made
// for it live on.
func (d *Decoder) relation(lsn checkpoint.LSN, r *reader) error {
	rel := &Relation{OID: r.uint32(), Schema: r.string(), Name: r.string(), Identity: ReplicaIdentity(r.uint8())}
	if rel.Schema == "" {
		rel.Schema = "pg_catalog" // the protocol's abbreviation
	}
	n := int(r.uint16())
	if n > r.len() {
		r.short = true
		return nil
	}
	rel.Columns = make([]Column, 0, n)
	for range n {
		flags := r.uint8()
		rel.Columns = append(rel.Columns, Column{
			Identity: flags&1 != 0,
			Name:     r.string(),
			TypeOID:  r.uint32(),
			TypeMod:  int32(r.uint32()),
		})
	}
	if r.short {
		return nil
	}
	if !utf8.ValidString(rel.Schema) || !utf8.ValidString(rel.Name) {
		return d.errorf(lsn, 'R', "relation %d has a name that is not UTF-8", rel.OID)
	}
	for _, c := range rel.Columns {
		// A record names its fields after the columns, and JSON and Avro are UTF-8.
		if !utf8.ValidString(c.Name) {
			return d.errorf(lsn, 'R', "relation %s.%s has a column whose name %q is not UTF-8", rel.Schema, rel.Name, c.Name)
		}
	}
	if err := d.primaryKey(rel); err != nil {
		return err
	}
	if known := d.relations[rel.OID]; known != nil && known.equal(rel) {
		return nil
	}
	d.relations[rel.OID] = rel
	return nil
}

// primaryKey fills in the key where RELATION's flags do not give it.
func (d *Decoder) primaryKey(rel *Relation) error {
	if d.keys == nil || (rel.Identity != IdentityFull && rel.Identity != IdentityNothing) {
		return nil
	}
	names, err := d.keys(rel.OID)
	if err != nil {
		return fmt.Errorf("look up the primary key of %s.%s: %w", rel.Schema, rel.Name, err)
	}
	var at []int
	for i, c := range rel.Columns {
		if slices.Contains(names, c.Name) {
			at = append(at, i)
		}
	}
	// A key column that this moment's relation does not have (renamed since, or left
	// out by a column list) makes the key unusable, not shorter.
	if len(at) == len(names) {
		rel.PrimaryKey = at
	}
	return nil
}

func (r *Relation) equal(o *Relation) bool {
	return r.Schema == o.Schema && r.Name == o.Name && r.Identity == o.Identity &&
		slices.Equal(r.Columns, o.Columns) && slices.Equal(r.PrimaryKey, o.PrimaryKey)
}

// widen gives the 64-bit transaction id nearest to near whose low 32 bits are x.
// Ids that can be in the WAL of one cluster at one time are less than 2^31 apart
// (PostgreSQL documentation, "Preventing Transaction ID Wraparound Failures").
func widen(x uint32, near checkpoint.XID) checkpoint.XID {
	d := int64(int32(x - uint32(near)))
	if d < 0 && uint64(-d) > uint64(near) {
		d += 1 << 32 // before the beginning of time: only with a near that is made up
	}
	return checkpoint.XID(int64(near) + d)
}

// pgEpoch is where PostgreSQL's timestamps start: 2000-01-01, in Unix microseconds.
const pgEpoch = 946684800000000

func pgTime(micros int64) time.Time { return time.UnixMicro(pgEpoch + micros).UTC() }

// ProtocolError is a pgoutput message that is not what the protocol says. It is
// never skipped: going on would lose what the message held.
type ProtocolError struct {
	LSN     checkpoint.LSN
	Message byte // its letter, 0 where the error is inside a tuple
	Reason  string
}

// Error says what is wrong and where.
func (e *ProtocolError) Error() string {
	if e.Message == 0 {
		return fmt.Sprintf("decode pgoutput at %s: %s", e.LSN, e.Reason)
	}
	return fmt.Sprintf("decode pgoutput message %q at %s: %s", e.Message, e.LSN, e.Reason)
}

func (d *Decoder) errorf(lsn checkpoint.LSN, kind byte, format string, args ...any) error {
	return &ProtocolError{LSN: lsn, Message: kind, Reason: fmt.Sprintf(format, args...)}
}

// reader takes a message apart. Reading past the end sets short and yields zeros,
// so that the caller checks once.
type reader struct {
	buf   []byte
	short bool
}

func (r *reader) len() int { return len(r.buf) }

func (r *reader) bytes(n int) []byte {
	if n < 0 || n > len(r.buf) {
		r.short, r.buf = true, nil
		return nil
	}
	b := r.buf[:n:n]
	r.buf = r.buf[n:]
	return b
}

func (r *reader) uint8() byte {
	if len(r.buf) < 1 {
		r.short = true
		return 0
	}
	v := r.buf[0]
	r.buf = r.buf[1:]
	return v
}

func (r *reader) uint16() uint16 {
	if len(r.buf) < 2 {
		r.short, r.buf = true, nil
		return 0
	}
	v := binary.BigEndian.Uint16(r.buf)
	r.buf = r.buf[2:]
	return v
}

func (r *reader) uint32() uint32 {
	if len(r.buf) < 4 {
		r.short, r.buf = true, nil
		return 0
	}
	v := binary.BigEndian.Uint32(r.buf)
	r.buf = r.buf[4:]
	return v
}

func (r *reader) uint64() uint64 {
	if len(r.buf) < 8 {
		r.short, r.buf = true, nil
		return 0
	}
	v := binary.BigEndian.Uint64(r.buf)
	r.buf = r.buf[8:]
	return v
}

// string reads a NUL-terminated string.
func (r *reader) string() string {
	for i, b := range r.buf {
		if b == 0 {
			s := string(r.buf[:i])
			r.buf = r.buf[i+1:]
			return s
		}
	}
	r.short, r.buf = true, nil
	return ""
}

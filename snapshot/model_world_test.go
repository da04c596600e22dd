package snapshot_test

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/snapshot"
)

// world is a plain simulation of PostgreSQL: rows as chains of versions, transactions
// with xids, and a WAL of commits. A commit's record, its flush and its becoming visible
// are three moments: with synchronous_commit = off it is seen before it is flushed, with
// a synchronous standby flushed (and streamed) before it is seen.
type world struct {
	tables  []*modelTable
	next    checkpoint.XID // the next xid to be given out
	ended   checkpoint.XID // the largest xid that has ended: latestCompletedXid
	open    []*modelTxn    // not ended: running, prepared, or committed and not seen yet
	wal     []*modelTxn    // committed, in the order of their commit records
	end     checkpoint.LSN // the insert LSN
	flushed checkpoint.LSN
	stamp   int // the last write's number
	// written is what each write made: the row, nil where it removed one.
	written map[int]*version
}

// tableKind is what a table of the model looks like.
type tableKind struct {
	columns  []string // "big" may be left unchanged by an update, "n" holds the write's stamp
	key      []string // in the order of the unique index
	identity replication.ReplicaIdentity
	whole    bool
	outbox   bool
	insert   bool // only inserts are published
	// compare orders one key column's values; not as their bytes do.
	compare func(a, b string) int
}

func numbers(a, b string) int {
	i, _ := strconv.Atoi(a)
	j, _ := strconv.Atoi(b)
	return cmp.Compare(i, j)
}

// backwards stands for a collation that orders otherwise than bytes do.
func backwards(a, b string) int { return strings.Compare(b, a) }

var tableKinds = map[string]tableKind{
	"int":  {columns: []string{"id", "n", "big"}, key: []string{"id"}, identity: replication.IdentityDefault, compare: numbers},
	"pair": {columns: []string{"a", "n", "b", "big"}, key: []string{"b", "a"}, identity: replication.IdentityDefault, compare: numbers},
	"text": {columns: []string{"big", "n", "id"}, key: []string{"id"}, identity: replication.IdentityIndex, compare: backwards},
	"full": {columns: []string{"id", "n", "big"}, key: []string{"id"}, identity: replication.IdentityFull, compare: numbers},
	// Without a key equal rows are different rows, so these have no stamp.
	"keyless": {columns: []string{"v", "big"}, identity: replication.IdentityFull, whole: true},
	"log":     {columns: []string{"v", "big"}, identity: replication.IdentityNothing, whole: true, insert: true},
	"outbox":  {columns: []string{"id", "n", "big"}, key: []string{"id"}, identity: replication.IdentityNothing, outbox: true, insert: true, compare: numbers},
}

// modelTable is a table. A row's key is its key columns' text with "/" between; keyless
// rows go by the column v, of which there may be several.
type modelTable struct {
	tableKind
	kind string
	oid  uint32
	name string
	rows []*version
	// published tells whether changes get into the stream.
	published bool
	// relations are the table's shape as the stream and the readers have it.
	streamed, read *replication.Relation
	// truncating holds the lock that conflicts with everything; readers counts reads
	// that are under way in pieces.
	truncating *modelTxn
	readers    int
}

// version is a row between the write that made it and the one that ended it.
type version struct {
	table   *modelTable
	key     string
	big     string
	stamp   int
	made    *modelTxn // nil: before everything
	xmin    checkpoint.XID
	removed *modelTxn
}

// modelTxn is a transaction of the application.
type modelTxn struct {
	name     string
	xid      checkpoint.XID
	prepared bool
	changes  []*modelChange
	commit   checkpoint.LSN // 0: not committed
	end      checkpoint.LSN
	seen     bool // ended, as a commit
	undone   bool // ended, otherwise
}

func (x *modelTxn) over() bool { return x.seen || x.undone }

// modelChange is a published write.
type modelChange struct {
	op        replication.Op
	table     *modelTable
	old, made *version // as the op has them
	stamp     int
	unchanged bool // big is not in the WAL
}

func newWorld() *world {
	// An epoch is about to begin: the wire's 32 bits are not enough.
	return &world{next: 1<<32 - 4, ended: 1<<32 - 5, end: 0x1000, flushed: 0x1000, written: map[int]*version{}}
}

func (w *world) table(name string) *modelTable {
	for _, t := range w.tables {
		if t.name == name {
			return t
		}
	}
	return nil
}

func (w *world) create(name, kind string) *modelTable {
	t := &modelTable{tableKind: tableKinds[kind], kind: kind, name: name, oid: 16384 + uint32(len(w.tables))}
	t.streamed, t.read = t.relation(), t.relation()
	w.tables = append(w.tables, t)
	return t
}

func (t *modelTable) relation() *replication.Relation {
	r := &replication.Relation{OID: t.oid, Schema: "public", Name: t.name, Identity: t.identity}
	for i, name := range t.columns {
		inKey := slices.Contains(t.key, name)
		r.Columns = append(r.Columns, replication.Column{Name: name, TypeOID: 25, TypeMod: -1,
			Identity: t.identity == replication.IdentityFull || inKey && t.identity != replication.IdentityNothing})
		if inKey && (t.identity == replication.IdentityFull || t.identity == replication.IdentityNothing) {
			r.PrimaryKey = append(r.PrimaryKey, i)
		}
	}
	return r
}

// captured is the table as the catalog and the configuration have it.
func (t *modelTable) captured() snapshot.Table {
	return snapshot.Table{OID: t.oid, Schema: "public", Name: t.name, Key: t.key, Whole: t.whole, Estimate: -1, Outbox: t.outbox}
}

// compareKeys orders two keys as the unique index does.
func (t *modelTable) compareKeys(a, b string) int {
	return slices.CompareFunc(strings.Split(a, "/"), strings.Split(b, "/"), t.compare)
}

// column gives a version's value of a column.
func (v *version) column(name string) string {
	switch name {
	case "n":
		return strconv.Itoa(v.stamp)
	case "big":
		return v.big
	case "v":
		return v.key
	}
	return strings.Split(v.key, "/")[slices.Index(v.table.key, name)]
}

func (w *world) begin(name string) *modelTxn {
	x := &modelTxn{name: name, xid: w.next}
	w.next++
	w.open = append(w.open, x)
	return x
}

// blocked tells whether x would have to wait to write the key, or anything at all.
func (w *world) blocked(x *modelTxn, t *modelTable, key string) bool {
	if t.truncating != nil && t.truncating != x {
		return true
	}
	for _, v := range t.rows {
		if v.key == key && !t.whole && (v.made != nil && v.made != x && !v.made.over() || v.removed != nil && v.removed != x && !v.removed.over()) {
			return true
		}
	}
	return false
}

// current gives the row that x would write; nil where there is none. Of a keyless
// table it is any that nobody else is about to remove.
func (w *world) current(x *modelTxn, t *modelTable, key string) *version {
	for _, v := range t.rows {
		if v.key == key && v.removed == nil && (v.made == nil || v.made == x || v.made.seen) {
			return v
		}
	}
	return nil
}

// put writes a row version of x, under an xid of a subtransaction's where sub is set.
func (w *world) put(x *modelTxn, t *modelTable, key, big string, sub bool) *version {
	w.stamp++
	v := &version{table: t, key: key, big: big, stamp: w.stamp, made: x}
	if x != nil {
		v.xmin = x.xid
		if sub {
			v.xmin = w.next
			w.next++
		}
	}
	t.rows = append(t.rows, v)
	w.written[v.stamp] = v
	return v
}

func (x *modelTxn) log(c modelChange) {
	if c.table.published && (c.op == replication.OpCreate || !c.table.insert) {
		x.changes = append(x.changes, &c)
	}
}

func (w *world) insert(x *modelTxn, t *modelTable, key, big string, sub bool) bool {
	if w.blocked(x, t, key) || !t.whole && w.current(x, t, key) != nil {
		return false
	}
	v := w.put(x, t, key, big, sub)
	x.log(modelChange{op: replication.OpCreate, table: t, made: v, stamp: v.stamp})
	return true
}

// update writes the row of key anew, under another key where that is not the same.
// An empty big leaves the column unchanged.
func (w *world) update(x *modelTxn, t *modelTable, key, to, big string, sub bool) bool {
	if w.blocked(x, t, key) || w.blocked(x, t, to) {
		return false
	}
	old := w.current(x, t, key)
	if old == nil || !t.whole && to != key && w.current(x, t, to) != nil {
		return false
	}
	old.removed = x
	c := modelChange{op: replication.OpUpdate, table: t, old: old, unchanged: big == ""}
	if big == "" {
		big = old.big
	}
	c.made = w.put(x, t, to, big, sub)
	c.stamp = c.made.stamp
	x.log(c)
	return true
}

func (w *world) remove(x *modelTxn, t *modelTable, key string) bool {
	old := w.current(x, t, key)
	if old == nil || w.blocked(x, t, key) {
		return false
	}
	old.removed = x
	w.stamp++
	x.log(modelChange{op: replication.OpDelete, table: t, old: old, stamp: w.stamp})
	return true
}

// truncate takes the lock that conflicts with every other use of the table, reads
// included, and keeps it until the transaction is seen.
func (w *world) truncate(x *modelTxn, t *modelTable) bool {
	if t.readers > 0 || t.truncating != nil && t.truncating != x {
		return false
	}
	for _, v := range t.rows {
		if v.made != nil && v.made != x && !v.made.over() || v.removed != nil && v.removed != x && !v.removed.over() {
			return false
		}
	}
	for _, v := range t.rows {
		if v.removed == nil {
			v.removed = x
		}
	}
	t.truncating = x
	w.stamp++
	x.log(modelChange{op: replication.OpTruncate, table: t, stamp: w.stamp})
	return true
}

// commit writes the commit record.
func (w *world) commit(x *modelTxn) {
	x.commit = w.end + 8*checkpoint.LSN(1+len(x.changes))
	x.end = x.commit + 8
	w.end = x.end
	w.wal = append(w.wal, x)
}

// finish ends a transaction for everybody: seen where it committed, else undone.
func (w *world) finish(x *modelTxn) {
	x.seen, x.undone = x.commit != 0, x.commit == 0
	w.open = slices.DeleteFunc(w.open, func(o *modelTxn) bool { return o == x })
	w.ended = max(w.ended, x.xid)
	for _, t := range w.tables {
		if t.truncating == x {
			t.truncating = nil
		}
		for _, v := range t.rows {
			if v.made == x {
				w.ended = max(w.ended, v.xmin)
			}
			if x.undone && v.removed == x {
				v.removed = nil
			}
		}
		if x.undone {
			t.rows = slices.DeleteFunc(t.rows, func(v *version) bool { return v.made == x })
		}
		t.rows = slices.DeleteFunc(t.rows, func(v *version) bool { // vacuum
			return v.removed != nil && v.removed.seen && v.removed.end <= w.flushed
		})
	}
}

// crash is the server's: what was not flushed never happened, and only what was
// prepared goes on.
func (w *world) crash() {
	w.wal = slices.DeleteFunc(w.wal, func(x *modelTxn) bool { return x.end > w.flushed })
	var lost []*modelTxn
	for _, t := range w.tables {
		t.readers = 0
		for _, v := range t.rows {
			for _, x := range []*modelTxn{v.made, v.removed} {
				if x != nil && (x.seen && x.end > w.flushed || !x.over() && !x.prepared) {
					lost = append(lost, x)
				}
			}
		}
	}
	lost = append(lost, w.open...)
	for _, x := range lost {
		switch {
		case x.commit != 0 && x.end <= w.flushed: // its wait for the standby ends with the crash
			w.finish(x)
		case x.commit == 0 && x.prepared:
		default:
			x.commit, x.seen = 0, false
			w.finish(x)
		}
	}
	w.end = w.flushed
	// An xid of which nothing was flushed is given out again.
	w.next = 1<<32 - 4
	for _, x := range append(slices.Clone(w.wal), w.open...) {
		w.next = max(w.next, x.xid+1)
	}
	for _, t := range w.tables {
		for _, v := range t.rows {
			w.next = max(w.next, v.xmin+1)
		}
	}
	w.ended = w.next - 1
}

// mvcc is pg_current_snapshot().
func (w *world) mvcc() snapshot.MVCC {
	m := snapshot.MVCC{Xmax: w.ended + 1}
	m.Xmin = m.Xmax
	for _, x := range w.open {
		if x.xid < m.Xmax {
			m.Running = append(m.Running, x.xid)
		}
	}
	slices.Sort(m.Running)
	if len(m.Running) > 0 {
		m.Xmin = m.Running[0]
	}
	return m
}

// visible gives the rows that a query sees now, in the order of the key.
func (w *world) visible(t *modelTable) []*version {
	var rows []*version
	for _, v := range t.rows {
		if (v.made == nil || v.made.seen) && (v.removed == nil || !v.removed.seen) {
			rows = append(rows, v)
		}
	}
	if !t.whole {
		slices.SortFunc(rows, func(a, b *version) int { return t.compareKeys(a.key, b.key) })
	}
	return rows
}

func (v *version) String() string {
	if v.table.whole {
		return fmt.Sprintf("%s big=%s", v.key, v.big)
	}
	return fmt.Sprintf("%s n=%d big=%s", v.key, v.stamp, v.big)
}

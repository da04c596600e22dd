package verify

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/walrelay/walrelay/checkpoint"
)

// comparison holds the two sides of one table against each other, part by part. What it
// is told before run does not change then.
type comparison struct {
	look
	dir    string
	budget int64 // bytes of entries that are in memory at a time

	// truncated is, per partition of the topic, the last truncate that counts.
	truncated map[int32]order
	// read is where the last row of a snapshot stands, behind all changes that it contains.
	read checkpoint.LSN
	// marks stand for unchanged TOAST values, by the column's name in quotes.
	marks map[string][]byte
	// defaults are what rows have in columns that are younger than they are.
	defaults map[string][]byte
	// threshold is the largest hash that is compared; sampled tells that others exist.
	threshold uint64
	sampled   bool
	topic     string
	judge     judge

	mu     sync.Mutex // guards what follows
	report *TableReport
	asked  *spill  // columns asked of other keys
	left   *keySet // for the next look
}

// judge compares what both sides have of one key. Changes are in their order; those that a
// truncate has removed are still among them.
type judge func(c *comparison, w *worker, key []byte, changes []change, rows []row)

// worker is the memory of one goroutine, and what it found.
type worker struct {
	changes []change
	rows    []row
	columns []column
	report  TableReport
	carries [][]byte
	left    []uint64
	buffers [3][]byte
	refs    [3][]ref
}

// leave leaves a key to the next look.
func (c *comparison) leave(w *worker, key []byte) { w.left = append(w.left, c.keyHash(key)) }

// keyHash is the hash of an entry's key.
func (c *comparison) keyHash(key []byte) uint64 {
	if c.digests {
		return binary.LittleEndian.Uint64(key)
	}
	return c.hash(key)
}

// run compares all parts. The spills stay whole until the end, since a row that had
// another key before may ask for that key's records.
func (c *comparison) run(topic, table *spill) error {
	workers := make(chan *worker, runtime.GOMAXPROCS(0))
	for range cap(workers) {
		workers <- &worker{}
	}
	room := c.budget / int64(cap(workers))
	var carries *spill
	for first := true; first || !carries.empty(); first = false {
		c.asked = newSpill(c.dir, c.budget/8, 0)
		var g errgroup.Group
		g.SetLimit(cap(workers))
		for i := range fan {
			sides := sides{topic: &topic.parts[i]}
			if first {
				sides.table = &table.parts[i]
			} else if sides.carry = &carries.parts[i]; sides.carry.entries == 0 {
				continue
			}
			g.Go(func() error {
				w := <-workers
				defer func() { workers <- w }()
				return c.part(w, sides, 0, room)
			})
		}
		err := g.Wait()
		if carries != nil {
			if e := carries.close(); err == nil {
				err = e
			}
		}
		if carries = c.asked; err != nil {
			_ = carries.close() // the first error is the one that counts
			return err
		}
	}
	return carries.close()
}

// sides are the parts of one stretch of hashes; nil for none.
type sides struct{ topic, table, carry *part }

func (s sides) all() [3]*part { return [3]*part{s.topic, s.table, s.carry} }

// part compares one part, or parts it further where it is too large for memory.
func (c *comparison) part(w *worker, s sides, level int, room int64) error {
	var size int64
	for _, p := range s.all() {
		if p != nil {
			size += p.bytes() + refSize*int64(p.entries)
		}
	}
	if size > room && level < maxLevel {
		return c.split(w, s, level, room)
	}
	for i, p := range s.all() {
		w.refs[i] = w.refs[i][:0]
		if p == nil {
			continue
		}
		all, err := p.load(w.buffers[i])
		if err != nil {
			return err
		}
		if p.size > 0 {
			w.buffers[i] = all
		}
		w.refs[i] = c.index(w.refs[i], all, p.entries)
	}
	c.match(w, w.refs[0], w.refs[1], w.refs[2], s.table == nil)
	return c.merge(w)
}

// split parts a part by the next bits of its keys' hashes.
func (c *comparison) split(w *worker, s sides, level int, room int64) (err error) {
	var subs [3]*spill
	defer func() {
		for _, sub := range subs {
			if sub != nil {
				if e := sub.close(); err == nil {
					err = e
				}
			}
		}
	}()
	for i, p := range s.all() {
		if p == nil {
			continue
		}
		subs[i] = newSpill(c.dir, room/8, level+1)
		if err := p.split(subs[i], c.keyHash); err != nil {
			return err
		}
	}
	for i := range fan {
		var sub sides
		if subs[0] != nil {
			sub.topic = &subs[0].parts[i]
		}
		if subs[1] != nil {
			sub.table = &subs[1].parts[i]
		}
		if subs[2] != nil {
			sub.carry = &subs[2].parts[i]
		}
		if err := c.part(w, sub, level+1, room); err != nil {
			return err
		}
	}
	return nil
}

// ref is an entry and the hash of its key.
type ref struct {
	hash  uint64
	entry []byte
}

const refSize = 32 // bytes of a ref

// index gives the entries by the hashes of their keys.
func (c *comparison) index(refs []ref, all []byte, entries int) []ref {
	refs = slices.Grow(refs, entries)
	for len(all) > 0 {
		var entry []byte
		entry, all = cutBytes(all)
		if hash := c.keyHash(entryKey(entry)); hash <= c.threshold {
			refs = append(refs, ref{hash: hash, entry: entry})
		}
	}
	slices.SortFunc(refs, func(a, b ref) int { return cmp.Compare(a.hash, b.hash) })
	return refs
}

// takeHash cuts the refs of one hash off.
func takeHash(refs []ref, hash uint64) (taken, rest []ref) {
	n := 0
	for n < len(refs) && refs[n].hash == hash {
		n++
	}
	return refs[:n], refs[n:]
}

// match brings together what the sides have of each key.
func (c *comparison) match(w *worker, topic, table, carries []ref, onlyCarries bool) {
	for len(topic) > 0 || len(table) > 0 || len(carries) > 0 {
		hash := ^uint64(0)
		for _, refs := range [...][]ref{topic, table, carries} {
			if len(refs) > 0 {
				hash = min(hash, refs[0].hash)
			}
		}
		var a, b, d []ref
		a, topic = takeHash(topic, hash)
		b, table = takeHash(table, hash)
		d, carries = takeHash(carries, hash)
		if onlyCarries && len(d) == 0 || !onlyCarries && !c.only.compares(hash) {
			continue // asked for by a row that has another key now
		}
		w.changes, w.rows = w.changes[:0], w.rows[:0]
		for _, r := range a {
			w.changes = append(w.changes, parseChange(r.entry))
		}
		if len(w.changes) > 1 {
			slices.SortFunc(w.changes, func(a, b change) int {
				return cmp.Or(bytes.Compare(a.key, b.key), a.order.compare(b.order))
			})
		}
		if onlyCarries {
			for _, r := range d {
				c.carried(w, parseCarry(r.entry))
			}
			continue
		}
		for _, r := range b {
			w.rows = append(w.rows, parseRow(r.entry))
		}
		if len(w.rows) > 1 {
			slices.SortFunc(w.rows, func(a, b row) int { return bytes.Compare(a.key, b.key) })
		}
		c.matchKeys(w)
	}
}

// matchKeys hands the keys of one hash, which is one key but by chance, to the judge.
func (c *comparison) matchKeys(w *worker) {
	changes, rows := w.changes, w.rows
	for len(changes) > 0 || len(rows) > 0 {
		var key []byte
		switch {
		case len(changes) == 0:
			key = rows[0].key
		case len(rows) == 0 || bytes.Compare(changes[0].key, rows[0].key) <= 0:
			key = changes[0].key
		default:
			key = rows[0].key
		}
		n, m := 0, 0
		for n < len(changes) && bytes.Equal(changes[n].key, key) {
			n++
		}
		for m < len(rows) && bytes.Equal(rows[m].key, key) {
			m++
		}
		c.judge(c, w, key, changes[:n], rows[:m])
		changes, rows = changes[n:], rows[m:]
	}
}

// merge adds what a worker found to the report.
func (c *comparison) merge(w *worker) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.report.take(&w.report)
	for _, hash := range w.left {
		c.left.add(hash, true)
	}
	for _, entry := range w.carries {
		if err := c.asked.add(c.keyHash(entryKey(entry)), entry); err != nil {
			return err
		}
	}
	w.report, w.left, w.carries = TableReport{}, w.left[:0], w.carries[:0]
	return nil
}

// take adds the counts of another report of the same table.
func (t *TableReport) take(o *TableReport) {
	t.Compared += o.Compared
	t.Equal += o.Equal
	t.Missing += o.Missing
	t.Extra += o.Extra
	t.Differing += o.Differing
	t.Doubled += o.Doubled
	t.Disordered += o.Disordered
	t.Unreadable += o.Unreadable
	t.unsettled += o.unsettled
	t.doubtful += o.doubtful
	t.defaulted += o.defaulted
	t.gone += o.gone
	t.unjudged += o.unjudged
	t.letters += o.letters
	t.partial = t.partial || o.partial
	t.Found = append(t.Found, o.Found[:min(len(o.Found), maxFound-len(t.Found))]...)
}

// where names a record.
func (c *comparison) where(o order) string {
	return fmt.Sprintf("%s[%d]@%d", c.topic, o.partition, o.offset)
}

// doubled finds records that stand in the topic more than once: those of one change have
// one position each, and the rows of one chunk of a snapshot the same time.
func (c *comparison) doubled(changes []change, found func(x, first *change)) {
	for from := 0; from < len(changes); {
		to := from + 1
		for to < len(changes) && changes[to].order.comparePosition(changes[from].order) == 0 {
			to++
		}
		if x := &changes[from]; x.order.seq == snapshotSeq && x.sum == 0 {
			from = to // rows of a table without a key, that may be equal
			continue
		}
		for i := from + 1; i < to; i++ {
			for j := from; j < i; j++ {
				if same(&changes[j], &changes[i]) {
					found(&changes[i], &changes[j])
					break
				}
			}
		}
		from = to
	}
}

// reportDoubled counts them.
func (c *comparison) reportDoubled(w *worker, changes []change) {
	c.doubled(changes, func(x, first *change) {
		w.report.add(Difference{Kind: kindDoubled, Key: x.key, Topic: x.row, Where: c.where(x.order) + " as at " + c.where(first.order)}, false)
	})
}

// judgeDigests holds the digest of a row against that of its key's last record, and leaves
// to the next look what is not so simple.
func judgeDigests(c *comparison, w *worker, key []byte, changes []change, rows []row) {
	doubled := false
	c.doubled(changes, func(_, _ *change) { doubled = true })
	if doubled || unsettled(changes) {
		c.leave(w, key)
		return
	}
	changes = c.standing(changes)
	alive := isAlive(changes)
	switch {
	case !alive && len(rows) == 0:
	case alive && len(rows) == 1 && bytes.Equal(changes[len(changes)-1].row, rows[0].value):
		w.report.Compared++
		w.report.Equal++
	default:
		c.leave(w, key)
	}
}

// same tells whether two records at one position are the same record.
func same(a, b *change) bool {
	switch {
	case (a.flags|b.flags)&(flagReplayed|flagUnplaced) != 0, a.kind != b.kind:
		return false
	case a.order.seq == snapshotSeq:
		return a.sum == b.sum && a.sum != 0
	}
	return a.op == b.op
}

// standing leaves out what was removed by a truncate behind it.
func (c *comparison) standing(changes []change) []change {
	if len(c.truncated) == 0 {
		return changes
	}
	kept := changes[:0:0]
	for _, x := range changes {
		if t, ok := c.truncated[x.order.partition]; !ok || x.order.compare(t) > 0 {
			kept = append(kept, x)
		}
	}
	return kept
}

func unsettled(changes []change) bool {
	for i := range changes {
		if changes[i].flags&flagUnsettled != 0 {
			return true
		}
	}
	return false
}

// judgeRows compares a table without a key as a multiset: how often each row is there.
// exact tells that the topic holds updates and deletes too; else a row that only the topic
// has may have been deleted, or updated.
func judgeRows(exact bool) judge {
	return func(c *comparison, w *worker, key []byte, changes []change, rows []row) {
		n := 0
		changes = c.counted(changes) // before truncates: a marked copy may be where none went
		for _, x := range c.standing(changes) {
			if x.kind == kindSet {
				n++
			} else {
				n--
			}
		}
		want := len(rows)
		doubt := unsettled(changes)
		if c.digests {
			c.doubled(changes, func(_, _ *change) { doubt = true })
			doubt = doubt || n < want || exact && n > want
		}
		if doubt && (c.digests || !c.final) {
			c.leave(w, key)
			return
		}
		c.reportDoubled(w, changes)
		w.report.Compared += int64(want)
		w.report.Equal += int64(min(max(n, 0), want))
		for range want - n {
			w.report.add(Difference{Kind: kindMissing, Key: key, Table: key}, doubt)
		}
		if !exact {
			w.report.gone += int64(max(0, n-want))
			return
		}
		for range n - want {
			w.report.add(Difference{Kind: kindExtra, Key: key, Topic: key}, doubt)
		}
	}
}

package snapshot_test

import (
	"slices"
	"strings"

	"github.com/walrelay/walrelay/replication"
)

// wire gives a change as the stream does. All its text lies in one piece of memory, which
// is the stream's again when the change is dealt with.
func (c *modelChange) wire(x *modelTxn, seq int) (*replication.Change, []byte) {
	t := c.table
	text := make([]byte, 0, 4096)
	value := func(s string) replication.Value {
		from := len(text)
		text = append(text, s...)
		return replication.Value{Kind: replication.ValueText, Text: text[from:len(text):len(text)]}
	}
	w := &replication.Change{Op: c.op, Seq: uint64(seq), LSN: x.commit, Relation: t.streamed,
		Txn: &replication.Transaction{XID: x.xid, CommitLSN: x.commit}}
	if v := c.made; v != nil {
		for _, name := range t.columns {
			if name == "big" && c.unchanged {
				w.New = append(w.New, replication.Value{Kind: replication.ValueUnchanged})
			} else {
				w.New = append(w.New, value(v.column(name)))
			}
		}
	}
	// The old row is sent whole under FULL, and else its key where that changes or goes.
	v := c.old
	if v == nil || t.identity != replication.IdentityFull && c.made != nil && c.made.key == v.key {
		return w, text
	}
	w.OldIsKey = t.identity != replication.IdentityFull
	for _, name := range t.columns {
		if w.OldIsKey && !slices.Contains(t.key, name) {
			w.Old = append(w.Old, replication.Value{Kind: replication.ValueNull})
		} else {
			w.Old = append(w.Old, value(v.column(name)))
		}
	}
	return w, text
}

// record gives what the router makes of the change, which the Merger may have filled.
func (c *modelChange) record(w *replication.Change) record {
	t := c.table
	r := record{table: t, op: c.op, stamp: c.stamp}
	if len(w.New) > 0 {
		r.values = texts(w.New)
		r.key = t.keyOf(r.values)
	}
	if len(w.Old) > 0 {
		old := texts(w.Old)
		if r.old = t.keyOf(old); r.old == r.key {
			r.old = ""
		}
		if w.Op == replication.OpDelete {
			r.key, r.old = r.old, ""
		}
		if !w.OldIsKey {
			r.before = old
		}
	}
	return r
}

// texts copies a tuple's values.
func texts(t replication.Tuple) []string {
	var s []string
	for _, v := range t {
		if v.Kind == replication.ValueUnchanged {
			s = append(s, absent)
		} else {
			s = append(s, string(v.Text))
		}
	}
	return s
}

// keyOf gives the key of a row.
func (t *modelTable) keyOf(values []string) string {
	key := t.key
	if t.whole {
		key = []string{"v"}
	}
	var parts []string
	for _, name := range key {
		parts = append(parts, values[slices.Index(t.columns, name)])
	}
	return strings.Join(parts, "/")
}

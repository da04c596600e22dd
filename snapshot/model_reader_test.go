package snapshot_test

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/snapshot"
)

// oddRows is the one condition that the model's readers understand.
const oddRows = "n % 2 = 1"

// modelRead is an order that a reader carries out.
type modelRead struct {
	order *snapshot.Order
	table *modelTable
	begun bool
	// chunks have not arrived yet.
	chunks []*snapshot.Chunk
}

// read carries out an order in one step, all of it under one snapshot; false where the
// lock has to be waited for.
func (w *world) read(r *modelRead, now time.Time) bool {
	o := r.order
	if o.Kind != snapshot.OrderSnapshot && r.table.truncating != nil {
		return false
	}
	r.begun = true
	first := &snapshot.Chunk{Order: o, Snapshot: w.mvcc(), LSN: w.end, Time: now, Last: true}
	r.chunks = []*snapshot.Chunk{first}
	if o.Kind == snapshot.OrderSnapshot {
		return true
	}
	t := r.table
	first.Shape = snapshot.Shape{Relation: t.read, Whole: t.whole, Estimate: -1}
	for _, name := range t.key {
		first.Shape.Key = append(first.Shape.Key, slices.Index(t.columns, name))
	}
	first.Rows.Reset(len(t.columns))
	rows := w.visible(t)
	switch o.Kind {
	case snapshot.OrderPlan:
		if o.End && len(rows) > 0 {
			first.End = strings.Split(rows[len(rows)-1].key, "/")
		}
		for i := 1; i < o.Pieces; i++ {
			if at := i * len(rows) / o.Pieces; at > 0 {
				if key := strings.Split(rows[at-1].key, "/"); !slices.ContainsFunc(first.Splits, func(k []string) bool { return slices.Equal(k, key) }) {
					first.Splits = append(first.Splits, key)
				}
			}
		}
	case snapshot.OrderKeys:
		for _, v := range rows {
			if slices.ContainsFunc(o.Keys, func(k []string) bool { return strings.Join(k, "/") == v.key }) {
				w.give(first, v)
			}
		}
	case snapshot.OrderRange:
		for _, v := range rows {
			if o.After != nil && t.compareKeys(v.key, strings.Join(o.After, "/")) <= 0 ||
				o.To != nil && t.compareKeys(v.key, strings.Join(o.To, "/")) > 0 {
				continue
			}
			if o.Where == oddRows && v.stamp%2 == 0 {
				continue
			}
			if first.Rows.Len() == o.Rows {
				first.Last = false
				break
			}
			w.give(first, v)
		}
	case snapshot.OrderWhole:
		r.table.readers++
		r.chunks[0].Last = false
		for {
			piece := *first
			piece.Rows = snapshot.Rows{}
			piece.Rows.Reset(len(t.columns))
			for ; len(rows) > 0 && piece.Rows.Len() < o.Rows; rows = rows[1:] {
				w.give(&piece, rows[0])
			}
			piece.Last = len(rows) == 0
			r.chunks = append(r.chunks, &piece)
			if piece.Last {
				break
			}
		}
	}
	return true
}

// give adds a row to a chunk.
func (w *world) give(c *snapshot.Chunk, v *version) {
	var values [][]byte
	for _, name := range v.table.columns {
		values = append(values, []byte(v.column(name)))
	}
	c.Rows.Add(values)
	if c.Order.Xmin {
		c.Xmins = append(c.Xmins, v.xmin)
	}
}

// spoil overwrites the rows of a chunk whose memory is free: who still reads them shows.
func spoil(c *snapshot.Chunk) {
	columns := len(c.Shape.Relation.Columns)
	n := c.Rows.Len()
	c.Rows.Reset(columns)
	for range n {
		row := make([][]byte, columns)
		for i := range row {
			row[i] = []byte("spoiled")
		}
		c.Rows.Add(row)
	}
	for i := range c.Xmins {
		c.Xmins[i] = 0
	}
}

// describe gives an order in a trace's words.
func describe(o *snapshot.Order, t *modelTable) string {
	keys := func(k [][]string) string {
		var s []string
		for _, k := range k {
			s = append(s, strings.Join(k, "/"))
		}
		return strings.Join(s, ",")
	}
	var s string
	switch o.Kind {
	case snapshot.OrderSnapshot:
		return "snapshot"
	case snapshot.OrderPlan:
		s = fmt.Sprintf("plan %s pieces=%d", t.name, o.Pieces)
	case snapshot.OrderKeys:
		s = fmt.Sprintf("keys %s %s", t.name, keys(o.Keys))
	case snapshot.OrderWhole:
		s = "whole " + t.name
	case snapshot.OrderRange:
		s = fmt.Sprintf("range %s (%s,%s]", t.name, strings.Join(o.After, "/"), strings.Join(o.To, "/"))
	}
	if o.Where != "" {
		s += " where " + o.Where
	}
	if o.Xmin {
		s += " xmin"
	}
	return s
}

// shortXID gives an xid as its distance from the first one of the model.
func shortXID(x checkpoint.XID) string { return fmt.Sprintf("x%d", int64(x)-(1<<32-4)) }

// shortMVCC gives an MVCC snapshot with short xids.
func shortMVCC(m snapshot.MVCC) string {
	s := shortXID(m.Xmin) + ":" + shortXID(m.Xmax) + ":"
	for i, x := range m.Running {
		if i > 0 {
			s += ","
		}
		s += shortXID(x)
	}
	return s
}

// describeChunk gives a chunk in a trace's words.
func describeChunk(c *snapshot.Chunk) string {
	s := fmt.Sprintf("S=%s L=%s", shortMVCC(c.Snapshot), c.LSN)
	if c.Order.Kind == snapshot.OrderSnapshot {
		return s
	}
	if len(c.Splits) > 0 {
		s += fmt.Sprintf(" splits=%v", c.Splits)
	}
	if c.End != nil {
		s += fmt.Sprintf(" end=%v", c.End)
	}
	for i := range c.Rows.Len() {
		var row []string
		for _, v := range c.Rows.Tuple(i, nil) {
			row = append(row, string(v.Text))
		}
		s += " (" + strings.Join(row, " ") + ")"
	}
	if c.Last {
		s += " last"
	}
	return s
}

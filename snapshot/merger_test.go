package snapshot

import (
	"testing"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// A table is read in two chunks; a change that the first chunk does not see supersedes
// its row, and the rows go out only when the stream has passed the chunk's LSN.
func TestMergerStrikesWhatPassed(t *testing.T) {
	rel := &replication.Relation{OID: 1, Schema: "s", Name: "t", Identity: replication.IdentityDefault,
		Columns: []replication.Column{{Name: "id", TypeOID: 23, Identity: true}, {Name: "v", TypeOID: 25}}}
	shape := Shape{Relation: rel, Key: []int{0}, Estimate: 3}
	text := func(s string) replication.Value {
		return replication.Value{Kind: replication.ValueText, Text: []byte(s)}
	}
	now := time.Unix(1000, 0)
	m := NewMerger(Options{ChunkRows: 2, ChunkBytes: 1 << 20, Readers: 1}, 100)
	m.Add(Table{OID: 1, Schema: "s", Name: "t", Key: []string{"id"}, Estimate: 3}, checkpoint.TableProgress{State: checkpoint.TablePending})

	o := m.Order(now)
	if o == nil || o.Kind != OrderPlan {
		t.Fatalf("first order: %+v, want a plan", o)
	}
	if err := m.Arrived(&Chunk{Order: o, Shape: shape}, now); err != nil {
		t.Fatal(err)
	}
	o = m.Order(now)
	if o == nil || o.Kind != OrderRange || o.After != nil || o.Rows != 2 {
		t.Fatalf("second order: %+v, want the first range", o)
	}
	// Transaction 10 passes before the rows arrive, and they do not show it.
	m.Begin(10, 100)
	c := &replication.Change{Op: replication.OpUpdate, Relation: rel, New: replication.Tuple{text("1"), text("new")}}
	if v := m.Change(c); v != Emit {
		t.Fatalf("verdict %d, want emit", v)
	}
	m.Reached(200)
	chunk := &Chunk{Order: o, Shape: shape, Snapshot: MVCC{Xmin: 10, Xmax: 10}, LSN: 150}
	chunk.Rows.Reset(2)
	chunk.Rows.Add([][]byte{[]byte("1"), []byte("old")})
	chunk.Rows.Add([][]byte{[]byte("2"), []byte("old")})
	if err := m.Arrived(chunk, now); err != nil {
		t.Fatal(err)
	}
	row, ok := m.Next()
	if !ok || string(row.Tuple[0].Text) != "2" {
		t.Fatalf("row %+v, want id 2 alone", row)
	}
	if row, ok := m.Next(); ok {
		t.Fatalf("another row: %+v", row)
	}
	p := m.Progress()[1]
	if p.State != checkpoint.TableReading || len(p.Ranges) != 1 || p.Ranges[0].After[0] != "2" || p.Rows != 1 {
		t.Fatalf("progress %+v", p)
	}
	o = m.Order(now)
	if o == nil || o.After[0] != "2" {
		t.Fatalf("third order: %+v, want what is behind 2", o)
	}
	last := &Chunk{Order: o, Shape: shape, Snapshot: MVCC{Xmin: 11, Xmax: 11}, LSN: 300, Last: true}
	last.Rows.Reset(2)
	last.Rows.Add([][]byte{[]byte("3"), []byte("old")})
	if err := m.Arrived(last, now); err != nil {
		t.Fatal(err)
	}
	if row, ok := m.Next(); ok {
		t.Fatalf("%+v went out before the stream had reached 300", row)
	}
	m.Reached(300)
	if row, ok := m.Next(); !ok || string(row.Tuple[0].Text) != "3" {
		t.Fatalf("row %+v, want id 3", row)
	}
	if _, ok := m.Next(); ok || m.Active() {
		t.Fatal("the table is not done")
	}
	if p := m.Progress()[1]; p.State != checkpoint.TableDone || p.Rows != 2 {
		t.Fatalf("progress %+v", p)
	}
}

// A change passes by the former key, and the plan has another one: rows of a chunk that
// does not see the change cannot be told apart by it, and none of them goes out.
func TestRowsBehindAnotherKeyWaitForWhatPassed(t *testing.T) {
	rel := &replication.Relation{OID: 1, Schema: "s", Name: "t", Identity: replication.IdentityDefault,
		Columns: []replication.Column{{Name: "id", TypeOID: 23, Identity: true}, {Name: "v", TypeOID: 25}}}
	shape := Shape{Relation: rel, Key: []int{1}, Estimate: 1}
	text := func(s string) replication.Value {
		return replication.Value{Kind: replication.ValueText, Text: []byte(s)}
	}
	now := time.Unix(1000, 0)
	m := NewMerger(Options{ChunkRows: 2, ChunkBytes: 1 << 20, Readers: 1}, 100)
	m.Add(Table{OID: 1, Schema: "s", Name: "t", Key: []string{"id"}, Estimate: 1}, checkpoint.TableProgress{State: checkpoint.TablePending})
	m.Begin(10, 100)
	m.Change(&replication.Change{Op: replication.OpUpdate, Relation: rel, New: replication.Tuple{text("1"), text("new")}})
	m.Reached(200)
	if err := m.Arrived(&Chunk{Order: m.Order(now), Shape: shape}, now); err != nil {
		t.Fatal(err)
	}
	read := func(s MVCC, v string) {
		t.Helper()
		o := m.Order(now)
		if o == nil || o.Kind != OrderRange {
			t.Fatalf("order %+v, want a range", o)
		}
		chunk := &Chunk{Order: o, Shape: shape, Snapshot: s, LSN: 150, Last: true}
		chunk.Rows.Reset(2)
		chunk.Rows.Add([][]byte{[]byte("1"), []byte(v)})
		if err := m.Arrived(chunk, now); err != nil {
			t.Fatal(err)
		}
	}
	read(MVCC{Xmin: 10, Xmax: 10}, "old")
	if row, ok := m.Next(); ok {
		t.Fatalf("row %+v went out, which the stream has superseded", row)
	}
	now = now.Add(time.Second)
	read(MVCC{Xmin: 11, Xmax: 11}, "new")
	if row, ok := m.Next(); !ok || string(row.Tuple[1].Text) != "new" {
		t.Fatalf("row %+v, want the one that the stream has passed", row)
	}
}

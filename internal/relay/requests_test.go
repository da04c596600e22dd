package relay

import (
	"slices"
	"testing"

	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/snapshot"
)

// Requests are taken in their order; one whose table is being read waits, and so does one
// that names a table which the catalog may not have shown yet. The offset in a checkpoint
// never passes one that waits.
func TestRequestsAreTakenInOrder(t *testing.T) {
	table := func(oid uint32, name string) snapshot.Table {
		return snapshot.Table{OID: oid, Schema: "public", Name: name, Key: []string{"id"}}
	}
	s := &session{log: zerolog.Nop()}
	g := &merging{l: &loop{s: s}, merger: snapshot.NewMerger(snapshot.Options{Readers: 1}, 1)}
	g.published = []snapshot.Table{table(1, "a"), table(2, "b"), {OID: 3, Schema: "public", Name: "heap", Whole: true}}
	g.merger.Add(table(1, "a"), checkpoint.TableProgress{State: checkpoint.TablePending})
	g.merger.Add(table(2, "b"), checkpoint.TableProgress{State: checkpoint.TableDone})
	ask := func(id string, tables ...string) checkpoint.Request {
		return checkpoint.Request{ID: id, Tables: tables}
	}
	offset := func() (int64, []string) {
		var cp checkpoint.Checkpoint
		g.requests.checkpoint(&cp)
		return cp.Requests, cp.TakenOver
	}
	state := func(oid uint32) checkpoint.TableState {
		p, _ := g.merger.Known(oid)
		return p.State
	}

	g.requests.take(g, news{requests: []checkpoint.Request{ask("1", "public.b"), ask("2", "public.a"), ask("3", "public.b")}, from: 10, next: 20})
	if at, taken := offset(); at != 10 || !slices.Equal(taken, []string{"1"}) {
		t.Errorf("offset %d, taken %v; the second waits for its table", at, taken)
	}
	if state(2) != checkpoint.TableWaiting {
		t.Errorf("b is %s, want waiting", state(2))
	}
	g.merger.Remove(1) // its first snapshot is over
	g.merger.Progress()
	g.requests.take(g, news{})
	if at, taken := offset(); at != 10 || !slices.Equal(taken, []string{"2"}) {
		t.Errorf("offset %d, taken %v; the third waits for b", at, taken)
	}
	g.merger.Remove(2)
	g.merger.Progress()
	g.requests.take(g, news{})
	if at, taken := offset(); at != 20 || !slices.Equal(taken, []string{"3"}) {
		t.Errorf("offset %d, taken %v; nothing waits any more", at, taken)
	}

	// A table that nobody has seen yet may have been made a moment ago.
	g.requests.take(g, news{requests: []checkpoint.Request{ask("4", "public.new")}, from: 20, next: 30})
	for range 2 {
		if at, taken := offset(); at != 20 || len(taken) > 0 {
			t.Fatalf("offset %d, taken %v before the catalog was looked at twice", at, taken)
		}
		g.requests.looks++
		g.requests.take(g, news{})
	}
	if at, taken := offset(); at != 30 || !slices.Equal(taken, []string{"4"}) {
		t.Errorf("offset %d, taken %v; it is not captured, and nobody waits for it for ever", at, taken)
	}

	// A truncate would take the rows outside of the condition along.
	part := ask("5", "public.heap")
	part.Where = "a > 1"
	g.requests.take(g, news{requests: []checkpoint.Request{part}, from: 30, next: 40})
	if _, known := g.merger.Known(3); known {
		t.Error("a part of a table that is read whole was taken over")
	}
}

package snapshot_test

import (
	"flag"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/snapshot"
)

var rewrite = flag.Bool("rewrite", false, "write what the Merger does into testdata, to be reviewed as a diff")

const wantMark = "-- want --\n"

// TestMergerScripts runs the scripts of testdata/merger and compares everything that
// happens, line by line.
func TestMergerScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/merger/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("scripts: %v, %v", files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			script, want, _ := strings.Cut(string(data), wantMark)
			s := newSim(newMerger)
			for _, line := range strings.Split(script, "\n") {
				line, _, _ = strings.Cut(line, "#")
				if line = strings.TrimSpace(line); line == "" {
					continue
				}
				if err := s.run(line); err != nil {
					t.Fatalf("%s: %v\n%s", line, err, s.trace.String())
				}
			}
			got := s.trace.String()
			if *rewrite {
				if err := os.WriteFile(file, []byte(script+wantMark+got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("the trace differs (-want +got):\n%s", diff)
			}
		})
	}
}

// wrong is a Merger that does one thing wrong.
type wrong struct {
	*snapshot.Merger
	change  func(m *snapshot.Merger, c *replication.Change) snapshot.Verdict
	arrived func(c *snapshot.Chunk)
	hold    func(lsn checkpoint.LSN, ok bool) (checkpoint.LSN, bool)
	paused  func(paused bool) bool
}

func (w *wrong) Change(c *replication.Change) snapshot.Verdict {
	if w.change != nil {
		return w.change(w.Merger, c)
	}
	return w.Merger.Change(c)
}

func (w *wrong) Arrived(c *snapshot.Chunk, now time.Time) error {
	if w.arrived != nil {
		w.arrived(c)
	}
	return w.Merger.Arrived(c, now)
}

func (w *wrong) Hold() (checkpoint.LSN, bool) {
	lsn, ok := w.Merger.Hold()
	if w.hold != nil {
		return w.hold(lsn, ok)
	}
	return lsn, ok
}

func (w *wrong) Paused(now time.Time) (bool, time.Time) {
	paused, wake := w.Merger.Paused(now)
	if w.paused != nil {
		paused = w.paused(paused)
	}
	return paused, wake
}

// TestModelCatchesWrongMergers makes sure that the model can fail: each of these is found
// within a few seeds.
func TestModelCatchesWrongMergers(t *testing.T) {
	everything := snapshot.MVCC{Xmin: math.MaxUint64, Xmax: math.MaxUint64}
	for _, tt := range []struct {
		name  string
		wrong wrong
		o     func(*snapshot.Options)
	}{
		{name: "every chunk is thought to see everything", wrong: wrong{arrived: func(c *snapshot.Chunk) { c.Snapshot = everything }}},
		{name: "rows go out before the stream has passed what they see", wrong: wrong{arrived: func(c *snapshot.Chunk) { c.LSN = 1 }}},
		{name: "the memory of what passed is dropped at once", wrong: wrong{change: func(m *snapshot.Merger, c *replication.Change) snapshot.Verdict {
			v := m.Change(c)
			m.Saw(everything)
			return v
		}}},
		{name: "truncates are not looked at", wrong: wrong{change: func(m *snapshot.Merger, c *replication.Change) snapshot.Verdict {
			if c.Op == replication.OpTruncate {
				return snapshot.Emit
			}
			return m.Change(c)
		}}},
		{name: "deletes are not looked at", wrong: wrong{change: func(m *snapshot.Merger, c *replication.Change) snapshot.Verdict {
			if c.Op == replication.OpDelete {
				return snapshot.Emit
			}
			return m.Change(c)
		}}},
		{name: "columns that a change lacks are not seen", wrong: wrong{change: func(m *snapshot.Merger, c *replication.Change) snapshot.Verdict {
			blind := *c
			blind.New = append(replication.Tuple(nil), c.New...)
			for i := range blind.New {
				if blind.New[i].Kind == replication.ValueUnchanged {
					blind.New[i].Kind = replication.ValueNull
				}
			}
			return m.Change(&blind)
		}}},
		{name: "what is held is not held", wrong: wrong{change: func(m *snapshot.Merger, c *replication.Change) snapshot.Verdict {
			if v := m.Change(c); v == snapshot.Drop {
				return v
			}
			return snapshot.Emit
		}}},
		{name: "what is contained in the rows goes out too", wrong: wrong{change: func(m *snapshot.Merger, c *replication.Change) snapshot.Verdict {
			if v := m.Change(c); v == snapshot.Hold {
				return v
			}
			return snapshot.Emit
		}}},
		{name: "everything may be confirmed", wrong: wrong{hold: func(checkpoint.LSN, bool) (checkpoint.LSN, bool) { return 0, false }}},
		{name: "the stream never stands still", wrong: wrong{paused: func(bool) bool { return false }}},
		{name: "a restart does not wait for what is sent again", o: func(o *snapshot.Options) { o.Delivered = checkpoint.Position{} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			create := func(o snapshot.Options, since checkpoint.LSN) merger {
				if tt.o != nil {
					tt.o(&o)
				}
				w := tt.wrong
				w.Merger = snapshot.NewMerger(o, since)
				return &w
			}
			for seed := uint64(1); seed <= 20_000; seed++ {
				if f := runSeed(create, seed, 400); f != nil {
					t.Logf("seed %d: %v", seed, f.err)
					return
				}
			}
			t.Error("the model did not notice")
		})
	}
}

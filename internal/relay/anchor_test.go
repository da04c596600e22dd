package relay

import (
	"testing"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

func TestTheAnchorMovesWhenItsWindowIsPassedAndNoFurther(t *testing.T) {
	now := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	const step = 100
	make16 := func() *anchor {
		a := &anchor{o: AnchorOptions{WAL: 16 * step, Time: 16 * time.Minute}, oldest: anchorMark{1000, now.Add(-10 * time.Minute)}}
		for i := range 40 {
			a.marks = append(a.marks, anchorMark{checkpoint.LSN(1000 + 50*i), now.Add(time.Duration(i-40) * 15 * time.Second)})
		}
		return a
	}
	for _, tt := range []struct {
		name        string
		live, floor checkpoint.LSN
		at          time.Time
		want        checkpoint.LSN
	}{
		{"within the window it stays", 2600, 0, now, 0},
		{"past it by WAL, by a step more", 2601, 0, now, 1100},
		{"past it by time, by a step more", 2500, 0, now.Add(6*time.Minute + time.Second), 1000 + 50*4},
		{"never past a running replay", 2900, 1070, now, 1050},
		{"a replay that stands at the anchor holds it", 2900, 1000, now, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := make16()
			if to, _ := a.target(tt.live, tt.floor, a.o.WAL, tt.at); to.lsn != tt.want {
				t.Errorf("to %d, want %d", to.lsn, tt.want)
			}
		})
	}
	a := make16()
	a.marks = []anchorMark{{5000, now}}
	if to, ask := a.target(5000, 0, a.o.WAL, now); to.lsn != 0 || ask != 1100 {
		t.Errorf("without marks: to %d, ask %d; want to ask a step further", to.lsn, ask)
	}
}

func TestTheAnchorLetsGoBeforeTheServerRunsShortOfRoom(t *testing.T) {
	a := &anchor{o: AnchorOptions{WAL: 1000, Time: time.Hour, MaxRetained: 5000}, had: true}
	live := replication.Slot{RestartLSN: 9000}
	for _, tt := range []struct {
		name  string
		slot  replication.Slot
		found bool
		keep  int64
		goes  bool
	}{
		{"there and small", replication.Slot{RestartLSN: 8000}, true, -1, false},
		{"dropped", replication.Slot{}, false, -1, true},
		{"lost", replication.Slot{RestartLSN: 8000, WALStatus: "lost"}, true, -1, true},
		{"above source.max-retained-wal", replication.Slot{RestartLSN: 4000}, true, -1, true},
		{"near max_slot_wal_keep_size", replication.Slot{RestartLSN: 7000}, true, 3900, true},
		{"in use", replication.Slot{RestartLSN: 4000, Active: true}, true, 100, false},
		{"where the stream itself keeps as much", replication.Slot{RestartLSN: 9000}, true, 100, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			why := a.letGo(tt.slot, tt.found, live, replication.Room{WALEnd: 10000, MaxKeep: tt.keep})
			if (why != "") != tt.goes {
				t.Errorf("lets go: %q, want %t", why, tt.goes)
			}
		})
	}
}

package checkpoint

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAPositionThatIsMovedTakesItsMarksAlong(t *testing.T) {
	id := func(lsn LSN, seq uint64) ChangeID { return ChangeID{CommitLSN: lsn, Seq: seq} }
	at := func(lsn LSN) Position { return Position{LSN: lsn, CommitLSN: lsn} }
	row := [][]string{{"1"}}
	before := After{
		Done: id(100, 2), Dead: []ChangeID{id(100, 3), id(150, 0), id(190, 1)},
		Skipped: []Stretch{{id(110, 0), id(120, 0)}, {id(140, 1), id(160, 0)}},
		Tables:  map[uint32]AfterTable{1: {From: id(50, 0)}, 2: {From: id(170, 0), Key: []string{"id"}, Rows: row}},
	}
	for name, tt := range map[string]struct {
		was, to Position
		want    After
	}{
		"nowhere": {at(200), at(200), before},
		"forwards": {at(200), at(300), After{
			Done: before.Done, Dead: before.Dead, Tables: before.Tables,
			Skipped: []Stretch{before.Skipped[0], before.Skipped[1], {id(200, 0), id(300, 0)}},
		}},
		"forwards out of a transaction that was cut": {Position{LSN: 200, Cut: Cut{CommitLSN: 210, Changes: 7}}, at(300), After{
			Done: before.Done, Dead: before.Dead, Tables: before.Tables,
			Skipped: []Stretch{before.Skipped[0], before.Skipped[1], {id(210, 7), id(300, 0)}},
		}},
		"back, not beyond what is done": {at(200), at(150), After{
			Done: id(100, 2), Dead: []ChangeID{id(100, 3)},
			Skipped: []Stretch{{id(110, 0), id(120, 0)}, {id(140, 1), id(150, 0)}},
			Tables:  map[uint32]AfterTable{1: {From: id(50, 0)}, 2: {From: id(150, 0), Key: []string{"id"}, Rows: row}},
		}},
		"back beyond everything": {at(200), at(40), After{
			Done:   id(40, 0),
			Tables: map[uint32]AfterTable{1: {From: id(40, 0)}, 2: {From: id(40, 0), Key: []string{"id"}, Rows: row}},
		}},
	} {
		was := before
		got := was.Moved(tt.was, tt.to)
		if diff := cmp.Diff(&tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if before.Tables[2].From != id(170, 0) || len(before.Skipped) != 2 {
			t.Fatalf("%s changed what it was given", name)
		}
	}
	if (*After)(nil).Moved(at(1), at(2)) != nil {
		t.Error("nothing became something")
	}
	s := Stretch{id(140, 1), id(160, 0)}
	for c, want := range map[ChangeID]bool{id(140, 0): false, id(140, 1): true, id(159, 9): true, id(160, 0): false} {
		if s.Has(c) != want {
			t.Errorf("%v has %v: %t", s, c, !want)
		}
	}
}

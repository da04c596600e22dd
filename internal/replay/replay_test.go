package replay

import (
	"slices"
	"testing"
	"time"

	"github.com/walrelay/walrelay/replication"
)

func TestAskedIsTheSameForTheSameFlags(t *testing.T) {
	at := time.Date(2026, 12, 1, 9, 0, 0, 5000, time.FixedZone("", 3600))
	for _, tt := range []struct {
		name string
		o    Options
		want string
	}{
		{"an LSN without an end", Options{Range: Range{From: 0x1A2B3C8}, Prefix: "replay.x"}, "--from-lsn 0/1A2B3C8 --topic-prefix replay.x"},
		{"times are in UTC, to the microsecond", Options{Range: Range{FromTime: at, ToTime: at.Add(time.Hour)}, InPlace: true, Prefix: "shop"},
			"--from-time 2026-12-01T08:00:00.000005Z --to-time 2026-12-01T09:00:00.000005Z --in-place"},
		{"tables are sorted, each once", Options{Range: Range{From: 1, To: 2}, Tables: []string{"b.b", "a.a", "b.b"}, Prefix: "p"},
			"--from-lsn 0/1 --to-lsn 0/2 --table a.a --table b.b --topic-prefix p"},
	} {
		if got := tt.o.asked(); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

func TestTableFilterPassesItsTablesAndKnowsWhichHadNoChange(t *testing.T) {
	a, b := &replication.Relation{Schema: "public", Name: "a"}, &replication.Relation{Schema: "public", Name: "b"}
	all := newTableFilter(nil)
	if !all.wants(nil) || !all.wants(a) || len(all.unseen()) > 0 {
		t.Error("without tables everything passes, messages too")
	}
	f := newTableFilter([]string{"public.c", "public.a", "other.a"})
	for i, rel := range []*replication.Relation{a, b, b, nil, a, a, {Schema: "public", Name: "A"}} {
		if got, want := f.wants(rel), rel == a; got != want {
			t.Errorf("change %d of %v: passes %t, want %t", i, rel, got, want)
		}
	}
	if got, want := f.unseen(), []string{"other.a", "public.c"}; !slices.Equal(got, want) {
		t.Errorf("without a change: %v, want %v", got, want)
	}
	if n := testing.AllocsPerRun(100, func() { f.wants(a) }); n > 0 {
		t.Errorf("%v allocations per change", n)
	}
}

func TestProgressIsAPartOfTheRange(t *testing.T) {
	for _, tt := range []struct {
		p    Progress
		want float64
	}{
		{Progress{At: 10, From: 10, To: 10}, 1}, {Progress{At: 5, From: 10, To: 20}, 0}, {Progress{At: 15, From: 10, To: 20}, 0.5}, {Progress{At: 30, From: 10, To: 20}, 1},
	} {
		if got := tt.p.Part(); got != tt.want {
			t.Errorf("%+v is %v, want %v", tt.p, got, tt.want)
		}
	}
}

package replication

import (
	"errors"
	"reflect"
	"testing"

	"github.com/walrelay/walrelay/checkpoint"
)

// healthy is a connector that has run, and may go on.
func healthy() Facts {
	return Facts{
		Managed: true,
		Database: Database{
			SystemID: "7001", Name: "shop", Timeline: 1, Version: 150008, WALLevel: "logical", WALEnd: 0x5000,
			MaxSlots: 10, Slots: 1, Role: Role{Name: "walrelay", Replication: true, Create: true},
		},
		SlotName: "walrelay_shop", SlotFound: true,
		Slot: Slot{
			Name: "walrelay_shop", Plugin: Plugin, Type: "logical", Database: "shop", RestartLSN: 0x2000, ConfirmedFlush: 0x3000,
			CatalogXmin: 740, WALStatus: "reserved",
		},
		Publication: "walrelay_shop", PublicationFound: true, Order: OrderPublicationFirst,
		Checkpoint: checkpoint.Checkpoint{
			Position: checkpoint.Position{LSN: 0x4000},
			Source:   checkpoint.Source{SystemID: "7001", Database: "shop", Timeline: 1},
		},
		CheckpointTopic: "_walrelay.shop", CheckpointTopicUsed: true, AnchorFound: true,
	}
}

// first is a connector that never ran.
func first() Facts {
	f := healthy()
	f.SlotFound, f.Slot, f.PublicationFound, f.Order = false, Slot{}, false, OrderUnknown
	f.Checkpoint, f.CheckpointTopicUsed, f.AnchorFound = checkpoint.Checkpoint{}, false, false
	return f
}

// adopted has a slot that somebody made for it.
func adopted() Facts {
	f := healthy()
	f.Checkpoint, f.CheckpointTopicUsed, f.AnchorFound = checkpoint.Checkpoint{}, false, false
	return f
}

func with(f Facts, change func(*Facts)) Facts {
	change(&f)
	return f
}

func TestVerifyStart(t *testing.T) {
	for _, tt := range []struct {
		name  string
		facts Facts
		want  string // parts of the refusal, separated by |
	}{
		{"a healthy connector starts", healthy(), ""},
		{"a first start", first(), ""},
		{"a slot without a checkpoint is adopted", adopted(), ""},
		{"the order of an adopted slot may be unknown", with(adopted(), func(f *Facts) { f.Order = OrderUnknown }), ""},
		{"a superuser needs no attribute", with(first(), func(f *Facts) { f.Database.Role = Role{Superuser: true} }), ""},
		{"wal_level", with(first(), func(f *Facts) { f.Database.WALLevel = "replica" }), "wal_level is replica|ALTER SYSTEM SET wal_level = logical"},
		{"an old server", with(first(), func(f *Facts) { f.Database.Version = 130012 }), "PostgreSQL 13 is too old"},
		{"no REPLICATION right", with(first(), func(f *Facts) { f.Database.Role.Replication = false }), `role "walrelay"|ALTER ROLE "walrelay" REPLICATION`},
		{"a standby, managed", with(first(), func(f *Facts) { f.Database.InRecovery = true }), "standby|publication-mode: existing"},
		{"a standby, existing", with(healthy(), func(f *Facts) { f.Database.InRecovery, f.Managed = true, false }), ""},
		{"no slot free", with(first(), func(f *Facts) { f.Database.Slots = 10 }), "10 of max_replication_slots = 10"},
		{"no slot free, but ours is there", with(healthy(), func(f *Facts) { f.Database.Slots = 10 }), ""},
		{"several problems come at once", with(first(), func(f *Facts) { f.Database.WALLevel, f.Database.Slots = "minimal", 10 }), "wal_level is minimal|max_replication_slots"},
		{"a physical slot", with(healthy(), func(f *Facts) { f.Slot.Type, f.Slot.Plugin = "physical", "" }), "is physical|source.slot"},
		{"another plugin", with(healthy(), func(f *Facts) { f.Slot.Plugin = "test_decoding" }), "logical with plugin test_decoding|source.slot"},
		{"a slot of another database", with(healthy(), func(f *Facts) { f.Slot.Database = "x" }), `belongs to database "x"|source.dsn`},
		{"two_phase", with(healthy(), func(f *Facts) { f.Slot.TwoPhase = true }), "two_phase"},
		{"temporary", with(healthy(), func(f *Facts) { f.Slot.Temporary = true }), "temporary"},
		{"lost WAL", with(healthy(), func(f *Facts) { f.Slot.WALStatus, f.Slot.Invalidation = "lost", "wal_removed" }),
			"is lost|wal_removed|committed after 0/4000|checkpoint set -c FILE --lsn 0/4000 makes the slot again|slot drop -c FILE --yes|kafka.checkpoint-topic|max_slot_wal_keep_size"},
		{"lost WAL of a slot without a checkpoint", with(adopted(), func(f *Facts) { f.Slot.WALStatus = "lost" }), "is lost|slot drop -c FILE --yes, then start again"},
		{"the slot is gone", with(healthy(), func(f *Facts) { f.SlotFound = false }), "walrelay_shop|does not exist|0/4000|_walrelay.shop|checkpoint set -c FILE --lsn 0/4000"},
		{"another cluster", with(healthy(), func(f *Facts) { f.Database.SystemID = "7002" }), "7001|7002|--accept-source"},
		{"an unknown cluster", with(healthy(), func(f *Facts) { f.Database.SystemID = "" }), "7001|unknown"},
		{"another database", with(healthy(), func(f *Facts) { f.Database.Name, f.Slot.Database = "x", "x" }), `"shop"|"x"|--accept-source`},
		{"a slot without publication", with(adopted(), func(f *Facts) { f.PublicationFound = false }),
			"cannot be used with a publication made after it|walrelay slot drop -c FILE --yes|publications are made first"},
		{"the same, existing", with(adopted(), func(f *Facts) { f.PublicationFound, f.Managed = false, false }), "cannot be used with a publication made after it|CREATE PUBLICATION"},
		{"the publication was dropped", with(healthy(), func(f *Facts) { f.PublicationFound = false }), "was dropped|slot drop|kafka.checkpoint-topic"},
		{"no slot and no publication, existing", with(first(), func(f *Facts) { f.Managed = false }), "does not exist|CREATE PUBLICATION"},
		{"a publication made after the slot", with(adopted(), func(f *Facts) { f.Order = OrderSlotFirst }), "is older than publication|0/3000|slot drop"},
		{"with a checkpoint the horizon counts", with(healthy(), func(f *Facts) { f.Order = OrderSlotFirst }), ""},
		{"the checkpoint is gone, the anchor is there", with(adopted(), func(f *Facts) { f.AnchorFound = true }), "no checkpoint|anchor|checkpoint set"},
		{"the checkpoint is gone, the topic was used", with(adopted(), func(f *Facts) { f.CheckpointTopicUsed = true }), "no checkpoint|has been written to|cleanup.policy=compact"},
		{"slot and checkpoint are gone, the topic was used", with(first(), func(f *Facts) { f.CheckpointTopicUsed = true }), "no checkpoint"},
		{"the position may be stale before fencing", with(healthy(), func(f *Facts) { f.Slot.ConfirmedFlush = 0x9000 }), ""},
	} {
		t.Run(tt.name, func(t *testing.T) { wantRefusal(t, VerifyStart(tt.facts), tt.want) })
	}
}

func TestVerifyResume(t *testing.T) {
	moved := func(f *Facts) { f.Database.Timeline = 2 }
	for _, tt := range []struct {
		name  string
		facts Facts
		want  string
	}{
		{"the slot follows the checkpoint", healthy(), ""},
		{"the slot is at the checkpoint", with(healthy(), func(f *Facts) { f.Slot.ConfirmedFlush = 0x4000 }), ""},
		{"the server's WAL ends at the checkpoint", with(healthy(), func(f *Facts) { f.Database.WALEnd = 0x4000 }), ""},
		{"an adopted slot has nothing to be past of", adopted(), ""},
		{"the slot is past the checkpoint", with(healthy(), func(f *Facts) { f.Slot.ConfirmedFlush = 0x4010 }),
			"walrelay_shop|0/4010|16 bytes past|0/4000|may be missing|walrelay checkpoint set -c FILE --lsn 0/4010"},
		{"the server lost commits", with(healthy(), func(f *Facts) { f.Database.WALEnd = 0x3FF0 }),
			"server's WAL is behind the checkpoint|0/3FF0|0/4000|timeline 1|16 bytes|checkpoint set -c FILE --lsn 0/3FF0"},
		{"another cluster", with(healthy(), func(f *Facts) { f.Database.SystemID = "7002" }), "7001|7002"},
		{"a slot that was lost meanwhile", with(healthy(), func(f *Facts) { f.Slot.WALStatus = "lost" }), "is lost"},
		{"a checkpoint that was lost meanwhile", with(adopted(), func(f *Facts) { f.CheckpointTopicUsed = true }), "no checkpoint"},
		{"a promoted standby that has everything", with(with(healthy(), moved), func(f *Facts) { f.History = []TimelineSwitch{{1, 0x4000}} }), ""},
		{"a promoted standby that has not", with(with(healthy(), moved), func(f *Facts) { f.History = []TimelineSwitch{{1, 0x3000}} }),
			"server's WAL is behind the checkpoint|0/4000|timeline 1|0/3000|timeline 2|4096 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) { wantRefusal(t, VerifyResume(tt.facts), tt.want) })
	}
}

func TestAdopts(t *testing.T) {
	for name, tt := range map[string]struct {
		facts Facts
		want  bool
	}{"healthy": {healthy(), false}, "first": {first(), false}, "adopted": {adopted(), true}} {
		if got := tt.facts.Adopts(); got != tt.want {
			t.Errorf("%s: adopts %v", name, got)
		}
	}
}

func TestCheckTimeline(t *testing.T) {
	history := []TimelineSwitch{{1, 0x1000}, {3, 0x3000}} // the server: 1, then 3, now 5
	for _, tt := range []struct {
		name     string
		timeline int32
		position checkpoint.LSN
		refused  bool
	}{
		{"the same timeline", 5, 0x9999, false},
		{"an ancestor, before it was left", 1, 0x0FFF, false},
		{"an ancestor, just where it was left", 3, 0x3000, false},
		{"an ancestor, past where it was left", 3, 0x3001, true},
		{"past an older switch, though below a newer one", 1, 0x2000, true},
		{"a timeline that the server never took", 2, 0x0800, true},
		{"a timeline above the server's", 6, 0x0800, true},
		{"a checkpoint without timeline", 0, 0x9999, false},
		{"no position yet", 2, 0, false},
	} {
		err := CheckTimeline(checkpoint.Source{Timeline: tt.timeline}, tt.position, 5, history)
		var r *checkpoint.Refusal
		if errors.As(err, &r) != tt.refused {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestParseTimelineHistory(t *testing.T) {
	got, err := ParseTimelineHistory([]byte("1\t0/3000148\tno recovery target specified\n\n# comment\n2\t1/5000000\tbefore 2026-01-01 00:00:00+00\r\n"))
	want := []TimelineSwitch{{1, 0x3000148}, {2, 0x1_05000000}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := ParseTimelineHistory(nil); err != nil || len(got) != 0 {
		t.Errorf("an empty file: %v, %v", got, err)
	}
	for _, bad := range []string{"1", "x\t0/1", "1\t0", "0\t0/1", "2\t0/1\n2\t0/2", "2\t0/1\n1\t0/2", "99999999999\t0/1"} {
		if got, err := ParseTimelineHistory([]byte(bad)); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}

func FuzzParseTimelineHistory(f *testing.F) {
	f.Add([]byte("1\t0/3000148\tno recovery target specified\n"))
	f.Add([]byte("# c\n\n1 0/1\n2 FFFFFFFF/FFFFFFFF x"))
	f.Add([]byte("1\t0/1\n1\t0/1"))
	f.Fuzz(func(t *testing.T, content []byte) {
		history, err := ParseTimelineHistory(content)
		if err != nil && history != nil {
			t.Error("an error and a history")
		}
		last := int32(0)
		for _, s := range history {
			if s.Timeline <= last {
				t.Errorf("timelines do not rise: %v", history)
			}
			last = s.Timeline
		}
	})
}

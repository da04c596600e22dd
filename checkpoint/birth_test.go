package checkpoint

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func fullBirth() *Birth {
	return &Birth{
		Slot: "walrelay_shop", LSN: 0x16_B374_D848, Source: Source{SystemID: "7431870498234981234", Database: `the "shop"`, Timeline: 3},
		Snapshot: "812:815:813", Before: []uint32{16384, 4294967295}, Empty: []uint32{16384},
	}
}

func TestBirthComesBack(t *testing.T) {
	const text = `{"version":"1.2","slot":"walrelay_shop","lsn":"16/B374D848","source":{"system_id":"7431870498234981234","database":"the \"shop\"","timeline":3},"snapshot":"812:815:813","before":[16384,4294967295],"empty":[16384]}`
	for _, b := range []*Birth{fullBirth(), {Slot: "s", LSN: 1, Before: []uint32{}, Empty: []uint32{}}} {
		data := EncodeBirth(nil, b)
		if b.LSN > 1 && string(data) != text {
			t.Errorf("encoded as %s, want %s", data, text)
		}
		back, err := DecodeBirth(data)
		if diff := cmp.Diff(b, back); err != nil || diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
	}
	for _, bad := range []string{`{}`, `{"version":"1.2"}`, `{"version":"1.2","slot":"s","lsn":"0/1"}`, `{"version":"1.2","slot":"s","lsn":"x","source":{}}`} {
		if _, err := DecodeBirth([]byte(bad)); err == nil {
			t.Errorf("%s decodes", bad)
		}
	}
	var newer *VersionError
	if _, err := DecodeBirth([]byte(`{"version":"2.0"}`)); !errors.As(err, &newer) {
		t.Errorf("a newer version: %v", err)
	}
}

func TestABirthIsOfOneSlot(t *testing.T) {
	b := fullBirth()
	other := b.Source
	other.SystemID = "1"
	moved := b.Source
	moved.Timeline++
	switch {
	case !b.Is(b.Slot, b.LSN, b.Source), !b.Is(b.Slot, b.LSN, moved):
		t.Error("it is not itself")
	case b.Is("another", b.LSN, b.Source), b.Is(b.Slot, b.LSN+8, b.Source), b.Is(b.Slot, b.LSN, other), (*Birth)(nil).Is(b.Slot, b.LSN, b.Source):
		t.Error("it is another slot's")
	case !b.Had(16384), b.Had(1), !b.WasEmpty(16384), b.WasEmpty(4294967295), (*Birth)(nil).Had(16384), (*Birth)(nil).WasEmpty(16384):
		t.Error("its tables are not its own")
	}
}

func FuzzDecodeBirth(f *testing.F) {
	f.Add(EncodeBirth(nil, fullBirth()))
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := DecodeBirth(data)
		if err != nil {
			return
		}
		again, err := DecodeBirth(EncodeBirth(nil, b))
		if err != nil {
			t.Fatal(err)
		}
		if b.Is(again.Slot, again.LSN, again.Source) != true {
			t.Errorf("%+v came back as %+v", b, again)
		}
	})
}

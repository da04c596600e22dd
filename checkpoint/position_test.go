package checkpoint

import (
	"slices"
	"testing"
)

func TestPositionSaysWhatIsDelivered(t *testing.T) {
	p := Position{LSN: 100, CommitLSN: 90}
	for commit, want := range map[LSN]bool{90: true, 99: true, 100: false, 101: false} {
		if p.HasTransaction(commit) != want {
			t.Errorf("a transaction with commit LSN %d delivered at %v: %v, want %v", commit, p, !want, want)
		}
	}
	// The wire gives a message the end of its record, which may be the next commit LSN.
	for end, want := range map[LSN]bool{99: true, 100: true, 101: false} {
		if p.HasMessage(end) != want {
			t.Errorf("a message that ends at %d delivered at %v: %v, want %v", end, p, !want, want)
		}
	}
	if p.Skip(100) != 0 {
		t.Error("nothing is cut, so nothing is skipped")
	}
	p.Cut = Cut{CommitLSN: 120, Changes: 7}
	if p.Skip(120) != 7 || p.Skip(121) != 0 || p.HasTransaction(120) {
		t.Errorf("of the cut transaction 7 changes are skipped: %v", p)
	}
}

func TestPositionCheck(t *testing.T) {
	for _, p := range []Position{{}, {LSN: 5}, {LSN: 5, Cut: Cut{CommitLSN: 5, Changes: 1}}, {Cut: Cut{CommitLSN: 5, Changes: 1}}} {
		if err := p.Check(); err != nil {
			t.Errorf("%v: %v", p, err)
		}
	}
	if (Position{LSN: 6, Cut: Cut{CommitLSN: 5, Changes: 1}}).Check() == nil {
		t.Error("a cut in a delivered transaction must be an error")
	}
}

func TestPositionZeroAndText(t *testing.T) {
	if !(Position{}).IsZero() || (Position{LSN: 1}).IsZero() || (Position{Cut: Cut{CommitLSN: 1}}).IsZero() {
		t.Error("IsZero is wrong")
	}
	if got := (Position{LSN: 0x100}).String(); got != "0/100" {
		t.Error(got)
	}
	if got := (Position{LSN: 0x100, Cut: Cut{CommitLSN: 0x200, Changes: 3}}).String(); got != "0/100+0/200:3" {
		t.Error(got)
	}
	if !(Checkpoint{}).IsZero() || (Checkpoint{Source: Source{Timeline: 1}}).IsZero() {
		t.Error("Checkpoint.IsZero is wrong")
	}
}

// A header sorts as text as the changes were delivered.
func TestHeaderSortsAsText(t *testing.T) {
	want := []string{
		"00000000FFFFFFFF-0000000007",
		"0000000100000000-0000000000",
		"00000009FF000000-0000000000",
		"0000000A00000001-0000000000",
		"0000001000000000-0000000012",
	}
	var got []string
	for _, p := range []struct {
		lsn string
		seq uint64
	}{{"0/FFFFFFFF", 7}, {"1/0", 0}, {"9/FF000000", 0}, {"A/1", 0}, {"10/0", 12}} {
		l, err := ParseLSN(p.lsn)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, string(AppendHeader(nil, l, p.seq)))
	}
	if !slices.Equal(got, want) || !slices.IsSorted(got) {
		t.Errorf("got %q, want %q", got, want)
	}
	if s := string(AppendSnapshotHeader(nil, 0xAB)); s != "00000000000000AB-snapshot" {
		t.Error(s)
	}
	if s := string(AppendHeader(nil, 1, 12345678901)); s != "0000000000000001-12345678901" {
		t.Error("a seq of more than ten digits is not cut:", s)
	}
}

// Rows that are read before the first transaction come before it, and it may commit at the
// very byte where the stream begins.
func TestRowsReadAtABeginningSortBeforeWhatCommitsThere(t *testing.T) {
	for _, begin := range []LSN{1, 0x3E75AF8, 0xFFFFFFFF} {
		p := Beginning(begin)
		if err := p.Check(); err != nil || p.HasTransaction(begin) || !p.HasTransaction(begin-1) {
			t.Errorf("%s: %v, has what commits there %t, and before %t", p, err, p.HasTransaction(begin), p.HasTransaction(begin-1))
		}
		row := string(AppendSnapshotHeader(nil, p.CommitLSN))
		if next := string(AppendHeader(nil, begin, 0)); row >= next {
			t.Errorf("a row that was read at %s sorts behind %s", row, next)
		}
		if last := string(AppendHeader(nil, begin-1, 1)); row <= last {
			t.Errorf("a row that was read at %s sorts before %s", row, last)
		}
	}
}

func TestParseHeaderRefusesWhatIsNone(t *testing.T) {
	for _, s := range []string{
		"", "-", "0000000000000001", "0000000000000001-", "0000000000000001-1", "1-0000000001", "+000000000000001-0000000001",
		"0000000000000001-Snapshot", "000000000000000G-0000000001", "0000000000000001-00000000-1", "0000000000000001-99999999999999999999",
	} {
		if _, _, _, err := ParseHeader(s); err == nil {
			t.Errorf("ParseHeader(%q) is no error", s)
		}
	}
}

func FuzzParseHeader(f *testing.F) {
	f.Add("0000001000000000-0000000012")
	f.Add("0000001000000000-snapshot")
	f.Add("0000001000000000-00000000012")
	f.Fuzz(func(t *testing.T, s string) {
		commit, seq, snapshot, err := ParseHeader(s)
		if err != nil {
			return
		}
		again := AppendHeader(nil, commit, seq)
		if snapshot {
			again = AppendSnapshotHeader(nil, commit)
		}
		c2, s2, n2, err := ParseHeader(string(again))
		if err != nil || c2 != commit || s2 != seq || n2 != snapshot {
			t.Fatalf("%q reads as %v %d %v, which reads as %v %d %v, %v", s, commit, seq, snapshot, c2, s2, n2, err)
		}
	})
}

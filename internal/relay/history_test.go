package relay

import (
	"testing"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

func TestWhatIsSentAgainHasToBeWhatWasDelivered(t *testing.T) {
	at := time.Date(2026, 12, 2, 12, 0, 0, 0, time.UTC)
	last := checkpoint.Position{LSN: 0x200, CommitLSN: 0x1F0, CommitTime: at}
	txn := func(commit checkpoint.LSN, after time.Duration) any {
		return &replication.Transaction{CommitLSN: commit, CommitTime: at.Add(after)}
	}
	for _, tt := range []struct {
		name    string
		slot    checkpoint.LSN
		sent    []any // transactions, and LSNs that everything is sent up to
		refused bool
	}{
		{"the same", 0x100, []any{txn(0x110, -time.Second), checkpoint.LSN(0x120), txn(0x1F0, 0), txn(0x300, time.Second)}, false},
		{"the same, beside a clock that was set back", 0x100, []any{txn(0x110, time.Hour), txn(0x1F0, 0), txn(0x300, 0)}, false},
		{"another one at its place", 0x100, []any{txn(0x1F0, time.Second)}, true},
		{"later ones before its place, and one behind it", 0x100, []any{txn(0x110, -time.Second), txn(0x150, time.Second), txn(0x300, 2*time.Second)}, true},
		{"later ones before its place, and nothing behind it", 0x100, []any{txn(0x150, time.Second), checkpoint.LSN(0x1F0), checkpoint.LSN(0x1F8)}, true},
		{"not there, and nothing against it", 0x100, []any{txn(0x110, -time.Second), txn(0x300, time.Second)}, false},
		{"not there, beside one of nearly the same time", 0x100, []any{txn(0x1E0, clockSlack), txn(0x300, time.Second)}, false},
		{"not sent again", 0x1F8, []any{txn(0x1F0, time.Second), txn(0x300, 0)}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h, refused := newHistory(last, tt.slot), false
			for _, sent := range tt.sent {
				if h == nil {
					break
				}
				var over bool
				var err error
				switch sent := sent.(type) {
				case *replication.Transaction:
					over, err = h.begins(sent)
				case checkpoint.LSN:
					over, err = h.reached(sent)
				}
				if err != nil && !checkpoint.IsRefusal(err) {
					t.Fatal(err)
				}
				refused = refused || err != nil
				if over {
					h = nil
				}
			}
			if refused != tt.refused {
				t.Errorf("refused %t, want %t", refused, tt.refused)
			}
		})
	}
	if h := newHistory(checkpoint.Beginning(0x200), 0x100); h != nil {
		t.Error("a beginning has nothing to be compared")
	}
}

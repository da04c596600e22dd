package kafka

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
)

func TestTheSlotsBirthIsFoundAndSaysNothingOfADelivery(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		s := c.store(t)
		want := func(want *checkpoint.Birth) {
			t.Helper()
			got, err := s.Birth(t.Context())
			if d := cmp.Diff(want, got); err != nil || d != "" {
				t.Fatalf("%v: %s", err, d)
			}
		}
		want(nil)
		s.mustRequest(t, "a")
		for lsn := range checkpoint.LSN(3) {
			b := &checkpoint.Birth{Slot: "s", LSN: lsn + 1, Snapshot: "1:1:", Before: []uint32{1}, Empty: []uint32{}}
			if err := s.NoteBirth(t.Context(), b); err != nil {
				t.Fatal(err)
			}
			want(b)
		}
		wantVirgin(t, s, true, "")
		newest := &checkpoint.Birth{Slot: "s", LSN: 3, Snapshot: "1:1:", Before: []uint32{1}, Empty: []uint32{}}
		w := c.writer(t, s, checkpoint.Checkpoint{})
		w.deliver(t, kgo.TryAbort)
		waitFor(t, "the birth behind nothing that is open", func() bool {
			b, err := s.Birth(t.Context())
			return err == nil && cmp.Equal(b, newest)
		})
		wantVirgin(t, s, true, "")
		// A record with its key that came in a transaction is nobody's note.
		if err := w.Client.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		w.Client.Produce(t.Context(), &kgo.Record{Topic: s.o.Topic, Key: []byte(checkpoint.KeySlot), Value: checkpoint.EncodeBirth(nil, newest)}, nil)
		if err := w.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := w.Client.EndTransaction(t.Context(), kgo.TryCommit); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the topic not to be virgin", func() bool {
			virgin, _, err := s.Virgin(t.Context())
			return err == nil && !virgin
		})
	})
}

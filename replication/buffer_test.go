package replication

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/walrelay/walrelay/checkpoint"
)

// slabOf holds one message of n bytes.
func slabOf(q *queue, lsn checkpoint.LSN, n int) *slab {
	s := q.newSlab()
	s.add(lsn, bytes.Repeat([]byte{'x'}, n))
	return s
}

// mustPush pushes what has room.
func mustPush(t testing.TB, q *queue, s *slab) {
	t.Helper()
	if err := q.push(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

// takeAll takes and renders every entry until the queue is empty.
func takeAll(t testing.TB, q *queue) []string {
	t.Helper()
	var got []string
	s, err := q.take(nil)
	for s != nil {
		for e, ok := s.next(); ok; e, ok = s.next() {
			switch {
			case e.keepalive && e.urgent:
				got = append(got, fmt.Sprintf("urgent %s", e.lsn))
			case e.keepalive:
				got = append(got, fmt.Sprintf("keepalive %s", e.lsn))
			default:
				got = append(got, fmt.Sprintf("message %s %d", e.lsn, len(e.msg)))
			}
		}
		s, err = q.take(s)
	}
	if err != nil {
		got = append(got, err.Error())
	}
	return got
}

func TestPushBlocksAtTheBoundAndWakesWhenASlabIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(3 * slabSize)
		const n = slabSize - entryHeader // a full slab, which none is merged with
		for i := range 3 {
			mustPush(t, q, slabOf(q, checkpoint.LSN(i), n))
		}
		pushed := make(chan error, 1)
		go func() { pushed <- q.push(t.Context(), slabOf(q, 3, n)) }()
		blocked := func(when string) {
			t.Helper()
			synctest.Wait()
			select {
			case err := <-pushed:
				t.Fatalf("pushed (%v) %s", err, when)
			default:
			}
		}
		blocked("over the bound")
		if got := q.buffered(); got != 3*slabSize {
			t.Errorf("%d bytes buffered, want %d", got, 3*slabSize)
		}
		s, err := q.take(nil)
		if err != nil {
			t.Fatal(err)
		}
		blocked("while the first slab is still being read")
		if s, err = q.take(s); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		select {
		case err := <-pushed:
			if err != nil {
				t.Fatal(err)
			}
		default:
			t.Fatal("still blocked with room for it")
		}
		if e, _ := s.next(); e.lsn != 1 {
			t.Errorf("second slab begins at %s", e.lsn)
		}
	})
}

func TestASlabAboveTheBoundPassesAnEmptyQueueOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(1000)
		mustPush(t, q, slabOf(q, 1, 5000))
		pushed := make(chan error, 1)
		go func() { pushed <- q.push(t.Context(), slabOf(q, 2, 5000)) }()
		synctest.Wait()
		if len(pushed) != 0 {
			t.Fatal("a second one passed")
		}
		s, err := q.take(nil)
		if err != nil {
			t.Fatal(err)
		}
		if s, err = q.take(s); s != nil || err != nil {
			t.Fatalf("took %v, %v; want nothing yet", s, err)
		}
		synctest.Wait()
		if len(pushed) != 1 {
			t.Fatal("it did not pass when the queue was empty")
		}
		select {
		case <-q.ready:
		default:
			t.Error("no signal that something arrived")
		}
	})
}

func TestPushGivesUpWhenTheStreamIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(10)
		mustPush(t, q, slabOf(q, 1, 100))
		ctx, cancel := context.WithCancelCause(t.Context())
		pushed := make(chan error, 1)
		go func() { pushed <- q.push(ctx, slabOf(q, 2, 100)) }()
		synctest.Wait()
		cancel(ErrStreamClosed)
		if err := <-pushed; !errors.Is(err, ErrStreamClosed) {
			t.Errorf("error %v, want the cause", err)
		}
		if got, want := takeAll(t, q), []string{"message 0/1 100"}; !slices.Equal(got, want) {
			t.Errorf("took %v, want %v", got, want)
		}
	})
}

func TestCloseGivesWhatArrivedBeforeTheError(t *testing.T) {
	q := newQueue(1 << 20)
	mustPush(t, q, slabOf(q, 1, 100))
	<-q.ready
	mustPush(t, q, slabOf(q, 2, slabSize))
	q.close(errors.New("cut"))
	<-q.ready
	want := []string{"message 0/1 100", fmt.Sprintf("message 0/2 %d", slabSize), "cut"}
	if got := takeAll(t, q); !slices.Equal(got, want) {
		t.Errorf("took %v, want %v", got, want)
	}
	if _, err := q.take(nil); err == nil {
		t.Error("the error is gone when asked for again")
	}
	if q.buffered() != 0 {
		t.Errorf("%d bytes buffered in an empty queue", q.buffered())
	}
}

func TestKeepalivesInARowBecomeOne(t *testing.T) {
	// Each slab is given as a word: m a message, k a keepalive, u an urgent one. They get
	// LSNs 1, 2, 3 and so on.
	for _, tt := range []struct {
		name  string
		slabs []string
		want  []string
	}{
		{"in one slab, the last WAL end counts", []string{"kkk"}, []string{"keepalive 0/3"}},
		{"one urgent among them stays urgent", []string{"kuk"}, []string{"urgent 0/3"}},
		{"a message keeps them apart", []string{"ukmkk"}, []string{"urgent 0/2", "message 0/3 1", "keepalive 0/5"}},
		{"over slabs", []string{"mk", "k", "k"}, []string{"message 0/1 1", "keepalive 0/4"}},
		{"over slabs, urgent", []string{"k", "u", "k"}, []string{"urgent 0/3"}},
		{"over slabs, a message keeps them apart", []string{"k", "m", "k", "mk"}, []string{
			"keepalive 0/1", "message 0/2 1", "keepalive 0/3", "message 0/4 1", "keepalive 0/5",
		}},
		{"over slabs, the second with more behind", []string{"mu", "kmk", "k"}, []string{
			"message 0/1 1", "urgent 0/3", "message 0/4 1", "keepalive 0/6",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			q := newQueue(1 << 20)
			lsn := checkpoint.LSN(0)
			for _, word := range tt.slabs {
				s := q.newSlab()
				for _, c := range word {
					if lsn++; c == 'm' {
						s.add(lsn, []byte{'x'})
					} else {
						s.addProgress(lsn, c == 'u')
					}
				}
				mustPush(t, q, s)
			}
			if got := takeAll(t, q); !slices.Equal(got, tt.want) {
				t.Errorf("took %v, want %v", got, tt.want)
			}
			if q.buffered() != 0 {
				t.Errorf("%d bytes buffered in an empty queue", q.buffered())
			}
		})
	}
}

// TestAQuietHourIsNotAPileOfSlabs: an hour of keepalives that nobody takes stays one entry,
// and small transactions take the memory of their bytes, not a slab for each.
func TestAQuietHourIsNotAPileOfSlabs(t *testing.T) {
	q := newQueue(DefaultBuffer)
	for i := range 3600 {
		s := q.newSlab()
		s.addProgress(checkpoint.LSN(i), false)
		mustPush(t, q, s)
	}
	if len(q.slabs) != 1 || q.buffered() != entryHeader {
		t.Errorf("%d slabs, %d bytes for keepalives", len(q.slabs), q.buffered())
	}
	const transactions, size = 2000, 200
	for i := range transactions {
		s := slabOf(q, checkpoint.LSN(i), size)
		s.addProgress(checkpoint.LSN(i), false)
		mustPush(t, q, s)
	}
	if most := transactions*(size+2*entryHeader)/slabSize + 1; len(q.slabs) > most {
		t.Errorf("%d slabs of %d bytes for %d bytes, want at most %d", len(q.slabs), slabSize, q.buffered(), most)
	}
}

func TestAReusedSlabIsNeverTheOneBeingRead(t *testing.T) {
	q := newQueue(1 << 20)
	mustPush(t, q, slabOf(q, 1, 10))
	live, err := q.take(nil)
	if err != nil {
		t.Fatal(err)
	}
	e, _ := live.next()
	var out []*slab
	for range 2 * freeSlabs {
		s := q.newSlab()
		s.add(2, []byte("yyyyyyyyyy"))
		out = append(out, s)
	}
	if slices.Contains(out, live) || string(e.msg) != "xxxxxxxxxx" {
		t.Fatalf("the slab being read was given out again: message %q", e.msg)
	}
	if _, err := q.take(live); err != nil {
		t.Fatal(err)
	}
	if again := q.newSlab(); again != live {
		t.Error("a slab that was given back is not used again")
	} else if len(again.buf) != 0 || again.read != 0 || again.progress != -1 {
		t.Errorf("a slab for reuse holds %d bytes, read %d, progress %d", len(again.buf), again.read, again.progress)
	}
	// One that grew is not kept: it would be large for ever.
	large := slabOf(q, 3, 2*slabSize)
	mustPush(t, q, large)
	if _, err := q.take(nil); err != nil {
		t.Fatal(err)
	}
	if _, err := q.take(large); err != nil {
		t.Fatal(err)
	}
	if q.newSlab() == large {
		t.Error("a slab that grew is kept")
	}
}

// TestTheQueueKeepsOrderAndContent pushes random slabs from one goroutine and takes them
// from another, with every byte checked while it is live.
func TestTheQueueKeepsOrderAndContent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Int64Range(1, 4*slabSize).Draw(t, "limit")
		sizes := rapid.SliceOfN(rapid.SliceOfN(rapid.IntRange(0, 20000), 1, 8), 1, 40).Draw(t, "slabs")
		q := newQueue(limit)
		var wg sync.WaitGroup
		wg.Go(func() {
			lsn := 0
			for _, slab := range sizes {
				s := q.newSlab()
				for _, n := range slab {
					lsn++
					s.add(checkpoint.LSN(lsn), bytes.Repeat([]byte{byte(lsn)}, n))
				}
				if err := q.push(t.Context(), s); err != nil {
					t.Errorf("push: %v", err)
				}
			}
			q.close(errors.New("end"))
		})
		defer wg.Wait()
		want := slices.Concat(sizes...)
		seen := 0
		var current *slab
		for {
			next, err := q.take(current)
			if current = next; next == nil {
				if err != nil {
					break
				}
				select {
				case <-q.ready:
				case <-time.After(10 * time.Second):
					t.Fatal("no signal although more is to come")
				}
				continue
			}
			for e, ok := next.next(); ok; e, ok = next.next() {
				seen++
				if seen > len(want) || e.lsn != checkpoint.LSN(seen) || !bytes.Equal(e.msg, bytes.Repeat([]byte{byte(seen)}, want[seen-1])) {
					t.Fatalf("entry %d has LSN %s and %d bytes", seen, e.lsn, len(e.msg))
				}
			}
		}
		if seen != len(want) || q.buffered() != 0 {
			t.Fatalf("%d of %d entries, %d bytes left", seen, len(want), q.buffered())
		}
	})
}

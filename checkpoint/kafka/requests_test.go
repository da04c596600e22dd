package kafka

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/walrelay/walrelay/checkpoint"
)

func request(id string) checkpoint.Request {
	return checkpoint.Request{ID: id, Tables: []string{"public." + id}, Where: "x > 'é\xff'", Replace: true, At: time.UnixMicro(1764550000119001).UTC()}
}

func (s *Store) mustRequest(t *testing.T, id string) (offset int64) {
	t.Helper()
	offset, err := s.Request(t.Context(), request(id))
	if err != nil {
		t.Fatal(err)
	}
	return offset
}

// wantRequests reads from an offset on, and gives where to go on.
func (s *Store) wantRequests(t *testing.T, from int64, ids ...string) (next int64) {
	t.Helper()
	var want []checkpoint.Request
	for _, id := range ids {
		want = append(want, request(id))
	}
	got, next, err := s.Requests(t.Context(), from)
	if d := cmp.Diff(want, got); err != nil || d != "" || next < from {
		t.Fatalf("from %d to %d, %v: %s", from, next, err, d)
	}
	return next
}

// Each request is read once, whatever lies around it, and is gone when it was taken
// over.
func TestRequestsAreReadOnce(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		s := c.store(t)
		next := s.wantRequests(t, 0)
		if next != 0 {
			t.Error("an empty log goes on at 0, not", next)
		}
		if at := s.mustRequest(t, "a"); at != 0 {
			t.Error("written at", at)
		}
		w := c.writer(t, s, checkpoint.Checkpoint{})
		w.deliver(t, kgo.TryCommit)
		s.mustRequest(t, "b")
		s.mustRequest(t, "c")
		w.deliver(t, kgo.TryAbort)
		waitFor(t, "three requests", func() bool { // Kafka writes markers a moment after it answers
			list, _, err := s.Requests(t.Context(), 0)
			return err == nil && len(list) == 3
		})
		next = s.wantRequests(t, 0, "a", "b", "c")
		s.wantRequests(t, 1, "b", "c")
		next = s.wantRequests(t, next)

		at := s.mustRequest(t, "d")
		next = s.wantRequests(t, next, "d")
		if next <= at || s.wantRequests(t, next) != next {
			t.Error("nothing new, and yet another offset")
		}
		if got := s.wantRequests(t, 1<<40); got != 1<<40 {
			t.Error("behind the end the offset stays, not", got)
		}

		cp := w.next()
		cp.TakenOver = []string{"b", "d"}
		w.write(t, &cp, kgo.TryAbort)
		s.wantRequests(t, 0, "a", "b", "c", "d")
		w.write(t, &cp, kgo.TryCommit)
		waitFor(t, "the commit", func() bool {
			list, _, err := s.Requests(t.Context(), 0)
			return err == nil && len(list) == 2
		})
		s.wantRequests(t, 0, "a", "c")
		s.wantRequests(t, next)
		wantLoad(t, s, cp, nil)
	})
}

// What lies behind the begin of an open transaction is read when that has ended, and
// not passed over.
func TestRequestsWaitForOpenTransactions(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		s := c.store(t)
		w := c.writer(t, s, checkpoint.Checkpoint{})
		s.mustRequest(t, "a")
		w.begin(t)
		w.produce(t, checkpoint.Record{Key: []byte("x"), Value: []byte("x")})
		s.mustRequest(t, "b")
		next := s.wantRequests(t, 0, "a")
		next = s.wantRequests(t, next)
		w.end(t, kgo.TryCommit)
		waitFor(t, "the request", func() bool {
			list, _, err := s.Requests(t.Context(), next)
			return err == nil && len(list) == 1
		})
		s.wantRequests(t, next, "b")
	})
}

// A request may be there before the first run, which then still adopts its slot.
func TestVirginWithRequests(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		s := c.store(t)
		s.mustRequest(t, "a")
		wantVirgin(t, s, true, "")
		w := c.writer(t, s, checkpoint.Checkpoint{})
		w.deliver(t, kgo.TryAbort)
		s.mustRequest(t, "b")
		wantVirgin(t, s, true, "")
		if _, found, err := s.Load(t.Context()); found || err != nil {
			t.Fatal("a request is no checkpoint:", found, err)
		}

		// What a connector wrote is another matter.
		w.begin(t)
		w.produce(t, checkpoint.Record{Key: []byte(checkpoint.RequestKey("a"))})
		w.end(t, kgo.TryCommit)
		wantVirgin(t, s, false, "committed record")
	})
}

// A request that this release cannot read stops the connector and says how to go on.
func TestRequestsThatCannotBeRead(t *testing.T) {
	c := fake(t)
	s := c.store(t)
	for _, value := range []string{`{"version":"2.0"}`, `{}`, ""} {
		key := []byte(checkpoint.RequestKey("x"))
		if err := s.cl.ProduceSync(t.Context(), &kgo.Record{Topic: s.o.Topic, Key: key, Value: []byte(value)}).FirstErr(); err != nil {
			t.Fatal(err)
		}
		if _, next, err := s.Requests(t.Context(), 0); !checkpoint.IsRefusal(err) || next != 0 || !strings.Contains(err.Error(), "request/x") {
			t.Errorf("%s: %d, %v", value, next, err)
		}
		if err := s.cl.ProduceSync(t.Context(), &kgo.Record{Topic: s.o.Topic, Key: key}).FirstErr(); err != nil {
			t.Fatal(err)
		}
		s.wantRequests(t, 0)
	}
	if _, err := s.Request(t.Context(), checkpoint.Request{ID: "x"}); err == nil {
		t.Error("a request for no table is written")
	}
}

// Once a second costs what was written in that second; and the first time, on a log
// that is long already, not more than the last records.
func TestRequestsReadLittleOfALongLog(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		s := c.store(t)
		s.mustRequest(t, "long-ago")
		w := c.writer(t, s, checkpoint.Checkpoint{}, kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.MaxBufferedRecords(1<<19))
		positions := func(n int) {
			w.begin(t)
			for range n {
				p := w.next()
				w.Produce(t.Context(), &kgo.Record{Topic: w.topic, Key: []byte("position"), Value: checkpoint.EncodePosition(nil, &p, 0, nil)}, nil)
			}
			if err := w.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.end(t, kgo.TryCommit)
		}
		positions(2 * lookBack)
		s.mustRequest(t, "late")
		positions(lookBackStep + 1)
		waitFor(t, "the commit", func() bool {
			end, err := s.offset(t.Context(), latest, readUncommitted)
			stable, serr := s.offset(t.Context(), latest, readCommitted)
			return err == nil && serr == nil && end == stable
		})
		s.stats = stats{}
		began := time.Now()
		next := s.wantRequests(t, 0, "late")
		t.Logf("%d fetches, %d bytes, %s the first time", s.stats.fetches, s.stats.bytes, time.Since(began))
		if s.stats.bytes > 4<<20 {
			t.Errorf("%d bytes the first time", s.stats.bytes)
		}
		s.stats = stats{}
		s.wantRequests(t, next)
		if s.stats.fetches > 0 {
			t.Error("nothing new, and yet fetched")
		}
		positions(200)
		s.mustRequest(t, "now")
		waitFor(t, "the request", func() bool {
			list, _, err := s.Requests(t.Context(), next)
			return err == nil && len(list) == 1
		})
		s.stats = stats{}
		s.wantRequests(t, next, "now")
		if s.stats.fetches > 2 || s.stats.bytes > 256<<10 {
			t.Errorf("%d fetches and %d bytes for a second's records", s.stats.fetches, s.stats.bytes)
		}
	})
}

// Compaction keeps a request until it is taken over.
func TestRequestsSurviveCompaction(t *testing.T) {
	c := fake(t)
	s := NewStore(c.client(t), Options{Topic: c.topic(t, map[string]string{"cleanup.policy": "compact", "segment.ms": "200", "min.cleanable.dirty.ratio": "0.01"})})
	s.mustRequest(t, "a")
	w := c.writer(t, s, checkpoint.Checkpoint{})
	for i := range 50 {
		w.deliver(t, kgo.TryCommit)
		if i == 20 {
			s.mustRequest(t, "b")
		}
	}
	c.compact()
	s.wantRequests(t, 0, "a", "b")
	s.wantRequests(t, 1, "b")
}

// A hosted cluster may not take max.message.bytes of 16 MiB.
func TestEnsureTopicWhereMaxMessageBytesIsBounded(t *testing.T) {
	fc, err := kfake.NewCluster(kfake.NumBrokers(1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fc.Close)
	refused := 0
	fc.ControlKey(int16(kmsg.CreateTopics), func(kreq kmsg.Request) (kmsg.Response, error, bool) {
		fc.KeepControl()
		req := kreq.(*kmsg.CreateTopicsRequest)
		for _, cfg := range req.Topics[0].Configs {
			if cfg.Name == "max.message.bytes" {
				refused++
				resp := req.ResponseKind().(*kmsg.CreateTopicsResponse)
				rt := kmsg.NewCreateTopicsResponseTopic()
				rt.Topic, rt.ErrorCode = req.Topics[0].Topic, 44 // POLICY_VIOLATION
				resp.Topics = append(resp.Topics, rt)
				return resp, nil, true
			}
		}
		return nil, nil, false
	})
	s := cluster{brokers: fc.ListenAddrs()}.store(t)
	if refused != 1 {
		t.Errorf("refused %d times", refused)
	}
	s.mustRequest(t, "a")
}

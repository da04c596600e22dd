package kafka

import (
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
)

// What a start loads of the tables is what was committed, however often it changed.
func TestLoadGivesTheTables(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		s := c.store(t)
		want := map[uint32]checkpoint.TableProgress{}
		cp := checkpoint.Checkpoint{}
		w := c.writer(t, s, cp)
		load := func(slot string, requests int64) checkpoint.Checkpoint {
			t.Helper()
			got, found, err := s.Load(t.Context())
			if d := cmp.Diff(want, got.Tables); err != nil || !found || d != "" || got.SlotSnapshot != slot || got.Requests != requests {
				t.Fatalf("found %v, %v, slot snapshot %q, requests %d: %s", found, err, got.SlotSnapshot, got.Requests, d)
			}
			return got
		}
		change := func(commit kgo.TransactionEndTry, oids ...uint32) {
			t.Helper()
			cp := w.next()
			cp.SlotSnapshot, cp.Requests = "5:5:", int64(w.lsn)
			cp.Tables = map[uint32]checkpoint.TableProgress{}
			after := maps.Clone(want)
			for _, oid := range oids {
				p := checkpoint.TableProgress{
					Table: fmt.Sprint("t", oid), State: checkpoint.TableReading, Key: []string{"id"},
					Ranges: []checkpoint.Range{{After: []string{"\xff", fmt.Sprint(w.lsn)}}, {To: []string{""}}},
					Again:  append(want[oid].Again, []string{fmt.Sprint(w.lsn)}),
				}
				if len(p.Again) > 2 {
					p.Again = p.Again[1:]
				}
				if len(oids) == 1 && want[oid].State != "" {
					p = checkpoint.TableProgress{}
				}
				cp.Tables[oid], after[oid] = p, p
				if p.State == "" {
					delete(after, oid)
				}
			}
			w.write(t, &cp, commit)
			if commit {
				want = after
			}
		}
		for range 2 {
			change(kgo.TryCommit, 1, 2, 4294967295)
			change(kgo.TryCommit, 1, 3)
			change(kgo.TryCommit, 2) // taken out
			change(kgo.TryCommit)
			w = c.writer(t, s, load("5:5:", int64(w.lsn)))
		}
		// What is aborted is gone, also for the log that goes on.
		last := int64(w.lsn)
		change(kgo.TryAbort, 7, 8)
		load("5:5:", last)
		change(kgo.TryCommit, 1, 9)
		load("5:5:", int64(w.lsn))
	})
}

// The state record of 20,000 tables is larger than one fetch, and than what a topic
// takes by default.
func TestLoadOfALargeStateRecord(t *testing.T) {
	eachCluster(t, func(t *testing.T, c cluster) {
		s := c.store(t)
		w := c.writer(t, s, checkpoint.Checkpoint{}, kgo.ProducerBatchMaxBytes(maxMessageBytes))
		cp := w.next()
		cp.Tables = map[uint32]checkpoint.TableProgress{}
		for oid := range uint32(20000) {
			cp.Tables[oid+16384] = checkpoint.TableProgress{
				Table: fmt.Sprintf("public.table_%d", oid), State: checkpoint.TableReading, Key: []string{"id"}, Rows: int64(oid),
				Ranges: []checkpoint.Range{{After: []string{fmt.Sprint(oid)}}}, Began: time.UnixMicro(1764550000119001).UTC(),
			}
		}
		w.write(t, &cp, kgo.TryCommit)
		last := w.deliver(t, kgo.TryCommit)
		began := time.Now()
		got := wantLoad(t, s, last, nil)
		t.Logf("%s to load", time.Since(began))
		if d := cmp.Diff(cp.Tables, got.Tables); d != "" {
			t.Error(d)
		}
	})
}

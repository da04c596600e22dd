package cdctest

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func mustViolate(t *testing.T, what string, vs []Violation) {
	t.Helper()
	if len(vs) == 0 {
		t.Errorf("%s: nothing found", what)
	}
}

// split gives the index of a record behind the first of its source transaction.
func split(t *testing.T, log *Log) int {
	t.Helper()
	seen := map[string]bool{}
	for i, r := range log.Records {
		commit := r.Headers["position"][:16]
		if seen[commit] {
			return i
		}
		seen[commit] = true
	}
	t.Fatal("no transaction with two records")
	return 0
}

func TestAtomicFindsASourceTransactionInTwoKafkaTransactions(t *testing.T) {
	_, log := simulate(3, 50)
	if vs := Atomic(log, 1000); len(vs) > 0 {
		t.Fatalf("a right log:\n%s", Report(vs, 5))
	}
	i := split(t, log)
	log.Records[i].ProducerEpoch++
	mustViolate(t, "another epoch", Atomic(log, 1000))
	if vs := Atomic(log, 1); len(vs) > 0 {
		t.Errorf("a large transaction may be cut:\n%s", Report(vs, 5))
	}

	_, log = simulate(3, 50)
	i = choose(rand.New(rand.NewPCG(1, 1)), log, kinds("x")) // its delete is in its partition
	for j := range log.Records {
		if r := &log.Records[j]; r.Topic == log.Records[i].Topic && r.Partition == log.Records[i].Partition && r.Offset >= log.Records[i].Offset {
			r.Segment++
		}
	}
	mustViolate(t, "a transaction's end in the middle", Atomic(log, 1000))
}

func TestVisibleFindsAHalfThatStays(t *testing.T) {
	_, whole := simulate(4, 60)
	upTo := func(n int) *Log {
		return &Log{Records: whole.Records[:n], Partitions: whole.Partitions}
	}
	i := split(t, whole)
	if vs := Visible([]*Log{upTo(0), upTo(i), whole}, 1000); len(vs) > 0 {
		t.Errorf("a half that is gone in the next snapshot is a commit under way:\n%s", Report(vs, 5))
	}
	mustViolate(t, "a half in two snapshots", Visible([]*Log{upTo(i), upTo(i), whole}, 1000))
	mustViolate(t, "records that disappear", Visible([]*Log{upTo(i + 1), upTo(i - 1), whole}, 1000))
	if vs := Visible([]*Log{upTo(i), upTo(i), whole}, 1); len(vs) > 0 {
		t.Errorf("a large transaction may be seen in part:\n%s", Report(vs, 5))
	}
}

func TestSumFindsMoneyThatLeaks(t *testing.T) {
	truth, log := simulate(5, 200)
	accounts := truth.table("public.accounts")
	if vs := Sum(log, testLayout(), "balance", accounts); len(vs) > 0 {
		t.Fatalf("a right log:\n%s", Report(vs, 5))
	}
	i := choose(rand.New(rand.NewPCG(1, 1)), log, func(it item) bool { return it.kind == KindUpdate && it.env.Source.Table == "accounts" })
	without := &Log{Records: slices.Delete(slices.Clone(log.Records), i, i+1), Partitions: log.Partitions}
	mustViolate(t, "half of a money move", Sum(without, testLayout(), "balance", accounts))
}

// TestOutboxOrderFindsAStaleEvent puts event n behind event n+1 with a position and
// an id of its own, as a relay does that publishes again: only aggregate_seq tells.
func TestOutboxOrderFindsAStaleEvent(t *testing.T) {
	truth, log := simulate(6, 200)
	i := choose(rand.New(rand.NewPCG(1, 1)), log, kinds("e"))
	stale := log.Records[i]
	stale.Headers = map[string]string{}
	for k, v := range log.Records[i].Headers {
		stale.Headers[k] = v
	}
	stale.Headers["id"] = "00000000-0000-4000-8000-ffffffffffff"
	stale.Headers["position"] = "0000007000000000-0000000000"
	atEnd(log, stale, stale.Partition)
	vs := OutboxOrder(log, truth, testLayout())
	if !slices.ContainsFunc(vs, func(v Violation) bool { return strings.Contains(v.Detail, "a stale event behind a newer one") }) {
		t.Errorf("no word of a stale event:\n%s", Report(vs, 5))
	}
}

// TestOutboxOrderFindsAGapThatEveryoneForgot drops an event from log and truth: the
// numbers alone show it.
func TestOutboxOrderFindsAGapThatEveryoneForgot(t *testing.T) {
	truth, log := simulate(6, 200)
	i := choose(rand.New(rand.NewPCG(1, 1)), log, func(it item) bool { return it.kind == KindEvent && it.Headers["aggregate_seq"] == "1" })
	id := log.Records[i].Headers["id"]
	log.Records = slices.Delete(log.Records, i, i+1)
	for _, tx := range truth.Committed {
		tx.Changes = slices.DeleteFunc(tx.Changes, func(c Change) bool { return c.Table != nil && c.text(c.New, "event_id") == id })
	}
	mustViolate(t, "event 1 missing", OutboxOrder(log, truth, testLayout()))
}

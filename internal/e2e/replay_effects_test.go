package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/replay"
)

// kafkaState is what a dry run must not change: topics with their ends, transactional ids,
// and the checkpoint topic's end among the former.
func (c *caseRun) kafkaState() map[string]string {
	c.t.Helper()
	adm := kadm.NewClient(c.kafka.Client(c.t))
	state := map[string]string{}
	ends, err := adm.ListEndOffsets(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	ends.Each(func(o kadm.ListedOffset) {
		// On a shared Kafka other tests are at work, and this connector's checkpoint goes on by itself.
		if strings.Contains(o.Topic, c.name) && !strings.HasPrefix(o.Topic, "_walrelay."+c.name) || strings.HasPrefix(o.Topic, "_walrelay."+c.name+".replay") {
			state[fmt.Sprintf("%s[%d]", o.Topic, o.Partition)] = fmt.Sprint(o.Offset)
		}
	})
	ids, err := adm.ListTransactions(c.t.Context(), nil, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, id := range ids.Sorted() {
		if strings.Contains(id.TxnID, c.name) {
			state[id.TxnID] = "transactional id"
		}
	}
	return state
}

// The dry run counts records and not changes, names tombstones and dead letters, and leaves
// no trace anywhere; the run does as it said.
func TestADryRunTellsWhatTheRunDoesAndChangesNothing(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{
		"outbox":      []caseMap{{"table": "public.outbox", "topic": c.name + ".ev.{event_type}"}},
		"topics":      caseMap{"config": caseMap{"max.message.bytes": "20000"}},
		"kafka":       caseMap{"compression": "none"},
		"dead-letter": caseMap{"topic": "{prefix}.dead-letter"},
	})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.pg.Exec("CREATE TABLE outbox (event_id bigint PRIMARY KEY, event_type text, aggregate_id text, payload jsonb)")
	c.start()
	c.anchored()
	begin := c.walEnd().String()
	c.pg.Exec("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 10) g")
	c.pg.Exec("DELETE FROM t WHERE id = 10")                    // two records
	c.pg.Exec("UPDATE t SET id = 100 WHERE id = 1")             // three
	c.pg.Exec("INSERT INTO t VALUES (50, repeat('x', 100000))") // a dead letter
	c.pg.Exec("TRUNCATE t")                                     // one in each of six partitions
	c.pg.Exec("INSERT INTO outbox VALUES (1, 'made', '7', '{}'), (2, 'sent', '7', NULL), (3, 'sent', '7', '{}')")
	c.fence()

	before := c.kafkaState()
	prefix := c.name + "again"
	args := []string{"--from-lsn", begin, "--topic-prefix", prefix}
	dry := c.mustReplay(append(args, "--dry-run")...)
	if after := c.kafkaState(); !maps.Equal(before, after) {
		t.Errorf("the dry run changed Kafka from %v to %v", before, after)
	}
	// The connector's and its anchor; the server may take a moment to notice that the others' sessions are gone.
	c.pg.WaitValue("2", "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()")
	done := c.mustReplay(args...)
	if !slices.EqualFunc(dry.Topics, done.Topics, func(a, b replay.TopicCount) bool {
		return a.Topic == b.Topic && a.Records == b.Records && a.Tombstones == b.Tombstones && a.DeadLetters == b.DeadLetters &&
			a.FirstLSN == b.FirstLSN && a.LastLSN == b.LastLSN && a.FirstTime.Equal(*b.FirstTime) && a.LastTime.Equal(*b.LastTime)
	}) || dry.Records != done.Records || dry.Transactions != done.Transactions {
		t.Errorf("the dry run told\n%+v\nthe run did\n%+v", dry, done)
	}
	got := map[string][3]int64{}
	for _, topic := range dry.Topics {
		got[strings.TrimPrefix(topic.Topic, prefix)] = [3]int64{topic.Records, topic.Tombstones, topic.DeadLetters}
		records := c.kafka.WaitCommitted(t, topic.Topic, int(topic.Records))
		if len(records) != int(topic.Records) {
			t.Errorf("topic %s has %d records, want %d", topic.Topic, len(records), topic.Records)
		}
		replayKeys(records)
		for i, want := range map[int]string{0: topic.FirstLSN, len(records) - 1: topic.LastLSN} {
			if at := positionHeader(t, replayHeader(records[i], "position")).String(); at != want {
				t.Errorf("record %d of %s is of commit %s, want %s", i, topic.Topic, at, want)
			}
		}
	}
	want := map[string][3]int64{
		".public.t": {10 + 2 + 3 + 6, 2, 0}, ".dead-letter": {1, 0, 1}, ".message": {1, 0, 0},
		"." + c.name + ".ev.made": {1, 0, 0}, "." + c.name + ".ev.sent": {2, 1, 0},
	}
	if !maps.Equal(got, want) {
		t.Errorf("records, tombstones and dead letters are %v, want %v", got, want)
	}

	// One that ends in the middle can go on; a dry run has nothing to go on with.
	c.set(caseMap{"dead-letter": caseMap{"on-error": "stop"}})
	for _, tt := range []struct {
		args []string
		says bool
	}{{nil, true}, {[]string{"--dry-run"}, false}} {
		code, _, stderr := c.command(append([]string{"replay", "--from-lsn", begin}, tt.args...)...)
		if code != 1 || strings.Contains(stderr, "what is delivered stays: the same command with --resume") != tt.says {
			t.Errorf("ended by a dead letter, %v: exit code %d, want 1 and --resume said: %t: %s", tt.args, code, tt.says, stderr)
		}
	}
	c.stop()
}

// Compaction keeps the record that was written last, and goes by no position.
func TestReplayInPlaceSparesCompactedTopics(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"topics": caseMap{"config": caseMap{"cleanup.policy": "compact,delete"}}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.start()
	c.anchored()
	begin := c.walEnd().String()
	c.pg.Exec("INSERT INTO t VALUES (1, 'old')")
	c.pg.Exec("UPDATE t SET v = 'new' WHERE id = 1")
	c.fence()
	topic := c.name + ".public.t"
	c.kafka.WaitCommitted(t, topic, 2)
	for _, args := range [][]string{{"--in-place", "--yes"}, {"--in-place", "--dry-run"}, {"--in-place", "--yes", "--table", "public.t"}} {
		code, _, stderr := c.command(append([]string{"replay", "--from-lsn", begin}, args...)...)
		if code != 4 || !strings.Contains(stderr, "topic "+topic+" is compacted") || !strings.Contains(stderr, "choose another --topic-prefix") {
			t.Errorf("%v: exit code %d, want 4: %s", args, code, stderr)
		}
	}
	r := c.mustReplay("--from-lsn", begin, "--table", "public.t")
	sameButReplay(t, c.kafka.Committed(t, topic), c.kafka.WaitCommitted(t, r.Prefix+".public.t", 2), r.ID)
	c.quiet()
}

// Messages have their prefix as the key, so that the last one of each would be an old one.
func TestReplayInPlaceSparesACompactedMessageTopic(t *testing.T) {
	c := caseNew(t)
	c.kafka.CreateTopic(t, c.name+".message", 1, "cleanup.policy", "compact")
	c.start()
	c.anchored()
	begin := c.walEnd().String()
	c.fence()
	if code, _, stderr := c.command("replay", "--from-lsn", begin, "--in-place", "--yes"); code != 4 || !strings.Contains(stderr, "topic "+c.name+".message is compacted") {
		t.Errorf("exit code %d, want 4: %s", code, stderr)
	}
	c.stop()
}

// Filtering comes behind counting: seq is the live one.
func TestReplayOfOneTableKeepsItsPositions(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.pg.Exec("CREATE TABLE u (id int PRIMARY KEY, v text)")
	c.start()
	c.anchored()
	begin := c.walEnd().String()
	c.exec(c.session(), "BEGIN; INSERT INTO u VALUES (1, 'a'); SELECT pg_logical_emit_message(true, 'x', 'y'); INSERT INTO t VALUES (6, 'b'); COMMIT")
	c.fence()
	r := c.mustReplay("--from-lsn", begin, "--table", "public.t", "--table", "public.nowhere")
	again := c.kafka.WaitCommitted(t, r.Prefix+".public.t", 1)
	sameButReplay(t, c.kafka.WaitCommitted(t, c.name+".public.t", 1), again, r.ID)
	if r.Records != 1 || !strings.HasSuffix(replayHeader(again[0], "position"), "-0000000002") {
		t.Errorf("%d records, the position is %s; want seq 2", r.Records, replayHeader(again[0], "position"))
	}
	if code, _, stderr := c.command("replay", "--from-lsn", begin, "--table", "public.nowhere", "--dry-run"); code != 0 || !strings.Contains(stderr, "the range has no change of this table") {
		t.Errorf("a table that is not there: exit code %d, %s", code, stderr)
	}
	if code, _, stderr := c.command("replay", "--from-lsn", begin, "--table", "t"); code != 2 || !strings.Contains(stderr, "schema.table") {
		t.Errorf("a table without its schema: exit code %d, %s; want 2", code, stderr)
	}
	c.quiet()
}

// Old states behind newer ones: whoever goes by position is not disturbed, verify neither.
func TestReplayInPlaceDoesNotDisturbWhoGoesByPosition(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY, v text)")
	c.set(caseMap{"source": caseMap{"messages": []string{}}})
	c.start()
	c.anchored()
	begin := c.walEnd().String()
	c.pg.Exec("INSERT INTO t VALUES (1, 'old'), (2, 'gone')")
	end := c.walEnd().String()
	c.pg.Exec("UPDATE t SET v = 'new' WHERE id = 1")
	c.pg.Exec("DELETE FROM t WHERE id = 2")
	topic := c.name + ".public.t"
	c.kafka.WaitCommitted(t, topic, 5)
	r := c.mustReplay("--from-lsn", begin, "--to-lsn", end, "--in-place", "--yes")
	if r.Records != 2 || r.Topics[0].Topic != topic {
		t.Errorf("%+v; want two records in %s", r, topic)
	}
	last := c.marked(topic, r.ID, 2)
	if !strings.Contains(string(last[0].Value), `"old"`) && !strings.Contains(string(last[1].Value), `"old"`) {
		t.Errorf("the old state is not there again: %s, %s", last[0].Value, last[1].Value)
	}
	if code, out, stderr := c.command("verify"); code != 0 {
		t.Errorf("verify: exit code %d, %s%s", code, out, stderr)
	}
	c.quiet()
}

// A killed replay leaves whole Kafka transactions and nothing that holds the connector; the
// same command again is another replay.
func TestAKilledReplayHoldsNobody(t *testing.T) {
	c := caseNew(t)
	c.set(caseMap{"batch": caseMap{"max-records": 50}})
	c.pg.Exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.start()
	c.anchored()
	args := []string{"--from-lsn", c.walEnd().String(), "--table", "public.t"}
	c.pg.Exec("INSERT INTO t SELECT generate_series(1, 500)")
	c.fence()
	c.stop()
	before := c.checkpoint()
	id := c.killedReplay(3, args...)
	c.pg.WaitValue("0", "SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()")
	if n := len(c.kafka.Committed(t, "replay."+id+".public.t")); n != 100 {
		t.Errorf("%d records of the killed replay can be seen, want the 100 of two transactions", n)
	}
	if after := c.checkpoint(); after.Position != before.Position {
		t.Errorf("the live checkpoint went from %v to %v", before.Position, after.Position)
	}
	// The replay's transaction is open still.
	c.start()
	c.pg.Exec("INSERT INTO t VALUES (1000)")
	c.fence()
	again := c.mustReplay(append(args, "--to-lsn", before.Position.LSN.String())...)
	if again.ID == id || again.Records != 500 {
		t.Errorf("the same command again: replay %s after %s, %d records; want another and 500", again.ID, id, again.Records)
	}
	c.mustReplay(append(args, "--resume", id)...)
	keys := map[string]int{}
	for _, r := range c.kafka.WaitCommitted(t, "replay."+id+".public.t", 500) {
		keys[string(r.Key)]++
	}
	if len(keys) != 500 || slices.Max(slices.Collect(maps.Values(keys))) != 1 {
		t.Errorf("%d keys in the resumed replay, want each of 500 once", len(keys))
	}
	harness.WaitFor(t, "the temporary slots to go", harness.DefaultTimeout, func() (bool, error) {
		return c.pg.Value("SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()") == "0", nil
	})
	c.quiet()
}

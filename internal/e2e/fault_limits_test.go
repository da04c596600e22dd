package e2e

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

const faultOversize = `BEGIN; INSERT INTO t VALUES (1,'a'); INSERT INTO t VALUES (2, (SELECT string_agg(md5(g::text),'') FROM generate_series(1,65536) g)); INSERT INTO t VALUES (3,'c'); COMMIT`

func TestAnOversizeRowGoesToTheDeadLetters(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE t (id int PRIMARY KEY, v text)`)
	b.set("kafka.compression", "none")
	b.set("topics.config", map[string]string{"max.message.bytes": "1048588"})
	p := b.stream()
	b.pg.Exec(faultOversize)
	for _, r := range b.wantIDs("t", []int{1, 3}) {
		v := faultDecode(t, r)
		if seq := int(v.After["id"].(float64)) - 1; v.Source.Seq != seq {
			t.Errorf("id %v has seq %d", v.After["id"], v.Source.Seq)
		}
	}
	letters := b.kafka.WaitCommitted(t, b.name+".dead-letter", 1)
	if len(letters) != 1 || string(letters[0].Key) != `{"id":2}` {
		t.Fatalf("%d dead letters, key %s", len(letters), letters[0].Key)
	}
	headers := map[string]string{}
	for _, h := range letters[0].Headers {
		headers[h.Key] = string(h.Value)
	}
	if headers["reason"] != "oversize" || headers["source-topic"] != b.topic("t") {
		t.Errorf("headers %v", headers)
	}
	for _, text := range []string{`"reason":"oversize"`, `"error":"`, `"table":"public.t"`, `"position":"`, `"truncated":true`, `"size":2097152`, `"sha256":"`} {
		if !bytes.Contains(letters[0].Value, []byte(text)) {
			t.Errorf("the dead letter lacks %s: %.300s", text, letters[0].Value)
		}
	}
	harness.WaitFor(t, "the count of dead letters", faultLong, func() (bool, error) {
		return faultSum(b.metrics(p), "walrelay_records_total", `outcome="dead_lettered"`) == 1, nil
	})
	b.stop(p)
}

func TestAnOversizeRowStopsWhereThatIsAsked(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE t (id int PRIMARY KEY, v text)`)
	b.set("kafka.compression", "none")
	b.set("topics.config", map[string]string{"max.message.bytes": "1048588"})
	b.set("dead-letter.on-error", "stop")
	p := b.stream()
	b.pg.Exec(faultOversize)
	says := []string{"public.t", `{"id":2}`, "1048588", "209", "-0000000001"}
	b.ends(p, 1, says...)
	if n := len(b.kafka.Committed(t, b.topic("t"))); n != 0 {
		t.Errorf("%d records of the transaction are visible", n)
	}
	// Neither checkpoint nor slot is past it: the next start meets it again.
	b.ends(b.start(), 1, says...)
	if n := len(b.kafka.Committed(t, b.topic("t"))); n != 0 {
		t.Errorf("%d records of the transaction are visible after another start", n)
	}
}

// faultMemory is the most memory that a process has had resident, in bytes.
func faultMemory(t *testing.T, p *harness.Proc) int64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(text)
	if found == nil {
		t.Fatalf("no VmHWM: %s", text)
	}
	n, err := strconv.ParseInt(string(found[1]), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n << 10
}

func TestAKafkaThatStandsStillIsWaitedOutInBoundedMemory(t *testing.T) {
	t.Parallel()
	k := harness.Kafka(t, harness.OwnKafka())
	b := newFaultBed(t, harness.Postgres(t, harness.Setting("wal_sender_timeout", "4s")), k)
	b.pg.Exec(`CREATE TABLE t (id int PRIMARY KEY, v text)`)
	p := b.stream()
	b.pg.Exec(`INSERT INTO t VALUES (1, '')`)
	b.wantIDs("t", []int{1})
	sender := b.walsender()
	k.Pause(0)
	paused := time.Now()
	const rows = 40000
	b.pg.Exec(fmt.Sprintf(`DO $$ BEGIN FOR i IN 1..%d LOOP INSERT INTO t SELECT g, repeat(md5(g::text), 32) FROM generate_series(2 + (i-1)*100, 1 + i*100) g; COMMIT; END LOOP; END $$`, rows/100))
	still := b.confirmed()
	notReady, most := false, 0.0
	for time.Since(paused) < 20*time.Second {
		m := b.metrics(p)
		most = max(most, m["walrelay_buffer_bytes"])
		if code, _ := b.get(p, "/readyz"); code == 503 {
			notReady = true
		}
		if at := b.confirmed(); at != still {
			t.Fatalf("confirmed went from %s to %s while Kafka stands still", still, at)
		}
	}
	lag := b.metrics(p)["walrelay_lag_seconds"]
	if now := b.walsender(); now != sender {
		t.Errorf("walsender %s, it was %s", now, sender)
	}
	if most > 2*8<<20 || most < 1<<20 {
		t.Errorf("walrelay_buffer_bytes reached %.0f, want some and at most %d", most, 2*8<<20)
	}
	if !notReady {
		t.Error("/readyz was ready all the time")
	}
	if lag < 12 || lag > 40 {
		t.Errorf("walrelay_lag_seconds is %.1f after 20 s", lag)
	}
	k.Resume(0)
	b.wantIDs("t", faultRange(1, rows+1))
	if m := faultMemory(t, p); m > 256<<20 {
		t.Errorf("%d MiB of memory", m>>20)
	}
	b.stop(p)
}

func TestAStartReadsOnlyTheEndOfALongCheckpointTopic(t *testing.T) {
	t.Parallel()
	k := harness.Kafka(t, harness.WithProxy())
	b := newFaultBed(t, harness.Postgres(t), k)
	b.pg.Exec(faultTable)
	p := b.stream()
	b.pg.Exec(`INSERT INTO t VALUES (1)`)
	b.wantIDs("t", []int{1})
	b.stop(p)
	var position, state []byte
	for _, r := range k.Committed(t, b.checkpointTopic()) {
		switch string(r.Key) {
		case checkpoint.KeyPosition:
			position = r.Value
		case checkpoint.KeyState:
			state = r.Value
		}
	}
	newest, _, _, err := checkpoint.DecodePosition(position)
	if err != nil || state == nil {
		t.Fatal(err, state)
	}
	newest.Requests = 199_000 // as a connector that runs keeps it
	beside := checkpoint.EncodePosition(nil, &newest, checkpoint.StateBeside, nil)
	wrong := newest
	wrong.Position.LSN += 1 << 30
	aborted := checkpoint.EncodePosition(nil, &wrong, checkpoint.StateBeside, nil)
	writer := k.Client(t, kgo.TransactionalID("walrelay-"+b.name), kgo.DefaultProduceTopic(b.checkpointTopic()), kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.ProducerBatchMaxBytes(64<<10), kgo.MaxBufferedRecords(50000))
	write := func(end kgo.TransactionEndTry, n int, value []byte) {
		t.Helper()
		if err := writer.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		for range n {
			writer.Produce(t.Context(), &kgo.Record{Key: []byte(checkpoint.KeyState), Value: state}, nil)
			writer.Produce(t.Context(), &kgo.Record{Key: []byte(checkpoint.KeyPosition), Value: value}, nil)
		}
		if err := writer.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := writer.EndTransaction(t.Context(), end); err != nil {
			t.Fatal(err)
		}
	}
	const records, size = 200000, 20000
	for range records / size {
		write(kgo.TryCommit, size/2, beside)
	}
	write(kgo.TryAbort, 100, aborted)
	writer.Close()
	before := k.Proxies[0].Bytes(harness.ToClient)
	began := time.Now()
	p = b.stream()
	took := time.Since(began)
	read := k.Proxies[0].Bytes(harness.ToClient) - before
	t.Logf("streaming after %s, %d bytes read of some %d", took, read, records/2*(len(beside)+len(state)))
	if read > 2<<20 { // some fetches of the end
		t.Errorf("the start has read %d bytes", read)
	}
	if at := p.WaitLog(faultLong, faultMessage("streaming")).Field("lsn"); at != newest.Position.LSN.String() {
		t.Errorf("goes on at %s, the last committed checkpoint is at %s", at, newest.Position.LSN)
	}
	b.pg.Exec(`INSERT INTO t VALUES (2)`)
	b.wantIDs("t", []int{1, 2})
	b.stop(p)
}

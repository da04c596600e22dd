package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

// API keys of the requests that the tests break.
const (
	faultKeyProduce     = int16(kmsg.Produce)
	faultKeyInitPID     = int16(kmsg.InitProducerID)
	faultKeyEndTxn      = int16(kmsg.EndTxn)
	faultKeyCoordinator = int16(kmsg.FindCoordinator)
	faultKeyTopics      = int16(kmsg.CreateTopics)
	faultKeyMetadata    = int16(kmsg.Metadata)
)

const faultLong = 60 * time.Second // for what has to sit out a timeout first

// faultBed is what a test of a fault stands on: a fresh database, a Kafka, and the configuration of one connector.
type faultBed struct {
	t     *testing.T
	pg    *harness.PG
	kafka *harness.Cluster
	name  string
	yaml  map[string]any
}

// newFaultBed makes a bed; the connector's name is the Kafka's unique one, so that its topics are its own too.
func newFaultBed(t *testing.T, pg *harness.PG, k *harness.Cluster) *faultBed {
	t.Helper()
	b := &faultBed{t: t, pg: pg, kafka: k, name: k.Unique(), yaml: map[string]any{}}
	b.set("name", b.name)
	b.set("source.dsn", pg.DSN())
	b.set("kafka.brokers", k.Brokers())
	b.set("topics.replication-factor", 1)
	b.set("snapshot.mode", "never")
	b.set("admin.listen", "127.0.0.1:0")
	return b
}

// newPlainBed is a bed on the shared servers.
func newPlainBed(t *testing.T, sql string) *faultBed {
	t.Helper()
	b := newFaultBed(t, harness.Postgres(t), harness.Kafka(t))
	b.pg.Exec(sql)
	return b
}

// newWireBed is a bed whose Kafka requests go through a faultWire.
func newWireBed(t *testing.T, sql string, options ...harness.PGOption) (*faultBed, *faultWire) {
	t.Helper()
	k := harness.Kafka(t, harness.WithProxy())
	w := newFaultWire(t, k)
	b := newFaultBed(t, harness.Postgres(t, options...), k)
	b.pg.Exec(sql)
	return b, w
}

// set sets a key of the configuration, its path in dots.
func (b *faultBed) set(path string, value any) {
	at := b.yaml
	keys := strings.Split(path, ".")
	for _, key := range keys[:len(keys)-1] {
		next, ok := at[key].(map[string]any)
		if !ok {
			next = map[string]any{}
			at[key] = next
		}
		at = next
	}
	at[keys[len(keys)-1]] = value
}

// start starts the connector with further arguments to run.
func (b *faultBed) start(args ...string) *harness.Proc {
	b.t.Helper()
	return harness.Start(b.t, b.yaml, append([]string{"run"}, args...)...)
}

// stream starts the connector and waits until it streams.
func (b *faultBed) stream() *harness.Proc {
	b.t.Helper()
	p := b.start()
	faultStreaming(p)
	return p
}

func faultStreaming(p *harness.Proc) { p.WaitLog(faultLong, faultMessage("streaming")) }

// faultMessage matches a line whose message is exactly this.
func faultMessage(text string) harness.Match { return harness.Field("message", text) }

// stop ends a connector with SIGTERM and wants exit code 0.
func (b *faultBed) stop(p *harness.Proc) {
	b.t.Helper()
	p.Term()
	if code := p.Wait(faultLong); code != 0 {
		b.t.Fatalf("exit code %d after SIGTERM, want 0", code)
	}
}

// refused waits for exit code 4 and that the message holds all these texts.
func (b *faultBed) refused(p *harness.Proc, texts ...string) {
	b.t.Helper()
	b.ends(p, 4, texts...)
}

// ends waits for an exit code and wants the texts on the last line of standard error, which is the error.
func (b *faultBed) ends(p *harness.Proc, want int, texts ...string) {
	b.t.Helper()
	if code := p.Wait(faultLong); code != want {
		b.t.Fatalf("exit code %d, want %d; it said: %s", code, want, p.Stderr())
	}
	var said []string
	for _, line := range p.Lines() {
		if line.Fields == nil {
			said = append(said, line.Raw)
		}
	}
	message := strings.Join(said, "\n")
	for _, text := range texts {
		if !strings.Contains(message, text) {
			b.t.Errorf("the error does not say %q: %s", text, message)
		}
	}
}

func (b *faultBed) slot() string            { return "walrelay_" + b.name }
func (b *faultBed) checkpointTopic() string { return "_walrelay." + b.name }

// topic is that of a table in schema public.
func (b *faultBed) topic(table string) string { return b.name + ".public." + table }

// confirmed is the slot's confirmed position.
func (b *faultBed) confirmed() checkpoint.LSN {
	b.t.Helper()
	return b.lsn(`SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1`, b.slot())
}

func (b *faultBed) lsn(sql string, args ...any) checkpoint.LSN {
	b.t.Helper()
	lsn, err := checkpoint.ParseLSN(b.pg.Value(sql, args...))
	if err != nil {
		b.t.Fatal(err)
	}
	return lsn
}

// checkpoint is the newest committed position record.
func (b *faultBed) checkpoint() checkpoint.Checkpoint {
	b.t.Helper()
	var newest checkpoint.Checkpoint
	for _, r := range b.kafka.Committed(b.t, b.checkpointTopic()) {
		if string(r.Key) != checkpoint.KeyPosition {
			continue
		}
		c, _, _, err := checkpoint.DecodePosition(r.Value)
		if err != nil {
			b.t.Fatal(err)
		}
		newest = c
	}
	return newest
}

// durable checks that what was confirmed at some moment is not past the newest committed checkpoint (DESIGN, invariant
// 1). A real broker shows a commit a moment after it has answered, hence the wait: no later commit can hide a
// confirm that was too early while nothing commits, and that is when the tests call it.
func (b *faultBed) durable(confirmed checkpoint.LSN) {
	b.t.Helper()
	harness.WaitFor(b.t, fmt.Sprintf("a committed checkpoint at or past %s, which is confirmed", confirmed), 3*time.Second,
		func() (bool, error) { return b.checkpoint().Position.LSN >= confirmed, nil })
}

// wantIDs waits for as many records as there are ids and wants exactly these, in any order across partitions.
func (b *faultBed) wantIDs(table string, ids []int) []*kgo.Record {
	b.t.Helper()
	records := b.kafka.WaitCommitted(b.t, b.topic(table), len(ids))
	got := faultIDs(b.t, records)
	slices.Sort(got)
	if !slices.Equal(got, ids) {
		b.t.Errorf("ids in %s: %s, want %s", b.topic(table), faultShort(got), faultShort(ids))
	}
	return records
}

func faultShort(ids []int) string {
	if len(ids) <= 40 {
		return fmt.Sprint(ids)
	}
	twice := 0
	for i := 1; i < len(ids); i++ {
		if ids[i] == ids[i-1] {
			twice++
		}
	}
	return fmt.Sprintf("%d from %d to %d, %d of them again", len(ids), ids[0], ids[len(ids)-1], twice)
}

// faultRange is the numbers from first to last.
func faultRange(first, last int) []int {
	var ids []int
	for i := first; i <= last; i++ {
		ids = append(ids, i)
	}
	return ids
}

// faultValue is the part of a record's value that tests look at.
type faultValue struct {
	Op     string
	After  map[string]any
	Before map[string]any
	Source struct {
		CommitLSN string `json:"commit_lsn"`
		Seq       int
	}
}

func faultDecode(t *testing.T, r *kgo.Record) faultValue {
	t.Helper()
	var v faultValue
	if err := json.Unmarshal(r.Value, &v); err != nil {
		t.Fatalf("value %s: %v", r.Value, err)
	}
	return v
}

// faultIDs are the ids of the rows after the change.
func faultIDs(t *testing.T, records []*kgo.Record) []int {
	t.Helper()
	var ids []int
	for _, r := range records {
		id, ok := faultDecode(t, r).After["id"].(float64)
		if !ok {
			t.Fatalf("value %s has no after.id", r.Value)
		}
		ids = append(ids, int(id))
	}
	return ids
}

// get asks the admin server.
func (b *faultBed) get(p *harness.Proc, path string) (code int, body string) {
	b.t.Helper()
	address := p.WaitLog(faultLong, faultMessage("admin server listening")).Field("address")
	ctx, cancel := context.WithTimeout(b.t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// metrics are the values by series as /metrics writes it, name{label="value"}.
func (b *faultBed) metrics(p *harness.Proc) map[string]float64 {
	b.t.Helper()
	_, body := b.get(p, "/metrics")
	out := map[string]float64{}
	for lines := bufio.NewScanner(strings.NewReader(body)); lines.Scan(); {
		at := strings.LastIndexByte(lines.Text(), ' ')
		if at < 0 || strings.HasPrefix(lines.Text(), "#") {
			continue
		}
		if v, err := strconv.ParseFloat(lines.Text()[at+1:], 64); err == nil {
			out[lines.Text()[:at]] = v
		}
	}
	return out
}

// faultSum adds the series of a metric that hold a text, such as a label.
func faultSum(metrics map[string]float64, name, holds string) float64 {
	sum := 0.0
	for _, series := range slices.Sorted(maps.Keys(metrics)) {
		if strings.HasPrefix(series, name) && strings.Contains(series, holds) {
			sum += metrics[series]
		}
	}
	return sum
}

// phase waits until the connector is in this phase.
func (b *faultBed) phase(p *harness.Proc, want string) {
	b.t.Helper()
	harness.WaitFor(b.t, "phase "+want, harness.DefaultTimeout, func() (bool, error) {
		return b.metrics(p)[`walrelay_state{phase="`+want+`"}`] == 1, nil
	})
}

// walsender is the process that streams from the slot, 0 for none.
func (b *faultBed) walsender() string {
	b.t.Helper()
	return b.pg.Value(`SELECT coalesce(max(active_pid), 0) FROM pg_replication_slots WHERE slot_name = $1`, b.slot())
}

// openTransaction says whether a partition of a topic has records above its last stable offset.
func (b *faultBed) openTransaction(topic string) bool {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), harness.DefaultTimeout)
	defer cancel()
	admin := kadm.NewClient(b.kafka.Client(b.t))
	stable, err := admin.ListCommittedOffsets(ctx, topic)
	if err != nil {
		b.t.Fatal(err)
	}
	ends, err := admin.ListEndOffsets(ctx, topic)
	if err != nil {
		b.t.Fatal(err)
	}
	open := false
	ends.Each(func(end kadm.ListedOffset) {
		if at, _ := stable.Lookup(topic, end.Partition); at.Offset < end.Offset {
			open = true
		}
	})
	return open
}

// holdCommit inserts ids into t and holds the EndTxn of the Kafka transaction that has them. One of a position that
// moved without records may come first; it is let through.
func (b *faultBed) holdCommit(w *faultWire, first, last int) {
	b.t.Helper()
	w.on(faultKeyEndTxn, func(int) faultAct { return faultHold })
	b.pg.Exec(fmt.Sprintf(`INSERT INTO t SELECT generate_series(%d, %d)`, first, last))
	harness.WaitFor(b.t, "the EndTxn of the rows to be held", faultLong, func() (bool, error) {
		if w.heldNow() == 0 {
			return false, nil
		}
		if len(b.kafka.Consume(b.t, b.topic("t"), kgo.ReadUncommitted())) > last-first {
			return true, nil
		}
		w.step()
		return false, nil
	})
}

// session opens a connection of its own, for a transaction that stays open.
func (b *faultBed) session() *pgx.Conn {
	b.t.Helper()
	return faultConnect(b.t, b.pg.DSN())
}

func faultConnect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) }) // the test may have broken it
	return conn
}

func (b *faultBed) must(conn *pgx.Conn, sql string) {
	b.t.Helper()
	if _, err := conn.Exec(b.t.Context(), sql); err != nil {
		b.t.Fatalf("%s: %v", sql, err)
	}
}

// faultLoad inserts ids 1, 2, … into t, one transaction each, until it is ended.
type faultLoad struct {
	stop chan struct{}
	wg   sync.WaitGroup
	mu   sync.Mutex
	last int
	err  error
}

// load starts a writer with a pause between its transactions.
func (b *faultBed) load(pause time.Duration) *faultLoad {
	l := &faultLoad{stop: make(chan struct{})}
	l.wg.Go(func() {
		tick := time.NewTicker(pause)
		defer tick.Stop()
		for {
			select {
			case <-l.stop:
				return
			case <-tick.C:
			}
			l.mu.Lock()
			next := l.last + 1
			l.mu.Unlock()
			_, err := b.pg.TryQuery(`INSERT INTO t VALUES ($1)`, next)
			l.mu.Lock()
			l.last, l.err = next, err
			l.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	b.t.Cleanup(func() { l.end() })
	return l
}

func (l *faultLoad) written() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}

// end stops the writer and gives the last id.
func (l *faultLoad) end() (int, error) {
	l.mu.Lock()
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.mu.Unlock()
	l.wg.Wait()
	return l.last, l.err
}

package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
)

// caseFencePrefix is the prefix of the logical messages by which a case learns that all
// that was committed before has been delivered.
const caseFencePrefix = "case-fence"

// caseMap is a piece of configuration.
type caseMap = map[string]any

// caseRun is one case: a database, a Kafka, a connector's configuration and the instance
// that runs with it.
type caseRun struct {
	t      *testing.T
	pg     *harness.PG
	kafka  *harness.Cluster
	name   string // of the connector, and the prefix of its topics
	config caseMap
	proc   *harness.Proc // the last one that was started
	first  map[string]map[int32]int64
	fences int
	waiter *kgo.Client // reads the fences
}

// caseNew makes a case in a database of its own.
func caseNew(t *testing.T, options ...harness.PGOption) *caseRun {
	t.Helper()
	t.Parallel()
	return caseOn(t, harness.Postgres(t, options...), harness.Kafka(t))
}

// caseOn makes a case on what is there already.
func caseOn(t *testing.T, pg *harness.PG, kafka *harness.Cluster) *caseRun {
	t.Helper()
	c := &caseRun{t: t, pg: pg, kafka: kafka, name: kafka.Unique()}
	c.config = caseMap{
		"name":     c.name,
		"source":   caseMap{"dsn": pg.DSN(), "messages": []string{caseFencePrefix}},
		"snapshot": caseMap{"mode": "never"},
		"kafka":    caseMap{"brokers": kafka.Brokers()},
		"admin":    caseMap{"listen": ""},
	}
	// On a shared Kafka the topics of outbox events may hold what earlier runs wrote.
	c.first = c.mustEnds(`outbox\.event\..*|ev\..*`)
	return c
}

// set lays overlay over the configuration, mapping by mapping.
func (c *caseRun) set(overlay caseMap) *caseRun {
	caseMerge(c.config, overlay)
	return c
}

func caseMerge(into, overlay caseMap) {
	for key, value := range overlay {
		inner, isMap := value.(caseMap)
		old, wasMap := into[key].(caseMap)
		if isMap && wasMap {
			caseMerge(old, inner)
			continue
		}
		into[key] = value
	}
}

// start runs an instance and waits until it streams.
func (c *caseRun) start() *harness.Proc {
	c.t.Helper()
	c.launch()
	c.streaming()
	return c.proc
}

func (c *caseRun) streaming() {
	c.t.Helper()
	c.proc.WaitLog(harness.DefaultTimeout, harness.Field("message", "streaming"))
}

// launch starts an instance. env are variables in the form NAME=value.
func (c *caseRun) launch(env ...string) *harness.Proc {
	c.t.Helper()
	text, err := yaml.Marshal(c.config)
	if err != nil {
		c.t.Fatal(err)
	}
	file := filepath.Join(c.t.TempDir(), "walrelay.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		c.t.Fatal(err)
	}
	args := append(slices.Clone(env), harness.Binary(c.t), "run", "-c", file)
	c.proc = harness.StartProgram(c.t, "env", nil, args...)
	return c.proc
}

// startUntil starts an instance that kills itself when its Kafka transaction number n
// that has records has begun to produce: n-1 of them are committed then, and nothing
// of this one ever will be.
func (c *caseRun) startUntil(n int) {
	c.t.Helper()
	c.launch(killpoint.Env + "=" + killpoint.Spec(killpoint.FirstProduced, n))
	c.streaming()
}

// killed waits for an instance to kill itself.
func (c *caseRun) killed() {
	c.t.Helper()
	if code := c.proc.Wait(harness.DefaultTimeout); code != -1 {
		c.t.Fatalf("the instance ended with exit code %d instead of killing itself", code)
	}
}

// stop ends the instance with SIGTERM.
func (c *caseRun) stop() {
	c.t.Helper()
	c.proc.Term()
	if code := c.proc.Wait(harness.DefaultTimeout); code != 0 {
		c.t.Fatalf("the instance ended with exit code %d", code)
	}
}

// session opens another connection to the database; it ends with the test.
func (c *caseRun) session() *pgx.Conn {
	c.t.Helper()
	return caseConnect(c.t, c.pg.DSN())
}

func caseConnect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(ctx) // the server may be gone
	})
	return conn
}

// exec runs statements in a session.
func (c *caseRun) exec(conn *pgx.Conn, sql string) {
	c.t.Helper()
	caseExec(c.t, conn, sql)
}

func caseExec(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.PgConn().Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// setDatabase sets a parameter for the database's new sessions, the walsender's too.
func (c *caseRun) setDatabase(name, value string) {
	c.t.Helper()
	c.pg.Exec(fmt.Sprintf("ALTER DATABASE %s SET %s = '%s'", c.pg.Name, name, value))
}

// walEnd is where the WAL ends now.
func (c *caseRun) walEnd() checkpoint.LSN {
	c.t.Helper()
	return c.lsn("SELECT pg_current_wal_insert_lsn()")
}

func (c *caseRun) lsn(sql string, args ...any) checkpoint.LSN {
	c.t.Helper()
	lsn, err := checkpoint.ParseLSN(c.pg.Value(sql, args...))
	if err != nil {
		c.t.Fatal(err)
	}
	return lsn
}

// confirmed is the slot's confirmed LSN.
func (c *caseRun) confirmed() checkpoint.LSN {
	c.t.Helper()
	return c.lsn("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1", "walrelay_"+c.name)
}

// waitConfirmed waits until the server knows everything before lsn to be delivered.
func (c *caseRun) waitConfirmed(lsn checkpoint.LSN) {
	c.t.Helper()
	harness.WaitFor(c.t, fmt.Sprintf("the slot to be confirmed up to %s", lsn), harness.DefaultTimeout, func() (bool, error) {
		return c.confirmed() >= lsn, nil
	})
}

// checkpoint is the newest committed one. No instance may be at work.
func (c *caseRun) checkpoint() checkpoint.Checkpoint {
	c.t.Helper()
	cp, found, err := c.store().Load(c.t.Context())
	if err != nil || !found {
		c.t.Fatalf("load the checkpoint: found %t, %v", found, err)
	}
	return cp
}

// waitCheckpoint waits until a committed checkpoint is at or past lsn, and returns it.
func (c *caseRun) waitCheckpoint(lsn checkpoint.LSN) (cp checkpoint.Checkpoint) {
	c.t.Helper()
	store := c.store()
	harness.WaitFor(c.t, fmt.Sprintf("a checkpoint at %s", lsn), harness.DefaultTimeout, func() (found bool, err error) {
		cp, found, err = store.Peek(c.t.Context())
		return found && cp.Position.LSN >= lsn, err
	})
	return cp
}

func (c *caseRun) store() *ckafka.Store {
	c.t.Helper()
	return ckafka.NewStore(c.kafka.Client(c.t), ckafka.Options{Topic: "_walrelay." + c.name})
}

// fence writes a logical message and waits until it is delivered: so is, by invariant 4,
// everything that was committed before.
func (c *caseRun) fence() {
	c.t.Helper()
	c.fences++
	token := fmt.Sprintf("%s-%d", c.name, c.fences)
	c.pg.Exec("SELECT pg_logical_emit_message(true, $1, $2)", caseFencePrefix, token)
	c.waitFence(token)
}

func (c *caseRun) waitFence(token string) {
	c.t.Helper()
	if c.waiter == nil {
		c.waiter = c.kafka.Client(c.t, kgo.ConsumeTopics(c.name+".message"), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxWait(100*time.Millisecond),
			kgo.MetadataMinAge(50*time.Millisecond), kgo.MetadataMaxAge(100*time.Millisecond))
	}
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*harness.DefaultTimeout)
	defer cancel()
	for {
		fetches := c.waiter.PollFetches(ctx)
		if ctx.Err() != nil {
			c.t.Fatalf("the message %s was not delivered", token)
		}
		for record := range fetches.RecordsAll() {
			if env, err := cdctest.ParseEnvelope(record.Value); err == nil && env.Message != nil && string(env.Message.Content) == token {
				return
			}
		}
	}
}

// caseRecord is a record with the parts of its envelope as they stand.
type caseRecord struct {
	cdctest.Record
	Op            string          `json:"op"`
	Before, After json.RawMessage `json:"-"`
	TsMs          *int64          `json:"ts_ms"`
	Source        struct {
		Schema    string  `json:"schema"`
		Table     string  `json:"table"`
		TxID      *uint64 `json:"tx_id"`
		CommitLSN string  `json:"commit_lsn"`
		LSN       *string `json:"lsn"`
		Seq       *uint64 `json:"seq"`
	} `json:"source"`
	Message *cdctest.MessageBody `json:"message"`
}

// line gives a change in the short form in which the cases write what is right:
// topic, op, seq, key, before and after; a tombstone is "x" with its key alone.
func (r *caseRecord) line() string {
	topic := r.Topic[strings.LastIndexByte(r.Topic, '.')+1:]
	key := "-"
	if r.Key != nil {
		key = string(r.Key)
	}
	if r.Value == nil {
		return fmt.Sprintf("%s x %s", topic, key)
	}
	return fmt.Sprintf("%s %s %d %s %s %s", topic, r.Op, *r.Source.Seq, key, r.Before, r.After)
}

func caseLines(records []caseRecord) []string {
	lines := make([]string, len(records))
	for i := range records {
		lines[i] = records[i].line()
	}
	return lines
}

// expect compares two lists of lines.
func (c *caseRun) expect(what string, got []caseRecord, want ...string) {
	c.t.Helper()
	lines := caseLines(got)
	if slices.Equal(lines, want) {
		return
	}
	c.t.Errorf("%s:\ngot\n\t%s\nwant\n\t%s", what, strings.Join(lines, "\n\t"), strings.Join(want, "\n\t"))
}

// settled waits for everything committed so far and reads the connector's topics.
func (c *caseRun) settled() *cdctest.Log {
	c.t.Helper()
	c.fence()
	return c.log()
}

// log reads all topics of the connector, and checks what holds of every log.
func (c *caseRun) log() *cdctest.Log {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*harness.DefaultTimeout)
	defer cancel()
	log, err := cdctest.ReadSettled(ctx, regexp.QuoteMeta(c.name)+`\..*|outbox\.event\..*|ev\..*`, kgo.SeedBrokers(c.kafka.Brokers()...))
	if err != nil {
		c.t.Fatalf("read the log: %v", err)
	}
	log.Records = slices.DeleteFunc(log.Records, func(r cdctest.Record) bool { return r.Offset < c.first[r.Topic][r.Partition] })
	return log
}

// changes gives the records of the connector's tables, sorted by position, and checks
// that nothing is there twice or out of order.
func (c *caseRun) changes() []caseRecord {
	c.t.Helper()
	return c.changesOf(c.settled())
}

func (c *caseRun) changesOf(log *cdctest.Log) []caseRecord {
	c.t.Helper()
	tables := &cdctest.Log{Partitions: log.Partitions}
	for _, r := range log.Records {
		if strings.HasPrefix(r.Topic, c.name+".") && r.Topic != c.name+".dead-letter" && r.Topic != c.name+".message" {
			tables.Records = append(tables.Records, r)
		}
	}
	c.check(cdctest.Order(tables, cdctest.Layout{Prefix: c.name}))
	c.check(cdctest.NoDuplicate(tables))
	c.check(cdctest.Partition(tables))
	return c.parse(tables.Records)
}

func (c *caseRun) check(violations []cdctest.Violation) {
	c.t.Helper()
	if len(violations) > 0 {
		c.t.Errorf("%d violations:\n%s", len(violations), cdctest.Report(violations, 10))
	}
}

// parse reads records and sorts them by position, those of one change by where they lie.
func (c *caseRun) parse(records []cdctest.Record) []caseRecord {
	c.t.Helper()
	out := make([]caseRecord, 0, len(records))
	for _, raw := range records {
		r := caseRecord{Record: raw}
		if raw.Value != nil {
			if err := json.Unmarshal(raw.Value, &r); err != nil {
				c.t.Fatalf("%s: %v: %s", raw.Where(), err, raw.Value)
			}
			var images struct{ Before, After json.RawMessage }
			if err := json.Unmarshal(raw.Value, &images); err != nil {
				c.t.Fatalf("%s: %v", raw.Where(), err)
			}
			r.Before, r.After = images.Before, images.After
		}
		out = append(out, r)
	}
	slices.SortStableFunc(out, func(a, b caseRecord) int {
		return cmp.Or(cmp.Compare(a.Headers["position"], b.Headers["position"]), cmp.Compare(a.Topic, b.Topic),
			cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
	})
	return out
}

// topic gives the records of one topic, by position.
func (c *caseRun) topic(log *cdctest.Log, name string) []cdctest.Record {
	var records []cdctest.Record
	for _, r := range log.Records {
		if r.Topic == name {
			records = append(records, r)
		}
	}
	slices.SortStableFunc(records, func(a, b cdctest.Record) int {
		return cmp.Or(cmp.Compare(a.Headers["position"], b.Headers["position"]), cmp.Compare(a.Offset, b.Offset))
	})
	return records
}

// mustEnds gives the end offsets of topics.
func (c *caseRun) mustEnds(topics string) map[string]map[int32]int64 {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), harness.DefaultTimeout)
	defer cancel()
	log, err := cdctest.ReadUncommitted(ctx, topics, kgo.SeedBrokers(c.kafka.Brokers()...))
	if err != nil {
		c.t.Fatalf("read where topics end: %v", err)
	}
	ends := map[string]map[int32]int64{}
	for _, r := range log.Records {
		if ends[r.Topic] == nil {
			ends[r.Topic] = map[int32]int64{}
		}
		ends[r.Topic][r.Partition] = max(ends[r.Topic][r.Partition], r.Offset+1)
	}
	return ends
}

// oneTransaction checks that changes are of one source transaction, with seq from 0
// without a gap.
func (c *caseRun) oneTransaction(changes []caseRecord) {
	c.t.Helper()
	for i, r := range changes {
		if r.Source.CommitLSN != changes[0].Source.CommitLSN || *r.Source.TxID != *changes[0].Source.TxID || *r.Source.Seq != uint64(i) {
			c.t.Fatalf("change %d has commit_lsn %s, tx_id %d, seq %d; the first one %s, %d", i, r.Source.CommitLSN, *r.Source.TxID, *r.Source.Seq,
				changes[0].Source.CommitLSN, *changes[0].Source.TxID)
		}
	}
}

// ids gives the id of each row in after.
func (c *caseRun) ids(changes []caseRecord) []int {
	c.t.Helper()
	ids := make([]int, len(changes))
	for i, r := range changes {
		var row struct{ ID int }
		if err := json.Unmarshal(r.After, &row); err != nil {
			c.t.Fatalf("%s: after is %s: %v", r.Where(), r.After, err)
		}
		ids[i] = row.ID
	}
	return ids
}

func (c *caseRun) expectIDs(changes []caseRecord, want ...int) {
	c.t.Helper()
	got := c.ids(changes)
	if slices.Equal(got, want) {
		return
	}
	at := 0
	for at < len(got) && at < len(want) && got[at] == want[at] {
		at++
	}
	c.t.Fatalf("%d ids, want %d; from the %dth on they are %v, want %v", len(got), len(want), at, got[at:min(len(got), at+10)], want[at:min(len(want), at+10)])
}

// caseRange is first, first+1, …, last.
func caseRange(first, last int) []int {
	var ids []int
	for id := first; id <= last; id++ {
		ids = append(ids, id)
	}
	return ids
}

// fold checks that folding a table's topic gives these rows. columns are name:type, the
// first one the key; a row is its columns' text.
func (c *caseRun) fold(log *cdctest.Log, table, columns string, rows ...[]string) {
	c.t.Helper()
	def := &cdctest.Table{Schema: "public", Name: table}
	for i, column := range strings.Fields(columns) {
		name, kind, _ := strings.Cut(column, ":")
		def.Columns = append(def.Columns, cdctest.Column{Name: name, Type: kind, Key: i == 0})
	}
	truth := &cdctest.Truth{Tables: []*cdctest.Table{def}, Final: map[string][]cdctest.Row{}}
	for _, row := range rows {
		cells := make(cdctest.Row, len(row))
		for i := range row {
			cells[i] = &row[i]
		}
		truth.Final[def.ID()] = append(truth.Final[def.ID()], cells)
	}
	c.check(cdctest.Fold(log, truth, cdctest.Layout{Prefix: c.name}))
}

// quiet checks that the log has no warning and no error.
func (c *caseRun) quiet() {
	c.t.Helper()
	for _, line := range c.proc.Lines() {
		if level := line.Level(); level != "info" && level != "debug" {
			c.t.Errorf("the log says: %s", line.Raw)
		}
	}
}

// admin gives the address of the instance's pages; the configuration must have
// admin.listen "127.0.0.1:0".
func (c *caseRun) admin() string {
	c.t.Helper()
	return "http://" + c.proc.WaitLog(harness.DefaultTimeout, harness.Field("message", "admin server listening")).Field("address")
}

func (c *caseRun) get(url string) (int, string) {
	c.t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: harness.DefaultTimeout}
	response, err := client.Get(url)
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

// metric sums a metric's samples whose labels contain all of the texts; 0 where there
// are none.
func (c *caseRun) metric(name string, labels ...string) float64 {
	c.t.Helper()
	_, page := c.get(c.admin() + "/metrics")
	sum := 0.0
samples:
	for line := range strings.Lines(page) {
		line = strings.TrimSpace(line)
		at := strings.LastIndexByte(line, ' ') // labels may hold blanks
		series, value := line[:max(at, 0)], line[at+1:]
		if series != name && !strings.HasPrefix(series, name+"{") {
			continue
		}
		for _, label := range labels {
			if !strings.Contains(series, label) {
				continue samples
			}
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			c.t.Fatalf("metric %s: %v", line, err)
		}
		sum += v
	}
	return sum
}

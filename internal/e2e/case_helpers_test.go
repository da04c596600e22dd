package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
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
	// A broker that is busy writes the marker of a killed instance's transaction late; at
	// the latest when the transaction times out, after a minute.
	c.proc.WaitLog(3*harness.DefaultTimeout, harness.Field("message", "streaming"))
}

// launch starts an instance. env are variables in the form NAME=value.
func (c *caseRun) launch(env ...string) *harness.Proc {
	c.t.Helper()
	args := append(slices.Clone(env), harness.Binary(c.t), "run", "-c", c.file())
	c.proc = harness.StartProgram(c.t, "env", nil, args...)
	return c.proc
}

// file writes the configuration.
func (c *caseRun) file() string {
	c.t.Helper()
	text, err := yaml.Marshal(c.config)
	if err != nil {
		c.t.Fatal(err)
	}
	file := filepath.Join(c.t.TempDir(), "walrelay.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		c.t.Fatal(err)
	}
	return file
}

// catchUp runs an instance until it has delivered everything, the snapshot included.
func (c *caseRun) catchUp() {
	c.t.Helper()
	c.proc = harness.StartProgram(c.t, harness.Binary(c.t), nil, "run", "-c", c.file(), "--until-caught-up")
	if code := c.proc.Wait(3 * harness.DefaultTimeout); code != 0 {
		c.t.Fatalf("the instance ended with exit code %d", code)
	}
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

// quiet checks that the log has no warning and no error.
func (c *caseRun) quiet() {
	c.t.Helper()
	// The server is other tests' too, and a slot is made when their transactions have ended.
	waits := harness.Message("creating the slot waits")
	for _, line := range c.proc.Lines() {
		if level := line.Level(); level != "info" && level != "debug" && !waits(line) {
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

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

// snapLong bounds waits for snapshots of many rows on a busy machine.
const snapLong = 3 * time.Minute

// snapBed is a faultBed that reads the tables at the start, its connections to PostgreSQL
// through a gate.
type snapBed struct {
	*faultBed
	gate *pgGate
}

// newSnapBed makes a bed on a fresh database in which sql has run.
func newSnapBed(t *testing.T, sql string, options ...harness.PGOption) *snapBed {
	t.Helper()
	t.Parallel()
	return snapBedOn(t, harness.Postgres(t, options...), harness.Kafka(t), sql)
}

func snapBedOn(t *testing.T, pg *harness.PG, k *harness.Cluster, sql string) *snapBed {
	t.Helper()
	pg.Exec(sql)
	b := &snapBed{faultBed: newFaultBed(t, pg, k), gate: newPGGate(t, pg.Server.Addr())}
	b.set("source.dsn", pg.ProxyDSN(b.gate.addr()))
	b.set("snapshot.mode", "initial")
	return b
}

// untilCaughtUp runs the connector to its end, and gives it.
func (b *snapBed) untilCaughtUp() *harness.Proc {
	b.t.Helper()
	p := b.start("--until-caught-up")
	if code := p.Wait(snapLong); code != 0 {
		b.t.Fatalf("exit code %d, want 0", code)
	}
	return p
}

// snapStatus is the snapshot's part of /status.
type snapStatus struct {
	Snapshot struct {
		Tables map[string]struct {
			State    string
			Rows     int64
			Estimate int64
		}
		Rows, Done, Total int64
	}
}

func (b *snapBed) status(p *harness.Proc) (s snapStatus) {
	b.t.Helper()
	_, body := b.get(p, "/status")
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		b.t.Fatalf("status %s: %v", body, err)
	}
	return s
}

// waitTable waits until a table's snapshot is done, or at least rows of it are out.
func (b *snapBed) waitTable(p *harness.Proc, table string, rows int64) {
	b.t.Helper()
	what := fmt.Sprintf("%d rows of %s", rows, table)
	if rows == allRows {
		what = "the snapshot of " + table + " to be done"
	}
	harness.WaitFor(b.t, what, snapLong, func() (bool, error) {
		if !p.Running() {
			return false, fmt.Errorf("the connector ended")
		}
		s := b.status(p).Snapshot.Tables[table]
		return s.State == "done" || rows != allRows && s.Rows >= rows, nil
	})
}

const allRows = -1

// log reads what the connector has delivered, its events too.
func (b *snapBed) log() *cdctest.Log {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), snapLong)
	defer cancel()
	log, err := cdctest.ReadSettled(ctx, regexp.QuoteMeta(b.name)+`\..*`, kgo.SeedBrokers(b.kafka.Brokers()...))
	if err != nil {
		b.t.Fatalf("read the log: %v", err)
	}
	return log
}

// settled waits until everything committed so far is delivered, and reads it.
func (b *snapBed) settled(p *harness.Proc) *cdctest.Log {
	b.t.Helper()
	b.caughtUp(p)
	return b.log()
}

// caughtUp waits until what is committed so far is confirmed.
func (b *snapBed) caughtUp(*harness.Proc) {
	b.t.Helper()
	end := b.lsn("SELECT pg_current_wal_insert_lsn()")
	b.pg.Exec("SELECT pg_logical_emit_message(true, 'caught-up', '')")
	harness.WaitFor(b.t, fmt.Sprintf("the slot to be confirmed up to %s", end), snapLong, func() (bool, error) {
		return b.confirmed() >= end, nil
	})
}

// snapRecord is a record of a table, as far as the tests look at it.
type snapRecord struct {
	cdctest.Record
	Op     string
	After  map[string]any
	Before map[string]any
	Source struct {
		TxID     *uint64 `json:"tx_id"`
		Snapshot bool
	}
}

// records gives the records of a table's topic by partition and offset, tombstones left
// out.
func (b *snapBed) records(log *cdctest.Log, table string) []snapRecord {
	b.t.Helper()
	return b.topicRecords(log, b.topic(table))
}

func (b *snapBed) topicRecords(log *cdctest.Log, topic string) (out []snapRecord) {
	b.t.Helper()
	for _, r := range log.Records {
		if r.Topic != topic || r.Value == nil {
			continue
		}
		rec := snapRecord{Record: r}
		if err := json.Unmarshal(r.Value, &rec); err != nil {
			b.t.Fatalf("%s: %s: %v", r.Where(), r.Value, err)
		}
		out = append(out, rec)
	}
	slices.SortStableFunc(out, func(a, b snapRecord) int {
		if a.Partition != b.Partition {
			return int(a.Partition - b.Partition)
		}
		return int(a.Offset - b.Offset)
	})
	return out
}

// ops gives, by id, the letters of a row's records in their order.
func (b *snapBed) ops(log *cdctest.Log, table string) map[int]string {
	b.t.Helper()
	ops := map[int]string{}
	for _, r := range b.records(log, table) {
		row := r.After
		if row == nil {
			row = r.Before
		}
		if id, ok := row["id"].(float64); ok {
			ops[int(id)] += r.Op
		}
	}
	return ops
}

// wantOps checks that the ids from first to last have exactly these records each.
func (b *snapBed) wantOps(log *cdctest.Log, table string, first, last int, want string) {
	b.t.Helper()
	ops := b.ops(log, table)
	wrong := 0
	for id := first; id <= last; id++ {
		if ops[id] != want {
			if wrong++; wrong <= 5 {
				b.t.Errorf("%s, id %d: records %q, want %q", table, id, ops[id], want)
			}
		}
	}
	if wrong > 5 {
		b.t.Errorf("%s: %d ids are wrong", table, wrong)
	}
}

// reads counts the rows that were read.
func (b *snapBed) reads(log *cdctest.Log, table string) (n int) {
	b.t.Helper()
	for _, r := range b.records(log, table) {
		if r.Op == "r" {
			n++
		}
	}
	return n
}

// snapTable describes a table in schema public: "name:type[:key|:big] ...".
func snapTable(name, columns string) *cdctest.Table {
	t := &cdctest.Table{Schema: "public", Name: name}
	for field := range strings.FieldsSeq(columns) {
		p := append(strings.Split(field, ":"), "")
		t.Columns = append(t.Columns, cdctest.Column{Name: p[0], Type: p[1], Key: p[2] == "key", Big: p[2] == "big"})
	}
	return t
}

// folds checks that the topic folds to the table as it is now, that everything in it is
// in order, and that no key goes back; version is a column that only rises, or empty.
func (b *snapBed) folds(log *cdctest.Log, version string, table *cdctest.Table) {
	b.t.Helper()
	var columns []string
	for _, c := range table.Columns {
		columns = append(columns, `"`+c.Name+`"::text`)
	}
	truth := &cdctest.Truth{Tables: []*cdctest.Table{table}, Final: map[string][]cdctest.Row{}}
	for _, cells := range b.pg.Query("SELECT " + strings.Join(columns, ", ") + " FROM " + table.ID()) {
		row := make(cdctest.Row, len(cells))
		for i := range cells {
			if cells[i] != harness.Null {
				row[i] = &cells[i]
			}
		}
		truth.Final[table.ID()] = append(truth.Final[table.ID()], row)
	}
	layout := cdctest.Layout{Prefix: b.name, Partitions: 6}
	b.check(cdctest.Fold(log, truth, layout))
	b.check(cdctest.Order(log, layout))
	b.check(cdctest.NoDuplicate(log))
	b.check(cdctest.Partition(log))
	if !table.Keyless() {
		b.check(cdctest.NeverBack(log, b.topic(table.Name), version))
	}
}

func (b *snapBed) check(violations []cdctest.Violation) {
	b.t.Helper()
	if len(violations) > 0 {
		b.t.Errorf("%d violations:\n%s", len(violations), cdctest.Report(violations, 10))
	}
}

// lockOf matches the statement with which a reader opens its transaction on a table in
// schema public: it locks the table and then takes its MVCC snapshot.
func lockOf(table string) func(string) bool {
	return func(sql string) bool {
		return strings.Contains(sql, "LOCK TABLE") && strings.Contains(sql, `"`+table+`"`)
	}
}

// rowsOf matches the statement that reads rows of a table under that snapshot, and ends
// the transaction.
func rowsOf(table string) func(string) bool {
	return func(sql string) bool {
		return strings.HasPrefix(sql, "SELECT") && strings.HasSuffix(sql, "COMMIT") && strings.Contains(sql, `"`+table+`"`)
	}
}

// released waits until rows of a table have been read, and no reader is at work on it any
// more: what it read is in the connector's memory.
func (b *snapBed) released(table string) {
	b.t.Helper()
	harness.WaitFor(b.t, "rows of "+table+" to be read", harness.DefaultTimeout, func() (bool, error) { return len(b.gate.seen(rowsOf(table))) > 0, nil })
	b.pg.WaitValue("0", `SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
		WHERE l.relation = $1::regclass AND a.application_name LIKE 'walrelay%'`, table)
}

// holdChunk starts the connector and brings it to where a chunk of the table is in memory
// and cannot be merged: the stream is held, and has not reached the end of WAL that the
// chunk was read at.
func (b *snapBed) holdChunk(table string) *harness.Proc {
	b.t.Helper()
	b.gate.on(gateOnce(gateHold, rowsOf(table)))
	p := b.start()
	b.gate.waitHeld(b.t)
	b.holdRead(table)
	return p
}

// holdRead holds the stream, and lets the chunk be read that is held.
func (b *snapBed) holdRead(table string) {
	b.t.Helper()
	b.gate.holdStream()
	b.pg.Exec("SELECT pg_logical_emit_message(true, 'beyond the stream', '')")
	b.gate.release()
	b.released(table)
}

// ask runs "walrelay snapshot" with the bed's configuration, and gives its exit code and
// what it said.
func (b *snapBed) ask(p *harness.Proc, args ...string) (int, string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), faultLong)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Binary(b.t), append([]string{"snapshot", "-c", p.ConfigFile}, args...)...)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		b.t.Fatalf("run walrelay snapshot: %v", err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

func (b *snapBed) mustAsk(p *harness.Proc, args ...string) {
	b.t.Helper()
	if code, said := b.ask(p, args...); code != 0 {
		b.t.Fatalf("walrelay snapshot %s: exit code %d: %s", strings.Join(args, " "), code, said)
	}
}

// snapWriters are sessions that write until they are ended.
type snapWriters struct {
	t    *testing.T
	stop context.CancelFunc
	wg   sync.WaitGroup
	mu   sync.Mutex
	n    int
	err  error
}

// write starts sessions that call step again and again; i counts the calls of a session.
func (b *snapBed) write(sessions int, pause time.Duration, step func(ctx context.Context, conn *pgx.Conn, session, i int) error) *snapWriters {
	b.t.Helper()
	ctx, stop := context.WithCancel(b.t.Context())
	w := &snapWriters{t: b.t, stop: stop}
	for session := range sessions {
		conn := b.session()
		w.wg.Go(func() {
			tick := time.NewTicker(max(pause, time.Microsecond))
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}
				err := step(context.WithoutCancel(ctx), conn, session, i)
				w.mu.Lock()
				w.n++
				if err != nil {
					w.err = err
				}
				w.mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	b.t.Cleanup(func() { w.stop(); w.wg.Wait() })
	return w
}

// end stops the writers, and gives the number of transactions.
func (w *snapWriters) end() int {
	w.t.Helper()
	w.stop()
	w.wg.Wait()
	if w.err != nil {
		w.t.Fatal(w.err)
	}
	return w.n
}

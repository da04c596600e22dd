package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/internal/killpoint"
)

// afterNew makes a case whose outbox rows are marked or deleted. Events of the type "bad
// type" cannot be routed and become dead letters.
func afterNew(t *testing.T, schema string, outbox caseMap) *caseRun {
	t.Helper()
	c := caseNew(t)
	c.pg.Exec(schema)
	return c.setAfter(outbox)
}

func (c *caseRun) setAfter(outbox caseMap) *caseRun {
	entry := caseMap{"table": "public.outbox", "topic": "outbox.event.{event_type}"}
	caseMerge(entry, outbox)
	return c.set(caseMap{"outbox": []caseMap{entry}})
}

// delivered are the ids of the events in the topic; each may be there once.
func (c *caseRun) delivered() map[string]bool {
	c.t.Helper()
	ids := map[string]bool{}
	for _, r := range c.topic(c.settled(), c.eventTopic()) {
		id := r.Headers["id"]
		if ids[id] {
			c.t.Errorf("event %s was delivered twice", id)
		}
		ids[id] = true
	}
	return ids
}

// waitMarked waits until a condition counts no rows.
func (c *caseRun) waitNone(what, condition string) {
	c.t.Helper()
	harness.WaitFor(c.t, what, harness.DefaultTimeout, func() (bool, error) {
		return c.pg.Value("SELECT count(*) FROM outbox WHERE "+condition) == "0", nil
	})
}

const afterBad = "event_type = 'bad type'"

func TestADeliveredOutboxRowIsMarkedWhicheverColumnTellsIt(t *testing.T) {
	const columns = "event_id uuid NOT NULL DEFAULT gen_random_uuid(), event_type text, payload jsonb"
	for name, tt := range map[string]struct{ table, unmarked, marked string }{
		"published_at":       {"id bigserial PRIMARY KEY, published_at timestamptz, status text DEFAULT 'pending', " + columns, "published_at IS NULL", "published_at <= now() AND status = 'pending'"},
		"status as number":   {"id bigserial PRIMARY KEY, status smallint NOT NULL DEFAULT 0, " + columns, "status <> 1", "status = 1"},
		"status as text":     {"id bigserial PRIMARY KEY, status varchar(20) DEFAULT 'pending', " + columns, "status <> 'processed'", "status = 'processed'"},
		"status as an enum":  {"id bigserial PRIMARY KEY, status outbox_status DEFAULT 'pending', " + columns, "status <> 'processed'", "status = 'processed'"},
		"a key of two parts": {`region text DEFAULT 'e"u\', id bigserial, published_at timestamptz, PRIMARY KEY (region, id), ` + columns, "published_at IS NULL", "published_at IS NOT NULL"},
		"no key at all":      {"id bigserial, published_at timestamptz, " + columns, "published_at IS NULL", "published_at IS NOT NULL"},
	} {
		t.Run(name, func(t *testing.T) {
			c := afterNew(t, "CREATE TYPE outbox_status AS ENUM ('pending', 'processed'); CREATE TABLE outbox ("+tt.table+")", caseMap{"after": "mark"})
			c.start()
			c.pg.Exec(fmt.Sprintf("INSERT INTO outbox (event_type, payload) SELECT CASE WHEN g = 5 THEN 'bad type' ELSE '%s' END, '{}' FROM generate_series(1, 10) g", c.name))
			c.waitNone("9 rows to be marked", "("+tt.unmarked+") AND NOT "+afterBad)
			if n := len(c.delivered()); n != 9 {
				t.Errorf("%d events, want 9", n)
			}
			if got := c.pg.Value("SELECT count(*) FROM outbox WHERE " + tt.marked); got != "9" {
				t.Errorf("%s rows are marked, want 9", got)
			}
			if got := c.pg.Value("SELECT count(*) FROM outbox WHERE " + afterBad + " AND " + tt.unmarked); got != "1" {
				t.Error("the dead letter's row is marked")
			}
		})
	}
}

func TestADeliveredOutboxRowIsDeleted(t *testing.T) {
	c := afterNew(t, caseOutbox, caseMap{"after": "delete"})
	c.start()
	c.pg.Exec(c.insertEvent("a", 1) + c.insertEvent("a", 2) + strings.Replace(c.insertEvent("a", 3), "'"+c.name+"'", "'bad type'", 1))
	c.exec(c.session(), "BEGIN;"+c.insertEvent("a", 4)+"DELETE FROM outbox WHERE aggregate_seq = 4; COMMIT")
	c.waitNone("what was delivered to be gone", "NOT "+afterBad)
	if n := len(c.delivered()); n != 3 {
		t.Errorf("%d events, want 3", n)
	}
	if got := c.pg.Value("SELECT string_agg(aggregate_seq::text, ',') FROM outbox"); got != "3" {
		t.Errorf("the table has %s, want the dead letter's row alone", got)
	}
	c.stop()
}

// afterBacklogs are what an outbox holds before the first start: two rows to be sent and
// one that was, one of them a dead letter.
const afterBacklog = `INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload, published_at)
	SELECT gen_random_uuid(), 'old', g, CASE WHEN g %% 7 = 3 THEN 'bad type' ELSE '%s' END, '{}', CASE WHEN g %% 5 = 0 THEN timestamptz '2020-01-01' END
	  FROM generate_series(1, 3000) g`

// checkAfter checks that exactly the delivered rows are marked, or gone, and all of them
// once the instance has nothing left to do. old are the ids of rows that were marked before.
func (c *caseRun) checkAfter(after string, all map[string]bool) {
	c.t.Helper()
	var ids map[string]bool
	condition := "published_at > timestamptz '2020-01-01'"
	ids = c.delivered()
	state := func() (marked, unmarked map[string]bool) {
		marked, unmarked = map[string]bool{}, map[string]bool{}
		for _, row := range c.pg.Query("SELECT event_id::text, coalesce(" + condition + ", false)::text FROM outbox") {
			if row[1] == "true" {
				marked[row[0]] = true
			} else {
				unmarked[row[0]] = true
			}
		}
		return marked, unmarked
	}
	left := 0
	harness.WaitFor(c.t, "every delivered row to be dealt with", harness.DefaultTimeout, func() (bool, error) {
		_, unmarked := state()
		left = 0
		for id := range unmarked {
			if ids[id] && (after == "delete" || c.pg.Value("SELECT coalesce(max(published_at) = timestamptz '2020-01-01', false) FROM outbox WHERE event_id = $1", id) != "t") {
				left++
			}
		}
		return left == 0, nil
	})
	marked, unmarked := state()
	for id := range marked {
		if !ids[id] {
			c.t.Errorf("row %s is marked and was not delivered", id)
		}
	}
	if after == "delete" {
		for id := range all {
			if !ids[id] && !unmarked[id] && !marked[id] {
				c.t.Errorf("row %s is gone and was not delivered", id)
			}
		}
	}
}

// waitRead waits until a checkpoint has the outbox as read.
func (c *caseRun) waitRead() {
	c.t.Helper()
	store := c.store()
	harness.WaitFor(c.t, "the backlog to be read", 2*harness.DefaultTimeout, func() (bool, error) {
		cp, found, err := store.Peek(c.t.Context())
		done := found && len(cp.Tables) > 0
		for _, p := range cp.Tables {
			done = done && p.State == checkpoint.TableDone
		}
		return done, err
	})
}

// outboxIDs are the events of the table as it is.
func (c *caseRun) outboxIDs() map[string]bool {
	ids := map[string]bool{}
	for _, row := range c.pg.Query("SELECT event_id::text FROM outbox") {
		ids[row[0]] = true
	}
	return ids
}

// afterWriter inserts events, of which every ninth is a dead letter, until ctx ends, and
// gives the ids of those that cannot be delivered.
func (c *caseRun) afterWriter(ctx context.Context, writer string) (dead []string, err error) {
	conn, err := pgx.Connect(context.WithoutCancel(ctx), c.pg.DSN())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	for seq := 1; ctx.Err() == nil; seq++ {
		kind := c.name
		if seq%9 == 4 {
			kind = "bad type"
		}
		n := 1 + seq%13
		rows, err := conn.Query(context.WithoutCancel(ctx), `INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload)
			SELECT gen_random_uuid(), $1, $2 * 100 + g, $3, '{}' FROM generate_series(1, $4) g, pg_sleep(0.01) RETURNING event_id::text`, writer, seq, kind, n)
		if err != nil {
			return nil, err
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return nil, err
		}
		if kind != c.name {
			dead = append(dead, ids...)
		}
	}
	return dead, nil
}

// TestKilledBetweenDeliveryAndMark kills the process at each step of a delivery and of the
// marks, and at random moments, while the application inserts and a backlog is read.
func TestKilledBetweenDeliveryAndMark(t *testing.T) {
	for _, after := range []string{"mark", "delete"} {
		for _, backlog := range []string{"pending", "all", "none"} {
			t.Run(after+" "+backlog, func(t *testing.T) {
				c := afterNew(t, caseOutbox, caseMap{"after": after, "snapshot": backlog})
				c.set(caseMap{"snapshot": caseMap{"mode": "initial", "chunk-rows": 500}, "batch": caseMap{"max-records": 300}})
				c.pg.Exec(fmt.Sprintf(afterBacklog, c.name))
				all := c.outboxIDs()
				ctx, end := context.WithCancel(t.Context())
				type written struct {
					dead []string
					err  error
				}
				done := make(chan written, 2)
				for w := range 2 {
					go func() {
						dead, err := c.afterWriter(ctx, fmt.Sprintf("w%d", w))
						done <- written{dead, err}
					}()
				}
				steps := []killpoint.Step{killpoint.BatchFilled, killpoint.RecordsAcked, killpoint.CheckpointAcked, killpoint.Committed, killpoint.Confirmed, killpoint.Marking, killpoint.Marked}
				rand.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
				for i, step := range steps {
					c.launch(killpoint.Env + "=" + killpoint.Spec(step, 1+i%3+i/3))
					c.killed()
				}
				for range 3 {
					c.start()
					before := c.pg.Value("SELECT count(*) FROM outbox")
					c.pg.WaitValue("t", "SELECT count(*) <> $1::int8 FROM outbox", before)
					c.proc.Kill()
				}
				c.start()
				end()
				for range 2 {
					w := <-done
					if w.err != nil {
						t.Fatal(w.err)
					}
					for _, id := range w.dead {
						all[id] = true
					}
				}
				if backlog != "none" {
					c.waitRead()
				}
				c.checkAfter(after, all)
				ids := c.delivered()
				old := 0
				for _, r := range c.topic(c.log(), c.eventTopic()) {
					if string(r.Key) == "old" {
						old++
					}
				}
				// Of 3000 every fifth was marked, and every seventh cannot be routed.
				if want := map[string]int{"pending": 2057, "all": 2571, "none": 0}[backlog]; old != want {
					t.Errorf("%d rows of the backlog were delivered, want %d", old, want)
				}
				if len(ids) < 100 {
					t.Errorf("only %d events", len(ids))
				}
				c.stop()
				c.waitConfirmed(c.checkpoint().Position.LSN)
			})
		}
	}
}

// Nothing may be confirmed beyond a row that is not marked: a trigger keeps one from it.
func TestARowThatCannotBeMarkedHoldsTheConfirmAndNotTheOthers(t *testing.T) {
	c := afterNew(t, caseOutbox, caseMap{"after": "mark"}).set(caseMap{"admin": caseMap{"listen": "127.0.0.1:0"}})
	c.pg.Exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON outbox FOR EACH ROW WHEN (old.aggregate_seq = 5) EXECUTE FUNCTION refuse()`)
	c.start()
	c.pg.Exec("BEGIN;" + strings.Join([]string{c.insertEvent("a", 1), c.insertEvent("a", 2), c.insertEvent("a", 3), c.insertEvent("a", 4)}, "") + "COMMIT")
	var sql strings.Builder
	for seq := 5; seq <= 40; seq++ {
		sql.WriteString(c.insertEvent("a", seq))
	}
	c.pg.Exec(sql.String())
	c.waitNone("all others to be marked", "published_at IS NULL AND aggregate_seq <> 5")
	c.proc.WaitLog(harness.DefaultTimeout, harness.Message("outbox rows cannot be marked"))
	if code, body := c.get(c.admin() + "/readyz"); code == 200 || !strings.Contains(body, "not this one") {
		t.Errorf("/readyz says %d %s", code, body)
	}
	if n := len(c.delivered()); n != 40 {
		t.Errorf("%d events, want 40", n)
	}
	var bad checkpoint.LSN // where the row's transaction commits
	for _, r := range c.topic(c.log(), c.eventTopic()) {
		if r.Headers["aggregate_seq"] == "5" {
			var err error
			if bad, _, _, err = checkpoint.ParseHeader(r.Headers["position"]); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := c.confirmed(); bad == 0 || got > bad {
		t.Errorf("confirmed %s, beyond a row at %s that is not marked", got, bad)
	}
	end := c.walEnd()
	c.proc.Kill()
	c.start()
	c.pg.Exec("DROP TRIGGER refuse ON outbox")
	c.waitNone("the last one to be marked", "published_at IS NULL")
	c.waitConfirmed(end)
	if n := len(c.delivered()); n != 40 {
		t.Errorf("%d events, want 40", n)
	}
}

// The application's locks are waited for in the marks' own time, and never to a deadlock.
func TestMarksGiveWayToTheApplication(t *testing.T) {
	c := afterNew(t, caseOutbox, caseMap{"after": "delete"})
	c.start()
	c.stop() // an open transaction would keep a slot from being made
	c.pg.Exec(c.insertEvent("a", 1) + c.insertEvent("a", 2))
	app := c.session()
	c.exec(app, "BEGIN; SELECT FROM outbox WHERE aggregate_seq = 1 FOR UPDATE")
	c.start()
	c.waitNone("the row that is not locked to be gone", "aggregate_seq = 2")
	c.pg.Exec(c.insertEvent("a", 3))
	c.waitNone("another one to be gone", "aggregate_seq = 3")
	c.exec(app, "UPDATE outbox SET payload = '{}'; COMMIT")
	c.waitNone("the last one to be gone", "true")
	if n := len(c.delivered()); n != 3 {
		t.Errorf("%d events, want 3", n)
	}
}

func TestMarksThatAreNotAllowedAreRefusedAtTheStart(t *testing.T) {
	const role = "walrelay_after"
	for name, tt := range map[string]struct {
		after, schema string
		want          []string
	}{
		"no right to update": {"mark", caseOutbox + "; GRANT SELECT, DELETE ON outbox TO %[1]s", []string{`GRANT SELECT, UPDATE ("published_at") ON "public"."outbox" TO %[1]s`}},
		"no right to delete": {"delete", caseOutbox + "; GRANT SELECT, UPDATE ON outbox TO %[1]s", []string{`GRANT SELECT, DELETE ON "public"."outbox" TO %[1]s`}},
		"no column to mark":  {"mark", "CREATE TABLE outbox (event_id uuid PRIMARY KEY, event_type text, payload json); GRANT ALL ON outbox TO %[1]s", []string{"no column to mark", "ADD COLUMN published_at timestamptz"}},
		"a time that rows have from the start": {"mark", "CREATE TABLE outbox (event_id uuid PRIMARY KEY, event_type text, payload json, published_at timestamptz NOT NULL DEFAULT now()); GRANT ALL ON outbox TO %[1]s",
			[]string{"no column to mark", "NULL in a new row"}},
		"no such label": {"mark", "CREATE TYPE s AS ENUM ('new', 'done'); CREATE TABLE outbox (event_id uuid PRIMARY KEY, event_type text, payload json, status s); GRANT ALL ON outbox TO %[1]s", []string{"processed"}},
		"a policy":      {"delete", caseOutbox + "; ALTER TABLE outbox ENABLE ROW LEVEL SECURITY; GRANT ALL ON outbox TO %[1]s", []string{"row-level security", "BYPASSRLS"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFaultBed(t, harness.Postgres(t), harness.Kafka(t))
			own := role + "_" + strings.ToLower(b.pg.Name)
			b.pg.Exec(fmt.Sprintf("CREATE ROLE %s LOGIN REPLICATION PASSWORD 'x'", own))
			t.Cleanup(func() { b.pg.Exec("DROP OWNED BY " + own + "; DROP ROLE " + own) })
			b.pg.Exec(fmt.Sprintf(tt.schema, own))
			b.pg.Exec("CREATE PUBLICATION p FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root)")
			dsn, err := url.Parse(b.pg.DSN())
			if err != nil {
				t.Fatal(err)
			}
			dsn.User = url.UserPassword(own, "x")
			b.set("source.dsn", dsn.String())
			b.set("source.publication-mode", "existing")
			b.set("source.publication", "p")
			b.set("source.tables", []string{"public.nothing"})
			b.set("outbox", []map[string]any{{"table": "public.outbox", "after": tt.after}})
			for i := range tt.want {
				tt.want[i] = strings.ReplaceAll(tt.want[i], "%[1]s", own)
			}
			b.refused(b.start(), tt.want...)
		})
	}
}

// Rows that were delivered while they were to be kept are not touched when that changes,
// nor are those of a transaction that was cut in between.
func TestRowsDeliveredBeforeTheyWereToBeMarkedAreLeftAlone(t *testing.T) {
	c := afterNew(t, caseOutbox, caseMap{"after": "keep"})
	c.start()
	c.pg.Exec(c.insertEvent("a", 1))
	c.fence()
	c.proc.Kill()
	c.setAfter(caseMap{"after": "delete"})
	c.start()
	c.pg.Exec(c.insertEvent("a", 2))
	c.waitNone("the second row to be gone", "aggregate_seq = 2")
	if got := c.pg.Value("SELECT count(*) FROM outbox"); got != "1" {
		t.Errorf("%s rows are left, want the first", got)
	}
	c.stop()
}

// Many dead letters behind a row that is not marked must not make a checkpoint without
// bound, and none of them may be marked after a restart.
func TestDeadLettersAmongMarksAreRememberedWithinBounds(t *testing.T) {
	c := afterNew(t, caseOutbox, caseMap{"after": "mark"})
	c.start()
	c.stop()
	c.pg.Exec(fmt.Sprintf(`INSERT INTO outbox (event_id, aggregate_id, aggregate_seq, event_type, payload)
		SELECT gen_random_uuid(), 'a', g, CASE WHEN g %% 50 = 1 THEN '%s' ELSE 'bad type' END, '{}' FROM generate_series(1, 10000) g`, c.name))
	c.launch(killpoint.Env + "=" + killpoint.Spec(killpoint.Marked, 3))
	c.killed()
	for _, r := range c.kafka.Committed(t, "_walrelay."+c.name) {
		if len(r.Value) > 200_000 {
			t.Errorf("a record of the checkpoint topic has %d bytes", len(r.Value))
		}
	}
	c.start()
	c.waitNone("200 rows to be marked", "published_at IS NULL AND NOT "+afterBad)
	if got := c.pg.Value("SELECT count(*) FROM outbox WHERE published_at IS NOT NULL"); got != "200" {
		t.Errorf("%s rows are marked, want 200", got)
	}
	if ids := c.delivered(); len(ids) != 200 {
		t.Errorf("%d events, want 200", len(ids))
	}
	c.stop()
}

// A transaction's commit is in the stream before its rows can be seen; a mark that comes
// too early would take a row for one that is gone.
func TestARowIsMarkedOnlyWhenItCanBeSeen(t *testing.T) {
	pg := harness.Postgres(t, harness.Dedicated())
	t.Parallel()
	c := caseOn(t, pg, harness.Kafka(t))
	pg.Exec(caseOutbox)
	c.setAfter(caseMap{"after": "mark"})
	c.start()
	// Commits wait for a standby that is not there, and are invisible meanwhile.
	pg.Exec("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
	pg.Exec("SELECT pg_reload_conf()")
	pg.WaitValue("nobody", "SHOW synchronous_standby_names")
	app := c.session()
	ended := make(chan error, 1)
	go func() {
		_, err := app.Exec(context.WithoutCancel(t.Context()), c.insertEvent("a", 1))
		ended <- err
	}()
	c.kafka.WaitCommitted(t, c.eventTopic(), 1)
	if got := pg.Value("SELECT count(*) FROM outbox"); got != "0" {
		t.Fatalf("%s rows can be seen", got)
	}
	pg.Exec("ALTER SYSTEM RESET synchronous_standby_names")
	pg.Exec("SELECT pg_reload_conf()")
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	pg.WaitValue("1", "SELECT count(*) FROM outbox WHERE published_at IS NOT NULL")
	c.stop()
}

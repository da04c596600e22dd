package replication

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/harness"
)

// TestScripts runs SQL on the oldest and the newest server and compares all that the
// stream then yields: once while it happens, and once from a second slot when all is over
// and the server can look up how each transaction ended, of which 18 makes use.
func TestScripts(t *testing.T) {
	const toasted = `create table t (id int primary key, v text, n int);
		alter table t alter v set storage external;
		insert into t values (1, repeat('x', 9000), 1);`
	for _, tt := range []struct {
		name, setup, sql string
		want             []string
	}{
		{
			name:  "insert, update, change of the key, delete",
			setup: `create table t (id int primary key, v text)`,
			sql: `insert into t values (1, 'a'), (2, null); update t set v = 'b' where id = 1;
				update t set id = 3 where id = 2; delete from t where id = 1`,
			want: []string{
				"begin", "0 c public.t new(id=1 v=a)", "1 c public.t new(id=2 v=null)", "2 u public.t new(id=1 v=b)",
				"3 u public.t key(id=2 v=null) new(id=3 v=null)", "4 d public.t key(id=1 v=null)", "commit",
			},
		},
		{
			name:  "keys swapped inside one transaction",
			setup: `create table t (id int primary key, v text); insert into t values (900, 'b')`,
			sql:   `update t set id = 901 where id = 900; update t set id = 900 where id = 901`,
			want: []string{
				"begin", "0 u public.t key(id=900 v=null) new(id=901 v=b)", "1 u public.t key(id=901 v=null) new(id=900 v=b)", "commit",
			},
		},
		{
			name:  "an unchanged TOAST value is not sent",
			setup: toasted,
			sql:   `update t set n = 2; update t set id = 5; delete from t`,
			want: []string{
				"begin", "0 u public.t new(id=1 v=unchanged n=2)", "1 u public.t key(id=1 v=null n=null) new(id=5 v=unchanged n=2)",
				"2 d public.t key(id=5 v=null n=null)", "commit",
			},
		},
		{
			name:  "under FULL the old row comes whole, TOAST values included",
			setup: toasted + `alter table t replica identity full`,
			sql:   `update t set n = 2; delete from t`,
			want: []string{
				"begin", "0 u public.t old(id=1 v=<9000 bytes> n=1) new(id=1 v=unchanged n=2)",
				"1 d public.t old(id=1 v=<9000 bytes> n=2)", "commit",
			},
		},
		{
			name:  "an index as replica identity",
			setup: `create table t (id int primary key, code text not null unique, v text); alter table t replica identity using index t_code_key`,
			sql:   `insert into t values (1, 'a', 'x'); update t set id = 2; update t set code = 'b'; delete from t`,
			want: []string{
				"begin", "0 c public.t new(id=1 code=a v=x)", "1 u public.t new(id=2 code=a v=x)",
				"2 u public.t key(id=null code=a v=null) new(id=2 code=b v=x)", "3 d public.t key(id=null code=b v=null)", "commit",
			},
		},
		{
			name:  "one truncate of two tables",
			setup: `create table a (id int primary key); create table b (id int primary key)`,
			sql:   `truncate a, b; insert into a values (1)`,
			want:  []string{"begin", "0 t public.a", "1 t public.b", "2 c public.a new(id=1)", "commit"},
		},
		{
			name:  "messages, transactional ones with their transaction and others at once",
			setup: `create table t (id int primary key)`,
			sql: `begin; select pg_logical_emit_message(false, 'nt', 'one'); insert into t values (1);
				select pg_logical_emit_message(true, 'p', 'lost'); rollback;
				select pg_logical_emit_message(false, 'nt', 'two');
				begin; insert into t values (2); select pg_logical_emit_message(true, 'p', 'kept'); commit`,
			want: []string{
				`- m "nt" "one"`, `- m "nt" "two"`, "begin", "0 c public.t new(id=2)", `1 m "p" "kept"`, "commit",
			},
		},
		{
			name:  "a table that changes its shape between two rows of one transaction",
			setup: `create table t (id int primary key, v text)`,
			sql: `insert into t values (1, 'a'); alter table t add w int default 7; insert into t values (2, 'b');
				alter table t drop v; insert into t values (3, 8); alter table t rename to u; insert into u values (4, 9)`,
			want: []string{
				"begin", "0 c public.t new(id=1 v=a)", "1 c public.t new(id=2 v=b w=7)", "2 c public.t new(id=3 w=8)",
				"3 c public.u new(id=4 w=9)", "commit",
			},
		},
		{
			name: "values are the text of our session, whatever the database sets",
			setup: `create table t (id int primary key, at timestamptz, gap interval, raw bytea, f float8, n numeric, s text);
				do $$ begin
					execute format('alter database %I set timezone = ''Asia/Kolkata''', current_database());
					execute format('alter database %I set datestyle = ''German, DMY''', current_database());
					execute format('alter database %I set intervalstyle = ''iso_8601''', current_database());
					execute format('alter database %I set bytea_output = ''escape''', current_database());
					execute format('alter database %I set extra_float_digits = -3', current_database());
				end $$`,
			sql: `insert into t values (1, '2026-01-02 03:04:05.678901+02', '1 day 2 hours', '\x00ff', 0.1::float8 + 0.2::float8, 12.50, 'ü')`,
			want: []string{
				"begin", `0 c public.t new(id=1 at=2026-01-02 01:04:05.678901+00 gap=1 day 02:00:00 raw=\x00ff f=0.30000000000000004 n=12.50 s=ü)`, "commit",
			},
		},
		{
			name:  "a transaction that changed nothing published, and one that was rolled back, leave no change",
			setup: `create table t (id int primary key); create unlogged table u (id int)`,
			sql:   `begin; insert into t values (1); rollback; begin; insert into t values (2); commit`,
			want:  []string{"begin", "0 c public.t new(id=2)", "commit"},
		},
		{
			name:  "a large transaction that is rolled back is never seen",
			setup: `create table big (id int primary key, v text); create table small (id int primary key)`,
			sql: `begin; insert into big select g, repeat('x', 200) from generate_series(1, 5000) g; savepoint s;
				insert into big select g, repeat('y', 200) from generate_series(5001, 10000) g; rollback to s;
				insert into big values (10001, 'z'); rollback; insert into small values (1)`,
			want: []string{"begin", "0 c public.small new(id=1)", "commit"},
		},
		{
			name:  "subtransactions of many changes that fail in the middle of others",
			setup: `create table t (id int primary key, v text)`,
			sql: `do $$ begin for i in 1..30 loop begin insert into t select i * 1000 + g, repeat('x', 200) from generate_series(1, 500) g;
				if i % 30 <> 0 then raise exception 'x'; end if; exception when others then null; end; end loop; end $$`,
			want: oneTransaction("t", func(yield func(string) bool) {
				for i := 1; i <= 500; i++ {
					if !yield(fmt.Sprintf("id=%d v=<200 bytes>", 30000+i)) {
						return
					}
				}
			}),
		},
		{
			name:  "subtransactions that fail are not sent, and their aborts do no harm",
			setup: `create table t (id int primary key)`,
			sql: `do $$ begin for i in 1..300 loop begin insert into t values (i); if i % 3 = 0 then raise exception 'x'; end if;
				exception when others then null; end; end loop; end $$`,
			want: oneTransaction("t", func(yield func(string) bool) {
				for i := 1; i <= 300; i++ {
					if i%3 != 0 && !yield(fmt.Sprintf("id=%d", i)) {
						return
					}
				}
			}),
		},
		{
			name:  "a savepoint rolled back inside a transaction that spills to disk",
			setup: `create table t (id int primary key, v text)`,
			sql: `begin; insert into t select g, 'keep' from generate_series(1, 5000) g; savepoint s;
				insert into t select g, 'drop' from generate_series(5001, 10000) g; rollback to s;
				insert into t select g, 'tail' from generate_series(10001, 10010) g; commit`,
			want: oneTransaction("t", func(yield func(string) bool) {
				for i := 1; i <= 10010; i++ {
					switch {
					case i <= 5000 && !yield(fmt.Sprintf("id=%d v=keep", i)), i > 10000 && !yield(fmt.Sprintf("id=%d v=tail", i)):
						return
					}
				}
			}),
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onOldestAndNewest(t, func(t *testing.T, major int) {
				pg := mustSource(t, tt.setup, harness.Major(major))
				late := pg.Name + "_late"
				pg.Exec(`select pg_create_logical_replication_slot($1, 'pgoutput')`, late)
				s := mustStart(t, pg, StreamOptions{})
				pg.Exec(tt.sql)
				endTrace(pg)
				if diff := cmp.Diff(tt.want, trace(t, s)); diff != "" {
					t.Errorf("events as they happen (-want +got):\n%s", diff)
				}
				mustClose(t, s)
				s = mustStart(t, pg, StreamOptions{Slot: late})
				if diff := cmp.Diff(tt.want, trace(t, s)); diff != "" {
					t.Errorf("events afterwards (-want +got):\n%s", diff)
				}
				mustClose(t, s)
			})
		})
	}
}

// oneTransaction is the trace of a transaction of inserts.
func oneTransaction(table string, rows func(yield func(string) bool)) []string {
	want := []string{"begin"}
	for row := range rows {
		want = append(want, fmt.Sprintf("%d c public.%s new(%s)", len(want)-1, table, row))
	}
	return append(want, "commit")
}

// TestAllRowsOfOneCopyShareAnLSN: what tells them apart is seq.
func TestAllRowsOfOneCopyShareAnLSN(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := mustSource(t, `create table t (id int primary key)`, harness.Major(major))
		s := mustStart(t, pg, StreamOptions{})
		var rows strings.Builder
		for i := range 20 {
			fmt.Fprintln(&rows, i+1)
		}
		if _, err := mustConnect(t, pg.DSN()).PgConn().CopyFrom(t.Context(), strings.NewReader(rows.String()), `copy t from stdin`); err != nil {
			t.Fatal(err)
		}
		var (
			rule order
			lsn  checkpoint.LSN
			seen int
		)
		for {
			ev := mustNext(t, s)
			rule.check(t, ev)
			if ev.Kind == KindCommit {
				break
			}
			if ev.Kind != KindChange {
				continue
			}
			if lsn == 0 {
				lsn = ev.Change.LSN
			}
			seen++
			if want := fmt.Sprintf("%d c public.t new(id=%d)", seen-1, seen); describe(ev) != want || ev.Change.LSN != lsn {
				t.Fatalf("%s at %s, want %s at %s", describe(ev), ev.Change.LSN, want, lsn)
			}
		}
		if seen != 20 {
			t.Errorf("%d rows, want 20", seen)
		}
	})
}

// TestALongTransactionComesWhenItCommits: its changes are older than
// what was sent before them, its commit is not.
func TestALongTransactionComesWhenItCommits(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := mustSource(t, `create table t (id int primary key, v text)`, harness.Major(major))
		s := mustStart(t, pg, StreamOptions{})
		long := mustConnect(t, pg.DSN())
		mustExec(t, long, `begin`, `insert into t values (1, 'A')`)
		for i := range 3 {
			pg.Exec(`insert into t values ($1, 'B')`, 1001+i)
		}
		var (
			rule   order
			lowest checkpoint.LSN
			got    []string
		)
		for len(got) < 4 {
			ev := mustNext(t, s)
			rule.check(t, ev)
			if ev.Kind != KindChange {
				continue
			}
			got = append(got, describe(ev))
			switch len(got) {
			case 1:
				lowest = ev.Change.LSN
			case 3:
				mustExec(t, long, `commit`)
			case 4:
				if ev.Change.LSN >= lowest {
					t.Errorf("the late commit's change has LSN %s, want one below %s", ev.Change.LSN, lowest)
				}
			}
		}
		want := []string{
			"0 c public.t new(id=1001 v=B)", "0 c public.t new(id=1002 v=B)", "0 c public.t new(id=1003 v=B)", "0 c public.t new(id=1 v=A)",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("changes (-want +got):\n%s", diff)
		}
	})
}

// TestTransactionsCarryTheServersNumbers compares xid, commit time and positions with what
// the server says of its own transaction.
func TestTransactionsCarryTheServersNumbers(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := mustSource(t, `create table t (id int primary key, v varchar(10))`, harness.Major(major))
		near := mustXID(t, pg.Value(`select pg_snapshot_xmax(pg_current_snapshot())`), 5)
		s := mustStart(t, pg, StreamOptions{Near: near})
		before := pg.Value(`select clock_timestamp() at time zone 'UTC'`)
		xid := pg.Value(`insert into t values (1, 'a') returning pg_current_xact_id()`)
		after := pg.Value(`select clock_timestamp() at time zone 'UTC'`)
		if ev := nextOf(t, s, KindBegin); ev.Txn.XID.String() != mustXID(t, xid, 5).String() {
			t.Errorf("xid %s, want %s in the epoch of near", ev.Txn.XID, xid)
		}
		rel := nextOf(t, s, KindChange).Change.Relation
		if oid := fmt.Sprint(rel.OID); oid != pg.Value(`select 't'::regclass::oid`) {
			t.Errorf("relation %s", oid)
		}
		want := []Column{{Name: "id", TypeOID: 23, TypeMod: -1, Identity: true}, {Name: "v", TypeOID: 1043, TypeMod: 14}}
		if diff := cmp.Diff(want, rel.Columns); diff != "" {
			t.Errorf("columns (-want +got):\n%s", diff)
		}
		const layout = "2006-01-02 15:04:05.999999"
		txn := nextOf(t, s, KindCommit).Txn
		if at := txn.CommitTime.Format(layout); at < before || at > after {
			t.Errorf("commit time %s, want between %s and %s", at, before, after)
		}
		if flushed := mustLSN(t, pg.Value(`select pg_current_wal_flush_lsn()`)); txn.EndLSN > flushed {
			t.Errorf("end %s behind the WAL's end %s", txn.EndLSN, flushed)
		}
	})
}

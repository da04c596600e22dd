package replication

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/internal/harness"
)

func TestReadWALMeasuresTheSlotsLag(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		pg := mustSource(t, `create table t (v text)`, harness.Major(major))
		conn := mustConnect(t, pg.DSN())
		pg.Exec(`insert into t select repeat('x', 1000) from generate_series(1, 1000)`)
		const flushed = `select pg_current_wal_flush_lsn()`
		before := mustLSN(t, pg.Value(flushed))
		w, err := ReadWAL(t.Context(), conn, pg.Name)
		if err != nil {
			t.Fatal(err)
		}
		if after := mustLSN(t, pg.Value(flushed)); w.End < before || w.End > after {
			t.Errorf("WAL ends at %s, want between %s and %s", w.End, before, after)
		}
		restart := mustLSN(t, pg.Value(`select restart_lsn from pg_replication_slots where slot_name = $1`, pg.Name))
		if want := int64(w.End - restart); w.Retained != want || want < 1000*1000 {
			t.Errorf("the slot retains %d bytes, want %d, a megabyte at least", w.Retained, want)
		}
		if w, err := ReadWAL(t.Context(), conn, "nowhere"); err != nil || w.Retained != 0 || w.End < before {
			t.Errorf("without a slot: %+v, %v", w, err)
		}
	})
}

func TestTextRowsGiveThePostgresText(t *testing.T) {
	onOldestAndNewest(t, func(t *testing.T, major int) {
		conn := mustConnect(t, harness.Postgres(t, append(testSettings(), harness.Major(major))...).DSN())
		for _, tt := range []struct {
			name, sql string
			want      []string // a row per line, null as the harness has it
			fails     string
		}{
			{"texts, nulls and empty texts apart", `select 1, null, '', true, '{a,NULL}'::text[], '\x00ff'::bytea, '2026-01-02 03:04:05+02'::timestamptz`, []string{`1|<null>||t|{a,NULL}|\x00ff|2026-01-02 01:04:05+00`}, ""},
			{"several rows in their order", `select g, g * 10 from generate_series(1, 3) g`, []string{"1|10", "2|20", "3|30"}, ""},
			{"no row", `select 1 where false`, nil, ""},
			{"an error of the server", `select 1/0`, nil, "division by zero"},
			{"an error behind the first row", `select 1/(g-2) from generate_series(1, 3) g`, nil, "division by zero"},
			{"two statements", `select 1; select 2`, nil, "2 results, want 1"},
		} {
			rows, err := TextRows(t.Context(), conn, tt.sql)
			if tt.fails != "" {
				if err == nil || !strings.Contains(err.Error(), tt.fails) {
					t.Errorf("%s: error %v, want %s", tt.name, err, tt.fails)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s: %v", tt.name, err)
			}
			var got []string
			for _, row := range rows {
				cells := make([]string, len(row))
				for i, cell := range row {
					if cells[i] = string(cell); cell == nil {
						cells[i] = harness.Null
					}
				}
				got = append(got, strings.Join(cells, "|"))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tt.name, diff)
			}
		}
	})
}

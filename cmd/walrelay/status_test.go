package main

import (
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/internal/config"
	"github.com/walrelay/walrelay/internal/phase"
	"github.com/walrelay/walrelay/internal/polling"
	"github.com/walrelay/walrelay/internal/relay"
)

func TestTheStatusFitsOneScreen(t *testing.T) {
	now := time.Date(2026, 12, 1, 9, 0, 0, 0, time.UTC)
	oldest, left := now.Add(-6*time.Hour), 90.0
	for _, tt := range []struct {
		name string
		s    shownStatus
		want []string
	}{
		{"behind, and reading tables", shownStatus{Status: relay.Status{
			Name: "shop", Phase: phase.Streaming, Since: now.Add(-3 * time.Hour), Slot: "walrelay_shop", Position: "0/1A2B3C8", Confirmed: "0/1A2B300",
			LagBytes: 5 << 20, LagSeconds: 7.25, CatchUp: relay.Seconds(math.Inf(1)), Consumed: 1 << 20, Produced: 1536 << 10, RecordRate: 1234.4,
			RetainedWAL: 6 << 20, Transactions: 12, Records: 34,
			Replay: &relay.ReplayStatus{Slot: "walrelay_shop_anchor", OldestLSN: "0/16B3748", OldestTime: &oldest, Retained: 1 << 30},
			Snapshot: &relay.SnapshotStatus{Done: 1, Total: 3, Rows: 700, Estimate: 2000, Rate: 99.6, Left: &left, Tables: map[string]relay.TableStatus{
				"public.a": {State: "done", Rows: 100, Estimate: 100}, "public.b": {State: "reading", Rows: 600, Estimate: 1900}, "public.c": {State: "waiting"},
			}},
			WaitingFor: []string{"xid 771 of psql"}, Problems: []string{"Kafka has not taken a batch for 7s"}, Warnings: []string{"table public.k has no key"},
		}}, []string{
			"shop         streaming for 3.0 h",
			"lag          5 MiB, 7.2 s; caught up: never at these rates",
			"rates        1.5 MiB/s of WAL written, 1 MiB/s delivered, 1234 records/s",
			"position     0/1A2B3C8 in Kafka, 0/1A2B300 confirmed to PostgreSQL",
			"delivered    34 records, 12 transactions since the start",
			"slot         walrelay_shop keeps 6 MiB of WAL",
			"replay       back to 0/16B3748 (2026-12-01T03:00:00Z); walrelay_shop_anchor keeps 1 GiB of WAL",
			"snapshot     1 of 3 tables read, 700 of about 2000 rows, 100 rows/s, 90 s left",
			"             public.b: reading, 600 of about 1900 rows",
			"             public.c: waiting, 0 of about 0 rows",
			"waiting for  xid 771 of psql",
			"problem      Kafka has not taken a batch for 7s",
			"warning      table public.k has no key",
		}},
		{"without a connection", shownStatus{Status: relay.Status{Name: "shop", Phase: phase.Retrying, Since: now.Add(-8 * time.Second), LagSeconds: 9, CatchUp: relay.Seconds(math.Inf(1))}}, []string{
			"shop       retrying for 8.0 s",
			"lag        not known: nothing is delivered at the moment, and what is committed waits, for 9.0 s at the most",
			"delivered  0 records, 0 transactions since the start",
		}},
		{"behind another instance", shownStatus{Status: relay.Status{Name: "shop", Phase: phase.Standby}}, []string{
			"shop       standby",
			"lag        the instance that streams tells",
			"delivered  0 records, 0 transactions since the start",
		}},
		{"stopped", shownStatus{Status: relay.Status{Name: "shop", Phase: phase.Stopped, Slot: "walrelay_shop", Position: "0/10", Confirmed: "0/10", LagBytes: 2048, RetainedWAL: 4096}}, []string{
			"shop      stopped",
			"lag       2 KiB",
			"position  0/10 in Kafka, 0/10 confirmed to PostgreSQL",
			"slot      walrelay_shop keeps 4 KiB of WAL",
		}},
		{"polling", shownStatus{Mode: "polling", Status: relay.Status{Phase: "polling", Since: now.Add(-50 * time.Hour), LagSeconds: 3, Records: 5},
			Outbox: []polling.TableStatus{{Table: "public.outbox", Pending: 4, OldestSeconds: 3}}}, []string{
			"walrelay   polling for 2.1 days",
			"lag        3.0 s (oldest pending row)",
			"published  5 records since the start",
			"outbox     public.outbox: 4 rows pending, the oldest for 3.0 s",
		}},
	} {
		var out strings.Builder
		if err := tt.s.write(&out, now); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestWhereStatusAsks(t *testing.T) {
	for _, tt := range []struct{ listen, addr, want string }{
		{"127.0.0.1:8642", "", "http://127.0.0.1:8642"},
		{":9000", "", "http://127.0.0.1:9000"},
		{"0.0.0.0:9000", "", "http://127.0.0.1:9000"},
		{"[::]:9000", "", "http://127.0.0.1:9000"},
		{"[::1]:9000", "", "http://[::1]:9000"},
		{"walrelay.internal:9000", "", "http://walrelay.internal:9000"},
		{"", "db1:8642", "http://db1:8642"},
		{"", "https://db1/shop/", "https://db1/shop"},
		{"", "", ""},
		{"", "ftp://db1", ""},
		{"", "http://", ""},
	} {
		var c config.Config
		c.Admin.Listen = tt.listen
		got, err := statusFlags{addr: tt.addr}.address(c, true)
		if got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("listen %q, --addr %q: %q, %v; want %q", tt.listen, tt.addr, got, err, tt.want)
		}
	}
}

// Two connectors of one host may have the same address: the one that has it is not the other.
func TestStatusIsOfTheConnectorThatWasAskedFor(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"name":"shop","phase":"streaming"}`) // the test sees what arrives
	}))
	defer server.Close()
	file := filepath.Join(t.TempDir(), "walrelay.yaml")
	for _, tt := range []struct {
		name, addr string
		fails      bool
	}{{"shop", "", false}, {"billing", "", true}, {"billing", server.URL, false}} {
		text := "name: " + tt.name + "\nsource: {dsn: 'postgres://127.0.0.1:1/x', mode: polling}\nkafka: {brokers: ['127.0.0.1:1']}\n" +
			"outbox: [{table: public.outbox, after: mark}]\nadmin: {listen: '" + strings.TrimPrefix(server.URL, "http://") + "'}\n"
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, output := range []string{"text", "json"} {
			var out strings.Builder
			a := &app{env: os.LookupEnv, stdout: &out, stderr: io.Discard, configFile: file}
			f := statusFlags{addr: tt.addr}
			f.output.value = output
			err := a.status(t.Context(), f)
			if tt.fails && (err == nil || !strings.Contains(err.Error(), "connector shop answers, and not billing") || out.Len() > 0) ||
				!tt.fails && (err != nil || !strings.Contains(out.String(), "shop")) {
				t.Errorf("%s at %q as %s: %v, %q", tt.name, tt.addr, output, err, out.String())
			}
		}
	}
}

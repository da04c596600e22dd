package outbox

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// One table that cannot be counted keeps no other from it, and a table that is gone
// leaves no number behind.
func TestPendingRowsOfSeveralTables(t *testing.T) {
	s := newStand(t, schema+`; CREATE TABLE plain (event_id int, status int); INSERT INTO plain VALUES (1, 0), (2, NULL), (3, 1);
		CREATE TABLE old (event_id int, created_at timestamp); INSERT INTO old VALUES (1, now() - interval '90 s'), (2, now())`)
	broken := Table{Schema: "public", Name: "broken", OID: 1, Pending: "true"}
	tables := []Table{broken, byPublishedAt(s, Mark), {Schema: "public", Name: "plain", Pending: `"status" IS DISTINCT FROM 1`}, {Schema: "public", Name: "old", Created: "created_at"}}
	p := NewPending(prometheus.NewRegistry())
	misfit := errors.New("public.misfit does not fit")
	p.tables = func(context.Context, *pgx.Conn) ([]Table, error) { return tables, misfit }
	conn := s.connect()
	if err := p.look(t.Context(), conn); err == nil || !strings.Contains(err.Error(), "public.broken") || !errors.Is(err, misfit) {
		t.Errorf("error %v, want one about public.broken, and of public.misfit", err)
	}
	for name, want := range map[string]float64{"public.outbox": 10, "public.plain": 2, "public.old": 2} {
		if got := testutil.ToFloat64(p.rows.WithLabelValues(name)); got != want {
			t.Errorf("%s: %v rows, want %v", name, got, want)
		}
	}
	if age := testutil.ToFloat64(p.oldest.WithLabelValues("public.old")); age < 90 || age > 600 {
		t.Errorf("the oldest waits for %v s, want 90 and a little", age)
	}
	s.Exec("UPDATE outbox SET published_at = now(); DELETE FROM old")
	tables = append(tables[1:2:2], tables[3])
	if err := p.look(t.Context(), conn); !errors.Is(err, misfit) || testutil.CollectAndCount(p.rows) != 3 {
		t.Errorf("error %v, %d tables have a number; want them all, since one may be the misfit", err, testutil.CollectAndCount(p.rows))
	}
	misfit = nil
	if err := p.look(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	if n := testutil.CollectAndCount(p.rows); n != 2 {
		t.Errorf("%d tables have a number, want 2", n)
	}
	for _, name := range []string{"public.outbox", "public.old"} {
		if rows, age := testutil.ToFloat64(p.rows.WithLabelValues(name)), testutil.ToFloat64(p.oldest.WithLabelValues(name)); rows != 0 || age != 0 {
			t.Errorf("%s: %v rows, the oldest of %v s; want 0 and 0", name, rows, age)
		}
	}
}

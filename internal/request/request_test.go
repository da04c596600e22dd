package request

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/config"
	"github.com/walrelay/walrelay/replication"
)

func TestNewMakesARequestOfTheFlags(t *testing.T) {
	now := time.Date(2026, 12, 2, 10, 55, 12, 123456789, time.FixedZone("", 3600))
	r, err := New([]string{"orders", "My Schema.Order*Items", "public.orders", "a.b.c"}, "id < 5", false, now)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(r.ID, "20261202-095512.123-") {
		t.Errorf("id %q", r.ID)
	}
	want := checkpoint.Request{ID: r.ID, Tables: []string{"public.orders", "My Schema.Order*Items", "a.b.c"}, Where: "id < 5",
		At: time.Date(2026, 12, 2, 9, 55, 12, 123456000, time.UTC)}
	if diff := cmp.Diff(want, r); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	again, err := New([]string{"orders"}, "", true, now)
	if err != nil || again.ID == r.ID || !again.Replace {
		t.Errorf("%+v, %v: two requests of one second must differ", again, err)
	}
}

func TestNewSaysEverythingThatIsWrong(t *testing.T) {
	_, err := New([]string{"", ".a", "a.", "ok"}, "x", true, time.Now())
	var usage *UsageError
	if !errors.As(err, &usage) {
		t.Fatalf("%v, want a *UsageError", err)
	}
	for _, want := range []string{`--table ""`, `--table ".a"`, `--table "a."`, "--replace with --where"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in:\n%v", want, err)
		}
	}
	if _, err := New(nil, "", false, time.Now()); !errors.As(err, &usage) {
		t.Errorf("no table: %v", err)
	}
}

func TestOnlyCapturedTablesThatAreNoOutbox(t *testing.T) {
	o := &Options{Publications: replication.PlanOptions{
		Match: config.Globs{"public.*", "!public.log_*"}.Match, Outbox: []string{"public.outbox", "events.outbox"}}}
	if err := o.captured([]string{"public.orders", "public.a.b"}); err != nil {
		t.Error(err)
	}
	err := o.captured([]string{"public.orders", "public.outbox"})
	var usage *UsageError
	if !checkpoint.IsRefusal(err) || errors.As(err, &usage) {
		t.Errorf("an outbox table: %v, want a refusal", err)
	}
	if err := o.captured([]string{"events.outbox"}); !checkpoint.IsRefusal(err) {
		t.Errorf("an outbox table that source.tables does not name: %v, want a refusal", err)
	}
	err = o.captured([]string{"public.log_1", "public.outbox", "x.y"})
	if !errors.As(err, &usage) {
		t.Fatalf("%v, want a *UsageError", err)
	}
	for _, want := range []string{"public.log_1: source.tables does not capture it", "public.outbox is an outbox table", "x.y: source.tables"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in:\n%v", want, err)
		}
	}
}

func TestAnotherDatabaseIsRefused(t *testing.T) {
	cp := checkpoint.Source{SystemID: "7", Database: "shop", Timeline: 1}
	for _, tt := range []struct {
		system, database string
		fine             bool
	}{{"7", "shop", true}, {"", "shop", true}, {"8", "shop", false}, {"7", "shop2", false}, {"", "shop2", false}} {
		err := sameSource(cp, replication.Database{SystemID: tt.system, Name: tt.database}, "topic")
		if tt.fine != (err == nil) || err != nil && !checkpoint.IsRefusal(err) {
			t.Errorf("%s %s: %v", tt.system, tt.database, err)
		}
	}
}

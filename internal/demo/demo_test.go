package demo

import (
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/walrelay/walrelay/internal/pgserver"
)

// output is a buffer that may be written while it is read.
type output struct {
	mu sync.Mutex
	b  strings.Builder
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

func startLocal(ctx context.Context, dir string, _ func(string)) (Database, error) {
	return pgserver.Start(ctx, pgserver.Options{Dir: dir})
}

// options gives those of a quick demo, in a temporary directory of its own, whose
// emptiness at the end is checked.
func options(t *testing.T) (Options, *output) {
	t.Helper()
	// Not t.TempDir: PostgreSQL's user must pass through it.
	tmp, err := os.MkdirTemp("", "demo-test-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(tmp, 0o1777); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", tmp)
	t.Cleanup(func() {
		left, err := os.ReadDir(tmp)
		if err != nil || len(left) > 0 {
			t.Errorf("left behind: %v %v", left, err)
		}
		_ = os.RemoveAll(tmp)
	})
	out := &output{}
	return Options{
		StartDatabase: startLocal,
		Screen:        NewScreen(out, nil, false),
		Rate:          200,
		Seed:          1,
		Events:        150,
		Listen:        "127.0.0.1:0",
	}, out
}

func self(t *testing.T, mode string) []string {
	t.Helper()
	t.Setenv(fakeMode, mode)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return []string{exe}
}

func TestDemoEndsAfterSoManyRecordsAndProvesThem(t *testing.T) {
	o, out := options(t)
	o.Run = fake{}.run
	if err := Run(t.Context(), o); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := regexp.MustCompile(`(?m)^\d+ records: \d+ events, \d+ table changes, \d+ tombstones; each exactly once and in order; median \d+ ms, p99 .*
the shop committed \d+ changes and events, all of them arrived; \d+ of its transactions rolled back, nothing of them arrived$`)
	for _, re := range []*regexp.Regexp{want, regexp.MustCompile(`rolled back \(card declined\)`), regexp.MustCompile(`status new→paid`)} {
		if !re.MatchString(out.String()) {
			t.Errorf("no %s in\n%s", re, out)
		}
	}
	if strings.Contains(out.String(), "postgres:postgres@") {
		t.Error("the header shows a password")
	}
}

func TestDemoProvesThatAKilledConnectorLosesNothing(t *testing.T) {
	o, out := options(t)
	o.Connector = self(t, "good")
	o.KillEvery = 500 * time.Millisecond
	o.Events, o.Duration = 0, 3*time.Second
	if err := Run(t.Context(), o); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !regexp.MustCompile(`killed with SIGKILL (\d+ times|once); nothing was lost or doubled`).MatchString(out.String()) {
		t.Errorf("no kill in\n%s", out)
	}
}

func TestDemoFailsWhenARecordComesTwice(t *testing.T) {
	o, out := options(t)
	o.Connector = self(t, "double")
	err := Run(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "duplicate") {
		t.Fatalf("error %v, want one about duplicates\n%s", err, out)
	}
	if !strings.Contains(out.String(), "! DUPLICATE of position") {
		t.Errorf("duplicates are not shown:\n%s", out)
	}
}

func TestDemoFailsWhenARecordIsMissing(t *testing.T) {
	o, out := options(t)
	o.SettleBudget = 500 * time.Millisecond
	o.Run = fake{lose: true}.run
	err := Run(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "missing") {
		t.Fatalf("error %v, want one about missing records\n%s", err, out)
	}
	if !strings.Contains(out.String(), "! MISSING: ") {
		t.Errorf("what is missing is not named:\n%s", out)
	}
}

func TestDemoShowsTheLastLinesOfAConnectorThatEnds(t *testing.T) {
	o, _ := options(t)
	o.Connector = self(t, "crash")
	err := Run(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "no way") {
		t.Fatalf("error %v, want exit status and last line", err)
	}
	if strings.Count(err.Error(), "no way") != 1 {
		t.Errorf("said more than once: %v", err)
	}
}

func TestDemoCleansUpWhereAPartDoesNotStart(t *testing.T) {
	boom := errors.New("boom")
	tests := map[string]func(*Options){
		"PostgreSQL": func(o *Options) {
			o.StartDatabase = func(context.Context, string, func(string)) (Database, error) { return nil, boom }
		},
		"the connector, in process": func(o *Options) {
			o.Run = func(context.Context, string, []string, string) error { return boom }
		},
		"the connector, a program": func(o *Options) { o.Connector = []string{"/nonexistent"} },
	}
	for name, breakIt := range tests {
		t.Run(name, func(t *testing.T) {
			o, _ := options(t)
			o.Run = nil
			breakIt(&o)
			if err := Run(t.Context(), o); err == nil {
				t.Fatal("no error")
			}
		})
	}
}

func TestDemoEndsWithItsContext(t *testing.T) {
	o, out := options(t)
	ctx, cancel := context.WithCancel(t.Context())
	o.Events = 0
	o.Run = func(run context.Context, dsn string, brokers []string, listen string) error {
		time.AfterFunc(500*time.Millisecond, cancel)
		return fake{}.run(run, dsn, brokers, listen)
	}
	if err := Run(ctx, o); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestDemoEndsWithItsContextDuringTheStart(t *testing.T) {
	o, out := options(t)
	ctx, cancel := context.WithCancel(t.Context())
	o.Run = func(run context.Context, _ string, _ []string, _ string) error {
		cancel()
		<-run.Done()
		return nil
	}
	if err := Run(ctx, o); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

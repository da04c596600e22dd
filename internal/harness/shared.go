package harness

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

// shared is the only mutable package variable: servers that all tests of a binary use, which no test owns. Starting
// PostgreSQL takes seconds and a Kafka broker ten, too long for each test.
var shared = &registry{entries: map[string]*entry{}}

// registry starts each server once and closes all at the end.
type registry struct {
	mu      sync.Mutex
	entries map[string]*entry
}

type entry struct {
	once   sync.Once
	server io.Closer
	reaper *reaper
	err    error
}

// get returns the server of this key, which start makes for the first caller. dir tells what to remove should this
// process be killed.
func get[S io.Closer](r *registry, key string, start func() (S, error), dir func(S) string) (S, error) {
	r.mu.Lock()
	e := r.entries[key]
	if e == nil {
		e = &entry{}
		r.entries[key] = e
	}
	r.mu.Unlock()
	e.once.Do(func() {
		server, err := start()
		if err != nil {
			e.err = err
			return
		}
		e.server = server
		e.reaper, e.err = startReaper(dir(server))
	})
	if e.err != nil {
		var none S
		return none, e.err
	}
	return e.server.(S), nil
}

// close ends all servers. The registry is empty afterwards and can be used again.
func (r *registry) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for key, e := range r.entries {
		if e.server != nil {
			errs = append(errs, e.server.Close())
		}
		if e.reaper != nil {
			errs = append(errs, e.reaper.release())
		}
		delete(r.entries, key)
	}
	return errors.Join(errs...)
}

// Main runs the tests, closes the shared servers, and looks for goroutines that a test left behind. A package that uses
// the harness has
//
//	func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }
func Main(m *testing.M) int {
	code := m.Run()
	if err := errors.Join(shared.close(), binaries.close()); err != nil {
		fmt.Fprintln(os.Stderr, "harness: close the shared servers:", err)
		code = max(code, 1)
	}
	if code != 0 {
		return code
	}
	// What fetched a PostgreSQL may keep its connection for a next time, with two goroutines.
	http.DefaultClient.CloseIdleConnections()
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, "harness: a test left goroutines behind:", err)
		return 1
	}
	return 0
}

// reaper removes a directory when this process ends without having done so: after SIGKILL, or a panic from `go test
// -timeout`. The servers themselves get a signal from the kernel in that case, but nobody removes their files.
type reaper struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
}

func startReaper(dir string) (*reaper, error) {
	// cat ends when the pipe does, which is at our end at the latest. The loop is there because the servers need a
	// moment to end, and write until then.
	cmd := exec.Command("sh", "-c", `cat >/dev/null; for i in 1 2 3 4 5; do rm -rf "$0" 2>/dev/null; [ -e "$0" ] || exit 0; sleep 1; done`, dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a ^C must not end it before us
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("watch over %s: %w", dir, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("watch over %s: %w", dir, err)
	}
	return &reaper{cmd: cmd, stdin: stdin}, nil
}

// watch starts a reaper that lasts as long as the test; call it before registering the cleanup that closes the server.
func watch(t testing.TB, dir string) {
	t.Helper()
	r, err := startReaper(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.release(); err != nil {
			t.Error(err)
		}
	})
}

// release ends the watch; the directory is gone already.
func (r *reaper) release() error {
	if err := r.stdin.Close(); err != nil {
		return fmt.Errorf("end the watch: %w", err)
	}
	if err := r.cmd.Wait(); err != nil {
		return fmt.Errorf("end the watch: %w", err)
	}
	return nil
}

package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// binaries are the programs that were built in this run; like shared, they belong to no test.
var binaries = &builds{paths: map[string]*build{}}

type builds struct {
	mu    sync.Mutex
	dir   string
	paths map[string]*build
}

type build struct {
	once sync.Once
	path string
	err  error
}

// Binary is the path of the walrelay to test: WALRELAY_TEST_BINARY, or one that is built once per run, with the race
// detector if WALRELAY_TEST_RACE is 1.
func Binary(t testing.TB) string {
	t.Helper()
	if path := os.Getenv("WALRELAY_TEST_BINARY"); path != "" {
		path, err := filepath.Abs(path)
		if err == nil {
			_, err = os.Stat(path)
		}
		if err != nil {
			t.Fatalf("WALRELAY_TEST_BINARY: %v: build it first, or unset the variable", err)
		}
		return path
	}
	return Build(t, "./cmd/walrelay")
}

// Build builds a main package, named from the module's root, once per run, and returns the program's path.
func Build(t testing.TB, pkg string) string {
	t.Helper()
	path, err := binaries.get(pkg)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func (b *builds) get(pkg string) (string, error) {
	b.mu.Lock()
	if b.dir == "" {
		dir, err := os.MkdirTemp("", "walrelay-bin-")
		if err != nil {
			b.mu.Unlock()
			return "", fmt.Errorf("create a directory for programs: %w", err)
		}
		b.dir = dir
	}
	one := b.paths[pkg]
	if one == nil {
		one = &build{path: filepath.Join(b.dir, filepath.Base(pkg))}
		b.paths[pkg] = one
	}
	b.mu.Unlock()
	one.once.Do(func() { one.err = goBuild(pkg, one.path) })
	return one.path, one.err
}

func goBuild(pkg, path string) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	args := []string{"build", "-o", path}
	if os.Getenv("WALRELAY_TEST_RACE") == "1" {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w: %s", pkg, err, out)
	}
	return nil
}

// moduleRoot is the directory of go.mod; tests run in their package's directory.
func moduleRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("find the module: %w", err)
	}
	mod := strings.TrimSpace(string(out))
	if mod == "" || mod == os.DevNull {
		return "", errors.New("find the module: the test runs outside of one")
	}
	return filepath.Dir(mod), nil
}

// close removes what was built.
func (b *builds) close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	dir := b.dir
	b.dir, b.paths = "", map[string]*build{}
	if dir == "" {
		return nil
	}
	return os.RemoveAll(dir)
}

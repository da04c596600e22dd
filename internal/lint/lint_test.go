package lint_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/walrelay/walrelay"

// pkg is what `go list` tells of a package; import paths of ours are relative to the module.
type pkg struct {
	path    string
	imports []string
}

// mustList lists the packages of the module with the imports of their non-test files.
func mustList(t *testing.T, root string) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list: %v: %s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	var pkgs []pkg
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var listed struct {
			ImportPath string
			Imports    []string
		}
		err := decoder.Decode(&listed)
		if errors.Is(err, io.EOF) {
			return pkgs
		}
		if err != nil {
			t.Fatal(err)
		}
		p := pkg{path: relative(listed.ImportPath)}
		for _, path := range listed.Imports {
			p.imports = append(p.imports, relative(path))
		}
		pkgs = append(pkgs, p)
	}
}

func relative(path string) string { return strings.TrimPrefix(path, module+"/") }

func mustRoot(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return root
}

func TestImports(t *testing.T) {
	pkgs := mustList(t, mustRoot(t))
	if len(pkgs) < 3 {
		t.Fatalf("only %d packages: are these all?", len(pkgs))
	}
	for _, complaint := range checkImports(pkgs) {
		t.Error(complaint)
	}
}

// TestImportRulesBite holds the rules against a plan that breaks each of them once.
func TestImportRulesBite(t *testing.T) {
	pgconn, kgo := "github.com/jackc/pgx/v5/pgconn", "github.com/twmb/franz-go/pkg/kgo"
	allowed := []pkg{
		{"cmd/walrelay", []string{"internal/relay", "internal/config", "internal/demo"}},
		{"internal/relay", []string{"router", "snapshot", "replication", "checkpoint", "checkpoint/kafka", "internal/admin"}},
		{"router", []string{kgo, "router/format", "replication", "checkpoint", "checkpoint/kafka"}},
		{"router/format", []string{"replication"}},
		{"snapshot", []string{pgconn, "replication", "checkpoint"}},
		{"replication", []string{pgconn, "checkpoint"}},
		{"checkpoint/kafka", []string{kgo, "checkpoint"}},
		{"internal/outbox", []string{kgo, pgconn, "router", "replication"}},
		{"internal/harness", []string{kgo, pgconn, "internal/pgserver"}},
		{"internal/newthing", []string{"fmt"}},
	}
	if got := checkImports(allowed); len(got) > 0 {
		t.Errorf("allowed, yet complained about: %v", got)
	}
	for _, bad := range []pkg{
		{"snapshot", []string{"router"}},
		{"snapshot", []string{kgo}},
		{"replication", []string{"snapshot"}},
		{"router", []string{pgconn}},
		{"router/format", []string{kgo}},
		{"replication", []string{kgo}},
		{"checkpoint", []string{"replication"}},
		{"checkpoint", []string{"internal/config"}},
		{"checkpoint/kafka", []string{"router"}},
		{"internal/config", []string{"internal/relay"}},
		{"internal/relay", []string{kgo}},
		{"internal/relay", []string{"internal/demo"}},
		{"internal/relay", []string{"internal/harness"}},
		{"cmd/walrelay", []string{pgconn}},
		{"stray", []string{"fmt"}},
	} {
		if got := checkImports([]pkg{bad}); len(got) != 1 {
			t.Errorf("%v: %d complaints, want one", bad, len(got))
		}
	}
}

// The floors, from the ground up. An import may only go down, or stay within one room. What is not listed under
// internal is a job beside the stream.
const (
	ground = iota + 1 // imports nothing of ours but the ground
	wire
	path
	loop
	command
)

// floorOf returns the floor of one of our packages; 0 for a top-level room that the plan does not know.
func floorOf(p string) int {
	switch room, _, _ := strings.Cut(p, "/"); {
	case p == "checkpoint", p == "checkpoint/kafka", p == "internal/config", p == "internal/admin", p == "internal/phase", p == "internal/killpoint", isAid(p):
		return ground
	case room == "replication":
		return wire
	case room == "router", room == "snapshot":
		return path
	case p == "internal/relay" || strings.HasPrefix(p, "internal/relay/"):
		return loop
	case room == "internal":
		return path
	case room == "cmd", room == "examples": // which import nothing of ours
		return command
	}
	return 0
}

// isAid says whether a package serves tests, benchmarks and the demo only. The aids may use anything, and of the rest
// only jobs may use them.
func isAid(p string) bool {
	return slices.Contains([]string{"internal/harness", "internal/pgserver", "internal/kafkaserver", "internal/child",
		"internal/faultconn", "internal/cdctest", "internal/lint", "internal/bench"}, p)
}

// isStream says whether a package is part of the path of a row, or of what must stay neutral.
func isStream(p string) bool {
	room, _, _ := strings.Cut(p, "/")
	return room == "checkpoint" || room == "replication" || room == "snapshot" || room == "router" || room == "cmd" ||
		strings.HasPrefix(p, "internal/relay") || p == "internal/config" || p == "internal/admin" || p == "internal/phase" || p == "internal/killpoint"
}

func checkImports(pkgs []pkg) []string {
	var complaints []string
	for _, p := range pkgs {
		for _, imported := range p.imports {
			if why := forbidden(p.path, imported); why != "" {
				complaints = append(complaints, fmt.Sprintf("%s must not import %s: %s", p.path, imported, why))
			}
		}
		if floorOf(p.path) == 0 {
			complaints = append(complaints, p.path+" has no floor: give it one in floorOf, or move it under internal")
		}
	}
	return complaints
}

// forbidden says why p may not import another package; empty if it may.
func forbidden(p, imported string) string {
	if isAid(p) {
		return ""
	}
	switch {
	case isKafkaClient(imported):
		if isStream(p) && p != "router" && p != "checkpoint/kafka" {
			return "in the stream's path only router and checkpoint/kafka reach Kafka"
		}
	case isPostgresClient(imported):
		// config parses a connection string with it, to check it, and connects to nothing.
		if isStream(p) && p != "replication" && p != "snapshot" && p != "internal/config" {
			return "in the stream's path only replication and snapshot reach PostgreSQL"
		}
	case strings.HasPrefix(imported, "github.com/") || floorOf(imported) == 0:
	case isAid(imported):
		if isStream(p) && floorOf(p) != command { // the demo starts its servers from there
			return "it is an aid of tests and jobs"
		}
	case strings.HasPrefix(imported, p+"/") || strings.HasPrefix(p, imported+"/"): // one room
		if p == "checkpoint" {
			return "checkpoint reaches nothing of ours"
		}
	case p == "checkpoint":
		return "checkpoint reaches nothing of ours"
	case p == "snapshot" && imported == "router":
		return "it knows nothing of Kafka"
	case p == "internal/relay" && (imported == "internal/outbox" || imported == "internal/lookup"): // marks and look-ups belong to a delivery
	case p == "internal/relay" && !isStream(imported):
		return "the jobs are beside the stream, not under it"
	case !isStream(p): // jobs reach everything below the loop
		if floorOf(imported) > floorOf(p) {
			return "arrows fall"
		}
	case floorOf(imported) > floorOf(p) || (floorOf(imported) == floorOf(p) && floorOf(p) != ground):
		return "arrows fall"
	}
	return ""
}

func isKafkaClient(path string) bool {
	return strings.HasPrefix(path, "github.com/twmb/franz-go") && !strings.HasSuffix(path, "/kmsg") && !strings.HasSuffix(path, "/kerr")
}

// isPostgresClient names what opens connections; the codecs for values and messages are free to use.
func isPostgresClient(path string) bool {
	return path == "github.com/jackc/pgx/v5" || strings.HasPrefix(path, "github.com/jackc/pgx/v5/pgconn") ||
		strings.HasPrefix(path, "github.com/jackc/pgx/v5/pgxpool")
}

// TestNoSleep: a sleeping test is slow where it is lucky and wrong where it is not. Wait for a condition instead, or use
// testing/synctest.
func TestNoSleep(t *testing.T) {
	root := mustRoot(t)
	for _, file := range mustFiles(t, root) {
		if !strings.HasSuffix(file, "_test.go") {
			continue
		}
		set := token.NewFileSet()
		parsed, err := parser.ParseFile(set, filepath.Join(root, file), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, at := range sleeps(set, parsed) {
			t.Errorf("%s:%d sleeps: wait for a condition", file, at)
		}
	}
}

// sleeps returns the lines that call Sleep of package time, outside functions that use synctest, where sleeping takes no
// time and is exact.
func sleeps(set *token.FileSet, file *ast.File) []int {
	var lines []int
	for _, decl := range file.Decls {
		var here []int
		bubble := false
		ast.Inspect(decl, func(n ast.Node) bool {
			selector, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if x, ok := selector.X.(*ast.Ident); ok {
				bubble = bubble || x.Name == "synctest"
				if x.Name == "time" && selector.Sel.Name == "Sleep" {
					here = append(here, set.Position(selector.Pos()).Line)
				}
			}
			return true
		})
		if !bubble {
			lines = append(lines, here...)
		}
	}
	return lines
}

func TestSleepsAreFound(t *testing.T) {
	const text = `package x
func TestA(t *testing.T) { go func() { time.Sleep(1) }() }
func TestB(t *testing.T) { synctest.Test(t, func(t *testing.T) { time.Sleep(1) }) }
var f = time.Sleep`
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, "x_test.go", text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	if got := sleeps(set, file); !slices.Equal(got, []int{2, 4}) {
		t.Errorf("lines %v, want 2 and 4", got)
	}
}

// TestStandsAlone: whoever clones the repository gets everything. No file points out of it, or to a machine on which it
// was once built.
func TestStandsAlone(t *testing.T) {
	root := mustRoot(t)
	// Put together, so that this file does not contain them.
	outside := []string{".." + "/shared", "/work" + "/", "/farm" + "/", "/root" + "/go"}
	for _, file := range mustFiles(t, root) {
		text, err := os.ReadFile(filepath.Join(root, file))
		if errors.Is(err, os.ErrNotExist) { // removed and not committed yet
			continue
		}
		if err != nil {
			t.Error(err)
			continue
		}
		for i, line := range strings.Split(string(text), "\n") {
			for _, s := range outside {
				if strings.Contains(line, s) && !isKnownPath(line, s) {
					t.Errorf("%s:%d names %s, which is outside of the repository", file, i+1, s)
				}
			}
		}
	}
}

// isKnownPath lets through what only looks like a path of a machine: a directory of the repository of that name.
func isKnownPath(line, s string) bool { return strings.Contains(line, "internal"+s) }

// mustFiles lists the files that are committed, or would be by `git add`; where there is no git, all of them.
func mustFiles(t *testing.T, root string) []string {
	t.Helper()
	cmd := exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
	cmd.Dir = root
	if out, err := cmd.Output(); err == nil {
		return strings.FieldsFunc(string(out), func(r rune) bool { return r == 0 })
	}
	var files []string
	err := filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(root, path)
		files = append(files, name)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(files)
	return files
}

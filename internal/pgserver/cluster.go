package pgserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/walrelay/walrelay/internal/child"
)

// defaultSettings are those of a server that walrelay can read from, small enough that several fit on one machine.
// Unix sockets are off: their path would have to be shorter than 108 bytes, which temporary directories are not.
func defaultSettings(fsync bool) map[string]string {
	settings := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"unix_socket_directories": "",
		"wal_level":               "logical",
		"max_wal_senders":         "20",
		"max_replication_slots":   "20",
		"max_connections":         "100",
		"shared_buffers":          "32MB",
		"log_line_prefix":         "%m [%p] %q%u@%d ",
		"fsync":                   "on",
	}
	if !fsync {
		settings["fsync"] = "off"
		settings["full_page_writes"] = "off"
	}
	return settings
}

// identity is the user as whom the server runs: this one, or under root the user postgres, else nobody.
func identity() (child.Identity, error) {
	if os.Getuid() != 0 {
		return child.Identity{}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			return child.Identity{}, fmt.Errorf("read the uid of %s: %w", name, err)
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			return child.Identity{}, fmt.Errorf("read the gid of %s: %w", name, err)
		}
		return child.Identity{UID: uint32(uid), GID: uint32(gid), Set: true}, nil
	}
	return child.Identity{}, errors.New("PostgreSQL does not run as root, and there is no user postgres or nobody: create one, or start as another user")
}

// makeDir creates Dir and gives it to the server's user.
func (s *Server) makeDir() error {
	if s.options.Dir == "" {
		dir, err := os.MkdirTemp("", "walrelay-postgres-")
		if err != nil {
			return fmt.Errorf("create PostgreSQL's directory: %w", err)
		}
		s.options.Dir, s.made = dir, true
	}
	dir, err := filepath.Abs(s.options.Dir)
	if err != nil {
		return fmt.Errorf("find PostgreSQL's directory: %w", err)
	}
	s.options.Dir = dir
	if _, err := os.Stat(s.dataDir()); err == nil {
		return fmt.Errorf("%s exists already: choose another directory, or remove it", s.dataDir())
	}
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		s.made = true
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("create PostgreSQL's directory: %w", err)
	}
	if err := os.Mkdir(s.dataDir(), 0o700); err != nil {
		return fmt.Errorf("create PostgreSQL's data directory: %w", err)
	}
	if !s.as.Set {
		return nil
	}
	paths := []string{s.dataDir()}
	if s.made { // one that the caller made stays the caller's
		paths = append(paths, dir)
	}
	for _, path := range paths {
		if err := os.Chown(path, int(s.as.UID), int(s.as.GID)); err != nil {
			return fmt.Errorf("give PostgreSQL its directory: %w", err)
		}
	}
	return nil
}

// initdb makes the cluster and writes its two configuration files.
func (s *Server) initdb(ctx context.Context) error {
	// The password goes through a file that only the server's user can read: an argument would be in every `ps`.
	pw, err := os.CreateTemp("", "walrelay-pw-")
	if err != nil {
		return fmt.Errorf("write PostgreSQL's password: %w", err)
	}
	defer os.Remove(pw.Name())
	_, err = pw.WriteString(s.password + "\n")
	if err = errors.Join(err, pw.Close()); err != nil {
		return fmt.Errorf("write PostgreSQL's password: %w", err)
	}
	if s.as.Set {
		if err := os.Chown(pw.Name(), int(s.as.UID), int(s.as.GID)); err != nil {
			return fmt.Errorf("give PostgreSQL its password: %w", err)
		}
	}
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, "initdb"), "-D", s.dataDir(), "-U", Superuser, "--pwfile", pw.Name(),
		"-A", "scram-sha-256", "-E", "UTF8", "--locale=C", "--no-sync")
	cmd.Env = environment()
	cmd.Dir = "/"
	if s.as.Set {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: s.as.UID, Gid: s.as.GID}}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		hint := ""
		if s.as.Set && strings.Contains(string(out), "Permission denied") {
			hint = fmt.Sprintf(" (under root the server runs as uid %d: let others pass (chmod o+x) through every directory above)", s.as.UID)
		}
		return fmt.Errorf("make a PostgreSQL cluster in %s: %w: %s%s", s.dataDir(), err, lastLines(string(out), 1), hint)
	}
	hba := "host all all 127.0.0.1/32 scram-sha-256\nhost replication all 127.0.0.1/32 scram-sha-256\n"
	if err := os.WriteFile(filepath.Join(s.dataDir(), "pg_hba.conf"), []byte(hba), 0o600); err != nil {
		return fmt.Errorf("write pg_hba.conf: %w", err)
	}
	settings := defaultSettings(s.options.Fsync)
	maps.Copy(settings, s.options.Settings)
	return s.appendSettings(settings)
}

// appendSettings adds to postgresql.conf, where the last line for a name counts.
func (s *Server) appendSettings(settings map[string]string) error {
	if len(settings) == 0 {
		return nil
	}
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&text, "%s = '%s'\n", name, strings.ReplaceAll(settings[name], "'", "''"))
	}
	conf, err := os.OpenFile(filepath.Join(s.dataDir(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("open postgresql.conf: %w", err)
	}
	_, err = conf.WriteString(text.String())
	if err = errors.Join(err, conf.Close()); err != nil {
		return fmt.Errorf("write postgresql.conf: %w", err)
	}
	return nil
}

// environment keeps the PG* variables of the caller away from the server: PGDATA or PGPORT would win over arguments.
func environment() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "PG") })
}

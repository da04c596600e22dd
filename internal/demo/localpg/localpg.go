// Package localpg starts a throw-away PostgreSQL from the binaries that this
// system has. It downloads nothing.
package localpg

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
)

// ErrNotFound says that the system has no PostgreSQL server. The remedy is to
// install one.
var ErrNotFound = errors.New("no PostgreSQL server on this system: install the package postgresql, or put initdb and pg_ctl on the PATH")

// Server is a running PostgreSQL. Its owner calls Close.
type Server struct {
	bin, dir string
	port     int
	password string
}

// Start makes a cluster with wal_level logical in dir, which must be empty and
// reachable for the user that the server runs as, and starts it on a free port of
// the loopback interface. Settings are lines for postgresql.conf.
func Start(ctx context.Context, dir string, settings ...string) (*Server, error) {
	bin, err := BinDir()
	if err != nil {
		return nil, err
	}
	port, err := freePort(ctx)
	if err != nil {
		return nil, err
	}
	s := &Server{bin: bin, dir: dir, port: port, password: "postgres"}
	if err := s.prepare(ctx, settings); err != nil {
		return nil, err
	}
	// -w waits until the server takes connections; -l keeps it from holding our stderr.
	err = s.command(ctx, "pg_ctl", "-D", s.data(), "-l", filepath.Join(dir, "server.log"), "-w", "-t", "60", "start")
	if err != nil {
		return nil, fmt.Errorf("start PostgreSQL: %w", err)
	}
	return s, nil
}

func (s *Server) prepare(ctx context.Context, settings []string) error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return fmt.Errorf("make PostgreSQL's directory: %w", err)
	}
	if err := giveToServer(s.dir); err != nil {
		return fmt.Errorf("make PostgreSQL's directory: %w", err)
	}
	pw := filepath.Join(s.dir, "pw")
	if err := os.WriteFile(pw, []byte(s.password), 0o600); err != nil {
		return fmt.Errorf("write PostgreSQL's password file: %w", err)
	}
	if err := giveToServer(pw); err != nil {
		return fmt.Errorf("write PostgreSQL's password file: %w", err)
	}
	err := s.command(ctx, "initdb", "-D", s.data(), "-U", "postgres", "--pwfile", pw, "-A", "scram-sha-256",
		"-E", "UTF8", "--locale=C", "--no-sync")
	if err != nil {
		return fmt.Errorf("initialise PostgreSQL: %w", err)
	}
	conf, err := os.OpenFile(filepath.Join(s.data(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("configure PostgreSQL: %w", err)
	}
	lines := append([]string{
		"port = " + strconv.Itoa(s.port), "listen_addresses = '127.0.0.1'", "unix_socket_directories = ''",
		"wal_level = logical", "fsync = off",
	}, settings...)
	_, err = conf.WriteString(strings.Join(lines, "\n") + "\n")
	if err := errors.Join(err, conf.Close()); err != nil {
		return fmt.Errorf("configure PostgreSQL: %w", err)
	}
	return nil
}

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

// DSN gives the connection string of the superuser, with its password.
func (s *Server) DSN() string {
	return fmt.Sprintf("postgres://postgres:%s@127.0.0.1:%d/postgres", s.password, s.port)
}

// Close stops the server (fast: sessions are ended) and removes its files.
func (s *Server) Close() error {
	err := s.command(context.Background(), "pg_ctl", "-D", s.data(), "-m", "fast", "-w", "-t", "30", "stop")
	if err != nil {
		return fmt.Errorf("stop PostgreSQL: %w", err)
	}
	return os.RemoveAll(s.dir)
}

func (s *Server) command(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, name), args...)
	cmd.Dir = s.dir
	if err := asServer(cmd); err != nil {
		return err
	}
	// A file and not a pipe: the server inherits it and would keep a pipe open.
	out, err := os.CreateTemp("", "walrelay-pg-*.log")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name())
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Run(); err != nil {
		text, _ := os.ReadFile(out.Name())
		return fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(string(text)))
	}
	return nil
}

// BinDir finds the directory with PostgreSQL's server binaries, the newest where
// there are several.
func BinDir() (string, error) {
	dirs, _ := filepath.Glob("/usr/lib/postgresql/*/bin") // the pattern is well-formed
	sort.Slice(dirs, func(i, j int) bool { return major(dirs[i]) > major(dirs[j]) })
	for _, d := range dirs {
		if _, err := os.Stat(filepath.Join(d, "initdb")); err == nil {
			return d, nil
		}
	}
	if p, err := exec.LookPath("initdb"); err == nil {
		return filepath.Dir(p), nil
	}
	return "", ErrNotFound
}

func major(bin string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(bin)))
	return n
}

func freePort(ctx context.Context) (int, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	return port, l.Close()
}

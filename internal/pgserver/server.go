package pgserver

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/walrelay/walrelay/internal/child"
)

const (
	// Superuser is the role that initdb makes, and the one in DSN.
	Superuser = "postgres"

	// startTimeout bounds the wait for a server to accept connections. Crash recovery is included, so it is generous.
	startTimeout = 60 * time.Second

	// stopGrace is how long a server may take to stop before it is killed. A fast shutdown waits for walsenders to
	// send everything up to the shutdown checkpoint, and a receiver that hangs makes that wait endless.
	stopGrace = 30 * time.Second
)

// Options say which server to start. The zero value starts the newest supported version in a temporary directory.
type Options struct {
	// Major is the major version, 14 to 18. 0 means DefaultMajor.
	Major int
	// Dir will hold the data directory and the log. It is created, and must hold no cluster yet. Empty means a
	// temporary directory. Under root, every directory above it must be open to others (x), since the server runs as
	// someone else.
	Dir string
	// Port to listen on, on 127.0.0.1. 0 means any free one, which a Restart keeps.
	Port int
	// Settings go into postgresql.conf, over the defaults of this package (see defaultSettings).
	Settings map[string]string
	// Password of the superuser. Empty means a random one: the server's port is open to every user of the machine.
	Password string
	// Fsync makes the server durable against a crash of the machine. Without it a killed server still loses nothing,
	// because what it wrote is in the kernel's cache; but the machine must not go down.
	Fsync bool
	// Log gets one line for a fetch and the server's own log. nil: only the file server.log in Dir.
	Log io.Writer
}

// Server is a PostgreSQL server that is running, or has run. Its methods are not to be called concurrently, except
// those that only tell something. It ends with this process (on Linux; elsewhere Close must have been called).
type Server struct {
	options  Options
	bin      string
	port     int
	password string
	as       child.Identity
	made     bool // Dir was made by Start and goes away whole

	mu      sync.Mutex // guards process
	process *child.Process
}

// StopMode is PostgreSQL's shutdown mode.
type StopMode syscall.Signal

// Smart waits for all clients to leave, Fast ends their sessions, Immediate aborts without a shutdown checkpoint, so
// that the next start goes through crash recovery.
const (
	Smart     = StopMode(syscall.SIGTERM)
	Fast      = StopMode(syscall.SIGINT)
	Immediate = StopMode(syscall.SIGQUIT)
)

// Start obtains the binaries, makes a cluster, starts the server and returns once it accepts connections. The caller
// must Close it. After an error nothing is left running and nothing is left in Dir.
func Start(ctx context.Context, options Options) (*Server, error) {
	if options.Major == 0 {
		options.Major = DefaultMajor
	}
	bin, err := Binaries(ctx, options.Major, options.Log)
	if err != nil {
		return nil, err
	}
	as, err := identity()
	if err != nil {
		return nil, err
	}
	s := &Server{options: options, bin: bin, port: options.Port, password: options.Password, as: as}
	if s.password == "" {
		s.password = rand.Text()
	}
	if err := s.makeDir(); err != nil {
		return nil, err
	}
	if err := s.initdb(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	if err := s.launchOnFreePort(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// DSN is the URL of the database postgres for the superuser, password included. It stays the same over restarts.
func (s *Server) DSN() string { return s.Database("postgres") }

// Database is like DSN for another database of this server.
func (s *Server) Database(name string) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(Superuser, s.password),
		Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)), Path: "/" + name,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// Addr is host:port of the server.
func (s *Server) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)) }

// Dir is the directory that holds everything of this server; its data directory is Dir/data.
func (s *Server) Dir() string { return s.options.Dir }

// Version is the server's major version.
func (s *Server) Version() int { return s.options.Major }

// Bin is the directory of the server's programs.
func (s *Server) Bin() string { return s.bin }

// Running says whether the postmaster is there.
func (s *Server) Running() bool {
	p := s.current()
	return p != nil && p.Running()
}

// Log returns the server's log so far, for messages about what went wrong.
func (s *Server) Log() string {
	text, err := os.ReadFile(s.logFile())
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// Stop shuts the server down in this mode and waits for its end. A server that does not run is no error. One that has
// not stopped after 30 s is killed, and that is an error.
func (s *Server) Stop(mode StopMode) error {
	p := s.current()
	if p == nil || !p.Running() {
		return nil
	}
	if err := p.Signal(syscall.Signal(mode)); err != nil {
		return err
	}
	if p.WaitTimeout(stopGrace) {
		return nil
	}
	return errors.Join(fmt.Errorf("stop PostgreSQL: not stopped within %s, so it was killed; see %s", stopGrace, s.logFile()), s.Kill())
}

// Quit is Stop(Immediate): as pg_ctl stop -m immediate.
func (s *Server) Quit() error { return s.Stop(Immediate) }

// Kill ends the postmaster and every child of it with SIGKILL, as the out-of-memory killer or a power cut would, and
// waits until all are gone. Restart brings the server back through crash recovery.
func (s *Server) Kill() error {
	p := s.current()
	if p == nil || !p.Running() {
		return nil
	}
	// Stopped first, so that the postmaster forks nobody between the look at its children and its end.
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	children := childrenOf(p.PID())
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	for _, pid := range children {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("kill PostgreSQL's process %d: %w", pid, err)
		}
	}
	<-p.Done()
	return waitGone(children, stopGrace)
}

// Restart stops the server (fast) if it runs, and starts it again on the same port and data. It is also what brings
// one back after Stop, Quit and Kill. Settings given here are added to postgresql.conf first.
func (s *Server) Restart(ctx context.Context, settings map[string]string) error {
	if err := s.Stop(Fast); err != nil {
		return err
	}
	if err := s.appendSettings(settings); err != nil {
		return err
	}
	return s.launch(ctx)
}

// Close kills the server and removes what Start put into Dir, and Dir if nothing else is in it. It may be called twice.
func (s *Server) Close() error {
	err := s.Kill()
	if s.made {
		return errors.Join(err, os.RemoveAll(s.options.Dir))
	}
	for _, path := range []string{s.dataDir(), s.logFile()} {
		err = errors.Join(err, os.RemoveAll(path))
	}
	return err
}

func (s *Server) dataDir() string { return filepath.Join(s.options.Dir, "data") }
func (s *Server) logFile() string { return filepath.Join(s.options.Dir, "server.log") }

func (s *Server) current() *child.Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process
}

// launchOnFreePort launches; where the port was ours to choose, another one is tried when somebody took it between the
// choice and the server's bind.
func (s *Server) launchOnFreePort(ctx context.Context) error {
	for attempt := 1; ; attempt++ {
		if s.options.Port == 0 {
			port, err := freePort()
			if err != nil {
				return err
			}
			s.port = port
		}
		err := s.launch(ctx)
		taken := err != nil && strings.Contains(s.Log(), "could not create any TCP/IP sockets")
		if !taken || s.options.Port != 0 || attempt == 3 {
			return err
		}
	}
}

// launch starts the postmaster and waits until it says that it is ready.
func (s *Server) launch(ctx context.Context) error {
	// A killed server leaves its pid file. PostgreSQL copes with that, but the wait below must not read the old one.
	if err := os.Remove(s.pidFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove a stale pid file: %w", err)
	}
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open PostgreSQL's log: %w", err)
	}
	cmd := exec.Command(filepath.Join(s.bin, "postgres"), "-D", s.dataDir(), "-p", strconv.Itoa(s.port))
	cmd.Dir = s.dataDir()
	cmd.Env = environment()
	cmd.Stdout = log
	if s.options.Log != nil {
		cmd.Stdout = io.MultiWriter(log, s.options.Log)
	}
	cmd.Stderr = cmd.Stdout
	// Should this process die, SIGQUIT makes the postmaster take its children with it.
	p, err := child.Start(cmd, s.as, syscall.SIGQUIT)
	if err != nil {
		return errors.Join(fmt.Errorf("start PostgreSQL %d: %w", s.options.Major, err), log.Close())
	}
	s.mu.Lock()
	s.process = p
	s.mu.Unlock()
	if s.options.Log == nil {
		if err := log.Close(); err != nil { // the server has a descriptor of its own
			return errors.Join(fmt.Errorf("close PostgreSQL's log: %w", err), s.Kill())
		}
	} else {
		go func() { // ends with the server: until then its output is copied into the file
			<-p.Done()
			log.Close()
		}()
	}
	return s.waitReady(ctx, p)
}

func (s *Server) pidFile() string { return filepath.Join(s.dataDir(), "postmaster.pid") }

// waitReady reads what pg_ctl reads: the status in the last line of the pid file.
func (s *Server) waitReady(ctx context.Context, p *child.Process) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.NewTimer(startTimeout)
	defer deadline.Stop()
	for {
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("start PostgreSQL: %w", context.Cause(ctx)), s.Kill())
		case <-p.Done():
			return fmt.Errorf("start PostgreSQL %d: it ended at once: %s", s.options.Major, lastLines(s.Log(), 5))
		case <-deadline.C:
			return errors.Join(fmt.Errorf("start PostgreSQL %d: not ready within %s: %s", s.options.Major, startTimeout, lastLines(s.Log(), 5)), s.Kill())
		case <-tick.C:
			text, err := os.ReadFile(s.pidFile())
			if err == nil && bytes.Contains(text, []byte("\nready")) {
				return nil
			}
		}
	}
}

// freePort asks the kernel. Another process may take the port before the server does; see launchOnFreePort.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	return port, nil
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], " | ")
}

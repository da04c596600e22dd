package demo

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
)

// workDir is the demo's directory, which goes when the demo ends:
//
//	walrelay.yaml   the connector's configuration, to be read
//	password        PostgreSQL's password, which the YAML names and does not hold
//	pgpass          the same for psql
//	connector.log   what the connector says
//	postgres/       the database
type workDir string

// makeWorkDir makes the directory. Others may pass through it, since PostgreSQL's
// user must reach its own part when we are root, but not list it; the files in it
// are the owner's alone.
func makeWorkDir() (workDir, error) {
	dir, err := os.MkdirTemp("", "walrelay-demo-")
	if err != nil {
		return "", fmt.Errorf("make a directory: %w", err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return "", fmt.Errorf("make a directory: %w", err)
	}
	return workDir(dir), nil
}

func (d workDir) path(name string) string { return filepath.Join(string(d), name) }

// remove removes the directory and all in it.
func (d workDir) remove() error {
	if err := os.RemoveAll(string(d)); err != nil {
		return fmt.Errorf("remove the demo's directory: %w", err)
	}
	return nil
}

// writeConnection writes the password where the YAML and psql look for it, and
// gives dsn twice: without the password, for people, and with a reference to the
// file, for the YAML.
func (d workDir) writeConnection(dsn string) (public, reference string, err error) {
	u, err := url.Parse(dsn)
	if err != nil || u.User == nil {
		return "", "", fmt.Errorf("read the database's DSN: want postgres://user:password@host:port/database")
	}
	user := u.User.Username()
	password, _ := u.User.Password()
	u.User = url.User(user)
	public = u.String()
	// Percent-encoded, because it is put into a URL; pgpass has its own escapes.
	encoded := strings.TrimPrefix(url.UserPassword("", password).String(), ":")
	if err := os.WriteFile(d.path("password"), []byte(encoded), 0o600); err != nil {
		return "", "", fmt.Errorf("write the password file: %w", err)
	}
	escape := strings.NewReplacer(`\`, `\\`, `:`, `\:`)
	line := strings.Join([]string{u.Hostname(), u.Port(), "*", escape.Replace(user), escape.Replace(password)}, ":")
	if err := os.WriteFile(d.path("pgpass"), []byte(line+"\n"), 0o600); err != nil {
		return "", "", fmt.Errorf("write the pgpass file: %w", err)
	}
	reference = strings.Replace(public, "@", ":${file:"+d.path("password")+"}@", 1)
	return public, reference, nil
}

// writeConfig writes the connector's YAML and gives its path. It says no more than
// is needed, since it is the first configuration that a new user reads.
func (d workDir) writeConfig(dsn string, brokers []string, listen string) (string, error) {
	text := fmt.Sprintf(`# Written by walrelay demo. Everything else has its default.
name: %s
source:
  dsn: %s
outbox:
  - table: public.outbox
kafka:
  brokers: [%s]
admin:
  listen: %s
`, shopName, dsn, strings.Join(brokers, ", "), listen)
	if err := os.WriteFile(d.path("walrelay.yaml"), []byte(text), 0o600); err != nil {
		return "", fmt.Errorf("write the connector's configuration: %w", err)
	}
	return d.path("walrelay.yaml"), nil
}

// freeAddress gives wanted if nobody listens there, else a free port of the
// loopback interface. Between this and its use somebody may take it; the
// connector then ends with a clear error.
func freeAddress(ctx context.Context, wanted string) (string, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", wanted)
	if err != nil {
		if l, err = lc.Listen(ctx, "tcp", "127.0.0.1:0"); err != nil {
			return "", fmt.Errorf("find a free port: %w", err)
		}
	}
	addr := l.Addr().String()
	return addr, l.Close()
}

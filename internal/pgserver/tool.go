package pgserver

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
)

// ClientTool returns the path of a PostgreSQL client program such as pg_recvlogical, psql or pg_dump: the newest that
// the system has. None can be fetched: the archives that Binaries uses hold initdb, pg_ctl and postgres alone, and so do
// the npm packages of the same project.
func ClientTool(name string) (string, error) {
	installed, err := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if err == nil && len(installed) > 0 {
		return slices.Max(installed), nil // by text: every version that still matters has two digits
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("find %s: %w: apt-get install postgresql-client", name, err)
	}
	return path, nil
}

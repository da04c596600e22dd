//go:build unix

package localpg

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
)

// asServer makes cmd run as an unprivileged user where we are root: PostgreSQL
// refuses to run as root.
func asServer(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is ours to hear
	if os.Getuid() != 0 {
		return nil
	}
	uid, gid, err := serverUser()
	if err != nil {
		return err
	}
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: gid}
	return nil
}

// giveToServer makes the server's user the owner of path.
func giveToServer(path string) error {
	if os.Getuid() != 0 {
		return nil
	}
	uid, gid, err := serverUser()
	if err != nil {
		return err
	}
	return os.Chown(path, int(uid), int(gid))
}

func serverUser() (uid, gid uint32, err error) {
	for _, name := range []string{"postgres", "nobody"} {
		u, lookup := user.Lookup(name)
		if err = lookup; err != nil {
			continue
		}
		i, errU := strconv.ParseUint(u.Uid, 10, 32)
		g, errG := strconv.ParseUint(u.Gid, 10, 32)
		if errU == nil && errG == nil {
			return uint32(i), uint32(g), nil
		}
	}
	return 0, 0, fmt.Errorf("find a user to run PostgreSQL as (as root it refuses): %w; add a user named postgres", err)
}

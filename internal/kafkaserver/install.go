package kafkaserver

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// Version is the release of Apache Kafka that pom.xml pins.
const Version = "4.3.1"

//go:embed pom.xml
var pom []byte

// ErrMissing says that this machine lacks what a real Kafka needs; the error around it says what to install.
var ErrMissing = errors.New("no real Kafka on this machine")

// Install makes the jars available and returns their directory. KAFKA_HOME, if set, must be a Kafka distribution (its
// libs are used); otherwise the jars come from Maven, once, into the user's cache directory. Concurrent callers, in
// other processes too, install once.
func Install(ctx context.Context) (string, error) {
	if _, err := exec.LookPath("java"); err != nil {
		return "", fmt.Errorf("%w: Java 17 or newer is needed: apt-get install openjdk-17-jre-headless", ErrMissing)
	}
	if home := os.Getenv("KAFKA_HOME"); home != "" {
		libs := filepath.Join(home, "libs")
		if !hasBroker(libs) {
			return "", fmt.Errorf("%w: KAFKA_HOME is %s, but libs there holds no kafka_2.13-*.jar: correct or unset it", ErrMissing, home)
		}
		return libs, nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache directory: %w (set HOME)", err)
	}
	base := filepath.Join(cache, "walrelay")
	if err := os.MkdirAll(base, 0o755); err != nil {
		return "", fmt.Errorf("create the cache for Kafka's jars: %w", err)
	}
	libs := filepath.Join(base, "kafka-"+Version)
	lock, err := os.OpenFile(libs+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", fmt.Errorf("open the cache's lock: %w", err)
	}
	defer lock.Close() // gives the lock back
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock the cache: %w", err)
	}
	if hasBroker(libs) {
		return libs, nil
	}
	return libs, fetch(ctx, base, libs)
}

func hasBroker(libs string) bool {
	jars, err := filepath.Glob(filepath.Join(libs, "kafka_2.13-*.jar"))
	return err == nil && len(jars) > 0
}

// fetch lets Maven collect the jars, and gives the directory its name only when it is complete.
func fetch(ctx context.Context, base, libs string) error {
	if _, err := exec.LookPath("mvn"); err != nil {
		return fmt.Errorf("%w: Maven is needed to obtain it once: apt-get install maven (or set KAFKA_HOME)", ErrMissing)
	}
	tmp, err := os.MkdirTemp(base, "fetch-")
	if err != nil {
		return fmt.Errorf("create a directory for Kafka's jars: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := os.WriteFile(filepath.Join(tmp, "pom.xml"), pom, 0o644); err != nil {
		return fmt.Errorf("write Kafka's pom.xml: %w", err)
	}
	got := filepath.Join(tmp, "libs")
	cmd := exec.CommandContext(ctx, "mvn", "-q", "-B", "-f", filepath.Join(tmp, "pom.xml"),
		"dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory="+got)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: Maven could not obtain Kafka %s: %w: %s", ErrMissing, Version, err, lastLines(string(out), 3))
	}
	if !hasBroker(got) {
		return fmt.Errorf("%w: Maven ended well but brought no broker", ErrMissing)
	}
	if err := os.Rename(got, libs); err != nil {
		return fmt.Errorf("move Kafka's jars into the cache: %w", err)
	}
	return nil
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], " | ")
}

package harness

import (
	"testing"
	"time"
)

const (
	// DefaultTimeout is for conditions that come true within a moment unless something is broken. Generous, since the
	// machine may be busy with other test binaries.
	DefaultTimeout = 30 * time.Second

	pollInterval = 10 * time.Millisecond
)

// WaitFor polls condition until it holds, and fails the test when it does not within the timeout. what completes the
// sentence "waited for …". An error ends the wait at once.
func WaitFor(t testing.TB, what string, timeout time.Duration, condition func() (bool, error)) {
	t.Helper()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for deadline := time.Now().Add(timeout); ; <-tick.C {
		held, err := condition()
		switch {
		case err != nil:
			t.Fatalf("waited for %s: %v", what, err)
		case held:
			return
		case time.Now().After(deadline):
			t.Fatalf("waited %s for %s, in vain", timeout, what)
		}
	}
}

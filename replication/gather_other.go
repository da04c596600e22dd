//go:build !linux

package replication

import "net"

// gatherer makes the socket quiet for a moment, on Linux; elsewhere it only waits.
type gatherer struct{}

func newGatherer(net.Conn) gatherer { return gatherer{} }

func (gatherer) pause(wait func()) { wait() }

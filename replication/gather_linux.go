package replication

import (
	"net"
	"syscall"
)

// gatherer makes the socket quiet for a moment: while it is set, the kernel does not
// report data before there is a lot of it. Without it every packet that arrives wakes
// the runtime's poller, even while nobody reads, and those wake-ups cost more than all
// the rest (seen: 20 s of processor time per million one-row transactions, instead of 8).
type gatherer struct{ conn syscall.RawConn }

// gatherBytes is more than arrives in one pause, and less than half of any receive
// buffer, to which the kernel would cut it.
const gatherBytes = 64 << 10

// newGatherer makes a gatherer for the TCP connection under c; for anything else one
// that does nothing.
func newGatherer(c net.Conn) gatherer {
	if inner, ok := c.(interface{ NetConn() net.Conn }); ok { // TLS
		c = inner.NetConn()
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return gatherer{}
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return gatherer{}
	}
	return gatherer{raw}
}

// pause calls wait with the socket quiet. Before it returns, the socket reports every
// byte again: a read that blocked with it quiet might never wake.
func (g gatherer) pause(wait func()) {
	if g.conn == nil || g.set(gatherBytes) != nil {
		wait()
		return
	}
	wait()
	// It cannot fail where setting it did not; the connection is closed then, and the
	// read that follows says so.
	_ = g.set(1)
}

func (g gatherer) set(bytes int) error {
	var serr error
	err := g.conn.Control(func(fd uintptr) {
		serr = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, bytes)
	})
	if err != nil {
		return err
	}
	return serr
}

package router

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"sync"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// What becomes of a request that a client sends.
type fate int

const (
	pass        fate = iota
	loseReply        // the broker executes it, and the connection breaks instead of an answer
	loseRequest      // the connection breaks before the broker sees it
)

const (
	apiProduce = int16(kmsg.Produce)
	apiEndTxn  = int16(kmsg.EndTxn)
)

// faults decides about every request of the clients that dial through it, so that one
// and the same fault happens with kfake and with real brokers.
type faults struct {
	mu   sync.Mutex
	seen map[int16]int
	// decide gets the nth request of an API (from 1). It may block: the request then
	// waits, and with it all that its connection sends later.
	decide func(api int16, n int) fate
}

func newFaults() *faults { return &faults{seen: map[int16]int{}} }

// set changes what is decided, and counts from 1 again.
func (f *faults) set(decide func(api int16, n int) fate) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen, f.decide = map[int16]int{}, decide
}

// count is how many requests of an API there were since set.
func (f *faults) count(api int16) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seen[api]
}

func (f *faults) request(api int16) fate {
	f.mu.Lock()
	f.seen[api]++
	decide, n := f.decide, f.seen[api]
	f.mu.Unlock()
	if decide == nil {
		return pass
	}
	return decide(api, n)
}

// dial is for ClientOptions.Dial.
func (f *faults) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &faultyConn{Conn: conn, faults: f}, nil
}

// faultyConn is a connection on which each write is one request, as the client does it.
type faultyConn struct {
	net.Conn
	faults *faults

	mu   sync.Mutex
	lost bool // what the broker says from now on is lost
}

func (c *faultyConn) Write(p []byte) (int, error) {
	if len(p) < 6 {
		return c.Conn.Write(p)
	}
	switch c.faults.request(int16(binary.BigEndian.Uint16(p[4:]))) {
	case loseRequest:
		_ = c.Close()
		return 0, io.ErrClosedPipe
	case loseReply:
		c.mu.Lock()
		c.lost = true
		c.mu.Unlock()
	}
	return c.Conn.Write(p)
}

func (c *faultyConn) Read(p []byte) (int, error) {
	// A lost answer is read first, so that the request surely was executed.
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lost {
		_ = c.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

package harness

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/walrelay/walrelay/internal/faultconn"
)

// Direction is a way through a Proxy.
type Direction int

// ToServer is what the client sends, ToClient what the server sends.
const (
	ToServer Direction = 1 << iota
	ToClient
	Both = ToServer | ToClient
)

// Proxy is a TCP proxy with faults, for any protocol. Its methods are safe for concurrent use.
type Proxy struct {
	listener net.Listener
	wg       sync.WaitGroup // the accepting goroutine and all that copy

	mu       sync.Mutex
	changed  *sync.Cond // on mu: held, swallowed or closed changed
	target   string
	held     Direction // not forwarded; the sender gets back-pressure
	swallow  Direction // read and thrown away; the sender notices nothing
	refusing bool
	closed   bool
	pairs    map[*pair]struct{}
	accepted int
	bytes    [Both + 1]int64
}

// pair is one proxied connection: the client's and the server's.
type pair struct{ client, server net.Conn }

func (p *pair) reset() {
	faultconn.Reset(p.client)
	faultconn.Reset(p.server)
}

// NewProxy listens on a free port of 127.0.0.1. The target may be empty and be set later. The caller must Close it.
func NewProxy(target string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for the proxy: %w", err)
	}
	p := &Proxy{listener: l, target: target, pairs: map[*pair]struct{}{}}
	p.changed = sync.NewCond(&p.mu)
	p.wg.Go(p.accept)
	return p, nil
}

// StartProxy is NewProxy for a test: it is closed at the test's end.
func StartProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	p, err := NewProxy(target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// Addr is host:port to connect to instead of the target.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// SetTarget changes where new connections go.
func (p *Proxy) SetTarget(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// Target is where new connections go: a test that puts something of its own in between reads it and sets its own.
func (p *Proxy) Target() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.target
}

// Cut resets every connection, on both sides, and returns how many there were. New ones are accepted.
func (p *Proxy) Cut() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cutLocked()
}

func (p *Proxy) cutLocked() int {
	n := len(p.pairs)
	for pair := range p.pairs {
		pair.reset()
		delete(p.pairs, pair)
	}
	p.changed.Broadcast() // who waits in a hold must see the end of its connection
	return n
}

// Refuse resets new connections as soon as they are made. Those that exist go on; Cut ends them.
func (p *Proxy) Refuse() { p.setRefusing(true) }

// Accept takes Refuse back.
func (p *Proxy) Accept() { p.setRefusing(false) }

func (p *Proxy) setRefusing(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refusing = on
}

// Hold stops forwarding in these directions, on every connection, also those to come, as a stalled network or a peer
// that no longer reads does. Nothing is lost: Release lets it flow.
func (p *Proxy) Hold(d Direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held |= d
}

// Blackhole throws away whatever arrives, in both directions: connections look alive and nobody answers, as behind a
// firewall that forgot them. Release resets the connections that lost bytes, because their streams are torn.
func (p *Proxy) Blackhole() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.swallow = Both
	p.held = 0
	p.changed.Broadcast()
}

// Release ends Hold and Blackhole.
func (p *Proxy) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.swallow != 0 {
		p.cutLocked()
	}
	p.held, p.swallow = 0, 0
	p.changed.Broadcast()
}

// Accepted is the number of connections that were let through so far.
func (p *Proxy) Accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// Connections is the number of those that are open.
func (p *Proxy) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.pairs)
}

// Bytes is how many bytes were forwarded in one direction so far.
func (p *Proxy) Bytes(d Direction) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bytes[d]
}

// Close resets all connections and waits for the proxy's goroutines. It may be called twice.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	p.cutLocked()
	p.mu.Unlock()
	_ = p.listener.Close() // a second close fails, and that is all it can do
	p.wg.Wait()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // this one connection was not to be
			continue
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

// serve connects a client to the target and copies both ways until either side is done.
func (p *Proxy) serve(client net.Conn) {
	p.mu.Lock()
	target, refuse := p.target, p.refusing || p.closed
	p.mu.Unlock()
	if refuse {
		faultconn.Reset(client)
		return
	}
	server, err := net.DialTimeout("tcp", target, 10*time.Second)
	if err != nil { // the target is down, and so is the proxy to its client
		faultconn.Reset(client)
		return
	}
	conns := &pair{client: client, server: server}
	p.mu.Lock()
	if p.closed || p.refusing {
		p.mu.Unlock()
		conns.reset()
		return
	}
	p.pairs[conns] = struct{}{}
	p.accepted++
	p.mu.Unlock()

	var both sync.WaitGroup
	both.Go(func() { p.copy(conns, server, client, ToServer) })
	both.Go(func() { p.copy(conns, client, server, ToClient) })
	both.Wait()
	p.mu.Lock()
	delete(p.pairs, conns)
	p.mu.Unlock()
	_ = client.Close() // closed by Cut, perhaps
	_ = server.Close()
}

// copy forwards one direction. An orderly end is passed on as such; any other ends the pair.
func (p *Proxy) copy(conns *pair, dst, src net.Conn, d Direction) {
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 && !p.forward(conns, dst, buf[:n], d) {
			conns.reset()
			return
		}
		if err == nil {
			continue
		}
		half, ok := dst.(*net.TCPConn)
		if !ok || !errors.Is(err, io.EOF) || !p.passEnd(conns, d) || half.CloseWrite() != nil {
			conns.reset()
		}
		return
	}
}

// forward waits while its direction is held and then passes the bytes on, or throws them away. It returns false when
// the connection is at its end.
func (p *Proxy) forward(conns *pair, dst net.Conn, b []byte, d Direction) bool {
	p.mu.Lock()
	for p.held&d != 0 && p.alive(conns) {
		p.changed.Wait()
	}
	alive, swallow := p.alive(conns), p.swallow&d != 0
	if alive && !swallow {
		p.bytes[d] += int64(len(b))
	}
	p.mu.Unlock()
	if !alive || swallow {
		return alive
	}
	_, err := dst.Write(b)
	return err == nil
}

// passEnd waits until an orderly end may pass: a network that is silent does not deliver it either.
func (p *Proxy) passEnd(conns *pair, d Direction) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for (p.held|p.swallow)&d != 0 && p.alive(conns) {
		p.changed.Wait()
	}
	return p.alive(conns)
}

// alive is called with mu held.
func (p *Proxy) alive(conns *pair) bool {
	_, ok := p.pairs[conns]
	return ok
}

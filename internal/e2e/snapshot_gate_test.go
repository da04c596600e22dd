package e2e

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// gateAct is what a pgGate does with one statement.
type gateAct int

const (
	gatePass      gateAct = iota
	gateHold              // the server does not see it before release
	gateHoldReply         // the server executes it; its answer waits for release
)

// pgGate stands between a connector and its PostgreSQL, and knows just enough of the
// protocol to pick single statements and the replication connections. So a test can stop
// a reader before a chunk, or between the server and the reader; and the stream alone.
type pgGate struct {
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	mu         sync.Mutex
	changed    *sync.Cond
	rule       func(sql string, n int) gateAct
	matched    int // statements that the rule did not let pass
	held       int
	gate       int // counts releases; what is held waits for the next
	streamHeld bool
	statements []string // that came by
	conns      map[*gateConn]struct{}
	closed     bool
}

// gateConn is one connection through a gate.
type gateConn struct {
	client, server net.Conn
	replication    bool
	replyHeld      bool
}

func newPGGate(t *testing.T, target string) *pgGate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &pgGate{listener: l, target: target, conns: map[*gateConn]struct{}{}}
	g.changed = sync.NewCond(&g.mu)
	g.wg.Go(g.accept)
	t.Cleanup(g.close)
	return g
}

func (g *pgGate) addr() string { return g.listener.Addr().String() }

// on installs the rule; n counts the statements that it did not let pass, from 0.
func (g *pgGate) on(rule func(sql string, n int) gateAct) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.rule, g.matched = rule, 0
}

// release lets what is held go on, and takes the rule away.
func (g *pgGate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.rule = nil
	g.gate++
	g.held = 0
	for c := range g.conns {
		c.replyHeld = false
	}
	g.changed.Broadcast()
}

// holdStream stops what the server sends on replication connections; releaseStream lets
// it flow.
func (g *pgGate) holdStream() { g.setStream(true) }

func (g *pgGate) releaseStream() { g.setStream(false) }

func (g *pgGate) setStream(held bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.streamHeld = held
	g.changed.Broadcast()
}

// heldNow is how many statements, or their answers, are being held.
func (g *pgGate) heldNow() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.held
}

// waitHeld waits until something is held.
func (g *pgGate) waitHeld(t *testing.T) {
	t.Helper()
	defer func() {
		if t.Failed() {
			all := g.seen(func(string) bool { return true })
			t.Logf("the statements that came by last:\n%s", strings.Join(all[max(0, len(all)-20):], "\n"))
		}
	}()
	harness.WaitFor(t, "a statement to be held", harness.DefaultTimeout, func() (bool, error) { return g.heldNow() > 0, nil })
}

// seen gives the statements that came by and match.
func (g *pgGate) seen(match func(sql string) bool) []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []string
	for _, s := range g.statements {
		if match(s) {
			out = append(out, s)
		}
	}
	return out
}

// cut ends every connection.
func (g *pgGate) cut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.conns {
		c.reset()
	}
}

func (g *pgGate) close() {
	g.cut()
	g.mu.Lock()
	g.closed = true
	g.changed.Broadcast()
	g.mu.Unlock()
	_ = g.listener.Close()
	g.wg.Wait()
}

func (c *gateConn) reset() {
	_ = c.client.Close()
	_ = c.server.Close()
}

func (g *pgGate) accept() {
	for {
		client, err := g.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", g.target)
		if err != nil { // the server is down
			_ = client.Close()
			continue
		}
		c := &gateConn{client: client, server: server}
		g.mu.Lock()
		if g.closed {
			g.mu.Unlock()
			c.reset()
			return
		}
		g.conns[c] = struct{}{}
		g.mu.Unlock()
		g.wg.Go(func() {
			_ = g.requests(c) // either side's end is the end of both
			g.end(c)
		})
		g.wg.Go(func() {
			_ = g.answers(c)
			g.end(c)
		})
	}
}

func (g *pgGate) end(c *gateConn) {
	c.reset()
	g.mu.Lock()
	delete(g.conns, c)
	g.changed.Broadcast()
	g.mu.Unlock()
}

// requests passes on what the client sends, message by message.
func (g *pgGate) requests(c *gateConn) error {
	for {
		body, raw, err := readMessage(c.client, false)
		if err != nil {
			return err
		}
		const ssl, gss = 80877103, 80877104 // asks for encryption; the start comes behind it
		code := binary.BigEndian.Uint32(body)
		if code != ssl && code != gss {
			g.mu.Lock()
			c.replication = bytes.Contains(body, []byte("replication\x00"))
			g.mu.Unlock()
		}
		if _, err := c.server.Write(raw); err != nil {
			return err
		}
		if code != ssl && code != gss {
			break
		}
	}
	for {
		body, raw, err := readMessage(c.client, true)
		if err != nil {
			return err
		}
		switch raw[0] {
		case 'Q':
			g.judge(c, string(bytes.TrimRight(body, "\x00")))
		case 'P': // name, query, types
			if _, query, ok := bytes.Cut(body, []byte{0}); ok {
				query, _, _ = bytes.Cut(query, []byte{0})
				g.judge(c, string(query))
			}
		}
		if _, err := c.server.Write(raw); err != nil {
			return err
		}
	}
}

// readMessage reads one message of the client: the type (but for the first ones), four
// bytes of length, and the body.
func readMessage(r io.Reader, typed bool) (body, raw []byte, err error) {
	head := make([]byte, 4)
	if typed {
		head = make([]byte, 5)
	}
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, nil, err
	}
	n := int(binary.BigEndian.Uint32(head[len(head)-4:])) - 4
	if n < 0 || n > 1<<26 {
		return nil, nil, fmt.Errorf("a message of %d bytes", n)
	}
	raw = append(head, make([]byte, n)...)
	body = raw[len(head):]
	_, err = io.ReadFull(r, body)
	return body, raw, err
}

// judge holds the statement, or its answer, where the rule says so.
func (g *pgGate) judge(c *gateConn, sql string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.statements = append(g.statements, sql)
	if g.rule == nil {
		return
	}
	act := g.rule(sql, g.matched)
	if act == gatePass {
		return
	}
	g.matched++
	g.held++
	if act == gateHoldReply {
		c.replyHeld = true
		return
	}
	for at := g.gate; at == g.gate && g.alive(c); {
		g.changed.Wait()
	}
}

func (g *pgGate) alive(c *gateConn) bool {
	_, ok := g.conns[c]
	return ok && !g.closed
}

// answers passes on what the server sends.
func (g *pgGate) answers(c *gateConn) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := c.server.Read(buf)
		if n > 0 {
			g.mu.Lock()
			for g.alive(c) && (c.replyHeld || c.replication && g.streamHeld) {
				g.changed.Wait()
			}
			g.mu.Unlock()
			if _, err := c.client.Write(buf[:n]); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
	}
}

// gateOnce holds one statement, the first that matches.
func gateOnce(act gateAct, match func(sql string) bool) func(string, int) gateAct {
	return func(sql string, n int) gateAct {
		if n > 0 || !match(sql) {
			return gatePass
		}
		return act
	}
}

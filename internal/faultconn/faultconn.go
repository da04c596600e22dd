// Package faultconn makes network connections fail at a chosen point: in the middle of a message, at the nth write,
// after so many bytes. It goes under a real client (pgconn's DialFunc, kgo's Dialer), so that what is tested is the
// client's own way of noticing.
//
// A fault that never happened proves nothing: Fault.Fired says whether it did.
package faultconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// ErrCut is what Read and Write return on a connection that a fault has cut.
var ErrCut = errors.New("connection cut on purpose")

// Direction says which way bytes go, as the side that holds the Conn sees it.
type Direction int

// Read is what comes from the peer, Write what goes to it.
const (
	Read Direction = iota
	Write
)

// Fault is one thing that goes wrong, once. The trigger is AtCall or AfterBytes; with neither it is the first byte. A
// Fault belongs to one Conn or, through Dialer, to whichever of its connections reaches the trigger first: the counts
// are over all the connections that share it.
type Fault struct {
	// On is the direction whose bytes and calls are counted.
	On Direction
	// AtCall is the number of the call, from 1, before which the fault strikes. A client's write is a message more
	// often than not, so this is "at the nth message".
	AtCall int
	// AfterBytes is how many bytes pass before the fault strikes, in the middle of a call if need be.
	AfterBytes int64
	// Delay, if not zero, is how long the call is held up. The connection survives, unless Cut is set too.
	Delay time.Duration
	// Alter, if not nil, changes the bytes of the call in place. With AfterBytes it gets those after them.
	Alter func(p []byte)
	// Cut ends the connection with a reset. A fault with neither Delay nor Alter cuts, set or not.
	Cut bool

	mu    sync.Mutex
	calls int
	bytes int64
	fired atomic.Bool
}

// Fired says whether the fault has happened.
func (f *Fault) Fired() bool { return f.fired.Load() }

func (f *Fault) cuts() bool { return f.Cut || (f.Delay == 0 && f.Alter == nil) }

// due counts a call of n bytes and says after how many of them the fault strikes; -1: not in this call.
func (f *Fault) due(n int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fired.Load() {
		return -1
	}
	f.calls++
	before := f.bytes
	f.bytes += int64(n)
	switch {
	case f.AtCall > 0:
		if f.calls < f.AtCall {
			return -1
		}
		f.fired.Store(true)
		return 0
	case f.bytes > f.AfterBytes, f.bytes == f.AfterBytes && f.AfterBytes > 0:
		f.fired.Store(true)
		return int(f.AfterBytes - before)
	}
	return -1
}

// Conn is a net.Conn with faults.
type Conn struct {
	net.Conn
	faults []*Fault
	done   chan struct{} // closed by Close; ends a delay
	once   sync.Once
	cut    atomic.Bool
}

// Wrap returns conn with these faults. Closing the result closes conn.
func Wrap(conn net.Conn, faults ...*Fault) *Conn {
	return &Conn{Conn: conn, faults: faults, done: make(chan struct{})}
}

// Close closes the connection and ends a delay that is under way.
func (c *Conn) Close() error {
	c.once.Do(func() { close(c.done) })
	return c.Conn.Close()
}

// Read reads, and then lets the faults look at what came.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n == 0 {
		return n, c.orCut(err)
	}
	for _, f := range c.faults {
		if f.On != Read {
			continue
		}
		at := f.due(n)
		if at < 0 {
			continue
		}
		if stop := c.strike(f, p[at:n]); stop != nil {
			return at, stop
		}
	}
	return n, err
}

// Write lets the faults look at p, and writes what they leave of it.
func (c *Conn) Write(p []byte) (int, error) {
	out := p
	for _, f := range c.faults {
		if f.On != Write {
			continue
		}
		at := f.due(len(out))
		if at < 0 {
			continue
		}
		if f.Alter != nil { // the caller's bytes are the caller's
			out = append([]byte(nil), out...)
		}
		if f.cuts() && at > 0 {
			// The peer gets the bytes before the cut, half a message and all.
			if n, err := c.Conn.Write(out[:at]); err != nil {
				return n, c.orCut(err)
			}
		}
		if stop := c.strike(f, out[at:]); stop != nil {
			return at, stop
		}
	}
	n, err := c.Conn.Write(out)
	return n, c.orCut(err)
}

// strike carries a fault out on the bytes behind its point. It returns an error when the connection is at its end.
func (c *Conn) strike(f *Fault, p []byte) error {
	if f.Alter != nil {
		f.Alter(p)
	}
	if f.Delay > 0 {
		timer := time.NewTimer(f.Delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-c.done:
			return net.ErrClosed
		}
	}
	if !f.cuts() {
		return nil
	}
	return c.Cut()
}

// Cut ends the connection now, with a reset where it is TCP, and returns ErrCut.
func (c *Conn) Cut() error {
	c.cut.Store(true)
	Reset(c.Conn)
	return ErrCut
}

// orCut makes the error of a connection that was cut say so.
func (c *Conn) orCut(err error) error {
	if err != nil && c.cut.Load() {
		return fmt.Errorf("%w: %w", ErrCut, err)
	}
	return err
}

// Reset closes a connection so that the peer gets a reset rather than an orderly end, as when a host or a process dies.
func Reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		// Linger 0 turns close into a reset. An error means that the connection is gone already.
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close() // closed before is as good
}

// Dialer dials TCP and puts the same faults under every connection. Its Dial fits pgconn's DialFunc and kgo's Dialer.
type Dialer struct {
	// Faults are shared by all connections, so each strikes once in total.
	Faults []*Fault

	mu    sync.Mutex
	conns []*Conn
}

// Dial connects. The caller owns the connection.
func (d *Dialer) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	wrapped := Wrap(conn, d.Faults...)
	d.mu.Lock()
	d.conns = append(d.conns, wrapped)
	d.mu.Unlock()
	return wrapped, nil
}

// CutAll cuts every connection that was dialled so far, and returns how many there were. Those closed before count too.
func (d *Dialer) CutAll() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.conns {
		_ = c.Cut() // it returns ErrCut, for Read and Write to pass on
	}
	return len(d.conns)
}

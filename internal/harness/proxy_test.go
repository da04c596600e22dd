package harness_test

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/walrelay/walrelay/internal/harness"
)

// mustEcho starts a server that sends back what it gets, and a proxy before it.
func mustEcho(t *testing.T) *harness.Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn) // ends with the connection, however that ends
			}()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return harness.StartProxy(t, l.Addr().String())
}

func mustDial(t *testing.T, addr string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func mustWrite(t *testing.T, conn net.Conn, text string) {
	t.Helper()
	if _, err := conn.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
}

// read reads up to n bytes for at most d.
func read(t *testing.T, conn net.Conn, n int, d time.Duration) (string, error) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(d)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, n)
	got, err := io.ReadFull(conn, buf)
	return string(buf[:got]), err
}

func TestAProxyPassesBytesAndAnOrderlyEnd(t *testing.T) {
	p := mustEcho(t)
	conn := mustDial(t, p.Addr())
	mustWrite(t, conn, "hello")
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(soon)); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(conn); string(got) != "hello" || err != nil {
		t.Fatalf("got %q, %v", got, err)
	}
	if p.Bytes(harness.ToServer) != 5 || p.Bytes(harness.ToClient) != 5 || p.Accepted() != 1 {
		t.Errorf("counted %d and %d bytes, %d connections", p.Bytes(harness.ToServer), p.Bytes(harness.ToClient), p.Accepted())
	}
}

func TestCutResetsWhatIsOpenAndLetsNewOnesIn(t *testing.T) {
	p := mustEcho(t)
	conn := mustDial(t, p.Addr())
	mustWrite(t, conn, "a")
	if _, err := read(t, conn, 1, soon); err != nil {
		t.Fatal(err)
	}
	if n := p.Cut(); n != 1 {
		t.Fatalf("cut %d connections, want 1", n)
	}
	if _, err := read(t, conn, 1, soon); err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("the client saw %v, want a reset", err)
	}
	again := mustDial(t, p.Addr())
	mustWrite(t, again, "b")
	if got, err := read(t, again, 1, soon); got != "b" {
		t.Fatalf("after the cut: %q, %v", got, err)
	}
}

func TestHoldLosesNothing(t *testing.T) {
	p := mustEcho(t)
	conn := mustDial(t, p.Addr())
	p.Hold(harness.ToClient)
	mustWrite(t, conn, "kept")
	if got, err := read(t, conn, 1, 100*time.Millisecond); err == nil {
		t.Fatalf("%q came through a hold", got)
	}
	p.Release()
	if got, err := read(t, conn, 4, soon); got != "kept" {
		t.Fatalf("after the release: %q, %v", got, err)
	}
}

func TestABlackholeSwallowsAndReleaseResets(t *testing.T) {
	p := mustEcho(t)
	conn := mustDial(t, p.Addr())
	p.Blackhole()
	mustWrite(t, conn, "gone")
	if got, err := read(t, conn, 1, 100*time.Millisecond); err == nil {
		t.Fatalf("%q came out of a black hole", got)
	}
	p.Release()
	var timeout net.Error
	if _, err := read(t, conn, 1, soon); err == nil || (errors.As(err, &timeout) && timeout.Timeout()) {
		t.Fatalf("a torn stream went on: %v", err)
	}
}

func TestRefuseKeepsNewConnectionsOut(t *testing.T) {
	p := mustEcho(t)
	old := mustDial(t, p.Addr())
	mustWrite(t, old, "a")
	if _, err := read(t, old, 1, soon); err != nil {
		t.Fatal(err)
	}
	p.Refuse()
	// The reset may be as early as the dial.
	if refused, err := net.Dial("tcp", p.Addr()); err == nil {
		defer refused.Close()
		if _, err := read(t, refused, 1, soon); err == nil || p.Accepted() != 1 {
			t.Fatalf("a connection got through: %v, %d accepted", err, p.Accepted())
		}
	}
	mustWrite(t, old, "b")
	if got, err := read(t, old, 1, soon); got != "b" {
		t.Fatalf("the old connection: %q, %v", got, err)
	}
	p.Accept()
	accepted := mustDial(t, p.Addr())
	mustWrite(t, accepted, "c")
	if got, err := read(t, accepted, 1, soon); got != "c" {
		t.Fatalf("after Accept: %q, %v", got, err)
	}
}

package faultconn_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/walrelay/walrelay/internal/faultconn"
)

// pair returns both ends of a TCP connection, the first one with faults.
func pair(t *testing.T, faults ...*faultconn.Fault) (*faultconn.Conn, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dialer := &faultconn.Dialer{Faults: faults}
	near, err := dialer.Dial(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close(); far.Close() })
	return near.(*faultconn.Conn), far
}

func TestACutAfterBytesDeliversExactlyThese(t *testing.T) {
	fault := &faultconn.Fault{On: faultconn.Write, AfterBytes: 7}
	near, far := pair(t, fault)
	received := make(chan []byte)
	go func() {
		// The far end reads byte for byte: a reset throws away what the kernel holds and nobody has read.
		var got []byte
		b := make([]byte, 1)
		for len(got) < 7 {
			if _, err := far.Read(b); err != nil {
				break
			}
			got = append(got, b[0])
		}
		received <- got
	}()
	if _, err := near.Write([]byte("abcd")); err != nil {
		t.Fatalf("the write before the cut: %v", err)
	}
	if fault.Fired() {
		t.Fatal("fired too early")
	}
	n, err := near.Write([]byte("efghij"))
	if n != 3 || !errors.Is(err, faultconn.ErrCut) {
		t.Fatalf("the write with the cut wrote %d, error %v; want 3 and ErrCut", n, err)
	}
	if !fault.Fired() {
		t.Fatal("Fired is false after the cut")
	}
	if got := <-received; len(got) > 7 || !bytes.HasPrefix([]byte("abcdefg"), got) {
		t.Fatalf("the far end got %q", got)
	}
	if _, err := near.Write([]byte("x")); !errors.Is(err, faultconn.ErrCut) {
		t.Fatalf("a write after the cut: %v, want ErrCut", err)
	}
}

func TestACutAtTheSecondReadLeavesTheFirstAlone(t *testing.T) {
	near, far := pair(t, &faultconn.Fault{On: faultconn.Read, AtCall: 2})
	buf := make([]byte, 8)
	for i, want := range []error{nil, faultconn.ErrCut} {
		if _, err := far.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := near.Read(buf); !errors.Is(err, want) {
			t.Fatalf("read %d: %v, want %v", i+1, err, want)
		}
	}
	if _, err := far.Read(buf); err == nil || errors.Is(err, io.EOF) {
		t.Fatalf("the far end saw %v, want a reset", err)
	}
}

func TestAnAlteredMessageLeavesTheCallersBytesAlone(t *testing.T) {
	near, far := pair(t, &faultconn.Fault{On: faultconn.Write, AtCall: 1, Alter: func(p []byte) { p[0] = 'X' }})
	sent := []byte("abc")
	if _, err := near.Write(sent); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 3)
	if _, err := io.ReadFull(far, got); err != nil {
		t.Fatal(err)
	}
	if string(got) != "Xbc" || string(sent) != "abc" {
		t.Fatalf("got %q, the caller's bytes are now %q", got, sent)
	}
}

func TestADelayEndsWithClose(t *testing.T) {
	fault := &faultconn.Fault{On: faultconn.Write, Delay: time.Hour}
	near, _ := pair(t, fault)
	ended := make(chan error)
	go func() {
		_, err := near.Write([]byte("x"))
		ended <- err
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !fault.Fired() {
		<-tick.C
	}
	if err := near.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Fatalf("the delayed write ended with %v", err)
	}
}

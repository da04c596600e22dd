package e2e

import (
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// faultAct is what a faultWire does with one request.
type faultAct int

const (
	faultPass        faultAct = iota
	faultHold                 // keep it until release or discard
	faultDropRequest          // the broker never sees it, and the connection is cut
	faultDropReply            // the broker executes it; its answer is lost with the connection
)

// faultWire stands between the harness's proxy and the one broker behind it, and knows just enough of Kafka's protocol
// to pick single requests: a frame is four bytes of size, and a request begins with its API key, version and
// correlation id, an answer with the correlation id. So the same fault can be made on kfake and on a real broker.
type faultWire struct {
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	mu      sync.Mutex
	changed *sync.Cond
	rules   map[int16]func(n int) faultAct
	taken   map[int16]int // requests that the rule of a key has judged
	seen    map[int16]int
	held    int
	gate    int // counts releases; a held request waits for the next
	forward bool
	conns   map[net.Conn]struct{}
	closed  bool
}

// newFaultWire puts itself before the only broker of k, which must have a proxy.
func newFaultWire(t *testing.T, k *harness.Cluster) *faultWire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &faultWire{listener: l, target: k.Proxies[0].Target(), rules: map[int16]func(int) faultAct{}, taken: map[int16]int{},
		seen: map[int16]int{}, conns: map[net.Conn]struct{}{}}
	w.changed = sync.NewCond(&w.mu)
	w.wg.Go(w.accept)
	t.Cleanup(w.close)
	k.Proxies[0].SetTarget(l.Addr().String())
	k.Proxies[0].Cut()
	return w
}

// on installs the rule for an API key; n counts its requests from 1.
func (w *faultWire) on(key int16, rule func(n int) faultAct) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rules[key], w.taken[key] = rule, 0
}

// off removes a rule.
func (w *faultWire) off(key int16) { w.on(key, nil) }

// count is how many requests of a key have come by.
func (w *faultWire) count(key int16) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen[key]
}

// judged is how many requests the present rule of a key has decided about.
func (w *faultWire) judged(key int16) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.taken[key]
}

// heldNow is how many requests are being held.
func (w *faultWire) heldNow() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.held
}

// release lets what is held go on, and takes every rule away.
func (w *faultWire) release() { w.open(true, true) }

// step lets what is held go on; the rules stay.
func (w *faultWire) step() { w.open(true, false) }

// discard loses what is held, with its connections, and takes every rule away.
func (w *faultWire) discard() { w.open(false, true) }

func (w *faultWire) open(forward, clearRules bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if clearRules {
		clear(w.rules)
	}
	w.gate++
	w.held = 0 // here and not where they wake: whoever looks next must not see them
	w.forward = forward
	w.changed.Broadcast()
}

func (w *faultWire) close() {
	w.mu.Lock()
	w.closed = true
	w.changed.Broadcast()
	for c := range w.conns {
		_ = c.Close() // ends its goroutines
	}
	w.mu.Unlock()
	_ = w.listener.Close()
	w.wg.Wait()
}

func (w *faultWire) accept() {
	for {
		client, err := w.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", w.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		w.mu.Lock()
		w.conns[client], w.conns[server] = struct{}{}, struct{}{}
		if w.closed {
			_ = client.Close()
			_ = server.Close()
		}
		w.mu.Unlock()
		lost := &sync.Map{} // correlation ids whose answers are to be lost
		end := func() {
			_ = client.Close() // whoever is second closes what is closed
			_ = server.Close()
			w.mu.Lock()
			delete(w.conns, client)
			delete(w.conns, server)
			w.mu.Unlock()
		}
		w.wg.Go(func() { defer end(); w.requests(client, server, lost) })
		w.wg.Go(func() { defer end(); answers(client, server, lost) })
	}
}

func (w *faultWire) requests(client, server net.Conn, lost *sync.Map) {
	for {
		frame, err := readFrame(client)
		if err != nil || len(frame) < 12 {
			return
		}
		switch w.judge(int16(binary.BigEndian.Uint16(frame[4:]))) {
		case faultDropRequest:
			return
		case faultDropReply:
			lost.Store(binary.BigEndian.Uint32(frame[8:]), true)
		}
		if _, err := server.Write(frame); err != nil {
			return
		}
	}
}

func answers(client, server net.Conn, lost *sync.Map) {
	for {
		frame, err := readFrame(server)
		if err != nil || len(frame) < 8 {
			return
		}
		if _, is := lost.Load(binary.BigEndian.Uint32(frame[4:])); is {
			return
		}
		if _, err := client.Write(frame); err != nil {
			return
		}
	}
}

// judge decides about a request; a held one waits here.
func (w *faultWire) judge(key int16) faultAct {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen[key]++
	rule := w.rules[key]
	if rule == nil {
		return faultPass
	}
	w.taken[key]++
	act := rule(w.taken[key])
	if act != faultHold {
		return act
	}
	w.held++
	for gate := w.gate; w.gate == gate && !w.closed; {
		w.changed.Wait()
	}
	if w.forward && !w.closed {
		return faultPass
	}
	return faultDropRequest
}

// readFrame reads one frame, its size included.
func readFrame(c net.Conn) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return nil, err
	}
	frame := make([]byte, 4+binary.BigEndian.Uint32(size[:]))
	copy(frame, size[:])
	_, err := io.ReadFull(c, frame[4:])
	return frame, err
}

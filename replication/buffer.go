package replication

import (
	"context"
	"encoding/binary"
	"sync"

	"github.com/walrelay/walrelay/checkpoint"
)

// queue hands messages from the receiver to the loop, in slabs, so that a lock is
// taken once per slab and not once per message. It is bounded in bytes: push blocks
// while the bound is reached, which is the back-pressure that reaches the walsender
// (DESIGN, invariant 8). One goroutine pushes, one takes.
type queue struct {
	limit int64

	mu    sync.Mutex
	slabs []*slab
	bytes int64
	err   error // why the receiver ended; given after the last slab
	free  []*slab

	ready chan struct{} // capacity 1: something was pushed, or err was set
	space chan struct{} // capacity 1: something was taken
}

func newQueue(limit int64) *queue {
	return &queue{limit: limit, ready: make(chan struct{}, 1), space: make(chan struct{}, 1)}
}

const (
	// slabSize is what one socket read at full speed brings, about 300 small rows.
	slabSize = 64 << 10
	// freeSlabs are kept for reuse; more than fit into the bound would never be used.
	freeSlabs = 16
)

// slab is a run of messages: an 8-byte LSN, a 4-byte length (or a keepalive's
// bits), and the payload, over and over.
type slab struct {
	buf  []byte
	read int
	// progress is the offset of a keepalive that is the last entry, so that the next
	// one overwrites it; -1 where the last entry is not one.
	progress int
}

const entryHeader = 12

// add appends a pgoutput message.
func (s *slab) add(lsn checkpoint.LSN, msg []byte) {
	s.buf = binary.LittleEndian.AppendUint64(s.buf, uint64(lsn))
	s.buf = binary.LittleEndian.AppendUint32(s.buf, uint32(len(msg)))
	s.buf = append(s.buf, msg...)
	s.progress = -1
}

// The bits of an entry's length that mark a keepalive; no message is that long.
const (
	keepaliveBit = 1 << 31
	urgentBit    = 1 << 30 // the server asked for a reply
)

// addProgress appends a keepalive's WAL end; keepalives in a row become one.
func (s *slab) addProgress(end checkpoint.LSN, urgent bool) {
	n := uint32(keepaliveBit)
	if urgent {
		n |= urgentBit
	}
	if s.progress >= 0 {
		b := s.buf[s.progress:]
		n |= binary.LittleEndian.Uint32(b[8:])
		binary.LittleEndian.PutUint64(b, uint64(end))
		binary.LittleEndian.PutUint32(b[8:], n)
		return
	}
	s.progress = len(s.buf)
	s.buf = binary.LittleEndian.AppendUint64(s.buf, uint64(end))
	s.buf = binary.LittleEndian.AppendUint32(s.buf, n)
}

// merge appends the entries of o, where a keepalive at the seam takes the place of the
// one before it. Both must be unread.
func (s *slab) merge(o *slab) {
	if s.progress >= 0 && len(o.buf) > 0 {
		const bits = 8 // where an entry's length or bits begin
		if first := binary.LittleEndian.Uint32(o.buf[bits:]); first&keepaliveBit != 0 {
			first |= binary.LittleEndian.Uint32(s.buf[s.progress+bits:])
			binary.LittleEndian.PutUint32(o.buf[bits:], first)
			s.buf = s.buf[:s.progress]
		}
	}
	s.progress = -1
	if o.progress >= 0 {
		s.progress = len(s.buf) + o.progress
	}
	s.buf = append(s.buf, o.buf...)
}

// entry is one message, or one keepalive.
type entry struct {
	lsn       checkpoint.LSN
	msg       []byte
	keepalive bool
	urgent    bool
}

// next gives the next entry; ok is false at the end.
func (s *slab) next() (e entry, ok bool) {
	if s.read == len(s.buf) {
		return entry{}, false
	}
	b := s.buf[s.read:]
	e.lsn = checkpoint.LSN(binary.LittleEndian.Uint64(b))
	n := binary.LittleEndian.Uint32(b[8:])
	s.read += entryHeader
	if n&keepaliveBit != 0 {
		e.keepalive, e.urgent = true, n&urgentBit != 0
		return e, true
	}
	e.msg = b[entryHeader : entryHeader+n : entryHeader+n]
	s.read += int(n)
	return e, true
}

func (q *queue) newSlab() *slab {
	q.mu.Lock()
	defer q.mu.Unlock()
	if n := len(q.free); n > 0 {
		s := q.free[n-1]
		q.free = q.free[:n-1]
		return s
	}
	return &slab{buf: make([]byte, 0, slabSize), progress: -1}
}

// push hands a slab over and blocks while the queue holds its limit. A slab larger
// than the limit passes when the queue is empty, so that no row is too large.
//
// A slab that still fits behind the last one is copied there. On a quiet stream each
// keepalive is a slab of 12 bytes in a buffer of 64 KiB: while nobody takes events, the
// bound of 1 MiB would otherwise let gigabytes pile up.
func (q *queue) push(ctx context.Context, s *slab) error {
	n := int64(len(s.buf))
	for {
		q.mu.Lock()
		if q.bytes == 0 || q.bytes+n <= q.limit {
			q.pushLocked(s)
			q.mu.Unlock()
			signal(q.ready)
			return nil
		}
		q.mu.Unlock()
		select {
		case <-q.space:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (q *queue) pushLocked(s *slab) {
	if n := len(q.slabs); n > 0 {
		if last := q.slabs[n-1]; len(last.buf)+len(s.buf) <= slabSize {
			before := len(last.buf)
			last.merge(s)
			q.bytes += int64(len(last.buf) - before)
			q.recycleLocked(s)
			return
		}
	}
	q.slabs = append(q.slabs, s)
	q.bytes += int64(len(s.buf))
}

// recycleLocked keeps a slab that nobody reads any more for newSlab, unless one large
// message made it grow.
func (q *queue) recycleLocked(s *slab) {
	if cap(s.buf) == slabSize && len(q.free) < freeSlabs {
		s.buf, s.read, s.progress = s.buf[:0], 0, -1
		q.free = append(q.free, s)
	}
}

// close says that nothing more will be pushed, and why.
func (q *queue) close(err error) {
	q.mu.Lock()
	q.err = err
	q.mu.Unlock()
	signal(q.ready)
}

// take gives the oldest slab, or nil where there is none at the moment; then err is
// set if none will ever come. done is the slab taken before, for reuse; its bytes
// count as buffered until it is given back.
func (q *queue) take(done *slab) (*slab, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if done != nil {
		q.bytes -= int64(len(done.buf))
		signal(q.space)
		q.recycleLocked(done)
	}
	if len(q.slabs) == 0 {
		return nil, q.err
	}
	s := q.slabs[0]
	q.slabs[0] = nil
	q.slabs = q.slabs[1:]
	return s, nil
}

// buffered is the number of bytes in the queue, the slab being read included.
func (q *queue) buffered() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.bytes
}

// signal wakes whoever waits on c, without waiting itself.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

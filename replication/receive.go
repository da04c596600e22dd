package replication

import (
	"encoding/binary"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walrelay/walrelay/checkpoint"
)

// receive reads the wire until it ends. It blocks on the queue's bound and so, in
// turn, on the socket: that is the back-pressure.
func (s *Stream) receive() {
	defer s.wg.Done()
	cur := s.queue.newSlab()
	flush := func() error {
		if len(cur.buf) == 0 {
			return nil
		}
		if err := s.queue.push(s.draining, cur); err != nil {
			return err
		}
		cur = s.queue.newSlab()
		return nil
	}
	pace := pace{quiet: newGatherer(s.wire)}
	for {
		// Whatever has arrived is handed over before the next read can block.
		if s.front.ReadBufferLen() == 0 && s.buf.Buffered() == 0 {
			if err := flush(); err != nil {
				s.drain(err)
				return
			}
			pace.wait()
		}
		msg, err := s.receiveMessage()
		if err != nil {
			if ferr := flush(); ferr != nil {
				err = ferr
			}
			s.drain(err)
			return
		}
		if len(cur.buf) > 0 && len(cur.buf)+len(msg)+entryHeader > slabSize {
			if err := flush(); err != nil {
				s.drain(err)
				return
			}
		}
		if err := s.accept(cur, msg); err != nil {
			if ferr := flush(); ferr != nil {
				err = ferr
			}
			s.drain(err)
			return
		}
	}
}

// pace lets messages gather in the socket while the stream is busy. A walsender that is
// slower than we are sends each message in a packet of its own; taking each at once
// would be a system call and two changes of goroutine per row (seen: 14 s of system
// time per million rows, instead of 1).
type pace struct {
	quiet gatherer
	last  time.Time // when the last read found nothing more
	quick int       // how often reads came quickly after another of late
}

func (p *pace) wait() {
	now := time.Now()
	switch gap := now.Sub(p.last); {
	case gap > paceQuiet:
		p.quick = 0
	case gap > paceGap:
		p.quick /= 2 // the server may only have lost its processor for a moment
	default:
		p.quick = min(p.quick+1, paceMost)
	}
	if p.quick >= paceQuick {
		p.quiet.pause(func() { time.Sleep(paceWait) })
		now = time.Now()
	}
	p.last = now
}

// receiveMessage gives the payload of the next CopyData, valid until the next call.
func (s *Stream) receiveMessage() ([]byte, error) {
	for {
		msg, err := s.front.Receive()
		if err != nil {
			return nil, fmt.Errorf("read replication stream: %w", err)
		}
		switch m := msg.(type) {
		case *pgproto3.CopyData:
			return m.Data, nil
		case *pgproto3.ErrorResponse:
			return nil, fmt.Errorf("replication stream: %w", pgconn.ErrorResponseToPgError(m))
		case *pgproto3.CopyDone, *pgproto3.CommandComplete:
			return nil, fmt.Errorf("read replication stream: the server ended it: %w", io.EOF)
		case *pgproto3.NoticeResponse:
			if NoticeTooYoung(&pgconn.Notice{Code: m.Code, Routine: m.Routine}) {
				return nil, fmt.Errorf("replication stream: %w: %s", ErrPublicationTooYoung, m.Message)
			}
		case *pgproto3.ParameterStatus:
		default:
			return nil, fmt.Errorf("read replication stream: message %T was not expected", m)
		}
	}
}

func (s *Stream) accept(cur *slab, msg []byte) error {
	switch {
	case len(msg) >= xlogDataHeader && msg[0] == pglogrepl.XLogDataByteID:
		s.received.Add(uint64(len(msg)))
		cur.add(checkpoint.LSN(binary.BigEndian.Uint64(msg[1:])), msg[xlogDataHeader:])
	case len(msg) == keepaliveSize && msg[0] == pglogrepl.PrimaryKeepaliveMessageByteID:
		urgent := msg[17] != 0
		cur.addProgress(checkpoint.LSN(binary.BigEndian.Uint64(msg[1:])), urgent)
		if urgent {
			signal(s.kick)
		}
	default:
		return &ProtocolError{Reason: fmt.Sprintf("CopyData of %d bytes that is neither WAL data nor a keepalive", len(msg))}
	}
	return nil
}

// drain reads on without keeping anything until the server closes the connection, so
// that Close sees when it has.
func (s *Stream) drain(err error) {
	s.queue.close(err)
	for s.end == nil {
		_, s.end = s.front.Receive()
	}
}

const (
	paceGap   = 200 * time.Microsecond // a read that comes sooner is quick
	paceQuiet = 5 * time.Millisecond   // one that comes later ends a busy stretch
	paceQuick = 16                     // that many make a busy stream; a small transaction is fewer
	paceMost  = 4 * paceQuick
	paceWait  = 500 * time.Microsecond // far below max-delay, for which a busy stream waits anyway
)

// Sizes of the two messages inside CopyData (PostgreSQL documentation, "Streaming
// Replication Protocol").
const (
	xlogDataHeader = 1 + 8 + 8 + 8
	keepaliveSize  = 1 + 8 + 8 + 1
)

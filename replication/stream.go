package replication

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walrelay/walrelay/checkpoint"
)

// DefaultStatusInterval is how often PostgreSQL hears of us at least. A second is
// far below any sensible wal_sender_timeout (60 s by default) and costs nothing.
const DefaultStatusInterval = time.Second

// DefaultBuffer bounds the bytes read from the wire and not yet taken: enough that
// the receiver never waits for the loop at full speed.
const DefaultBuffer = 1 << 20

// StreamOptions says what to stream.
type StreamOptions struct {
	Slot         string
	Publications []string
	// From is where the server begins to send: with what is committed there or later. 0, or
	// one before the slot's confirmed LSN, is that confirmed LSN.
	From checkpoint.LSN
	// Near is a recent transaction id of the cluster with its epoch (NewDecoder).
	Near checkpoint.XID
	// Keys looks primary keys up where RELATION does not tell them; nil for never.
	Keys KeyLookup
	// Buffer bounds the bytes read ahead; DefaultBuffer where 0.
	Buffer int64
	// StatusInterval is how often a status update is sent at least;
	// DefaultStatusInterval where 0.
	StatusInterval time.Duration
}

// System is what IDENTIFY_SYSTEM says of a server.
type System struct {
	checkpoint.Source
	FlushLSN checkpoint.LSN // where the WAL flushed to disk ends
}

// Stream is a logical replication connection. Open, Start, then Next (or TryNext
// with Ready) from one goroutine; Confirm from any. It owns two goroutines, the
// receiver and the sender of status updates, which go on while nobody takes events:
// that keeps the walsender connected while Kafka stands still (DESIGN, invariant 8).
type Stream struct {
	conn *pgconn.PgConn // until Start
	cfg  *pgconn.Config

	wire    net.Conn
	front   *pgproto3.Frontend
	buf     *bufio.Reader
	queue   *queue
	decoder *Decoder
	current *slab
	event   Event
	failed  error // what TryNext ended with

	confirmed atomic.Uint64 // LSN that status updates carry; 0 confirms nothing
	kick      chan struct{} // a status update is wanted now
	received  atomic.Uint64 // bytes of WAL messages received

	stop     context.CancelCauseFunc
	draining context.Context
	wg       sync.WaitGroup
	mu       sync.Mutex    // guards the write deadline, and that the updates end with draining
	reported chan struct{} // closed when no more status updates will be written
	end      error         // how the connection ended; to be read after wg.Wait
}

// ErrSlotActive says that another connection streams from the slot: it holds the
// lease, and this instance is a standby.
var ErrSlotActive = errors.New("replication slot is active")

// ErrPublicationTooYoung says that the server left a change out because a publication
// did not exist when it was written (18 and later; older servers end the stream). What
// was received before it is good; nothing behind it may be delivered.
var ErrPublicationTooYoung = errors.New("a publication is younger than the WAL that the slot reads")

// ErrStreamClosed says that the stream was closed by this side.
var ErrStreamClosed = errors.New("stream closed")

// Open connects in replication mode. cfg comes from WalsenderConfig; the stream
// changes nothing in it.
func Open(ctx context.Context, cfg *pgconn.Config) (*Stream, error) {
	s := &Stream{cfg: cfg.Copy(), kick: make(chan struct{}, 1)}
	s.cfg.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
		// The frontend reads in pieces of 8 KiB; behind a larger buffer that is a copy,
		// in front of a socket it would be a system call per 40 rows.
		s.buf = bufio.NewReaderSize(r, 2*slabSize)
		return pgproto3.NewFrontend(s.buf, w)
	}
	conn, err := ConnectReplication(ctx, s.cfg)
	if err != nil {
		return nil, err
	}
	s.conn = conn
	return s, nil
}

// Identify asks which cluster, database and timeline this is.
func (s *Stream) Identify(ctx context.Context) (System, error) {
	r, err := pglogrepl.IdentifySystem(ctx, s.conn)
	if err != nil {
		return System{}, fmt.Errorf("identify system: %w", err)
	}
	return System{
		Source:   checkpoint.Source{SystemID: r.SystemID, Timeline: r.Timeline, Database: r.DBName},
		FlushLSN: checkpoint.LSN(r.XLogPos),
	}, nil
}

// TimelineHistory reads a timeline's history file; timeline 1 has none.
func (s *Stream) TimelineHistory(ctx context.Context, timeline int32) ([]byte, error) {
	r, err := pglogrepl.TimelineHistory(ctx, s.conn, timeline)
	if err != nil {
		return nil, fmt.Errorf("read history of timeline %d: %w", timeline, err)
	}
	return r.Content, nil
}

// PID is the walsender's process id.
func (s *Stream) PID() uint32 { return s.conn.PID() }

// Start takes the slot and begins to stream. A connector asks for the position 0/0, so
// that the server begins at the slot's confirmed LSN; whoever holds the checkpoint skips
// what it has (DESIGN, invariant 3). Nothing is confirmed before the first Confirm.
// ErrSlotActive where another connection holds the slot.
func (s *Stream) Start(ctx context.Context, o StreamOptions) error {
	args := []string{
		"proto_version '1'",
		"publication_names " + QuoteLiteral(quoteNames(o.Publications)),
		// Messages are always asked for: seq counts them, captured or not, so that a
		// change has one identity under every configuration.
		"messages 'true'",
	}
	slot := `"` + strings.ReplaceAll(o.Slot, `"`, `""`) + `"`
	if err := pglogrepl.StartReplication(ctx, s.conn, slot, pglogrepl.LSN(o.From), pglogrepl.StartReplicationOptions{PluginArgs: args}); err != nil {
		if IsSlotActive(err) {
			return fmt.Errorf("%w: %w", ErrSlotActive, err)
		}
		return fmt.Errorf("start replication from slot %s: %w", o.Slot, err)
	}
	hijacked, err := s.conn.Hijack()
	if err != nil {
		return fmt.Errorf("start replication: take over the connection: %w", err)
	}
	if o.Buffer == 0 {
		o.Buffer = DefaultBuffer
	}
	if o.StatusInterval == 0 {
		o.StatusInterval = DefaultStatusInterval
	}
	s.wire, s.front = hijacked.Conn, hijacked.Frontend
	s.queue = newQueue(o.Buffer)
	s.decoder = NewDecoder(o.Near, o.Keys)
	s.draining, s.stop = context.WithCancelCause(context.WithoutCancel(ctx))
	s.reported = make(chan struct{})
	s.wg.Add(2)
	go s.receive()
	go s.report(o.StatusInterval)
	return nil
}

// Ready is signalled when TryNext may have something again.
func (s *Stream) Ready() <-chan struct{} { return s.queue.ready }

// TryNext returns the next event, or nil where none has arrived; then Ready tells
// when to ask again. Everything that arrived before the connection ended is given
// before its error. An error is final: it is given again and again, because an event
// from behind it would hide what was lost with it.
func (s *Stream) TryNext() (*Event, error) {
	if s.failed != nil {
		return nil, s.failed
	}
	ev, err := s.tryNext()
	s.failed = err
	return ev, err
}

// TypeName gives what the stream said of the type with this OID (Decoder.TypeName).
func (s *Stream) TypeName(oid uint32) (name TypeName, ok bool) { return s.decoder.TypeName(oid) }

func (s *Stream) tryNext() (*Event, error) {
	if ev := s.decoder.More(); ev != nil {
		return ev, nil
	}
	for {
		if s.current == nil {
			next, err := s.queue.take(nil)
			if next == nil {
				return nil, err
			}
			s.current = next
		}
		e, ok := s.current.next()
		if !ok {
			next, err := s.queue.take(s.current)
			s.current = next
			if next == nil {
				return nil, err
			}
			continue
		}
		if e.keepalive {
			if s.decoder.InTransaction() {
				continue // its WAL end lies before the open transaction's commit: no news
			}
			s.event = Event{Kind: KindProgress, LSN: e.lsn, Urgent: e.urgent}
			return &s.event, nil
		}
		ev, err := s.decoder.Decode(e.lsn, e.msg)
		if ev != nil || err != nil {
			return ev, err
		}
	}
}

// Next waits for the next event.
func (s *Stream) Next(ctx context.Context) (*Event, error) {
	for {
		if ev, err := s.TryNext(); ev != nil || err != nil {
			return ev, err
		}
		select {
		case <-s.Ready():
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Confirm lets PostgreSQL forget everything that ends at or before lsn.
//
// Invariant 1 (durable before confirmed): the caller has committed a checkpoint at
// or past lsn. A confirmed LSN never goes back.
func (s *Stream) Confirm(lsn checkpoint.LSN) {
	for {
		old := s.confirmed.Load()
		if uint64(lsn) <= old {
			return
		}
		if s.confirmed.CompareAndSwap(old, uint64(lsn)) {
			signal(s.kick)
			return
		}
	}
}

// Confirmed is the LSN that status updates carry.
func (s *Stream) Confirmed() checkpoint.LSN { return checkpoint.LSN(s.confirmed.Load()) }

// Txn gives the source transaction that has begun and not ended, as far as events were
// taken. It is not for use beside Next.
func (s *Stream) Txn() (t Transaction, open bool) { return s.decoder.txn, s.decoder.open }

// Buffered is the number of bytes received and not yet taken.
func (s *Stream) Buffered() int64 { return s.queue.buffered() }

// Received is the number of bytes of WAL messages received so far.
func (s *Stream) Received() uint64 { return s.received.Load() }

// report sends status updates: at the interval, and when kicked by a confirm or by
// a keepalive that asks for a reply.
func (s *Stream) report(interval time.Duration) {
	defer s.wg.Done()
	defer close(s.reported)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var buf []byte
	for {
		select {
		case <-tick.C:
		case <-s.kick:
		case <-s.draining.Done():
			return
		}
		if !s.mayReport(10*time.Second + interval) {
			return
		}
		buf = appendStatus(buf[:0], checkpoint.LSN(s.confirmed.Load()), time.Now())
		if _, err := s.wire.Write(buf); err != nil {
			// The receiver sees the end of the connection too, and tells.
			s.wire.Close()
			return
		}
	}
}

// mayReport gives the next status update its time, unless the stream is being closed:
// then the deadline is Close's.
func (s *Stream) mayReport(budget time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draining.Err() == nil && s.wire.SetWriteDeadline(time.Now().Add(budget)) == nil
}

// appendStatus appends a standby status update in its CopyData frame.
//
// Write, flush and apply are all the confirmed LSN, explicitly: a flush position of
// 0 confirms nothing, and a client library that fills it in with the write position
// would confirm what Kafka does not have (DESIGN, invariant 1).
func appendStatus(dst []byte, confirmed checkpoint.LSN, now time.Time) []byte {
	dst = append(dst, 'd')
	dst = binary.BigEndian.AppendUint32(dst, 4+1+4*8+1)
	dst = append(dst, pglogrepl.StandbyStatusUpdateByteID)
	for range 3 {
		dst = binary.BigEndian.AppendUint64(dst, uint64(confirmed))
	}
	dst = binary.BigEndian.AppendUint64(dst, uint64(now.UnixMicro()-pgEpoch))
	return append(dst, 0) // no reply wanted
}

// Close sends the last confirmed LSN and waits, within ctx (5 s where it has no
// deadline), until the server has read it and let the slot go. An error says that this is
// not known: the slot may still be held, and may stand at an older LSN. The connection is
// closed in any case. A stream that was never started is just closed.
func (s *Stream) Close(ctx context.Context) error {
	if s.wire == nil {
		return s.conn.Close(ctx)
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(5 * time.Second)
	}
	s.mu.Lock()
	s.stop(ErrStreamClosed) // the receiver drains from here on
	err := s.wire.SetDeadline(deadline)
	s.mu.Unlock()
	release := context.AfterFunc(ctx, func() { _ = s.wire.SetDeadline(time.Now()) })
	defer release()
	// An update behind the terminate message would find a closed socket there, whose
	// reset could overtake what we wait for.
	<-s.reported
	if err == nil {
		_, err = s.wire.Write(append(appendStatus(nil, checkpoint.LSN(s.confirmed.Load()), time.Now()), 'X', 0, 0, 0, 4))
	}
	// The server reads both even in the middle of a large transaction, and closes the
	// connection once the slot is released; waiting for that makes "exit 0" mean that
	// the confirm arrived.
	if err != nil {
		s.wire.Close()
	}
	s.wg.Wait()
	if err == nil && !errors.Is(s.end, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("wait for the server to take the last confirm: %w", s.end)
	}
	_ = s.wire.Close() // the server has closed its side, or err tells
	if err != nil {
		return fmt.Errorf("close replication stream: %w", err)
	}
	return nil
}

// Abort closes the connection at once, without a last status update.
func (s *Stream) Abort() {
	if s.wire == nil {
		s.conn.Conn().Close()
		return
	}
	s.stop(ErrStreamClosed)
	s.wire.Close()
	s.wg.Wait()
}

// quoteNames gives publication names as pgoutput's option wants them: identifiers,
// separated by commas.
func quoteNames(names []string) string {
	quoted := make([]string, len(names))
	for i, n := range names {
		quoted[i] = `"` + strings.ReplaceAll(n, `"`, `""`) + `"`
	}
	return strings.Join(quoted, ",")
}

// QuoteLiteral writes a text as SQL, where a parameter cannot stand.
func QuoteLiteral(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

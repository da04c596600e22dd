package relay

import (
	"context"
	"fmt"
	"sync"

	"github.com/walrelay/walrelay/replication"
)

// primary opens connections to where tables are read, when that is not where the stream
// comes from. A crash there takes commits that MVCC snapshots have seen, gives their
// transaction ids to others, and does not end the stream, which comes from a standby. So
// one connection stays open, as a witness: while it lives there was no crash, and once it
// is lost everything that was learnt from the primary is void and the session ends.
type primary struct {
	open replication.Connector
	lost chan error // has room for one

	mu      sync.Mutex
	witness *replication.Conn
}

func newPrimary(open replication.Connector) *primary {
	return &primary{open: open, lost: make(chan error, 1)}
}

// connect is a replication.Connector.
func (p *primary) connect(ctx context.Context, opts ...replication.ConnOption) (*replication.Conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.witness == nil {
		witness, err := p.open(ctx)
		if err != nil {
			return nil, err
		}
		p.witness = witness
	}
	conn, err := p.open(ctx, opts...)
	if err != nil {
		return nil, err
	}
	// Asked behind the new connection: what is read over it comes from the same life of the
	// server as all that was read before.
	if err := p.ask(ctx); err != nil {
		_ = conn.Close(ctx) // the session ends
		return nil, err
	}
	return conn, nil
}

// alive asks the witness, if there is one.
func (p *primary) alive(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.witness == nil {
		return nil
	}
	return p.ask(ctx)
}

func (p *primary) ask(ctx context.Context) error {
	err := p.witness.Ping(ctx)
	if err == nil || ctx.Err() != nil && !p.witness.IsClosed() {
		return err
	}
	err = fmt.Errorf("the connection to the primary, on which tables are read, was lost: %w", err)
	select {
	case p.lost <- err:
	default: // once is enough
	}
	return err
}

// close ends the witness. No connect may be running.
func (p *primary) close(ctx context.Context) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.witness != nil {
		_ = p.witness.Close(ctx) // nothing hangs on it
	}
}

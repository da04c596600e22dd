package snapshot

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/replication"
)

const (
	// idleConnection is how long a connection without orders is kept: between two chunks
	// it is milliseconds, after the snapshot it would be for ever.
	idleConnection = time.Minute
	// retryFrom and retryUpTo bound the time between two attempts.
	retryFrom, retryUpTo = 50 * time.Millisecond, 5 * time.Second
	// lockReport is the time between two log lines about one table's lock.
	lockReport = time.Minute
	// keptArenas per reader: one being filled, two in the Merger's hands.
	keptArenas = 3
	// orderRoom is how many orders may wait for each reader before Do blocks.
	orderRoom = 16
)

// ReaderOptions of Readers.
type ReaderOptions struct {
	// Connect opens a connection to the primary: a standby's snapshot does not tell which
	// transactions are in progress.
	Connect      replication.Connector
	N            int      // connections; at least 1
	Publications []string // those that the stream names
	Logger       zerolog.Logger
}

// Readers are connections that carry out orders, each in a transaction of its own. Orders
// go in by Do, answers come out of Chunks, in no particular order; Recycle gives their
// memory back. What passes by itself, lost connections and locked tables, they wait out:
// every order is answered, unless Close comes first.
type Readers struct {
	o      ReaderOptions
	orders chan *Order
	chunks chan *Chunk
	done   <-chan struct{}
	stop   context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex // guards what follows
	free   []Rows
	shapes map[uint32]*replication.Relation
	places map[uint32]place
	sizes  map[uint32]float64 // bytes per row, of the chunks before
	locked map[uint32]time.Time
	down   bool // an outage was said in the log
}

// NewReaders starts o.N readers. They end with ctx, or with Close, which must be called.
// Connections are made when there is something to do.
func NewReaders(ctx context.Context, o ReaderOptions) *Readers {
	n := max(1, o.N)
	ctx, stop := context.WithCancel(ctx)
	r := &Readers{
		o: o, done: ctx.Done(), stop: stop, orders: make(chan *Order, n*orderRoom), chunks: make(chan *Chunk, n),
		shapes: map[uint32]*replication.Relation{}, places: map[uint32]place{}, sizes: map[uint32]float64{}, locked: map[uint32]time.Time{},
	}
	for range n {
		r.wg.Add(1)
		go r.work(ctx)
	}
	return r
}

// Do takes an order. It blocks only while many more orders are out than there are readers.
func (r *Readers) Do(order *Order) {
	select {
	case r.orders <- order:
	case <-r.done:
	}
}

// Chunks gives the answers. It is never closed.
func (r *Readers) Chunks() <-chan *Chunk { return r.chunks }

// Recycle takes the memory of a chunk back, which nobody must use any more. Each piece of
// an OrderWhole has to come back, or the next but one is not read.
func (r *Readers) Recycle(c *Chunk) {
	if c.slot != nil {
		<-c.slot
		c.slot = nil
	}
	rows := c.Rows
	c.Rows, c.Xmins = Rows{}, nil
	r.keep(rows, c.Order.Bytes)
}

// keep keeps memory for the next chunk, unless a large row made it grow far beyond what a
// chunk may take.
func (r *Readers) keep(rows Rows, limit int64) {
	if rows.arena == nil || limit > 0 && int64(cap(rows.arena)) > 2*limit {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.free) < keptArenas*max(1, r.o.N) {
		r.free = append(r.free, rows)
	}
}

func (r *Readers) take(columns int) Rows {
	r.mu.Lock()
	defer r.mu.Unlock()
	var rows Rows
	if n := len(r.free); n > 0 {
		rows, r.free[n-1] = r.free[n-1], Rows{}
		r.free = r.free[:n-1]
	}
	rows.Reset(columns)
	return rows
}

// Close ends the readers and waits until they have. Orders that are not answered stay so.
func (r *Readers) Close() {
	r.stop()
	r.wg.Wait()
}

// work is one reader.
func (r *Readers) work(ctx context.Context) {
	defer r.wg.Done()
	w := &reader{r: r, ctx: ctx}
	defer w.disconnect()
	idle := time.NewTimer(idleConnection)
	defer idle.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-idle.C:
			w.disconnect()
		case o := <-r.orders:
			w.carryOut(o)
			idle.Reset(idleConnection)
		}
	}
}

// carryOut answers an order, however long it takes.
func (w *reader) carryOut(o *Order) {
	wait := retryFrom
	for w.ctx.Err() == nil {
		if o.Cancelled() {
			w.send(&Chunk{Order: o, Last: true})
			return
		}
		used := w.conn != nil
		err := w.attempt(o)
		if err == nil || w.ctx.Err() != nil {
			w.r.recovered()
			return
		}
		var fatal *fatalError
		switch {
		case errors.As(err, &fatal):
			w.send(&Chunk{Order: o, Err: fatal.err})
			return
		case errors.Is(err, errMoved):
		case used && w.conn == nil:
			// A connection that nobody used for a while may have ended long ago.
		default:
			w.r.lost(err, o)
		}
		if w.headSent {
			w.send(&Chunk{Order: o, Broken: true})
			return
		}
		select {
		case <-w.ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, retryUpTo)
	}
}

// send hands a chunk over; false when the readers are being closed.
func (w *reader) send(c *Chunk) bool {
	select {
	case w.r.chunks <- c:
		return true
	case <-w.ctx.Done():
		return false
	}
}

// lost says, once per outage, that reading does not go on for now; of a locked table now
// and then.
func (r *Readers) lost(err error, o *Order) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if codeOf(err) == codeLockNotAvailable {
		if now := time.Now(); now.Sub(r.locked[o.Table.OID]) >= lockReport {
			r.locked[o.Table.OID] = now
			r.o.Logger.Warn().Str("table", o.Table.String()).
				Msg("the snapshot waits for a lock on the table: find who holds it in pg_locks, with mode AccessExclusiveLock")
		}
		return
	}
	if r.down {
		return
	}
	r.down = true
	r.o.Logger.Warn().Err(err).Str("table", o.Table.String()).Msg("the snapshot cannot be read for now; trying again until it can")
}

func (r *Readers) recovered() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.down {
		r.down = false
		r.o.Logger.Info().Msg("the snapshot is read again")
	}
}

// shape gives the known Relation where d's says the same, so that plans made for it live on.
func (r *Readers) shape(d *description) {
	r.mu.Lock()
	defer r.mu.Unlock()
	oid := d.table.OID
	r.places[oid] = d.table.place()
	if known := r.shapes[oid]; known != nil && sameRelation(known, d.shape.Relation) {
		d.shape.Relation = known
		return
	}
	r.shapes[oid] = d.shape.Relation
}

func (r *Readers) place(oid uint32) (place, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, ok := r.places[oid]
	return p, ok
}

func (r *Readers) forget(oid uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.places, oid)
}

// rowLimit lowers the number of rows so that they will fit into the order's bytes, as far
// as the chunks before tell: a query that is cancelled has read too much.
func (r *Readers) rowLimit(o *Order) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	size := r.sizes[o.Table.OID]
	if o.Bytes <= 0 || size <= 0 {
		return o.Rows
	}
	fit := max(1, int(min(float64(o.Bytes)/size, 1<<30)))
	if o.Rows <= 0 || fit < o.Rows {
		return fit
	}
	return o.Rows
}

// learn takes what a chunk's rows were like.
func (r *Readers) learn(o *Order, rows *Rows) {
	if rows.Len() == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	size := float64(max(1, rows.Bytes())) / float64(rows.Len())
	if before := r.sizes[o.Table.OID]; before > size {
		size = (before + size) / 2 // rises at once, falls by halves
	}
	r.sizes[o.Table.OID] = size
}

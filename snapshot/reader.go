package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

const (
	// lockTimeout bounds one wait for a table: its lock is asked for again and again, so
	// that the reader stays free to be closed and says what it waits for.
	lockTimeout = "5s"
	// cancelBudget bounds a cancel request. Where it fails the connection is given up.
	cancelBudget = 5 * time.Second
	// disconnectBudget bounds the goodbye.
	disconnectBudget = time.Second
	// flushPoll is how often the WAL's flushed end is looked at. The WAL writer flushes
	// every 200 ms by default.
	flushPoll = 20 * time.Millisecond

	minSample   = 10      // sampled rows per range, for ranges to be worth anything
	samplePages = 40      // per range
	minSplit    = 4 << 20 // bytes per range, below which a table is not parted
	pageSize    = 8 << 10 // PostgreSQL's default; only the sample's size depends on it
	percentAll  = 100.0   // of a table's pages
	suffix      = " snapshot"
)

// reader is one connection and what it works on.
type reader struct {
	r    *Readers
	ctx  context.Context
	conn *pgx.Conn
	wire *wire
	role string
	// headSent tells that the order's first chunk, of an OrderWhole, is out already.
	headSent bool
}

// fatalError is an error that no retry mends.
type fatalError struct{ err error }

func (e *fatalError) Error() string { return e.err.Error() }
func (e *fatalError) Unwrap() error { return e.err }

var (
	// errMoved tells that a table was renamed, dropped or changed its kind between the look
	// at its name and its lock.
	errMoved = errors.New("the table is not where it was")
	errCut   = errors.New("enough rows")
	errStop  = errors.New("the order was cancelled")
)

func (w *reader) connect() error {
	if w.conn != nil && !w.conn.IsClosed() {
		return nil
	}
	w.disconnect()
	conn, err := w.r.o.Connect(w.ctx, func(c *pgconn.Config) {
		c.BuildFrontend = func(r io.Reader, out io.Writer) *pgproto3.Frontend {
			w.wire = newWire(r)
			return pgproto3.NewFrontend(w.wire, out)
		}
		if name := c.RuntimeParams["application_name"]; name != "" {
			c.RuntimeParams["application_name"] = name + suffix
		}
		// The source does not suffer: a chunk takes one process there, and compiling its
		// query would take longer than reading it.
		c.RuntimeParams["max_parallel_workers_per_gather"] = "0"
		c.RuntimeParams["jit"] = "off"
	})
	if err != nil {
		return err
	}
	w.conn, w.role = conn, conn.Config().User
	if conn.PgConn().ParameterStatus("server_encoding") == "SQL_ASCII" {
		// As in the stream: such a server checks what it cannot convert, and refuses bytes
		// that are no UTF-8.
		if _, err := w.simple("SET client_encoding = 'SQL_ASCII'"); err != nil {
			return err
		}
	}
	return nil
}

func (w *reader) disconnect() {
	if w.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.ctx), disconnectBudget)
	defer cancel()
	_ = w.conn.Close(ctx) // its work is done
	w.conn, w.wire = nil, nil
}

// attempt carries an order out once. No transaction is open when it returns.
func (w *reader) attempt(o *Order) error {
	w.headSent = false
	if err := w.connect(); err != nil {
		w.disconnect()
		return err
	}
	err := w.execute(o)
	w.wire.sink = nil
	if err != nil {
		w.rollback()
	}
	return err
}

// rollback ends what is left of a transaction, or the connection.
func (w *reader) rollback() {
	switch {
	case w.conn.IsClosed():
		w.disconnect()
	case w.conn.PgConn().TxStatus() != 'I':
		if _, err := w.simple("ROLLBACK"); err != nil || w.conn.PgConn().TxStatus() != 'I' {
			w.disconnect()
		}
	}
}

// simple runs statements in one round trip.
func (w *reader) simple(sql string) ([]*pgconn.Result, error) {
	return w.conn.PgConn().Exec(w.ctx, sql).ReadAll()
}

func (w *reader) execute(o *Order) error {
	if o.Kind == OrderSnapshot {
		return w.snapshot(o, false)
	}
	at, ok := w.r.place(o.Table.OID)
	if !ok {
		var err error
		if at, ok, err = w.find(o.Table.OID); err != nil {
			return w.classify(err, o, place{o.Table.Schema, o.Table.Name, false}, false)
		}
		if !ok {
			return w.snapshot(o, true)
		}
	}
	d, err := w.begin(o, at)
	if err != nil {
		return err
	}
	if d.gone {
		w.r.forget(o.Table.OID)
		if err := w.commit(); err != nil {
			return err
		}
		c := d.chunk(o)
		c.Gone, c.Shape = true, Shape{}
		w.send(c)
		return nil
	}
	w.r.shape(d)
	switch o.Kind {
	case OrderPlan:
		return w.plan(o, d)
	case OrderRange, OrderKeys:
		return w.rows(o, d)
	case OrderWhole:
		return w.whole(o, d)
	}
	return &fatalError{fmt.Errorf("read %s: order of unknown kind %d", o.Table, o.Kind)}
}

// snapshot answers with the MVCC snapshot alone.
func (w *reader) snapshot(o *Order, gone bool) error {
	results, err := w.simple("SELECT " + nowSQL)
	if err != nil {
		return w.classify(err, o, place{}, false)
	}
	d, err := parseNow(results[0].Rows[0])
	if err != nil {
		return &fatalError{fmt.Errorf("read MVCC snapshot: %w", err)}
	}
	if o.Flushed {
		if err := w.flushed(o, d.lsn); err != nil {
			return err
		}
	}
	c := d.chunk(o)
	c.Gone, c.Last = gone, true
	w.send(c)
	return nil
}

// find looks a table's name up: LOCK knows tables by nothing else, and a query for it
// inside the transaction would take the snapshot before the lock.
func (w *reader) find(oid uint32) (p place, ok bool, err error) {
	results, err := w.simple(`SELECT n.nspname, c.relname, c.relkind FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p') AND c.oid = ` + strconv.FormatUint(uint64(oid), 10))
	if err != nil || len(results[0].Rows) == 0 {
		return place{}, false, err
	}
	row := results[0].Rows[0]
	return place{schema: string(row[0]), name: string(row[1]), partitioned: string(row[2]) == "p"}, true, nil
}

// begin opens the transaction: the lock first, which takes no snapshot. A rewriting ALTER
// TABLE and a TRUNCATE are not MVCC-safe, so that a snapshot from before one finds the
// table empty after it. Then the first query takes the snapshot and describes the table.
func (w *reader) begin(o *Order, at place) (*description, error) {
	sort := "on"
	if o.Kind == OrderRange && o.Table.Identity == nil {
		// The key's index gives the order. What the planner saves by sorting, where its
		// statistics are old, it pays again with every chunk.
		sort = "off"
	}
	results, err := w.simple("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL row_security = off; SET LOCAL lock_timeout = '" + lockTimeout +
		"'; SET LOCAL enable_sort = " + sort + "; SET LOCAL enable_incremental_sort = " + sort + "; LOCK TABLE " + at.from() + " IN ACCESS SHARE MODE; " +
		describeSQL(replication.ServerMajor(w.conn.PgConn()), w.r.o.Publications, o.Table.OID))
	if err != nil {
		switch codeOf(err) {
		case codeUndefinedTable, codeWrongObjectType, codeInvalidSchemaName:
			w.r.forget(o.Table.OID)
			return nil, errMoved
		case codeInsufficientPrivilege:
			if _, cached := w.r.place(o.Table.OID); cached {
				w.r.forget(o.Table.OID) // the name may be another table's by now
				return nil, errMoved
			}
		}
		return nil, w.classify(err, o, at, false)
	}
	last := results[len(results)-1]
	if len(last.Rows) != 1 {
		return nil, &fatalError{fmt.Errorf("describe %s: %d rows, want 1", at, len(last.Rows))}
	}
	d, err := parseDescription(last.Rows[0], o.Table)
	if err != nil {
		return nil, &fatalError{fmt.Errorf("describe %s: %w", at, err)}
	}
	if !d.gone && d.table.place() != at {
		// What was locked is another table.
		w.r.forget(o.Table.OID)
		return nil, errMoved
	}
	return &d, nil
}

func (w *reader) commit() error {
	_, err := w.simple("COMMIT")
	return err
}

// chunk is an answer that says what is known so far.
func (d *description) chunk(o *Order) *Chunk {
	return &Chunk{Order: o, Snapshot: d.snapshot, LSN: d.lsn, Time: d.time, Shape: d.shape}
}

// rows answers an OrderRange or OrderKeys.
func (w *reader) rows(o *Order, d *description) error {
	c := d.chunk(o)
	columns := d.keys
	if o.Kind == OrderKeys {
		columns = d.identity
	}
	if !reads(columns, o.Key) {
		// Its key is another one: the answer is the shape.
		if err := w.commit(); err != nil {
			return err
		}
		w.send(c)
		return nil
	}
	s := &sink{columns: len(d.shape.Relation.Columns), xmin: o.Xmin, next: d.snapshot.Xmax}
	var sql string
	limit := 0
	if o.Kind == OrderKeys {
		sql = d.selectSQL(o, oneOf(columns, o.Keys), "")
	} else {
		limit = w.r.rowLimit(o)
		sql = d.rangeSQL(o, limit)
		s.limit, s.full = o.Bytes, func() error { return w.cut(s, limit) }
	}
	rows := w.r.take(s.columns)
	s.rows = &rows
	if err := w.query(sql+"; COMMIT", s); err != nil {
		w.r.keep(rows, o.Bytes)
		return w.classify(err, o, d.table.place(), true)
	}
	w.r.learn(o, &rows)
	c.Rows, c.Xmins = rows, s.xmins
	c.Last = o.Kind == OrderKeys || !s.cut && (limit <= 0 || rows.Len() < limit)
	if o.Flushed {
		if err := w.flushed(o, d.lsn); err != nil {
			return err
		}
	}
	w.send(c)
	return nil
}

// reads tells whether rows can be read by a key of these columns.
func reads(columns []keyColumn, key []string) bool {
	if len(key) == 0 || len(columns) != len(key) {
		return false
	}
	for i, k := range columns {
		if k.Name != key[i] {
			return false
		}
	}
	return true
}

// query runs a query whose rows go to the sink. Where the sink has cut it short its
// error, and the connection's, are no errors.
func (w *reader) query(sql string, s *sink) error {
	w.wire.sink = s
	results := w.conn.PgConn().Exec(w.ctx, sql)
	for results.NextResult() {
		_, err := results.ResultReader().Close()
		if err != nil {
			break
		}
	}
	err := results.Close()
	w.wire.sink = nil
	if err == nil || w.ctx.Err() != nil {
		return err
	}
	if s.cut {
		w.rollback()
		return nil
	}
	return err
}

// cut ends a range's query when its bytes are used up. The chunk ends at the row just
// taken; what the server has sent of the next ones is thrown away. The request has an
// answer before the query has one, so that it cannot hit the statement behind it.
func (w *reader) cut(s *sink, limit int) error {
	s.done = true
	if limit > 0 && s.rows.Len() >= limit {
		return nil // it was the last one anyway
	}
	s.cut = true
	ctx, cancel := context.WithTimeout(w.ctx, cancelBudget)
	defer cancel()
	if err := w.conn.PgConn().CancelRequest(ctx); err != nil {
		return errCut // ends the connection
	}
	return nil
}

// whole answers an OrderWhole, piece by piece. At most two pieces are out at a time; the
// server waits, and so does its transaction.
func (w *reader) whole(o *Order, d *description) error {
	if o.Flushed {
		if err := w.flushed(o, d.lsn); err != nil {
			return err
		}
	}
	slots := make(chan struct{}, 2)
	s := &sink{columns: len(d.shape.Relation.Columns), xmin: o.Xmin, next: d.snapshot.Xmax, limit: o.Bytes, count: o.Rows}
	var rows Rows
	next := func() error {
		if o.Cancelled() {
			return errStop
		}
		select {
		case slots <- struct{}{}:
		case <-w.ctx.Done():
			return w.ctx.Err()
		}
		rows = w.r.take(s.columns)
		s.rows, s.xmins = &rows, nil
		return nil
	}
	hand := func(last bool) error {
		c := d.chunk(o)
		c.Rows, c.Xmins, c.Last, c.slot = rows, s.xmins, last, slots
		rows = Rows{}
		if !w.send(c) {
			return w.ctx.Err()
		}
		return nil
	}
	s.full = func() error {
		if err := hand(false); err != nil {
			return err
		}
		return next()
	}
	sql := d.selectSQL(o, "", "")
	if !w.send(d.chunk(o)) {
		return w.ctx.Err()
	}
	w.headSent = true
	if err := next(); err != nil {
		return w.stopped(o, err)
	}
	if err := w.query(sql+"; COMMIT", s); err != nil {
		return w.stopped(o, w.classify(err, o, d.table.place(), true))
	}
	return hand(true)
}

// stopped answers an order that was cancelled on the way; any other error is given back.
func (w *reader) stopped(o *Order, err error) error {
	if !o.Cancelled() {
		return err
	}
	w.rollback()
	w.send(&Chunk{Order: o, Last: true})
	return nil
}

// flushed waits until the WAL up to lsn is on disk. No transaction is open meanwhile,
// but for an OrderWhole's. A connection that is lost means that the server may have
// crashed, and undone what was read.
func (w *reader) flushed(o *Order, lsn checkpoint.LSN) error {
	tick := time.NewTicker(flushPoll)
	defer tick.Stop()
	for !o.Cancelled() {
		results, err := w.simple("SELECT pg_catalog.pg_current_wal_flush_lsn()::text")
		if err != nil {
			return w.classify(err, o, place{}, false)
		}
		end, err := checkpoint.ParseLSN(string(results[0].Rows[0][0]))
		if err != nil {
			return &fatalError{fmt.Errorf("read the WAL's flushed end: %w", err)}
		}
		if end >= lsn {
			return nil
		}
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			return w.ctx.Err()
		}
	}
	return nil
}

// classify gives err back where it passes, and makes it final where it does not.
func (w *reader) classify(err error, o *Order, at place, rows bool) error {
	if w.ctx.Err() != nil || isPassing(err) {
		return err
	}
	return &fatalError{refuse(err, at, w.role, rows && (o.Where != "" || o.Table.Where != ""))}
}

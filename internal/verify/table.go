package verify

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/router/format"
	"github.com/walrelay/walrelay/snapshot"
)

// pieceBytes is how much of the table is handed over at a time, where memory allows; two
// pieces are out at most.
const pieceBytes = 2 << 20

// limit is how many keys are left to the next look, before it looks at all.
func (c *compared) limit() int { return int(c.o.Memory / 512) }

// quiet is how long the table may be read without a row before the connection is looked at.
const quiet = 10 * time.Second

// compared is one look at one table.
type compared struct {
	*run
	look
	table  snapshot.Table
	report TableReport

	form    *router.RowForm
	rel     *replication.Relation
	mvcc    snapshot.MVCC
	lsn     checkpoint.LSN
	settled checkpoint.LSN // every transaction that committed below it is seen
	before  horizon        // with format.envelope: false; taken before the snapshot
	keyless bool
	exact   bool // keyless: updates and deletes are in the topic too
	never   bool // no snapshot has read the table
	deleted bool // the topic's oldest records are gone
	sample  sample
	rows    *spill
	moved   *keySet
	entry   []byte
	value   []byte
	hashed  [digestSize]byte

	comparison comparison
	events     events
}

func (c *compared) kind() string {
	switch {
	case c.table.Outbox:
		return KindOutbox
	case c.keyless:
		return KindKeyless
	}
	return KindTable
}

// once reads both sides and compares them. errAgain asks for another look.
func (c *compared) once(ctx context.Context) (err error) {
	cp, err := c.checkpoint(ctx)
	if err != nil {
		return err
	}
	if err := c.snapshotDone(cp); err != nil {
		return err
	}
	c.settled = cp.Position.LSN
	// Where the topic ends before our snapshot is taken: rows of a connector's snapshot
	// behind it may be newer than ours.
	var begin ends
	if !c.table.Outbox {
		if _, begin, err = c.topics.list(ctx, c.o.Router.TableTopic(c.table.Schema, c.table.Name)); err != nil {
			return err
		}
	}
	if c.first() {
		c.sample = sample{n: c.o.Sample}
	}
	c.rows = newSpill(c.o.TempDir, c.o.Memory/8, 0)
	topic := newSpill(c.o.TempDir, c.o.Memory/8, 0)
	defer func() {
		if e := errors.Join(c.rows.close(), topic.close()); err == nil {
			err = e
		}
	}()
	if c.format().Bare && !c.table.Outbox {
		if c.before, err = c.horizon(ctx); err != nil {
			return err
		}
	}
	// The table is read while the topic is, unless the one decides what is read of the other.
	g, gctx := errgroup.WithContext(ctx)
	opened, read := make(chan struct{}), make(chan struct{})
	g.Go(func() error { return c.readTable(gctx, opened, read) })
	g.Go(func() error {
		ready := opened
		if c.table.Outbox || c.sample.n > 0 {
			ready = read
		}
		select {
		case <-ready:
		case <-gctx.Done():
			return gctx.Err()
		}
		return c.readTopics(gctx, begin, topic)
	})
	if err := g.Wait(); err != nil {
		return err
	}
	c.report.Kind, c.report.Snapshot, c.report.LSN = c.kind(), c.mvcc.String(), c.lsn.String()
	return c.comparison.run(topic, c.rows)
}

// snapshotDone refuses a table that a snapshot has not read yet.
func (c *compared) snapshotDone(cp checkpoint.Checkpoint) error {
	p, known := cp.Tables[c.table.OID]
	c.never = !known
	c.events.began = p.Began
	if !known || p.State == checkpoint.TableDone {
		return nil
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("the snapshot of %s is not done: %s, %d rows are delivered", c.table, p.State, p.Rows),
		Risk:   "rows that were not read yet would look like a difference",
		Remedy: "let walrelay run go on, and verify when its snapshot is done (walrelay status, /status)",
	}
}

// readTable reads the table under one snapshot and puts its rows aside. opened is closed
// when the snapshot is known, read when all rows are.
func (c *compared) readTable(ctx context.Context, opened, read chan struct{}) error {
	readers := snapshot.NewReaders(ctx, snapshot.ReaderOptions{Connect: c.o.Connect, N: 1, Publications: c.names, Logger: c.o.Logger})
	defer readers.Close()
	readers.Do(&snapshot.Order{Kind: snapshot.OrderWhole, Table: c.table, Bytes: min(pieceBytes, c.o.Memory/32)})
	var tuple replication.Tuple
	tick := time.NewTicker(quiet)
	defer tick.Stop()
	for {
		var chunk *snapshot.Chunk
		select {
		case chunk = <-readers.Chunks():
		case <-tick.C:
			// The reader goes on until it can read; a connection of ours tells whether it may.
			if err := c.conn.Ping(ctx); err != nil {
				return fmt.Errorf("look whether PostgreSQL is there: %w", err)
			}
			continue
		case <-ctx.Done():
			return ctx.Err()
		}
		switch {
		case chunk.Err != nil:
			return chunk.Err
		case chunk.Gone, chunk.Broken:
			return errAgain
		}
		if c.form == nil {
			if err := c.open(ctx, chunk); err != nil {
				return err
			}
			close(opened)
		}
		for i := range chunk.Rows.Len() {
			tuple = chunk.Rows.Tuple(i, tuple)
			if err := c.row(tuple); err != nil {
				return err
			}
		}
		readers.Recycle(chunk)
		if chunk.Last {
			close(read)
			return nil
		}
	}
}

// open takes what the first chunk tells of the table.
func (c *compared) open(ctx context.Context, chunk *snapshot.Chunk) (err error) {
	c.mvcc, c.lsn, c.rel = chunk.Snapshot, chunk.LSN, chunk.Shape.Relation
	if err := c.begin(c.rel); err != nil {
		return err
	}
	if c.form, err = c.router.RowForm(c.rel); err != nil {
		return fmt.Errorf("plan the rows: %w", err)
	}
	if c.before.settledBy(c.mvcc) {
		c.settled = max(c.settled, c.before.lsn)
	}
	c.moved = newKeySet(c.limit())
	k := &c.comparison
	*k = comparison{look: c.look, dir: c.o.TempDir, budget: c.o.Memory / 4, threshold: ^uint64(0), report: &c.report, left: newKeySet(c.limit()), judge: judgeKey}
	if c.digests {
		k.judge = judgeDigests
	}
	if c.table.Outbox {
		if k.judge = c.events.judge; c.digests {
			k.judge = c.events.judgeDigests
		}
		return c.events.open(ctx, c)
	}
	c.keyless = !c.form.Keyed()
	c.report.Topic, k.topic = c.form.Topic(), c.form.Topic()
	if c.keyless {
		// Of a table without a replica identity the publication has inserts alone.
		c.exact = c.rel.Identity == replication.IdentityFull
		if c.exact && c.format().Bare {
			return &checkpoint.Refusal{
				What:   fmt.Sprintf("%s has no key, and with format.envelope: false its updates do not tell which row they replace", c.table),
				Risk:   "the topic cannot be folded, by whoever reads it",
				Remedy: "give the table a primary key, or set format.envelope: true; tables with a key can be verified either way",
			}
		}
		k.judge = judgeRows(c.exact)
		return nil
	}
	k.marks = c.form.Unavailable()
	k.defaults, err = c.defaults(ctx)
	return err
}

func (c *compared) format() Format { return c.o.Format }

// row puts one row aside.
func (c *compared) row(tuple replication.Tuple) (err error) {
	c.report.Rows++
	if c.table.Outbox {
		return c.events.row(c, tuple)
	}
	if c.keyless {
		if c.value, err = c.form.AppendRow(c.value[:0], tuple); err != nil {
			return c.unencodable(err)
		}
		hash := c.hash(c.value)
		if !c.sample.take(hash) || !c.only.has(hash) {
			return nil
		}
		return c.put(hash, row{key: c.value})
	}
	if c.value, err = c.form.AppendKey(c.value[:0], tuple); err != nil {
		return c.unencodable(err)
	}
	n := len(c.value)
	hash := c.hash(c.value)
	if !c.sample.take(hash) || !c.only.has(hash) {
		return nil
	}
	if c.value, err = c.form.AppendRow(c.value, tuple); err != nil {
		return c.unencodable(err)
	}
	return c.put(hash, row{key: c.value[:n], value: c.digest(&c.hashed, c.value[n:])})
}

// put puts a row aside by its key's hash, which stands for the key in the first look.
func (c *compared) put(hash uint64, r row) error {
	if c.digests {
		c.entry = appendRow(c.entry[:0], hash, r.value)
	} else {
		c.entry = r.append(c.entry[:0])
	}
	return c.rows.add(hash, c.entry)
}

// unencodable counts a row that has no form in a record, and so is a dead letter.
func (c *compared) unencodable(err error) error {
	var fault *router.RouteError
	if !errors.As(err, &fault) {
		return err
	}
	if c.first() {
		c.report.letters++
	}
	return nil
}

// readTopics waits for the connector and puts aside what is in the topics.
func (c *compared) readTopics(ctx context.Context, begin ends, topic *spill) error {
	cp, err := c.caughtUp(ctx, c.lsn)
	if err != nil {
		return err
	}
	if err := c.snapshotDone(cp); err != nil {
		return errAgain
	}
	k := &c.comparison
	if threshold, sampled := c.sample.threshold(); sampled {
		k.threshold, k.sampled, c.report.Sampled = threshold, true, true
	}
	if c.table.Outbox {
		return c.events.readTopics(ctx, c, topic)
	}
	start, end, err := c.topics.list(ctx, k.topic)
	if err != nil {
		return err
	}
	for _, offset := range start {
		c.deleted = c.deleted || offset > 0
	}
	s := &records{
		look: c.look, format: c.format(), snapshot: c.mvcc, lsn: c.lsn, settled: c.settled, begin: begin, keyless: c.keyless, bald: len(c.rel.Columns) == 0,
		threshold: k.threshold, out: topic, truncated: map[int32]order{}, last: map[int32]*passed{}, report: &c.report, comparer: k, moved: c.moved,
	}
	for _, t := range c.tables {
		if t.OID != c.table.OID && !t.Outbox && c.o.Router.TableTopic(t.Schema, t.Name) == k.topic {
			if s.schema, s.table, err = quoted(c.table.Schema, c.table.Name); err != nil {
				return err
			}
		}
	}
	if s.table != nil && c.format().Bare {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("topic %s holds several tables, and with format.envelope: false its records do not tell of which they are", k.topic),
			Risk:   "rows of one table would look like those of another",
			Remedy: "give each table a topic (topics.table), or set format.envelope: true",
		}
	}
	if err := c.topics.read(ctx, k.topic, start, end, s.take); err != nil {
		return err
	}
	s.count()
	k.truncated, k.read = s.truncated, s.read
	if s.restarted {
		return errAgain
	}
	return nil
}

// quoted gives names as records have them.
func quoted(schema, table string) (s, t []byte, err error) {
	if s, err = format.AppendString(nil, []byte(schema)); err == nil {
		t, err = format.AppendString(nil, []byte(table))
	}
	if err != nil {
		return nil, nil, fmt.Errorf("encode a table's name: %w", err)
	}
	return s, t, nil
}

// defaults gives what PostgreSQL shows in columns that are younger than a row, by the
// column's name in quotes. There is no WAL of it, so that no record can hold it.
func (c *compared) defaults(ctx context.Context) (map[string][]byte, error) {
	rows, err := c.conn.Query(ctx, `
SELECT DISTINCT ON (a.attname) a.attname::text, (a.attmissingval::text::text[])[1]
  FROM pg_catalog.pg_attribute a
 WHERE a.attrelid IN (SELECT $1::pg_catalog.oid UNION SELECT relid::pg_catalog.oid FROM pg_catalog.pg_partition_tree($1::pg_catalog.oid::pg_catalog.regclass))
   AND a.atthasmissing AND NOT a.attisdropped`, c.rel.OID)
	if err != nil {
		return nil, fmt.Errorf("read the defaults of %s: %w", c.table, err)
	}
	texts := map[string]string{}
	var name string
	var text *string
	if _, err := pgx.ForEachRow(rows, []any{&name, &text}, func() error {
		if text != nil {
			texts[name] = *text
		}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the defaults of %s: %w", c.table, err)
	}
	if len(texts) == 0 {
		return nil, nil
	}
	tuple := make(replication.Tuple, len(c.rel.Columns))
	for i, column := range c.rel.Columns {
		tuple[i].Kind = replication.ValueNull
		if text, ok := texts[column.Name]; ok {
			tuple[i] = replication.Value{Kind: replication.ValueText, Text: []byte(text)}
		}
	}
	encoded, err := c.form.AppendRow(nil, tuple)
	if err != nil {
		return nil, fmt.Errorf("encode the defaults of %s: %w", c.table, err)
	}
	defaults := map[string][]byte{}
	m := object(encoded)
	for name, v, ok := m.next(); ok; name, v, ok = m.next() {
		if !isNull(v) {
			defaults[string(name)] = v
		}
	}
	return defaults, nil
}

// notes says what the numbers do not.
func (c *compared) notes(r *TableReport) {
	note := func(text string, args ...any) { r.Notes = append(r.Notes, fmt.Sprintf(text, args...)) }
	if c.never && !c.table.Outbox && r.Missing+r.Differing > 0 {
		note("no snapshot has read this table (snapshot.mode, snapshot.exclude): rows from before the connector's first start are not in the topic; walrelay snapshot reads them")
	}
	if c.deleted {
		note("the topic no longer begins at offset 0: retention has deleted records, and rows that were not changed since are missing with them; compact the topic, or read the table again with walrelay snapshot --replace")
	}
	if r.unsettled > 0 {
		note("%d of the differences are of transactions that committed while this looked, whose records do not tell their xid: verify again when less is written", r.unsettled)
	}
	if r.doubtful > 0 {
		note("%d keys were written each time this looked; they are equal to what they were at one moment of it (format.envelope: false)", r.doubtful)
	}
	if r.defaulted > 0 {
		note("%d rows have columns that no record holds, as they were added later; they count as equal, since the table has there NULL or the default that PostgreSQL gives to such rows", r.defaulted)
	}
	if r.partial {
		note("columns that rows have kept from an earlier key were not compared where that key is outside of the sample, or the row left it while this looked")
	}
	if r.gone > 0 {
		note("%d rows are in the topic and no longer in the table: it is published by its inserts alone, so that they may have been deleted or updated", r.gone)
	}
	if c.table.Outbox {
		note("events whose rows are gone from the table cannot be checked, but for being there twice")
	}
	if r.unjudged > 0 {
		note("%d marked rows have no event: they may have been published before the connector's first start (outbox[].snapshot)", r.unjudged)
	}
	if n := r.letters; n > 0 {
		note("%d rows cannot become records, and are dead letters (%s)", n, c.o.Router.DeadLetterTopic)
	}
}

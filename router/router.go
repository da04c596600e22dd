package router

import (
	"errors"
	"fmt"
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// Options says what a Router captures and how its records look.
type Options struct {
	Name     string // source.name
	Database string // source.db

	// Tables tells which tables are captured; outbox tables are, whatever it says.
	Tables func(schema, table string) bool
	// Messages tells which logical-message prefixes are captured.
	Messages func(prefix string) bool
	// Keys names record keys by "schema.table" where a table has none or another one
	// is wanted.
	Keys   map[string][]string
	Outbox []OutboxOptions
	// Columns says by "schema.table" which columns are masked or left out. Nothing of a
	// table leaves without it being asked, dead letters and errors included.
	Columns map[string]ColumnOptions

	// TableTopic gives the topic of a table; only characters that Kafka takes.
	TableTopic   func(schema, table string) string
	MessageTopic string
	Prefix       string // {prefix} in an outbox's templates
	// TopicPrefix stands for {prefix} in an outbox's topic, and in front of one without it,
	// where the records are delivered beside the live ones; empty: they are not. Everything
	// but the topic stays what it is.
	TopicPrefix string
	// Replay is the id of a replay, which its records carry as a header; empty for none.
	Replay string

	Tombstones bool
	// ToastMarker stands for an unchanged TOAST value; nil leaves the column out.
	ToastMarker *string
	// Debezium makes records of `types: debezium`; nil makes plain ones.
	Debezium *DebeziumOptions
	// Unwrapped leaves out the envelope: a value is the row itself.
	Unwrapped bool
	// DeletedField puts a last value with "__deleted":true before an unwrapped row's
	// tombstone. Rows of tables without a key have it in any case: no tombstone tells
	// which of them is gone.
	DeletedField bool

	// CheckpointTopic is where the stored position is; no change may be routed there.
	CheckpointTopic string

	DeadLetterTopic string
	// DeadLetterOn are the reasons that make a change a dead letter; any other stops
	// the stream with *StopError, and so do all where it is empty.
	DeadLetterOn []string

	// Aside is told of each dead letter; nil where nobody wants to know.
	Aside func(table, reason, position string)
	// Sequence is told of events whose aggregate_seq leaves a gap or goes backwards; nil
	// where nobody wants to know.
	Sequence func(*SequenceFault)
	// Polled tells that rows are read from tables and not from the stream: there is no
	// position, and their records have no such header.
	Polled bool

	// Types describes a type that is not built in; nil where it is unknown, whose text
	// then becomes a JSON string.
	Types func(oid uint32) (*format.Type, error)
	// TypesAt makes sure that what Types says of composite types holds for what was
	// written at lsn; changed tells that what it said before does not. It is asked for
	// each transaction with a change of a table that has one, and may be nil.
	TypesAt func(lsn checkpoint.LSN) (changed bool, err error)
}

// Topics finds the topics that records go to.
type Topics interface {
	// Lookup gives what is known of a topic, or nil. It is called once per plan and
	// once per event of an outbox.
	Lookup(name string) *Topic
}

// Router turns changes into records. It is pure but for Options.Types and TypesAt, which
// may ask the catalog. One goroutine owns it.
type Router struct {
	o      Options
	topics Topics
	enc    format.Encoder
	plans  map[uint32]*tablePlan // by relation OID
	// readPlans are those of snapshot rows: their relation is another pointer than the
	// stream's, and the two take turns.
	readPlans map[uint32]*tablePlan
	last      *tablePlan
	shape     shape
	// claimed remembers which table has which topic, so that two never meet in one
	// because characters were rewritten.
	claimed map[string]*replication.Relation
	// messageOutboxes are the plans of message prefixes whose messages are events.
	messageOutboxes map[string]*outboxPlan
	// guards are the tables of Options.Columns by OID, under whichever name; nil before
	// Guard is called.
	guards map[uint32]*guard

	rejected map[string]rejection // topics of events that cannot be had
	outboxes map[uint32]string    // outbox tables by OID, under whichever name

	scratch scratch
	event   event
	filled  replication.Tuple // reused by fill
	writing rowRecord         // reused by row
}

// NewRouter makes a Router.
func NewRouter(o Options, topics Topics) (*Router, error) {
	r := &Router{
		o: o, topics: topics, plans: map[uint32]*tablePlan{}, readPlans: map[uint32]*tablePlan{},
		claimed: map[string]*replication.Relation{},
	}
	var err error
	if r.shape, err = newShape(o); err != nil {
		return nil, err
	}
	return r, r.planMessages()
}

// Check tries a table's configuration on its columns of today, before anything is
// created, and says what an outbox's columns were taken for. inserts tells that nothing
// but inserts will come, which need no replica identity.
func (r *Router) Check(rel *replication.Relation, inserts bool) (recognised []string, err error) {
	if err := r.Guard(rel); err != nil {
		return nil, err
	}
	p, err := r.newPlan(rel, false)
	if err != nil {
		var refusal *checkpoint.Refusal
		if errors.As(err, &refusal) {
			return nil, err
		}
		return nil, &checkpoint.Refusal{
			What:   fmt.Sprintf("table %s.%s does not fit its configuration", rel.Schema, rel.Name),
			Risk:   "the stream would stop at its first row",
			Remedy: "correct the table's entry under outbox or source.keys",
			Err:    err,
		}
	}
	if p.outbox != nil {
		return p.outbox.recognised(), nil
	}
	if inserts || p.excluded {
		return nil, nil
	}
	return nil, p.needsIdentity()
}

// OutboxUses tells what an outbox's events take from each column of rel, by the column's
// name. rel must have passed Check.
func (r *Router) OutboxUses(rel *replication.Relation) (map[string][]string, error) {
	p, err := r.newPlan(rel, false)
	if err != nil || p.outbox == nil {
		return nil, err
	}
	return p.outbox.uses(), nil
}

// MissingTopicError says that a topic has to be looked up, or created, before the
// change can be routed. Nothing was added to the batch; route the change again.
type MissingTopicError struct{ Topic string }

// Error names the topic.
func (e *MissingTopicError) Error() string { return "topic " + e.Topic + " is not known yet" }

// StopError says that a change cannot be delivered and that the configuration wants
// the stream to stop there.
type StopError struct {
	Reason   string // as in dead-letter.on
	Table    string
	Key      string
	Position string
	Err      error
}

// Error names the change, why, and the way on.
func (e *StopError) Error() string {
	way := "correct the row"
	if e.Reason == ReasonOversize {
		way = "raise the topic's max.message.bytes"
	}
	at := ", position " + e.Position
	if e.Position == "" {
		at = ""
	}
	return fmt.Sprintf("deliver a change of %s, key %s%s: %v; %s, or set dead-letter.on-error to dead-letter with %s in dead-letter.on to put such changes aside",
		e.Table, e.Key, at, e.Err, way, e.Reason)
}

func (e *StopError) Unwrap() error { return e.Err }

// Route appends the records of c to b, or counts c as excluded. On an error nothing
// was appended.
//
// Invariant 6 (nothing vanishes silently): every path through Route either appends
// records, counts the change, or returns an error that stops the stream.
func (r *Router) Route(c *replication.Change, b *Batch) error {
	m := b.mark()
	err := r.route(c, b)
	if err == nil {
		return nil
	}
	b.truncate(m)
	var fault *RouteError
	if errors.As(err, &fault) {
		if err = r.deadLetter(c, b, fault); err != nil {
			b.truncate(m)
		}
	}
	return err
}

func (r *Router) route(c *replication.Change, b *Batch) error {
	if c.Op == replication.OpMessage {
		return r.message(c, b)
	}
	p, err := r.plan(c)
	if err != nil {
		return err
	}
	switch {
	case p.outbox != nil && (c.Op == replication.OpCreate || c.Op == replication.OpRead):
		return r.outboxEvent(p, c, b)
	case p.excluded || p.outbox != nil:
		// Marking and cleaning are an outbox's normal life: not events.
		b.tally(p.topicName, outcomeExcluded)
		return nil
	}
	if p.topic == nil {
		if p.topic = r.topics.Lookup(p.topicName); p.topic == nil {
			return &MissingTopicError{Topic: p.topicName}
		}
	}
	if p.key == nil && p.topic.Compacted {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("table %s has no key, and its topic %s is compacted (cleanup.policy), where Kafka takes no null key", p.label, p.topicName),
			Risk:   "its changes cannot be delivered",
			Remedy: fmt.Sprintf("name a key under source.keys, or set cleanup.policy=delete on %s, or exclude the table with \"!%s\" under source.tables", p.topicName, p.label),
		}
	}
	if c.Read != nil {
		r.shape.beginRead(c.Read)
	} else {
		r.shape.beginTxn(c.Txn)
	}
	switch c.Op {
	case replication.OpCreate, replication.OpRead:
		return r.row(p, c, b, rowRecord{op: c.Op, after: c.New, key: c.New})
	case replication.OpUpdate:
		return r.update(p, c, b)
	case replication.OpDelete:
		return r.delete(p, c, b, otherKey{})
	case replication.OpTruncate:
		return r.truncate(p, c, b)
	}
	return fmt.Errorf("route change of %s: operation %q is unknown", p.label, byte(c.Op))
}

// outboxEvent turns an inserted outbox row into an event on its topic.
func (r *Router) outboxEvent(p *tablePlan, c *replication.Change, b *Batch) error {
	r.scratch.reset()
	return r.appendOutbox(p.outbox, c.New, c, b)
}

// appendOutbox appends the event of a row, a table's or a message's.
func (r *Router) appendOutbox(p *outboxPlan, row replication.Tuple, c *replication.Change, b *Batch) error {
	if err := p.appendEvent(&r.event, &r.scratch, row); err != nil {
		return err
	}
	ev := &r.event
	topic := r.topics.Lookup(ev.Topic)
	if topic == nil {
		if why, ok := r.rejection(ev.Topic); ok {
			return &RouteError{Reason: ReasonRoute, Detail: why}
		}
		return &MissingTopicError{Topic: ev.Topic}
	}
	rec := record{topic: topic, key: b.put(ev.Key), value: b.put(ev.Value)}
	if ev.NullValue {
		rec.value = nullSpan
	}
	at := len(b.headers)
	for _, h := range ev.Headers {
		b.headers = append(b.headers, header{name: h.Key, value: b.put(h.Value)})
	}
	r.positionHeader(c, b)
	rec.headers = span{at: at, n: len(b.headers) - at}
	switch {
	case ev.Partition >= 0:
		if n := topic.partitions(); ev.Partition >= int64(n) {
			return &RouteError{Reason: ReasonRoute, Detail: fmt.Sprintf(
				"the row names partition %d, and topic %s has %d, from 0 on; correct the row's column, or add partitions", ev.Partition, ev.Topic, n)}
		}
		rec.where, rec.partition = placeAt, int32(ev.Partition)
	case ev.Key == nil:
		rec.where = placeAlone
	}
	if err := r.add(b, rec, ev.Topic); err != nil {
		return err
	}
	p.observe(row, r.o.Sequence)
	return nil
}

// put copies v into the arena; nil becomes null.
func (b *Batch) put(v []byte) span {
	if v == nil {
		return nullSpan
	}
	at := len(b.arena)
	b.arena = append(b.arena, v...)
	return b.spanFrom(at)
}

// message turns a captured logical message into a record.
func (r *Router) message(c *replication.Change, b *Batch) error {
	if p := r.messageOutboxes[c.Message.Prefix]; p != nil {
		return r.messageEvent(p, c, b)
	}
	if !r.o.Messages(c.Message.Prefix) {
		b.tally(r.o.MessageTopic, outcomeExcluded)
		return nil
	}
	topic := r.topics.Lookup(r.o.MessageTopic)
	if topic == nil {
		return &MissingTopicError{Topic: r.o.MessageTopic}
	}
	key, value, err := r.encodeMessage(c, b)
	if err != nil {
		return err
	}
	headers := r.positionHeader(c, b)
	return r.add(b, record{topic: topic, key: key, value: value, headers: headers}, r.o.MessageTopic)
}

// add appends a record if it fits into its topic.
func (r *Router) add(b *Batch, rec record, topicName string) error {
	size := recordSize(b, &rec)
	if limit := min(int(rec.topic.MaxMessageBytes), maxRecordBytes); size > limit {
		return &RouteError{Reason: ReasonOversize, Detail: fmt.Sprintf(
			"the record takes %d bytes, topic %s takes %d (max.message.bytes)", size, topicName, limit)}
	}
	b.records = append(b.records, rec)
	return nil
}

// maxRecordBytes is what a request has room for, whatever the topic takes: neither the
// client nor a broker with its default settings (socket.request.max.bytes) deals with
// requests of more than 100 MiB. The rest is for the request's other fields.
const maxRecordBytes = 100<<20 - 64<<10

// recordBatchOverhead is what a record batch of one record adds to it: the batch
// header of 61 bytes (Kafka documentation, "Record Batch"), and up to 11 that the
// client sets aside for lengths when it fills batches.
const recordBatchOverhead = 61 + 11

// recordSize is the size of a record batch with this one record, before
// compression, which is what max.message.bytes is held against.
func recordSize(b *Batch, rec *record) int {
	n := recordBatchOverhead + 5 /* length */ + 1 /* attributes */ + 1 + 1 /* deltas */ + 5 + 5 /* key, value */ + 2
	n += max(rec.key.n, 0) + max(rec.value.n, 0)
	for _, h := range b.headers[rec.headers.at : rec.headers.at+rec.headers.n] {
		n += len(h.name) + max(h.value.n, 0) + 2 + 5
	}
	return n
}

// deadLetter puts a change aside, with the reason, in the same Kafka transaction; or
// stops where the configuration says so.
func (r *Router) deadLetter(c *replication.Change, b *Batch, fault *RouteError) error {
	table, sourceTopic := r.nameOf(c)
	var position []byte
	if !r.o.Polled {
		position = appendPosition(nil, c)
	}
	if !slices.Contains(r.o.DeadLetterOn, fault.Reason) {
		return &StopError{
			Reason: fault.Reason, Table: table, Key: r.keyText(c), Err: fault,
			Position: string(position),
		}
	}
	topic := r.topics.Lookup(r.o.DeadLetterTopic)
	if topic == nil {
		return &MissingTopicError{Topic: r.o.DeadLetterTopic}
	}
	counted := sourceTopic
	if r.event.Topic != "" && r.outboxOf(c) != nil {
		sourceTopic = r.event.Topic // where the event would have gone, valid or not
		if fault.Reason != ReasonRoute {
			counted = sourceTopic // a topic that exists
		}
	}
	rec := record{topic: topic, key: r.deadLetterKey(c, b, int(topic.MaxMessageBytes)/4), dead: true}
	if rec.key.n < 0 && topic.Compacted {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("the dead-letter topic %s is compacted (cleanup.policy), where Kafka takes no null key, and a change of %s has none", topic.Name, table),
			Risk:   "the change cannot be put aside, and dead letters of one key replace each other",
			Remedy: fmt.Sprintf("set cleanup.policy=delete on %s", topic.Name),
		}
	}
	at := len(b.headers)
	b.headers = append(b.headers,
		header{name: "reason", value: b.put([]byte(fault.Reason))},
		header{name: "source-topic", value: b.put([]byte(sourceTopic))})
	r.positionHeader(c, b)
	rec.headers = span{at: at, n: len(b.headers) - at}
	if rec.key.n < 0 {
		rec.where = placeAlone
	}
	limit := int(topic.MaxMessageBytes) - recordSize(b, &rec)
	letterTable := table
	if c.Relation == nil {
		letterTable = "" // the letter has the message itself
	}
	start := len(b.arena)
	var whole bool
	b.arena, whole = appendDeadLetter(b.arena, &deadLetter{
		Reason: fault.Reason, Error: fault.Detail, Table: letterTable,
		Position: position, Change: c, Columns: r.columnsOf(c), Text: c.Relation == nil && r.outboxOf(c) != nil,
	}, limit)
	b.lastCut = !whole
	rec.value = b.spanFrom(start)
	if err := r.add(b, rec, topic.Name); err != nil {
		return fmt.Errorf("write a dead letter for %s: %w", table, err)
	}
	// A name that cannot be a topic's is made of the row, and each would be a series of
	// its own: such an event counts for its table.
	b.tally(counted, outcomeDeadLettered)
	if r.o.Aside != nil {
		r.o.Aside(table, fault.Reason, string(position))
	}
	return nil
}

// messageCommit stands for the commit LSN of a message that is not transactional. One
// less than the end of its record is no commit's LSN, since records are aligned, and
// lies before the next one's.
func messageCommit(c *replication.Change) checkpoint.LSN { return c.LSN - 1 }

// appendPosition appends what the position header of a change's records says.
func appendPosition(dst []byte, c *replication.Change) []byte {
	switch {
	case c.Read != nil:
		return checkpoint.AppendSnapshotHeader(dst, c.Read.CommitLSN)
	case c.Txn == nil:
		return checkpoint.AppendHeader(dst, messageCommit(c), 0)
	}
	return checkpoint.AppendHeader(dst, c.Txn.CommitLSN, c.Seq)
}

// positionHeader appends the header "position", if there is one, and a replay's own, and
// returns their span of headers.
func (r *Router) positionHeader(c *replication.Change, b *Batch) span {
	if r.o.Polled {
		return span{at: len(b.headers)}
	}
	at := len(b.arena)
	b.arena = appendPosition(b.arena, c)
	b.headers = append(b.headers, header{name: "position", value: b.spanFrom(at)})
	if r.o.Replay == "" {
		return span{at: len(b.headers) - 1, n: 1}
	}
	at = len(b.arena)
	b.arena = append(b.arena, r.o.Replay...)
	b.headers = append(b.headers, header{name: "replay", value: b.spanFrom(at)})
	return span{at: len(b.headers) - 2, n: 2}
}

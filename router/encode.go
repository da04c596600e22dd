package router

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// tablePlan is what is known of a relation once, so that a row costs only its bytes.
type tablePlan struct {
	rel       *replication.Relation
	label     string // schema.table
	topicName string
	topic     *Topic // nil until looked up
	excluded  bool
	outbox    *outboxPlan

	columns []columnPlan
	key     []int // indexes of the record key's columns, in the table's order; nil for none
	// keyBeyondIdentity tells that updates and deletes do not carry the key.
	keyBeyondIdentity bool
	source            []byte // `"connector":…,"table":"orders"`
}

type columnPlan struct {
	name   []byte // `"name":`
	append format.Append
}

// plan finds or makes the plan of a change's relation.
func (r *Router) plan(c *replication.Change) (*tablePlan, error) {
	rel := c.Relation
	if r.last != nil && r.last.rel == rel {
		return r.last, nil
	}
	plans := r.plans
	if c.Read != nil {
		plans = r.readPlans
	}
	p := plans[rel.OID]
	if p == nil || p.rel != rel {
		var err error
		if p, err = r.newPlan(rel); err != nil {
			return nil, fmt.Errorf("plan records of %s.%s: %w", rel.Schema, rel.Name, err)
		}
		plans[rel.OID] = p
	}
	r.last = p
	return p, nil
}

func (r *Router) newPlan(rel *replication.Relation) (*tablePlan, error) {
	p := &tablePlan{rel: rel, label: rel.Schema + "." + rel.Name}
	for i := range r.o.Outbox {
		o := &r.o.Outbox[i]
		if o.Schema == rel.Schema && o.Table == rel.Name {
			var err error
			p.topicName = strings.ToValidUTF8(p.label, "_") // for metrics only
			p.outbox, err = compileOutbox(rel, o, r.o.Prefix, r.validTopic)
			return p, err
		}
	}
	p.topicName = r.o.TableTopic(rel.Schema, rel.Name)
	if !r.o.Tables(rel.Schema, rel.Name) {
		p.excluded = true
		return p, nil
	}
	if err := r.claimTopic(p); err != nil {
		return nil, err
	}
	for _, c := range rel.Columns {
		t := format.Builtin(c.TypeOID)
		if t == nil && r.o.Types != nil {
			var err error
			if t, err = r.o.Types(c.TypeOID); err != nil {
				return nil, fmt.Errorf("look up the type of column %s: %w", c.Name, err)
			}
		}
		p.columns = append(p.columns, columnPlan{name: format.QuoteName(c.Name), append: r.enc.Plain(t)})
	}
	if err := p.chooseKey(r.o.Keys[p.label]); err != nil {
		return nil, err
	}
	p.source = append(p.source, r.origin...)
	p.source = append(p.source, `,"schema":`...)
	var err error
	if p.source, err = format.AppendString(p.source, []byte(rel.Schema)); err != nil {
		return nil, err
	}
	p.source = append(p.source, `,"table":`...)
	p.source, err = format.AppendString(p.source, []byte(rel.Name))
	return p, err
}

// validTopic is ValidTopicName, and keeps events out of the checkpoint topic: one with
// the key "state" or "position" would be read as the connector's own.
func (r *Router) validTopic(name string) error {
	if name != "" && name == r.o.CheckpointTopic {
		return &TopicNameError{Name: name, Reason: "it is the checkpoint topic, which holds this connector's position"}
	}
	return ValidTopicName(name)
}

// claimTopic makes sure that rewriting characters does not bring two tables into
// one topic, where their keys would mix.
func (r *Router) claimTopic(p *tablePlan) error {
	if err := r.validTopic(p.topicName); err != nil {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("table %s cannot have the topic %s: %v", p.label, p.topicName, err),
			Risk:   "its rows cannot be delivered there",
			Remedy: fmt.Sprintf("change topics.table, or exclude the table under source.tables (\"!%s\")", p.label),
		}
	}
	other := r.claimed[p.topicName]
	if other == nil || other.OID == p.rel.OID { // the same table, renamed perhaps
		r.claimed[p.topicName] = p.rel
		return nil
	}
	if r.meetByTemplate(other, p.rel) {
		return nil
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("tables %s.%s and %s meet in topic %s, because Kafka does not take some characters of their names", other.Schema, other.Name, p.label, p.topicName),
		Risk:   "rows of the two tables could not be told apart",
		Remedy: fmt.Sprintf("exclude one under source.tables (\"!%s\"), or rename it", p.label),
	}
}

// ClaimTopic takes the topic of a table before its first row, so that two tables that
// meet in one end the start with a *checkpoint.Refusal, and not the stream weeks later.
func (r *Router) ClaimTopic(oid uint32, schema, table string) error {
	rel := &replication.Relation{OID: oid, Schema: schema, Name: table}
	return r.claimTopic(&tablePlan{rel: rel, label: schema + "." + table, topicName: r.o.TableTopic(schema, table)})
}

// meetByTemplate tells that a and b differ in nothing but what the topics.table
// template itself leaves out: they are meant to share a topic.
func (r *Router) meetByTemplate(a, b *replication.Relation) bool {
	schemaCounts := r.o.TableTopic("a", "a") != r.o.TableTopic("b", "a")
	tableCounts := r.o.TableTopic("a", "a") != r.o.TableTopic("a", "b")
	return (a.Schema == b.Schema || !schemaCounts) && (a.Name == b.Name || !tableCounts)
}

// chooseKey takes the configured key, or the table's own.
func (p *tablePlan) chooseKey(configured []string) error {
	if len(configured) == 0 {
		p.key = p.rel.Key()
		return nil
	}
	for _, name := range configured {
		found := false
		for i, c := range p.rel.Columns {
			if c.Name == name {
				found = true
				p.keyBeyondIdentity = p.keyBeyondIdentity || !c.Identity
				p.key = append(p.key, i)
			}
		}
		if !found {
			return &checkpoint.Refusal{
				What:   fmt.Sprintf("source.keys names column %q of %s, which has no such column", name, p.label),
				Risk:   "its records would have no key",
				Remedy: "name columns that the table has, or remove the entry",
			}
		}
	}
	slices.Sort(p.key) // columns stand in the table's order, in keys too
	p.key = slices.Compact(p.key)
	return nil
}

// beginTxn caches what all records of a source transaction share.
func (r *Router) beginTxn(t *replication.Transaction) {
	if r.txn == t.CommitLSN {
		return
	}
	r.txn = t.CommitLSN
	r.tsMillis = append(r.tsMillis[:0], `,"ts_ms":`...)
	r.tsMillis = strconv.AppendInt(r.tsMillis, t.CommitTime.UnixMilli(), 10)
	r.tsMillis = append(r.tsMillis, `,"source":{`...)
	r.txnPart = append(r.txnPart[:0], `,"tx_id":`...)
	r.txnPart = strconv.AppendUint(r.txnPart, uint64(t.XID), 10)
	r.txnPart = append(r.txnPart, `,"commit_lsn":"`...)
	r.txnPart = t.CommitLSN.Append(r.txnPart)
	r.txnPart = append(r.txnPart, `"`...)
}

// beginRead caches what all rows of a chunk share, up to the end of their values.
func (r *Router) beginRead(at *replication.ReadPoint) {
	if r.read == *at && len(r.readMillis) > 0 {
		return
	}
	r.read = *at
	r.readMillis = append(r.readMillis[:0], `,"ts_ms":`...)
	r.readMillis = strconv.AppendInt(r.readMillis, at.Time.UnixMilli(), 10)
	r.readMillis = append(r.readMillis, `,"source":{`...)
	r.readPart = append(r.readPart[:0], `,"tx_id":null,"commit_lsn":"`...)
	r.readPart = at.CommitLSN.Append(r.readPart)
	r.readPart = append(r.readPart, `","lsn":null,"seq":null,"snapshot":true}}`...)
}

// rowRecord is one record of a row to be written.
type rowRecord struct {
	op            replication.Op
	before, after replication.Tuple
	beforeIsKey   bool
	key           replication.Tuple
	previousKey   span // zero: none
}

// row appends one record of a row: its key, its value, its headers.
func (r *Router) row(p *tablePlan, c *replication.Change, b *Batch, w rowRecord) error {
	rec := record{topic: p.topic, key: nullSpan}
	if p.key == nil {
		rec.where = placeAlone
	} else {
		at := len(b.arena)
		var err error
		if b.arena, err = r.appendKey(b.arena, p, w.key, c.Old); err != nil {
			return err
		}
		rec.key = b.spanFrom(at)
	}
	at := len(b.arena)
	var err error
	b.arena = append(b.arena, `{"before":`...)
	if b.arena, err = r.appendRow(b.arena, p, w.before, nil, w.beforeIsKey); err != nil {
		return err
	}
	b.arena = append(b.arena, `,"after":`...)
	if b.arena, err = r.appendRow(b.arena, p, w.after, r.fill(p, c), false); err != nil {
		return err
	}
	b.arena = r.appendSource(b.arena, p, c, w.op)
	rec.value = b.spanFrom(at)
	rec.headers = r.positionHeader(c, b)
	if w.previousKey.n > 0 {
		b.headers = append(b.headers, header{name: "previous-key", value: w.previousKey})
		rec.headers.n++
	}
	return r.add(b, rec, p.topicName)
}

// fill gives the tuple that has the values which the new row of c leaves out: the old
// row where it is whole, else its key, whose other columns are made unchanged TOAST
// values too, since the nulls there mean nothing.
func (r *Router) fill(p *tablePlan, c *replication.Change) replication.Tuple {
	if !c.OldIsKey || len(c.New) == 0 {
		return c.Old
	}
	r.filled = append(r.filled[:0], c.Old...)
	for i := range r.filled {
		if !p.rel.Columns[i].Identity {
			r.filled[i] = replication.Value{Kind: replication.ValueUnchanged}
		}
	}
	return r.filled
}

// envelope appends a value without rows.
func (r *Router) envelope(p *tablePlan, c *replication.Change, b *Batch, op replication.Op) span {
	at := len(b.arena)
	b.arena = append(b.arena, `{"before":null,"after":null`...)
	b.arena = r.appendSource(b.arena, p, c, op)
	return b.spanFrom(at)
}

// appendSource appends everything behind the rows.
func (r *Router) appendSource(dst []byte, p *tablePlan, c *replication.Change, op replication.Op) []byte {
	dst = append(dst, `,"op":"`...)
	dst = append(dst, byte(op), '"')
	if c.Read != nil {
		dst = append(dst, r.readMillis...)
		dst = append(dst, p.source...)
		return append(dst, r.readPart...)
	}
	dst = append(dst, r.tsMillis...)
	dst = append(dst, p.source...)
	dst = append(dst, r.txnPart...)
	return appendChange(dst, c)
}

func appendChange(dst []byte, c *replication.Change) []byte {
	dst = append(dst, `,"lsn":"`...)
	dst = c.LSN.Append(dst)
	dst = append(dst, `","seq":`...)
	dst = strconv.AppendUint(dst, c.Seq, 10)
	return append(dst, `,"snapshot":false}}`...)
}

// appendRow appends a row as a JSON object, or null where there is none. onlyKey
// leaves out the columns outside the replica identity, which hold nothing. A value
// that the WAL lacks is taken from fill; where that lacks it too it is left out, or
// marked.
func (r *Router) appendRow(dst []byte, p *tablePlan, row, fill replication.Tuple, onlyKey bool) ([]byte, error) {
	if len(row) == 0 {
		return append(dst, "null"...), nil
	}
	dst = append(dst, '{')
	sep := false
	for i := range row {
		v := &row[i]
		if onlyKey && !p.rel.Columns[i].Identity {
			continue
		}
		if v.Kind == replication.ValueUnchanged && len(fill) > 0 {
			v = &fill[i]
		}
		if v.Kind == replication.ValueUnchanged && r.toast == nil {
			continue
		}
		if sep {
			dst = append(dst, ',')
		}
		sep = true
		dst = append(dst, p.columns[i].name...)
		var err error
		if dst, err = r.appendValue(dst, p, i, v); err != nil {
			return dst, err
		}
	}
	return append(dst, '}'), nil
}

func (r *Router) appendValue(dst []byte, p *tablePlan, i int, v *replication.Value) ([]byte, error) {
	switch v.Kind {
	case replication.ValueNull:
		return append(dst, "null"...), nil
	case replication.ValueUnchanged:
		return append(dst, r.toast...), nil
	}
	dst, err := p.columns[i].append(dst, v.Text)
	if err != nil {
		return dst, &RouteError{Reason: ReasonEncode, Detail: fmt.Sprintf("column %q: %v", p.rel.Columns[i].Name, err)}
	}
	return dst, nil
}

// appendKey appends the record key. A key column whose value is unchanged TOAST has
// it in old, since PostgreSQL sends such an identity with every update.
func (r *Router) appendKey(dst []byte, p *tablePlan, row, old replication.Tuple) ([]byte, error) {
	dst = append(dst, '{')
	for n, i := range p.key {
		v := &row[i]
		if v.Kind == replication.ValueUnchanged {
			if len(old) == 0 || old[i].Kind == replication.ValueUnchanged {
				return dst, &RouteError{Reason: ReasonMalformed, Detail: fmt.Sprintf("the WAL holds no value of key column %q", p.rel.Columns[i].Name)}
			}
			v = &old[i]
		}
		if n > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, p.columns[i].name...)
		var err error
		if dst, err = r.appendValue(dst, p, i, v); err != nil {
			return dst, err
		}
	}
	return append(dst, '}'), nil
}

// encodeMessage appends key and value of a logical message.
func (r *Router) encodeMessage(c *replication.Change, b *Batch) (key, value span, err error) {
	at := len(b.arena)
	if b.arena, err = appendMessageKey(b.arena, c); err != nil {
		return nullSpan, nullSpan, &RouteError{Reason: ReasonEncode, Detail: fmt.Sprintf("message prefix: %v", err)}
	}
	key = b.spanFrom(at)

	at = len(b.arena)
	b.arena = append(b.arena, `{"message":`...)
	b.arena = append(b.arena, b.bytes(span{at: key.at, n: key.n - 1})...) // up to the closing brace
	b.arena = append(b.arena, `,"transactional":`...)
	b.arena = strconv.AppendBool(b.arena, c.Message.Transactional)
	b.arena = append(b.arena, `,"content":`...)
	b.arena = format.AppendBase64(b.arena, c.Message.Content)
	b.arena = append(b.arena, `},"op":"m"`...)
	if c.Txn != nil {
		r.beginTxn(c.Txn)
		b.arena = append(b.arena, r.tsMillis...)
	} else {
		b.arena = append(b.arena, `,"ts_ms":null,"source":{`...)
	}
	b.arena = append(b.arena, r.origin...)
	b.arena = append(b.arena, `,"schema":null,"table":null`...)
	if c.Txn != nil {
		b.arena = append(b.arena, r.txnPart...)
	} else {
		b.arena = append(b.arena, `,"tx_id":null,"commit_lsn":"`...)
		b.arena = messageCommit(c).Append(b.arena)
		b.arena = append(b.arena, '"')
	}
	b.arena = appendChange(b.arena, c)
	return key, b.spanFrom(at), nil
}

// appendMessageKey appends the key of a logical message, {"prefix":…}.
func appendMessageKey(dst []byte, c *replication.Change) ([]byte, error) {
	dst = append(dst, `{"prefix":`...)
	dst, err := format.AppendString(dst, []byte(c.Message.Prefix))
	return append(dst, '}'), err
}

// nameOf gives the table, for people, and the topic that a change would go to.
func (r *Router) nameOf(c *replication.Change) (table, topic string) {
	if c.Relation == nil {
		return "message " + strconv.Quote(c.Message.Prefix), r.o.MessageTopic
	}
	table = c.Relation.Schema + "." + c.Relation.Name
	if p, err := r.plan(c); err == nil {
		return table, p.topicName
	}
	return table, ""
}

// deadLetterKey appends the key that the change's record would have had; null where
// it has none, where the key itself cannot be encoded, and where it takes more than
// most bytes: the letter is to fit into its topic, and has the key's columns anyway.
func (r *Router) deadLetterKey(c *replication.Change, b *Batch, most int) span {
	at := len(b.arena)
	dst, ok := r.appendDeadLetterKey(b.arena, c)
	if !ok || len(dst)-at > most {
		return nullSpan
	}
	b.arena = dst
	return b.spanFrom(at)
}

func (r *Router) appendDeadLetterKey(dst []byte, c *replication.Change) ([]byte, bool) {
	if c.Relation == nil {
		dst, err := appendMessageKey(dst, c)
		return dst, err == nil
	}
	p, err := r.plan(c)
	if err != nil {
		return dst, false
	}
	if p.outbox != nil {
		return append(dst, r.event.Key...), r.event.Key != nil
	}
	row := c.New
	if len(row) == 0 {
		row = c.Old
	}
	if p.key == nil || len(row) == 0 {
		return dst, false
	}
	dst, err = r.appendKey(dst, p, row, c.Old)
	return dst, err == nil
}

// keyText is the key for an error message.
func (r *Router) keyText(c *replication.Change) string {
	b := NewBatch(Limits{})
	if k := r.deadLetterKey(c, b, math.MaxInt); k.n >= 0 {
		return cutText(string(b.bytes(k)))
	}
	return "(none)"
}

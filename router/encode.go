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
	// composites are the columns whose type is, or is made of, a composite one.
	composites []compositeColumn
	typesRead  chunkTime // of the chunk for which their types were looked at last
	key        []int     // indexes of the record key's columns, in the table's order; nil for none
	// keyBeyondIdentity tells that updates and deletes do not carry the key.
	keyBeyondIdentity bool

	// What the shape adds.
	source             []byte // the part of `source` that is the table's
	keyHead, valueHead []byte // `{"schema":…,"payload":`, which a brace closes; or empty
	// wholeBefore writes null for the columns of an old row that PostgreSQL did not
	// send; else they are left out.
	wholeBefore bool
}

type columnPlan struct {
	name        []byte // `"name":`
	append      format.Append
	unavailable []byte // stands for an unchanged TOAST value; nil: the column is left out
	// excluded columns are in no record; the rest is empty then.
	excluded bool
	mask     *format.Masker // append applies it already; nil: none
}

// plan finds or makes the plan of a change's relation.
func (r *Router) plan(c *replication.Change) (*tablePlan, error) {
	rel := c.Relation
	if r.last != nil && r.last.rel == rel && r.last.composites == nil {
		return r.last, nil
	}
	plans := r.plans
	if c.Read != nil {
		plans = r.readPlans
	}
	p := plans[rel.OID]
	if p == nil || p.rel != rel {
		var err error
		if p, err = r.newPlan(rel, c.Read != nil); err != nil {
			return nil, fmt.Errorf("plan records of %s.%s: %w", rel.Schema, rel.Name, err)
		}
		plans[rel.OID] = p
	}
	if p.composites != nil {
		return r.compositePlan(p, c)
	}
	r.last = p
	return p, nil
}

// newPlan makes a plan; read tells that the relation is one of the snapshot's.
func (r *Router) newPlan(rel *replication.Relation, read bool) (*tablePlan, error) {
	p := &tablePlan{rel: rel, label: rel.Schema + "." + rel.Name}
	if o := r.outboxEntry(rel); o != nil {
		p.topicName = strings.ToValidUTF8(p.label, "_") // for metrics only
		source, err := tableSource(rel, &r.enc, r.typeOf)
		if err != nil {
			return nil, err
		}
		p.outbox, err = compileOutbox(source, o, r.outboxEnv())
		return p, err
	}
	p.topicName = r.o.TableTopic(rel.Schema, rel.Name)
	if !r.o.Tables(rel.Schema, rel.Name) {
		p.excluded = true
		return p, nil
	}
	if err := r.claimTopic(p); err != nil {
		return nil, err
	}
	hidden, err := r.hidden(rel, read)
	if err != nil {
		return nil, err
	}
	var types []*format.Type
	for _, c := range rel.Columns {
		column, t, err := r.planColumn(c, hidden)
		if err != nil {
			return nil, err
		}
		types = append(types, t)
		p.columns = append(p.columns, column)
		if column.mask == nil && !column.excluded {
			p.addComposite(t, r.o.Debezium != nil && r.o.Debezium.Schemas, &r.enc)
		}
	}
	if err := p.chooseKey(r.o.Keys[p.label], r.o.Debezium != nil); err != nil {
		return nil, err
	}
	if err := p.keepsIdentity(hidden); err != nil {
		return nil, err
	}
	return p, r.shape.plan(p, types)
}

func (r *Router) outboxEnv() outboxEnv {
	return outboxEnv{name: r.o.Name, prefix: r.o.Prefix, topicPrefix: r.o.TopicPrefix, validTopic: r.validEventTopic}
}

// typeOf describes a type; nil is an unknown one.
func (r *Router) typeOf(oid uint32) (*format.Type, error) {
	t := format.Builtin(oid)
	if t == nil && r.o.Types != nil {
		return r.o.Types(oid)
	}
	return t, nil
}

// planColumn plans a column, and gives its type. One that is masked is a text, and has
// no type of its own.
func (r *Router) planColumn(c replication.Column, hidden *ColumnOptions) (columnPlan, *format.Type, error) {
	if hidden.excludes(c.Name) {
		return columnPlan{excluded: true}, nil, nil
	}
	if m, ok := hidden.mask(c.Name); ok {
		column := r.shape.column(c, nil, &r.enc)
		column.mask = format.NewMasker(m)
		column.append = column.mask.AppendJSON
		if constant := column.mask.Constant(); constant != nil {
			column.unavailable = constant
		}
		return column, nil, nil
	}
	t, err := r.typeOf(c.TypeOID)
	if err != nil {
		return columnPlan{}, nil, fmt.Errorf("look up the type of column %s: %w", c.Name, err)
	}
	return r.shape.column(c, t, &r.enc), t, nil
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

// chooseKey takes the configured key, or the table's own. Its columns stand in the
// table's order, in keys too, unless asWritten: Debezium has those of a primary key in
// the order of its definition, and so can have who goes on with Debezium's topics, where
// another order would be other keys.
func (p *tablePlan) chooseKey(configured []string, asWritten bool) error {
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
				if !slices.Contains(p.key, i) {
					p.key = append(p.key, i)
				}
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
	if !asWritten {
		slices.Sort(p.key)
	}
	return nil
}

// rowRecord is one record of a row to be written.
type rowRecord struct {
	op            replication.Op
	before, after replication.Tuple
	beforeIsKey   bool
	key           replication.Tuple
	// fill has the values that after leaves out.
	fill  replication.Tuple
	other otherKey
}

// otherKey is, of a key change, the key of the other record: the old one beside the new
// and the new one beside the old. The zero one is none.
type otherKey struct {
	header string
	key    span
}

// row appends one record of a row: its key, its value, its headers.
func (r *Router) row(p *tablePlan, c *replication.Change, b *Batch, w rowRecord) error {
	rec := record{topic: p.topic, key: nullSpan}
	if p.key == nil {
		rec.where = placeAlone
	} else {
		at := len(b.arena)
		var err error
		if b.arena, err = p.appendKey(b.arena, w.key, c.Old); err != nil {
			return err
		}
		rec.key = b.spanFrom(at)
	}
	at := len(b.arena)
	w.fill = r.fill(p, c)
	r.writing = w // a pointer to w would make it an allocation per row
	var err error
	if b.arena, err = r.shape.appendRow(b.arena, p, c, &r.writing); err != nil {
		return err
	}
	rec.value = b.spanFrom(at)
	rec.headers = r.rowHeaders(c, b, w.other)
	return r.add(b, rec, p.topicName)
}

// rowHeaders appends the headers of a row's record.
func (r *Router) rowHeaders(c *replication.Change, b *Batch, other otherKey) span {
	headers := r.positionHeader(c, b)
	if other.header != "" {
		b.headers = append(b.headers, header{name: other.header, value: other.key})
		headers.n++
	}
	return headers
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

// appendRow appends a row as a JSON object, or null where there is none. onlyKey
// leaves out the columns outside the replica identity, which hold nothing, or writes
// null for them. A value
// that the WAL lacks is taken from fill; where that lacks it too it is left out, or
// marked.
func (p *tablePlan) appendRow(dst []byte, row, fill replication.Tuple, onlyKey bool) ([]byte, error) {
	if len(row) == 0 {
		return append(dst, "null"...), nil
	}
	dst = append(dst, '{')
	sep := false
	for i := range row {
		if p.columns[i].excluded {
			continue
		}
		v := &row[i]
		if onlyKey && !p.rel.Columns[i].Identity {
			if !p.wholeBefore {
				continue
			}
			v = &replication.Value{Kind: replication.ValueNull}
		}
		if v.Kind == replication.ValueUnchanged && len(fill) > 0 {
			v = &fill[i]
		}
		if v.Kind == replication.ValueUnchanged && p.columns[i].unavailable == nil {
			continue
		}
		if sep {
			dst = append(dst, ',')
		}
		sep = true
		dst = append(dst, p.columns[i].name...)
		var err error
		if dst, err = p.appendValue(dst, i, v); err != nil {
			return dst, err
		}
	}
	return append(dst, '}'), nil
}

func (p *tablePlan) appendValue(dst []byte, i int, v *replication.Value) ([]byte, error) {
	switch v.Kind {
	case replication.ValueNull:
		return append(dst, "null"...), nil
	case replication.ValueUnchanged:
		return append(dst, p.columns[i].unavailable...), nil
	}
	dst, err := p.columns[i].append(dst, v.Text)
	if err != nil {
		return dst, &RouteError{Reason: ReasonEncode, Detail: fmt.Sprintf("column %q: %v", p.rel.Columns[i].Name, err)}
	}
	return dst, nil
}

// appendKey appends the record key. A key column whose value is unchanged TOAST has
// it in old, since PostgreSQL sends such an identity with every update.
func (p *tablePlan) appendKey(dst []byte, row, old replication.Tuple) ([]byte, error) {
	dst = append(dst, p.keyHead...)
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
		if dst, err = p.appendValue(dst, i, v); err != nil {
			return dst, err
		}
	}
	dst = append(dst, '}')
	if len(p.keyHead) > 0 {
		dst = append(dst, '}')
	}
	return dst, nil
}

// keyPayload is the part of a record's key that is the columns' object.
func (p *tablePlan) keyPayload(key span) span {
	if len(p.keyHead) == 0 {
		return key
	}
	return span{at: key.at + len(p.keyHead), n: key.n - len(p.keyHead) - len("}")}
}

// encodeMessage appends key and value of a logical message.
func (r *Router) encodeMessage(c *replication.Change, b *Batch) (key, value span, err error) {
	if c.Txn != nil {
		r.shape.beginTxn(c.Txn)
	}
	at := len(b.arena)
	if b.arena, err = r.shape.appendMessageKey(b.arena, c); err == nil {
		key = b.spanFrom(at)
		at = len(b.arena)
		b.arena, err = r.shape.appendMessage(b.arena, c)
	}
	if err != nil {
		return nullSpan, nullSpan, &RouteError{Reason: ReasonEncode, Detail: fmt.Sprintf("message prefix: %v", err)}
	}
	return key, b.spanFrom(at), nil
}

// appendPrefix appends the object that names a logical message's prefix, {"prefix":…}.
func appendPrefix(dst []byte, c *replication.Change) ([]byte, error) {
	dst = append(dst, `{"prefix":`...)
	dst, err := format.AppendString(dst, []byte(c.Message.Prefix))
	return append(dst, '}'), err
}

// nameOf gives the table, for people, and the topic that a change would go to.
func (r *Router) nameOf(c *replication.Change) (table, topic string) {
	if c.Relation == nil {
		label := "message " + strconv.Quote(c.Message.Prefix)
		if r.messageOutboxes[c.Message.Prefix] != nil {
			return label, strings.ToValidUTF8(c.Message.Prefix, "_") // for metrics only
		}
		return label, r.o.MessageTopic
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
	if r.outboxOf(c) != nil {
		return append(dst, r.event.Key...), r.event.Key != nil
	}
	if c.Relation == nil {
		dst, err := r.shape.appendMessageKey(dst, c)
		return dst, err == nil
	}
	p, err := r.plan(c)
	if err != nil {
		return dst, false
	}
	row := c.New
	if len(row) == 0 {
		row = c.Old
	}
	if p.key == nil || len(row) == 0 {
		return dst, false
	}
	dst, err = p.appendKey(dst, row, c.Old)
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

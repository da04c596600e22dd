package router

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// DebeziumOptions says how records of `types: debezium` look.
type DebeziumOptions struct {
	format.Debezium
	// Schemas puts each key and value beside its Connect schema (schemas.enable).
	Schemas bool
}

// debeziumVersion is the version of Debezium whose records these are.
const debeziumVersion = "3.6.1.Final"

// debeziumShape is Debezium's envelope. Other than Debezium, which puts the time of its
// own work into ts_ms, every byte of it follows from the change, so that the same change
// always gives the same record.
type debeziumShape struct {
	o         format.Debezium
	schemas   bool
	unwrapped bool
	deleted   bool
	// head is `"source":{"version":…,"name":…,"ts_ms":`; database is `,"db":…`.
	head, database []byte
	messageHead    []byte // `{"schema":…,"payload":` of a message's value, or empty

	txn  checkpoint.LSN // whose fragments are cached
	frag debeziumFragments

	read     replication.ReadPoint // whose fragments are cached
	readFrag debeziumFragments     // empty before the first
}

// debeziumFragments are the pieces of an envelope that the records of a transaction, or
// of a chunk, share. Between them stand a change's LSN, the table, the LSN again and op.
type debeziumFragments struct {
	toSequence []byte // `"source":{…,"sequence":"[\"1\",\"`
	toTable    []byte // `\"]","ts_us":…,"ts_ns":…,`
	toLSN      []byte // `,"txId":…,"lsn":`
	end        []byte // `","ts_ms":…,"ts_us":…,"ts_ns":…}`
}

func newDebeziumShape(o Options) (*debeziumShape, error) {
	resolved, err := o.Debezium.Resolve()
	if err != nil {
		return nil, err
	}
	s := &debeziumShape{o: resolved, schemas: o.Debezium.Schemas, unwrapped: o.Unwrapped, deleted: o.DeletedField}
	s.head = append(s.head, `"source":{"version":"`+debeziumVersion+`","connector":"postgresql","name":`...)
	if s.head, err = format.AppendString(s.head, []byte(o.Prefix)); err != nil {
		return nil, fmt.Errorf("encode topics.prefix: %w", err)
	}
	s.head = append(s.head, `,"ts_ms":`...)
	if s.database, err = format.AppendString([]byte(`,"db":`), []byte(o.Database)); err != nil {
		return nil, fmt.Errorf("encode the database's name: %w", err)
	}
	if _, err := format.AppendString(nil, []byte(resolved.Unavailable)); err != nil {
		return nil, fmt.Errorf("encode unavailable-value-placeholder: %w", err)
	}
	if s.schemas {
		s.messageHead = []byte(messageSchema(s.o))
	}
	return s, nil
}

func (s *debeziumShape) column(c replication.Column, t *format.Type, enc *format.Encoder) columnPlan {
	return columnPlan{
		name: format.QuoteName(c.Name), append: enc.Debezium(t, c.TypeMod, &s.o),
		unavailable: s.o.UnavailableValue(t),
	}
}

func (s *debeziumShape) plan(p *tablePlan, types []*format.Type) error {
	p.wholeBefore = true
	var err error
	if p.source, err = appendTable(p.source, p.rel); err != nil || !s.schemas {
		return err
	}
	s.planSchemas(p, types)
	return nil
}

func (s *debeziumShape) beginTxn(t *replication.Transaction) {
	if s.txn == t.CommitLSN {
		return
	}
	s.txn = t.CommitLSN
	s.fragments(&s.frag, t.CommitTime.UnixMicro(), "false")
	s.frag.toSequence = append(s.frag.toSequence, `\"`...)
	s.frag.toSequence = strconv.AppendUint(s.frag.toSequence, uint64(t.CommitLSN), 10)
	s.frag.toSequence = append(s.frag.toSequence, `\",\"`...)
	s.frag.toLSN = append(s.frag.toLSN[:0], `,"txId":`...)
	s.frag.toLSN = strconv.AppendUint(s.frag.toLSN, uint64(t.XID), 10)
	s.frag.toLSN = append(s.frag.toLSN, `,"lsn":`...)
}

func (s *debeziumShape) beginRead(at *replication.ReadPoint) {
	if s.read == *at && len(s.readFrag.end) > 0 {
		return
	}
	s.read = *at
	s.fragments(&s.readFrag, at.Time.UnixMicro(), "true")
	s.readFrag.toSequence = append(s.readFrag.toSequence, `null,\"`...)
	s.readFrag.toLSN = append(s.readFrag.toLSN[:0], `,"txId":null,"lsn":`...)
}

// fragments makes what depends on the time alone.
func (s *debeziumShape) fragments(f *debeziumFragments, micros int64, snapshot string) {
	f.toSequence = append(f.toSequence[:0], s.head...)
	f.toSequence = strconv.AppendInt(f.toSequence, floorMillis(micros), 10)
	f.toSequence = append(f.toSequence, `,"snapshot":"`...)
	f.toSequence = append(f.toSequence, snapshot...)
	f.toSequence = append(f.toSequence, '"')
	f.toSequence = append(f.toSequence, s.database...)
	f.toSequence = append(f.toSequence, `,"sequence":"[`...)
	f.toTable = appendMicros(append(f.toTable[:0], `\"]"`...), micros)
	f.toTable = append(f.toTable, ',')
	f.end = strconv.AppendInt(append(f.end[:0], `","ts_ms":`...), floorMillis(micros), 10)
	f.end = append(appendMicros(f.end, micros), '}')
}

func floorMillis(micros int64) int64 {
	if micros < 0 {
		return (micros - 999) / 1000
	}
	return micros / 1000
}

// appendMicros appends `,"ts_us":…,"ts_ns":…`.
func appendMicros(dst []byte, micros int64) []byte {
	dst = strconv.AppendInt(append(dst, `,"ts_us":`...), micros, 10)
	return strconv.AppendInt(append(dst, `,"ts_ns":`...), micros*1000, 10)
}

func (s *debeziumShape) appendRow(dst []byte, p *tablePlan, c *replication.Change, w *rowRecord) ([]byte, error) {
	dst = append(dst, p.valueHead...)
	dst = append(dst, `{"before":`...)
	dst, err := p.appendRow(dst, w.before, nil, w.beforeIsKey)
	if err != nil {
		return dst, err
	}
	dst = append(dst, `,"after":`...)
	if dst, err = p.appendRow(dst, w.after, w.fill, false); err != nil {
		return dst, err
	}
	return s.appendRest(dst, p, c, w.op), nil
}

func (s *debeziumShape) appendTruncate(dst []byte, p *tablePlan, c *replication.Change) []byte {
	dst = append(dst, p.valueHead...)
	dst = append(dst, `{"before":null,"after":null`...)
	return s.appendRest(dst, p, c, replication.OpTruncate)
}

// appendRest appends everything behind the rows.
func (s *debeziumShape) appendRest(dst []byte, p *tablePlan, c *replication.Change, op replication.Op) []byte {
	f, lsn := &s.frag, c.LSN
	if c.Read != nil {
		f, lsn = &s.readFrag, c.Read.CommitLSN
	}
	dst = append(dst, ',')
	dst = appendDebeziumSource(dst, f, lsn, p.source)
	dst = append(dst, `,"transaction":null,"op":"`...)
	dst = append(dst, byte(op))
	dst = append(dst, f.end...)
	if len(p.valueHead) > 0 {
		dst = append(dst, '}')
	}
	return dst
}

func appendDebeziumSource(dst []byte, f *debeziumFragments, lsn checkpoint.LSN, table []byte) []byte {
	dst = append(dst, f.toSequence...)
	at := len(dst)
	dst = strconv.AppendUint(dst, uint64(lsn), 10)
	end := len(dst)
	dst = append(dst, f.toTable...)
	dst = append(dst, table...)
	dst = append(dst, f.toLSN...)
	dst = append(dst, dst[at:end]...) // the same digits
	return append(dst, `,"xmin":null,"origin":null,"origin_lsn":null}`...)
}

func (s *debeziumShape) appendMessageKey(dst []byte, c *replication.Change) ([]byte, error) {
	if !s.schemas {
		return appendPrefix(dst, c)
	}
	dst, err := appendPrefix(append(dst, messageKeyHead...), c)
	return append(dst, '}'), err
}

func (s *debeziumShape) appendMessage(dst []byte, c *replication.Change) ([]byte, error) {
	dst = append(dst, s.messageHead...)
	dst = append(dst, `{"op":"m","ts_ms":`...)
	const none = `"schema":"","table":""`
	if c.Txn != nil {
		dst = strconv.AppendInt(dst, floorMillis(c.Txn.CommitTime.UnixMicro()), 10)
		dst = append(dst, ',')
		dst = appendDebeziumSource(dst, &s.frag, c.LSN, []byte(none))
	} else {
		// Not of a transaction: nothing knows when it was written.
		commit := messageCommit(c)
		dst = append(dst, `null,`...)
		dst = append(dst, s.head...)
		dst = append(dst, `null,"snapshot":"false"`...)
		dst = append(dst, s.database...)
		dst = fmt.Appendf(dst, `,"sequence":"[\"%d\",\"%d\"]","ts_us":null,"ts_ns":null,%s,"txId":null,"lsn":%d,"xmin":null,"origin":null,"origin_lsn":null}`,
			uint64(commit), uint64(c.LSN), none, uint64(c.LSN))
	}
	dst = append(dst, `,"transaction":null,"message":`...)
	dst, err := appendPrefix(dst, c)
	if err != nil {
		return dst, err
	}
	dst = append(dst[:len(dst)-1], `,"content":`...)
	dst = s.o.AppendBinary(dst, c.Message.Content)
	dst = append(dst, '}', '}')
	if s.schemas {
		dst = append(dst, '}')
	}
	return dst, nil
}

// Connect schemas, as JsonConverter writes them beside what they describe.
const (
	sourceFields = `{"type":"string","optional":false,"field":"version"},{"type":"string","optional":false,"field":"connector"},{"type":"string","optional":false,"field":"name"},` +
		`{"type":"int64","optional":%t,"field":"ts_ms"},{"type":"string","optional":true,"name":"io.debezium.data.Enum","version":1,"parameters":{"allowed":"true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"},"default":"false","field":"snapshot"},` +
		`{"type":"string","optional":false,"field":"db"},{"type":"string","optional":true,"field":"sequence"},{"type":"int64","optional":true,"field":"ts_us"},{"type":"int64","optional":true,"field":"ts_ns"},` +
		`{"type":"string","optional":false,"field":"schema"},{"type":"string","optional":false,"field":"table"},{"type":"int64","optional":true,"field":"txId"},{"type":"int64","optional":true,"field":"lsn"},` +
		`{"type":"int64","optional":true,"field":"xmin"},{"type":"string","optional":true,"field":"origin"},{"type":"int64","optional":true,"field":"origin_lsn"}`
	sourceSchema      = `{"type":"struct","fields":[` + sourceFields + `],"optional":false,"name":"io.debezium.connector.postgresql.Source","version":1,"field":"source"}`
	transactionSchema = `{"type":"struct","fields":[{"type":"string","optional":false,"field":"id"},{"type":"int64","optional":false,"field":"total_order"},{"type":"int64","optional":false,"field":"data_collection_order"}],"optional":true,"name":"event.block","version":1,"field":"transaction"}`
	messageKeyHead    = `{"schema":{"type":"struct","fields":[{"type":"string","optional":true,"field":"prefix"}],"optional":false,"name":"io.debezium.connector.postgresql.MessageKey","version":1},"payload":`
	payload           = `,"payload":`
)

// messageSchema is the head of a message's value. Its source.ts_ms may be null: of a
// message that is not transactional the WAL has no time.
func messageSchema(d format.Debezium) string {
	content := "string"
	if d.Binary == format.BinaryBytes {
		content = "bytes"
	}
	return `{"schema":{"type":"struct","fields":[{"type":"string","optional":false,"field":"op"},{"type":"int64","optional":true,"field":"ts_ms"},` +
		fmt.Sprintf(sourceSchema, true) + `,` + transactionSchema +
		`,{"type":"struct","fields":[{"type":"string","optional":true,"field":"prefix"},{"type":"` + content + `","optional":true,"field":"content"}],"optional":false,"name":"io.debezium.connector.postgresql.Message","version":1,"field":"message"}],` +
		`"optional":false,"name":"io.debezium.connector.postgresql.MessageValue","version":1}` + payload
}

// planSchemas makes the schemas of key and value. Whether a column may be null is not in
// the WAL; those of the key may not, and all others are said to.
func (s *debeziumShape) planSchemas(p *tablePlan, types []*format.Type) {
	all := make([]format.ConnectField, len(types))
	for i, t := range types {
		all[i] = format.ConnectField{Name: p.rel.Columns[i].Name, Type: t, Mod: p.rel.Columns[i].TypeMod, Optional: true}
	}
	for _, i := range p.rel.Key() {
		all[i].Optional = false
	}
	var fields []format.ConnectField
	for i := range all {
		if p.columns[i].excluded {
			continue
		}
		if p.columns[i].mask != nil && !slices.Contains(p.key, i) {
			all[i].Optional = true // a mask may be NULL
		}
		fields = append(fields, all[i])
	}
	if p.key != nil {
		var key []format.ConnectField
		for _, i := range p.key {
			key = append(key, all[i])
		}
		p.keyHead = s.o.AppendStruct([]byte(`{"schema":`), key, false, p.topicName+".Key", "")
		p.keyHead = append(p.keyHead, payload...)
	}
	name := p.topicName + ".Value"
	head := []byte(`{"schema":`)
	if s.unwrapped {
		if s.deleted || p.key == nil {
			fields = append(fields, format.ConnectField{Name: deletedField, Type: format.Builtin(oidBool), Mod: format.NoMod, Optional: true})
		}
		p.valueHead = append(s.o.AppendStruct(head, fields, false, name, ""), payload...)
		return
	}
	head = append(head, `{"type":"struct","fields":[`...)
	for _, field := range []string{"before", "after"} {
		head = append(s.o.AppendStruct(head, fields, true, name, field), ',')
	}
	head = append(head, fmt.Sprintf(sourceSchema, false)+`,`+transactionSchema+`,{"type":"string","optional":false,"field":"op"}`...)
	for _, field := range []string{"ts_ms", "ts_us", "ts_ns"} {
		head = append(head, `,{"type":"int64","optional":true,"field":"`+field+`"}`...)
	}
	head = append(head, `],"optional":false,"name":`+strconv.Quote(strings.TrimSuffix(name, "Value")+"Envelope")+`,"version":2}`...)
	p.valueHead = append(head, payload...)
}

package cdctest

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/walrelay/walrelay/checkpoint"
)

// builder writes the right log of a stream of changes, as INTERFACE describes it:
// the other side of what the validators read.
type builder struct {
	layout Layout
	log    *Log
	next   map[partitionID]int64
	epoch  int16 // of the Kafka transaction in hand, as under transaction version 2
	ended  map[partitionID]int
}

func newBuilder(l Layout) *builder {
	return &builder{layout: l, log: &Log{Partitions: map[string]int32{}}, next: map[partitionID]int64{}, ended: map[partitionID]int{}}
}

// deliver ends the Kafka transaction in hand: a marker takes an offset in every
// partition that it wrote to.
func (b *builder) deliver() {
	b.epoch++
	for id := range b.ended {
		b.ended[id]++
		b.next[id]++
	}
}

func (b *builder) add(topic string, partition int32, key, value []byte, headers map[string]string) {
	id := partitionID{topic, partition}
	b.log.Partitions[topic] = b.layout.Partitions
	b.log.Records = append(b.log.Records, Record{Topic: topic, Partition: partition, Offset: b.next[id], Key: key, Value: value,
		Headers: headers, Committed: true, ProducerID: 1, ProducerEpoch: b.epoch, Segment: b.ended[id]})
	b.ended[id] += 0
	b.next[id]++
}

// put adds a record where its key belongs, or in the first partition.
func (b *builder) put(topic string, key, value []byte, headers map[string]string) {
	partition := int32(0)
	if key != nil {
		partition = PartitionOf(key, b.layout.Partitions)
	}
	b.add(topic, partition, key, value, headers)
}

// read writes a row as the snapshot does, behind the transaction that ends at commit.
func (b *builder) read(commit checkpoint.LSN, t *Table, row Row) {
	h := map[string]string{"position": string(checkpoint.AppendSnapshotHeader(nil, commit))}
	if t.Outbox {
		c := Change{Op: 'c', Table: t, New: row}
		for k, v := range event(c).headers {
			h[k] = v
		}
		b.put(b.layout.topic(c), []byte(c.text(row, "aggregate_id")), event(c).value, h)
		return
	}
	b.put(b.layout.tableTopic(t), rowKey(t, row), b.readEnvelope(commit, t, "r", row), h)
}

// again writes the truncate of a table that is read anew.
func (b *builder) again(commit checkpoint.LSN, t *Table) {
	for p := range b.layout.Partitions {
		b.add(b.layout.tableTopic(t), p, nil, b.readEnvelope(commit, t, "t", nil),
			map[string]string{"position": string(checkpoint.AppendSnapshotHeader(nil, commit))})
	}
}

func (b *builder) readEnvelope(commit checkpoint.LSN, t *Table, op string, row Row) []byte {
	source := fmt.Sprintf(`{"connector":"walrelay","name":"shop","db":"shop","schema":%q,"table":%q,"tx_id":null,"commit_lsn":%q,"lsn":null,"seq":null,"snapshot":true}`,
		t.Schema, t.Name, commit)
	return object([]Member{{"before", json.RawMessage("null")}, {"after", rowJSON(t, row, nil)}, {"op", quote(op)},
		{"ts_ms", json.RawMessage("1764550000000")}, {"source", json.RawMessage(source)}})
}

// meta is what a change's records say of their source.
type meta struct {
	commit checkpoint.LSN
	xid    *uint64
	ts     *int64
	seq    uint64
}

// change writes the records of c; lacks tells which of its new row's columns are
// unchanged TOAST values.
func (b *builder) change(m meta, c Change, lacks func(column int) bool) {
	topic := b.layout.topic(c)
	head := func() map[string]string {
		return map[string]string{"position": string(checkpoint.AppendHeader(nil, m.commit, m.seq))}
	}
	put := func(key, value []byte, headers map[string]string) {
		b.put(topic, key, value, headers)
	}
	t := c.Table
	switch {
	case t == nil:
		key := object([]Member{{"prefix", quote(c.Message.Prefix)}})
		put(key, b.envelope(m, c, "m", nil, nil, nil), head())
	case t.Outbox:
		h := head()
		for k, v := range event(c).headers {
			h[k] = v
		}
		put([]byte(c.text(c.New, "aggregate_id")), event(c).value, h)
	case c.Op == 't':
		for p := range b.layout.Partitions {
			b.add(topic, p, nil, b.envelope(m, c, "t", nil, nil, nil), head())
		}
	case c.Op == 'c':
		put(rowKey(t, c.New), b.envelope(m, c, "c", nil, c.New, lacks), head())
	case c.Op == 'u' && (c.Old == nil || t.sameKey(c.Old, c.New)):
		before := c.Old
		if !t.Full {
			before = nil
		}
		put(rowKey(t, c.New), b.envelope(m, c, "u", before, c.New, lacks), head())
	default:
		put(rowKey(t, c.Old), b.envelope(m, c, "d", c.Old, nil, nil), head())
		if !b.layout.NoTombstones && !t.Keyless() {
			put(rowKey(t, c.Old), nil, head())
		}
		if c.Op == 'u' {
			h := head()
			h["previous-key"] = string(rowKey(t, c.Old))
			put(rowKey(t, c.New), b.envelope(m, c, "c", nil, c.New, lacks), h)
		}
	}
}

func (b *builder) envelope(m meta, c Change, op string, before, after Row, lacks func(int) bool) []byte {
	source := map[string]any{"connector": "walrelay", "name": "shop", "db": "shop", "schema": nil, "table": nil,
		"tx_id": m.xid, "commit_lsn": m.commit.String(), "lsn": m.commit.String(), "seq": m.seq, "snapshot": false}
	if c.Table != nil {
		source["schema"], source["table"] = c.Table.Schema, c.Table.Name
	}
	src, err := json.Marshal(source)
	if err != nil {
		panic(err)
	}
	ts, err := json.Marshal(m.ts)
	if err != nil {
		panic(err)
	}
	var v []Member
	if c.Table == nil {
		content, err := json.Marshal(MessageBody{c.Message.Prefix, m.xid != nil, []byte(c.Message.Content)})
		if err != nil {
			panic(err)
		}
		v = append(v, Member{"message", content})
	} else {
		v = append(v, Member{"before", rowJSON(c.Table, before, func(i int) bool { return !c.Table.Full && !c.Table.Columns[i].Key })},
			Member{"after", rowJSON(c.Table, after, lacks)})
	}
	return object(append(v, Member{"op", quote(op)}, Member{"ts_ms", ts}, Member{"source", src}))
}

func rowKey(t *Table, row Row) []byte {
	if t.Keyless() {
		return nil
	}
	return rowJSON(t, row, func(i int) bool { return !t.Columns[i].Key })
}

func rowJSON(t *Table, row Row, lacks func(int) bool) []byte {
	if row == nil {
		return []byte("null")
	}
	var members []Member
	for i, c := range t.Columns {
		if lacks == nil || !lacks(i) {
			members = append(members, Member{c.Name, PlainJSON(c.Type, row[i])})
		}
	}
	return object(members)
}

func object(members []Member) []byte {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range members {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%q:%s", m.Name, m.Raw)
	}
	b.WriteByte('}')
	return b.Bytes()
}

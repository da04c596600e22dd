package replication

import (
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
)

// wire builds a pgoutput message by hand, field by field, as the PostgreSQL
// documentation ("Logical Replication Message Formats") lists them.
type wire []byte

func (w wire) u8(v byte) wire    { return append(w, v) }
func (w wire) u16(v int) wire    { return binary.BigEndian.AppendUint16(w, uint16(v)) }
func (w wire) u32(v uint32) wire { return binary.BigEndian.AppendUint32(w, v) }
func (w wire) u64(v uint64) wire { return binary.BigEndian.AppendUint64(w, v) }
func (w wire) str(s string) wire { return append(append(w, s...), 0) }
func (w wire) cut(n int) wire    { return w[:len(w)-n] }

// The special cells of a hand-built tuple.
const (
	cellNull      = "\x00null"
	cellUnchanged = "\x00unchanged"
)

func (w wire) tuple(cells ...string) wire {
	w = w.u16(len(cells))
	for _, c := range cells {
		switch c {
		case cellNull:
			w = w.u8('n')
		case cellUnchanged:
			w = w.u8('u')
		default:
			w = append(w.u8('t').u32(uint32(len(c))), c...)
		}
	}
	return w
}

// testCommitTime is a commit time with microseconds, 25 years behind PostgreSQL's epoch.
var testCommitTime = time.Date(2024, 12, 31, 23, 59, 59, 123456000, time.UTC)

func begin(commit checkpoint.LSN, xid uint32) wire {
	return wire{'B'}.u64(uint64(commit)).u64(uint64(testCommitTime.UnixMicro() - pgEpoch)).u32(xid)
}

func commit(commit, end checkpoint.LSN) wire {
	return wire{'C'}.u8(0).u64(uint64(commit)).u64(uint64(end)).u64(0)
}

// relation describes a table whose columns are given by name; a star marks those of the
// replica identity.
func relation(oid uint32, schema, name string, identity ReplicaIdentity, columns ...string) wire {
	w := wire{'R'}.u32(oid).str(schema).str(name).u8(byte(identity)).u16(len(columns))
	for _, c := range columns {
		bare := strings.TrimPrefix(c, "*")
		w = w.u8(byte(len(c) - len(bare))).str(bare).u32(25).u32(0xffffffff)
	}
	return w
}

func insert(oid uint32, cells ...string) wire {
	return wire{'I'}.u32(oid).u8('N').tuple(cells...)
}

// update has an old tuple, of kind K or O, unless kind is 0.
func update(oid uint32, kind byte, old, cells []string) wire {
	w := wire{'U'}.u32(oid)
	if kind != 0 {
		w = w.u8(kind).tuple(old...)
	}
	return w.u8('N').tuple(cells...)
}

func remove(oid uint32, kind byte, old ...string) wire {
	return wire{'D'}.u32(oid).u8(kind).tuple(old...)
}

func truncate(oids ...uint32) wire {
	w := wire{'T'}.u32(uint32(len(oids))).u8(0)
	for _, oid := range oids {
		w = w.u32(oid)
	}
	return w
}

func logicalMessage(transactional bool, at checkpoint.LSN, prefix, content string) wire {
	flags := byte(0)
	if transactional {
		flags = 1
	}
	return append(wire{'M'}.u8(flags).u64(uint64(at)).str(prefix).u32(uint32(len(content))), content...)
}

// describe renders an event in one line, without what differs from run to run (LSNs,
// xids, times):
//
//	begin
//	0 c public.t new(id=1 v=a)
//	1 u public.t key(id=1 v=null) new(id=2 v=unchanged)
//	2 m "prefix" "content"
//	commit
//
// A message outside a transaction has a dash instead of seq.
func describe(ev *Event) string {
	switch ev.Kind {
	case KindBegin:
		return "begin"
	case KindCommit:
		return "commit"
	case KindProgress:
		return "progress"
	}
	c := ev.Change
	var b strings.Builder
	if c.Txn == nil {
		b.WriteString("- ")
	} else {
		fmt.Fprintf(&b, "%d ", c.Seq)
	}
	b.WriteString(c.Op.String())
	if c.Op == OpMessage {
		fmt.Fprintf(&b, " %q %q", c.Message.Prefix, c.Message.Content)
		return b.String()
	}
	fmt.Fprintf(&b, " %s.%s", c.Relation.Schema, c.Relation.Name)
	if len(c.Old) > 0 {
		kind := "old"
		if c.OldIsKey {
			kind = "key"
		}
		fmt.Fprintf(&b, " %s(%s)", kind, describeTuple(c.Relation, c.Old))
	}
	if len(c.New) > 0 {
		fmt.Fprintf(&b, " new(%s)", describeTuple(c.Relation, c.New))
	}
	return b.String()
}

// maxShown keeps a trace readable: of a longer value only the length is shown.
const maxShown = 40

func describeTuple(rel *Relation, t Tuple) string {
	cells := make([]string, len(t))
	for i, v := range t {
		text := string(v.Text)
		switch {
		case v.Kind == ValueNull:
			text = "null"
		case v.Kind == ValueUnchanged:
			text = "unchanged"
		case len(text) > maxShown:
			text = fmt.Sprintf("<%d bytes>", len(text))
		}
		cells[i] = rel.Columns[i].Name + "=" + text
	}
	return strings.Join(cells, " ")
}

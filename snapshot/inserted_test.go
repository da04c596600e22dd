package snapshot

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// outboxReading gives a merger that reads an outbox table of one key column up to a key.
func outboxReading(t *testing.T, typ uint32, end string, o Options) (*Merger, *replication.Relation, *Order) {
	t.Helper()
	rel := &replication.Relation{OID: 1, Schema: "s", Name: "outbox", Columns: []replication.Column{{Name: "id", TypeOID: typ}}}
	o.ChunkRows, o.ChunkBytes, o.Readers = 2, 1<<20, 1
	m := NewMerger(o, 100)
	m.Add(Table{OID: 1, Schema: "s", Name: "outbox", Key: []string{"id"}, Estimate: -1, Outbox: true}, checkpoint.TableProgress{State: checkpoint.TablePending})
	plan := m.Order(time.Unix(1000, 0))
	if plan == nil || plan.Kind != OrderPlan || !plan.End {
		t.Fatalf("first order: %+v, want a plan with the greatest key", plan)
	}
	c := &Chunk{Order: plan, Shape: Shape{Relation: rel, Key: []int{0}, Estimate: -1}, Snapshot: MVCC{Xmin: 10, Xmax: 10}}
	if end != "" {
		c.End = []string{end}
	}
	if err := m.Arrived(c, time.Unix(1000, 0)); err != nil {
		t.Fatal(err)
	}
	return m, rel, m.Order(time.Unix(1000, 0))
}

func insertText(m *Merger, xid checkpoint.XID, rel *replication.Relation, id string) {
	m.Begin(xid, 100)
	m.Change(&replication.Change{Op: replication.OpCreate, Relation: rel, Txn: &replication.Transaction{XID: xid},
		New: replication.Tuple{{Kind: replication.ValueText, Text: []byte(id)}}})
	m.Reached(100)
}

// Rows that are inserted behind the last row that there was at first are neither read nor
// remembered, however many they are.
func TestWhatIsInsertedBehindABacklogIsNotRemembered(t *testing.T) {
	for name, tt := range map[string]struct {
		typ uint32
		end string
		key func(i int) string
	}{
		"integers":   {oidInt8, "999", func(i int) string { return fmt.Sprint(i + 1000) }},
		"timestamps": {oidTimestamptz, "2026-12-02 10:00:00.5+00", func(i int) string { return fmt.Sprintf("2026-12-02 10:00:00.6%05d+00", i) }},
	} {
		m, rel, o := outboxReading(t, tt.typ, tt.end, Options{MaxInserted: 10})
		if o == nil || o.Kind != OrderRange || len(o.To) != 1 || o.To[0] != tt.end {
			t.Fatalf("%s: order %+v, want a range up to %s", name, o, tt.end)
		}
		for i := range 10_000 {
			insertText(m, checkpoint.XID(20+i), rel, tt.key(i))
		}
		if n := len(m.tables[1].inserted.keys); n != 0 || m.Err() != nil {
			t.Errorf("%s: %d rows are remembered, %v", name, n, m.Err())
		}
	}
}

// What may still be read is remembered, so that its event does not go out again, and no more of
// it than there is room for.
func TestWhatIsInsertedAmongABacklogIsStruckOut(t *testing.T) {
	m, rel, o := outboxReading(t, oidInt8, "999", Options{MaxInserted: 3})
	insertText(m, 11, rel, "17")
	// The chunk sees the transaction, and its row.
	c := &Chunk{Order: o, Shape: Shape{Relation: rel, Key: []int{0}, Estimate: -1}, Snapshot: MVCC{Xmin: 12, Xmax: 12}, LSN: 100}
	c.Rows.Reset(1)
	c.Rows.Add([][]byte{[]byte("16")})
	c.Rows.Add([][]byte{[]byte("17")})
	if err := m.Arrived(c, time.Unix(1000, 0)); err != nil {
		t.Fatal(err)
	}
	if row, ok := m.Next(); !ok || string(row.Tuple[0].Text) != "16" {
		t.Fatalf("row %+v, want 16", row)
	}
	if row, ok := m.Next(); ok {
		t.Fatalf("row %+v went out, which the stream has brought", row)
	}
	for i := range 2 {
		insertText(m, checkpoint.XID(12+i), rel, fmt.Sprint(20+i))
	}
	if m.Err() != nil {
		t.Fatal(m.Err())
	}
	insertText(m, 14, rel, "22")
	var refusal *checkpoint.Refusal
	if !errors.As(m.Err(), &refusal) {
		t.Fatalf("error %v, want a refusal", m.Err())
	}
}

func TestAnOutboxThatIsEmptyIsDoneAtOnce(t *testing.T) {
	m, rel, o := outboxReading(t, oidInt8, "", Options{MaxInserted: 3})
	if o != nil {
		t.Fatalf("order %+v, want none", o)
	}
	for i := range 10 {
		insertText(m, checkpoint.XID(11+i), rel, fmt.Sprint(i))
	}
	if _, ok := m.Next(); ok || m.Active() || m.Err() != nil {
		t.Errorf("a row %t, active %t, %v", ok, m.Active(), m.Err())
	}
}

func TestARowIsBehindTheEndOnlyWhereThatIsSure(t *testing.T) {
	for _, tt := range []struct {
		typ        uint32
		value, end string
		want       bool
	}{
		{oidInt2, "8", "7", true}, {oidInt4, "10", "9", true}, {oidInt8, "9223372036854775807", "9223372036854775806", true},
		{oidInt4, "7", "7", false}, {oidInt4, "-8", "7", false}, {oidInt4, "-8", "-9", true}, {oidInt4, "", "9", false}, {oidInt4, "10", "", false},
		{oidTimestamp, "2026-12-02 10:00:00", "2026-12-02 09:59:59.999999", true},
		{oidTimestamp, "2026-12-02 10:00:00.1", "2026-12-02 10:00:00", true},
		{oidTimestamp, "2026-12-02 10:00:00.09", "2026-12-02 10:00:00.1", false},
		{oidTimestamptz, "2026-12-02 10:00:00+00", "2026-12-02 10:00:00+00", false},
		{oidTimestamptz, "2026-12-02 10:00:00.5+00", "2026-12-02 10:00:00+00", true},
		{oidTimestamptz, "2026-12-02 11:00:00+01", "2026-12-02 10:00:00+00", false},
		{oidTimestamptz, "10000-01-01 00:00:00+00", "2026-12-02 10:00:00+00", false},
		{oidTimestamptz, "2026-12-02 10:00:00+00", "10000-01-01 00:00:00+00", false},
		{oidTimestamptz, "2026-12-02 10:00:00+00 BC", "2026-12-02 09:00:00+00 BC", false},
		{oidTimestamp, "infinity", "2026-12-02 10:00:00", false},
		{25, "b", "a", false}, {2950, "b", "a", false},
	} {
		rel := &replication.Relation{Columns: []replication.Column{{Name: "v", TypeOID: 25}, {Name: "id", TypeOID: tt.typ}}}
		c := &replication.Change{Relation: rel, New: replication.Tuple{{}, {Kind: replication.ValueText, Text: []byte(tt.value)}}}
		var n inserted
		if got := n.beyond(c, "id", tt.end); got != tt.want {
			t.Errorf("type %d: %s behind %s: %t", tt.typ, tt.value, tt.end, got)
		}
		if n.beyond(c, "v", tt.end) || n.beyond(&replication.Change{Relation: &replication.Relation{}}, "id", tt.end) {
			t.Errorf("type %d: a column that is not there, or is null, is behind", tt.typ)
		}
	}
}

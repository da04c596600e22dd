package snapshot

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
)

// MVCC is an MVCC snapshot as pg_current_snapshot() gives it: which transactions' effects
// a query sees (PostgreSQL documentation, "Transaction ID and Snapshot Information
// Functions"). The zero value sees nothing.
type MVCC struct {
	Xmin    checkpoint.XID   // every smaller xid is seen, if it committed
	Xmax    checkpoint.XID   // no xid from here on is seen
	Running []checkpoint.XID // not seen, of those between; sorted
}

// ParseMVCC reads the text form xmin:xmax:xid,xid,….
func ParseMVCC(s string) (MVCC, error) {
	bad := func() (MVCC, error) {
		return MVCC{}, fmt.Errorf("parse MVCC snapshot %q: want xmin:xmax:xid,xid", s)
	}
	parts := strings.Split(s, ":")
	if len(parts) != 3 {
		return bad()
	}
	var m MVCC
	xid := func(text string) (checkpoint.XID, bool) {
		n, err := strconv.ParseUint(text, 10, 64)
		return checkpoint.XID(n), err == nil
	}
	var ok1, ok2 bool
	m.Xmin, ok1 = xid(parts[0])
	m.Xmax, ok2 = xid(parts[1])
	if !ok1 || !ok2 {
		return bad()
	}
	// One that a slot's creation exported may have its bounds crossed: nothing from xmin
	// down runs, and nothing has committed since the xmax.
	m.Xmax = max(m.Xmax, m.Xmin)
	if parts[2] == "" {
		return m, nil
	}
	for _, text := range strings.Split(parts[2], ",") {
		x, ok := xid(text)
		if !ok || x < m.Xmin || x >= m.Xmax || len(m.Running) > 0 && x <= m.Running[len(m.Running)-1] {
			return bad()
		}
		m.Running = append(m.Running, x)
	}
	return m, nil
}

// Sees tells whether the effects of the transaction x, should it have committed, are in
// what a query under the snapshot reads. x is a top-level transaction's.
func (m MVCC) Sees(x checkpoint.XID) bool {
	switch {
	case x < m.Xmin:
		return true
	case x >= m.Xmax:
		return false
	}
	_, running := slices.BinarySearch(m.Running, x)
	return !running
}

// Covers tells whether m sees every transaction that o sees.
func (m MVCC) Covers(o MVCC) bool {
	if m.Xmax < o.Xmax {
		return false
	}
	for _, x := range m.Running {
		if o.Sees(x) {
			return false
		}
	}
	return true
}

// IsZero tells whether m is the zero value, which sees nothing.
func (m MVCC) IsZero() bool { return m.Xmax == 0 }

// String gives the text form.
func (m MVCC) String() string {
	b := strconv.AppendUint(nil, uint64(m.Xmin), 10)
	b = append(b, ':')
	b = strconv.AppendUint(b, uint64(m.Xmax), 10)
	b = append(b, ':')
	for i, x := range m.Running {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(x), 10)
	}
	return string(b)
}

// Current reads the current MVCC snapshot; conn must be to the primary.
func Current(ctx context.Context, conn *pgx.Conn) (MVCC, error) {
	var text string
	if err := conn.QueryRow(ctx, "SELECT pg_catalog.pg_current_snapshot()::text").Scan(&text); err != nil {
		return MVCC{}, fmt.Errorf("read MVCC snapshot: %w", err)
	}
	return ParseMVCC(text)
}

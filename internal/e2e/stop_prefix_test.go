package e2e

import (
	"fmt"
	"testing"
)

// What was committed before a change that may not be put aside does not wait for it, over
// however many restarts: it is delivered, and the position stands behind it.
func TestWhatPrecedesAChangeThatStopsIsDelivered(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE t (id int PRIMARY KEY, v text)`)
	b.set("kafka.compression", "none")
	b.set("topics.config", map[string]string{"max.message.bytes": "1048588"})
	b.set("dead-letter.on-error", "stop")
	b.stop(b.stream())
	for id := 11; id <= 13; id++ {
		b.pg.Exec(fmt.Sprintf(`INSERT INTO t VALUES (%d, '')`, id))
	}
	behind := b.lsn(`SELECT pg_current_wal_lsn()`)
	b.pg.Exec(`BEGIN; INSERT INTO t VALUES (14, ''); INSERT INTO t VALUES (15, (SELECT string_agg(md5(g::text),'') FROM generate_series(1,65536) g)); COMMIT`)
	b.pg.Exec(`INSERT INTO t VALUES (16, '')`)
	for range 2 {
		b.ends(b.start(), 1, "public.t", `{"id":15}`)
		b.wantIDs("t", []int{11, 12, 13})
		if at := b.checkpoint().Position.LSN; at < behind {
			t.Errorf("the checkpoint is at %s, before %s", at, behind)
		}
	}
	// With the obstacle gone the rest follows.
	b.set("dead-letter.on-error", "dead-letter")
	p := b.stream()
	b.wantIDs("t", []int{11, 12, 13, 14, 16})
	b.stop(p)
}

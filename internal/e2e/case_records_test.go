package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

// caseRecord is a record with the parts of its envelope as they stand.
type caseRecord struct {
	cdctest.Record
	Op            string          `json:"op"`
	Before, After json.RawMessage `json:"-"`
	TsMs          *int64          `json:"ts_ms"`
	Source        struct {
		Schema    string  `json:"schema"`
		Table     string  `json:"table"`
		TxID      *uint64 `json:"tx_id"`
		CommitLSN string  `json:"commit_lsn"`
		LSN       *string `json:"lsn"`
		Seq       *uint64 `json:"seq"`
	} `json:"source"`
	Message *cdctest.MessageBody `json:"message"`
}

// line gives a change in the short form in which the cases write what is right:
// topic, op, seq, key, before and after; a tombstone is "x" with its key alone.
func (r *caseRecord) line() string {
	topic := r.Topic[strings.LastIndexByte(r.Topic, '.')+1:]
	key := "-"
	if r.Key != nil {
		key = string(r.Key)
	}
	if r.Value == nil {
		return fmt.Sprintf("%s x %s", topic, key)
	}
	return fmt.Sprintf("%s %s %d %s %s %s", topic, r.Op, *r.Source.Seq, key, r.Before, r.After)
}

func caseLines(records []caseRecord) []string {
	lines := make([]string, len(records))
	for i := range records {
		lines[i] = records[i].line()
	}
	return lines
}

// expect compares two lists of lines.
func (c *caseRun) expect(what string, got []caseRecord, want ...string) {
	c.t.Helper()
	lines := caseLines(got)
	if slices.Equal(lines, want) {
		return
	}
	c.t.Errorf("%s:\ngot\n\t%s\nwant\n\t%s", what, strings.Join(lines, "\n\t"), strings.Join(want, "\n\t"))
}

// settled waits for everything committed so far and reads the connector's topics.
func (c *caseRun) settled() *cdctest.Log {
	c.t.Helper()
	c.fence()
	return c.log()
}

// log reads all topics of the connector, and checks what holds of every log.
func (c *caseRun) log() *cdctest.Log {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*harness.DefaultTimeout)
	defer cancel()
	log, err := cdctest.ReadSettled(ctx, regexp.QuoteMeta(c.name)+`\..*|outbox\.event\..*|ev\..*`, kgo.SeedBrokers(c.kafka.Brokers()...))
	if err != nil {
		c.t.Fatalf("read the log: %v", err)
	}
	log.Records = slices.DeleteFunc(log.Records, func(r cdctest.Record) bool { return r.Offset < c.first[r.Topic][r.Partition] })
	return log
}

// changes gives the records of the connector's tables, sorted by position, and checks
// that nothing is there twice or out of order.
func (c *caseRun) changes() []caseRecord {
	c.t.Helper()
	return c.changesOf(c.settled())
}

func (c *caseRun) changesOf(log *cdctest.Log) []caseRecord {
	c.t.Helper()
	tables := &cdctest.Log{Partitions: log.Partitions}
	for _, r := range log.Records {
		if strings.HasPrefix(r.Topic, c.name+".") && r.Topic != c.name+".dead-letter" && r.Topic != c.name+".message" {
			tables.Records = append(tables.Records, r)
		}
	}
	c.check(cdctest.Order(tables, cdctest.Layout{Prefix: c.name}))
	c.check(cdctest.NoDuplicate(tables))
	c.check(cdctest.Partition(tables))
	return c.parse(tables.Records)
}

func (c *caseRun) check(violations []cdctest.Violation) {
	c.t.Helper()
	if len(violations) > 0 {
		c.t.Errorf("%d violations:\n%s", len(violations), cdctest.Report(violations, 10))
	}
}

// parse reads records and sorts them by position, those of one change by where they lie.
func (c *caseRun) parse(records []cdctest.Record) []caseRecord {
	c.t.Helper()
	out := make([]caseRecord, 0, len(records))
	for _, raw := range records {
		r := caseRecord{Record: raw}
		if raw.Value != nil {
			if err := json.Unmarshal(raw.Value, &r); err != nil {
				c.t.Fatalf("%s: %v: %s", raw.Where(), err, raw.Value)
			}
			var images struct{ Before, After json.RawMessage }
			if err := json.Unmarshal(raw.Value, &images); err != nil {
				c.t.Fatalf("%s: %v", raw.Where(), err)
			}
			r.Before, r.After = images.Before, images.After
		}
		out = append(out, r)
	}
	slices.SortStableFunc(out, func(a, b caseRecord) int {
		return cmp.Or(cmp.Compare(a.Headers["position"], b.Headers["position"]), cmp.Compare(a.Topic, b.Topic),
			cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
	})
	return out
}

// topic gives the records of one topic, by position.
func (c *caseRun) topic(log *cdctest.Log, name string) []cdctest.Record {
	var records []cdctest.Record
	for _, r := range log.Records {
		if r.Topic == name {
			records = append(records, r)
		}
	}
	slices.SortStableFunc(records, func(a, b cdctest.Record) int {
		return cmp.Or(cmp.Compare(a.Headers["position"], b.Headers["position"]), cmp.Compare(a.Offset, b.Offset))
	})
	return records
}

// mustEnds gives the end offsets of topics.
func (c *caseRun) mustEnds(topics string) map[string]map[int32]int64 {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), harness.DefaultTimeout)
	defer cancel()
	log, err := cdctest.ReadUncommitted(ctx, topics, kgo.SeedBrokers(c.kafka.Brokers()...))
	if err != nil {
		c.t.Fatalf("read where topics end: %v", err)
	}
	ends := map[string]map[int32]int64{}
	for _, r := range log.Records {
		if ends[r.Topic] == nil {
			ends[r.Topic] = map[int32]int64{}
		}
		ends[r.Topic][r.Partition] = max(ends[r.Topic][r.Partition], r.Offset+1)
	}
	return ends
}

// oneTransaction checks that changes are of one source transaction, with seq from 0
// without a gap.
func (c *caseRun) oneTransaction(changes []caseRecord) {
	c.t.Helper()
	for i, r := range changes {
		if r.Source.CommitLSN != changes[0].Source.CommitLSN || *r.Source.TxID != *changes[0].Source.TxID || *r.Source.Seq != uint64(i) {
			c.t.Fatalf("change %d has commit_lsn %s, tx_id %d, seq %d; the first one %s, %d", i, r.Source.CommitLSN, *r.Source.TxID, *r.Source.Seq,
				changes[0].Source.CommitLSN, *changes[0].Source.TxID)
		}
	}
}

// ids gives the id of each row in after.
func (c *caseRun) ids(changes []caseRecord) []int {
	c.t.Helper()
	ids := make([]int, len(changes))
	for i, r := range changes {
		var row struct{ ID int }
		if err := json.Unmarshal(r.After, &row); err != nil {
			c.t.Fatalf("%s: after is %s: %v", r.Where(), r.After, err)
		}
		ids[i] = row.ID
	}
	return ids
}

func (c *caseRun) expectIDs(changes []caseRecord, want ...int) {
	c.t.Helper()
	got := c.ids(changes)
	if slices.Equal(got, want) {
		return
	}
	at := 0
	for at < len(got) && at < len(want) && got[at] == want[at] {
		at++
	}
	c.t.Fatalf("%d ids, want %d; from the %dth on they are %v, want %v", len(got), len(want), at, got[at:min(len(got), at+10)], want[at:min(len(want), at+10)])
}

// caseRange is first, first+1, …, last.
func caseRange(first, last int) []int {
	var ids []int
	for id := first; id <= last; id++ {
		ids = append(ids, id)
	}
	return ids
}

// fold checks that folding a table's topic gives these rows. columns are name:type, the
// first one the key; a row is its columns' text.
func (c *caseRun) fold(log *cdctest.Log, table, columns string, rows ...[]string) {
	c.t.Helper()
	def := &cdctest.Table{Schema: "public", Name: table}
	for i, column := range strings.Fields(columns) {
		name, kind, _ := strings.Cut(column, ":")
		def.Columns = append(def.Columns, cdctest.Column{Name: name, Type: kind, Key: i == 0})
	}
	truth := &cdctest.Truth{Tables: []*cdctest.Table{def}, Final: map[string][]cdctest.Row{}}
	for _, row := range rows {
		cells := make(cdctest.Row, len(row))
		for i := range row {
			cells[i] = &row[i]
		}
		truth.Final[def.ID()] = append(truth.Final[def.ID()], cells)
	}
	c.check(cdctest.Fold(log, truth, cdctest.Layout{Prefix: c.name}))
}

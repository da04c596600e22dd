package demo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
)

// commitTimes is how many recent commits' times the consumer keeps for the events
// of the same transaction, whose records do not say it.
const commitTimes = 1024

// consumer reads the demo's topics as a careful application would, read_committed,
// and judges and prints each record. One goroutine runs it; stats may be asked by
// others.
type consumer struct {
	client  *kgo.Client
	prefix  string // of the tables' topics
	checker *Checker
	ledger  *Ledger
	stats   *Stats
	screen  *Screen
	now     func() time.Time
	times   map[checkpoint.LSN]time.Time
	order   []checkpoint.LSN // the keys of times, oldest first
	// arrived gets a signal after each batch; the demo asks stats then.
	arrived chan struct{}

	mu    sync.Mutex
	reach map[partition]int64 // the offset after the last one taken
}

// newConsumer gives a consumer of all topics that start with prefix and a dot, and
// of all event topics, those made later included. The caller closes its client.
func newConsumer(brokers []string, prefix string, ledger *Ledger, screen *Screen) (*consumer, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(brokers...),
		kgo.ClientID("walrelay-demo-consumer"),
		kgo.ConsumeRegex(),
		kgo.ConsumeTopics("^"+strings.ReplaceAll(prefix+".", ".", `\.`), "^"+strings.ReplaceAll(eventTopicPrefix, ".", `\.`)),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// Markers take offsets: without them the end of a partition is never seen to
		// be reached.
		kgo.KeepControlRecords(),
		// Topics that come later (a table made at psql) are found within a second.
		kgo.MetadataMaxAge(time.Second), kgo.MetadataMinAge(100*time.Millisecond),
	)
	if err != nil {
		return nil, fmt.Errorf("open the consumer: %w", err)
	}
	return &consumer{
		client: client, prefix: prefix + ".", checker: NewChecker(), ledger: ledger, stats: &Stats{}, screen: screen,
		now: time.Now, times: map[checkpoint.LSN]time.Time{}, arrived: make(chan struct{}, 1),
		reach: map[partition]int64{},
	}, nil
}

// run reads until ctx ends, which is no error.
func (c *consumer) run(ctx context.Context) error {
	for {
		fetches := c.client.PollFetches(ctx)
		if ctx.Err() != nil || fetches.IsClientClosed() {
			return nil
		}
		var errs []error
		fetches.EachError(func(topic string, p int32, err error) {
			errs = append(errs, fmt.Errorf("read %s/%d: %w", topic, p, err))
		})
		if err := errors.Join(errs...); err != nil {
			return err
		}
		c.take(fetches.Records())
	}
}

// take judges and prints a batch.
func (c *consumer) take(records []*kgo.Record) {
	now := c.now()
	batch := make([]*Event, 0, len(records))
	for _, r := range records {
		if r.Attrs.IsControl() {
			continue // a transaction's marker: only its offset counts, in reach
		}
		e, err := ParseRecord(r, now)
		if err != nil {
			c.stats.observeForeign()
			c.screen.Warn(err.Error())
			continue
		}
		if !e.Committed.IsZero() {
			c.rememberTime(e.CommitLSN, e.Committed)
		}
		batch = append(batch, &e)
	}
	// Partition by partition is how Kafka gives them and what the checker needs;
	// people read better in the order of the source. Verdicts are reached first.
	verdicts := make(map[*Event]string, len(batch))
	for _, e := range batch {
		if e.Committed.IsZero() {
			e.Committed = c.times[e.CommitLSN]
		}
		problem, repeat := c.checker.Observe(e)
		if !repeat {
			problem = strings.Trim(problem+"; "+c.ledger.Arrive(e), "; ")
		}
		verdicts[e] = problem
		c.stats.observe(e, c.checker.Verdict())
	}
	slices.SortStableFunc(batch, func(a, b *Event) int { return strings.Compare(a.Position, b.Position) })
	for _, e := range batch {
		c.screen.Event(e, verdicts[e])
	}
	c.advance(records)
	select {
	case c.arrived <- struct{}{}:
	default: // one signal is enough
	}
}

func (c *consumer) rememberTime(commit checkpoint.LSN, t time.Time) {
	if _, ok := c.times[commit]; ok {
		return
	}
	c.times[commit] = t
	if c.order = append(c.order, commit); len(c.order) > commitTimes {
		delete(c.times, c.order[0])
		c.order = c.order[1:]
	}
}

func (c *consumer) advance(records []*kgo.Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range records {
		c.reach[partition{r.Topic, r.Partition}] = r.Offset + 1
	}
}

// drain waits until everything that stands in the topics now has been taken. The
// connector must have ended: a transaction that is open is waited for.
// Ended is closed when nobody reads any more.
func (c *consumer) drain(ctx context.Context, ended <-chan struct{}) error {
	ends, err := kadm.NewClient(c.client).ListEndOffsets(ctx)
	if err != nil {
		return fmt.Errorf("list end offsets: %w", err)
	}
	for {
		if c.reached(ends) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("read the topics to their end: %w", context.Cause(ctx))
		case <-ended:
			return nil // the reader's own error says why
		case <-c.arrived:
		}
	}
}

func (c *consumer) reached(ends kadm.ListedOffsets) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := true
	ends.Each(func(o kadm.ListedOffset) {
		if strings.HasPrefix(o.Topic, c.prefix) || strings.HasPrefix(o.Topic, eventTopicPrefix) {
			all = all && c.reach[partition{o.Topic, o.Partition}] >= o.Offset
		}
	})
	return all
}

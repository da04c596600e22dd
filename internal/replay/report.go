package replay

import (
	"cmp"
	"slices"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// Report is what a replay delivered, or a dry run would; of a resumed one, what this call
// did.
type Report struct {
	ID           string       `json:"id"`
	From         string       `json:"from_lsn"`
	To           string       `json:"to_lsn"`
	DryRun       bool         `json:"dry_run"`
	InPlace      bool         `json:"in_place"`
	Prefix       string       `json:"topic_prefix"`
	Transactions int64        `json:"transactions"`
	Records      int64        `json:"records"`
	Topics       []TopicCount `json:"topics"`
}

// TopicCount is a topic's part: its records, of which so many are tombstones or dead
// letters, and its first and last commit.
type TopicCount struct {
	Topic       string     `json:"topic"`
	Records     int64      `json:"records"`
	Tombstones  int64      `json:"tombstones"`
	DeadLetters int64      `json:"dead_letters"`
	FirstLSN    string     `json:"first_commit_lsn"`
	FirstTime   *time.Time `json:"first_commit_time"` // null for a message outside a transaction
	LastLSN     string     `json:"last_commit_lsn"`
	LastTime    *time.Time `json:"last_commit_time"`
}

// counts counts as records are routed.
type counts struct {
	topics map[*router.Topic]*topicCount
	last   *router.Topic
	of     *topicCount
	total  int64
}

type topicCount struct {
	records, tombstones, dead int64
	first, latest             checkpoint.LSN
	firstTime, lastTime       time.Time
}

func (n *counts) add(b *router.Batch, from int, c *replication.Change) {
	commit, at := c.LSN-1, time.Time{} // as the header position of a message has it
	if c.Txn != nil {
		commit, at = c.Txn.CommitLSN, c.Txn.CommitTime
	}
	b.Added(from, func(t *router.Topic, copies int, tombstone, dead bool) {
		if t != n.last {
			if n.topics == nil {
				n.topics = map[*router.Topic]*topicCount{}
			}
			if n.topics[t] == nil {
				n.topics[t] = &topicCount{first: commit, firstTime: at}
			}
			n.last, n.of = t, n.topics[t]
		}
		n.of.records += int64(copies)
		n.total += int64(copies)
		if tombstone {
			n.of.tombstones++
		}
		if dead {
			n.of.dead++
		}
		n.of.latest, n.of.lastTime = commit, at
	})
}

func (n *counts) list() []TopicCount {
	list := make([]TopicCount, 0, len(n.topics))
	for t, c := range n.topics {
		list = append(list, TopicCount{
			Topic: t.Name, Records: c.records, Tombstones: c.tombstones, DeadLetters: c.dead,
			FirstLSN: c.first.String(), FirstTime: known(c.firstTime), LastLSN: c.latest.String(), LastTime: known(c.lastTime),
		})
	}
	slices.SortFunc(list, func(a, b TopicCount) int { return cmp.Compare(a.Topic, b.Topic) })
	return list
}

func known(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

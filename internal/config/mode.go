package config

import "fmt"

// mode judges what source.mode means for the other keys. Polling has no slot, no
// publication, no checkpoint and no snapshot: a key that speaks of one would be obeyed by
// nobody, so that it is an error and not a silent nothing.
func (v *validator) mode(c Config) {
	if c.Source.Mode != ModePolling {
		return
	}
	if len(c.Outbox) == 0 && !v.spokenIn("outbox") {
		v.bad("outbox", "[]", "is empty, and polling reads outbox tables only", "write for example [{table: public.outbox, after: mark}]")
	}
	for i, o := range c.Outbox {
		path := fmt.Sprintf("outbox[%d]", i)
		if o.Prefix != "" {
			v.bad(path+".message-prefix", o.Prefix, "has no meaning with source.mode polling: messages are in the WAL alone", "write the events into a table, or write source.mode: wal")
			continue
		}
		if o.After == AfterKeep {
			v.bad(path+".after", o.After, "leaves nothing by which polling could tell a published row from a new one", "write after: mark, or after: delete")
		}
		if v.given(path + ".snapshot") {
			v.bad(path+".snapshot", o.Snapshot, "has no meaning with source.mode polling, where every row that is not marked is pending", "remove it; mark the rows that are not to be sent")
		}
	}
	for _, k := range walOnly() {
		if v.given(k.path) {
			v.bad(k.path, v.at(k.path).text, "has no meaning with source.mode polling: "+k.why, "remove it, or write source.mode: wal")
		}
	}
}

// given tells whether the file has a key at path, whatever its value.
func (v *validator) given(path string) bool { return v.at(path).line > 0 }

// walOnly lists the keys that only logical replication, or the Kafka transactions that
// go with it, can obey.
func walOnly() []struct{ path, why string } {
	const (
		noSlot        = "there is no replication slot and no publication"
		outboxOnly    = "it reads outbox tables only"
		noSnapshot    = "it reads no other rows than those that are pending"
		noTransaction = "it uses no Kafka transactions and stores no position"
	)
	return []struct{ path, why string }{
		{"source.slot", noSlot},
		{"source.publication", noSlot},
		{"source.publication-mode", noSlot},
		{"source.tables", outboxOnly},
		{"source.messages", outboxOnly},
		{"source.keyless", outboxOnly},
		{"source.keys", outboxOnly},
		{"source.columns", outboxOnly},
		{"source.max-retained-wal", noSlot},
		{"source.primary-dsn", "rows are read and marked at source.dsn, which must be the primary"},
		{"snapshot", noSnapshot},
		{"replay", noSlot},
		{"format", "it forms the values of plain tables, and polling reads outbox tables only"},
		{"batch.max-delay", "a batch holds what a poll finds, and source.poll-interval says when to look"},
		{"topics.table", outboxOnly},
		{"topics.message", outboxOnly},
		{"kafka.transactional-id", noTransaction},
		{"kafka.transaction-timeout", noTransaction},
		{"kafka.checkpoint-topic", noTransaction},
		{"on-fenced", "several instances share the work, and none is fenced"},
	}
}

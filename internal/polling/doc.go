// Package polling publishes outbox tables without logical replication: it reads the rows
// that are not marked, publishes them, and then marks or deletes them. That is two systems
// and no transaction over both, so that it is at least once. Any number of instances share
// the work; what they keep in order, and how, is told in docs/polling.md.
//
// One round, in one database transaction (READ COMMITTED):
//
//  1. Outside of it, look which shards have pending rows. A shard is a 64th of the keys, by
//     their hash.
//  2. Take the advisory locks of some of these shards. They end with the transaction. All
//     that follows sees what the shard's last holder has committed, since a lock is let go
//     only after the commit is visible.
//  3. List the pending rows of the shards in their order, without locking them.
//  4. Lock and read them, some at a time, FOR UPDATE SKIP LOCKED. A row of the list that
//     does not come is held by somebody else, or was changed this moment: the rows of its
//     key that follow it in the list are left for a later round, or they would overtake it.
//  5. Publish, and wait for Kafka's acknowledgements.
//  6. Mark or delete what is acknowledged, and commit.
//
// What must hold:
//
//   - A row is marked only after Kafka has it: nothing is lost.
//   - A key's rows are published by one instance at a time, each for the first time only
//     when those before it in the list have been. What a kill or a failure between 5 and 6
//     leaves is published again, that batch at most, and by itself in the same order.
package polling

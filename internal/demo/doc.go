// Package demo is the whole of walrelay in one process tree, for a first look:
// a throw-away PostgreSQL, an embedded Kafka, a small shop that writes to the
// one, the connector, and a consumer that prints what arrives in the other.
//
// Nothing in it is staged. The connector is the binary itself, started as
// `walrelay run -c FILE` with a file that the reader can open; PostgreSQL and
// the Kafka protocol are real; and the sentence at the end, "each exactly once",
// is computed by [Checker] and [Ledger] from what the shop committed and what
// the consumer read, so that it can come out otherwise.
//
// # What starts, and in which order
//
//	work directory → PostgreSQL → shop's schema → Kafka and topics → consumer → connector → shop
//
// The consumer stands before the connector so that the first record's latency
// is measured too; the shop comes last because a fresh connector streams from
// the creation of its slot. Close is the mirror: the shop ends its transaction,
// the consumer waits for what is still to come, the connector gets SIGTERM, what
// it may have sent in the meantime is read, and only then do Kafka and
// PostgreSQL go and the directory with them.
package demo

// Package checkpoint holds how far the stream has been delivered, the state that a
// restart needs, and the forms in which both are stored.
//
// It speaks of positions in PostgreSQL's write-ahead log and knows neither
// PostgreSQL connections nor Kafka; package checkpoint/kafka keeps checkpoints in
// a topic.
package checkpoint

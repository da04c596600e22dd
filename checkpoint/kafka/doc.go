// Package kafka keeps checkpoints in a compacted Kafka topic.
//
// It reads: the position gets into the topic only through the Kafka transactions of
// the producer, which writes the records that checkpoint.Log gives it. What it writes
// are requests, which ask the connector for something. FORMAT.md in package checkpoint
// describes the records and says why a start is fast.
package kafka

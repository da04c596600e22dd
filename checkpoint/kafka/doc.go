// Package kafka keeps checkpoints in a compacted Kafka topic.
//
// It reads: the position gets into the topic only through the Kafka transactions of
// the producer, which writes the records that checkpoint.Log gives it. FORMAT.md
// in package checkpoint describes them and says why a start is fast.
package kafka

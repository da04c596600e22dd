// Package outbox is what happens to rows of outbox tables beside the stream: they are
// marked or deleted once their events are in Kafka, what is marked is cleaned away, and
// what is pending is counted. It knows nothing of Kafka; which rows are in it, its
// callers say.
package outbox

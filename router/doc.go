// Package router turns changes into records and delivers them: which topic, which
// key, which bytes, in which Kafka transaction. Outbox rows become events here.
//
// Router is pure; Producer is the only way a record or a checkpoint gets into
// Kafka.
package router

// Package replication owns the slot, the publications and PostgreSQL's
// replication protocol, and turns pgoutput messages into changes. It knows nothing
// of Kafka.
package replication

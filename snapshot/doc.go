// Package snapshot reads the rows that are in the tables and merges them into the stream,
// exactly, without holding an MVCC snapshot open (DESIGN, "Snapshot merge").
//
//	catalog ──► Merger ──orders──► Readers ──chunks──► Merger ──rows──► router
//	                ▲
//	   the stream's changes
//
// The Merger is pure: it decides what to read, which rows a change has superseded, and
// when the rest may go out. The Readers are connections that execute its orders. Neither
// knows of Kafka.
package snapshot

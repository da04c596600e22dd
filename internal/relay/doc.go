// Package relay is the connector: it starts the rooms in their order, runs the one
// loop from the stream to the producer, and decides what an error means.
//
// The order of a start is an invariant (DESIGN, invariant 3): take the slot, which
// is the lease; fence; then read the checkpoint.
package relay

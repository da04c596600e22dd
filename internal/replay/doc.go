// Package replay delivers a stretch of the WAL again, beside the connector: from a
// temporary copy of its anchor slot, through a transactional id and a checkpoint topic of
// its own, so that the live stream is neither stopped nor fenced nor held back. See
// DESIGN.md, "Replay from a chosen LSN".
package replay

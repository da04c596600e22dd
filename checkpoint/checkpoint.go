package checkpoint

import "time"

// Checkpoint is the state that a restart resumes from. It is written only inside
// the Kafka transaction that delivers the records before it (DESIGN, invariant 2).
type Checkpoint struct {
	Position     Position
	Source       Source
	Publications []Publication
	// Partitions is the partition count of each topic written to, as the first
	// record saw it. A change of it moves keys between partitions. It is stored in
	// the state record and not in the position record; the producer keeps it in its
	// Log, so it is set here only by Load.
	Partitions map[string]int32
	// Tables is the progress of the snapshot by table OID. Load gives all of it; what is
	// delivered carries only what changed since the last delivery, and the Log keeps the
	// whole. A TableProgress without a State takes the table out. The Log copies what it
	// keeps, but for single keys and Requests, which nobody alters.
	Tables map[uint32]TableProgress
	// Trees are the partitions of each partitioned table that is captured through its root,
	// by its OID. Load gives all of them; what is delivered carries only those that changed,
	// nil for one that is no more, and the Log keeps the whole. A Tree is never altered.
	Trees map[uint32]Tree
	// SlotSnapshot is the MVCC snapshot at the slot's creation, as pg_current_snapshot()
	// writes it: transactions that it does not see are in the stream. Empty where it is
	// not known, or no longer of use.
	SlotSnapshot string
	// Requests is the offset in the checkpoint topic up to which requests have been
	// taken over into Tables; 0: from the beginning.
	Requests int64
	// TakenOver holds the IDs of requests whose records the delivery removes, because
	// they are in Tables now or need nothing any more. Load leaves it nil.
	TakenOver []string
	// After is what a restart has to know of outbox rows that are marked or deleted; nil
	// where none are.
	After *After
	// Rewound is the LSN of the last run --from-lsn: a restart with the same one does not
	// rewind again. 0 before the first.
	Rewound LSN
	// Anchor is where the anchor slot was last seen to stand; zero before it is made.
	Anchor Anchor
	// Replay is what a replay was begun with; nil in a connector's checkpoint.
	Replay *Replay
}

// Anchor is a place of the anchor slot, and a time of the server's clock by which everything
// before it was committed. It is of use only while the slot stands at LSN.
type Anchor struct {
	LSN LSN
	At  time.Time
}

// Replay is what a replay delivers: transactions whose commit record ends after From and at
// or before To. Asked is what was asked for, as its flags: a replay that goes on is asked for
// the same.
type Replay struct {
	From, To LSN
	Asked    string
}

// Source identifies the database that the position belongs to. LSNs of two
// clusters compare without complaint, so the identity is checked first.
type Source struct {
	SystemID string // IDENTIFY_SYSTEM's systemid, a 64-bit number in decimal
	Database string
	Timeline int32
}

// Publication is one that the stream names, with its horizon: the WAL LSN from
// which on every change finds the publication in the catalog of its own moment.
// Before it, naming the publication ends the stream (14 to 17) or loses changes in
// silence (18). Horizon 0 means not known yet. Once known it stays, but where a session goes on
// delivering without the publication: then it moves behind what was delivered.
type Publication struct {
	Name    string
	Horizon LSN
}

// IsZero tells whether c is the checkpoint before the first one.
func (c Checkpoint) IsZero() bool { return c.Position.IsZero() && c.Source == Source{} }

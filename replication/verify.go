package replication

import (
	"errors"
	"fmt"

	"github.com/walrelay/walrelay/checkpoint"
)

// minVersion is PostgreSQL 14: logical messages in pgoutput, which the sequence number
// of a change counts, came with it.
const minVersion = 140000

// Facts are what the refusals are decided by. The checks are pure; the caller has read
// the facts, in this order:
//
//  1. ReadDatabase, Tables, and NewPlan or Cover.
//  2. ReadSlot, ReadPublication, and with both there ReadOrder; the checkpoint as
//     it can be read before fencing. Source and horizons never change, so they may be
//     trusted; the position may be stale and is not looked at yet.
//  3. VerifyStart. Nothing has been created or changed up to here.
//  4. Sync, OpenHorizon, and where there is no slot CreateSlot: publications first.
//     Waiting for HorizonReached before CreateSlot costs nothing, since the server
//     would wait for the same transactions, and makes both publications older than the
//     slot beyond doubt.
//  5. START_REPLICATION at 0/0, which takes the slot; then fencing; then the
//     checkpoint, up to the end of its log (DESIGN, invariant 3).
//  6. ReadDatabase and ReadSlot once more: until 5 another instance may have moved the
//     slot, from now on only this one does. IDENTIFY_SYSTEM and, where the timeline is
//     another one than the checkpoint's, TIMELINE_HISTORY (ParseTimelineHistory).
//  7. VerifyResume. Nothing has been delivered or confirmed up to here.
type Facts struct {
	// Managed is publication-mode: managed.
	Managed  bool
	Database Database

	SlotName  string
	Slot      Slot
	SlotFound bool

	Publication      string // the main one; the second may join later, see its horizon
	PublicationFound bool
	// Order is ReadOrder's answer for Publication and SlotName.
	Order Order

	Checkpoint      checkpoint.Checkpoint
	CheckpointTopic string
	// CheckpointTopicUsed tells that the topic's end offset is above 0, so that a
	// missing checkpoint was lost and not never written.
	CheckpointTopicUsed bool
	// AnchorFound tells that the connector's anchor slot is there; it is made only
	// after the first checkpoint.
	AnchorFound bool

	// History are the switches to the server's timeline, from TIMELINE_HISTORY.
	History []TimelineSwitch
}

// VerifyStart decides, before anything is created, whether the start may go on. All
// problems come at once, each a *checkpoint.Refusal.
func VerifyStart(f Facts) error {
	return errors.Join(
		verifyServer(f),
		verifySource(f),
		verifySlot(f),
		verifyPublication(f),
		verifyRanBefore(f),
	)
}

// VerifyResume decides, after the slot is taken and the checkpoint read, whether the
// stream may go on from the checkpoint.
func VerifyResume(f Facts) error {
	// The source comes first and alone: the LSNs of another cluster mean nothing.
	if err := verifySource(f); err != nil {
		return err
	}
	// A server on another branch may have any WAL end and any slot: its own message.
	if err := verifyTimeline(f); err != nil {
		return err
	}
	return errors.Join(
		verifySlot(f),
		verifyRanBefore(f),
		verifyWALEnd(f),
		verifyConfirmed(f),
	)
}

// Adopts tells whether the start takes over a slot that it did not make, from the
// slot's confirmed position; callers say so in the log.
func (f Facts) Adopts() bool { return f.SlotFound && f.Checkpoint.Position.IsZero() }

func verifyServer(f Facts) error {
	db := f.Database
	var problems []error
	if db.Version < minVersion {
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("PostgreSQL %d is too old", db.Version/10000),
			Remedy: "upgrade to PostgreSQL 14 or later",
		})
	}
	if db.WALLevel != "logical" {
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("wal_level is %s, so that the WAL lacks what logical replication needs", db.WALLevel),
			Remedy: "ALTER SYSTEM SET wal_level = logical, then restart PostgreSQL (on a managed service the parameter rds.logical_replication or its like)",
		})
	}
	if !db.Role.Superuser && !db.Role.Replication {
		problems = append(problems, refuseReplicationRight(db.Role.Name, nil))
	}
	if db.InRecovery && f.Managed {
		problems = append(problems, &checkpoint.Refusal{
			What:   "the server is a standby, where publications cannot be created or altered",
			Remedy: "point source.dsn to the primary (target_session_attrs=read-write finds it among several hosts), or make the publication there and set source.publication-mode: existing",
		})
	}
	if !f.SlotFound && db.MaxSlots > 0 && db.Slots >= db.MaxSlots {
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("no replication slot is free for %q: %d of max_replication_slots = %d are in use", f.SlotName, db.Slots, db.MaxSlots),
			Remedy: "raise max_replication_slots (needs a restart of PostgreSQL), or drop a slot that nobody uses: SELECT slot_name, active FROM pg_replication_slots",
		})
	}
	return errors.Join(problems...)
}

func verifySource(f Facts) error { return CheckSource(f.Checkpoint.Source, f.Database) }

// CheckSource compares a checkpoint's cluster and database with the server's, and gives a
// *checkpoint.Refusal where they are others. A zero cp fits every server.
func CheckSource(cp checkpoint.Source, db Database) error {
	if cp == (checkpoint.Source{}) {
		return nil
	}
	if cp.SystemID != db.SystemID {
		return &checkpoint.Refusal{
			What: fmt.Sprintf("the checkpoint belongs to another cluster: its system identifier is %s, the server's is %s", cp.SystemID, orUnknown(db.SystemID)),
			Risk: "positions of two clusters cannot be compared, so changes would be skipped or repeated without notice",
			Remedy: "point source.dsn to the cluster that the checkpoint belongs to; after pg_upgrade or a restore of a dump run walrelay checkpoint set -c FILE --accept-source; " +
				"for another database altogether use another name",
		}
	}
	if cp.Database != db.Name {
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("the checkpoint belongs to database %q, source.dsn names %q", cp.Database, db.Name),
			Risk:   "the changes of one database would continue the topics of another",
			Remedy: fmt.Sprintf("correct source.dsn, or, if the database was renamed, run walrelay checkpoint set -c FILE --accept-source; for another database use another name than %q's", cp.Database),
		}
	}
	return nil
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}

// verifySlot looks at the slot itself: ours in kind, and alive.
func verifySlot(f Facts) error {
	s := f.Slot
	drop := fmt.Sprintf("SELECT pg_drop_replication_slot('%s')", f.SlotName)
	switch {
	case !f.SlotFound:
		return verifySlotMissing(f)
	case s.Type != "logical" || s.Plugin != Plugin:
		kind := s.Type
		if s.Plugin != "" {
			kind += " with plugin " + s.Plugin
		}
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("slot %q is %s, not logical with plugin %s", s.Name, kind, Plugin),
			Risk:   "it may belong to another program, which would lose its position",
			Remedy: "set source.slot to another name, or, if nobody uses the slot, " + drop,
		}
	case s.Database != f.Database.Name:
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("slot %q belongs to database %q, source.dsn names %q", s.Name, s.Database, f.Database.Name),
			Remedy: "correct source.dsn, or set source.slot to another name (slot names are shared by the whole cluster)",
		}
	case s.TwoPhase:
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("slot %q was created with two_phase, which sends prepared transactions before they commit", s.Name),
			Remedy: "set source.slot to another name, or, if nobody uses the slot, " + drop,
		}
	case s.Temporary:
		return &checkpoint.Refusal{
			What:   fmt.Sprintf("slot %q is temporary and ends with the session that made it", s.Name),
			Remedy: "set source.slot to another name",
		}
	case s.Invalidation != "" || s.WALStatus == "lost":
		return refuseLostSlot(f)
	}
	return nil
}

func refuseLostSlot(f Facts) error {
	s := f.Slot
	from := s.ConfirmedFlush
	if p := f.Checkpoint.Position.LSN; p > from {
		from = p
	}
	again := "walrelay slot drop -c FILE --yes, then start again"
	if !f.Checkpoint.IsZero() {
		again = fmt.Sprintf("walrelay checkpoint set -c FILE --lsn %s makes the slot again from the anchor, where that still reaches back so far; otherwise accept the gap with "+
			"walrelay slot drop -c FILE --yes, start under a new checkpoint topic (kafka.checkpoint-topic) and read the tables again with walrelay snapshot -c FILE --table T --replace", f.Checkpoint.Position.LSN)
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("slot %q is lost (wal_status %s, reason %s): PostgreSQL has removed what it needs", s.Name, orUnknown(s.WALStatus), orUnknown(s.Invalidation)),
		Risk:   fmt.Sprintf("changes that were committed after %s and are not in Kafka cannot be read from the WAL any more", from),
		Remedy: again + "; raise max_slot_wal_keep_size (or idle_replication_slot_timeout) so that it does not happen again",
	}
}

// verifySlotMissing: no slot is what a first start finds, and nobody else.
func verifySlotMissing(f Facts) error {
	if f.Checkpoint.IsZero() {
		return nil // with an emptied topic, verifyRanBefore has its say
	}
	p := f.Checkpoint.Position.LSN
	return &checkpoint.Refusal{
		What: fmt.Sprintf("slot %q does not exist, although the checkpoint in topic %q is at %s: it was dropped, or lost in a failover", f.SlotName, f.CheckpointTopic, p),
		Risk: fmt.Sprintf("changes committed after %s may be missing: a new slot begins where it is created", p),
		Remedy: fmt.Sprintf("walrelay checkpoint set -c FILE --lsn %s makes the slot again from the anchor, where that still reaches back so far; otherwise accept the gap with "+
			"walrelay slot drop -c FILE --yes, start under a new checkpoint topic (kafka.checkpoint-topic) and read the tables again with walrelay snapshot -c FILE --table T --replace", p),
	}
}

// verifyPublication: a publication that is missing beside a slot must not be made now,
// because the slot's WAL is older than it (see Order).
func verifyPublication(f Facts) error {
	if !f.SlotFound {
		if !f.PublicationFound && !f.Managed {
			return refuseNoPublication(f.Publication)
		}
		return nil
	}
	remedy := fmt.Sprintf("walrelay slot drop -c FILE --yes (or SELECT pg_drop_replication_slot('%s')), then start again: publications are made first, then the slot", f.SlotName)
	risk := fmt.Sprintf("what was committed between the slot's position %s and the new slot is not streamed; a snapshot reads the rows", f.Slot.ConfirmedFlush)
	if !f.PublicationFound {
		what := fmt.Sprintf("slot %q is there but its publication %q is not, and a slot cannot be used with a publication made after it", f.SlotName, f.Publication)
		if !f.Managed {
			remedy = fmt.Sprintf("SELECT pg_drop_replication_slot('%s'), CREATE PUBLICATION %s FOR TABLE …, then start again: the publication first, then the slot", f.SlotName, quote(f.Publication))
		}
		if !f.Checkpoint.IsZero() {
			what = fmt.Sprintf("publication %q was dropped while slot %q was in use, and a slot cannot be used with a publication made after it", f.Publication, f.SlotName)
			remedy = fmt.Sprintf("walrelay slot drop -c FILE --yes, then start under a new checkpoint topic (kafka.checkpoint-topic), which reads the tables anew: publications are made first, then the slot; "+
				"with source.publication-mode: existing, CREATE PUBLICATION %s FOR TABLE … before that", quote(f.Publication))
		}
		return &checkpoint.Refusal{What: what, Risk: risk, Remedy: remedy}
	}
	// With a checkpoint its horizons have been kept, whatever a probe of today says.
	if f.Order == OrderSlotFirst && f.Checkpoint.IsZero() {
		return RefuseYoungPublication(f.Publication, f.SlotName, f.Slot.ConfirmedFlush, nil)
	}
	return nil
}

// verifyRanBefore: without a checkpoint a slot is adopted, or made, only where nothing
// shows that this connector ran before.
func verifyRanBefore(f Facts) error {
	if !f.Checkpoint.IsZero() || !f.CheckpointTopicUsed && !f.AnchorFound {
		return nil
	}
	sign := fmt.Sprintf("topic %q has been written to", f.CheckpointTopic)
	if !f.CheckpointTopicUsed {
		sign = "its anchor slot is there"
	}
	return &checkpoint.Refusal{
		What: fmt.Sprintf("there is no checkpoint in topic %q, although this connector ran before: %s", f.CheckpointTopic, sign),
		Risk: "how far the stream was delivered is not known, so changes would be repeated or missing",
		Remedy: "restore the topic, or set the position by hand: walrelay checkpoint set -c FILE --lsn L; to start anew, walrelay slot drop -c FILE --yes and another kafka.checkpoint-topic; " +
			"the topic must have cleanup.policy=compact, as retention deletes the checkpoint",
	}
}

// verifyWALEnd: a server whose WAL ends before the checkpoint has lost commits that
// Kafka holds.
func verifyWALEnd(f Facts) error {
	p, end := f.Checkpoint.Position.LSN, f.Database.WALEnd
	if p <= end {
		return nil
	}
	return &checkpoint.Refusal{
		What: fmt.Sprintf("the server's WAL is behind the checkpoint: it ends at %s on timeline %d, the checkpoint is at %s on timeline %d, %d bytes ahead",
			end, f.Database.Timeline, p, f.Checkpoint.Source.Timeline, uint64(p-end)),
		Risk:   "the server lost commits in a failover or restore that Kafka already holds, and new ones would be taken for old ones and skipped",
		Remedy: fmt.Sprintf("point source.dsn to the server that has the commits; or accept the loss: walrelay checkpoint set -c FILE --lsn %s, then walrelay snapshot -c FILE --table T --replace for the tables concerned", end),
	}
}

// verifyConfirmed: the slot only ever follows the checkpoint (DESIGN, invariant 1), so
// that a slot ahead of it was moved by somebody else. Behind is normal: the server
// writes the confirmed position to disk lazily.
func verifyConfirmed(f Facts) error {
	p, confirmed := f.Checkpoint.Position.LSN, f.Slot.ConfirmedFlush
	if !f.SlotFound || p == 0 || confirmed <= p {
		return nil
	}
	return &checkpoint.Refusal{
		What: fmt.Sprintf("slot %q is confirmed up to %s, %d bytes past the checkpoint at %s: it was created again or advanced by somebody else",
			f.SlotName, confirmed, uint64(confirmed-p), p),
		Risk: fmt.Sprintf("changes committed between %s and %s may be missing in Kafka, and this slot does not send them any more", p, confirmed),
		Remedy: fmt.Sprintf("walrelay checkpoint set -c FILE --lsn %s accepts the gap (then walrelay snapshot -c FILE --table T --replace reads the tables again); "+
			"with --lsn %s it makes the slot again from the anchor, where that still reaches back so far", confirmed, p),
	}
}

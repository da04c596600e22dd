package replication

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
)

// Order says which of a publication and a slot came first. Decoding looks a publication
// up in the catalog of the change's own time, so that a slot cannot be used with one
// that is younger than the WAL that it still has to read.
type Order int

// The orders. OrderUnknown may be streamed: should the publication be too young after
// all, the server says so before anything is lost, see PublicationTooYoung and
// NoticeTooYoung.
const (
	OrderUnknown Order = iota
	OrderPublicationFirst
	OrderSlotFirst
)

// probeTimeout bounds the probe, which decodes the first source transaction that the
// slot has; a large one says nothing in that time, and the order stays unknown.
const probeTimeout = "5s"

// ReadOrder finds out which came first: from the ages of catalog row and slot, and
// where that proves nothing, by letting the server decode the first transaction of the
// slot without consuming it. A slot that is in use is not probed. It changes nothing.
func ReadOrder(ctx context.Context, connect Connector, publication, slot string) (Order, error) {
	young := false
	conn, err := connect(ctx, WithNotice(func(n *pgconn.Notice) { young = young || NoticeTooYoung(n) }))
	if err != nil {
		return OrderUnknown, err
	}
	defer closeQuietly(ctx, conn)
	older, err := ProvablyOlder(ctx, conn, publication, slot)
	if err != nil {
		return OrderUnknown, err
	}
	if older {
		return OrderPublicationFirst, nil
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL statement_timeout = '"+probeTimeout+"'"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `SELECT count(*) FROM pg_catalog.pg_logical_slot_peek_binary_changes($1, NULL, 1,
  'proto_version', '1', 'publication_names', $2)`, slot, quote(publication))
		return err
	})
	switch {
	case young || PublicationTooYoung(err):
		return OrderSlotFirst, nil
	case err == nil, hasCode(err, codeQueryCanceled), hasCode(err, codeObjectInUse), hasCode(err, codeObjectNotReady):
		// One good transaction proves nothing about those behind it.
		return OrderUnknown, ctx.Err()
	}
	return OrderUnknown, fmt.Errorf("probe slot %s: %w", slot, err)
}

// PublicationTooYoung tells whether decoding failed because a publication did not exist
// yet when the change was written (14 to 17). The same WAL fails for ever, so callers
// end with RefuseYoungPublication instead of retrying.
func PublicationTooYoung(err error) bool {
	var pgErr *pgconn.PgError
	return errors.Is(err, ErrPublicationTooYoung) ||
		errors.As(err, &pgErr) && pgErr.Code == codeUndefinedObject && pgErr.Routine == "get_publication_oid"
}

// NoticeTooYoung recognises the same on 18 and later, where the server only warns and
// then leaves the change out. The warning comes on the stream's connection, ahead of
// whatever is sent after the gap: a stream that hears it must stop at once, confirm
// nothing more and end with RefuseYoungPublication (DESIGN, invariant 6).
func NoticeTooYoung(n *pgconn.Notice) bool {
	return n != nil && n.Code == codeObjectNotReady && n.Routine == "LoadPublications"
}

// RefuseYoungPublication is the *checkpoint.Refusal for a slot whose WAL is older than
// a publication; err may be nil.
func RefuseYoungPublication(publication, slot string, confirmed checkpoint.LSN, err error) error {
	return &checkpoint.Refusal{
		What: fmt.Sprintf("slot %q (confirmed %s) is older than publication %q, and a slot cannot be used with a publication made after it",
			slot, confirmed, publication),
		Risk: fmt.Sprintf("what was committed between %s and a new slot is not streamed; a snapshot reads the rows", confirmed),
		Remedy: fmt.Sprintf("walrelay slot drop -c FILE --yes (or SELECT pg_drop_replication_slot('%s')), then start again: publications are made first, then the slot",
			slot),
		Err: err,
	}
}

// ProvablyOlder tells whether the publication is older than everything that the slot
// still decodes: its catalog row was written by a transaction before the slot's
// catalog_xmin, and every snapshot of the slot counts those as finished. False means
// not proven, not the contrary: the row may have been altered since, or another
// transaction was running when the slot was made.
func ProvablyOlder(ctx context.Context, conn *pgx.Conn, publication, slot string) (bool, error) {
	var older bool
	// age() is largest for the frozen xid 2. Negative, the xid lies more than two
	// thousand million transactions back, as none can lie ahead.
	err := conn.QueryRow(ctx, `
SELECT pg_catalog.age(p.xmin) > pg_catalog.age(s.catalog_xmin) OR pg_catalog.age(p.xmin) < 0
  FROM pg_catalog.pg_publication p, pg_catalog.pg_replication_slots s
 WHERE p.pubname = $1 AND s.slot_name = $2 AND s.catalog_xmin IS NOT NULL`, publication, slot).Scan(&older)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("compare ages of publication %s and slot %s: %w", publication, slot, err)
	}
	return older, nil
}

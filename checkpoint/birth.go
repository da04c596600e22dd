package checkpoint

import (
	"errors"
	"slices"
	"strconv"
)

// KeySlot is the key of the record that tells of the slot's creation.
const KeySlot = "slot"

// Birth is what is known at the creation of a slot and never again. It is written at once,
// outside of transactions, so that a first start which ends before its first checkpoint is
// one for the next start, too.
type Birth struct {
	Slot     string
	LSN      LSN // where the slot begins
	Source   Source
	Snapshot string // the MVCC snapshot that sees what the slot does not send
	// Before are the OIDs of the tables that were published before; Empty are the outbox
	// tables among them that had no row.
	Before, Empty []uint32
}

// EncodeBirth appends the value of the record to dst.
//
//	| field    | JSON          | meaning                                  |
//	| -------- | ------------- | ---------------------------------------- |
//	| version  | "major.minor" | of the format                            |
//	| slot     | string        | Birth.Slot                               |
//	| lsn      | "X/Y"         | Birth.LSN                                |
//	| source   | object        | Birth.Source, as in the position record  |
//	| snapshot | string        | Birth.Snapshot                           |
//	| before   | [integer]     | Birth.Before                             |
//	| empty    | [integer]     | Birth.Empty                              |
func EncodeBirth(dst []byte, b *Birth) []byte {
	dst = append(dst, `{"version":"`+formatVersion+`","slot":`...)
	dst = appendString(dst, b.Slot)
	dst = append(dst, `,"lsn":"`...)
	dst = b.LSN.Append(dst)
	dst = append(dst, `","source":`...)
	dst = appendSource(dst, b.Source)
	dst = append(dst, `,"snapshot":`...)
	dst = appendString(dst, b.Snapshot)
	dst = append(dst, `,"before":`...)
	dst = appendOIDs(dst, b.Before)
	dst = append(dst, `,"empty":`...)
	return append(appendOIDs(dst, b.Empty), '}')
}

func appendOIDs(dst []byte, oids []uint32) []byte {
	dst = append(dst, '[')
	for i, oid := range oids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(oid), 10)
	}
	return append(dst, ']')
}

type birthRecord struct {
	Slot     string        `json:"slot"`
	LSN      *jsonLSN      `json:"lsn"`
	Source   *sourceRecord `json:"source"`
	Snapshot string        `json:"snapshot"`
	Before   []uint32      `json:"before"`
	Empty    []uint32      `json:"empty"`
}

// DecodeBirth reads what EncodeBirth wrote. A record of a newer major version is a
// *VersionError.
func DecodeBirth(data []byte) (*Birth, error) {
	var r birthRecord
	if err := decode(KeySlot, data, &r); err != nil {
		return nil, err
	}
	if r.Slot == "" || r.LSN == nil || r.Source == nil {
		return nil, damaged(KeySlot, errors.New("it is incomplete"))
	}
	return &Birth{Slot: r.Slot, LSN: LSN(*r.LSN), Source: Source(*r.Source), Snapshot: r.Snapshot, Before: r.Before, Empty: r.Empty}, nil
}

// Is tells whether b tells of that slot: of this name, in this database, which nothing was
// confirmed of yet.
func (b *Birth) Is(slot string, confirmed LSN, s Source) bool {
	return b != nil && b.Slot == slot && b.LSN == confirmed && b.Source.SystemID == s.SystemID && b.Source.Database == s.Database
}

// Had tells whether a table was published before the slot was made.
func (b *Birth) Had(oid uint32) bool { return b != nil && slices.Contains(b.Before, oid) }

// WasEmpty tells of an outbox table that it had no row then.
func (b *Birth) WasEmpty(oid uint32) bool { return b != nil && slices.Contains(b.Empty, oid) }

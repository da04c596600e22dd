package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Keys of the records in the checkpoint topic. The topic is compacted, so the
// newest record of each is what Kafka keeps.
const (
	// KeyPosition is the key of the position record: small, in every Kafka
	// transaction.
	KeyPosition = "position"
	// KeyState is the key of the state record: as large as the number of topics and
	// tables makes it, written rarely.
	KeyState = "state"
)

// StateBeside stands in a position record for "the state record that belongs to
// this one is the nearest before it, from the same Kafka transaction". A producer
// cannot know the offset of a record before the broker has appended it.
const StateBeside int64 = -1

// formatVersion is what this release writes, major.minor.
//
// The minor rises when a field is added that an older release may ignore, and may
// drop when it writes its own record, without harm. The major rises otherwise, and
// a release refuses majors that it does not know. See FORMAT.md.
const (
	formatVersion = "1.2"
	formatMajor   = 1
)

// EncodePosition appends the position record of c to dst, without allocating when
// dst has room. c.Partitions, c.Tables and c.Trees are not part of it: they stand in the state
// record at offset stateOffset of the checkpoint topic (or StateBeside), and delta (nil:
// nothing) holds what has changed since. Output is deterministic.
//
//	| field         | JSON            | meaning                                              |
//	| ------------- | --------------- | ---------------------------------------------------- |
//	| version       | "major.minor"   | of the format                                        |
//	| lsn           | "X/Y"           | Position.LSN                                         |
//	| commit_lsn    | "X/Y"           | Position.CommitLSN                                   |
//	| commit_time_us| integer, absent | Position.CommitTime, microseconds since 1970, UTC    |
//	| cut           | object, absent  | {"commit_lsn":"X/Y","changes":n}                     |
//	| source        | object          | {"system_id":"…","database":"…","timeline":n}        |
//	| publications  | array           | [{"name":"…","horizon":"X/Y"}]                       |
//	| state         | integer         | offset of the state record, -1 for the one beside it |
//	| delta         | object, absent  | {"topic":partitions} set since that state record     |
//	| tables        | object, absent  | {"oid":progress or null} set since that state record |
//	| trees         | object, absent  | {"oid":partitions or null} set since that record     |
//	| slot_snapshot | string, absent  | Checkpoint.SlotSnapshot                              |
//	| requests      | integer, absent | Checkpoint.Requests                                  |
//	| rewound       | "X/Y", absent   | Checkpoint.Rewound                                   |
//	| anchor        | object, absent  | {"lsn":"X/Y","at_us":n}: Checkpoint.Anchor           |
//	| replay        | object, absent  | {"from":"X/Y","to":"X/Y","asked":"…"}: Checkpoint.Replay |
//	| after         | object, absent  | Checkpoint.After                                     |
func EncodePosition(dst []byte, c *Checkpoint, stateOffset int64, delta *Delta) []byte {
	dst, _ = encodePosition(dst, c, stateOffset, delta)
	return dst
}

// encodePosition tells also how many of the bytes are the delta's.
func encodePosition(dst []byte, c *Checkpoint, stateOffset int64, delta *Delta) (_ []byte, deltaBytes int) {
	p := &c.Position
	dst = append(dst, `{"version":"`+formatVersion+`","lsn":"`...)
	dst = p.LSN.Append(dst)
	dst = append(dst, `","commit_lsn":"`...)
	dst = p.CommitLSN.Append(dst)
	dst = append(dst, '"')
	if !p.CommitTime.IsZero() {
		dst = append(dst, `,"commit_time_us":`...)
		dst = strconv.AppendInt(dst, p.CommitTime.UnixMicro(), 10)
	}
	if !p.Cut.IsZero() {
		dst = append(dst, `,"cut":{"commit_lsn":"`...)
		dst = p.Cut.CommitLSN.Append(dst)
		dst = append(dst, `","changes":`...)
		dst = strconv.AppendUint(dst, p.Cut.Changes, 10)
		dst = append(dst, '}')
	}
	dst = append(dst, `,"source":`...)
	dst = appendSource(dst, c.Source)
	dst = append(dst, `,"publications":[`...)
	for i := range c.Publications {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"name":`...)
		dst = appendString(dst, c.Publications[i].Name)
		dst = append(dst, `,"horizon":"`...)
		dst = c.Publications[i].Horizon.Append(dst)
		dst = append(dst, `"}`...)
	}
	dst = append(dst, `],"state":`...)
	dst = strconv.AppendInt(dst, stateOffset, 10)
	before := len(dst)
	if delta != nil && len(delta.Partitions) > 0 {
		dst = append(dst, `,"delta":`...)
		dst = appendCounts(dst, delta.Partitions)
	}
	if delta != nil && len(delta.Tables) > 0 {
		dst = append(dst, `,"tables":`...)
		dst = appendTables(dst, delta.Tables)
	}
	if delta != nil && len(delta.Trees) > 0 {
		dst = append(dst, `,"trees":`...)
		dst = appendTrees(dst, delta.Trees)
	}
	deltaBytes = len(dst) - before
	if c.SlotSnapshot != "" {
		dst = append(dst, `,"slot_snapshot":`...)
		dst = appendString(dst, c.SlotSnapshot)
	}
	if c.Requests != 0 {
		dst = append(dst, `,"requests":`...)
		dst = strconv.AppendInt(dst, c.Requests, 10)
	}
	if c.Rewound != 0 {
		dst = append(dst, `,"rewound":"`...)
		dst = c.Rewound.Append(dst)
		dst = append(dst, '"')
	}
	if a := c.Anchor; a.LSN != 0 {
		dst = append(dst, `,"anchor":{"lsn":"`...)
		dst = a.LSN.Append(dst)
		dst = append(dst, `","at_us":`...)
		dst = strconv.AppendInt(dst, a.At.UnixMicro(), 10)
		dst = append(dst, '}')
	}
	if r := c.Replay; r != nil {
		dst = append(dst, `,"replay":{"from":"`...)
		dst = r.From.Append(dst)
		dst = append(dst, `","to":"`...)
		dst = r.To.Append(dst)
		dst = append(dst, `","asked":`...)
		dst = appendString(dst, r.Asked)
		dst = append(dst, '}')
	}
	if c.After != nil {
		dst = append(dst, `,"after":`...)
		dst = appendAfter(dst, c.After)
	}
	return append(dst, '}'), deltaBytes
}

// EncodeState appends the state record of c to dst.
//
//	| field      | JSON           | meaning                                 |
//	| ---------- | -------------- | --------------------------------------- |
//	| version    | "major.minor"  | of the format                           |
//	| partitions | object         | {"topic":partitions}, every known topic |
//	| tables     | object, absent | {"oid":progress}, every known table     |
//	| trees      | object, absent | {"oid":partitions}, every known tree    |
func EncodeState(dst []byte, c *Checkpoint) []byte {
	tables := make(map[uint32]*TableDelta, len(c.Tables))
	for oid, p := range c.Tables {
		tables[oid] = &TableDelta{TableProgress: p}
	}
	return encodeState(dst, c.Partitions, tables, c.Trees)
}

// encodeState takes tables whose Again is whole.
func encodeState(dst []byte, partitions map[string]int32, tables map[uint32]*TableDelta, trees map[uint32]Tree) []byte {
	dst = append(dst, `{"version":"`+formatVersion+`","partitions":`...)
	dst = appendCounts(dst, partitions)
	if len(tables) > 0 {
		dst = append(dst, `,"tables":`...)
		dst = appendTables(dst, tables)
	}
	if len(trees) > 0 {
		dst = append(dst, `,"trees":`...)
		dst = appendTrees(dst, trees)
	}
	return append(dst, '}')
}

// appendTables appends tables as a JSON object, sorted by OID. Up to 64 are sorted on
// the stack.
func appendTables(dst []byte, tables map[uint32]*TableDelta) []byte {
	var room [64]uint32
	oids := slices.AppendSeq(room[:0], maps.Keys(tables))
	slices.Sort(oids)
	dst = append(dst, '{')
	for i, oid := range oids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, '"')
		dst = strconv.AppendUint(dst, uint64(oid), 10)
		dst = append(dst, `":`...)
		if t := tables[oid]; t == nil {
			dst = append(dst, "null"...)
		} else {
			dst = appendTable(dst, &t.TableProgress, t.Again, t.AgainRead)
		}
	}
	return append(dst, '}')
}

// appendCounts appends counts as a JSON object, sorted by topic. Up to 64 topics
// are sorted on the stack; that is twice what a delta holds.
func appendCounts(dst []byte, counts map[string]int32) []byte {
	var room [64]string
	topics := slices.AppendSeq(room[:0], maps.Keys(counts))
	slices.Sort(topics)
	dst = append(dst, '{')
	for i, topic := range topics {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendString(dst, topic)
		dst = append(dst, ':')
		dst = strconv.AppendInt(dst, int64(counts[topic]), 10)
	}
	return append(dst, '}')
}

// positionRecord is the JSON form of the position record. Pointers tell an absent
// field from a zero one: lsn and state decide where a restart goes on, so their
// absence is damage and never a default.
type positionRecord struct {
	LSN          *jsonLSN                `json:"lsn"`
	CommitLSN    jsonLSN                 `json:"commit_lsn"`
	CommitTimeUS *int64                  `json:"commit_time_us"`
	Cut          *cutRecord              `json:"cut"`
	Source       sourceRecord            `json:"source"`
	Publications []publication           `json:"publications"`
	State        *int64                  `json:"state"`
	Delta        map[string]*int32       `json:"delta"`
	Tables       map[string]*tableRecord `json:"tables"`
	Trees        treeRecords             `json:"trees"`
	SlotSnapshot string                  `json:"slot_snapshot"`
	Requests     int64                   `json:"requests"`
	Rewound      jsonLSN                 `json:"rewound"`
	Anchor       *anchorRecord           `json:"anchor"`
	Replay       *replayRecord           `json:"replay"`
	After        *afterRecord            `json:"after"`
}

type cutRecord struct {
	CommitLSN *jsonLSN `json:"commit_lsn"`
	Changes   *uint64  `json:"changes"`
}

func appendSource(dst []byte, s Source) []byte {
	dst = append(dst, `{"system_id":`...)
	dst = appendString(dst, s.SystemID)
	dst = append(dst, `,"database":`...)
	dst = appendString(dst, s.Database)
	dst = append(dst, `,"timeline":`...)
	dst = strconv.AppendInt(dst, int64(s.Timeline), 10)
	return append(dst, '}')
}

type sourceRecord struct {
	SystemID string `json:"system_id"`
	Database string `json:"database"`
	Timeline int32  `json:"timeline"`
}

type publication struct {
	Name    string  `json:"name"`
	Horizon jsonLSN `json:"horizon"`
}

type anchorRecord struct {
	LSN  jsonLSN `json:"lsn"`
	AtUS *int64  `json:"at_us"`
}

type replayRecord struct {
	From  *jsonLSN `json:"from"`
	To    *jsonLSN `json:"to"`
	Asked string   `json:"asked"`
}

type stateRecord struct {
	Partitions map[string]*int32       `json:"partitions"`
	Tables     map[string]*tableRecord `json:"tables"`
	Trees      treeRecords             `json:"trees"`
}

// DecodePosition reads what EncodePosition wrote. The checkpoint that it returns
// has no Partitions, Tables and Trees: decode the state record at stateOffset into it with
// DecodeState and set delta on top with Apply. A record of a newer major version
// is a *VersionError.
func DecodePosition(data []byte) (c Checkpoint, stateOffset int64, delta Delta, err error) {
	var r positionRecord
	if err := decode(KeyPosition, data, &r); err != nil {
		return Checkpoint{}, 0, Delta{}, err
	}
	if c, delta, err = r.checkpoint(); err != nil {
		return Checkpoint{}, 0, Delta{}, damaged(KeyPosition, err)
	}
	return c, *r.State, delta, nil
}

func (r *positionRecord) checkpoint() (c Checkpoint, delta Delta, err error) {
	switch {
	case r.LSN == nil:
		return c, delta, errors.New(`"lsn" is missing`)
	case r.State == nil:
		return c, delta, errors.New(`"state" is missing`)
	case *r.State < StateBeside:
		return c, delta, fmt.Errorf(`"state" is %d, want an offset or %d`, *r.State, StateBeside)
	case r.Requests < 0:
		return c, delta, fmt.Errorf(`"requests" is %d, want an offset`, r.Requests)
	}
	c.Position = Position{LSN: LSN(*r.LSN), CommitLSN: LSN(r.CommitLSN), CommitTime: timeOf(r.CommitTimeUS)}
	if r.Cut != nil {
		if r.Cut.CommitLSN == nil || r.Cut.Changes == nil {
			return c, delta, errors.New(`"cut" is incomplete`)
		}
		c.Position.Cut = Cut{CommitLSN: LSN(*r.Cut.CommitLSN), Changes: *r.Cut.Changes}
	}
	if err := c.Position.Check(); err != nil {
		return c, delta, err
	}
	c.Source = Source(r.Source)
	for _, p := range r.Publications {
		c.Publications = append(c.Publications, Publication{Name: p.Name, Horizon: LSN(p.Horizon)})
	}
	c.SlotSnapshot, c.Requests, c.Rewound = r.SlotSnapshot, r.Requests, LSN(r.Rewound)
	if r.Anchor != nil && r.Anchor.LSN != 0 && r.Anchor.AtUS != nil { // one at 0/0 is none
		c.Anchor = Anchor{LSN: LSN(r.Anchor.LSN), At: timeOf(r.Anchor.AtUS)}
	}
	if r.Replay != nil {
		if r.Replay.From == nil || r.Replay.To == nil {
			return c, delta, errors.New(`"replay" is incomplete`)
		}
		c.Replay = &Replay{From: LSN(*r.Replay.From), To: LSN(*r.Replay.To), Asked: r.Replay.Asked}
	}
	if c.After, err = r.After.after(); err != nil {
		return c, delta, err
	}
	if delta.Partitions, err = counts(r.Delta); err != nil {
		return c, delta, err
	}
	if delta.Tables, err = tablesOf(r.Tables, true); err != nil {
		return c, delta, err
	}
	delta.Trees, err = r.Trees.trees(true)
	return c, delta, err
}

// DecodeState reads what EncodeState wrote into c, replacing c.Partitions, c.Tables and
// c.Trees and leaving the rest alone. A record of a newer major version is a *VersionError;
// after an error c is as it was.
func DecodeState(data []byte, c *Checkpoint) error {
	var r stateRecord
	if err := decode(KeyState, data, &r); err != nil {
		return err
	}
	if r.Partitions == nil {
		return damaged(KeyState, errors.New(`"partitions" is missing`))
	}
	p, err := counts(r.Partitions)
	if err != nil {
		return damaged(KeyState, err)
	}
	list, err := tablesOf(r.Tables, false)
	if err != nil {
		return damaged(KeyState, err)
	}
	trees, err := r.Trees.trees(false)
	if err != nil {
		return damaged(KeyState, err)
	}
	var tables map[uint32]TableProgress
	if len(list) > 0 {
		tables = make(map[uint32]TableProgress, len(list))
	}
	for oid, t := range list {
		if len(t.AgainRead) > 0 {
			return damaged(KeyState, fmt.Errorf(`table "%d" has "again_read", which only a position record may have`, oid))
		}
		tables[oid] = t.TableProgress
	}
	c.Partitions, c.Tables, c.Trees = p, tables, trees
	return nil
}

// decode checks the version first, so that a newer major is named as such even
// where its fields have other types.
func decode(kind string, data []byte, into any) error {
	var head struct {
		Version *string `json:"version"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return damaged(kind, err)
	}
	if head.Version == nil {
		return damaged(kind, errors.New(`"version" is missing`))
	}
	major, minor, ok := strings.Cut(*head.Version, ".")
	m, errM := strconv.ParseUint(major, 10, 31)
	if _, errN := strconv.ParseUint(minor, 10, 31); !ok || errM != nil || errN != nil {
		return damaged(kind, fmt.Errorf("version %s is not major.minor", quote(*head.Version)))
	}
	if m != formatMajor {
		return &VersionError{Kind: kind, Version: *head.Version}
	}
	if err := json.Unmarshal(data, into); err != nil {
		return damaged(kind, err)
	}
	return nil
}

// damaged wraps the reason why a record cannot be read. It says where to look,
// because a record that nobody but walrelay writes does not damage itself.
func damaged(kind string, err error) error {
	return fmt.Errorf("read checkpoint record %q: %w (see who else writes to the checkpoint topic; its newest good record can be read with any consumer)", kind, err)
}

// counts takes the partition counts out of their JSON form. A topic without a
// positive count cannot have been written.
func counts(m map[string]*int32) (map[string]int32, error) {
	if m == nil {
		return nil, nil
	}
	out := make(map[string]int32, len(m))
	for topic, n := range m {
		if n == nil || *n < 1 {
			return nil, fmt.Errorf("topic %q has no partition count above 0", topic)
		}
		out[topic] = *n
	}
	return out, nil
}

// jsonLSN reads an LSN from its text form.
type jsonLSN LSN

// UnmarshalJSON takes a string X/Y. Null would leave the LSN at zero in silence,
// so it is refused.
func (l *jsonLSN) UnmarshalJSON(data []byte) error {
	if len(data) < 2 || data[0] != '"' {
		return fmt.Errorf("LSN is %s, want a string", bytes.ToValidUTF8(data, []byte("?")))
	}
	v, err := ParseLSN(string(data[1 : len(data)-1]))
	if err != nil {
		return err
	}
	*l = jsonLSN(v)
	return nil
}

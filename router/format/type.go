package format

import (
	"cmp"
	"math"
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
)

// Kind tells how a type is put together, and with it which fields of a Type hold.
type Kind uint8

// The kinds of types.
const (
	// KindUnknown is a type of which no catalog row was at hand: dropped since, or not
	// yet looked up. Its values are PostgreSQL's text.
	KindUnknown Kind = iota
	KindBase
	KindArray     // Elem
	KindComposite // Fields
	KindDomain    // Base
	KindEnum
	KindRange
	KindMultirange
	KindHstore // the extension's type, whichever schema it lives in
)

// Type describes a PostgreSQL type. It is not changed once it is made, so that it may
// be shared and serve as a cache key. Types never form a cycle.
type Type struct {
	OID    uint32
	Name   string // pg_type.typname: int4, _int4
	Schema string
	Kind   Kind
	// Delim separates the elements in an array of this type: a comma, for box a
	// semicolon.
	Delim  byte
	Elem   *Type   // KindArray
	Base   *Type   // KindDomain; may be a domain again
	Mod    int32   // KindDomain: the modifier that it gives to Base (pg_attribute.atttypmod), NoMod for none
	Fields []Field // KindComposite, in order, without dropped ones
	// Altered is, of KindComposite, the newest transaction that changed its attributes
	// after it was made; zero for none, Altering where one is at it. A value that an older
	// one wrote has other fields, which nothing tells any more.
	Altered checkpoint.XID
	// Labels of KindEnum, in their order, as the catalog had them when it was read.
	Labels []string
}

// Altering is Type.Altered while a transaction is altering the type, or has committed and
// is not seen yet: no value is surely written by the type as it is known.
const Altering = checkpoint.XID(math.MaxUint64)

// NoMod is the modifier of a type without length, precision or scale.
const NoMod int32 = -1

// Field is an attribute of a composite type.
type Field struct {
	Name string
	Type *Type
	Mod  int32 // pg_attribute.atttypmod, NoMod for none
}

// The OIDs of the types whose JSON is not simply their text.
const (
	oidBool        = 16
	oidBytea       = 17
	oidInt8        = 20
	oidInt2        = 21
	oidInt4        = 23
	oidOID         = 26
	oidJSON        = 114
	oidXML         = 142
	oidPoint       = 600
	oidFloat4      = 700
	oidFloat8      = 701
	oidMoney       = 790
	oidDate        = 1082
	oidTime        = 1083
	oidTimestamp   = 1114
	oidTimestamptz = 1184
	oidInterval    = 1186
	oidTimetz      = 1266
	oidBit         = 1560
	oidVarbit      = 1562
	oidNumeric     = 1700
	oidUUID        = 2950
	oidTsvector    = 3614
	oidJSONB       = 3802
)

// FirstUserOID is the lowest OID that may belong to something else in another
// database or version. Below it, what Builtin says holds everywhere.
const FirstUserOID = 10000

// Builtin returns the built-in base, range, multirange or array type with this OID,
// the same in PostgreSQL 14 to 18. It returns nil for every other OID.
func Builtin(oid uint32) *Type {
	if t := find(builtinBases[:], oid); t != nil {
		return t
	}
	return find(builtinArrays[:], oid)
}

// find returns the type with this OID from types, which are in the order of OIDs.
func find(types []Type, oid uint32) *Type {
	i, ok := slices.BinarySearchFunc(types, oid, func(t Type, oid uint32) int {
		return cmp.Compare(t.OID, oid)
	})
	if !ok {
		return nil
	}
	return &types[i]
}

// builtinNamed returns the built-in type of this name, nil if there is none. It is
// slow and for rare use: TYPE messages name types, they have no OID of a base type.
func builtinNamed(name string) *Type {
	for _, types := range [][]Type{builtinBases[:], builtinArrays[:]} {
		for i := range types {
			if types[i].Name == name {
				return &types[i]
			}
		}
	}
	return nil
}

// Underlying returns the type that t's values are printed as: for a domain the type
// at the bottom of it, for every other type t itself. Nil stays nil.
func (t *Type) Underlying() *Type {
	for t != nil && t.Kind == KindDomain {
		t = t.Base
	}
	return t
}

// LastAltered gives the newest transaction that altered a composite type which t is or is
// made of; composite tells whether there is such a type at all.
func (t *Type) LastAltered() (xid checkpoint.XID, composite bool) {
	if t == nil {
		return 0, false
	}
	xid, composite = t.Altered, t.Kind == KindComposite
	add := func(part *Type) {
		x, c := part.LastAltered()
		xid, composite = max(xid, x), composite || c
	}
	add(t.Elem)
	add(t.Base)
	for _, f := range t.Fields {
		add(f.Type)
	}
	return xid, composite
}

// bottom is Underlying together with the modifier that holds there: a domain's own
// hides the column's, which has none.
func (t *Type) bottom(mod int32) (*Type, int32) {
	for t != nil && t.Kind == KindDomain {
		if mod < 0 {
			mod = t.Mod
		}
		t = t.Base
	}
	return t, mod
}

// String gives the name as people write it: without schema if PostgreSQL's own, else
// schema.name.
func (t *Type) String() string {
	switch {
	case t == nil:
		return "unknown"
	case t.Schema == "" || t.Schema == "pg_catalog":
		return t.Name
	}
	return t.Schema + "." + t.Name
}

package format

// Resolver knows the types of one database and puts them together. It does no I/O:
// whoever holds a connection asks Missing, runs TypesQuery, and hands the rows to Add.
// It belongs to one goroutine; the Types that it returns may be shared.
//
// The catalog speaks of today, the stream of the past. What holds then: an OID names
// the same type as long as the type exists; a type that exists no longer may still be
// known by a TYPE message (Learn), else it is its text; of a composite type it is known
// which transaction altered it last (Type.Altered), and a value with another number of
// fields is told by that (ErrFieldCount).
//
// The zero Resolver is ready for use and knows what Builtin knows.
type Resolver struct {
	rows  map[uint32]TypeRow
	hints map[uint32]hint
	types map[uint32]*Type // made from rows and hints; thrown away when these change
}

// hint is what a TYPE message says of an OID.
type hint struct{ schema, name string }

// Missing returns those of oids that the Resolver knows nothing of, each once: what to
// ask TypesQuery for. A type that the catalog does not have stays missing; the caller
// should not ask for it again with each row.
func (r *Resolver) Missing(oids []uint32) []uint32 {
	var missing []uint32
	asked := make(map[uint32]bool, len(oids))
	for _, oid := range oids {
		if _, known := r.rows[oid]; known || asked[oid] || Builtin(oid) != nil {
			continue
		}
		asked[oid] = true
		missing = append(missing, oid)
	}
	return missing
}

// Add takes in rows of the catalog; a row replaces an earlier one of its OID. It
// returns whether anything changed: Types returned before are then possibly out of
// date, and so is all that was made from them.
func (r *Resolver) Add(rows ...TypeRow) (changed bool) {
	if r.rows == nil {
		r.rows = make(map[uint32]TypeRow, len(rows))
	}
	for _, row := range rows {
		if old, ok := r.rows[row.OID]; ok && old.equal(row) {
			continue
		}
		r.rows[row.OID] = row
		changed = true
	}
	if changed {
		// Types point to each other, so that one change may concern any of them.
		clear(r.types)
	}
	return changed
}

// Learn takes in a TYPE message of pgoutput. PostgreSQL sends it ahead of the RELATION
// message for every column type with an OID of 10000 or more. It carries the type's
// own OID but, for a domain, schema and name of the type at the bottom of it; the
// schema pg_catalog is sent as an empty one. It counts only for types that Add was
// given no row of: it comes from the time of the change, so that it helps where the
// type was dropped since. The return value is that of Add.
func (r *Resolver) Learn(oid uint32, schema, name string) (changed bool) {
	h := hint{schema: schema, name: name}
	if r.hints[oid] == h {
		return false
	}
	if r.hints == nil {
		r.hints = make(map[uint32]hint)
	}
	r.hints[oid] = h
	if _, known := r.rows[oid]; known {
		return false
	}
	clear(r.types)
	return true
}

// Composites returns the OIDs of all composite types that Add was given: those that an
// ALTER TYPE can change under the values that are on their way.
func (r *Resolver) Composites() []uint32 {
	var oids []uint32
	for oid, row := range r.rows {
		if row.Class == 'c' {
			oids = append(oids, oid)
		}
	}
	return oids
}

// Type returns the type with this OID, never nil. Of an OID that nothing is known of
// it is a Type of KindUnknown. Until Add or Learn report a change, the same OID gives
// the same pointer.
func (r *Resolver) Type(oid uint32) *Type {
	if t := Builtin(oid); t != nil {
		return t
	}
	if t, ok := r.types[oid]; ok {
		return t
	}
	if r.types == nil {
		r.types = make(map[uint32]*Type)
	}
	return r.build(oid, nil)
}

// build makes the type with this OID and what it consists of. Above are the OIDs that
// are being made. PostgreSQL refuses a type that contains itself, but rows read at
// different times could come together to one: there the inner one is unknown, so that
// Types never form a cycle.
func (r *Resolver) build(oid uint32, above []uint32) *Type {
	if t := Builtin(oid); t != nil {
		return t
	}
	if t, ok := r.types[oid]; ok {
		return t
	}
	row, ok := r.rows[oid]
	if !ok {
		t := r.buildHint(oid)
		r.types[oid] = t
		return t
	}
	t := &Type{OID: oid, Name: row.Name, Schema: row.Schema, Delim: row.Delim}
	for _, a := range above {
		if a == oid {
			return t
		}
	}
	above = append(above, oid)
	switch {
	case row.Elem != 0:
		t.Kind, t.Elem = KindArray, r.build(row.Elem, above)
	case row.Class == 'c':
		t.Kind, t.Altered = KindComposite, row.Altered
		for _, f := range row.Fields {
			t.Fields = append(t.Fields, Field{Name: f.Name, Type: r.build(f.OID, above), Mod: f.Mod})
		}
	case row.Class == 'd':
		t.Kind, t.Base, t.Mod = KindDomain, r.build(row.Base, above), row.Mod
	default:
		t.Kind, t.Labels = simpleKind(row), row.Labels
	}
	r.types[oid] = t
	return t
}

// simpleKind is the kind of a type that is not made of others. Hstore has no OID of
// its own and no schema that is sure; but a base type can only be made by a superuser
// from C functions, so that its name is a good sign.
func simpleKind(row TypeRow) Kind {
	switch {
	case row.Class == 'b' && row.Name == "hstore":
		return KindHstore
	case row.Class == 'b':
		return KindBase
	case row.Class == 'e':
		return KindEnum
	case row.Class == 'r':
		return KindRange
	case row.Class == 'm':
		return KindMultirange
	}
	return KindUnknown
}

// buildHint makes a type of which there is no row.
func (r *Resolver) buildHint(oid uint32) *Type {
	h := r.hints[oid]
	t := &Type{OID: oid, Name: h.name, Schema: h.schema, Delim: ','}
	if h.schema == "" && h.name != "" {
		if base := builtinNamed(h.name); base != nil {
			t.Kind, t.Base, t.Mod, t.Delim = KindDomain, base, NoMod, base.Delim
		}
		return t
	}
	if h.name == "hstore" {
		t.Kind = KindHstore
	}
	return t
}

package format

import (
	"strconv"
	"strings"
)

// ConnectField is a field of a Kafka Connect schema: a column with its type.
type ConnectField struct {
	Name     string
	Type     *Type
	Mod      int32
	Optional bool
}

// AppendStruct appends the Connect schema of a struct with these fields, as JsonConverter
// writes it with schemas enabled: of a key, or of a row that is field `before` or `after`
// of an envelope. An empty field stands for none.
func (d *Debezium) AppendStruct(dst []byte, fields []ConnectField, optional bool, name, field string) []byte {
	dst = append(dst, `{"type":"struct","fields":[`...)
	for i, f := range fields {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = d.appendSchema(dst, f.Type, f.Mod, f.Optional, f.Name)
	}
	dst = append(dst, ']')
	return appendSchemaTail(dst, connectType{name: name}, optional, field)
}

// connectType is how Connect knows a type: one of its own types, and what it stands for.
type connectType struct {
	kind    string // type: int32, string, bytes; array, struct and map are spelt out
	inner   string // what comes between type and optional: fields, items, keys and values
	name    string // semantic name
	version bool   // 1, where there is a name of Debezium's or Connect's
	params  [][2]string
	doc     string
}

// named is kind with a semantic name of the first version.
func named(kind, name string, params ...[2]string) connectType {
	return connectType{kind: kind, name: name, version: true, params: params}
}

// appendSchema appends the schema that what Debezium encodes t as adheres to. Elements
// of arrays may be null, and may be arrays again, which no schema of Connect's can say.
func (d *Debezium) appendSchema(dst []byte, t *Type, mod int32, optional bool, field string) []byte {
	t, mod = t.bottom(mod)
	c := connectType{kind: "string"}
	switch {
	case t == nil:
	case t.Kind == KindArray:
		items := d.appendSchema([]byte(`"items":`), t.Elem, mod, true, "")
		c = connectType{kind: "array", inner: string(items)}
	case t.Kind == KindComposite:
		var fields []ConnectField
		for _, f := range t.Fields {
			fields = append(fields, ConnectField{Name: f.Name, Type: f.Type, Mod: f.Mod, Optional: true})
		}
		return d.AppendStruct(dst, fields, optional, t.String(), field)
	case t.Kind == KindEnum:
		c = named("string", "io.debezium.data.Enum", [2]string{"allowed", strings.Join(t.Labels, ",")})
	case t.Kind == KindHstore && d.Hstore == HstoreMap:
		c = connectType{kind: "map", inner: `"keys":{"type":"string","optional":false},"values":{"type":"string","optional":true}`}
	case t.Kind == KindHstore:
		c = named("string", "io.debezium.data.Json")
	case t.Kind == KindBase:
		c = d.connectBase(t, mod)
	}
	dst = append(dst, `{"type":"`...)
	dst = append(dst, c.kind...)
	dst = append(dst, '"')
	if c.inner != "" {
		dst = append(dst, ',')
		dst = append(dst, c.inner...)
	}
	return appendSchemaTail(dst, c, optional, field)
}

// appendSchemaTail appends what every schema has, in JsonConverter's order.
func appendSchemaTail(dst []byte, c connectType, optional bool, field string) []byte {
	dst = append(dst, `,"optional":`...)
	dst = strconv.AppendBool(dst, optional)
	text := func(head, s string) {
		dst = append(dst, head...)
		dst = appendName(dst, s)
	}
	if c.name != "" {
		text(`,"name":`, c.name)
	}
	if c.version {
		dst = append(dst, `,"version":1`...)
	}
	if c.doc != "" {
		text(`,"doc":`, c.doc)
	}
	if len(c.params) > 0 {
		head := `,"parameters":{`
		for _, p := range c.params {
			text(head, p[0])
			text(":", p[1])
			head = ","
		}
		dst = append(dst, '}')
	}
	if field != "" {
		text(`,"field":`, field)
	}
	return append(dst, '}')
}

func (d *Debezium) connectBase(t *Type, mod int32) connectType {
	switch t.OID {
	case oidBool:
		return connectType{kind: "boolean"}
	case oidInt2:
		return connectType{kind: "int16"}
	case oidInt4:
		return connectType{kind: "int32"}
	case oidInt8, oidOID:
		return connectType{kind: "int64"}
	case oidFloat4:
		return connectType{kind: "float"}
	case oidFloat8:
		return connectType{kind: "double"}
	case oidNumeric, oidMoney:
		return d.connectDecimal(t, mod)
	case oidBytea:
		if d.Binary == BinaryBytes {
			return connectType{kind: "bytes"}
		}
	case oidBit, oidVarbit:
		if mod == 1 {
			return connectType{kind: "boolean"}
		}
		length := int64(1<<31 - 1)
		if mod > 0 {
			length = int64(mod)
		}
		return named("bytes", "io.debezium.data.Bits", [2]string{"length", strconv.FormatInt(length, 10)})
	case oidDate, oidTime, oidTimestamp:
		return d.connectTime(t, mod)
	case oidTimestamptz:
		return named("string", "io.debezium.time.ZonedTimestamp")
	case oidTimetz:
		return named("string", "io.debezium.time.ZonedTime")
	case oidInterval:
		if d.Interval == IntervalString {
			return named("string", "io.debezium.time.Interval")
		}
		return named("int64", "io.debezium.time.MicroDuration")
	case oidUUID:
		return named("string", "io.debezium.data.Uuid")
	case oidXML:
		return named("string", "io.debezium.data.Xml")
	case oidJSON, oidJSONB:
		return named("string", "io.debezium.data.Json")
	case oidTsvector:
		return named("string", "io.debezium.data.Tsvector")
	case oidPoint:
		c := named("struct", "io.debezium.data.geometry.Point")
		c.doc = "Geometry (POINT)"
		c.inner = `"fields":[{"type":"double","optional":false,"field":"x"},{"type":"double","optional":false,"field":"y"},` +
			`{"type":"bytes","optional":true,"field":"wkb"},{"type":"int32","optional":true,"field":"srid"}]`
		return c
	}
	if t.Schema != "pg_catalog" {
		return connectExtension(t)
	}
	return connectType{kind: "string"}
}

func (d *Debezium) connectDecimal(t *Type, mod int32) connectType {
	switch d.Decimal {
	case DecimalString:
		return connectType{kind: "string"}
	case DecimalDouble:
		return connectType{kind: "double"}
	}
	const decimal = "org.apache.kafka.connect.data.Decimal"
	if t.OID == oidMoney {
		return named("bytes", decimal, [2]string{"scale", "2"})
	}
	if scale, fixed := numericScale(mod); fixed {
		return named("bytes", decimal, [2]string{"scale", strconv.Itoa(scale)},
			[2]string{"connect.decimal.precision", strconv.Itoa(int((mod - 4) >> 16 & 0xffff))})
	}
	c := named("struct", "io.debezium.data.VariableScaleDecimal")
	c.doc = "Variable scaled decimal"
	c.inner = `"fields":[{"type":"int32","optional":false,"field":"scale"},{"type":"bytes","optional":false,"field":"value"}]`
	return c
}

func (d *Debezium) connectTime(t *Type, mod int32) connectType {
	kind := map[uint32]string{oidDate: "Date", oidTime: "Time", oidTimestamp: "Timestamp"}[t.OID]
	number := "int64"
	millis := t.millis(mod, d)
	if t.OID == oidDate || t.OID == oidTime && millis {
		number = "int32"
	}
	switch {
	case d.Time == TimeISOString:
		return named("string", "io.debezium.time.Iso"+kind)
	case d.Time == TimeConnect:
		return named(number, "org.apache.kafka.connect.data."+kind)
	case t.OID != oidDate && !millis:
		kind = "Micro" + kind
	}
	return named(number, "io.debezium.time."+kind)
}

func connectExtension(t *Type) connectType {
	switch t.Name {
	case "ltree":
		return named("string", "io.debezium.data.Ltree")
	case "geometry", "geography":
		c := named("struct", "io.debezium.data.geometry.Geometry")
		c.doc = "Geometry"
		if t.Name == "geography" {
			c = named("struct", "io.debezium.data.geometry.Geography")
			c.doc = "Geography"
		}
		c.inner = `"fields":[{"type":"bytes","optional":false,"field":"wkb"},{"type":"int32","optional":true,"field":"srid"}]`
		return c
	case "vector":
		c := named("array", "io.debezium.data.DoubleVector")
		c.inner = `"items":{"type":"double","optional":false}`
		return c
	case "halfvec":
		c := named("array", "io.debezium.data.FloatVector")
		c.inner = `"items":{"type":"float","optional":false}`
		return c
	case "sparsevec":
		c := named("struct", "io.debezium.data.SparseDoubleVector")
		c.doc = "Sparse vector"
		c.inner = `"fields":[{"type":"int16","optional":false,"field":"dimensions"},` +
			`{"type":"map","keys":{"type":"int16","optional":false},"values":{"type":"double","optional":false},"optional":false,"field":"vector"}]`
		return c
	}
	return connectType{kind: "string"}
}

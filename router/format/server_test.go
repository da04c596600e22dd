package format

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/internal/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// server is a database of its own, made for one test.
type server struct {
	t    *testing.T
	conn *pgconn.PgConn
}

// mustServer makes a database whose settings are as far from ours as they can be, and
// connects to it the way that walrelay's sessions do.
func mustServer(t *testing.T) *server {
	t.Helper()
	return mustServerOf(t, harness.DefaultMajor(t))
}

// mustServerOf is mustServer on this version.
func mustServerOf(t *testing.T, major int) *server {
	t.Helper()
	cfg, err := pgconn.ParseConfig(harness.Postgres(t, harness.Major(major)).Server.DSN())
	if err != nil {
		t.Fatal(err)
	}
	connect := func(cfg *pgconn.Config) *server {
		conn, err := pgconn.ConnectConfig(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		return &server{t: t, conn: conn}
	}
	admin := connect(cfg)
	name := strings.ToLower(fmt.Sprintf("format_%s_%d", strings.ReplaceAll(t.Name(), "/", "_"), os.Getpid()))
	admin.exec(`CREATE DATABASE ` + name + ` TEMPLATE template0 ENCODING 'UTF8'`)
	for _, set := range []string{`timezone = 'Asia/Kolkata'`, `datestyle = 'German, DMY'`, `intervalstyle = 'iso_8601'`, `bytea_output = 'escape'`, `extra_float_digits = -3`} {
		admin.exec(`ALTER DATABASE ` + name + ` SET ` + set)
	}
	cfg = cfg.Copy()
	cfg.Database = name
	for k, v := range map[string]string{"client_encoding": "UTF8", "TimeZone": "UTC", "DateStyle": "ISO, MDY", "IntervalStyle": "postgres", "bytea_output": "hex", "extra_float_digits": "1"} {
		cfg.RuntimeParams[k] = v
	}
	s := connect(cfg)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		s.conn.Close(ctx)
		if _, err := admin.conn.Exec(ctx, `DROP DATABASE `+name).ReadAll(); err != nil {
			t.Error(err)
		}
		admin.conn.Close(ctx)
	})
	return s
}

// exec runs statements and returns the rows of the last, in text form.
func (s *server) exec(sql string) [][][]byte {
	s.t.Helper()
	results, err := s.conn.Exec(s.t.Context(), sql).ReadAll()
	if err != nil {
		s.t.Fatalf("%v\n%.2000s", err, sql)
	}
	if len(results) == 0 {
		return nil
	}
	return results[len(results)-1].Rows
}

// query runs one statement with parameters in text form.
func (s *server) query(sql string, args ...string) [][][]byte {
	s.t.Helper()
	params := make([][]byte, len(args))
	for i, a := range args {
		params[i] = []byte(a)
	}
	res := s.conn.ExecParams(s.t.Context(), sql, params, nil, nil, nil).Read()
	if res.Err != nil {
		s.t.Fatalf("%v\n%s\n%.2000q", res.Err, sql, args)
	}
	return res.Rows
}

// columnTypes returns names and types of a table's columns; what Builtin does not know
// comes by one query.
func (s *server) columnTypes(r *Resolver, table string) (names []string, types []*Type) {
	s.t.Helper()
	var oids []uint32
	for _, row := range s.exec(`SELECT attname, atttypid FROM pg_attribute WHERE attrelid = '` + table + `'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum`) {
		var oid uint32
		fmt.Sscan(string(row[1]), &oid)
		names, oids = append(names, string(row[0])), append(oids, oid)
	}
	if missing := r.Missing(oids); len(missing) > 0 {
		s.addTypes(r, s.exec(TypesQueryFor(missing)))
	}
	for _, oid := range oids {
		types = append(types, r.Type(oid))
	}
	return names, types
}

func (s *server) addTypes(r *Resolver, rows [][][]byte) {
	s.t.Helper()
	for _, row := range rows {
		parsed, err := ParseTypeRow(row)
		if err != nil {
			s.t.Fatal(err)
		}
		r.Add(parsed)
	}
}

// encode returns the row's JSON object.
func encode(t *testing.T, e *Encoder, names []string, types []*Type, row [][]byte) string {
	t.Helper()
	dst := []byte{'{'}
	for i, v := range row {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, QuoteName(names[i])...)
		if v == nil {
			dst = append(dst, "null"...)
			continue
		}
		var err error
		if dst, err = e.Plain(types[i])(dst, v); err != nil {
			t.Fatalf("column %s, text %q: %v", names[i], v, err)
		}
	}
	return string(append(dst, '}'))
}

// The random values of the round trip, as SQL over r (a random number below 1), i (a
// random integer) and s (a random text with much to escape). The few types without
// random values of their own stand with a fixed one.
var roundTrip = []struct{ typ, expr string }{
	{"bool", `i % 2 = 0`}, {"int2", `i % 32768`}, {"int4", `i`}, {"int8", `i::int8 * 4294967296 + i`},
	{"float4", `CASE i % 9 WHEN 0 THEN 'NaN' WHEN 1 THEN '-Infinity' WHEN 2 THEN '-0' ELSE (r * 10 ^ (i % 35))::text END`},
	{"float8", `CASE i % 9 WHEN 0 THEN 'NaN' WHEN 1 THEN 'Infinity' WHEN 2 THEN '-0' ELSE (r * 10 ^ (i % 300))::text END`},
	{"numeric", `CASE i % 9 WHEN 0 THEN 'NaN' WHEN 1 THEN 'Infinity' ELSE (i::numeric * 123456789012345678901234567890 / 10 ^ (i % 20))::text END`},
	{"money", `i`}, {"text", `s`}, {"varchar", `s`}, {"bpchar", `s || 'x'`}, {"name", `left(s, 10)`}, {"char", `chr(33 + abs(i) % 90)`},
	{"date", `CASE i % 9 WHEN 0 THEN 'infinity' WHEN 1 THEN '-infinity' ELSE (date '4000-01-01 BC' + abs(i) % 100000000)::text END`},
	{"timestamp", `CASE i % 9 WHEN 0 THEN 'infinity' ELSE (timestamp '4000-01-01 BC' + r * interval '290000 years')::text END`},
	{"timestamptz", `CASE i % 9 WHEN 0 THEN '-infinity' ELSE (timestamptz '4000-01-01 BC' + r * interval '290000 years')::text END`},
	{"time", `time '00:00' + r * interval '1 day'`}, {"timetz", `(time '00:00' + r * interval '1 day')::text || '+05:30'`},
	{"interval", `r * interval '100 years -3 days' + i * interval '1 microsecond'`}, {"uuid", `md5(i::text)`},
	{"inet", `inet '0.0.0.0' + abs(i)`}, {"cidr", `set_masklen((inet '0.0.0.0' + abs(i))::cidr, 8)`},
	{"macaddr", `left(md5(i::text), 12)`}, {"macaddr8", `left(md5(i::text), 16)`}, {"bit", `abs(i % 2)`}, {"varbit", `(i::bit(32) || i::bit(13))`},
	{"point", `point(r, i)`}, {"line", `line(point(r, i), point(i, r + 1))`}, {"lseg", `lseg(point(r, i), point(i, r))`}, {"box", `box(point(r, i), point(i, r))`},
	{"path", `'[' || point(r, i) || ',' || point(i, r) || ']'`}, {"polygon", `polygon(box(point(r, i), point(i, r)))`}, {"circle", `circle(point(r, i), r)`},
	{"int4range", `int4range(i % 1000, i % 1000 + 5)`}, {"int8range", `int8range(NULL, i)`}, {"numrange", `numrange(i, NULL, '(]')`}, {"daterange", `daterange(date '2000-01-01', date '2000-01-02' + abs(i) % 10000)`},
	{"tsrange", `tsrange('2000-01-01', timestamp '2000-01-01' + r * interval '100 years')`}, {"tstzrange", `tstzrange('2000-01-01', timestamptz '2000-01-01' + r * interval '100 years')`},
	{"int4multirange", `multirange(int4range(i % 9, 20)) + multirange(int4range(30, 40))`}, {"int8multirange", `multirange(int8range(NULL, i))`}, {"nummultirange", `'{}'`},
	{"datemultirange", `multirange(daterange('2000-01-01', NULL))`}, {"tsmultirange", `multirange(tsrange('2000-01-01', NULL))`}, {"tstzmultirange", `multirange(tstzrange('2000-01-01', NULL))`},
	{"json", `json_build_object('k' || s, r, 'a', jsonb_build_array(s, i, NULL))`}, {"jsonb", `jsonb_build_object('k' || s, r, 'a', jsonb_build_array(s, i, NULL))`},
	{"jsonpath", `'$.' || to_json(s)`}, {"xml", `'<a b="' || i || '">x</a>'`}, {"tsvector", `to_tsvector('simple', s)`}, {"tsquery", `plainto_tsquery('simple', s)`},
	{"oid", `abs(i)`}, {"xid", `abs(i)`}, {"cid", `abs(i)`}, {"xid8", `abs(i)`}, {"tid", `'(' || abs(i) || ',7)'`}, {"pg_lsn", `'16/' || to_hex(abs(i))`},
	{"pg_snapshot", `'10:20:10,14,15'`}, {"txid_snapshot", `'10:20:10,14,15'`}, {"regclass", `'pg_class'`}, {"regtype", `'int4'`}, {"regproc", `'now'`}, {"regprocedure", `'now()'`},
	{"regoper", `'!!'`}, {"regoperator", `'+(int4,int4)'`}, {"regconfig", `'simple'`}, {"regdictionary", `'simple'`}, {"regnamespace", `'pg_catalog'`}, {"regrole", `'pg_monitor'`}, {"regcollation", `'"C"'`},
	{"aclitem", `'=r/' || current_user`}, {"refcursor", `s`}, {"int2vector", `'1 2 ' || i % 32768`}, {"oidvector", `'1 2 ' || abs(i)`},
	{"addr", `ROW(s, i, i / 7.0, timestamptz '2000-01-01' + r * interval '100 years', ARRAY[s, NULL, 'x'])::addr`}, {"mood", `CASE i % 2 WHEN 0 THEN 'sad' ELSE 'it''s "ok", is it' END`},
	{"posint", `abs(i) % 1000 + 1`}, {"price", `r * 1000`}, {"ints", `ARRAY[i, NULL, 3]`}, {"person", `ROW(s, ROW(s, i, r, NULL, ARRAY[s])::addr, ARRAY[ROW(s, i, r, NULL, ARRAY[s])::addr, NULL], NULL)::person`},
}

const roundTripTypes = `
CREATE TYPE addr AS (street text, no int, price numeric, at timestamptz, tags text[]);
CREATE TYPE mood AS ENUM ('sad', 'it''s "ok", is it');
CREATE DOMAIN posint AS int CHECK (VALUE > 0);
CREATE DOMAIN price AS numeric(12,2);
CREATE DOMAIN ints AS int[];
CREATE TYPE person AS (n text, home addr, others addr[], x int);
CREATE FUNCTION rnd() RETURNS text LANGUAGE sql VOLATILE AS $$
  SELECT coalesce(string_agg(substr(E'{}"\\,;()[]= \n\tnul NULL é€😀/<>&''0aZ', 1 + (random() * 40)::int, 1), ''), '') FROM generate_series(1, (random() * 20)::int) $$;`

// Every built-in type, an array of it in one and in two dimensions, and types of the
// database: the JSON that we make, read by PostgreSQL, is the row again.
func TestPostgreSQLReadsTheSameValuesBack(t *testing.T) {
	s := mustServer(t)
	s.exec(roundTripTypes)
	var defs, exprs []string
	for i, c := range roundTrip {
		typ := c.typ
		if typ == "char" {
			typ = `"char"`
		}
		defs = append(defs, fmt.Sprintf("v%d %s", i, typ))
		exprs = append(exprs, fmt.Sprintf("CASE WHEN random() < 0.9 THEN (%s)::text::%s END", c.expr, typ))
		if typ == "ints" {
			continue // the dimensions of [[1,2]] are two for json_populate_record, ours is an array of arrays
		}
		// By way of text[], as ARRAY[] of a vector would be of more dimensions; a
		// text[] is no box[], which has another delimiter.
		elem, cast := "(%s)::text", "::text::%s[]"
		if typ == "box" {
			elem, cast = "(%s)::text::box", "::%s[]"
		}
		elem, cast = fmt.Sprintf(elem, c.expr), fmt.Sprintf(cast, typ)
		defs = append(defs, fmt.Sprintf("a%d %s[], m%d %s[][]", i, typ, i, typ))
		exprs = append(exprs, fmt.Sprintf("ARRAY[%[1]s, NULL, %[1]s]%[2]s, ARRAY[[%[1]s, NULL], [NULL, %[1]s]]%[2]s", elem, cast))
	}
	s.exec(`CREATE TABLE v (` + strings.Join(defs, ", ") + `)`)
	s.exec(`INSERT INTO v SELECT ` + strings.Join(exprs, ", ") + ` FROM (SELECT random() AS r, (random() * 4294967294 - 2147483647)::int8::int4 AS i, rnd() AS s FROM generate_series(1, 200) OFFSET 0) x`)

	var r Resolver
	var e Encoder
	names, types := s.columnTypes(&r, "v")
	rows := s.exec(`SELECT * FROM v`)
	if len(rows) != 200 {
		t.Fatalf("%d rows", len(rows))
	}
	for _, row := range rows {
		obj := encode(t, &e, names, types, row)
		back := s.query(`SELECT x.* FROM json_populate_record(NULL::v, $1) x`, obj)[0]
		for i := range row {
			if string(row[i]) != string(back[i]) || (row[i] == nil) != (back[i] == nil) {
				t.Errorf("%s: PostgreSQL had %q and reads back %q", types[i], row[i], back[i])
			}
		}
		if t.Failed() {
			return
		}
	}
}

// No built-in type that a column can have is left out of the round trip: but for
// bytea, which PostgreSQL does not read as base64 and has a test of its own, and types
// whose input function refuses every value.
func TestRoundTripCoversTheBuiltinTypes(t *testing.T) {
	covered := map[string]bool{"bytea": true, "gtsvector": true, "pg_node_tree": true, "pg_ndistinct": true, "pg_dependencies": true,
		"pg_mcv_list": true, "pg_brin_bloom_summary": true, "pg_brin_minmax_multi_summary": true}
	for _, c := range roundTrip {
		covered[c.typ] = true
	}
	for i := range builtinBases {
		if name := builtinBases[i].Name; !covered[name] {
			t.Errorf("%s is not in the round trip", name)
		}
	}
}

func TestPostgreSQLReadsBase64AndHstoreBack(t *testing.T) {
	s := mustServer(t)
	s.exec(roundTripTypes)
	s.exec(`CREATE SCHEMA ext; CREATE EXTENSION hstore SCHEMA ext; SET search_path = public, ext`)
	s.exec(`CREATE TABLE v (b bytea, ba bytea[], h hstore, ha hstore[])`)
	s.exec(`INSERT INTO v SELECT decode(repeat(md5(random()::text), n % 3) || left(md5(random()::text), n % 16 * 2), 'hex'), ARRAY['\x'::bytea, decode(md5(random()::text), 'hex'), NULL],
		hstore(ARRAY['a' || rnd(), 'b' || rnd(), 'c'], ARRAY[rnd(), NULL, 'NULL']), ARRAY[hstore('k', rnd()), NULL, ''::hstore] FROM generate_series(1, 200) n`)
	var r Resolver
	var e Encoder
	names, types := s.columnTypes(&r, "v")
	if types[2].Kind != KindHstore || types[2].Schema != "ext" || types[3].Elem != types[2] {
		t.Fatalf("hstore is %+v, its array %+v", types[2], types[3])
	}
	for _, row := range s.exec(`SELECT * FROM v`) {
		obj := encode(t, &e, names, types, row)
		back := s.query(`SELECT decode(j->>'b', 'base64'), (SELECT array_agg(decode(x, 'base64')) FROM json_array_elements_text(j->'ba') x),
			(SELECT hstore(array_agg(key), array_agg(value)) FROM json_each_text(j->'h')),
			(SELECT array_agg(CASE json_typeof(o) WHEN 'object' THEN (SELECT coalesce(hstore(array_agg(key), array_agg(value)), '') FROM json_each_text(o)) END) FROM json_array_elements(j->'ha') o)
			FROM (SELECT $1::json AS j) x`, obj)[0]
		for i := range row {
			if string(row[i]) != string(back[i]) {
				t.Fatalf("%s: PostgreSQL had %q and reads back %q from %s", types[i], row[i], back[i], obj)
			}
		}
	}
}

func TestTypesOfADatabaseComeByOneQuery(t *testing.T) {
	s := mustServer(t)
	s.exec(roundTripTypes + `
		CREATE SCHEMA "Odd ""s"; CREATE TYPE "Odd ""s"."T y" AS ("f ""1" text, gone int, p posint[], o mood[]); ALTER TYPE "Odd ""s"."T y" DROP ATTRIBUTE gone;
		CREATE TYPE fr AS RANGE (subtype = float8); CREATE TYPE nothing AS ();
		CREATE DOMAIN tile AS box; CREATE DOMAIN small AS int; CREATE DOMAIN deep AS small; CREATE TABLE other (id int, h addr);
		CREATE EXTENSION citext; CREATE EXTENSION ltree;
		CREATE TABLE v (t "Odd ""s"."T y"[], r fr, rm fr[], n nothing, b tile[], d deep, o other, c citext, ca citext[], l ltree, p person[], i information_schema.sql_identifier, ints ints[]);
		CREATE TABLE unrelated (a int);
		INSERT INTO v VALUES (ARRAY[ROW('x "y"', '{1,2}', '{sad,NULL}')::"Odd ""s"."T y"], '[1,2)', '{"[1,2)"}', ROW(), ARRAY['(1,1),(0,0)'::box, '(2,2),(1,1)'],
			15, ROW(1, ROW('s', 2, 3, '2026-12-01 11:24:20+05:30', '{a b}')), 'Ab', '{Ab,"c d"}', 'a.b', ARRAY[ROW('n', NULL, '{}', 1)::person], 'id', '{"{1,2}","{}"}')`)
	const want = `{"t":[{"f \"1":"x \"y\"","p":[1,2],"o":["sad",null]}],"r":"[1,2)","rm":["[1,2)"],"n":{},"b":["(1,1),(0,0)","(2,2),(1,1)"],` +
		`"d":15,"o":{"id":1,"h":{"street":"s","no":2,"price":"3","at":"2026-12-01T05:54:20Z","tags":["a b"]}},"c":"Ab","ca":["Ab","c d"],"l":"a.b",` +
		`"p":[{"n":"n","home":null,"others":[],"x":1}],"i":"id","ints":[[1,2],[]]}`
	row := s.exec(`SELECT * FROM v`)[0]

	var byOID Resolver
	var e Encoder
	names, types := s.columnTypes(&byOID, "v")
	if got := encode(t, &e, names, types, row); got != want {
		t.Errorf("types by OID:\n got %s\nwant %s", got, want)
	}

	var all Resolver
	s.addTypes(&all, s.exec(AllTypesQuery))
	for i := range types {
		types[i] = all.Type(types[i].OID)
	}
	if got := encode(t, &e, names, types, row); got != want {
		t.Errorf("all types:\n got %s\nwant %s", got, want)
	}
	for _, row := range all.rows {
		if row.Name == "unrelated" || row.Name == "_unrelated" {
			t.Error("the row type of a table that no column uses was read, too")
		}
	}

	// The parameter form finds the same.
	missing := fmt.Sprintf("{%d}", types[0].OID)
	var byParam Resolver
	s.addTypes(&byParam, s.query(TypesQuery, missing))
	if got := byParam.Type(types[0].OID); got.Kind != KindArray || len(got.Elem.Fields) != 3 {
		t.Errorf("by parameter: %+v", got)
	}
}

// What is known of a composite type names the transaction that altered it last, and tells
// while one is at it.
func TestACompositeTypeKnowsWhoAlteredIt(t *testing.T) {
	s := mustServer(t)
	var r Resolver
	s.exec(`CREATE TYPE pair AS (a int, b text); CREATE TYPE one AS (a int); CREATE TABLE v (p pair[], o one)`)
	_, types := s.columnTypes(&r, "v")
	for _, typ := range types {
		if xid, composite := typ.LastAltered(); xid != 0 || !composite {
			t.Errorf("%s: altered by %s, composite %t", typ, xid, composite)
		}
	}
	for _, alter := range []string{
		`TYPE pair ADD ATTRIBUTE c int`, `TYPE pair RENAME ATTRIBUTE c TO d`, `TYPE pair DROP ATTRIBUTE a`, `TYPE pair DROP ATTRIBUTE d, ADD ATTRIBUTE e int`,
		`TYPE one RENAME ATTRIBUTE a TO b`, `TYPE one DROP ATTRIBUTE b, ADD ATTRIBUTE c int`,
	} {
		s.exec(`BEGIN; ALTER ` + alter)
		xid := string(s.exec(`SELECT pg_current_xact_id()`)[0][0])
		altering := s.exec(AlteringQueryFor(r.Composites()))
		s.exec(`COMMIT`)
		s.addTypes(&r, s.exec(TypesQueryFor(r.Composites())))
		at := 0
		if strings.HasPrefix(alter, "TYPE one") {
			at = 1
		}
		typ := r.Type(types[at].OID)
		if got, _ := typ.LastAltered(); got.String() != xid {
			t.Errorf("%s: altered by %s, want %s", alter, got, xid)
		}
		oid := typ.OID
		if typ.Kind == KindArray {
			oid = typ.Elem.OID
		}
		if len(altering) != 1 || string(altering[0][0]) != fmt.Sprint(oid) {
			t.Errorf("%s: %q are being altered, want %d", alter, altering, oid)
		}
	}
	if altering := s.exec(AlteringQueryFor(r.Composites())); len(altering) != 0 {
		t.Errorf("%q are still being altered", altering)
	}
}

// A session with wrong settings is an error for each type whose text shows it.
func TestWrongSettingsDoNotGoUnnoticed(t *testing.T) {
	s := mustServer(t)
	s.exec(`RESET ALL; SET TimeZone = 'Asia/Kolkata'; SET DateStyle = 'German, DMY'; SET bytea_output = 'escape'`)
	row := s.exec(`SELECT date '2026-12-01', timestamp '2026-12-01 05:54:20', timestamptz '2026-12-01 05:54:20+00', '\x00ff'::bytea, ARRAY[date '2026-12-01']`)[0]
	s.exec(`SET DateStyle = 'ISO'`)
	row = append(row, s.exec(`SELECT timestamptz '2026-12-01 05:54:20+00'`)[0]...)
	var e Encoder
	for i, name := range []string{"date", "timestamp", "timestamptz", "bytea", "_date", "timestamptz"} {
		if got, err := e.Plain(builtinNamed(name))(nil, row[i]); err == nil {
			t.Errorf("%s %q went out as %s", name, row[i], got)
		}
	}
}

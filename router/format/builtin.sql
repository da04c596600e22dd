-- Prints builtin.go. The result is checked in; to make it again, on the newest
-- PostgreSQL that is supported (its built-in types contain those of the older ones):
--
--   psql -XAtq -f builtin.sql | gofmt > builtin.go
--
-- OIDs below 10000 are assigned by hand in PostgreSQL's sources and never change.
-- Left out are the catalogs' row types, pseudo-types, and arrays of either.
\set ON_ERROR_STOP on
CREATE TEMP VIEW base AS
  SELECT row_number() OVER (ORDER BY oid) - 1 AS i, oid, typname, typarray, typdelim::text AS delim,
         CASE typtype WHEN 'r' THEN 'KindRange' WHEN 'm' THEN 'KindMultirange' ELSE 'KindBase' END AS kind
    FROM pg_type
   WHERE oid < 10000 AND typnamespace = 'pg_catalog'::regnamespace
     AND typtype IN ('b', 'r', 'm') AND typoutput <> 'array_out'::regproc;
SELECT '// Code generated from pg_type by builtin.sql; DO NOT EDIT.' || E'\n\npackage format\n';
SELECT '// builtinBases are the built-in types that are not arrays, by OID. Never written to.';
SELECT 'var builtinBases = [...]Type{';
SELECT format('{OID: %s, Name: "%s", Schema: "pg_catalog", Kind: %s, Delim: ''%s''},', oid, typname, kind, delim)
  FROM base ORDER BY oid;
SELECT E'}\n';
SELECT '// builtinArrays are the arrays of builtinBases, by OID. Never written to.';
SELECT 'var builtinArrays = [...]Type{';
SELECT format('{OID: %s, Name: "%s", Schema: "pg_catalog", Kind: KindArray, Delim: ''%s'', Elem: &builtinBases[%s]},', t.oid, t.typname, t.typdelim, b.i)
  FROM pg_type t JOIN base b ON b.typarray = t.oid ORDER BY t.oid;
SELECT '}';

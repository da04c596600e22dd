// Package format turns the text that PostgreSQL sends for a value into the JSON of
// `types: plain`.
//
// The text must be what PostgreSQL prints under the settings of walrelay's own
// sessions: UTF-8, TimeZone UTC, DateStyle ISO, IntervalStyle postgres, bytea_output
// hex, extra_float_digits 1. Where a type's text shows that a setting differs, that
// is an error and never another value: a date in the German style must not reach a
// topic only because a role's setting got through.
//
// A value is never parsed into a Go type and printed again. Digits, fractions and
// years beyond 9999 stay as PostgreSQL printed them, because only copying cannot lose
// any.
//
// Everything appends to a byte slice and allocates nothing per value. An Encoder owns
// the little memory that unquoting needs and belongs to one goroutine.
//
// What a type is made of is said by Type. PostgreSQL's own types come from a table
// (Builtin); a database's types come from its catalog through a Resolver, which does
// no I/O itself.
package format

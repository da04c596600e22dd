// Package config reads walrelay's YAML file: one struct, Config, with a
// default for everything but three keys, decoded strictly and validated as a
// whole.
//
// It exists so that an operator sees every mistake of a file at once, each
// with its path, the value, the reason and the remedy, before any connection
// is tried; and so that nothing below it reads the environment or can print a
// password by accident.
//
// The flow is always the same three steps:
//
//	Default() → decode the file over it → Validate
//
// Decoding and validation add to one list of problems instead of returning at
// the first. The table in fields.go holds each key's description, choices and
// bounds; Validate, Config.Print and Schema all read that table, so that they
// cannot tell different stories.
package config

package checkpoint

import (
	"errors"
	"strings"
)

// Refusal says that the state of the database or of Kafka forbids the work, and
// that nothing was done about it (DESIGN, invariant 7). The command line ends with
// exit code 4 when an error chain holds one. It lives here because every room
// above may refuse.
type Refusal struct {
	What   string // what was found, with the facts: names, LSNs, offsets
	Risk   string // what would be lost or repeated by going on
	Remedy string // the command or change that resolves it
	Err    error  // the cause, or nil
}

// Error gives what, risk and remedy in that order, the cause right behind what, as
// "what: cause; at risk: risk; to resolve: remedy".
func (r *Refusal) Error() string {
	var b strings.Builder
	b.WriteString(r.What)
	if r.Err != nil {
		b.WriteString(": ")
		b.WriteString(r.Err.Error())
	}
	if r.Risk != "" {
		b.WriteString("; at risk: ")
		b.WriteString(r.Risk)
	}
	if r.Remedy != "" {
		b.WriteString("; to resolve: ")
		b.WriteString(r.Remedy)
	}
	return b.String()
}

// Unwrap gives the cause.
func (r *Refusal) Unwrap() error { return r.Err }

// IsRefusal tells whether err, or an error that it wraps, is a Refusal.
func IsRefusal(err error) bool {
	var r *Refusal
	return errors.As(err, &r)
}

// ErrBroken says that a property of positions would be broken: a bug, at which the
// process ends before anything is committed.
var ErrBroken = errors.New("this is a bug; nothing was committed")

// VersionError says that a record was written in a form that this release does
// not read. Guessing at it could lose the position, so it is never read partly.
type VersionError struct {
	Kind    string // "position" or "state"
	Version string // as it stands in the record
}

// Error names both versions and the way out.
func (e *VersionError) Error() string {
	return "checkpoint record \"" + e.Kind + "\" has format version " + quote(e.Version) +
		", this release reads " + quote(formatVersion) + ": run the release that wrote it, or a newer one"
}

// quote is strconv.Quote for the few characters that a version may have; a version
// that is too long to be one is cut.
func quote(s string) string {
	if len(s) > 32 {
		s = s[:32] + "…"
	}
	return string(appendString(nil, s))
}

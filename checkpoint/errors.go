package checkpoint

import "strings"

// Refusal is an error that forbids a start: the state of the database or of Kafka
// does not allow the job, and repairing it without being asked could lose changes
// (DESIGN, invariant 7). It is never retried; the process ends with exit code 4.
type Refusal struct {
	What   string // what happened, with the names and LSNs that show it
	Risk   string // what is at risk; empty when nothing is
	Remedy string // the command or setting that resolves it
	Err    error  // the cause, where there is one
}

// Error gives the three parts on one line.
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

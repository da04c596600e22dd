package cdctest

import (
	"fmt"
	"strings"
)

// Violation is one way in which a log is wrong.
type Violation struct {
	Rule   string // the validator's name
	Where  string // topic[partition]@offset, or what else shows it
	Detail string // what was found and what would have been right
}

// String gives one line.
func (v Violation) String() string { return v.Rule + ": " + v.Where + ": " + v.Detail }

// Report gives the first violations, most of them at the most, one a line, and how many more there are.
// A log that is wrong in one place is often wrong in thousands.
func Report(vs []Violation, most int) string {
	var b strings.Builder
	for i, v := range vs {
		if i == most {
			fmt.Fprintf(&b, "... and %d more\n", len(vs)-most)
			break
		}
		b.WriteString(v.String())
		b.WriteByte('\n')
	}
	return b.String()
}

// findings collects the violations of one validator.
type findings struct {
	rule string
	list []Violation
}

func (f *findings) at(r *Record, format string, args ...any) {
	f.add(r.Where(), format, args...)
}

func (f *findings) add(where, format string, args ...any) {
	f.list = append(f.list, Violation{f.rule, where, fmt.Sprintf(format, args...)})
}

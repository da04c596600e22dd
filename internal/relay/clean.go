package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/outbox"
)

// CleanOutbox deletes published rows of the configured outbox tables. It needs no
// connector that runs, and does not disturb one that does. What was done before an error
// is in the list.
func CleanOutbox(ctx context.Context, o Options, c outbox.CleanOptions) ([]outbox.Cleaned, error) {
	o.Registerer = nil
	wanted, after := o.After, map[string]string{}
	for _, name := range o.Publications.Outbox {
		after[name] = outbox.Mark // whatever the configuration says: all of them are looked at
	}
	o.After = after
	r := New(o)
	r.base = context.WithoutCancel(ctx)
	conn, err := r.primary(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // nothing is under way on it
	tables, misfits, err := r.outboxTables(ctx, conn)
	if err != nil {
		return nil, err
	}
	var problems []error
	for _, name := range o.Publications.Outbox {
		switch {
		case misfits[name] != nil:
			problems = append(problems, misfits[name])
		case !slices.ContainsFunc(tables, func(t outbox.Table) bool { return t.String() == name }):
			problems = append(problems, &checkpoint.Refusal{
				What:   fmt.Sprintf("outbox table %s is not there", name),
				Risk:   "nothing; it is not cleaned",
				Remedy: "correct the name under outbox, as the catalog spells it",
			})
		}
	}
	list := []outbox.Cleaned{}
	for _, t := range tables {
		if t.Mark == "" && wanted[t.String()] == outbox.Delete {
			list = append(list, outbox.Cleaned{Table: t.String(), Dropped: []string{}, Left: []string{}}) // delivered rows are gone
			continue
		}
		cleaned, err := outbox.Clean(ctx, r.primary, t, c)
		list = append(list, cleaned)
		if err != nil {
			problems = append(problems, err)
		}
	}
	return list, errors.Join(problems...)
}

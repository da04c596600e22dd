package main

import (
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// asideLog says in the log what is put into the dead-letter topic: of each table and reason
// a line at once, then one a minute at the most, with how many there were since. Rows stay
// out of it; the position tells which letter is meant.
type asideLog struct {
	log zerolog.Logger
	now func() time.Time

	mu   sync.Mutex
	seen map[asideKind]*asideCount
}

type asideKind struct{ table, reason string }

type asideCount struct {
	said  time.Time
	since int
}

const (
	asideInterval = time.Minute
	maxAsideKinds = 1000 // messages of any prefix may be among them
)

func newAsideLog(log zerolog.Logger) *asideLog {
	return &asideLog{log: log, now: time.Now, seen: map[asideKind]*asideCount{}}
}

// note takes a change that was put aside. It is safe for concurrent use.
func (l *asideLog) note(table, reason, position string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := asideKind{table, reason}
	c := l.seen[k]
	if c == nil {
		if len(l.seen) >= maxAsideKinds {
			clear(l.seen)
		}
		c = &asideCount{}
		l.seen[k] = c
	}
	c.since++
	now := l.now()
	if !c.said.IsZero() && now.Sub(c.said) < asideInterval {
		return
	}
	e := l.log.Warn().Str("table", table).Str("reason", reason)
	if position != "" {
		e = e.Str("position", position)
	}
	e.Int("count", c.since).Msg("dead letter: a change could not become a record and goes to the dead-letter topic, with the reason; further ones of this table and reason are counted, and said once a minute")
	c.said, c.since = now, 0
}

package relay

import (
	"time"

	"github.com/walrelay/walrelay/internal/outbox"
)

// afterFault is what keeps rows from being marked.
type afterFault struct {
	text     string
	since    time.Time
	said     time.Time
	attempts int
}

// pump hands rows that may be marked to the marker.
func (a *after) pump() {
	if a.busy || len(a.rows) == 0 || a.l.now.Before(a.tryAt) {
		return
	}
	a.job.Reset(nil)
	a.picked = a.picked[:0]
	rows := a.open()
	for i := range rows {
		row := &rows[i]
		if row.state != rowWaits || a.l.now.Before(row.tryAt) {
			continue
		}
		if !a.ready(row) {
			if row.id.IsZero() {
				continue
			}
			break
		}
		if a.job.Target == nil {
			a.job.Reset(row.target)
		}
		if a.job.Target != row.target {
			continue
		}
		a.job.Add(row.xid, a.keys[row.at:row.at+row.n])
		a.picked = append(a.picked, a.head+i)
		if len(a.picked) >= a.size {
			break
		}
	}
	if len(a.picked) == 0 {
		return
	}
	for _, i := range a.picked {
		a.rows[i].state = rowPicked
	}
	a.busy = true
	a.marker.Do(&a.job)
}

// back takes the job that the marker gives back.
func (a *after) back() {
	a.busy = false
	now := time.Now()
	unseen := 0
	for n, i := range a.picked {
		row := &a.rows[i]
		row.state = rowWaits
		switch {
		case a.job.Settled(n):
			row.state = rowDone
			a.done++
			if row.id.IsZero() {
				a.reads--
				a.readBytes -= row.n
			}
		case a.job.Err == nil:
			row.tryAt = now.Add(unseenAfter)
			unseen++
		}
	}
	switch err := a.job.Err; {
	case err == nil:
		a.recovered(unseen)
	case outbox.IsRow(err) && len(a.picked) > 1:
		// One of them is in the way: it is found by halves, and the others are marked.
		a.size = max(len(a.picked)/2, 1)
	case outbox.IsRow(err):
		a.rows[a.picked[0]].tryAt = now.Add(rowRetry)
		a.failed(err, now)
	default:
		a.wait = min(max(2*a.wait, 100*time.Millisecond), 10*time.Second)
		a.tryAt = now.Add(a.wait)
		a.failed(err, now)
	}
	a.compact()
	a.l.confirm()
}

func (a *after) failed(err error, now time.Time) {
	f := &a.fault
	f.attempts++
	if f.text == "" {
		f.since = now
	}
	if f.text != "" && now.Sub(f.said) < sayEvery {
		return
	}
	f.text, f.said = err.Error(), now
	a.l.s.r.setMarkProblem("delivered outbox rows cannot be marked: " + f.text)
	a.l.s.log.Error().Err(err).Int("attempts", f.attempts).Int("rows", len(a.rows)-a.done).
		Msg("delivered outbox rows cannot be marked: trying again; nothing is delivered twice, but the slot keeps its WAL until they are")
}

// recovered notes that rows were marked. A row that stays in the way is tried again, and
// said again, on its own.
func (a *after) recovered(unseen int) {
	a.wait, a.tryAt = 0, time.Time{}
	if unseen < len(a.picked) {
		a.size = min(2*a.size, rowsPerMark)
	}
	if a.fault.text == "" {
		return
	}
	rows := a.open()
	for i := range rows {
		if row := &rows[i]; row.state == rowWaits && row.tryAt.Sub(a.l.now) > unseenAfter {
			return
		}
	}
	a.l.s.log.Info().Int("attempts", a.fault.attempts).Dur("took", time.Since(a.fault.since)).Msg("outbox rows are marked again")
	a.fault = afterFault{}
	a.l.s.r.setMarkProblem("")
}

// compact gives the memory of rows that are done back, once they are most of it.
func (a *after) compact() {
	if a.done < len(a.rows) && a.done < max(len(a.rows)/2, rowsPerMark) {
		return
	}
	kept, keys := a.rows[:0], a.keys[:0]
	for i := range a.rows {
		row := a.rows[i]
		if row.state == rowDone {
			continue
		}
		at := len(keys)
		keys = append(keys, a.keys[row.at:row.at+row.n]...)
		row.at = at
		kept = append(kept, row)
	}
	clear(a.rows[len(kept):])
	a.rows, a.keys, a.done, a.head = kept, keys, 0, 0
}

// wake is when something may have to be done though nothing arrives; 0 for never.
func (a *after) wake() time.Duration {
	if !a.restBy.IsZero() {
		return 20 * time.Millisecond
	}
	if a.busy || len(a.rows) == a.done {
		return 0
	}
	at := a.tryAt
	if at.IsZero() {
		rows := a.open()
		for i := range rows {
			row := &rows[i]
			if row.state != rowWaits {
				continue
			}
			if !a.ready(row) {
				if row.id.IsZero() {
					continue
				}
				break
			}
			if at.IsZero() || row.tryAt.Before(at) {
				at = row.tryAt
			}
			if !at.After(a.l.now) {
				break
			}
		}
		if at.IsZero() {
			return 0
		}
	}
	return max(at.Sub(a.l.now), time.Millisecond)
}

// rest tells whether the end of a run need not wait for marks: there are none left, or
// they take too long, and the next start makes them.
func (a *after) rest() bool {
	if !a.busy && len(a.rows) == a.done && !a.moving() {
		return true
	}
	if a.restBy.IsZero() {
		a.restBy = a.l.now.Add(min(restBudget, a.l.s.r.o.StopTimeout/2))
	}
	if a.l.now.Before(a.restBy) && a.waitsForMarks() {
		return false
	}
	if n := len(a.rows) - a.done; n > 0 && a.waitsForMarks() {
		a.l.s.log.Warn().Int("rows", n).Msg("delivered outbox rows are not marked yet: the next start marks them")
	}
	return true
}

// waitsForMarks tells whether any row is to be marked now.
func (a *after) waitsForMarks() bool {
	if a.busy || a.moving() {
		return true
	}
	rows := a.open()
	for i := range rows {
		if row := &rows[i]; row.state != rowDone && a.ready(row) {
			return true
		}
	}
	return false
}

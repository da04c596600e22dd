package relay

import (
	"slices"
	"time"

	"github.com/walrelay/walrelay/internal/outbox"
)

// work is how delivered rows get marked: which of them are tried next, and when again.
type work struct {
	job    outbox.Job
	picked []int     // the rows of the job, by index
	busy   bool      // the job is out
	tryAt  time.Time // before it there is none
	wait   time.Duration

	// A statement that fails for the sake of one row is made again with parts of its rows
	// until that one stands alone. Meanwhile they are troubled, and have every other job, so
	// that neither they nor the others wait for as long as somebody holds a lock.
	troubled   int  // rows with fails > 0
	search     int  // rows of their next job
	theirs     bool // they have the next job
	out        bool // the job has troubled rows
	impatient  bool // the last job of the others met a lock
	unseenWait time.Duration

	fault afterFault
}

// lane is the work on one table.
type lane struct {
	target  *outbox.Target
	byEvent *lane
	size    int       // rows of the next job
	tryAt   time.Time // before it there is none
	wait    time.Duration
}

func newLane(t *outbox.Target) *lane { return &lane{target: t, size: rowsPerMark} }

// loose is the lane of the table's rows that are known by their event's id alone.
func (n *lane) loose() *lane {
	if n.target.Loose {
		return n
	}
	if n.byEvent == nil {
		n.byEvent = newLane(n.target.ByEvent())
	}
	return n.byEvent
}

// afterFault is what keeps rows from being marked.
type afterFault struct {
	text     string
	since    time.Time
	said     time.Time
	attempts int
}

const (
	// rowsPerMark is how many rows are marked by one statement: few enough that the
	// application does not wait long for their locks.
	rowsPerMark = 1000
	// unseenAfter is when a row is looked for again whose transaction is not visible yet; it
	// doubles, up to maxUnseenAfter.
	unseenAfter    = 10 * time.Millisecond
	maxUnseenAfter = 500 * time.Millisecond
	// rowRetry is when a row is tried again that its own lock, trigger or constraint kept
	// from being marked; it doubles, up to maxRowRetry.
	rowRetry    = time.Second
	maxRowRetry = 15 * time.Second
	// searchWait is how long a lock is waited for where there was one just before: long
	// enough for an application that commits, short enough to find one locked row in a
	// thousand within half a second.
	searchWait = 20 * time.Millisecond
	// tableRetry is when a table is tried again, or all are, after a failure that concerns
	// all rows; it doubles, up to maxTableRetry.
	tableRetry    = 100 * time.Millisecond
	maxTableRetry = 10 * time.Second
)

// pump hands rows that may be marked to the marker.
func (a *after) pump() {
	if a.busy || len(a.rows) == a.done || a.l.now.Before(a.tryAt) {
		return
	}
	theirs := a.theirs
	if a.pick(theirs); len(a.picked) == 0 {
		theirs = !theirs
		a.pick(theirs)
	}
	if len(a.picked) == 0 {
		return
	}
	a.theirs, a.out = !theirs, theirs
	if theirs || a.impatient {
		a.job.LockWait = searchWait
	}
	for _, i := range a.picked {
		a.rows[i].state = rowPicked
	}
	a.busy = true
	a.marker.Do(&a.job)
}

// pick fills the job with rows of one table, troubled ones or others.
func (a *after) pick(troubled bool) {
	a.job.Reset(nil)
	a.picked = a.picked[:0]
	if troubled && a.troubled == 0 {
		return
	}
	var of *lane
	limit := 0
	rows := a.open()
	for i := range rows {
		row := &rows[i]
		if row.state != rowWaits || row.fails > 0 != troubled || a.l.now.Before(row.due()) {
			continue
		}
		if !a.ready(row) {
			if row.id.IsZero() {
				continue
			}
			break
		}
		if of == nil {
			of, limit = row.lane, row.lane.size
			if troubled {
				limit = a.search
			}
			a.job.Reset(of.target)
		}
		if of != row.lane {
			continue
		}
		a.job.Add(row.xid, a.keys[row.at:row.at+row.n])
		if a.picked = append(a.picked, a.head+i); len(a.picked) >= limit {
			break
		}
	}
}

// due is when a row may be tried.
func (row *afterRow) due() time.Time {
	if row.tryAt.Before(row.lane.tryAt) {
		return row.lane.tryAt
	}
	return row.tryAt
}

// back takes the job that the marker gives back.
func (a *after) back() {
	a.busy = false
	now := time.Now()
	settled := 0
	for n, i := range a.picked {
		row := &a.rows[i]
		row.state = rowWaits
		switch {
		case a.job.Settled(n):
			a.settle(row)
			settled++
		case a.job.Err == nil:
			row.tryAt = now.Add(max(a.unseenWait, unseenAfter))
		}
	}
	of := a.rows[a.picked[0]].lane
	switch err := a.job.Err; {
	case err == nil:
		a.succeeded(of, settled)
	case outbox.IsRow(err):
		a.inTheWay(of, err, now)
	case outbox.IsTable(err):
		of.wait, of.tryAt = retryAfter(of.wait, now)
		if outbox.IsRedefined(err) {
			err = a.renew(of, err)
		}
		if err != nil {
			a.failed(err, now)
		}
	default:
		a.wait, a.tryAt = retryAfter(a.wait, now)
		a.failed(err, now)
	}
	a.compact()
}

func retryAfter(was time.Duration, now time.Time) (time.Duration, time.Time) {
	wait := min(max(2*was, tableRetry), maxTableRetry)
	return wait, now.Add(wait)
}

// settle notes that nothing is left to be done about a row.
func (a *after) settle(row *afterRow) {
	row.state = rowDone
	a.done++
	if row.fails > 0 {
		a.troubled--
	}
	if row.id.IsZero() {
		a.reads--
		a.readBytes -= row.n
	}
}

func (a *after) succeeded(of *lane, settled int) {
	a.wait, a.tryAt = 0, time.Time{}
	of.wait, of.tryAt = 0, time.Time{}
	switch {
	case settled == 0: // no transaction could be seen, so that no statement was made
		a.unseenWait = min(2*max(a.unseenWait, unseenAfter), maxUnseenAfter)
		return
	case a.out:
		a.search = min(2*a.search, rowsPerMark)
	default:
		a.impatient = false
		of.size = min(2*of.size, rowsPerMark)
	}
	a.unseenWait = 0
	if !a.restBy.IsZero() && !a.l.stopping {
		a.restBy = time.Now().Add(restBudget) // a run until caught up waits for as long as marks are made
	}
	a.recovered()
}

// inTheWay goes on after a statement that failed for the sake of one of its rows, or of
// their number.
func (a *after) inTheWay(of *lane, err error, now time.Time) {
	first := &a.rows[a.picked[0]]
	n := len(a.picked)
	if !a.out {
		a.impatient = a.impatient || outbox.IsLocked(err)
		if outbox.IsSlow(err) {
			of.size = max(n/2, 1)
		}
		for _, i := range a.picked {
			a.rows[i].fails = 1
		}
		a.troubled += n
		a.theirs = true
	}
	if a.search = max(n/2, 1); n > 1 {
		return
	}
	first.tryAt = now.Add(min(rowRetry<<min(first.fails-1, 8), maxRowRetry))
	first.fails = min(first.fails, 100) + 1
	// A lock is worth no word that is gone a second later.
	if !outbox.IsLocked(err) || first.fails > 2 {
		a.failed(err, now)
	}
}

// renew looks at a table again that is not what it was. What it gives is said; nil where
// the work goes on.
func (a *after) renew(of *lane, err error) error {
	t, gone, lookErr := a.l.s.renewTarget(of.target)
	switch {
	case lookErr != nil:
		return lookErr
	case gone:
		a.l.s.log.Warn().Str("table", of.target.String()).Msg("outbox table is gone, and with it the delivered rows that were to be marked")
		for i := range a.rows {
			if row := &a.rows[i]; row.lane.target.OID == of.target.OID && row.state == rowWaits && a.ready(row) {
				a.settle(row)
			}
		}
		a.recovered()
		return nil
	}
	main := a.lanes[t.OID]
	if t.Same(main.target) {
		return err // it is not the table that was redefined, but what a trigger does
	}
	if of != main || !t.SameKey(main.target) {
		// Their key is no key any more. The event's id is part of it.
		loose := newLane(t.ByEvent())
		for i := range a.rows {
			row := &a.rows[i]
			if row.lane.target.OID != t.OID {
				continue
			}
			if at := slices.Index(row.lane.target.Key, row.lane.target.EventID); len(row.lane.target.Key) > 1 {
				id := outbox.SplitKey(a.keys[row.at:row.at+row.n], len(row.lane.target.Key))[at]
				key := outbox.AppendColumn(nil, []byte(id))
				if row.id.IsZero() && row.state != rowDone {
					a.readBytes += len(key) - row.n
				}
				row.at, row.n = len(a.keys), len(key)
				a.keys = append(a.keys, key...)
			}
			row.lane = loose
		}
		a.lanes[t.OID] = newLane(t)
		a.lanes[t.OID].byEvent = loose
	} else {
		main.target, main.byEvent = t, nil
	}
	clear(a.plans)
	a.l.s.log.Info().Str("table", t.String()).Strs("key", t.Key).Msg("outbox table has changed: its delivered rows are marked by what it is now")
	return nil
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

// recovered notes that rows were marked, and that nothing is in the way any more.
func (a *after) recovered() {
	if a.fault.text == "" || a.troubled > 0 {
		return
	}
	for _, n := range a.lanes {
		if n.wait > 0 || n.byEvent != nil && n.byEvent.wait > 0 {
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
	var at time.Time
	found := false
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
		if due := row.due(); !found || due.Before(at) {
			at, found = due, true
		}
		if !at.After(a.l.now) {
			break
		}
	}
	if !found {
		return 0
	}
	if at.Before(a.tryAt) {
		at = a.tryAt
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

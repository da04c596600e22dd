package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
)

// AnchorOptions says how far the anchor trails the stream; either of the first two 0
// turns it off.
type AnchorOptions struct {
	WAL         int64
	Time        time.Duration
	MaxRetained int64 // above this much WAL kept the anchor lets go; 0: never
}

func (o AnchorOptions) on() bool { return o.WAL > 0 && o.Time > 0 }

// ReplayStatus is how far back replay reaches.
type ReplayStatus struct {
	Slot string `json:"slot"`
	// OldestLSN is the least --from-lsn; OldestTime is of its first commit, or of the moment
	// at which the stream stood there. Null where nothing is known yet.
	OldestLSN  string     `json:"oldest_lsn"`
	OldestTime *time.Time `json:"oldest_time"`
	Retained   int64      `json:"retained_wal_bytes"`
}

// anchorMark is a place where the anchor may stand: the live slot stood there, so it is
// the end of a record.
type anchorMark struct {
	lsn checkpoint.LSN
	at  time.Time
}

// anchor trails the stream with a second slot, on a connection and goroutine of its own:
// nothing of the stream waits for it, and no error of it ends anything.
type anchor struct {
	r     *Relay
	o     AnchorOptions
	name  string
	log   zerolog.Logger
	conn  *replication.Conn
	named []string

	marks   []anchorMark      // rising
	oldest  anchorMark        // where the anchor stands
	stored  checkpoint.Anchor // the same as the checkpoint had it at the start
	had     bool              // it was there once
	touched time.Time
	restBy  time.Time // until then it is not moved again
	said    string
	warned  bool // of max-retained-wal
}

const (
	anchorInterval = 2 * time.Second
	// anchorTimeout bounds what asks the catalog. Reading WAL takes as long as it takes: a step
	// reads all of it from the beginning of the oldest transaction on that was open where the
	// anchor stands, and one that was broken off would have to read it again.
	anchorTimeout = 2 * time.Minute
	// anchorRest is how many times as long as a step took the server is left alone after it.
	anchorRest = 4
	// anchorSteps is into how many steps the window is cut: each advance reads that part of
	// it from the WAL.
	anchorSteps = 16
)

func newAnchor(r *Relay) *anchor {
	return &anchor{r: r, o: r.o.Anchor, name: replication.AnchorName(r.o.Slot), log: r.o.Logger.With().Str("part", "anchor").Logger()}
}

// run looks until ctx ends. The first checkpoint is written by then, so that an anchor
// shows that the connector ran before.
func (a *anchor) run(ctx context.Context, named []string) {
	a.named = named
	a.stored = a.r.anchorAt()
	tick := time.NewTicker(anchorInterval)
	defer tick.Stop()
	defer a.disconnect()
	for {
		err := a.look(ctx)
		if err != nil && ctx.Err() == nil {
			if err.Error() != a.said {
				a.log.Warn().Err(err).Str("slot", a.name).Msg("the anchor of replay cannot be kept: trying again; the stream goes on")
			}
			a.said = err.Error()
			a.disconnect()
		} else if err == nil && a.said != "" {
			a.said = ""
			a.log.Info().Str("slot", a.name).Msg("the anchor of replay is kept again")
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (a *anchor) disconnect() {
	if a.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(a.r.base, time.Second)
	defer cancel()
	_ = a.conn.Close(ctx) // its work is done
	a.conn = nil
}

func (a *anchor) look(whole context.Context) (err error) {
	ctx, cancel := context.WithTimeout(whole, anchorTimeout)
	defer cancel()
	if a.conn == nil {
		if a.conn, err = a.r.connect(ctx); err != nil {
			return err
		}
	}
	live, found, err := replication.ReadSlot(ctx, a.conn, a.r.o.Slot)
	if err != nil || !found || live.ConfirmedFlush == 0 {
		return err
	}
	slot, found, err := replication.ReadSlot(ctx, a.conn, a.name)
	if err != nil {
		return err
	}
	room, err := replication.ReadRoom(ctx, a.conn)
	if err != nil {
		return err
	}
	a.warn(int64(room.WALEnd - live.RestartLSN))
	if !a.o.on() {
		if found && !slot.Active {
			a.log.Info().Str("slot", a.name).Msg("replay.retain-wal or retain-time is 0: dropping the anchor")
			return replication.DropSlot(ctx, a.conn, a.name)
		}
		a.r.setReplay(nil)
		a.r.setAnchor(checkpoint.Anchor{})
		return nil
	}
	a.mark(live.ConfirmedFlush, room.Now)
	if why := a.letGo(slot, found, live, room); why != "" {
		return a.replace(ctx, found, why)
	}
	a.had = true
	if err := a.know(whole, slot, live, room.Now); err != nil {
		return err
	}
	a.report(int64(room.WALEnd - slot.RestartLSN))
	if slot.Active || time.Now().Before(a.restBy) {
		return nil
	}
	floor, err := replication.ReplayFloor(ctx, a.conn, a.r.o.Slot)
	if err != nil {
		return err
	}
	began := time.Now()
	if err := a.advance(whole, live, floor, room); err != nil {
		return err
	}
	a.restBy = time.Now().Add(anchorRest * time.Since(began))
	a.report(int64(room.WALEnd - slot.RestartLSN))
	return nil
}

// report tells how far back replay reaches.
func (a *anchor) report(retained int64) {
	at := a.oldest.at
	a.r.setReplay(&ReplayStatus{Slot: a.name, OldestLSN: a.oldest.lsn.String(), OldestTime: &at, Retained: retained})
	a.r.setAnchor(checkpoint.Anchor{LSN: a.oldest.lsn, At: at})
}

// warn says once that the live slot keeps more than max-retained-wal.
func (a *anchor) warn(retained int64) {
	over := a.o.MaxRetained > 0 && retained > a.o.MaxRetained
	if over && !a.warned {
		a.log.Warn().Str("slot", a.r.o.Slot).Int64("bytes", retained).Msg("the slot keeps more WAL than source.max-retained-wal: see the lag, and the disk of the server")
	}
	a.warned = over
}

// mark notes where the stream stands, at most a few times per step of the window.
func (a *anchor) mark(lsn checkpoint.LSN, now time.Time) {
	if n := len(a.marks); n > 0 {
		last := a.marks[n-1]
		if lsn <= last.lsn || int64(lsn-last.lsn) < a.o.WAL/(4*anchorSteps) && now.Sub(last.at) < a.o.Time/(4*anchorSteps) {
			return
		}
	}
	a.marks = append(a.marks, anchorMark{lsn, now})
}

// window is how much WAL the anchor may keep: less than configured where the server, or
// max-retained-wal, leaves less.
func (a *anchor) window(room replication.Room) int64 {
	w := a.o.WAL
	if room.MaxKeep >= 0 {
		w = min(w, room.MaxKeep/2)
	}
	if a.o.MaxRetained > 0 {
		w = min(w, a.o.MaxRetained/2)
	}
	return w
}

// letGo tells why the anchor must be made anew where the stream is now, which takes no
// WAL and keeps none: it is not there, is lost, or keeps WAL that is getting short.
func (a *anchor) letGo(slot replication.Slot, found bool, live replication.Slot, room replication.Room) string {
	kept := int64(room.WALEnd - slot.RestartLSN)
	switch {
	case !found && !a.had:
		return "created the anchor: replay reaches back to here"
	case !found:
		return "the anchor was dropped and is made anew: replay reaches back only to here"
	case slot.Invalidation != "" || slot.WALStatus == "lost":
		return "the anchor was lost and is made anew: replay reaches back only to here"
	case slot.Active || slot.RestartLSN >= live.RestartLSN:
		return "" // nothing would be won
	case room.MaxKeep >= 0 && (kept > room.MaxKeep*3/4 || slot.WALStatus == "unreserved"):
		return "max_slot_wal_keep_size is nearly reached and the anchor let go of its WAL: replay reaches back only to here"
	case a.o.MaxRetained > 0 && kept > a.o.MaxRetained:
		return "source.max-retained-wal is reached and the anchor let go of its WAL: replay reaches back only to here"
	}
	return ""
}

func (a *anchor) replace(ctx context.Context, found bool, why string) error {
	if found {
		if err := replication.DropSlot(ctx, a.conn, a.name); err != nil {
			return err
		}
	}
	lsn, err := replication.CopySlot(ctx, a.conn, a.r.o.Slot, a.name)
	if err != nil {
		return err
	}
	// Behind the copy: what is committed before the anchor was committed by then, and a replay
	// from that time on leaves nothing out.
	room, err := replication.ReadRoom(ctx, a.conn)
	if err != nil {
		return err
	}
	now := room.Now
	e := a.log.Info()
	if found || a.had {
		e = a.log.Warn()
	}
	e.Str("slot", a.name).Stringer("lsn", lsn).Msg(why)
	a.had, a.oldest, a.touched = true, anchorMark{lsn, now}, now
	a.report(0)
	return nil
}

// know finds the time of where the anchor stands, after a start.
func (a *anchor) know(ctx context.Context, slot, live replication.Slot, now time.Time) error {
	if a.oldest.lsn == slot.ConfirmedFlush {
		return nil
	}
	if a.stored.LSN == slot.ConfirmedFlush {
		a.oldest = anchorMark{a.stored.LSN, a.stored.At}
		return nil
	}
	m, err := a.first(ctx, slot.ConfirmedFlush, live.ConfirmedFlush, now)
	if err != nil {
		return err
	}
	a.oldest = anchorMark{slot.ConfirmedFlush, m.at}
	return nil
}

// first gives the first commit from lsn on: where it begins, and its time.
func (a *anchor) first(ctx context.Context, lsn, live checkpoint.LSN, now time.Time) (anchorMark, error) {
	cfg, err := replication.WalsenderConfig(a.r.o.DSN, a.r.o.AppName, a.r.o.ConnOptions...)
	if err != nil {
		return anchorMark{}, err
	}
	t, err := replication.FirstCommit(ctx, cfg, a.name, replication.StreamOptions{
		Slot: replication.ReplaySlot(a.r.o.Slot, "lookback"), Publications: a.named, From: lsn,
	}, live)
	switch {
	case errors.Is(err, replication.ErrNoCommit):
		return anchorMark{live, now}, nil
	case err != nil:
		return anchorMark{}, fmt.Errorf("look for the oldest commit that replay reaches: %w", err)
	}
	return anchorMark{t.CommitLSN, t.CommitTime}, nil
}

// advance moves the anchor by a step where it reaches further back than it may. Where no
// mark is known, as after a start, the WAL is asked for a place to stand.
func (a *anchor) advance(ctx context.Context, live replication.Slot, floor checkpoint.LSN, room replication.Room) error {
	to, ask := a.target(live.ConfirmedFlush, floor, a.window(room), room.Now)
	if ask > 0 {
		m, err := a.first(ctx, ask, live.ConfirmedFlush, room.Now)
		if err != nil {
			return err
		}
		a.insert(m)
		to, _ = a.target(live.ConfirmedFlush, floor, a.window(room), room.Now)
	}
	switch {
	case to.lsn > a.oldest.lsn:
		if err := replication.AdvanceSlot(ctx, a.conn, a.name, to.lsn); err != nil {
			return err
		}
		a.oldest, a.touched = to, room.Now
	case room.IdleTimeout > 0 && room.Now.Sub(a.touched) > room.IdleTimeout/4:
		if err := replication.AdvanceSlot(ctx, a.conn, a.name, a.oldest.lsn); err != nil {
			return err
		}
		a.touched = room.Now
	}
	return nil
}

// target gives the mark to advance to, or an LSN from which a commit is to be looked for
// because a mark is missing. Neither where the anchor may stay. It never passes floor,
// which is where the slowest replay is (0: none runs), nor the stream.
func (a *anchor) target(live, floor checkpoint.LSN, window int64, now time.Time) (to anchorMark, ask checkpoint.LSN) {
	overWAL := int64(live-a.oldest.lsn) > window
	overTime := now.Sub(a.oldest.at) > a.o.Time
	if !overWAL && !overTime {
		return to, 0
	}
	limit := live
	if floor > 0 {
		limit = min(limit, floor)
	}
	step := window / anchorSteps
	next := anchorMark{} // the first behind the anchor
	for _, m := range a.marks {
		if m.lsn <= a.oldest.lsn || m.lsn > limit {
			continue
		}
		if next.lsn == 0 {
			next = m
		}
		// As far as it has to, and a step more, so that it is not moved all the time.
		byWAL := overWAL && int64(live-m.lsn) >= window-step
		byTime := overTime && now.Sub(m.at) >= a.o.Time-a.o.Time/anchorSteps
		if byWAL || byTime {
			to = m
		}
	}
	for len(a.marks) > 0 && a.marks[0].lsn <= a.oldest.lsn {
		a.marks = a.marks[1:]
	}
	if to.lsn == 0 && next.lsn > 0 && int64(next.lsn-a.oldest.lsn) > step && step > 0 {
		return to, min(a.oldest.lsn+checkpoint.LSN(step), limit)
	}
	return to, 0
}

// insert puts a mark in its place.
func (a *anchor) insert(m anchorMark) {
	i := 0
	for i < len(a.marks) && a.marks[i].lsn < m.lsn {
		i++
	}
	if i < len(a.marks) && a.marks[i].lsn == m.lsn {
		return
	}
	a.marks = append(a.marks[:i], append([]anchorMark{m}, a.marks[i:]...)...)
}

// setReplay notes how far back replay reaches.
func (r *Relay) setReplay(s *ReplayStatus) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status.Replay = s
}

// setAnchor notes where the anchor stands, for the next checkpoint.
func (r *Relay) setAnchor(at checkpoint.Anchor) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.anchored = at
}

func (r *Relay) anchorAt() checkpoint.Anchor {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.anchored
}

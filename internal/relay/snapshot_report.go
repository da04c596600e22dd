package relay

import (
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/snapshot"
)

// SnapshotStatus is how far the snapshot of all tables is.
type SnapshotStatus struct {
	Tables map[string]TableStatus `json:"tables"` // by schema.table
	Done   int                    `json:"done"`   // tables
	Total  int                    `json:"total"`
	Rows   int64                  `json:"rows"` // delivered so far
	// Estimate is the planner's number of rows of all tables; without those not analysed.
	Estimate int64   `json:"estimate"`
	Rate     float64 `json:"rows_per_second"`
	// Left is the estimated time until all is done, in seconds; absent where unknown.
	Left *float64 `json:"seconds_left,omitempty"`
}

// TableStatus is how far the snapshot of a table is.
type TableStatus struct {
	State    string   `json:"state"` // waiting, pending, reading, done
	Rows     int64    `json:"rows"`
	Estimate int64    `json:"estimate"` // -1: not known
	Again    int      `json:"keys_to_read_again,omitempty"`
	Request  string   `json:"request,omitempty"`
	Rate     float64  `json:"rows_per_second,omitempty"`
	Left     *float64 `json:"seconds_left,omitempty"`
}

// progressReport says how far the snapshot is: for /status every second, in the log every
// ten seconds, and once when a table is done.
type progressReport struct {
	began     time.Time
	looked    time.Time
	said      time.Time
	rows      map[uint32]int64 // at began, by table
	states    map[uint32]checkpoint.TableState
	finished  bool
	atFirst   int64 // rows delivered before this session
	haveFirst bool
}

const (
	lookEvery = time.Second
	sayRows   = 10 * time.Second
)

// look reports if it is time to.
func (p *progressReport) look(g *merging) {
	now := g.l.now
	if now.Sub(p.looked) < lookEvery {
		return
	}
	p.report(g, now.Sub(p.said) >= sayRows)
}

// end reports once more when everything is read.
func (p *progressReport) end(g *merging) {
	if p.finished {
		return
	}
	p.finished = true
	p.report(g, false)
	if s := g.l.s.r.Status().Snapshot; s != nil && !p.began.IsZero() && s.Rows > p.atFirst {
		g.l.s.log.Info().Int("tables", s.Done).Int64("rows", s.Rows).Dur("took", g.l.now.Sub(p.began)).Msg("snapshot done")
	}
}

func (p *progressReport) report(g *merging, say bool) {
	now := g.l.now
	if p.states == nil {
		p.states, p.rows = map[uint32]checkpoint.TableState{}, map[uint32]int64{}
	}
	p.looked = now
	p.finished = p.finished && !g.merger.Active()
	s := &SnapshotStatus{Tables: map[string]TableStatus{}}
	counts := map[checkpoint.TableState]int{}
	guess := true // every table's size is known
	g.merger.Each(func(t snapshot.Table, tp checkpoint.TableProgress) {
		counts[tp.State]++
		s.Total++
		s.Rows += tp.Rows
		if tp.State == checkpoint.TableDone {
			s.Done++
			s.Estimate += tp.Rows
		} else {
			s.Estimate += max(t.Estimate, tp.Rows, 0)
			guess = guess && t.Estimate >= 0
		}
		ts := TableStatus{State: string(tp.State), Rows: tp.Rows, Estimate: t.Estimate, Again: len(tp.Again)}
		if tp.Request != nil {
			ts.Request = tp.Request.ID
		}
		p.table(g, t, tp, &ts, say)
		s.Tables[t.String()] = ts
	})
	if !p.haveFirst {
		p.haveFirst, p.atFirst = true, s.Rows
	}
	if s.Done < s.Total && p.began.IsZero() {
		p.began, p.said = now, now
		g.l.s.log.Info().Int("tables", s.Total-s.Done).Int64("estimated_rows", s.Estimate).Msg("snapshot begins, beside the stream")
	}
	if took := now.Sub(p.began).Seconds(); took > 0 && !p.began.IsZero() {
		s.Rate = float64(s.Rows-p.atFirst) / took
		if guess {
			s.Left = left(s.Estimate-s.Rows, s.Rate)
		}
	}
	if say && s.Done < s.Total {
		p.said = now
		e := g.l.s.log.Info().Int("tables_done", s.Done).Int("tables", s.Total).Int64("rows", s.Rows).Int64("estimated_rows", s.Estimate).
			Int64("rows_per_second", int64(s.Rate))
		if s.Left != nil {
			e = e.Dur("left", time.Duration(*s.Left*float64(time.Second)))
		}
		e.Msg("snapshot")
	}
	for _, state := range []checkpoint.TableState{checkpoint.TableWaiting, checkpoint.TablePending, checkpoint.TableReading, checkpoint.TableDone} {
		g.l.s.r.metrics.snapshotTables.WithLabelValues(string(state)).Set(float64(counts[state]))
	}
	if s.Total > 0 {
		g.l.s.r.setSnapshot(s)
	}
}

// table reports one table.
func (p *progressReport) table(g *merging, t snapshot.Table, tp checkpoint.TableProgress, ts *TableStatus, say bool) {
	before, seen := p.states[t.OID]
	p.states[t.OID] = tp.State
	if tp.State == checkpoint.TableDone && seen && before != tp.State {
		g.l.s.log.Info().Str("table", t.String()).Int64("rows", tp.Rows).Dur("took", g.l.now.Sub(tp.Began)).Msg("table read")
	}
	if tp.State != checkpoint.TableReading {
		return
	}
	if _, ok := p.rows[t.OID]; !ok {
		p.rows[t.OID] = tp.Rows
	}
	if took := g.l.now.Sub(tp.Began).Seconds(); took > 0 {
		ts.Rate = float64(tp.Rows) / took
		if t.Estimate >= 0 { // unknown before the first ANALYZE
			ts.Left = left(max(t.Estimate, tp.Rows)-tp.Rows, ts.Rate)
		}
	}
	if say {
		e := g.l.s.log.Info().Str("table", t.String()).Int64("rows", tp.Rows).Int64("estimated_rows", t.Estimate).Int64("rows_per_second", int64(ts.Rate))
		if ts.Left != nil {
			e = e.Dur("left", time.Duration(*ts.Left*float64(time.Second)))
		}
		e.Msg("reading table")
	}
}

// left estimates seconds; nil where nothing is known.
func left(rows int64, rate float64) *float64 {
	if rate <= 0 {
		return nil
	}
	v := float64(max(rows, 0)) / rate
	return &v
}

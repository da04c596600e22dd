package relay

import (
	"math"
	"strconv"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
)

// Lag is how far delivery is behind what is committed, as last sampled.
type Lag struct {
	Bytes    int64   // WAL written and not delivered
	Seconds  float64 // age of the oldest such WAL; 0 when caught up
	Consumed float64 // WAL delivered, bytes per second
	Produced float64 // WAL written, bytes per second
	CatchUp  Seconds // until all is delivered, at these rates
	Records  float64 // delivered, per second
}

// Seconds is a time that may be never; in JSON that is the word.
type Seconds float64

// UnmarshalJSON reads what MarshalJSON prints.
func (s *Seconds) UnmarshalJSON(b []byte) error {
	if string(b) == `"never"` {
		*s = Seconds(math.Inf(1))
		return nil
	}
	v, err := strconv.ParseFloat(string(b), 64)
	*s = Seconds(v)
	return err
}

// MarshalJSON prints what JSON has no number for as "never".
func (s Seconds) MarshalJSON() ([]byte, error) {
	if math.IsInf(float64(s), 0) {
		return []byte(`"never"`), nil
	}
	return strconv.AppendFloat(nil, float64(s), 'f', 3, 64), nil
}

// catchUp is how long a lag in bytes takes at two rates in bytes per second.
func catchUp(lag, consumed, produced float64) Seconds {
	switch {
	case lag <= 0:
		return 0
	case consumed <= produced:
		return Seconds(math.Inf(1))
	}
	return Seconds(lag / (consumed - produced))
}

// standing is where the WAL ended, and where delivery stood, at a moment.
type standing struct {
	at        time.Time
	end       checkpoint.LSN
	delivered checkpoint.LSN
	records   uint64 // delivered by this process
}

const (
	wallsKept  = 1 << 12         // places that are not delivered; more are thinned out
	ratesOver  = 5 * time.Second // so that a stop shows at once
	keepsPace  = 2 * sampleInterval
	leastRated = 500 * time.Millisecond // rates over less time are noise
)

// lagMeter makes lags out of samples. Lag in seconds is the age of the oldest WAL end seen
// that is not delivered yet, and so is 0 on an idle database. What was written before the
// first sample is as old as the transaction that is delivered now.
type lagMeter struct {
	first  checkpoint.LSN // the WAL's end at the first sample; 0 before
	walls  []standing     // not delivered yet
	recent []standing     // of the last seconds
}

// sample takes where things stand; age is that of the commit which was delivered last, by
// the server's clock, 0 where none was.
func (m *lagMeter) sample(now standing, age time.Duration) Lag {
	if m.first == 0 {
		m.first = now.end
	}
	m.walls = append(m.walls, now)
	first := 0
	for first < len(m.walls) && m.walls[first].end <= now.delivered {
		first++
	}
	m.walls = m.walls[first:]
	if len(m.walls) > wallsKept {
		m.walls = thinned(m.walls)
	}
	m.recent = append(m.recent, now)
	for len(m.recent) > 2 && now.at.Sub(m.recent[1].at) >= ratesOver {
		m.recent = m.recent[1:]
	}
	var l Lag
	if old := m.recent[0]; now.at.Sub(old.at) >= leastRated {
		over := now.at.Sub(old.at).Seconds()
		l.Consumed = rate(uint64(old.delivered), uint64(now.delivered), over)
		l.Produced = rate(uint64(old.end), uint64(now.end), over)
		l.Records = rate(old.records, now.records, over)
	}
	if len(m.walls) == 0 {
		return l
	}
	l.Bytes = int64(now.end - now.delivered)
	l.Seconds = now.at.Sub(m.walls[0].at).Seconds()
	if now.delivered < m.first {
		l.Seconds = max(l.Seconds, age.Seconds())
	}
	if l.CatchUp = catchUp(float64(l.Bytes), l.Consumed, l.Produced); l.Seconds < keepsPace.Seconds() {
		// What was there at the last look but one is delivered: it keeps pace, and at equal
		// rates the quotient would say never.
		l.CatchUp = min(l.CatchUp, Seconds(l.Seconds))
	}
	return l
}

// rate is 0 where a position went back, as at a rewind.
func rate(from, to uint64, seconds float64) float64 {
	if to <= from {
		return 0
	}
	return float64(to-from) / seconds
}

// thinned keeps the first and every second of the others: ages get coarser, not younger.
func thinned(walls []standing) []standing {
	kept := walls[:0]
	for i, w := range walls {
		if i%2 == 0 {
			kept = append(kept, w)
		}
	}
	return kept
}

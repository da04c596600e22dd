package relay

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/phase"
)

func TestCatchUpTime(t *testing.T) {
	never := math.Inf(1)
	for _, tt := range []struct{ lag, consumed, produced, want float64 }{
		{100000, 10000, 5000, 20}, {100000, 6000, 5000, 100}, {100000, 5500, 5000, 200},
		{100000, 5000, 5000, never}, {100000, 4000, 5000, never},
		{0, 0, 0, 0}, {0, 4000, 5000, 0}, {1000000, 100000, 0, 10},
	} {
		if got := float64(catchUp(tt.lag, tt.consumed, tt.produced)); got != tt.want {
			t.Errorf("lag %v at %v of %v takes %v s, want %v", tt.lag, tt.consumed, tt.produced, got, tt.want)
		}
	}
}

func TestNeverIsAWordInJSON(t *testing.T) {
	for _, tt := range []struct {
		s    Seconds
		want string
	}{{Seconds(math.Inf(1)), `"never"`}, {0, "0.000"}, {12.3456, "12.346"}} {
		b, err := json.Marshal(tt.s)
		if err != nil || string(b) != tt.want {
			t.Errorf("%v is %s, %v; want %s", float64(tt.s), b, err, tt.want)
		}
		var back Seconds
		if err := json.Unmarshal(b, &back); err != nil || math.Abs(float64(back-tt.s)) > 0.001 {
			t.Errorf("%s reads as %v, %v", b, float64(back), err)
		}
	}
}

// What is not delivered waits, whether it can be measured or not.
func TestLagWhileNothingStreams(t *testing.T) {
	r := New(Options{})
	ago := func(d time.Duration) { r.sampledAt = time.Now().Add(-d) }
	want := func(least, most float64, catchUp float64) {
		t.Helper()
		if s := r.Status(); s.LagSeconds < least || s.LagSeconds > most || float64(s.CatchUp) != catchUp {
			t.Errorf("%s: lag %v s, catch-up %v; want %v to %v s, and %v", s.Phase, s.LagSeconds, float64(s.CatchUp), least, most, catchUp)
		}
	}
	never := math.Inf(1)
	ago(10 * time.Second)
	want(10, 60, never) // since the start of the process
	r.setPhase(phase.Streaming)
	want(10, 60, never) // not measured yet
	r.sample(Lag{Bytes: 100, Seconds: 3, CatchUp: 7}, 0, 0)
	ago(time.Hour)
	want(3, 3, 7)
	r.setPhase(phase.Retrying)
	want(3603, 3700, never)
	r.setPhase(phase.Connecting)
	want(3603, 3700, never)
	r.setPhase(phase.Standby)
	ago(time.Hour)
	if want(0, 0, 0); r.Status().LagBytes != 0 {
		t.Errorf("a standby lags by %d bytes", r.Status().LagBytes)
	}
	r.setPhase(phase.Fencing) // until then another instance delivered
	want(0, 60, never)
	r.setPhase(phase.Streaming)
	r.sample(Lag{}, 0, 0)
	want(0, 0, 0)
	r.setPhase(phase.Stopping)
	want(0, 0, 0)
}

// metered feeds a meter a sample a second.
type metered struct {
	m         lagMeter
	at        time.Time
	end, done checkpoint.LSN
}

func newMetered(end, done checkpoint.LSN) *metered {
	return &metered{at: time.Unix(1_800_000_000, 0), end: end, done: done}
}

func (m *metered) second(written, delivered checkpoint.LSN) Lag {
	m.at, m.end, m.done = m.at.Add(sampleInterval), m.end+written, min(m.done+delivered, m.end+written)
	return m.m.sample(standing{m.at, m.end, m.done, 0}, 0)
}

func TestLagOfAStreamThatKeepsPaceStopsAndCatchesUp(t *testing.T) {
	m := newMetered(1_000_000, 990_000)
	for range 30 {
		if l := m.second(10_000, 10_000); l.Bytes != 10_000 || l.Seconds > 1 || l.CatchUp > 1 {
			t.Fatalf("keeping pace: %+v", l)
		}
	}
	for i := range 20 {
		l := m.second(10_000, 0)
		if want := float64(i + 1); l.Seconds != want {
			t.Errorf("lag is %v s after %v s without a delivery", l.Seconds, want)
		}
		if i > 1 && !math.IsInf(float64(l.CatchUp), 1) {
			t.Errorf("catches up in %v s, and nothing is delivered", l.CatchUp)
		}
	}
	before := math.Inf(1)
	for l := m.second(10_000, 60_000); l.Bytes > 0; l = m.second(10_000, 60_000) {
		if l.Seconds > before {
			t.Errorf("lag grows from %v s to %v s while it catches up", before, l.Seconds)
		}
		before = l.Seconds
		if l.Seconds > 5 && l.Seconds < 15 && (l.CatchUp < 0.5 || l.CatchUp > 60) {
			t.Errorf("catches up in %v s, %d bytes behind at 60,000 of 10,000 bytes a second", l.CatchUp, l.Bytes)
		}
	}
	for range 30 {
		if l := m.second(0, 0); l.Bytes != 0 || l.Seconds != 0 || l.CatchUp != 0 {
			t.Errorf("idle: %+v", l)
		}
	}
	if l := m.second(500, 500); l.Bytes != 0 || l.Seconds != 0 || l.CatchUp != 0 {
		t.Errorf("WAL of others: %+v", l)
	}
}

func TestLagBeforeTheFirstSampleIsTheAgeOfWhatIsDelivered(t *testing.T) {
	var m lagMeter
	at := time.Unix(1_800_000_000, 0)
	l := m.sample(standing{at, 1_000_000, 1000, 0}, time.Hour)
	if l.Seconds != 3600 {
		t.Errorf("lag is %v s with transactions of an hour ago on their way", l.Seconds)
	}
	l = m.sample(standing{at.Add(sampleInterval), 1_100_000, 1_000_000, 500}, 10*time.Second)
	if l.Seconds != 0 || l.Bytes != 100_000 {
		t.Errorf("lag is %v s, %d bytes, once what was there at the start is delivered", l.Seconds, l.Bytes)
	}
	if want := 500 / sampleInterval.Seconds(); l.Records != want || l.Consumed != 999_000 || l.Produced != 100_000 {
		t.Errorf("%+v, want %v records a second, 999,000 and 100,000 bytes", l, want)
	}
}

func TestOldLagStaysOldWithinABound(t *testing.T) {
	m := newMetered(1000, 1000)
	const seconds = 5 * wallsKept
	var l Lag
	for range seconds {
		l = m.second(1000, 0)
	}
	if len(m.m.walls) > wallsKept || len(m.m.recent) > 10 {
		t.Errorf("%d and %d samples are kept", len(m.m.walls), len(m.m.recent))
	}
	if l.Seconds != seconds-1 {
		t.Errorf("lag is %v s after %d s", l.Seconds, seconds)
	}
}

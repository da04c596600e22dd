package snapshot_test

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
)

// generator makes a script line by line, each of them run before the next is made. What
// it does often, and what never, is another mix for each seed.
type generator struct {
	sim    *sim
	r      *rand.Rand
	lines  []string
	mix    []choice
	keys   int // how many a table has
	txns   int // given names
	events int
	big    float64 // how many updates change it
	tables []*modelTable
}

// choice is a kind of line and its weight in the mix.
type choice struct {
	weight int
	line   func() string
}

func (g *generator) do(format string, args ...any) error {
	line := fmt.Sprintf(format, args...)
	g.lines = append(g.lines, line)
	return g.sim.run(line)
}

// run makes a script of a number of lines.
func (g *generator) run(steps int) error {
	if err := g.setUp(); err != nil {
		return err
	}
	total := 0
	for _, c := range g.mix {
		total += c.weight
	}
	for range steps {
		n := g.r.IntN(total)
		for _, c := range g.mix {
			if n -= c.weight; n >= 0 {
				continue
			}
			if line := c.line(); line != "" {
				if err := g.do("%s", line); err != nil {
					return err
				}
			}
			break
		}
	}
	return g.do("drain")
}

func (g *generator) setUp() error {
	g.keys, g.big = 2+g.r.IntN(8), g.r.Float64()
	// One in four remembers hardly anything.
	passed := max(0, g.r.IntN(16)-12)
	again := max(0, g.r.IntN(8)-4)
	if err := g.do("options %d %d %d %d", 1+g.r.IntN(4), 1+g.r.IntN(3), passed, again); err != nil {
		return err
	}
	kinds := []string{"int", "int", "pair", "text", "full", "keyless", "log", "outbox"}
	for i := range 1 + g.r.IntN(3) {
		word := "table"
		if g.r.IntN(6) == 0 {
			word = "later"
		}
		kind := kinds[g.r.IntN(len(kinds))]
		if err := g.do("%s t%d %s", word, i, kind); err != nil {
			return err
		}
	}
	g.tables = g.sim.w.tables
	for range g.r.IntN(2 * g.keys * len(g.tables)) {
		t := g.table()
		if err := g.do("row %s %s %s", t.name, g.fresh(t), g.value()); err != nil {
			return err
		}
	}
	g.mixture()
	if g.r.IntN(4) == 0 { // committed before the slot, and seen after it
		t := g.table()
		for _, line := range []string{"begin 0", "insert 0 " + t.name + " " + g.fresh(t) + " early", "commit 0 wait"} {
			if err := g.do("%s", line); err != nil {
				return err
			}
		}
	}
	return g.do("start")
}

func (g *generator) table() *modelTable { return g.tables[g.r.IntN(len(g.tables))] }

// key gives one of a table's keys, some of them more often than others.
func (g *generator) key(t *modelTable) string {
	n := g.r.IntN(g.keys)
	if g.r.IntN(3) == 0 {
		n = n * g.r.IntN(2)
	}
	switch t.kind {
	case "pair":
		return strconv.Itoa(n%3) + "/" + strconv.Itoa(5+n) // their bytes' order is another
	case "outbox":
		return strconv.Itoa(1 + g.r.IntN(max(g.events, 1)))
	}
	return strconv.Itoa(6 + n)
}

// fresh gives a key for a new row.
func (g *generator) fresh(t *modelTable) string {
	if t.outbox {
		g.events++
		return strconv.Itoa(g.events)
	}
	return g.key(t)
}

func (g *generator) value() string { return string(rune('a' + g.r.IntN(26))) }

// bigOrNot gives a value, or none for one that stays unchanged.
func (g *generator) bigOrNot() string {
	if g.r.Float64() < g.big {
		return g.value()
	}
	return ""
}

// running picks a transaction that is not over; "" for none.
func (g *generator) running() string {
	if len(g.sim.w.open) == 0 {
		return ""
	}
	return g.sim.w.open[g.r.IntN(len(g.sim.w.open))].name
}

// write makes a line that writes.
func (g *generator) write() string {
	x, t := g.running(), g.table()
	if x == "" {
		return ""
	}
	switch n := g.r.IntN(40); {
	case n < 12:
		word := "insert"
		if g.r.IntN(4) == 0 {
			word = "subinsert"
		}
		return fmt.Sprintf("%s %s %s %s %s", word, x, t.name, g.fresh(t), g.value())
	case n < 24:
		return strings.TrimSpace(fmt.Sprintf("update %s %s %s %s", x, t.name, g.key(t), g.bigOrNot()))
	case n < 30 && !t.outbox:
		return strings.TrimSpace(fmt.Sprintf("move %s %s %s %s %s", x, t.name, g.key(t), g.key(t), g.bigOrNot()))
	case n < 38:
		return fmt.Sprintf("delete %s %s %s", x, t.name, g.key(t))
	}
	return fmt.Sprintf("truncate %s %s", x, t.name)
}

// mixture decides what is done often.
func (g *generator) mixture() {
	always := func(line string) func() string { return func() string { return line } }
	of := func(n int) int { return g.r.IntN(n + 1) }
	rare := func(n int) int { return g.r.IntN(n+1) * g.r.IntN(2) }
	begin := func() string {
		if len(g.sim.w.open) > 4 {
			return ""
		}
		g.txns++
		return fmt.Sprintf("begin %d", g.txns)
	}
	onTxn := func(format string) func() string {
		return func() string {
			if x := g.running(); x != "" {
				return fmt.Sprintf(format, x)
			}
			return ""
		}
	}
	onTable := func(format string) func() string {
		return func() string { return fmt.Sprintf(format, g.table().name) }
	}
	g.mix = []choice{
		{10 + of(20), begin},
		{20 + of(60), g.write},
		{10 + of(10), onTxn("commit %s")},
		{rare(20), onTxn("commit %s wait")},
		{rare(10), onTxn("commit %s async")},
		{5 + of(10), onTxn("show %s")},
		{rare(5), onTxn("prepare %s")},
		{of(5), onTxn("abort %s")},
		{2 + of(5), always("flush")},
		{of(3), always("noise")},
		{5 + of(40), always("deliver")},
		{rare(10), func() string { return fmt.Sprintf("deliver %d", 1+g.r.IntN(3)) }},
		{5 + of(10), always("keepalive")},
		{5 + of(20), always("order")},
		{5 + of(20), func() string { return fmt.Sprintf("read %d", g.r.IntN(3)) }},
		{5 + of(20), func() string { return fmt.Sprintf("arrive %d", g.r.IntN(3)) }},
		{rare(10), always("saw")},
		{rare(5), always("snap")},
		{rare(5), always("sawold")},
		{5 + of(20), func() string { return fmt.Sprintf("next %d", 1+g.r.IntN(4)) }},
		{3 + of(5), always("held")},
		{2 + of(3), always("release")},
		{1 + of(5), always("checkpoint")},
		{rare(5), always("seal")},
		{rare(5), always("durable")},
		{rare(5), always("confirm")},
		{rare(3), always("persist")},
		{rare(3), always("crash")},
		{rare(2), always("servercrash")},
		{5 + of(10), func() string { return fmt.Sprintf("tick %d", 1+g.r.IntN(400)) }},
		{1, onTable("publish %s")},
		{rare(3), onTable("request %s")},
		{rare(3), onTable("request %s replace")},
		{rare(2), onTable("request %s where")},
	}
}

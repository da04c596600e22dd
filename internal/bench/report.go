package main

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"
)

// spread is the least, the middle and the greatest of some numbers.
type spread struct{ min, median, max float64 }

// spreadOf gives the spread of f over n measurements; n is at least 1. Of an even
// number the median is the mean of the two in the middle.
func spreadOf(n int, f func(i int) float64) spread {
	v := make([]float64, n)
	for i := range v {
		v[i] = f(i)
	}
	slices.Sort(v)
	return spread{v[0], (v[(n-1)/2] + v[n/2]) / 2, v[n-1]}
}

// format prints the three numbers with a number of decimals.
func (s spread) format(decimals int) string {
	return fmt.Sprintf("%.*f / %.*f / %.*f", decimals, s.min, decimals, s.median, decimals, s.max)
}

// report prints a table, each cell min / median / max. Ratio is the floor's time
// divided by walrelay's, pair by pair: 1 would be as fast as throwing it away.
func report(out io.Writer, results []result, latencies []latency, notes []string) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "%d cores, %s; each cell min / median / max\n\n", runtime.NumCPU(), runtime.Version())
	if len(results) > 0 {
		fmt.Fprintln(w, "workload\trows\t\twall s\t1000 rows/s\tCPU s per 1M rows\tpeak MiB\tratio to floor")
	}
	for _, r := range results {
		name := r.letter + " " + r.name
		if len(r.floor) > 0 {
			fmt.Fprintf(w, "%s\t%d\tfloor\t%s\t\n", name, r.rows, line(r.rows, r.floor))
			name = ""
		}
		ratio := "-"
		if len(r.floor) > 0 {
			ratio = spreadOf(len(r.relay), func(i int) float64 {
				return r.floor[i].wall.Seconds() / r.relay[i].wall.Seconds()
			}).format(2)
		}
		fmt.Fprintf(w, "%s\t%d\twalrelay\t%s\t%s\n", name, r.rows, line(r.rows, r.relay), ratio)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, l := range latencies {
		fmt.Fprintf(out, "\n%s (from the commit to a read_committed consumer)", l)
	}
	if len(latencies) > 0 {
		fmt.Fprintln(out)
	}
	for _, n := range notes {
		fmt.Fprintf(out, "\n%s\n", n)
	}
	return nil
}

func line(rows int, u []usage) string {
	of := func(decimals int, f func(usage) float64) string {
		return spreadOf(len(u), func(i int) float64 { return f(u[i]) }).format(decimals)
	}
	return of(2, func(u usage) float64 { return u.wall.Seconds() }) + "\t" +
		of(0, func(u usage) float64 { return float64(rows) / 1000 / max(u.wall.Seconds(), time.Microsecond.Seconds()) }) + "\t" +
		of(2, func(u usage) float64 { return u.cpu.Seconds() * 1e6 / float64(rows) }) + "\t" +
		of(0, func(u usage) float64 { return float64(u.rss) / (1 << 20) })
}

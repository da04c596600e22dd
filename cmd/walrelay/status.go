package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/internal/config"
	"github.com/walrelay/walrelay/internal/phase"
	"github.com/walrelay/walrelay/internal/polling"
	"github.com/walrelay/walrelay/internal/relay"
)

type statusFlags struct {
	addr   string
	output choice
}

// newStatusCommand is status: what a connector is doing, on one screen.
func newStatusCommand(a *app) *cobra.Command {
	f := statusFlags{output: choice{choices: []string{"text", "json"}}}
	cmd := &cobra.Command{
		Use:   "status [-c FILE | --addr URL]",
		Short: "Show what a connector is doing, and how far behind it is",
		Long: "Asks the connector's admin address: admin.listen of FILE, or URL, or the default\n" +
			"one. With -c, where nothing answers, it shows what Kafka and the database have of the\n" +
			"stopped connector, and exits with 1. A token is taken from FILE.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.status(cmd.Context(), f) },
	}
	a.addConfigFlag(cmd.Flags())
	cmd.Flags().StringVar(&f.addr, "addr", "", "`URL` of the connector, such as http://127.0.0.1:8642")
	cmd.Flags().VarP(&f.output, "output", "o", "form of the answer: "+f.output.Type())
	return cmd
}

// shownStatus is what a connector answers in either mode.
type shownStatus struct {
	relay.Status
	Mode   string                `json:"mode,omitempty"` // of a polling one
	Outbox []polling.TableStatus `json:"tables,omitempty"`
}

func (a *app) status(ctx context.Context, f statusFlags) error {
	var c config.Config
	if a.configFile != "" {
		var err error
		if c, err = a.loadConfig(); err != nil {
			return err
		}
	}
	configured := a.configFile != ""
	polled := c.Source.Mode == config.ModePolling
	if configured && f.addr == "" && c.Admin.Listen == "" && !polled {
		return a.offline(ctx, f, c, errors.New("admin.listen is empty, so that a connector that runs cannot be asked: this is what Kafka and the database have"))
	}
	addr, err := f.address(c, configured)
	if err != nil {
		return &exitError{exitUsage, err}
	}
	body, err := askStatus(ctx, addr, c.Admin.Token.Reveal())
	var unreachable *unreachableError
	if errors.As(err, &unreachable) && configured && f.addr == "" && !polled {
		return a.offline(ctx, f, c, err)
	}
	if err != nil {
		return err
	}
	var s shownStatus
	if err := json.Unmarshal(body, &s); err != nil {
		return fmt.Errorf("read the answer of %s: %w (is that walrelay's admin.listen?)", addr, err)
	}
	if configured && f.addr == "" && s.Name != c.Name {
		err := fmt.Errorf("at %s connector %s answers, and not %s: give each an admin.listen of its own; --addr shows whoever is there", addr, s.Name, c.Name)
		if polled {
			return err
		}
		return a.offline(ctx, f, c, err)
	}
	if f.output.value == "json" {
		_, err := a.stdout.Write(body)
		return err
	}
	return s.write(a.stdout, time.Now())
}

// offline shows what is stored; that nothing answered is the error all the same.
func (a *app) offline(ctx context.Context, f statusFlags, c config.Config, cause error) error {
	o, err := relayOptions(c, zerolog.Nop(), prometheus.NewRegistry())
	if err != nil {
		return &exitError{exitUsage, err}
	}
	s := shownStatus{Status: relay.Offline(ctx, o)}
	if f.output.value == "json" {
		err = printJSON(a.stdout, s)
	} else {
		err = s.write(a.stdout, time.Now())
	}
	return cmp.Or(err, cause)
}

// address is where the connector answers.
func (f statusFlags) address(c config.Config, configured bool) (string, error) {
	addr := f.addr
	if addr == "" {
		listen := config.Default().Admin.Listen
		if configured {
			listen = c.Admin.Listen
		}
		host, port, err := net.SplitHostPort(listen)
		if err != nil {
			return "", errors.New("admin.listen is empty, so that the connector answers nowhere: give it an address, such as 127.0.0.1:8642")
		}
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			host = "127.0.0.1"
		}
		addr = net.JoinHostPort(host, port)
	}
	if !strings.Contains(addr, "://") {
		addr = "http://" + addr
	}
	u, err := url.Parse(addr)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", fmt.Errorf("--addr %s: give an address such as http://127.0.0.1:8642", f.addr)
	}
	return strings.TrimSuffix(u.String(), "/"), nil
}

// unreachableError is that nothing answers.
type unreachableError struct {
	addr string
	err  error
}

func (e *unreachableError) Error() string {
	return fmt.Sprintf("nothing answers at %s: the connector does not run, or its admin.listen is another address (%v)", e.addr, e.err)
}

func (e *unreachableError) Unwrap() error { return e.err }

func askStatus(ctx context.Context, addr, token string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, addr+"/status", nil)
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		var cause *url.Error
		if errors.As(err, &cause) {
			err = cause.Err // without the URL once more
		}
		return nil, &unreachableError{addr, err}
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end below
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the answer of %s: %w", addr, err)
	case resp.StatusCode == http.StatusUnauthorized:
		return nil, fmt.Errorf("%s wants its admin.token: give the connector's file with -c", addr)
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s answers %s: is that walrelay's admin.listen?", addr, resp.Status)
	}
	return body, nil
}

// write lays the status out for people: a line for each thing that there is.
func (s *shownStatus) write(w io.Writer, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(label, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", label, fmt.Sprintf(format, args...)) //nolint:errcheck // told by Flush
	}
	doing := string(s.Phase)
	if !s.Since.IsZero() {
		doing += " for " + roughly(now.Sub(s.Since))
	}
	line(cmp.Or(s.Name, "walrelay"), "%s", doing)
	switch {
	case s.Mode != "":
		line("lag", "%s (oldest pending row)", roughly(seconds(s.LagSeconds)))
	case s.Phase == phase.Stopped && s.Position != "" && s.Confirmed != "":
		line("lag", "%s", byteSize(s.LagBytes))
	case s.Phase == phase.Stopped:
	case s.Phase == phase.Standby:
		line("lag", "the instance that streams tells")
	case s.Phase != phase.Streaming && s.Phase != phase.Stopping:
		line("lag", "not known: nothing is delivered at the moment, and what is committed waits, for %s at the most", roughly(seconds(s.LagSeconds)))
	default:
		line("lag", "%s, %s; caught up: %s", byteSize(s.LagBytes), roughly(seconds(s.LagSeconds)), s.caughtUp())
		line("rates", "%s/s of WAL written, %s/s delivered, %.0f records/s", byteSize(int64(s.Produced)), byteSize(int64(s.Consumed)), s.RecordRate)
	}
	if s.Position != "" || s.Confirmed != "" {
		line("position", "%s in Kafka, %s confirmed to PostgreSQL", cmp.Or(s.Position, "none"), cmp.Or(s.Confirmed, "none"))
	}
	switch {
	case s.Mode != "":
		line("published", "%d records since the start", s.Records)
	case s.Phase != phase.Stopped:
		line("delivered", "%d records, %d transactions since the start", s.Records, s.Transactions)
	}
	if s.Slot != "" && s.Confirmed != "" {
		line("slot", "%s keeps %s of WAL", s.Slot, byteSize(s.RetainedWAL))
	}
	if r := s.Replay; r != nil {
		since := ""
		if r.OldestTime != nil {
			since = " (" + r.OldestTime.UTC().Format(time.RFC3339) + ")"
		}
		line("replay", "back to %s%s; %s keeps %s of WAL", r.OldestLSN, since, r.Slot, byteSize(r.Retained))
	}
	for _, o := range s.Outbox {
		line("outbox", "%s: %d rows pending, the oldest for %s", o.Table, o.Pending, roughly(seconds(o.OldestSeconds)))
	}
	s.writeSnapshot(line)
	for _, list := range []struct {
		label string
		texts []string
	}{{"waiting for", s.WaitingFor}, {"problem", s.Problems}, {"warning", s.Warnings}} {
		for _, text := range list.texts {
			line(list.label, "%s", text)
		}
	}
	return t.Flush()
}

// shownTables is how many unfinished tables fit on the screen.
const shownTables = 10

func (s *shownStatus) writeSnapshot(line func(label, format string, args ...any)) {
	n := s.Snapshot
	if n == nil || n.Done == n.Total {
		return
	}
	left := ""
	if n.Left != nil {
		left = ", " + roughly(seconds(*n.Left)) + " left"
	}
	all, more := n.Estimate, 0
	for _, t := range n.Tables {
		if t.Estimate < 0 {
			all = -1
		}
	}
	line("snapshot", "%d of %d tables read, %s, %.0f rows/s%s", n.Done, n.Total, rowsOf(n.Rows, all), n.Rate, left)
	for _, name := range slices.Sorted(maps.Keys(n.Tables)) {
		t := n.Tables[name]
		switch {
		case t.State == "done":
		case more < shownTables:
			more++
			line("", "%s: %s, %s", name, t.State, rowsOf(t.Rows, t.Estimate))
		default:
			more++
		}
	}
	if more > shownTables {
		line("", "and %d more", more-shownTables)
	}
}

// rowsOf leaves out an estimate that is not known, or was too low.
func rowsOf(rows, estimate int64) string {
	if estimate < rows {
		return fmt.Sprintf("%d rows", rows)
	}
	return fmt.Sprintf("%d of about %d rows", rows, estimate)
}

func (s *shownStatus) caughtUp() string {
	switch v := float64(s.CatchUp); {
	case math.IsInf(v, 0):
		return "never at these rates"
	case s.LagBytes == 0:
		return "yes"
	default:
		return "in " + roughly(seconds(v))
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// roughly prints a time with two figures' worth of units.
func roughly(d time.Duration) string {
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0f min", d.Minutes())
	case d < 48*time.Hour:
		return fmt.Sprintf("%.1f h", d.Hours())
	}
	return fmt.Sprintf("%.1f days", d.Hours()/24)
}

// byteSize prints bytes with the unit that leaves up to four figures.
func byteSize(n int64) string {
	v := float64(n)
	for _, unit := range []string{"B", "KiB", "MiB", "GiB"} {
		if math.Abs(v) < 1024 {
			return fmt.Sprintf("%.4g %s", v, unit)
		}
		v /= 1024
	}
	return fmt.Sprintf("%.4g TiB", v)
}

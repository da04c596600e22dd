package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/walrelay/walrelay/internal/demo"
)

// demoFlags are the flags of the command demo.
type demoFlags struct {
	rate      float64
	events    int
	duration  time.Duration
	killEvery time.Duration
	seed      uint64
	kafkaPort int
	listen    string
}

func newDemoCommand() *cobra.Command {
	var f demoFlags
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "See it work: a throw-away PostgreSQL, an embedded Kafka, a shop, the connector and a consumer",
		Long: `Starts everything in one process tree and prints what arrives in Kafka: a
throw-away PostgreSQL (fetched once, or the system's), an embedded Kafka, a small
shop that writes orders and outbox events, the connector, and a consumer. Needs
no Docker and leaves nothing behind.

On a terminal, k and Enter kills the connector with SIGKILL: nothing is lost or
doubled, and the summary at the end proves it (exit code 1 if not).`,
		Example: `  walrelay demo
  walrelay demo --rate 200 --kill-every 3s --duration 30s
  walrelay demo --events 20`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runDemo(cmd, f) },
	}
	flags := cmd.Flags()
	flags.Float64Var(&f.rate, "rate", 2, "transactions of the shop per second")
	flags.IntVar(&f.events, "events", 0, "end after `N` records; 0: go on until Ctrl-C")
	flags.DurationVar(&f.duration, "duration", 0, "end after this time; 0: go on until Ctrl-C")
	flags.DurationVar(&f.killEvery, "kill-every", 0, "kill the connector with SIGKILL this often; 0: never")
	flags.Uint64Var(&f.seed, "seed", 0, "repeat a run of the shop; 0: another one each time")
	flags.IntVar(&f.kafkaPort, "kafka-port", 0, "port of the embedded Kafka; 0: a free one")
	flags.StringVar(&f.listen, "listen", "127.0.0.1:8642", "address of the status page; if it is taken, a free port")
	return cmd
}

// validate gives every problem of the flags at once.
func (f demoFlags) validate() error {
	var errs []error
	if !(f.rate > 0 && f.rate <= 10_000) { // false for NaN, too
		errs = append(errs, fmt.Errorf("--rate %v: give a number above 0 and up to 10000", f.rate))
	}
	if f.events < 0 {
		errs = append(errs, fmt.Errorf("--events %d: give 0 or more", f.events))
	}
	if f.duration < 0 {
		errs = append(errs, fmt.Errorf("--duration %s: give 0 or more", f.duration))
	}
	if f.killEvery != 0 && f.killEvery < time.Second {
		errs = append(errs, fmt.Errorf("--kill-every %s: give 1s or more; the connector needs time to start", f.killEvery))
	}
	if f.kafkaPort < 0 || f.kafkaPort > 65535 {
		errs = append(errs, fmt.Errorf("--kafka-port %d: give a port, or 0 for a free one", f.kafkaPort))
	}
	return errors.Join(errs...)
}

func runDemo(cmd *cobra.Command, f demoFlags) error {
	if err := f.validate(); err != nil {
		return &exitError{exitUsage, err}
	}
	executable, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program's file, to run the connector from it: %w", err)
	}
	if f.seed == 0 {
		f.seed = rand.Uint64()
	}
	o := demo.Options{
		StartDatabase: startDemoDatabase,
		Connector:     []string{executable, "run", "--log-format", "console"},
		Screen:        newDemoScreen(cmd.OutOrStdout()),
		Rate:          f.rate,
		Seed:          f.seed,
		Events:        f.events,
		Duration:      f.duration,
		KillEvery:     f.killEvery,
		Listen:        f.listen,
		KafkaPort:     f.kafkaPort,
	}
	if in, ok := cmd.InOrStdin().(*os.File); ok && term.IsTerminal(int(in.Fd())) {
		o.Kill = watchKillKey(in)
	}
	return demo.Run(cmd.Context(), o)
}

// newDemoScreen gives a screen that uses colours and a live last line where out
// is a terminal that can show them, colours only without NO_COLOR
// (https://no-color.org).
func newDemoScreen(out io.Writer) *demo.Screen {
	file, ok := out.(*os.File)
	if !ok || !term.IsTerminal(int(file.Fd())) || os.Getenv("TERM") == "dumb" {
		return demo.NewScreen(out, nil, false)
	}
	width := func() int {
		if w, _, err := term.GetSize(int(file.Fd())); err == nil && w > 0 {
			return w
		}
		return 80
	}
	return demo.NewScreen(out, width, os.Getenv("NO_COLOR") == "")
}

// watchKillKey receives when a line that says k is typed. Its goroutine ends with
// the input or with the process: a read from a terminal cannot be called back.
func watchKillKey(in io.Reader) <-chan struct{} {
	keys := make(chan struct{})
	go func() {
		lines := bufio.NewScanner(in)
		for lines.Scan() {
			if strings.EqualFold(strings.TrimSpace(lines.Text()), "k") {
				keys <- struct{}{}
			}
		}
	}()
	return keys
}

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/walrelay/walrelay/internal/config"
)

// The exit codes, as scripts rely on them.
const (
	exitFailed     = 1 // at run time
	exitUsage      = 2 // flags or file
	exitDifference = 3 // found by verify or check
	exitRefused    = 4 // by the state of database or Kafka
)

// exitError gives an error its exit code. A command returns one where the code
// is not 1; everything else follows from where the error comes from.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

// app is what the commands share: the process's surroundings, and the flags
// that every command has.
type app struct {
	env            func(string) (string, bool)
	stdout, stderr io.Writer

	configFile string // -c, of the commands that have it
	logLevel   choice
	logFormat  choice

	// started tells whether a command began to run. cobra does not type its
	// errors, but all of those about flags and arguments come before.
	started bool
}

// addLogFlags defines the flags that override the file's log section.
func (a *app) addLogFlags(flags *pflag.FlagSet) {
	a.logLevel.choices = []string{"trace", "debug", "info", "warn", "error"}
	a.logFormat.choices = []string{config.LogJSON, config.LogConsole}
	flags.Var(&a.logLevel, "log-level", "least severe level to log: "+a.logLevel.Type()+" (overrides log.level)")
	flags.Var(&a.logFormat, "log-format", "form of the log on stderr: "+a.logFormat.Type()+" (overrides log.format)")
}

// addConfigFlag gives a command -c. Whether it is mandatory is loadConfig's to
// say, with a better text than cobra's.
func (a *app) addConfigFlag(flags *pflag.FlagSet) {
	flags.StringVarP(&a.configFile, "config", "c", "", "configuration `FILE`")
}

// loadConfig reads the file of -c and lays the flags over it.
func (a *app) loadConfig() (config.Config, error) {
	if a.configFile == "" {
		return config.Config{}, &exitError{exitUsage, errors.New("no configuration file: give one with -c FILE")}
	}
	c, err := config.Load(a.configFile, a.env)
	if err != nil {
		return config.Config{}, err
	}
	if a.logLevel.value != "" {
		c.Log.Level = a.logLevel.value
	}
	if a.logFormat.value != "" {
		c.Log.Format = a.logFormat.value
	}
	return c, nil
}

// loadWALConfig is loadConfig for a command that has no meaning with source.mode polling;
// instead says why, and what to do.
func (a *app) loadWALConfig(instead string) (config.Config, error) {
	c, err := a.loadConfig()
	if err == nil && c.Source.Mode == config.ModePolling {
		err = &exitError{exitUsage, errors.New("source.mode is polling, " + instead)}
	}
	return c, err
}

// watchStart makes every command of the tree note that it began to run.
func (a *app) watchStart(cmd *cobra.Command) {
	if runE := cmd.RunE; runE != nil {
		cmd.RunE = func(c *cobra.Command, args []string) error {
			a.started = true
			return runE(c, args)
		}
	}
	for _, sub := range cmd.Commands() {
		a.watchStart(sub)
	}
}

// exit prints err, if there is one, and returns the exit code for it. The usage
// is never dumped: it would push the message off the screen.
func (a *app) exit(cmd *cobra.Command, err error) int {
	if err == nil {
		return 0
	}
	var problems *config.Problems
	if errors.As(err, &problems) {
		list := problems.List()
		noun := "problems"
		if len(list) == 1 {
			noun = "problem"
		}
		_, _ = fmt.Fprintf(a.stderr, "walrelay: the configuration %s has %d %s:\n", a.configFile, len(list), noun)
		for _, p := range list {
			_, _ = fmt.Fprintf(a.stderr, "  %s\n", p)
		}
		return exitUsage
	}
	_, _ = fmt.Fprintf(a.stderr, "walrelay: %v\n", err)
	var coded *exitError
	isCoded := errors.As(err, &coded)
	if !a.started || isCoded && coded.code == exitUsage {
		_, _ = fmt.Fprintf(a.stderr, "See '%s --help'.\n", cmd.CommandPath())
		return exitUsage
	}
	if isCoded {
		return coded.code
	}
	return exitFailed
}

// unknownCommand refuses arguments of a command that only has commands below
// it, and names what may have been meant.
func unknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	text := fmt.Sprintf("unknown command %q", args[0])
	cmd.SuggestionsMinimumDistance = 2
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		text += "; did you mean " + strings.Join(near, " or ") + "?"
	}
	return errors.New(text)
}

// choice is a flag with a few possible values; empty means not given.
type choice struct {
	value   string
	choices []string
}

func (c *choice) String() string { return c.value }
func (c *choice) Type() string   { return strings.Join(c.choices, "|") }

// Set refuses everything but the choices.
func (c *choice) Set(s string) error {
	for _, x := range c.choices {
		if s == x {
			c.value = s
			return nil
		}
	}
	return fmt.Errorf("must be one of %s", strings.Join(c.choices, ", "))
}

// printJSON prints an answer for programs.
func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("print the answer: %w", err)
	}
	return nil
}

package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/rs/zerolog"

	"github.com/walrelay/walrelay/internal/config"
)

// newLogger builds the one logger of the process, from which each component
// gets its own.
func newLogger(c config.Config, stderr io.Writer) (zerolog.Logger, error) {
	level, err := zerolog.ParseLevel(c.Log.Level)
	if err != nil {
		return zerolog.Nop(), fmt.Errorf("log level %q: %w", c.Log.Level, err)
	}
	var w io.Writer = redactor{to: stderr, secrets: c.Redactor()}
	if c.Log.Format == config.LogConsole {
		w = zerolog.ConsoleWriter{Out: w, NoColor: !isTerminal(stderr)}
	}
	return zerolog.New(w).Level(level).With().Timestamp().Logger(), nil
}

// redactor strikes the configuration's secrets out of each log line. Invariant
// 9 is kept by types that do not print; this stands behind them, for errors
// made by drivers.
type redactor struct {
	to      io.Writer
	secrets *strings.Replacer
}

// Write writes the line in one piece, so that lines of several goroutines do
// not mix, and reports all of p as written: what was struck out is no short
// write.
func (r redactor) Write(p []byte) (int, error) {
	if _, err := io.WriteString(r.to, r.secrets.Replace(string(p))); err != nil {
		return 0, fmt.Errorf("write log: %w", err)
	}
	return len(p), nil
}

// isTerminal tells whether w is a terminal, where colours help.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

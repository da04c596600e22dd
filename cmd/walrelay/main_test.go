package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/internal/config"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"walrelay": main})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			example, err := os.ReadFile("../../deploy/walrelay.yaml")
			if err != nil {
				return fmt.Errorf("read example: %w", err)
			}
			return os.WriteFile(env.WorkDir+"/example.yaml", example, 0o600)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"code": code},
	})
}

// code runs "code N COMMAND…": COMMAND must end with exit code N. Testscript's
// own exec only tells zero from the rest.
func code(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N COMMAND…")
	}
	err := ts.Exec(args[1], args[2:]...)
	var coded interface{ ExitCode() int }
	got := 0
	if errors.As(err, &coded) {
		got = coded.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if fmt.Sprint(got) != args[0] {
		ts.Fatalf("exit code %d, want %s", got, args[0])
	}
}

func TestFirstSignalCancelsAndSecondAborts(t *testing.T) {
	signals := make(chan os.Signal, 2)
	done := make(chan int)
	ctx, cancel := context.WithCancelCause(t.Context())
	var stderr bytes.Buffer
	result := make(chan int)
	go func() { result <- supervise(signals, cancel, done, &stderr) }()
	signals <- syscall.SIGTERM
	<-ctx.Done()
	if got := fmt.Sprint(context.Cause(ctx)); got != "stopped by signal: terminated" {
		t.Errorf("cause is %q", got)
	}
	signals <- syscall.SIGINT
	if got := <-result; got != 1 || !strings.Contains(stderr.String(), "aborted by a second signal") {
		t.Errorf("exit code %d, stderr %q", got, &stderr)
	}
}

func TestACommandThatFinishesAfterTheFirstSignalGivesItsCode(t *testing.T) {
	signals := make(chan os.Signal, 2)
	done := make(chan int)
	ctx, cancel := context.WithCancelCause(t.Context())
	result := make(chan int)
	go func() { result <- supervise(signals, cancel, done, &bytes.Buffer{}) }()
	signals <- syscall.SIGINT
	<-ctx.Done()
	done <- 0
	if got := <-result; got != 0 {
		t.Errorf("exit code %d", got)
	}
}

func TestExitCodes(t *testing.T) {
	badFile := func() error { _, err := config.Parse(nil, os.LookupEnv, os.ReadFile); return err }()
	for what, c := range map[string]struct {
		err     error
		started bool
		code    int
		stderr  string
	}{
		"nothing wrong":              {nil, true, 0, ""},
		"at run time":                {errors.New("read slot: gone"), true, exitFailed, "walrelay: read slot: gone\n"},
		"flags":                      {errors.New("unknown flag: --x"), false, exitUsage, "walrelay: unknown flag: --x\nSee 'walrelay --help'.\n"},
		"usage found by a command":   {&exitError{exitUsage, errors.New("x")}, true, exitUsage, "walrelay: x\nSee 'walrelay --help'.\n"},
		"the file":                   {badFile, true, exitUsage, "walrelay: the configuration f.yaml has 3 problems:\n  name: is missing"},
		"the file, wrapped":          {fmt.Errorf("reload: %w", badFile), true, exitUsage, "3 problems"},
		"a difference":               {&exitError{exitDifference, errors.New("x")}, true, exitDifference, "walrelay: x\n"},
		"refused":                    {&exitError{exitRefused, errors.New("x")}, true, exitRefused, "walrelay: x\n"},
		"refused, wrapped":           {fmt.Errorf("start: %w", &exitError{exitRefused, errors.New("x")}), true, exitRefused, "walrelay: start: x\n"},
		"its error can be asked for": {&exitError{exitRefused, context.Canceled}, true, exitRefused, "canceled"},
	} {
		var stderr bytes.Buffer
		a := &app{stderr: &stderr, started: c.started, configFile: "f.yaml"}
		if got := a.exit(&cobra.Command{Use: "walrelay"}, c.err); got != c.code || !strings.Contains(stderr.String(), c.stderr) {
			t.Errorf("%s: exit code %d, stderr %q", what, got, &stderr)
		}
	}
	if !errors.Is(&exitError{exitRefused, context.Canceled}, context.Canceled) {
		t.Error("exitError hides its error")
	}
}

func TestLogLinesHaveNoSecrets(t *testing.T) {
	c := config.Default()
	c.Source.DSN = config.NewDSN("postgres://u:s3cr3t-pg@h/d")
	for format, want := range map[string]string{config.LogJSON: `"error":"cannot parse postgres://u:***@h"`, config.LogConsole: "cannot parse postgres://u:***@h"} {
		c.Log.Format = format
		var out bytes.Buffer
		log, err := newLogger(c, &out)
		if err != nil {
			t.Fatal(err)
		}
		log.Debug().Msg("below the level")
		log.Error().Err(errors.New("cannot parse postgres://u:s3cr3t-pg@h")).Msg("a driver's error")
		if s := out.String(); strings.Contains(s, "s3cr3t") || !strings.Contains(s, want) || strings.Contains(s, "below") || strings.Contains(s, "\x1b[") {
			t.Errorf("%s: %q", format, s)
		}
		if log.GetLevel() != zerolog.InfoLevel {
			t.Errorf("level is %v", log.GetLevel())
		}
	}
}

func TestVersionLine(t *testing.T) {
	info := &debug.BuildInfo{GoVersion: "go1.26.8", Settings: []debug.BuildSetting{
		{Key: "vcs.revision", Value: "0123456789abcdef"}, {Key: "vcs.modified", Value: "true"}, {Key: "GOOS", Value: "linux"}, {Key: "GOARCH", Value: "arm64"},
	}}
	for _, c := range []struct {
		version string
		info    *debug.BuildInfo
		want    string
	}{
		{"v1.2.3", info, "walrelay v1.2.3 (commit 0123456789ab with local changes, go1.26.8, linux/arm64)"},
		{"", &debug.BuildInfo{Main: debug.Module{Version: "v1.0.0"}, GoVersion: "go1.26.8"}, "walrelay v1.0.0 (go1.26.8)"},
		{"", nil, "walrelay (devel)"},
	} {
		if got := versionLine(c.version, c.info); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

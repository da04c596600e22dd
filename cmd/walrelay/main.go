// Command walrelay streams PostgreSQL's logical replication into Kafka, exactly
// once. This package is the command line and nothing more: flags, texts and exit
// codes.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/internal/killpoint"
)

func main() {
	if err := killpoint.Arm(os.Getenv(killpoint.Env)); err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "walrelay: %v\n", err)
		os.Exit(exitUsage)
	}
	os.Exit(supervised())
}

// supervised runs the command line under the two signals and gives the exit code.
func supervised() int {
	// Room for both signals: the second must not be lost while the first is
	// being looked at.
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	ctx, cancel := context.WithCancelCause(context.Background())
	done := make(chan int, 1)
	go func() { done <- run(ctx, os.Args[1:], os.Stdout, os.Stderr) }()
	return supervise(signals, cancel, done, os.Stderr)
}

// supervise waits for the exit code. The first signal asks the command to
// finish, by cancelling its context; the second one gives up on that and is exit
// code 1 at once, because a batch may be lost in flight (it is not: the next
// start resumes from the checkpoint).
func supervise(signals <-chan os.Signal, cancel context.CancelCauseFunc, done <-chan int, stderr io.Writer) int {
	asked := false
	for {
		select {
		case code := <-done:
			return code
		case s := <-signals:
			if asked {
				_, _ = fmt.Fprintf(stderr, "walrelay: aborted by a second signal (%v); the next start resumes from the checkpoint\n", s)
				return exitFailed
			}
			asked = true
			cancel(fmt.Errorf("stopped by signal: %v", s))
		}
	}
}

// run executes one command line and returns the exit code. It touches nothing
// of the process but what it is given and the environment.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	a := &app{env: os.LookupEnv, stdout: stdout, stderr: stderr}
	root := newRootCommand(a)
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	return a.exit(cmd, err)
}

// newRootCommand builds the tree of commands; a new one is a line here.
func newRootCommand(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "walrelay",
		Short: "Streams PostgreSQL's logical replication into Kafka, exactly once",
		Args:  unknownCommand,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },

		// Errors are printed by app.exit, in one place and one form.
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.CompletionOptions.DisableDefaultCmd = true // completion.go has ours
	a.addLogFlags(root.PersistentFlags())
	root.AddCommand(
		newRunCommand(a),
		newStatusCommand(a),
		newSnapshotCommand(a),
		newOutboxCommand(a),
		newVerifyCommand(a),
		newReplayCommand(a),
		newCheckpointCommand(a),
		newSlotCommand(a),
		newDemoCommand(),
		newConfigCommand(a),
		newVersionCommand(),
		newCompletionCommand(),
	)
	a.watchStart(root)
	return root
}

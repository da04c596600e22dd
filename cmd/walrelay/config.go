package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/internal/config"
)

// newConfigCommand is config print and config schema.
func newConfigCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show the effective configuration, or its schema",
		Args:  unknownCommand,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	a.addConfigFlag(cmd.PersistentFlags())
	cmd.AddCommand(&cobra.Command{
		Use:   "print -c FILE",
		Short: "Print the effective configuration, defaults included, secrets masked",
		Long: "Reads FILE as every command does, reports all that is wrong with it (exit 2),\n" +
			"and otherwise prints what holds: defaults filled in, references resolved,\n" +
			"secrets masked. No connection is made.",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			c, err := a.loadConfig()
			if err != nil {
				return err
			}
			return c.Print(a.stdout)
		},
	}, &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of the configuration file, for editors",
		Long: "Prints the JSON Schema (draft 2020-12) of the configuration file. With the\n" +
			"YAML language server, save it and begin the file with\n" +
			"  # yaml-language-server: $schema=./walrelay.schema.json",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if _, err := a.stdout.Write(config.Schema()); err != nil {
				return fmt.Errorf("print schema: %w", err)
			}
			return nil
		},
	})
	return cmd
}

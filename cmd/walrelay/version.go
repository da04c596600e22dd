package main

import (
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the release build: -ldflags "-X main.version=v1.2.3".
// Without it the module's version tells, as go install leaves it.
var version string

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print version, commit and Go version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			info, _ := debug.ReadBuildInfo()
			if _, err := fmt.Fprintln(cmd.OutOrStdout(), versionLine(version, info)); err != nil {
				return fmt.Errorf("print version: %w", err)
			}
			return nil
		},
	}
}

// versionLine is "walrelay VERSION (commit COMMIT, GO VERSION, OS/ARCH)". What
// the build did not record is left out rather than made up.
func versionLine(version string, info *debug.BuildInfo) string {
	if info == nil {
		info = &debug.BuildInfo{}
	}
	if version == "" {
		version = info.Main.Version
	}
	if version == "" {
		version = "(devel)"
	}
	settings := make(map[string]string)
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	line := "walrelay " + version
	var facts string
	if commit := settings["vcs.revision"]; commit != "" {
		facts = ", commit " + commit[:min(len(commit), 12)]
		if settings["vcs.modified"] == "true" {
			facts += " with local changes"
		}
	}
	if info.GoVersion != "" {
		facts += ", " + info.GoVersion
	}
	if settings["GOOS"] != "" {
		facts += ", " + settings["GOOS"] + "/" + settings["GOARCH"]
	}
	if facts != "" {
		line += " (" + facts[2:] + ")"
	}
	return line
}

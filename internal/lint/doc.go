// Package lint holds the project's rules that no general linter knows, as tests: which package may import which, and
// what a test or a committed file must not contain. They look at whatever packages there are, so a new one is held to
// them from its first commit.
package lint

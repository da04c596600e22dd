// Package e2e holds the tests that run the built binary against real servers: the
// seeded random workload under a nemesis, and a kill at each numbered step of a
// delivery. What they need of the world is the interface stand, in stand_test.go.
package e2e

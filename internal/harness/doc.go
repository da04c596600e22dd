// Package harness gives tests the real parts around walrelay: PostgreSQL servers, a Kafka (in-process fake or real
// brokers), the walrelay binary as a process, and proxies that cut, hold and swallow the connections between them.
//
// One suite runs against all of them; three variables choose:
//
//	WALRELAY_TEST_PG      major versions, e.g. 18 (default), 14,16 or all
//	WALRELAY_TEST_KAFKA   kfake (default), kafka (real brokers, started here), or host:port[,host:port] of running ones
//	WALRELAY_TEST_BINARY  a walrelay to test instead of building one; WALRELAY_TEST_RACE=1 builds with the race detector
//
// Nothing is skipped here: what a test asks for and this machine cannot give fails the test with one line that says
// what to install.
//
// Servers are shared within a test binary and databases, Kafkas' names and processes are the test's own. A package that
// uses the harness hands its TestMain to Main, which closes the shared servers at the end. They also end when the test
// binary is killed, and a small shell that watches for that removes their files.
package harness

// Package cdctest decides whether a log of records is right: it holds the
// validators that every end-to-end run ends with, the random workload whose truth
// they compare with, and the nemesis that disturbs the run.
//
// It is an oracle, and so shares no code with what it judges: keys, values,
// partitions and folds are worked out here a second time, from the documented
// record format. Only the LSN and the form of the header "position" are taken from
// package checkpoint.
//
// Validators are pure: they take a Log (and a Truth) and return every Violation
// they find, each with the place in the log that shows it. No violation means
// right; an error that stops the reading is never turned into "no violation".
package cdctest

// Package verify compares topics with tables: it reads a table under one MVCC snapshot,
// folds the records of its topic that belong to transactions which that snapshot sees,
// and reports every key that is not the same on both sides. It writes nothing but
// temporary files, works beside the running connector, and takes bounded memory.
package verify

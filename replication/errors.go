package replication

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
)

// What a failed connection is about, where a retry cannot help: see IsConfiguration.
// Everything else (refused, timed out, server starting up) is worth a retry.
var (
	ErrDSN         = errors.New("source.dsn is not a valid connection string")
	ErrAuth        = errors.New("the database does not let this role in")
	ErrNoDatabase  = errors.New("the database does not exist")
	ErrHostUnknown = errors.New("the database host is unknown")
	ErrTLS         = errors.New("the TLS connection to the database is not possible")
)

// IsConfiguration tells whether a connection failed for something that is written in
// the configuration, so that a start ends (exit 1) instead of being retried. On a
// connection that has worked before, callers retry all the same: a name server may
// forget a host, and a password may be changed first here and then there.
func IsConfiguration(err error) bool {
	for _, kind := range []error{ErrDSN, ErrAuth, ErrNoDatabase, ErrHostUnknown, ErrTLS} {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}

// SQLSTATE codes that this package tells apart (PostgreSQL documentation, "Error
// Codes").
const (
	codeInvalidPassword       = "28P01"
	codeInvalidAuthorization  = "28000" // pg_hba.conf, unknown role
	codeInvalidCatalogName    = "3D000"
	codeInsufficientPrivilege = "42501"
	codeUndefinedObject       = "42704"
	codeObjectInUse           = "55006"
	codeLockNotAvailable      = "55P03"
	codeSerializationFailure  = "40001"
	codeConfigurationLimit    = "53400"
	codeQueryCanceled         = "57014"
	codeObjectNotReady        = "55000" // object_not_in_prerequisite_state
	codeAdminShutdown         = "57P01"
	codeCannotConnectNow      = "57P03"
)

func hasCode(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

// IsLocked tells that somebody held a lock for longer than was waited for it.
func IsLocked(err error) bool { return hasCode(err, codeLockNotAvailable) }

// IsSlotActive tells whether the server refused a slot because another connection
// holds it: the standby's signal to wait and try again.
func IsSlotActive(err error) bool { return hasCode(err, codeObjectInUse) }

// connectError is a failed connection without the configuration that pgconn's own
// error carries, password included.
type connectError struct {
	kind  error // one of the sentinels above; nil: worth a retry
	text  string
	cause error
}

func (e *connectError) Error() string { return e.text }

func (e *connectError) Unwrap() []error {
	if e.kind == nil {
		return []error{e.cause}
	}
	return []error{e.kind, e.cause}
}

const dsnAdvice = "percent-encode the special characters of user and password (@ is %40, / is %2F, : is %3A, ? is %3F, # is %23, % is %25), " +
	"as in postgres://user:password@host:5432/database?sslmode=require, and check the names and values of its parameters"

// dsnError keeps nothing of pgconn's error but a file that could not be read: its
// masking of passwords is best effort, and a DSN that cannot be parsed may hide one
// anywhere.
func dsnError(err error) error {
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		return fmt.Errorf("%w: %s %s: %w; correct the path or the file's rights", ErrDSN, pathErr.Op, pathErr.Path, pathErr.Err)
	}
	return fmt.Errorf("%w: %s", ErrDSN, dsnAdvice)
}

// connectFailure turns pgconn's error into one that says what to do and keeps no
// secret: user, database and addresses are all that it names.
func connectFailure(cfg *pgconn.Config, err error) error {
	var connErr *pgconn.ConnectError
	cause := err
	if errors.As(err, &connErr) {
		cause = connErr.Unwrap()
	}
	advice, kind := classifyConnect(cause)
	details := oneLine(cause.Error())
	text := fmt.Sprintf("connect to PostgreSQL as %q, database %q: %s", cfg.User, cfg.Database, details)
	if kind != nil {
		text = fmt.Sprintf("%s: %s", kind, text)
	}
	if advice != "" {
		text += "; " + advice
	}
	return &connectError{kind: kind, text: text, cause: cause}
}

// oneLine joins the lines of an error that tells of several attempts, each once: the
// attempts with and without TLS often fail alike.
func oneLine(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" && !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, ", ")
}

// classifyConnect gives the sentinel that err is about, nil for none, and what to do.
func classifyConnect(err error) (advice string, kind error) {
	if errors.Is(err, context.Canceled) {
		return "", nil
	}
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		switch pgErr.Code {
		case codeInvalidPassword, codeInvalidAuthorization:
			return "check user and password in source.dsn, and the server's pg_hba.conf", ErrAuth
		case codeInsufficientPrivilege:
			return "GRANT CONNECT ON DATABASE to the role of source.dsn", ErrAuth
		case codeInvalidCatalogName:
			return "correct the database in source.dsn, or create it", ErrNoDatabase
		}
		return "", nil
	}
	// One of several hosts that is unknown is no mistake as long as another one may
	// answer: only when nothing but name look-ups failed.
	var opErr *net.OpError
	var dnsErr *net.DNSError
	if errors.As(err, &dnsErr) && dnsErr.IsNotFound && !errors.As(err, &opErr) {
		return "correct the host in source.dsn", ErrHostUnknown
	}
	if isTLSFailure(err) {
		return "check sslmode, sslrootcert and the server's certificate", ErrTLS
	}
	return "", nil
}

func isTLSFailure(err error) bool {
	var (
		unknown  x509.UnknownAuthorityError
		hostname x509.HostnameError
		invalid  x509.CertificateInvalidError
		verify   *tls.CertificateVerificationError
	)
	return errors.As(err, &unknown) || errors.As(err, &hostname) || errors.As(err, &invalid) || errors.As(err, &verify) ||
		strings.Contains(err.Error(), "server refused TLS connection")
}

// noReplicationRight recognises the refusal of a walsender for a role without the
// REPLICATION attribute. A missing CONNECT right has the same code but is raised in
// CheckMyDatabase; unlike the message, the routine is never translated.
func noReplicationRight(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == codeInsufficientPrivilege && pgErr.Routine == "InitPostgres"
}

func refuseReplicationRight(role string, err error) error {
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("role %q may not use replication slots", role),
		Remedy: "as a superuser: ALTER ROLE " + quote(role) + " REPLICATION (on a managed service grant its replication role, such as rds_replication)",
		Err:    err,
	}
}

// SlotRight gives a *checkpoint.Refusal for a server's answer that the role may not use
// replication slots, and other errors as they are.
func SlotRight(role string, err error) error {
	if hasCode(err, codeInsufficientPrivilege) {
		return refuseReplicationRight(role, err)
	}
	return err
}

// IsServer tells whether an error is the server's answer.
func IsServer(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr)
}

// IsTimeout tells whether a connection was given up because it took too long.
func IsTimeout(err error) bool { return pgconn.Timeout(err) }

// DecodingFailed tells that the server cannot decode the WAL at this place, so that
// every retry meets the same error: it comes from within the output plugin, or from where
// the server hands a change's table to that (a file that it cannot map to a table), and it is
// about data and not about the connection or the server's resources.
func DecodingFailed(err error) bool {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || !strings.Contains(pgErr.Where, "output plugin") && pgErr.Routine != "ReorderBufferProcessTXN" {
		return false
	}
	switch pgErr.Code[:min(2, len(pgErr.Code))] {
	case "57", "53", "08", "58": // operator intervention, resources, connection, I/O
		return false
	}
	return true
}

// DecodingError is what DecodingFailed tells, with the place. It quotes nothing of the
// row.
type DecodingError struct {
	Slot      string
	Confirmed checkpoint.LSN // where the stream would go on from
	// Txn is the source transaction that cannot be decoded; zero where the server ended the
	// stream before it began to send it.
	Txn Transaction
	Err error
}

// Error says where, what is at risk and what can be done.
func (e *DecodingError) Error() string {
	where, behind := "", "L, an LSN behind that transaction's commit (pg_current_wal_lsn() is, and skips all that is committed by now)"
	var pgErr *pgconn.PgError
	if errors.As(e.Err, &pgErr) {
		where = " (" + pgErr.Where + ")"
	}
	txn := ""
	if e.Txn.CommitLSN != 0 {
		txn = fmt.Sprintf(", in transaction %d with commit LSN %s", uint32(e.Txn.XID), e.Txn.CommitLSN)
		// A server that is asked to begin within a commit record leaves that transaction out.
		behind = (e.Txn.CommitLSN + 1).String()
	}
	return fmt.Sprintf("PostgreSQL cannot decode a change of slot %s behind %s%s: %v%s; at risk: nothing committed after it is delivered, and the WAL from there is kept; "+
		"to resolve: mend the cause if the server's log names one, or skip that transaction for ever: stop walrelay, then walrelay checkpoint set -c FILE --lsn %s; walrelay snapshot -c FILE --table T reads its rows as they are now",
		e.Slot, e.Confirmed, txn, e.Err, where, behind)
}

// Unwrap gives the server's error.
func (e *DecodingError) Unwrap() error { return e.Err }

// IsShutdown tells that the server is shutting down: it takes no connections any more,
// or has ended this one.
func IsShutdown(err error) bool {
	return hasCode(err, codeCannotConnectNow) || hasCode(err, codeAdminShutdown)
}

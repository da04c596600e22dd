package snapshot

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/checkpoint"
)

// SQLSTATE codes that are told apart (PostgreSQL documentation, "Error Codes").
const (
	codeInsufficientPrivilege = "42501"
	codeUndefinedTable        = "42P01"
	codeWrongObjectType       = "42809"
	codeInvalidSchemaName     = "3F000"
	codeLockNotAvailable      = "55P03"
	codeQueryCanceled         = "57014"
	codeNotInPrerequisite     = "55000"
	codeObjectInUse           = "55006"
)

func codeOf(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// isPassing tells whether an error goes away by itself, so that the order is carried out
// again: everything about connections, resources, operators and other sessions. What is
// left is about the query, our role or damaged data.
func isPassing(err error) bool {
	code := codeOf(err)
	switch {
	case code == "": // not from the server: the connection is lost
		return !errors.Is(err, errRow)
	case code == "XX001" || code == "XX002": // damaged data, a damaged index
		return false
	case code == codeLockNotAvailable || code == codeObjectInUse || code == codeNotInPrerequisite: // the last: a standby
		return true
	}
	switch code[:2] {
	case "08", "25", "40", "53", "57", "58", "XX": // connection, transaction state, rollback, resources, operator, system, internal
		return true
	}
	return false
}

// refuse words an error that does not pass.
func refuse(err error, table place, role string, conditional bool) error {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return fmt.Errorf("read %s: %w", table, err)
	}
	switch {
	case isRowSecurity(pgErr):
		return refuseRowSecurity(table, role, err)
	case pgErr.Code == codeInsufficientPrivilege:
		return refuseSelect(table, role, err)
	}
	r := &checkpoint.Refusal{
		What:   "PostgreSQL cannot read the rows of " + table.String(),
		Risk:   "its rows are not complete in Kafka until they can be read",
		Remedy: "mend the cause that the server's error names",
		Err:    err,
	}
	if conditional {
		r.Remedy = "correct the condition of the snapshot's request, or the mark columns of the outbox, if the server's error is about it; else mend the cause that it names"
	}
	return r
}

// isRowSecurity recognises the error by who raised it: the message is translated.
func isRowSecurity(err *pgconn.PgError) bool {
	return err.Code == codeInsufficientPrivilege && (err.Routine == "check_enable_rls" || strings.Contains(err.Message, "row-level security"))
}

// Access says which tables our role cannot read all rows of, and why. The lock that a read
// takes needs the right on the whole table; on some of its columns is not enough.
func Access(ctx context.Context, conn *pgx.Conn, oids []uint32) (map[uint32]error, error) {
	rows, err := conn.Query(ctx, `
SELECT c.oid, n.nspname::text, c.relname::text, c.relkind = 'p', current_user::text,
       has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'), row_security_active(c.oid)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = ANY($1)`, oids)
	if err != nil {
		return nil, fmt.Errorf("read privileges on tables: %w", err)
	}
	refused := map[uint32]error{}
	var (
		oid               uint32
		at                place
		role              string
		readable, secured bool
	)
	_, err = pgx.ForEachRow(rows, []any{&oid, &at.schema, &at.name, &at.partitioned, &role, &readable, &secured}, func() error {
		switch {
		case !readable:
			refused[oid] = refuseSelect(at, role, nil)
		case secured:
			refused[oid] = refuseRowSecurity(at, role, nil)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read privileges on tables: %w", err)
	}
	return refused, nil
}

func refuseRowSecurity(table place, role string, err error) error {
	return &checkpoint.Refusal{
		What: fmt.Sprintf("query would be affected by row-level security policy for table %q: it hides rows of %s from role %s", table.name, table, quote(role)),
		Risk: "a snapshot would lack rows that the stream sends",
		Remedy: fmt.Sprintf("as a superuser: ALTER ROLE %s BYPASSRLS; or take the table out of the snapshot (snapshot.exclude), or ALTER TABLE %s DISABLE ROW LEVEL SECURITY",
			quote(role), table.sql()),
		Err: err,
	}
}

func refuseSelect(table place, role string, err error) error {
	return &checkpoint.Refusal{
		What: "role " + quote(role) + " may not read " + table.String(),
		Risk: "its rows cannot be brought to Kafka",
		Remedy: fmt.Sprintf(`GRANT SELECT ON %s TO %s (on the whole table, since the read locks it), and GRANT USAGE ON SCHEMA %s TO %s if that is missing too`,
			table.sql(), quote(role), quote(table.schema), quote(role)),
		Err: err,
	}
}

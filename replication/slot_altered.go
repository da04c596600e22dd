package replication

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// While a slot is created PostgreSQL (14 to 18, snapbuild.c) does not notice what commits
// between its first two looks at the running transactions. A table that is altered, rewritten
// or truncated then is decoded, for a while, as it was before: rows lack the new column, and
// nothing says so, or a file cannot be mapped to a table and the stream ends for ever. So a
// creation that a change of the catalog fell into is thrown away, and made again: nothing has
// been read from the slot yet.

// createTries is how often the slot is created at most before the start is made again.
const createTries = 5

// creationMemory is logical_decoding_work_mem of the connection that creates a slot, in kB.
// PostgreSQL 18.3 crashes, all of it, when a larger transaction with a subtransaction is
// rolled back meanwhile: pgoutput gets a stream abort that it is not ready for. What is held
// are only transactions that began during the creation and are open still.
const creationMemory = 512 << 10

// prepareCreation sets up the connection that will create a slot and gives the first
// transaction id that is not given out yet, as text.
func prepareCreation(ctx context.Context, conn *pgx.Conn) (since string, err error) {
	rows, err := TextResults(ctx, conn,
		fmt.Sprintf(`SELECT pg_catalog.set_config(name, '%d', false) FROM pg_catalog.pg_settings
 WHERE name = 'logical_decoding_work_mem' AND setting::int8 < %[1]d AND pg_catalog.current_setting('server_version_num')::int >= 180000`, creationMemory),
		`SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::numeric % 4294967296`)
	if err != nil {
		return "", fmt.Errorf("prepare the creation of a slot: %w", err)
	}
	return string(rows[1][0][0]), nil
}

// alteredSince gives the tables of this database whose description was changed, by
// transactions that have committed, by a transaction id from since on.
func alteredSince(ctx context.Context, conn *pgx.Conn, since string) ([]string, error) {
	// age() counts back from the next transaction id. Negative, the xid lies more than two
	// thousand million transactions back, as none can lie ahead.
	young := func(alias string) string {
		return fmt.Sprintf("pg_catalog.age(%s.xmin) BETWEEN 0 AND pg_catalog.age('%s'::pg_catalog.xid)", alias, since)
	}
	rows, err := TextRows(ctx, conn, `
SELECT DISTINCT pg_catalog.format('%I.%I', n.nspname, c.relname)
  FROM (SELECT c.oid FROM pg_catalog.pg_class c WHERE `+young("c")+`
  UNION SELECT a.attrelid FROM pg_catalog.pg_attribute a WHERE `+young("a")+`
  UNION SELECT i.indrelid FROM pg_catalog.pg_index i WHERE (i.indisprimary OR i.indisreplident) AND `+young("i")+`
  UNION SELECT a.attrelid FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid WHERE `+young("t")+`
  UNION SELECT a.attrelid FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_enum e ON e.enumtypid = a.atttypid WHERE `+young("e")+`) altered
  JOIN pg_catalog.pg_class c ON c.oid = altered.oid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p', 'm') AND c.relpersistence = 'p' AND c.oid >= 16384
 ORDER BY 1`)
	if err != nil {
		return nil, fmt.Errorf("look for tables that were altered while the slot was created: %w", err)
	}
	tables := make([]string, len(rows))
	for i, row := range rows {
		tables[i] = string(row[0])
	}
	return tables, nil
}

// dropAltered drops the slot that was created just now where tables were altered since, or
// where that cannot be told.
func dropAltered(ctx context.Context, conn *pgx.Conn, slot, since string) (tables []string, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), importBudget)
	defer cancel()
	tables, err = alteredSince(ctx, conn, since)
	if err == nil && len(tables) == 0 {
		return nil, nil
	}
	if _, dropErr := TextRows(ctx, conn, "SELECT pg_catalog.pg_drop_replication_slot("+QuoteLiteral(slot)+")"); dropErr != nil {
		return nil, errors.Join(err, fmt.Errorf("drop slot %s: %w", slot, dropErr))
	}
	return tables, err
}

// AlteredError says that tables were altered whenever the slot was created. A later start
// may succeed.
type AlteredError struct {
	Slot   string
	Tables []string // of the last time
}

// Error names the tables, the risk and the remedy.
func (e *AlteredError) Error() string {
	return fmt.Sprintf("create slot %s: %d times in a row tables were altered or truncated meanwhile, the last time %s; at risk: PostgreSQL would decode their first changes by their old definition; "+
		"to resolve: pause what alters them until the slot is there, and end long transactions, which the creation waits for", e.Slot, createTries, strings.Join(e.Tables, ", "))
}

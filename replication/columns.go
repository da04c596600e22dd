package replication

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// UnsentColumns gives the columns of a table that the stream does not bring: those that
// the publication's column list leaves out, and generated ones, as far as the publication
// and the server do not send them. publication is "" for one that we make and that may not
// be there yet: it has no column list, and sends stored generated columns where the server
// can (PostgreSQL 18).
func UnsentColumns(ctx context.Context, conn *pgx.Conn, oid uint32, publication string) (columns []string, err error) {
	// attrs is there from PostgreSQL 15 on, and NULL (up to 16) where there is no list. As JSON
	// it is a list of numbers in one form or another.
	err = conn.QueryRow(ctx, `
SELECT coalesce(array_agg(a.attname::text ORDER BY a.attnum), '{}')
  FROM pg_catalog.pg_attribute a
  LEFT JOIN LATERAL (SELECT to_jsonb(t) ->> 'attrs' AS attrs FROM pg_catalog.pg_get_publication_tables($2::text) t
                      WHERE $2::text <> '' AND t.relid = $1::oid LIMIT 1) p ON true
 WHERE a.attrelid = $1::oid AND a.attnum > 0 AND NOT a.attisdropped
   AND CASE WHEN p.attrs IS NOT NULL THEN p.attrs !~ ('(^|[^0-9])' || a.attnum || '([^0-9]|$)')
            WHEN a.attgenerated = 's' AND $2::text = '' THEN current_setting('server_version_num')::int < 180000
            ELSE a.attgenerated <> '' END`, oid, publication).Scan(&columns)
	if err != nil {
		return nil, fmt.Errorf("read published columns: %w", err)
	}
	return columns, nil
}

package replication

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
)

const (
	// InsertSuffix makes the name of the second managed publication.
	InsertSuffix = "_insert"
	// maxIdentifier is NAMEDATALEN-1: PostgreSQL cuts longer names in silence, so that
	// two of our names could become one.
	maxIdentifier = 63
	// syncChunk bounds the tables altered in one transaction. Each takes a lock, and
	// the lock table holds about 6,400 with the default settings.
	syncChunk = 2000
	// syncLockTimeout bounds the wait for a table that a VACUUM FULL, a CREATE INDEX or
	// an ALTER TABLE holds, as the wait keeps the locks on the tables before it.
	syncLockTimeout = "30s"
	// shownNames bounds the tables named in one message.
	shownNames = 20
)

// PlanOptions is what the configuration says about publications.
type PlanOptions struct {
	Publication string
	// Match tells whether source.tables captures a table.
	Match func(schema, name string) bool
	// Outbox holds the outbox tables as schema.table; they are captured whatever
	// Match says.
	Outbox []string
	// KeylessInserts is keyless: inserts. source.keys changes nothing here: it gives
	// a record its key, but PostgreSQL a replica identity it does not.
	KeylessInserts bool
}

// Plan says which table belongs in which managed publication. The two never share a
// table: the server publishes what either of them does, and an update published
// without replica identity makes the application's UPDATE fail (SQLSTATE 55000).
type Plan struct {
	Publication       string
	InsertPublication string
	All               []Table // insert, update, delete, truncate
	Insert            []Table // insert only: outbox tables, and keyless ones
	Keyless           []Table // the part of Insert that loses its updates and deletes
	// InsertPending tells that the stream does not name InsertPublication yet. Until it
	// does, a table that has to move there stays in Publication too: the server sends
	// the union of both, and a table in the other one alone would not be sent at all.
	InsertPending bool
	// Warnings are for the log: what works now but may not for ever.
	Warnings []string
}

// NewPlan decides where each captured table goes. It is pure: a *checkpoint.Refusal,
// or several joined, comes before anything has been created.
func NewPlan(tables []Table, o PlanOptions) (Plan, error) {
	p := Plan{Publication: o.Publication, InsertPublication: o.Publication + InsertSuffix}
	var problems []error
	if len(p.InsertPublication) > maxIdentifier {
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("the publication name %q is longer than PostgreSQL's 63 bytes", p.InsertPublication),
			Remedy: fmt.Sprintf("set source.publication to a name of at most %d bytes", maxIdentifier-len(InsertSuffix)),
		})
	}
	missing := slices.Clone(o.Outbox)
	var refused []Table
	for _, t := range tables {
		isOutbox := slices.Contains(o.Outbox, t.String())
		switch {
		case isOutbox:
			missing = slices.DeleteFunc(missing, func(name string) bool { return name == t.String() })
			p.Insert = append(p.Insert, t)
		case !o.Match(t.Schema, t.Name):
		case t.Updatable:
			p.All = append(p.All, t)
			if t.Partitioned && t.Identity != IdentityDefault {
				p.Warnings = append(p.Warnings, fmt.Sprintf("partitions do not inherit the replica identity of %s: "+
					"a new partition needs its own before the application updates rows in it", t))
			}
		case o.KeylessInserts:
			p.Insert = append(p.Insert, t)
			p.Keyless = append(p.Keyless, t)
		default:
			refused = append(refused, t)
		}
	}
	if len(missing) > 0 {
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("outbox table %s does not exist in this database (as a logged table that is not a partition)", strings.Join(missing, ", ")),
			Remedy: "create it, or correct outbox.table (of a partitioned table name the root)",
		})
	}
	if len(refused) > 0 {
		problems = append(problems, refuseKeyless(refused))
	}
	if len(p.Keyless) > 0 {
		p.Warnings = append(p.Warnings, "updates and deletes of tables without a usable replica identity are not captured, only their inserts (source.keyless: inserts): "+
			names(p.Keyless, shownNames))
	}
	return p, errors.Join(problems...)
}

func refuseKeyless(tables []Table) error {
	var why []string
	for _, t := range tables[:min(len(tables), shownNames)] {
		why = append(why, fmt.Sprintf("%s (%s)", t, t.Obstacle))
	}
	if more := len(tables) - shownNames; more > 0 {
		why = append(why, fmt.Sprintf("%d more", more))
	}
	t := tables[0]
	return &checkpoint.Refusal{
		What: "tables without a usable replica identity: " + strings.Join(why, ", "),
		Risk: "once published, every UPDATE and DELETE that the application makes on them would fail (SQLSTATE 55000)",
		Remedy: fmt.Sprintf(`for each of them, exclude it in source.tables ("!%s"), or ALTER TABLE %s REPLICA IDENTITY FULL `+
			`(of a partitioned table each partition too), or set source.keyless: inserts (its updates and deletes are then not captured)`,
			t, pgx.Identifier{t.Schema, t.Name}.Sanitize()),
	}
}

// Publication is a publication as the catalog has it now.
type Publication struct {
	OID                              uint32
	Name                             string
	Owner                            string
	Owned                            bool // our role may alter it
	Insert, Update, Delete, Truncate bool
	ViaRoot                          bool
	AllTables                        bool
	// GeneratedStored tells that stored generated columns are published (18 and later).
	GeneratedStored bool
	Schemas         []string // FOR TABLES IN SCHEMA (15 and later), sorted
	Tables          []PublishedTable
}

// PublishedTable is a table that a publication names itself.
type PublishedTable struct {
	OID        uint32 `json:"oid"`
	Schema     string `json:"schema"`
	Name       string `json:"name"`
	Filter     bool   `json:"filter"`  // has a row filter (15 and later)
	ColumnList bool   `json:"columns"` // has a column list (15 and later)
}

// String gives schema.table, unquoted.
func (t PublishedTable) String() string { return t.Schema + "." + t.Name }

// publicationSQL reads through to_jsonb what only newer servers have: 15 added
// prqual, prattrs and pg_publication_namespace, 18 pubgencols.
const publicationSQL = `
SELECT p.oid, p.pubname::text, pg_catalog.pg_get_userbyid(p.pubowner)::text, pg_catalog.pg_has_role(p.pubowner, 'USAGE'),
       p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot, p.puballtables,
       coalesce(to_jsonb(p) ->> 'pubgencols' = 's', false),
       coalesce((SELECT jsonb_agg(jsonb_build_object('oid', c.oid::int8, 'schema', n.nspname, 'name', c.relname,
                   'filter', to_jsonb(pr) ->> 'prqual' IS NOT NULL,
                   'columns', to_jsonb(pr) ->> 'prattrs' IS NOT NULL) ORDER BY n.nspname, c.relname)
          FROM pg_catalog.pg_publication_rel pr
          JOIN pg_catalog.pg_class c ON c.oid = pr.prrelid
          JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
         WHERE pr.prpubid = p.oid), '[]')
  FROM pg_catalog.pg_publication p
 WHERE p.pubname = $1`

// ReadPublication reads a publication; found is false where there is none.
func ReadPublication(ctx context.Context, conn *pgx.Conn, name string) (p Publication, found bool, err error) {
	err = conn.QueryRow(ctx, publicationSQL, name).Scan(&p.OID, &p.Name, &p.Owner, &p.Owned,
		&p.Insert, &p.Update, &p.Delete, &p.Truncate, &p.ViaRoot, &p.AllTables, &p.GeneratedStored, &p.Tables)
	if errors.Is(err, pgx.ErrNoRows) {
		return Publication{}, false, nil
	}
	if err != nil {
		return Publication{}, false, fmt.Errorf("read publication %s: %w", name, err)
	}
	var version int
	if err := conn.QueryRow(ctx, "SELECT current_setting('server_version_num')::int").Scan(&version); err != nil {
		return Publication{}, false, fmt.Errorf("read server version: %w", err)
	}
	if version >= 150000 {
		err = conn.QueryRow(ctx, `SELECT coalesce(array_agg(n.nspname::text ORDER BY n.nspname), '{}')
  FROM pg_catalog.pg_publication_namespace pn JOIN pg_catalog.pg_namespace n ON n.oid = pn.pnnspid
 WHERE pn.pnpubid = $1`, p.OID).Scan(&p.Schemas)
		if err != nil {
			return Publication{}, false, fmt.Errorf("read publication %s: %w", name, err)
		}
	}
	return p, true, nil
}

// target is one managed publication: as it should be, and as it is.
type target struct {
	name       string
	insertOnly bool
	generated  bool // the server can publish stored generated columns
	want       []Table
	have       Publication
	exists     bool
}

// options is the WITH clause. Stored generated columns are published where the server
// can (18 and later): with REPLICA IDENTITY FULL it would otherwise make the
// application's UPDATE fail on a table that has one.
func (t target) options() string {
	publish := "insert, update, delete, truncate"
	if t.insertOnly {
		publish = "insert"
	}
	o := "(publish = '" + publish + "', publish_via_partition_root = true"
	if t.generated {
		o += ", publish_generated_columns = stored"
	}
	return o + ")"
}

func (t target) optionsDiffer() bool {
	h, all := t.have, !t.insertOnly
	return !h.Insert || h.Update != all || h.Delete != all || h.Truncate != all || !h.ViaRoot || h.GeneratedStored != t.generated
}

// stayNamed takes the drops out of todo that would leave a table in a publication alone
// that the stream does not name yet; the Sync of the session that names both does them.
func (p Plan) stayNamed(todo []move) []move {
	if !p.InsertPending {
		return todo
	}
	insert := map[uint32]bool{}
	for _, t := range p.Insert {
		insert[t.OID] = true
	}
	kept := todo[:0]
	for _, m := range todo {
		if m.from == p.Publication && insert[m.table.OID] {
			m.from = ""
		}
		if m.from != "" || m.to != "" {
			kept = append(kept, m)
		}
	}
	return kept
}

// move takes a table out of one publication, into another, or both at once.
type move struct {
	table    PublishedTable
	sql      string
	from, to string // publication names; empty: none
}

// moves compares the targets and gives what has to change, in the order of OIDs so
// that two instances cannot lock the same tables crosswise.
func moves(targets []target) []move {
	byOID := map[uint32]*move{}
	at := func(t PublishedTable) *move {
		m := byOID[t.OID]
		if m == nil {
			m = &move{table: t, sql: "ONLY " + pgx.Identifier{t.Schema, t.Name}.Sanitize()}
			byOID[t.OID] = m
		}
		return m
	}
	for _, tg := range targets {
		have, want := map[uint32]bool{}, map[uint32]bool{}
		for _, t := range tg.have.Tables {
			have[t.OID] = true
		}
		for _, t := range tg.want {
			want[t.OID] = true
			if !have[t.OID] {
				at(PublishedTable{OID: t.OID, Schema: t.Schema, Name: t.Name}).to = tg.name
			}
		}
		for _, t := range tg.have.Tables {
			if !want[t.OID] {
				at(t).from = tg.name
			}
		}
	}
	all := make([]move, 0, len(byOID))
	for _, m := range byOID {
		all = append(all, *m)
	}
	slices.SortFunc(all, func(a, b move) int { return cmp.Compare(a.table.OID, b.table.OID) })
	return all
}

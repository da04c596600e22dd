package replication

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
)

// Changes says what Sync did, for the log and for the snapshots that follow.
type Changes struct {
	Created []string         // publications made
	Altered []string         // publications whose options were set
	Added   []PublishedTable // not published by us before
	Removed []PublishedTable // not published by us any more
	Moved   []PublishedTable // from one of our publications to the other
}

// IsZero tells whether nothing had to change.
func (c Changes) IsZero() bool {
	return len(c.Created)+len(c.Altered)+len(c.Added)+len(c.Removed)+len(c.Moved) == 0
}

// Sync makes the two managed publications what the plan says: creates them, empty if
// need be, and adds, drops and moves tables. A table moves between the publications
// inside one transaction, so that no change falls between them. Where nothing differs,
// nothing is written and no right is needed.
//
// Everything is one transaction up to 2,000 tables, beyond that several; after an
// error between them another call goes on. Refusals come before the first change.
// Never call it with publication-mode: existing.
func Sync(ctx context.Context, conn *pgx.Conn, plan Plan) (Changes, error) {
	db, err := ReadDatabase(ctx, conn)
	if err != nil {
		return Changes{}, err
	}
	generated := db.Version >= 180000
	targets := []target{
		{name: plan.Publication, want: plan.All, generated: generated},
		{name: plan.InsertPublication, want: plan.Insert, generated: generated, insertOnly: true},
	}
	for i := range targets {
		t := &targets[i]
		if t.have, t.exists, err = ReadPublication(ctx, conn, t.name); err != nil {
			return Changes{}, err
		}
	}
	todo := plan.stayNamed(moves(targets))
	if err := verifySync(db, plan, targets, todo); err != nil {
		return Changes{}, err
	}
	return applySync(ctx, conn, targets, todo)
}

// verifySync refuses what cannot be made to work, before anything is changed.
func verifySync(db Database, plan Plan, targets []target, todo []move) error {
	var problems []error
	create := false
	for _, t := range targets {
		if !t.exists {
			create = true
			continue
		}
		touched := t.optionsDiffer() || slices.ContainsFunc(todo, func(m move) bool { return m.from == t.name || m.to == t.name })
		problems = append(problems, verifyManaged(t, touched, db.Role.Name)...)
	}
	if create && !db.Role.Create {
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("role %q may not create publications in database %q", db.Role.Name, db.Name),
			Remedy: fmt.Sprintf("GRANT CREATE ON DATABASE %s TO %s; or have the publication made by its tables' owner and set source.publication-mode: existing", quote(db.Name), quote(db.Role.Name)),
		})
	}
	if foreign := notOwned(plan, todo); len(foreign) > 0 {
		problems = append(problems, &checkpoint.Refusal{
			What: fmt.Sprintf("role %q does not own tables that have to be added to a publication: %s", db.Role.Name, names(foreign, shownNames)),
			Remedy: fmt.Sprintf("GRANT %s TO %s (the role that owns them), or exclude them in source.tables, or have the publication made by their owner and set source.publication-mode: existing",
				quote(foreign[0].Owner), quote(db.Role.Name)),
		})
	}
	return errors.Join(problems...)
}

// verifyManaged looks at a publication of ours that exists already: somebody may have
// made it, and differently from what managed can keep.
func verifyManaged(t target, touched bool, role string) (problems []error) {
	name := quote(t.name)
	if t.have.AllTables || len(t.have.Schemas) > 0 {
		what := "FOR ALL TABLES"
		if !t.have.AllTables {
			what = "FOR TABLES IN SCHEMA " + strings.Join(t.have.Schemas, ", ")
		}
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("publication %s is %s, so that its tables cannot be kept equal to source.tables", name, what),
			Remedy: "set source.publication-mode: existing to use it as it is, or source.publication to another name",
		})
	}
	var narrowed []string
	for _, p := range t.have.Tables {
		if p.Filter || p.ColumnList {
			narrowed = append(narrowed, p.String())
		}
	}
	if len(narrowed) > 0 {
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("publication %s has row filters or column lists: %s", name, strings.Join(narrowed, ", ")),
			Risk:   "the rows and columns outside of them would be missing without a word",
			Remedy: fmt.Sprintf("set source.publication-mode: existing if that is meant; otherwise ALTER PUBLICATION %s DROP TABLE …, walrelay adds them again", name),
		})
	}
	if touched && !t.have.Owned {
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("publication %s belongs to role %q and has to be altered, which role %q may not", name, t.have.Owner, role),
			Remedy: fmt.Sprintf("ALTER PUBLICATION %s OWNER TO %s, or GRANT %s TO %s, or set source.publication-mode: existing", name, quote(role), quote(t.have.Owner), quote(role)),
		})
	}
	return problems
}

// notOwned gives the tables to be added that our role may not add.
func notOwned(plan Plan, todo []move) []Table {
	adding := map[uint32]bool{}
	for _, m := range todo {
		if m.to != "" {
			adding[m.table.OID] = true
		}
	}
	var foreign []Table
	for _, t := range slices.Concat(plan.All, plan.Insert) {
		if adding[t.OID] && !t.Owned {
			foreign = append(foreign, t)
		}
	}
	return foreign
}

func applySync(ctx context.Context, conn *pgx.Conn, targets []target, todo []move) (Changes, error) {
	var (
		changes Changes
		head    []string
	)
	for _, t := range targets {
		switch {
		case !t.exists:
			head = append(head, "CREATE PUBLICATION "+quote(t.name)+" WITH "+t.options())
			changes.Created = append(changes.Created, t.name)
		case t.optionsDiffer():
			head = append(head, "ALTER PUBLICATION "+quote(t.name)+" SET "+t.options())
			changes.Altered = append(changes.Altered, t.name)
		}
	}
	if len(head)+len(todo) == 0 {
		return Changes{}, nil
	}
	// An insert-only publication that publishes updates so far has to lose its keyless
	// tables' updates before they matter, so options come first; both orders are safe
	// inside the one transaction.
	for first := true; first || len(todo) > 0; first = false {
		n := min(len(todo), syncChunk)
		statements := alterStatements(targets, todo[:n])
		if first {
			statements = append(head, statements...)
		}
		if err := runSync(ctx, conn, statements); err != nil {
			return Changes{}, err
		}
		for _, m := range todo[:n] {
			switch {
			case m.from != "" && m.to != "":
				changes.Moved = append(changes.Moved, m.table)
			case m.to != "":
				changes.Added = append(changes.Added, m.table)
			default:
				changes.Removed = append(changes.Removed, m.table)
			}
		}
		todo = todo[n:]
	}
	return changes, nil
}

// alterStatements drops before it adds, so that no table is in both publications even
// for the statements after it.
func alterStatements(targets []target, todo []move) []string {
	var drops, adds []string
	for _, t := range targets {
		var drop, add []string
		for _, m := range todo {
			if m.from == t.name {
				drop = append(drop, m.sql)
			}
			if m.to == t.name {
				add = append(add, m.sql)
			}
		}
		if len(drop) > 0 {
			drops = append(drops, "ALTER PUBLICATION "+quote(t.name)+" DROP TABLE "+strings.Join(drop, ", "))
		}
		if len(add) > 0 {
			adds = append(adds, "ALTER PUBLICATION "+quote(t.name)+" ADD TABLE "+strings.Join(add, ", "))
		}
	}
	return append(drops, adds...)
}

func runSync(ctx context.Context, conn *pgx.Conn, statements []string) error {
	// READ WRITE: the role may have default_transaction_read_only.
	err := pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		for _, s := range append([]string{"SET LOCAL lock_timeout = '" + syncLockTimeout + "'"}, statements...) {
			if _, err := tx.Exec(ctx, s); err != nil {
				return err
			}
		}
		return nil
	})
	switch {
	case err == nil:
		return nil
	case hasCode(err, codeLockNotAvailable):
		return fmt.Errorf("alter publications: a table is locked by another session (VACUUM, CREATE INDEX, ALTER TABLE) for more than %s, "+
			"see pg_blocking_pids() and pg_stat_activity; it is tried again: %w", syncLockTimeout, err)
	default:
		return fmt.Errorf("alter publications: %w", err)
	}
}

// Coverage compares an existing publication with the configuration.
type Coverage struct {
	Publication Publication
	// Missing are the configured tables, outbox tables included, that it does not publish.
	Missing []Table
	// MissingOutbox are configured outbox tables that do not exist at all.
	MissingOutbox []string
	// Keyless are published tables on which the application's UPDATE and DELETE fail
	// already, because the publication publishes them.
	Keyless []Table
	// ByLeaf are partitioned tables whose changes carry the names of their leaves,
	// because the publication does not publish via the root.
	ByLeaf []Table

	outbox []string // those of the configuration
}

// Cover reads how far an existing publication covers the configured tables. It changes
// nothing. A publication that does not exist is a *checkpoint.Refusal; what is missing
// is left to Refusal, because a running connector looks again every so often.
func Cover(ctx context.Context, conn *pgx.Conn, tables []Table, o PlanOptions) (Coverage, error) {
	pub, found, err := ReadPublication(ctx, conn, o.Publication)
	if err != nil {
		return Coverage{}, err
	}
	if !found {
		return Coverage{}, refuseNoPublication(o.Publication)
	}
	// A partitioned table counts as published when it is itself, or all its leaves are.
	rows, err := conn.Query(ctx, `
WITH published AS (SELECT DISTINCT t.relid FROM pg_catalog.pg_publication p, pg_catalog.pg_get_publication_tables(p.pubname) t WHERE p.oid = $1)
SELECT relid::oid FROM published
UNION
SELECT c.oid FROM pg_catalog.pg_class c
 WHERE c.relkind = 'p' AND NOT c.relispartition
   AND EXISTS (SELECT FROM pg_catalog.pg_partition_tree(c.oid) t WHERE t.isleaf AND t.relid <> c.oid)
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_partition_tree(c.oid) t
                    WHERE t.isleaf AND t.relid NOT IN (SELECT relid FROM published))`, pub.OID)
	if err != nil {
		return Coverage{}, fmt.Errorf("read published tables: %w", err)
	}
	oids, err := pgx.CollectRows(rows, pgx.RowTo[uint32])
	if err != nil {
		return Coverage{}, fmt.Errorf("read published tables: %w", err)
	}
	published := make(map[uint32]bool, len(oids))
	for _, oid := range oids {
		published[oid] = true
	}
	return cover(pub, published, tables, o), nil
}

func cover(pub Publication, published map[uint32]bool, tables []Table, o PlanOptions) Coverage {
	c := Coverage{Publication: pub, MissingOutbox: slices.Clone(o.Outbox), outbox: o.Outbox}
	for _, t := range tables {
		isOutbox := slices.Contains(o.Outbox, t.String())
		if isOutbox {
			c.MissingOutbox = slices.DeleteFunc(c.MissingOutbox, func(name string) bool { return name == t.String() })
		}
		configured := isOutbox || o.Match(t.Schema, t.Name)
		switch {
		case !configured:
		// An empty partitioned table without leaves has nothing to publish without its root.
		case !published[t.OID]:
			c.Missing = append(c.Missing, t)
		default:
			if t.Partitioned && !pub.ViaRoot {
				c.ByLeaf = append(c.ByLeaf, t)
			}
			if !t.Updatable && (pub.Update || pub.Delete) {
				c.Keyless = append(c.Keyless, t)
			}
		}
	}
	return c
}

// Refusal is nil where everything configured is published, else a
// *checkpoint.Refusal that names what is not (DESIGN, invariant 7).
func (c Coverage) Refusal() error {
	name := quote(c.Publication.Name)
	var problems []error
	if len(c.MissingOutbox) > 0 {
		problems = append(problems, &checkpoint.Refusal{
			What:   "outbox table " + strings.Join(c.MissingOutbox, ", ") + " does not exist in this database",
			Remedy: "create it and add it to publication " + name + ", or correct outbox.table",
		})
	}
	if len(c.Missing) > 0 {
		t := c.Missing[0]
		problems = append(problems, &checkpoint.Refusal{
			What: fmt.Sprintf("configured but not published by publication %s: %s", name, names(c.Missing, shownNames)),
			Risk: "their changes never reach Kafka (a table that was dropped and created again leaves its publication)",
			Remedy: fmt.Sprintf("ALTER PUBLICATION %s ADD TABLE %s and then walrelay snapshot --table %s, or exclude them in source.tables, or set source.publication-mode: managed",
				name, pgx.Identifier{t.Schema, t.Name}.Sanitize(), t),
		})
	}
	if leaves := c.outboxByLeaf(); len(leaves) > 0 {
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("publication %s sends the rows of outbox table %s under the names of its partitions", name, names(leaves, shownNames)),
			Risk:   "they would not be events, and never reach their topics",
			Remedy: fmt.Sprintf("ALTER PUBLICATION %s SET (publish_via_partition_root = true), or set source.publication-mode: managed", name),
		})
	}
	if !c.Publication.Insert {
		problems = append(problems, &checkpoint.Refusal{
			What:   fmt.Sprintf("publication %s does not publish inserts", name),
			Risk:   "new rows never reach Kafka",
			Remedy: fmt.Sprintf("ALTER PUBLICATION %s SET (publish = 'insert, update, delete, truncate')", name),
		})
	}
	return errors.Join(problems...)
}

// outboxByLeaf are the outbox tables among ByLeaf: an outbox is known by its root.
func (c Coverage) outboxByLeaf() []Table {
	return slices.DeleteFunc(slices.Clone(c.ByLeaf), func(t Table) bool { return !slices.Contains(c.outbox, t.String()) })
}

// Warnings are for the log: what the publication as it is leaves out or breaks.
func (c Coverage) Warnings() []string {
	var w []string
	p := c.Publication
	for op, on := range map[string]bool{"updates": p.Update, "deletes": p.Delete, "truncates": p.Truncate} {
		if !on {
			w = append(w, fmt.Sprintf("publication %s does not publish %s: they are not captured", p.Name, op))
		}
	}
	slices.Sort(w)
	if len(c.Keyless) > 0 {
		w = append(w, "published without a usable replica identity, so that UPDATE and DELETE on them fail: "+names(c.Keyless, shownNames))
	}
	if len(c.ByLeaf) > 0 {
		w = append(w, "changes carry the names of the partitions, as the publication has publish_via_partition_root = false: "+names(c.ByLeaf, shownNames))
	}
	return w
}

func refuseNoPublication(name string) error {
	return &checkpoint.Refusal{
		What: fmt.Sprintf("publication %q does not exist", name),
		Remedy: fmt.Sprintf("CREATE PUBLICATION %s FOR TABLE … WITH (publish_via_partition_root = true) before the slot is created, or set source.publication-mode: managed",
			quote(name)),
	}
}

package e2e

import (
	"fmt"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

// A table that is renamed keeps what is hidden of it, and does not start again without an
// entry for its new name.
func TestARenamedTableStaysHidden(t *testing.T) {
	b := newSnapBed(t, usersSQL)
	b.hideUsers()
	b.set("snapshot.mode", "never")
	p := b.stream()
	insert := func(table string, id int) string {
		return fmt.Sprintf("INSERT INTO %s VALUES (%d, %s, 1)", table, id, userValues())
	}
	b.pg.Exec(insert("users", 1))
	b.pg.Exec("ALTER TABLE users RENAME TO people")
	b.pg.Exec(insert("people", 2))
	log := b.settled(p)
	b.wantOps(log, "users", 1, 1, "c")
	b.wantOps(log, "people", 2, 2, "c")
	b.stop(p)
	b.pg.Exec(insert("people", 3))
	b.refused(b.start(), "source.columns names public.users, and there is no such table")
	columns := b.yaml["source"].(map[string]any)["columns"].(caseMap)
	columns["public.people"] = columns["public.users"]
	delete(columns, "public.users")
	q := b.stream()
	b.wantOps(b.settled(q), "people", 3, 3, "c")
	b.nothingLeaks(true, []*harness.Proc{p, q}, secretText)
	b.stop(q)
}

func TestARenamedTableOfOldRowsIsHiddenByItsNewName(t *testing.T) {
	b := newSnapBed(t, usersSQL)
	b.hideUsers()
	b.set("snapshot.mode", "never")
	b.stop(b.stream())
	b.pg.Exec(fmt.Sprintf("INSERT INTO users VALUES (1, %s, 1)", userValues()))
	b.pg.Exec("ALTER TABLE users RENAME TO people")
	columns := b.yaml["source"].(map[string]any)["columns"].(caseMap)
	columns["public.people"] = columns["public.users"]
	delete(columns, "public.users")
	p := b.stream()
	b.wantOps(b.settled(p), "users", 1, 1, "c")
	b.nothingLeaks(true, []*harness.Proc{p}, secretText)
	b.stop(p)
}

// The WAL may still have rows of a table that is gone; its entry stays until nothing of it
// can come.
func TestATableThatIsDroppedKeepsItsEntry(t *testing.T) {
	insert := fmt.Sprintf("INSERT INTO users VALUES (1, %s, 1)", userValues())
	t.Run("known to the checkpoint", func(t *testing.T) {
		b := newSnapBed(t, usersSQL)
		b.hideUsers()
		p := b.stream()
		b.waitTable(p, "public.users", allRows)
		b.stop(p)
		b.pg.Exec(insert)
		b.pg.Exec("DROP TABLE users")
		p = b.stream()
		b.wantOps(b.settled(p), "users", 1, 1, "c")
		b.nothingLeaks(true, []*harness.Proc{p}, secretText)
		b.stop(p)
	})
	t.Run("known to nobody", func(t *testing.T) {
		b := newSnapBed(t, usersSQL)
		b.hideUsers()
		b.set("snapshot.mode", "never")
		b.stop(b.stream())
		b.pg.Exec(insert)
		b.pg.Exec("DROP TABLE users")
		b.refused(b.start(), "source.columns names public.users, and there is no such table", "gone")
		columns := b.yaml["source"].(map[string]any)["columns"].(caseMap)["public.users"].(caseMap)
		columns["gone"] = []string{"password_hash", "email", "phone", "note", "city", "name"}
		p := b.stream()
		b.wantOps(b.settled(p), "users", 1, 1, "c")
		b.nothingLeaks(true, []*harness.Proc{p}, secretText)
		b.stop(p)
	})
}
